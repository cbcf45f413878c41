"""Train a plain vision transformer to predict the next step of ERA5-like grids, on a dp × domain mesh.

    python -m pipelines.era5_grid make era5.zarr
    python examples/train_vit.py --data era5.zarr                                          # one process
    torchrun --nproc-per-node 4 examples/train_vit.py --data era5.zarr --domain 2          # 2 dp × 2 domain
    torchrun --nproc-per-node 4 examples/train_vit.py --data era5.zarr --domain 2 --check --dtype float64
    torchrun --nproc-per-node 8 examples/train_vit.py --data era5.zarr --domain 2 --tp 2   # 2 dp × 2 domain × 2 tp

The model is plain PyTorch and knows nothing of ranks. What is different from a script for one process is four lines,
marked ``# scidata``: ``open_era5(..., mesh)`` here, ``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Stats, Trainer, check_arguments, parser_of, run

import scidata
from pipelines.era5_grid import channel_names, normalisation, open_era5, stack_channels

# -- the model: plain PyTorch --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention over all tokens.

    The heads are those whose features are there, a part of them under tensor parallelism: each lies together.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, N, D)."""
        B, N, _ = x.shape
        heads = self.qkv(x).reshape(B, N, -1, 3 * self.head_dim)
        x = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads.chunk(3, dim=-1)))
        return self.out(x.transpose(1, 2).reshape(B, N, -1))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, N, D)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Fields in, fields of the same shape out.

    B samples, C channels, H × W grid, N = H/patch × W/patch tokens of dim D.
    """

    def __init__(self, channels: int, grid: tuple[int, int], patch: int, *, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch, self.rows, self.columns = patch, grid[0] // patch, grid[1] // patch
        self.embed = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.rows * self.columns, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, channels * patch * patch)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C, H, W)."""
        B, C, H, W = x.shape
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        x = self.head(self.norm(self.blocks(x)))
        x = x.reshape(B, self.rows, self.columns, C, self.patch, self.patch)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


TENSOR_PARALLEL: dict[str, ParallelStyle] = {  # one sum over tp for each attention, and one for each MLP
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
}


# -- one step ------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: scidata.Sample, mean: Tensor, std: Tensor) -> Tensor:
    """Mean squared error of the predicted increment from one step to the next, in standard deviations."""
    now, later = (((x - mean) / std) for x in stack_channels(batch))
    return (model(now) - (later - now)).square().mean()


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    plan = TENSOR_PARALLEL

    def open(self, mesh: DeviceMesh | None) -> scidata.ShardedDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        ds = open_era5(args.data, mesh, patch=args.patch, fields=args.fields, dtype=self.dtype)  # scidata
        if len(ds) == 0:
            raise scidata.errors.ConfigError(f"{args.data}: has no two steps that follow each other")
        return ds

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args, grid = self.args, self.ds.global_shape(self.ds.fields[0])[-2:]
        return ViT(len(channel_names(self.ds)), grid, args.patch, dim=args.dim, depth=args.depth, heads=args.heads)

    def normalise(self) -> None:
        """Compute mean and standard deviation of each channel."""
        mean, std = normalisation(self.ds)
        self.stats = {"mean": mean.to(self.device), "std": std.to(self.device)}

    def blank_stats(self) -> Stats:
        """Return tensors as :func:`normalisation` does, for a checkpoint to fill."""
        shape = 1, len(channel_names(self.ds)), 1, 1
        return {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name in ("mean", "std")}

    def loss(self, model: nn.Module, batch: scidata.Sample) -> Tensor:
        """Loss of one batch; a plain tensor, the same on every rank of a domain."""
        return loss_of(model, batch, **self.stats)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of data and model, which a forecast has, too."""
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="Zarr, HDF5 or NetCDF with fields (time, [level,] lat, lon)")
    parser.add_argument("--fields", nargs="+", help="default: all on the grid")
    parser.add_argument("--patch", default=8, **number)
    parser.add_argument("--dim", default=128, **number)
    parser.add_argument("--depth", default=4, **number)
    parser.add_argument("--heads", default=4, **number)
    parser.add_argument("--tp", default=1, help="ranks that share the features of each layer", **number)


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check them."""
    check_arguments(parser, args, ("patch", "dim", "depth", "heads", "tp"))
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} must be a multiple of --heads {args.heads}")
    if args.heads % args.tp:
        parser.error(f"--heads {args.heads} must be a multiple of --tp {args.tp}")


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    parser = parser_of(__doc__, out="runs/vit", lr=5e-4, lr_batch=16, decay=0.05)
    options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    return run(Training, parser, args)


if __name__ == "__main__":
    sys.exit(main())

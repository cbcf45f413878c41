"""Train a plain vision transformer to predict the next step of ERA5-like grids, on a dp × domain mesh.

    python -m pipelines.era5_grid make era5.zarr
    python examples/train_vit.py --data era5.zarr                                          # one process
    torchrun --nproc-per-node 4 examples/train_vit.py --data era5.zarr --domain 2          # 2 dp × 2 domain
    torchrun --nproc-per-node 4 examples/train_vit.py --data era5.zarr --domain 2 --check --dtype float64
    torchrun --nproc-per-node 8 examples/train_vit.py --data era5.zarr --domain 2 --tp 2   # 2 dp × 2 domain × 2 tp
    torchrun --nproc-per-node 8 examples/train_vit.py --data era5.zarr --domain 2 --pp 2 --batch-size 8  # … × 2 pp
    python examples/train_vit.py --data era5.zarr --val-fraction 0.2 --amp bf16            # the last fifth is held out
    python examples/train_vit.py --data era5.zarr --derived insolation sin_time_of_day cos_time_of_day

The model is plain PyTorch and knows nothing of ranks. What is different from a script for one process is four lines,
marked ``# scidata``: ``open_era5(..., mesh)`` here, ``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Trainer, run
from trainer_options import Parser, check_arguments, parser_of

import scidata
from pipelines.era5_grid import open_era5
from pipelines.forcings import NAMES
from scidata import metrics

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
    """Fields in, what is predicted out.

    B samples, C channels in and O out, H × W grid, N = H/patch × W/patch tokens of dim D.
    """

    def __init__(
        self, channels: int, outputs: int, grid: tuple[int, int], patch: int, *, dim: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.patch, self.rows, self.columns = patch, grid[0] // patch, grid[1] // patch
        self.embed = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.rows * self.columns, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, outputs * patch * patch)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, O, H, W)."""
        x = self.blocks(x if self.embed is None else self.to_tokens(x))
        return x if self.head is None else self.to_grid(x)

    def to_tokens(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D)."""
        return self.embed(x).flatten(2).transpose(1, 2) + self.position

    def to_grid(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, O, H, W)."""
        B = len(x)
        x = self.head(self.norm(x)).reshape(B, self.rows, self.columns, -1, self.patch, self.patch)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(B, -1, self.rows * self.patch, self.columns * self.patch)

    def keep_stage(self, number: int, count: int) -> None:
        """Keep one of ``count`` stages of a pipeline, under its names: tokens in and out, but for the ends."""
        for block in range(len(self.blocks)):
            if block * count // len(self.blocks) != number:
                self.blocks[block] = nn.Identity()
        if number > 0:
            self.embed = self.position = None
        if number < count - 1:
            self.norm = self.head = None


TENSOR_PARALLEL: dict[str, ParallelStyle] = {  # one sum over tp for each attention, and one for each MLP
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
}


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    plan = TENSOR_PARALLEL
    model_options = ("patch", "dim", "depth", "heads", "fields", "forcings", "derived")

    # -- data

    def open(self, mesh: DeviceMesh | None) -> scidata.ShardedDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        names = None if args.fields is None else [*args.fields, *args.forcings]
        more = {"patch": args.patch, "fields": names, "dtype": self.dtype, "derived": args.derived}
        ds = open_era5(args.data, mesh, steps=(0, 1), **more)  # scidata
        if len(ds) == 0:
            raise scidata.errors.ConfigError(f"{args.data}: has no two steps that follow each other")
        self.forcings = (*args.forcings, *args.derived)  # what the model is given of each time and does not predict
        self.predicted = tuple(name for name in ds.fields if name not in self.forcings)
        return ds

    def span(self, index: int) -> tuple[Any, Any]:
        """Return the first and the last time of a sample, or its numbers where there is no coordinate."""
        times = next(iter(self.data.own_coords(index).values()), (index, index + 1))
        return times[0], times[-1]

    def statistics(self, ds: scidata.CombinedDataset) -> scidata.Statistics:
        """Mean and deviation of each field, of each of its levels."""
        levels = {dim for name in self.data.fields for dim in self.data.dims(name)[1:-2]}
        return scidata.statistics(ds, by=sorted(levels), differences=False)

    # -- model

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args, grid = self.args, self.states.global_shape(self.predicted[0])[-2:]
        outputs = sum(self.num_channels(name) for name in self.predicted)
        inputs = outputs + sum(self.num_channels(name) for name in self.forcings)
        return ViT(inputs, outputs, grid, args.patch, dim=args.dim, depth=args.depth, heads=args.heads)

    def num_channels(self, name: str) -> int:
        """Return how many channels a field has."""
        if name in self.args.derived:
            return 1
        return self.states.global_shape(name)[0] if len(self.states.dims(name)) == 3 else 1

    def predict(self, model: nn.Module, batch: scidata.Sample) -> tuple[Tensor, Tensor]:
        """Return the state that follows by the model, and by the data, in standard deviations."""
        now, later = (batch.stack(self.predicted, steps=step) for step in (0, 1))
        return self.next_state(model, now, batch.stack(self.forcings, steps=0) if self.forcings else None), later

    def next_state(self, model: nn.Module, now: Tensor, forcings: Tensor | None) -> Tensor:
        """Return the state that follows: the model says what it differs by."""
        return now + model(now if forcings is None else torch.cat([now, forcings], dim=1))

    def loss(self, model: nn.Module, batch: scidata.Sample) -> Tensor:
        """Mean squared error of what follows, in standard deviations: plain, the same on every rank of a domain."""
        predicted, later = self.predict(model, batch)
        return (predicted - later).square().mean()

    # -- stages of a pipeline

    def ends(self, batch: scidata.Sample) -> tuple[Tensor, Tensor]:
        """Return state and forcings, and what the state that follows differs by."""
        now, later = (batch.stack(self.predicted, steps=step) for step in (0, 1))
        return torch.cat([now, batch.stack(self.forcings, steps=0)], dim=1) if self.forcings else now, later - now

    # -- scores, and a forecast's steps

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Take channels apart: ``(B, C, H, W)`` to ``(B, L, H, W)`` or ``(B, H, W)`` by field."""
        parts = x.split([self.num_channels(name) for name in self.predicted], dim=1)
        has_levels = {name: len(self.states.dims(name)) == 3 for name in self.predicted}
        return {
            name: part if has_levels[name] else part[:, 0] for name, part in zip(self.predicted, parts, strict=True)
        }

    def error_of(self, field: str) -> metrics.Metric:
        """Root mean square over levels and the sphere, by area where the data say at which latitudes rows are."""
        *_, lat, _ = dims = self.states.dims(field)
        has_rows = self.states.coordinate(lat) is not None
        weights = {lat: metrics.latitude_weights(self.states, dim=lat)} if has_rows else None
        return metrics.RMSE(weights=weights, dims=dims, mesh=self.mesh)

    def first_state(self, time: int) -> Tensor:
        """Return the state at one time, ``(1, C, H, W)``."""
        return self.states[time].to(self.device).stack(self.predicted).unsqueeze(0)

    def advance(self, state: Tensor, time: int) -> Tensor:
        """Return the state one step later."""
        given = self.states[time].to(self.device).stack(self.forcings).unsqueeze(0) if self.forcings else None
        return self.next_state(self.model, state, given)


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and what it has made of the command line."""
    parser = parser_of(__doc__, out="runs/vit", lr=5e-4, lr_batch=16, decay=0.05)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="Zarr, HDF5 or NetCDF with fields (time, [level,] lat, lon)")
    parser.add_argument("--fields", nargs="+", help="to be predicted; default: all on the grid")
    parser.add_argument("--forcings", nargs="+", default=[], help="besides --fields: given at each time, not predicted")
    parser.add_argument("--derived", nargs="+", default=[], choices=NAMES, help="forcings computed from time and place")
    parser.add_argument("--patch", default=8, **number)
    parser.add_argument("--dim", default=128, **number)
    parser.add_argument("--depth", default=4, **number)
    parser.add_argument("--heads", default=4, **number)
    parser.add_argument("--tp", default=1, help="ranks that share the features of each layer", **number)
    parser.add_argument("--pp", default=1, help="ranks that share the blocks: stages of a pipeline", **number)
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("patch", "dim", "depth", "heads", "tp", "pp"))
    if args.pp > args.depth:
        parser.error(f"--pp {args.pp}: the model has {args.depth} blocks, and a stage at least one; raise --depth")
    if args.pp > 1 and (args.amp == "fp16" or args.compile or args.val_fraction or args.val_sel):
        parser.error("--pp: stages are trained without --amp fp16, --compile and validation (forecast.py scores them)")
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} must be a multiple of --heads {args.heads}")
    if args.heads % args.tp:
        parser.error(f"--heads {args.heads} must be a multiple of --tp {args.tp}")
    if args.forcings and args.fields is None:
        parser.error("--forcings: say which other fields are predicted, with --fields")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    return run(Training, *arguments(argv))


if __name__ == "__main__":
    sys.exit(main())

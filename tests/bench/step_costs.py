"""What a training step of small local work costs all ranks together, beside one process: CPU time and Python calls.

A step is forward, loss, backward and optimizer, on CPUs over gloo, one thread a rank. The ways take turns in the same
processes: one process on the whole sample, while the others wait without using the CPU; each rank on its own rows as
plain tensors, nothing sent (the floor); and the ranks together. CPU time is the sum over ranks, median of ``--repeats``
turns, each the mean of ``--steps`` steps; calls are those of Python functions in one step of rank 0.

    PYTHONPATH=. python tests/bench/step_costs.py --ranks 2 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import scidata
from scidata.testing import run_ranks

WAYS = ("one process", "own rows", "ranks")


class ConvBlock(nn.Sequential):
    """Two 3x3 convolutions, each with a group norm and an activation."""

    def __init__(self, inner: int, outer: int) -> None:
        layers: list[nn.Module] = []
        for width in (inner, outer):
            layers += [nn.Conv2d(width, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.GELU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Two levels, ten 3x3 convolutions."""

    def __init__(self, width: int = 24, channels: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(channels, width), ConvBlock(width, 2 * width)])
        self.bottom = ConvBlock(2 * width, 4 * width)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (2 * width, width))
        self.up = nn.ModuleList([ConvBlock(4 * width, 2 * width), ConvBlock(2 * width, width)])
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels as came in."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([kept.pop(), widen(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


def mlp(width: int, times: int = 4) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(width, times * width), nn.GELU(), nn.Linear(times * width, width))


class Attention(nn.Module):
    """Self-attention of tokens ``(..., tokens, width)``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.out(found.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class ViTBlock(nn.Module):
    """One block of a vision transformer on ``(batch, tokens, width)``."""

    def __init__(self, width: int = 128, num_heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, num_heads), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, then channels."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class FNO(nn.Module):
    """Four Fourier layers that keep 12 modes in each direction."""

    def __init__(self, width: int = 16, modes: int = 12, depth: int = 4, channels: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.head = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        scale = 1 / width**2
        self.weights = nn.ParameterList(
            nn.Parameter(scale * torch.rand(2, width, width, modes, modes, dtype=torch.cfloat)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels as came in."""
        x, m = self.lift(x), self.modes
        for skip, weight in zip(self.skips, self.weights, strict=True):
            spectrum = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], weight[0])
            high = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], weight[1])
            found = torch.zeros_like(spectrum)
            found[:, :, :m, :m] = low
            found[:, :, -m:, :m] = high
            x = F.gelu(torch.fft.irfft2(found, s=x.shape[-2:]) + skip(x))
        return self.head(x)  # type: ignore[no-any-return]


class Swin(nn.Module):
    """Two blocks of attention in windows of ``(batch, rows, columns, width)``, the second in shifted ones."""

    def __init__(self, width: int = 64, num_heads: int = 4, window: int = 8) -> None:
        super().__init__()
        self.window = window
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attentions = nn.ModuleList(Attention(width, num_heads) for _ in range(2))
        self.mlps = nn.ModuleList(mlp(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens of each window, then channels."""
        w, shift = self.window, self.window // 2
        batch, rows, columns, width = x.shape
        for i, (attention, last) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            y = self.norms[2 * i](x)
            if i:
                y = torch.roll(y, (-shift, -shift), (1, 2))
            y = y.view(batch, rows // w, w, columns // w, w, width).transpose(2, 3).reshape(-1, w * w, width)
            y = attention(y).view(batch, rows // w, columns // w, w, w, width).transpose(2, 3)
            y = y.reshape(batch, rows, columns, width)
            if i:
                y = torch.roll(y, (shift, shift), (1, 2))
            x = x + y
            x = x + last(self.norms[2 * i + 1](x))
        return x


class Transolver(nn.Module):
    """Two layers of attention among slices of points ``(batch, points, width)``."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_slices: int = 32) -> None:
        super().__init__()
        self.num_heads, head = num_heads, width // num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.values = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.slices = nn.ModuleList(nn.Linear(head, num_slices) for _ in range(2))
        self.qkvs = nn.ModuleList(nn.Linear(head, 3 * head, bias=False) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlps = nn.ModuleList(mlp(width, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix slices of all points, then channels."""
        batch, points, width = x.shape
        for i in range(2):
            both = (
                self.values[i](self.norms[2 * i](x)).view(batch, points, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            )
            values, keys = both.unbind(0)
            shares = self.slices[i](keys).softmax(-1)  # (batch, heads, points, slices)
            total = shares.sum(2).unsqueeze(-1)
            tokens = torch.einsum("bhnc,bhng->bhgc", values, shares) / (total + 1e-5)
            mixed = F.scaled_dot_product_attention(*self.qkvs[i](tokens).chunk(3, -1))
            y = torch.einsum("bhgc,bhng->bhnc", mixed, shares).transpose(1, 2).reshape(batch, points, width)
            x = x + self.outs[i](y)
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return x


class Model(NamedTuple):
    """A model, the shape of its input and of its output, and the dim that the ranks split."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int


MODELS = {
    "UNet": Model(UNet, (1, 4, 96, 128), 2),
    "ViT block": Model(ViTBlock, (1, 512, 128), 1),
    "FNO": Model(FNO, (1, 4, 192, 256), 2),
    "Swin": Model(Swin, (1, 64, 64, 64), 1),
    "Transolver": Model(Transolver, (1, 4096, 64), 1),
}


def step_of(model: Model, way: str, mesh: Any) -> Callable[[], None]:
    """Return a function that takes one step of training, on samples that are the same each time."""
    torch.manual_seed(0)
    net, x, y = model.make(), torch.randn(model.shape), torch.randn(model.shape)
    if way == "own rows":
        size = mesh["domain"].size()
        x, y = (each.chunk(size, model.dim)[mesh["domain"].get_local_rank()].clone() for each in (x, y))
    elif way == "ranks":
        scidata.parallelize(net, mesh)
        x, y = (scidata.scatter_tensor(each, 0, mesh["domain"], [Shard(model.dim)]) for each in (x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(net(x), y))
        optimizer.step()

    return step


def python_calls(step: Callable[[], None]) -> int:
    """Return how many Python functions a step calls."""
    count = 0

    def see(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def rank_main(rank: int, num_ranks: int, names: list[str], repeats: int, steps: int) -> dict[str, Any]:
    """Measure on one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    found: dict[str, Any] = {}
    for name in names:
        ways = {way: step_of(MODELS[name], way, mesh) for way in WAYS}
        cpu: dict[str, list[float]] = {way: [] for way in WAYS}
        calls = {}
        for turn in range(repeats + 1):  # the first is a rehearsal
            for way, step in ways.items():
                dist.barrier()
                began = time.process_time()
                if way != "one process" or rank == 0:
                    for _ in range(steps):
                        step()
                if turn:
                    cpu[way].append((time.process_time() - began) / steps)
        for way, step in ways.items():
            calls[way] = python_calls(step)
        found[name] = cpu, calls
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    # freed memory is kept: how much a way gives back to the system, and faults in again, is chance
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**32))
    print(
        "| model | ranks | one process, ms | own rows, ratio | all ranks, ratio | calls, one process | calls, a rank |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for num_ranks in args.ranks:
        ranks = run_ranks(rank_main, num_ranks, args.models, args.repeats, args.steps, timeout=3600)
        for name in args.models:
            cpu = {way: [sum(each) for each in zip(*(r[name][0][way] for r in ranks), strict=True)] for way in WAYS}
            cpu["one process"] = ranks[0][name][0]["one process"]
            alone, own, all_ranks = (statistics.median(cpu[way]) for way in WAYS)
            calls = ranks[0][name][1]
            print(
                f"| {name} | {num_ranks} | {1e3 * alone:.1f} | {own / alone:.2f} | {all_ranks / alone:.2f} "
                f"| {calls['one process']} | {calls['ranks']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

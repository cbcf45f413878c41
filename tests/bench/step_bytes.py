"""Bytes and messages that a rank sends in a step of training, beside the least that the algorithm needs.

A step is forward, loss and backward with ``scidata.parallelize``; figures are the mean of the ranks: of reductions and
gathers as in rings. The least counts, for each model: what its algorithm has to bring to other ranks
(halos of convolutions, keys and values or heads, columns of spectra, shifted windows, sums of slices, ghosts), there
and, as gradients, back; and one all-reduce of the weights' gradients as in a ring. Counts are exact: they do not depend
on the machine.

    PYTHONPATH=. python tests/bench/step_bytes.py --ranks 2 4
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import scidata
from pipelines import flow_graph, graphcast
from scidata.testing import run_ranks
from tests._collectives import Collectives
from tests.bench.step_costs import MODELS, Attention

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GRAPHS = ("MeshGraphNet", "GraphCast")
DEPTH, WIDTH = 4, 32  # of the graphs' models
FLOAT = 4


class SpectralConv2d(nn.Module):
    """A Fourier layer as in PhysicsNeMo: its zeros are plain, its weights are real."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights1, self.weights2 = (
            nn.Parameter(torch.rand(width, width, modes, modes, 2) / width**2) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix channels in the lowest frequencies."""
        m, spectrum = self.modes, torch.fft.rfft2(x)
        found = torch.zeros(x.size(0), x.size(1), x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat)
        for rows, weight in ((slice(m), self.weights1), (slice(-m, None), self.weights2)):
            mixed = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows, :m], torch.view_as_complex(weight))
            found[:, :, rows, :m] = mixed
        return torch.fft.irfft2(found, s=(x.size(-2), x.size(-1)))  # type: ignore[no-any-return]


class LayeredFNO(nn.Module):
    """The same as the FNO, of layers."""

    def __init__(self, width: int = 16, modes: int = 12, depth: int = 4, channels: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.head = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.layers = nn.ModuleList(SpectralConv2d(width, modes) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many channels as came in."""
        x = self.lift(x)
        for skip, layer in zip(self.skips, self.layers, strict=True):
            x = F.gelu(layer(x) + skip(x))
        return self.head(x)  # type: ignore[no-any-return]


TENSORS = {**MODELS, "FNO, stock layers": MODELS["FNO"]._replace(make=LayeredFNO)}


def ring(num_bytes: int, num_ranks: int) -> int:
    """Return what each rank sends in an all-reduce."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def gradients(net: nn.Module, num_ranks: int) -> int:
    """Return what each rank sends to add up the weights' gradients."""
    return ring(sum(p.nbytes for p in net.parameters()), num_ranks)


# -- the least, forward and backward, without gradients of weights -------------------------------------------------


def halos_and_norms(net: nn.Module, x: torch.Tensor, num_ranks: int) -> int:
    """One row to each neighbour before a 3x3 convolution, and two sums a group of a group norm."""
    found: list[int] = []

    def see(module: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        if isinstance(module, nn.GroupNorm):
            found.append(ring(2 * module.num_groups * FLOAT, num_ranks))
        elif module.kernel_size == (3, 3):
            found.append(2 * args[0][:, :, 0].nbytes * (num_ranks - 1) // num_ranks)  # the first has one neighbour

    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.GroupNorm):
            module.register_forward_hook(see)
    net(x)
    return 2 * sum(found)


def by_heads(net: nn.Module, x: torch.Tensor, num_ranks: int) -> int:
    """Rows to heads and back: queries, keys, values, and the result; or all keys and values to all others."""
    part = x.nbytes // num_ranks
    depth = sum(isinstance(m, Attention) for m in net.modules())
    return 2 * depth * min(4 * part * (num_ranks - 1) // num_ranks, 2 * part * (num_ranks - 1))


def columns_of_spectra(net: Any, x: torch.Tensor, num_ranks: int) -> int:
    """The rows' columns that are kept go to the ranks of channels, and the modes to all ranks, in rings."""
    width, rows, modes = net.lift.out_channels, x.shape[2], net.modes
    there = width * rows * modes * 2 * FLOAT // num_ranks * (num_ranks - 1) // num_ranks
    kept = width * 2 * modes * modes * 2 * FLOAT
    return 2 * len(net.skips) * (there + ring(kept, num_ranks))


def shifted_rows(net: Any, x: torch.Tensor, num_ranks: int) -> int:
    """Half a window's rows to a neighbour, and back."""
    return 2 * 2 * x[:, : net.window // 2].nbytes


def sums_of_slices(net: Any, x: torch.Tensor, num_ranks: int) -> int:
    """Forward the sums of values and of shares, backward that of the mixed slices' gradients."""
    slices, width = net.slices[0].out_features, x.shape[2]
    sums = net.num_heads * slices * FLOAT
    return 2 * ring((2 * width // net.num_heads + 1) * sums, num_ranks)


LEAST: dict[str, Callable[[Any, torch.Tensor, int], int]] = {
    "UNet": halos_and_norms,
    "ViT block": by_heads,
    "FNO": columns_of_spectra,
    "FNO, stock layers": columns_of_spectra,
    "Swin": shifted_rows,
    "Transolver": sums_of_slices,
}


# -- steps ---------------------------------------------------------------------------------------------------------


def counted(step: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Return bytes and messages of a step, once the buckets' order is known."""
    for _ in range(2):
        step().backward()  # type: ignore[no-untyped-call]
    with Collectives() as seen:
        step().backward()  # type: ignore[no-untyped-call]
    return seen.num_bytes, seen.num_messages


def of_tensors(name: str, mesh: Any) -> tuple[int, int, int]:
    """Return bytes, messages and the least bytes of a model on a tensor that is cut along one dim."""
    torch.manual_seed(0)
    model, num_ranks = TENSORS[name], mesh["domain"].size()
    net, x, y = model.make(), torch.randn(model.shape), torch.randn(model.shape)
    least = LEAST[name](model.make(), x, num_ranks) + gradients(net, num_ranks)
    scidata.parallelize(net, mesh)
    x, y = (scidata.scatter_tensor(each, 0, mesh["domain"], [Shard(model.dim)]) for each in (x, y))
    return *counted(lambda: F.mse_loss(net(x), y)), least


def training_of(name: str, num_ranks: int, folder: str) -> Any:
    """Build an example's training of a model on nodes and edges of a store."""
    sys.path.insert(0, str(EXAMPLES))
    script, data = ("train_gnn", "flow.store") if name == "MeshGraphNet" else ("train_graphcast", "waves")
    module = importlib.import_module(script)
    given = ["--data", f"{folder}/{data}", "--domain", str(num_ranks), "--device", "cpu", "--check"]
    _, args = module.arguments([*given, "--dim", str(WIDTH), "--depth", str(DEPTH)])
    training = module.Training(args)
    training.normalise()
    training.build(measure=True)
    return training


def of_graphs(name: str, mesh: Any, folder: str) -> tuple[int, int, int]:
    """Return bytes, messages and the least bytes of a model on nodes and edges of a store."""
    training = training_of(name, mesh["domain"].size(), folder)
    batch = scidata.collate([training.data[0]])
    ghosts = ghost_rows(name, batch)
    return *counted(lambda: training.loss(training.model, batch)), (
        2 * ghosts * WIDTH * FLOAT + gradients(training.model, mesh["domain"].size())
    )


def ghost_rows(name: str, batch: Any) -> int:
    """Return how many rows this rank gets in a forward pass: others' nodes with an edge to one of its own."""
    if name == "MeshGraphNet":
        return DEPTH * _foreign(batch.edge_index[0], batch.index_map("node").num_owned)
    rounds = {("mesh", "to", "mesh"): DEPTH}
    return sum(
        rounds.get(relation, 1) * _foreign(ends[0], batch.index_map(relation[0]).num_owned)
        for relation, ends in batch.edge_index_dict.items()
    )


def _foreign(sources: torch.Tensor, num_owned: int) -> int:
    return len(sources[sources >= num_owned].unique())


def rank_main(rank: int, num_ranks: int, names: list[str], folder: str) -> dict[str, tuple[int, int, int]]:
    """Count on one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    return {name: of_graphs(name, mesh, folder) if name in GRAPHS else of_tensors(name, mesh) for name in names}


def make(names: list[str], folder: str) -> None:
    """Write the graphs' data."""
    if "MeshGraphNet" in names:
        flow_graph.make(f"{folder}/raw", num_samples=1, num_nodes=4000)
        flow_graph.convert(f"{folder}/raw", f"{folder}/flow.store")
    if "GraphCast" in names:
        graphcast.make(f"{folder}/waves", num_times=4, num_levels=3, shape=(31, 60))


def main() -> None:
    """Count and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=[*TENSORS, *GRAPHS], choices=[*TENSORS, *GRAPHS])
    args = parser.parse_args()
    print("| model | ranks | MB | least, MB | ratio | messages |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        make(args.models, folder)
        for num_ranks in args.ranks:
            ranks = run_ranks(rank_main, num_ranks, args.models, folder, timeout=3600)
            for name in args.models:
                sent, messages, least = (sum(r[name][i] for r in ranks) / num_ranks for i in range(3))
                cells = [f"{sent / 1e6:.3f}", f"{least / 1e6:.3f}", f"{sent / least:.2f}", f"{messages:.0f}"]
                print(f"| {name} | {num_ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

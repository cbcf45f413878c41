"""One rank of many: what it reads of a large store, and a training step of a MeshGraphNet and a Transolver on that.

    python tests/bench/one_of_many.py [--scale 10] [--ranks 64] [--store tets.store]

The store is of ``--scale`` million tetrahedra as of ``partition_memory.py``, put in order with ``memory="1G"`` where it
is not there. One process is rank 33 of the group by torch's "fake" backend: messages are counted as sent at once, so
that time and memory are those of the rank's own work. The graph network has its k-hop ghosts, the attention its rows;
both are those of the examples. Seconds are of CPU, medians; the peak is the process', program included.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import scidata

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]


def example(name: str) -> Any:
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def graph_network(store: Path, mesh: Any, dim: int, depth: int) -> tuple[Callable[[], None], dict[str, int]]:
    """Return a step on owned rows and the ghosts that so many layers need."""
    sample = scidata.collate([scidata.open_dataset(store, mesh, halo=depth, ghosts="disk")[0]])
    data = sample.to_pyg(x=["u"], y=["u"], khop=True, by_hop=True)
    model = example("train_gnn").MeshGraphNet(3, 4, 3, dim=dim, depth=depth)
    scidata.parallelize(model, mesh)
    ends = sample.edge_index_with_ghosts
    pos = sample.with_ghosts("pos")
    along = pos[ends[0]] - pos[ends[1]]
    edge = torch.cat([along, along.norm(dim=1, keepdim=True)], dim=1).float()

    def step() -> None:
        model.zero_grad()
        out = sample.call_on_parts(model, data.x, data.edge_index, edge, data.num_sampled_nodes, data.num_sampled_edges)
        (out - data.y).square().mean().backward()

    index = sample.index_map("node")
    return step, {"owned": index.num_owned, "ghosts": index.num_local - index.num_owned, "edges": ends.shape[1]}


def attention(store: Path, mesh: Any, dim: int, depth: int) -> tuple[Callable[[], None], dict[str, int]]:
    """Return a step on owned rows."""
    sample = scidata.collate([scidata.open_dataset(store, mesh)[0]])
    model = example("train_surface").Transolver(3, dim=dim, depth=depth, slices=32)
    scidata.parallelize(model, mesh)
    x, one = sample["u"], torch.ones_like(sample["u"][:, :1])

    def step() -> None:
        model.zero_grad()
        (model(x, one) - x[:, :1]).square().mean().backward()

    return step, {"owned": sample.index_map("node").num_owned}


def main() -> None:
    """Print what each takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = args.store or Path(folder) / "tets.store"
        if not store.exists():
            from partition_memory import make

            make("tets", Path(folder) / "tets.h5", args.scale)
            scidata.partition(Path(folder) / "tets.h5", store, memory="1G")
        dist.init_process_group("fake", store=FakeStore(), rank=args.ranks // 2 + 1, world_size=args.ranks)
        mesh = dist.init_device_mesh("cpu", (1, args.ranks), mesh_dim_names=("dp", "domain"))
        for make_step in (attention, graph_network):
            began = time.process_time()
            step, held = make_step(store, mesh, args.dim, args.depth)
            read_s = time.process_time() - began
            times = []
            for _ in range(args.repeats + 1):
                began = time.process_time()
                step()
                times.append(time.process_time() - began)
            print(
                f"{make_step.__name__}: {held}; read and made in {read_s:.2f} s, a step "
                f"{statistics.median(times[1:]):.2f} s, peak {peak() / 2**20:,.0f} MiB",
                flush=True,
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

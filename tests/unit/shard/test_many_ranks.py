"""An operation costs a rank what its neighbours cost: as many Python calls among 512 ranks as among two."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.core.index_map import IndexMap
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.comm import transport
from scidata.shard.comm.agreement import check_agreement
from scidata.shard.comm.transport import gather
from scidata.shard.graphs import ghosts, routed
from scidata.shard.graphs.routed import route_edges
from scidata.shard.ops import advanced
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import fake_group
from tests.bench.scale_ranks import OPS, image
from tests.dist._conformance import cases

RANKS = (2, 64, 512)


def counted(function: Callable[[], Any]) -> int:
    """Return how many functions are called, of Python and of C."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # Hypothesis has a collection call functions of its own
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def steps(function: Callable[..., Any], operands: list[Any]) -> tuple[int, int]:
    """Return the calls of a forward and a backward pass in the steady state."""
    found: list[tuple[int, int]] = []
    for _ in range(3):
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
        results: list[Any] = []
        forward = counted(lambda given=given, results=results: results.extend(tree_leaves(function(*given))))
        local = [x.local if isinstance(x, ShardTensor) else x for x in results if isinstance(x, torch.Tensor)]
        local = [x for x in local if x.requires_grad]
        ones = [torch.ones_like(x) for x in local]
        backward = counted(lambda local=local, ones=ones: local and torch.autograd.backward(local, ones))
        found.append((forward, backward))
    # the least: in any turn tensors of earlier ones may be collected, which calls what waits for their end
    return min(each[0] for each in found[1:]), min(each[1] for each in found[1:])


def of_images() -> dict[str, list[tuple[int, int]]]:
    """Count for operations on an image, four rows on each rank; of some also where every other rank has three."""
    uneven = {f"{name}, uneven": OPS[name] for name in ("cumsum", "gather", "softmax", "conv 3x3", "flip")}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in [*OPS, *uneven]}
    for num_ranks in RANKS:
        with fake_group(num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            for name, op in OPS.items():
                found[name].append(steps(op, [image(mesh, num_ranks)]))
            sizes = (4, 3) * (num_ranks // 2)
            spec = ShardSpec.even(mesh, [Shard(2)], (1, 4, sum(sizes), 8), {0: sizes})
            for name, op in uneven.items():
                found[name].append(steps(op, [ShardTensor(torch.rand(spec.local_shape), spec)]))
    return found


def of_two(x: torch.Tensor, sizes: tuple[int, ...], dim: int, group: Any) -> torch.Tensor:
    """Gather how many elements are true, of two ranks that have 4 and 3 rows, all true."""
    found = gather(x, sizes, dim, group)
    found[1], found[2:] = found[0] * 3 // 4, 0
    return found


def of_cases() -> dict[str, list[tuple[int, int]]]:
    """Count for the cases of the op table, with rows on the first two ranks: as much to do among any number."""
    found: dict[str, list[tuple[int, int]]] = {}
    for num_ranks in RANKS:
        with fake_group(num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            for i, case in enumerate(cases()):
                operands: list[Any] = []
                for dim, shape in zip(case.dims[0], case.shapes, strict=True):
                    torch.default_generator.manual_seed(0)
                    x = torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
                    x = x.clamp(min=0.31) if case.name == "put_where" else x  # true everywhere
                    if dim is not None:
                        spec = ShardSpec.even(mesh, [Shard(dim)], shape, {0: (4, 3, *[0] * (num_ranks - 2))})
                        x = ShardTensor(x.narrow(dim, 0, 4).clone(), spec)
                    operands.append(x)
                found.setdefault(f"{case.name} {i}", []).append(steps(case.function, operands))
    return found


def of_layouts() -> dict[str, list[tuple[int, int]]]:
    """Count for layouts, comparisons and graphs that are made anew, and for a step over a graph."""
    found: dict[str, list[tuple[int, int]]] = {}
    whole = torch.rand(4, 8)
    edges = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 2, 3, 0, 0, 1]])
    for num_ranks in RANKS:
        with fake_group(num_ranks, 1):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            shapes = {0: ((4, 8),) * num_ranks}
            bounds = np.arange(num_ranks + 1) * 4

            def message(x: torch.Tensor) -> torch.Tensor:
                routed = route_edges(edges, IndexMap(bounds=bounds, part=1, ghosts=np.array([3])), mesh)  # noqa: B023
                return torch.zeros_like(x).index_add(0, routed[1], x[routed[0]])

            def agreed(x: torch.Tensor) -> list[torch.Tensor]:
                check_agreement("a test", {"x": x.shape}, mesh, (0,))  # noqa: B023
                return [
                    ShardTensor.from_local(whole, mesh, [Shard(0)], sharding_shapes=how, global_shape=shape)  # noqa: B023
                    for how, shape in ((shapes, None), ("chunk", (4 * num_ranks, 8)), ("infer", None))  # noqa: B023
                ]

            x = ShardTensor.from_local(whole, mesh, [Shard(0)], sharding_shapes=shapes)
            for name, function in {"a graph": message, "layouts": agreed}.items():
                found.setdefault(name, []).append(steps(function, [x]))
    return found


def told(row: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a row of each rank; where one says which part it holds, ranks hold their own."""
    rows = row[None].repeat(group.size(), 1)
    if len(row) == 5:
        rows[:, 1] = torch.arange(group.size())
    return rows


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks hear from others what these would say, where that decides how much there is to do."""
    monkeypatch.setattr(advanced, "gather", of_two)
    for module in (ghosts, routed):
        monkeypatch.setattr(module, "gather_rows", told)
    monkeypatch.setattr(ghosts, "swap_counts", lambda counts, group: (counts, 2))
    monkeypatch.setattr(ghosts, "exchange_rows", lambda ids, held, *rest: torch.full((sum(n for _, n in held),), 4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [of_images, of_cases, of_layouts])
def test_calls_do_not_grow_with_ranks(count: Callable[[], dict[str, list[tuple[int, int]]]]) -> None:
    for name, (two, some, many) in count().items():
        for way, few, more, most in zip(("forward", "backward"), two, some, many, strict=True):
            calls = f"{name}, {way}: {few}, {more} and {most} calls"
            assert most <= 1.01 * more + 4, calls
            # beyond four ranks, neighbours send and receive by themselves; of many, statistics take two rounds; and
            # ranks without rows are asked about
            assert more <= 1.3 * few + 20, calls


def test_small_reductions_of_gloo_take_the_logarithm_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def exchange(rows: torch.Tensor, to: Any, held: Any, *rest: Any) -> torch.Tensor:
        sent.append(len(to))
        return rows.new_zeros(len(held), *rows.shape[1:])

    monkeypatch.setattr(transport, "exchange_rows", exchange)
    monkeypatch.setattr(transport, "_is_gloo", lambda group: True)
    for num_ranks, rounds in ((64, 6), (512, 9), (2048, 11), (2049, 13)):
        with fake_group(num_ranks):
            sent.clear()
            transport.reduce(torch.ones(3), dist.ReduceOp.SUM, dist.group.WORLD)
            assert len(sent) == rounds
            assert sum(sent) <= 12

"""Neighbours of sharded points, and picks of them, against one process; edges of theirs in message passing."""

import importlib.util
from itertools import pairwise, product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.graphs.routed import RoutedIndex
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._pyg_operators import have_operators

NUM, NUM_OTHER = 12, 9
LAYOUTS = {1: [((12,), (9,))], 2: [((7, 5), (2, 7)), ((12, 0), (0, 9))],
           3: [((5, 3, 4), (4, 4, 1)), ((0, 11, 1), (9, 0, 0)), ((12, 0, 0), (0, 9, 0))]}  # fmt: skip
BATCH, OTHER_BATCH = torch.tensor([0] * 5 + [2] * 7), torch.tensor([0] * 3 + [1] * 2 + [2] * 4)
PTR, OTHER_PTR, FULL_PTR = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 3, 5, 9]), torch.tensor([0, 4, 12])


def points(seed=5):
    torch.default_generator.manual_seed(seed)
    x, y = torch.rand(NUM, 3, dtype=torch.float64), torch.rand(NUM_OTHER, 3, dtype=torch.float64)
    return [x.requires_grad_(), y.requires_grad_()]


def passed_on(x, y, edges):
    """Return what message passing along edges does with rows of points."""
    to, source = edges
    messages = x[source].sin() * y[to]
    return messages.new_zeros(y.shape).index_add_(0, to, messages)


def searches():
    """Calls of the operators on two clouds."""
    op = torch.ops.pyg
    for ptr_x, ptr_y in ((None, None), (PTR, OTHER_PTR)):
        yield lambda x, y, p=ptr_x, q=ptr_y: op.knn(x, y, p, q, 3, False, 2)
        yield lambda x, y, p=ptr_x, q=ptr_y: op.knn.default(x, y, ptr_x=p, ptr_y=q, k=20)
        for most, same in product((0, 1, 3, 10**9, -1), (False, True)):
            yield lambda x, y, p=ptr_x, q=ptr_y, most=most, same=same: op.radius(x, y, p, q, 0.6, most, 1, same)
    yield lambda x, y: op.knn(x, y)
    yield lambda x, y: op.radius(x, y, r=0.4, ignore_same_index=True)
    for x_in, y_in in ((PTR, torch.tensor([0, 4, 4, 9])), (None, None)):
        yield lambda x, y, p=x_in, q=y_in: op.nearest(y, x, q, p)
    for ptr, ratio in ((torch.tensor([0, 12]), 0.5), (FULL_PTR, 0.3), (FULL_PTR, 1.0)):
        yield lambda x, y, ptr=ptr, ratio=ratio: op.fps(x, ptr, ratio, False)
    for ptr in (None, PTR):
        for most in (0, 2, 30):
            yield lambda x, y, p=ptr, most=most: op.radius(x, x, p, p, 0.5, most, 1, True)
        yield lambda x, y, p=ptr: op.knn(x, x, p, p, 4)


def uses():
    """Functions of what was found, of which both clouds are sharded."""
    op = torch.ops.pyg
    for p, q in ((None, None), (PTR, OTHER_PTR)):
        yield lambda x, y, p=p, q=q: passed_on(x, y, op.knn(x, y, p, q, 3))
        yield lambda x, y, p=p: passed_on(x, x, op.knn(x, x, p, p, 4))
        yield lambda x, y, p=p: passed_on(x, x, op.radius(x, x, p, p, 0.5, 2, 1, True))
    for ratio in (0.3, 1.0):
        yield lambda x, y, ratio=ratio: x[op.fps(x.detach(), FULL_PTR, ratio, random_start=False)]


def check_operators(rank, num_ranks):
    have_operators()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    inputs = points()
    for sizes, others in LAYOUTS[num_ranks]:
        x = ShardSpec.even(mesh, [Shard(0)], (NUM, 3), {0: sizes})
        y = ShardSpec.even(mesh, [Shard(0)], (NUM_OTHER, 3), {0: others})
        columns = ShardSpec.even(mesh, [Shard(1)], (NUM, 3), {0: (3, *[0] * (num_ranks - 1))})
        cases = [(f, specs) for f in searches() for specs in ([x, y], [x, None], [None, y], [columns, y])]
        for i, (function, specs) in enumerate([*cases, *((f, [x, y]) for f in uses())]):
            try:
                assert_like_one_process(function, inputs, specs)
            except Exception as error:
                raise AssertionError(f"case {i} at {specs}") from error


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check_operators, num_ranks, timeout=200)


def check_two_axes(rank, num_ranks):
    have_operators()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    inputs = points()
    rows = {"h": (7, 5), "w": (0, 12)}

    def spec(shape, *dims):
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        sizes = {n: rows[n] for n, d in zip("hw", dims, strict=True) if d == 0 and shape[0] == NUM}
        return ShardSpec.even(mesh, placements, shape, sizes)

    cases = [(0, 1), (0, None), (None, 0), (1, 0)]
    for function in searches():
        for first, second in zip(cases, cases[1:] + cases[:1], strict=True):
            specs = [spec((NUM, 3), *first), spec((NUM_OTHER, 3), *second)]
            assert_like_one_process(function, inputs, specs)


def test_two_axes():
    run_ranks(check_two_axes, 4, timeout=200)


def check_kinds(rank, num_ranks):
    """Edges between points split alike know their routes, others do not; random picks are those of the first rank."""
    have_operators()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x, y = (each.detach() for each in points())
    spec = ShardSpec.even(mesh, [Shard(0)], x.shape, {0: (5, 0, 7)})
    ours = shard_of(x, spec)
    edges = torch.ops.pyg.knn(ours, ours, k=3)
    assert (type(edges), edges._owned) == (RoutedIndex, (True, False))
    assert edges.spec.sizes_of(0) == (15, 0, 21)
    other = torch.ops.pyg.knn(ours, shard_of(y, ShardSpec.even(mesh, [Shard(0)], y.shape)), k=3)
    assert (type(other), other.spec.sizes_of(0)) == (ShardTensor, (9, 9, 9))
    assert type(torch.ops.pyg.knn(ours, y, k=3)) is torch.Tensor

    turned = shard_of(x.t().contiguous(), ShardSpec.even(mesh, [Shard(1)], (3, NUM), {0: (5, 0, 7)})).t()
    assert torch.equal(torch.ops.pyg.knn(turned, turned, k=3).full_tensor(), edges.full_tensor())
    assert torch.ops.pyg.knn(turned, turned, k=3).stride() == (36, 1)

    for _ in range(rank):  # ranks whose generators differ
        torch.ops.pyg.fps(x, torch.tensor([0, NUM]), 0.5)
    torch.default_generator.manual_seed(rank)
    for _ in range(5):
        picks = torch.ops.pyg.fps(ours, FULL_PTR, 0.5)
        assert (type(picks), picks.spec.sizes_of(0)) == (ShardTensor, (2, 2, 2))
        check_picks(x, picks.full_tensor())
        same = torch.ops.pyg.fps(ours.redistribute(placements=[Replicate()]), FULL_PTR, 0.5)
        check_picks(x, same)
        first = same.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(same, first)


def check_picks(x, picks):
    """Each is the farthest from those before it, whatever the first."""
    for (first, last), mine in zip(pairwise(FULL_PTR.tolist()), picks.split([2, 4]), strict=True):
        for i in range(1, len(mine)):
            away = torch.cdist(x[first:last], x[mine[:i]]).amin(1)
            assert int(mine[i]) == first + int(away.argmax())


def test_kinds_and_random_picks():
    run_ranks(check_kinds, 3)


# -- PyG's own functions -----------------------------------------------------------------------------------------------


def of_pyg():
    import torch_geometric.nn as g

    for loop, flow, batch in product((False, True), ("source_to_target", "target_to_source"), (None, BATCH)):
        yield lambda x, y, b, c, o=(loop, flow), batch=batch: g.knn_graph(x, 3, batch if batch is None else b, *o)
        for most in (2, 32):
            yield lambda x, y, b, c, o=(loop, most, flow), batch=batch: g.radius_graph(
                x, 0.5, batch if batch is None else b, *o, num_workers=2
            )
    yield lambda x, y, b, c: g.knn(x, y, 2, b, c)
    yield lambda x, y, b, c: g.knn(x, y, 2, b, c, batch_size=5)
    yield lambda x, y, b, c: g.radius(x, y, 0.6, b, c, max_num_neighbors=2)
    yield lambda x, y, b, c: g.fps(x, None, 0.4, random_start=False)
    yield lambda x, y, b, c: g.knn_interpolate(x.sin(), x, y, b, b[:9] if c is None else c, k=2)
    yield lambda x, y, b, c: dynamic(g)(x, b)
    yield lambda x, y, b, c: set_abstraction(g)(x)


def dynamic(g):
    torch.manual_seed(3)
    return g.DynamicEdgeConv(torch.nn.Linear(6, 4).double(), 3)


def set_abstraction(g):
    """The step of PointNet++: picks, what is near them, and a convolution from all points to the picks."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(6, 4).double(), torch.nn.Linear(4, 2).double()
    layer = g.PointNetConv(*layers, add_self_loops=False)

    def run(pos):
        picks = g.fps(pos, ratio=0.5, random_start=False)
        row, col = g.radius(pos, pos[picks], 0.5, max_num_neighbors=8)
        return layer((pos.sin(), None), (pos, pos[picks]), torch.stack([col, row]))

    return run


def check_pyg(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    inputs = [*points(), BATCH, OTHER_BATCH]
    for sizes, others in LAYOUTS[num_ranks]:
        specs = [ShardSpec.even(mesh, [Shard(0)], x.shape, {0: sizes if len(x) == NUM else others}) for x in inputs]
        for i, function in enumerate(of_pyg()):
            try:
                assert_like_one_process(function, inputs, specs)
            except Exception as error:
                raise AssertionError(f"function {i} at {sizes}, {others}") from error


@pytest.mark.skipif(
    importlib.util.find_spec("pyg_lib") is None, reason="PyG calls pyg-lib, of which there is none here"
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_pyg(num_ranks):
    run_ranks(check_pyg, num_ranks, timeout=200)

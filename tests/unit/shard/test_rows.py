"""Plans of moved rows against brute force, on pretended ranks: every case is a few rows of a few ranks."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard import HaloDim, ShardSpec
from scidata.shard.rows import edge_order, ordered, redistribute, runs
from scidata.testing import fake_group

FILLED = runs.FILLED


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ()),
        ([3], ((3, 1),)),
        ([3, 4, 5, 9, 10, 2], ((3, 3), (9, 2), (2, 1))),
        ([5, 4], ((5, 1), (4, 1))),
        ([FILLED, FILLED, 0, 1, FILLED], ((FILLED, 2), (0, 2), (FILLED, 1))),
        ([7, 7, 8], ((7, 1), (7, 2))),
        ([0, FILLED, 0], ((0, 1), (FILLED, 1), (0, 1))),
    ],
)
def test_rows_are_joined_to_runs(rows, expected):
    assert runs.runs_of(rows) == expected


@pytest.mark.parametrize(("start", "stop"), [*itertools.combinations(range(-4, 8), 2)])
def test_a_window_is_filled_outside_of_the_dim(start, stop):
    rows = [row if 0 <= row < 3 else FILLED for row in range(start, stop)]
    assert runs.window_runs(start, stop, 3) == runs.runs_of(rows)


@pytest.mark.parametrize("sizes", [(3,), (2, 0, 3), (0, 4, 1), (1, 1, 1)])
@pytest.mark.parametrize("wanted_rows", [[0, 1, 2], [2, FILLED, 0], [], [1, 1, 2, 0]])
def test_a_plan_of_runs_names_each_wanted_row_once(sizes, wanted_rows):
    """The pieces that a rank sends are those that the others hold, and with what it keeps they make its result."""
    wanted = tuple(
        runs.runs_of(wanted_rows) if rank % 2 == 0 else runs.window_runs(-1, 2, sum(sizes))
        for rank in range(len(sizes))
    )
    bounds = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    plans = [runs.plan_runs(sizes, rank, wanted) for rank in range(len(sizes))]
    moved = set()
    for rank, plan in enumerate(plans):
        there, back = plan.there, plan.back
        found = [None] * there.length
        pieces = [(rank, start, place, n) for start, place, n in there.kept]
        for other, placed in there.placed:
            sent = dict(plans[other].there.sent)[rank]
            assert other != rank
            assert [n for _, n in sent] == [n for _, n in placed]
            pieces += [(other, start, place, n) for (start, n), (place, _) in zip(sent, placed, strict=True)]
        for owner, start, place, n in pieces:
            for i in range(n):
                assert start + n <= sizes[owner]
                assert found[place + i] is None
                found[place + i] = bounds[owner] + start + i
        for offset, count in plan.filled:
            found[offset : offset + count] = [FILLED] * count
        rows = [FILLED if first == FILLED else first + i for first, n in wanted[rank] for i in range(n)]
        assert found == rows
        moved |= {(owner, rank) for owner, *_ in pieces if owner != rank}
        assert (back.sent, back.placed, back.length) == (there.placed, there.sent, sizes[rank])
    assert all(plan.pairs == len(moved) for plan in plans)
    assert all(plan.fills == any(row == FILLED for each in wanted for row, _ in each) for plan in plans)


#: Edges of three ranks, joined of two parts: those of the graph, then self-loops.
PARTS = ((2, 0, 3), (1, 2, 0))
#: The same edges, numbered as one process has them, rank after rank.
BY_RANK = [0, 1, 5, 6, 7, 2, 3, 4]


def edges(parts):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("domain",))
    spec = ShardSpec.even(mesh, [Shard(0)], (8,), {0: (3, 2, 3)})
    graph = ShardSpec(
        device_mesh=mesh,
        placements=spec.placements,
        global_shape=spec.global_shape,
        sizes=spec.sizes,
        exchange=object(),
        edge_parts=parts,
    )
    assert spec.in_order
    assert not graph.in_order
    return spec, graph


def test_edges_between_the_orders_of_ranks_and_of_one_process():
    assert [edge_order.edge_runs(PARTS, rank) for rank in range(3)] == [
        [(0, 2), (5, 1)],
        [(2, 0), (6, 2)],
        [(2, 3), (8, 0)],
    ]
    rows = torch.arange(8)
    with fake_group(3, 1):
        spec, graph = edges(PARTS)
        assert edge_order.as_joined(torch.add, rows, 0, graph).tolist() == BY_RANK
        assert torch.equal(edge_order.as_in_one_process(torch.tensor(BY_RANK), graph), rows)
        assert edge_order.places_by_rank(torch.add, rows, graph).tolist() == [BY_RANK.index(row) for row in range(8)]
        for same in (edge_order.as_joined(torch.add, rows, 0, spec), edge_order.places_by_rank(torch.add, rows, spec)):
            assert same is rows
        assert edge_order.as_in_one_process(rows, spec) is rows
        assert edge_order.in_one_order(torch.add, rows[:2], spec) == (pytest.approx(rows[:2]), spec)


def test_edges_of_an_unknown_order_take_what_is_the_same_for_all():
    with fake_group(3, 1):
        graph = edges(None)[1]
        same = torch.full((8, 2), 3.0)
        assert edge_order.as_joined(torch.add, same, 0, graph) is same
        rows = torch.arange(16.0).view(8, 2)
        assert edge_order.as_in_one_process(rows, graph) is rows
        columns = torch.tensor([[1.0, 2.0]]).expand(8, 2)
        assert edge_order.as_joined(torch.add, columns, 0, graph) is columns
        for refused in (rows, same.clone().requires_grad_()):
            with pytest.raises(UnsupportedShardOp, match="joined on each rank"):
                edge_order.as_joined(torch.add, refused, 0, graph)
        with pytest.raises(UnsupportedShardOp, match="joined on each rank"):
            edge_order.places_by_rank(torch.add, torch.arange(2), graph)
        with pytest.raises(UnsupportedShardOp, match="joined on each rank"):
            edge_order.in_one_order(torch.add, torch.zeros(2), graph)


def test_halos_as_users_say_them():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        spec = ShardSpec.even(mesh, [Shard(1)], (3, 8, 5))
        found = runs.halo_dims({1: 2, -1: (0, 3)}, [2], spec)
        assert found == {1: HaloDim(lo=2, hi=2), 2: HaloDim(lo=0, hi=3, periodic=True)}
        padded = torch.arange(8.0)[:6].expand(3, 5, 6).transpose(1, 2)  # rows 0 to 3, then two of the other rank
        assert torch.equal(runs.owned_of(padded, spec, {1: HaloDim(lo=2, hi=2)}), padded[:, :4])
        for lo, hi in ((-1, 2), (2, -1)):
            with pytest.raises(ConfigError, match="must not be negative"):
                HaloDim(lo=lo, hi=hi)


def test_keys_are_in_the_order_of_the_values():
    values = torch.tensor(
        [float("nan"), -0.0, 0.0, 1e-300, -float("inf"), float("inf"), -2.5, 3.0, -1e-300], dtype=torch.float64
    )
    keys = ordered.order_keys(values)
    assert torch.equal(torch.sort(keys, stable=True).indices, torch.sort(values, stable=True).indices)
    assert keys[1] == keys[2]
    assert keys[0] == ordered.LARGEST
    assert torch.equal(ordered.order_keys(torch.tensor([2, -3])), torch.tensor([2, -3]))


def sent_to(plan, rank):
    """Return the rows that a plan sends to a rank."""
    parts = torch.split(plan.route.rows, [num for _, num in plan.route.sent])
    return dict(zip([other for other, _ in plan.route.sent], parts, strict=True)).get(rank, plan.route.rows[:0])


def num_pairs(plans):
    """Return how many pairs of different ranks there are of which one sends to the other."""
    return sum(other != rank for rank, plan in enumerate(plans) for other, _ in plan.route.sent)


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (0, 4, 1)])
def test_a_reshape_moves_each_element_once(sizes):
    """From (2, rows, 3), split along the rows, to (3, rows', 2): element by element, in C order."""
    rows = sum(sizes)
    whole = torch.arange(2 * rows * 3)
    old = torch.split(whole.view(2, rows, 3), list(sizes), 1)
    new_sizes = tuple(reversed(sizes))
    new = torch.split(whole.view(3, rows, 2), list(new_sizes), 1)
    plans = [redistribute.plan_reshape((2, 3), sizes, (3, 2), new_sizes, rank) for rank in range(len(sizes))]
    for rank, plan in enumerate(plans):
        received = torch.cat([old[p].reshape(-1)[sent_to(plans[p], rank)] for p in range(len(sizes))])
        counts = [(p, len(sent_to(plans[p], rank))) for p in range(len(sizes))]
        assert [each for each in counts if each[1]] == plan.route.held
        assert plan.route.pairs == num_pairs(plans)
        assert torch.equal(received[plan.order], new[rank].reshape(-1))
        assert not plan.stays


@pytest.mark.parametrize("index", [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [2, 2, 0], []])
def test_a_listed_plan_takes_rows_by_their_number(index):
    sizes = (2, 0, 3)
    new_sizes = {5: sizes, 3: (1, 1, 1), 0: (0, 0, 0)}[len(index)]
    parts = torch.split(torch.arange(5), list(sizes))
    rows = torch.tensor(index, dtype=torch.int64)
    plans = [redistribute.plan_listed(rows.numpy(), sizes, new_sizes, rank) for rank in range(3)]
    for rank, (plan, expected) in enumerate(zip(plans, torch.split(rows, list(new_sizes)), strict=True)):
        received = torch.cat([parts[p][sent_to(plans[p], rank)] for p in range(3)])
        assert plan.route.pairs == num_pairs(plans)
        assert torch.equal(received[plan.order], expected)
        assert plan.stays == (index in ([0, 1, 2, 3, 4], []))

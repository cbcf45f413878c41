"""Ghosts by exchange and by hops, and gathers and scatters along a routed edge index, against one process."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from scidata.core.index_map import IndexMap
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard import ShardTensor
from scidata.shard.graphs.ghosts import PendingHalo, ghost_exchange, halo_exchange, node_tensor
from scidata.shard.graphs.parts import call_on_parts
from scidata.shard.graphs.routed import RoutedIndex, edge_tensor, route_edges
from scidata.shard.rows.redistribute import gather_full
from scidata.testing import run_ranks
from tests.dist._graphs import LAYOUTS, NUM_NODES, khop_part_of, part_of, parts_of, whole_edges


class Spy:
    """Counts collectives."""

    NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce", "broadcast")

    def __enter__(self):
        import scidata.shard.comm.transport as transport

        self.counts, self.kept = {}, []
        for module, name in [*((dist, name) for name in self.NAMES), (transport, "_all_gather")]:
            function = getattr(module, name, None)
            if function is not None:
                self.kept.append((module, name, function))
                setattr(module, name, self._counting(name, function))
        return self

    def _counting(self, name, function):
        def counted(*args, **kwargs):
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for module, name, function in self.kept:
            setattr(module, name, function)

    @property
    def total(self):
        return sum(self.counts.values())


def _mesh(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def _close(found, expected, what=""):
    full = gather_full(found.local, found.spec) if isinstance(found, ShardTensor) else found
    assert full.shape == expected.shape, f"{what}: {tuple(full.shape)} is not {tuple(expected.shape)}"
    torch.testing.assert_close(full, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


# -- the exchange --------------------------------------------------------------------------------------------------


def _in_two_steps(own, index_map, group):
    return PendingHalo(own, ghost_exchange(index_map, group)).wait()


def check_exchange(rank, num_ranks):
    group = dist.group.WORLD
    edges = whole_edges()
    for sizes in LAYOUTS[num_ranks]:
        part = part_of(edges, sizes, rank)
        index_map = part.index_map
        ids = torch.from_numpy(np.r_[np.arange(*index_map.owned), index_map.ghosts])
        torch.default_generator.manual_seed(0)
        for shape in ((), (3,), (2, 0), (2, 2)):
            whole = torch.randn(NUM_NODES, *shape, dtype=torch.float64)
            seeds = [torch.randn(NUM_NODES, *shape, dtype=torch.float64) for _ in range(num_ranks)]
            for exchange in (halo_exchange, _in_two_steps):
                own = whole[part.nodes].clone().requires_grad_()
                for _ in range(2):  # also with the plan that is there by now
                    own.grad = None
                    held = exchange(own, index_map, group)
                    torch.testing.assert_close(held, whole[ids], rtol=0, atol=0)
                    (held * seeds[rank][ids]).sum().backward()
                wanted = torch.zeros_like(whole)
                for other in range(num_ranks):
                    theirs = part_of(edges, sizes, other).index_map
                    held_there = np.r_[np.arange(*theirs.owned), theirs.ghosts]
                    wanted.index_add_(0, torch.from_numpy(held_there), seeds[other][torch.from_numpy(held_there)])
                torch.testing.assert_close(own.grad, wanted[part.nodes], rtol=1e-12, atol=1e-12)
        sharded = node_tensor(whole[part.nodes], index_map, _mesh(num_ranks))
        torch.testing.assert_close(halo_exchange(sharded, index_map, group), whole[ids], rtol=0, atol=0)
        integers = torch.arange(NUM_NODES)
        torch.testing.assert_close(halo_exchange(integers[part.nodes], index_map, group), ids, rtol=0, atol=0)


def check_number_of_collectives(rank, num_ranks):
    group = dist.group.WORLD
    index_map = part_of(whole_edges(), (6, 5), rank).index_map
    own = torch.ones(index_map.num_owned, 2, requires_grad=True)
    with Spy() as spy:
        halo_exchange(own, index_map, group)
    assert spy.counts.pop("all_to_all_single") == 3  # numbers of ids, ids, rows
    for exchange in (halo_exchange, _in_two_steps):
        with Spy() as spy:
            held = exchange(own, index_map, group)
        assert spy.counts == {"all_to_all_single": 1}
        with Spy() as spy:
            held.sum().backward()
        assert spy.counts == {"all_to_all_single": 1}
    alone = IndexMap(bounds=index_map.bounds, part=rank, ghosts=np.zeros(0, np.int64))
    ghost_exchange(alone, group)
    with Spy() as spy:
        halo_exchange(own, alone, group).sum().backward()
    assert spy.total == 0
    # work between start and wait: gradients of both ways meet
    own.grad = None
    pending = PendingHalo(own, ghost_exchange(index_map, group))
    meanwhile = own.square().sum()
    (pending.wait().sum() * 3 + meanwhile).backward()
    wanted = torch.full((NUM_NODES, 2), 2.0 + 3.0)
    wanted[part_of(whole_edges(), (6, 5), 1 - rank).index_map.ghosts] += 3.0
    torch.testing.assert_close(own.grad, wanted[slice(*index_map.owned)])


def check_faults(rank, num_ranks):
    group, mesh = dist.group.WORLD, _mesh(num_ranks)
    bounds = np.array([0, 6, 11])
    nothing = np.zeros(0, np.int64)
    with pytest.raises(ShardLayoutError, match="different bounds"):
        ghost_exchange(IndexMap(bounds=np.array([0, 6 - rank, 11]), part=rank, ghosts=nothing), group)
    with pytest.raises(ShardLayoutError, match="rank r must hold part r"):
        ghost_exchange(IndexMap(bounds=bounds, part=1, ghosts=nothing), group)
    with pytest.raises(ShardLayoutError, match="map of 2 parts"):
        ghost_exchange(IndexMap(bounds=np.array([0, 2, 6, 11]), part=rank, ghosts=nothing), group)
    good = IndexMap(bounds=bounds, part=rank, ghosts=nothing)
    with pytest.raises(ShardLayoutError, match="owns"):
        halo_exchange(torch.zeros(3, 2), good, group)
    edges = torch.zeros(2, 3, dtype=torch.int64)
    for row, value, message in ((0, 9, "neither owned nor ghosts"), (1, -1, "not owned"), (1, 9, "not owned")):
        wrong = edges.clone()
        if rank == 1:
            wrong[row, 2] = value
        with pytest.raises(ShardLayoutError, match=f"rank 1: edge_index holds .*{message}"):
            route_edges(wrong, good, mesh)
    with pytest.raises(ShardLayoutError, match="rank 0: edge_index must be an integer"):
        route_edges(edges.double() if rank == 0 else edges, good, mesh)
    routed = route_edges(edges, good, mesh)
    with pytest.raises(ShardLayoutError, match="local part has shape"):
        edge_tensor(torch.zeros(2), routed)
    with pytest.raises(ShardLayoutError, match="one mesh axis"):
        node_tensor(torch.zeros(6, 1), good, init_device_mesh("cpu", (1, 2), mesh_dim_names=("h", "w")))


# -- gathers and scatters ------------------------------------------------------------------------------------------


def _mean_to(x, e):
    row, col = e
    count = x.new_zeros(NUM_NODES)
    messages = x[row]
    sums = messages.new_zeros((NUM_NODES, 2)).scatter_add_(0, col.view(-1, 1).expand_as(messages), messages)
    count = messages.new_zeros(NUM_NODES)
    count.scatter_add_(0, col, messages.new_ones(messages.size(0)))
    return sums / count.clamp(min=1).view(-1, 1)


def _softmax(x, e):
    scores = (x[e[0]] * x[e[1]]).sum(-1)
    top = scores.new_zeros(NUM_NODES).scatter_reduce_(0, e[1], scores.detach(), "amax", include_self=False)
    weights = (scores - top.index_select(0, e[1])).exp()
    return weights / weights.new_zeros(NUM_NODES).scatter_add_(0, e[1], weights).index_select(0, e[1])


def _reduce(reduce, include_self):
    def function(x, e):
        messages = x[e[0]] * 2
        index = e[1].unsqueeze(-1).expand(-1, 2)
        return messages.new_ones((NUM_NODES, 2)).scatter_reduce(0, index, messages, reduce, include_self=include_self)

    return function


def _with_loops(x, e):
    loops = torch.arange(NUM_NODES).view(1, -1).repeat(2, 1)
    messages = (x[e[0]] - x[e[1]]).square()
    mask = e[0] != e[1]
    fills = messages.new_full((NUM_NODES, 2), 0.5)
    fills[e[0][~mask]] = messages[~mask]
    messages = torch.cat([messages[mask], fills], dim=0)
    e = torch.cat([e[:, mask], loops], dim=1)
    assert tuple(e.shape) == (2, messages.size(0))
    sums = x.new_zeros((NUM_NODES, 2)).index_add(0, e[1], messages * x.index_select(0, e[0]))
    return sums, int(mask.sum()), int(e.max()), e.size(1)


def _into_plain(x, e):
    out = torch.zeros(NUM_NODES, dtype=torch.float64)
    out.scatter_add_(0, e[1], torch.ones(e.size(1), dtype=torch.float64))
    assert out.shape == (NUM_NODES,)
    return out.pow(-0.5).masked_fill(out == 0, 0.0) * out.add(x[:, 0])


def _to_sources(x, e):  # the sums go where other ranks own
    messages = x[e[1]] * x[e[0]]
    return torch.zeros_like(x).index_add_(0, e[0], messages, alpha=2)


def _write_where(x, e):
    weights = (x[e[0]] * x[e[1]]).sum(-1)
    loops = e[0] == e[1]
    weights[loops] -= 1
    weights[e[0] > e[1]] = 0.5
    return weights


def _backwards(x, e):
    row, col = e
    return [
        torch.zeros_like(x).index_add(0, there[1], x[there[0]].square())
        for there in (e.flip([0]), torch.stack([col, row], dim=0))
    ]


#: Functions of node values (11, 2) and an edge index.
RIGHT = [
    lambda x, e: x.index_select(0, e[0]),
    lambda x, e: torch.index_select(x, 0, e[1]),
    lambda x, e: x[e[0]] * x[e[1]] + x[e[0]],
    lambda x, e: x.t().contiguous().index_select(1, e[0]),
    lambda x, e: x.t()[:, e[0]],
    lambda x, e: x.gather(0, e[0].view(-1, 1).expand(-1, 2)),
    lambda x, e: torch.arange(NUM_NODES * 3).view(NUM_NODES, 3)[e[0]],
    lambda x, e: [e.max(), e.min(), e[0].sum(), e.numel(), e.size(1), e.dtype, e.dim()],
    lambda x, e: [e[0] < e[1], e[0] + e[1], e == 5],
    lambda x, e: [e.clone()[0], e.contiguous()[1], e.select(0, 0), e.detach().unbind(0)[1], e.to(torch.int32)],
    lambda x, e: e[:, e[0] > e[1]],
    lambda x, e: x[e[0]][e[0] > e[1]],
    _mean_to,
    _softmax,
    _with_loops,
    _into_plain,
    _to_sources,
    _write_where,
    _backwards,
    lambda x, e: torch.nn.functional.normalize(x[e[0]], p=2.0, dim=-1),
    *(_reduce(reduce, True) for reduce in ("sum", "amax", "amin", "prod", "mean")),
    *(_reduce(reduce, False) for reduce in ("amax", "amin", "mean")),
]


def _results(result):
    return list(result) if isinstance(result, list | tuple) else [result]


def check_functions(rank, num_ranks, edges):
    mesh = _mesh(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        part = part_of(edges, sizes, rank)
        for number, function in enumerate(RIGHT):
            what = f"function {number} on {sizes}"
            torch.default_generator.manual_seed(1)
            whole = torch.randn(NUM_NODES, 2, dtype=torch.float64, requires_grad=True)
            own = whole.detach()[part.nodes].clone().requires_grad_()
            x = node_tensor(own, part.index_map, mesh)
            routed = route_edges(part.edge_index, part.index_map, mesh)
            expected, found = _results(function(whole, edges)), _results(function(x, routed))
            losses = []
            for theirs, ours in zip(expected, found, strict=True):
                if not isinstance(theirs, torch.Tensor):
                    assert ours == theirs, what
                    continue
                assert ours.dtype == theirs.dtype, what
                _close(ours, theirs.detach(), what)
                if theirs.requires_grad:
                    seed = torch.randn_like(theirs)
                    losses.append(((theirs * seed).sum(), (ours * seed).sum()))
            if losses:
                sum(a for a, _ in losses).backward()
                sum(b for _, b in losses).backward()
                _close(own.grad, whole.grad[part.nodes], f"{what}: gradient")


def check_kept_ghosts(rank, num_ranks):
    mesh = _mesh(num_ranks)
    edges = whole_edges()
    part = part_of(edges, (6, 5), rank)
    e = route_edges(part.edge_index, part.index_map, mesh)
    torch.manual_seed(1)
    whole = torch.randn(NUM_NODES, 2, dtype=torch.float64, requires_grad=True)
    x = node_tensor(whole.detach()[part.nodes].clone(), part.index_map, mesh)
    with Spy() as spy:
        first = x.index_select(0, e[0])
        x.index_select(0, e[0]), x.index_select(0, e[1])
    assert spy.counts == {"all_to_all_single": 1}
    x.add_(1)  # what was kept is old now
    _close(x[e[0]], whole.detach()[edges[0]] + 1)
    _close(first, whole.detach()[edges[0]])
    x.sub_(1)
    with torch.no_grad():
        x[e[0]]
    x.requires_grad_()  # what was kept has no graph
    (x[e[0]] * x[e[0]] * x[e[1]]).sum().backward()
    (whole[edges[0]] * whole[edges[0]] * whole[edges[1]]).sum().backward()
    _close(x.grad, whole.grad)
    for p in (x, whole):
        p.grad = None
    ((x[e[0]] ** 2).sum()).backward()  # a second pass
    ((whole[edges[0]] ** 2).sum()).backward()
    _close(x.grad, whole.grad)

    def layer(x, e):
        h = (x * 2).tanh()
        return (h[e[0]] * h[e[1]]).sin() + h[e[0]]

    for p in (x, whole):
        p.grad = None
    checkpoint(layer, x, e, use_reentrant=False).sum().backward()
    layer(whole, edges).sum().backward()
    _close(x.grad, whole.grad, "recomputed")


def check_refusals(rank, num_ranks):
    mesh = _mesh(num_ranks)
    part = part_of(whole_edges(), (6, 5), rank)
    e = route_edges(part.edge_index, part.index_map, mesh)
    x = node_tensor(torch.rand(part.index_map.num_owned, 2), part.index_map, mesh)
    messages, index = x[e[0]], e[0].view(-1, 1).expand(-1, 2)
    other = x.redistribute(sizes={"domain": (5, 6)})
    zeros = torch.zeros(NUM_NODES, 2)
    refused = {
        "another layout": lambda: other[e[0]],
        "extremes for ghosts": lambda: torch.zeros_like(x).scatter_reduce_(0, index, messages, "amax"),
        "written at ghosts": lambda: x.__setitem__(e[0], 0.0),
        "values of another layout": lambda: zeros.scatter_add(0, e[1].view(-1, 1).expand(-1, 2), x),
        "edges to join": lambda: torch.cat([e, torch.zeros(2, NUM_NODES, dtype=torch.int64)], 1),
        "a parameter in place": lambda: nn.Parameter(zeros.clone()).scatter_add_(0, index, messages),
        "plain values where": lambda: messages.__setitem__(e[0] == e[1], torch.zeros(1, 2)),
    }
    for name, function in refused.items():
        with pytest.raises(UnsupportedShardOp):
            raise AssertionError(f"{name} gave {function()}")
    expected = x[e[0]].full_tensor()
    e.add_(0)  # its routes are of no more use
    assert not isinstance(e[0], RoutedIndex)
    assert torch.equal(x[e[0]].full_tensor(), expected)


def check_two_ranks(rank, num_ranks):
    check_number_of_collectives(rank, num_ranks)
    check_faults(rank, num_ranks)
    check_kept_ghosts(rank, num_ranks)
    check_refusals(rank, num_ranks)
    check_copies(rank, num_ranks)


def check_copies(rank, num_ranks):
    part = part_of(whole_edges(), (6, 5), rank)
    e = route_edges(part.edge_index, part.index_map, _mesh(num_ranks))
    twin = copy.deepcopy(e)
    assert isinstance(twin, RoutedIndex)
    assert torch.equal(twin.local_ids, e.local_ids)
    assert twin.local.data_ptr() != e.local.data_ptr()


# -- ghosts by hops ------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_layers))
        self.same = self.layers[0]  # under two names, as PyG registers aggregations
        self.layers[1].bias = self.layers[0].bias  # tied

    def forward(self, x, e):
        for layer in self.layers:
            messages = layer(x[e[0]] - x[e[1]]).tanh()
            x = x + messages.new_zeros(x.shape).index_add(0, e[1], messages)
        return x


class Pooled(nn.Module):
    def forward(self, x, e):
        return x.sum(0, keepdim=True)


def check_hops(rank, num_ranks):
    mesh, edges = _mesh(num_ranks), whole_edges()
    torch.manual_seed(2)
    model = Layers(2).double()
    whole = torch.randn(NUM_NODES, 2, dtype=torch.float64, requires_grad=True)
    model(whole, edges).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    checks_left = 1 if num_ranks > 1 else 0
    for sizes in LAYOUTS[num_ranks]:
        part = part_of(edges, sizes, rank)
        own = whole.detach()[part.nodes].clone().requires_grad_()
        deep, local_edges, _ = khop_part_of(edges, sizes, rank, 2)
        for way in ("exchange", "hops"):
            model.zero_grad()
            own.grad = None
            if way == "exchange":
                x = node_tensor(own, part.index_map, mesh)
                result = model(x, route_edges(part.edge_index, part.index_map, mesh))
            else:
                held = halo_exchange(own, deep, dist.group.WORLD)
                with Spy() as spy:
                    result = call_on_parts(model, parts_of(deep, local_edges, 2, mesh), held, local_edges)
                assert spy.total <= checks_left
                checks_left -= spy.total
                assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            result.square().mean().backward()
            for p, grad in zip(model.parameters(), wanted, strict=True):
                _close(p.grad, grad, f"{way} {sizes}")
            _close(own.grad, whole.grad[part.nodes], f"{way} {sizes}: input")
    parts, rows = parts_of(deep, local_edges, 2, mesh), torch.zeros(deep.num_local, 2)
    with pytest.raises(UnsupportedShardOp, match="count its ghosts"):
        call_on_parts(nn.Sequential(nn.BatchNorm1d(2)), parts, rows)
    call_on_parts(nn.Sequential(nn.BatchNorm1d(2)).eval(), parts, rows)
    if num_ranks > 1:
        with pytest.raises(UnsupportedShardOp, match="a row for each"):
            call_on_parts(Pooled(), parts, rows, local_edges)


def ring():
    """As many edges as nodes, so that their sizes cannot be told apart by the numbers."""
    nodes = torch.arange(NUM_NODES)
    return torch.stack([nodes.roll(1), nodes])


def check_all(rank, num_ranks):
    check_exchange(rank, num_ranks)
    check_functions(rank, num_ranks, whole_edges())
    check_functions(rank, num_ranks, ring())
    check_hops(rank, num_ranks)


@pytest.mark.slow_for("2", "4")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_exchange_functions_and_hops(num_ranks):
    run_ranks(check_all, num_ranks)


def test_number_of_collectives_faults_and_refusals():
    run_ranks(check_two_ranks, 2)

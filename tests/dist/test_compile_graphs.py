"""Message passing by compiled graphs beside eager steps: by exchange and by k-hop ghosts, of one graph and of many."""

import copy
import importlib.util
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.compile import overlap, regions_of
from scidata.shard.graphs.parts import call_on_parts
from scidata.testing import run_ranks
from tests.bench.compile_step import collectives_of
from tests.bench.step_costs import ViTBlock
from tests.dist._checks import asked_for, failures
from tests.dist._graphs import NUM_NODES, khop_part_of, part_of, parts_of, whole_edges
from tests.dist._pyg import hetero_to_pyg, to_pyg
from tests.dist.test_gnn_model import example
from tests.dist.test_hetero import LAYOUTS, Interaction, cut, whole

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)
DEPTH = 2


def sample(index, mesh, sizes=(6, 5)):
    """Return a graph of its own edges, and its rows."""
    generator = torch.Generator().manual_seed(index)
    edges = whole_edges()
    edges = edges[:, torch.rand(edges.shape[1], generator=generator) < (1 if index == 0 else 0.8)]
    x = torch.randn(NUM_NODES, 3, generator=generator, dtype=torch.float64)
    attr = torch.randn(edges.shape[1], 2, generator=generator, dtype=torch.float64)
    rank = mesh.get_local_rank("domain")
    part = part_of(edges, sizes, rank)
    node, edge = {"x": x[part.nodes]}, {"edge_attr": attr[part.edges]}
    data = to_pyg(part.edge_index, part.index_map, mesh, node=node, edge=edge)
    deep, near, ids = khop_part_of(edges, sizes, rank, DEPTH)
    held = x[torch.from_numpy(deep.to_global(range(deep.num_local)))]
    return data, (parts_of(deep, near, DEPTH, mesh), held, near, attr[ids])


def pair(mesh, make, **options):
    torch.manual_seed(0)
    eager = make()
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        scidata.parallelize(model, mesh)
    return eager, scidata.compile(compiled, **{"backend": "aot_eager", **options})


def mesh_graph_net():
    return example().MeshGraphNet(3, 2, 2, dim=8, depth=DEPTH).double()


def by_exchange(model, given):
    data = given[0]
    return model(data.x, data.edge_index, data.edge_attr)


def by_ghosts(model, given):
    graph, *rest = given[1]
    return call_on_parts(model, graph, *rest)


def of_data(model, given):
    return model(given[0])


class Stack(nn.Module):
    """Layers of PyTorch Geometric, called with a ``Data``."""

    def __init__(self, loops=False):
        import torch_geometric.nn as g

        super().__init__()
        layers = [g.SAGEConv(3, 4), g.GATv2Conv(4, 4, edge_dim=2, add_self_loops=loops), g.GraphConv(4, 4, aggr="max")]
        self.layers = nn.ModuleList([*layers, g.GINEConv(nn.Linear(4, 3), edge_dim=2)]).double()

    def forward(self, data):
        x = data.x
        for layer in self.layers:
            takes_edges = "edge_attr" in layer.forward.__code__.co_varnames
            x = layer(x, data.edge_index, **({"edge_attr": data.edge_attr} if takes_edges else {}))
        return x


def trains(models, run, samples, steps=4):
    """Compare steps on samples in turns; return how often the second model was captured."""
    for _ in range(steps):
        for given in samples:
            losses = []
            for model in models:
                model.zero_grad()
                loss = run(model, given).square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
            for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), name
                if a.grad is not None:
                    torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-12, msg=name)
    return sum(len(group) for region in regions_of(models[1]) for group in region.captured.values())


# -- each is called with a mesh ----------------------------------------------------------------------------------------


def one_graph_by_exchange(mesh):
    assert trains(pair(mesh, mesh_graph_net), by_exchange, [sample(0, mesh)]) == 1


def one_graph_by_ghosts(mesh):
    assert trains(pair(mesh, mesh_graph_net), by_ghosts, [sample(0, mesh)]) == 1


def layers_of_pyg(mesh):
    assert trains(pair(mesh, Stack), of_data, [sample(0, mesh)]) == 1


def many_graphs_by_exchange(mesh):
    samples = [sample(i, mesh) for i in range(4)]
    assert trains(pair(mesh, mesh_graph_net, limit=2), by_exchange, samples, 3) <= 2


def many_graphs_by_ghosts(mesh):
    samples = [sample(i, mesh) for i in range(4)]
    assert trains(pair(mesh, mesh_graph_net, limit=2), by_ghosts, samples, 3) <= 2


def layers_that_depend_on_values(mesh):
    """How many loops a graph has is read: its edges are constants of the captured graph, which is of no other edges."""
    models = pair(mesh, lambda: Stack(loops=True), limit=2)
    assert trains(models, of_data, [sample(0, mesh)]) == 1
    assert trains(models, of_data, [sample(i, mesh) for i in range(3)], 3) == 2
    assert not any(region.reason for region in regions_of(models[1]))


class Pooled(nn.Module):
    """Layers that check ids, count them, fill dense batches, and write where a mask of numbers is true."""

    def __init__(self):
        import torch_geometric.nn as g

        super().__init__()
        self.conv, self.norm, self.pool = g.HypergraphConv(3, 4), g.GraphNorm(4), g.LSTMAggregation(4, 3)
        self.double()

    def forward(self, x, edge_index, batch):
        from torch_geometric.utils import to_dense_batch

        rows, mask = to_dense_batch(self.norm(self.conv(x, edge_index)), batch)
        return self.pool(self.norm(self.conv(x, edge_index)), batch).sum() * rows[mask]


def dense_batches(mesh):
    """Values of integers are known, whatever computes with them."""
    models, data = pair(mesh, Pooled, fullgraph=True), sample(0, mesh)[0]
    spec, rank = ShardSpec.even(mesh, [Shard(0)], (11,), {0: (6, 5)}), mesh.get_local_rank()
    batch = torch.tensor([0] * 4 + [1] * 2 + [3] * 5).split([6, 5])[rank]
    given = data.x, data.edge_index, ShardTensor(batch, spec)
    assert trains(models, lambda model, given: model(*given), [given]) == 1


class Chosen(nn.Module):
    """Rows where ids are positive, a number of rows that is read, after a sum over the ranks and a random number."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3).double(), nn.Dropout(0.5)

    def forward(self, x, ids):
        y = self.layer(self.dropout(x - x.mean(0, keepdim=True)))
        return y[ids > 0] * (1 + y.sum(0))


def ids_of_other_ranks(mesh):
    """One rank's ids stay, and the other's change: the graph of the first is left where it meets that."""
    models, spec = pair(mesh, Chosen), ShardSpec.even(mesh, [Shard(0)], (11,), {0: (6, 5)})
    rank, generator = mesh.get_local_rank(), torch.Generator().manual_seed(1)
    x = torch.randn(11, 3, dtype=torch.float64, generator=generator)
    rows = ShardTensor(x.split([6, 5])[rank], ShardSpec.even(mesh, [Shard(0)], x.shape, {0: (6, 5)}))
    whole = torch.tensor([[1, 0, 2, 0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 2, 0, 0, 1, 1, 1, 1, 0, 1]])
    samples = [ShardTensor(ids.split([6, 5])[rank].clone(), spec) for ids in whole]

    def run(model, given):
        torch.manual_seed(2)
        return model(rows, given)

    region = regions_of(models[1])[0]
    assert trains(models, run, samples[:1], 4) == 1
    assert trains(models, run, samples[1:], 1) == 1
    assert (region._num_missed > 0) == (rank == 0)
    assert trains(models, run, samples, 3) == 1 + (rank == 1)  # the first rank's two are one to it
    assert not region.reason
    assert trains(models, run, samples[1:], 5) == 1 + (rank == 1)  # the first rank's is captured anew
    assert not region.reason
    local = samples[0].local
    local[0] = 0  # of the same tensor
    assert trains(models, run, samples[:1], 3) == 2 + (rank == 1)


def one_of_two_results(mesh):
    """The loss uses one result, and a rank's ids change at each step: the other rank runs the call again in backward."""
    models, sizes, rank = pair(mesh, Two), (6, 5), mesh.get_local_rank()
    x = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = ShardTensor(x.split(sizes)[rank], ShardSpec.even(mesh, [Shard(0)], x.shape, {0: sizes}))
    spec = ShardSpec.even(mesh, [Shard(0)], (11,), {0: sizes})
    for index in range(4):
        whole = torch.tensor([1, 0, 2, 0, 0, 1, 1, 0, 0, 0, index])
        trains(models, lambda model, ids: model(rows, ids)[0], [ShardTensor(whole.split(sizes)[rank], spec)], 1)
    assert regions_of(models[1])[0].captured or rank == 1


class Two(Chosen):
    """Two results."""

    def forward(self, x, ids):
        y = self.layer(x)
        return y[ids > 0] * x.mean(), y * y.sum(0)


def gradients_differentiated(mesh):
    """A rank's ids change: first calls whose gradients are differentiated stay eager, and later ones meet."""
    sizes, rank = (6, 5), mesh.get_local_rank()
    x = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    specs = [ShardSpec.even(mesh, [Shard(0)], shape, {0: sizes}) for shape in (x.shape, (11,))]

    def step(model, last, penalty):
        rows = ShardTensor(x.split(sizes)[rank].clone(), specs[0]).requires_grad_()
        ids = torch.tensor([1, 0, 2, 0, 0, 1, 1, 0, 0, 0, last]).split(sizes)[rank]
        model.zero_grad()
        loss = (model(rows, ShardTensor(ids, specs[1])) ** 2).sum()
        if penalty:
            loss = loss + (torch.autograd.grad(loss, rows, create_graph=True)[0] ** 2).sum()
        loss.backward()
        return model.layer.weight.grad

    def make():
        model = Chosen()
        model.dropout.p = 0.0
        return model

    models = pair(mesh, make)
    for last in (0, 0, 1, 0, 1):
        expected, found = [step(model, last, penalty=True) for model in models]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert "differentiated" in regions_of(models[1])[0].reason
    models = pair(mesh, make)
    for last, penalty in ((0, False), (0, False), (0, True), (1, True), (0, True)):
        expected, found = [step(model, last, penalty) for model in models]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert regions_of(models[1])[0].captured


def scattered_inside(mesh):
    """Ranks learn the shape by a broadcast, which is in the graph where integers are constants, and else refused."""

    def by_source(x, ids):
        whole = torch.ones(11, 3, dtype=torch.float64) if mesh.get_local_rank() == 0 else None
        part = scidata.scatter_v(whole, [6, 5], 0, 0, mesh.get_group())
        return part * x.sum() * (1 if ids is None else int(ids.max()))

    rank, sizes = mesh.get_local_rank(), (6, 5)
    x = torch.arange(11.0, dtype=torch.float64)
    rows = ShardTensor(x.split(sizes)[rank], ShardSpec.even(mesh, [Shard(0)], x.shape, {0: sizes}))
    for ids, reason in ((None, "writes to"), (torch.arange(3), "")):
        compiled = scidata.compile(by_source, backend="aot_eager")
        results = [compiled(rows, ids) for _ in range(4)]
        assert all(torch.equal(each, by_source(rows, ids)) for each in results)
        assert reason in regions_of(compiled)[0].reason


def communicates_past_scidata(mesh):
    def by_torch(x):
        found = torch.ones(2)
        torch.distributed.all_reduce(found)
        return x * found.sum()

    compiled = scidata.compile(by_torch, backend="aot_eager")
    assert all(torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0)) for _ in range(3))
    assert "past scidata" in regions_of(compiled)[0].reason


class Recurrent(nn.Module):
    """A GRU, and in-place operations, so that results of exchanges in backward are not used."""

    def __init__(self):
        super().__init__()
        self.gru, self.conv = nn.GRU(3, 3).double(), nn.Conv1d(3, 3, 3, padding=1).double()

    def forward(self, x):
        y = self.gru(x.full_tensor())[0].sum()
        return torch.relu_(self.conv(x.detach().t()[None])) * y


def recurrent_layers(mesh):
    x = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = ShardTensor(x.split([6, 5])[mesh.get_local_rank()], ShardSpec.even(mesh, [Shard(0)], x.shape, {0: (6, 5)}))
    assert trains(pair(mesh, Recurrent), lambda model, x: model(x), [rows]) == 1


def other_values_on_one_graph(mesh):
    first = sample(0, mesh)[0]
    data = [copy.copy(first) for _ in range(3)]
    for index, each in enumerate(data):
        each.x = first.x * (1 + index)
    assert trains(pair(mesh, mesh_graph_net), by_exchange, [(each,) for each in data], 2) == 1


class Noting(nn.Module):
    """Puts its result and another tensor in the ``Data`` that it is given."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3).double(), nn.Parameter(torch.ones(3).double())

    def forward(self, data):
        data.found = self.layer(data.x)
        data.scaled = data.x * self.scale  # which no loss uses, and the next step does not read
        return data.found


def arguments_that_are_changed(mesh):
    models, given = pair(mesh, Noting), sample(0, mesh)
    assert trains(models, of_data, [given], 6) == 1
    assert regions_of(models[1])[0].reason == ""
    given[0].found = given[0].scaled = None
    assert models[1](given[0]) is given[0].found
    torch.testing.assert_close(given[0].scaled.full_tensor(), (given[0].x * models[1].scale).full_tensor())


class Picks(Function):
    @staticmethod
    def forward(ctx, x, ids):
        ctx.save_for_backward(x, ids)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        x, ids = ctx.saved_tensors
        return 2 * x * grad * len(ids[ids > 1]), None  # as many as the ids say, which a graph cannot count


class Picking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("ids", torch.arange(4))

    def forward(self, x):
        return Picks.apply(self.layer(x), self.ids)


def ids_that_a_backward_pass_reads(mesh):
    models = pair(mesh, Picking, fullgraph=True)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert trains(models, lambda model, x: model(x), [scidata.scatter_tensor(x, 0, mesh, [Shard(0)])]) == 1


def keeping(graphs):
    def keep(gm, inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    return keep


def work_while_values_travel(mesh):
    """Gradients of weights are computed while those of halos travel."""
    graphs = []

    def make():
        return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.GELU(), nn.Conv1d(3, 2, 3, padding=1)).double()

    x = torch.randn(1, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    models = pair(mesh, make, backend=keeping(graphs))
    assert trains(models, lambda model, x: model(x), [scidata.scatter_tensor(x, 0, mesh, [Shard(2)])]) == 1
    targets = [node.target for node in graphs[1].graph.nodes]
    start, finish = (targets.index(getattr(torch.ops.scidata, name).default) for name in ("start", "finish"))
    assert torch.ops.aten.convolution_backward.default in targets[start:finish]


class OfKinds(nn.Module):
    """A convolution, and a row of a table for each cell: ids are checked while the halo travels."""

    def __init__(self):
        super().__init__()
        self.conv, self.table = nn.Conv1d(3, 3, 3, padding=1).double(), nn.Embedding(4, 3).double()

    def forward(self, x, ids):
        return self.conv(x.t()[None])[0].t() * self.table(ids)


def an_index_that_is_out_of_range(mesh):
    """It raises while values travel; the next step waits for those, and is right."""
    graphs, sizes, rank = [], (6, 5), mesh.get_local_rank()
    specs = [ShardSpec.even(mesh, [Shard(0)], shape, {0: sizes}) for shape in ((11, 3), (11,))]
    x = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = ShardTensor(x.split(sizes)[rank], specs[0])
    ids = torch.tensor([0, 1, 2, 3] * 2 + [0, 1, 2]).split(sizes)[rank].clone()
    models = pair(mesh, OfKinds, backend=keeping(graphs))
    samples = [(rows, ShardTensor(ids, specs[1]))]
    assert trains(models, lambda model, given: model(*given), samples) == 1
    targets = [node.target for node in graphs[0].graph.nodes]
    start, finish = (targets.index(getattr(torch.ops.scidata, name).default) for name in ("start", "finish"))
    assert torch.ops.aten.embedding.default in targets[start:finish]
    for last in (4, 3):
        ids[-1] = last
        if last == 4:
            with pytest.raises(IndexError, match="out of range"):
                models[1](*samples[0])
    assert any(overlap._started.values())
    assert trains(models, lambda model, given: model(*given), samples, 2) == 1
    assert not any(overlap._started.values())


def sums_that_meet(mesh):
    """A block of attention gathers keys and values, which are kept once for backward, adds their gradients up, and has
    one bucket for all weights.
    """
    graphs = []
    x = scidata.scatter_tensor(torch.ones(1, 11, 4, dtype=torch.float64), 0, mesh, [Shard(1)])
    models = pair(mesh, lambda: ViTBlock(4, 2).double(), backend=keeping(graphs))
    assert trains(models, lambda model, x: model(x), [x]) == 1
    (gathered,) = [node for node in graphs[0].graph.nodes if node.name.startswith("gather")]
    assert gathered in graphs[0].graph.output_node().args[0]
    assert [collectives_of(lambda: model(x).sum().backward())[0] for model in models] == [3, 3]  # noqa: B023


class ThereAndBack(nn.Module):
    """Grid to mesh and back, as GraphCast, called with a ``HeteroData``."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = Interaction().double(), Interaction().double()

    def forward(self, data):
        grid, mesh = data["grid"].x, data["mesh"].x
        there, back = data["grid", "to", "mesh"], data["mesh", "to", "grid"]
        mesh = self.encode((grid, mesh), there.edge_index, there.edge_attr)
        return self.decode((mesh, grid), back.edge_index, back.edge_attr)


def two_node_sets_made_anew(mesh):
    rank, sizes = mesh.get_rank(), LAYOUTS[2][1]  # the mesh has no node on the first rank
    _, local, maps = cut(mesh, sizes, rank)
    x, edges, attr = whole()
    first = {relation: sizes[relation[2]][0] for relation in edges}  # targets of the first rank
    held = {r: (e[1] < first[r]) if rank == 0 else (e[1] >= first[r]) for r, e in edges.items()}

    def made(model, scale):
        node = {name: {"x": scale * values[slice(*maps[name].owned)]} for name, values in x.items()}
        edge = {r: {"edge_attr": values[held[r]]} for r, values in attr.items()}
        return model(hetero_to_pyg(local, maps, mesh, node=node, edge=edge))

    models = pair(mesh, ThereAndBack)
    assert trains(models, made, [1.0, 0.5, 2.0]) == 1
    with pytest.warns(UserWarning, match="32 calls in a row had layouts") if rank == 0 else nullcontext():
        for _ in range(32):
            models[1](cut(mesh, sizes, rank)[0])  # other index maps each time


def writes_to_copies(mesh):
    """What is a view in one process is a copy here: writes go back to where it comes from, by an eager call."""

    def doubles(x, y):
        return x.mul_(2) + y.sum()

    compiled = scidata.compile(doubles, backend="aot_eager")
    for _ in range(4):
        x = scidata.scatter_tensor(torch.ones(3, 4), 0, mesh, [Shard(1)])
        column = x[:, 2]
        compiled(column, torch.ones(1))
        torch.testing.assert_close(x.full_tensor(), torch.tensor([1.0, 1.0, 2.0, 1.0]).expand(3, 4))
        torch.testing.assert_close(
            compiled(x, column).full_tensor(), torch.tensor([14.0, 14.0, 16.0, 14.0]).expand(3, 4)
        )
        torch.testing.assert_close(column.full_tensor(), torch.full((3,), 4.0))


def plain_results_of_unknown_strides(mesh):
    """A plain tensor that vmap makes of a whole one is a ShardTensor, as its strides are not known: in graphs, too."""

    def function(x):
        return torch.func.vmap(lambda t: t @ torch.ones(1, 2), 0)(x[None][0::2, 0:2, -2, 1:].transpose(-3, -3))

    x = scidata.scatter_tensor(torch.ones(6, 4, 2), 0, mesh, [Shard(1)])
    compiled = scidata.compile(function, backend="aot_eager", fullgraph=True)
    for call in (function, *[compiled] * 3):
        assert type(call(x)) is ShardTensor
    assert regions_of(compiled)[0].captured


class Branching(nn.Module):
    """Checks for NaN, and computes with other ranks' rows either way, behind a random number and statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.double()

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        y = self.norm(self.conv(self.dropout(x)))
        return self.conv(y) if x.mean() > 0 else y * y.sum() if x.min() < -3 else y


def branches_on_values(mesh, **options):
    """Graphs check what they take for granted; a call that differs, and one rank alone, go on eagerly from there."""
    models = pair(mesh, Branching, **options)
    x = torch.randn(2, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    up, down, low = [scidata.scatter_tensor(x + k, 0, mesh, [Shard(2)]) for k in (1, -1, -9)]
    (region,) = regions_of(models[1])

    def run(model, given):
        torch.manual_seed(2)
        return model(given)

    def checked():
        return [each.num_assumed for group in region.captured.values() for each in group]

    assert trains(models, run, [up], 4) == 1
    assert checked() == [2]
    assert trains(models, run, [down, up, low, up], 1) == 1
    assert checked() == [2]
    assert trains(models, run, [low], 4) == 1
    assert checked() == [3]
    for a, b in zip(*(model.norm.buffers() for model in models), strict=True):
        torch.testing.assert_close(a, b)
    mixed = [models[0], models[min(mesh.get_local_rank(), 1)]]
    trains(mixed, run, [low, up, down, low], 1)
    trains(models, run, [low], 4)
    for i in range(2):
        trains(models, run, [up if i % 2 else low], 1)
    assert not region.reason
    for model in models:
        with pytest.raises(ValueError, match="NaN"):
            run(model, up * float("nan"))
    for i in range(16):
        trains(models, run, [up if i % 2 else low], 1)
    assert "values that it reads" in region.reason


def branches_on_values_by_inductor(mesh):
    branches_on_values(mesh, backend="inductor")


ALL = [
    two_node_sets_made_anew, one_graph_by_exchange, layers_that_depend_on_values, other_values_on_one_graph, arguments_that_are_changed,
    ids_of_other_ranks, one_of_two_results, gradients_differentiated, scattered_inside, communicates_past_scidata,
    work_while_values_travel, sums_that_meet, ids_that_a_backward_pass_reads, an_index_that_is_out_of_range, dense_batches, branches_on_values, writes_to_copies,
    plain_results_of_unknown_strides,
]  # fmt: skip
SLOW = [
    one_graph_by_ghosts,
    many_graphs_by_exchange,
    many_graphs_by_ghosts,
    layers_of_pyg,
    recurrent_layers,
    branches_on_values_by_inductor,
]


MESH = partial(init_device_mesh, "cpu", (2,), mesh_dim_names=("domain",))
MESH_OF_THREE = partial(init_device_mesh, "cpu", (3,), mesh_dim_names=("domain",))


@pytest.fixture(scope="module")
def failed(request):
    return run_ranks(failures, 2, MESH, asked_for(request), timeout=240)


@pytest.mark.parametrize("each", ALL)
def test_on_two_ranks(failed, each):
    for of_rank in failed:
        assert not of_rank.get(each.__name__), of_rank[each.__name__]


@pytest.mark.slow
@pytest.mark.parametrize("each", SLOW)
def test_more_on_two_ranks(each):
    assert run_ranks(failures, 2, MESH, [each], timeout=240) == [{}, {}]


def test_branches_on_three_ranks():
    assert run_ranks(failures, 3, MESH_OF_THREE, [branches_on_values], timeout=240) == [{}, {}, {}]

"""Meshes and graphs of a store on real ranks: what is handed out, that reading never communicates, and PyG on it."""

import importlib.util
import itertools
import pickle

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.spatial import Delaunay

import scidata
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.store.partitioning.partition import partition
from scidata.testing import run_ranks
from tests.dist._workers import forked
from tests.writers import triangulation, write_hdf5

SIZES = (130, 47)


def write_raw(path, num_nodes, seed):
    rng = np.random.default_rng(seed)
    mesh = triangulation(rng.random((num_nodes, 2)))
    fields = {
        "u": rng.standard_normal((num_nodes, 3)),
        "p": rng.standard_normal(num_nodes),
        "area": rng.random(len(mesh["cells"])),
        "node/history": rng.standard_normal((2, num_nodes)),
    }
    return write_hdf5(path, mesh | fields)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    rng = np.random.default_rng(9)
    write_hdf5(folder / "raw.h5", {"points": rng.random((700, 3)), "u": rng.standard_normal((700, 2))})
    partition(folder / "raw.h5", folder / "store", kind="points")
    return str(folder / "store")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("irregular")
    raws = [write_raw(folder / f"case{i}.h5", n, i) for i, n in enumerate(SIZES)]
    partition(raws, folder / "store")
    return str(folder / "store"), raws


def sequence_numbers(mesh):
    groups = [dist.group.WORLD, *(mesh.get_group(i) for i in range(mesh.ndim))]
    return [group._get_sequence_number_for_group() for group in groups]


def whole(raw, name):
    with h5py.File(raw) as file:
        return torch.from_numpy(file[name][...])


def full(x):
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


def in_source_order(sample, name):
    dim = sample.places[name].dim
    ids, values = full(sample.original_id(sample.entity_of(name))), full(sample[name])
    return torch.zeros_like(values).index_copy_(dim, ids, values)


def hands_out_shards(rank, num_ranks, path, raws):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    disk = scidata.open_dataset(path, mesh, halo=2)
    swap = scidata.open_dataset(path, mesh, halo=2, ghosts="exchange")
    before = sequence_numbers(mesh)
    samples = [disk[i] for i in range(2)]
    assert disk[-1].index == 1
    others = [swap[i] for i in range(2)]
    held = [[s.with_ghosts(name) for name in s] for s in samples]
    assert sequence_numbers(mesh) == before, "reading communicated"
    for sample, other, raw, values in zip(samples, others, raws, held, strict=True):
        for name, local in zip(sample, values, strict=True):
            source = {"pos": "points", "history": "node/history"}.get(name, name)
            assert torch.equal(in_source_order(sample, name), whole(raw, source)), name
            assert torch.equal(other.with_ghosts(name), local), name
            assert local.shape[sample.places[name].dim] == sample.index_map(sample.entity_of(name)).num_local
        assert torch.equal(sample.edge_index, other.edge_index)
        assert sample.num_nodes == len(whole(raw, "p"))
    assert num_ranks == 1 or sequence_numbers(mesh) != before, "the spy does not see collectives"
    with pytest.raises(UnknownNameError, match="did you mean 'u'"):
        samples[0].with_ghosts("U")
    doubled = samples[0].replace({"twice": samples[0]["u"] * 2})
    assert doubled.entity_of("twice") == "node"
    with pytest.raises(ConfigError, match="made after reading"):
        doubled.with_ghosts("twice")
    with pytest.raises(ConfigError, match="cut by rank, not cropped"):
        scidata.open_dataset(path, mesh, isel={"node": slice(3)})
    single = samples[0].to(torch.float32)
    assert single["u"].dtype is torch.float32
    assert single.edge_index.dtype is torch.int64
    assert torch.equal(single.with_ghosts("u"), samples[0].with_ghosts("u").float())
    return {r: disk.plan(0, r).bytes_fetched for r in range(num_ranks)}


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_holds_its_rows_and_nothing_is_sent(store, num_ranks):
    plans = run_ranks(hands_out_shards, num_ranks, *store)
    assert all(plan == plans[0] for plan in plans), "ranks disagree on what each of them reads"


def net(conv):
    import torch_geometric.nn as g

    torch.manual_seed(0)
    return getattr(g, conv)(3, 2).double()


def one_process(path, conv, indices):
    """Loss and gradients on the whole samples, one after the other."""
    model, loss = net(conv), 0.0
    ds = scidata.open_dataset(path, fields=["u", "p"])
    for i in indices:
        data = ds[i].to_pyg(x="u")
        loss = loss + (model(data.x, data.edge_index) * data.p[:, None]).square().sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def trains(rank, num_ranks, path, convs, layouts):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ways = [{"halo": 1}, {"halo": 3}, {"ghosts": "exchange"}, {"halo": 1, "ghosts": "exchange"}]
    for conv in convs:
        loss, grads = one_process(path, conv, [0])
        for bounds, way in itertools.product(layouts, ways):
            ds = scidata.open_dataset(path, mesh, fields=["u", "p"], bounds=bounds, **way)
            data = ds[0].to_pyg(x="u")
            model = scidata.parallelize(net(conv), mesh)
            found = (model(data.x, data.edge_index) * data.p[:, None]).square().sum()
            found.backward()
            assert abs(found - loss) <= 1e-12 * abs(loss)
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                assert torch.allclose(parameter.grad, grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))
    if num_ranks == 3:
        without_exchange(mesh, path)


def points_with_ghosts(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    disk = scidata.open_dataset(path, mesh, halo=0.2)[0]
    swap = scidata.open_dataset(path, mesh, halo=0.2, ghosts="exchange")[0]
    assert disk.edge_index is None
    assert disk.index_map("point").num_ghost > 0
    for name in disk:
        assert torch.equal(disk.with_ghosts(name), swap.with_ghosts(name))
    batch = scidata.collate([disk, disk])
    assert batch["batch"].full_tensor().bincount().tolist() == [700, 700]
    if importlib.util.find_spec("torch_geometric") is not None:
        data = batch.to_pyg(x=["u", "pos"])
        assert data.edge_index is None
        assert tuple(data.x.shape) == (1400, 5)
        assert abs(data.x.sum() - 2 * (disk["u"].sum() + disk["pos"].sum())) < 1e-9


def test_points_with_a_radius(cloud):
    run_ranks(points_with_ghosts, 2, cloud, timeout=150)


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_layer_gives_what_one_process_gives(store, num_ranks):
    pytest.importorskip("torch_geometric", reason="its layers are what is tested")
    layouts = ["even", {0: [0, 0, 1, 130]}] if num_ranks == 3 else ["even"]
    run_ranks(trains, num_ranks, store[0], ["SAGEConv", "GraphConv"], layouts, timeout=150)


def test_a_layer_on_cells_as_rows(tmp_path):
    pytest.importorskip("torch_geometric", reason="its layers are what is tested")
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = rng.random((80, 2))
        file["cells"] = cells = Delaunay(file["points"][...]).simplices
        file["cell/u"], file["cell/p"] = rng.standard_normal((len(cells), 3)), rng.standard_normal(len(cells))
    partition(tmp_path / "raw.h5", tmp_path / "store", entity="cell")
    layouts = ["even", {0: [0, 1, len(cells)]}]
    run_ranks(trains, 2, str(tmp_path / "store"), ["SAGEConv"], layouts, timeout=150)


def without_exchange(mesh, path):
    """Two layers on two hops of ghosts: no communication forward."""
    from torch_geometric.nn import GraphConv

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([GraphConv(3, 4), GraphConv(4, 2)]).double()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x, edge_index):
            for layer in self.layers:
                x = layer(x, edge_index).tanh()
            return x

    plain = scidata.open_dataset(path, fields=["u"])[0].to_pyg(x="u")
    wanted = Model()(plain.x, plain.edge_index)
    sample = scidata.open_dataset(path, mesh, fields=["u"], halo=2)[0]
    model = Model()
    sample.call_on_parts(model, sample.with_ghosts("u"), sample.edge_index_with_ghosts)  # checks how far it looks
    before = sequence_numbers(mesh)
    found = sample.call_on_parts(model, sample.with_ghosts("u"), sample.edge_index_with_ghosts)
    assert sequence_numbers(mesh) == before
    assert torch.allclose(found.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def unions(rank, num_ranks, path, raws):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    for options in ({"halo": 2}, {"ghosts": "exchange"}):
        ds = scidata.open_dataset(path, mesh, **options)
        before = sequence_numbers(mesh)
        batch = scidata.collate([ds[0], ds[1]])
        assert sequence_numbers(mesh) == before
        assert batch.index == [0, 1]
        assert batch.num_nodes == sum(SIZES)
        of = batch["batch"].full_tensor()
        ids, u = batch.original_id("node").full_tensor(), batch["u"].full_tensor()
        history = batch["history"].full_tensor()
        for i, raw in enumerate(raws):
            mine = of == i
            assert torch.equal(u[mine], whole(raw, "u")[ids[mine]])
            assert torch.equal(history[:, mine], whole(raw, "node/history")[:, ids[mine]])
        for name in batch:  # every ghost is its owner's row
            x, place = batch[name].full_tensor(), batch.places[name]
            rows = batch.index_map(place.entity)
            ghosts = batch.with_ghosts(name).movedim(place.dim, 0)[rows.num_owned :]
            assert torch.equal(ghosts, x.movedim(place.dim, 0)[torch.from_numpy(rows.ghosts)]), name
        rows = batch.index_map("node")
        pairs = torch.from_numpy(rows.to_global(batch.edge_index_with_ghosts.numpy()))
        assert torch.equal(of[pairs[0]], of[pairs[1]]), "an edge joins two samples"
        corners = torch.from_numpy(rows.to_global(batch.cells.connectivity.numpy()))
        triangles = torch.stack([of[corners], ids[corners]]).reshape(2, -1, 3)
        cell_ids = batch.original_id("cell").to_local()
        for j, cell in enumerate(cell_ids.tolist()):
            raw = raws[int(triangles[0, j, 0])]
            assert torch.equal(triangles[1, j], whole(raw, "cells")[cell].long())
        with pytest.raises(ConfigError, match="already"):
            scidata.collate([batch, batch])
    data = batch.to_pyg(x="u")
    loss, grads = one_process(path, "SAGEConv", [0, 1])
    model = scidata.parallelize(net("SAGEConv"), mesh)
    found = (model(data.x, data.edge_index) * data.p[:, None]).square().sum()
    found.backward()
    assert abs(found - loss) <= 1e-12 * abs(loss)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))


def test_a_batch_is_a_disjoint_union(store):
    pytest.importorskip("torch_geometric", reason="its layers are what is tested")
    run_ranks(unions, 3, *store, timeout=150)


def feeds_the_stock_loader(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, halo=1, dtype=torch.bfloat16)
    copy = pickle.loads(pickle.dumps(ds))
    with pytest.raises(ConfigError, match="in the parent"):
        copy.assemble(copy[1])
    stock = torch.utils.data.DataLoader(ds, batch_size=None, num_workers=1, multiprocessing_context=forked())
    for i, local in enumerate(stock):
        sample = ds.assemble(local)
        assert sample.index == i
        assert sample["u"].dtype is torch.bfloat16
        assert torch.equal(sample["u"].to_local(), ds[i]["u"].to_local())
    axes = scidata.init_mesh(domain=(num_ranks, 1), names=("dp", "h", "w"), device="cpu")
    with pytest.raises(ConfigError, match="one domain axis"):
        scidata.open_dataset(path, axes)


def test_the_stock_loader_with_a_worker_process(store):
    run_ranks(feeds_the_stock_loader, 2, store[0], timeout=150)


def test_without_a_mesh_samples_are_plain(store):
    ds = scidata.open_dataset(store[0])
    assert len(ds) == 2
    assert type(ds[1]["u"]) is torch.Tensor
    assert torch.equal(in_source_order(ds[1], "u"), whole(store[1][1], "u"))
    assert ds.statistics("p").mean == pytest.approx(float(torch.cat([whole(r, "p") for r in store[1]]).mean()))
    assert ds.fingerprint == scidata.open_dataset(store[0]).fingerprint
    assert ds.fingerprint != scidata.open_dataset(store[0], fields=["u"]).fingerprint
    with pytest.raises(IndexError, match="sample 2 is out of range"):
        ds[2]
    with pytest.raises(ConfigError, match="halo=1 needs a mesh"):
        scidata.open_dataset(store[0], halo=1)
    with pytest.raises(ConfigError, match="is a store of kind 'mesh'"):
        scidata.open_dataset(store[0], kind="graph")


def test_raw_data_names_the_command(tmp_path):
    path = str(tmp_path / "graph.h5")
    with h5py.File(path, "w") as file:
        file["edge_index"] = np.array([[0, 1], [1, 0]])
        file["node/x"] = np.zeros((2, 2))
    with pytest.raises(UnsupportedFormatError, match=r"scidata partition .*graph\.h5 OUT --kind graph"):
        scidata.open_dataset(path)


def draws_alike(rank, num_ranks, path, kind, subsample, block):
    """Each rank's rows of what an epoch draws, and that nothing is sent."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    bounds = {1: None, 2: [0, 0, 700], 3: [0, 100, 101, 700]}[num_ranks] if kind == "points" else None
    ds = scidata.open_dataset(
        path, mesh, kind=kind, bounds="even" if bounds is None else bounds, subsample=subsample, subsample_block=block
    )
    loader = scidata.DataLoader(ds, batch_size=None, num_workers=1)
    found = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        before = sequence_numbers(mesh)
        samples = list(loader)
        assert sequence_numbers(mesh) == before, "reading communicated"
        for sample in samples:
            shapes = {name: tuple(x.shape) for name, x in sample.items()}
            whole = {name: x.full_tensor() for name, x in sample.items()}
            assert {name: tuple(x.shape) for name, x in whole.items()} == shapes
            ids = {entity: sample.original_id(entity).full_tensor() for entity in sample.entities}
            found.append((epoch, sample.index, whole, ids))
            if "edge" in sample.entities:
                swapped = sample.with_ghosts("pos")
                assert len(swapped) == sample.index_map("node").num_local
                rows = sample.index_map("node").to_global(np.arange(len(swapped)))
                assert torch.equal(swapped, whole["pos"][rows])
    return found


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_draw_the_same_of_raw_points(num_ranks, tmp_path):
    rng = np.random.default_rng(3)
    values = {"points": rng.random((700, 3)), "u": rng.standard_normal((700, 2))}
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        for name, x in values.items():
            file.create_dataset(name, data=x, chunks=(50, x.shape[1]))
    path = str(tmp_path / "raw.h5")
    for block in (1, "chunk"):
        seen = {}
        for found in run_ranks(draws_alike, num_ranks, path, "points", {"point": 150}, block):
            for epoch, _, whole, ids in found:
                assert torch.equal(whole["u"], torch.from_numpy(values["u"])[ids["point"]])
                assert torch.equal(whole["pos"], torch.from_numpy(values["points"])[ids["point"]])
                assert len(ids["point"]) == 150
                assert torch.equal(seen.setdefault(epoch, ids["point"]), ids["point"])
        assert not torch.equal(seen[0], seen[1])


def test_ranks_draw_the_same_cells_and_exchange_their_nodes(store):
    path, raws = store
    one = run_ranks(draws_alike, 1, path, None, {"cell": 60}, 1)[0]
    for found in run_ranks(draws_alike, 3, path, None, {"cell": 60}, 1):
        for (epoch, index, whole, ids), (_, _, expected, same) in zip(found, one, strict=True):
            assert all(torch.equal(ids[entity], same[entity]) for entity in ids), (epoch, index)
            assert all(torch.equal(whole[name], expected[name]) for name in whole)
            with h5py.File(raws[index]) as file:
                cells = file["cells"][...][ids["cell"].numpy()]
            assert np.array_equal(np.sort(ids["node"].numpy()), np.unique(cells))


def feeds_kept_workers(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, subsample={"point": 20})
    loader = torch.utils.data.DataLoader(
        ds, batch_size=None, num_workers=1, multiprocessing_context=forked(), persistent_workers=True
    )
    for epoch in (0, 3, 1):
        ds.set_epoch(epoch)
        (local,) = list(loader)
        assert torch.equal(ds.assemble(local)["u"].full_tensor(), ds[0]["u"].full_tensor())
        assert local.rows["point"].tolist() == ds.read_local(0, epoch=epoch).rows["point"].tolist()


def test_an_epoch_reaches_workers_that_are_kept(cloud):
    run_ranks(feeds_kept_workers, 2, cloud)

"""``halo="cells"``: each rank has all cells of its nodes, or all that share a node with its own, as the whole mesh has."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError
from scidata.meshes.formats.vtk_write import write_vtk
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import SOLID_FACES
from scidata.meshes.order.ids import ranges
from scidata.store.format.store import verify
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.topology import _cells_of_others
from scidata.testing import run_ranks
from tests.writers import write_hdf5

SIDE = 10


def grid_mesh(kinds):
    """A box of cubes, each a hexahedron, two wedges or six tets by its number; or a square with polygons of 4 to 12."""
    rng = np.random.default_rng(3)
    if kinds == "polygons":
        rows = []
        for k in range(4, 13):  # strips that wind along others, so that polygons are long
            rows += [[*range(a, a + k // 2), *range(a + SIDE * 8 + k // 2 - 1, a + SIDE * 8 - 1, -1)]
                     for a in range(0, SIDE * 8 * 5, 29)]  # fmt: skip
        return rng.random((SIDE * 8 * 7, 2)), rows, [7] * len(rows)
    ids = np.arange(SIDE**3).reshape(SIDE, SIDE, SIDE)
    corners = [ids[i : SIDE - 1 + i, j : SIDE - 1 + j, k : SIDE - 1 + k].ravel()
               for k, j, i in np.ndindex(2, 2, 2)]  # fmt: skip
    cubes = np.stack([corners[n] for n in (0, 1, 3, 2, 4, 5, 7, 6)], axis=1)
    cells, types = [], []
    for number, cube in enumerate(cubes.tolist()):
        if number % 3 == 0:
            cells, types = [*cells, cube], [*types, 12]
        elif number % 3 == 1:
            cells += [[cube[n] for n in wedge] for wedge in ((0, 1, 2, 4, 5, 6), (0, 2, 3, 4, 6, 7))]
            types += [13, 13]
        else:
            cells += [[cube[0], cube[a], cube[b], cube[6]] for a, b in
                      ((1, 2), (2, 3), (3, 7), (7, 4), (4, 5), (5, 1))]  # fmt: skip
            types += [10] * 6
    points = np.stack(np.unravel_index(np.arange(SIDE**3), ids.shape), axis=1) + 0.2 * rng.random((SIDE**3, 3))
    return points, cells, types


@pytest.fixture(scope="module", params=["solids", "polygons"])
def stores(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    points, cells, types = grid_mesh(request.param)
    for name, num in (("a", len(cells)), ("b", len(cells) // 3)):
        write_hdf5(folder / f"{name}.h5", {
            "points": points, "cells/offsets": np.cumsum([0, *map(len, cells[:num])]), "cells/types": types[:num],
            "cells/connectivity": np.concatenate(cells[:num]), "u": points[:, 0], "q": np.arange(num) + 0.5,
        })  # fmt: skip
    edges = {} if request.param == "solids" else {"edges": "radius:0.01", "keep": "crowded_faces"}
    scidata.partition([folder / "a.h5", folder / "b.h5"], folder / "store", **edges)
    assert verify(folder / "store") is None
    return str(folder / "store")


def parts(rank, num_ranks, path, bounds, ghosts):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, halo="cells", ghosts=ghosts, bounds=bounds)
    loader = scidata.DataLoader(ds, batch_size=2, shuffle=False)
    found = []
    for sample in [ds[0], ds[1], *loader]:
        nodes, rows, cells = sample.index_map("node"), sample.index_map("cell"), sample.cells_with_ghosts
        values = sample.with_ghosts("q")
        assert len(values) == rows.num_local == len(cells.types)
        assert len(sample.cells.types) == rows.num_owned
        x = torch.zeros(nodes.num_local).index_add(
            0, cells.connectivity, torch.repeat_interleave(values.float(), torch.diff(cells.offsets))
        )
        corners = sample.with_ghosts("u")[cells.connectivity].numpy()
        ids = [rows.to_global(np.arange(rows.num_local)), nodes.to_global(cells.connectivity.numpy())]
        found.append((x[: nodes.num_owned].numpy(), corners, values.numpy(), cells.types.numpy(), *ids))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "bounds", "ghosts"),
    [(2, "even", "disk"), (3, [0, 60, 60, -1], "exchange"), pytest.param(1, "even", None, marks=pytest.mark.slow)],
)
def test_each_rank_has_all_cells_of_its_nodes(stores, num_ranks, bounds, ghosts):
    whole = scidata.open_dataset(stores)
    bounds = bounds if isinstance(bounds, str) else [*bounds[:-1], whole[0].num_nodes]
    ranks = run_ranks(parts, num_ranks, stores, bounds, ghosts)
    for which, sample in enumerate([whole[0], whole[1]]):
        (offsets, nodes, types), q = (x.numpy() for x in sample.cells), sample["q"].numpy()
        sums = np.bincount(nodes, np.repeat(q, np.diff(offsets)), sample.num_nodes)
        np.testing.assert_allclose(np.concatenate([found[which][0] for found in ranks]), sums, rtol=1e-6)
        for _, corners, values, own_types, ids, own_nodes in (found[which] for found in ranks):
            assert np.array_equal(own_nodes, nodes[ranges(offsets[ids], offsets[ids + 1])])
            assert np.array_equal(corners, sample["u"].numpy()[own_nodes])
            assert np.array_equal(values, q[ids])
            assert np.array_equal(own_types, types[ids])
    for found in ranks:  # of a union, a rank's rows of the first sample come before those of the second
        np.testing.assert_allclose(found[2][0], np.concatenate([found[0][0], found[1][0]]), rtol=1e-6)


def test_a_rank_reads_the_blocks_that_touch_its_own(tmp_path):
    """And of a store that does not say which touch, all before it, with the same result."""
    ids = np.arange(150 * 150).reshape(150, 150)
    quads = np.stack([ids[:-1, :-1], ids[1:, :-1], ids[1:, 1:], ids[:-1, 1:]], axis=-1).reshape(-1, 4)
    points = np.stack(np.unravel_index(ids.ravel(), ids.shape), axis=1).astype(float)
    arrays = {"cells/offsets": np.arange(0, quads.size + 1, 4), "cells/types": np.full(len(quads), 9)}
    write_hdf5(tmp_path / "q.h5", {"points": points, "cells/connectivity": quads.ravel(), **arrays})
    scidata.partition(tmp_path / "q.h5", tmp_path / "store", edges="radius:0.1")
    reader = StoreReader(tmp_path / "store", ReadOptions(halo="cells"), num_parts=16)
    info = reader.store.sample(0)
    without = {name: each for name, each in info.arrays.items() if not name.startswith("blocks/touched")}
    read, num_cells = [], []
    for part in range(16):
        owned, found = reader.partition_of(0).owned("node", part), []
        for each in (info, replace(info, arrays=without)):
            access = RowAccess(reader.store, 0)
            rows, cells = _cells_of_others(access, each, *owned)
            found.append((rows, *vars(cells).values()))
            read.append(sum(plan.bytes_wanted for plan in access.plans.get("cell/connectivity", ())))
        assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
        num_cells.append(len(rows))
    some, every = np.array(read[::2]), np.array(read[1::2])
    assert some[0] == every[0] == 0
    assert (every[1:] == 16 * reader.store.read(0, "cell/indptr")[reader.partition_of(0).bounds["node"][1:-1]]).all()
    assert some.sum() < 0.4 * every.sum()
    assert some.max() < 10 * 512 * 16  # blocks beside a part of three
    assert sum(num_cells) > 15 * 30


def polyhedra(path):
    """Write boxes of which two in three are polyhedra, and a value of each; return the cells' nodes."""
    points, cells, types = grid_mesh("solids")
    cells = np.array([cell for cell, kind in zip(cells, types, strict=True) if kind == 12])
    is_solid = np.arange(len(cells)) % 3 == 0
    num, faces = (~is_solid).sum(), np.array(SOLID_FACES[12])
    raw = RawCells(
        offsets=np.append(0, np.cumsum(8 * is_solid)), connectivity=cells[is_solid].ravel(),
        cell_type=np.where(is_solid, 12, 42).astype("u1"),
    )  # fmt: skip
    sides = np.full(6 * num, 4), cells[~is_solid][:, faces].ravel(), np.repeat(np.flatnonzero(~is_solid), 6)
    write_vtk(str(path), "UnstructuredGrid", points, raw, {}, {"q": np.arange(len(cells)) + 0.5}, faces=[sides])
    return cells


def of_cells(rank, num_ranks, path, bounds, ghosts):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    sample = scidata.open_dataset(path, mesh, halo="cells", ghosts=ghosts, bounds=bounds)[0]
    rows, far = sample.index_map("cell"), sample.edge_index
    own, ids = sample.original_id("cell"), sample.index_map("cell").to_global(np.arange(rows.num_local))
    edges = rows.to_global(far.numpy())
    across = sample["across_face"]
    local = getattr(across, "to_local", lambda: across)()
    whole = getattr(own, "full_tensor", lambda: own)().numpy()
    return ids, rows.num_owned, edges, local.numpy(), sample.with_ghosts("q").numpy(), whole


@pytest.mark.parametrize(
    ("kind", "num_ranks", "bounds", "ghosts"),
    [("polyhedra", 3, [0, 70, 70, -1], "exchange"),
     pytest.param("polyhedra", 2, "even", "disk", marks=pytest.mark.slow),
     pytest.param("solids", 2, "even", "disk", marks=pytest.mark.slow),
     pytest.param("polyhedra", 1, "even", None, marks=pytest.mark.slow)],
)  # fmt: skip
def test_each_rank_has_all_cells_that_share_a_node_with_its_own(tmp_path, kind, num_ranks, bounds, ghosts):
    path, corners = tmp_path / "m.vtu", [*polyhedra(tmp_path / "m.vtu")]
    if kind == "solids":
        points, corners, types = grid_mesh(kind)
        path, num = tmp_path / "m.h5", len(corners)
        write_hdf5(path, {
            "points": points, "cells/offsets": np.cumsum([0, *map(len, corners)]), "cells/types": types,
            "cells/connectivity": np.concatenate(corners), "q": np.arange(num) + 0.5,
        })  # fmt: skip
    scidata.partition(path, tmp_path / "store", entity="cell", edges="nodes")
    scidata.partition(path, tmp_path / "faces", entity="cell")
    assert verify(tmp_path / "store") is None
    has = np.zeros((len(corners), 1000), bool)
    for cell, nodes in enumerate(corners):
        has[cell, nodes] = True
    shares = has.astype("f4") @ has.T.astype("f4") > 0
    np.fill_diagonal(shares, False)
    faces = scidata.open_dataset(str(tmp_path / "faces"))[0]
    by_face = np.zeros_like(shares)
    by_face[tuple(faces.original_id("cell").numpy()[faces.edge_index.numpy()])] = True
    assert (by_face <= shares).all()
    assert 0 < by_face.sum() < shares.sum()
    bounds = bounds if isinstance(bounds, str) else [*bounds[:-1], len(corners)]
    found = np.zeros_like(shares)
    for ids, num_owned, edges, across, values, source in run_ranks(
        of_cells, num_ranks, str(tmp_path / "store"), bounds, ghosts
    ):
        assert np.array_equal(values, source[ids] + 0.5)
        own, ghost = source[ids[:num_owned]], source[ids[num_owned:]]
        assert set(ghost) == set(np.flatnonzero(shares[own].any(axis=0))) - set(own)
        src, dst = source[edges]
        assert np.isin(dst, own).all()
        assert not found[dst, src].any()
        found[dst, src] = True
        assert np.array_equal(across, by_face[dst, src])
    assert np.array_equal(found, shares)
    with pytest.raises(ConfigError, match="edges='nodes'"):
        scidata.open_dataset(tmp_path / "faces", scidata.init_mesh(domain=1, device="cpu"), halo="cells")


def test_what_means_nothing(stores, tmp_path):
    mesh = scidata.init_mesh(domain=1, device="cpu")
    with pytest.raises(ConfigError, match="did you mean 'cells'"):
        scidata.open_dataset(stores, mesh, halo="cell")
    write_hdf5(tmp_path / "c.h5", {"points": np.zeros((3, 3))})
    scidata.partition(tmp_path / "c.h5", tmp_path / "c", kind="points")
    with pytest.raises(ConfigError, match="a halo of points is a radius"):
        scidata.open_dataset(tmp_path / "c", mesh, halo="cells")

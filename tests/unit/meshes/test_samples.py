"""Samples of any kind: their names, what is read when, fields put together from several files, wrong arguments."""

import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scidata
import scidata.meshes.formats.base
from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.formats.base import Joined
from scidata.meshes.geometry import RawCells
from scidata.meshes.sample import RawSample, parse_edges
from scidata.meshes.samples import read_samples
from scidata.testing.ranks import fork_server
from tests.writers import write_hdf5

POINTS = np.random.default_rng(0).random((6, 2))
CELLS = [[0, 1, 2], [2, 3, 4], [3, 4, 5]]


def write_mesh(path, **arrays):
    return write_hdf5(path, {"points": POINTS, "cells": CELLS, **arrays})


def test_one_sample_per_file(tmp_path):
    paths = [write_mesh(tmp_path / f"wing_{i}.h5", p=np.arange(6.0) + i) for i in (2, 0, 1)]
    samples = read_samples(str(tmp_path / "wing_*.h5"))
    assert samples.names == ("wing_0", "wing_1", "wing_2")
    assert [s.fields["p"].read()[0] for s in samples] == [0, 1, 2]
    assert samples[-1].name == "wing_2"
    assert samples.names[1:] == ("wing_1", "wing_2")
    assert read_samples(paths).names == ("wing_2", "wing_0", "wing_1")
    with pytest.raises(IndexError):
        samples[3]


def test_names_are_told_apart_by_folders(tmp_path):
    paths = [write_mesh(tmp_path / case / name) for case in ("a", "b") for name in ("x.h5", "y.h5")]
    assert read_samples(paths).names == ("a_x", "a_y", "b_x", "b_y")
    assert read_samples(paths[:2]).names == ("x", "y")
    twice = read_samples([paths[0]] * 2).names
    assert len(set(twice)) == 2
    assert all("/" not in name for name in twice)


def test_metadata_come_first(tmp_path, monkeypatch):
    path = write_mesh(tmp_path / "m.h5", p=np.arange(6.0))
    reads = []
    read_array = scidata.meshes.formats.base.read_array
    monkeypatch.setattr(
        scidata.meshes.formats.base,
        "read_array",
        lambda source, layout, *a, **k: reads.append(layout.name) or read_array(source, layout, *a, **k),
    )
    header = read_samples(path).header(0)
    assert (header.kind, header.topology.sizes, header.edges) == ("mesh", {"node": 6, "cell": 3}, "cells")
    assert (header.fields["p"].dtype, header.fields["p"].shape) == (np.dtype("f8"), (6,))
    assert reads == []
    sample = header.read()
    assert set(reads) == {"points", "cells"}
    sample.fields["p"].read(slice(0, 2))
    assert reads[-1] == "p"


def read_in_worker(samples):
    sample = samples[1]
    return sample.points, sample.cells.connectivity, sample.fields["p"].read(slice(1, 4))


def test_samples_are_read_in_another_process(tmp_path):
    for i in range(2):
        write_mesh(tmp_path / f"m{i}.h5", p=np.arange(6.0) * (i + 1))
    samples = read_samples(str(tmp_path / "*.h5"))
    samples[1].fields["p"].read()  # open here
    with fork_server().Pool(1) as pool:
        points, connectivity, values = pool.apply(read_in_worker, (samples,))
    assert np.array_equal(points, POINTS)
    assert connectivity.tolist() == np.ravel(CELLS).tolist()
    assert values.tolist() == [2, 4, 6]


def test_a_field_reads_ranges_of_rows(tmp_path):
    values = np.random.default_rng(0).random((4, 6, 2))
    path = write_hdf5(
        tmp_path / "m.h5",
        {"points": POINTS, "cells": CELLS, "node/w": values, "flag": [True] * 6},
        {"node/w": ["time"]},
    )
    sample = read_samples(path)[0]
    w = sample.fields["w"]
    assert (w.entity_dim, w.num_rows, w.path) == (1, 6, "node/w")
    for rows in (None, slice(None), slice(0, 0), slice(4, 99), slice(-2, None), slice(1, 6, 3)):
        assert np.array_equal(w.read(rows), values[:, slice(None) if rows is None else rows])
        assert w.read(rows).flags.c_contiguous
    with pytest.raises(ConfigError, match=r"field 'w'.*positive step"):
        w.read(slice(4, 1, -1))
    assert sample.fields["flag"].read().tolist() == [True] * 6


# Fields of one mesh in several files ----------------------------------------------------------------------------


def test_files_continue_in_time(tmp_path):
    mesh = write_mesh(tmp_path / "mesh.h5", area=np.arange(3.0))
    rng = np.random.default_rng(0)
    parts = [rng.random((steps, 6)) for steps in (2, 1, 3)]
    dims = {"p": ["time", "n"]}
    paths = [write_hdf5(tmp_path / f"p{i}.h5", {"p": part}, dims) for i, part in enumerate(parts)]
    other = write_hdf5(tmp_path / "t.h5", {"t": np.arange(3.0)})
    sample = pickle.loads(pickle.dumps(read_samples([*paths, other], mesh=mesh)))[0]
    p, whole = sample.fields["p"], np.concatenate(parts)
    assert (p.entity, p.dims, p.shape, p.entity_dim) == ("node", ("time", "n"), (6, 6), 1)
    assert np.array_equal(p.read(), whole)
    assert np.array_equal(p.read(slice(1, 5, 2)), whole[:, 1:5:2])
    assert np.array_equal(p.read_box((slice(1, 6, 3), slice(2, 3))), whole[1:6:3, 2:3])
    assert {name: f.entity for name, f in sample.fields.items()} == {"area": "cell", "p": "node", "t": "cell"}
    assert sample.name == "p0"


def test_a_length_that_fits_two_entities(tmp_path):
    mesh = write_mesh(tmp_path / "mesh.h5")  # 6 nodes, 3 cells
    path = write_hdf5(tmp_path / "p.h5", {"p": np.zeros((3, 6))}, {"p": ["run", "n"]})
    with pytest.raises(FieldMismatchError, match=r"'p' of shape \(run: 3, n: 6\) fits cells and nodes alike"):
        read_samples(path, mesh=mesh)[0]
    path = write_hdf5(
        tmp_path / "p.h5", {"node/p": np.zeros((3, 6)), "v": np.zeros((6, 3)), "square": np.zeros((6, 6))}
    )
    fields = read_samples(path, mesh=mesh)[0].fields
    assert {n: (f.entity, f.entity_dim) for n, f in fields.items()} == {
        "p": ("node", 1),
        "v": ("node", 0),  # rows first, where dimensions have no names
        "square": ("node", 0),
    }


def test_files_without_time_are_stacked(tmp_path):
    mesh = write_mesh(tmp_path / "mesh.h5")
    parts = [np.arange(12.0).reshape(6, 2) + i for i in range(3)]
    paths = [write_hdf5(tmp_path / f"p{i}.h5", {"p": part}) for i, part in enumerate(parts)]
    p = read_samples(paths, mesh=mesh)[0].fields["p"]
    assert (p.dims[0], p.shape, p.entity_dim) == ("sample", (3, 6, 2), 1)
    assert np.array_equal(p.read(slice(2, 5)), np.stack(parts)[:, 2:5])


def test_files_that_disagree(tmp_path):
    mesh = write_mesh(tmp_path / "mesh.h5")
    one = write_hdf5(tmp_path / "one.h5", {"p": np.zeros(6)})
    for name, values in (("cells", np.zeros(3)), ("dtype", np.zeros(6, "f4")), ("tail", np.zeros((6, 2)))):
        other = write_hdf5(tmp_path / f"{name}.h5", {"p": values})
        with pytest.raises(FieldMismatchError, match=rf"{name}\.h5: field 'p'.*one\.h5 has.*must agree"):
            read_samples([one, other], mesh=mesh)[0]


def test_data_replace_what_the_mesh_has(tmp_path):
    mesh = write_mesh(tmp_path / "mesh.h5", p=np.zeros(6))
    data = write_hdf5(tmp_path / "data.h5", {"p": np.ones(6)})
    assert read_samples(data, mesh=mesh)[0].fields["p"].read().tolist() == [1] * 6
    assert read_samples(mesh, mesh=mesh)[0].fields["p"].read().tolist() == [0] * 6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_parts_read_as_one(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    dim = data.draw(st.integers(0, 1))
    whole = np.arange(float(3 * sum(sizes))).reshape(3, -1) if dim else np.arange(float(3 * sum(sizes))).reshape(-1, 3)
    bounds = tuple(np.cumsum([0, *sizes]).tolist())
    absent = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    parts = []
    for i in range(len(sizes)):
        rows = (slice(None),) * dim + (slice(bounds[i], bounds[i + 1]),)
        if i in absent:
            whole[rows] = np.nan
        parts.append(None if i in absent else whole[rows].copy().__getitem__)
    joined = Joined(parts=tuple(parts), dim=dim, bounds=bounds, shape=whole.shape, dtype=whole.dtype)
    limits = st.one_of(st.none(), st.integers(-1, sum(sizes) + 2))
    box = tuple(slice(data.draw(limits), data.draw(limits), data.draw(st.integers(1, 4))) for _ in range(2))
    assert np.array_equal(joined(box), whole[box], equal_nan=True)


# What is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "meshes"}, r"not 'meshes'; did you mean 'mesh'"),
        ({"edges": "knn"}, "edges='knn'"),
        ({"edges": "knn:2.5"}, "edges='knn:2.5'"),
        ({"edges": "radius:-1"}, "edges='radius:-1'"),
        ({"edges": "radius:nan"}, "edges='radius:nan'"),
        ({"edges": "cells:3"}, "edges='cells:3'"),
        ({"edges": "cells", "kind": "points"}, "those of points are 'knn:8' or 'radius:0.1'"),
        ({"edges": "knn:4", "kind": "mesh"}, "do not go together"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        read_samples(str(tmp_path / "nothing.h5"), **options)


def test_edge_rules():
    assert parse_edges("knn:8") == ("knn", 8)
    assert parse_edges("radius:0.1") == ("radius", 0.1)
    assert parse_edges("edge_index") == ("edge_index", 0)


def test_wrong_files_and_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches"):
        read_samples(str(tmp_path / "*.h5"))
    path = write_mesh(tmp_path / "mesh.h5", p=np.zeros(6), note=np.zeros((4, 4)))
    with pytest.raises(FileNotFoundError, match=r"mash\.h5.*did you mean 'mesh\.h5'"):
        read_samples(path, mesh=str(tmp_path / "mash.h5"))[0]
    with pytest.raises(UnknownNameError, match=r"no field 'pp'; did you mean 'p'"):
        read_samples(path, fields="pp")[0]
    with pytest.raises(FieldMismatchError, match=r"field 'note' has shape .*6 nodes, 3 cells"):
        read_samples(path, fields=["note"])[0]
    assert "note" in read_samples(path)[0].left_out
    with pytest.raises(UnsupportedFormatError, match=r"mesh\.h5: no mesh"):
        read_samples(write_hdf5(tmp_path / "mesh.h5", {"a": np.zeros(3)}))[0]


def test_text_is_left_out_with_its_reason(tmp_path):
    path = write_mesh(tmp_path / "mesh.h5", names=[b"a", b"b"])
    assert "names" in read_samples(path)[0].left_out
    with pytest.raises(UnsupportedFormatError, match="field 'names' is not read"):
        read_samples(path, fields="names")[0]


def test_samples_made_by_hand():
    cells = RawCells(offsets=np.array([0, 3]), connectivity=np.arange(3), cell_type=np.array([5], "u1"))
    sample = RawSample(name="s", kind="mesh", points=POINTS, cells=cells)
    assert sample.sizes == {"node": 6, "cell": 1}
    assert RawSample(name="s", kind="points", points=POINTS).sizes == {"point": 6}
    assert RawSample(name="g", kind="graph", num_nodes=4).num_nodes == 4
    for wrong in (
        {"kind": "graph"},
        {"kind": "mesh", "points": POINTS, "num_nodes": 5},
        {"kind": "grid", "num_nodes": 1},
    ):
        with pytest.raises(ConfigError, match="sample 's'"):
            RawSample(name="s", **wrong)
    for offsets in ([0, 2], [1, 3], [0, 3, 3]):
        with pytest.raises(ConfigError, match="cells need offsets from 0 to 3"):
            RawCells(offsets=np.array(offsets), connectivity=np.arange(3), cell_type=np.array([5], "u1"))
    with pytest.raises(ConfigError, match="must not decrease, but do after cell 1"):
        RawCells(offsets=np.array([0, 4, 3]), connectivity=np.arange(3), cell_type=np.array([5, 5], "u1"))


@pytest.mark.parametrize("suffix", ["nc", "pt", "vtp", "vtu", "ply", "json"])
def test_pointers_of_git_lfs_are_named(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    with pytest.raises(CorruptDataError, match="git lfs pull"):
        read_samples(str(path)).header(0)


def test_files_and_arguments_that_do_not_fit_get_one_hint(tmp_path, capsys):
    pytest.importorskip("meshio", reason="reads the files")
    text = "# vtk DataFile Version 1.0\nt\nASCII\nDATASET POLYDATA\nPOINTS 3 float\n0 0 0 1 0 0 0 1 0\n"
    (tmp_path / "a.vtk").write_text(text + "LINES 1 4\n3 0 1 2\n")
    with pytest.raises(UnsupportedFormatError, match="has 1 lines; read are polygons and triangle strips"):
        read_samples(str(tmp_path / "a.vtk")).header(0)
    assert not capsys.readouterr().out  # which is for data
    corners = "".join(f"vertex {x}\n" for x in ("0 0 0", "1 0 0", "0 1 0"))
    facet = f"facet normal 0 0 1\nouter loop\n{corners}endloop\nendfacet\n"
    (tmp_path / "a.stl").write_text(f"solid a\n{facet}endsolid a\n")
    with pytest.raises(UnsupportedFormatError, match=r"not of kind='graph': leave out kind=; .* edges='knn:2'"):
        read_samples(str(tmp_path / "a.stl"), kind="graph", edges="knn:2").header(0)
    assert read_samples(str(tmp_path / "a.stl"), edges="knn:2").header(0).edges == "knn:2"  # as the hint says
    with pytest.raises(ConfigError, match="path= is an array of shape"):
        scidata.open_dataset(np.zeros((3, 4)))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/u"] = np.zeros((3, 4, 5))
    with pytest.raises(UnsupportedFormatError, match=r"is one array of .*a\.h5; open that, with fields=\['g/u'\]"):
        scidata.open_dataset(str(tmp_path / "a.h5" / "g" / "u"))


# Meshes as points -----------------------------------------------------------------------------------------------


def test_nodes_and_cells_of_meshes_are_points_with_areas_and_normals(tmp_path):
    """Two hexahedra, and a skin of a quad, a triangle and a polygon, each with fields, against figures by hand."""
    z, y, x = np.meshgrid([0.0, 1.0, 3.0], [0.0, 2.0], [0.0, 1.0], indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), z.ravel()], axis=1)
    below = np.array([0, 1, 3, 2])
    solids = np.stack([np.r_[below, below + 4], np.r_[below + 4, below + 8]])
    fields = {"node/t": np.arange(12.0), "cell/q": np.array([7.0, 9.0])}
    arrays = {"cells/offsets": [0, 8, 16], "cells/connectivity": solids.ravel(), "cells/types": [12, 12]}
    write_hdf5(tmp_path / "solid.h5", {"points": points} | arrays | fields)
    about = {"kind": "points", "entity": "cell"}
    scidata.partition(tmp_path / "solid.h5", tmp_path / "solid", **about)
    cells = scidata.open_dataset(tmp_path / "solid")[0]
    order = cells.original_id("point")
    assert cells["volume"][order.argsort()].tolist() == [2.0, 4.0]
    assert cells["q"][order.argsort()].tolist() == [7.0, 9.0]
    assert cells["pos"][order.argsort()].tolist() == [[0.5, 1, 0.5], [0.5, 1, 2]]
    skin = {"points": points[:8], "cells/offsets": [0, 4, 7, 11], "cells/types": [9, 5, 7]}
    skin["cells/connectivity"] = np.array([0, 2, 3, 1, 4, 5, 7, 0, 1, 5, 4])  # looking down, up, and to the front
    write_hdf5(tmp_path / "skin.h5", skin | {"node/t": np.arange(8.0)})
    of_nodes = {"kind": "points", "geometry": True}
    for name, options in (("cells", about), ("nodes", of_nodes), ("mesh", {"geometry": True})):
        scidata.partition(tmp_path / "skin.h5", tmp_path / name, **options)
        found = scidata.open_dataset(tmp_path / name)[0]
        assert float(found["area"].sum()) == 2 + 1 + 1
        normals = found["normal"][found.original_id(found.entity).argsort()]
        if name == "cells":
            assert normals.tolist() == [[0, 0, -1], [0, 0, 1], [0, -1, 0]]
            assert "t" not in found
        else:
            assert normals[2].tolist() == [0, 0, -1]
            assert normals[7].tolist() == [0, 0, 1]
            assert found["t"].tolist() == found.original_id(found.entity).tolist()
    write_hdf5(tmp_path / "bad.h5", skin | {"cells/connectivity": skin["cells/connectivity"] + 2})
    with pytest.raises(CorruptDataError, match="not among the 8"):
        scidata.partition(tmp_path / "bad.h5", tmp_path / "bad", **about)

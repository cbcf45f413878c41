"""The plain layout, point clouds and graphs, written to Zarr, HDF5 and NetCDF."""

import pickle

import numpy as np
import pytest
import zarr

from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    SciDataError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.meshes.samples import read_samples
from tests.writers import write_arrays as write

FORMATS = ["zarr2", "zarr3", "hdf5", "netcdf4", "netcdf3"]
POINTS = np.random.default_rng(0).random((7, 2))
CELLS = [[0, 1, 2], [2, 1, 3, 4], [4, 3, 5, 6, 2]]
OFFSETS, CONNECTIVITY = np.array([0, 3, 7, 12]), np.concatenate(CELLS)


DIMS = {
    "points": ["n", "xy"],
    "cells/types": ["c"],
    "u": ["n", "three"],
    "k": ["c"],
    "node/w": ["time", "n"],
    "cell/w": ["c", "time"],
}


def mesh_arrays(format):
    arrays = {
        "points": POINTS,
        "cells/offsets": OFFSETS,
        "cells/connectivity": CONNECTIVITY,
        "cells/types": np.array([5, 9, 7], "u1"),
        "u": np.arange(21, dtype="f4").reshape(7, 3),
        "k": np.array([3, 1, 2]),
        "node/w": np.arange(14.0).reshape(2, 7),
        "cell/w": np.arange(6.0).reshape(3, 2),
    }
    return {n: a for n, a in arrays.items() if format != "netcdf3" or "/w" not in n}


UNNAMED = [(format, False) for format in FORMATS if not format.startswith("netcdf")]  # whose dims always have names


@pytest.mark.parametrize(("format", "named"), [(format, True) for format in FORMATS] + UNNAMED)
def test_a_mesh_in_every_format(tmp_path, format, named):
    arrays = mesh_arrays(format)
    dims = {n: d for n, d in DIMS.items() if n in arrays} if named else None
    path = write(tmp_path / "m", format, arrays, dims=dims)
    sample = pickle.loads(pickle.dumps(read_samples(path)))[0]
    assert (sample.kind, sample.on_sphere, sample.edges) == ("mesh", False, "cells")
    assert np.array_equal(sample.points, POINTS)
    assert np.array_equal(sample.cells.offsets, OFFSETS)
    assert np.array_equal(sample.cells.connectivity, CONNECTIVITY)
    assert sample.cells.cell_type.tolist() == [5, 9, 7]
    entities = {"u": "node", "k": "cell", "node/w": "node", "cell/w": "cell"}
    assert {n: f.entity for n, f in sample.fields.items()} == {n: e for n, e in entities.items() if n in arrays}
    for name, field in sample.fields.items():
        values = arrays[name]
        assert field.dtype == (np.dtype("i4") if format == "netcdf3" and values.dtype.kind == "i" else values.dtype)
        assert np.array_equal(field.read(), values)
        picked = field.read(slice(1, None, 2))
        assert np.array_equal(picked, np.moveaxis(np.moveaxis(values, field.entity_dim, 0)[1::2], 0, field.entity_dim))


@pytest.mark.parametrize(("start", "fill"), [(0, -1), (1, 0), (1, -1), (0, 99)])
def test_padded_rows(tmp_path, start, fill):
    rows = np.full((3, 6), fill)
    for row, nodes in zip(rows, CELLS, strict=True):
        row[: len(nodes)] = np.array(nodes) + start
    attributes = {"cells": {"start_index": start, "_FillValue": fill}}
    sample = read_samples(write(tmp_path / "m.h5", "hdf5", {"points": POINTS, "cells": rows}, attributes))[0]
    assert np.array_equal(sample.cells.offsets, OFFSETS)
    assert np.array_equal(sample.cells.connectivity, CONNECTIVITY)
    assert sample.cells.cell_type.tolist() == [5, 9, 7]


def test_a_fill_value_that_is_a_node(tmp_path):
    arrays = {"points": POINTS, "cells": [[1, 2, 0], [2, 3, 6]]}
    path = write(tmp_path / "m.h5", "hdf5", arrays, {"cells": {"_FillValue": 6}})
    with pytest.raises(CorruptDataError, match=r"'cells' has the fill value 6, which is also the index of a node"):
        read_samples(path)[0]
    path = write(tmp_path / "m.h5", "hdf5", arrays, {"cells": {"_FillValue": 5}})  # which no cell has
    assert read_samples(path)[0].cells.connectivity.tolist() == [1, 2, 0, 2, 3, 6]


def test_zarr2_fills_with_zero_unless_told_otherwise(tmp_path):
    points = np.arange(14.0).reshape(7, 2)
    group = zarr.open_group(tmp_path / "m.zarr", mode="w", zarr_format=2)
    for name, values, dims in (
        ("points", points, ["n", "xy"]),
        ("cells", np.array([[1, 2, 0], [2, 3, 4]]), ["c", "k"]),
    ):
        array = group.create_array(name, shape=values.shape, dtype=values.dtype)
        array[...] = values
        array.attrs["_ARRAY_DIMENSIONS"] = dims
    sample = read_samples(str(tmp_path / "m.zarr"))[0]
    assert np.array_equal(sample.points, points)  # 0 is a coordinate, and a node
    assert sample.cells.connectivity.tolist() == [1, 2, 0, 2, 3, 4]


def test_volumes_need_a_type(tmp_path):
    arrays = {"points": np.random.default_rng(0).random((8, 3)), "cells": [[0, 1, 2, 3], [4, 5, 6, 7]]}
    path = write(tmp_path / "m.h5", "hdf5", arrays)
    with pytest.raises(ConfigError, match=r"m\.h5: cells of \[4\] nodes.*'cells'.*cell_type"):
        read_samples(path)[0]
    path = write(tmp_path / "m.h5", "hdf5", arrays, {"cells": {"cell_type": "tetra"}})
    assert read_samples(path)[0].cells.cell_type.tolist() == [10, 10]
    path = write(tmp_path / "m.h5", "hdf5", arrays, {"cells": {"cell_type": "tetrahedra"}})
    with pytest.raises(UnknownNameError, match=r"'tetrahedra'.*did you mean 'tetra'"):
        read_samples(path)[0]
    path = write(tmp_path / "m.h5", "hdf5", arrays, {"cells": {"cell_type": "wedge"}})
    with pytest.raises(FieldMismatchError, match="cell 0 has 4 nodes, but a wedge has 6"):
        read_samples(path)[0]
    triangles = {"points": arrays["points"], "cells": [[0, 1, 2], [4, 5, 6]]}
    assert read_samples(write(tmp_path / "m.h5", "hdf5", triangles))[0].cells.cell_type.tolist() == [5, 5]


@pytest.mark.parametrize("units", ["degrees", "radians"])
def test_a_mesh_on_the_sphere(tmp_path, units):
    stored = np.radians(POINTS * 90) if units == "radians" else POINTS * 90
    arrays = {"points": stored, "cells": [[0, 1, 2]]}
    sample = read_samples(write(tmp_path / "m.zarr", "zarr3", arrays, {"points": {"units": units}}))[0]
    assert sample.on_sphere
    assert np.allclose(sample.points, POINTS * 90, rtol=1e-15)


def test_as_many_cells_as_nodes(tmp_path):
    arrays = {"points": POINTS[:3], "cells": [[0, 1, 2]] * 3, "p": np.arange(3.0)}
    with pytest.raises(FieldMismatchError, match=r"'p' of shape \(dim_0: 3\) fits nodes and cells alike.*'node/p'"):
        read_samples(write(tmp_path / "m.h5", "hdf5", arrays))[0]
    assert not read_samples(write(tmp_path / "m.h5", "hdf5", arrays), fields=[])[0].fields
    said = {"points": arrays["points"], "cells": arrays["cells"], "cell/p": np.arange(3.0)}
    assert read_samples(write(tmp_path / "m.h5", "hdf5", said))[0].fields["p"].entity == "cell"
    dims = {"points": ["n", "xy"], "cells": ["c", "k"], "p": ["c"]}
    assert read_samples(write(tmp_path / "m.zarr", "zarr3", arrays, dims=dims))[0].fields["p"].entity == "cell"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cells/offsets": [0, 3, 7, 11]}, CorruptDataError, "'cells/offsets' must rise from 0 to 12.*0 to 11"),
        ({"cells/offsets": [0, 7, 3, 12]}, CorruptDataError, "falls after cell 1"),
        ({"cells/types": np.array([5, 9])}, FieldMismatchError, r"'cells/types' of shape \(2,\).*3 cells"),
        ({"cells/types": np.array([5, 9, 300])}, FieldMismatchError, "'cells/types'"),
        ({"cells/connectivity": CONNECTIVITY + 0.5}, CorruptDataError, "'cells/connectivity'.*no integers"),
        ({"cells/connectivity": None}, UnknownNameError, "no 'cells/connectivity'"),
        ({"points": None}, UnknownNameError, "has cells but no 'points'"),
        ({"points": np.zeros((7, 4))}, UnknownNameError, "has cells but no 'points'"),
        ({"node/w": np.zeros((2, 6))}, FieldMismatchError, r"'node/w' lives on nodes, of which .* has 7.*\(dim_0: 2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, error, message):
    arrays = {n: a for n, a in {**mesh_arrays("hdf5"), **change}.items() if a is not None}
    with pytest.raises(error, match=r"m\.h5.*" + message):
        read_samples(write(tmp_path / "m.h5", "hdf5", arrays))[0]


# Point clouds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_clouds(tmp_path, format):
    rng = np.random.default_rng(0)
    columns = dict(zip("xyz", rng.random((3, 20)), strict=True))
    arrays = {**columns, "p": rng.random(20).astype("f4"), "v": rng.random((20, 3)), "inflow": np.array([1.0, 2.0])}
    dims = {n: ["points", "three"][: np.ndim(a)] for n, a in arrays.items() if n != "inflow"}
    sample = read_samples(write(tmp_path / "c", format, arrays, dims=dims))[0]
    assert (sample.kind, sample.cells, sample.edge_index, sample.edges) == ("points", None, None, None)
    assert np.array_equal(sample.points, np.stack(list(columns.values()), axis=1))
    assert sample.sizes == {"point": 20}
    assert {n: f.entity for n, f in sample.fields.items()} == {"p": "point", "v": "point"}
    assert "(" in sample.left_out["inflow"]
    assert np.array_equal(sample.fields["v"].read(slice(3, 17, 2)), arrays["v"][3:17:2])


def test_clouds_by_name(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"surf": rng.random((9, 3)), "a": rng.random(9), "b": rng.random(9), "q": np.arange(9)}
    path = write(tmp_path / "c.h5", "hdf5", arrays)
    sample = read_samples(path, points="surf")[0]
    assert np.array_equal(sample.points, arrays["surf"])
    assert set(sample.fields) == {"a", "b", "q"}
    sample = read_samples(path, points=["a", "b"])[0]
    assert np.array_equal(sample.points, np.stack([arrays["a"], arrays["b"]], axis=1))
    with pytest.raises(UnknownNameError, match=r"c\.h5: no coordinate 'serf'; did you mean 'surf'"):
        read_samples(path, points="serf")[0]
    with pytest.raises(FieldMismatchError, match=r"'a' \(9,\), 'surf' \(9, 3\)"):
        read_samples(path, points="a,surf")[0]
    with pytest.raises(FieldMismatchError, match=r"no coordinates of points were found among.*points="):
        read_samples(path, kind="points")[0]
    with pytest.raises(UnsupportedFormatError, match=r"no mesh, points or graph was found"):
        read_samples(path)[0]


def test_stations_by_longitude_and_latitude(tmp_path):
    lonlat = np.random.default_rng(0).random((6, 2)) * 90
    arrays = {"lat": lonlat[:, 1], "lon": lonlat[:, 0], "t2m": np.arange(6.0)}
    attributes = {"lat": {"units": "degrees_north"}, "lon": {"units": "degrees_east"}}
    dims = {name: ["station"] for name in arrays}
    sample = read_samples(write(tmp_path / "s.nc", "netcdf4", arrays, attributes, dims))[0]
    assert (sample.kind, sample.on_sphere) == ("points", True)
    assert np.array_equal(sample.points, lonlat)
    assert set(sample.fields) == {"t2m"}


def test_a_graph_made_from_points(tmp_path):
    path = write(tmp_path / "c.h5", "hdf5", {"pos": POINTS, "u": np.arange(7.0)})
    sample = read_samples(path, edges="knn:3")[0]
    assert (sample.kind, sample.edges, sample.edge_index) == ("graph", "knn:3", None)
    assert sample.fields["u"].entity == "node"
    assert read_samples(path, kind="graph", edges="radius:0.2")[0].edges == "radius:0.2"


# Graphs ---------------------------------------------------------------------------------------------------------

PAIRS = np.array([[0, 4, 2, 1, 3, 3], [1, 1, 0, 4, 3, 4]])


@pytest.mark.parametrize("format", ["zarr3", "hdf5", "netcdf4"])
def test_graphs_by_pairs(tmp_path, format):
    arrays = {
        "edge_index": PAIRS,
        "pos": POINTS[:5],
        "x": np.arange(10.0).reshape(5, 2),
        "edge_attr": np.arange(12.0).reshape(6, 2),
        "edge/flux": np.arange(6),
        "node/label": np.arange(5),
    }
    dims = {
        "edge_index": ["two", "e"],
        "pos": ["n", "xy"],
        "x": ["n", "f"],
        "edge_attr": ["e", "f"],
        "edge/flux": ["e"],
        "node/label": ["n"],
    }
    sample = read_samples(write(tmp_path / "g", format, arrays, dims=dims if format == "netcdf4" else None))[0]
    assert (sample.kind, sample.edges) == ("graph", "edge_index")
    assert sample.sizes == {"node": 5, "edge": 6}
    assert np.array_equal(sample.edge_index, PAIRS)
    assert np.array_equal(sample.points, POINTS[:5])
    entities = {"x": "node", "edge_attr": "edge", "flux": "edge", "label": "node"}
    assert {n: f.entity for n, f in sample.fields.items()} == entities
    assert np.array_equal(sample.fields["edge_attr"].read(slice(2, 5)), arrays["edge_attr"][2:5])


@pytest.mark.parametrize("rows", ["destination", "source"])
def test_graphs_by_pointers(tmp_path, rows):
    grouping = PAIRS[1] if rows == "destination" else PAIRS[0]
    order = np.argsort(grouping, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(grouping, minlength=6))])
    others = (PAIRS[0] if rows == "destination" else PAIRS[1])[order]
    arrays = {"indptr": indptr, "indices": others, "edge/w": np.arange(6.0)}
    path = write(tmp_path / "g.h5", "hdf5", arrays, {"indptr": {"rows": rows}})
    sample = read_samples(path)[0]
    assert np.array_equal(sample.edge_index, PAIRS[:, order])
    assert (sample.points, sample.num_nodes) == (None, 6)  # node 5 has no edge
    assert sample.fields["w"].entity == "edge"


def test_the_number_of_nodes(tmp_path):
    path = write(tmp_path / "g.h5", "hdf5", {"edge_index": PAIRS + 1}, {"edge_index": {"start_index": 1}})
    assert read_samples(path)[0].sizes == {"node": 5, "edge": 6}
    assert np.array_equal(read_samples(path)[0].edge_index, PAIRS)
    assert read_samples(write(path, "hdf5", {"edge_index": PAIRS}, root={"num_nodes": 9}))[0].num_nodes == 9
    assert read_samples(write(path, "hdf5", {"edge_index": PAIRS, "node/a": np.zeros(7)}))[0].num_nodes == 7
    empty = {"edge_index": np.zeros((2, 0), int)}
    assert read_samples(write(path, "hdf5", empty, root={"num_nodes": 3}))[0].sizes == {"node": 3, "edge": 0}
    with pytest.raises(FieldMismatchError, match=r"disagrees on the number of nodes.*'pos': 4.*9"):
        read_samples(write(path, "hdf5", {"edge_index": PAIRS, "pos": POINTS[:4]}, root={"num_nodes": 9}))[0]


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"edge_index": PAIRS.T.copy()}, FieldMismatchError, r"\(6, 2\), but \(2, num_edges\).*transpose"),
        ({"edge_index": PAIRS + 0.5}, CorruptDataError, "'edge_index'.*no integers"),
        ({"indptr": [0, 2, 1, 3], "indices": [0, 1, 2]}, CorruptDataError, "'indptr'.*falls after row 1"),
        ({"indptr": [0, 2, 5], "indices": [0, 1, 2]}, CorruptDataError, "'indptr' must rise from 0 to 3.*0 to 5"),
        ({"indptr": [[0, 2]], "indices": [0, 1]}, FieldMismatchError, r"'indptr' has shape \(1, 2\)"),
    ],
)
def test_what_is_wrong_with_a_graph_is_named(tmp_path, arrays, error, message):
    with pytest.raises(error, match=r"g\.h5.*" + message):
        read_samples(write(tmp_path / "g.h5", "hdf5", arrays))[0]


def test_a_graph_without_edges(tmp_path):
    path = write(tmp_path / "g.h5", "hdf5", {"pos": POINTS})
    with pytest.raises(FieldMismatchError, match=r"g\.h5: has no edges.*edges='knn:8'"):
        read_samples(path, kind="graph")[0]
    with pytest.raises(UnknownNameError, match="edges='edge_index', but the file has no edges"):
        read_samples(path, edges="edge_index")[0]


def test_edges_made_in_place_of_those_there(tmp_path):
    path = write(tmp_path / "g.h5", "hdf5", {"edge_index": PAIRS, "pos": POINTS[:5], "edge/w": np.arange(6.0)})
    sample = read_samples(path, edges="radius:0.5")[0]
    assert (sample.kind, sample.edges, sample.edge_index, dict(sample.fields)) == ("graph", "radius:0.5", None, {})
    assert "edges are made (radius:0.5)" in sample.left_out["w"]
    with pytest.raises(UnsupportedFormatError, match="field 'w' is not read: lives on the file's edges"):
        read_samples(path, edges="radius:0.5", fields="w")[0]


def test_a_mesh_with_edges_of_its_own(tmp_path):
    arrays = {"points": POINTS, "cells": [[0, 1, 2]], "edge_index": PAIRS, "edge/w": np.arange(6.0)}
    path = write(tmp_path / "m.h5", "hdf5", arrays)
    sample = read_samples(path)[0]
    assert (sample.kind, sample.edges, sample.edge_index) == ("mesh", "cells", None)
    assert "edges='edge_index'" in sample.left_out["edge/w"]
    sample = read_samples(path, edges="edge_index")[0]
    assert (sample.kind, sample.edges) == ("mesh", "edge_index")
    assert np.array_equal(sample.edge_index, PAIRS)
    assert sample.fields["w"].entity == "edge"
    assert read_samples(path, kind="graph")[0].kind == "graph"


@pytest.mark.parametrize(
    ("array", "attribute", "value"),
    [
        ("cells", "cell_type", [[]]),
        ("cells", "cell_type", {"a": 1}),
        ("cells", "start_index", [[1], [2, 3]]),
        ("cells", "start_index", 2**63),
        ("cells", "start_index", 2**70),
        ("points", "period", [[1.0], [2.0, 3.0]]),
        ("u", "scale_factor", [[1], [2, 3]]),
    ],
    ids=str,
)
def test_odd_attributes_are_named(tmp_path, array, attribute, value):
    group = zarr.open_group(tmp_path / "m.zarr", mode="w")
    arrays = {
        "points": np.random.default_rng(0).random((4, 3)),
        "cells": np.array([[0, 1, 2], [1, 2, 3]]),
        "u": POINT_U,
    }
    for name, values in arrays.items():
        made = group.create_array(name, shape=values.shape, dtype=values.dtype, config={"write_empty_chunks": True})
        made[...] = values
    assert np.array_equal(read_samples(str(tmp_path / "m.zarr"))[0].fields["u"].read(), POINT_U)
    group[array].attrs[attribute] = value
    with pytest.raises(SciDataError, match=r"m\.zarr"):
        read_samples(str(tmp_path / "m.zarr"))[0]


POINT_U = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("shape", [(), (4,), (2**60, 3), (2**45, 3)], ids=str)
def test_arrays_of_another_shape_than_the_layouts(tmp_path, shape):
    group = zarr.open_group(tmp_path / "m.zarr", mode="w")
    group.create_array("points", shape=shape, dtype="f8", chunks=tuple(min(n, 2**20) for n in shape))
    group.create_array("cells", shape=(2, 3), dtype="i8")[...] = [[0, 1, 2], [1, 2, 3]]
    with pytest.raises(SciDataError, match=r"m\.zarr"):
        read_samples(str(tmp_path / "m.zarr"), points="points")[0]

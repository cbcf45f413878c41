"""UGRID meshes: every way the convention allows of writing the same mesh, and real files against netCDF4 and xarray."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    SciDataError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.meshes.formats.arrays import ragged_of_padded
from scidata.meshes.samples import read_samples
from tests.unit.meshes._ugrid import CELLS, FILL, XY, netCDF4, write_mesh

DATA = Path(__file__).parents[3].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real sample files are not beside the repository")


def lists_of(cells):
    return [cells.connectivity[a:b].tolist() for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("start", "fill", "dtype", "say_fill"),
    [
        (0, FILL, "i4", True),
        (1, 0, "i4", True),
        (1, FILL, "i8", True),
        (0, 4294967295, "u4", True),
        (0, 2**64 - 1, "u8", True),
        (0, np.nan, "f8", True),
        (0, -1, "i4", False),
        (1, 0, "i4", False),
    ],
)
def test_one_mesh_written_in_every_way(tmp_path, transposed, start, fill, dtype, say_fill):
    if dtype == "u8":
        rows_fill = fill  # 2**64 - 1 does not fit the int64 rows that the writer builds
        path = write_mesh(tmp_path / "m.nc", start=start, fill=-1, dtype="i8", transposed=transposed)
        with netCDF4.Dataset(path, "a") as nc:
            old = nc["face_nodes"]
            old.set_auto_mask(False)
            new = nc.createVariable("nodes_u8", "u8", old.dimensions, fill_value=np.uint64(rows_fill))
            new.set_auto_mask(False)
            new[...] = old[...].astype(np.uint64)
            new.start_index = 0
            nc["mesh"].face_node_connectivity = "nodes_u8"
    else:
        path = write_mesh(
            tmp_path / "m.nc", start=start, fill=fill, dtype=dtype, transposed=transposed, say_fill=say_fill
        )
    sample = read_samples(path)[0]
    assert (sample.kind, sample.on_sphere, sample.edges, sample.name) == ("mesh", False, "cells", "m")
    assert np.array_equal(sample.points, XY)
    assert lists_of(sample.cells) == CELLS
    assert sample.cells.cell_type.tolist() == [5, 5, 9, 7]
    assert sample.sizes == {"node": 8, "cell": 4}


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_CLASSIC", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("mesh_type", ["S1", "i4"])
def test_a_mesh_variable_of_any_type(tmp_path, format, mesh_type):
    sample = read_samples(write_mesh(tmp_path / "m.nc", format=format, mesh_type=mesh_type))[0]
    assert lists_of(sample.cells) == CELLS
    assert np.array_equal(sample.points, XY)
    assert set(sample.fields) == {"u", "packed"}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=0, max_size=6), max_size=12),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_padded_rows_are_taken_apart(cells, start, extra):
    most = max(map(len, cells), default=0) + extra
    rows = np.full((len(cells), most), -7)
    for row, nodes in zip(rows, cells, strict=True):
        row[: len(nodes)] = np.array(nodes, int) + start
    offsets, connectivity = ragged_of_padded(rows, padding=rows == -7, start_index=start)
    assert [connectivity[a:b].tolist() for a, b in itertools.pairwise(offsets)] == cells


def test_fields_by_location_and_dimension(tmp_path):
    sample = read_samples(write_mesh(tmp_path / "m.nc"))[0]
    assert set(sample.fields) == {"u", "packed"}
    u, packed = sample.fields["u"], sample.fields["packed"]
    assert (u.entity, u.entity_dim, u.dims, u.shape) == ("node", 2, ("time", "lev", "n_node"), (3, 2, 8))
    assert np.array_equal(u.read(slice(2, 7, 2)), np.arange(48, dtype="f4").reshape(3, 2, 8)[..., 2:7:2])
    assert (packed.entity, packed.units, packed.dtype) == ("cell", "K", np.dtype("f8"))
    assert np.array_equal(packed.read(), [np.nan, 10.5, 11, 11.5], equal_nan=True)
    assert np.array_equal(packed.read(slice(1, 2)), [10.5])


def test_a_hole_in_a_cell_is_kept_for_the_checks(tmp_path):
    path = write_mesh(tmp_path / "m.nc", cells=[[0, FILL, 2, 3], [0, 1, 2]])
    assert lists_of(read_samples(path)[0].cells) == [[0, -1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("units", [("degrees_east", "degrees_north"), ("radians", "radians")])
def test_longitude_and_latitude_in_degrees(tmp_path, units):
    lonlat = XY * 30 + 5
    stored = np.radians(lonlat) if units[0] == "radians" else lonlat
    names = ("lat", "lon")  # named in this order: the roles decide
    path = write_mesh(tmp_path / "m.nc", points=stored[:, ::-1], node_names=names, units=units[::-1])
    sample = read_samples(path)[0]
    assert sample.on_sphere
    assert np.allclose(sample.points, lonlat, rtol=1e-15)


def test_coordinates_found_by_units(tmp_path):
    units = ("degrees_east", "degrees_north")
    path = write_mesh(tmp_path / "m.nc", coordinates=False, units=units, mesh_attributes={"face_coordinates": "cx cy"})
    with netCDF4.Dataset(path, "a") as nc:
        for name, unit in zip(("cx", "cy"), units, strict=True):
            nc.createVariable(name, "f8", ("n_face",)).units = unit
    sample = read_samples(path)[0]
    assert sample.on_sphere
    assert np.array_equal(sample.points, XY)
    assert not {"cx", "cy"} & set(sample.fields)
    plain = write_mesh(tmp_path / "plain.nc", coordinates=False)
    with pytest.raises(FieldMismatchError, match=r"plain\.nc.*'mesh'.*node_coordinates.*points="):
        read_samples(plain)[0]
    assert np.array_equal(read_samples(plain, points="node_x,node_y")[0].points, XY)


def test_without_a_mesh_variable(tmp_path):
    path = write_mesh(tmp_path / "m.nc", mesh_attributes={"cf_role": ""}, units=("degrees_east", "degrees_north"))
    with netCDF4.Dataset(path, "a") as nc:
        nc["face_nodes"].cf_role = "face_node_connectivity"
    assert lists_of(read_samples(path)[0].cells) == CELLS


def test_indices_from_one_that_do_not_say_so(tmp_path):
    path = write_mesh(tmp_path / "m.nc", start=1, say_start=False)
    with pytest.raises(CorruptDataError, match=r"m\.nc.*'face_nodes'.*start_index = 1"):
        read_samples(path)[0]


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"face_node_connectivity": "face_node"}, UnknownNameError, r"'face_node'.*did you mean 'face_nodes'"),
        ({"node_coordinates": "node_x nodes_y"}, UnknownNameError, r"'nodes_y'.*did you mean"),
        ({"node_coordinates": "node_x"}, FieldMismatchError, r"node_coordinates \['node_x'\], but 2 or 3"),
        ({"face_dimension": "n_faces"}, FieldMismatchError, r"\('n_face', 'most'\), none of which is 'n_faces'"),
        ({"face_node_connectivity": "time"}, FieldMismatchError, r"'time' has shape \(3,\)"),
        ({"node_coordinates": "node_x packed"}, FieldMismatchError, r"'packed' has shape \(4,\)"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, attributes, error, message):
    path = write_mesh(tmp_path / "m.nc", mesh_attributes=attributes)
    with pytest.raises(error, match=r"m\.nc.*" + message) as caught:
        read_samples(path)[0]
    assert isinstance(caught.value, SciDataError)


def test_connectivity_that_is_no_integer(tmp_path):
    path = write_mesh(tmp_path / "m.nc", dtype="f8", fill=np.nan)
    with netCDF4.Dataset(path, "a") as nc:
        nc["face_nodes"][0, 0] = 0.5
    with pytest.raises(CorruptDataError, match=r"'face_nodes'.*no integers"):
        read_samples(path)[0]


def test_several_meshes(tmp_path):
    path = write_mesh(tmp_path / "m.nc")
    with netCDF4.Dataset(path, "a") as nc:
        other = nc.createVariable("other", "i4")
        other.setncatts({k: nc["mesh"].getncattr(k) for k in nc["mesh"].ncattrs()})
    with pytest.raises(ConfigError, match=r"\['mesh', 'other'\].*topology="):
        read_samples(path)[0]
    assert lists_of(read_samples(path, topology="other")[0].cells) == CELLS
    with pytest.raises(UnknownNameError, match=r"'mash'.*did you mean 'mesh'"):
        read_samples(path, topology="mash")[0]


def write_volumes(path, *, shape_type=True, break_it=False):
    """A tetrahedron, a pyramid, a wedge and a hexahedron; nodes need not make sense."""
    cells = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], list(range(8))]
    if break_it:
        cells[1] = cells[1][:4]
    rows = np.full((4, 8), -1)
    for row, nodes in zip(rows, cells, strict=True):
        row[: len(nodes)] = nodes
    with netCDF4.Dataset(path, "w") as nc:
        for name, size in (("n", 9), ("c", 4), ("most", 8), ("f", 5)):
            nc.createDimension(name, size)
        mesh = nc.createVariable("mesh3d", "i4")
        mesh.setncatts(
            {
                "cf_role": "mesh_topology",
                "topology_dimension": 3,
                "node_coordinates": "x y z",
                "volume_node_connectivity": "nodes",
                "face_dimension": "f",
            }
        )
        nc.createVariable("nodes", "i4", ("c", "most"), fill_value=-1)[...] = rows
        if shape_type:
            mesh.volume_shape_type = "shape"
            shape = nc.createVariable("shape", "i1", ("c",))
            shape.flag_values = np.array([1, 2, 3, 4], "i1")
            shape.flag_meanings = "tetrahedron pyramid wedge hexahedron"
            shape[...] = [1, 2, 3, 4]
        for i, name in enumerate("xyz"):
            nc.createVariable(name, "f8", ("n",))[...] = np.arange(9) * 3 + i
        nc.createVariable("p", "f8", ("c",))[...] = np.arange(4)
        nc.createVariable("q", "f8", ("f",)).location = "face"
    return str(path), cells


@pytest.mark.parametrize("shape_type", [True, False])
def test_volumes(tmp_path, shape_type):
    path, cells = write_volumes(tmp_path / "v.nc", shape_type=shape_type)
    sample = read_samples(path)[0]
    assert lists_of(sample.cells) == cells
    assert sample.cells.cell_type.tolist() == [10, 14, 13, 12]
    assert np.array_equal(sample.points, np.arange(27, dtype=float).reshape(9, 3))
    assert {name: f.entity for name, f in sample.fields.items()} == {"p": "cell"}
    assert "faces" in sample.left_out["q"]


def test_a_volume_that_is_not_its_shape(tmp_path):
    path, _ = write_volumes(tmp_path / "v.nc", break_it=True)
    with pytest.raises(UnsupportedFormatError, match=r"'nodes': volume 1 has 4 nodes"):
        read_samples(path)[0]


def write_network(path, *, mesh=None):
    """Add edges to a mesh, or write a 1-D mesh of them alone."""
    pairs = np.array([[0, 1], [1, 2], [2, 0], [4, 5]])
    path = write_mesh(path) if mesh is None else mesh
    with netCDF4.Dataset(path, "a") as nc:
        nc.createDimension("n_edge", 4)
        nc.createDimension("two", 2)
        nodes = nc.createVariable("edge_nodes", "i4", ("n_edge", "two"))
        nodes[...] = pairs + 1
        nodes.start_index = 1
        nc["mesh"].edge_node_connectivity = "edge_nodes"
        nc["mesh"].edge_dimension = "n_edge"
        flux = nc.createVariable("flux", "f8", ("time", "n_edge"))
        flux[...] = np.arange(12).reshape(3, 4)
    return path, pairs


def test_edges_of_the_file_when_asked_for(tmp_path):
    path, pairs = write_network(tmp_path / "m.nc")
    without = read_samples(path)[0]
    assert without.edge_index is None
    assert np.array_equal(without.mesh_edges, pairs.T)
    assert (without.edges, without.fields["flux"].entity) == ("cells", "edge")
    sample = read_samples(path, edges="edge_index")[0]
    assert np.array_equal(sample.edge_index, pairs.T)
    assert (sample.edges, sample.kind, sample.sizes["edge"]) == ("edge_index", "mesh", 4)
    assert np.array_equal(sample.fields["flux"].read(slice(1, 3)), np.arange(12).reshape(3, 4)[:, 1:3])
    with pytest.raises(UnknownNameError, match="edge_node_connectivity"):
        read_samples(write_mesh(tmp_path / "none.nc"), edges="edge_index")[0]


def test_a_network_is_a_graph(tmp_path):
    path, pairs = write_network(tmp_path / "m.nc")
    with netCDF4.Dataset(path, "a") as nc:
        nc["mesh"].topology_dimension = 1
    sample = read_samples(path)[0]
    assert (sample.kind, sample.edges, sample.cells) == ("graph", "edge_index", None)
    assert np.array_equal(sample.edge_index, pairs.T)
    assert sample.fields["flux"].entity == "edge"


# Real files -----------------------------------------------------------------------------------------------------


def netcdf(name, variable):
    with netCDF4.Dataset(DATA / name) as nc:
        nc.set_auto_maskandscale(False)
        return nc[variable][...]


@needs_data
def test_cubed_sphere_and_its_data_in_another_file():
    sample = read_samples(str(DATA / "outCSne30_vortex.nc"), mesh=str(DATA / "outCSne30.ug"))[0]
    assert sample.name == "outCSne30_vortex"
    assert (sample.on_sphere, sample.sizes) == (True, {"node": 5402, "cell": 5400})
    mesh = "outCSne30.ug"
    expected = np.stack([netcdf(mesh, "Mesh2_node_x"), netcdf(mesh, "Mesh2_node_y")], axis=1)
    assert np.array_equal(sample.points, expected)
    assert np.array_equal(sample.cells.connectivity.reshape(-1, 4), netcdf(mesh, "Mesh2_face_nodes"))
    assert set(sample.cells.cell_type.tolist()) == {9}
    psi = sample.fields["psi"]
    assert (psi.entity, psi.dims) == ("cell", ("ncol",))
    expected = netcdf("outCSne30_vortex.nc", "psi")
    assert np.array_equal(psi.read(slice(100, 3000, 7)), expected[100:3000:7])
    assert np.array_equal(psi.read(), expected)


@needs_data
def test_a_series_over_one_mesh():
    pytest.importorskip("xarray", reason="the oracle")
    import xarray as xr

    sample = read_samples(str(DATA / "outCSne30_sel_timeseries.nc"), mesh=str(DATA / "outCSne30.ug"))[0]
    psi = sample.fields["psi"]
    assert (psi.dims, psi.shape, psi.entity_dim) == (("time", "ncol"), (6, 5400), 1)
    with xr.open_dataset(DATA / "outCSne30_sel_timeseries.nc") as ds:
        assert np.array_equal(psi.read(slice(17, 170)), ds["psi"].values[:, 17:170])
    twice = read_samples([str(DATA / "outCSne30_sel_timeseries.nc")] * 2, mesh=str(DATA / "outCSne30.ug"))[0]
    both = twice.fields["psi"]
    assert both.shape == (12, 5400)
    assert np.array_equal(both.read(slice(5, 9)), np.concatenate([psi.read(slice(5, 9))] * 2))


@needs_data
def test_geoflow_layers_on_nodes_that_repeat():
    sample = read_samples(str(DATA / "geoflow_v1.nc"), mesh=str(DATA / "geoflow_grid.nc"))[0]
    assert sample.sizes == {"node": 6000, "cell": 3840}
    assert len(np.unique(sample.points, axis=0)) < 6000
    v1 = sample.fields["v1"]
    assert (v1.entity, v1.dims, v1.shape) == ("node", ("time", "meshLayers", "nMeshNodes"), (1, 20, 6000))
    assert np.array_equal(v1.read(slice(5000, 6000)), netcdf("geoflow_v1.nc", "v1")[..., 5000:])
    assert np.array_equal(sample.fields["mesh_depth"].read(), netcdf("geoflow_grid.nc", "mesh_depth"))
    assert np.array_equal(sample.cells.connectivity.reshape(-1, 4), netcdf("geoflow_grid.nc", "mesh_face_nodes"))


@needs_data
def test_hexagons_with_face_coordinates():
    sample = read_samples(str(DATA / "quad_hexagon_data.nc"), mesh=str(DATA / "quad_hexagon_grid.nc"))[0]
    assert set(sample.fields) == {"t2m"}
    assert (sample.fields["t2m"].entity, sample.fields["t2m"].units) == ("cell", "K")
    assert np.array_equal(sample.fields["t2m"].read(), netcdf("quad_hexagon_data.nc", "t2m"))
    rows = netcdf("quad_hexagon_grid.nc", "face_node_connectivity")
    assert lists_of(sample.cells) == [[n for n in row if n >= 0] for row in rows.tolist()]
    assert sample.cells.cell_type.tolist() == [7] * 4


@needs_data
def test_data_of_another_mesh():
    with pytest.raises(FieldMismatchError, match=r"geoflow_v1\.nc.*'v1'.*5402.*6000"):
        read_samples(str(DATA / "geoflow_v1.nc"), mesh=str(DATA / "outCSne30.ug"))[0]
    with pytest.raises(FieldMismatchError, match=r"vortex\.nc: has no field.*psi has shape"):
        read_samples(str(DATA / "outCSne30_vortex.nc"), mesh=str(DATA / "geoflow_grid.nc"))[0]
    with pytest.raises(UnsupportedFormatError, match=r"vortex\.nc.*mesh="):
        read_samples(str(DATA / "outCSne30_vortex.nc"))[0]


def write_two_meshes(path, *, shared_dims=False):
    """Two squares of two triangles each, ``mesh_a`` and ``mesh_b``, of equal sizes and with fields of both."""
    with netCDF4.Dataset(path, "w") as nc:
        nc.createDimension("three", 3)
        for i, which in enumerate("ab"):
            node, face = ("node", "face") if shared_dims else (f"node_{which}", f"face_{which}")
            for dim, size in ((node, 4), (face, 2)):
                if dim not in nc.dimensions:
                    nc.createDimension(dim, size)
            nc.createVariable(f"mesh_{which}", "i4").setncatts(
                {
                    "cf_role": "mesh_topology",
                    "topology_dimension": np.int32(2),
                    "node_coordinates": f"x_{which} y_{which}",
                    "face_node_connectivity": f"nodes_{which}",
                }
            )
            for axis, values in (("x", [0, 1, 0, 1]), ("y", [0, 0, 1, 1])):
                nc.createVariable(f"{axis}_{which}", "f8", (node,))[:] = np.array(values) + 100 * i
            nodes = nc.createVariable(f"nodes_{which}", "i4", (face, "three"))
            nodes.start_index = np.int32(0)
            nodes[:] = [[0, 1, 2], [1, 3, 2]]
            for name, location, said in (("u", "node", True), ("c", "face", True), ("v", "node", False)):
                if said or not shared_dims:
                    dim = node if location == "node" else face
                    field = nc.createVariable(f"{name}_{which}", "f8", (dim,))
                    field.setncatts({"location": location} | ({"mesh": f"mesh_{which}"} if said else {}))
                    field[:] = np.arange(len(nc.dimensions[dim])) + 100 * i
        part = nc.createVariable("part", "f8", ("node" if shared_dims else "node_a",))
        part.location_index_set = "some"


@pytest.mark.parametrize("shared_dims", [False, True])
def test_a_fields_mesh_decides_where_two_meshes_have_equal_sizes(tmp_path, shared_dims):
    path = str(tmp_path / "two.nc")
    write_two_meshes(path, shared_dims=shared_dims)
    for which, other in ("ab", "ba"):
        sample = read_samples(path, topology=f"mesh_{which}")[0]
        assert set(sample.fields) == {f"u_{which}", f"c_{which}"} | (set() if shared_dims else {f"v_{which}"})
        assert sample.fields[f"u_{which}"].read()[0] == (0 if which == "a" else 100)
        assert f"mesh_{other}" in sample.left_out[f"u_{other}"]
        assert "part of a mesh" in sample.left_out["part"]
        with pytest.raises(FieldMismatchError, match=f"lives on mesh 'mesh_{other}'; topology='mesh_{other}' takes it"):
            read_samples(path, topology=f"mesh_{which}", fields=[f"u_{other}"]).header(0)

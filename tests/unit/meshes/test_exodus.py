"""Exodus II, as the library writes it: NetCDF-3 and NetCDF-4, blocks of several types, variables by name."""

import pickle
import zlib

import h5py
import numpy as np
import pytest

from scidata.errors import CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.samples import read_samples
from tests.unit.meshes._exodus import HEX, POINTS, TETS, netCDF4, write


@pytest.mark.parametrize("format", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA", "NETCDF4"])
@pytest.mark.parametrize("old", [False, True])
def test_blocks_and_variables(tmp_path, format, old):
    path, nodal, element = write(tmp_path / "m.exo", format, joint_coordinates=old, old_variables=old)
    sample = pickle.loads(pickle.dumps(read_samples(path)))[0]
    assert (sample.kind, sample.sizes, sample.edges) == ("mesh", {"node": 9, "cell": 4}, "cells")
    assert np.array_equal(sample.points, POINTS)
    assert sample.cells.offsets.tolist() == [0, 8, 12, 16, 20]
    assert sample.cells.connectivity.tolist() == [n - 1 for row in [*HEX, *TETS] for n in row]
    assert sample.cells.cell_type.tolist() == [12, 10, 10, 10]
    assert {n: (f.entity, f.path) for n, f in sample.fields.items()} == {
        "pressure": ("node", "node/pressure"),
        "node/T": ("node", "node/T"),
        "stress": ("cell", "cell/stress"),
        "cell/T": ("cell", "cell/T"),
    }
    pressure, stress = sample.fields["pressure"], sample.fields["stress"]
    assert (pressure.dims, pressure.shape, pressure.entity_dim) == (("time_step", "node"), (3, 9), 1)
    assert np.array_equal(pressure.read(slice(2, 8, 3)), nodal[0][:, 2:8:3])
    assert np.array_equal(sample.fields["node/T"].read(), nodal[1])
    for rows in (slice(None), slice(0, 1), slice(0, 3), slice(1, 4, 2), slice(2, 2)):
        assert np.array_equal(stress.read(rows), element[0][:, rows], equal_nan=True)
        assert np.array_equal(sample.fields["cell/T"].read(rows), element[1][:, rows])
    assert np.array_equal(stress.read_box((slice(1, 2), slice(None))), element[0][1:2], equal_nan=True)


def test_chosen_fields(tmp_path):
    path, _, _ = write(tmp_path / "m.exo", "NETCDF4")
    assert set(read_samples(path, fields="T")[0].fields) == {"node/T", "cell/T"}
    assert set(read_samples(path, fields=["cell/T", "pressure"])[0].fields) == {"cell/T", "pressure"}
    with pytest.raises(UnknownNameError, match="no field 'presure'; did you mean 'pressure'"):
        read_samples(path, fields=["presure"])[0]


def test_names_in_another_file_are_not_followed(tmp_path):
    path, _, _ = write(tmp_path / "m.exo", "NETCDF4")
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["names"] = np.array([list("secret"), list("secre2")], "S1")
    with h5py.File(path, "a") as f:
        del f["name_nod_var"]
        f["name_nod_var"] = h5py.ExternalLink("other.h5", "/names")
    assert {"nod_var1", "nod_var2"} <= set(read_samples(path)[0].fields)


def test_names_that_are_no_text(tmp_path):
    path, _, _ = write(tmp_path / "m.exo", "NETCDF4")
    with h5py.File(path, "a") as f:
        del f["name_nod_var"]
        f["name_nod_var"] = np.arange(4)
    with pytest.raises(CorruptDataError, match=r"m\.exo: field 'name_nod_var' has shape \(4,\)"):
        read_samples(path)[0]


@pytest.mark.skipif(h5py.version.hdf5_version_tuple < (2,), reason="HDF5 before 2.0 does not write such a chunk")
def test_names_that_would_fill_the_memory(tmp_path):
    """A chunk of deflate may hold a thousand times its bytes, and HDF5 decodes all of them for 33 characters."""
    path, _, _ = write(tmp_path / "m.exo", "NETCDF4")
    with h5py.File(path, "a") as f:
        shape = f["name_nod_var"].shape
        del f["name_nod_var"]
        names = f.create_dataset("name_nod_var", shape, "S1", chunks=shape, compression="gzip")
        names.id.write_direct_chunk((0, 0), zlib.compress(bytes(1 << 28)))
    with pytest.raises(CorruptDataError, match=r"m\.exo: field 'name_nod_var': its 1 chunks of .* take more bytes"):
        read_samples(path)[0]


def corners_and_middles(code):
    """Nodes of the reference cell in VTK's order: corners, then the middles of edges, faces and body it documents."""
    if code in (25, 29):
        corners = np.array(
            [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]], float
        )
        edges = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7)]
    else:
        corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1]], float)
        edges = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5)]
    nodes = [*corners, *(corners[[a, b]].mean(axis=0) for a, b in edges)]
    if code == 29:  # x = 0, x = 1, y = 0, y = 1, z = 0, z = 1, centre
        nodes += [[0, 0.5, 0.5], [1, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 0], [0.5, 0.5, 1], [0.5] * 3]
    return np.array(nodes)


def exodus_nodes(code):
    """The same in the order of the Exodus manual: bottom, upright and top edges; centre, bottom, top, left, …"""
    corners = corners_and_middles(code)[: 8 if code != 26 else 6]
    if code == 26:
        edges = [(0, 1), (1, 2), (2, 0), (0, 3), (1, 4), (2, 5), (3, 4), (4, 5), (5, 3)]
    else:
        edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 5), (2, 6), (3, 7), (4, 5), (5, 6), (6, 7), (7, 4)]
    nodes = [*corners, *(corners[[a, b]].mean(axis=0) for a, b in edges)]
    if code == 29:
        nodes += [[0.5] * 3, [0.5, 0.5, 0], [0.5, 0.5, 1], [0, 0.5, 0.5], [1, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 1, 0.5]]
    return np.array(nodes)


@pytest.mark.parametrize(("kind", "code"), [("HEX20", 25), ("HEX27", 29), ("WEDGE15", 26)])
def test_quadratic_cells_in_the_order_of_vtk(tmp_path, kind, code):
    nodes = exodus_nodes(code)
    with netCDF4.Dataset(tmp_path / "q.exo", "w") as nc:
        nc.createDimension("num_nodes", len(nodes))
        nc.createDimension("one", 1)
        for c, column in zip("xyz", nodes.T, strict=True):
            nc.createVariable(f"coord{c}", "f8", ("num_nodes",))[...] = column
        connect = nc.createVariable("connect1", "i4", ("one", "num_nodes"))
        connect.elem_type = kind
        connect[...] = np.arange(1, len(nodes) + 1)
    sample = read_samples(str(tmp_path / "q.exo"))[0]
    assert sample.cells.cell_type.tolist() == [code]
    assert np.array_equal(sample.points[sample.cells.connectivity], corners_and_middles(code))


def write_polygons(path, counts=(3, 4), with_counts=True):
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as nc:
        for name, size in (("num_nodes", 9), ("num_el_in_blk1", 2), ("num_nod_per_el1", 7)):
            nc.createDimension(name, size)
        for c, column in zip("xy", POINTS.T[:2], strict=True):
            nc.createVariable(f"coord{c}", "f8", ("num_nodes",))[...] = column
        connect = nc.createVariable("connect1", "i4", ("num_nod_per_el1",))
        connect.elem_type = "NSIDED"
        connect[...] = [1, 2, 3, 4, 5, 6, 7]
        if with_counts:
            nc.createVariable("ebepecnt1", "i4", ("num_el_in_blk1",))[...] = counts
    return str(path)


def test_polygons(tmp_path):
    sample = read_samples(write_polygons(tmp_path / "p.exo"))[0]
    assert sample.points.shape == (9, 2)
    assert sample.cells.offsets.tolist() == [0, 3, 7]
    assert sample.cells.cell_type.tolist() == [5, 9]
    with pytest.raises(FieldMismatchError, match=r"'connect1' has 7 nodes, but 'ebepecnt1' counts 8"):
        read_samples(write_polygons(tmp_path / "p.exo", counts=(4, 4)))[0]
    with pytest.raises(UnknownNameError, match="no 'ebepecnt1'"):
        read_samples(write_polygons(tmp_path / "p.exo", with_counts=False))[0]


def test_an_element_that_is_not_read(tmp_path):
    path, _, _ = write(tmp_path / "m.exo", "NETCDF4", blocks=(("HEX8", HEX), ("NFACED", TETS)))
    with pytest.raises(UnsupportedFormatError, match=r"m\.exo.*'connect2'.*'NFACED'"):
        read_samples(path)[0]

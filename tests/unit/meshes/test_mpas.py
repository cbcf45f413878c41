"""MPAS meshes: the real file against netCDF4, and small ones written here."""

from pathlib import Path

import numpy as np
import pytest

from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.meshes.samples import read_samples
from tests.writers import write_mpas as write_plane

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816

DATA = Path(__file__).parents[3].parent / "shared" / "data"
FILE = DATA / "mesh.QU.1920km.151026.nc"
needs_data = pytest.mark.skipif(not FILE.is_file(), reason="the real sample files are not beside the repository")


def test_a_plane_that_wraps(tmp_path):
    sample = read_samples(write_plane(tmp_path / "m.nc"))[0]
    assert (sample.kind, sample.on_sphere, sample.period) == ("mesh", False, (4.0, 0.0))
    assert np.array_equal(sample.points, [[0, 0], [1, 0], [1, 1], [0, 1], [-1, 1]])
    assert sample.cells.offsets.tolist() == [0, 3, 7]
    assert sample.cells.connectivity.tolist() == [0, 1, 2, 0, 2, 3, 4]
    assert sample.cells.cell_type.tolist() == [5, 9]
    thickness = sample.fields["thickness"]
    assert (thickness.entity, thickness.dims, thickness.entity_dim) == ("cell", ("Time", "nCells"), 1)
    assert np.array_equal(thickness.read(slice(1, 2)), [[2], [4], [6]])
    with_edges = read_samples(write_plane(tmp_path / "m.nc"), edges="edge_index")[0]
    assert with_edges.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(FieldMismatchError, match=r"m\.nc.*'nEdgesOnCell'.*cannot hold"):
        read_samples(write_plane(tmp_path / "m.nc", sizes=(3, 5)))[0]
    with pytest.raises(UnknownNameError, match=r"on a sphere has an array 'lonVertex'"):
        read_samples(write_plane(tmp_path / "m.nc", attributes={"on_a_sphere": "YES"}))[0]
    with pytest.raises(UnknownNameError, match="'verticesOnEdge'"):
        read_samples(write_plane(tmp_path / "m.nc", leave_out=("verticesOnEdge",)), edges="edge_index")[0]
    with pytest.raises(ConfigError, match=r"points= has no meaning.*kind='points'"):
        read_samples(write_plane(tmp_path / "m.nc"), points="xVertex,yVertex")[0]


@needs_data
def test_the_real_mesh():
    with netCDF4.Dataset(FILE) as nc:
        nc.set_auto_maskandscale(False)
        arrays = {name: nc[name][...] for name in nc.variables}
    sample = read_samples(str(FILE))[0]
    assert sample.sizes == {"node": 320, "cell": 162, "edge": 480}
    assert sample.on_sphere
    expected = np.degrees(np.stack([arrays["lonVertex"], arrays["latVertex"]], axis=1))
    assert np.array_equal(sample.points, expected)
    offsets = sample.cells.offsets
    assert np.array_equal(np.diff(offsets), arrays["nEdgesOnCell"])
    for row in range(162):
        nodes = sample.cells.connectivity[offsets[row] : offsets[row + 1]]
        assert np.array_equal(nodes + 1, arrays["verticesOnCell"][row, : len(nodes)])
    # each vertex lies on three cells of a closed sphere
    assert np.array_equal(np.bincount(sample.cells.connectivity), np.full(320, 3))
    assert "latCell" not in sample.fields
    assert (sample.fields["dcEdge"].entity, sample.mesh_edges.shape) == ("edge", (2, 480))
    assert sample.fields["areaCell"].entity == "cell"
    kite = sample.fields["kiteAreasOnVertex"]
    assert (kite.entity, kite.dtype) == ("node", np.dtype("f8"))
    assert np.array_equal(kite.read(slice(3, 200, 5)), arrays["kiteAreasOnVertex"][3:200:5])
    assert np.isclose(sample.fields["areaCell"].read().sum(), 4 * np.pi, rtol=1e-3)


@needs_data
def test_edges_and_clouds_of_the_real_mesh():
    with netCDF4.Dataset(FILE) as nc:
        pairs, angle = nc["verticesOnEdge"][...].data, nc["angleEdge"][...].data
        centres = np.stack([nc[f"{c}Cell"][...].data for c in "xyz"], axis=1)
    sample = read_samples(str(FILE), edges="edge_index")[0]
    assert np.array_equal(sample.edge_index, pairs.T - 1)
    assert np.array_equal(sample.fields["angleEdge"].read(), angle)
    cloud = read_samples(str(FILE), kind="points", points=["xCell", "yCell", "zCell"], fields=["areaCell"])[0]
    assert (cloud.kind, cloud.cells, cloud.edges) == ("points", None, None)
    assert np.array_equal(cloud.points, centres)
    assert list(cloud.fields) == ["areaCell"]
    assert cloud.fields["areaCell"].entity == "point"

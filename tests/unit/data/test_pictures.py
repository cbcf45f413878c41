"""Pictures show the values that there are, where they are, and who has them."""

import sys

import h5py
import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.data.pictures.canvas import LEGEND_RANKS, amplification_text, colours_of, rank_groups
from scidata.data.pictures.drawing import places_of
from scidata.data.pictures.grid_field import draw_grid, map_axes
from scidata.data.pictures.mesh_field import draw_mesh
from scidata.errors import ConfigError, MissingDependencyError, UnknownNameError
from scidata.grids.reader import GridReader
from scidata.store.reading.reader import StoreReader
from scidata.testing import make_grid

pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    make_grid(path / "era5.zarr", num_lat=24, num_lon=48, chunks=(1, 3, 7, 24))
    rng = np.random.default_rng(0)
    side = np.stack(np.meshgrid(np.arange(9.0), np.arange(9.0), indexing="ij"), axis=-1).reshape(-1, 2)
    quads = (np.arange(8)[:, None] * 9 + np.arange(8)).ravel()[:, None] + np.array([0, 9, 10, 1])
    with h5py.File(path / "flat.h5", "w") as file:
        file["points"], file["cells"] = side, quads
        file["u"], file["p"] = side[:, 0] + 10 * side[:, 1], quads[:, 0].astype(float)
        file["u"].attrs["units"] = "m/s"
    from scipy.spatial import Delaunay

    solid = rng.random((300, 3))
    with h5py.File(path / "solid.h5", "w") as file:
        file["points"], file["u"] = solid, solid[:, 0]
        file["cells"] = Delaunay(solid).simplices.astype(np.int64)
        file["cells"].attrs["cell_type"] = "tetra"
    with h5py.File(path / "cloud.h5", "w") as file:
        file["points"], file["p"] = rng.random((200, 2)), rng.random((200, 3))
    for name in ("flat", "solid", "cloud"):
        scidata.partition(path / f"{name}.h5", path / f"{name}.store", repair=("all",))
    return path


def test_colours_of_many_ranks_differ_between_neighbours():
    for count in (2, LEGEND_RANKS, 17, 64, 300):
        colours = np.array([colour[:3] for colour in colours_of(count)])
        assert colours.shape == (count, 3)
        assert (np.abs(np.diff(colours, axis=0)).max(axis=1) > 0.12).all()
        groups = rank_groups(count)
        assert [rank for group in groups for rank in group] == [*range(count)]
        assert len(groups) == (count if count <= LEGEND_RANKS else 8)


def test_amplification_is_said():
    assert "all 1.50\nmost 2.00, rank 1" in amplification_text([1.0, 2.0, None], 1.5)
    assert amplification_text([None], None) is None


def drawn(figure):
    """Return the values of the picture's mesh, and the positions of its lines."""
    axes = figure.axes[0]
    mesh = next(each for each in axes.collections if type(each).__name__.endswith("QuadMesh"))
    return np.asarray(mesh.get_array()), axes


@pytest.mark.parametrize("halo", [0, {"latitude": 3}])
def test_a_grid_is_drawn_whole_with_its_bounds(folder, halo):
    reader = GridReader(
        folder / "era5.zarr", ReadOptions(shard={"latitude": "domain"}, halo=halo), axis_sizes={"domain": 5}
    )
    figure = draw_grid(reader, 2, "u", {"level": -1}, parts=True, path=None)
    values, axes = drawn(figure)
    whole = scidata.open_dataset(folder / "era5.zarr", fields=["u"])[2]["u"][-1].numpy()
    np.testing.assert_array_equal(values, whole)
    latitude = reader.coordinate("latitude")
    lines = sorted(float(line.get_ydata()[0]) for line in axes.lines)
    bounds = reader.partition.bounds["latitude"][1:-1]
    np.testing.assert_allclose(lines, sorted((latitude[bounds] + latitude[bounds - 1]) / 2))
    assert {text.get_text() for text in axes.texts} == set("01234")
    assert "level -1" in axes.get_title(loc="left")


def test_a_grid_on_two_axes_and_many_ranks(folder):
    shard = {"latitude": "h", "longitude": "w"}
    reader = GridReader(
        folder / "era5.zarr", ReadOptions(shard=shard, periodic="longitude", halo=1), axis_sizes={"h": 4, "w": 8}
    )
    values, axes = drawn(draw_grid(reader, 0, "t", None, parts=True, path=None))
    assert (len(axes.lines), len(axes.texts)) == (3 + 7, 32)
    assert values.shape == (24, 48)
    stripes = GridReader(folder / "era5.zarr", ReadOptions(shard={"latitude": "domain"}), axis_sizes={"domain": 24})
    _, axes = drawn(draw_grid(stripes, 0, "t", None, parts=True, path=None))
    assert len(axes.lines) == 23
    assert 8 <= len(axes.texts) <= LEGEND_RANKS
    _, axes = drawn(draw_grid(stripes, 0, "t", None, parts=False, path=None))
    assert not axes.lines


def test_plot_of_a_grid(folder, tmp_path):
    ds = scidata.open_dataset(folder / "era5.zarr")
    figure = ds.plot(1, "u", isel={"level": 1}, path=str(tmp_path / "u.png"))
    assert (tmp_path / "u.png").read_bytes()[:4] == b"\x89PNG"
    assert figure._repr_png_()[:4] == b"\x89PNG"
    for call, error, says in (
        (lambda: ds.plot(99), IndexError, "sample 99 is out of range: there are 4"),
        (lambda: ds.plot(0, "uu"), UnknownNameError, "did you mean 'u'"),
        (lambda: ds.plot(0, isel={"levl": 0}), UnknownNameError, "did you mean 'level'"),
        (lambda: ds.plot(0, isel={"level": 9}), ConfigError, "9 is no row of 3"),
        (lambda: ds.plot(0, isel={"level": 0, "latitude": 0, "longitude": 0}), ConfigError, "no dimension of several"),
        (lambda: ds.plot(0, feild="u"), TypeError, "did you mean 'field'"),
    ):
        with pytest.raises(error, match=says):
            call()


def test_without_matplotlib(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pictures need matplotlib; pip install 'matplotlib>="):
        scidata.open_dataset(folder / "era5.zarr").plot()


@pytest.mark.parametrize("name", ["u", "p"])
def test_a_mesh_has_its_values_and_parts(folder, name, tmp_path):
    reader = StoreReader(str(folder / "flat.store"), num_parts=3)
    figure = draw_mesh(reader, 0, name, parts=True, path=str(tmp_path / "flat.png"))
    field, _bar, ranks = sorted(figure.axes, key=lambda axes: ("ranks" in axes.get_title(loc="left"), axes.get_label()))
    (filled,) = field.collections
    corners = np.array([path.vertices[:4] for path in filled.get_paths()])
    lowest = corners.min(axis=1)
    # u is x + 10 y, of which a cell shows the mean; p is the number of its lowest corner
    expected = (lowest + 0.5) @ [1, 10] if name == "u" else lowest @ [9, 1]
    colours = filled.get_facecolors()
    order = np.argsort(expected, kind="stable")
    from matplotlib import colormaps, rcParams

    shares = (expected - expected.min()) / np.ptp(expected)
    np.testing.assert_allclose(colours[order], colormaps[rcParams["image.cmap"]](shares[order]), atol=0.02)
    assert len({tuple(colour) for colour in ranks.collections[0].get_facecolors()}) == 3
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("store", ["solid", "cloud"])
def test_plot_of_solids_and_clouds(folder, store, tmp_path):
    ds = scidata.open_dataset(folder / f"{store}.store")
    ds.plot(path=str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000
    draw_mesh(StoreReader(str(folder / f"{store}.store"), num_parts=40), 0, None, parts=True, path=None)
    with pytest.raises(UnknownNameError, match="no field 'x'"):
        ds.plot(0, "x")
    with pytest.raises(IndexError):
        ds.plot(1)
    ds.close()


def test_raw_points_need_their_positions(folder):
    ds = scidata.open_dataset(folder / "cloud.h5", kind="points")
    assert ds.plot(0, "p").axes[0].collections[0].get_offsets().shape == (200, 2)
    drawn_anew = scidata.open_dataset(folder / "cloud.h5", kind="points", subsample={"point": 50})
    with pytest.raises(ConfigError, match="without subsample"):
        drawn_anew.plot()
    with pytest.raises(ConfigError, match="positions"):
        scidata.open_dataset(folder / "cloud.h5", kind="points", fields=["p"]).plot()


def test_places_on_the_sphere_are_a_map():
    points = np.random.default_rng(0).normal(size=(500, 3))
    points /= np.linalg.norm(points, axis=1)[:, None]
    places = places_of(points, on_sphere=False)
    assert (places.in_space, places.start) == (False, -180.0)
    assert np.abs(places.xy[:, 1]).max() <= 90


def test_a_map_where_cartopy_is_installed(folder):
    pytest.importorskip("cartopy", reason="maps need cartopy")
    from scidata.data.pictures.canvas import new_figure

    found = map_axes(new_figure(4, 3), 360)
    assert found is not None
    assert found[1] == 180
    values, axes = drawn(scidata.open_dataset(folder / "era5.zarr").plot(0, "u"))
    assert values.shape == (24, 48)
    assert type(axes).__name__ == "GeoAxes"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two sets in a plane."""
    folder = tmp_path_factory.mktemp("sets")
    random = np.random.default_rng(0)
    with h5py.File(folder / "two.h5", "w") as file:
        for name, num in (("coarse", 12), ("fine", 90)):
            file[f"nodes/{name}/pos"] = random.random((num, 2))
        file["nodes/fine/u"] = random.random(90)
        file["edges/fine__to__coarse/edge_index"] = np.stack([np.arange(90), np.arange(90) // 8])
        file["edges/coarse__near__coarse/edge_index"] = np.stack([np.arange(12), (np.arange(12) + 1) % 12])
        file["edges/fine__to__coarse/length"] = random.random(90)
    scidata.partition(folder / "two.h5", folder / "two.store")
    return str(folder / "two.store")


def cut_between(reader, relation):
    """Count the edges of a relation that begin in another part than they end."""
    parts = [reader.read(0, part) for part in range(reader.num_parts)]
    source = relation.split("__")[0]
    return sum(int((p.relations[relation][0] >= p.index_maps[source].num_owned).sum()) for p in parts)


def test_a_panel_for_each_node_set(sets, tmp_path):
    from matplotlib.collections import LineCollection

    from scidata.data.pictures.store_parts import draw_sample

    reader = StoreReader(sets, num_parts=3)
    figure = draw_mesh(reader, 0, None, parts=True, path=str(tmp_path / "field.png"))
    field, coarse, fine = (axes for axes in figure.axes if axes.get_label() != "<colorbar>")
    assert "two.store: u, sample 0" in field.get_title(loc="left")
    num_cut = cut_between(reader, "fine__to__coarse") + cut_between(reader, "coarse__near__coarse")
    assert f"{num_cut} of 102 edges that end here are cut" in coarse.get_title(loc="left")
    (lines,) = [each for each in coarse.collections if isinstance(each, LineCollection)]
    assert len(lines.get_segments()) == num_cut
    assert not [each for each in fine.collections if isinstance(each, LineCollection)]  # no edge ends there
    for axes, name in ((coarse, "coarse"), (fine, "fine")):
        (points,) = [each for each in axes.collections if not isinstance(each, LineCollection)]
        assert len(points.get_offsets()) == reader.partition_of(0).bounds[name][-1]
        assert len(np.unique(points.get_facecolors(), axis=0)) == 3
    assert draw_sample(reader.store, reader.partition_of(0), (), str(tmp_path / "plan.png")) == []
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert len(draw_mesh(StoreReader(sets), 0, "u", parts=True, path=None).axes) == 2  # the set of the field, its bar
    with pytest.raises(ConfigError, match="lives on the edges of fine__to__coarse"):
        draw_mesh(reader, 0, "length", parts=True, path=None)

"""``scidata inspect`` and ``scidata plan`` of partitioned stores, against brute force on what went into them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from scipy.spatial import Delaunay, cKDTree
from typer.testing import CliRunner

from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.data.pictures import store_parts
from scidata.data.pictures.drawing import outlines, places_in_store, shapes_in_store, unrolled
from scidata.data.raw_report import inspect_store
from scidata.errors import UnsupportedFormatError
from scidata.meshes.order import quality
from scidata.store.format.store import open_store
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader
from scidata.testing import make_grid
from tests.unit._parts import khop_ghosts

DATA = Path(__file__).parents[3].parent / "shared" / "data"
SIZES = (700, 500, 900)


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def run_json(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def words(text: str) -> str:
    """Undo the folding of the box that usage errors come in."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three triangulations of different sizes."""
    folder = tmp_path_factory.mktemp("mesh")
    for index, size in enumerate(SIZES):
        points = np.random.default_rng(index).random((size, 2)) ** 1.5
        with h5py.File(folder / f"case{index}.h5", "w") as file:
            file["points"] = points
            file["cells"] = Delaunay(points).simplices
            file["node/u"] = np.stack([points[:, 0], points[:, 1] - 1], axis=1).astype("f4")
            file["node/u"].attrs["units"] = "m s-1"
            file["node/cost"] = np.random.default_rng(index).integers(0, 9, size).astype("f8")
    partition(sorted(folder.glob("*.h5")), folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cloud")
    with h5py.File(folder / "cloud.h5", "w") as file:
        points = np.random.default_rng(0).random((3000, 2))
        points[10] = points[20]
        file["points"] = points
        file["p"] = points[:, 0].astype("f4")
    partition(folder / "cloud.h5", folder / "store", kind="points")
    return folder / "store"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rings of 40 nodes and 5 nodes without an edge, nowhere in space."""
    folder = tmp_path_factory.mktemp("graph")
    ring = np.arange(40)
    one = np.stack([ring, np.roll(ring, -1)])
    with h5py.File(folder / "graph.h5", "w") as file:
        file["edge_index"] = np.concatenate([one, one[::-1], one + 40], axis=1)
        file["node/x"] = np.arange(85.0)
    partition(folder / "graph.h5", folder / "store", kind="graph", order="rows")
    return folder / "store"


def edges_of(store: Path, index: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    opened = open_store(store)
    indptr, src = opened.read(index, "csr/indptr"), opened.read(index, "csr/src")
    return indptr, src, np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_says_what_went_in(mesh: Path) -> None:
    report = run_json("inspect", mesh)
    assert (report["kind"], report["order"]) == ("mesh", "hilbert")
    assert [sample["name"] for sample in report["samples"]] == ["case0", "case1", "case2"]
    assert [sample["counts"]["node"] for sample in report["samples"]] == list(SIZES)
    assert report["counts"]["node"] == sum(SIZES)
    fields = {field["name"]: field for field in report["fields"]}
    assert set(fields) == {"u", "cost"}
    every = []
    for index in range(len(SIZES)):
        with h5py.File(mesh.parent / f"case{index}.h5") as file:
            every.append(file["node/u"][()])
    u = np.concatenate(every).astype("f8")
    field = fields["u"]
    assert (field["entity"], field["dtype"], field["units"]) == ("node", "float32", "m s-1")
    for name, expected in (("mean", u.mean(axis=0)), ("std", u.std(axis=0)), ("min", u.min(axis=0))):
        assert np.allclose(field["statistics"][name], expected, rtol=1e-12), name


@pytest.mark.parametrize("sample", [0, 2])
def test_inspect_quality_is_that_of_the_edges(mesh: Path, sample: int) -> None:
    report = run_json("inspect", mesh, *(["--sample", sample] if sample else []))
    assert report["quality_sample"] == sample
    _, src, dst = edges_of(mesh, sample)
    assert [part["num_parts"] for part in report["quality"]["parts"]] == [2, 8, 64]
    for part in report["quality"]["parts"]:
        first, more = divmod(SIZES[sample], part["num_parts"])
        owner = np.repeat(np.arange(part["num_parts"]), [first + 1] * more + [first] * (part["num_parts"] - more))
        cut = owner[src] != owner[dst]
        assert part["edge_cut"] == pytest.approx(cut.mean())
        ghosts = {(int(owner[d]), int(s)) for s, d in zip(src[cut], dst[cut], strict=True)}
        assert part["halo"] == pytest.approx(len(ghosts) / SIZES[sample])
        assert part["balance"] == pytest.approx((first + (more > 0)) * part["num_parts"] / SIZES[sample])


def test_inspect_table(mesh: Path) -> None:
    result = run("inspect", mesh)
    assert result.exit_code == 0, result.output
    for text in ("kind: mesh; order hilbert", "case1", "2100", "3 samples", "Nx2", "m s-1", "the store's edges"):
        assert text in result.stdout, text
    assert "64" in result.stdout


def test_inspect_of_points_without_edges(cloud: Path) -> None:
    report = run_json("inspect", cloud)
    assert report["quality_edges"] == "each point's 6 nearest others"
    assert report["quality"]["num_duplicate_points"] == 1
    assert report["notes"] == ["sample 0: 1 points lie where another one does"]
    assert 0 < report["quality"]["parts"][1]["edge_cut"] < 0.1  # rows at random: 7/8 of the edges


def test_inspect_notes_what_is_odd_in_a_graph(graph: Path) -> None:
    report = run_json("inspect", graph)
    notes = " ".join(report["notes"])
    assert "5 nodes have no edge" in notes
    assert "the other nodes are 2 components" in notes
    assert report["quality"]["num_duplicate_points"] is None
    assert "5 nodes have no edge" in run("inspect", graph).stdout


def test_inspect_leaves_out_more_parts_than_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "few.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((20, 3))
    partition(tmp_path / "few.h5", tmp_path / "store", kind="points")
    report = run_json("inspect", tmp_path / "store")
    assert [part["num_parts"] for part in report["quality"]["parts"]] == [2, 8]
    assert "has 20 points" in report["notes"][0]
    assert "positions and topology alone" in run("inspect", tmp_path / "store").stdout


def test_inspect_faults(mesh: Path, cloud: Path, tmp_path: Path) -> None:
    result = run("inspect", mesh, "--sample", "3")
    assert (result.exit_code, "no sample 3" in result.stderr) == (2, True)
    result = run("inspect", mesh, cloud)
    assert (result.exit_code, "one of them at a time" in words(result.stderr)) == (2, True)
    shutil.copytree(mesh, tmp_path / "begun")
    (tmp_path / "begun" / "manifest.json").unlink()
    for command in (("inspect",), ("plan", "--domain", "2")):
        result = run(*command, tmp_path / "begun")
        assert (result.exit_code, "unfinished" in result.stderr, "--resume" in result.stderr) == (1, True, True)
    with pytest.raises(UnsupportedFormatError, match="inspect_partitioned"):
        inspect_store(str(mesh))


def test_options_of_stores_mean_nothing_for_grids(tmp_path: Path) -> None:
    path = str(tmp_path / "grid.zarr")
    make_grid(path, num_times=2, num_levels=1, num_lat=8, num_lon=8, chunks=(1, 1, 4, 8))
    result = run("inspect", path, "--sample", "0")
    assert (result.exit_code, "--sample" in result.stderr) == (2, True)
    result = run("plan", path, "--domain", "2", "--ghosts", "disk")
    assert (result.exit_code, "--ghosts" in result.stderr) == (2, True)
    assert run("plan", path, "--domain", "2", "--steps", "0").exit_code == 0


# -- plan --------------------------------------------------------------------------------------------------------------


def test_times_are_samples(tmp_path: Path) -> None:
    points = np.random.default_rng(0).random((1100, 2))
    for case, times in enumerate((4, 2)):
        with h5py.File(tmp_path / f"case{case}.h5", "w") as file:
            file["points"] = points
            file["cells"] = Delaunay(points).simplices
            for name, shape in (("u", (times, 1100)), ("w", (1100,))):
                data = file.create_dataset(f"node/{name}", data=np.zeros(shape))
                for i, dim in enumerate(("Time", "node")[-len(shape) :]):
                    data.dims[i].label = dim
    store = tmp_path / "store"
    partition(sorted(tmp_path.glob("*.h5")), store)
    report = run_json("inspect", store)
    assert (report["sample_dim"], report["num_read"], len(report["samples"])) == ("Time", 6, 2)
    assert "opens as 6 samples: each Time of each" in run("inspect", store).stdout
    found = run_json("plan", store, "--domain", "2", "--sample", "5", "--halo", "1", "--dp", "2")
    assert (found["num_samples"], found["name"], found["rows"]) == (6, "case1", [1])
    assert found["global_shape"]["u"] == [1100]
    assert found["samples_per_dp_rank"] == 3
    reader = StoreReader(store, ReadOptions(halo=1, ghosts="disk"), num_parts=2)
    assert [rank["bytes_fetched"] for rank in found["ranks"]] == [reader.plan(5, r).bytes_fetched for r in range(2)]
    several = run("plan", store, "--domain", "2", "--steps", "0,1", "--isel", "Time=1:", "--sample", "1")
    assert "sample 1 (case0, Time 2,3) of 2" in several.stdout
    whole = run_json("plan", store, "--domain", "2", "--sample-dim", "none", "--sample", "1")
    assert (whole["num_samples"], whole["global_shape"]["u"]) == (2, [2, 1100])


@pytest.mark.parametrize("hops", [1, 2])
def test_plan_counts_are_those_of_the_edges(mesh: Path, hops: int) -> None:
    found = run_json("plan", mesh, "--domain", "5", "--halo", hops, "--sample", "1")
    indptr, src, dst = edges_of(mesh, 1)
    assert (found["kind"], found["sample"], found["name"], found["num_hops"]) == ("mesh", 1, "case1", hops)
    assert [rank["num_owned"]["node"] for rank in found["ranks"]] == [100] * 5
    for rank in found["ranks"]:
        start, stop = rank["owned"]["node"]
        assert rank["num_owned"]["edge"] == indptr[stop] - indptr[start]
        mine = (dst >= start) & (dst < stop)
        away = (src < start) | (src >= stop)
        assert rank["num_cut_edges"] == (mine & away).sum()
        # the corners of a rank's cells are neighbours of its nodes: no ghosts but those along edges
        ghosts = khop_ghosts(indptr, src, start, stop, hops)
        assert rank["num_ghosts"] == len(ghosts)
        assert rank["num_neighbours"] == len(np.unique(ghosts // 100))
    totals = found["totals"]
    assert totals["num_owned"] == found["counts"]
    assert totals["num_cut_edges"] == sum(rank["num_cut_edges"] for rank in found["ranks"])


@pytest.mark.parametrize(
    ("options", "halo", "ghosts"),
    [
        ([], 0, "exchange"),
        (["--halo", "1"], 1, "disk"),  # the defaults of open_dataset
        (["--halo", "1", "--ghosts", "exchange"], 1, "exchange"),
    ],
)
def test_plan_bytes_are_those_of_the_reads(mesh: Path, options: list[str], halo: int, ghosts: str) -> None:
    found = run_json("plan", mesh, "--domain", "4", "--fields", "u", *options)
    assert found["ghosts"] == ghosts
    reader = StoreReader(mesh, ReadOptions(halo=halo, ghosts=ghosts, fields="u"), num_parts=4)
    for rank in found["ranks"]:
        plan = reader.plan(0, rank["rank"])
        assert (rank["bytes_wanted"], rank["bytes_fetched"]) == (plan.bytes_wanted, plan.bytes_fetched)
        assert rank["amplification"] == pytest.approx(plan.amplification)
    assert found["totals"]["bytes_fetched"] == sum(rank["bytes_fetched"] for rank in found["ranks"])


def test_plan_by_weights_and_bounds(mesh: Path) -> None:
    even, edges = (run_json("plan", mesh, "--domain", "6", *more) for more in ((), ("--weights", "edges")))
    assert edges["totals"]["balance"]["edge"] < even["totals"]["balance"]["edge"]
    assert edges["totals"]["balance"]["edge"] < 1.02
    cost = run_json("plan", mesh, "--domain", "6", "--weights", "cost")
    values = open_store(mesh).read(0, "node/cost")
    sums = [values[a:b].sum() for a, b in (rank["owned"]["node"] for rank in cost["ranks"])]
    assert max(sums) / np.mean(sums) < 1.08
    given = run_json("plan", mesh, "--domain", "3", "--bounds", "0,10,10,700")
    assert given["bounds"]["node"] == [0, 10, 10, 700]
    assert given["ranks"][1]["num_ghosts"] == 0
    assert given["totals"]["balance"]["node"] == pytest.approx(690 * 3 / 700)


def test_ghosts_that_partition_counted_are_those_of_the_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_BATCH", 50)  # many batches, and parts that end inside one
    side = np.arange(92)
    nodes = np.random.default_rng(0).permutation(92 * 92).reshape(92, 92)
    points = np.empty((nodes.size, 2))
    points[nodes.ravel()] = np.stack(np.meshgrid(side**1.3, side, indexing="ij"), axis=-1).reshape(-1, 2)
    with h5py.File(tmp_path / "quads.h5", "w") as file:
        file["points"] = points
        file["cells"] = np.stack([nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]], -1).reshape(-1, 4)
    partition(tmp_path / "quads.h5", tmp_path / "q.store")
    partition(tmp_path / "quads.h5", tmp_path / "disk.store", memory=700_000)
    assert (tmp_path / "q.store/manifest.json").read_bytes() == (tmp_path / "disk.store/manifest.json").read_bytes()
    found = run_json("plan", tmp_path / "q.store", "--domain", "13", "--counted")["ghosts"]
    assert [(each["domain"], each["counted"]) for each in found] == [(8, True), (13, False), (16, True)]
    for each in found:
        exact = [r["num_ghosts"] for r in run_json("plan", tmp_path / "q.store", "--domain", each["domain"])["ranks"]]
        shown = each["num_ghosts"], each["most_of_a_rank"]
        assert shown == (sum(exact), max(exact)) or not each["counted"]
        assert shown == pytest.approx((sum(exact), max(exact)), rel=0.25)
    assert "about" in run("plan", tmp_path / "q.store", "--domain", "9", "--counted").stdout
    for more, part in ((["--halo", "2"], "one hop"), (["--bounds", "0,9,8464"], "equal parts"), ([], "8 to 16 parts")):
        refused = run("plan", tmp_path / "q.store", "--domain", "2", "--counted", *more)
        assert refused.exit_code != 0
        assert part in words(refused.output)


def test_plan_by_radius(cloud: Path) -> None:
    found = run_json("plan", cloud, "--domain", "4", "--halo", "0.05")
    points = open_store(cloud).read(0, "point/pos")
    for rank in found["ranks"]:
        start, stop = rank["owned"]["point"]
        others = np.r_[0:start, stop : len(points)]
        near = cKDTree(points[start:stop]).query(points[others])[0] <= 0.05
        assert rank["num_ghosts"] == near.sum()
        assert rank["num_cut_edges"] is None
    assert run_json("plan", cloud, "--domain", "4")["totals"]["num_ghosts"] == 0


def test_plan_table(mesh: Path, cloud: Path) -> None:
    result = run("plan", mesh, "--domain", "4", "--halo", "2", "--dp", "2", "--weights", "edges")
    assert result.exit_code == 0, result.output
    for text in (
        "nodes over 4 ranks by edges; sample 0 (case0) of 3",
        "within 2 hops along edges, and its own cells' corners",
        "balance (most / mean of a rank): nodes",
        "dp 2 x domain 4 = world size 8; 2 samples for each dp rank",
    ):
        assert text in result.stdout, text
    many = run("plan", cloud, "--domain", "40").stdout
    assert "median" in many
    assert "40 ranks, of which the best" in many
    assert "--halo R adds those" in many
    every = run("plan", cloud, "--domain", "40", "--all").stdout
    assert "2925:3000" in every
    assert "median" not in every


def test_plan_of_more_ranks_than_rows(graph: Path) -> None:
    found = run_json("plan", graph, "--domain", "100")
    assert [rank["num_owned"]["node"] for rank in found["ranks"]] == [1] * 85 + [0] * 15
    assert run("plan", graph, "--domain", "100", "--all").exit_code == 0


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--align", "8"], ["--align", "means nothing"]),
        (["--periodic", "lon"], ["--periodic", "means nothing"]),
        (["--shard", "node"], ["--shard", "means nothing"]),
        (["--domain", "2x4"], ["--domain", "one sequence", "--domain 8"]),
        (["--halo", "lat=2"], ["--halo", "'lat=2' is no width"]),
        (["--halo", "-1"], ["--halo", "negative"]),
        (["--halo", "1", "--halo", "2"], ["--halo", "2 times"]),
        (["--bounds", "chunk"], ["--bounds", "accepted: even"]),
        (["--bounds", "0,1,700", "--weights", "edges"], ["--weights", "leave out --bounds"]),
        (["--ghosts", "disc"], ["--ghosts", "none of disk, exchange"]),
        (["--sample", "3"], ["--sample", "there are 3 samples"]),
    ],
)
def test_usage(mesh: Path, args: list[str], parts: list[str]) -> None:
    result = run("plan", mesh, *(() if "--domain" in args else ("--domain", "2")), *args)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    for part in parts:
        assert part in words(result.stderr), result.stderr


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--weights", "wieght"], "no field 'wieght'"),
        (["--fields", "uu"], "no field 'uu'"),
        (["--bounds", "0,5,6"], "700"),
        (["--halo", "0.5"], "whole number of hops"),
        (["--ghosts", "disk"], "say how wide"),
    ],
)
def test_what_the_store_cannot_do(mesh: Path, args: list[str], part: str) -> None:
    result = run("plan", mesh, "--domain", "2", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr


# -- pictures ----------------------------------------------------------------------------------------------------------


def colours_in(path: Path, num_ranks: int) -> list[float]:
    """Return the share of the map that has each rank's colour."""
    from matplotlib.image import imread

    from scidata.data.pictures.canvas import colours_of

    image = imread(path)[:, : int(0.84 * imread(path).shape[1]), :3]  # without the legend
    pale = store_parts._pale(colours_of(num_ranks))
    shares = [float((np.abs(image - colour).max(axis=2) < 0.02).mean()) for colour in pale]
    return [share / sum(shares) if sum(shares) else 0.0 for share in shares]


def test_picture_of_a_mesh(mesh: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    out = tmp_path / "mesh.png"
    result = run("plan", mesh, "--domain", "4", "--plot", out)
    assert result.exit_code == 0, result.output
    assert f"picture: {out}" in result.stdout
    shares = colours_in(out, 4)
    assert min(shares) > 0.05
    again = run("plan", mesh, "--domain", "4", "--plot", out)
    assert (again.exit_code, "--overwrite replaces it" in again.stderr) == (1, True)
    assert run_json("plan", mesh, "--domain", "20", "--plot", out, "--overwrite")["plot_notes"] == []
    assert colours_in(out, 4) != shares


def dark(path: Path) -> float:
    """Return the share of the picture, without its legend, that is nearly black."""
    from matplotlib.image import imread

    image = imread(path)[:, : int(0.84 * imread(path).shape[1]), :3]
    return float((image.max(axis=2) < 0.35).mean())


def test_rings_do_not_blacken_the_picture_of_many_ranks(mesh: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    for ranks in ("2", "64"):
        out = tmp_path / f"{ranks}.png"
        assert run("plan", mesh, "--domain", ranks, "--halo", "2", "--plot", out).exit_code == 0
        assert dark(out) < 0.03


def test_a_solid_is_drawn_by_its_surface(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    points = np.random.default_rng(0).random((400, 3))
    with h5py.File(tmp_path / "solid.h5", "w") as file:
        file["points"], file["cells"] = points, Delaunay(points).simplices.astype(np.int64)
        file["cells"].attrs["cell_type"] = "tetra"
    partition(tmp_path / "solid.h5", tmp_path / "store", repair=("all",))
    found = run_json("plan", tmp_path / "store", "--domain", "4", "--halo", "1", "--plot", tmp_path / "solid.png")
    assert found["plot_notes"] == ["what is nearest the viewer is cut away"]
    assert dark(tmp_path / "solid.png") < 0.03


def test_picture_of_points(cloud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    out = tmp_path / "cloud.png"
    found = run_json("plan", cloud, "--domain", "4", "--halo", "0.02", "--plot", out)
    assert found["plot_notes"] == []
    assert all(0.15 < share < 0.35 for share in colours_in(out, 4))
    monkeypatch.setattr(store_parts, "MAX_POINTS", 400)
    monkeypatch.setattr(store_parts, "_MAX_GHOSTS", 100)
    thin = run_json("plan", cloud, "--domain", "4", "--halo", "0.02", "--plot", out, "--overwrite")
    num_ghosts = thin["totals"]["num_ghosts"]
    assert thin["plot_notes"] == [
        "1 in 8 of 3000 points is drawn",
        f"1 in {-(-num_ghosts // 100)} of {num_ghosts} ghosts is drawn",
    ]


def test_picture_in_space_and_of_no_place(graph: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    points = np.random.default_rng(0).random((500, 3)) * [4, 2, 1]
    with h5py.File(tmp_path / "car.h5", "w") as file:
        file["points"] = points
    partition(tmp_path / "car.h5", tmp_path / "store", kind="points")
    out = tmp_path / "car.png"
    assert run("plan", tmp_path / "store", "--domain", "3", "--plot", out).exit_code == 0
    assert min(colours_in(out, 3)) > 0
    result = run("plan", graph, "--domain", "2", "--plot", tmp_path / "graph.png")
    assert (result.exit_code, "no positions" in result.stderr) == (2, True)


@pytest.mark.parametrize("ndim", [2, 3])
def test_picture_of_a_graph_has_its_edges(ndim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    points = np.random.default_rng(0).random((60, ndim))
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file["pos"] = points
        file["edge_index"] = np.stack([np.arange(59), np.arange(1, 60)])
    partition(tmp_path / "net.h5", tmp_path / "store", kind="graph")
    out = tmp_path / "net.png"
    assert run_json("plan", tmp_path / "store", "--domain", "2", "--plot", out)["plot_notes"] == []
    from matplotlib.image import imread

    drawn = imread(out)
    monkeypatch.setattr(store_parts, "_MAX_EDGES", 5)
    thin = run_json("plan", tmp_path / "store", "--domain", "2", "--plot", out, "--overwrite")
    assert thin["plot_notes"] == ["1 in 12 of 59 edges is drawn"]
    width = int(0.8 * drawn.shape[1])  # without the legend, which has a note more now
    changed = np.abs(drawn[:, :width, :3] - imread(out)[:, :width, :3]).max(axis=2) > 0.1
    assert changed.sum() > 2000


@pytest.mark.parametrize(
    ("source", "mesh_file", "num_cells"),
    [
        ("outCSne30_vortex.nc", "outCSne30.ug", 5400),  # a node at each pole
        ("mesh.QU.1920km.151026.nc", None, 162),  # a cell around each pole
    ],
)
def test_picture_of_the_sphere_covers_it(source: str, mesh_file: str | None, num_cells: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    if not (DATA / source).exists():
        pytest.skip("the sample files are not beside the repo")
    partition(DATA / source, tmp_path / "store", mesh=None if mesh_file is None else str(DATA / mesh_file))
    out = tmp_path / "sphere.png"
    assert run("plan", tmp_path / "store", "--domain", "4", "--plot", out).exit_code == 0
    assert min(colours_in(out, 4)) > 0.1
    corners, cells = outlines(shapes_in_store(open_store(tmp_path / "store"), 0, "node"))
    places = places_in_store(open_store(tmp_path / "store"), 0, "node")
    polygons, owners = unrolled([places.xy[ids] for ids in corners], cells, 0.0)
    assert set(owners.tolist()) == set(range(num_cells))
    grid = np.stack(np.meshgrid(np.arange(0.31, 360, 3.717), np.arange(-89.73, 90, 3.717)), axis=-1).reshape(-1, 2)
    hits = np.zeros(len(grid), np.int64)
    for polygon in polygons:  # those across the first meridian come twice
        hits += crossings(polygon, grid)
    assert np.array_equal(hits, np.ones(len(grid)))


def crossings(polygon: npt.NDArray[Any], points: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say which points lie inside, by the edges that a ray to the right of each crosses."""
    inside = np.zeros(len(points), np.bool_)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        straddles = (points[:, 1] < y0) != (points[:, 1] < y1)
        inside ^= straddles & (points[:, 0] < x0 + (points[:, 1] - y0) / (y1 - y0 if y1 != y0 else 1) * (x1 - x0))
    return inside

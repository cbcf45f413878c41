"""The command line: arguments, tables, JSON, pictures, exit codes. ``demo`` is in tests/examples."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from scidata import __version__
from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.data.pictures.grid_field import plane_of
from scidata.data.pictures.grid_parts import PlotAxis, _halo_boxes
from scidata.data.raw_report import inspect_store
from scidata.grids.partition import make_partition
from scidata.grids.reader import GridReader
from scidata.testing import make_grid

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data"


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def run_json(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def start(*args: object, **kwargs: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scidata", *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **kwargs)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Latitude 24 in chunks of 7 rows, longitude 32 in one chunk, compressed."""
    path = str(tmp_path_factory.mktemp("grid") / "weather.zarr")
    make_grid(path, num_times=5, num_levels=2, num_lat=24, num_lon=32, chunks=(1, 2, 7, 32))
    return path


def write_metadata_only(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> str:
    """Write a Zarr v3 store of which no chunk exists."""
    (path / "t").mkdir(parents=True)
    array = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
        ],
        "attributes": {},
        "dimension_names": ["time", "level", "latitude", "longitude"],
    }
    (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    (path / "t" / "zarr.json").write_text(json.dumps(array))
    return str(path)


# -- the program ---------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "zarr", "h5py", "numcodecs", "matplotlib", "numpy", "scipy")
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom scidata.cli.app import app\n"
        "r = CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0 and 'inspect' in r.stdout\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_version_and_no_command() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"scidata {__version__}\n")
    assert run().exit_code == 2


def test_failure_is_one_line_on_stderr_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    absent = tmp_path / "absent.nc"
    for debug in ((), ("--debug",)):
        process = start("inspect", absent, *debug, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert out == ""
        if debug:
            assert "Traceback" in err
        else:
            assert err.startswith(f"error: {absent}")
            assert err.count("\n") == 1


def test_interrupt_exits_with_130(tmp_path: Path) -> None:
    path = write_metadata_only(tmp_path / "big.zarr", (10, 37, 721, 1440), (1, 1, 10, 10))
    ours, theirs = pty.openpty()
    process = start("plan", path, "--domain", "64x64", stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"planning" not in seen:  # the bar is drawn on a terminal only, and means that planning has begun
        seen += os.read(ours, 1024)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, out) == (130, "")


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--domain", "many", "not an integer"),
        ("--domain", "0", "at least 1"),
        ("--domain", "2x2x2x2", "4 axes"),
        ("--shard", "latitude=rows", "no domain axis"),
        ("--shard", "latitude,longitude", "more dimensions"),
        ("--halo", "latitude=wide", "not an integer"),
        ("--halo", "latitude=1:2:3", "no width"),
        ("--halo", "latitude=-1", "no width"),
        ("--halo", "latitude=", "incomplete"),
        ("--bounds", "chunks", "did you mean 'chunk'"),
        ("--bounds", "0,x", "no bounds"),
        ("--align", "0", "less than 1"),
        ("--isel", "3", "names no dimension"),
        ("--isel", "level=1:2:3:4", "too many colons"),
        ("--steps", "0,b", "not an integer"),
        ("--dtype", "float31", "did you mean 'float32'"),
        ("--sample", "5", "there are 5 samples"),
        ("--dp", "0", "1"),
    ],
)
def test_bad_value_names_the_option(store: str, option: str, value: str, part: str) -> None:
    domain = () if option == "--domain" else ("--domain", "2")
    result = run("plan", store, *domain, option, value)
    words = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, result.output
    assert option in words
    assert part in words


def test_unknown_names_are_answered_with_near_ones(store: str) -> None:
    for args, part in (
        (("--halo", "lattitude=1"), "did you mean 'latitude'"),
        (("--fields", "uu"), "did you mean 'u'"),
        (("--shard", "longitud"), "did you mean 'longitude'"),
        (("--sample-dim", "tim"), "did you mean 'time'"),
    ):
        result = run("plan", store, "--domain", "2", *args)
        assert result.exit_code == 2
        assert part in result.output


def test_weights_and_bounds_exclude_each_other(store: str) -> None:
    result = run("plan", store, "--domain", "2", "--weights", "t", "--bounds", "chunk")
    assert result.exit_code == 2
    assert "--weights" in result.output


# -- inspect ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "hdf5", "netcdf4", "netcdf3"])
def test_inspect_lists_arrays_of_every_format(tmp_path: Path, format: str) -> None:
    made = make_grid(tmp_path / "grid", format=format)
    report = run_json("inspect", tmp_path / "grid")
    assert report["format"] == format
    assert (report["kind"], report["sample_dim"], report["num_samples"], report["shard_dim"]) == (
        "grid",
        "time",
        4,
        "latitude",
    )
    arrays = {a["name"]: a for a in report["arrays"]}
    assert set(made) <= set(arrays)
    assert arrays["u"]["shape"] == list(made["u"].shape)
    assert arrays["u"]["is_data"]
    assert not arrays["latitude"]["is_data"]
    assert arrays["latitude"]["role"] == "Y"
    assert set(report["fields"]) == {"u", "v", "t"}


def test_inspect_table(store: str) -> None:
    result = run("inspect", store)
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("u "))
    for part in ("time, level, latitude, longitude", "5x2x24x32", "float32", "1x2x7x32", "field"):
        assert part in row


def test_inspect_and_plan_say_which_library_inflates(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "grid.h5", "w") as f:
        f.create_dataset("u", data=rng.random((4, 6, 8)), chunks=(1, 6, 8), compression="gzip")
    with h5py.File(tmp_path / "points.h5", "w") as f:
        for name in ("pos", "velocity"):
            f.create_dataset(name, data=rng.random((50, 3)), chunks=(10, 3), compression="gzip")
    said = f"zlib: decoded by {'zlib-ng' if find_spec('zlib_ng') else 'Python'}"
    for name, options in (("grid", ["--shard", "dim_1"]), ("points", ["--kind", "points"])):
        path = tmp_path / f"{name}.h5"
        assert said in run("inspect", path).stdout
        assert run_json("inspect", path)["inflated"].startswith(said)
        assert f"note: {said}" in run("plan", path, "--domain", 2, *options).stdout
        assert any(note.startswith(said) for note in run_json("plan", path, "--domain", 2, *options)["notes"])


def test_inspect_a_series_and_files_that_do_not_fit(tmp_path: Path) -> None:
    for i in range(3):
        make_grid(tmp_path / f"part{i}", format="netcdf3", num_times=2, first_time=2 * i)
    report = run_json("inspect", tmp_path / "part*")
    assert (len(report["paths"]), report["num_samples"], report["warnings"]) == (3, 6, [])
    make_grid(tmp_path / "other", format="netcdf3", num_lat=11, first_time=6)
    report = run_json("inspect", tmp_path / "part0", tmp_path / "other")
    assert report["num_samples"] is None
    assert "not one data set" in report["warnings"][0]


def test_inspect_guesses_the_kind(tmp_path: Path) -> None:
    def kind_of(name: str, arrays: dict[str, Any], attributes: dict[str, str] | None = None) -> str:
        with h5py.File(tmp_path / name, "w") as f:
            for array, values in arrays.items():
                f[array] = values
                f[array].attrs.update(attributes or {})
        return inspect_store(str(tmp_path / name)).kind

    rng = np.random.default_rng(0)
    points = rng.random((50, 3))
    assert kind_of("points.h5", {"pos": points, "pressure": points[:, 0]}) == "points"
    assert kind_of("graph.h5", {"edge_index": np.zeros((2, 9), int), "x": points}) == "graph"
    assert kind_of("edges.h5", {"edges": np.zeros((9, 2), int), "x": points}) == "graph"
    assert kind_of("cells.h5", {"pos": points, "connectivity": np.zeros((9, 3), int)}) == "mesh"
    assert kind_of("ugrid.h5", {"mesh": np.int32(0)}, {"cf_role": "mesh_topology"}) == "mesh"
    assert kind_of("grid.h5", {"u": rng.random((4, 6, 8))}) == "grid"


def test_inspect_warns_of_what_reads_badly(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "bad.zarr"), mode="w")
    dims = ["time", "latitude", "longitude"]
    group.create_array("whole", shape=(8, 200, 300), chunks=(4, 200, 300), dtype="f4", dimension_names=dims)
    group.create_array("tiny", shape=(8, 200, 300), chunks=(1, 10, 10), dtype="f4", dimension_names=dims)
    group.create_array("other", shape=(7, 5), chunks=(7, 5), dtype="f4")
    warnings = inspect_store(str(tmp_path / "bad.zarr")).warnings
    text = "\n".join(warnings)
    assert "whole: chunks of 4 rows of time, which a sample alone decodes whole" in text
    assert "whole: one chunk spans all 200 rows of latitude" in text
    assert "tiny: 4800 chunks of 0.4 KiB" in text
    assert "other: no dimension names" in text
    assert "other: not on the grid of " in text
    make_grid(tmp_path / "good", format="netcdf3")
    assert inspect_store(str(tmp_path / "good")).warnings == ()


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder of real files is absent")
def test_inspect_real_files() -> None:
    kinds = {path.name: run_json("inspect", path)["kind"] for path in DATA.iterdir() if path.suffix in (".nc", ".ug")}
    assert kinds.pop("eraint_uvz.nc") == "grid"
    assert kinds
    assert set(kinds.values()) == {"mesh"}


# -- plan ------------------------------------------------------------------------------------------------------------


def test_plan_is_the_sum_of_every_ranks_plan(store: str) -> None:
    options = ("--halo", "latitude=1:2", "--halo", "longitude=3", "--periodic", "longitude", "--steps", "0,1")
    found = run_json("plan", store, "--domain", "3x2", *options, "--isel", "latitude=22:0:-1", "--sample", "2")
    reader = GridReader(
        store,
        ReadOptions(
            halo={"latitude": (1, 2), "longitude": 3},
            periodic="longitude",
            steps=(0, 1),
            isel={"latitude": slice(22, 0, -1)},
        ),
        axis_sizes={"h": 3, "w": 2},
    )
    assert found["num_samples"] == reader.num_samples == 4
    assert found["exact"]
    for rank in range(6):
        here, plan = found["ranks"][rank], reader.plan(2, rank)
        assert here["bytes_wanted"] == plan.bytes_wanted
        assert here["bytes_fetched"] == plan.bytes_fetched
        assert here["bytes_decoded"] == plan.bytes_decoded
        assert here["num_chunks"] == plan.num_chunks
        specs = reader.buffer_specs(reader.partition.coordinate(rank))
        assert here["local_shape"] == {name: list(spec.shape) for name, spec in specs.items()}
        assert here["bytes_memory"] == sum(spec.nbytes for spec in specs.values())
    assert found["totals"]["bytes_fetched"] == sum(r["bytes_fetched"] for r in found["ranks"])
    assert found["ranks"][0]["halo"] == {"latitude": [0, 2], "longitude": [3, 3]}


def test_plan_tells_the_halo_apart(store: str) -> None:
    options = ("--domain", "3x2", "--halo", "latitude=2", "--halo", "longitude=1", "--periodic", "longitude")
    found = run_json("plan", store, *options, "--fields", "u")
    assert found["totals"]["bytes_owned"] == 2 * 24 * 32 * 4  # each value of a sample once
    rows, columns = (8 + 2) * 2 + (8 + 4), 2 * (16 + 2)
    assert found["totals"]["bytes_wanted"] == 2 * rows * columns * 4
    assert found["totals"]["halo_amplification"] == pytest.approx(rows * columns / (24 * 32))
    for rank in found["ranks"]:
        assert rank["bytes_owned"] + rank["bytes_halo"] == rank["bytes_wanted"]
    assert not any("halo" in note for note in found["notes"])
    wide = run("plan", store, "--domain", "4", "--halo", "latitude=0:9").stdout
    assert "the halo of latitude (0+9 rows) is wider than the smallest part (6 rows)" in wide
    assert " owned " in wide
    assert " wanted " not in wide.split("times what they own")[0].split("both are wanted")[0].replace("/wanted", "")


def test_plan_counts_chunks_that_ranks_share(store: str) -> None:
    even = run_json("plan", store, "--domain", "3", "--fields", "u")  # rows 8, 16: chunks end at 7, 14, 21
    assert even["totals"]["shared_chunks"] == 2
    chunk = run_json("plan", store, "--domain", "3", "--fields", "u", "--bounds", "0,7,14,24")
    assert chunk["totals"]["shared_chunks"] == 0
    assert chunk["totals"]["decode_amplification"] == pytest.approx(28 / 24)  # the last chunk is padded
    assert chunk["totals"]["balance"] == pytest.approx(10 / 8)


def test_plan_align_dtype_and_dp(store: str) -> None:
    found = run_json(
        "plan", store, "--domain", "4", "--align", "latitude=3", "--dtype", "float64", "--dp", "2", "--fields", "u,v"
    )
    assert all(b % 3 == 0 for b in found["bounds"]["latitude"])
    assert (found["world_size"], found["samples_per_dp_rank"], found["fields"]) == (8, 3, ["u", "v"])
    assert found["ranks"][0]["bytes_memory"] == 2 * 6 * 2 * 32 * 8


def test_plan_weights_are_a_fields_row_sums(tmp_path: Path) -> None:
    path = str(tmp_path / "weighted.zarr")
    make_grid(path, num_lat=24)
    cost = np.repeat([5.0, 1.0], [9, 15])  # 60 in all: 15 for each of four ranks
    group = zarr.open_group(path, mode="a")
    group.create_array("cost", data=cost, dimension_names=["latitude"])
    weighted = run_json("plan", path, "--domain", "4", "--weights", "cost", "--fields", "u")
    assert weighted["bounds"]["latitude"] == [0, 3, 6, 9, 24]


def test_plan_table(store: str) -> None:
    result = run("plan", store, "--domain", "2", "--halo", "latitude=2", "--dp", "2")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "0:12", "(0+2)", "2x14x32"] in [line[:4] for line in lines]
    assert ["1", "12:24", "(2+0)", "2x14x32"] in [line[:4] for line in lines]
    assert "world size 4" in result.stdout
    assert "\x1b" not in result.stdout  # no colours in a pipe


def test_suggestion_gives_the_figure_that_it_would_have(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.zarr")
    make_grid(path, num_lat=16, num_lon=32, chunks=(1, 3, 16, 4))
    bad = run_json("plan", path, "--domain", "4")
    assert bad["totals"]["decode_amplification"] == pytest.approx(4)
    assert bad["suggestions"][0].startswith("--shard longitude gives 1.00 instead of 4.00")
    assert "latitude in chunks of at most 4 rows, not 16" in bad["suggestions"][1]
    good = run_json("plan", path, "--domain", "4", "--shard", "longitude")
    assert good["totals"]["decode_amplification"] == pytest.approx(1)
    assert good["suggestions"] == []

    make_grid(str(tmp_path / "edges.zarr"), num_lat=32, num_lon=8, chunks=(1, 3, 10, 8))
    bad = run_json("plan", tmp_path / "edges.zarr", "--domain", "3")
    told = next(s for s in bad["suggestions"] if s.startswith("--bounds chunk"))
    better = run_json("plan", tmp_path / "edges.zarr", "--domain", "3", "--bounds", "chunk")
    assert f"gives {better['totals']['decode_amplification']:.2f} " in told


def test_plan_of_many_ranks_needs_no_chunks(tmp_path: Path) -> None:
    """40 years of 6-hourly 0.25° data: 2.3e10 chunks, of which none exists."""
    path = write_metadata_only(tmp_path / "era5.zarr", (58440, 37, 721, 1440), (1, 1, 10, 10))
    found = run_json("plan", path, "--domain", "32x32", "--halo", "2", "--periodic", "longitude")
    assert not found["exact"]
    assert len(found["ranks"]) == 1024
    assert sum(np.prod([stop - start for start, stop in r["owned"].values()]) for r in found["ranks"]) == 721 * 1440
    first = found["ranks"][0]  # rows 0:23 and 2 above; columns 0:45 with 2 on both sides, wrapped
    assert first["bytes_wanted"] == 37 * 25 * 49 * 4
    assert first["num_chunks"] == 37 * 3 * (5 + 1)
    assert first["bytes_decoded"] == first["num_chunks"] * 100 * 4

    table = run("plan", path, "--domain", "8x5", "--sample", "58000").stdout
    rows = [line.split()[0] for line in table.splitlines() if line.strip()]
    assert {"best", "median", "worst"} <= set(rows)
    assert len(rows) < 20  # not a row for each rank
    assert "estimated from decoded sizes" in table
    listed = run("plan", path, "--domain", "8x5", "--all").stdout
    assert [line.split()[0] for line in listed.splitlines()[6:46]] == [str(rank) for rank in range(40)]


# -- pictures --------------------------------------------------------------------------------------------------------


def test_picture_shows_each_rank_in_its_colour(store: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    from matplotlib.image import imread

    out = tmp_path / "shards.png"
    assert run("plan", store, "--domain", "4", "--halo", "1", "--plot", out).exit_code == 0
    pixels = imread(out)
    column = pixels[:, pixels.shape[1] // 3, :3].round(2)
    runs = np.flatnonzero(np.any(np.diff(column, axis=0) != 0, axis=1))
    long = [tuple(column[i + 1]) for i, j in itertools.pairwise(runs) if j - i > 20]
    assert len({colour for colour in long if colour != (1.0, 1.0, 1.0)}) == 4

    again = run("plan", store, "--domain", "4", "--plot", out)
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    assert run("plan", store, "--domain", "40x2", "--shard", "longitude", "--plot", out).exit_code == 2
    assert run("plan", store, "--domain", "4x8", "--halo", "1", "--plot", out, "--overwrite").exit_code == 0
    assert run("plan", store, "--domain", "2", "--plot", tmp_path / "shards.docx").exit_code == 2


def test_halo_is_drawn_where_it_wraps() -> None:
    sizes = {"latitude": 10, "longitude": 40}
    options = ReadOptions(shard={"longitude": "w"}, halo={"longitude": 3}, periodic="longitude")
    cut = make_partition(sizes, options, axis_sizes={"w": 4}, chunks={})
    none = np.empty(0, np.int64)
    plane = [PlotAxis(dim=d, size=sizes[d], chunk_edges=none) for d in ("latitude", "longitude")]
    boxes, widened = _halo_boxes(cut, plane, {"w": 0})
    assert sorted(boxes) == [[(0, 10), (10, 13)], [(0, 10), (37, 40)]]
    assert not widened
    boxes, _ = _halo_boxes(cut, plane, {"w": 3})
    assert sorted(boxes) == [[(0, 10), (0, 3)], [(0, 10), (27, 30)]]


def test_plane_has_the_sharded_dimensions_first() -> None:
    sizes = {"level": 5, "latitude": 10, "longitude": 40}
    for shard, plane in (
        ({"latitude": "d"}, ("latitude", "longitude")),
        ({"level": "d"}, ("level", "longitude")),
        ({"longitude": "d"}, ("latitude", "longitude")),
    ):
        cut = make_partition(sizes, ReadOptions(shard=shard), axis_sizes={"d": 2}, chunks={})
        assert plane_of(cut, sizes) == plane
    line = make_partition({"x": 9}, ReadOptions(shard={"x": "d"}), axis_sizes={"d": 2}, chunks={})
    assert plane_of(line, {"x": 9}) == ("x",)


# -- bench -----------------------------------------------------------------------------------------------------------


def test_bench(store: str) -> None:
    found = run_json("bench", store, "--fields", "u", "--repeats", "1")
    methods = {row["method"] for row in found["rows"]}
    assert {"slicing", "scidata", "preadv"} <= methods
    assert {row["field"] for row in found["rows"]} == {"u"}
    table = run("bench", store, "--fields", "u", "--repeats", "1")
    assert table.exit_code == 0
    assert "preadv" in table.stdout
    assert run("bench", store, "--fields", "w").exit_code == 2


def test_bench_of_a_pipeline(store: str) -> None:
    options = ("bench", store, "--fields", "u", "--pipeline", "--samples", "3", "--repeats", "1", "--workers", "0,2")
    found = run_json(*options, "--step-ms", "1.5")
    assert found["step"] == 1.5e-3
    names = [(row["method"], row["num_workers"]) for row in found["rows"]]
    assert names[:3] == [("loader", 0), ("loader", 2), ("preadv", None)]
    table = run(*options)
    assert table.exit_code == 0
    assert "loader, 2 threads" in table.stdout
    assert run("bench", store, "--pipeline", "--workers", "two").exit_code == 2
    assert run("bench", store, "--workers", "2").exit_code == 2


def test_plan_of_a_raw_mesh_says_what_to_run_first(tmp_path: Path) -> None:
    path = tmp_path / "mesh.nc"
    with netCDF4.Dataset(path, "w") as f:
        f.createDimension("node", 12)
        f.createDimension("face", 4)
        f.createDimension("corner", 3)
        mesh = f.createVariable("mesh", "i4")
        mesh.setncatts({"cf_role": "mesh_topology", "topology_dimension": 2})
        mesh.setncatts({"node_coordinates": "x y", "face_node_connectivity": "corners"})
        for name in ("x", "y", "u"):
            f.createVariable(name, "f8", ("node",))[:] = np.arange(12) % 5
        f.createVariable("corners", "i4", ("face", "corner"))[:] = np.arange(12).reshape(4, 3)
    result = run("plan", path, "--domain", 2)
    assert result.exit_code == 1
    assert f"scidata partition {path} OUT --kind mesh" in " ".join(result.output.split())
    assert run_json("plan", path, "--domain", 2, "--kind", "grid", "--fields", "u")["shard"] == {"node": "domain"}
    assert run("plan", path, "--domain", 2, "--kind", "gird").exit_code == 2

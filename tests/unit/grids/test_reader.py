"""Every rank's part of a grid against xarray's decoded read: all formats, cuts and halos, without starting a rank."""

import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, FieldMismatchError, SourceChangedError, UnknownNameError
from scidata.grids.planner import Planner
from scidata.grids.reader import GridReader
from scidata.testing import GRID_FORMATS, make_grid

REAL = Path(__file__).parents[3].parent / "shared" / "data" / "eraint_uvz.nc"


def read_part(reader, index, rank):
    """One rank's fields with halo, read into poisoned buffers so that an unwritten element shows.

    What was fetched is what the plan said.
    """
    coordinate = reader.partition.coordinate(rank)
    out = {}
    for name, spec in reader.buffer_specs(coordinate).items():
        out[name] = np.full(spec.shape, 77 if spec.dtype.kind in "iu" else 1e30, spec.dtype)
    stats = reader.read_into(index, out, coordinate)
    assert stats.bytes_fetched == reader.plan(index, rank).bytes_fetched
    return out


def assert_reassembles(reader, wanted, index=0):
    """Owned parts cover the full read bit for bit, and every halo row is its owner's."""
    partition = reader.partition
    for name in reader.fields:
        covered = np.zeros(reader.global_shape(name), int)
        whole = np.asarray(wanted[name])
        assert whole.shape == covered.shape
        for rank in range(partition.num_parts):
            coordinate = partition.coordinate(rank)
            part = read_part(reader, index, rank)[name]
            assert part.dtype == whole.dtype
            rows, owned = [], []
            for dim, size in zip(reader.dims(name), covered.shape, strict=True):
                if dim == reader.sample_dim:
                    start, stop, below, above = 0, size, 0, 0
                else:
                    start, stop = partition.owned_rows(dim, coordinate)
                    below, above = partition.halo_rows(dim, coordinate)
                rows.append(np.arange(start - below, stop + above) % max(size, 1))
                owned.append(np.arange(start, stop))
            expected = whole[np.ix_(*rows)]
            assert part.tobytes() == expected.tobytes()
            covered[np.ix_(*owned)] += 1
        assert np.all(covered == 1)


HALOS = [
    ({}, ()),
    ({"latitude": 2}, ()),
    ({"latitude": (0, 3)}, ("latitude",)),
    ({"latitude": (5, 1), "longitude": (1, 2)}, ("longitude",)),
    ({"latitude": 30}, ("latitude",)),  # wider than every shard, and than the whole dimension: wraps onto itself
]
BOUNDS_1D = ["even", "chunk", "explicit"]
CUT_IN_ALL_WAYS = ("netcdf4", "zarr3")  # the others, which differ in where their chunks are, in fewer


def explicit(size, num_parts):
    """Uneven bounds with an empty part wherever there are three parts or more."""
    cuts = [0] + [max(1, size // 3)] * (num_parts - 1) + [size]
    return sorted(cuts) if num_parts > 1 else [0, size]


@pytest.mark.parametrize("fmt", GRID_FORMATS)
def test_every_cut_reassembles(fmt, tmp_path):
    path = tmp_path / "store"
    wanted = make_grid(path, format=fmt, num_times=2, num_levels=2, num_lat=13, num_lon=8)
    one = {"v": wanted["v"][1]}
    numbers = range(1, 8) if fmt in CUT_IN_ALL_WAYS else (1, 3, 7)
    for num_parts, bounds, (halo, periodic) in itertools.product(numbers, BOUNDS_1D, HALOS):
        reader = GridReader(
            str(path),
            ReadOptions(
                fields=list(one),
                shard={"latitude": "domain"},
                bounds=explicit(13, num_parts) if bounds == "explicit" else bounds,
                halo=halo,
                periodic=periodic,
                num_threads=1,
            ),
            axis_sizes={"domain": num_parts},
        )
        assert_reassembles(reader, one, index=1)


@pytest.mark.parametrize("fmt", GRID_FORMATS)
def test_two_dimensional_domains_reassemble(fmt, tmp_path):
    path = tmp_path / "store"
    wanted = make_grid(path, format=fmt, num_times=2, num_levels=2, num_lat=13, num_lon=8)
    one = {"t": wanted["t"][0]}
    sizes = [(2, 3), (7, 1), (1, 2), (2, 2), (3, 2)][: 5 if fmt in CUT_IN_ALL_WAYS else 2]
    for (h, w), bounds in itertools.product(sizes, BOUNDS_1D):
        cuts = {"latitude": explicit(13, h), "longitude": explicit(8, w)} if bounds == "explicit" else bounds
        for halo, periodic in HALOS:
            reader = GridReader(
                str(path),
                ReadOptions(
                    fields=list(one),
                    shard={"latitude": "h", "longitude": "w"},
                    bounds=cuts,
                    halo=halo,
                    periodic=periodic,
                ),
                axis_sizes={"h": h, "w": w},
            )
            assert_reassembles(reader, one)


@pytest.mark.skipif(not REAL.exists(), reason="the shared sample files are not beside this checkout")
@pytest.mark.filterwarnings("ignore::xarray.SerializationWarning")
def test_the_real_file_reassembles_to_xarrays_decoded_read():
    with xr.open_dataset(REAL) as ds:
        wanted = {name: ds[name].values for name in ("z", "u", "v")}
    for num_parts, (halo, periodic) in itertools.product([1, 4, 7], HALOS):
        reader = GridReader(REAL, ReadOptions(halo=halo, periodic=periodic), axis_sizes={"domain": num_parts})
        assert (reader.sample_dim, reader.num_samples) == ("month", 2)
        assert reader.partition.axis_of_dim == {"latitude": "domain"}
        assert_reassembles(reader, {k: v[1] for k, v in wanted.items()}, index=1)
    cropped = GridReader(
        REAL,
        ReadOptions(
            isel={"latitude": slice(239, None, -2), "longitude": slice(5, 400, 3), "level": [2, 0]},
            halo={"latitude": 1, "longitude": 2},
            periodic="longitude",
            fields=["u"],
        ),
        axis_sizes={"h": 2, "w": 3},
    )
    assert_reassembles(cropped, {"u": wanted["u"][0][[2, 0], 239::-2, 5:400:3]})


@pytest.fixture
def store(tmp_path):
    path = str(tmp_path / "grid.zarr")
    return path, make_grid(path, format="zarr3", num_times=5, num_lat=12, num_lon=10)


def test_steps_keep_the_sample_dimension_in_its_place(store):
    path, wanted = store
    reader = GridReader(path, ReadOptions(fields=["u"], steps=(0, 2)), axis_sizes={"domain": 2})
    assert reader.num_samples == 3
    assert reader.dims("u")[0] == "time"
    assert_reassembles(reader, {"u": wanted["u"][[1, 3]]}, index=1)
    back = GridReader(path, ReadOptions(fields=["u"], steps=(-1, 0)))
    assert back.num_samples == 4
    assert_reassembles(back, {"u": wanted["u"][[0, 1]]}, index=0)
    strided = GridReader(path, ReadOptions(fields=["u"], steps=(0, 1), isel={"time": slice(None, None, 2)}))
    assert strided.num_samples == 2
    assert_reassembles(strided, {"u": wanted["u"][[2, 4]]}, index=1)


def test_files_follow_each_other_along_time(tmp_path):
    parts = []
    for year in range(3):
        path = tmp_path / f"era5_{2015 + year}.nc"
        parts.append(make_grid(path, format="netcdf4", num_times=2 + year, seed=year, first_time=10 * year))
    whole = np.concatenate([p["u"] for p in parts])
    reader = GridReader(
        str(tmp_path / "era5_*.nc"), ReadOptions(fields=["u"], steps=(0, 1), gaps="allow"), axis_sizes={"domain": 2}
    )
    assert reader.num_samples == 8
    for index in range(8):
        assert_reassembles(reader, {"u": whole[index : index + 2]}, index=index)
    assert len(reader.coordinate("time")) == 9


def test_files_that_disagree_are_refused(tmp_path):
    def write(name, **options):
        make_grid(tmp_path / name, format="netcdf4", num_times=2, **options)
        return str(tmp_path / name)

    first = write("a.nc", first_time=0)
    cases = {
        "has shape": write("b.nc", num_lat=20, first_time=10),
        "coordinate 'longitude' differs|has shape": write("c.nc", num_lon=25, first_time=10),
        "has dtype": write("d.nc", packed=True, first_time=10),
        "list the files in order": write("e.nc", first_time=0),
    }
    for words, other in cases.items():
        with pytest.raises(FieldMismatchError, match=words):
            GridReader([first, other])


def test_dims_of_one_row_and_static_fields(store):
    path, wanted = store
    reader = GridReader(path, ReadOptions(fields=["u"], isel={"level": 1}), axis_sizes={"domain": 3})
    assert reader.dims("u") == ("latitude", "longitude")
    assert_reassembles(reader, {"u": wanted["u"][0, 1]})


def test_weights_by_field_name(store):
    path, _ = store
    reader = GridReader(
        path, ReadOptions(fields=["u"], weights="latitude", isel={"latitude": slice(0, 5)}), axis_sizes={"domain": 2}
    )
    rows = reader.coordinate("latitude")
    bounds = reader.partition.bounds["latitude"]
    halves = rows[: bounds[1]].sum(), rows[bounds[1] :].sum()
    assert abs(halves[0] - halves[1]) <= rows.max()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fields": ["uu"]}, UnknownNameError, "no field 'uu'; did you mean 'u'"),
        ({"fields": []}, ConfigError, "empty"),
        ({"shard": {"latitude": "domian"}}, UnknownNameError, "did you mean 'domain'"),
        ({"sample_dim": "tim"}, UnknownNameError, "did you mean 'time'"),
        ({"sample_dim": "time", "shard": {"time": "domain"}}, ConfigError, "cannot be sharded as well"),
        ({"halo": {"time": 1}}, ConfigError, "use steps"),
        ({"steps": ()}, ConfigError, "steps is empty"),
        (
            {"fields": ["u", "time"], "shard": {"latitude": "domain"}, "isel": {"latitude": slice(9, 3)}},
            ConfigError,
            "no rows",
        ),
        ({"axis_sizes": {"domain": 13}, "shard": {"latitude": "domain"}}, ConfigError, "at most 12 ranks"),
        ({"axis_sizes": {"domain": 50}}, ConfigError, "no dimension can be split over the 50 ranks"),
    ],
)
def test_bad_arguments_fail_before_any_data_is_read(store, options, error, words):
    axis_sizes = options.get("axis_sizes", {"domain": 2})
    asked = {name: value for name, value in options.items() if name != "axis_sizes"}
    with pytest.raises(error, match=words):
        GridReader(store[0], ReadOptions(**asked), axis_sizes=axis_sizes)


def test_samples_out_of_range(store):
    reader = GridReader(store[0], ReadOptions(steps=(0, 1)))
    assert reader.plan(-1).index == -1
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"sample {index} is out of range: there are 4 samples with steps"):
            reader.plan(index)
    with pytest.raises(ConfigError, match="rank 1 is out of range"):
        reader.plan(0, rank=1)


@pytest.mark.parametrize("fmt", ["zarr3", "zarr3_sharded", "netcdf4", "netcdf3"])
def test_samples_are_planned_once(fmt, tmp_path, monkeypatch):
    path = tmp_path / "store"
    make_grid(path, format=fmt, num_times=4, num_lat=13, num_lon=24)
    options = ReadOptions(shard={"latitude": "domain"}, halo={"latitude": 1})
    wanted = [read_part(GridReader(path, options, axis_sizes={"domain": 2}), i, 1) for i in range(3)]
    planned, plan_fields = [], Planner.plan_fields
    monkeypatch.setattr(Planner, "plan_fields", lambda self, i, *rest: planned.append(i) or plan_fields(self, i, *rest))
    reader = GridReader(path, options, axis_sizes={"domain": 2})
    for _ in range(3):
        for i in (2, 0, 1):
            found = read_part(reader, i, 1)
            assert all(found[name].tobytes() == wanted[i][name].tobytes() for name in reader.fields)
    assert planned == [2, 0, 1]
    pickle.loads(pickle.dumps(reader)).plan(0, 1)
    assert planned == [2, 0, 1, 0]
    reader.close()  # the files may be others when it is used again
    reader.plan(0, 1)
    reader.plan(0, 0)
    assert planned == [2, 0, 1, 0, 0, 0]


def test_a_kept_plan_of_a_file_that_was_cut_off_names_it(tmp_path):
    path = tmp_path / "grid.nc"
    make_grid(path, format="netcdf3", num_times=2)
    reader = GridReader(path)
    read_part(reader, 1, 0)
    os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(SourceChangedError, match=r"grid\.nc: .* 3.* bytes"):
        read_part(reader, 1, 0)


def test_absent_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file matches"):
        GridReader(str(tmp_path / "*.nc"))
    with pytest.raises(FileNotFoundError, match=r"absent\.nc"):
        GridReader(str(tmp_path / "absent.nc"))


@pytest.mark.parametrize("fmt", GRID_FORMATS)
def test_lists_of_indices_of_any_dim(fmt, tmp_path):
    path = tmp_path / "grid"
    make_grid(path, format=fmt, num_times=5, num_lat=150, num_lon=9)
    rng = np.random.default_rng(0)
    crop = {"latitude": rng.permutation(150)[:100].tolist(), "time": [3, 0, 4], "longitude": [8, 2, 3]}
    reader = GridReader(
        path,
        ReadOptions(shard={"latitude": "domain"}, isel=crop, halo={"latitude": 2}, fields=["u"]),
        axis_sizes={"domain": 3},
    )
    wanted = GridReader(path, ReadOptions(fields=["u"]))
    for index, row in enumerate(crop["time"]):
        whole = read_part(wanted, row, 0)["u"]
        dims = wanted.dims("u")
        for dim in ("latitude", "longitude"):
            whole = whole.take(crop[dim], axis=dims.index(dim))
        assert_reassembles(reader, {"u": whole}, index)

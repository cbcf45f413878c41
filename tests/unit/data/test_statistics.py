"""Statistics of data sets of every kind, against NumPy and xarray over the whole data; what is refused; their files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xarray as xr
import zarr
from torch.utils.data import Subset

import scidata
from scidata.core import passes
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    OutputError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.grids import passes as grid_passes
from scidata.testing import GRID_FORMATS, make_grid
from tests.real_layouts.make import anemoi
from tests.writers import triangulation, write_hdf5

DATA = Path(__file__).parents[4] / "shared" / "data"
AXES = {(): (0, 1, 2, 3), ("level",): (0, 2, 3), ("latitude", "level"): (0, 3), ("longitude",): (0, 1, 2)}
TOTALS = {"mean": np.nanmean, "std": np.nanstd, "min": np.nanmin, "max": np.nanmax}


def check(found: Any, values: npt.NDArray[Any], axis: Any, *, steps: npt.NDArray[Any] | None = None) -> None:
    """Compare the figures of a field with NumPy's of (time, level, latitude, longitude), or any other array."""
    values = values.astype("f8")
    np.testing.assert_array_equal(found.count, np.isfinite(values).sum(axis=axis).T)
    np.testing.assert_array_equal(found.missing, np.isnan(values).sum(axis=axis).T)
    for name, function in TOTALS.items():
        np.testing.assert_allclose(getattr(found, name), function(values, axis=axis).T, rtol=1e-12, atol=1e-13)
    if steps is not None:
        np.testing.assert_array_equal(found.difference_count, np.isfinite(steps).sum(axis=axis).T)
        for name, function in TOTALS.items():
            wanted = function(steps, axis=axis).T
            np.testing.assert_allclose(getattr(found, f"difference_{name}"), wanted, rtol=1e-12, atol=1e-13)


def same(one: scidata.Statistics, other: scidata.Statistics) -> bool:
    """Whether all numbers are the same, bit for bit."""
    numbers = [
        [np.asarray(list(row.values())[2:], dtype=object).tolist() for row in stats.rows()] for stats in (one, other)
    ]
    return repr(numbers[0]) == repr(numbers[1]) and list(one) == list(other)


# -- grids ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("grid") / "grid.zarr")
    return path, make_grid(path, num_times=11, num_lat=17, num_lon=20, packed=True, chunks=(4, 2, 7, 20))


@pytest.mark.parametrize("format", GRID_FORMATS)
@pytest.mark.parametrize("packed", [False, True])
def test_formats(tmp_path: Path, format: str, packed: bool) -> None:
    wanted = make_grid(tmp_path / "grid", format=format, num_times=5, packed=packed)
    stats = scidata.statistics(scidata.open_dataset(tmp_path / "grid"), by="level")
    for name in ("u", "v", "t"):
        check(stats[name], wanted[name], (0, 2, 3), steps=np.diff(wanted[name].astype("f8"), axis=0))
        assert stats[name].dtype == str(wanted[name].dtype)
    assert stats["t"].units == "K"
    assert stats.labels["level"] == tuple(wanted["level"].tolist())


@pytest.mark.parametrize("by", AXES)
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, slice(None)),
        ({"steps": (0, 1)}, slice(None)),
        ({"steps": (-3, 0, 2)}, slice(None)),
        ({"isel": {"time": slice(2, 9, 3)}}, slice(2, 9, 3)),
        ({"isel": {"time": slice(None, None, -1)}}, slice(None, None, -1)),
        ({"sel": {"time": slice("2020-01-01T06", "2020-01-02")}}, slice(1, 8)),
        ({"isel": {"time": slice(4, 9)}, "steps": (0, 2)}, slice(4, 9)),
    ],
)
def test_periods(packed: Any, by: tuple[str, ...], options: dict[str, Any], times: slice) -> None:
    path, wanted = packed
    ds = scidata.open_dataset(path, fields=["u", "t"], **options)
    stats = scidata.statistics(ds, by=by)
    for name in ("u", "t"):
        values = wanted[name][times]
        check(stats[name], values, AXES[by], steps=np.diff(values.astype("f8"), axis=0))
    assert stats.period["rows"] == len(wanted["time"][times])
    assert stats.period["samples"] == len(ds)
    assert stats.fingerprint == ds.fingerprint


def test_crops_and_single_levels(packed: Any) -> None:
    path, wanted = packed
    ds = scidata.open_dataset(path, fields="u", isel={"level": [2, 0], "latitude": slice(3, 12, 2)})
    check(scidata.statistics(ds, by="level")["u"], wanted["u"][:, [2, 0], 3:12:2], (0, 2, 3))
    ds = scidata.open_dataset(path, fields="u", isel={"level": 1})
    check(scidata.statistics(ds)["u"], wanted["u"][:, 1], None)
    ds = scidata.open_dataset(path, fields="u", decode=False)
    check(scidata.statistics(ds)["u"], zarr.open_group(path)["u"][...], None)


def test_bits_do_not_depend_on_jobs_files_chunks_or_tiles(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed
    ds = scidata.open_dataset(path, fields=["u", "t"])
    whole = scidata.statistics(ds, by="level")
    by_latitude = scidata.statistics(ds, by="latitude")
    assert same(scidata.statistics(ds, by="level", jobs=2), whole)
    for first in (0, 4, 6):
        last = {0: 4, 4: 6, 6: 11}[first]
        with xr.open_zarr(path, mask_and_scale=False, consolidated=False) as source:
            source.isel(time=slice(first, last)).load().to_netcdf(tmp_path / f"{first}.nc")
    files = scidata.open_dataset(str(tmp_path / "?.nc"), fields=["u", "t"])
    assert same(scidata.statistics(files, by="level"), whole)
    for limit in (1, 3_000, 20_000):
        monkeypatch.setitem(grid_passes.GridPass.__init__.__kwdefaults__, "max_bytes", limit)
        assert same(scidata.statistics(ds, by="level"), whole), limit
        assert same(scidata.statistics(ds, by=("latitude",)), by_latitude), limit


@pytest.mark.parametrize("limit", [128 << 20, 9_000])
def test_each_chunk_is_decoded_once(packed: Any, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    path, decoded, largest = packed[0], [], []
    read = grid_passes.read_plan

    def counting(plan: Any, out: npt.NDArray[Any], **options: Any) -> Any:
        stats = read(plan, out, **options)
        decoded.append(stats.bytes_decoded)
        largest.append(out.nbytes)
        return stats

    monkeypatch.setattr(grid_passes, "read_plan", counting)
    monkeypatch.setitem(grid_passes.GridPass.__init__.__kwdefaults__, "max_bytes", limit)
    ds = scidata.open_dataset(path, fields=["u"], steps=(0, 1))
    layout = ds.reader.layout("u")
    scidata.statistics(ds, by="level")
    whole = np.prod([-(-n // c) * c for n, c in zip(layout.shape, layout.chunks, strict=True)]) * 2
    assert sum(decoded) == whole, "bytes of int16 that came out of decoding"
    assert max(largest) <= max(limit, 4 * 3 * 7 * 20 * 8)
    assert len(decoded) == (1 if limit > 1 << 20 else 18)


def test_blocks_follow_chunks_and_tiles_follow_memory() -> None:
    starts = np.array([0, 3, 7, 11])
    apart = np.array([True, False, False, True])
    assert passes.merged_blocks(starts, 13, 1, apart).tolist() == list(range(14))
    assert passes.merged_blocks(starts, 13, 4, apart).tolist() == [0, 3, 7, 11, 13]
    assert passes.merged_blocks(starts, 13, 8, apart).tolist() == [0, 7, 11, 13]
    assert passes.merged_blocks(starts, 13, 99, apart).tolist() == [0, 11, 13]
    assert passes.merged_blocks(np.array([0]), 0, 9, np.array([True])).tolist() == [0]


def test_gaps_make_no_differences(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(8, 3, 4))
    times = np.array([0, 6, 12, 36, 42, 48, 48, 54])  # a day is missing, and one time comes twice
    labels = ("time", times, {"units": "hours since 2000-01-01"})
    data = xr.Dataset({"u": (("time", "lat", "lon"), values)}, {"time": labels})
    data.to_netcdf(tmp_path / "gap.nc")
    stats = scidata.statistics(scidata.open_dataset(tmp_path / "gap.nc"))
    kept = np.diff(values, axis=0)[[0, 1, 3, 4, 6]]
    check(stats["u"], values, None, steps=kept)
    assert stats["u"].skipped == 2
    months = np.array([0, 31, 59, 90, 120, 151, 181, 212])
    data["time"] = ("time", months, {"units": "days since 2001-01-01"})
    data.to_netcdf(tmp_path / "months.nc")
    stats = scidata.statistics(scidata.open_dataset(tmp_path / "months.nc"))
    assert stats["u"].skipped == 0
    check(stats["u"], values, None, steps=np.diff(values, axis=0))


def test_trajectories_do_not_run_into_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    group = zarr.open_group(tmp_path / "runs.zarr", mode="w")
    u, shared, fixed = rng.normal(size=(3, 5, 4, 6)), rng.normal(size=(5, 4, 6)), rng.normal(size=(3, 4, 6))
    grid = ["y", "x"]
    group.create_array("u", data=u, chunks=(1, 2, 4, 6), dimension_names=["trajectory", "time", *grid])
    group.create_array("shared", data=shared, chunks=(1, 4, 6), dimension_names=["time", *grid])
    group.create_array("fixed", data=fixed, chunks=(1, 4, 6), dimension_names=["trajectory", *grid])
    group.create_array("still", data=fixed[0], dimension_names=grid)
    ds = scidata.open_dataset(tmp_path / "runs.zarr", sample_dim=("trajectory", "time"), steps=(0, 1))
    stats = scidata.statistics(ds)
    check(stats["u"], u, None, steps=np.diff(u, axis=1))
    check(stats["shared"], shared, None, steps=np.diff(shared, axis=0))
    check(stats["fixed"], fixed, None)
    check(stats["still"], fixed[0], None)
    assert stats["fixed"].differences is None
    with pytest.raises(UnknownNameError, match="no differences"):
        _ = stats["still"].difference_std
    with pytest.raises(UnknownNameError, match="by names 'time'"):
        scidata.statistics(ds, by="time")


def test_subsets_and_combinations(packed: Any, tmp_path: Path) -> None:
    path, wanted = packed
    ds = scidata.open_dataset(path, fields=["u"])
    values = wanted["u"]
    chosen = scidata.statistics(scidata.subset(ds, [7, 0, 1, 2, 7]))
    check(chosen["u"], values[[0, 1, 2, 7]], None, steps=np.diff(values[:3], axis=0))
    check(scidata.statistics(Subset(ds, [3, 4]))["u"], values[3:5], None, steps=np.diff(values[3:5], axis=0))
    more = make_grid(tmp_path / "more.zarr", num_times=3, num_lat=17, num_lon=20, seed=3)
    other = scidata.open_dataset(tmp_path / "more.zarr", fields=["u"])
    both = scidata.subset(scidata.concat(ds, other), range(2, 13))
    found = scidata.statistics(both, by="level")
    every = np.concatenate([values[2:], more["u"][:2]])
    steps = np.concatenate([np.diff(x.astype("f8"), axis=0) for x in (values[2:], more["u"][:2])])
    check(found["u"], every, (0, 2, 3), steps=steps)
    assert same(
        scidata.statistics(scidata.mix([ds, other], [1, 1]), by="level"),
        scidata.statistics(scidata.concat(ds, other), by="level"),
    )
    upside_down = scidata.open_dataset(path, fields=["u"], isel={"level": [2, 1, 0]})
    with pytest.raises(FieldMismatchError, match="differ along 'level'"):
        scidata.statistics(scidata.concat(ds, upside_down), by="level")
    assert scidata.statistics(scidata.concat(ds, upside_down))["u"].count == 2 * scidata.statistics(ds)["u"].count


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "u4", "i8", "?", ">f4"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 90, (6, 5, 8)).astype(dtype)
    path = write_hdf5(tmp_path / "grid.h5", {"u": values}, {"u": ("time", "lat", "lon")})
    stats = scidata.statistics(scidata.open_dataset(path, kind="grid"))
    check(stats["u"], values, None, steps=np.diff(values.astype("f8"), axis=0))


def test_hard_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fields = {
        "far": 1e8 + rng.normal(size=(6, 5, 8)),
        "none": np.full((6, 5, 8), np.nan),
        "some": np.where(rng.random((6, 5, 8)) < 0.3, np.nan, rng.normal(size=(6, 5, 8))),
        "endless": np.where(rng.random((6, 5, 8)) < 0.3, -np.inf, rng.normal(size=(6, 5, 8))),
        "same": np.full((6, 5, 8), 0.1),
    }
    path = write_hdf5(tmp_path / "grid.h5", fields, dict.fromkeys(fields, ("time", "lat", "lon")))
    stats = scidata.statistics(scidata.open_dataset(path, kind="grid"))
    check(stats["far"], fields["far"], None, steps=np.diff(fields["far"], axis=0))
    check(stats["some"], fields["some"], None, steps=np.diff(fields["some"], axis=0))
    assert stats["none"].count == 0
    assert stats["none"].missing == fields["none"].size
    assert all(np.isnan(getattr(stats["none"], name)) for name in TOTALS)
    finite = fields["endless"][np.isfinite(fields["endless"])]
    assert (stats["endless"].infinite, stats["endless"].missing) == (240 - len(finite), 0)
    np.testing.assert_allclose(stats["endless"].std, finite.std(), rtol=1e-12)
    assert (float(stats["same"].mean), float(stats["same"].std), float(stats["same"].difference_std)) == (0.1, 0, 0)


def test_what_is_the_same_in_all_samples_counts_once(tmp_path: Path) -> None:
    make_grid(tmp_path / "grid.zarr", num_times=4)
    z = np.random.default_rng(0).normal(size=(19, 24))
    group = zarr.open_group(tmp_path / "grid.zarr")
    group.create_array("z", data=z, chunks=(5, 24), dimension_names=["latitude", "longitude"])
    stats = scidata.statistics(scidata.open_dataset(tmp_path / "grid.zarr", fields=["u", "z"]), by="level")
    check(stats["z"], z, None)
    assert (stats["z"].dims, stats["u"].dims) == ((), ("level",))


@pytest.mark.parametrize("name", ["u", "z"])
def test_era_interim(name: str) -> None:
    path = DATA / "eraint_uvz.nc"
    if not path.exists():
        pytest.skip("needs the real file")
    stats = scidata.statistics(scidata.open_dataset(path), by="level")
    with xr.open_dataset(path) as source:
        values = source[name].values.astype("f8")
    check(stats[name], values, (0, 2, 3))
    wanted = np.diff(values, axis=0)
    np.testing.assert_allclose(stats[name].difference_std, wanted.std(axis=(0, 2, 3)), rtol=1e-12)


# -- stores and clouds -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: Any) -> tuple[str, list[dict[str, Any]]]:
    """Meshes with a vector, a field of cells, one that varies over time, and one behind time."""
    folder, rng, every = tmp_path_factory.mktemp("meshes"), np.random.default_rng(0), []
    for number, size in enumerate((60, 41)):
        arrays = triangulation(rng.random((size, 2)))
        arrays |= {
            "node/speed": rng.normal(10, 3, size),
            "node/height": rng.normal(1e6, 1, size),
            "node/wind": rng.normal(size=(size, 3)).astype("f4"),
            "cell/area": rng.random(len(arrays["cells"])),
            "node/moving": rng.normal(size=(4 + number, size)).astype("f4"),
        }
        dims = {"node/moving": ("time", "node"), "node/speed": ("node",), "node/wind": ("node", "xyz")}
        write_hdf5(folder / f"{number}.h5", arrays, dims)
        every.append(arrays)
    scidata.partition(str(folder / "?.h5"), str(folder / "out.store"))
    return str(folder / "out.store"), every


def test_stores(meshes: Any) -> None:
    path, every = meshes
    wind = np.concatenate([arrays["node/wind"] for arrays in every])
    for stored in (None, False):
        ds = scidata.open_dataset(path)
        stats = scidata.statistics(ds, by="xyz", stored=stored)
        for component in range(3):
            np.testing.assert_allclose(stats["wind"].std[component], wind[:, component].astype("f8").std(), rtol=1e-12)
        check(stats["speed"], np.concatenate([arrays["node/speed"] for arrays in every]), None)
        check(stats["area"], np.concatenate([arrays["cell/area"] for arrays in every]), None)
        flat = np.concatenate([arrays["node/moving"].reshape(-1) for arrays in every])
        steps = np.concatenate([np.diff(arrays["node/moving"].astype("f8"), axis=0).reshape(-1) for arrays in every])
        check(stats["moving"], flat, None, steps=steps)
        check(scidata.statistics(ds, fields="wind", stored=stored)["wind"], wind, None)
    first = scidata.subset(scidata.open_dataset(path, steps=(0, 1)), [0, 1])
    found = scidata.statistics(first)
    check(found["speed"], every[0]["node/speed"], None)
    moving = every[0]["node/moving"][:3]
    check(found["moving"], moving, None, steps=np.diff(moving.astype("f8"), axis=0))


def test_what_a_store_has_of_itself_is_not_read_again(meshes: Any) -> None:
    path, every = meshes
    ds = scidata.open_dataset(path, fields=["speed", "wind"])
    found = scidata.statistics(ds)
    assert found.source == "store"
    far = scidata.open_dataset(path, fields=["height"])
    assert scidata.statistics(far, stored=True).source == "store"
    heights = scidata.statistics(far)
    assert heights.source == "data", "merged figures are not precise enough"
    np.testing.assert_allclose(
        heights["height"].std, np.concatenate([a["node/height"] for a in every]).std(), rtol=1e-12
    )
    assert scidata.statistics(ds, stored=False).source == "data"
    moving = scidata.open_dataset(path, fields=["moving"])
    assert scidata.statistics(moving).source == "data", "the store knows no differences"
    assert scidata.statistics(moving, differences=False).source == "store"
    assert scidata.statistics(moving, stored=True)["moving"].differences is None
    assert scidata.statistics(scidata.subset(ds, [0])).source == "data"
    with pytest.raises(ConfigError, match="no figures of speed"):
        scidata.statistics(scidata.subset(ds, [0]), stored=True, fields="speed")
    with pytest.raises(ConfigError, match="no figures of pos"):
        scidata.statistics(scidata.open_dataset(path), stored=True)


def test_all_rows_count_where_some_are_drawn(meshes: Any) -> None:
    path, every = meshes
    ds = scidata.open_dataset(path, fields=["speed"], subsample={"node": 10})
    check(scidata.statistics(ds, stored=False)["speed"], np.concatenate([a["node/speed"] for a in every]), None)


def test_clouds(tmp_path: Path) -> None:
    rng, every = np.random.default_rng(0), []
    for number, size in enumerate((9, 4)):
        every.append(rng.normal(size=size))
        write_hdf5(tmp_path / f"{number}.h5", {"pos": rng.random((size, 3)), "speed": every[-1]})
    ds = scidata.open_dataset(str(tmp_path / "?.h5"), kind="points", subsample={"point": 2})
    stats = scidata.statistics(ds)
    check(stats["speed"], np.concatenate(every), None)
    check(scidata.statistics(scidata.subset(ds, [1]))["speed"], every[1], None)
    assert stats["pos"].count == 39
    with pytest.raises(UnknownNameError, match="by names 'point'"):
        scidata.statistics(ds, by="point")


def test_anemoi_brings_its_own(tmp_path: Path) -> None:
    anemoi(tmp_path / "aifs.zarr")
    group = zarr.open_group(tmp_path / "aifs.zarr")
    ds = scidata.open_dataset(tmp_path / "aifs.zarr", isel={"variable": [2, 0]})
    stats = scidata.statistics(ds, stored=True)
    assert stats["data"].dims == ("variable",)
    assert stats.labels["variable"] == ("z_500", "2t")
    np.testing.assert_array_equal(stats["data"].std, group["stdev"][...][[2, 0]])
    np.testing.assert_array_equal(stats["data"].min, group["minimum"][...][[2, 0]])
    own = scidata.statistics(ds, by="variable")
    check(own["data"], group["data"][:, [2, 0]], (0, 2, 3))
    assert own.labels == stats.labels


# -- what is refused --------------------------------------------------------------------------------------------------


def test_refused(packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = scidata.open_dataset(packed[0])
    with pytest.raises(UnknownNameError, match="did you mean 'level'"):
        scidata.statistics(ds, by="levels")
    with pytest.raises(UnknownNameError, match="no field 'w'"):
        scidata.statistics(ds, fields=["w"])
    with pytest.raises(ConfigError, match="jobs must be at least 1"):
        scidata.statistics(ds, jobs=0)
    with pytest.raises(TypeError, match="did you mean 'differences'"):
        scidata.statistics(ds, difference=False)
    with pytest.raises(ConfigError, match=r"expected a data set of scidata\.open_dataset, not list"):
        scidata.statistics([1])
    with pytest.raises(ConfigError, match="no figures of"):
        scidata.statistics(ds, stored=True)
    monkeypatch.setattr("scidata.data.statistics._MAX_CELLS", 50)
    with pytest.raises(ConfigError, match="51 figures of 'u' by level, latitude"):
        scidata.statistics(ds, by=("level", "latitude"), fields=["u"])
    waves = write_hdf5(tmp_path / "waves.h5", {"w": np.ones((3, 4, 5), "c8")}, {"w": ("time", "lat", "lon")})
    with pytest.raises(ConfigError, match="'w' is complex64"):
        scidata.statistics(scidata.open_dataset(waves, kind="grid"))


def test_damaged_data_are_an_error_in_jobs_too(tmp_path: Path) -> None:
    make_grid(tmp_path / "grid.zarr", num_times=3)
    chunk = next(path for path in (tmp_path / "grid.zarr" / "u" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(b"damaged")
    ds = scidata.open_dataset(tmp_path / "grid.zarr")
    for jobs in (1, 2):
        with pytest.raises(CorruptDataError, match="'u'"):
            scidata.statistics(ds, jobs=jobs)


# -- files ------------------------------------------------------------------------------------------------------------


def test_files(packed: Any, tmp_path: Path) -> None:
    stats = scidata.statistics(scidata.open_dataset(packed[0]), by="level")
    path = tmp_path / "stats.json"
    stats.save(path)
    again = scidata.Statistics.load(path)
    assert same(again, stats)
    assert (again.labels, again.period, again.fingerprint, again.path, again.source) == (
        *(stats.labels, stats.period, stats.fingerprint, stats.path, stats.source),
    )
    assert again["u"].units == stats["u"].units
    assert same(pickle.loads(pickle.dumps(stats)), stats)
    with pytest.raises(OutputError, match="is there already"):
        stats.save(path)
    stats.save(path, overwrite=True)
    assert os.listdir(tmp_path) == ["stats.json"], "no temporary file is left"
    assert "mean" in repr(stats)
    assert "std" in stats._repr_html_()
    with pytest.raises(UnknownNameError, match="did you mean 'u'"):
        _ = stats["U"]


def test_nothing_known_is_null_and_comes_back(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "grid.h5", {"u": np.full((3, 4, 5), np.nan)}, {"u": ("time", "lat", "lon")})
    stats = scidata.statistics(scidata.open_dataset(path, kind="grid"))
    stats.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["fields"]["u"]["values"]["mean"] is None
    assert np.isnan(scidata.Statistics.load(tmp_path / "s.json")["u"].mean)


def broken(change: Any) -> Any:
    def make(data: dict[str, Any]) -> str:
        change(data)
        return json.dumps(data)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: "{", "no JSON"),
        (lambda data: "[" * 100_000, "no JSON"),
        (lambda data: "[]", "format: expected 'scidata statistics'"),
        (lambda data: '{"version": NaN}', "NaN is no JSON"),
        (broken(lambda d: d.update(version=2)), "version: expected 1"),
        (broken(lambda d: d.update(version=True)), "version: expected an integer"),
        (broken(lambda d: d.pop("fields")), "fields: expected an object"),
        (broken(lambda d: d.update(path=3)), "path: expected text"),
        (broken(lambda d: d["fields"]["u"].pop("values")), r"fields\.u\.values: expected an object"),
        (broken(lambda d: d["fields"]["u"]["values"].update(mean=[1, 2])), r"mean: expected numbers of shape \(3,\)"),
        (broken(lambda d: d["fields"]["u"]["values"].update(mean=["1", 2, 3])), "mean: expected numbers"),
        (broken(lambda d: d["fields"]["u"]["values"].update(count=[1.5, 2, 3])), "count: expected numbers"),
        (broken(lambda d: d["fields"]["u"]["values"].update(count=[-1, 2, 3])), "count: expected no negative"),
        (broken(lambda d: d["fields"]["u"]["values"].update(count=[10**30, 2, 3])), "count: expected numbers"),
        (broken(lambda d: d["fields"]["u"].update(dims=["level", "level"])), "dims: expected names of dims"),
        (broken(lambda d: d["fields"]["u"].update(shape=[10**12])), r"level: expected 1000000000000 labels"),
        (broken(lambda d: d["labels"].update(level=[[1], 2, 3])), r"labels\.level: expected a list"),
        (broken(lambda d: d["fields"]["u"]["differences"].update(skipped="x")), r"differences\.skipped"),
        (broken(lambda d: d["period"].update(samples=[1])), r"period\.samples"),
    ],
)
def test_faulty_files(packed: Any, tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "stats.json"
    stats = scidata.statistics(scidata.open_dataset(packed[0], fields=["u"]), by="level")
    stats.save(path)
    path.write_text(make(json.loads(path.read_text())))
    with pytest.raises(UnsupportedFormatError, match=message):
        scidata.Statistics.load(path)

"""What users get wrong in their first hours: one line, which says what was found and one thing to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import scidata
from scidata.core.options import ReadOptions
from scidata.data.raw_report import inspect_store
from scidata.errors import ConfigError, CorruptDataError, SciDataError, UnsupportedFormatError
from scidata.grids.plan import cheaper_cuts, plan_grid
from scidata.grids.reader import GridReader

LON = np.arange(8) * 45.0


def write(path: Path, *, units: str = "days since 2000-01-01", calendar: str | None = None, lon: Any = LON) -> str:
    group = zarr.open_group(path, mode="w")

    def add(name: str, values: Any, dims: tuple[str, ...], **attributes: str) -> None:
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, dimension_names=dims)
        array[...] = values
        array.attrs.update(attributes)

    add("time", np.arange(4.0), ("time",), units=units, **({} if calendar is None else {"calendar": calendar}))
    add("lat", np.arange(-10.0, 11, 10), ("lat",), units="degrees_north")
    add("lon", np.asarray(lon, float), ("lon",), units="degrees_east")
    values = np.zeros((4, 3, 8), "f4") + np.asarray(lon)
    add("u", values.astype("f4"), ("time", "lat", "lon"))
    return str(path)


def said(call: Callable[[], Any], kind: type[Exception] = SciDataError) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


TIMES = {
    ("months since 2000-01-01", None): "whose length is not the same everywhere",
    ("years since 2000-01-01", "standard"): "whose length is not the same everywhere",
    ("days since 2000-01-01", "360"): "in calendar '360', which xarray and cftime do not decode",
    ("days since 2000-01-01", "none"): "in calendar 'none', which xarray and cftime do not decode",
    ("days since 0000-01-01", None): "there is no year 0 in this calendar",
    ("hours since 2000-13-45", None): "which xarray and cftime do not decode (invalid month",
}


@pytest.mark.parametrize(("units", "calendar"), TIMES)
def test_times_that_nobody_decodes(tmp_path, units, calendar):
    pytest.importorskip("xarray")
    pytest.importorskip("cftime")
    path = write(tmp_path / "t.zarr", units=units, calendar=calendar)
    for call in (
        lambda: scidata.open_dataset(path, coords=True)[1].coords,
        lambda: scidata.open_dataset(path, sel={"time": "2000-01-02"}),
        scidata.open_dataset(path)[1].to_xarray,
    ):
        text = said(call, UnsupportedFormatError)
        assert f"times of 'time' count {units!r}" in text
        assert TIMES[units, calendar] in text
        assert "choose rows by number (isel)" in text
        assert "decode_times" not in text
    assert scidata.open_dataset(path, fields=["time", "u"])[1]["time"] == 1


WRAPPED = [*LON[:5], *(LON[5:] - 360)]  # 0 … 180, -135 … -45
FROM_180 = np.roll(LON, 4)


@pytest.mark.parametrize(
    ("lon", "wanted", "values"),
    [
        (WRAPPED, slice(-45, 45), [-45, 0, 45]),
        (WRAPPED, slice(-90, 0), [-90, -45, 0]),
        (WRAPPED, slice(300, 30), [-45, 0]),
        (FROM_180, slice(-45, 45), [315, 0, 45]),
        (FROM_180, slice(350, 370), [0]),
        (FROM_180, slice(10, 20), None),
    ],
)
def test_longitudes_that_wrap(tmp_path, lon, wanted, values):
    pytest.importorskip("xarray")
    path = write(tmp_path / "w.zarr", lon=lon)
    text = said(lambda: scidata.open_dataset(path, sel={"lon": wanted}), ConfigError)
    assert "labels wrap around" in text
    assert "slice(" not in text
    if values is not None:  # what it advises is what was asked for
        isel = eval(text.rpartition("isel=")[2], {"range": range})
        assert scidata.open_dataset(path, isel=isel)[0]["u"][0].tolist() == values


def test_labels_that_descend_are_still_turned(tmp_path):
    pytest.importorskip("xarray")
    path = write(tmp_path / "d.zarr", lon=LON[::-1])
    text = said(lambda: scidata.open_dataset(path, sel={"lon": slice(10, 100)}))
    assert text.endswith("labels descend: slice(100, 10)")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda p, m: scidata.open_dataset(p, kind="points"), "leave kind out where it is a grid"),
        (lambda p, m: scidata.open_dataset(p, m, shard={"time": "domain"}), "split one of lat, lon"),
        (lambda p, m: scidata.open_dataset(p, m, halo={"lon": 1}), "halo of 'lon': it is not split (lat is)"),
        (lambda p, m: scidata.open_dataset(np.zeros((3, 4))), "path= is an array of shape (3, 4)"),
        (lambda p, m: scidata.open_dataset(torch.zeros(2)), "path= is an array of shape (2,)"),
        (lambda p, m: scidata.open_dataset([p, 3]), "path=3: expected a path or URL"),
        (lambda p, m: scidata.partition(np.zeros(3), p + ".store"), "path= is an array of shape (3,)"),
    ],
)
def test_arguments(tmp_path, call, expected):
    text = said(lambda: call(write(tmp_path / "a.zarr"), scidata.init_mesh(domain=1)))
    assert expected in text
    assert "points=[" not in text


def test_what_has_no_effect(tmp_path):
    path, mesh = write(tmp_path / "a.zarr"), scidata.init_mesh(domain=1)
    with pytest.warns(UserWarning, match=r"periodic: lon has no halo that could wrap; give it one, halo=\{'lon': 1\}"):
        scidata.open_dataset(path, mesh, halo=1, periodic="lon")
    wrapped = scidata.open_dataset(path, mesh, halo={"lon": 1}, periodic="lon")[0]["u"]
    assert wrapped.local_with_halo()[0].tolist() == [315, *LON, 0]
    with pytest.warns(UserWarning, match="drop_last=True leaves no batch of 9 of this rank's 4 samples"):
        assert len(scidata.DataLoader(scidata.open_dataset(path), batch_size=9, drop_last=True)) == 0


KEYWORDS = {
    "num_replicas": "the mesh says how many ranks",
    "rank": "the mesh knows which rank this is",
    "device": r"scidata.DataLoader\(device=\)",
    "batch_size": r"scidata.DataLoader\(dataset, batch_size=\)",
    "engine": "told by the content",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_names_of_torch(tmp_path, name):
    path = write(tmp_path / "a.zarr")
    with pytest.raises(TypeError, match=f"no argument '{name}'; .*{KEYWORDS[name]}"):
        scidata.open_dataset(path, **{name: 1})
    with pytest.raises(TypeError, match=f"no argument '{name}'; .*{KEYWORDS[name]}"):
        scidata.DistributedSampler(scidata.open_dataset(path), **{name: 1})


def test_fields_are_keys(tmp_path):
    sample = scidata.open_dataset(write(tmp_path / "a.zarr"))[0]
    with pytest.raises(AttributeError, match=r"fields of a sample are its keys: sample\['u'\]"):
        sample.u  # noqa: B018
    with pytest.raises(AttributeError, match="'Sample' object has no attribute 'w'"):
        sample.w  # noqa: B018
    assert not hasattr(sample, "u")


def test_a_lone_field_of_datetimes(tmp_path):
    np.save(tmp_path / "when.npy", np.array(["2000-01-01"] * 3, "M8[s]"))
    text = said(lambda: scidata.open_dataset(str(tmp_path / "when.npy")))
    assert "'data' has dtype datetime64[s], which no tensor has: store numbers" in text


def test_a_series_of_single_numbers(tmp_path):
    np.save(tmp_path / "only.npy", np.arange(4.0))
    group = zarr.open_group(tmp_path / "only.zarr", mode="w")
    for name in ("time", "a"):
        array = group.create_array(name, shape=(4,), dtype="f8", dimension_names=("time",))
        array[:] = np.arange(4)
    path, mesh = str(tmp_path / "only.zarr"), scidata.init_mesh(domain=1)
    text = said(lambda: scidata.open_dataset(path, mesh))
    assert "a sample is a single number" in text
    assert "sample_dim=False" in text
    assert scidata.open_dataset(path, mesh, sample_dim=False)[0]["a"].shape == (4,)


def test_a_hint_keeps_what_a_sample_is(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((6, 8)))
    np.save(tmp_path / "line.npy", np.zeros(6))
    alone = scidata.open_dataset(str(tmp_path / "flat.npy"))
    text = said(lambda: GridReader(str(tmp_path / "flat.npy"), axis_sizes={"domain": 2}), ConfigError)
    assert "shard={'dim_1': 'domain'} (--shard dim_1), and what numbers the samples with sample_dim='dim_0'" in text
    split = GridReader(str(tmp_path / "flat.npy"), ReadOptions(shard={"dim_1": "domain"}), axis_sizes={"domain": 2})
    assert split.num_samples == len(alone)
    assert split.global_shape("data") == alone.global_shape("data")

    other = GridReader(str(tmp_path / "flat.npy"), ReadOptions(shard={"dim_0": "domain"}), axis_sizes={"domain": 2})
    assert not any("shard" in changed for changed, _ in cheaper_cuts(plan_grid(other)))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21461\nsize 12345\n"


@pytest.mark.parametrize(
    "name",
    [*(f"x.{end}" for end in ("nc", "h5", "pt", "npz", "vtu", "json")), "x.zarr/zarr.json", "x.store/manifest.json"],
)
def test_pointers_of_git_lfs(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(LFS)
    path = str(tmp_path / name.partition("/")[0])
    text = said(lambda: scidata.open_dataset(path), CorruptDataError)
    assert text == f"{tmp_path / name}: is a pointer of Git LFS, not the file itself; fetch that: git lfs pull"


def test_inspect_says_each_cause_once(tmp_path):
    group = zarr.open_group(tmp_path / "many.zarr", mode="w", zarr_format=2)
    for i in range(15):
        chunks = (8, 64, 8) if i < 10 else (16, 64, 8)
        array = group.create_array(f"f{i}", shape=(16, 64, 512), chunks=chunks, dtype="f4")
        array.attrs["_ARRAY_DIMENSIONS"] = ["time", "lat", "lon"]
    warnings = inspect_store(str(tmp_path / "many.zarr")).warnings
    assert len(warnings) == 3
    assert sum("many small reads are slow" in text for text in warnings) == 1
    (blocks,) = [text for text in warnings if "rows of time" in text]
    assert blocks.startswith("f0, f1, f10, f11, f12, f13, f14, f2 and 7 more: f10 has chunks of 16 rows of time")
    assert "shuffle='blocks'" in blocks
    assert "rechunk" not in blocks

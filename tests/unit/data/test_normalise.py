"""Normalised samples against NumPy, and back; what does not fit is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.utils.data
import zarr

import scidata
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.testing import make_grid
from scidata.testing.ranks import fork_server
from tests.writers import write_hdf5

AXES = {(): (0, 1, 2, 3), ("level",): (0, 2, 3), ("latitude",): (0, 1, 3), ("latitude", "level"): (0, 3)}


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "packed"])
def grid(request: Any, tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("grid") / "grid.zarr")
    return path, make_grid(path, num_times=9, num_lat=17, num_lon=20, packed=request.param, chunks=(4, 2, 7, 20))


def wanted_of(values: Any, by: tuple[str, ...]) -> Any:
    values, axis = values.astype("f8"), AXES[by]
    return (values - np.nanmean(values, axis=axis, keepdims=True)) / np.nanstd(values, axis=axis, keepdims=True)


@pytest.mark.parametrize("by", AXES)
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, np.s_[3]),
        ({"steps": (0, 1)}, np.s_[3:5]),
        ({"isel": {"level": [2, 0], "latitude": slice(None, None, -2)}}, np.s_[3, [2, 0], ::-2]),
        ({"isel": {"level": 1}}, np.s_[3, 1]),
        ({"pool_bytes": 0}, np.s_[3]),
    ],
)
def test_numpy_gives_the_same(grid: Any, by: tuple[str, ...], options: dict[str, Any], rows: Any) -> None:
    path, wanted = grid
    stats = scidata.statistics(scidata.open_dataset(path), by=by)
    ds = scidata.open_dataset(path, **options)
    normal = ds.normalise(stats)
    for name in ("u", "t"):
        got, raw = normal[3][name], ds[3][name]
        values = wanted_of(wanted[name], by)[rows]
        np.testing.assert_allclose(got.numpy(), values, atol=1e-12 if got.dtype == torch.float64 else 2e-5)
        assert got.dtype == raw.dtype
        back = normal.denormalise(normal[3])[name]
        torch.testing.assert_close(back, raw, equal_nan=True)
        batch = normal.denormalise(scidata.collate([normal[3], normal[4]]))
        torch.testing.assert_close(batch[name][0], raw, equal_nan=True)
    assert normal.fingerprint == ds.fingerprint, "a sampler goes on"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("by", [(), ("level",), ("latitude", "level")])
def test_dtypes(grid: Any, dtype: torch.dtype, by: tuple[str, ...]) -> None:
    path, wanted = grid
    ds = scidata.open_dataset(path, fields=["t"], dtype=dtype)
    normal = ds.normalise(scidata.statistics(scidata.open_dataset(path), by=by))
    got = normal[2]["t"]
    assert got.dtype == dtype
    values = wanted_of(wanted["t"], by)[2]
    # what is read as float16 has three digits of its own
    tolerance = {torch.float16: 0.2, torch.bfloat16: 0.03, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    np.testing.assert_allclose(got.double().numpy(), values, atol=tolerance)
    assert normal.denormalise(normal[2])["t"].dtype == dtype


def test_large_offsets_lose_no_digits(tmp_path: Path) -> None:
    values = 1e8 + np.random.default_rng(0).normal(size=(4, 5, 6))
    path = write_hdf5(tmp_path / "grid.h5", {"p": values}, {"p": ("time", "lat", "lon")})
    ds = scidata.open_dataset(path, kind="grid")
    got = torch.stack([sample["p"] for sample in ds.normalise(scidata.statistics(ds))])
    np.testing.assert_allclose(got.numpy(), (values - values.mean()) / values.std(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", ["mean_std", "min_max", "std"])
def test_methods(grid: Any, method: str) -> None:
    path, wanted = grid
    ds = scidata.open_dataset(path, fields=["u"])
    normal = ds.normalise(scidata.statistics(ds), method=method)
    values = wanted["u"].astype("f8")
    low, width = {
        "mean_std": (np.nanmean(values), np.nanstd(values)),
        "min_max": (np.nanmin(values), np.nanmax(values) - np.nanmin(values)),
        "std": (0, np.nanstd(values)),
    }[method]
    np.testing.assert_allclose(normal[5]["u"].numpy(), (values[5] - low) / width, atol=1e-5)
    torch.testing.assert_close(normal.denormalise(normal[5])["u"], ds[5]["u"], equal_nan=True)


def doubled(sample: Any) -> Any:
    return sample.replace({"u": sample["u"] * 2})


def shifted(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"u": fields["u"] + 1}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("decode", [True, "node"])
def test_loaders_and_transforms(grid: Any, num_workers: int, decode: Any) -> None:
    path, _ = grid
    plain = scidata.open_dataset(path, fields=["u", "t"])
    stats = scidata.statistics(plain, by="level")
    ds = scidata.open_dataset(path, fields=["u", "t"], transform=doubled, local_transform=shifted, decode=decode)
    normal, own = ds.normalise(stats), plain.normalise(stats)
    wanted = [2 * (own[i]["u"] + 1) for i in range(len(own))]
    loader = scidata.DataLoader(normal, batch_size=2, num_workers=num_workers, shuffle="blocks")
    for _ in range(2):
        seen = []
        for batch in loader:
            for index, u in zip(batch.index, batch["u"], strict=True):
                torch.testing.assert_close(u, wanted[index], equal_nan=True)
                seen.append(index)
        assert sorted(seen) == list(range(9))
    torch.testing.assert_close(ds[4]["t"], plain[4]["t"], equal_nan=True)
    again = pickle.loads(pickle.dumps(normal))
    torch.testing.assert_close(again[3]["u"], wanted[3], equal_nan=True)


def test_worker_processes_of_torch(grid: Any) -> None:
    path, _ = grid
    ds = scidata.open_dataset(path, fields=["u"])
    normal = ds.normalise(scidata.statistics(ds))
    loader = torch.utils.data.DataLoader(normal, batch_size=None, num_workers=1, multiprocessing_context=fork_server())
    for index, sample in enumerate(loader):
        torch.testing.assert_close(sample["u"], normal[index]["u"], equal_nan=True)


def test_combinations(grid: Any, tmp_path: Path) -> None:
    path, _ = grid
    ds = scidata.open_dataset(path, fields=["u"])
    turned = scidata.open_dataset(path, fields=["u"], isel={"level": [2, 1, 0]})
    stats = scidata.statistics(ds, by="level")
    both = scidata.concat(scidata.subset(ds, [1, 2]), turned).normalise(stats)
    torch.testing.assert_close(both[0]["u"], ds.normalise(stats)[1]["u"], equal_nan=True)
    torch.testing.assert_close(both[3]["u"].flip(0), ds.normalise(stats)[1]["u"], equal_nan=True)
    assert both[0].index == 0
    torch.testing.assert_close(both.denormalise(both[0])["u"], ds[1]["u"], equal_nan=True)
    torch.testing.assert_close(both.denormalise(both[3])["u"], turned[1]["u"], equal_nan=True)
    batch = both.denormalise(scidata.collate([both[3], both[2]]))
    torch.testing.assert_close(batch["u"][1], turned[0]["u"], equal_nan=True)
    for mixed in (scidata.collate([both[1], both[3]]), {"u": both[0]["u"]}):
        with pytest.raises(ConfigError, match="normalised differently"):
            both.denormalise(mixed)
    torch.testing.assert_close(
        scidata.subset(both, [3]).denormalise(scidata.subset(both, [3])[0])["u"], turned[1]["u"], equal_nan=True
    )


def test_gradients_and_models_outputs(grid: Any) -> None:
    path, _ = grid
    ds = scidata.open_dataset(path, fields=["u"])
    stats = scidata.statistics(ds, by="level")
    normal = ds.normalise(stats)
    output = torch.zeros((2, 5, *ds.global_shape("u")), requires_grad=True)  # batch, ensemble
    found = normal.denormalise({"u": output, "other": output})
    found["u"].sum().backward()
    for level, (mean, std) in enumerate(zip(stats["u"].mean, stats["u"].std, strict=True)):
        np.testing.assert_allclose(found["u"][:, :, level].detach(), mean, rtol=1e-6)
        np.testing.assert_allclose(output.grad[:, :, level], std, rtol=1e-6)
    assert found["other"] is output
    with pytest.raises(ConfigError, match="a tensor of 2 dims"):
        normal.denormalise({"u": output[0, 0, 0]})


def test_integers_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "grid.zarr")
    make_grid(path, num_times=3)
    mask = (np.random.default_rng(0).random((3, 19, 24)) < 0.5).astype("i4")
    group = zarr.open_group(path)
    group.create_array("mask", data=mask, dimension_names=["time", "latitude", "longitude"])
    ds = scidata.open_dataset(path, fields=["u", "mask"])
    stats = scidata.statistics(ds)
    assert torch.equal(ds.normalise(stats)[1]["mask"], torch.from_numpy(mask[1]))
    with pytest.raises(ConfigError, match="'mask' is int32, and only floating"):
        ds.normalise(stats, fields=["mask"])
    only = ds.normalise(stats, fields="u")
    assert list(only.normalising) == ["u"]


def test_what_does_not_fit(grid: Any, tmp_path: Path) -> None:
    path, _ = grid
    ds = scidata.open_dataset(path, fields=["u", "t"])
    stats = scidata.statistics(scidata.open_dataset(path, fields=["u"], isel={"level": [0, 1]}), by="level")
    with pytest.raises(UnknownNameError, match="no statistics of field 't'"):
        ds.normalise(stats)
    with pytest.raises(FieldMismatchError, match=r"'u' has level 100, of which there are no statistics.*1000, 550"):
        ds.normalise(stats, fields=["u"])
    with pytest.raises(UnknownNameError, match="no field 'w'"):
        ds.normalise(stats, fields=["w"])
    with pytest.raises(ConfigError, match="did you mean 'mean_std'"):
        ds.normalise(stats, method="mean_sd")
    with pytest.raises(ConfigError, match=r"expected scidata\.statistics"):
        ds.normalise({"u": (0, 1)})  # type: ignore[arg-type]
    own = scidata.statistics(ds)
    other = replace(own, fields={**own.fields, "u": replace(own["u"], units="km h-1")})
    with pytest.raises(FieldMismatchError, match="'u' is in 'm s-1', its statistics in 'km h-1'"):
        ds.normalise(other)
    ds.normalise(replace(own, fields={**own.fields, "u": replace(own["u"], units=None)}))
    by_time = replace(own, fields={**own.fields, "u": replace(stats["u"], dims=("height",))})
    with pytest.raises(FieldMismatchError, match="are by 'height', which the field does not have"):
        ds.normalise(by_time)
    unlabelled = replace(stats, labels={})
    with pytest.raises(FieldMismatchError, match="3 rows along 'level', and its statistics are of 2"):
        ds.normalise(unlabelled, fields="u")
    with pytest.raises(ConfigError, match="normalised already"):
        ds.normalise(own).normalise(own)
    with pytest.raises(ConfigError, match="is not normalised"):
        ds.denormalise(ds[0])
    with pytest.raises(TypeError, match="did you mean 'fields'"):
        ds.normalise(own, field="u")  # type: ignore[call-arg]


def test_positions_stay_unless_they_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "cloud.h5", "w") as file:
        file["points"], file["u"] = 5 + rng.random((9, 2)), 5 + rng.random(9)
    ds = scidata.open_dataset(tmp_path / "cloud.h5", kind="points")
    stats = scidata.statistics(ds)
    assert torch.equal(ds.normalise(stats)[0]["pos"], ds[0]["pos"])
    assert abs(float(ds.normalise(stats)[0]["u"].mean())) < 1e-9
    named = ds.normalise(stats, fields=["pos"])[0]
    assert abs(float(named["pos"].mean())) < 1e-9
    assert torch.equal(named["u"], ds[0]["u"])


def test_one_value_everywhere_is_refused_by_name(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 2, 4, 5))
    values[:, 1] = 7
    fields = {"u": values, "none": np.full_like(values, np.nan)}
    path = write_hdf5(tmp_path / "grid.h5", fields, dict.fromkeys(fields, ("time", "level", "lat", "lon")))
    ds = scidata.open_dataset(path, kind="grid")
    stats = scidata.statistics(ds, by="level")
    with pytest.raises(ConfigError, match="field 'u' at level 1 has a deviation of 0, one value everywhere"):
        ds.normalise(stats, fields="u")
    with pytest.raises(ConfigError, match="field 'none' at level 0 has no finite deviation"):
        ds.normalise(stats, fields="none")
    scidata.open_dataset(path, kind="grid", fields="u", isel={"level": 0}).normalise(scidata.statistics(ds, fields="u"))

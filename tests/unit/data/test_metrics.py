"""Metrics of one process: sums without error, what xarray and scipy say, weights, NaN, batches, messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import scidata
from scidata import metrics
from scidata.data.metrics.exact import LARGEST, exact_terms, rounded_sum
from scidata.data.metrics.scores import _power
from scidata.errors import ConfigError, UnknownNameError
from scidata.testing import make_grid

ERA = Path(__file__).parents[3].parent / "shared" / "data" / "eraint_uvz.nc"

# -- sums without error ----------------------------------------------------------------------------------------------


def exact_sum(values: Any) -> float:
    return float(rounded_sum(exact_terms(torch.tensor(values, dtype=torch.float64).reshape(1, -1)))[0])


addends = st.one_of(
    st.floats(-1e280, 1e280, allow_subnormal=True),
    st.builds(math.ldexp, st.integers(-9, 9), st.integers(-1074, 200)),
    st.builds(math.ldexp, st.integers(-9, 9), st.integers(-60, 60)),
)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(addends, max_size=40), at=st.integers(0, 40))
def test_sums_are_those_of_fsum(values: list[float], at: int) -> None:
    expected = math.fsum(values)
    assert exact_sum(values) == expected
    parts = [exact_terms(torch.tensor([part], dtype=torch.float64)) for part in (values[:at], values[at:])]
    assert rounded_sum(np.concatenate(parts))[0] == expected


@pytest.mark.parametrize("rest", [-(2.0**-120), 0.0, 2.0**-120])
def test_ties(rest: float) -> None:
    for values in ([1.0, 2.0**-53, rest], [1 + 2.0**-52, 2.0**-53, rest], [-1.0, -(2.0**-53), rest]):
        assert exact_sum(values) == math.fsum(values)


def test_many_addends_of_many_sums() -> None:
    x = np.random.default_rng(0).standard_normal((70, 3000)) * 10.0 ** np.arange(-35, 35)[:, None]
    found = rounded_sum(exact_terms(torch.from_numpy(x)))
    assert found.tolist() == [math.fsum(row) for row in x]
    turned = torch.from_numpy(np.ascontiguousarray(x[:, ::-1].T)).t()  # another order, another memory
    assert np.array_equal(rounded_sum(exact_terms(turned)), found)
    assert len(exact_terms(torch.from_numpy(x))) < 12


def test_infinite_addends() -> None:
    assert exact_sum([1.0, math.inf, 2.0]) == math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert math.isnan(exact_sum([1.0, math.nan]))
    assert exact_sum([1.0, -LARGEST]) == -math.inf
    assert exact_sum([-LARGEST / 2, LARGEST / 2, 3.0]) == 3.0


# -- what other libraries say ----------------------------------------------------------------------------------------


def weights_of(latitude: Any) -> xr.DataArray:
    """WeatherBench 2's definition, in other words: areas between the middles, up to the poles."""
    edges = np.deg2rad(np.concatenate([[90.0], (latitude[1:].values + latitude[:-1].values) / 2, [-90.0]]))
    return xr.DataArray(-np.diff(np.sin(edges)), dims=latitude.dims)


def xarray_scores(data: xr.Dataset, lat: str, lon: str, steps: str) -> tuple[xr.Dataset, xr.Dataset]:
    """RMSE and ACC of persistence by one step, against the mean over steps."""
    data = data.astype("float64")
    forecast, truth = data.isel({steps: slice(0, -1)}).drop_vars(steps), data.isel({steps: slice(1, None)})
    truth, climatology = truth.drop_vars(steps), data.mean(steps)
    weights = weights_of(data[lat])

    def mean(x: xr.Dataset) -> xr.Dataset:
        return x.weighted(weights).mean([lat, lon])

    a, b = forecast - climatology, truth - climatology
    rmse = np.sqrt(mean((forecast - truth) ** 2).mean(steps))
    return rmse, (mean(a * b) / np.sqrt(mean(a**2) * mean(b**2))).mean(steps)


def persistence(ds: Any, data: xr.Dataset, lat: str, lon: str, by: str, steps: str) -> tuple[Any, Any]:
    dims = (by, lat, lon)
    options = {"weights": {lat: metrics.latitude_weights(ds, dim=lat)}, "by": by, "dims": dims}
    climatology = {
        name: torch.from_numpy(data[name].astype("float64").mean(steps).transpose(*dims).values) for name in ds.fields
    }
    rmse, acc = metrics.RMSE(**options), metrics.ACC(climatology=climatology, **options)
    for index in range(len(ds)):
        sample = ds[index]
        first, second = ({name: x[step] for name, x in sample.items()} for step in (0, 1))
        rmse.update(first, second, index=index)
        acc.update(first, second, index=index)
    return rmse.compute(), acc.compute()


def check_against_xarray(path: str, lat: str, lon: str, by: str, steps: str) -> None:
    ds = scidata.open_dataset(path, sample_dim=steps, steps=(0, 1))
    with xr.open_dataset(path) as file:
        data = file[list(ds.fields)].load()
        for found, expected in zip(
            persistence(ds, data, lat, lon, by, steps), xarray_scores(data, lat, lon, steps), strict=True
        ):
            assert list(found) == list(ds.fields)
            for name, values in found.items():
                assert found.dims[name] == (by,)
                np.testing.assert_allclose(values.numpy(), expected[name].values, rtol=1e-12)


def test_grid_against_xarray(tmp_path: Path) -> None:
    make_grid(tmp_path / "era5.nc", format="netcdf4", num_times=5)
    check_against_xarray(str(tmp_path / "era5.nc"), "latitude", "longitude", "level", "time")


def test_era_interim_against_xarray() -> None:
    if not ERA.is_file():
        pytest.skip("needs ERA-Interim in shared/data")
    with xr.open_dataset(ERA) as data:
        steps, by, lat, lon = map(str, data["u"].dims)
    check_against_xarray(str(ERA), lat, lon, by, steps)


@pytest.mark.parametrize("fair", [True, False])
def test_crps_of_all_pairs(fair: bool) -> None:
    made = np.random.default_rng(1)
    members, target = made.standard_normal((5, 3, 7)), made.standard_normal((3, 7))
    pairs = np.abs(members[:, None] - members[None]).sum((0, 1)) / (20 if fair else 25)
    expected = (np.abs(members - target).mean(0) - pairs / 2).mean(1)
    crps = metrics.CRPS(fair=fair, dims=("level", "x"), by="level", member_dim=1)
    crps.update(torch.from_numpy(members).movedim(0, 1), torch.from_numpy(target), index=0)
    np.testing.assert_allclose(crps.compute().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("num_points", [1, 2, 9, 10])
def test_power_adds_up_to_the_mean_square(num_points: int) -> None:
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 5, num_points)))
    spectrum = metrics.Spectrum("x", dims=("y", "x"), weights={"y": [1, 2, 0, 1, 3]})
    spectrum.update(x, index=[0, 1, 2, 3])
    power = spectrum.compute()
    weights = torch.tensor([1, 2, 0, 1, 3], dtype=torch.float64) / 7
    assert power.shape == (num_points // 2 + 1,)
    torch.testing.assert_close(power.sum(), (x.square().mean((0, 2)) * weights).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_points", [24, 97, 480])
def test_a_rows_power_does_not_depend_on_the_others(num_points: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(3).standard_normal((41, num_points)))
    power = _power(rows, num_points)
    for first in (1, 15, 16, 40):
        assert torch.equal(_power(rows[first:], num_points), power[first:])


# -- weights ---------------------------------------------------------------------------------------------------------


def test_latitude_weights() -> None:
    latitude = np.linspace(90, -90, 19)
    down, up = metrics.latitude_weights(latitude), metrics.latitude_weights(latitude[::-1].copy())
    assert torch.equal(down, up.flip(0))
    expected = weights_of(xr.DataArray(latitude, dims="latitude")).values
    np.testing.assert_allclose(down.numpy(), expected / expected.mean(), rtol=1e-12)
    gaussian = metrics.latitude_weights([-89.4, -88.7, 0.0, 88.7, 89.4])  # the last cells reach the poles
    edge = (1 - math.sin(math.radians(89.05))) / (2 / 5)
    assert gaussian[0].item() == pytest.approx(edge, rel=1e-9)
    crop = metrics.latitude_weights([30.0, 40.0, 50.0])  # and those of a crop do not
    cells = [math.sin(math.radians(at + 5)) - math.sin(math.radians(at - 5)) for at in (30, 40, 50)]
    np.testing.assert_allclose(crop.numpy(), np.array(cells) / np.mean(cells), rtol=1e-12)
    for wrong in ([0, 100], [1, 1], [3, 1, 2], [[1, 2]]):
        with pytest.raises(ConfigError):
            metrics.latitude_weights(wrong)
    with pytest.raises(ConfigError, match="'area' or 'cos'"):
        metrics.latitude_weights([1, 2], method="sin")


def test_level_weights() -> None:
    assert metrics.level_weights([200, 400]).tolist() == pytest.approx([2 / 3, 4 / 3])
    assert metrics.level_weights([1000, 800, 200], method="thickness").tolist() == pytest.approx([0.5, 1.0, 1.5])
    with pytest.raises(ConfigError, match="positive"):
        metrics.level_weights([0, 1])


def test_weights_along_several_dims_and_of_a_sample() -> None:
    x = torch.arange(6.0).view(2, 3)
    areas = torch.tensor([[1.0, 0, 0], [0, 0, 3.0]])
    mean = metrics.Mean(dims=("y", "x"), weights={("x", "y"): areas.t()})
    mean.update(x, index=0)
    assert mean.compute().item() == 15 / 4
    mean = metrics.Mean(dims=("y", "x"), weights={"x": [1, 0, 1]})
    mean.update(x, index=0, weights={"y": [0, 1]})
    mean.update(x, index=1)
    assert mean.compute().item() == (4 + 2.5) / 2


def test_rows_without_weight_do_not_count() -> None:
    nan = math.nan
    mean = metrics.Mean(dims=("x",), weights={"x": [1, 0, 1]})
    mean.update(torch.tensor([1.0, nan, 2.0]), index=0)
    assert mean.compute().item() == 1.5
    mean.update(torch.tensor([nan, 1.0, 2.0]), index=1)
    assert math.isnan(mean.compute().item())


def test_nan() -> None:
    nan = math.nan
    x = torch.tensor([[[1.0, nan], [3.0, 5.0]], [[nan, nan], [7.0, nan]]])
    for skipna, expected in ((False, [nan, nan]), (True, [1.0, (4 + 7) / 2])):
        mean = metrics.Mean(dims=("y", "x"), by="y", skipna=skipna)
        mean.update(x, index=[0, 1])
        np.testing.assert_array_equal(mean.compute().numpy(), expected)


# -- samples ---------------------------------------------------------------------------------------------------------


def test_each_sample_counts_once() -> None:
    mse = metrics.MSE()
    zero = torch.zeros(3)
    mse.update(zero + 1, zero, index=4)
    mse.update(torch.stack([zero + 1, zero + 3]), torch.stack([zero, zero]), index=[4, 9])
    assert mse.compute().item() == 5.0
    mse.reset()
    for _ in range(2):  # without a number each is another sample
        mse.update(zero + 1, zero)
    mse.update(zero + 4, zero)
    assert mse.compute().item() == 6.0


def test_half_precision_is_added_up_in_float64() -> None:
    x = torch.full((70000,), 0.1, dtype=torch.bfloat16)
    mean = metrics.Mean()
    mean.update(x, index=0)
    assert mean.compute().item() == x[0].item()


def test_fields_of_different_dims() -> None:
    target = scidata.Sample(
        {"z": torch.arange(6.0).view(2, 3), "ps": torch.arange(3.0)},
        dims={"z": ("level", "x"), "ps": ("x",)},
        index=5,
    )
    rmse = metrics.RMSE(by="level", weights={"level": [1, 2], "x": [1, 1, 2]})
    rmse.update({"z": target["z"] + 2, "ps": target["ps"] - 3}, target)
    result = rmse.compute()
    assert (result["z"].tolist(), result["ps"].item()) == ([2.0, 2.0], 3.0)
    assert result.dims == {"z": ("level",), "ps": ()}
    assert result.to_xarray()["z"].dims == ("level",)


class Excess(metrics.PairMetric):
    def pointwise(self, *values: torch.Tensor) -> torch.Tensor:
        return (values[0] > values[1]).double()


def test_a_metric_of_ones_own() -> None:
    excess = Excess()
    excess.update(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, 2.0, 2.0]), index=0)
    assert excess.compute().item() == 0.5


def test_mesh_areas(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "cloud.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((20, 3))
        file["area"] = np.random.default_rng(1).random(20)
        file["p"] = np.arange(20.0)
    sample = scidata.open_dataset(tmp_path / "cloud.h5", kind="points")[0]
    mean = metrics.Mean()
    mean.update({"p": sample["p"]}, index=0, weights={"dim_0": sample["area"]})
    expected = np.average(np.arange(20.0), weights=sample["area"].numpy())
    assert mean.compute()["p"].item() == pytest.approx(expected, rel=1e-12)
    entity = sample.entity
    whole = metrics.Mean(weights={entity: sample["area"]})
    whole.update(sample.replace({}))
    assert whole.compute()["p"].item() == pytest.approx(expected, rel=1e-12)


def test_saved_and_loaded(tmp_path: Path) -> None:
    zero = torch.zeros(3)
    mse = metrics.MSE(dims=("x",), weights={"x": [1, 2, 3]})
    mse.update(zero + 1, zero, index=0)
    mse.update(zero + 2, zero)
    torch.save(mse.state_dict(), tmp_path / "metric.pt")
    again = metrics.MSE(dims=("x",), weights={"x": [1, 2, 3]})
    again.load_state_dict(torch.load(tmp_path / "metric.pt"))
    for each in (mse, again):
        each.update(zero + 9, zero, index=0)  # known
        each.update(zero + 3, zero)
    assert again.compute() == mse.compute() == (1 + 4 + 9) / 3
    with pytest.raises(ConfigError, match="another metric"):
        metrics.MAE().load_state_dict(mse.state_dict())


def test_one_climatology_for_a_batch() -> None:
    made = torch.Generator().manual_seed(0)
    p, t, c = (torch.randn(shape, generator=made) for shape in ((2, 3, 4), (2, 3, 4), (3, 4)))
    climatology = scidata.Sample({"u": c}, dims={"u": ("y", "x")}, index=7)
    whole, single, each = (metrics.ACC(climatology=climatology, by="y", dims=("y", "x")) for _ in range(3))
    whole.update({"u": p}, {"u": t}, index=[0, 1])
    each.update({"u": p}, {"u": t}, {"u": torch.stack([c, c])}, index=[0, 1])
    for index in (0, 1):
        single.update({"u": p[index]}, {"u": t[index]}, index=index)
    assert torch.equal(whole.compute()["u"], single.compute()["u"])
    assert torch.equal(each.compute()["u"], single.compute()["u"])


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "call", "error", "text"),
    [
        ({"weights": {"x": [1, 2]}}, {}, ConfigError, r"weights along x have shape \(2,\), and the fields have x: 3"),
        ({"weights": {"z": [1, 2]}}, {}, UnknownNameError, "no field has a dim 'z'"),
        ({"by": "lev"}, {}, UnknownNameError, "by: no field has a dim 'lev'"),
        ({"weights": {"x": [[1, 2]]}}, {}, ConfigError, "have 2 dims, and need 1"),
        ({"weights": {"x": [1, -2, 1]}}, {}, ConfigError, "1 are negative or not finite"),
        ({"weights": {"x": [0, 0, 0]}}, {}, ConfigError, "all zero"),
        ({"weights": [1, 2, 3]}, {}, ConfigError, "weights"),
        ({}, {"index": [0, 1, 2]}, ConfigError, "has 2 dims .* 3 names"),
        ({"dims": ("x",)}, {"index": [0, 1, 2]}, ConfigError, "3 indices for a batch of 2"),
        ({}, {"index": -1}, ConfigError, "a sample's number"),
        ({}, {"target": torch.zeros(3, 2)}, ConfigError, r"target has shape \(3, 2\)"),
        ({}, {"target": torch.zeros(6)}, ConfigError, "has 1 dims"),
        ({}, {"target": {"u": torch.zeros(2, 3)}}, ConfigError, "expected a tensor"),
        ({}, {"prediction": {"u": torch.zeros(2, 3)}}, ConfigError, "fields by name"),
        (
            {},
            {"prediction": {"u": torch.zeros(2, 3)}, "target": {"uu": torch.zeros(2, 3)}},
            UnknownNameError,
            "target has no field 'u'; did you mean 'uu'",
        ),
        ({}, {"target": torch.zeros(2, 3, dtype=torch.complex64)}, ConfigError, "complex"),
    ],
)
def test_messages(options: Any, call: Any, error: type[Exception], text: str) -> None:
    arguments = {"prediction": torch.zeros(2, 3), "target": torch.zeros(2, 3), "index": 0} | call
    with pytest.raises((error, scidata.errors.ShardLayoutError), match=text):
        metrics.MSE(**{"dims": ("y", "x")} | options).update(**arguments)


def test_more_messages() -> None:
    with pytest.raises(ConfigError, match="no rank has called"):
        metrics.MSE().compute()
    with pytest.raises(ConfigError, match="needs a climatology"):
        metrics.ACC().update(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ConfigError, match="two members or more"):
        metrics.CRPS().update(torch.zeros(1, 2), torch.zeros(2))
    with pytest.raises(UnknownNameError, match="no dim 'longitude'"):
        metrics.Spectrum(dims=("y", "x")).update(torch.zeros(2, 3))
    ragged = metrics.Mean(by="x", dims=("x",))
    ragged.update(torch.zeros(2), index=0)
    ragged.update(torch.zeros(3), index=1)
    with pytest.raises(ConfigError, match="different sizes"):
        ragged.compute()

"""A sample in a user's hands: where it comes from."""

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import UnsupportedFormatError

TIMES = np.arange("2015-01-01", "2015-01-04", 6, dtype="M8[h]").astype("M8[ns]")


def grid(times=TIMES, **more):
    shape = (len(times), 3, 6, 8)
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    dims = ("time", "level", "lat", "lon")
    return xr.Dataset({"u": (dims, values), **more}, {"time": times, "level": [1000, 500, 100]})


@pytest.fixture
def files(tmp_path):
    for number, part in enumerate((TIMES[:5], TIMES[5:])):
        grid(part).to_netcdf(tmp_path / f"{number}.nc")
    return [f"{tmp_path}/0.nc", f"{tmp_path}/1.nc"]


def places(sample):
    return [(source.path[-4:], source.index) for source in sample.source]


def test_source_of_steps_over_two_files(files):
    ds = scidata.open_dataset(files, steps=(-1, 0, 2))
    assert places(ds[3]) == [("0.nc", 3), ("0.nc", 4), ("1.nc", 1)]
    assert [source.time for source in ds[3].source] == list(TIMES[[3, 4, 6]])
    assert ds[3].source == ds.sources_of(3) == ds.sources_of(3 - len(ds))
    assert str(ds[0].source[1]).endswith("0.nc[1] 2015-01-01T06:00:00")
    with pytest.raises(IndexError, match="out of range"):
        ds.sources_of(len(ds))


def test_source_follows_crops_batches_and_combined_data_sets(files):
    cropped = scidata.open_dataset(files, isel={"time": slice(1, 12, 2)})
    assert places(cropped[2]) == [("1.nc", 0)]
    twice = scidata.subset(scidata.concat(cropped, cropped), [7, 2])
    assert places(scidata.collate([twice[0], twice[1]])) == [("0.nc", 3), ("1.nc", 0)]
    (batch,) = scidata.DataLoader(twice, batch_size=2)
    assert places(batch) == [("0.nc", 3), ("1.nc", 0)]
    assert places(batch.replace({"w": batch["u"] * 2}).to(torch.float64)) == places(batch)
    assert scidata.Sample({"u": torch.zeros(1)}, dims={"u": ("x",)}, index=None).source == ()


def test_source_of_members_and_of_a_file_without_times(tmp_path):
    dims = ("member", "time", "lat", "lon")
    values = np.random.default_rng(0).random((3, len(TIMES), 6, 8))
    xr.Dataset({"t": (dims, values)}, {"time": TIMES}).to_netcdf(tmp_path / "ens.nc")
    ds = scidata.open_dataset(str(tmp_path / "ens.nc"), sample_dim=("member", "time"), steps=(0, 1))
    first, second = ds[len(TIMES)].source  # each member has one window less than times
    assert (first.trajectory, first.index, second.index, second.time) == ({"member": 1}, 1, 2, TIMES[2])
    whole = scidata.open_dataset(str(tmp_path / "ens.nc"), sample_dim=False)
    (source,) = whole[0].source
    assert (source.index, source.time) == (0, None)


def test_times_that_cannot_be_decoded_have_no_label(tmp_path):
    ds = grid(np.arange(4))
    ds["time"].attrs["units"] = "months since 0000-01-01"
    ds.to_netcdf(tmp_path / "a.nc")
    sample = scidata.open_dataset(str(tmp_path / "a.nc"), coords=True, gaps="allow")[2]
    assert (sample.source[0].index, sample.source[0].time) == (2, None)
    with pytest.raises(UnsupportedFormatError):
        sample.coords  # noqa: B018


def test_source_of_stores_and_clouds(tmp_path):
    for number in (1, 2):
        with h5py.File(tmp_path / f"car_{number}.h5", "w") as file:
            file["points"] = np.random.default_rng(number).random((30 * number, 3))
    raw = scidata.open_dataset(f"{tmp_path}/car_*.h5", kind="points")
    assert [source.path for source in raw[1].source] == [f"{tmp_path}/car_2.h5"]
    scidata.partition(f"{tmp_path}/car_*.h5", str(tmp_path / "cars.store"), kind="points")
    ds = scidata.open_dataset(str(tmp_path / "cars.store"))
    (batch,) = scidata.DataLoader(ds, batch_size=2)
    want = [f"{tmp_path}/cars.store/sample-{number:06d}.zarr" for number in range(2)]
    assert (
        [source.path for source in batch.source] == [source.path for i in range(2) for source in ds[i].source] == want
    )
    assert batch.to(torch.float64).replace({"w": batch["pos"] * 2}).source == batch.source


def fails(sample):
    raise ValueError("no rain")


def test_an_error_of_a_transform_names_the_source(files):
    ds = scidata.open_dataset(files, transform=fails)
    for read in (lambda: ds[6], lambda: list(scidata.DataLoader(scidata.subset(ds, [6]), batch_size=1))):
        with pytest.raises(ValueError, match="no rain") as caught:
            read()
        assert "1.nc[1] 2015-01-02T12:00:00" in caught.value.__notes__[0]

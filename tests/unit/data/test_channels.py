"""Fields of different rank as channels: their order and names, and what does not fit."""

import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError

SIZES = {"time": 4, "level": 2, "lat": 5, "lon": 4, "cell": 6}
DIMS = {"u": "time level lat lon", "t2m": "time lat lon", "mask": "lat lon", "season": "time", "q": "time cell"}
VALUES = {
    name: np.random.default_rng(k).random([SIZES[d] for d in dims.split()]).astype("f4" if name != "mask" else "f8")
    for k, (name, dims) in enumerate(DIMS.items())
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = xr.Dataset({name: (dims.split(), VALUES[name]) for name, dims in DIMS.items()}, {"level": [500.0, 850.5]})
    path = str(tmp_path_factory.mktemp("channels") / "a.nc")
    made.to_netcdf(path)
    return path


def test_channels_go_through_steps_and_levels(path):
    ds = scidata.open_dataset(path, fields=["u", "t2m", "mask"], steps={"u": (0, 1)})
    channels = ds.channels()
    assert channels.names == (
        *("u[time=0, level=500]", "u[time=0, level=850.5]"),
        *("u[time=1, level=500]", "u[time=1, level=850.5]"),
        *("t2m", "mask"),
    )
    x = ds[1].stack()
    flat = [VALUES["u"][1:3].reshape(4, 5, 4), VALUES["t2m"][1:2], VALUES["mask"][None]]
    assert torch.equal(x, torch.cat(list(map(torch.from_numpy, flat))))
    assert x.dtype == torch.float64  # as torch.cat promotes
    assert x.shape == (len(channels), 5, 4)
    back = channels.unstack(x)
    assert all(torch.equal(back[name], ds[1][name].double()) for name in ds.fields)
    more = channels.unstack(torch.randn(3, 7, 6, 2, 2))  # of an ensemble, a batch and another grid
    assert [tuple(part.shape) for part in more.values()] == [(3, 7, 2, 2, 2, 2), (3, 7, 2, 2), (3, 7, 2, 2)]
    assert torch.equal(ds[1].stack(["mask", "t2m"])[1], ds[1]["t2m"].double())


def test_members_and_cells(path):
    cells = scidata.open_dataset(path, fields=["q"], steps=(0, 2))
    assert cells.channels().dims == ("cell",)
    assert cells.channels().names == ("q[time=0]", "q[time=2]")
    one = scidata.open_dataset(path, fields=["u"], isel={"level": [1]})
    assert one.channels().names == ("u[level=850.5]",)
    assert one.channels(dims=("level", "lat", "lon")).names == ("u",)
    assert scidata.open_dataset(path, fields=["u"], isel={"level": 1}).channels().names == ("u",)


def test_what_does_not_fit(path):
    ds = scidata.open_dataset(path, fields=["u", "t2m", "season"], sample_dim="time")
    with pytest.raises(ConfigError, match=r"do not all end with the same dims: u \(level, lat, lon\).*season \(\)"):
        ds.channels()
    with pytest.raises(UnknownNameError, match=r"'t2' *.*'t2m'"):
        ds[0].stack(["u", "t2"])
    with pytest.raises(ConfigError, match=r"end with the same dims \('level', 'lat', 'lon'\)"):
        ds.channels(["u", "t2m"], dims=("level", "lat", "lon"))
    channels = ds.channels(["u", "t2m"])
    with pytest.raises(FieldMismatchError, match="does not have 3 channels"):
        channels.unstack(torch.zeros(4, 5, 4))
    with pytest.raises(FieldMismatchError, match="field 'u' has dims"):
        channels.stack(scidata.open_dataset(path, fields=["u", "t2m"], isel={"level": [0]})[0])

"""Steps of a sample by field, and windows of steps over gaps in time."""

import pickle

import numpy as np
import pytest
import xarray as xr

import scidata
from scidata.errors import ConfigError, UnknownNameError
from scidata.grids.reader import GridReader
from scidata.read.disk_cache import make_cache

NUM = 12
U, F, MASK = (np.random.default_rng(0).random(shape, np.float32) for shape in ((NUM, 7, 4), (NUM, 7, 4), (7, 4)))


def write(path, times, rows=slice(None)):
    fields = {"u": (("time", "y", "x"), U[rows]), "f": (("time", "y", "x"), F[rows]), "mask": (("y", "x"), MASK)}
    encoding = {name: {"zlib": True, "chunksizes": (3, 7, 4)} for name in "uf"}
    xr.Dataset(fields, {"time": times}).to_netcdf(path, engine="netcdf4", encoding=encoding)
    return str(path)


@pytest.mark.parametrize("more", [{}, {"pool_bytes": 1 << 20}, {"cache": True}], ids=["alone", "pool", "cache"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_by_field(tmp_path, num_ranks, more):
    path = write(tmp_path / "a.nc", np.datetime64("2015-01-01", "ns") + np.arange(NUM) * np.timedelta64(6, "h"))
    steps = {"u": (-1, 0, 2), "*": (1,)}
    more = {"disk": make_cache(tmp_path / "kept", None)} if "cache" in more else more
    reader = GridReader(path, axis_sizes={"domain": num_ranks}, shard={"y": "domain"}, steps=steps, **more)
    reader = pickle.loads(pickle.dumps(reader))
    assert reader.num_samples == NUM - 3
    for _ in range(2):
        for i in range(reader.num_samples):
            parts = []
            for rank in range(num_ranks):
                here = reader.partition.coordinate(rank)
                parts.append({n: np.empty(s.shape, s.dtype) for n, s in reader.buffer_specs(here).items()})
                reader.read_into(i, parts[-1], here)
            whole = {n: np.concatenate([p[n] for p in parts], reader.dims(n).index("y")) for n in parts[0]}
            assert np.array_equal(whole["u"], U[[i, i + 1, i + 3]])
            assert np.array_equal(whole["f"], F[i + 2])
            assert np.array_equal(whole["mask"], MASK)


def test_steps_that_mean_nothing_are_refused(tmp_path):
    path = write(tmp_path / "a.nc", np.arange(NUM))
    with pytest.raises(UnknownNameError, match=r"'uu' is read.*'u'"):
        scidata.open_dataset(path, steps={"uu": (0,)})
    with pytest.raises(ConfigError, match="'mask' has no dimension 'time'"):
        scidata.open_dataset(path, steps={"mask": (0, 1)})
    with pytest.raises(ConfigError, match="gaps must be one of"):
        scidata.open_dataset(path, gaps="jump")


def test_no_window_crosses_a_gap(tmp_path):
    every = np.datetime64("2015-01-01", "ns") + np.arange(NUM + 1) * np.timedelta64(6, "h")
    times = np.delete(every, 5)
    one = write(tmp_path / "one.nc", times)
    several = [write(tmp_path / f"{k}.nc", times[rows], rows) for k, rows in enumerate((slice(5), slice(5, NUM)))]
    for path in (one, several):
        with pytest.warns(
            UserWarning, match="a gap in steps of 6 hours, from 2015-01-02T00.* to .*2015-01-02T12.*2 of 10"
        ):
            ds = scidata.open_dataset(path, fields=["u"], steps=(-1, 0, 1), sample_dim="time", coords=True)
        assert len(ds) == 8
        for sample in (ds[i] for i in range(len(ds))):
            assert (np.diff(sample.coords["time"]) == np.timedelta64(6, "h")).all()
        with pytest.raises(ConfigError, match="gap"):
            scidata.open_dataset(path, steps=(0, 1), gaps="error", sample_dim="time")
        assert len(scidata.open_dataset(path, steps=(-1, 0, 1), gaps="allow", sample_dim="time")) == 10


@pytest.mark.filterwarnings("error::UserWarning:scidata")
def test_months_are_no_gaps(tmp_path):
    path = write(tmp_path / "a.nc", np.arange("2015-01", "2016-01", dtype="M8[M]").astype("M8[ns]"))
    assert len(scidata.open_dataset(path, steps=(0, 1), sample_dim="time", gaps="error")) == NUM - 1

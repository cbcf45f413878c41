"""Times that count from a date: whole numbers of plain units are decoded here, as xarray decodes them."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from scidata.sources.times import decode_times

UNITS = [
    "days",
    "d",
    "hours",
    "hr",
    "hrs",
    "h",
    "minutes",
    "min",
    "seconds",
    "secs",
    "s",
    "milliseconds",
    "microseconds",
]
DATES = ["1900-01-01", "1900-1-1 00:00:0.0", "1970-01-01T06:30:00Z", "2000-02-29 12:00", "1800-01-01 00:00:00.000 UTC"]
REMEDY = "write others"


def by_xarray(said, values):
    xr = pytest.importorskip("xarray")
    return np.asarray(xr.decode_cf(xr.Dataset(coords={"t": ("t", values, said)}))["t"].values).astype("M8[ns]")


@pytest.mark.parametrize("dtype", ["i4", "i8", "u1"])
def test_as_xarray_decodes_them(dtype):
    for unit, date, calendar in itertools.product(UNITS, DATES, [None, "standard", "Gregorian", "proleptic_gregorian"]):
        said = {"units": f"{unit} since {date}"} | ({} if calendar is None else {"calendar": calendar})
        values = np.array([0, 1, 59, 200], dtype) - (0 if dtype == "u1" else 60)
        found = decode_times("x.nc", "t", said, values, REMEDY)
        assert found.dtype == "M8[ns]"
        assert np.array_equal(found, by_xarray(said, values)), said


@pytest.mark.parametrize(
    ("values", "units", "calendar"),
    [
        ([0.25, 1.5], "days since 2000-01-01", "standard"),
        ([1, 2], "days since 1500-01-01", "standard"),
        ([2**40, 1], "days since 2000-01-01", "standard"),
        ([59, 60], "days since 2001-01-01", "noleap"),
        ([1, 2], "days since 2000-01-01 00:00 +02:00", "standard"),
    ],
)
def test_all_others_are_left_to_xarray(values, units, calendar, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match="times of 't' are decoded by xarray"):
        decode_times("x.nc", "t", {"units": units, "calendar": calendar}, np.array(values), REMEDY)


def test_plain_ones_load_no_xarray(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="w")
    group.create_array("t2m", data=np.zeros((3, 4), "f4"), dimension_names=("time", "lat"))
    time = group.create_array("time", data=np.arange(3) * 6, dimension_names=("time",))
    time.attrs["units"] = "hours since 1900-01-01 00:00:00.0"
    code = (
        "import sys, scidata\n"
        f"keys = scidata.open_dataset({str(tmp_path / 'x.zarr')!r}).sample_keys('time')\n"
        "print(keys[2].astype('M8[h]'), 'xarray' in sys.modules, 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1900-01-01T12", "False", "False"]

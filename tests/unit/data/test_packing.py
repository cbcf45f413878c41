"""How values are stored: exact, or refused with the value, its place and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import scidata
from scidata.data.output.packing import Packing, packing_given
from scidata.errors import ConfigError
from scidata.testing import make_grid

BIG = 2**53 + 1  # no float64 is this number


def packing(dtype: str, **options: Any) -> Packing:
    return packing_given("u", {"dtype": dtype, **options}, Packing(dtype=np.dtype(dtype)))


@pytest.mark.parametrize(
    ("values", "how", "stored"),
    [
        (np.array([BIG, -BIG]), packing("int64", _FillValue=-1), [BIG, -BIG]),
        (np.array([2**63 - 1]), packing("int64", _FillValue=-(2**63)), [2**63 - 1]),
        (np.array([1]), packing("int64", _FillValue=2**63 - 1), [1]),
        (np.array([BIG]), packing("uint64"), [BIG]),
        (np.array([2**64 - 1], "u8"), packing("uint64", _FillValue=0), [2**64 - 1]),
        (np.array([1.0, np.nan]), packing("int64", _FillValue=BIG), [1, BIG]),
        (np.array([-(2.0**63)]), packing("int64"), [-(2**63)]),
        (np.array([True, False]), packing("int8", _FillValue=-1), [1, 0]),
        (np.array([3.0, np.inf]), packing("float32"), [3.0, np.inf]),
        (np.array([3, 7]), packing("float32", scale_factor=2, add_offset=1), [1.0, 3.0]),
    ],
)
def test_what_is_stored_is_exact(values: Any, how: Packing, stored: list[Any]) -> None:
    assert how.pack(values, "u").tolist() == stored


@pytest.mark.parametrize(
    ("bad", "how", "said"),
    [
        (-9999.0, packing("float32", _FillValue=-9999), "-9999.0, at [1, 2] of this rank's part, would be stored as"),
        (-32767.2, packing("int16", _FillValue=-32767), "read as NaN; give another _FillValue"),
        (-327.67, packing("int16", _FillValue=-32767, scale_factor=0.01), "with scale_factor 0.01"),
        (np.int64(-1), packing("int64", _FillValue=-1), "the _FillValue -1 of int64"),
        (np.int64(-1), packing("uint64"), "-1, at [1, 2] of this rank's part, cannot be stored as uint64"),
        (np.int64(300), packing("uint8", _FillValue=0), "300, at [1, 2]"),
        (2.0**63, packing("int64"), "cannot be stored as int64"),
        (2.0**64, packing("uint64", _FillValue=0), "cannot be stored as uint64"),
        (np.inf, packing("int32", _FillValue=0), "inf, at [1, 2]"),
        (np.nan, packing("int32"), "without a _FillValue"),
        (1e300, packing("float32"), "1e+300, at [1, 2] of this rank's part, cannot be stored as float32"),
        (-1e300, packing("float32", _FillValue=-9999), "-1e+300"),
        (np.float32(1e5), packing("float16"), "100000.0, at [1, 2]"),
        (np.int64(100_000), packing("float16"), "100000, at [1, 2]"),
        (1e10, packing("float32", scale_factor=1e-30), "with scale_factor 1e-30"),
        (1 + 2j, packing("float64"), "is complex128, and float64 is written; give its .real and .imag"),
    ],
)
def test_what_would_be_read_as_another_value(bad: Any, how: Packing, said: str) -> None:
    values = np.zeros((2, 4), np.asarray(bad).dtype) + np.asarray(bad).dtype.type(5)
    assert how.pack(values, "u").shape == (2, 4) if values.dtype.kind != "c" else True
    values[1, 2] = bad
    with pytest.raises(ConfigError) as caught:
        how.pack(values, "u of step 3")
    assert said in str(caught.value)
    assert "u of step 3" in str(caught.value)


@pytest.mark.parametrize(("dtype", "fill"), [("int8", 1.5), ("int64", 2**63), ("float32", 1e300), ("int16", "none")])
def test_fill_values_that_the_dtype_does_not_hold(dtype: str, fill: Any) -> None:
    with pytest.raises(ConfigError, match=f"_FillValue .* is no {dtype}"):
        packing(dtype, _FillValue=fill)


@pytest.mark.parametrize("out", ["out.nc", "out.h5", "out.zarr"])
def test_what_was_read_as_it_is_stored_is_written_as_it_is_stored(tmp_path: Path, out: str) -> None:
    make_grid(tmp_path / "packed.nc", format="netcdf4", num_times=2, num_lat=5, num_lon=6, packed=True)
    ds: Any = scidata.open_dataset(tmp_path / "packed.nc", decode=False)
    with scidata.create(tmp_path / out, like=ds) as writer:
        for step in range(2):
            writer[step] = ds[step]
    engine: Any = "zarr" if out.endswith(".zarr") else "netcdf4"
    written = xr.open_dataset(tmp_path / out, engine=engine).load()
    xr.testing.assert_identical(written, xr.open_dataset(tmp_path / "packed.nc").load())

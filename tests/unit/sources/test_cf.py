"""CF decoding against xarray, bit for bit, and axis roles."""

from __future__ import annotations

import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import scidata
from scidata.core.types import ArrayLayout
from scidata.errors import UnsupportedFormatError
from scidata.sources import open_source
from scidata.sources.cf import decoding_of, is_coordinate, role_of

xr = pytest.importorskip("xarray", reason="the oracle of CF decoding")

DATA = Path(__file__).parents[3].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real sample files are not beside the repository")


def layout_of(dtype="i2", attributes=None, *, name="u", dims=("x",), shape=(8,)):
    return ArrayLayout(
        store="made",
        name=name,
        shape=shape,
        dims=dims,
        dtype=np.dtype(dtype),
        chunks=shape,
        axis_order=tuple(range(len(shape))),
        attributes=attributes or {},
    )


def apply(raw, decoding):
    """What the reader does, in plain NumPy."""
    if decoding is None:
        return raw.astype(raw.dtype.newbyteorder("="))
    if decoding.view_as is not None:
        raw = raw.view(decoding.view_as)
    values = raw.astype(decoding.dtype)
    if decoding.scale is not None:
        values *= decoding.scale
    if decoding.offset is not None:
        values += decoding.offset
    for fill in decoding.fill_values:
        values[raw == fill] = complex(np.nan, np.nan) if values.dtype.kind == "c" else np.nan
    return values


def by_xarray(raw, attributes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variable = xr.conventions.decode_cf_variable(
            "u", xr.Variable(("x",), raw, dict(attributes)), decode_times=False, decode_timedelta=False
        )
        return variable.values


def assert_same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


F4, F8, I2, I4, U1, I1 = np.float32, np.float64, np.int16, np.int32, np.uint8, np.int8

CASES = {
    "complex": ("c16", {}),
    "complex, fill": ("c8", {"_FillValue": np.complex64(100)}),
    "complex, fill and missing, big-endian": (">c16", {"_FillValue": 5 + 0j, "missing_value": 100 + 0j}),
    "nothing, int": ("i2", {}),
    "nothing, float": ("f4", {}),
    "nothing, big-endian float": (">f8", {}),
    "float32 pair": ("i2", {"scale_factor": F4(0.1), "add_offset": F4(273.15)}),
    "float64 pair": ("i2", {"scale_factor": F8(0.1), "add_offset": F8(273.15)}),
    "float64 pair, fill": ("i2", {"scale_factor": F8(0.1), "add_offset": F8(273.15), "_FillValue": I2(-32768)}),
    "float32 pair, fill, big-endian": (
        ">i2",
        {"scale_factor": F4(0.1), "add_offset": F4(2.5), "_FillValue": I2(-32768)},
    ),
    "mixed pair": ("i2", {"scale_factor": F4(0.1), "add_offset": F8(273.15)}),
    "scale only, float32": ("i2", {"scale_factor": F4(0.01)}),
    "scale only, float64": ("u1", {"scale_factor": F8(0.01), "missing_value": U1(255)}),
    "offset only, float32": ("i2", {"add_offset": F4(0.5)}),
    "int32, float32 pair": ("i4", {"scale_factor": F4(0.1), "add_offset": F4(1.0)}),
    "int64, float32 pair": ("i8", {"scale_factor": F4(0.1), "add_offset": F4(1.0)}),
    "python numbers (Zarr)": ("i2", {"scale_factor": 0.1, "add_offset": 1.5, "_FillValue": -1}),
    "int8 unsigned": ("i1", {"_Unsigned": "true"}),
    "int8 unsigned, fill": ("i1", {"_Unsigned": "true", "_FillValue": I1(-1)}),
    "int8 unsigned, packed, fill": (
        "i1",
        {"_Unsigned": "true", "_FillValue": I1(-1), "scale_factor": F4(0.5), "add_offset": F4(1.0)},
    ),
    "int8 unsigned, missing_value in the stored dtype": ("i1", {"_Unsigned": "true", "missing_value": I1(-1)}),
    "int16 unsigned, big-endian": (">i2", {"_Unsigned": "true", "_FillValue": I2(-2)}),
    "uint8 signed": ("u1", {"_Unsigned": "false", "scale_factor": F4(0.5)}),
    "uint8 said to be unsigned": ("u1", {"_Unsigned": "true"}),
    "float said to be unsigned": ("f4", {"_Unsigned": "true"}),
    "float32 fill": ("f4", {"_FillValue": F4(-9999.0)}),
    "float32 fill, big-endian": (">f4", {"_FillValue": F4(-9999.0)}),
    "float32, both fills": ("f4", {"_FillValue": F4(-9999.0), "missing_value": F4(3.0)}),
    "float32, fill as float64 that no float32 equals": ("f4", {"missing_value": F8(0.1)}),
    "float64 fill": ("f8", {"_FillValue": F8(2.0)}),
    "float32, NaN fill": ("f4", {"_FillValue": F4("nan")}),
    "float32, NaN fill, packed": ("f4", {"_FillValue": F4("nan"), "scale_factor": F4(0.1)}),
    "float16 fill": ("f2", {"_FillValue": np.float16(2.0)}),
    "int32 fill, no scale": ("i4", {"_FillValue": I4(-9999)}),
    "int64 fill, no scale": ("i8", {"_FillValue": np.int64(-9999)}),
    "int16 fill, no scale": ("i2", {"_FillValue": I2(-999)}),
    "int16, several missing values": ("i2", {"missing_value": np.array([-999, 5], "i2")}),
    "int16, NaN fill": ("i2", {"_FillValue": F8("nan")}),
    "int16, NaN fill, packed": ("i2", {"_FillValue": F8("nan"), "scale_factor": F8(0.1)}),
    "int16, float fill": ("i2", {"_FillValue": F8(-999.0)}),
    "int16, fill that no int16 equals": ("i2", {"_FillValue": F8(-999.5)}),
    "int16, fill out of range": ("i2", {"_FillValue": I4(-99999)}),
}


@pytest.mark.parametrize("case", CASES)
def test_decoding_has_xarrays_bits(case):
    dtype, attributes = CASES[case]
    dtype = np.dtype(dtype)
    values = [0, 1, 2, 3, 5, 100, 127] + ([] if dtype.kind == "u" else [-1, -2, -128])
    if dtype.itemsize > 1:
        values += [-999, -9999, -32768, 32767, 2**10] if dtype.kind != "u" else [65535]
    raw = np.array(values).astype(dtype)
    decoding = decoding_of(layout_of(dtype, attributes, shape=raw.shape))
    # xarray swaps the bytes of a big-endian fill value that is viewed as unsigned, and so misses it
    given = raw.astype(dtype.newbyteorder("=")) if "_Unsigned" in attributes else raw
    assert_same_bits(apply(raw, decoding), by_xarray(given, attributes))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4"])
def test_every_stored_value_decodes_to_xarrays_bits(dtype):
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    raw = rng.integers(info.min, info.max, 20_000, dtype=dtype, endpoint=True)
    for kind in (F4, F8):
        attributes = {"scale_factor": kind(1.2345e-3), "add_offset": kind(-271.3), "_FillValue": raw[7]}
        assert_same_bits(apply(raw, decoding_of(layout_of(dtype, attributes))), by_xarray(raw, attributes))


def test_complex_values_are_read_as_xarrays(tmp_path):
    values = np.array([[1 + 1j, 2, 9 + 9j], [9, 3, -1j]], np.complex64)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        for name, options in (("u", {}), ("chunked", {"chunks": (1, 2)})):
            file.create_dataset(name, data=values, **options).attrs["_FillValue"] = np.complex64(9 + 9j)
    expected = by_xarray(values.ravel(), {"_FillValue": np.complex64(9 + 9j)}).reshape(values.shape)
    assert np.isnan(expected).sum() == 1
    for sample, row in zip(scidata.open_dataset(tmp_path / "c.h5"), expected, strict=True):
        for name in ("u", "chunked"):
            assert_same_bits(sample[name].numpy(), row)


def test_nothing_to_do_is_none():
    assert decoding_of(layout_of("i4")) is None
    assert decoding_of(layout_of("f4")) is None
    assert decoding_of(layout_of(">f4")) is None
    assert decoding_of(layout_of("f4", {"_FillValue": F4("nan")})) is None
    assert decoding_of(layout_of("f4"), np.dtype("f4")) is None
    assert decoding_of(layout_of("?", {"_FillValue": 1})) is None
    assert decoding_of(layout_of("c8", {"scale_factor": 2.0})) is None


def test_the_dtype_asked_for_is_that_of_floating_results_only():
    assert decoding_of(layout_of("i4"), np.dtype("f4")) is None
    plain = decoding_of(layout_of("f8"), np.dtype("f4"))
    assert plain is not None
    assert (plain.dtype, plain.scale, plain.offset, plain.fill_values) == (np.dtype("f4"), None, None, ())
    packed = decoding_of(layout_of("i2", {"scale_factor": F8(0.1), "add_offset": F8(3.0)}), np.dtype(">f4"))
    assert packed is not None
    assert packed.dtype == np.dtype("f4")
    assert packed.dtype.isnative
    filled = decoding_of(layout_of("i4", {"_FillValue": I4(-1)}), np.dtype("f4"))
    assert filled is not None
    assert filled.dtype == np.dtype("f4")
    unsigned = decoding_of(layout_of("i1", {"_Unsigned": "true"}), np.dtype("f4"))
    assert unsigned is not None
    assert (unsigned.dtype, unsigned.view_as) == (np.dtype("u1"), np.dtype("u1"))


def test_fill_values_are_scalars_of_the_dtype_compared_with():
    decoding = decoding_of(layout_of("i1", {"_Unsigned": "true", "_FillValue": I1(-1), "missing_value": U1(9)}))
    assert decoding is not None
    assert {(f.dtype, f.item()) for f in decoding.fill_values} == {(np.dtype("u1"), 255), (np.dtype("u1"), 9)}
    same = decoding_of(layout_of("i2", {"_FillValue": I2(-9), "missing_value": I2(-9)}))
    assert same is not None
    assert len(same.fill_values) == 1


def test_fill_values_written_as_text_in_json():
    assert decoding_of(layout_of("f4", {"_FillValue": "NaN"})) is None
    decoding = decoding_of(layout_of("f4", {"missing_value": "-9999"}))
    assert decoding is not None
    assert decoding.fill_values == (F4(-9999),)


def test_integer_scale_gives_float64():
    decoding = decoding_of(layout_of("i2", {"scale_factor": 2, "_FillValue": -1}))
    assert decoding is not None
    assert decoding.dtype == np.dtype("f8")
    assert apply(np.array([-1, 3], "i2"), decoding).tolist()[1] == 6.0


def test_a_scale_that_is_no_number_is_refused():
    with pytest.raises(UnsupportedFormatError, match=r"'u': scale_factor is .*one number"):
        decoding_of(layout_of("i2", {"scale_factor": np.array([1.0, 2.0])}))
    with pytest.raises(UnsupportedFormatError, match="add_offset"):
        decoding_of(layout_of("i2", {"add_offset": "warm"}))


@needs_data
@pytest.mark.parametrize(
    "name", ["eraint_uvz.nc", "quad_hexagon_grid.nc", "outCSne30.ug", "outCSne30_sel_timeseries.nc"]
)
@pytest.mark.filterwarnings("ignore:variable .* has non-conforming")
def test_real_files_decode_to_xarrays_bits(name):
    source = open_source(DATA / name)
    with xr.open_dataset(DATA / name, decode_times=False, decode_timedelta=False, mask_and_scale=True) as oracle:
        for key, layout in source.arrays.items():
            raw = np.empty(layout.shape, layout.dtype)
            source.read_box(layout, tuple(slice(0, n) for n in layout.shape), raw)
            assert_same_bits(apply(raw, decoding_of(layout)), oracle[key].values)


ROLES = [
    ("a", {"axis": "T"}, "T"),
    ("a", {"axis": "y "}, "Y"),
    ("a", {"standard_name": "latitude"}, "Y"),
    ("a", {"standard_name": "grid_longitude"}, "X"),
    ("a", {"standard_name": "projection_x_coordinate", "units": "m"}, "X"),
    ("a", {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}, "Z"),
    ("a", {"units": "degrees_north"}, "Y"),
    ("a", {"units": "degree_N"}, "Y"),
    ("a", {"units": "degreesE"}, "X"),
    ("a", {"units": "degrees_east"}, "X"),
    ("a", {"units": "days since 1900-01-01"}, "T"),
    ("a", {"units": "hours since 2000-01-01 00:00:0.0"}, "T"),
    ("a", {"units": "days accumulated"}, None),
    ("a", {"units": "degrees"}, None),
    ("a", {"positive": "down", "units": "m"}, "Z"),
    ("a", {}, None),
    ("temperature", {"units": "K"}, None),
    *[(n, {}, "Y") for n in ("lat", "latitude", "y")],
    *[(n, {}, "X") for n in ("lon", "longitude", "x")],
    *[(n, {}, "T") for n in ("time", "month", "valid_time", "step")],
    *[(n, {}, "Z") for n in ("level", "lev", "plev", "pressure", "isobaricInhPa")],
    ("group/lat", {}, "Y"),
    ("lat", {"axis": "X"}, "X"),
    ("lat", {"axis": np.int32(3)}, "Y"),
]


@pytest.mark.parametrize(("name", "attributes", "role"), ROLES)
def test_role(name, attributes, role):
    assert role_of(layout_of("f4", attributes, name=name)) == role


def test_coordinates_are_told_from_fields():
    arrays = {
        a.name: a
        for a in (
            layout_of(name="x"),
            layout_of(name="u", attributes={"coordinates": "lat2d lon2d"}, dims=("y", "x"), shape=(4, 8)),
            layout_of(name="lat2d", dims=("y", "x"), shape=(4, 8)),
            layout_of(name="time", dims=("time",), attributes={"bounds": "time_bnds"}),
            layout_of(name="time_bnds", dims=("time", "two"), shape=(8, 2)),
            layout_of(name="lat", dims=("x",)),
            layout_of(name="g/y", dims=("y",)),
            layout_of(name="g/v", dims=("y",), attributes={"coordinates": "height"}),
            layout_of(name="g/height", dims=("y",)),
            layout_of(name="h/height", dims=("y",)),
        )
    }
    coordinates = {name for name, a in arrays.items() if is_coordinate(a, arrays)}
    assert coordinates == {"x", "lat2d", "time", "time_bnds", "g/y", "g/height"}


@needs_data
def test_roles_of_a_real_file():
    arrays = open_source(DATA / "eraint_uvz.nc").arrays
    roles = {name: role_of(a) for name, a in arrays.items() if is_coordinate(a, arrays)}
    assert roles == {"longitude": "X", "latitude": "Y", "level": "Z", "month": "T"}

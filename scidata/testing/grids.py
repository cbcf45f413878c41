"""A small ERA5-like grid in every format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scidata.core.checks import optional_module
from scidata.core.types import AnyArray, Array, FloatArray
from scidata.errors import ConfigError

#: The formats that ``make_grid`` writes.
GRID_FORMATS = ("zarr2", "zarr3", "zarr3_sharded", "hdf5", "hdf5_chunked", "netcdf4", "netcdf3")

_DIMS = ("time", "level", "latitude", "longitude")
_MISSING = np.int16(-32767)


@dataclass(frozen=True, kw_only=True)
class _Variable:
    dims: tuple[str, ...]
    values: Array  # as stored
    attributes: Mapping[str, object] = field(default_factory=dict)
    chunks: tuple[int, ...] | None = None  # coordinates are in one piece


def make_grid(
    path: str | os.PathLike[str],
    *,
    format: str = "zarr3",
    num_times: int = 4,
    num_levels: int = 3,
    num_lat: int = 19,
    num_lon: int = 24,
    first_time: int = 0,
    seed: int = 0,
    chunks: Sequence[int] | None = None,
    packed: bool = False,
    compressed: bool = True,
    unlimited: bool = False,
) -> dict[str, AnyArray]:
    """Write a small ERA5-like store and return the arrays that a reader should get.

    Fields ``u``, ``v``, ``t`` (smooth plus noise, float32) on ``time, level, latitude, longitude``, latitude from
    north to south, with CF attributes and coordinates.

    Parameters
    ----------
    path : str or PathLike
        File or folder to write; no extension is needed.
    format : str, default "zarr3"
        One of ``GRID_FORMATS``.
    first_time : int, default 0
        Steps (of 6 h) from the start of the data, for series of files.
    chunks : Sequence[int] or None, optional
        Of the fields, where the format has chunks; default ones that divide nothing.
    packed : bool, default False
        Store int16 with ``scale_factor``, ``add_offset`` and some missing values; decoded values are float64.
    compressed : bool, default True
        Where the format has chunks.
    unlimited : bool, default False
        Make time the record dimension of a NetCDF or chunked HDF5 file.
    num_times : int, default 4
        Rows of time.
    num_levels : int, default 3
        Rows of level.
    num_lat : int, default 19
        Rows of latitude.
    num_lon : int, default 24
        Rows of longitude.
    seed : int, default 0
        Of the noise.

    Returns
    -------
    dict
        Fields and coordinates by name, decoded.

    Raises
    ------
    ConfigError
        Unknown format.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> make_grid("era5.zarr", num_lat=7)["u"].shape
    (4, 3, 7, 24)
    """
    if format not in GRID_FORMATS:
        raise ConfigError(f"format must be one of {', '.join(GRID_FORMATS)}, not {format!r}")
    shape = (num_times, num_levels, num_lat, num_lon)
    chunked = (
        tuple(chunks) if chunks is not None else tuple(min(c, n) for c, n in zip((1, 2, 7, 10), shape, strict=True))
    )
    variables = _coordinates(shape, first_time)
    wanted: dict[str, AnyArray] = {name: variable.values for name, variable in variables.items()}
    for number, (name, about) in enumerate(_FIELDS.items()):
        smooth = _smooth(shape, first_time, np.random.default_rng([seed, number]), *_RANGES[name])
        attributes: dict[str, object] = {"units": about[0], "standard_name": about[1]}
        values: Array = smooth
        wanted[name] = smooth
        if packed:
            values, wanted[name], packing = _pack(smooth)
            attributes |= packing
        variables[name] = _Variable(dims=_DIMS, values=values, attributes=attributes, chunks=chunked)
    target = os.path.expanduser(os.fspath(path))
    if format.startswith("zarr"):
        _write_zarr(target, format, variables, compressed)
    elif format.startswith("hdf5"):
        _write_hdf5(target, format == "hdf5_chunked", variables, compressed, unlimited)
    elif format == "netcdf4":
        _write_netcdf4(target, variables, compressed, unlimited)
    else:
        _write_netcdf3(target, variables, unlimited)
    return wanted


_FIELDS = {"u": ("m s-1", "eastward_wind"), "v": ("m s-1", "northward_wind"), "t": ("K", "air_temperature")}
_RANGES = {"u": (5.0, 20.0), "v": (0.0, 10.0), "t": (260.0, 40.0)}  # mean, amplitude
_GLOBAL_ATTRIBUTES = {"Conventions": "CF-1.10", "title": "synthetic grid of scidata.testing"}


def _coordinates(shape: tuple[int, int, int, int], first_time: int) -> dict[str, _Variable]:
    num_times, num_levels, num_lat, num_lon = shape
    values: dict[str, Array] = {
        "time": (6 * (first_time + np.arange(num_times))).astype(np.int32),
        "level": np.linspace(1000, 100, num_levels).round().astype(np.int32),
        "latitude": np.linspace(90, -90, num_lat, dtype=np.float32),
        "longitude": (360 / num_lon * np.arange(num_lon)).astype(np.float32),
    }
    attributes = {
        "time": {"units": "hours since 2020-01-01 00:00:00", "calendar": "standard", "axis": "T"},
        "level": {"units": "hPa", "standard_name": "air_pressure", "positive": "down", "axis": "Z"},
        "latitude": {"units": "degrees_north", "standard_name": "latitude", "axis": "Y"},
        "longitude": {"units": "degrees_east", "standard_name": "longitude", "axis": "X"},
    }
    for name in values:
        attributes[name]["standard_name"] = attributes[name].get("standard_name", name)
    return {name: _Variable(dims=(name,), values=values[name], attributes=attributes[name]) for name in _DIMS}


def _smooth(
    shape: tuple[int, int, int, int], first_time: int, random: np.random.Generator, mean: float, amplitude: float
) -> npt.NDArray[np.float32]:
    num_times, num_levels, num_lat, num_lon = shape
    t, z, y, x = np.ogrid[:num_times, :num_levels, :num_lat, :num_lon]
    wave = np.sin(2 * np.pi * x / num_lon + 0.3 * (t + first_time)) * np.cos(np.pi * y / num_lat) / (1 + 0.5 * z)
    return (mean + amplitude * (wave + 0.05 * random.standard_normal(shape))).astype(np.float32)


def _pack(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], FloatArray, dict[str, object]]:
    """Return raw int16, the decoded values, and the attributes that say how."""
    low, high = float(values.min()), float(values.max())
    scale, offset = np.float64((high - low) / 60_000), np.float64((high + low) / 2)
    raw = np.round((values - offset) / scale).astype(np.int16)
    raw.reshape(-1)[5::37] = _MISSING
    decoded = raw.astype(np.float64) * scale + offset
    decoded[raw == _MISSING] = np.nan
    return raw, decoded, {"scale_factor": scale, "add_offset": offset, "_FillValue": _MISSING}


def _write_zarr(path: str, format: str, variables: Mapping[str, _Variable], compressed: bool) -> None:
    import zarr

    version: Literal[2, 3] = 2 if format == "zarr2" else 3
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.attrs.update(_GLOBAL_ATTRIBUTES)
    for name, variable in variables.items():
        attributes, options = dict[str, Any](), dict[str, Any]()
        attributes |= {k: v.item() if isinstance(v, np.generic) else v for k, v in variable.attributes.items()}
        if not compressed:
            options["compressors"] = None
        if version == 2:
            attributes["_ARRAY_DIMENSIONS"] = list(variable.dims)
        else:
            options["dimension_names"] = variable.dims
        if format == "zarr3_sharded" and variable.chunks is not None:
            options["shards"] = tuple(2 * c for c in variable.chunks)
        array = group.create_array(
            name,
            shape=variable.values.shape,
            dtype=variable.values.dtype,
            chunks=variable.chunks or variable.values.shape,
            # readers of version 2 take a fill value for missing data
            fill_value=variable.attributes.get("_FillValue", None if version == 2 else 0),
            attributes=attributes,
            config={"write_empty_chunks": True},  # a chunk of zeros is data too
            **options,
        )
        array[...] = variable.values


def _write_hdf5(
    path: str, chunked: bool, variables: Mapping[str, _Variable], compressed: bool, unlimited: bool
) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs.update(_GLOBAL_ATTRIBUTES)
        for name, variable in variables.items():
            options: dict[str, object] = {}
            if chunked and variable.chunks is not None:
                options["chunks"] = variable.chunks
                if compressed:
                    options |= {"compression": "gzip", "shuffle": True}
                if unlimited:
                    options["maxshape"] = (None, *variable.values.shape[1:])
            dataset = file.create_dataset(name, data=variable.values, **options)
            dataset.attrs.update(variable.attributes)
            if variable.dims == (name,):
                dataset.make_scale(name)
            else:
                for index, dim in enumerate(variable.dims):
                    dataset.dims[index].attach_scale(file[dim])


def _write_netcdf4(path: str, variables: Mapping[str, _Variable], compressed: bool, unlimited: bool) -> None:
    netCDF4 = optional_module("netCDF4", "writing NetCDF-4 needs netCDF4", "netcdf")  # noqa: N806
    with netCDF4.Dataset(path, "w", format="NETCDF4") as file:
        file.setncatts(_GLOBAL_ATTRIBUTES)
        for name in _DIMS:
            file.createDimension(name, None if unlimited and name == "time" else len(variables[name].values))
        for name, variable in variables.items():
            attributes = dict(variable.attributes)
            options: dict[str, object] = {"fill_value": attributes.pop("_FillValue", None)}
            if variable.chunks is not None:
                options["chunksizes"] = variable.chunks
                if compressed:
                    options |= {"zlib": True, "shuffle": True}
            out = file.createVariable(name, variable.values.dtype, variable.dims, **options)
            out.set_auto_maskandscale(False)
            out.setncatts(attributes)
            out[...] = variable.values


def _write_netcdf3(path: str, variables: Mapping[str, _Variable], unlimited: bool) -> None:
    from scipy.io import netcdf_file

    with netcdf_file(path, "w", version=2) as file:
        for key, text in _GLOBAL_ATTRIBUTES.items():
            setattr(file, key, text)
        for name in _DIMS:
            file.createDimension(name, None if unlimited and name == "time" else len(variables[name].values))
        for name, variable in variables.items():
            out = file.createVariable(name, variable.values.dtype.newbyteorder(">"), variable.dims)
            for key, value in variable.attributes.items():
                setattr(out, key, value)
            out[:] = variable.values

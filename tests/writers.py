"""Writes the small files and stores that tests read: arrays by name in every format, meshes, grids, clouds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
import zarr
from scipy.spatial import Delaunay

import scidata

__all__ = [
    "normal_values",
    "triangulation",
    "write_arrays",
    "write_clouds",
    "write_grid",
    "write_hdf5",
    "write_mpas",
]

Arrays = Mapping[str, npt.ArrayLike]
Path = str | os.PathLike[str]


def write_hdf5(
    path: Path,
    arrays: Arrays,
    dims: Mapping[str, Sequence[str]] | None = None,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    root: Mapping[str, Any] | None = None,
) -> str:
    """Write arrays to an HDF5 file, whose folder is made; ``dims`` and ``attributes`` by array. Return its path."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(root or {})
        for name, values in arrays.items():
            file[name] = values
            file[name].attrs.update((attributes or {}).get(name, {}))
            for i, dim in enumerate((dims or {}).get(name, ())):
                file[name].dims[i].label = dim
    return str(path)


def write_arrays(
    path: Path,
    format: str,
    arrays: Arrays,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    root: Mapping[str, Any] | None = None,
) -> str:
    """Write arrays to ``zarr2``, ``zarr3`` (two chunks along each dim), ``hdf5``, ``netcdf4`` or ``netcdf3``."""
    if format == "hdf5":
        return write_hdf5(path, arrays, dims=dims, attributes=attributes, root=root)
    write = _write_zarr if format.startswith("zarr") else _write_netcdf
    write(path, format, arrays, attributes or {}, dims or {}, root or {})
    return str(path)


def _write_zarr(path: Path, format: str, arrays: Arrays, attributes: Any, dims: Any, root: Any) -> None:
    group = zarr.open_group(str(path), mode="w", zarr_format=int(format[-1]))
    group.attrs.update(root)
    for name, given in arrays.items():
        values = np.asarray(given)
        chunks = tuple(max(1, (n + 1) // 2) for n in values.shape)
        options: dict[str, Any] = {"dimension_names": dims[name]} if name in dims and format == "zarr3" else {}
        if format == "zarr2":  # whose fill value counts as CF's _FillValue, as in xarray: none, as xarray writes it
            options["fill_value"] = None
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks, **options)
        array[...] = values + 0
        extra = {"_ARRAY_DIMENSIONS": dims[name]} if name in dims and format == "zarr2" else {}
        array.attrs.update({**attributes.get(name, {}), **extra})


def _write_netcdf(path: Path, format: str, arrays: Arrays, attributes: Any, dims: Any, root: Any) -> None:
    import pytest

    netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")
    with netCDF4.Dataset(path, "w", format="NETCDF4" if format == "netcdf4" else "NETCDF3_CLASSIC") as nc:
        nc.setncatts(root)
        for name, given in arrays.items():
            values, name_here = np.asarray(given), name
            if format == "netcdf3":  # which has neither groups nor 64-bit integers
                values = values.astype("i4") if values.dtype.kind in "iu" else values
                name_here = name.replace("cells/", "cells_")
            names = dims.get(name, [f"{name.replace('/', '_')}_{i}" for i in range(values.ndim)])
            for dim, size in zip(names, values.shape, strict=True):
                if dim not in nc.dimensions:
                    nc.createDimension(dim, size)
            extra = dict(attributes.get(name, {}))
            variable = nc.createVariable(name_here, values.dtype, names, fill_value=extra.pop("_FillValue", None))
            variable.setncatts(extra)
            variable.set_auto_mask(False)
            variable[...] = values


def triangulation(points: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
    """Return points in the plane, and the triangles between them, int32: a mesh for :func:`write_hdf5`."""
    return {"points": np.asarray(points), "cells": Delaunay(points).simplices.astype("i4")}


def write_mpas(
    path: Path,
    *,
    sizes: Sequence[int] = (3, 4),
    attributes: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
) -> str:
    """Write a triangle and a quad on a plane that wraps in x; padding is not zero, as some tools write it."""
    import netCDF4

    with netCDF4.Dataset(path, "w", format="NETCDF3_64BIT_OFFSET") as nc:
        nc.setncatts(
            {"on_a_sphere": "NO", "is_periodic": "YES", "x_period": 4.0, "y_period": 0.0, **(attributes or {})}
        )
        for name, size in (("nCells", 2), ("nVertices", 5), ("maxEdges", 4), ("nEdges", 3), ("TWO", 2), ("Time", None)):
            nc.createDimension(name, size)
        arrays: dict[str, tuple[str, tuple[str, ...], Any]] = {
            "verticesOnCell": ("i4", ("nCells", "maxEdges"), [[1, 2, 3, 3], [1, 3, 4, 5]]),
            "nEdgesOnCell": ("i4", ("nCells",), sizes),
            "verticesOnEdge": ("i4", ("nEdges", "TWO"), [[1, 2], [2, 3], [3, 1]]),
            "xVertex": ("f8", ("nVertices",), [0, 1, 1, 0, -1]),
            "yVertex": ("f8", ("nVertices",), [0, 0, 1, 1, 1]),
            "zVertex": ("f8", ("nVertices",), [0] * 5),
            "thickness": ("f4", ("Time", "nCells"), [[1, 2], [3, 4], [5, 6]]),
        }
        for name, (dtype, dims, values) in arrays.items():
            if name not in leave_out:
                nc.createVariable(name, dtype, dims)[...] = np.array(values)
    return str(path)


def normal_values(*shape: int) -> torch.Tensor:
    """Return the same float64 numbers for the same shape."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def write_grid(path: Path, values: torch.Tensor, *, name: str = "u", chunk: tuple[int, int]) -> str:
    """Write ``(time, lat, lon)`` to a Zarr group; return its path."""
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    group.create_array(name, data=values.numpy(), chunks=(1, *chunk), dimension_names=["time", "lat", "lon"])
    return str(path)


def write_clouds(folder: Path, sizes: Sequence[int]) -> str:
    """Write points in the unit cube, a sample of each size, to a store; return its path."""
    files = [
        write_hdf5(os.path.join(folder, f"{index}.h5"), {"pos": np.random.default_rng(index).random((size, 3))})
        for index, size in enumerate(sizes)
    ]
    store = os.path.join(folder, "clouds")
    scidata.partition(files, store, kind="points")
    return store

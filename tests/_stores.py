"""Small data sets that several tests of the loader read."""

from __future__ import annotations

import os
from collections.abc import Sequence

import h5py
import numpy as np
import torch
import zarr

import scidata

__all__ = ["normal_values", "write_clouds", "write_grid"]


def normal_values(*shape: int) -> torch.Tensor:
    """Return the same float64 numbers for the same shape."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def write_grid(path: str | os.PathLike[str], values: torch.Tensor, *, name: str = "u", chunk: tuple[int, int]) -> str:
    """Write ``(time, lat, lon)`` to a Zarr group; return its path."""
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    group.create_array(name, data=values.numpy(), chunks=(1, *chunk), dimension_names=["time", "lat", "lon"])
    return str(path)


def write_clouds(folder: str | os.PathLike[str], sizes: Sequence[int]) -> str:
    """Write points in the unit cube, a sample of each size, to a store; return its path."""
    files = [os.path.join(folder, f"{index}.h5") for index in range(len(sizes))]
    for index, (path, size) in enumerate(zip(files, sizes, strict=True)):
        with h5py.File(path, "w") as file:
            file["pos"] = np.random.default_rng(index).random((size, 3))
    store = os.path.join(folder, "clouds")
    scidata.partition(files, store, kind="points")
    return store

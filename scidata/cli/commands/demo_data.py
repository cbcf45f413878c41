"""Synthetic weather for the demo: smooth waves that drift eastward, on a coarse ERA5-like grid, as Zarr."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr

NUM_LATITUDES, NUM_LONGITUDES, NUM_TIMES, LEVELS = 121, 240, 16, (850, 500, 250)
#: Names, units, mean and standard deviation; the model takes the last two to normalise.
FIELDS: dict[str, tuple[str, float, float]] = {
    "u": ("m s**-1", 5.0, 10.0),
    "v": ("m s**-1", 0.0, 8.0),
    "t": ("K", 260.0, 20.0),
}
PATCH = 8  # rows and columns of a patch of the model
#: What is read of each sample: input, and the target six hours later, on rows that fill patches; and how it is split.
READ: dict[str, Any] = {
    "fields": list(FIELDS),
    "steps": (0, 1),
    "isel": {"latitude": slice(0, NUM_LATITUDES - NUM_LATITUDES % PATCH)},
}
SPLIT: dict[str, Any] = {"shard": {"latitude": "domain"}, "align": PATCH}
_CHUNK_ROWS = 32


def write_weather(path: str, *, seed: int = 0) -> None:
    """Write ``u``, ``v`` and ``t``, float32 of (time 16, level 3, latitude 121, longitude 240), to a new Zarr store."""
    rng = np.random.default_rng(seed)
    latitude = np.linspace(90.0, -90.0, NUM_LATITUDES)
    longitude = np.arange(NUM_LONGITUDES) * (360.0 / NUM_LONGITUDES)
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"title": "synthetic weather of scidata demo"})
    coordinates = {
        "time": (np.arange(NUM_TIMES) * 6, "hours since 2020-01-01"),
        "level": (np.array(LEVELS), "hPa"),
        "latitude": (latitude, "degrees_north"),
        "longitude": (longitude, "degrees_east"),
    }
    for name, (values, units) in coordinates.items():
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=values.shape, dimension_names=[name]
        )
        array[:] = values
        array.attrs["units"] = units
    shape = (NUM_TIMES, len(LEVELS), NUM_LATITUDES, NUM_LONGITUDES)
    for name, (units, mean, spread) in FIELDS.items():
        array = group.create_array(
            name,
            shape=shape,
            dtype="float32",
            chunks=(1, len(LEVELS), _CHUNK_ROWS, NUM_LONGITUDES),
            dimension_names=list(coordinates),
            config={"write_empty_chunks": True},
        )
        array.attrs["units"] = units
        array[:] = (mean + spread * _waves(rng, shape, latitude, longitude)).astype(np.float32)


def _waves(rng: np.random.Generator, shape: tuple[int, ...], latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Return about unit variance: a few zonal waves, each with its own speed, and a little noise."""
    phi, theta = np.deg2rad(longitude), np.deg2rad(latitude)[:, None]
    time = np.arange(shape[0])[:, None, None, None]
    level = np.arange(shape[1])[:, None, None]
    field = 0.05 * rng.standard_normal(shape)
    for number in range(1, 6):
        phase, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0.1, 0.4)
        field += np.cos(number * phi - speed * time + phase + 0.3 * level) * np.cos(theta) ** number / np.sqrt(number)
    return field

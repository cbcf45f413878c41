"""What normalising costs: CPU time of reading samples as they are, normalised, and with a transform that normalises.

``python tests/bench/normalise.py [--megabytes 54] [--rounds 7]``

Rounds are interleaved; figures are medians of CPU ms a sample, of this process with all its threads, into buffers that
are used again, as a loader's are. ``numpy`` is what ``scidata.statistics`` is held against: mean, std, min and max of
one sample in memory, in float64, without reading it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr

import scidata

SHAPE = (4, 13, 361, 720)  # times, levels, latitudes, longitudes; 13.5 MB a sample of float32


def write(path: str, scheme: str, num_levels: int) -> None:
    """Write a field as raw float32, as float32 behind zstd, or as int16 with scale and offset."""
    rng = np.random.default_rng(0)
    shape = (SHAPE[0], num_levels, *SHAPE[2:])
    packed = rng.normal(0, 4000, shape).clip(-30000, 30000).astype("i2")
    group = zarr.open_group(path, mode="w")
    dims = ["time", "level", "latitude", "longitude"]
    values: npt.NDArray[Any] = packed
    if scheme != "int16":
        values = (packed * np.float32(0.003) + np.float32(270)).astype("f4")
    options: dict[str, Any] = {"compressors": None} if scheme == "raw" else {}
    chunks = (1, num_levels, *SHAPE[2:]) if scheme == "raw" else (1, 1, *SHAPE[2:])
    array = group.create_array("t", data=values, chunks=chunks, dimension_names=dims, **options)
    if scheme == "int16":
        array.attrs.update(scale_factor=np.float32(0.003).item(), add_offset=270.0)


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU ms of each, all in turn in every round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            taken[name].append((time.process_time() - began) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def bench(scheme: str, num_levels: int, rounds: int, by: tuple[str, ...]) -> dict[str, float]:
    """Measure one way of storing."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "grid.zarr")
        write(path, scheme, num_levels)
        ds = scidata.open_dataset(path, dtype=torch.float32, pool_bytes=0)
        stats = scidata.statistics(ds, by=by, differences=False)
        normal = ds.normalise(stats)
        shape = (-1, 1, 1) if by else ()
        mean, std = (torch.from_numpy(np.asarray(x, "f4").reshape(shape)) for x in (stats["t"].mean, stats["t"].std))
        buffers = {name: np.empty(spec.shape, spec.dtype) for name, spec in ds.buffer_specs().items()}
        tensor = torch.from_numpy(buffers["t"])

        def plain() -> None:
            ds.read_into(1, buffers)

        def normalised() -> None:
            normal.read_into(1, buffers)

        def transformed() -> torch.Tensor:
            ds.read_into(1, buffers)
            return (tensor - mean) / std

        def in_place() -> None:
            ds.read_into(1, buffers)
            tensor.sub_(mean).div_(std)

        values = buffers["t"].astype("f4")
        runs = {"plain": plain, "normalised": normalised, "transform": transformed, "transform in place": in_place}
        found = measured(runs, rounds)

        def by_numpy() -> None:
            wide = values.astype("f8")
            axis = (1, 2) if by else None
            wide.mean(axis=axis), wide.std(axis=axis), wide.min(axis=axis), wide.max(axis=axis)

        def passes() -> None:
            scidata.statistics(ds, by=by, differences=False)

        def with_steps() -> None:
            scidata.statistics(ds, by=by)

        more = {"statistics": passes, "with differences": with_steps}
        each = {name: ms / SHAPE[0] for name, ms in measured(more, rounds).items()}
        return found | each | measured({"numpy": by_numpy}, rounds)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=54)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_levels = max(1, arguments.megabytes * 10**6 // (4 * SHAPE[2] * SHAPE[3]))
    print(f"CPU ms a sample of {num_levels * SHAPE[2] * SHAPE[3] * 4 / 1e6:.0f} MB, median of {arguments.rounds}")
    for by in ((), ("level",)):
        for scheme in ("raw", "zstd", "int16"):
            found = bench(scheme, num_levels, arguments.rounds, by)
            shown = "  ".join(f"{name} {ms:.1f}" for name, ms in found.items())
            print(f"{scheme:6s} by {','.join(by) or 'field':6s} {shown}", flush=True)


if __name__ == "__main__":
    main()

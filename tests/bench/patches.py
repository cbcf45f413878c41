"""CPU and bytes of a patch, beside xarray's ``isel`` of the same rows: ``python tests/bench/patches.py``."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import xarray as xr
import zarr

import scidata

SIZE, NUM, TURNS = {"lat": 128, "lon": 128}, 40, 5


def write(path: str, compressed: bool) -> None:
    """Write four fields of 721 x 1440, a quarter of the rows in a chunk."""
    group = zarr.open_group(path, mode="w")
    noise = np.random.default_rng(0).random((4, 721, 1440), np.float32)
    for name in "abcd":
        group.create_array(
            name, shape=noise.shape, chunks=(1, 103, 180), dtype="f4", compressors="auto" if compressed else None,
            dimension_names=["time", "lat", "lon"],
        )[...] = noise  # fmt: skip


def milliseconds(read: Callable[[int], object]) -> float:
    """Return the CPU time of a call."""
    begin = time.process_time()
    for i in range(NUM):
        read(i)
    return (time.process_time() - begin) / NUM * 1e3


def row(path: str) -> str:
    """Measure one file."""
    asked = [
        scidata.Patches(SIZE),
        scidata.Patches({"lat": 103, "lon": 180}, align="chunk"),
        scidata.Patches(SIZE, order="regular"),
    ]
    sets = [scidata.open_dataset(path, patch=each, num_threads=0, pool_bytes=0) for each in asked]
    whole = xr.open_zarr(path, consolidated=False)

    def ours(ds: scidata.PatchDataset, i: int) -> None:
        ds.set_epoch(i)
        ds[i % 4]

    def theirs(i: int) -> None:
        at = sets[0].origin(i % 4, epoch=i)
        rows = {dim: slice(first, first + SIZE[dim]) for dim, first in at.items()}
        whole.isel(time=i % 4, **rows).load()

    calls: list[Callable[[int], object]] = [partial(ours, ds) for ds in sets]
    turns = [[milliseconds(call) for call in [*calls, theirs]] for _ in range(TURNS)]
    median = [statistics.median(each) for each in zip(*turns, strict=True)]
    ratios = []
    for ds in sets[:2]:
        plans = [ds.plan(i) for i in range(4)]
        ratios.append(sum(p.bytes_fetched for p in plans) / sum(p.bytes_wanted for p in plans))
    return f"{' | '.join(f'{ms:.1f} ms' for ms in median)} | {ratios[0]:.2f}, {ratios[1]:.2f} |"


def main() -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    print("| data | random | at chunks | tiles, again | xarray | bytes fetched / wanted: random, at chunks |")
    print("|---|---|---|---|---|---|")
    for compressed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "grid.zarr")
            write(path, compressed)
            print(f"| {'zstd' if compressed else 'raw'} | {row(path)}")


if __name__ == "__main__":
    main()

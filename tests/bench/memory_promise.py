"""The memory that ``scidata plan`` promises for a loader, and the memory that a fresh process takes.

``python tests/bench/memory_promise.py`` prints MiB of ten configurations: peak resident beyond imports in three
epochs, on one rank.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

import scidata
from scidata.loader.promise import promise_of
from scidata.testing import run_ranks

STEPS, LAT, LON = 96, 361, 720


class Case(NamedTuple):
    """Options of data, of ``open_dataset`` and of the loader."""

    store: str
    options: dict[str, Any]
    loader: dict[str, Any]


CASES = {
    "lz4, blocks, all kept": Case("lz4", {}, {"batch_size": 4, "shuffle": "blocks"}),
    "lz4, stored, all kept, batches of 16": Case("lz4", {}, {"batch_size": 16}),
    "lz4, full, all kept": Case("lz4", {}, {"shuffle": True}),
    "lz4, blocks, 60 MB": Case("lz4", {"pool_bytes": 60_000_000}, {"batch_size": 4, "shuffle": "blocks"}),
    "lz4, full, no pool": Case("lz4", {"pool_bytes": 0}, {"batch_size": 8, "shuffle": True}),
    "zstd, pairs of steps, blocks, all kept": Case("zstd", {"steps": [0, 1]}, {"batch_size": 4, "shuffle": "blocks"}),
    "raw, full, batches of 32": Case("raw", {}, {"batch_size": 32, "shuffle": True}),
    "raw, pairs of steps, stored, batches of 16": Case("raw", {"steps": [0, 1]}, {"batch_size": 16}),
    "lz4, half of the rows, blocks, all kept": Case(
        "lz4", {"isel": {"latitude": slice(0, 181)}}, {"shuffle": "blocks"}
    ),
    "lz4, full, 60 MB": Case("lz4", {"pool_bytes": 60_000_000}, {"batch_size": 4, "shuffle": True}),
}

AHEAD = 12  # steps of each epoch that take so long that the loader reads as far ahead as it may


def resident(name: str) -> int:
    """Return a line of the process's status in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def wait_for_threads() -> None:
    """Return when this process's threads have nothing left to do: on a busy machine that takes them longer."""
    used, rest = -1.0, 0
    for _ in range(200):
        before, used = used, time.process_time()
        rest = rest + 1 if used - before < 2e-3 else 0
        if rest == 2:
            return
        time.sleep(0.02)


def taken(rank: int, num_ranks: int, folder: Path, case: Case) -> tuple[int, int]:
    """Return the bytes that are promised, and those that this process, a fresh one, takes."""
    for _ in scidata.DataLoader(scidata.open_dataset(folder / "tiny"), 2):  # imports what is imported at the first read
        pass
    before = resident("VmRSS")
    ds = scidata.open_dataset(folder / case.store, **case.options)
    loader = scidata.DataLoader(ds, **case.loader)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for step, _ in enumerate(loader):
            if step < AHEAD:
                wait_for_threads()
    promise = promise_of(ds.reader, batch_size=case.loader.get("batch_size", 1))
    return promise.total, resident("VmHWM") - before


def make_stores(folder: Path) -> None:
    """Write a small store, and three of a field of 100 MB: lz4, zstd in chunks of eight steps, raw in chunks of one."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((STEPS, LAT, LON)) * 10).round(1).astype("f4")
    codecs = {
        "lz4": zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle"), "zstd": zarr.codecs.ZstdCodec(level=1),
        "raw": None, "tiny": zarr.codecs.BloscCodec(cname="lz4"),
    }  # fmt: skip
    for name, codec in codecs.items():
        data = values[:16, :8, :8] if name == "tiny" else values
        zarr.create_array(
            folder / name, name="u", data=data, chunks=(1 if name == "raw" else 8, *data.shape[1:]), compressors=codec,
            dimension_names=("time", "latitude", "longitude"),
        )  # fmt: skip


def measured(folder: Path, case: Case) -> tuple[int, int]:
    """Return the bytes that were promised, and those that a fresh process took."""
    promised, found = run_ranks(taken, 1, folder, case)[0]
    return promised, found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        make_stores(Path(name))
        print("| | promised | measured | promised / measured |\n|---|---|---|---|")
        for what, case in CASES.items():
            promised, found = measured(Path(name), case)
            print(f"| {what} | {promised / 2**20:.0f} | {found / 2**20:.0f} | {promised / found:.2f} |", flush=True)


if __name__ == "__main__":
    main()

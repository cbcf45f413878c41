"""The memory that ``scidata plan`` promises for a loader, and the memory that a fresh process takes.

``python tests/bench/memory_promise.py`` prints MiB of ten configurations: peak resident beyond imports in three
epochs, on one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

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
    "lz4, half of the rows, blocks, all kept": Case("lz4", {"isel": {"latitude": [0, 181]}}, {"shuffle": "blocks"}),
    "lz4, full, 60 MB": Case("lz4", {"pool_bytes": 60_000_000}, {"batch_size": 4, "shuffle": True}),
}

RUN = """
import json, sys
def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))
import scidata
from scidata.loader.promise import promise_of
warm, path, options, arguments = json.loads(sys.argv[1])
for batch in scidata.DataLoader(scidata.open_dataset(warm), 2):  # imports what is imported at the first read
    pass
if "isel" in options:
    options["isel"] = {dim: slice(*rows) for dim, rows in options["isel"].items()}
before = resident("VmRSS")
ds = scidata.open_dataset(path, **options)
loader = scidata.DataLoader(ds, **arguments)
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader:
        pass
promise = promise_of(ds.reader, batch_size=arguments.get("batch_size", 1))
print(json.dumps([promise.total, resident("VmHWM") - before]))
"""


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
    given = json.dumps([str(folder / "tiny"), str(folder / case.store), case.options, case.loader])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, given], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    promised, taken = json.loads(done.stdout)
    return promised, taken


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        make_stores(Path(name))
        print("| | promised | measured | promised / measured |\n|---|---|---|---|")
        for what, case in CASES.items():
            promised, taken = measured(Path(name), case)
            print(f"| {what} | {promised / 2**20:.0f} | {taken / 2**20:.0f} | {promised / taken:.2f} |", flush=True)


if __name__ == "__main__":
    main()

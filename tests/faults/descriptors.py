"""Many threads read many small files while few descriptors may be open; every value is compared.

    python -m tests.faults.descriptors --seconds 600

A cache of descriptors that closes one under a reader makes the kernel give its number to the next file: the read then
succeeds, on another chunk, whose own checksum is right. So every value here says which field, row and column it is.
Each case (a limit of open files, a number of reader threads) runs in a process of its own, which takes turns over all
layouts; prints a line a case and exits 1 if any value was wrong, or anything was raised.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

import scidata

FIELDS = ("u", "v", "w")
ROWS, COLUMNS = 70, 600
LIMITS, READERS = (64, 256, 1024), (2, 4, 16)
CODECS: dict[str, list[Any]] = {
    "raw": [],
    "crc32c": [Crc32cCodec()],
    "zstd": [ZstdCodec()],
    "zstd_crc32c": [ZstdCodec(), Crc32cCodec()],
    "blosc": [BloscCodec(cname="lz4")],
    "gzip": [GzipCodec(level=1)],
}
LAYOUTS = (*CODECS, "sharded", "hdf5", "hdf5_chunked")


def values(field: int, row: int) -> np.ndarray:
    """Return one row of a field: every number occurs once in a data set."""
    return np.arange(COLUMNS, dtype=np.float64) + COLUMNS * (row + ROWS * field)


def write(folder: Path, layout: str) -> str | list[str]:
    """Write a data set in which each row of each field is a file of its own, or each row; return what opens it."""
    data = [np.stack([values(i, row) for row in range(ROWS)]) for i in range(len(FIELDS))]
    if layout.startswith("hdf5"):
        paths = []
        for row in range(ROWS):
            paths.append(str(folder / f"{layout}_{row:03d}.h5"))
            with h5py.File(paths[-1], "w") as file:
                for name, array in zip(FIELDS, data, strict=True):
                    more = {"chunks": (1, 100), "fletcher32": True} if layout == "hdf5_chunked" else {}
                    dset = file.create_dataset(name, data=array[row : row + 1], **more)
                    dset.dims[0].label, dset.dims[1].label = "time", "x"
        return paths
    group = zarr.open_group(folder / f"{layout}.zarr", mode="w", zarr_format=3)
    for name, array in zip(FIELDS, data, strict=True):
        more = {"shards": (1, COLUMNS), "chunks": (1, 100)} if layout == "sharded" else {"chunks": (1, COLUMNS)}
        codecs = [Crc32cCodec()] if layout == "sharded" else CODECS[layout]
        if layout == "sharded":
            made = group.create_array(
                name, shape=array.shape, dtype=array.dtype, dimension_names=("time", "x"), compressors=codecs, **more
            )
        else:
            made = group.create_array(
                name,
                shape=array.shape,
                dtype=array.dtype,
                dimension_names=("time", "x"),
                serializer=BytesCodec(),
                compressors=codecs or None,
                **more,
            )
        made[:] = array
    return str(folder / f"{layout}.zarr")


class Tally:
    """What a case has read, and what of it was not as written."""

    def __init__(self) -> None:
        self.num_read = 0
        self.faults: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, num_read: int, faults: list[str]) -> None:
        """Count what one thread did; the kinds of faults alone, since their messages name chunks."""
        with self._lock:
            self.num_read += num_read
            self.faults.update(faults)


def read_for(seconds: float, datasets: dict[str, Any], num_readers: int) -> Tally:
    """Read random samples of random layouts with ``num_readers`` threads until the time is over or a few are wrong."""
    tally, stop = Tally(), time.monotonic() + seconds

    def run(seed: int) -> None:
        generator = np.random.default_rng([seed, num_readers])
        names = sorted(datasets)
        while time.monotonic() < stop and sum(tally.faults.values()) < 20:
            layout = names[generator.integers(len(names))]
            faults = []
            for row in generator.permutation(ROWS)[:20].tolist():
                try:
                    sample = datasets[layout][row]
                    for i, name in enumerate(FIELDS):
                        if not np.array_equal(sample[name].numpy(), values(i, row)):
                            faults.append(f"{layout}: wrong values")
                except Exception as e:
                    faults.append(f"{layout}: {type(e).__name__}: {e}")
            tally.add(20 * len(FIELDS), faults)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num_readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def run_case(folder: Path, num_readers: int, seconds: float, layouts: tuple[str, ...]) -> Tally:
    """Read with threads that are held up now and then where a read has its descriptor and is about to begin.

    So the system does, too, but on a machine with little else to do once in minutes.
    """
    preadv, pause = os.preadv, random.Random(0)

    def late(descriptor: int, views: Any, offset: int) -> int:
        if pause.random() < 0.05:
            time.sleep(0.002)
        return preadv(descriptor, views, offset)

    os.preadv = late
    found = {layout: sorted(map(str, folder.glob(f"{layout}_[0-9]*.h5"))) for layout in layouts}
    datasets = {
        layout: scidata.open_dataset(paths or str(folder / f"{layout}.zarr"), sample_dim="time", num_threads=2)
        for layout, paths in found.items()
    }
    return read_for(seconds, datasets, num_readers)


@contextmanager
def data_sets(layouts: tuple[str, ...]) -> Iterator[Path]:
    """Write data sets of some layouts into a folder that goes again."""
    with tempfile.TemporaryDirectory() as name:
        for layout in layouts:
            write(Path(name), layout)
        yield Path(name)


def run_apart(folder: Path, limit: int, num_readers: int, seconds: float, layouts: tuple[str, ...]) -> tuple[int, str]:
    """Run a case in a process of its own; return its exit code and what it printed."""
    command = [
        sys.executable, __file__, "--folder", str(folder), "--readers", str(num_readers), "--seconds", str(seconds),
        "--layouts", *layouts,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    limits = limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        env=environment,
        preexec_fn=functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits),  # before scidata counts
    )
    return done.returncode, f"limit {limit:5d}, {num_readers:2d} readers: {done.stdout}{done.stderr}"


def main() -> int:
    """Run one case here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of all cases together, or of the one")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--folder", type=Path, help="of data sets that are there; with --readers: one case, here")
    parser.add_argument("--readers", type=int)
    options = parser.parse_args()
    layouts = tuple(options.layouts)
    if options.folder is not None:
        tally = run_case(options.folder, options.readers, options.seconds, layouts)
        print(f"{tally.num_read} fields read, {sum(tally.faults.values())} faults")
        for fault, count in tally.faults.most_common(10):
            print(f"    {count} x {fault}")
        return int(bool(tally.faults))
    failed = False
    with data_sets(layouts) as folder:
        for limit in LIMITS:
            for num_readers in READERS:
                code, text = run_apart(folder, limit, num_readers, options.seconds / 9, layouts)
                print(text, end="", flush=True)
                failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

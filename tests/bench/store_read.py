"""Time and bytes of reading one rank's part of a mesh from a store, against reading all of it and slicing.

    PYTHONPATH=. python tests/bench/store_read.py --nodes 500000 --ranks 2 4 8

A part is owned rows of all fields, the edges that end there, and the ghosts that one hop brings. The other ways read
the same fields whole, without edges and ghosts, and slice: zarr-python from the store, h5py from the raw file (where
rows are in no order that helps, so that the slice is not even the rank's own rows). Nothing is kept between reads. The
ways take turns; medians over the rounds; files are in the page cache, so this measures the CPU's work and not the
disk's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from scipy.spatial import Delaunay

import scidata
from scidata.core.options import ReadOptions
from scidata.store.reading.reader import StoreReader

FIELDS = {"velocity": 3, "pressure": 1, "history": 8}


def make_mesh(path: Path, num_nodes: int) -> None:
    """Write a triangle mesh with fields on its nodes."""
    rng = np.random.default_rng(0)
    points = rng.random((num_nodes, 2))
    with h5py.File(path, "w") as file:
        file["points"] = points
        file["cells"] = Delaunay(points).simplices.astype("i4")
        for name, width in FIELDS.items():
            file[f"node/{name}"] = rng.standard_normal((num_nodes, width), dtype=np.float32)


@contextmanager
def readers(raw: Path, store: Path, num_parts: int) -> Iterator[dict[str, Callable[[], int]]]:
    """Give the ways to read one part from the middle; each returns the bytes that it fetched."""
    part = num_parts // 2
    fields = list(FIELDS)
    own = StoreReader(store, ReadOptions(fields=fields, halo=1, ghosts="disk", cache_bytes=0), num_parts=num_parts)
    start, stop = own.partition_of(0).owned("node", part)
    whole = StoreReader(store, ReadOptions(fields=fields, cache_bytes=0))

    def of_zarr() -> int:
        (sample,) = (path.parent for path in store.rglob("zarr.json") if (path.parent / "node").is_dir())
        group = zarr.open_group(sample, mode="r")
        kept = []
        for name in fields:
            values = group[f"node/{name}"][...]
            kept.append(values[start:stop].copy())
        return sum(group[f"node/{name}"].nbytes_stored() for name in fields)

    def of_h5py() -> int:
        with h5py.File(raw) as file:
            whole = [file[f"node/{name}"][...] for name in fields]
        _ = [values[start:stop].copy() for values in whole]
        return sum(values.nbytes for values in whole)

    def read_all() -> int:
        everything = whole.read(0, 0)
        _ = [values[start:stop].copy() for values in everything.fields.values()]
        return everything.stats.bytes_fetched

    yield {
        "its part": lambda: own.read(0, part).stats.bytes_fetched,
        "all, sliced": read_all,
        "zarr, sliced": of_zarr,
        "h5py, sliced": of_h5py,
    }
    own.close()
    whole.close()


def measure(raw: Path, store: Path, num_parts: int, repeats: int) -> dict[str, dict[str, float]]:
    """Let the ways take turns."""
    times: dict[str, list[tuple[float, float]]] = {}
    fetched = {}
    with readers(raw, store, num_parts) as ways:
        for number in range(repeats + 1):  # the first is a rehearsal
            for name, read in ways.items():
                began, cpu = time.perf_counter(), time.process_time()
                fetched[name] = read()
                if number:
                    times.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - cpu))
    medians = {n: [statistics.median(each) for each in zip(*found, strict=True)] for n, found in times.items()}
    return {n: {"wall_s": wall, "cpu_s": cpu, "bytes": fetched[n]} for n, (wall, cpu) in medians.items()}


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw, store = Path(folder) / "mesh.h5", Path(folder) / "mesh.store"
        make_mesh(raw, args.nodes)
        scidata.partition(raw, store)
        found: dict[int, Any] = {p: measure(raw, store, p, args.repeats) for p in args.ranks}
    if args.json:
        print(json.dumps({"options": vars(args), "results": found}))
        return
    print(f"{'ranks':>5}  {'way':<14}{'MiB':>8}{'CPU ms':>10}{'ratio':>7}{'wall ms':>10}{'ratio':>7}")
    for num_parts, ways in found.items():
        first = ways["its part"]
        for name, r in ways.items():
            print(
                f"{num_parts:>5}  {name:<14}{r['bytes'] / 2**20:>8.1f}{1e3 * r['cpu_s']:>10.1f}"
                f"{r['cpu_s'] / first['cpu_s']:>7.2f}{1e3 * r['wall_s']:>10.1f}{r['wall_s'] / first['wall_s']:>7.2f}"
            )


if __name__ == "__main__":
    main()

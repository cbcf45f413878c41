"""Peak memory of ``scidata partition`` of one sample: a cloud, a mesh and a graph whose fields do not count.

    python tests/bench/partition_memory.py --scale 0.5

At scale 1 the cloud has 8 M points, the mesh 2 M nodes, quads and 8 M directed edges, the graph 1 M nodes and 16 M
edges; each has a field of 256 MiB or more. Given are the peak of a process that does nothing else, less what it takes
after importing scidata, and the bytes of the sample's points, cells and edges as int64 and float64: the measure of what
must be in memory. Wall seconds depend on the disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CHANNELS = 16


def write_field(file: h5py.File, name: str, num_rows: int, rng: np.random.Generator) -> None:
    """Write a field block by block."""
    data = file.create_dataset(name, (num_rows, CHANNELS), "f4")
    for first in range(0, num_rows, 1 << 18):
        stop = min(first + (1 << 18), num_rows)
        data[first:stop] = rng.random((stop - first, CHANNELS), "f4")


def make(kind: str, path: Path, scale: float) -> int:
    """Write one raw sample; return the bytes of its points, cells and edges, 8 for each number."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        if kind == "cloud":
            num = int(8_000_000 * scale)
            file["points"] = rng.random((num, 3), "f4")
            write_field(file, "u", num, rng)
            return num * 3 * 8
        if kind == "graph":
            num, num_edges = int(1_000_000 * scale), int(16_000_000 * scale)
            src = rng.integers(0, num, num_edges)
            dst = (src + rng.integers(1, 1000, num_edges)) % num
            file["pos"], file["edge_index"] = rng.random((num, 3)), np.stack([src, dst]).astype("i4")
            write_field(file, "edge/w", num_edges, rng)
            return num * 3 * 8 + num_edges * 2 * 8
        side = int((2_000_000 * scale) ** 0.5)
        nodes = np.arange(side * side, dtype="i4").reshape(side, side)
        file["cells"] = np.stack([nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]], -1).reshape(-1, 4)
        y, x = np.divmod(np.arange(side * side), side)
        file["points"] = np.stack([x, y], axis=1).astype("f8")
        write_field(file, "node/u", side * side, rng)
        return side * side * (2 * 8 + 4 * 8 + 4 * 2 * 8)


RUN = """
import json, sys, time
from scidata.store.partitioning.partition import partition
import h5py, zarr, scipy.spatial, scidata.meshes.order.csr
def peak():  # not ru_maxrss, which begins at the peak of the process that began this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
before = peak()
begun = time.perf_counter()
keep = "duplicate_edges,self_loops"
report = partition(sys.argv[1], sys.argv[2], order=sys.argv[3], keep=keep, max_field_bytes=64 << 20)
print(json.dumps({"grown": peak() - before, "wall_s": time.perf_counter() - begun, "counts": report.counts}))
"""


def measure(kind: str, order: str, scale: float, folder: Path) -> dict[str, Any]:
    """Partition one raw sample in a process of its own."""
    raw = folder / f"{kind}.h5"
    needed = make(kind, raw, scale)
    command = [sys.executable, "-c", RUN, str(raw), str(folder / "store"), order]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"kind": kind, "order": order, "needed": needed, "raw": raw.stat().st_size, **json.loads(run.stdout)}


def main() -> None:
    """Measure what was asked for; a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--kinds", nargs="+", default=["cloud", "mesh", "graph"])
    parser.add_argument("--orders", nargs="+", default=["hilbert"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds:
        for order in options.orders:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(kind, order, options.scale, Path(folder))
            if options.json:
                print(json.dumps(found), flush=True)
                continue
            counts = ", ".join(f"{count:,} {entity}s" for entity, count in found["counts"].items())
            print(
                f"{kind} by {order}: {counts}; raw file {found['raw'] / 2**20:,.0f} MiB; peak "
                f"{found['grown'] / 2**20:,.0f} MiB, {found['grown'] / found['needed']:.2f} times the "
                f"{found['needed'] / 2**20:,.0f} MiB of points, cells and edges; {found['wall_s']:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Peak memory of ``scidata partition`` of one sample: a cloud, meshes and a graph whose fields do not count.

    python tests/bench/partition_memory.py --scale 0.5
    python tests/bench/partition_memory.py --kinds tets tets-as-rows --scale 3 --memory 0 1G

At scale 1 the cloud has 8 M points, the mesh 2 M nodes, quads and 8 M directed edges, the graph 1 M nodes and 16 M
edges; each has a field of 256 MiB or more. ``tets`` is 1 M tetrahedra (cubes cut into six, their corners numbered at
random) with a field of nodes and one of cells, ``tets-as-rows`` the same with ``entity="cell"``. Given are the peak of
a process that does nothing else, less what it takes after importing scidata, and the bytes of the sample's points,
cells and edges as int64 and float64. Wall seconds depend on the disk. ``--memory`` gives limits, 0 for none: the same
manifest shows that the store is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
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


def write_tets(file: h5py.File, num_cells: int, rng: np.random.Generator) -> int:
    """Write cubes that are cut into six tetrahedra each, layer by layer; nodes are numbered at random."""
    side = round((num_cells / 6) ** (1 / 3))
    new_ids = rng.permutation((side + 1) ** 3).astype("i4").reshape((side + 1,) * 3)
    points = np.empty((new_ids.size, 3))
    points[new_ids.ravel()] = np.indices(new_ids.shape).reshape(3, -1).T + rng.uniform(-0.2, 0.2, points.shape)
    file["points"] = points
    del points
    cells = file.create_dataset("cells", (6 * side**3, 4), "i4")
    cells.attrs["cell_type"] = "tetra"
    pressure = file.create_dataset("cell/p", (6 * side**3,), "f4")
    paths = np.array([[0, *np.cumsum(1 << np.array(axes)).tolist()] for axes in itertools.permutations(range(3))])
    for layer in range(side):
        corners = np.stack([
            new_ids[layer + (c >> 2), (c >> 1 & 1) : (c >> 1 & 1) + side, (c & 1) : (c & 1) + side].ravel()
            for c in range(8)
        ])  # fmt: skip
        rows = slice(layer * 6 * side**2, (layer + 1) * 6 * side**2)
        cells[rows] = corners[paths].transpose(2, 0, 1).reshape(-1, 4)
        pressure[rows] = rng.random(6 * side**2, "f4")
    file["node/u"] = rng.random((new_ids.size, 3), "f4")
    return cells.shape[0] * 4 * 8 + new_ids.size * (3 * 8 + 14 * 2 * 8)


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
        if kind.startswith("tets"):
            return write_tets(file, int(1_000_000 * scale), rng)
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
options = json.loads(sys.argv[4])
if "entity" not in options:
    options["keep"] = "duplicate_edges,self_loops"
report = partition(sys.argv[1], sys.argv[2], order=sys.argv[3], max_field_bytes=64 << 20, **options)
grown, wall_s = peak() - before, time.perf_counter() - begun
found = {"grown": grown, "peak": peak(), "wall_s": wall_s, "cpu_s": time.process_time(), "counts": report.counts}
print(json.dumps(found))
"""


def measure(raw: Path, kind: str, order: str, memory: str, store: Path) -> dict[str, Any]:
    """Partition one raw sample in a process of its own; its store's digests show that it is the same each time."""
    options = {"entity": "cell"} if kind.endswith("as-rows") else {}
    options |= {} if memory == "0" else {"memory": memory}
    command = [sys.executable, "-c", RUN, str(raw), str(store), order, json.dumps(options)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    digest = hashlib.sha256((store / "manifest.json").read_bytes()).hexdigest()[:16]
    shutil.rmtree(store)
    return {"kind": kind, "order": order, "memory": memory, "digest": digest, **json.loads(run.stdout)}


def main() -> None:
    """Measure what was asked for; a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--kinds", nargs="+", default=["cloud", "mesh", "graph"])
    parser.add_argument("--orders", nargs="+", default=["hilbert"])
    parser.add_argument("--memory", nargs="+", default=["0"], help="memory= of partition, 0 for none")
    parser.add_argument("--folder", help="where raw samples and stores go, and are removed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            raw = Path(folder) / f"{kind}.h5"
            needed = make(kind, raw, options.scale)
            for order, memory in itertools.product(options.orders, options.memory):
                found = measure(raw, kind, order, memory, Path(folder) / "store")
                found |= {"needed": needed, "raw": raw.stat().st_size}
                print(json.dumps(found) if options.json else as_text(found), flush=True)


def as_text(found: dict[str, Any]) -> str:
    """Describe a measurement in one line."""
    counts = ", ".join(f"{count:,} {entity}s" for entity, count in found["counts"].items())
    memory = "" if found["memory"] == "0" else f" with memory={found['memory']}"
    return (
        f"{found['kind']} by {found['order']}{memory}: {counts}; raw file {found['raw'] / 2**20:,.0f} MiB; peak "
        f"{found['grown'] / 2**20:,.0f} MiB and {(found['peak'] - found['grown']) / 2**20:,.0f} MiB of the program, "
        f"{found['grown'] / found['needed']:.2f} times the {found['needed'] / 2**20:,.0f} MiB of points, cells and "
        f"edges, {found['grown'] / found['counts'].get('cell', 1):,.0f} bytes a cell; {found['wall_s']:.1f} s, "
        f"{found['cpu_s']:.1f} s CPU; manifest {found['digest']}"
    )


if __name__ == "__main__":
    main()

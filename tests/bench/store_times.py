"""CPU time of reading one rank's part of further times of a stored mesh: edges and cells kept, and read anew each time.

    python tests/bench/store_times.py [--nodes 400000] [--ranks 4]

Interleaved, median of 7 rounds, page cache warm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace

import h5py
import numpy as np

import scidata
from scidata.core.options import ReadOptions
from scidata.store.reading.reader import StoreReader


def write_raw(path: str, num_nodes: int, num_times: int) -> None:
    """Write a triangulated square with one field of two components over time."""
    side = int(num_nodes**0.5)
    rng = np.random.default_rng(0)
    corner = (np.arange(side - 1)[:, None] * side + np.arange(side - 1)).ravel()
    cells = [
        np.stack([corner, corner + 1, corner + side], 1),
        np.stack([corner + 1, corner + side + 1, corner + side], 1),
    ]
    with h5py.File(path, "w") as file:
        file["points"] = np.stack(np.divmod(np.arange(side**2), side), axis=1) + 0.1 * rng.random((side**2, 2))
        file["cells"] = np.concatenate(cells).astype("i4")
        data = file.create_dataset("node/u", data=rng.random((num_times, side**2, 2), np.float32))
        data.dims[0].label = "time"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=400_000)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw, out = os.path.join(folder, "raw.h5"), os.path.join(folder, "store")
        write_raw(raw, args.nodes, 8)
        scidata.partition(raw, out)
        common = ReadOptions(halo=2, ghosts="disk", fields="u", num_threads=1)
        each = {"kept": common, "anew": replace(common, cache_bytes=0)}
        readers = {name: StoreReader(out, options, num_parts=args.ranks) for name, options in each.items()}
        found: dict[str, list[float]] = {name: [] for name in readers}
        for turn in range(8):
            for name, reader in readers.items():
                start = time.process_time()
                reader.read(turn, 1)
                if turn:  # the first read brings the edges
                    found[name].append(1e3 * (time.process_time() - start))
        kept, anew = (statistics.median(found[name]) for name in ("kept", "anew"))
        size = readers["kept"].topologies.size / 2**20
        print(
            f"kept {kept:.1f} ms, anew {anew:.1f} ms, ratio {anew / kept:.1f}; {size:.0f} MiB of edges and cells kept"
        )


if __name__ == "__main__":
    main()

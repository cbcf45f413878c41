"""Bytes and ghosts of draws from a shuffled store, against single rows of a store along the curve.

python tests/bench/shuffled_draws.py [POINTS] [DRAWN] [PARTS]
"""

import sys
import tempfile

import h5py
import numpy as np

import scidata
from scidata.core.options import ReadOptions
from scidata.store.reading.reader import StoreReader


def main(num: int = 400_000, drawn: int = 65_536, parts: int = 4) -> None:
    """Print a line for each order."""
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(f"{folder}/raw.h5", "w") as file:
            file["points"] = np.random.default_rng(0).random((num, 3))
            file["p"] = np.zeros(num, "f4")
        for order in ("hilbert", "shuffle"):
            scidata.partition(f"{folder}/raw.h5", f"{folder}/{order}", kind="points", order=order)
            for edges in (None, "knn:8"):
                options = ReadOptions(subsample={"point": drawn}, edges=edges)
                reader = StoreReader(f"{folder}/{order}", options, num_parts=parts)
                plans = [reader.plan(0, part, epoch=1) for part in range(parts)]
                fetched = sum(plan.bytes_fetched for plan in plans)
                ghosts = [reader.read(0, part, epoch=1).index_maps["point"].num_ghost for part in range(parts)]
                print(f"{order}, edges {edges}: {fetched / (drawn * 28):.2f} x the drawn bytes, ghosts {ghosts}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

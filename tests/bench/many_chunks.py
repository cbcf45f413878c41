"""Opening HDF5 files of 100,000 chunks, of which a sample needs one: CPU ms until the first sample, and of later ones.

    PYTHONPATH=. python tests/bench/many_chunks.py [--earlier PATH]

Files differ in the index of their chunks (64 float32 each, uncompressed). Each turn opens each file in a process of its
own, which has read from a small file before; samples are drawn in random order. ``--earlier`` is a checkout of an
earlier version, which takes turns. Medians.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

#: By name: the file format's version, and the most that each dim may have.
INDICES = {
    "B-tree, version 1": ("earliest", (None, 64)),
    "B-tree, version 2": ("latest", (None, None)),
    "fixed array": ("latest", None),
    "extensible array": ("latest", (None, 64)),
}
STEPS = (("open_dataset", 0), ("first sample", 1), ("next 100", 100), ("next 400", 400), ("the same 400 again", -400))


def write(path: str, libver: str, maxshape: tuple[int | None, ...] | None, num_chunks: int) -> None:
    """Write a file of chunks of one row."""
    with h5py.File(path, "w", libver=libver) as file:
        dset = file.create_dataset("u", (num_chunks, 64), "f4", maxshape=maxshape, chunks=(1, 64))
        for i in range(num_chunks):
            dset.id.write_direct_chunk((i, 0), np.full(64, i, "f4").tobytes())


def measure(small: str, path: str) -> None:
    """Print CPU times of one opening, in ms a sample."""
    import scidata  # of the checkout that is measured

    def timed(call: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = call()
        times.append((time.process_time() - began) * 1e3)
        return result

    times: list[float] = []
    warm = scidata.open_dataset(small)
    for i in range(4):
        warm[i]
    ds = timed(lambda: scidata.open_dataset(path))
    order = random.Random(0).sample(range(len(ds)), 501)
    for _, number in STEPS[1:]:
        drawn = order[-400:] if number < 0 else [order.pop() for _ in range(number)]
        order = drawn if number == 400 else order
        timed(lambda drawn=drawn: [ds[i] for i in drawn])
        times[-1] /= len(drawn)
    print(*times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--indices", nargs="+", default=list(INDICES), choices=list(INDICES))
    args = parser.parse_args()
    trees = ({"earlier": args.earlier} if args.earlier else {}) | {"now": os.getcwd()}
    print("| index of chunks | |", " | ".join(name for name, _ in STEPS), "|")
    print("|---|---|" + "---:|" * len(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        write(small := f"{folder}/small.h5", "latest", None, 10)
        for name in args.indices:
            write(path := f"{folder}/many.h5", *INDICES[name], args.chunks)
            found: dict[str, list[list[float]]] = {tree: [] for tree in trees}
            for _ in range(args.turns):
                for tree, there in trees.items():
                    command = [sys.executable, os.path.abspath(__file__), "--measure", small, path]
                    run = subprocess.run(
                        command, env=os.environ | {"PYTHONPATH": there}, capture_output=True, check=True
                    )
                    found[tree].append([float(each) for each in run.stdout.split()])
            for tree, rows in found.items():
                print(
                    f"| {name} | {tree} |",
                    " | ".join(f"{statistics.median(x):.2f}" for x in zip(*rows, strict=True)),
                    "|",
                )


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["--measure"] else main()

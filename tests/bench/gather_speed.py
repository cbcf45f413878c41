"""Scattered rows of large arrays beside the formats' own libraries: CPU milliseconds, least of some rounds.

    PYTHONPATH=. python tests/bench/gather_speed.py

Files are made in a temporary folder and read from the page cache. "first" plans and reads a new list of rows, "again"
the same list, as `isel` has for every sample. Results are compared first.
"""

import argparse
import os
import tempfile
import time

import h5py
import numpy as np
import zarr

from scidata.core.bounds import segments_of_slice
from scidata.plan.array import chunks_needed, plan_array
from scidata.read import read_plan
from scidata.sources import open_source


def make(folder, num):
    rng = np.random.default_rng(0)
    values, rows = rng.random(num, dtype="f4"), rng.random((num // 2, 4), dtype="f4")
    with h5py.File(os.path.join(folder, "rows.h5"), "w") as file:
        file["contiguous"], file["four channels"] = values, rows
        file.create_dataset("chunked", data=values, chunks=(1 << 18,))
    group = zarr.open_group(os.path.join(folder, "rows.zarr"), mode="w")
    group.create_array("raw", shape=values.shape, dtype="f4", chunks=(1 << 18,), compressors=None)[:] = values


def methods_of(path, name, num_rows):
    source = open_source(path)
    layout, rng = source.arrays[name], np.random.default_rng(1)
    rest = tuple(segments_of_slice(slice(None), n) for n in layout.shape[1:])
    out = np.empty((num_rows, *layout.shape[1:]), layout.dtype)
    ids = np.sort(rng.choice(layout.shape[0], num_rows, replace=False))
    array = zarr.open(path, mode="r")[name] if path.endswith("zarr") else h5py.File(path)[name]
    kept = (segments_of_slice(ids, layout.shape[0]), *rest)

    def read(selection):
        refs = source.locate(layout, chunks_needed(layout, selection))
        read_plan(plan_array(layout, selection, refs, out_shape=out.shape), out, source=source)
        return out

    return {
        "library": lambda: array.oindex[ids] if path.endswith("zarr") else array[ids],
        "first": lambda: read((segments_of_slice(ids, layout.shape[0]), *rest)),
        "again": lambda: read(kept),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--wanted", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'array':<24}{'scidata, first':>16}{'again':>10}{'library':>10}")
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args.rows)
        for file, name in (("h5", "contiguous"), ("h5", "chunked"), ("zarr", "raw"), ("h5", "four channels")):
            methods = methods_of(os.path.join(folder, f"rows.{file}"), name, args.wanted)
            wanted = methods["library"]()
            times = dict.fromkeys(methods, float("inf"))
            for method in ("first", "again"):
                assert np.array_equal(methods[method](), wanted), method
            for _ in range(args.repeats):
                for method in ("library", "first"):  # "again" after itself: another list would take its place
                    times[method] = min(times[method], timed(methods[method]))
            methods["again"]()
            for _ in range(args.repeats):
                times["again"] = min(times["again"], timed(methods["again"]))
            print(f"{file + ' ' + name:<24}" + "".join(
                f"{times[m] * 1e3:>{width}.1f}" for m, width in (("first", 16), ("again", 10), ("library", 10))
            ))  # fmt: skip


def timed(method):
    began = time.process_time()
    method()
    return time.process_time() - began


if __name__ == "__main__":
    main()

"""A 0.25-degree grid with GraphCast's mesh: what partitioning costs, and what a rank reads of it.

    python tests/bench/graphcast_store.py --level 6 --step 0.25 --ranks 2 8 64 [--folder FOLDER]

Writes a NetCDF file of one field and two times, builds the graph around it (edges within 0.6 of the longest side,
edges of all levels, containing cells), and prints: seconds and peak memory of partitioning, bytes of the store; for
each number of ranks ghosts and cut edges of each relation, and what the first, middle and last rank read of a sample,
beside reading all of it and slicing (CPU ms, medians of five, in turn).
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time

import numpy as np
import xarray as xr

import scidata
from scidata.core.options import ReadOptions
from scidata.store.plan import plan_store
from scidata.store.reading.reader import StoreReader

NODES = {"grid": "file", "mesh": "icosahedral:{level}"}
EDGES = {"grid__to__mesh": "spacing:0.6", "mesh__near__mesh": "levels", "mesh__to__grid": "containing"}


def cpu_ms(reader, rank):
    start = time.process_time()
    reader.read(0, rank)
    return 1000 * (time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=6)
    parser.add_argument("--step", type=float, default=0.25)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    lat = np.arange(90, -90 - args.step / 2, -args.step)
    lon = np.arange(0, 360, args.step)
    values = np.random.default_rng(0).normal(size=(2, len(lat), len(lon))).astype("f4")
    dims = ("time", "latitude", "longitude")
    coords = {"time": [0, 1], "latitude": lat, "longitude": lon}
    xr.Dataset({"t2m": (dims, values)}, coords).to_netcdf(f"{folder}/era5.nc")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    nodes = {name: rule.format(level=args.level) for name, rule in NODES.items()}
    report = scidata.partition(f"{folder}/era5.nc", f"{folder}/era5.store", nodes=nodes, edges=EDGES)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    counts = ", ".join(f"{num:,} {name}" for name, num in report.counts.items())
    print(f"{counts}\npartition: {wall:.1f} s, CPU {cpu:.1f} s, {grown:,.0f} MiB more, store {report.nbytes >> 20} MiB")
    for num in args.ranks:
        reader = StoreReader(
            f"{folder}/era5.store", ReadOptions(fields=["t2m"], cache_bytes=0, num_threads=1), num_parts=num
        )
        plan = plan_store(reader)
        for name, (ghosts, cut) in plan.by_relation.items():
            total = plan.cut.bounds[name][-1]
            print(
                f"P={num} {name}: {ghosts.sum():,} ghosts, {cut.sum():,} of {total:,} edges cut; most {ghosts.max():,}"
            )
        print(f"P={num} balance: " + ", ".join(f"{name} {plan.balance(name):.3f}" for name in plan.cut.bounds))
        whole = StoreReader(
            f"{folder}/era5.store", ReadOptions(fields=["t2m"], cache_bytes=0, num_threads=1), num_parts=1
        )
        ranks = sorted({0, num // 2, num - 1})
        own, every = [], []
        for _ in range(args.repeats):
            own.append(statistics.mean(cpu_ms(reader, rank) for rank in ranks))
            every.append(cpu_ms(whole, 0))
        own_ms, every_ms = statistics.median(own), statistics.median(every)
        print(f"P={num} read of a rank: CPU {own_ms:.1f} ms, of all {every_ms:.1f} ms, x{every_ms / own_ms:.1f}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Many small samples to a store: by ``jobs=2``, and by two workers of a Dask cluster, one of which is killed.

    python tests/bench/dask_samples.py [--samples 10000] [--points 200] [--memory 128K] [--killed-only]

Samples are clouds of a file each (HDF5, page cache warm), every tenth of ten times as many points: with ``--memory``
the cluster puts in order over disk those that take more; ``jobs=2`` has no limit. Stores are compared byte for byte.
Milliseconds a sample, wall; what one process takes alone is beside them, over a tenth of the samples.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import distributed
import h5py
import numpy as np

import scidata


def write_raw(folder: Path, num_samples: int, num_points: int) -> list[str]:
    """Write a cloud with one field for each sample."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = []
    for i in range(num_samples):
        num = num_points * (10 if i % 10 == 0 else 1)
        with h5py.File(folder / f"case{i:05}.h5", "w") as file:
            file["points"] = rng.random((num, 3))
            file["node/u"] = rng.random(num, np.float32)
            paths.append(file.filename)
    return paths


def kill_one(pid: int, store: Path, when: int) -> None:
    """Kill a worker once the store has some samples."""
    while not store.exists() or len(os.listdir(store)) < when:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    print(f"  killed a worker at about {len(os.listdir(store))} samples")


def num_differences(left: Path, right: Path) -> int:
    """Count files that are not the same in two trees."""
    files = [{str(p.relative_to(top)) for p in top.rglob("*") if p.is_file()} for top in (left, right)]
    differing = filecmp.cmpfiles(left, right, files[0] & files[1], shallow=False)
    return len(files[0] ^ files[1]) + len(differing[1]) + len(differing[2])


def timed(num_samples: int, what: str, paths: list[str], out: Path, **options: Any) -> None:
    """Partition, and print what it took."""
    began = time.perf_counter()
    report = scidata.partition(paths, out, kind="points", **options)
    took = time.perf_counter() - began
    assert report.finished
    print(f"{what}: {took:.1f} s, {1e3 * took / num_samples:.2f} ms a sample", flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--memory", help="memory= of the runs on the cluster")
    parser.add_argument("--killed-only", action="store_true", help="no run of one process, nor of two whole workers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        paths = write_raw(top / "raw", args.samples, args.points)
        if not args.killed_only:
            timed(args.samples // 10, "one process", paths[: args.samples // 10], top / "alone")
        timed(args.samples, "jobs=2", paths, top / "jobs", jobs=2)
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None, local_directory=str(top / "dask")
        )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            if not args.killed_only:
                timed(args.samples, "Dask, 2 workers", paths, top / "dask.store", client=client, memory=args.memory)
            pid = next(iter(client.run(os.getpid).values()))
            killer = threading.Thread(target=kill_one, args=(pid, top / "killed.store", args.samples // 2))
            killer.start()
            timed(args.samples, "Dask, a worker killed", paths, top / "killed.store", client=client, memory=args.memory)
            killer.join()
        for name in ("killed.store",) if args.killed_only else ("dask.store", "killed.store"):
            print(f"files of {name} that differ from jobs=2: {num_differences(top / name, top / 'jobs')}")


if __name__ == "__main__":
    main()

"""Samples a second with a cache on disk and without: grids and meshes, from S3 with latency and from local chunks.

    PYTHONPATH=. python tests/bench/disk_cache.py --repeats 5

One process with two reader threads, full shuffle, after the data set was opened; rank 1 of 4, so that a part of each
chunk is wanted. S3 is moto's server in a process of its own, each answer of which waits ``--latency`` ms. Ways:
``source`` reads without a cache; ``fill`` with an empty one; ``run`` as a new job over a full one, which looks at the
source's files first (at a store's manifest); ``epoch`` as a further epoch of it. ``--only meshes`` measures stores
alone: one mesh with a field of many times, and several meshes, with halo. All are measured in turn, ``--repeats``
times; figures are medians. CPU is that of the reading process.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import zarr
from scipy.spatial import Delaunay

from scidata.core.options import ReadOptions
from scidata.core.urls import url_of
from scidata.grids.reader import GridReader
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader

FIELDS = ("u", "v")
SHAPE = (181, 360)
CODECS = {
    "zstd": zarr.codecs.ZstdCodec(level=3),
    "lz4": zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
    "raw": None,
}


def write(path, codec, steps, num_steps):
    rng = np.random.default_rng(0)
    y, x = np.linspace(0, 6, SHAPE[0])[:, None], np.linspace(0, 9, SHAPE[1])
    group = zarr.open_group(path, mode="w")
    for name in FIELDS:
        array = group.create_array(
            name,
            shape=(num_steps, *SHAPE),
            dtype="f4",
            chunks=(steps, *SHAPE),
            dimension_names=("time", "latitude", "longitude"),
            compressors=CODECS[codec],
        )
        for t in range(0, num_steps, steps):
            field = np.stack([np.sin(y + k / 9) * np.cos(x - k / 9) for k in range(t, min(t + steps, num_steps))])
            array[t : t + steps] = np.round((field + rng.normal(scale=1e-3, size=field.shape)) * 4096) / 4096
    zarr.consolidate_metadata(path)
    for folder, _, names in os.walk(path):
        for name in names:  # what was written just now is not kept
            os.utime(os.path.join(folder, name), (time.time() - 3600,) * 2)


class OneRank:
    """One rank's part of a grid, as its loader reads it in a job of several."""

    def __init__(self, path, options, args, cache):
        self.threads = args.threads
        kept = ReadOptions(cache_dir=cache)
        self.reader = GridReader(url_of(path, options), kept, axis_sizes={"domain": args.ranks})
        self.coordinate = self.reader.partition.coordinate(min(1, args.ranks - 1))
        self.specs = self.reader.buffer_specs(self.coordinate)

    def _read(self, indices):
        out = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.specs.items()}
        for index in indices:
            self.reader.read_into(int(index), out, self.coordinate)

    def epoch(self):
        """Read all samples, shuffled; return samples a second and CPU ms a sample."""
        order = np.random.default_rng(0).permutation(self.reader.num_samples)
        begin = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(self._read, [order[k :: self.threads] for k in range(self.threads)]))
        return len(order) / (time.perf_counter() - begin[0]), (time.process_time() - begin[1]) / len(order) * 1e3


class OneRankOfStore(OneRank):
    """One rank's part of a partitioned store."""

    def __init__(self, path, options, args, cache):
        self.threads = args.threads
        kept = ReadOptions(halo=1, ghosts="disk", cache_dir=cache, num_threads=1)
        self.reader = StoreReader(url_of(path, options), kept, num_parts=args.ranks)
        self.part = min(1, args.ranks - 1)

    def _read(self, indices):
        for index in indices:
            self.reader.read(int(index), self.part)


def write_store(path, num_meshes, num_times):
    """Write triangulated points; a field of all times and one without."""
    raws = []
    for k in range(num_meshes):
        rng = np.random.default_rng(k)
        points = rng.random((60_000, 2))
        raws.append(f"{path}-{k}.h5")
        with h5py.File(raws[-1], "w") as file:
            file["points"], file["cells"] = points, Delaunay(points).simplices
            file["p"] = rng.normal(size=(len(points), 4)).astype("f4")
            if num_times:
                file["node/u"] = rng.normal(size=(num_times, len(points), 4)).astype("f4")
                for dim, name in zip(file["node/u"].dims, ("time", "node", "component"), strict=True):
                    dim.label = name
    partition(raws, path)


def ways(path, options, args, cache):
    """Yield each way's name, samples a second and CPU ms a sample."""
    kind = OneRankOfStore if "meshes" in path else OneRank
    yield "source", kind(path, options, args, None).epoch()
    shutil.rmtree(cache, ignore_errors=True)
    yield "fill", kind(path, options, args, cache).epoch()
    job = kind(path, options, args, cache)
    yield "run", job.epoch()
    yield "epoch", job.epoch()


@contextmanager
def s3(latency):
    """Serve from another process; yield how to put a folder there, and what opens it."""
    command = [sys.executable, __file__, "--serve", str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        endpoint = process.stdout.readline().strip()
        import boto3

        from tests.unit._s3 import KEY, SECRET

        options = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET}
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )

        def put(path, name):
            for file in [p for p in Path(path).rglob("*") if p.is_file()]:
                client.put_object(
                    Bucket="bucket", Key=f"{name}/{file.relative_to(path).as_posix()}", Body=file.read_bytes()
                )
            return f"s3://bucket/{name}"

        try:
            yield put, options
        finally:
            process.stdin.close()


def serve(latency):
    import logging

    from tests.unit import _s3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with _s3.serve() as server:
        server.wire.latency = latency / 1e3
        print(server.endpoint, flush=True)
        sys.stdin.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=96)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--latency", type=float, default=20)
    parser.add_argument("--only", choices=("grids", "meshes"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    found = {}
    with tempfile.TemporaryDirectory() as folder, s3(args.latency) as (put, options):
        stores = {}
        for num_meshes, num_times in ((1, args.num_steps), (16, 0)) if args.only != "grids" else ():
            path = os.path.join(folder, f"meshes-{num_meshes}-{num_times}")
            write_store(path, num_meshes, num_times)
            name = f"S3 mesh, {num_times} times" if num_times else f"S3 {num_meshes} meshes"
            stores[name] = put(path, os.path.basename(path)), options
        codecs = (("zstd", 1), ("zstd", 8), ("lz4", 1), ("raw", 1))
        for codec, steps in codecs if args.only != "meshes" else ():
            path = os.path.join(folder, f"{codec}-{steps}")
            write(path, codec, steps, args.num_steps)
            if codec != "raw":
                stores[f"local {codec}, {steps} a chunk"] = path, None
            if codec in ("zstd", "raw"):
                stores[f"S3 {codec}, {steps} a chunk"] = put(path, f"{codec}-{steps}"), options
        for path, how in stores.values():  # what is imported and connected at first
            list(ways(path, how, args, os.path.join(folder, "cache")))
        for _ in range(args.repeats):
            for name, (path, how) in stores.items():
                for way, figures in ways(path, how, args, os.path.join(folder, "cache")):
                    found.setdefault((name, way), []).append(figures)
    rows = [
        {
            "store": store, "way": way, "samples/s": round(statistics.median(f[0] for f in figures), 1),
            "CPU ms": round(statistics.median(f[1] for f in figures), 2),
        }
        for (store, way), figures in found.items()
    ]  # fmt: skip
    if args.json:
        return print(json.dumps(rows))
    print(f"{'store':24} {'way':7} {'samples/s':>9} {'CPU ms':>7}")
    for row in rows:
        print(f"{row['store']:24} {row['way']:7} {row['samples/s']:9} {row['CPU ms']:7}")
    return None


if __name__ == "__main__":
    main()

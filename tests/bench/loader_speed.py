"""``scidata.DataLoader`` beside torch's over xarray, zarr and h5py, and beside a ``preadv`` loop; alone and on ranks.

    PYTHONPATH=. python tests/bench/loader_speed.py --into tests/bench/README.md

Samples are handed out one by one (``batch_size=None``), from the page cache, at 0, 1 and 2 workers (threads here,
forked-server processes of torch's that stay alive; of 100 MB not 1). Ways take turns; medians of the rounds; CPU time
of a way with worker processes includes theirs. The preadv loop reads the byte ranges that scidata reads, into two
buffers in turn, as a loop needs which keeps one sample while the next is read; so does the decompressor, of chunks that
are in memory. On ranks (gloo, on this machine) every rank reads its part; or every rank reads whole samples and slices;
or rank 0 reads and ``scatter_tensor`` sends; CPU time is of all ranks. Where PhysicsNeMo's datapipes import, they take
their turns too, and on ranks with its ``scatter_tensor`` (physicsnemo 2.2.2 needs omegaconf, timm, and a torchvision
built for the torch that is there).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
import xarray
import zarr
from scipy.spatial import Delaunay
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.cli.commands.pipeline_bench import decompressors, plans_of, preadv_loop
from scidata.testing.ranks import run_ranks

try:
    import physicsnemo
    import physicsnemo.datapipes as nemo
    from physicsnemo.distributed import DistributedManager
    from physicsnemo.domain_parallel import scatter_tensor as nemo_scatter
except ImportError:
    nemo = None

WORKERS = (0, 1, 2)
LIBRARIES = ("xarray", "zarr", "h5py")
NUM_SAMPLES = {1: 64, 10: 24, 100: 6}
PRELOAD = [
    "torch.distributed.tensor", "xarray", "zarr", "h5py", "scipy.spatial", "scidata.cli.commands.pipeline_bench",
    "scidata.shard",
    "scidata.testing.ranks", "physicsnemo.datapipes", "physicsnemo.domain_parallel",
]  # fmt: skip
BEGIN, END = "<!-- loader_speed: begin -->", "<!-- loader_speed: end -->"


# -- data ----------------------------------------------------------------------------------------------------------


def weather(num_samples, megabytes):
    """A smooth field with noise, float32, one chunk a level: compresses about as reanalyses do."""
    ny, nx = 181, 360
    levels = max(1, round(megabytes * 1e6 / (4 * ny * nx)))
    rng = np.random.default_rng(0)
    y, x = np.linspace(0, 6, ny)[:, None], np.linspace(0, 9, nx)
    found = np.empty((num_samples, levels, ny, nx), "f4")
    for t in range(num_samples):
        for z in range(levels):
            found[t, z] = np.sin(y + t) * np.cos(x - z) + rng.normal(scale=1e-3, size=(ny, nx))
    return np.round(found * 4096) / np.float32(4096)


def make_zarr(path, data, compressors):
    group = zarr.open_group(path, mode="w")
    options = {"chunks": (1, 1, *data.shape[2:]), "compressors": compressors}
    dims = ("time", "level", "latitude", "longitude")
    group.create_array("u", shape=data.shape, dtype=data.dtype, dimension_names=dims, **options)[:] = data


def make_hdf5(path, data):
    with h5py.File(path, "w") as file:
        file["u"] = data


def make_mesh(raw, num_samples, megabytes):
    """Write triangles, and on their nodes 25 channels that vary in time."""
    rng = np.random.default_rng(0)
    num_nodes = round(megabytes * 1e6 / 100)
    points = rng.random((num_nodes, 2))
    with h5py.File(raw, "w") as file:
        file["points"], file["cells"] = points, Delaunay(points).simplices.astype("i4")
        file["node/u"] = rng.standard_normal((num_samples, num_nodes, 25), dtype=np.float32)
        for dim, label in enumerate(("time", "node", "channel")):
            file["node/u"].dims[dim].label = label


def make_clouds(folder, num_samples, megabytes):
    """Write a file a sample, with 25 channels; return their paths."""
    rng = np.random.default_rng(0)
    num_points = round(megabytes * 1e6 / 100)
    paths = [f"{folder}/cloud_{i}.h5" for i in range(num_samples)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["pos"] = rng.random((num_points, 3))
            file["u"] = rng.standard_normal((num_points, 25), dtype=np.float32)
    return paths


# -- torch's loader over other libraries -----------------------------------------------------------------------------


class Sliced(torch.utils.data.Dataset):
    """Whole samples by plain slicing: rows of the first dimension of a file, or a file each; opened where read."""

    def __init__(self, library, paths, name, num_samples):
        self.library, self.paths, self.name, self.num_samples = library, paths, name, num_samples
        self.arrays = {}

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        several = isinstance(self.paths, list)
        path = self.paths[index] if several else self.paths
        if path not in self.arrays:
            self.arrays[path] = self.open(path)
        values = self.arrays[path][... if several else index]
        return torch.from_numpy(values.values if self.library == "xarray" else values)

    def open(self, path):
        if self.library == "h5py":
            return h5py.File(path)[self.name]
        if self.library == "zarr":
            return zarr.open_group(path, mode="r")[self.name]
        return xarray.open_zarr(path, consolidated=False, chunks=None)[self.name]


def stock(library, path, name, num_samples, num_workers):
    options = {"multiprocessing_context": "forkserver", "persistent_workers": True} if num_workers else {}
    dataset = Sliced(library, path, name, num_samples)
    return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


def datapipes(library, path, name, num_workers):
    """Return PhysicsNeMo's loader of the same samples; without workers nothing is read ahead."""
    if library == "zarr":
        reader = nemo.ZarrReader(path, fields=[name])
    elif isinstance(path, list):
        reader = nemo.HDF5Reader(Path(path[0]).parent, fields=[name], file_pattern="cloud_*.h5")
    else:
        reader = nemo.HDF5Reader(path, fields=[name], index_key=name)
    dataset = nemo.Dataset(reader, num_workers=max(1, num_workers))
    return nemo.DataLoader(
        dataset, prefetch_factor=num_workers, use_streams=False, collate_fn=lambda batch: batch[0][0]
    )


# -- one process -----------------------------------------------------------------------------------------------------


def run(loader):
    for _ in loader:
        pass


def cpu_seconds(loader=None):
    """CPU time of this process and of a loader's workers."""
    total = time.process_time()
    for worker in getattr(getattr(loader, "_iterator", None), "_workers", ()):
        for task in Path(f"/proc/{worker.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def take_turns(ways, repeats):
    """Return CPU and wall seconds of each way, medians after a rehearsal; ways are loaders or functions."""
    taken = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            cpu, wall = cpu_seconds(way), time.perf_counter()
            way() if callable(way) else run(way)
            if number:
                taken[name].append((cpu_seconds(way) - cpu, time.perf_counter() - wall))
    return {name: [statistics.median(t) for t in zip(*found, strict=True)] for name, found in taken.items()}


def share_waited(loader, step):
    """Wait of the loop as a part of it, in %, at steps of so many seconds; without the first, and medians of steps."""
    waits, began = [], time.perf_counter()
    for _ in loader:
        waits.append(time.perf_counter() - began)
        time.sleep(step)
        began = time.perf_counter()
    wait = statistics.median(waits[1:])
    return 100 * wait / (wait + step)


def measure(ds, others, num_samples, repeats):
    """Let all ways of one case take turns; return a row of the table."""
    ours = {n: scidata.DataLoader(ds, None, num_workers=n) for n in WORKERS}
    ways = {("scidata", n): loader for n, loader in ours.items()}
    for library, path, name in others:
        for n in WORKERS if num_samples > NUM_SAMPLES[100] else (0, 2):  # of 100 MB: seconds a round
            ways[library, n] = stock(library, path, name, num_samples, n)
    for n in () if nemo is None else (0, 2):
        ways["physicsnemo", n] = datapipes(*others[-1], n)
    plans = plans_of(ds, range(num_samples))
    read, nbytes = preadv_loop(plans)
    decode, decoded = decompressors(plans)
    ways["preadv", 0] = functools.partial(read, num_samples)
    if decoded > nbytes * 1.05:
        ways["decode", 0] = functools.partial(decode, num_samples)
    times = {name: [t / num_samples for t in found] for name, found in take_turns(ways, repeats).items()}
    step = 2 * times["scidata", 0][1]
    theirs = min((n for n in times if n[0] in LIBRARIES and n[1] == 2), key=lambda n: times[n][1])
    waits = [(share_waited(ours[2], step), share_waited(ways[theirs], step)) for _ in range(repeats)]
    stats = ours[0].stats()
    wait = [statistics.median(shares) for shares in zip(*waits, strict=True)]
    return {"bytes": stats["bytes"] / stats["samples"], "times": times, "wait": wait}


def row_of(case, megabytes, found):
    times = found["times"]

    def best(names):
        name = min((n for n in times if n[0] in names), key=lambda n: times[n][1])
        return name, times[name]

    (_, n), (cpu, wall) = best({"scidata"})
    (library, m), (stock_cpu, stock_wall) = best(LIBRARIES)
    raw_cpu, raw_wall = times["preadv", 0]
    decode = times.get(("decode", 0))
    (_, k), (nemo_cpu, nemo_wall) = best({"physicsnemo"}) if nemo is not None else ((0, 0), (0, 0))
    return [
        f"{case}, {megabytes} MB",
        f"{1e3 * wall:.1f} ({n})",
        f"{found['bytes'] / wall / 1e6:,.0f}",
        f"{1e3 * times['scidata', 0][0]:.1f}",
        f"{1e3 * raw_wall:.1f}, {1e3 * raw_cpu:.1f}",
        "-" if decode is None else f"{1e3 * decode[1]:.1f}, {1e3 * decode[0]:.1f}",
        f"{1e3 * stock_wall:.1f} ({library}, {m})",
        f"**{stock_wall / wall:.1f}x**, {stock_cpu / cpu:.1f}x",
        "-" if nemo is None else f"{1e3 * nemo_wall:.1f}, {1e3 * nemo_cpu:.1f} ({k})",
        "{:.1f} %, {:.1f} %".format(*found["wait"]),
    ]


COLUMNS = [
    "one process, ms a sample",
    "scidata, wall (threads)",
    "MB/s",
    "CPU, 0 threads",
    "preadv, wall, CPU",
    "decompressor",
    "best of torch's (library, workers)",
    "gain, wall, CPU",
    "PhysicsNeMo's datapipes, wall, CPU (threads)",
    "wait of a step of two reads, torch's best of 2 workers",
]


def cases(folder, megabytes):
    """Yield name, data set and what torch's loader reads, of each kind of data, uncompressed unless it says so."""
    num_samples = NUM_SAMPLES[megabytes]
    data = weather(num_samples, megabytes)
    lz4 = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
    for case, compressors in (("grid, Zarr raw", None), ("grid, Zarr lz4", lz4)):
        path = f"{folder}/{'raw' if compressors is None else 'lz4'}.zarr"
        make_zarr(path, data, compressors)
        yield case, scidata.open_dataset(path, num_threads=1), [("xarray", path, "u"), ("zarr", path, "u")]
    path = f"{folder}/grid.h5"
    make_hdf5(path, data)
    yield "grid, HDF5", scidata.open_dataset(path, kind="grid", num_threads=1), [("h5py", path, "u")]
    del data
    paths = make_clouds(folder, num_samples, megabytes)
    ds = scidata.open_dataset(paths, kind="points", fields=["u"], num_threads=1)
    yield "points, HDF5", ds, [("h5py", paths, "u")]
    raw, store = f"{folder}/mesh.h5", f"{folder}/mesh.store"
    make_mesh(raw, num_samples, megabytes)
    scidata.partition(raw, store, kind="mesh")
    ds = scidata.open_dataset(store, fields=["u"], num_threads=1)
    assert len(ds) == num_samples
    yield "mesh, store", ds, [("h5py", raw, "node/u")]


# -- ranks -----------------------------------------------------------------------------------------------------------


def on_rank(rank, num_ranks, path, library, raw, name, repeats):
    """Return CPU and wall seconds of each round of each way, on this rank, of one epoch."""
    mesh = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("dp", "domain"))
    ds = scidata.open_dataset(path, mesh, fields=["u"], num_threads=1)
    loader = scidata.DataLoader(ds, None, num_workers=1)
    whole = Sliced(library, raw, name, len(ds))
    dim = 1 if library == "zarr" else 0

    def slices():
        for i in range(len(ds)):
            values = whole[i]
            values.tensor_split(num_ranks, dim)[rank].clone()

    def scatters():
        for i in range(len(ds)):
            values = whole[i] if rank == 0 else None
            scidata.scatter_tensor(values, 0, mesh["domain"], [Shard(dim)])

    pipe = datapipes(library, raw, name, 2) if nemo is not None and rank == 0 else None
    if nemo is not None:  # its manager would read the environment and make a process group of its own
        DistributedManager._shared_state["_is_initialized"] = True
        DistributedManager()._rank, DistributedManager()._world_size = rank, num_ranks

    def pipes():
        samples = iter(pipe or [])
        for _ in range(len(ds)):
            values = next(samples)[name] if rank == 0 else None
            if num_ranks > 1:
                nemo_scatter(values, 0, mesh["domain"], (Shard(dim),))

    ways = [("parts", lambda: run(loader)), ("whole", slices), ("scatter", scatters)]
    ways += [] if nemo is None else [("pipes", pipes)]
    found = {way: [] for way, _ in ways}
    for number in range(repeats + 1):
        for way, do in ways:
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            do()
            cpu = time.process_time() - cpu
            dist.barrier()
            if number:
                found[way].append((cpu / len(ds), (time.perf_counter() - wall) / len(ds)))
    return found


def rank_rows(case, megabytes, arguments, ranks, repeats):
    """Yield a row for each number of ranks."""
    for num_ranks in ranks:
        found = run_ranks(on_rank, num_ranks, *arguments, repeats, timeout=300)
        times = {}
        for way in found[0]:
            rounds = list(zip(*(f[way] for f in found), strict=True))
            wall = statistics.median(max(w for _, w in each) for each in rounds)
            times[way] = wall, statistics.median(sum(c for c, _ in each) for each in rounds)
        wall, cpu = times["parts"]
        yield [
            f"{case}, {megabytes} MB, P = {num_ranks}",
            *(f"{1e3 * w:.1f}, {1e3 * c:.1f}" for w, c in times.values()),
            *(f"{w / wall:.1f}x, {c / cpu:.1f}x" for way, (w, c) in times.items() if way != "parts"),
        ]


RANK_COLUMNS = [
    "on ranks, ms a sample: wall, CPU of all",
    "each its part",
    "each all, sliced",
    "rank 0, scatter_tensor",
    *([] if nemo is None else ["rank 0, PhysicsNeMo's datapipes and scatter_tensor"]),
    "gain on sliced",
    "gain on scatter",
    *([] if nemo is None else ["gain on PhysicsNeMo"]),
]


# -- the table -------------------------------------------------------------------------------------------------------


def markdown(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(args, rows, ranked, loads):
    modules = (torch, zarr, h5py, xarray, *(() if nemo is None else (physicsnemo,)))
    versions = ", ".join(f"{m.__name__} {m.__version__.partition('+')[0]}" for m in modules)
    text = (
        f"Medians of {args.repeats} rounds in which the ways take turns; {os.cpu_count()} cores, load {min(loads):.0f} "
        f"to {max(loads):.0f}; {versions}.\n\n{markdown(COLUMNS, rows)}"
    )
    return text + (f"\n\n{markdown(RANK_COLUMNS, ranked)}" if ranked else "")


def put_into(path, text):
    """Put the tables between their marks, as far as they have come."""
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 10, 100], choices=list(NUM_SAMPLES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--folder", help="where to make the files; default a temporary folder")
    parser.add_argument("--into", help="a file with the marks of the table, which is put between them")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # what torch says of workers and cores
    multiprocessing.set_forkserver_preload(PRELOAD)
    rows, ranked, loads = [], [], [os.getloadavg()[0]]
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for case, ds, others in cases(folder, megabytes):
                if args.only in case:
                    rows.append(row_of(case, megabytes, measure(ds, others, NUM_SAMPLES[megabytes], args.repeats)))
                    print(time.strftime("%X"), rows[-1], flush=True)
                    if case in ("grid, Zarr raw", "mesh, store") and megabytes > 1:
                        arguments = (ds.reader.path if "store" in case else others[0][1], *others[-1])
                        ranked += rank_rows(case, megabytes, arguments, args.ranks, args.repeats)
                        print(ranked[-len(args.ranks) :], flush=True)
                    loads.append(os.getloadavg()[0])
                    if args.into:
                        put_into(Path(args.into), report(args, rows, ranked, loads))
                ds.close()
                if "Zarr" in case:
                    shutil.rmtree(others[0][1])
    if not args.into:
        print(report(args, rows, ranked, loads))


if __name__ == "__main__":
    main()

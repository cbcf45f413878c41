"""Samples a second where chunks hold several steps: by order, with and without what samples and ranks share.

    python tests/bench/chunk_layouts.py --repeats 5
    python tests/bench/chunk_layouts.py --codec zstd --ranks 1 2 4 --readers alone pool node --orders stored
    python tests/bench/chunk_layouts.py --rivals zarr insitubatch --fields 1 --shape 1 361 720 --epoch 0

Stores of WeatherBench's kind, ``(time, level, latitude, longitude)``, in a temporary folder, read from the page cache.
All cells are measured in turn, ``--repeats`` times, each in processes of its own, of which the second epoch counts
(``--epoch 0``: the first); figures are medians. Wall time is that of the slowest rank, CPU time and memory (resident at
the most, beyond what it was before) are sums over ranks.
``--rivals``: zarr-python, ``insitubatch`` (Python 3.12 or newer) and ``xbatcher`` with 0, 2 or 4 workers of torch's
loader, each reading whole samples in one process.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import numpy as np
import zarr

import scidata
from scidata.testing import run_ranks

FIELDS = ("u", "v", "w", "t")
LAYOUTS = {"whole": (1, 1), "banded": (4, 1), "tiled": (4, 4)}  # chunks along latitude and longitude
CODECS = {
    "lz4": lambda: zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
    "zstd": lambda: zarr.codecs.ZstdCodec(level=3),
    "raw": lambda: None,
}


def write(path, steps, layout, codec, args):
    rng = np.random.default_rng(0)
    levels, rows, columns = args.shape
    y, x = np.linspace(0, 6, rows)[:, None], np.linspace(0, 9, columns)
    bands, tiles = LAYOUTS[layout]
    chunks = (steps, levels, -(-rows // bands), -(-columns // tiles))
    shards = {} if not args.sharded else {"shards": (4 * steps, levels, bands * chunks[2], tiles * chunks[3])}
    group = zarr.open_group(path, mode="w")
    for name in FIELDS[: args.fields]:
        array = group.create_array(
            name,
            shape=(args.num_steps, levels, rows, columns),
            dtype="f4",
            chunks=chunks,
            dimension_names=("time", "level", "latitude", "longitude"),
            compressors=CODECS[codec](),
            **shards,
        )
        size = 4 * steps if args.sharded else steps
        for first in range(0, args.num_steps, size):
            times = range(first, min(first + size, args.num_steps))
            field = np.stack([[np.sin(y + t / 9) * np.cos(x - t / 9 + k) for k in range(levels)] for t in times])
            field += rng.normal(scale=1e-3, size=field.shape)
            array[first : first + size] = np.round(field * 4096) / 4096


# -- readers: each returns what goes through an epoch, and says how many samples it saw, and what was decoded ---------


def with_scidata(path, order, window, mesh, *, pool_bytes=None, decode="rank"):
    ds = scidata.open_dataset(path, mesh, steps=window, pool_bytes=pool_bytes, decode=decode)
    shuffle = {"stored": False, "blocks": "blocks", "full": True}[order]
    loader = scidata.DataLoader(ds, None, sampler=scidata.DistributedSampler(ds, mesh, shuffle=shuffle))

    def epoch(number):
        loader.set_epoch(number)
        before = loader.stats()
        count = sum(1 for _ in loader)
        after = loader.stats()
        return count, after["bytes_decoded"] - before["bytes_decoded"], after["bytes"] - before["bytes"]

    return epoch


def with_zarr(path, order, window, mesh):
    group = zarr.open_group(path, mode="r")
    arrays = [group[name] for name in FIELDS if name in group]
    count = arrays[0].shape[0] - max(window)

    def epoch(number):
        for i in range(count) if order == "stored" else np.random.default_rng(number).permutation(count).tolist():
            for array in arrays:
                array[i : i + max(window) + 1]
        return count, 0, 0

    return epoch


def with_insitubatch(path, order, window, mesh):
    from insitubatch import InSituDataset, open_geometries, split_by_chunk
    from insitubatch.store import obstore_store

    store = obstore_store(f"file://{path}")
    geometries = {name: found for name, found in open_geometries(store).items() if name in FIELDS}
    manifest = split_by_chunk(geometries["u"], fractions=(1.0, 0.0, 0.0))
    dataset = InSituDataset(
        store, manifest, geometries=geometries, batch_size=1, block_chunks=8, shuffle=order != "stored", seed=0
    )

    def epoch(number):
        dataset.set_epoch(number)
        return sum(batch.arrays["u"].shape[0] for batch in dataset.train), 0, 0

    return epoch


def with_xbatcher(path, order, window, mesh, *, workers):
    import torch
    import xarray as xr
    import xbatcher
    from xbatcher.loaders.torch import MapDataset

    array = xr.open_zarr(path, consolidated=False).to_array("field").transpose("time", ...)
    dims = {dim: size if dim != "time" else len(window) for dim, size in array.sizes.items()}
    overlap = {"time": len(window) - 1} if len(window) > 1 else {}
    loader = torch.utils.data.DataLoader(
        MapDataset(xbatcher.BatchGenerator(array, input_dims=dims, input_overlap=overlap)),
        batch_size=None,
        num_workers=workers,
        shuffle=order != "stored",
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=workers > 0,
    )
    return lambda number: (sum(1 for _ in loader), 0, 0)


RIVALS = ("zarr", "insitubatch", "xbatcher 0", "xbatcher 2", "xbatcher 4")
READERS = {
    "alone": lambda *place: with_scidata(*place, pool_bytes=0),
    "pool": with_scidata,
    "node": lambda *place: with_scidata(*place, decode="node"),
    "zarr": with_zarr,
    "insitubatch": with_insitubatch,
    **{f"xbatcher {n}": (lambda *place, n=n: with_xbatcher(*place, workers=n)) for n in (0, 2, 4)},
}


def resident():
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
    return int(found["VmRSS"].split()[0]) << 10, int(found["VmHWM"].split()[0]) << 10


def cpu_seconds():
    """Of this process and those that it started."""
    me = os.getpid()
    total = 0.0
    for pid in [me, *_descendants(me)]:
        with open(f"/proc/{pid}/stat") as line:
            user, system = line.read().rsplit(")", 1)[1].split()[11:13]
        total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def _descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as line:
        children = [int(child) for child in line.read().split()]
    return [*children, *(other for child in children for other in _descendants(child))]


def measure(rank, num_ranks, reader, path, order, window, number):
    multiprocessing.current_process()._config["daemon"] = False  # torch's loader starts processes of its own
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu") if reader in ("alone", "pool", "node") else None
    before = resident()[0]
    epoch = READERS[reader](path, order, window, mesh)
    for earlier in range(number):  # the first has what is imported, started and planned then
        epoch(earlier)
    began, cpu = time.perf_counter(), cpu_seconds()
    count, decoded, nbytes = epoch(number)
    return count, time.perf_counter() - began, cpu_seconds() - cpu, decoded, nbytes, resident()[1] - before


def cells(folder, args):
    for steps, layout, codec in itertools.product(args.steps, args.layouts, args.codec):
        path = os.path.join(folder, f"{steps}-{layout}-{codec}")
        for ranks, order, window in itertools.product(args.ranks, args.orders, args.windows):
            offsets = tuple(range(window))
            for reader in [*args.readers, *(args.rivals if ranks == 1 and order != "blocks" else ())]:
                if reader == "insitubatch" and window > 1:
                    continue  # its windows are of other variables
                yield (steps, layout, codec, ranks, order, window, reader), (path, order, offsets, args.epoch)


def measured(key, place):
    ranks, reader = key[3], key[6]
    found = run_ranks(measure, ranks, reader, *place, timeout=600)
    count, wall = found[0][0], max(rank[1] for rank in found)
    decoded, nbytes = (sum(rank[i] for rank in found) for i in (3, 4))
    return {
        "samples/s": count / wall,
        "CPU ms": sum(rank[2] for rank in found) / count * 1e3,
        "decoded": decoded / nbytes if nbytes else None,
        "MiB": sum(rank[5] for rank in found) / 2**20,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8, 40])
    parser.add_argument("--layouts", nargs="+", default=["whole"], choices=LAYOUTS)
    parser.add_argument("--codec", nargs="+", default=["lz4"], choices=CODECS)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--orders", nargs="+", default=["stored", "blocks", "full"])
    parser.add_argument("--windows", type=int, nargs="+", default=[1])
    parser.add_argument("--readers", nargs="+", default=["alone", "pool"], choices=["alone", "pool", "node"])
    parser.add_argument("--rivals", nargs="*", default=[], choices=RIVALS)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=240)
    parser.add_argument("--fields", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=3, default=[2, 181, 360])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = ("steps", "layout", "codec", "ranks", "order", "window", "reader")
    with tempfile.TemporaryDirectory() as folder:
        for steps, layout, codec in itertools.product(args.steps, args.layouts, args.codec):
            write(os.path.join(folder, f"{steps}-{layout}-{codec}"), steps, layout, codec, args)
        found = {}
        for _ in range(args.repeats):
            for key, place in cells(folder, args):
                np.ones(1 << 27)  # a virtual machine's fresh pages cost whoever is first to need so many
                found.setdefault(key, []).append(measured(key, place))
    rows = []
    for key, results in found.items():
        row = dict(zip(names, key, strict=True))
        for name in ("samples/s", "CPU ms", "decoded", "MiB"):
            values = [result[name] for result in results]
            row[name] = None if values[0] is None else round(statistics.median(values), 2)
        rows.append(row)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'steps':>5} {'layout':7} {'codec':5} {'ranks':>5} {'order':7} {'window':>6} {'reader':12}", end="")
    print(f"{'samples/s':>10} {'CPU ms':>8} {'decoded':>8} {'MiB':>7}")
    for row in rows:
        decoded = "" if row["decoded"] is None else f"x{row['decoded']:.2f}"
        print(
            f"{row['steps']:5} {row['layout']:7} {row['codec']:5} {row['ranks']:5} {row['order']:7} {row['window']:6} "
            f"{row['reader']:12}{row['samples/s']:10.0f} {row['CPU ms']:8.2f} {decoded:>8} {row['MiB']:7.0f}"
        )


if __name__ == "__main__":
    main()

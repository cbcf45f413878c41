"""Samples a second where chunks hold several steps, by order, with a pool of decoded rows and without.

    python tests/bench/chunk_layouts.py --repeats 5

One process, its DataLoader with two reader threads; a store of lz4 in a temporary folder, read from the page cache. All
cells are measured in turn, ``--repeats`` times; figures are medians. zarr-python reads single samples beside them.
``insitubatch`` is run too where it is installed (Python 3.12 or newer).
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time

import numpy as np
import zarr

import scidata

FIELDS = ("u", "v")


def write(path, steps, num_steps, shape):
    rng = np.random.default_rng(0)
    y, x = np.linspace(0, 6, shape[0])[:, None], np.linspace(0, 9, shape[1])
    group = zarr.open_group(path, mode="w")
    for name in FIELDS:
        array = group.create_array(
            name,
            shape=(num_steps, *shape),
            dtype="f4",
            chunks=(steps, *shape),
            dimension_names=("time", "latitude", "longitude"),
            compressors=zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
        )
        for first in range(0, num_steps, steps):
            field = np.stack(
                [np.sin(y + t / 9) * np.cos(x - t / 9) for t in range(first, min(first + steps, num_steps))]
            )
            field += rng.normal(scale=1e-3, size=field.shape)
            array[first : first + steps] = np.round(field * 4096) / 4096


def with_scidata(path, order, pool_bytes, window):
    ds = scidata.open_dataset(path, pool_bytes=pool_bytes)
    shuffle = {"stored": False, "blocks": "blocks", "full": True}[order]
    loader = scidata.DataLoader(ds, None, sampler=scidata.DistributedSampler(ds, shuffle=shuffle, window=window))
    count = sum(float(sample["u"][0, 0]) > -9 for sample in loader)
    stats = loader.stats()
    ds.close()
    return count, stats["bytes_decoded"] / stats["bytes"]


def with_zarr(path, order):
    group = zarr.open_group(path, mode="r")
    arrays = [group[name] for name in FIELDS]
    count = arrays[0].shape[0]
    indices = range(count) if order == "stored" else np.random.default_rng(0).permutation(count)
    return sum(all(array[i][0, 0] > -9 for array in arrays) for i in indices), None


def with_insitubatch(path, order):
    from insitubatch import InsituDataLoader

    loader = InsituDataLoader(path, variables=list(FIELDS), batch_size=1, shuffle=order != "stored")
    return sum(1 for _ in loader), None


def cells(folder, args):
    for steps in args.steps:
        path = os.path.join(folder, str(steps))
        block = min(steps, args.num_steps) * args.shape[0] * args.shape[1] * 4 * len(FIELDS)
        for order in ("stored", "blocks", "full"):
            pools = {"pool": (args.window + 2) * block} if steps > 1 else {}
            for name, pool_bytes in {"alone": 0, **pools}.items():
                yield (
                    steps,
                    order,
                    f"scidata, {name}",
                    lambda p=path, o=order, n=pool_bytes: with_scidata(p, o, n, args.window),
                )
            if order != "blocks":
                yield steps, order, "zarr", lambda p=path, o=order: with_zarr(p, o)
                if importlib.util.find_spec("insitubatch"):
                    yield steps, order, "insitubatch", lambda p=path, o=order: with_insitubatch(p, o)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8, 40])
    parser.add_argument("--num-steps", type=int, default=240)
    parser.add_argument("--shape", type=int, nargs=2, default=[181, 360])
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for steps in args.steps:
            write(os.path.join(folder, str(steps)), steps, args.num_steps, args.shape)
        wall, cpu, times = {}, {}, {}
        next(cells(folder, args))[3]()  # what is imported and compiled at first
        for _ in range(args.repeats):
            for steps, order, name, run in cells(folder, args):
                key = steps, order, name
                begin = time.perf_counter(), time.process_time()
                count, times[key] = run()
                wall.setdefault(key, []).append(count / (time.perf_counter() - begin[0]))
                cpu.setdefault(key, []).append((time.process_time() - begin[1]) / count * 1e3)
        rows = [
            {
                "steps": steps, "order": order, "reader": name,
                "samples/s": round(statistics.median(wall[steps, order, name])),
                "CPU ms": round(statistics.median(cpu[steps, order, name]), 2),
                "decoded": times[steps, order, name],
            }
            for steps, order, name in wall
        ]  # fmt: skip
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'steps':>5} {'order':7} {'reader':16} {'samples/s':>9} {'CPU ms':>7} {'decoded':>8}")
    for row in rows:
        decoded = "" if row["decoded"] is None else f"x{row['decoded']:.1f}"
        print(
            f"{row['steps']:5} {row['order']:7} {row['reader']:16} {row['samples/s']:9} {row['CPU ms']:7} {decoded:>8}"
        )


if __name__ == "__main__":
    main()

"""Reading speed of every layout that scidata reads, as a table; ``--json`` for figures to keep.

    python tests/bench/read_speed.py --megabytes 256 --repeats 5

Files are made in a temporary folder and read from the page cache, so this measures CPU work and not the disk.
"""

import argparse
import dataclasses
import json
import os
import shutil
import tempfile

import h5py
import numpy as np
import zarr

from scidata.cli.commands.bench import bench_path

COLUMNS = ("slicing", "library", "scidata", "scidata threads")


def weather_like(megabytes):
    """A smooth field with noise, float32: compresses about as reanalyses do."""
    ny, nx = 721, 1440
    nt = max(1, round(megabytes * 2**20 / (4 * ny * nx)))
    rng = np.random.default_rng(0)
    y, x = np.linspace(0, 6, ny)[:, None], np.linspace(0, 9, nx)
    field = np.stack([np.sin(y + t) * np.cos(x - t) for t in range(nt)]).astype("f4")
    field += rng.normal(scale=1e-3, size=field.shape).astype("f4")
    return np.round(field * 4096) / np.float32(4096)


def make_zarr(path, data, **options):
    group = zarr.open_group(path, mode="w")
    group.create_array("u", shape=data.shape, dtype=data.dtype, **options)[:] = data


def make_hdf5(path, data, **options):
    with h5py.File(path, "w") as f:
        f.create_dataset("u", data=data, **options)


def stores(data):
    step = (1, *data.shape[1:])
    tile = (1, 91, 180)
    shard = (1, 728, 1440)
    lz4 = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
    crc = {"compressors": zarr.codecs.Crc32cCodec()} if hasattr(zarr.codecs, "Crc32cCodec") else {"compressors": None}
    return {
        "zarr raw": (make_zarr, {"chunks": step, "compressors": None}),
        "zarr raw, small tiles": (make_zarr, {"chunks": tile, "compressors": None}),
        "zarr sharded raw": (make_zarr, {"chunks": tile, "shards": shard, "compressors": None}),
        "zarr sharded raw 32x32": (make_zarr, {"chunks": (1, 32, 32), "shards": (1, 736, 1440), "compressors": None}),
        "zarr sharded rows crc32c": (make_zarr, {"chunks": (1, 8, 1440), "shards": (1, 728, 1440), **crc}),
        "zarr blosc-lz4": (make_zarr, {"chunks": step, "compressors": lz4}),
        "zarr sharded blosc-lz4": (make_zarr, {"chunks": tile, "shards": shard, "compressors": lz4}),
        "zarr zstd": (make_zarr, {"chunks": step, "compressors": "auto"}),
        "hdf5 contiguous": (make_hdf5, {}),
        "hdf5 chunked raw": (make_hdf5, {"chunks": step}),
        "hdf5 chunked gzip shuffle": (make_hdf5, {"chunks": step, "compression": "gzip", "shuffle": True}),
    }


def table(rows):
    """One line a store and case: CPU-time ratio to the preadv ceiling, and the wall ratio with threads."""
    lines = [f"{'store':<28}{'case':<6}" + "".join(f"{c:>16}" for c in COLUMNS) + f"{'preadv ms':>12}"]
    for (store, case), methods in rows.items():
        cells = []
        for name in COLUMNS:
            row = methods.get(name)
            value = None if row is None else row.wall_ratio if name == "scidata threads" else row.cpu_ratio
            cells.append(f"{'-' if value is None else f'{value:.3f}':>16}")
        lines.append(f"{store:<28}{case:<6}" + "".join(cells) + f"{methods['preadv'].cpu * 1e3:>12.2f}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="stores whose name contains this")
    parser.add_argument("--folder", help="where to make the files; default a temporary folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data, rows = weather_like(args.megabytes), {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, (make, options) in stores(data).items():
            if args.only not in name:
                continue
            path = os.path.join(folder, name.replace(" ", "_") + (".h5" if make is make_hdf5 else ".zarr"))
            make(path, data, **options)
            for row in bench_path(path, fields=["u"], repeats=args.repeats):
                rows.setdefault((name, row.case), {})[row.method] = row
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    if args.json:
        print(json.dumps([{"store": s, **dataclasses.asdict(r)} for (s, _), m in rows.items() for r in m.values()]))
    else:
        print("CPU-time ratio to preadv of the wanted bytes (higher is better); threads: wall-time ratio")
        print(table(rows))


if __name__ == "__main__":
    main()

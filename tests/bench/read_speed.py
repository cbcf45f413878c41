"""Reading speed of every layout that scidata reads, as a table; ``--json`` for figures to keep.

    python tests/bench/read_speed.py --megabytes 256 --repeats 5

Files are made in a temporary folder and read from the page cache, so this measures CPU work and not the disk.
``--codecs`` times the decoding of single chunks alone, by each library that is installed:

    pip install zlib-ng isal deflate zstandard backports.zstd blosc
    python tests/bench/read_speed.py --codecs
"""

import argparse
import dataclasses
import gzip
import importlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
import zlib
from contextlib import suppress
from types import SimpleNamespace

import h5py
import numcodecs
import numpy as np
import zarr
from numcodecs import blosc as numcodecs_blosc
from numcodecs import zstd as numcodecs_zstd

from scidata.cli.commands.bench import bench_path
from scidata.core.types import Codec
from scidata.read import blosc, inflate, zstd
from scidata.read.codecs import Pipeline, Scratch

COLUMNS = ("slicing", "library", "scidata", "scidata threads")


def weather_like(megabytes, *, rounded=True):
    """A smooth field with noise, float32: compresses about as reanalyses do; not ``rounded``, as models' output."""
    ny, nx = 721, 1440
    nt = max(1, round(megabytes * 2**20 / (4 * ny * nx)))
    rng = np.random.default_rng(0)
    y, x = np.linspace(0, 6, ny)[:, None], np.linspace(0, 9, nx)
    field = np.stack([np.sin(y + t) * np.cos(x - t) for t in range(nt)]).astype("f4")
    field += rng.normal(scale=1e-3, size=field.shape).astype("f4")
    return np.round(field * 4096) / np.float32(4096) if rounded else field


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


# -- codecs --------------------------------------------------------------------------------------------------------

SIZES = (50_000, 400_000, 4_000_000)
SHUFFLE = Codec(name="shuffle", config={"elementsize": 4})
CHUNKS = {  # codecs as the formats' libraries write them by default
    "HDF5, NetCDF-4: shuffle, deflate 4": ([SHUFFLE, Codec(name="zlib")], lambda a: zlib.compress(shuffled(a), 4)),
    "HDF5: deflate 4": ([Codec(name="zlib")], lambda a: zlib.compress(a, 4)),
    "Zarr v2: zlib 1": ([Codec(name="zlib")], lambda a: zlib.compress(a, 1)),
    "Zarr v2: gzip 1": ([Codec(name="gzip")], lambda a: gzip.compress(a.tobytes(), 1)),
    "Zarr v3: gzip 5": ([Codec(name="gzip")], lambda a: gzip.compress(a.tobytes(), 5)),
    "Zarr: zstd 0": ([Codec(name="zstd")], lambda a: numcodecs.Zstd(0).encode(a)),
    "Zarr: blosc, lz4": ([Codec(name="blosc")], lambda a: numcodecs.Blosc("lz4").encode(a)),
    "Zarr: blosc, zstd": ([Codec(name="blosc")], lambda a: numcodecs.Blosc("zstd").encode(a)),
}


def shuffled(values):
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)


def module_of(name):
    with suppress(ImportError):
        return importlib.import_module(name)
    return None


def libdeflate(library, nbytes):
    """libdeflate in zlib's place: one call for one member, without zlib's limits."""

    def stream(wbits):
        decompress = library.gzip_decompress if wbits > 15 else library.zlib_decompress
        return SimpleNamespace(decompress=lambda data, _: decompress(data, nbytes), eof=True, unused_data=b"")

    return SimpleNamespace(decompressobj=stream, error=ValueError)


def decoders(name, nbytes):
    """Return by library what scidata's decoding calls: module, attribute, replacement. The first is the baseline."""
    if name == "zstd":
        found = {"numcodecs": numcodecs_zstd.decompress, "scidata": zstd.decode}
        for other, of in (("zstandard", "zstandard"), ("backports.zstd", "backports.zstd")):
            if (module := module_of(of)) is not None:
                call = module.ZstdDecompressor().decompress if other == "zstandard" else module.decompress
                found[other] = lambda data, dest, call=call: np.copyto(dest, np.frombuffer(call(data), np.uint8))
        return {library: (zstd, "decode", call) for library, call in found.items()}
    if name == "blosc":
        found = {"numcodecs": numcodecs_blosc.decompress, "scidata": blosc.decode}
        if (module := module_of("blosc")) is not None:
            module.set_nthreads(1)
            found["python-blosc"] = lambda data, dest: module.decompress_ptr(data.tobytes(), dest.ctypes.data)
        return {library: (blosc, "decode", call) for library, call in found.items()}
    modules = {"zlib": "zlib", "zlib-ng": "zlib_ng.zlib_ng", "isa-l": "isal.isal_zlib", "libdeflate": "deflate"}
    found = {library: module for library, of in modules.items() if (module := module_of(of)) is not None}
    if "libdeflate" in found:
        found["libdeflate"] = libdeflate(found["libdeflate"], nbytes)
    return {library: (inflate, "engine", lambda engine=engine: engine) for library, engine in found.items()}


def time_chunk(values, codecs, encoded, repeats):
    """Return ms of CPU a chunk by library: medians of rounds in which the libraries take turns."""
    pipeline, scratch = Pipeline(codecs, values.nbytes), Scratch()
    dest, wanted = np.empty(values.nbytes, np.uint8), values.view(np.uint8)
    taken, times = decoders(codecs[-1].name, values.nbytes), max(1, 8_000_000 // values.nbytes)
    found = {library: [] for library in taken}
    for _ in range(repeats):
        for library, (module, name, call) in taken.items():
            own = getattr(module, name)
            setattr(module, name, call)
            begin = time.process_time()
            for _ in range(times):
                pipeline.decode(encoded, dest, scratch)
            found[library].append(1e3 * (time.process_time() - begin) / times)
            setattr(module, name, own)
            assert np.array_equal(dest, wanted)
    return {library: statistics.median(each) for library, each in found.items()}


def codecs_table(repeats):
    """Return a line a codec and field, of three sizes: ms of CPU, then how many times as fast as the first library."""
    lines, shown = [], None
    fields = {"rounded": weather_like(8).reshape(-1), "all bits": weather_like(8, rounded=False).reshape(-1)}
    for (name, (codecs, encode)), kind in itertools.product(CHUNKS.items(), fields):
        rows = []
        for nbytes in SIZES:
            values = fields[kind][: nbytes // 4]
            encoded = np.frombuffer(bytearray(encode(values)), np.uint8)
            rows.append(time_chunk(values, codecs, encoded, repeats))
        libraries = list(rows[0])
        if libraries != shown:
            shown = libraries
            lines += ["", f"| chunk | ratio | {' | '.join(shown)} |", "|---" * (2 + len(shown)) + "|"]
        base = [row[shown[0]] for row in rows]
        cells = [", ".join(f"{each:.3g}" for each in base)]
        for library in shown[1:]:
            cells.append(", ".join(f"{first / row[library]:.2f}" for first, row in zip(base, rows, strict=True)))
        lines.append(f"| {name}, {kind} | {values.nbytes / encoded.size:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="stores whose name contains this")
    parser.add_argument("--folder", help="where to make the files; default a temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--codecs", action="store_true", help="time the decoding of single chunks by each library")
    args = parser.parse_args()
    if args.codecs:
        print("chunks of", ", ".join(f"{size:,}" for size in SIZES), "bytes: ms of CPU, and times as fast")
        print(codecs_table(args.repeats))
        return
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

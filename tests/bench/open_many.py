"""Opening many files, or two of many arrays: CPU time and system calls, beside netCDF4-python, h5py and xarray.

    PYTHONPATH=. python tests/bench/open_many.py [--files 200] [--arrays 200] [--rounds 5]
    PYTHONPATH=. python tests/bench/open_many.py --samples 50000 [--earlier PATH]

Every way opens each file, and reads shape, dtype and attributes of two fields, and the times; scidata also compares the
coordinates. "indexed" is scidata after ``scidata index``; some 6 ms of an opening are of no file, so take many. CPU
time in turns, medians, imports left out, page cache warm. Calls (of ``strace``, where it is installed) are those that
name one of the files, in the middle of the series.

With ``--samples``: a store of as many samples, of which only the folders are there, and the same store with a manifest
as version 3 wrote it. Each is opened in processes of its own, in turns: CPU time, and memory beyond that after a small
store was opened. ``--earlier`` is a checkout of an earlier version, which opens the latter, too.
"""

import argparse
import glob
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import h5py
import netCDF4
import numpy as np
import xarray
import zarr

import scidata
from scidata.cli.commands.index import run_index
from scidata.sources.indexed import NAME
from scidata.store.format.manifest import ArrayInfo, SampleInfo
from scidata.store.format.places import folder_of
from scidata.store.format.store import open_store, read_sample_info, write_manifest

FIELDS = ["t2m", "u10"]


def write_day(path: str, day: int, format: str) -> None:
    """Write a file of four times, with compression where the format has it."""
    with netCDF4.Dataset(path, "w", format=format) as file:
        for dim, length, units in (
            ("time", None, "hours since 2000-01-01"),
            ("latitude", 19, "degrees_north"),
            ("longitude", 36, "degrees_east"),
        ):
            file.createDimension(dim, length)
            variable = file.createVariable(dim, "f8", (dim,))
            variable.units, variable.standard_name = units, dim
            variable[:] = np.arange(length or 4) + (4 * day if length is None else 0)
        for name in FIELDS:
            zlib = format == "NETCDF4"
            variable = file.createVariable(name, "f4", ("time", "latitude", "longitude"), zlib=zlib)
            variable.units, variable.long_name, variable.standard_name = "K", f"long {name}", name
            values = np.random.default_rng(day).normal(size=(4, 19, 36))  # compressed, they take other numbers of bytes
            variable[:] = np.round(values, day % 3)


def write_arrays(path: str, num: int) -> None:
    """Write a Zarr v3 group without consolidated metadata."""
    group = zarr.open_group(path, mode="w", zarr_format=3)
    shapes = {"time": (4,), "latitude": (19,), "longitude": (36,)}
    shapes |= dict.fromkeys([*FIELDS, *(f"v{i}" for i in range(num - 2))], (4, 19, 36))
    for name, shape in shapes.items():
        dims = [name] if len(shape) == 1 else ["time", "latitude", "longitude"]
        group.create_array(name, data=np.zeros(shape, "f4"), chunks=shape, dimension_names=dims)


def by_scidata(paths: list[str]) -> int:
    """Open a series, or a store."""
    return len(scidata.open_dataset(paths if len(paths) > 1 else paths[0], fields=FIELDS))


def by_index(paths: list[str]) -> int:
    """Open a series by the index beside it, which the other ways do without."""
    place = os.path.join(os.path.dirname(paths[0]), NAME)
    os.rename(f"{place}-away", place)
    try:
        return by_scidata(paths)
    finally:
        os.rename(place, f"{place}-away")


def by_netcdf4(paths: list[str]) -> int:
    """Open each file with netCDF4-python."""
    found = 0
    for path in paths:
        with netCDF4.Dataset(path) as file:
            for name in FIELDS:
                variable = file[name]
                found += len((variable.shape, variable.dtype, variable.__dict__)[0])
            found += len(file["time"][:])
    return found


def by_h5py(paths: list[str]) -> int:
    """Open each file with h5py."""
    found = 0
    for path in paths:
        with h5py.File(path) as file:
            for name in FIELDS:
                found += len(dict(file[name].attrs)) + len(file[name].shape)
            found += len(file["time"][:])
    return found


def by_xarray(paths: list[str]) -> int:
    """Open each file with xarray."""
    found = 0
    for path in paths:
        with xarray.open_dataset(path, decode_times=False) as file:
            found += len(file["time"].values) + sum(len(file[name].attrs) for name in FIELDS)
    return found


def by_xarray_zarr(paths: list[str]) -> int:
    """Open a store with xarray."""
    return len(xarray.open_zarr(paths[0], consolidated=False, chunks=None)[FIELDS].time)


def calls_of(paths: list[str]) -> str:
    """Return the system calls of scidata that name the middle file of a series; of a store, all in its folder."""
    if shutil.which("strace") is None:
        return "no strace"
    pattern = os.path.join(os.path.dirname(paths[0]), "*.nc") if len(paths) > 1 else paths[0]
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, __file__, "--open", pattern]
        subprocess.run(["strace", "-f", "-e", "trace=file", "-o", log.name, *command], check=True)
        lines = [line for line in log if (paths[len(paths) // 2] in line if len(paths) > 1 else paths[0] in line)]
    kinds = Counter("open" if "open" in line.split("(")[0] else "stat" for line in lines if "execve" not in line)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def write_store(folder: str, num: int) -> dict[str, str]:
    """Write a cloud, and two stores of many such samples, whose files are not there; return their paths."""
    from scidata.store.format.sums import old_document  # which an earlier version does not have

    rng = np.random.default_rng(0)
    with h5py.File(f"{folder}/cloud.h5", "w") as file:
        file["xyz"], file["u"] = rng.random((500, 3)), rng.random(500)
    scidata.partition(f"{folder}/cloud.h5", f"{folder}/one", kind="points", points="xyz")
    paths = {way: f"{folder}/{way}" for way in ("table", "before")}
    for path, i in ((path, i) for path in paths.values() for i in range(num)):
        os.makedirs(f"{path}/{folder_of(i)}")
    write_manifest(paths["table"], repeated(read_sample_info(f"{folder}/one", 0), num, rng))
    for path, source in ((paths["before"], paths["table"]), (f"{folder}/one", f"{folder}/one")):
        text = old_document(open_store(source).manifest)
        with open(f"{path}/manifest.json", "w") as file:
            file.write(text)
    return paths


def repeated(first: SampleInfo, num: int, rng: np.random.Generator) -> Iterator[SampleInfo]:
    """Yield descriptions of samples that differ in all that samples usually differ in."""
    for i in range(num):
        rows = int(rng.integers(10, 500))
        yield replace(
            first,
            index=i,
            num_samples=num,
            folder=folder_of(i),
            name=f"cloud{i:07d}",
            counts={"point": rows},
            source_counts={"point": rows},
            arrays={path: other(array, rows, rng.bytes(16).hex()) for path, array in first.arrays.items()},
            statistics={"point/u": replace(first.statistics["point/u"], mean=rng.random(), std=rng.random())},
            bbox=(tuple(rng.random(3).tolist()), tuple((1 + rng.random(3)).tolist())),
            inputs=(replace(first.inputs[0], name=f"cloud{i:07d}.h5", digest=rng.bytes(16).hex()),),
            documents=rng.bytes(16).hex(),
        )


def other(array: ArrayInfo, rows: int, digest: str) -> ArrayInfo:
    """Return an array of another number of rows than 500, of one chunk and one block as before."""
    sizes = {
        name: tuple(rows if n == 500 else n for n in getattr(array, name)) for name in ("shape", "chunks", "shards")
    }
    return replace(array, **sizes, digest=digest)


def open_alone(small: str, path: str) -> None:
    """Print CPU seconds and MiB of opening a store: at its peak, and after it."""
    scidata.open_dataset(small)
    before, begin = memory(), time.process_time()
    kept = scidata.open_dataset(path)
    taken = time.process_time() - begin
    with open("/proc/self/status") as file:  # not ru_maxrss, in which a process begins with its parent's
        peak = next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
    print(taken, peak - before, memory() - before, len(kept))


def memory() -> float:
    """Return the resident MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def compare_stores(num: int, rounds: int, earlier: str | None) -> None:
    """Print a table of stores of many samples."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_store(folder, num)
        here = os.getcwd()
        runs = {"table": (here, paths["table"]), "manifest of version 3": (here, paths["before"])}
        if earlier is not None:
            runs["earlier scidata"] = (earlier, paths["before"])
        found: dict[str, list[list[float]]] = {way: [] for way in runs}
        for _ in range(rounds):
            for way, (tree, path) in runs.items():
                command = [sys.executable, __file__, "--alone", f"{folder}/one", path]
                said = subprocess.run(
                    command, env=os.environ | {"PYTHONPATH": tree}, check=True, capture_output=True, text=True
                )
                found[way].append(list(map(float, said.stdout.split())))
    for way, each in found.items():
        taken, peak, after = (statistics.median(run[i] for run in each) for i in range(3))
        print(f"{num} samples, {way}: {taken:.2f} s of CPU, {peak:.0f} MiB at the peak, {after:.0f} MiB after it")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--earlier")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        open_alone(*args.alone)
        return
    if args.samples is not None:
        compare_stores(args.samples, args.rounds, args.earlier)
        return
    if args.open is not None:
        by_scidata(sorted(glob.glob(args.open)))
        return
    ways: dict[str, dict[str, Callable[[list[str]], int]]] = {
        "NetCDF-4": {
            "scidata": by_scidata,
            "indexed": by_index,
            "h5py": by_h5py,
            "netCDF4": by_netcdf4,
            "xarray": by_xarray,
        },
        "NetCDF-3": {"scidata": by_scidata, "indexed": by_index, "netCDF4": by_netcdf4, "xarray": by_xarray},
        "Zarr v3": {"scidata": by_scidata, "xarray": by_xarray_zarr},
    }
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, list[str]] = {}
        for format, name in (("NETCDF4", "NetCDF-4"), ("NETCDF3_64BIT_OFFSET", "NetCDF-3")):
            os.mkdir(f"{folder}/{format}")
            paths[name] = [f"{folder}/{format}/d{day:05}.nc" for day in range(args.files)]
            for day, path in enumerate(paths[name]):
                write_day(path, day, format)
            run_index(paths[name], out=None, as_json=False)
            os.rename(f"{folder}/{format}/{NAME}", f"{folder}/{format}/{NAME}-away")
        paths["Zarr v3"] = [f"{folder}/a.zarr"]
        write_arrays(paths["Zarr v3"][0], args.arrays)
        for name, rivals in ways.items():
            times: dict[str, list[float]] = {way: [] for way in rivals}
            for round_ in range(args.rounds + 1):
                for way, run in rivals.items():
                    begin = time.process_time()
                    run(paths[name])
                    if round_:  # the first imports
                        times[way].append((time.process_time() - begin) / len(paths[name]) * 1e3)
            shown = ", ".join(f"{way} {statistics.median(found):.3f}" for way, found in times.items())
            print(f"{name}: ms of CPU a file: {shown}; scidata's calls: {calls_of(paths[name])}")


if __name__ == "__main__":
    main()

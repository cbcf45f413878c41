"""Opening many files, or two of many arrays: CPU time and system calls, beside netCDF4-python, h5py and xarray.

    PYTHONPATH=. python tests/bench/open_many.py [--files 200] [--arrays 200] [--rounds 5]

Every way opens each file, and reads shape, dtype and attributes of two fields, and the times; scidata also compares the
coordinates. "indexed" is scidata after ``scidata index``; some 6 ms of an opening are of no file, so take many. CPU
time in turns, medians, imports left out, page cache warm. Calls (of ``strace``, where it is installed) are those that
name one of the files, in the middle of the series.
"""

import argparse
import glob
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import h5py
import netCDF4
import numpy as np
import xarray
import zarr

import scidata
from scidata.cli.commands.index import run_index
from scidata.sources.indexed import NAME

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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", help=argparse.SUPPRESS)
    args = parser.parse_args()
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

"""Windows of a table of observations: CPU and bytes read of one window, beside xarray, pandas and pyarrow.

Each reads the rows of six hours, drawn at random, of 100 days: four columns and the times (xarray has these in memory).
The bytes that system calls of this process read are counted (``rchar``). ``--epoch`` writes a table block by
block, reads all of its windows in order, and prints the memory after each tenth of them.
"""

import argparse
import resource
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import xarray as xr
import zarr

from scidata.core.options import ReadOptions
from scidata.sources import tables
from scidata.store.raw_points.windows_reader import WindowsReader

BEGIN, DAYS, HOURS = np.datetime64("2020-01-01", "ns"), 100, 6
COLUMNS = ["lat", "lon", "bt", "qc", "dates"]


def make(folder, num, chunk):
    """Write the table in each format; return its files."""
    rng = np.random.default_rng(0)
    times = BEGIN + np.sort(rng.integers(0, DAYS * 86400 * 10**6, num)) * np.timedelta64(1, "us")
    columns = {
        "lat": rng.uniform(-90, 90, num).astype("f4"),
        "lon": rng.uniform(0, 360, num).astype("f4"),
        "bt": rng.normal(250, 20, num).astype("f4"),
        "qc": rng.integers(0, 4, num).astype("i1"),
    }
    table = xr.Dataset({name: ("row", column) for name, column in columns.items()}, coords={"dates": ("row", times)})
    units = {"units": "nanoseconds since 1970-01-01", "dtype": "i8"}
    files = {}
    for name, compressors in (("Zarr, raw", None), ("Zarr, zstd", "auto")):
        files[name] = folder / f"{name.split()[1]}.zarr"
        encoding = {each: {"chunks": (chunk,)} | ({} if compressors else {"compressors": None}) for each in COLUMNS}
        encoding["dates"] |= units
        table.to_zarr(files[name], encoding=encoding, consolidated=False)
    files["Parquet"] = folder / "table.parquet"
    frame = pa.table({**{name: pa.array(column) for name, column in columns.items()}, "dates": pa.array(times)})
    pq.write_table(frame, files["Parquet"], row_group_size=chunk, compression="zstd")
    return files


def make_blocks(folder, num, chunk):
    """Write a table of any size, of small dtypes, zstd; return its path."""
    group, rng = zarr.open_group(folder / "table.zarr", mode="w"), np.random.default_rng(0)
    dtypes = {"lat": "f2", "lon": "f2", "bt": "f2", "qc": "i1", "dates": "i4"}
    arrays = {
        name: group.create_array(name, shape=(num,), chunks=(chunk,), dtype=dtype, dimension_names=["row"])
        for name, dtype in dtypes.items()
    }
    arrays["dates"].attrs["units"] = "seconds since 2020-01-01"
    for start in range(0, num, size := 64 * chunk):
        stop = min(num, start + size)
        for name, array in arrays.items():
            rows = np.arange(start, stop)
            array[start:stop] = rows * (DAYS * 86400 / num) if name == "dates" else rng.integers(0, 90, len(rows))
    return folder / "table.zarr"


def ours(path, num_parts=1, where=None):
    """Return a function that reads the rows of a window, of the last rank."""
    read = ReadOptions(time="dates", window=f"{HOURS}h", positions=("lat", "lon"), where=where, num_threads=0)
    reader = WindowsReader(str(path), read, num_parts=num_parts)
    return lambda index: reader.read(index, num_parts - 1).fields["bt"]


def by_xarray(path):
    """Return the same by xarray, which has all times in memory, sorted."""
    table = xr.open_zarr(path, chunks=None, consolidated=False)
    times = table["dates"].values

    def read(index):
        begin = BEGIN + index * np.timedelta64(HOURS, "h")
        rows = np.searchsorted(times, [begin, begin + np.timedelta64(HOURS, "h")])
        return table.isel(row=slice(*rows)).load()["bt"].values

    return read


def by_pandas(path):
    """Return the same by pandas, which filters by the statistics of row groups."""
    span = pd.Timedelta(hours=HOURS)
    first = pd.Timestamp(BEGIN)

    def read(index):
        ends = [("dates", ">=", first + index * span), ("dates", "<", first + (index + 1) * span)]
        return pd.read_parquet(path, columns=COLUMNS, filters=ends)["bt"].to_numpy()

    return read


def by_pyarrow(path):
    """Return the same by a data set of pyarrow."""
    table = pads.dataset(path)
    span, first = pd.Timedelta(hours=HOURS), pd.Timestamp(BEGIN)

    def read(index):
        low, high = pa.scalar(first + index * span), pa.scalar(first + (index + 1) * span)
        wanted = (pads.field("dates") >= low) & (pads.field("dates") < high)
        return table.to_table(columns=COLUMNS, filter=wanted, use_threads=False)["bt"].to_numpy()

    return read


def bytes_read():
    """Return the bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--chunk", type=int, default=1 << 15)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epoch", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if args.epoch:
            read = ours(make_blocks(Path(folder), args.rows, args.chunk))
            for index in range(num := DAYS * 24 // HOURS):
                read(index)
                if index % (num // 10) == num // 10 - 1:
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    print(f"{index + 1} windows: {pages * resource.getpagesize() / 2**20:.0f} MiB", flush=True)
            return
        files = make(Path(folder), args.rows, args.chunk)
        readers = {}
        for name, path in files.items():
            readers |= {(name, "scidata"): ours(path), (name, "scidata, a rank of 4"): ours(path, 4)}
            if name == "Parquet":
                readers |= {(name, "pandas"): by_pandas(path), (name, "pyarrow"): by_pyarrow(path)}
            else:
                readers[name, "xarray"] = by_xarray(path)
        rng = np.random.default_rng(1)
        found = {key: [] for key in readers}
        for index in [0, *rng.choice(DAYS * 24 // HOURS, args.rounds, replace=False).tolist()]:
            for key, read in readers.items():
                tables._columns.clear()  # which readers of one process share
                begin, before = bytes_read(), time.process_time()
                num = len(read(index))
                found[key].append((1000 * (time.process_time() - before), (bytes_read() - begin) / (num * 21)))
        print("| table | read by | CPU of a window, ms | bytes read / wanted |\n|---|---|---|---|")
        for (name, who), each in found.items():
            cpu, ratio = (statistics.median(column) for column in zip(*each[1:], strict=True))
            print(f"| {name} | {who} | {cpu:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

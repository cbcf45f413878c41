"""Random tables of observations in the layouts that windows are read from, and as pandas has them."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr
import zarr

import scidata
from scidata.store.format.store import verify

UNITS = (
    "datetime64[ns]",
    "datetime64[s]",
    "seconds since 1970-01-01",
    "hours since 1900-01-01",
    "nanoseconds since 2000-01-01T06:00:00",
)
LAYOUTS = ("zarr3", "zarr2", "table", "hdf5", "netcdf", "parquet", "arrow")


WHOLE = {"write_empty_chunks": True}  # or else chunks of zeros are not there


@dataclass
class Case:
    """A table, the arguments that open windows of it, and the spans and rows that pandas takes."""

    paths: list | str
    frame: pd.DataFrame
    options: dict
    window: pd.Timedelta
    every: pd.Timedelta
    firsts: list = field(default_factory=list)


def random_times(rng, num, begin):
    """Draw sorted times of four days: with duplicates, gaps, full hours, and none at all."""
    seconds = rng.integers(0, 4 * 86400, num)
    if rng.random() < 0.5:
        seconds = seconds // 900 * 900
    if rng.random() < 0.5:
        seconds = seconds[(seconds < 86400) | (seconds > 3 * 86400)]
    return np.sort(begin + seconds * 10**9)


def encoded(times, units):
    """Return times as a layout stores them, and their attributes."""
    if units.startswith("datetime64"):
        return times.astype("M8[ns]").astype(units), {}
    unit, _, date = units.partition(" since ")
    step = {"seconds": 10**9, "hours": 3600 * 10**9, "nanoseconds": 1}[unit]
    since = times - pd.Timestamp(date).as_unit("ns").value
    return (since / step if unit == "hours" else since // step), {"units": units}


def write_table(path, layout, columns, times, units, chunk):
    """Write a Zarr store, an array a column or one of all; or a file."""
    if layout in WRITERS:
        values, attributes = encoded(times, units)
        WRITERS[layout](path, {"dates": values, **columns}, attributes, chunk)
        return
    group = zarr.open_group(str(path), mode="w", zarr_format=3 if layout == "zarr3" else 2)
    values, attributes = encoded(times, units)

    def add(name, array, **attributes):
        dims = {"dimension_names": ["obs"]} if layout == "zarr3" else {}
        chunks = tuple(max(1, min(chunk, n) if i == 0 else n) for i, n in enumerate(array.shape))
        made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, config=WHOLE, **dims)
        made[...] = array
        made.attrs.update(attributes)

    if layout == "table":
        add("data", np.stack([column.astype("f4") for column in columns.values()], axis=1), colnames=list(columns))
        add("dates", values[:, None], **attributes)
        return
    add("dates", values, **attributes)
    for name, column in columns.items():
        add(name, column, **{"lat": {"units": "degrees_north"}, "lon": {"units": "degrees_east"}}.get(name, {}))


def write_hdf5(path, columns, attributes, chunk):
    """Write an HDF5 file."""
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            made = file.create_dataset(name, data=column, chunks=(min(chunk, len(column)),), compression="gzip")
            made.attrs.update(attributes if name == "dates" else {})


def write_netcdf(path, columns, attributes, chunk):
    """Write a NetCDF file."""
    said = {"dates": attributes, "lat": {"units": "degrees_north"}, "lon": {"units": "degrees_east"}}
    found = {name: ("obs", column, said.get(name, {})) for name, column in columns.items()}
    xr.Dataset(found).to_netcdf(path, encoding={name: {"_FillValue": None} for name in found})


def write_parquet(path, columns, attributes, chunk):
    """Write a Parquet file of several row groups, in which NaN is missing."""
    frame = pa.Table.from_pandas(pd.DataFrame(columns), preserve_index=False)
    index = frame.schema.get_field_index("dates")
    frame = frame.set_column(index, pa.field("dates", frame.schema[index].type, metadata=attributes), frame["dates"])
    pq.write_table(frame, path, row_group_size=chunk)


def write_arrow(path, columns, attributes, chunk):
    """Write an Arrow file of several batches."""
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    index = table.schema.get_field_index("dates")
    table = table.set_column(index, pa.field("dates", table.schema[index].type, metadata=attributes), table["dates"])
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table, max_chunksize=chunk)


WRITERS = {"hdf5": write_hdf5, "netcdf": write_netcdf, "parquet": write_parquet, "arrow": write_arrow}


def make_case(rng, folder: Path) -> Case:
    """Write a random table, in one to three files, and choose windows of it."""
    layout, chunk = str(rng.choice(LAYOUTS)), int(rng.choice([7, 64, 1000]))
    begin = pd.Timestamp(rng.choice(["2020-02-28", "1999-12-31T21", "1969-12-30", "2100-02-27"])).as_unit("ns").value
    frames, paths, firsts = [], [], [0]
    for number in range(rng.integers(1, 4)):
        units = str(rng.choice(UNITS[2:] if layout in ("zarr3", "hdf5", "netcdf") else UNITS))
        times = random_times(rng, rng.integers(1, 400), begin)
        if units.startswith("hours"):  # of which a float has quarters exactly
            times = times // (900 * 10**9) * (900 * 10**9)
        num = len(times)
        if not num:
            continue
        if rng.random() < 0.2:  # late rows, or a table in no order
            late = rng.permutation(num)[: rng.integers(1, 4) if rng.random() < 0.5 else num]
            times[late] = times[rng.permutation(late)]
        columns = {
            "lat": rng.uniform(-90, 90, num).astype("f4"),
            "lon": rng.uniform(0, 360, num).astype("f4"),
            "bt": np.where(rng.random(num) < 0.2, np.nan, rng.normal(250, 20, num)).astype("f4"),
            "qc": rng.integers(0, 4, num).astype("i1"),
        }
        path = folder / f"{number}.{layout}"
        write_table(path, layout, columns, times, units, chunk)
        paths.append(str(path))
        frames.append(pd.DataFrame({"dates": times.astype("M8[ns]"), **columns}))
        firsts.append(firsts[-1] + num)
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    window, every = (pd.Timedelta(rng.choice(["1h", "6h", "90min", "1D", "7h"])) for _ in range(2))
    options = {
        "positions": ("lat", "lon"),
        "time": "dates",
        "window": window.to_pytimedelta(),
        "every": every.to_pytimedelta(),
    }
    options["where"] = [None, {"qc": (0, 1)}, {"qc": 2, "bt": slice(None)}, {"bt": slice(240, None)}][rng.integers(4)]
    if rng.random() < 0.3:
        options["bounds"] = "chunk"
    return Case(paths, frame, options, window, every, firsts)


def sort_case(rng, case: Case, folder: Path) -> Case:
    """Write the tables of a case sorted by time, with little memory or all of it."""
    memory = None if rng.random() < 0.3 else 40_000
    out, options = str(folder / "sorted.store"), {**case.options, "positions": None}
    scidata.partition(case.paths, out, order="time:dates", points=("lat", "lon"), memory=memory)
    assert verify(out) is None
    parts = [case.frame[a:b].sort_values("dates", kind="stable") for a, b in itertools.pairwise(case.firsts)]
    return replace(case, paths=out, options=options, frame=pd.concat(parts, ignore_index=True))


def kept(frame, where):
    """Return which rows of a frame pass the filter."""
    found = np.ones(len(frame), bool)
    for name, wanted in (where or {}).items():
        column = frame[name]
        if isinstance(wanted, slice):
            low, high = wanted.start, wanted.stop
            found &= (
                column.notna() & (True if low is None else column >= low) & (True if high is None else column <= high)
            )
        else:
            found &= column.isin(np.ravel(wanted))
    return found

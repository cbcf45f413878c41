"""CPU time a sample in the first epoch and in the second, beside libraries that plan nothing ahead.

    pip install tensorstore zarrs
    RAYON_NUM_THREADS=1 python tests/bench/first_epoch.py --repeats 5

Samples are single steps of some fields, each field of a step in a chunk of its own, read in stored order from the page
cache. ``zarr`` has a file a chunk, ``hdf5`` is one file, ``netcdf`` a file for every ten steps. Readers take turns;
each turn opens the data anew, with no file open, and goes through them twice. Rivals read each array into NumPy's
memory, one after the other, without a loader: those that are not installed are left out. Medians in ms.
"""

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time

import h5py
import netCDF4
import numpy as np
import zarr

import scidata
from scidata.sources.access.files import files

STEPS_PER_FILE = 10  # of NetCDF
COLUMNS = 146


def values(args, rows, number):
    rng = np.random.default_rng(number)
    x = np.sin(np.linspace(0, 6, rows))[:, None] * np.cos(np.linspace(0, 9, COLUMNS) + number)
    return np.round((x + rng.normal(scale=1e-3, size=x.shape)) * 4096).astype("f4") / 4096


def write_zarr(path, args, fields, rows, codec):
    group = zarr.open_group(path, mode="w")
    made = {
        "lz4": lambda: zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
        "zstd": lambda: zarr.codecs.ZstdCodec(level=3),
        "raw": lambda: None,
    }
    for k in range(fields):
        array = group.create_array(
            f"v{k}", shape=(args.samples, rows, COLUMNS), dtype="f4", chunks=(1, rows, COLUMNS),
            dimension_names=("time", "y", "x"), compressors=made[codec](),
        )  # fmt: skip
        for i in range(args.samples):
            array[i] = values(args, rows, i + k)
    return path


def write_hdf5(path, args, fields, rows, codec):
    with h5py.File(path, "w") as file:
        for k in range(fields):
            dset = file.create_dataset(
                f"v{k}", (args.samples, rows, COLUMNS), "f4", chunks=(1, rows, COLUMNS),
                **({} if codec == "raw" else {"compression": "gzip", "compression_opts": 1, "shuffle": True}),
            )  # fmt: skip
            dset.dims[0].label = "time"
            for i in range(args.samples):
                dset[i] = values(args, rows, i + k)
    return path


def write_netcdf(path, args, fields, rows, codec):
    os.makedirs(path)
    for f, first in enumerate(range(0, args.samples, STEPS_PER_FILE)):
        with netCDF4.Dataset(f"{path}/{f:04d}.nc", "w") as file:
            for dim, size in (("time", None), ("y", rows), ("x", COLUMNS)):
                file.createDimension(dim, size)
            for k in range(fields):
                options = {} if codec == "raw" else {"zlib": True, "complevel": 1, "shuffle": True}
                file.createVariable(f"v{k}", "f4", ("time", "y", "x"), chunksizes=(1, rows, COLUMNS), **options)
                for i in range(first, min(first + STEPS_PER_FILE, args.samples)):
                    file[f"v{k}"][i - first] = values(args, rows, i + k)
    return sorted(f"{path}/{name}" for name in os.listdir(path))


def by_scidata(path, args, fields):
    ds = scidata.open_dataset(path, fields=[f"v{k}" for k in range(fields)], sample_dim="time")
    loader = scidata.DataLoader(ds, None)
    yield
    while True:
        for _ in loader:
            pass
        yield


def by_sample(path, args, fields):
    ds = scidata.open_dataset(path, fields=[f"v{k}" for k in range(fields)], sample_dim="time")
    yield
    while True:
        for i in range(len(ds)):
            ds.reader.read_into(i, {name: np.empty(s.shape, s.dtype) for name, s in ds.buffer_specs().items()}, {})
        yield


def by_zarr(pipeline):
    def epochs(path, args, fields):
        zarr.config.set({"codec_pipeline.path": pipeline})
        group = zarr.open_group(path, mode="r")
        arrays = [group[f"v{k}"] for k in range(fields)]
        yield
        while True:
            for i, array in itertools.product(range(args.samples), arrays):
                array[i]
            yield

    return epochs


def by_tensorstore(path, args, fields):
    import tensorstore

    one = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
    arrays = [
        tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/v{k}/"}, "context": one}
        ).result()
        for k in range(fields)
    ]
    yield
    while True:
        for i in range(args.samples):
            for future in [array[i].read() for array in arrays]:
                future.result()
        yield


def epochs_of(arrays):
    """Read each step of the fields of each file, one epoch after the other."""
    yield
    while True:
        for of_file in arrays:
            for i in range(len(of_file[0])):
                for array in of_file:
                    array[i]
        yield


def by_h5py(path, args, fields):
    paths = [path] if isinstance(path, str) else path
    opened = [h5py.File(p) for p in paths]
    arrays = [[file[f"v{k}"] for k in range(fields)] for file in opened]
    yield from epochs_of(arrays)


def by_netcdf4(path, args, fields):
    paths = [path] if isinstance(path, str) else path
    opened = [netCDF4.Dataset(p) for p in paths]
    arrays = [[file[f"v{k}"] for k in range(fields)] for file in opened]
    for of_file in arrays:
        for array in of_file:
            array.set_auto_maskandscale(False)
    yield from epochs_of(arrays)


def by_xarray(path, args, fields):
    import xarray

    paths = [path] if isinstance(path, str) else path
    opened = [xarray.open_dataset(p, engine="netcdf4", cache=False) for p in paths]
    arrays = [[file[f"v{k}"] for k in range(fields)] for file in opened]
    yield
    while True:
        for of_file in arrays:
            for i in range(len(of_file[0])):
                for array in of_file:
                    array[i].to_numpy()
        yield


ZARR = "zarr.core.codec_pipeline.BatchedCodecPipeline"
READERS = {
    "zarr": {"tensorstore": by_tensorstore, "zarrs": by_zarr("zarrs.ZarrsCodecPipeline"), "zarr": by_zarr(ZARR)},
    "hdf5": {"h5py": by_h5py, "netCDF4": by_netcdf4},
    "netcdf": {"h5py": by_h5py, "netCDF4": by_netcdf4, "xarray": by_xarray},
}
WRITERS = {"zarr": write_zarr, "hdf5": write_hdf5, "netcdf": write_netcdf}


def installed(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def turn(epochs, path, args, fields):
    """Open the data, and return the CPU time a sample of the first epoch and of the second."""
    files().close()
    gc.collect()
    begun = epochs(path, args, fields)
    next(begun)
    taken = []
    for _ in range(2):
        began = time.process_time()
        next(begun)
        taken.append((time.process_time() - began) / args.samples * 1e3)
    begun.close()
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--formats", nargs="+", default=list(WRITERS), choices=WRITERS)
    parser.add_argument(
        "--codecs", nargs="+", default=["raw", "lz4", "zstd"], help="of HDF5 and NetCDF: raw, or else gzip"
    )
    parser.add_argument("--fields", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[53])
    parser.add_argument("--no-rivals", action="store_true")
    args = parser.parse_args()
    cells = [
        (form, codec, fields, kilobytes)
        for form, codec, fields, kilobytes in itertools.product(args.formats, args.codecs, args.fields, args.kilobytes)
        if form == "zarr" or codec in ("raw", "lz4")
    ]
    for form, codec, fields, kilobytes in cells:
        rivals = {} if args.no_rivals else {name: r for name, r in READERS[form].items() if installed(name)}
        readers = {"loader": by_scidata, "read_into": by_sample, **rivals}
        with tempfile.TemporaryDirectory() as folder:
            rows = round(kilobytes * 1000 / 4 / COLUMNS)
            path = WRITERS[form](os.path.join(folder, "data"), args, fields, rows, codec)
            found = {name: [] for name in readers}
            for number, (name, epochs) in itertools.product(range(args.repeats + 1), readers.items()):
                times = turn(epochs, path, args, fields)
                if number:
                    found[name].append(times)
        shown = codec if form == "zarr" or codec == "raw" else "gzip"
        cells = [
            f"{name} {statistics.median(t[0] for t in each):.3f}, {statistics.median(t[1] for t in each):.3f}"
            for name, each in found.items()
        ]
        print(f"{form:7}{shown:5}{fields:3} x {kilobytes} kB  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()

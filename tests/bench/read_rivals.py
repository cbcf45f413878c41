"""Zarr reading beside the fastest libraries for it, zarrs and tensorstore: CPU time as a share of ``preadv``'s.

    pip install zarrs tensorstore
    RAYON_NUM_THREADS=1 python tests/bench/read_rivals.py --megabytes 128 --repeats 5

Methods take turns on the stores of ``read_speed.py``, in the page cache; each result is compared with the data first.
tensorstore has no call that reads into a buffer of the caller's, so fresh pages are part of its time.
"""

import argparse
import os
import statistics
import tempfile
import time

import numpy as np
import read_speed
import tensorstore
import zarr
from zarr.core.buffer import default_buffer_prototype

from scidata.cli.commands.bench import _cases, _ceiling
from scidata.plan.array import chunks_needed, plan_array
from scidata.read import read_plan
from scidata.sources import open_source

PIPELINES = {"zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs": "zarrs.ZarrsCodecPipeline"}
COLUMNS = ("scidata", "zarrs", "tensorstore", "zarr")


def open_zarr(path, pipeline):
    zarr.config.set({"codec_pipeline.path": PIPELINES[pipeline]})
    return zarr.open(path, mode="r")["u"]


def methods_of(path, source, selection, out):
    layout = source.arrays["u"]
    box = tuple(slice(dim[0].start, dim[0].start + dim[0].count) for dim in selection)
    into = default_buffer_prototype().nd_buffer.from_numpy_array(out)
    one = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/u/"}, "context": one}
    theirs = tensorstore.open(spec).result()
    arrays = {name: open_zarr(path, name) for name in PIPELINES}

    def scidata():
        refs = source.locate(layout, chunks_needed(layout, selection))
        read_plan(plan_array(layout, selection, refs, out_shape=out.shape), out, source=source)
        return out

    def through(array):
        def run():
            array.get_basic_selection(box, out=into)
            return out

        return run

    return {
        "scidata": scidata,
        **{name: through(array) for name, array in arrays.items()},
        "tensorstore": lambda: theirs[box].read().result(),
        "preadv": _ceiling(source, layout, selection, out),
    }


def measure(path, data, repeats):
    """Yield case and CPU seconds of each method, medians."""
    source = open_source(path)
    for case, selection in _cases(source.arrays["u"], data.nbytes).items():
        out = np.zeros(tuple(sum(s.count for s in dim) for dim in selection), data.dtype)
        methods = methods_of(path, source, selection, out)
        wanted = data[tuple(slice(dim[0].start, dim[0].start + dim[0].count) for dim in selection)]
        for name in COLUMNS:
            out[:] = 0
            assert np.array_equal(methods[name](), wanted), name
        times = {name: [] for name in methods}
        for _ in range(repeats):
            for name, method in methods.items():
                begin = time.process_time()
                method()
                times[name].append(time.process_time() - begin)
        yield case, {name: statistics.median(taken) for name, taken in times.items()}
    source.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="stores whose name contains this")
    args = parser.parse_args()
    data = read_speed.weather_like(args.megabytes)
    print(f"{'store':<26}{'case':<6}" + "".join(f"{name:>13}" for name in COLUMNS) + f"{'preadv ms':>13}")
    for name, (make, options) in read_speed.stores(data).items():
        if make is not read_speed.make_zarr or args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "store.zarr")
            zarr.config.set({"codec_pipeline.path": PIPELINES["zarr"]})
            make(path, data, **options)
            for case, cpu in measure(path, data, args.repeats):
                ratios = "".join(f"{cpu['preadv'] / cpu[method]:>13.3f}" for method in COLUMNS)
                print(f"{name:<26}{case:<6}{ratios}{cpu['preadv'] * 1e3:>13.2f}", flush=True)


if __name__ == "__main__":
    main()

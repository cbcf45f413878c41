"""What the loader's threads cost, or gain, where samples are small: its defaults beside no threads, and ``preadv``.

    python tests/bench/small_samples.py --repeats 9

Samples of one field of 1440 columns, from the page cache, handed out one by one. Loops do nothing, sleep, or compute
in Python (holding the GIL) for some milliseconds a step. All cells are measured in turn, ``--repeats`` times: epochs of
``--samples``, of which one warms up; medians of wall and CPU time a sample, in ms, without what the loop itself takes.
"""

import argparse
import os
import statistics
import tempfile
import time

import numpy as np
import zarr

import scidata

COLUMNS = 1440


def write(path, rows, codec, args):
    rng = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w")
    compressors = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle") if codec == "lz4" else None
    shape = (args.samples, rows, COLUMNS)
    array = group.create_array(
        "u",
        shape=shape,
        dtype="f4",
        chunks=(1, *shape[1:]),
        dimension_names=("time", "y", "x"),
        compressors=compressors,
    )
    for i in range(args.samples):
        field = np.sin(np.linspace(0, 6, rows))[:, None] * np.cos(np.linspace(0, 9, COLUMNS) + i)
        array[i] = np.round((field + rng.normal(scale=1e-3, size=field.shape)) * 4096) / 4096


def work(how, seconds):
    if how == "sleep":
        time.sleep(seconds)
    elif how == "busy":
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


def by_loader(path, args, **options):
    threads = options.pop("num_threads", None)
    ds = scidata.open_dataset(path, **({} if threads is None else {"num_threads": threads}))
    loader = scidata.DataLoader(ds, None, **options)

    def epoch(number, how, seconds):
        loader.set_epoch(number)
        for _ in loader:
            work(how, seconds)

    return epoch


def by_preadv(path, args):
    folder = os.path.join(path, "u", "c")
    files = [os.open(os.path.join(folder, f"{i}/0/0"), os.O_RDONLY) for i in range(args.samples)]
    buffers = [np.empty(os.fstat(files[0]).st_size, np.uint8) for _ in range(4)]

    def epoch(number, how, seconds):
        for i, fd in enumerate(files):
            os.preadv(fd, [buffers[i % 4]], 0)
            work(how, seconds)

    return epoch


WAYS = {
    "preadv": by_preadv,
    "0 workers, 1 thread": lambda *a: by_loader(*a, num_workers=0, num_threads=1),
    "0 workers": lambda *a: by_loader(*a, num_workers=0),
    "defaults": by_loader,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--codecs", nargs="+", default=["raw", "lz4"])
    parser.add_argument("--loops", nargs="+", default=["none", "sleep 2", "sleep 10", "busy 2"])
    args = parser.parse_args()
    print(f"{'':20}{'loop':10}" + "".join(f"{way:>22}" for way in WAYS))
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in args.megabytes:
            for codec in args.codecs:
                path = os.path.join(folder, f"{codec}-{megabytes:g}")
                write(path, round(megabytes * 1e6 / 4 / COLUMNS), codec, args)
                for loop in args.loops:
                    how, ms = [*loop.split(), "0"][:2]
                    seconds = float(ms) / 1e3
                    epochs = {way: make(path, args) for way, make in WAYS.items()}
                    found = {way: [] for way in WAYS}
                    for number in range(args.repeats + 1):
                        for way, epoch in epochs.items():
                            began, cpu = time.perf_counter(), time.process_time()
                            epoch(number, how, seconds)
                            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                            if number:
                                found[way].append((wall, cpu - (args.samples * seconds if how == "busy" else 0)))
                    cells = []
                    for results in found.values():
                        wall, cpu = (statistics.median(r[k] for r in results) / args.samples * 1e3 for k in (0, 1))
                        cells.append(f"{wall - float(ms):13.2f}, {cpu:6.2f} ")
                    print(f"{codec:6}{megabytes:5g} MB      {loop:10}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()

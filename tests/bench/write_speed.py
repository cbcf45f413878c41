"""What writing costs the loop: ``scidata.create``, a loop that writes nothing, and rank 0 that gathers and writes.

    python tests/bench/write_speed.py --ranks 2 4 --repeats 5

Each rank has its part of a float32 state, level x latitude x longitude, split along latitude; a step sleeps (the
device computes) and gives a state, made before, to what writes: chunks of one level and ``--rows`` latitudes, of which
some lie across bounds. ``create`` writes with copies of the tensors, or keeps them (on CUDA copies cost the loop
nothing); ``gather`` sends all to rank 0, which writes with ``xarray.Dataset.to_zarr``; ``write`` is the floor: a thread
of each rank puts its part into files of a megabyte, as it is, by ``os.write``. All are measured in turn,
``--repeats`` times; medians over them of ms a step of the slowest rank, of what closing takes, of CPU ms a step of all
ranks, and of the memory that the largest rank grew by, in MB.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
import zarr

import scidata
from scidata.testing import run_ranks

DIMS = ("time", "level", "latitude", "longitude")


def source(path, args):
    group = zarr.open_group(path, mode="w")
    for dim, size in zip(DIMS[1:], args.shape, strict=True):
        group.create_array(dim, shape=(size,), dtype="f4", dimension_names=(dim,))[:] = np.arange(size)
    group.create_array("u", shape=(1, *args.shape), dtype="f4", chunks=(1, 1, *args.shape[1:]), dimension_names=DIMS)


def state_of(ds):
    """A state of which a codec makes something: smooth, with noise in the low bits cut off."""
    shape = ds.buffer_specs()["u"].shape
    values = torch.linspace(0, 60, shape[-1]).sin() + torch.randn(shape) * 1e-2
    return ds.assemble({"u": (values * 4096).round() / 4096}, batched=False)["u"]


def gathering(path, ds, args):
    """Return what writes a step on rank 0 of what the others send."""
    import xarray

    def write(step, u):
        parts = u.sharding_shapes()[0]
        local = u.to_local().contiguous()
        if dist.get_rank():
            dist.send(local, 0)
            return
        found = [local] + [torch.empty(shape) for shape in parts[1:]]
        for rank, part in enumerate(found[1:], 1):
            dist.recv(part, rank)
        whole = torch.cat(found, dim=1).numpy()
        data = xarray.Dataset({"u": (DIMS, whole[None])})
        if step:
            data.to_zarr(path, append_dim="time", consolidated=False)
        else:
            chunks = {"chunks": (1, 1, args.rows, args.shape[2])}
            data.to_zarr(path, zarr_format=3, consolidated=False, encoding={"u": chunks})

    return write


def plainly(path):
    """Return what writes a step beside the loop and no more, and what waits for the last ones."""

    def go_last():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

    thread = ThreadPoolExecutor(1, initializer=go_last)
    os.makedirs(path, exist_ok=True)

    def put(step, values):
        for start in range(0, len(values), 1 << 20):
            with open(f"{path}/{dist.get_rank()}-{step}-{start}", "wb", buffering=0) as file:
                file.write(values[start : start + (1 << 20)])

    def write(step, u):
        thread.submit(put, step, memoryview(u.to_local().numpy().reshape(-1).view(np.uint8)))

    return write, thread.shutdown


def loop(rank, num_ranks, how, path, out, args):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, fields=["u"], shard={"latitude": "domain"}, allow_missing=True)
    u, close = state_of(ds), lambda: None
    if how == "write":
        write, close = plainly(out)
    elif how == "gather":
        write = gathering(out, ds, args)
    elif how.startswith("create"):
        codec = next((name for name in ("blosc", "lz4") if name in how), "none")
        options = {"copy": "kept" not in how, "codec": codec}
        options["chunks"] = {"latitude": args.rows}
        writer = scidata.create(out, like=ds, times=args.steps, **options)
        close = writer.close

        def write(step, u):
            writer[step] = {"u": u}
    else:

        def write(step, u):
            pass

    states = [u, u + 1]
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started, given = time.perf_counter(), []
    for step in range(args.steps):
        time.sleep(args.seconds)
        write(step, states[step % 2])
        dist.barrier()
        given.append(time.perf_counter())
    close()
    ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (
        (given[-1] - started) / args.steps,
        ended - given[-1],
        cpu / args.steps,
        (after.ru_maxrss - before.ru_maxrss) / 1e3,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(73, 721, 1440))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=181, help="latitudes of a chunk")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--ways", nargs="+", default=["nothing", "write", "create raw", "create raw kept", "create lz4 kept", "gather"]
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source(f"{folder}/source.zarr", args)
        for ranks in args.ranks:
            found = {way: [] for way in args.ways}
            for _ in range(args.repeats):
                for way in args.ways:
                    measured = run_ranks(
                        loop, ranks, way, f"{folder}/source.zarr", f"{folder}/out.zarr", args, timeout=500
                    )
                    found[way].append([max(m[0] for m in measured), max(m[1] for m in measured)])
                    found[way][-1] += [sum(m[2] for m in measured), max(m[3] for m in measured)]
                    shutil.rmtree(f"{folder}/out.zarr", ignore_errors=True)
            base = statistics.median(each[0] for each in found[args.ways[0]])
            print(f"{ranks} ranks, {args.shape} float32, {args.steps} steps of {args.seconds * 1e3:.0f} ms")
            for way, figures in found.items():
                wall, close, cpu, memory = map(statistics.median, zip(*figures, strict=True))
                print(
                    f"  {way:18} {wall * 1e3:7.1f} ms a step, x{wall / base:.3f}; close {close * 1e3:6.0f} ms; "
                    f"CPU {cpu * 1e3:6.0f} ms; +{memory:5.0f} MB"
                )


if __name__ == "__main__":
    main()

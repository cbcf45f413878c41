"""One trial: a random grid and random patches of it, of which each rank compares what it has with slices of NumPy."""

from __future__ import annotations

import os

import numpy as np
import torch.distributed as dist
import xarray as xr

import scidata
from scidata import Patches


def make_file(folder: str, seed: int) -> tuple[str, xr.Dataset]:
    """Write a grid of random sizes, chunks and format."""
    stream = np.random.default_rng(seed)
    sizes = {"time": int(stream.integers(3, 6)), "level": 2, "lat": int(stream.integers(9, 20)),
             "lon": int(stream.integers(9, 24))}  # fmt: skip
    values = stream.random(tuple(sizes.values()), np.float32)
    ds = xr.Dataset(
        {"u": (tuple(sizes), values), "t": (("time", "lat", "lon"), values[:, 0] + 1),
         "z": (("lat", "lon"), values[0, 1]), "k": (("level",), values[0, :, 0, 0])},
        {"time": np.datetime64("2020-01-01", "ns") + np.arange(sizes["time"]) * np.timedelta64(6, "h"),
         "lat": np.linspace(90, -90, sizes["lat"]), "lon": np.linspace(0, 350, sizes["lon"])},
    )  # fmt: skip
    path = os.path.join(folder, f"{seed}.zarr" if stream.integers(3) else f"{seed}.nc")
    chunks = {d: int(stream.integers(1, n + 1)) for d, n in sizes.items()}
    if path.endswith(".nc"):
        ds.to_netcdf(path)
    else:
        encoding = {n: {"chunks": tuple(chunks[d] for d in ds[n].dims)} for n in ds.data_vars}
        if stream.integers(2):
            encoding = {n: {**e, "compressors": None} for n, e in encoding.items()}
        ds.to_zarr(path, encoding=encoding, zarr_format=3, consolidated=False)
    return path, ds


def choose(seed: int, sizes: dict[str, int], shard: dict[str, str]) -> dict[str, object]:
    """Draw options of ``open_dataset``."""
    stream = np.random.default_rng([seed, 1])
    dims = [d for d in ("lat", "lon", "level") if stream.integers(4)] or ["lat"]
    size = {d: int(stream.integers(1 if d == "level" else 4, sizes[d] + 1)) for d in dims}
    if not stream.integers(4):
        size["time"] = 2
    regular = bool(stream.integers(2))
    periodic = ["lon"] if stream.integers(2) else []
    given: dict[str, object] = {"order": "regular"} if regular else {"num": int(stream.integers(1, 4)), "seed": seed}
    if regular:
        given["overlap"] = {d: int(stream.integers(0, n)) for d, n in size.items()}
    elif stream.integers(2):
        given["align"] = "chunk" if stream.integers(2) else {d: int(stream.integers(1, 4)) for d in size}
    if not regular and stream.integers(2):
        given["weights"] = stream.random([sizes[d] for d in size if d != "time"])
    halo = {d: (int(stream.integers(0, 3)), int(stream.integers(0, 3))) for d in shard}
    for d in size:
        if d != "time" and size[d] < sizes[d] and stream.integers(2):
            halo[d] = (int(stream.integers(0, 4)), int(stream.integers(0, 4)))
    steps = {} if "time" in size or stream.integers(2) else {"steps": (0, 1)}
    caches = [{}, {"pool_bytes": 0}, {"decode": "node"}, {"cache_dir": "cache"}][int(stream.integers(4))]
    steps |= caches
    return {"patch": Patches(size, **given), "periodic": [d for d in periodic if d in halo], "halo": halo, **steps}


def window(
    ds: object, whole: xr.Dataset, name: str, index: int, origin: dict[str, int], parts: dict[str, int], common=None
):
    """Return what a rank has of a field of a patch, halo included."""
    patches, options = ds.reader.patches, ds.reader.options
    values = whole[name]
    steps = ds.reader.field_steps.every
    if "time" in values.dims:
        base = patches.base(index)
        values = values.isel(time=[base + s for s in steps] if len(steps) > 1 else base)
    for dim in values.dims:
        if dim == "time":
            continue
        size, rows = ds.reader.cut.sizes[dim], whole.sizes[dim]
        axis = ds.reader.cut.axis_of_dim.get(dim)
        bounds = np.array_split(np.arange(size), ds.reader.cut.axis_sizes[axis] if axis else 1)
        first, stop = bounds[parts.get(axis, 0)][[0, -1]] + [0, 1]
        lo, hi = options.halo.get(dim, (0, 0))
        wanted = np.arange(first - lo, stop + hi) + origin.get(dim, 0)
        if dim in origin or dim in options.periodic:
            wanted = wanted % rows if dim in options.periodic else wanted[(wanted >= 0) & (wanted < rows)]
        else:
            wanted = wanted[(wanted >= 0) & (wanted < size)]
        values = values.isel({dim: wanted})
    return values.values


def run(rank: int, num_ranks: int, folder: str, seeds: list[int]) -> int:
    """Run trials on this rank; return how many samples were compared."""
    meshes = [(scidata.init_mesh(domain=num_ranks), {"lat": "domain"})]
    if num_ranks == 4:
        meshes.append((scidata.init_mesh(domain=(2, 2), names=("dp", "h", "w")), {"lat": "h", "lon": "w"}))
    num = 0
    for seed in seeds:
        mesh, shard = meshes[seed % len(meshes)]
        with (
            xr.open_dataset(path)
            if (path := os.path.join(folder, f"{seed}.nc")) and os.path.exists(path)
            else (xr.open_zarr(path := os.path.join(folder, f"{seed}.zarr"), consolidated=False)) as whole
        ):
            whole.load()
            num += one(seed, path, whole, mesh, shard)
    return num


def one(seed: int, path: str, whole: xr.Dataset, mesh: object, shard: dict[str, str]) -> int:
    """Compare some samples of one data set."""
    options = choose(seed, dict(whole.sizes), shard)
    if "cache_dir" in options:
        options["cache_dir"] = os.path.join(os.path.dirname(path), "cache")
    ds = scidata.open_dataset(path, mesh, fields=["u", "t", "z", "k"], shard=shard, coords=True, **options)
    stream, patch = np.random.default_rng([seed, 2]), options["patch"]
    parts, places = dict(ds._coordinate), []
    first = int(stream.integers(0, len(ds)))
    near = [first, (first + 1) % len(ds)]  # which may share what was decoded
    for index in [*near, first, int(stream.integers(0, len(ds)))]:
        ds.set_epoch(epoch := int(stream.integers(3)))
        sample, origin = ds[index], ds.origin(index)
        places.append((index, epoch, origin))
        for dim, first in origin.items():
            assert 0 <= first < whole.sizes[dim]
            assert dim in options["periodic"] or first + patch.size[dim] <= whole.sizes[dim]
        for name in ds.fields:
            wanted = window(ds, whole, name, index, origin, parts)
            held = sample[name].local_with_halo() if sample[name].halo else sample[name].to_local()
            assert np.array_equal(held.numpy(), wanted), (seed, index, name, held.shape, wanted.shape)
            full = np.asarray(sample[name].full_tensor())
            pure = whole[name]
            if "time" in pure.dims:
                base, steps = ds.reader.patches.base(index), ds.reader.field_steps.every
                pure = pure.isel(time=[base + s for s in steps] if len(steps) > 1 else base)
            for dim in pure.dims:
                if dim != "time":
                    rows = (np.arange(ds.reader.cut.sizes[dim]) + origin.get(dim, 0)) % whole.sizes[dim]
                    pure = pure.isel({dim: rows})
            assert np.array_equal(full, pure.values), (seed, index, name)
        for dim in ("lat", "lon"):
            coord = sample.coords[dim]
            coord = coord.full_tensor() if hasattr(coord, "full_tensor") else coord
            rows = (np.arange(ds.reader.cut.sizes[dim]) + origin.get(dim, 0)) % whole.sizes[dim]
            assert np.array_equal(np.asarray(coord), whole[dim].values[rows]), (seed, dim)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, places)
    assert all(each == places for each in every)
    return len(places)

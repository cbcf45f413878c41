"""Stores of each kind behind S3, and the requests for them, counted: for tests and tests/bench/object_requests.py."""

from __future__ import annotations

import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import zarr

import scidata
from scidata.testing import run_ranks

SHAPE = (4, 64, 96)
_DIMS = ("time", "y", "x")


class Counts(NamedTuple):
    """Requests by kind, those of objects that are not there too; and the bytes that came."""

    get: int = 0
    head: int = 0
    list: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        kinds = {"GET": self.get, "HEAD": self.head, "LIST": self.list}
        return ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "none"


def _values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype("f4")


def _zarr(path: Path, *, zarr_format: int = 3, consolidated: bool = False, **options: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name in ("u", "v"):
        named = {"dimension_names": _DIMS} if zarr_format == 3 else {}
        array = group.create_array(name, shape=SHAPE, dtype="f4", **options, **named)
        array[:] = _values()
        if zarr_format == 2:
            array.attrs["_ARRAY_DIMENSIONS"] = list(_DIMS)
    if consolidated:
        zarr.consolidate_metadata(path, zarr_format=zarr_format)


def _hdf5(path: Path, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        for name in ("u", "v"):
            data = file.create_dataset(name, data=_values(), **options)
            for dim, label in zip(data.dims, _DIMS, strict=True):
                dim.label = label


def _netcdf(path: Path, kind: str) -> None:
    import netCDF4

    with netCDF4.Dataset(path, "w", format=kind) as file:
        for dim, n in zip(_DIMS, SHAPE, strict=True):
            file.createDimension(dim, n)
        for name in ("u", "v"):
            file.createVariable(name, "f4", _DIMS)[:] = _values()


def _store(path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = path.with_name("cloud.h5")
    with h5py.File(raw, "w") as file:
        file["x"], file["y"], file["p"] = rng.normal(size=(3, 5000))
    scidata.partition(raw, path, kind="points")


_CHUNKS = {"chunks": (1, 32, 96)}
_SHARDS = {"chunks": (1, 8, 96), "shards": (2, 64, 96)}

#: By name: how it is written, and the end of its URL.
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "Zarr v3, consolidated": (lambda p: _zarr(p, consolidated=True, **_CHUNKS), ".zarr"),
    "Zarr v3": (lambda p: _zarr(p, **_CHUNKS), ".zarr"),
    "Zarr v3, uncompressed": (lambda p: _zarr(p, consolidated=True, compressors=None, **_CHUNKS), ".zarr"),
    "Zarr v3, shards": (lambda p: _zarr(p, consolidated=True, **_SHARDS), ".zarr"),
    "Zarr v2, consolidated": (lambda p: _zarr(p, zarr_format=2, consolidated=True, **_CHUNKS), ".zarr"),
    "Zarr v2": (lambda p: _zarr(p, zarr_format=2, **_CHUNKS), ".zarr"),
    "HDF5": (lambda p: _hdf5(p, chunks=(1, 32, 96), compression="gzip"), ".h5"),
    "NetCDF-4": (lambda p: _netcdf(p, "NETCDF4"), ".nc"),
    "NetCDF-3": (lambda p: _netcdf(p, "NETCDF3_CLASSIC"), ".nc"),
    "partitioned store": (_store, ""),
}


def put(server: Any, folder: Path, case: str) -> str:
    """Write the data of a case, and put them on a server; return their URL."""
    write, suffix = CASES[case]
    path = folder / f"data{suffix}"
    write(path)
    name = "counted/" + case.replace(", ", "-").replace(" ", "-").lower() + suffix
    url: str = server.put(path, name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return url


def count(server: Any, urls: Sequence[str], num_ranks: int = 1) -> list[list[Counts]]:
    """Open data and read two epochs of them, on so many ranks; return the requests of these three, by URL.

    Of several ranks those of opening them once more, together, come second.
    """
    server.wire.forget()
    read = (list(urls), server.options, server.endpoint)
    _read(0, 1, *read) if num_ranks == 1 else run_ranks(_read, num_ranks, *read)
    phases: list[list[tuple[str, str, str, int]]] = [[]]
    for each in server.wire.requests:
        phases.append([]) if each[0] == "mark" else phases[-1].append(each)
    assert not phases.pop()
    server.wire.forget()
    counts = [Counts(**Counter(kind for kind, *_ in phase), nbytes=sum(each[3] for each in phase)) for phase in phases]
    per_url = 3 if num_ranks == 1 else 4
    return [counts[i : i + per_url] for i in range(0, len(counts), per_url)]


def _read(rank: int, num_ranks: int, urls: list[str], options: dict[str, Any], endpoint: str) -> None:
    def mark() -> None:
        if num_ranks > 1:
            torch.distributed.barrier()
        if rank == 0:
            urllib.request.urlopen(f"{endpoint}/mark").close()
        if num_ranks > 1:
            torch.distributed.barrier()

    mesh = scidata.init_mesh(domain=num_ranks) if num_ranks > 1 else None
    for url in urls:
        is_store = "." not in url.rpartition("/")[2]
        shard = {} if is_store or mesh is None else {"shard": {"y": "domain"}}
        ds = scidata.open_dataset(url, mesh, storage_options=options, **shard)
        mark()
        if mesh is not None:
            with scidata.open_together():
                ds = scidata.open_dataset(url, mesh, storage_options=options, **shard)
            mark()
        for _ in range(2):
            samples = [ds[index] for index in range(len(ds))]
            mark()
        if mesh is not None and not is_store:
            own = slice(rank * SHAPE[1] // num_ranks, (rank + 1) * SHAPE[1] // num_ranks)
            for values, sample in zip(_values(), samples, strict=True):
                assert np.array_equal(sample["u"].local, values[own])

"""Grids and stores in Google Cloud Storage, by obstore: read, replaced, missing, kept on a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.core.urls import url_of
from scidata.errors import SourceChangedError
from scidata.sources.access.validators import Validators
from tests.unit._gcs import BUCKET, Server, serve

SHAPE = (8, 30, 40)


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as found:
        yield found


def write(path: Path, value: float = 0.0) -> np.ndarray:
    group = zarr.open_group(path, mode="w")
    array = group.create_array(
        "u",
        shape=SHAPE,
        dtype="f4",
        chunks=(1, 30, 40),
        dimension_names=("t", "y", "x"),
        compressors=zarr.codecs.ZstdCodec(),
    )
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32) + np.float32(value)
    array[:] = values
    return values


@pytest.fixture
def grid(server: Server, tmp_path: Path) -> tuple[str, np.ndarray]:
    values = write(tmp_path / "a.zarr")
    return server.put(tmp_path / "a.zarr", "a.zarr"), values


def test_a_grid(server: Server, grid: tuple[str, np.ndarray]) -> None:
    url, values = grid
    ds = scidata.open_dataset(url, storage_options=server.options)
    server.forget()
    for i in (3, 0, 7):
        assert np.array_equal(ds.read_local(i)["u"].numpy(), values[i])
    assert [key for key, _ in server.gets] == [f"a.zarr/u/c/{i}/0/0" for i in (3, 0, 7)]
    assert all(span.startswith("bytes=0-") for _, span in server.gets)
    loader = scidata.DataLoader(ds, 2)
    assert np.array_equal(np.concatenate([batch["u"].numpy() for batch in loader]), values)


@pytest.mark.parametrize("suffix", [".nc", ".h5"])
def test_files(server: Server, tmp_path: Path, suffix: str) -> None:
    xr = pytest.importorskip("xarray")
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    xr.Dataset({"u": (("t", "y", "x"), values)}).to_netcdf(
        tmp_path / f"a{suffix}", engine="netcdf4", encoding={"u": {"zlib": True, "chunksizes": (2, 30, 40)}}
    )
    url = server.put(tmp_path / f"a{suffix}", f"folder/a{suffix}")
    ds = scidata.open_dataset(url, storage_options=server.options)
    assert all(np.array_equal(ds.read_local(i)["u"].numpy(), values[i]) for i in range(8))


def test_a_partitioned_store(server: Server, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "cloud.h5", "w") as file:
        file["points"] = rng.random((900, 2))
        file["u"] = rng.standard_normal((900, 2)).astype("f4")
    scidata.partition(str(tmp_path / "cloud.h5"), str(tmp_path / "store"), kind="points")
    url = server.put(tmp_path / "store", "store")
    here = scidata.open_dataset(str(tmp_path / "store")).read_local(0)
    there = scidata.open_dataset(url, storage_options=server.options).read_local(0)
    assert all(np.array_equal(there.fields[name], here.fields[name]) for name in here.fields)


@pytest.mark.parametrize("name", ["gs://nobucket/a.zarr", f"gs://{BUCKET}/nothing.zarr"])
def test_what_is_not_there(server: Server, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        scidata.open_dataset(name, storage_options=server.options)


def replaced(server: Server, url: str, tmp_path: Path) -> None:
    write(tmp_path / "b.zarr", 1.0)
    server.put(tmp_path / "b.zarr" / "u" / "c", f"{url.removeprefix(f'gs://{BUCKET}/')}/u/c")


def test_an_object_that_is_replaced_while_it_is_read(
    server: Server, grid: tuple[str, np.ndarray], tmp_path: Path
) -> None:
    url, values = grid
    ds = scidata.open_dataset(url, storage_options=server.options)
    ds.read_local(3)
    replaced(server, url, tmp_path)
    with pytest.raises(SourceChangedError, match=r"a\.zarr/u/c/3/0/0.*replaced"):
        ds.read_local(3)
    again = scidata.open_dataset(url, storage_options=server.options)
    assert np.array_equal(again.read_local(3)["u"].numpy(), values[3] + 1)


def test_a_server_that_tells_no_generation_is_read(server: Server, grid: tuple[str, np.ndarray]) -> None:
    server.tells_generations = False
    ds = scidata.open_dataset(grid[0], storage_options=server.options)
    assert all(np.array_equal(ds.read_local(3)["u"].numpy(), grid[1][3]) for _ in range(2))


def test_what_objects_are_known_by(server: Server, grid: tuple[str, np.ndarray], tmp_path: Path) -> None:
    """By listings: no object is asked for by itself."""
    url, _ = grid

    def validators(names: list[str]) -> list[bytes]:
        root = url_of(url, server.options)
        known = Validators(root)
        return [known.of([root.bound(f"{url}/{name}")]).digest for name in names]

    names = [f"u/c/{i}/0/0" for i in range(8)] + ["u/c/9/0/0"]
    first = validators(names)
    assert len(set(first)) == 9
    assert all(first)
    assert server.gets == []
    assert validators(names) == first
    write(tmp_path / "b.zarr", 1.0)
    server.put(tmp_path / "b.zarr" / "u" / "c" / "3", "a.zarr/u/c/3")
    second = validators(names)
    assert [a == b for a, b in zip(first, second, strict=True)] == [i != 3 for i in range(9)]


def test_kept_on_a_local_disk(server: Server, grid: tuple[str, np.ndarray], tmp_path: Path) -> None:
    url, values = grid

    def epoch() -> np.ndarray:
        ds = scidata.open_dataset(url, storage_options=server.options, cache_dir=tmp_path / "cache")
        server.forget()
        return np.stack([ds.read_local(i)["u"].numpy() for i in range(8)])

    assert np.array_equal(epoch(), values)
    assert len(server.gets) == 8
    assert np.array_equal(epoch(), values)
    assert server.gets == []
    replaced(server, url, tmp_path)
    assert np.array_equal(epoch(), values + 1)

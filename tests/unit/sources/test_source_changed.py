"""Files that are written again while a data set of them is open: an error, never samples of two versions."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import scidata
from scidata.errors import SourceChangedError
from scidata.sources.access.files import files
from scidata.testing import make_grid

FORMATS = ("zarr2", "zarr3", "zarr3_sharded", "hdf5", "hdf5_chunked", "netcdf4", "netcdf3")


def open_grid(path: Path) -> Any:
    return scidata.open_dataset(str(path), fields=["u"], sample_dim="time")


def write(path: Path, format: str, **options: int) -> np.ndarray:
    """Write a grid and return its ``u``; the time of the files moves on, however coarse the file system's clock is."""
    make_grid(path, format=format, **options)
    grid = open_grid(path)
    return np.stack([grid[i]["u"].numpy() for i in range(len(grid))])


def move_on(path: Path) -> None:
    """Make files a second younger, as they would be if they had not been written in the same instant."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            status = file.stat()
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def replace(path: Path, format: str, how: str, **options: int) -> None:
    """Write another grid of the same shape over it: in place, or beside it and renamed."""
    other = path.with_name("other")
    make_grid(other, format=format, first_time=50, **options)
    if how == "renamed" or other.is_dir():
        if path.is_dir():
            shutil.rmtree(path)
        other.rename(path)
    else:
        path.write_bytes(other.read_bytes())
        other.unlink()
    move_on(path)


@pytest.mark.parametrize("how", ["in place", "renamed"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_source_that_is_written_again(tmp_path: Path, format: str, how: str) -> None:
    old = write(tmp_path / "grid", format)
    grid = open_grid(tmp_path / "grid")
    assert np.array_equal(grid[0]["u"].numpy(), old[0])
    replace(tmp_path / "grid", format, how)
    if how == "renamed" or (tmp_path / "grid").is_dir():  # files that have lost their names are open, and whole
        with contextlib.suppress(SourceChangedError):
            assert np.array_equal(grid[1]["u"].numpy(), old[1])
    else:
        with pytest.raises(SourceChangedError, match=r"grid.*open the data set again"):
            grid[1]
    files().close()  # as happens where many files are read
    with pytest.raises(SourceChangedError):
        grid[2]
    again = open_grid(tmp_path / "grid")
    assert not np.array_equal(again[0]["u"].numpy(), old[0])
    with pytest.raises(SourceChangedError):  # the other data set, now that this one has the file open
        grid[2]


@pytest.mark.parametrize("format", FORMATS)
def test_other_processes_do_not_read_the_new_one(tmp_path: Path, format: str) -> None:
    write(tmp_path / "grid", format)
    grid = open_grid(tmp_path / "grid")
    grid[0]
    sent = pickle.dumps(grid)
    replace(tmp_path / "grid", format, "in place")
    with pytest.raises(SourceChangedError):
        pickle.loads(sent)[1]


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "zarr3_sharded"])
def test_a_chunk_that_is_written_again(tmp_path: Path, format: str) -> None:
    """The metadata stay as they are: what was read before is known, and what was not is as it is now."""
    write(tmp_path / "grid", format)
    grid = open_grid(tmp_path / "grid")
    for i in range(len(grid)):
        grid[i]
    for file in (tmp_path / "grid" / "u").rglob("*"):
        if file.is_file() and file.name not in ("zarr.json", ".zarray", ".zattrs"):
            file.write_bytes(file.read_bytes())
    move_on(tmp_path / "grid" / "u")
    with pytest.raises(SourceChangedError, match="grid/u/"):
        grid[0]


def test_another_shape_is_a_change_before_it_is_damage(tmp_path: Path) -> None:
    """Offsets of the old file make no sense in the new one: the message does not send the user to copy it again."""
    write(tmp_path / "grid.h5", "hdf5_chunked")
    grid = open_grid(tmp_path / "grid.h5")
    grid[0]
    replace(tmp_path / "grid.h5", "hdf5_chunked", "in place", num_lat=7, num_lon=5)
    with pytest.raises(SourceChangedError):
        grid[1]


def test_files_that_are_read_alone_do_not_matter(tmp_path: Path) -> None:
    """Another attribute, array or access time is no change of what is read."""
    write(tmp_path / "grid", "zarr3")
    grid = open_grid(tmp_path / "grid")
    grid[0]
    (tmp_path / "grid" / "notes.txt").write_text("seen")
    move_on(tmp_path / "grid" / "v")
    os.utime(tmp_path / "grid" / "u")
    grid[0]


@pytest.mark.parametrize("way", ["{}", "file://{}", "local://{}", "relative"])
def test_a_store_that_is_opened_anew_after_it_was_replaced_is_the_new_one(tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    name = "store" if way == "relative" else way.format(tmp_path / "store")
    for value in (1, 2, 3):
        folder = tmp_path / f"next{value}"
        array = zarr.open_group(folder, mode="w").create_array(
            "u", shape=(3, 4, 5), dtype="f4", chunks=(1, 4, 5), dimension_names=("time", "y", "x"), compressors=None
        )
        array[:] = value
        if value > 1:
            shutil.rmtree(tmp_path / "store")
        folder.rename(tmp_path / "store")
        ds = scidata.open_dataset(name, sample_dim="time")
        assert float(ds[1]["u"][0, 0]) == value


@pytest.mark.parametrize("format", ["zarr3", "hdf5", "netcdf3"])
def test_the_same_size_with_the_time_put_back(tmp_path: Path, format: str) -> None:
    old = write(tmp_path / "grid", format)
    grid = open_grid(tmp_path / "grid")
    assert np.array_equal(grid[0]["u"].numpy(), old[0])
    path = tmp_path / "grid"
    for file in [path] if path.is_file() else [p for p in (path / "u").rglob("0") if p.is_file()]:
        status, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceChangedError, match="it was replaced or changed while it was in use"):
        grid[0]

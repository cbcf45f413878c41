"""What scidata opens for itself: no link is followed to another file of the user, and no FIFO is waited for."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import scidata
from scidata.core.own_files import make_own_folder, open_own, write_whole
from scidata.core.trace import _save
from scidata.errors import RefusedError
from scidata.grids.blocks import shared_arrays
from scidata.grids.blocks.shared_arrays import SharedArrays
from scidata.read.disk_cache import DiskCache

PRECIOUS = b"a file of the user, of some length"


@pytest.fixture
def precious(tmp_path: Path) -> Any:
    """A file, and a folder, to which a link leads that nobody may follow."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "file").write_bytes(PRECIOUS)
    yield folder
    assert (folder / "file").read_bytes() == PRECIOUS
    assert os.listdir(folder) == ["file"]


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


#: What somebody puts where scidata has a file.
TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, file: path.symlink_to(file),
    "a link to nothing": lambda path, file: path.symlink_to(file.with_name("new")),
    "another name": lambda path, file: path.hardlink_to(file),
    "a FIFO": lambda path, file: os.mkfifo(path),
    "a socket": lambda path, file: bind(path),
    "a folder": lambda path, file: path.mkdir(),
}


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_refused(tmp_path, precious, trap, flags):
    TRAPS[trap](tmp_path / "own", precious / "file")
    if trap == "another name" and flags == os.O_RDONLY:
        os.close(open_own(str(tmp_path / "own"), flags))
        return
    with pytest.raises((RefusedError, IsADirectoryError), match="own"):
        open_own(str(tmp_path / "own"), flags)


def test_a_file_is_made_and_emptied(tmp_path):
    path = str(tmp_path / "own")
    for text in (b"long text", b"short"):
        with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(text)
        assert (tmp_path / "own").read_bytes() == text
    with pytest.raises(FileExistsError):
        open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_folders(tmp_path, precious):
    make_own_folder(str(tmp_path / "a" / "b"))
    make_own_folder(str(tmp_path / "a" / "b"))
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(RefusedError, match="link: is a link"):
        make_own_folder(str(tmp_path / "link"))


def test_a_whole_file_replaces_a_link_and_no_device(tmp_path, precious):
    (tmp_path / "out").symlink_to(precious / "file")
    write_whole(str(tmp_path / "out"), b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    _save({"traceEvents": []}, tmp_path / "out")
    assert not (tmp_path / "out").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="pipe: is no file"):
        write_whole(str(tmp_path / "pipe"), b"new")


# -- the places that open them -----------------------------------------------------------------------------------------

KEY = hashlib.sha256(b"key").digest()
ROWS = np.arange(40, dtype=np.uint8).reshape(2, 20)


def is_kept(cache: DiskCache) -> bool:
    out = np.zeros_like(ROWS)
    return cache.read(KEY, ROWS.shape, [(0, out.reshape(-1).data)]) and np.array_equal(out, ROWS)


@pytest.mark.parametrize("trap", [*TRAPS, "an entry of zeros"])
def test_the_total_of_a_cache(tmp_path, precious, trap):
    root = tmp_path / "cache" / "scidata-parts"
    root.mkdir(parents=True)
    if trap == "an entry of zeros":
        (root / "total").write_bytes(bytes(12))
    else:
        TRAPS[trap](root / "total", precious / "file")
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    assert cache.put(KEY, ROWS) == is_kept(cache) == (trap == "an entry of zeros")


@pytest.mark.parametrize("trap", ["a link", "a link to nothing", "a FIFO", "a socket"])
def test_an_entry_of_a_cache_is_made_anew(tmp_path, precious, trap):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    assert cache.put(KEY, ROWS)
    path = Path(cache._path(KEY))
    path.unlink()
    TRAPS[trap](path, precious / "file")
    assert not is_kept(cache)
    assert cache.put(KEY, ROWS)
    assert is_kept(cache)


@pytest.mark.parametrize("which", ["scidata-parts", "fan"])
def test_folders_of_a_cache(tmp_path, precious, which):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    link = Path(cache._path(KEY)).parent if which == "fan" else tmp_path / "cache" / which
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    assert not cache.put(KEY, ROWS)


def test_the_folder_in_shared_memory(tmp_path, precious, monkeypatch):
    monkeypatch.setattr(shared_arrays, "_base", lambda: str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    joined = Path(shared_arrays._join("these"))
    shared_arrays._leave()
    assert not joined.exists()
    precious.chmod(0o700)
    joined.symlink_to(precious)
    found = []
    box = SharedArrays("these", 0, 1 << 20)
    box.take(KEY, (3,), np.dtype("f4"), lambda a: a.fill(1), lambda a: found.append(a.copy()), takers=[0, 1], wait=True)
    assert found[0].tolist() == [1, 1, 1]
    shared_arrays._sweep()
    assert joined.is_symlink()


@pytest.mark.parametrize("trap", TRAPS)
def test_the_lock_of_a_folder_in_shared_memory(tmp_path, precious, monkeypatch, trap):
    monkeypatch.setattr(shared_arrays, "_base", lambda: str(tmp_path / "shm"))
    monkeypatch.setattr(shared_arrays, "_sweep", lambda: None)
    (tmp_path / "shm").mkdir()
    joined = Path(shared_arrays._join("these"))
    shared_arrays._leave()
    joined.mkdir(0o700)
    TRAPS[trap](joined / "alive", precious / "file")
    assert shared_arrays._join("these") is None


@pytest.mark.parametrize("trap", ["a link", "a link to nothing", "another name", "a FIFO"])
def test_the_lock_of_a_store(tmp_path, precious, trap):
    (tmp_path / "x.store").mkdir()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["pos"] = np.zeros((3, 2))
    TRAPS[trap](tmp_path / "x.store" / ".lock", precious / "file")
    with pytest.raises(RefusedError, match=r"\.lock: is"):
        scidata.partition(str(tmp_path / "x.h5"), str(tmp_path / "x.store"))


def test_temporary_files_of_a_store(tmp_path, precious):
    store = tmp_path / "x.store"
    store.mkdir()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["pos"] = np.zeros((3, 2))
    for name in (".tmp-manifest.json", ".tmp-sample-000000.zarr", ".tmp-sample-000000.zarr.scratch"):
        (store / name).symlink_to(precious / "file")
    scidata.partition(str(tmp_path / "x.h5"), str(store), resume=True)
    assert len(scidata.open_dataset(str(store))[0]["pos"]) == 3

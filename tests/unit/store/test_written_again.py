"""A store written anew at the same path by another process: opened again it is the new one, an open one says so."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import SourceChangedError
from scidata.store.format.store import open_store


def write(folder: Path, num_rows: int, seed: int) -> np.ndarray:
    """Write a store that nobody has open; return its field."""
    rng = np.random.default_rng(seed)
    values = rng.random(num_rows)
    with h5py.File(folder.with_suffix(".h5"), "w") as file:
        file["pos"], file["a"] = rng.random((num_rows, 2)), values
        file["cells"] = np.arange(num_rows - 2)[:, None] + np.arange(3)
    scidata.partition(str(folder.with_suffix(".h5")), str(folder))
    return values


def is_right(ds: Any, values: np.ndarray) -> bool:
    sample = ds[0]
    return np.array_equal(sample["a"].numpy(), values[sample.original_id("node").numpy()])


def put(new: Path, store: Path) -> None:
    """As another process would, of which nothing here knows."""
    shutil.rmtree(store)
    shutil.copytree(new, store)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray]]:
    """Stores of the same shape, of fewer rows, and of more."""
    folder = tmp_path_factory.mktemp("stores")
    shapes = {"first": (50, 0), "alike": (50, 1), "fewer": (40, 2), "more": (80, 3)}
    return {name: (folder / name, write(folder / name, *shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("way", ["{}", "file://{}", "relative"])
def test_opened_again_it_is_the_new_one(tmp_path, monkeypatch, stores, way):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stores["first"][0], tmp_path / "x.store")
    path = "x.store" if way == "relative" else way.format(tmp_path / "x.store")
    for name in ("first", "alike", "more", "fewer"):
        put(stores[name][0], tmp_path / "x.store")
        assert is_right(scidata.open_dataset(path), stores[name][1])


@pytest.mark.parametrize("name", ["alike", "fewer", "more"])
def test_an_open_one_says_that_it_was_replaced(tmp_path, stores, name):
    store = tmp_path / "x.store"
    shutil.copytree(stores["first"][0], store)
    unread, read = scidata.open_dataset(str(store)), scidata.open_dataset(str(store))
    sent = pickle.dumps(read)
    assert is_right(read, stores["first"][1])
    put(stores[name][0], store)
    assert is_right(scidata.open_dataset(str(store)), stores[name][1])
    said = r"x\.store: the store was replaced by another one while it was in use; open it again, in all processes"
    for ds in (unread, read):
        with pytest.raises(SourceChangedError, match=said):
            is_right(ds, stores["first"][1])
    with pytest.raises(SourceChangedError, match=said):
        pickle.loads(sent)[0]


def test_one_without_checksums_is_not_mixed_with_another(tmp_path, stores):
    """Its samples' arrays have nothing that binds them to the manifest."""
    shutil.copytree(stores["first"][0], tmp_path / "x.store")
    store = open_store(tmp_path / "x.store")
    put(stores["alike"][0], tmp_path / "x.store")
    with pytest.raises(SourceChangedError, match="was replaced"):
        store.source(0)
    shutil.rmtree(tmp_path / "x.store")
    with pytest.raises(SourceChangedError, match="was removed"):
        store.source(0)


def test_the_same_store_copied_again_is_no_other(tmp_path, stores):
    store = tmp_path / "x.store"
    shutil.copytree(stores["first"][0], store)
    ds = scidata.open_dataset(str(store))
    put(stores["first"][0], store)
    os.utime(store / "manifest.json")
    assert is_right(ds, stores["first"][1])

"""A store of many samples is opened by one listing of its folder, not by looks at each sample."""

from __future__ import annotations

import os
import shutil

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import CorruptDataError, RefusedError
from scidata.store.format import store as store_module


@pytest.fixture
def store(tmp_path, monkeypatch):
    for i in range(3):
        with h5py.File(tmp_path / f"c{i}.h5", "w") as file:
            file["xyz"] = np.arange(12.0).reshape(4, 3) + i
    path = str(tmp_path / "s")
    scidata.partition(str(tmp_path / "c*.h5"), path, kind="points", points="xyz")
    monkeypatch.setattr(store_module, "_MANY", 2)
    return path


def test_no_sample_is_looked_at(store, monkeypatch):
    looks = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, real=real, **k: looks.append(str(path)) or real(path, *a, **k))
    ds = scidata.open_dataset(store)
    assert len(ds) == 3
    assert not [path for path in looks if "sample-" in path]


def test_a_sample_that_is_gone_or_elsewhere_is_still_found(store, tmp_path):
    shutil.move(f"{store}/sample-000001.zarr", tmp_path / "away")
    with pytest.raises(CorruptDataError, match=r"sample 1 .* is not there"):
        scidata.open_dataset(store)
    os.symlink(tmp_path / "away", f"{store}/sample-000001.zarr")
    with pytest.raises(RefusedError, match="out of the store"):
        scidata.open_dataset(store)

"""Ranks that share one folder for their decoded parts: each finds its own, in a job of another kind too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.testing import run_ranks

SHAPE = (12, 11, 8)


def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype("f4")


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("cache") / "store"
    array = zarr.open_group(path, mode="w").create_array(
        "u", shape=SHAPE, dtype="f4", chunks=(4, 11, 8), dimension_names=("time", "y", "x")
    )
    array[:] = values()
    for file in path.rglob("*"):
        os.utime(file, (time.time() - 100,) * 2)
    return str(path)


def read_all(rank: int, num_ranks: int, path: str, cache: str, is_full: bool, decode: Any = True) -> float:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    whole = torch.from_numpy(values())
    fetched = 0.0
    for shuffle in (True, "blocks"):
        ds = scidata.open_dataset(
            path,
            mesh,
            sample_dim="time",
            shard={"y": "domain"},
            halo={"y": 1},
            cache_dir=cache,
            cache_disk_bytes=1 << 30,
        )
        loader = scidata.DataLoader(ds, sampler=scidata.DistributedSampler(ds, mesh, shuffle=shuffle))
        for batch in loader:
            (index,) = batch.index
            assert torch.equal(batch["u"].full_tensor()[0], whole[index])
        fetched += loader.stats()["bytes_fetched"]
        if is_full:
            assert fetched == 0
    return fetched


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_a_folder(store: str, tmp_path: Path, num_ranks: int) -> None:
    cache = str(tmp_path)
    assert all(found > 0 for found in run_ranks(read_all, num_ranks, store, cache, False))
    assert not any(run_ranks(read_all, num_ranks, store, cache, True))


def test_ranks_that_share_the_decoding(store: str, tmp_path: Path) -> None:
    assert sum(run_ranks(read_all, 2, store, str(tmp_path), False, "node")) > 0
    for decode in ("node", True):
        assert not any(run_ranks(read_all, 2, store, str(tmp_path), True, decode))


def test_staged_for_ranks(store: str, tmp_path: Path) -> None:
    arguments = [
        "stage",
        store,
        str(tmp_path),
        "--domain",
        "2",
        "--shard",
        "y",
        "--halo",
        "y=1",
        "--sample-dim",
        "time",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not any(run_ranks(read_all, 2, store, str(tmp_path), True))

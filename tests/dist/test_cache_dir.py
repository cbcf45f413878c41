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
from scidata.sources.access import mounts
from scidata.testing import run_ranks
from tests.writers import triangulation, write_hdf5

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


@pytest.mark.slow_for("2")
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


# -- partitioned stores ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh_store(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("cache")
    rng = np.random.default_rng(0)
    mesh = triangulation(rng.random((6000, 2)))
    fields = {"node/u": rng.standard_normal((4, 6000, 3)), "p": rng.standard_normal((6000, 2))}
    raw = write_hdf5(folder / "raw.h5", mesh | fields, {"node/u": ("time", "node", "c")})
    scidata.partition(raw, folder / "store")
    return str(folder / "store")


def read_store(rank: int, num_ranks: int, path: str, cache: str) -> float:
    """Read all samples with a cache and without, as if the folder lay on a network file system."""
    mounts._type_of = lambda device: "nfs4"
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    fetched = 0.0
    for options in ({"halo": 2}, {"halo": 1, "ghosts": "exchange", "steps": (0, 1)}, {"subsample": {"node": 500}}):
        plain = scidata.open_dataset(path, mesh, **options)
        kept = scidata.open_dataset(path, mesh, **options, cache_dir=cache, cache_disk_bytes=1 << 30)
        loader = scidata.DataLoader(
            kept, sampler=scidata.DistributedSampler(kept, mesh, shuffle=False), batch_size=None
        )
        for index, sample in enumerate(loader):
            expected = plain[index]
            for name in expected:
                assert torch.equal(sample[name].to_local(), expected[name].to_local()), name
            if "subsample" not in options:
                assert torch.equal(sample.edge_index, expected.edge_index)
        assert index + 1 == len(kept)
        fetched += loader.stats()["bytes_fetched"]
    return fetched


@pytest.mark.slow_for("1", "2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_blocks_of_a_store(mesh_store: str, tmp_path: Path, num_ranks: int) -> None:
    cache = str(tmp_path)
    assert sum(run_ranks(read_store, num_ranks, mesh_store, cache)) > 0
    assert not any(run_ranks(read_store, num_ranks, mesh_store, cache))
    assert not any(run_ranks(read_store, 5 - num_ranks, mesh_store, cache))  # blocks are not those of a cut


def test_a_store_staged_for_ranks(mesh_store: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    arguments = ["stage", mesh_store, str(tmp_path), "--domain", "2", "--halo", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert not any(run_ranks(read_store, 2, mesh_store, str(tmp_path)))

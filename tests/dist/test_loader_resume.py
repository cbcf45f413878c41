"""A loader's place saved on real ranks by ``torch.distributed.checkpoint``, and resumed on others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
import zarr

import scidata
from scidata.testing import run_ranks

STEPS = 29


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("resume") / "t.zarr")
    data = np.arange(STEPS * 6, dtype=np.float32).reshape(STEPS, 6)
    zarr.open_group(path, mode="w").create_array("t", data=data, chunks=(1, 2), dimension_names=["time", "lat"])
    return path


def part(
    rank: int, num_ranks: int, path: str, dp: int, batch_size: int, load: str, save: str, batches: int
) -> list[list[int]]:
    """Iterate for some batches, from a checkpoint and to one; return the samples, checked against the file."""
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    ds = scidata.open_dataset(path, mesh, shard={"lat": "domain"})
    loader = scidata.DataLoader(ds, batch_size, shuffle=True)
    loader.set_epoch(2)
    if load:
        dcp.load({"loader": loader}, checkpoint_id=load)
    had = []
    for number, batch in enumerate(loader, 1):
        assert np.array_equal(batch["t"].full_tensor()[:, 0] // 6, batch.index)
        had.append(batch.index)
        if number == batches:
            dcp.save({"loader": loader}, checkpoint_id=save)
            break
    return had


def test_checkpoints_resume_on_other_meshes(store: str, tmp_path: Path) -> None:
    ds = scidata.open_dataset(store)
    sampler = scidata.DistributedSampler(ds)
    sampler.set_epoch(2)
    seen, load = [], ""
    for number, (dp, domain, batch_size, batches) in enumerate([(2, 2, 2, 2), (3, 1, 2, 99)]):
        save = str(tmp_path / str(number))
        had = run_ranks(part, dp * domain, store, dp, batch_size, load, save, batches)
        for rank, rows in enumerate(had):
            assert rows == had[rank - rank % domain]
        steps = zip(*had[::domain], strict=True)
        seen += [i for step in steps for row in zip(*step, strict=True) for i in row]
        load = save
    assert seen == list(sampler)


def mixed(rank: int, num_ranks: int, path: str, dp: int, state: dict | None, batches: int) -> tuple[list, dict]:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    ds = scidata.open_dataset(path, mesh, shard={"lat": "domain"})
    odd, even = scidata.subset(ds, range(1, STEPS, 2)), scidata.subset(ds, range(0, STEPS, 2))
    loader = scidata.DataLoader(scidata.mix([even, odd], [2, 1]), 12 // dp, shuffle=True)
    if state is not None:
        loader.load_state_dict(state)
    had = []
    for number, batch in enumerate(loader, 1):
        values = batch["t"].full_tensor()[:, 0] // 6
        assert [v % 2 for v in values.tolist()] == [i >= 15 for i in batch.index]
        had.append(batch.index)
        if number == batches:
            break
    return had, loader.state_dict()


def test_a_mix_of_subsets_on_other_meshes(store: str) -> None:
    whole = run_ranks(mixed, 1, store, 1, None, 99)[0][0]
    assert [len(rows) for rows in whole] == [12, 10]
    assert [sum(i < 15 for i in rows) for rows in whole] == [8, 7]
    first = run_ranks(mixed, 4, store, 2, None, 1)
    assert sorted(i for had, _ in first[::2] for i in had[0]) == sorted(whole[0])
    rest = run_ranks(mixed, 2, store, 1, first[0][1], 99)
    assert rest[0][0] == rest[1][0] == whole[1:]

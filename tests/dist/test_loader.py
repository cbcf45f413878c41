"""``DataLoader`` on real stores and real ranks: every rank's batches against one process's full read."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from torch.distributed.device_mesh import DeviceMesh

import scidata
from scidata import open_dataset
from scidata.device_mesh import init_mesh
from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader
from scidata.loader.sampler import DistributedSampler
from scidata.shard import ShardTensor
from scidata.testing import make_grid, run_ranks

STEPS, LAT, LON = 7, 11, 6


def values(name: str) -> np.ndarray:
    shape = (STEPS, LAT, LON) if name == "t" else (STEPS, 2, LAT, LON)
    return np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("loader") / "era.zarr")
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for name, dims in (("t", ["time", "lat", "lon"]), ("wind", ["time", "level", "lat", "lon"])):
        data = values(name)
        chunks = (1, *data.shape[1:-2], 4, 3)
        group.create_array(name, data=data, chunks=chunks, dimension_names=dims)
    return path


def full_batch(batch: Any) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if isinstance(x, ShardTensor) else x for name, x in batch.items()}


def check(batch: Any, index: list[int]) -> None:
    assert batch.index == index
    for name, full in full_batch(batch).items():
        assert torch.equal(full, torch.from_numpy(values(name)[index])), name


# -- a domain works on the same samples ----------------------------------------------------------------------------


def batches(mesh: DeviceMesh, path: str, num_workers: int) -> None:
    ds = open_dataset(path, mesh, shard={"lat": "domain"}, halo={"lat": (1, 2)}, periodic=("lat",))
    loader = DataLoader(ds, 3, num_workers=num_workers)
    kept = []
    for _ in range(2):
        assert len(loader) == 3
        for step, batch in enumerate(loader):
            check(batch, list(range(STEPS))[step * 3 : step * 3 + 3])
            assert batch.dims["wind"] == ("batch", "level", "lat", "lon")
            kept.append(batch)
    for batch in kept:  # while their buffers would long have been reused
        check(batch, batch.index)
        own, start = batch["t"].to_local(), batch["t"].offsets[1]
        rows = [(start + i) % LAT for i in range(-1, own.shape[1] + 2)]
        assert torch.equal(batch["t"].local_with_halo(), torch.from_numpy(values("t")[batch.index][:, rows]))
    assert loader.stats()["samples"] == 2 * STEPS
    assert loader.stats()["bytes_fetched"] > 0


def samples_and_transform(mesh: DeviceMesh, path: str) -> None:
    def doubled(sample: Any) -> Any:
        return sample.replace({"t": sample["t"] * 2.0})

    ds = open_dataset(path, mesh, shard={"lat": "domain"}, transform=doubled)
    for i, sample in enumerate(DataLoader(ds, batch_size=None)):
        assert sample.index == i
        assert torch.equal(full_batch(sample)["t"], torch.from_numpy(values("t")[i]) * 2)
    for batch in DataLoader(ds, 4):
        assert batch["t"].shape == (len(batch.index), LAT, LON)
        assert torch.equal(full_batch(batch)["t"], torch.from_numpy(values("t")[batch.index]) * 2)
        assert torch.equal(full_batch(batch)["wind"], torch.from_numpy(values("wind")[batch.index]))


def gradients(mesh: DeviceMesh, path: str) -> None:
    ds = open_dataset(path, mesh, shard={"lat": "domain"}, fields=["t"])
    weight, expected = torch.full((LON,), 0.5, requires_grad=True), torch.zeros(LON)
    for batch in DataLoader(ds, 2):
        product = batch["t"] * weight
        (product * product).mean().backward()
        t = torch.from_numpy(values("t")[batch.index])
        expected += (2 * t * t * 0.5).sum((0, 1)) / t.numel()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-6)


def one_domain(rank: int, num_ranks: int, path: str) -> None:
    mesh = init_mesh(domain=num_ranks)
    batches(mesh, path, num_workers=0)
    batches(mesh, path, num_workers=2)
    samples_and_transform(mesh, path)
    gradients(mesh, path)


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_domain(store: str, num_ranks: int) -> None:
    run_ranks(one_domain, num_ranks, store)


# -- domains divide the samples --------------------------------------------------------------------------------------


def shuffled_epochs(mesh: DeviceMesh, path: str, drop_last: bool) -> tuple[int, list[list[int]]]:
    loader = DataLoader(open_dataset(path, mesh, shard={"lat": "domain"}), 2, True, drop_last=drop_last)
    assert isinstance(loader.sampler, DistributedSampler)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen = []
        for batch in loader:
            check(batch, batch.index)
            seen += batch.index
        epochs.append(seen)
    return len(loader), epochs


def without_being_asked(mesh: DeviceMesh, path: str, dp_rank: int, dp: int) -> None:
    ds = open_dataset(path, mesh, shard={"lat": "domain"})
    with pytest.raises(ConfigError, match="generator"):
        DataLoader(ds, shuffle=True, generator=torch.Generator())
    own = list(range(dp_rank, STEPS, dp))
    own += [] if len(own) == -(-STEPS // dp) else [dp_rank - STEPS % dp]  # filled up from the start
    assert [batch.index for batch in DataLoader(ds)] == [[i] for i in own]
    given = DataLoader(ds, sampler=[3, 1])
    assert [batch.index for batch in given] == [[3], [1]]


def many_domains(rank: int, num_ranks: int, path: str, dp: int) -> list[tuple[int, list[list[int]]]]:
    mesh = init_mesh(dp=dp, domain=num_ranks // dp)
    if dp > 1:
        without_being_asked(mesh, path, mesh.get_local_rank("dp"), dp)
    return [shuffled_epochs(mesh, path, drop_last) for drop_last in (False, True)]


@pytest.mark.parametrize(("num_ranks", "dp"), [(2, 1), (3, 3), (4, 2)])
def test_many_domains(store: str, num_ranks: int, dp: int) -> None:
    results = run_ranks(many_domains, num_ranks, store, dp)
    domain = num_ranks // dp
    for drop_last in (False, True):
        lengths, epochs = zip(*(r[drop_last] for r in results), strict=True)
        assert len(set(lengths)) == 1
        for rank in range(num_ranks):
            assert epochs[rank] == epochs[rank - rank % domain]  # one domain, one order
            assert len({tuple(e) for e in epochs[rank]}) == 3
        for epoch in range(3):
            parts = [epochs[i * domain][epoch] for i in range(dp)]
            assert len({len(p) for p in parts}) == 1
            together = [i for p in parts for i in p]
            assert drop_last or set(together) == set(range(STEPS))
            assert not drop_last or len(set(together)) == len(together) == dp * 2 * (STEPS // dp // 2)


# -- nothing communicates --------------------------------------------------------------------------------------------


def without_a_mesh(rank: int, num_ranks: int, path: str) -> None:
    dataset = open_dataset(path, fields=["t"])
    with pytest.warns(UserWarning, match=r"all 2 processes read all samples, whole.*init_mesh\(domain="):
        for _ in DataLoader(dataset):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dealt = torch.utils.data.DistributedSampler(dataset, shuffle=False)  # type: ignore[arg-type, unused-ignore]
        assert len(list(DataLoader(dataset, sampler=dealt))) == -(-len(dataset) // 2)
        mesh = init_mesh(domain=2)
        for _ in DataLoader(open_dataset(path, mesh, fields=["t"])):
            pass


def test_ranks_that_read_the_same_are_told(store: str) -> None:
    run_ranks(without_a_mesh, 2, store)


def alone(rank: int, num_ranks: int, path: str) -> None:
    mesh = init_mesh(domain=num_ranks)
    ds = open_dataset(path, mesh, shard={"lat": "domain"}, halo={"lat": 1})
    if rank == 0:  # the others never come: a collective would hang, and fail the test at its timeout
        for batch in DataLoader(ds, 2):
            assert batch["t"].to_local().shape[1] > 0
    dist.barrier()


def test_a_rank_iterates_without_the_others(store: str) -> None:
    run_ranks(alone, 2, store, timeout=40)


def validates(rank, num_ranks, path, domain, count):
    mesh = scidata.init_mesh(dp=-1, domain=domain)
    ds = scidata.open_dataset(path, mesh, fields=["u"], shard={"latitude": "domain"})
    part = scidata.subset(ds, range(count))
    with pytest.raises(ConfigError, match="with pad=False some have fewer"):
        scidata.DataLoader(part, sampler=scidata.DistributedSampler(part, mesh, pad=False), on_error="skip")
    sampler = scidata.DistributedSampler(part, mesh, shuffle=False, pad=False)
    loader = scidata.DataLoader(part, batch_size=2, sampler=sampler)
    totals = []
    for _ in range(2):  # epochs
        seen = torch.zeros(count, dtype=torch.int64)
        error = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            seen[batch.index] += 1
            error += torch.stack([(batch["u"].double() ** 2).sum(), torch.tensor(float(batch["u"].numel()))])
        dist.all_reduce(seen, group=mesh.get_group("dp"))
        dist.all_reduce(error, group=mesh.get_group("dp"))
        assert seen.tolist() == [1] * count
        totals.append(((error[0] / error[1]) ** 0.5).item())
    assert totals[0] == totals[1]
    return len(loader), totals[0]


@pytest.mark.parametrize(("num_ranks", "domain", "count"), [(1, 1, 5), (3, 1, 5), (3, 1, 2), (2, 2, 3), (4, 2, 3)])
def test_validation_counts_each_sample_once(tmp_path, num_ranks, domain, count):
    path = str(tmp_path / "grid.zarr")
    u = make_grid(path, num_times=5, num_levels=2, num_lat=13, num_lon=10)["u"][:count].astype("f8")
    found = run_ranks(validates, num_ranks, path, domain, count)
    assert [rmse for _, rmse in found] == pytest.approx([(u**2).mean() ** 0.5] * num_ranks, rel=1e-13)
    if (num_ranks, count) == (3, 2):
        assert [steps for steps, _ in found] == [1, 1, 0]

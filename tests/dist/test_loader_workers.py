"""Worker processes, and torch's own loaders, under ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scidata
from scidata.testing import run_ranks
from tests.dist._workers import forked
from tests.writers import normal_values, write_clouds, write_grid

STEPS, LAT, LON = 4, 5, 6
SIZES = (40, 25)


def values() -> torch.Tensor:
    return normal_values(STEPS, LAT, LON)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("workers")
    return write_grid(folder / "u.zarr", values(), chunk=(3, 4)), write_clouds(folder, SIZES)


def full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


def doubled(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert torch.utils.data.get_worker_info() is not None
    return {name: x * 2 for name, x in fields.items()}


def clouds_of(loader: Any, epoch: int) -> list[torch.Tensor]:
    loader.set_epoch(epoch)
    return [full(sample["pos"]) for sample in loader]


def processes(rank: int, num_ranks: int, grid: str, clouds: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    options: dict[str, Any] = {"workers": "process", "num_workers": 1, "persistent_workers": True}
    others: dict[str, Any] = options | {"multiprocessing_context": forked()}
    options = others if rank else options  # one process is spawned, as those of users are
    ds = scidata.open_dataset(grid, mesh, shard={"lat": "domain"}, halo={"lat": 1}, local_transform=doubled)
    loader = scidata.DataLoader(ds, 3, **options)
    assert len(loader) == 2
    for batch in loader:
        assert torch.equal(full(batch["u"]), values()[batch.index] * 2)
        rows = slice(max(0, batch["u"].offsets[1] - 1), batch["u"].offsets[1] + batch["u"].to_local().shape[1] + 1)
        assert torch.equal(batch["u"].local_with_halo(), values()[batch.index][:, rows] * 2)
    del loader, batch

    # the epoch reaches processes that live on: they draw what threads draw
    ds = scidata.open_dataset(clouds, mesh, subsample={"point": 10})
    threads, loader = scidata.DataLoader(ds, None), scidata.DataLoader(ds, None, **others)
    drawn = [clouds_of(threads, epoch) for epoch in range(2)]
    for epoch in (0, 1, 0):
        for own, expected in zip(clouds_of(loader, epoch), drawn[epoch], strict=True):
            assert torch.equal(own, expected)
    assert not any(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def test_processes_of_two_ranks(stores: tuple[str, str]) -> None:
    run_ranks(processes, 2, *stores, timeout=170)


def stateful(rank: int, num_ranks: int, grid: str) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(grid, mesh, shard={"lat": "domain"})

    def make() -> Any:
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": forked()}
        sampler = scidata.DistributedSampler(ds, mesh, shuffle=False)
        return StatefulDataLoader(ds, batch_size=2, sampler=sampler, **options)

    loader = make()
    iterator = iter(loader)
    first = ds.assemble(next(iterator))
    assert torch.equal(full(first["u"]), values()[:2])
    state = loader.state_dict()
    del iterator
    resumed = make()
    resumed.load_state_dict(state)
    rest = [ds.assemble(local) for local in resumed]
    assert torch.equal(torch.cat([full(batch["u"]) for batch in rest]), values()[2:])


def test_torchdata(stores: tuple[str, str]) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata (extra 'test')")
    run_ranks(stateful, 2, stores[0], timeout=170)

"""``sample.generator``: an augmentation is what one process makes of the whole sample, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scidata
from scidata.testing import run_ranks
from tests.writers import normal_values, write_clouds, write_grid

STEPS, LAT, LON = 5, 7, 12


def values() -> torch.Tensor:
    return normal_values(STEPS, LAT, LON)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("generator")
    return write_grid(folder / "u.zarr", values(), chunk=(3, 4)), write_clouds(folder, (9, 1, 14))


def full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


def crop(sample: Any) -> Any:
    """A random crop of the longitudes, a flip and a gain, drawn before and after a replacement."""
    start = int(torch.randint(LON - 4, (), generator=sample.generator))
    sample = sample.replace({"u": sample["u"].narrow(1, start, 4)})
    gain, flip = torch.rand(2, generator=sample.generator, dtype=torch.float64).tolist()
    u = sample["u"].flip(1) if flip < 0.5 else sample["u"]
    return sample.replace({"u": u * gain})


def rotate(sample: Any) -> Any:
    axis = torch.randn(3, 3, generator=sample.generator, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(axis)
    return sample.replace({"pos": sample["pos"] @ rotation})


def augmented(rank: int, num_ranks: int, stores: tuple[str, str], dp: int) -> dict[Any, torch.Tensor]:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    found = {}
    grid = scidata.open_dataset(stores[0], mesh, shard={"lat": "domain"}, transform=crop)
    clouds = scidata.open_dataset(stores[1], mesh, transform=rotate)
    for kind, ds in (("grid", grid), ("clouds", clouds)):
        for seed, workers in ((0, 0), (0, 3), (7, 1)):
            sampler = scidata.DistributedSampler(ds, mesh, seed=seed)
            loader = scidata.DataLoader(ds, batch_size=None, sampler=sampler, num_workers=workers)
            for epoch in range(2):
                loader.set_epoch(epoch)
                for sample in loader:
                    field = full(sample["u" if kind == "grid" else "pos"])
                    key = (kind, seed, epoch, sample.index)
                    assert torch.equal(found.setdefault(key, field), field)
    batches = scidata.DataLoader(grid, 2, sampler=scidata.DistributedSampler(grid, mesh))
    for batch in batches:
        for row, index in enumerate(batch.index):
            assert torch.equal(full(batch["u"])[row], found["grid", 0, 0, index])
    return found


@pytest.fixture(scope="module")
def alone(stores: tuple[str, str]) -> dict[Any, torch.Tensor]:
    (found,) = run_ranks(augmented, 1, stores, 1)
    return found


@pytest.mark.parametrize(("num_ranks", "dp"), [(2, 1), (3, 1), (2, 2)])
def test_one_process_result(stores: tuple[str, str], alone: dict[Any, torch.Tensor], num_ranks: int, dp: int) -> None:
    for found in run_ranks(augmented, num_ranks, stores, dp):
        assert len(found) >= 2 * 2 * (STEPS + 3) // dp
        for key, field in found.items():
            torch.testing.assert_close(field, alone[key], rtol=1e-13, atol=1e-13)


def test_seeds_epochs_and_samples_differ(alone: dict[Any, torch.Tensor]) -> None:
    grids = [field for (kind, *_), field in alone.items() if kind == "grid"]
    assert len(grids) == 2 * 2 * STEPS
    assert len({field.numpy().tobytes() for field in grids}) == len(grids)


def test_outside_of_a_loader(stores: tuple[str, str]) -> None:
    ds = scidata.open_dataset(stores[0])
    first, again = ds[2], ds[2]
    assert torch.rand((), generator=first.generator) == torch.rand((), generator=again.generator)
    assert torch.rand((), generator=first.to(torch.float32).generator) == torch.rand((), generator=again.generator)
    assert torch.rand((), generator=ds[1].generator) != torch.rand((), generator=ds[2].generator)

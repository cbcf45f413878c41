"""Lightning and Accelerate around a ``scidata.DataLoader``, really, on ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import scidata
from scidata.testing import run_ranks
from tests.writers import normal_values, write_grid

STEPS, LAT, LON = 7, 5, 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_grid(tmp_path_factory.mktemp("trainers") / "t.zarr", values(), name="t", chunk=(2, 4))


def values() -> torch.Tensor:
    return normal_values(STEPS, LAT, LON)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((LON,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).square().mean()


def expected_weight(batches: list[list[list[int]]], lr: float) -> torch.Tensor:
    """One process trains on the whole samples; ``batches`` by step, then by dp rank."""
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in batches:
        optimizer.zero_grad()
        sum(model(values()[own]) / len(step) for own in step).backward()
        optimizer.step()
    return model.weight.detach()


def steps_of(order: list[int], dp: int, batch: int) -> list[list[list[int]]]:
    per_rank = [order[r::dp] for r in range(dp)]
    return [[own[i : i + batch] for own in per_rank] for i in range(0, len(per_rank[0]), batch)]


# -- Lightning -------------------------------------------------------------------------------------------------------


def lightning_trainer(rank: int, num_ranks: int, **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Started(LightningEnvironment):
        """Ranks that somebody else has started, in the order of the process group."""

        creates_processes_externally = True
        world_size = staticmethod(lambda: num_ranks)
        set_world_size = set_global_rank = staticmethod(lambda *_: None)
        global_rank = local_rank = staticmethod(lambda: rank)
        node_rank = staticmethod(lambda: 0)

    # like torchrun's, on the group that is there
    return Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=DDPStrategy(cluster_environment=Started(), process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def lightning_module(seen: list[Any]) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scale()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert torch.equal(full(batch["t"]), values()[batch.index])
            seen.append(batch.index)
            return self.model(batch["t"])

        def validation_step(self, batch: Any, _: int) -> None:
            seen.append(batch.index)

        def predict_step(self, batch: Any, _: int) -> torch.Tensor:
            return full(batch["t"]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def under_lightning(rank: int, num_ranks: int, path: str, dp: int) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    ds = scidata.open_dataset(path, mesh, shard={"lat": "domain"})
    loader = scidata.DataLoader(ds, 2, True, drop_last=True)
    seen: list[list[int]] = []
    module = lightning_module(seen)
    trainer = lightning_trainer(rank, num_ranks, max_epochs=2)
    trainer.fit(module, loader)
    assert type(trainer.train_dataloader) is scidata.DataLoader
    assert type(trainer.train_dataloader.sampler) is scidata.DistributedSampler

    steps, own = [], []
    for epoch in range(2):  # Lightning has called set_epoch
        loader.set_epoch(epoch)
        mine = steps_of(loader.sampler.order().tolist(), dp, 2)
        steps += [step for step in mine if len(step[0]) == 2]
        own += [step[mesh.get_local_rank("dp")] for step in mine if len(step[0]) == 2]
    assert seen == own
    torch.testing.assert_close(module.model.weight.detach(), expected_weight(steps, 0.1), rtol=1e-12, atol=1e-12)

    # in order, and made again for predictions, which Lightning does with each argument as an attribute
    plain = scidata.DataLoader(ds, 2, num_workers=1, prefetch_factor=3)
    seen.clear()
    trainer.validate(module, plain, verbose=False)
    ordered = [step[mesh.get_local_rank("dp")] for step in steps_of(loader_order(plain), dp, 2)]
    assert seen == ordered
    predictions = trainer.predict(module, plain)
    made = trainer.predict_dataloaders
    assert made is not plain
    assert (type(made), made.num_workers, made.prefetch_factor) == (scidata.DataLoader, 1, 3)
    assert torch.allclose(torch.stack(predictions), torch.stack([values()[i].sum() for i in ordered]))

    # a sampler that is not dealt over dp is replaced by one over all ranks: right where that is the same, or refused
    custom = scidata.DataLoader(ds, 2, sampler=list(range(STEPS)))
    if dp < num_ranks:
        with pytest.raises(scidata.errors.ConfigError, match="use_distributed_sampler=False"):
            trainer.validate(module, custom, verbose=False)
        trainer = lightning_trainer(rank, num_ranks, use_distributed_sampler=False)
        seen.clear()
        trainer.validate(lightning_module(seen), custom, verbose=False)
        assert seen == [[0, 1], [2, 3], [4, 5], [6]]
    else:
        trainer.validate(module, custom, verbose=False)


def loader_order(loader: Any) -> list[int]:
    return loader.sampler.order().tolist()


@pytest.mark.slow_for("1")
@pytest.mark.parametrize("dp", [1, 2])
def test_lightning(store: str, dp: int) -> None:
    pytest.importorskip("lightning")
    run_ranks(under_lightning, 2, store, dp, timeout=120)


# -- Accelerate ------------------------------------------------------------------------------------------------------


def accelerator_of(rank: int, num_ranks: int) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def under_accelerate(rank: int, num_ranks: int, path: str, dp: int, folder: str) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    ds = scidata.open_dataset(path, mesh, shard={"lat": "domain"})
    accelerator = accelerator_of(rank, num_ranks)
    assert (accelerator.num_processes, accelerator.process_index) == (num_ranks, rank)
    given = scidata.DataLoader(ds, 2, True, drop_last=True)
    model = Scale()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), given)
    assert loader is given  # samples are dealt to the ranks of dp already
    steps = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            assert torch.equal(full(batch["t"]), values()[batch.index])
            optimizer.zero_grad()
            accelerator.backward(model(batch["t"]))
            optimizer.step()
        steps += [step for step in steps_of(loader_order(loader), dp, 2) if len(step[0]) == 2]
    weight = accelerator.unwrap_model(model).weight.detach()
    torch.testing.assert_close(weight, expected_weight(steps, 0.1), rtol=1e-12, atol=1e-12)

    left = scidata.DataLoader(ds, 1)  # its place is saved with the rest
    left = accelerator.prepare(left)
    ahead = iter(left)
    first = next(ahead).index
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    rest = [batch.index for batch in ahead]
    accelerator.load_state(folder)
    assert [batch.index for batch in left] == rest
    assert first not in rest


def without_a_mesh(rank: int, num_ranks: int, path: str) -> list[int]:
    """Accelerate makes torch's own loader from the attributes, which deals batches to the ranks."""
    accelerator = accelerator_of(rank, num_ranks)
    loader = accelerator.prepare(scidata.DataLoader(scidata.open_dataset(path), 2, num_workers=0))
    seen = []
    for batch in loader:
        assert torch.equal(batch["t"], values()[batch.index])
        seen += batch.index
    return seen


@pytest.mark.parametrize("dp", [1, 2])
def test_accelerate(store: str, tmp_path: Path, dp: int) -> None:
    pytest.importorskip("accelerate")
    run_ranks(under_accelerate, 2, store, dp, str(tmp_path / "state"), timeout=120)


def test_accelerate_without_a_mesh(store: str) -> None:
    pytest.importorskip("accelerate")
    first, second = run_ranks(without_a_mesh, 2, store, timeout=120)
    assert sorted({*first, *second}) == list(range(STEPS))
    assert len(first) == len(second)

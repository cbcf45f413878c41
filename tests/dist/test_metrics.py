"""Metrics over ranks: bit for bit those of one process, however samples are dealt and the domain is cut."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import scidata
from scidata import metrics
from scidata.errors import ConfigError, ShardLayoutError
from scidata.testing import make_grid, run_ranks

DIMS = ("level", "latitude", "longitude")
SHAPE = (3, 13, 10)
NUM = 5
PLAIN = (1, ("dp", "domain"), {})


def fields(index: int) -> tuple[torch.Tensor, ...]:
    """Prediction, target, climatology and an ensemble of a sample, of very different sizes along levels."""
    made = torch.Generator().manual_seed(index)
    scale = torch.tensor([1e-7, 1.0, 3e6], dtype=torch.float64)[:, None, None]
    target = torch.randn(SHAPE, generator=made, dtype=torch.float64) * scale
    error = torch.randn(SHAPE, generator=made, dtype=torch.float64) * scale
    members = target + torch.randn((6, *SHAPE), generator=made, dtype=torch.float64) * scale
    return target + error, target, error * 0.3, members


def made_metrics(mesh: Any) -> dict[str, Any]:
    weights = {"latitude": metrics.latitude_weights(np.linspace(90, -90, SHAPE[1]))}
    both = {**weights, "level": metrics.level_weights([500, 850, 1000])}
    options = {"dims": DIMS, "mesh": mesh}
    return {
        "rmse": metrics.RMSE(weights=weights, by="level", **options),
        "mae": metrics.MAE(weights=both, **options),
        "bias": metrics.Bias(by=("latitude",), **options),
        "acc": metrics.ACC(weights=weights, by="level", **options),
        "crps": metrics.CRPS(weights=weights, **options),
        "spectrum": metrics.Spectrum("level", weights=weights, by="longitude", **options),
        "sum": metrics.Sum(weights=both, **options),
        "map": metrics.MSE(by=("latitude", "longitude"), **options),
    }


def results_of(
    rank: int, num_ranks: int, domain: Any, names: tuple[str, ...], cut: dict[str, tuple[int, Any]], num: int, pad: bool
) -> dict[str, torch.Tensor]:
    mesh = scidata.init_mesh(domain=domain, names=names, device="cpu")
    parts = mesh[names[1:]] if len(names) > 2 else mesh[names[1]]
    sampler = scidata.DistributedSampler(range(num), mesh, shuffle=True, pad=pad)

    def shard(x: torch.Tensor, lead: int = 0) -> torch.Tensor:
        spots = [cut.get(name) for name in names[1:]]
        if all(spot is None for spot in spots):
            return x
        placements = [Replicate() if spot is None else Shard(spot[0] + lead) for spot in spots]
        sizes = {i: spot[1] for i, spot in enumerate(spots) if spot is not None}
        replicated = scidata.ShardTensor.from_local(x, parts, [Replicate()] * len(placements))
        return replicated.redistribute(placements=placements, sizes=sizes)

    every = made_metrics(mesh)
    for index in sampler:
        prediction, target, climatology, members = fields(index)
        p, t = shard(prediction), shard(target)
        for name in ("rmse", "mae", "bias", "map"):
            every[name].update(p, t, index=index)
        every["acc"].update(p, t, climatology, index=index)  # whole on each rank: cut as the others are
        every["crps"].update(shard(members, 1), t, index=index)
        every["sum"].update(t, index=index)
        every["spectrum"].update(t, index=index)
    return {name: metric.compute() for name, metric in every.items()}


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return run_ranks(results_of, 1, *PLAIN, NUM, False)[0]


CASES = {
    "2 parts": (2, 2, ("dp", "domain"), {"domain": (1, (8, 5))}),
    "3 parts, one empty": (3, 3, ("dp", "domain"), {"domain": (1, (9, 0, 4))}),
    "3 parts of longitudes": (3, 3, ("dp", "domain"), {"domain": (2, (1, 8, 1))}),
    "replicated": (2, 2, ("dp", "domain"), {}),
    "3 replicas": (3, 1, ("dp", "domain"), {}),
    "2 x 2": (4, 2, ("dp", "domain"), {"domain": (1, (2, 11))}),
    "h x w": (4, (2, 2), ("dp", "h", "w"), {"h": (1, (13, 0)), "w": (2, (3, 7))}),
    "h alone": (4, (2, 2), ("dp", "h", "w"), {"h": (1, (6, 7))}),
}


@pytest.mark.parametrize(("case", "pad"), [*((case, False) for case in CASES), ("3 replicas", True), ("2 x 2", True)])
def test_bits_of_one_process(case: str, pad: bool, whole: dict[str, torch.Tensor]) -> None:
    num_ranks, *layout = CASES[case]
    for result in run_ranks(results_of, num_ranks, *layout, NUM, pad):
        for name, expected in whole.items():
            assert torch.equal(result[name], expected), (name, result[name], expected)


def test_dp_rank_without_a_step() -> None:
    one = run_ranks(results_of, 1, *PLAIN, 2, False)[0]
    for result in run_ranks(results_of, 3, 1, ("dp", "domain"), {}, 2, False):
        assert all(torch.equal(result[name], one[name]) for name in one)


# -- samples of data sets --------------------------------------------------------------------------------------------


def persistence(
    rank: int, num_ranks: int, path: str, domain: int, pad: bool, batch_size: int | None, bounds: Any, halo: int
) -> dict[str, Any]:
    mesh = scidata.init_mesh(domain=domain, device="cpu")
    ds = scidata.open_dataset(
        path, mesh, shard={"latitude": "domain"}, bounds=bounds, halo={"latitude": halo}, coords=True
    )
    sampler = scidata.DistributedSampler(ds, mesh, shuffle=False, pad=pad)
    weights = {"latitude": metrics.latitude_weights(ds)}
    rmse = metrics.RMSE(weights=weights, by="level", mesh=mesh, skipna=True)
    cosine = metrics.Mean(mesh=mesh, skipna=True)
    state = None
    for number, sample in enumerate(scidata.DataLoader(ds, batch_size=batch_size, sampler=sampler)):
        rmse.update({name: 0.5 * x for name, x in sample.items()}, sample)
        angle = sample.coords["latitude"]
        cosine.update(sample, weights={"latitude": torch.cos(angle.to(torch.float64) * (torch.pi / 180)).abs()})
        if number == 0:
            state = rmse.state_dict()
            rmse = metrics.RMSE(weights=weights, by="level", mesh=mesh, skipna=True)
            rmse.load_state_dict(state)
    result = rmse.compute()
    assert list(result) == ["u", "v", "t"]
    assert result.dims["u"] == ("level",)
    found = {name: x.numpy() for name, x in result.items()}
    return found | {f"mean {name}": x.numpy() for name, x in cosine.compute().items()}


@pytest.mark.slow_for("True")
@pytest.mark.parametrize("packed", [False, True])
def test_data_sets(tmp_path: Path, packed: bool) -> None:
    path = str(tmp_path / "era5.nc")
    make_grid(path, format="netcdf4", num_times=5, packed=packed)
    one = run_ranks(persistence, 1, path, 1, False, None, "even", 0)[0]
    cases = [(2, 2, True, 2, [0, 17, 19], 1), (4, 2, False, 2, "even", 2), (3, 1, True, None, "even", 0)]
    for num_ranks, *options in cases:
        for result in run_ranks(persistence, num_ranks, path, *options):
            assert all(np.array_equal(result[name], one[name]) for name in one), options


def write_ring(path: Path) -> None:
    ids = np.arange(23)
    made = np.random.default_rng(5)
    with h5py.File(path, "w") as file:
        file["pos"] = np.stack([np.cos(ids * 2 * np.pi / 23), np.sin(ids * 2 * np.pi / 23)], axis=1)
        file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 23], np.r_[(ids + 1) % 23, ids]])
        file["area"] = made.random(23)
        file["p"] = made.standard_normal((23, 2)).astype("f4")


def on_a_graph(rank: int, num_ranks: int, store: str, bounds: Any) -> dict[str, Any]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    sample = scidata.open_dataset(store, mesh, halo=1, bounds=bounds)[0]
    entity = sample.entity
    mae = metrics.MAE(mesh=mesh, by=sample.shown_dims()["p"][1])
    mae.update({"p": sample["p"] * 0.3}, sample, weights={entity: sample["area"]})
    return {name: x.numpy() for name, x in mae.compute().items()}


def test_owned_rows_of_a_graph_count(tmp_path: Path) -> None:
    write_ring(tmp_path / "ring.h5")
    scidata.partition(tmp_path / "ring.h5", tmp_path / "ring.store", order="rows")
    with h5py.File(tmp_path / "ring.h5") as file:
        error = np.abs(file["p"][:].astype("f4") * np.float32(0.3) - file["p"][:]).astype("f8")
        expected = np.average(error, axis=0, weights=file["area"][:])
    (one,) = run_ranks(on_a_graph, 1, str(tmp_path / "ring.store"), "even")
    np.testing.assert_allclose(one["p"], expected, rtol=1e-6)
    for num_ranks, bounds in ((2, "even"), (3, [0, 20, 20, 23])):
        for result in run_ranks(on_a_graph, num_ranks, str(tmp_path / "ring.store"), bounds):
            assert np.array_equal(result["p"], one["p"])


# -- what cannot be --------------------------------------------------------------------------------------------------


def misused(rank: int, num_ranks: int) -> None:
    mesh = scidata.init_mesh(domain=2, device="cpu")
    x = scidata.scatter_tensor(torch.arange(12.0).view(4, 3), 0, mesh["domain"], [Shard(0)])
    with pytest.raises(ConfigError, match="mesh=mesh"):
        metrics.RMSE().update(x, x)
    mse = metrics.MSE(mesh=mesh, dims=("y", "x"))
    with pytest.raises(ShardLayoutError, match="redistribute"):
        mse.update(x, x.redistribute(sizes={0: [1, 3]}), index=0)
    with pytest.raises(ShardLayoutError, match="from_local"):
        mse.update(x.to_local(), x, index=0)
    with pytest.raises(ConfigError, match=r"weights along y have shape \(2,\).*y: 4"):
        metrics.MSE(mesh=mesh, dims=("y", "x"), weights={"y": [1, 2]}).update(x, x, index=0)
    with pytest.raises(ConfigError, match=r"'y', which is sharded.*'x'"):
        metrics.Spectrum("y", dims=("y", "x"), mesh=mesh).update(x, index=0)
    with pytest.raises(ConfigError, match="no rank has called"):
        mse.compute()
    bad = x.new_tensor([1.0, -1.0]) if rank == 1 else x.new_tensor([1.0, 1.0])
    parts = scidata.ShardTensor.from_local(bad, mesh["domain"], [Shard(0)])
    mse.update(x, x, index=0, weights={"y": parts})
    with pytest.raises(ConfigError, match="negative"):  # seen on rank 1, raised on both
        mse.compute()
    mse.reset()
    if rank == 0:
        mse.update(x, x, index=3)
    with pytest.raises(ConfigError, match="sample 3 is on"):
        mse.compute()
    other = metrics.MSE(mesh=mesh, dims=("y", "x"), weights={"y": [1, 2, 3, 4 + rank]})
    other.update(x, x, index=0)
    with pytest.raises(ConfigError, match="different metrics"):
        other.compute()


def test_misuse() -> None:
    run_ranks(misused, 2)


def of_two_domains(rank: int, num_ranks: int) -> None:
    mesh = scidata.init_mesh(domain=2, device="cpu")
    x = scidata.scatter_tensor(torch.arange(4.0), 2 * (rank // 2), mesh["domain"], [Shard(0)])
    mse = metrics.MSE(mesh=mesh)
    if rank != 3:
        mse.update(x, 2 * x, index=rank // 2)
    with pytest.raises(ConfigError, match="different samples"):  # the domain of ranks 0 and 1 hears of it
        mse.compute()


def test_other_domains_hear_of_it() -> None:
    run_ranks(of_two_domains, 4)


def silent(rank: int, num_ranks: int) -> list[Any]:
    mesh = scidata.init_mesh(domain=2, device="cpu")
    x = scidata.scatter_tensor(torch.arange(12.0).view(4, 3), 0, mesh["domain"], [Shard(0)])
    mse = metrics.MSE(mesh=mesh)
    if rank == 0:  # would wait for rank 1 if it communicated
        mse.update(x, x, index=0)
    torch.distributed.barrier()
    if rank == 1:
        mse.update(x, x, index=0)
    return [mse.compute().item()]


def test_updates_do_not_communicate() -> None:
    assert run_ranks(silent, 2) == [[0.0], [0.0]]


def with_torchmetrics(rank: int, num_ranks: int) -> tuple[float, float]:
    """Return the error that torchmetrics has of the ranks' parts, and that of the whole."""
    import torchmetrics

    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    error = torchmetrics.MeanSquaredError()
    alone = torchmetrics.MeanSquaredError(distributed_available_fn=lambda: False)
    for index in range(3):
        prediction, target, *_ = (x.float()[1] for x in fields(index))
        sizes = {0: [4, 9]}
        p, t = (
            scidata.ShardTensor.from_local(x, mesh["domain"], [Replicate()]).redistribute(
                placements=[Shard(0)], sizes=sizes
            )
            for x in (prediction, target)
        )
        error.update(p.to_local().reshape(-1), t.to_local().reshape(-1))
        alone.update(prediction.reshape(-1), target.reshape(-1))
    return error.compute().item(), alone.compute().item()


@pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="its metrics are what is tested")
def test_torchmetrics_of_owned_parts() -> None:
    (found, one), (other, _) = run_ranks(with_torchmetrics, 2)
    assert found == other == pytest.approx(one, rel=1e-6)

"""``weights="measured"``: cuts follow what ranks' parts took; the same on all ranks, saved, and exact in gradients."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.errors import ConfigError, RankFailedError
from scidata.testing import run_ranks

ROWS = 600


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    for number in range(2):
        with h5py.File(path / f"{number}.h5", "w") as file:
            ids, num = np.arange(ROWS + number), ROWS + number
            file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % num], np.r_[(ids + 1) % num, ids]])
            file["x"] = np.random.default_rng(number).random((num, 2))
    scidata.partition([path / "0.h5", path / "1.h5"], path / "two.store", order="rows")
    return path


def seconds_of(sample: Any, rank: int) -> float:
    """Rank 0 is twice as slow as the others."""
    return float(sample.index_map("node").num_owned * (2.0 if rank == 0 else 1.0)) / ROWS


def train(rank: int, size: int, folder: str) -> dict[str, Any]:
    mesh = scidata.init_mesh(domain=size)
    ds = scidata.open_dataset(f"{folder}/two.store", mesh, weights="measured")
    loader = scidata.DataLoader(ds, num_workers=1, shuffle=True)
    torch.manual_seed(0)
    net: Any = scidata.parallelize(torch.nn.Linear(2, 1).double(), mesh)
    cuts, grads, saved = [], [], None
    for epoch in range(5):
        loader.set_epoch(epoch)
        net.zero_grad()
        cuts.append([ds.reader.partition_of(i).bounds["node"].tolist() for i in range(2)])
        for step, sample in enumerate(loader):
            data = sample.to_pyg()
            net(data.x).square().sum().backward()
            ds.measure(sample, seconds_of(sample, rank))
            if epoch == 3 and step == 0:
                saved = json.loads(json.dumps(loader.state_dict()))
                ds.rebalance()  # in the middle of an epoch: what was begun stays
                (first,) = sample.index
                bounds = cuts[-1][first]
                assert sample.original_id("node").to_local().tolist() == list(range(bounds[rank], bounds[rank + 1]))
            elif epoch == 3:
                assert sample.index_map("node").bounds.tolist() == cuts[-1][1 - first]
        grads.append([p.grad.clone() for p in net.parameters()])
        ds.rebalance()
    again = scidata.open_dataset(f"{folder}/two.store", mesh, weights="measured")
    resumed = scidata.DataLoader(again, num_workers=0, shuffle=True)
    resumed.load_state_dict(saved)
    (rest,) = list(resumed)
    assert rest.index == [1 - first]
    assert rest.index_map("node").bounds.tolist() == cuts[3][1 - first]
    with pytest.raises(ConfigError, match="open the store with weights='measured'"):
        scidata.open_dataset(f"{folder}/two.store", mesh).rebalance()
    with pytest.raises(ConfigError, match="seconds=nan"):
        ds.measure(0, float("nan"))
    with pytest.raises(ConfigError, match="sample 0 had 7 rows, and the store has 600"):
        again.load_costs({"version": 1, "samples": {"0": {"bounds": [0, 7], "seconds": [1.0]}}})
    return {"cuts": cuts, "grads": grads, "costs": ds.costs}


def test_cuts_follow_measured_costs_and_gradients_stay_those_of_one_process(stores: Path) -> None:
    found = run_ranks(train, 3, str(stores), timeout=300)
    assert found[0]["cuts"] == found[1]["cuts"] == found[2]["cuts"]
    assert found[0]["costs"] == found[1]["costs"] == found[2]["costs"]
    for number in range(2):
        cuts = [np.diff(cut[number]) for cut in found[0]["cuts"]]
        assert cuts[0].max() - cuts[0].min() <= 1
        balanced = (ROWS + number) * np.array([0.2, 0.4, 0.4])  # a half, one and one
        assert np.abs(cuts[3] - balanced).max() < 0.01 * ROWS
        took = [(cut * [2, 1, 1]).max() / (cut * [2, 1, 1]).mean() for cut in cuts]
        assert took[0] == pytest.approx(1.5, rel=0.01)
        assert took[3] < 1.01
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1).double()
    for number in range(2):
        with h5py.File(stores / f"{number}.h5") as file:
            net(torch.from_numpy(file["x"][:])).square().sum().backward()
    for grads in (grads for each in found for grads in each["grads"]):
        for got, p in zip(grads, net.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-12, atol=0)


def visit(rank: int, size: int, folder: str) -> Any:
    """2 x 2 ranks, batches in flight: what follows a rebalance is right, and costs are means over domains."""
    mesh = scidata.init_mesh(domain=2)
    part, dp = mesh.get_local_rank("domain"), mesh.get_local_rank("dp")
    whole = scidata.open_dataset(f"{folder}/two.store")
    truth = [whole[i]["x"] for i in range(2)]
    ds = scidata.open_dataset(f"{folder}/two.store", mesh, weights="measured")
    loader = scidata.DataLoader(ds, num_workers=2, prefetch_factor=2, shuffle=True)
    seen, saved = [], None
    for epoch in range(6):
        loader.set_epoch(epoch)
        for sample in loader:
            bounds = sample.index_map("node").bounds
            (index,) = sample.index
            assert torch.equal(sample["x"].to_local(), truth[index][bounds[part] : bounds[part + 1]])
            assert torch.equal(sample["x"].full_tensor(), truth[index])
            seen.append((epoch, index, bounds.tolist()))
            ds.measure(sample, (1.0 + 2 * part) * (1 + dp))
            if epoch == 2:
                saved = json.loads(json.dumps(loader.state_dict()))
                ds.rebalance()  # with the next epoch's samples not read yet, and this one's in flight
        ds.rebalance()
    again = scidata.open_dataset(f"{folder}/two.store", mesh, weights="measured")
    resumed = scidata.DataLoader(again, num_workers=2, shuffle=True)
    resumed.load_state_dict(saved)
    resumed.set_epoch(3)
    for sample in resumed:
        bounds = sample.index_map("node").bounds
        assert torch.equal(sample["x"].to_local(), truth[sample.index[0]][bounds[part] : bounds[part + 1]])
    return seen, ds.costs


def test_two_domains_share_their_costs(stores: Path) -> None:
    found = run_ranks(visit, 4, str(stores), timeout=300)
    assert len({json.dumps(costs) for _, costs in found}) == 1
    for seen, _ in found:
        first = [bounds for epoch, _, bounds in seen if epoch == 0]
        assert all(bounds[1] == (bounds[2] + 1) // 2 for bounds in first)
    assert any(bounds[1] > bounds[2] // 2 + 9 for _, _, bounds in found[0][0])


def alone(rank: int, size: int, folder: str, how: str) -> None:
    mesh = scidata.init_mesh(domain=size, timeout=3)
    ds = scidata.open_dataset(f"{folder}/two.store", mesh, weights="measured")
    if how == "later" and rank == 1:
        ds.set_epoch(1)
    if how == "later" or rank == 0:
        with pytest.raises(
            (ConfigError, RankFailedError), match=r"rank 0 .*rebalance\(\) no\. 1, in epoch 0.*all ranks call it"
        ):
            ds.rebalance()
    else:
        with pytest.raises(RankFailedError, match=r"rank 0 waits in rebalance.*all ranks call it"):
            ds[0]["x"].sum()


@pytest.mark.parametrize("how", ["later", pytest.param("never", marks=pytest.mark.slow)])
def test_a_rank_that_rebalances_alone_is_named(stores: Path, how: str) -> None:
    run_ranks(alone, 2, str(stores), how)


def test_a_field_of_the_name_measured(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["points"], file["measured"] = np.random.default_rng(0).random((8, 2)), np.array([4.0, 0, 0, 0, 1, 1, 1, 1])
    scidata.partition(tmp_path / "a.h5", tmp_path / "s", kind="points", order="rows")
    ds = scidata.open_dataset(tmp_path / "s", weights="point/measured")
    assert ds.costs is None
    assert scidata.open_dataset(tmp_path / "s", weights="measured").costs is not None


def test_costs_of_three_ranks_cut_for_any_number() -> None:
    assert scidata.balanced_bounds([0, 40, 80, 120], [2, 1, 1], 2).tolist() == [0, 40, 120]
    assert scidata.balanced_bounds([0, 0, 4], [9, 1]).tolist() == [0, 2, 4]  # a part without rows says nothing
    assert scidata.balanced_bounds([0, 1, 1, 1], [0, 0, 0]).tolist() == [0, 1, 1, 1]
    with pytest.raises(ConfigError, match="one for each part"):
        scidata.balanced_bounds([0, 4], [1, 2])

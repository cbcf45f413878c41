"""Members of an ensemble over an axis of their own, beside the domain: each rank reads its members."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr

import scidata
from scidata.testing import run_ranks

MEMBERS = 5


@pytest.fixture(scope="module")
def forecasts(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("ensemble") / "a.zarr")
    rng = np.random.default_rng(0)
    dims = ("init", "lead", "member", "lat", "lon")
    made = {"t": (dims, rng.random((3, 4, MEMBERS, 7, 8))), "orog": (("lat", "lon"), rng.random((7, 8)))}
    hours = np.arange("2020-01-01", "2020-01-04", dtype="M8[D]").astype("M8[ns]")
    chunks = {"t": {"chunks": (1, 4, 1, 7, 8)}, "orog": {"chunks": (7, 8)}}
    xr.Dataset(made, {"init": hours}).to_zarr(path, encoding=chunks)
    return path


def shares_members(rank: int, num_ranks: int, path: str, folder: str) -> tuple[int, ...]:
    num_domain = 2 if num_ranks == 4 else 1
    mesh = scidata.init_mesh(domain=num_domain, extra={"ens": num_ranks // num_domain})
    dims: dict[str, Any] = {"sample_dim": ("init", "lead")}
    ds = scidata.open_dataset(path, mesh, shard={"member": "ens", "lat": "domain"}, **dims)
    whole = scidata.open_dataset(path, **dims)
    ds, whole = (scidata.subset(each, [9, 2, 5, 7]) for each in (ds, whole))
    analysis = scidata.subset(scidata.open_dataset(path, mesh, shard={"lat": "domain"}, **dims), [9, 2, 5, 7])
    stats = scidata.statistics(ds)
    assert torch.equal(torch.tensor(stats["t"].mean), torch.tensor(scidata.statistics(whole)["t"].mean))
    normal, alone = ds.normalise(stats), pickle.loads(pickle.dumps(whole)).normalise(stats)
    scores = [
        (scidata.metrics.CRPS(mesh=m, by="lat"), scidata.metrics.CRPS(mesh=m, fair=False, skipna=True),
         scidata.metrics.RMSE(mesh=m, by="member"))
        for m in (mesh, None)
    ]  # fmt: skip
    loader = scidata.DataLoader(normal, 2)
    for batch, want in zip(loader, scidata.DataLoader(alone, 2), strict=True):
        assert batch.dims["t"] == ("batch", "member", "lat", "lon")
        assert torch.equal(batch["t"].full_tensor(), want["t"])
        ens = mesh.get_local_rank("ens")
        sizes = [len(each) for each in np.array_split(np.arange(MEMBERS), num_ranks // num_domain)]
        assert batch["t"].to_local().shape[1] == sizes[ens]
        truth = scidata.collate([analysis[i] for i in batch.index])["t"][:, 0]  # over the domain alone
        for (crps, biased, rmse), sample, came in ((scores[0], batch, truth), (scores[1], want, truth.full_tensor())):
            crps.update({"t": sample["t"]}, scidata.Sample({"t": came}, dims={"t": DIMS}, index=sample.index))
            biased.update({"t": sample["t"]}, scidata.Sample({"t": came}, dims={"t": DIMS}, index=sample.index))
            rmse.update({"t": sample["t"] * 2}, sample)
        state = loader.state_dict()
    for one, other in zip(*scores, strict=True):
        assert torch.equal(one.compute()["t"], other.compute()["t"])
    loader.load_state_dict(state)
    assert next(iter(loader), None) is None
    first = ds.datasets[0]
    times = {"init": 3, "lead": 4}
    with scidata.create(f"{folder}/{num_ranks}.zarr", like=first, fields=["t"], times=times) as writer:
        for index in range(len(first)):
            writer[index] = {"t": first[index]["t"]}
    assert np.array_equal(xr.open_zarr(f"{folder}/{num_ranks}.zarr").t.values, xr.open_zarr(path).t.values)
    decoded = []
    for decode in ("rank", "node"):  # all members in one, so that ranks of ens read the same
        truth = scidata.open_dataset(path, mesh, fields=["t"], shard={"lat": "domain"}, decode=decode, **dims)
        loader = scidata.DataLoader(truth, 2)
        assert all(torch.equal(batch["t"].full_tensor()[1], whole.datasets[0][batch.index[1]]["t"]) for batch in loader)
        dist.barrier()
        decoded.append(loader.stats()["bytes_decoded"])
    return tuple(decoded)


DIMS = ("batch", "lat", "lon")


@pytest.mark.slow_for("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_of_an_axis_share_members(forecasts: str, tmp_path: Any, num_ranks: int) -> None:
    found = np.array(run_ranks(shares_members, num_ranks, forecasts, str(tmp_path)))
    each, together = found.sum(0)
    assert together == each / num_ranks


def trains(rank: int, num_ranks: int, path: str) -> None:
    mesh = scidata.init_mesh(domain=2 if num_ranks == 4 else 1, extra={"ens": 2 if num_ranks == 4 else num_ranks})
    ds = scidata.open_dataset(path, mesh, shard={"member": "ens", "lat": "domain"}, sample_dim=("init", "lead"))
    alone = scidata.open_dataset(path, sample_dim=("init", "lead"))
    losses, models = [], []
    for data, on in ((ds, mesh), (alone, None)):
        torch.manual_seed(0)
        model = scidata.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1).double(), on)
        x = data[3]["t"]
        y, truth = model(x.unsqueeze(1))[:, 0], x.mean(0)
        spread = (y.unsqueeze(0) - y.unsqueeze(1)).abs().mean((0, 1))
        loss = ((y - truth).abs().mean(0) - spread / 2).mean()
        loss.backward()
        losses.append(loss)
        models.append(model)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-14)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_loss_over_members_has_the_gradient_of_one_process(forecasts: str, num_ranks: int) -> None:
    run_ranks(trains, num_ranks, forecasts)

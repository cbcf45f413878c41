"""A sample in a user's hands on several ranks: steps, predictions, channels; each rank's part with its halo."""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.testing import run_ranks

STEPS = {"u": (-1, 0, 1), "solar": (0, 1)}


@pytest.fixture(scope="module")
def weather(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("weather") / "a.zarr")
    rng = np.random.default_rng(0)
    u, solar = rng.random((9, 2, 7, 8)), rng.random((9, 7, 8))
    made = {"u": (("time", "level", "lat", "lon"), u), "solar": (("time", "lat", "lon"), solar)}
    xr.Dataset(made, {"level": [500, 850]}).to_zarr(path)
    return path


def uses_steps(rank: int, num_ranks: int, path: str) -> None:
    grid = num_ranks == 4
    mesh = scidata.init_mesh(**({"domain": (2, 2), "names": ("dp", "h", "w")} if grid else {"domain": num_ranks}))
    shard = {"lat": "h", "lon": "w"} if grid else {"lat": "domain"}
    options: dict[str, Any] = {"steps": STEPS, "halo": {"lat": 1, "lon": (0, 2)}, "periodic": ("lon",)}
    ds = scidata.open_dataset(path, mesh, shard=shard, **options)
    whole = scidata.open_dataset(path, steps=STEPS)
    normal = ds.normalise(scidata.statistics(whole, by="level"))
    rmse, alone = (scidata.metrics.RMSE(by="level", mesh=m) for m in (mesh, None))
    for batch, want in zip(scidata.DataLoader(ds, 2), scidata.DataLoader(whole, 2, shuffle=False), strict=True):
        step, single = batch.step(1), want.step(1)
        assert torch.equal(step["u"].full_tensor(), single["u"])
        halo = batch["u"].local_with_halo()[:, 2]
        assert torch.equal(step["u"].local_with_halo(), halo)
        assert step["u"].halo.keys() == {2, 3}
        picked: dict[str, Any] = {"fields": ["u", "solar"], "steps": {"u": (1, -1), "solar": 0}}
        x = batch.stack(**picked)
        assert torch.equal(x.full_tensor(), want.stack(**picked))
        assert torch.equal(x.local_with_halo()[:, :2], halo)
        made, plain = (each.replace({"u": each["u"][:, 1] / 2}) for each in (batch, want))
        assert made.dims["u"] == ("batch", "level", "lat", "lon")
        rmse.update({"u": made["u"]}, step)
        alone.update({"u": plain["u"]}, single)
        output = normal.denormalise({"u": made["u"]})["u"]
        torch.testing.assert_close(output, normal.denormalise(made)["u"])
        found = normal.assemble(normal.read_local(batch.index[0]), index=batch.index[0]).step(1)
        torch.testing.assert_close(normal.denormalise(found)["u"].local_with_halo(), halo[0])
    assert torch.equal(rmse.compute()["u"], alone.compute()["u"])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_steps_keep_halos_and_metrics_by_level(weather: str, num_ranks: int) -> None:
    run_ranks(uses_steps, num_ranks, weather)

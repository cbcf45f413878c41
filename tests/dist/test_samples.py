"""A sample in a user's hands on several ranks: steps, predictions, channels; each rank's part with its halo."""

from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import ConfigError
from scidata.testing import run_ranks
from tests.dist._workers import forked

STEPS = {"u": (-1, 0, 1), "solar": (0, 1)}


@pytest.fixture(scope="module")
def weather(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("weather") / "a.zarr")
    rng = np.random.default_rng(0)
    u, solar = rng.random((9, 2, 7, 8)), rng.random((9, 7, 8))
    made = {"u": (("time", "level", "lat", "lon"), u), "solar": (("time", "lat", "lon"), solar)}
    times = np.arange("2015-01-01", "2015-01-10", dtype="M8[D]").astype("M8[ns]")
    xr.Dataset(made, {"level": [500, 850], "time": times}).to_zarr(path)
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


@pytest.fixture(scope="module")
def cars(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("cars")
    for number in range(4):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["points"] = np.random.default_rng(number).random((20 + number, 3))
    scidata.partition(f"{folder}/*.h5", f"{folder}/cars.store", kind="points")
    return f"{folder}/cars.store"


def goes_through_loaders(rank: int, num_ranks: int, weather: str, cars: str) -> None:
    for mesh in (scidata.init_mesh(domain=num_ranks), *([None] * (num_ranks == 1))):
        shard = None if mesh is None else {"lat": "domain"}
        grid = scidata.open_dataset(weather, mesh, shard=shard, steps=(0, 1), coords=True)
        store = scidata.open_dataset(cars, mesh)
        for ds in (grid, scidata.subset(scidata.concat(grid, grid), [9, 2, 5]), store, scidata.subset(store, [3, 1])):
            is_store = "pos" in ds.fields
            loaders: list[Any] = [
                scidata.DataLoader(ds, 2, num_workers=1, workers="process", multiprocessing_context=forked()),
                *[
                    torch.utils.data.DataLoader(
                        ds, size, num_workers=n, collate_fn=fn, multiprocessing_context=forked() if n else None
                    )
                    for n in (0, 1)
                    for size, fn in ((None, scidata.collate), (None, None), (2, None), (2, scidata.collate))
                    if not is_store or (fn is not None and (size is None or n == 0 or mesh is None))
                ],
            ]
            for loader in loaders:
                item = next(iter(loader))
                if type(item) is dict and not hasattr(ds, "reader"):
                    with pytest.raises(ConfigError, match=r"collate_fn=scidata\.collate, which keeps them"):
                        ds.assemble(item)
                    continue
                sample = ds.assemble(item)
                assert isinstance(sample, scidata.Sample)
                numbers = [0, 1] if sample.dims[ds.fields[0]][:1] == ("batch",) or "batch" in sample else 0
                want = scidata.collate([ds[0], ds[1]]) if numbers else ds[0]
                assert all(torch.equal(sample[name], want[name]) for name in ds.fields)
                assert sample.dims == want.dims
                if sample.index is None:  # torch's own collate function leaves names and tensors alone
                    assert loader.num_workers == 0 or mesh is None
                    continue
                assert sample.index == numbers
                assert list(map(str, sample.source)) == list(map(str, want.source))
                assert is_store or np.array_equal(sample.coords["time"], want.coords["time"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_loader_gives_samples(weather: str, cars: str, num_ranks: int) -> None:
    run_ranks(goes_through_loaders, num_ranks, weather, cars)

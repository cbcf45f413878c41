"""Samples as forecasts need them, on ranks: steps by field over a gap, read every way there is, as xarray has them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import scidata
from scidata.testing import run_ranks
from tests._collectives import Collectives

NUM, GAP = 14, 6  # times, and after how many of them one is missing
STEPS = {"u": (-1, 0, 2), "t2m": (0,), "*": (1, 2)}
SAMPLES = [t for t in range(1, NUM - 2) if not {t, t + 1, t + 2} & {GAP}]  # no window has rows on both sides
FIELDS = ("u", "t2m", "forcing", "orography")


def whole() -> xr.Dataset:
    rng = np.random.default_rng(0)
    every = np.datetime64("2015-01-01", "ns") + np.arange(NUM + 1) * np.timedelta64(6, "h")
    dims = {
        "u": ("time", "level", "lat", "lon"), "t2m": ("time", "lat", "lon"), "forcing": ("time", "lat", "lon"),
        "orography": ("lat", "lon"),
    }  # fmt: skip
    sizes = {"time": NUM, "level": 2, "lat": 9, "lon": 6}
    fields = {name: (own, rng.random([sizes[d] for d in own], np.float32)) for name, own in dims.items()}
    coords = {"time": np.delete(every, GAP), "level": [500, 850], "lat": np.arange(9.0), "lon": np.arange(6.0)}
    return xr.Dataset(fields, coords)


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("forecast") / "a.zarr"
    chunks = {4: (4, 1, 9, 6), 3: (3, 5, 6), 2: (5, 6)}
    made = whole()
    packed = {name: {"chunks": chunks[made[name].ndim], "compressors": (zarr.codecs.ZstdCodec(),)} for name in FIELDS}
    made.to_zarr(path, encoding=packed)
    return str(path)


def wanted(data: xr.Dataset, index: int) -> dict[str, np.ndarray]:
    """Return a sample as xarray has it."""
    at = SAMPLES[index]
    rows = {"u": [at - 1, at, at + 2], "t2m": at, "forcing": [at + 1, at + 2]}
    found = {name: data[name].values[rows[name]] for name in rows}  # time comes first
    return found | {"orography": data["orography"].values}


def check(batch: Any, data: xr.Dataset, **scale: Any) -> None:
    """Compare all of a batch, and the halo that this rank has, with the whole."""
    for name in FIELDS:
        want = np.stack([wanted(data, i)[name] for i in batch.index])
        assert np.array_equal(batch[name].full_tensor().numpy(), want), name
        part = batch[name]
        (place,) = (k for k, d in enumerate(batch.dims[name]) if d == "lat")
        first = sum(shape[place] for shape in part.sharding_shapes()[0][: batch_rank(part)])
        rows = range(max(0, first - 1), min(9, first + part.to_local().shape[place] + 1))
        assert np.array_equal(part.local_with_halo().numpy(), want.take(rows, place)), name


def batch_rank(part: Any) -> int:
    return part.device_mesh.get_local_rank()


WAYS: tuple[dict[str, Any], ...] = (
    {}, {"decode": "node"}, {"pool_bytes": 0}, {"pool_bytes": 1 << 20}, {"cache_dir": True},
    {"cache_dir": True, "decode": "node"},
)  # fmt: skip


def every_way(rank: int, num_ranks: int, path: str, cache: str, dp: int) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=-1, device="cpu")
    data = whole()
    for way, shuffle in itertools.product(WAYS, (True, "blocks")):
        options = way | ({"cache_dir": cache} if "cache_dir" in way else {})
        ds = scidata.open_dataset(
            path, mesh, fields=FIELDS, steps=STEPS, shard={"lat": "domain"}, halo={"lat": 1}, **options
        )
        assert len(ds) == len(SAMPLES)
        sampler = scidata.DistributedSampler(ds, mesh, shuffle=shuffle, seed=3)
        loader = scidata.DataLoader(ds, batch_size=2, sampler=sampler)
        batches = iter(loader)
        seen = []
        for _ in range(2):
            batch = next(batches)
            check(batch, data)
            seen.append(batch.index)
        state = loader.state_dict()
        rest = [batch.index for batch in batches]
        again = scidata.DataLoader(
            ds, batch_size=2, sampler=scidata.DistributedSampler(ds, mesh, shuffle=shuffle, seed=3)
        )
        again.load_state_dict(state)
        for batch, indices in zip(again, rest, strict=True):
            check(batch, data)
            assert batch.index == indices
        assert loader.stats()["bytes_static"] == ds.static_nbytes > 0
        own = sorted(itertools.chain(*seen, *rest))
        every = [None] * num_ranks
        torch.distributed.all_gather_object(every, own)
        assert sorted(set(itertools.chain(*every))) == list(range(len(SAMPLES)))
        ds.close()
    mesh_only = {"shard": {"lat": "domain"}, "halo": {"lat": 1}, "fields": FIELDS, "steps": STEPS, "coords": True}
    ds = scidata.open_dataset(path, mesh, **mesh_only)
    made_of_others(ds, scidata.open_dataset(path, mesh, **mesh_only, pool_bytes=0), data)
    normalised(ds, data)
    coordinates(ds, data)
    stacked(ds, data)


def made_of_others(ds: Any, other: Any, data: xr.Dataset) -> None:
    """Of a union, numbers beyond the first data set are those of the second."""
    both = scidata.mix({"a": scidata.subset(ds, range(1, len(ds))), "b": other}, {"a": 1, "b": 2})
    for batch in scidata.DataLoader(both, batch_size=3, shuffle=True):
        for k, index in enumerate(batch.index):
            want = wanted(data, index + 1 if index < len(ds) - 1 else index - len(ds) + 1)
            for name in FIELDS:
                assert np.array_equal(batch[name].full_tensor()[k].numpy(), want[name]), (name, index)


def normalised(ds: Any, data: xr.Dataset) -> None:
    stats = scidata.statistics(ds)
    normal = ds.normalise(stats)
    for batch in scidata.DataLoader(normal, batch_size=2):
        back = normal.denormalise(batch)
        for k, index in enumerate(batch.index):
            for name, want in wanted(data, index).items():
                found = batch[name].full_tensor()[k].numpy()
                assert np.allclose(found * stats[name].std + stats[name].mean, want, atol=1e-5), name
                assert np.allclose(back[name].full_tensor()[k].numpy(), want, atol=1e-5), name


def coordinates(ds: Any, data: xr.Dataset) -> None:
    """Coordinates of each field are those of its own steps, in xarray too."""
    at = {name: [SAMPLES[3] + step for step in STEPS.get(name, STEPS["*"])] for name in ("u", "t2m", "forcing")}
    times = data["time"].values
    sample, batch = ds[3], scidata.collate([ds[3], ds[4]])
    assert np.array_equal(sample.coords["time"], times[SAMPLES[3] - 1 : SAMPLES[3] + 3])
    assert np.array_equal(sample.coords["u_time"], times[at["u"]])
    assert sample.coords["t2m_time"] == times[at["t2m"][0]]
    assert np.array_equal(batch.coords["forcing_time"], [times[at["forcing"]], times[[t + 1 for t in at["forcing"]]]])
    found = sample.to_xarray()
    assert found["u"].dims == ("u_time", "level", "lat", "lon")
    assert found["t2m"].dims == ("lat", "lon")
    assert "time" not in found.coords
    rows = found["lat"].values.astype(int)
    for name, own in at.items():
        want = data[name].isel(lat=rows, time=own if len(own) > 1 else own[0])
        assert np.array_equal(found[name].values, want.values)
        assert np.array_equal(found[f"{name}_time"].values, want["time"].values)
    assert batch.to_xarray()["u_time_of_sample"].shape == (2, 3)


def stacked(ds: Any, data: xr.Dataset) -> None:
    """Channels are torch.cat's of the whole; no rank talks to another, and the halo stays."""
    order = ("orography", "u", "t2m", "forcing")
    batch = next(iter(scidata.DataLoader(ds, batch_size=2)))
    channels = ds.channels(order)
    assert channels == batch.channels(order) == ds[0].channels(order)
    with Collectives() as found:
        x = batch.stack(order)
        parts = channels.unstack(x)
    assert not found.names
    whole = torch.cat([torch.from_numpy(_flat(data, batch.index, name)) for name in order], dim=1)
    assert torch.equal(x.full_tensor(), whole)
    held = torch.cat([_leading(batch[name].local_with_halo()) for name in order], dim=1)
    assert torch.equal(x.local_with_halo(), held)
    for name in order:
        assert torch.equal(parts[name].full_tensor(), batch[name].full_tensor())
        assert parts[name].placements == batch[name].placements
    assert batch.replace(parts).dims == batch.dims
    grads = batch.replace({"u": batch["u"].clone().requires_grad_()})
    (grads.stack(order) * 2).sum().backward()
    assert torch.equal(grads["u"].grad.full_tensor(), torch.full(grads["u"].shape, 2.0))
    assert torch.equal(ds[1].stack(order).full_tensor(), torch.from_numpy(_flat_of_all(data, order)))


def _flat(data: xr.Dataset, indices: list[int], name: str) -> np.ndarray:
    return np.stack([wanted(data, index)[name].reshape(-1, 9, 6) for index in indices])


def _flat_of_all(data: xr.Dataset, order: tuple[str, ...]) -> np.ndarray:
    return np.concatenate([wanted(data, 1)[name].reshape(-1, 9, 6) for name in order])


def _leading(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(len(part), -1, *part.shape[-2:])


@pytest.mark.slow_for("4-2", "2-1")
@pytest.mark.filterwarnings("ignore:.*a gap in steps of 6 hours")
@pytest.mark.parametrize(("num_ranks", "dp"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_every_way_of_reading_gives_the_same_steps(store: str, tmp_path: Path, num_ranks: int, dp: int) -> None:
    run_ranks(every_way, num_ranks, store, str(tmp_path), dp)


MEMBERS, HOURS, HOLE = 4, 10, 5  # members, times of each, and before which of them one is missing


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("ensemble") / "a.zarr")
    made = members()
    zstd = {"compressors": (zarr.codecs.ZstdCodec(),)}
    made.to_zarr(path, encoding={"u": {"chunks": (2, 3, 9, 6)} | zstd, "scale": {"chunks": (2, 9)} | zstd})
    return path


def members() -> xr.Dataset:
    """Forecasts of an ensemble, what came, and what each member, or all, have for good."""
    rng = np.random.default_rng(1)
    time = np.datetime64("2015-01-01", "ns") + np.arange(HOURS + 1) * np.timedelta64(6, "h")
    fields = {
        "u": (("member", "time", "lat", "lon"), rng.random((MEMBERS, HOURS, 9, 6))),
        "truth": (("time", "lat", "lon"), rng.random((HOURS, 9, 6))),
        "scale": (("member", "lat"), rng.random((MEMBERS, 9))),
        "orography": (("lat", "lon"), rng.random((9, 6))),
    }
    return xr.Dataset(fields, {"time": np.delete(time, HOLE), "lat": np.arange(9.0), "lon": np.arange(6.0)})


def an_ensemble(rank: int, num_ranks: int, path: str, cache: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    data, common = members(), {"shard": {"lat": "domain"}, "halo": {"lat": 1}, "fields": list(members())}
    ds = scidata.open_dataset(path, mesh, **common)
    assert (ds.reader.sample_dims, len(ds), ds.static_fields) == (("time",), HOURS, ("scale", "orography"))
    crps = scidata.metrics.CRPS(mesh=mesh)
    for batch in scidata.DataLoader(ds, batch_size=3, sampler=scidata.DistributedSampler(ds, mesh, pad=False)):
        assert batch.dims["u"] == ("batch", "member", "lat", "lon")
        assert np.array_equal(batch["u"].full_tensor().numpy(), data["u"].values[:, batch.index].swapaxes(0, 1))
        crps.update({"u": batch["u"]}, {"u": batch["truth"]}, index=batch.index)
    u, truth = data["u"].values, data["truth"].values
    apart = np.abs(u[:, None] - u[None]).sum(axis=(0, 1)) / (MEMBERS * (MEMBERS - 1))
    want = (np.abs(u - truth).mean(axis=0) - apart / 2).mean()
    assert abs(crps.compute()["u"] - want) < 1e-12
    starts = [t for t in range(HOURS - 1) if t + 1 != HOLE]
    ways: tuple[tuple[dict[str, Any], Any], ...] = (
        ({}, "blocks"), ({"decode": "node"}, "blocks"), ({"cache_dir": cache}, False),
        ({"cache_dir": cache, "decode": "node"}, "blocks"), ({"pool_bytes": 0}, True),
    )  # fmt: skip
    for way, shuffle in ways:
        each = scidata.open_dataset(path, mesh, sample_dim=("member", "time"), steps={"u": (0, 1)}, **common, **way)
        assert (len(each), each.static_fields) == (MEMBERS * len(starts), ("orography",))
        sampler = scidata.DistributedSampler(each, mesh, shuffle=shuffle)
        loader = scidata.DataLoader(each, batch_size=2, sampler=sampler)
        for batch in loader:
            for k, index in enumerate(batch.index):
                member, at = divmod(index, len(starts))
                now = starts[at]
                found = {name: batch[name].full_tensor()[k].numpy() for name in each.fields}
                assert np.array_equal(found["u"], u[member, now : now + 2]), (index, way)
                assert np.array_equal(found["truth"], truth[now])
                assert np.array_equal(found["scale"], data["scale"].values[member])
                assert np.array_equal(found["orography"], data["orography"].values)
                first = each.reader.partition.segments("lat", {"domain": rank})[0]
                held = slice(first.start, first.start + first.count)
                assert np.array_equal(batch["u"].local_with_halo()[k].numpy(), u[member, now : now + 2, held])
        if "cache_dir" in way:
            again = scidata.open_dataset(
                path, mesh, sample_dim=("member", "time"), steps={"u": (0, 1)}, **common, **way
            )
            later = scidata.DataLoader(again, sampler=scidata.DistributedSampler(again, mesh, shuffle=shuffle))
            for _ in later:
                pass
            assert later.stats()["bytes_fetched"] == 0


@pytest.mark.filterwarnings("ignore:.*a gap in steps of 6 hours")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_members_are_a_dim_or_samples_of_their_own(ensemble: str, tmp_path: Path, num_ranks: int) -> None:
    for file in Path(ensemble).rglob("*"):
        os.utime(file, (1e9, 1e9))
    run_ranks(an_ensemble, num_ranks, ensemble, str(tmp_path))

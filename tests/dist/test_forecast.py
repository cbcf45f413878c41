"""Samples as forecasts need them, on ranks: steps by field over a gap, read every way there is, as xarray has them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import scidata
from scidata.testing import run_ranks

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
    found = {name: data[name].isel(time=rows[name]).values for name in rows}
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
        own = sorted(itertools.chain(*seen, *rest))
        every = [None] * num_ranks
        torch.distributed.all_gather_object(every, own)
        assert sorted(set(itertools.chain(*every))) == list(range(len(SAMPLES)))
        ds.close()


@pytest.mark.filterwarnings("ignore:.*a gap in steps of 6 hours")
@pytest.mark.parametrize(("num_ranks", "dp"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_every_way_of_reading_gives_the_same_steps(store: str, tmp_path: Path, num_ranks: int, dp: int) -> None:
    run_ranks(every_way, num_ranks, store, str(tmp_path), dp)

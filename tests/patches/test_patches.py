"""Patches as samples: batches, orders, places, halos; a share of the random trials."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import scidata
from scidata import Patches
from scidata.errors import ConfigError, ShardLayoutError, UnknownNameError
from scidata.testing import make_grid, run_ranks
from tests.patches import trials

HALF = {"latitude": 8, "longitude": 9}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("patches") / "grid.zarr")
    return path, make_grid(path, num_times=5, num_lat=16, num_lon=18, chunks=(1, 1, 8, 6))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_trials(tmp_path, num_ranks):
    seeds = list(range(40 * num_ranks, 40 * num_ranks + 3))  # ``python -m tests.patches`` has more
    for seed in seeds:
        trials.make_file(str(tmp_path), seed)
    assert run_ranks(trials.run, num_ranks, str(tmp_path), seeds) == [12] * num_ranks


def _of_batches(rank, num_ranks, path):
    """Batches, convolutions and gradients of patches, beside single ones and one process."""
    mesh = scidata.init_mesh(domain=num_ranks)
    common = {"fields": ["u"], "shard": {"latitude": "domain"}, "isel": {"level": 0}}
    patch = Patches(HALF, num=3)
    ds = scidata.open_dataset(path, mesh, patch=patch, halo={"latitude": 2, "longitude": 1}, coords=True, **common)
    ds.set_epoch(4)
    loader = scidata.DataLoader(ds, batch_size=4, shuffle=False, device="cpu")
    loader.set_epoch(4)
    weight = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    for batch in loader:
        singles = [ds[i] for i in batch.index]
        assert torch.equal(batch["u"].full_tensor(), torch.stack([s["u"].full_tensor() for s in singles]))
        lon = torch.stack([s.coords["longitude"] for s in singles])
        assert torch.equal(torch.as_tensor(batch.coords["longitude"]), lon)
        stacked = scidata.collate(singles)
        assert torch.equal(stacked["u"].full_tensor(), batch["u"].full_tensor())
        widths = batch["u"].halo
        held = batch["u"].local_with_halo()
        for row, single in enumerate(singles):
            alone, own = single["u"].local_with_halo(), single["u"].halo
            cut = []
            for dim in (0, 1):  # the batch has the halo that all of its patches have
                first = own[dim].before - widths[dim + 1].before if dim == 1 or rank == 0 else 0
                cut.append(slice(first, first + held.shape[dim + 1]))
            assert torch.equal(alone[tuple(cut)], held[row])
        x = batch["u"].unsqueeze(1)
        whole = x.full_tensor()
        wanted = F.conv2d(whole, weight, padding=1)  # zeros beyond the patch, whoever computes it
        assert torch.allclose(F.conv2d(x, weight, padding=1).full_tensor(), wanted, atol=1e-5)
        twice = (2 * batch["u"]).local_with_halo()
        assert torch.equal(twice, 2 * held)
    w = batch["u"].clone().requires_grad_()
    if any(h.before or h.after for h in (w * 1).halo.values()):
        with pytest.raises(ShardLayoutError, match="beyond the edges of a patch"):
            (w * 1).local_with_halo()
    return [ds.origin(i) for i in range(len(ds))]


def test_batches_and_convolutions(grid):
    places = [run_ranks(_of_batches, n, grid[0]) for n in (1, 2, 3)]
    assert all(each == places[0][0] for found in places for each in found)


def _resumed(rank, num_ranks, path, domain, state, workers):
    """Return what is read from a state on: places by sample; and the state after two batches."""
    mesh = scidata.init_mesh(domain=domain)
    ds = scidata.open_dataset(path, mesh, fields=["u"], patch=Patches(HALF, num=2), shard={"latitude": "domain"})
    sampler = scidata.DistributedSampler(ds, mesh, seed=3)
    loader = scidata.DataLoader(ds, batch_size=1, sampler=sampler, num_workers=1, workers=workers)
    if state is None:
        loader.set_epoch(2)
    else:
        loader.load_state_dict(state)
    found = {}
    for step, batch in enumerate(loader):
        full = batch["u"].full_tensor()
        found[batch.index[0]] = full.double().sum().item()
        if state is None and step == 1:
            return found, loader.state_dict()
    return found, None


def test_resumed_on_other_ranks(grid):
    first = run_ranks(_resumed, 2, grid[0], 1, None, "thread")
    seen = {k: v for found, _ in first for k, v in found.items()}
    state = first[0][1]
    results = [run_ranks(_resumed, n, grid[0], d, state, w) for n, d, w in ((1, 1, "process"), (2, 2, "thread"))]
    for ranks in results:
        rest = {k: v for found, _ in ranks for k, v in found.items()}
        assert not rest.keys() & seen.keys()
        assert sorted(rest.keys() | seen.keys()) == list(range(10))
    ds = scidata.open_dataset(grid[0], fields=["u"], patch=Patches(HALF, num=2))
    ds.set_epoch(2)
    for k, v in (seen | {k: v for found, _ in results[1] for k, v in found.items()}).items():
        assert ds[k]["u"].double().sum().item() == v


def test_an_iterator_stays_in_its_epoch(grid):
    ds = scidata.open_dataset(grid[0], fields=["u"], patch=HALF)
    both = scidata.concat(ds, ds)
    for data in (ds, both):
        loader = scidata.DataLoader(data, batch_size=None, shuffle=False, prefetch_factor=2, num_workers=1)
        loader.set_epoch(0)
        batches = iter(loader)
        first = next(batches)
        loader.set_epoch(1)
        found = [first, *batches]
        ds.set_epoch(0)
        assert all(torch.equal(sample["u"], ds[i % 5]["u"]) for i, sample in enumerate(found))


def test_stock_loader_workers_pickles_and_combinations(grid):
    path = grid[0]
    ds = scidata.open_dataset(path, fields=["u"], patch=HALF, coords=True)
    again = pickle.loads(pickle.dumps(ds))
    assert torch.equal(again[3]["u"], ds[3]["u"])
    assert (
        again.fingerprint
        == ds.fingerprint
        != scidata.open_dataset(path, fields=["u"], patch=Patches(HALF, seed=1)).fingerprint
    )
    ds = scidata.open_dataset(path, scidata.init_mesh(domain=1), fields=["u"], patch=HALF, coords=True)
    stock = torch.utils.data.DataLoader(ds, batch_size=2, num_workers=1, collate_fn=scidata.collate,
                                        multiprocessing_context="spawn")  # fmt: skip
    for at, local in enumerate(stock):
        batch = ds.assemble(local)
        assert torch.equal(batch["u"][0], ds[2 * at]["u"])
        if at == 0:
            assert torch.equal(batch.coords["latitude"][1], ds[1].coords["latitude"])
    some = scidata.subset(scidata.concat(ds, ds), [7, 1])
    assert torch.equal(some[0]["u"], ds[2]["u"])
    assert some[0].index == 0
    stats = scidata.statistics(ds, by="level")
    whole = scidata.statistics(scidata.open_dataset(path, fields=["u"]), by="level")
    assert np.array_equal(stats["u"].mean, whole["u"].mean)
    normal = ds.normalise(stats)
    assert torch.allclose(normal.denormalise(normal[1])["u"], ds[1]["u"], atol=1e-4)
    with pytest.raises(ConfigError, match="statistics of 'u' are by 'latitude', along which patches lie anywhere"):
        ds.normalise(scidata.statistics(ds, by="latitude"))
    assert ds.sample_keys("time").tolist() == scidata.open_dataset(path).sample_keys("time").tolist()
    assert ds.blocks().tolist() == list(range(5))


def test_weights_draw_in_proportion(grid):
    weights = np.zeros((16, 18))
    weights[3, 4] = 1
    ds = scidata.open_dataset(grid[0], fields=["u"], patch=Patches(HALF, num=200, weights=weights))
    places = [ds.origin(i) for i in range(len(ds))]
    assert all(p["latitude"] <= 3 < p["latitude"] + 8 and p["longitude"] <= 4 < p["longitude"] + 9 for p in places)
    assert len({(p["latitude"], p["longitude"]) for p in places}) == 4 * 5
    weights = np.ones((16, 18))
    weights[8:] = 3
    ds = scidata.open_dataset(grid[0], fields=["u"], patch=Patches({"latitude": 8, "longitude": 18}, num=2000,
                              align={"latitude": 8}, weights=weights))  # fmt: skip
    low = np.mean([ds.origin(i)["latitude"] == 8 for i in range(4000)])
    assert abs(low - 0.75) < 0.03


def test_bytes_fetched_with_and_without_alignment(grid):
    path = grid[0]
    size = {"latitude": 8, "longitude": 6}
    fetched = {}
    for align in (1, "chunk"):
        ds = scidata.open_dataset(path, fields=["u"], patch=Patches(size, num=4, align=align))
        plans = [ds.plan(i) for i in range(len(ds))]
        fetched[align] = sum(plan.bytes_fetched for plan in plans) / sum(plan.bytes_wanted for plan in plans)
        assert {f"{plan.num_chunks}" for plan in plans} == {"3"} if align == "chunk" else True
    whole = scidata.open_dataset(path, fields=["u"]).plan(0)
    encoded = whole.bytes_fetched / whole.bytes_wanted
    assert abs(fetched["chunk"] / encoded - 1) < 0.02  # each byte once
    assert fetched[1] > 2.5 * fetched["chunk"]


def test_patches_of_a_sample_are_decoded_once(tmp_path):
    path = str(tmp_path / "whole.zarr")
    make_grid(path, num_times=4, num_lat=16, num_lon=18, chunks=(1, 3, 16, 18))
    one = scidata.open_dataset(path, fields=["u"]).plan(0).bytes_fetched
    asked = Patches(HALF, num=4)
    for options, times in [
        ({"pool_bytes": 0}, (16, 16)),
        ({}, (4, 0)),
        ({"cache_dir": str(tmp_path / "cache")}, (4, 0)),
    ]:
        ds = scidata.open_dataset(path, fields=["u"], patch=asked, **options)
        for epoch in range(2):
            loader = scidata.DataLoader(ds, batch_size=2, shuffle=False, num_workers=1)
            loader.set_epoch(epoch)
            sums = [float(batch["u"].double().sum()) for batch in loader]
            assert loader.stats()["bytes_fetched"] == pytest.approx(times[epoch] * one, rel=0.01)
            assert sums == [float(sum(ds[i]["u"].double().sum() for i in (k, k + 1))) for k in range(0, 16, 2)]
    few = scidata.open_dataset(path, fields=["u"], patch=HALF)
    assert not few.shared_reads(0)  # one patch of a sample is read by itself


def test_tiles_cover_and_wrap(grid):
    path = grid[0]
    for periodic in ((), "longitude"):
        asked = Patches({"latitude": 7, "longitude": 5}, order="regular", overlap={"latitude": 2, "longitude": 1})
        mesh = scidata.init_mesh(domain=1)
        ds = scidata.open_dataset(path, mesh, fields=["u"], patch=asked, shard={"latitude": "domain"},
                                  halo={"longitude": 1}, periodic=periodic)  # fmt: skip
        starts = sorted({ds.origin(i)["longitude"] for i in range(len(ds))})
        assert starts == ([0, 4, 8, 12, 16] if periodic else [0, 4, 8, 12, 13])
        assert sorted({ds.origin(i)["latitude"] for i in range(len(ds))}) == [0, 5, 9]
        assert len(ds) == 5 * 3 * 5


def test_what_is_refused(grid):
    path = grid[0]
    for patch, error, words in [
        ({"lat": 4}, UnknownNameError, "patch names dimension 'lat', which no field has; did you mean 'latitude'"),
        ({"latitude": 17}, ConfigError, "patch of 'latitude' has 17 rows, and the grid has 16"),
        ({"latitude": 0}, ConfigError, "patch of 'latitude' must be at least 1"),
        ({}, ConfigError, "patch names no dimension"),
        (Patches({"latitude": 5}, order="regular", align=4), ConfigError, "do not cover the 16 rows of 'latitude'"),
        (Patches({"latitude": 5}, weights="u"), ConfigError, "the same in all samples"),
        (Patches({"latitude": 5}, weights=np.ones(3)), ConfigError, r"along latitude have shape \(16,\), not \(3,\)"),
        (Patches({"latitude": 5}, weights=np.zeros(16)), ConfigError, "weights are 0"),
        (Patches({"latitude": 5}, weights=["x"] * 16), ConfigError, "weights must be an array of numbers"),
    ]:
        with pytest.raises(error, match=words):
            scidata.open_dataset(path, patch=patch)
    with pytest.raises(ConfigError, match="leave out steps"):
        scidata.open_dataset(path, patch={"time": 2}, steps=(0, 1))
    with pytest.raises(ConfigError, match=r"epoch=1\.5: expected an integer"):
        scidata.open_dataset(path, patch={"latitude": 5}).set_epoch(1.5)
    with pytest.raises(ConfigError, match="overlap means nothing with order='random'"):
        Patches({"latitude": 5}, overlap=1)
    with pytest.raises(ConfigError, match="overlap of 'latitude' is 5, and a patch has 5 rows"):
        Patches({"latitude": 5}, order="regular", overlap=5)
    with pytest.raises(ConfigError, match="did you mean 'regular'"):
        Patches({"latitude": 5}, order="regula")

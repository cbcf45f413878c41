"""The order that the sampler deals, on meshes of up to 512 ranks (a fake group: no communication)."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from scidata.device_mesh import init_mesh
from scidata.errors import ConfigError
from scidata.loader.sampler import DistributedSampler
from scidata.testing import fake_group


def test_without_a_mesh_every_sample_once_in_an_order_of_seed_and_epoch():
    sampler = DistributedSampler(range(100), seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(100))
    assert first == list(sampler) == list(DistributedSampler(range(100), seed=3))
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(100))
    assert list(sampler) != first
    expected = np.random.default_rng(np.random.SeedSequence([3, 1])).permutation(100)
    assert list(sampler) == expected.tolist()


def test_neighbouring_seeds_do_not_share_orders():
    orders = set()
    for seed in range(4):
        sampler = DistributedSampler(range(20), seed=seed)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
    assert len(orders) == 16


def dealt(num_samples, num_ranks, domain, **options):
    """What each rank gets, by (dp rank, domain rank)."""
    shares = {}
    for rank in range(num_ranks):
        with fake_group(num_ranks, rank=rank):
            mesh = init_mesh(domain=domain)
            sampler = DistributedSampler(range(num_samples), mesh, check=False, **options)
            share = list(sampler)
            assert len(share) == len(sampler)
            shares[tuple(mesh.get_coordinate())] = share
    return shares


@pytest.mark.parametrize("num_samples", [1, 2, 7, 12])
@pytest.mark.parametrize("shuffle", [False, True])
def test_domains_share_and_dp_ranks_take_equal_numbers(num_samples, shuffle):
    shares = dealt(num_samples, 6, 2, shuffle=shuffle, seed=1)
    assert len({len(share) for share in shares.values()}) == 1
    for (dp, _), share in shares.items():
        assert share == shares[dp, 0]
    seen = [index for dp in range(3) for index in shares[dp, 0]]
    assert set(seen) == set(range(num_samples))
    assert len(seen) == -(-num_samples // 3) * 3


def test_drop_last_repeats_nothing():
    shares = dealt(8, 6, 2, drop_last=True)
    seen = [index for dp in range(3) for index in shares[dp, 0]]
    assert len(seen) == len(set(seen)) == 6


def test_unshuffled_order_is_as_in_torch():
    shares = dealt(8, 3, 1, shuffle=False)
    for rank in range(3):
        stock = torch.utils.data.DistributedSampler(range(8), num_replicas=3, rank=rank, shuffle=False)
        assert shares[rank, 0] == list(stock)


def test_hundreds_of_ranks():
    with fake_group(512, rank=511):
        sampler = DistributedSampler(range(1000), init_mesh(domain=(2, 2), extra={"tp": 2}), check=False)
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (64, 63, 16)


def test_looks_like_torchs_sampler():
    sampler = DistributedSampler(range(10), drop_last=True, seed=7)
    stock = torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0, drop_last=True, seed=7)
    assert isinstance(sampler, torch.utils.data.DistributedSampler)
    for name, value in vars(stock).items():
        assert getattr(sampler, name) == value, name
    loader = torch.utils.data.DataLoader(list(range(10)), sampler=sampler, batch_size=3)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(10))


def test_other_names():
    with fake_group(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
        assert DistributedSampler(range(4), mesh, dp="data", check=False).num_replicas == 2
        assert DistributedSampler(range(4), mesh, dp=None, check=False).num_replicas == 1
        with pytest.raises(ConfigError, match="'data' could be the dp axis"):
            DistributedSampler(range(4), mesh)


def test_refusals():
    with pytest.raises(ConfigError, match="empty"):
        DistributedSampler([])
    with pytest.raises(ConfigError, match="seed must not be negative"):
        DistributedSampler(range(3), seed=-1)
    with pytest.raises(ConfigError, match="epoch must not be negative"):
        DistributedSampler(range(3)).set_epoch(-1)
    with fake_group(4), pytest.raises(ConfigError, match="3 samples for 4 dp ranks"):
        DistributedSampler(range(3), init_mesh(), drop_last=True)

"""The order that the sampler deals, on meshes of up to 512 ranks (a fake group: no communication)."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import scidata
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


def begun(count=10, taken=4, **options):
    """A sampler that has dealt some of its entries."""
    sampler = DistributedSampler(range(count), seed=2, **options)
    entries = iter(sampler)
    for _ in range(taken):
        next(entries)
    return sampler


def test_another_epoch_begins_at_its_beginning():
    sampler = begun()
    state = sampler.state_dict()
    sampler.set_epoch(0)  # the one that it is in, as a loop over epochs does after a state was loaded
    assert sampler.state_dict() == state
    sampler.set_epoch(1)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (1, 0)
    resumed = DistributedSampler(range(10), seed=2)
    resumed.load_state_dict(state)
    assert resumed.start == 4
    resumed.set_epoch(1)
    assert resumed.start == resumed.state_dict()["consumed"] == 0
    whole = DistributedSampler(range(10), seed=2)
    whole.set_epoch(1)
    assert list(resumed) == list(whole)
    assert len(list(whole)) == 10


def test_before_its_first_sample_a_resumed_epoch_is_where_it_was():
    state = begun().state_dict()
    assert state["consumed"] == 4
    resumed = DistributedSampler(range(10), seed=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    entries = iter(resumed)
    assert resumed.state_dict() == state
    next(entries)
    assert resumed.state_dict()["consumed"] == 5
    resumed.load_state_dict(state)  # and not where the place before it was
    assert resumed.state_dict() == state


ORDERS = [
    {},
    {"weights": np.arange(10) + 1.0},
    {"weights": np.arange(10) + 2.0},
    {"weights": np.arange(10) + 1.0, "num_samples": 12},
    {"sizes": np.arange(10) % 4 + 1, "group": 2},
    {"sizes": np.arange(10) % 4 + 1, "group": 3},
    {"sizes": np.arange(10) % 3 + 1, "group": 2},
]


@pytest.mark.parametrize("saved", range(len(ORDERS)))
@pytest.mark.parametrize("epoch", [0, 2])
def test_only_the_order_that_was_left_is_gone_on_with(saved, epoch):
    first = begun(**ORDERS[saved])
    first.set_epoch(epoch)
    state = first.state_dict(consumed=4)
    for number, options in enumerate(ORDERS):
        sampler = DistributedSampler(range(10), seed=2, **options)
        sampler.state_dict()  # whose digest of epoch 0 is none of another epoch
        if number == saved:
            sampler.load_state_dict(state)
            assert list(sampler) == first.order().tolist()[4:]
        else:
            with pytest.raises(ConfigError, match=f"another order of epoch {epoch}"):
                sampler.load_state_dict(state)
            assert (sampler.epoch, sampler.start) == (0, 0)


def test_an_order_that_is_not_listed_is_known_by_its_first_entries():
    state = begun(2**40).state_dict()
    other = DistributedSampler(range(2**40), seed=2)
    with pytest.raises(ConfigError, match="another order of epoch 1"):
        other.load_state_dict(state | {"epoch": 1})


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


@pytest.mark.parametrize("count", [1, 2, 7, 9])
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_padding_each_sample_comes_once(count, shuffle):
    samplers = []
    for rank in range(3):
        sampler = scidata.DistributedSampler(range(count), shuffle=shuffle, pad=False)
        sampler.rank, sampler.num_replicas = rank, 3  # as on a mesh of three dp ranks
        sampler.num_samples = sampler._share(0)
        samplers.append(sampler)
    dealt = [list(sampler) for sampler in samplers]
    assert sorted(index for own in dealt for index in own) == list(range(count))
    assert [len(own) for own in dealt] == [len(sampler) for sampler in samplers]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    whole = list(scidata.DistributedSampler(range(count), shuffle=shuffle))
    assert dealt == [whole[rank::3] for rank in range(3)]
    with pytest.raises(ConfigError, match="pad=False keeps each sample"):
        scidata.DistributedSampler(range(count), pad=False, drop_last=True)

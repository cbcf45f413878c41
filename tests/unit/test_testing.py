"""The rank runner itself: results, failures, hangs and deaths all come back."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scidata.testing import RankError, fake_group, run_ranks


class Value:
    def __init__(self, number):
        self.number = number


def summed(rank, num_ranks, value):
    x = torch.full((2,), rank + value.number)
    dist.all_reduce(x)
    assert torch.get_num_threads() == 1
    return x, Value(rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_returns_each_ranks_value(num_ranks):
    results = run_ranks(summed, num_ranks, Value(10))
    for rank, (x, value) in enumerate(results):
        assert x.tolist() == [sum(range(num_ranks)) + 10 * num_ranks] * 2
        assert value.number == rank


def raises_on_one(rank, num_ranks):
    if rank == 1:
        raise ValueError("not on my watch")
    dist.barrier()


def test_a_traceback_comes_back_with_its_rank():
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback[\s\S]*raises_on_one[\s\S]*not on my watch") as e:
        run_ranks(raises_on_one, 2)
    assert e.value.rank == 1


def dies(rank, num_ranks):
    if rank == 0:
        os._exit(7)


def test_a_death_comes_back():
    with pytest.raises(RankError, match="rank 0 of 2: ended with exit code 7"):
        run_ranks(dies, 2)


def hangs(rank, num_ranks):
    if rank == 1:
        time.sleep(1000)


def test_a_hang_comes_back_with_its_stack():
    with pytest.raises(RankError, match=r"rank 1 of 2: hung[\s\S]* in hangs"):
        run_ranks(hangs, 2, timeout=3)


def waits_for_the_other(rank, num_ranks):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def test_a_collective_gives_up_before_the_deadline():
    with pytest.raises(RankError, match=r"rank 0 of 2: Traceback[\s\S]*dist.barrier"):
        run_ranks(waits_for_the_other, 2, timeout=4)


def no_group(rank, num_ranks):
    return dist.is_initialized()


def test_without_a_group():
    assert run_ranks(no_group, 2, backend=None) == [False, False]


def test_local_functions_are_refused():
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda rank, num_ranks: None, 1)


def test_fake_group_shows_one_rank_of_many():
    with fake_group(512, rank=257):
        mesh = init_device_mesh("cpu", (128, 4), mesh_dim_names=("dp", "domain"))
        assert mesh.get_local_rank("domain") == 1
    assert not dist.is_initialized()

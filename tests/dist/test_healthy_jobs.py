"""Jobs that are well, though their ranks do not do the same: nobody is ended, held up, or refused for it."""

import contextlib
import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import scidata
from scidata.device_mesh.board import begin, board
from scidata.testing import make_grid, run_ranks
from tests.ports import free_port


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("healthy") / "grid.zarr"
    make_grid(path, num_times=6, num_lat=4, num_lon=4)
    return str(path)


def do_something_else(rank, num_ranks):
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    x = scidata.ShardTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    if rank == 0:
        with contextlib.suppress(IndexError):  # a rank alone has caught this, and is done with it
            x.select(1, 7)
        time.sleep(1.5)
    dist.barrier()
    board._SILENCE = 0.5
    time.sleep(0.5)
    if rank == 1:
        ctypes.PyDLL(None).usleep(2_000_000)  # seen to run, with the GIL
    dist.barrier()
    assert x.sum().item() == 6 * num_ranks


def test_a_caught_error_and_a_rank_that_keeps_the_gil():
    run_ranks(do_something_else, 2)


def iterate(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=1)
    ds = scidata.open_dataset(path, mesh, fields=["u"])
    own = range(rank, 5, num_ranks)
    assert [batch.index for batch in scidata.DataLoader(ds, sampler=own)] == [[i] for i in own]
    loader = scidata.DataLoader(ds, batch_size=1, shuffle=True)
    if rank == 0:
        next(iter(loader))  # a look that the others do not take
    for epoch in range(3):
        loader.set_epoch(epoch)
        for _ in loader:
            dist.all_reduce(torch.ones(1))
    few = scidata.init_mesh(domain=1, dp=num_ranks)["domain"]  # ranks by themselves have loaders of their own
    assert len(list(scidata.DataLoader(scidata.open_dataset(path, few), batch_size=rank + 1))) == 6 // (rank + 1)
    iterator = iter(loader)
    next(iterator)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.6)
    began = time.monotonic()
    iterator.close()  # nobody is there any more to tell
    assert time.monotonic() - began < 3


def test_batches_and_looks_that_one_rank_takes_alone(store):
    run_ranks(iterate, 2, store)


def begin_again(rank, num_ranks, port):
    dist.barrier()
    dist.destroy_process_group()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in (where | {"RANK": rank, "LOCAL_RANK": rank}).items()})
    for turn in range(3):
        scidata.init_mesh(domain=1, timeout=20)
        name = begin().name_for("writer", [0, 1])  # the store may be the same, with the claims of before
        assert begin().base.below(name).claim("block/0", f"{turn}") == f"{turn}"
        dist.barrier()
        dist.destroy_process_group()


def test_process_groups_that_follow_each_other_in_a_process():
    run_ranks(begin_again, 2, free_port(), timeout=40)

"""Real groups from launcher variables, and agreement between ranks."""

import os
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scidata.device_mesh import axis_rank, domain_mesh, init_mesh
from scidata.device_mesh.torch_internals import timeout_of
from scidata.errors import ConfigError
from scidata.loader.sampler import DistributedSampler
from scidata.shard.comm.agreement import check_agreement
from scidata.shard.torch_internals import flatten_mesh
from scidata.testing import run_ranks
from tests.ports import free_port

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def joins(rank, num_ranks, environ):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({k: v.format(rank=rank, num_ranks=num_ranks) for k, v in environ.items()})
    mesh = init_mesh(domain=-1, dp=1, device="cpu", timeout=30)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=domain_mesh(mesh, ("domain",)).get_group())
    assert axis_rank(mesh, "domain") == rank == dist.get_rank()
    if num_ranks > 1:
        groups = [*mesh.get_all_groups(), flatten_mesh(mesh).get_group()]
        assert {timeout_of(group).total_seconds() for group in groups} == {30}
    return x.item()


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_NTASKS": "{num_ranks}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NODELIST": "localhost",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{num_ranks}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "MASTER_ADDR": "127.0.0.1",
}


@RANKS
@pytest.mark.parametrize("environ", [SLURM, OPEN_MPI], ids=["SLURM", "Open MPI"])
def test_ranks_find_each_other(num_ranks, environ):
    environ = environ | {"MASTER_PORT": str(free_port())}
    assert run_ranks(joins, num_ranks, environ, backend=None) == [sum(range(num_ranks))] * num_ranks


def agrees_and_disagrees(rank, num_ranks, domain):
    mesh = init_mesh(domain=domain)
    axes = mesh.mesh_dim_names
    check_agreement("it", {"a": 1, "b": "x" * 1000}, mesh, axes)
    with pytest.raises(ConfigError) as e:
        check_agreement("it", {"a": 1, "b": "é" * rank, "c": rank // 2}, mesh, axes)
    return str(e.value)


@pytest.mark.parametrize(("num_ranks", "domain"), [(2, 2), (2, 1), (3, 3), (4, 2), (4, (2, 2))])
def test_disagreement_is_told_alike_on_all_ranks(num_ranks, domain):
    messages = run_ranks(agrees_and_disagrees, num_ranks, domain)
    assert len(set(messages)) == 1
    assert re.match("ranks disagree about it: b is  on rank 0 and é on rank 1", messages[0])
    if num_ranks == 4:
        assert "c is 0 on ranks 0, 1 and 1 on ranks 2, 3" in messages[0]


def samples(rank, num_ranks):
    mesh = init_mesh(domain=num_ranks)
    first = list(DistributedSampler(range(9), mesh, seed=4))
    with pytest.raises(ConfigError, match="about the sampler: seed is 0 on rank 0 and 1 on rank"):
        iter(DistributedSampler(range(9), mesh, seed=min(rank, 1)))
    for name, group in (("weights", None), ("sizes", 2)):
        with pytest.raises(ConfigError, match=f"about the sampler: {name} is"):
            iter(DistributedSampler(range(9), mesh, group=group, **{name: np.arange(9.0) + rank}))
        options = {name: np.arange(9.0), "group": group} if rank else {}
        with pytest.raises(ConfigError, match=f"about the sampler: {name} is none on rank 0"):
            iter(DistributedSampler(range(9), mesh, **options))
    with pytest.raises(ConfigError, match=r"the number of samples is 9 on ranks? 0(, 1)? and 10 on rank"):
        iter(DistributedSampler(range(10 if rank == num_ranks - 1 else 9), mesh))
    unchecked = DistributedSampler(range(9), mesh, seed=rank, check=False)
    assert len(list(unchecked)) == 9
    return first


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_samplers_agree_on_their_arguments(num_ranks):
    results = run_ranks(samples, num_ranks)
    assert all(result == results[0] for result in results)

"""Ranks that share samples and were told different things, in short epochs: each is named on all, and nobody hangs.

With pauses, and with everything in epochs of 50 steps: ``python -m tests.faults.disagreement``.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import scidata
from scidata.data.local_fields import LocalFields
from scidata.errors import ConfigError, RankFailedError
from scidata.shard.comm import indexed
from scidata.testing import run_ranks
from tests.faults.disagreement import ALIKE, ARGUMENTS, ORDERS, meets, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("disagreement")
    write(made)
    return made


@pytest.mark.slow_for("2-50")
@pytest.mark.parametrize(("num_ranks", "steps"), [(2, 1), (3, 2), (2, 50)])
def test_what_differs_is_named_on_all_ranks(folder, num_ranks, steps):
    names = [*ARGUMENTS, *ALIKE, *ORDERS]
    names = names if steps == 1 else names[::2] if steps == 2 else ["torch's seed", "batch_size", *ALIKE, *ORDERS]
    assert run_ranks(meets, num_ranks, folder, names, steps, 0.0, timeout=120) == [[]] * num_ranks


# -- without a loader of scidata --------------------------------------------------------------------------------------


def told(ds, first, *, part=False):
    """Take samples from one on, by each rank's own number, and use them; return what is said."""
    indices = [first, (first + 1) % len(ds)]
    if part:  # as worker processes of torch's loader hand them out, one by one
        samples = [ds.assemble(LocalFields.of(ds.read_local(i), i, is_whole=False)) for i in indices]
    else:
        samples = next(iter(torch.utils.data.DataLoader(ds, 2, sampler=indices, collate_fn=list)))
    x = torch.stack([sample["u"] * 2 for sample in samples])
    try:
        x.mean()
    except ConfigError as e:
        return str(e)
    return ""


def takes(rank, num_ranks, folder):
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, 6)})
    clouds = scidata.open_dataset(folder / "store", mesh, fields=["u"])
    odd = rank == num_ranks - 1
    for dataset, part in ((ds, False), (ds, True), (clouds, False), (scidata.concat(ds, ds), False)):
        assert told(dataset, 1, part=part) == "", (dataset, part)
        text = told(dataset, 2 if odd else 1, part=part)
        assert f"ranks 0 and {num_ranks - 1}, which share their samples, have taken different ones" in text
        assert "rank 0 sample 1 of" in text
        dist.barrier()  # the groups are of use
    if rank == 0:
        ds[5]["u"].to_local()  # a look by itself
    assert told(ds, 3) == ""
    indexed._SECONDS = 0.3
    if rank == 0:
        ds[5]  # the others have nothing to compare
    x = scidata.scatter_tensor(torch.arange(6.0), 0, mesh["domain"], [Shard(0)])
    assert torch.equal(x.full_tensor(), torch.arange(6.0))


def test_samples_that_are_taken_one_by_one(folder):
    run_ranks(takes, 2, folder)
    run_ranks(takes, 3, folder)


def arrives_late(rank, num_ranks, folder):
    """A rank that takes longer for its first batch than others wait is heard of in their first collective."""
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, 8)})
    loader = scidata.DataLoader(ds, 2 if rank else 1)
    time.sleep(2.5 * rank)
    with pytest.raises(ConfigError, match="batch_size is 1 on rank 0 and 2 on rank 1"):
        for batch in loader:
            batch["u"].mean()


def test_a_rank_that_comes_late(folder):
    run_ranks(arrives_late, 2, folder)


def domains(rank, num_ranks, folder):
    """Ranks along dp have other samples, and the same arguments; one may leave its loop before the others."""
    mesh = scidata.init_mesh(dp=2, domain=2)
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, 7)})
    had = [batch.index for batch in scidata.DataLoader(ds, 2)]
    assert len(had) == 2
    for step, _ in enumerate(scidata.DataLoader(ds, 1)):
        if rank == 3 and step == 1:
            break
    assert len(list(scidata.DataLoader(ds, 1, sampler=scidata.DistributedSampler(ds, mesh, pad=False)))) in (3, 4)
    dist.barrier()
    with pytest.raises(ConfigError, match="disagree about the loader: batch_size is 2 on rank 0 and 1 on ranks 2, 3"):
        for _ in scidata.DataLoader(ds, 1 if mesh.get_local_rank("dp") else 2):
            pass


def test_domains_side_by_side(folder):
    run_ranks(domains, 4, folder)


def never_comes(rank, num_ranks, folder):
    """A rank that is alive and does something else is named where the others wait for it, after init_mesh's timeout."""
    mesh = scidata.init_mesh(domain=num_ranks, timeout=3)
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, 8)})
    if rank == 1:
        time.sleep(7)
        return
    with pytest.raises(RankFailedError, match="rank 1 has not come to the first batch of iteration 1 of the loader"):
        for batch in scidata.DataLoader(ds, 1):
            batch["u"].mean()


def test_a_rank_that_never_comes(folder):
    run_ranks(never_comes, 2, folder)

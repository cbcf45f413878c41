"""Halo exchange against ``bounds.window`` on the full tensor, forward and backward."""

import itertools

import pytest
import torch
import torch.distributed as dist

from scidata.core.bounds import window
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.rows.redistribute import fetch_rows
from scidata.shard.rows.runs import halo_exchange_dim
from scidata.testing import fake_group, run_ranks

SIZES = {1: [(4,)], 2: [(4, 1), (0, 3), (2, 2)], 3: [(1, 4, 2), (3, 0, 1), (0, 0, 2), (1, 1, 1), (0, 0, 0)]}
WIDTHS = [(0, 0), (1, 1), (0, 2), (3, 0), (2, 9)]  # 9: wider than the whole dim, wraps several times where periodic
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def bounds_of(sizes):
    return list(itertools.accumulate(sizes, initial=0))


def rows_of(sizes, rank, lo, hi, periodic):
    """Global rows of the padded part, from the function that readers use."""
    segments = window(bounds_of(sizes), rank, lo=lo, hi=hi, periodic=periodic)
    return [row for s in segments for row in range(s.start, s.start + s.count)]


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cases(num_ranks):
    return itertools.product(SIZES[num_ranks], WIDTHS, (False, True), (0, 1))


def exchanges(rank, num_ranks):
    group = dist.group.WORLD
    for sizes, (lo, hi), periodic, dim in cases(num_ranks):
        shape = [2, 2]
        shape[dim] = sum(sizes)
        full = random(*shape, seed=1).requires_grad_()
        mine = bounds_of(sizes)[rank], sizes[rank]
        local = full.detach().narrow(dim, *mine).clone().requires_grad_()
        padded = halo_exchange_dim(local, tuple(sizes), dim, lo, hi, periodic, group)
        windows = [torch.tensor(rows_of(sizes, r, lo, hi, periodic), dtype=torch.int64) for r in range(num_ranks)]
        expected = [full.index_select(dim, rows) for rows in windows]
        assert torch.equal(padded, expected[rank])
        weights = [random(*e.shape, seed=5 + r) for r, e in enumerate(expected)]
        all_reduce_sum((weights[rank] * padded**2).sum(), group).backward()
        sum((w * e**2).sum() for w, e in zip(weights, expected, strict=True)).backward()
        torch.testing.assert_close(local.grad, full.grad.narrow(dim, *mine), rtol=1e-12, atol=1e-13)


@RANKS
def test_exchange_gives_the_windows_rows_and_their_gradients(num_ranks):
    run_ranks(exchanges, num_ranks)


def differentiates_twice(rank, num_ranks):
    group = dist.group.WORLD
    sizes = SIZES[num_ranks][0]
    full = random(sum(sizes), seed=1).requires_grad_()
    mine = slice(bounds_of(sizes)[rank], bounds_of(sizes)[rank + 1])
    local = full.detach()[mine].clone().requires_grad_()
    padded = halo_exchange_dim(local, tuple(sizes), 0, 2, 1, True, group)
    (grad,) = torch.autograd.grad(all_reduce_sum((padded**3).sum(), group), local, create_graph=True)
    all_reduce_sum((grad**2).sum(), group).backward()
    total = sum((full[rows_of(sizes, r, 2, 1, True)] ** 3).sum() for r in range(num_ranks))
    (grad,) = torch.autograd.grad(total, full, create_graph=True)
    (grad**2).sum().backward()
    torch.testing.assert_close(local.grad, full.grad[mine], rtol=1e-12, atol=0)


@RANKS
def test_second_derivatives(num_ranks):
    run_ranks(differentiates_twice, num_ranks)


def exchanges_both_dims(rank, num_ranks):
    """Two exchanges, one after the other, carry the corners."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    groups = mesh.get_group("h"), mesh.get_group("w")
    h, w = mesh.get_local_rank("h"), mesh.get_local_rank("w")
    rows, cols = (3, 2), (1, 4)
    full = random(5, 5, seed=1)
    local = full[bounds_of(rows)[h] :, bounds_of(cols)[w] :][: rows[h], : cols[w]]
    tall = halo_exchange_dim(local, rows, 0, 2, 1, False, groups[0])
    padded = halo_exchange_dim(tall, cols, 1, 2, 2, True, groups[1])
    expected = full[rows_of(rows, h, 2, 1, False)][:, rows_of(cols, w, 2, 2, True)]
    assert torch.equal(padded, expected)


def test_two_dims():
    run_ranks(exchanges_both_dims, 4)


def moves_integers(rank, num_ranks):
    x = torch.full((1,), rank, dtype=torch.int16)
    padded = halo_exchange_dim(x, (1,) * num_ranks, 0, 1, 0, True, dist.group.WORLD)
    assert padded.tolist() == [(rank - 1) % num_ranks, rank]


@RANKS
def test_integers(num_ranks):
    run_ranks(moves_integers, num_ranks)


def test_shapes_on_many_ranks():
    with fake_group(512, rank=511):
        sizes = [3, 0] * 255 + [2, 1]
        padded = halo_exchange_dim(torch.ones(1, 2), tuple(sizes), 0, 4, 2, False, dist.group.WORLD)
        assert padded.shape == (5, 2)


def fetches(rank, num_ranks):
    """Each rank asks for rows by ids of its own; a wrong one of any rank is told to all."""
    sizes, group = (2, 0, 3), dist.group.WORLD
    full = random(5, 2, seed=1).requires_grad_()
    local = full.detach().split(sizes)[rank].clone().requires_grad_()
    asked = [torch.tensor([-1, 0, 4, -1]), torch.tensor([-5, 2]), torch.tensor([], dtype=torch.int64)]
    found = fetch_rows(local, asked[rank], sizes, 0, group)
    assert torch.equal(found, full[asked[rank]])
    weights = [random(len(ids), 2, seed=2 + r) for r, ids in enumerate(asked)]
    (weights[rank] * found).sum().backward()
    sum((w * full[ids]).sum() for w, ids in zip(weights, asked, strict=True)).backward()
    torch.testing.assert_close(local.grad, full.grad.split(sizes)[rank], rtol=1e-12, atol=1e-13)
    for bad in (5, -6):
        with pytest.raises(IndexError, match="out of range for dim 0 of extent 5"):
            fetch_rows(local, torch.tensor([bad if rank == 1 else 0]), sizes, 0, group)


def test_rows_by_ids_that_only_their_rank_knows():
    run_ranks(fetches, 3)

"""Each collective as a map from the ranks' inputs to their outputs: every dtype, any memory, groups of a mesh, and the
first and second derivative, against the same map in one process.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import scidata
from scidata.errors import ConfigError
from scidata.shard.comm.collectives import slice_to_shard
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import group_rank, group_size
from scidata.shard.rows.runs import halo_exchange_dim
from scidata.testing import run_ranks

SIZES = {1: [(4,)], 2: [(4, 1), (0, 3)], 3: [(1, 4, 2), (0, 0, 2)], 4: [(3, 0, 1, 2), (0, 1, 4, 0)]}
MOVED = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
MOVED += [torch.float32, torch.float64, torch.complex64, torch.complex128]


@dataclass(frozen=True, kw_only=True)
class Map:
    """``run`` on a rank's input; ``expected`` lists all outputs, of the list of all inputs."""

    run: Callable[[torch.Tensor, tuple[int, ...], dist.ProcessGroup], torch.Tensor]
    expected: Callable[[list[torch.Tensor], tuple[int, ...]], list[torch.Tensor]]
    whole_input: bool = False  # each rank has all rows, else its part
    same_input: bool = False  # all ranks have the same, and the full gradient
    same_output: bool = False  # one loss, which each rank computes
    adds: bool = False


def wanted(sizes: tuple[int, ...], receiver: int, owner: int) -> torch.Tensor:
    """Rows that a rank asks another for, with repeats."""
    rows = torch.arange((receiver + 2 * owner) % 4)
    return rows % max(sizes[owner], 1) if sizes[owner] else rows[:0]


def indexed(x, sizes, group):
    rank, ranks = group_rank(group), range(len(sizes))
    counts = [len(wanted(sizes, rank, p)) for p in ranks]
    return scidata.indexed_all_to_all_v(x, [wanted(sizes, p, rank) for p in ranks], counts, group)


def windows(xs, sizes):
    full, starts = torch.cat(xs), np.cumsum([0, *sizes])
    return [full[max(0, a - 2) if b > a else a : b + 1 if b > a else b] for a, b in itertools.pairwise(starts)]


ROOT = 0
MAPS = {
    "all_gather_v": Map(
        run=lambda x, s, g: scidata.all_gather_v(x, s, 0, g),
        expected=lambda xs, s: [torch.cat(xs)] * len(s),
        same_output=True,
    ),
    "all_gather_v, sum": Map(
        run=lambda x, s, g: scidata.all_gather_v(x, s, 0, g, grad="sum"), expected=lambda xs, s: [torch.cat(xs)] * len(s)
    ),
    "reduce_scatter_v": Map(
        run=lambda x, s, g: scidata.reduce_scatter_v(x, s, 0, g),
        expected=lambda xs, s: list(sum(xs[1:], xs[0]).split(list(s))),
        whole_input=True,
        adds=True,
    ),
    "all_reduce_sum": Map(
        run=lambda x, s, g: all_reduce_sum(x, g),
        expected=lambda xs, s: [sum(xs[1:], xs[0])] * len(s),
        whole_input=True,
        same_output=True,
        adds=True,
    ),
    "replicate_to_shards": Map(
        run=lambda x, s, g: replicate_to_shards(x, [g]),
        expected=lambda xs, s: [xs[0]] * len(s),
        whole_input=True,
        same_input=True,
    ),
    "slice_to_shard": Map(
        run=lambda x, s, g: slice_to_shard(x, s, 0, g),
        expected=lambda xs, s: list(xs[0].split(list(s))),
        whole_input=True,
        same_input=True,
    ),
    "gather_v": Map(
        run=lambda x, s, g: scidata.gather_v(x, s, 0, ROOT, g),
        expected=lambda xs, s: [torch.cat(xs), *[xs[0][:0]] * (len(s) - 1)],
    ),
    "scatter_v": Map(
        run=lambda x, s, g: scidata.scatter_v(x if group_rank(g) == ROOT or len(x) == 0 else None, s, 0, ROOT, g),
        expected=lambda xs, s: list(xs[ROOT].split(list(s))),
        whole_input=True,
    ),
    "indexed_all_to_all_v": Map(
        run=indexed, expected=lambda xs, s: [torch.cat([x[wanted(s, r, p)] for p, x in enumerate(xs)]) for r in range(len(s))]
    ),
    "halo_exchange_dim": Map(run=lambda x, s, g: halo_exchange_dim(x, tuple(s), 0, 2, 1, False, g), expected=windows),
}  # fmt: skip


def inputs_of(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """All ranks' inputs; the same on each rank."""
    generator = torch.Generator().manual_seed(len(name))
    rows = [sum(sizes) if MAPS[name].whole_input else size for size in sizes]
    result = []
    for count in rows:
        values = torch.randn(count, 3, generator=generator, dtype=torch.float64) * 4
        result.append(
            values.to(torch.complex128).to(dtype)
            if dtype.is_complex
            else values.long().to(dtype)
            if not dtype.is_floating_point
            else values.to(dtype)
        )
    return [result[0]] * len(sizes) if MAPS[name].same_input else result  # fmt: skip


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same values, every other column of a transposed tensor."""
    wide = torch.zeros(2 * x.shape[1], x.shape[0], dtype=x.dtype)
    wide[::2] = x.t()
    return wide[::2].t()


def moves(name: str, group: Any) -> None:
    rank, num_ranks = group_rank(group), group_size(group)
    for sizes in SIZES[num_ranks]:
        for dtype in MOVED:
            inputs = inputs_of(name, sizes, dtype)
            if MAPS[name].adds and dtype == torch.bool:
                continue
            expected = MAPS[name].expected(inputs, sizes)[rank]
            if MAPS[name].adds and dtype in (torch.float16, torch.bfloat16):
                expected = MAPS[name].expected([x.float() for x in inputs], sizes)[rank].to(dtype)
            close = {"rtol": 1e-12, "atol": 1e-12} if dtype in (torch.float64, torch.complex128) else {}
            for x in (inputs[rank], scattered(inputs[rank]), inputs[rank].conj()):
                found = MAPS[name].run(x, sizes, group)
                assert found.dtype == dtype
                assert not found.requires_grad
                torch.testing.assert_close(found, expected.conj() if x.is_conj() else expected, **close)


def total(name: str, outputs: list[torch.Tensor]) -> torch.Tensor:
    """The loss in one process: each output with a power of its own, so that they count differently."""
    if MAPS[name].same_output:
        return (outputs[0] ** 3).sum()
    return sum(((rank + 1) * y**3).sum() for rank, y in enumerate(outputs))


def differentiates(name: str, group: Any) -> None:
    this, rank, num_ranks = MAPS[name], group_rank(group), group_size(group)
    for sizes in SIZES[num_ranks]:
        inputs = [x.clone().requires_grad_() for x in inputs_of(name, sizes, torch.float64)]
        if this.same_input:
            inputs = [inputs[0]] * num_ranks
        leaves = [inputs[0]] if this.same_input else inputs
        firsts = torch.autograd.grad(total(name, this.expected(inputs, sizes)), leaves, create_graph=True, allow_unused=True, materialize_grads=True)  # fmt: skip
        sum(((i + 2) * g**2).sum() for i, g in enumerate(firsts)).backward()
        own = 0 if this.same_input else rank

        x = inputs[rank].detach().clone().requires_grad_()
        if name == "scatter_v" and rank != ROOT:
            x = x.detach()[:0].requires_grad_()
        y = this.run(x, sizes, group)
        loss = (y**3).sum() if this.same_output else all_reduce_sum(((rank + 1) * y**3).sum(), group)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = ((own + 2) * first**2).sum()
        (penalty if this.same_input else all_reduce_sum(penalty, group)).backward()
        if name == "scatter_v" and rank != ROOT:
            assert first.numel() == 0
            continue
        torch.testing.assert_close(first, firsts[own], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, leaves[own].grad, rtol=1e-12, atol=1e-12)


def check(rank, num_ranks):
    for name in MAPS:
        for what in (moves, differentiates):
            try:
                what(name, dist.group.WORLD)
            except Exception as error:
                raise AssertionError(f"{name} {what.__name__}") from error


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_as_in_one_process(num_ranks):
    run_ranks(check, num_ranks)


def check_grid(rank, num_ranks):
    """Two groups of two at the same time, along each axis of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    for axis in ("h", "w"):
        for name in MAPS:
            moves(name, mesh.get_group(axis))
            differentiates(name, mesh.get_group(axis))


def test_groups_of_a_mesh():
    run_ranks(check_grid, 4)


def check_no_source(rank, num_ranks):
    with pytest.raises(ConfigError, match="rank 1 is the source of scatter_v and must pass a tensor"):
        scidata.scatter_v(None, (1, 1), 0, 1, dist.group.WORLD)
    assert scidata.scatter_v(torch.ones(2), (1, 1), 0, 0, dist.group.WORLD).tolist() == [1]  # the group is in step


def test_a_source_without_a_tensor_raises_on_every_rank():
    run_ranks(check_no_source, 2)

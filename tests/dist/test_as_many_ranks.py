"""Reductions of many ranks, which gather nothing, on few: as one process computes, and as stable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scidata.shard.comm import transport
from scidata.testing import run_ranks
from tests.dist import test_conformance, test_ops_norms, test_ops_reductions, test_stable_arithmetic
from tests.dist import test_ties_and_integers as test_ties

CHECKS: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "cases": (3, test_conformance.check_cases, (False,)),
    "formulas": (2, test_stable_arithmetic.check, ("formulas",)),
    "reductions": (3, test_stable_arithmetic.check, ("reductions",)),
    "special values": (3, test_ops_reductions.check_special_values, ()),
    "two axes": (4, test_ops_reductions.check_two_axes, ()),
    "norms": (3, test_ops_norms.check_norms, ()),
    "ties": (3, test_ties.check_ties, ()),
    "integers": (3, test_ties.check_integers, ()),
    "pools": (3, test_ties.check_pools, ()),
    "second derivatives": (2, test_ties.check_twice, ()),
}


def as_many(rank: int, num_ranks: int, check: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    few, transport._FEW = transport._FEW, 1
    try:
        return check(rank, num_ranks, *arguments)
    finally:
        transport._FEW = few


@pytest.mark.slow_for("cases", "formulas", "reductions")  # the others reduce in each way, too
@pytest.mark.parametrize("name", CHECKS)
def test_as_one_process(name: str) -> None:
    num_ranks, check, arguments = CHECKS[name]
    found = run_ranks(as_many, num_ranks, check, arguments, timeout=300)[0]
    if check is test_stable_arithmetic.check:
        assert not found, f"{len(found)}:\n" + "\n".join(found)


def check_pairs(rank: int, num_ranks: int) -> None:
    """Sums and extremes of every number of ranks; all get the same bits."""
    for size in range(2, num_ranks + 1):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        generator = torch.Generator().manual_seed(size)
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64):
            whole = (torch.randn(size, 3, 4, generator=generator, dtype=torch.float64) * 4).to(dtype)
            for op, reduce in transport._REDUCTIONS.items():
                if dtype.is_complex and op != dist.ReduceOp.SUM:
                    continue
                found = transport._reduce_by_pairs(whole[rank].contiguous(), op, group)
                torch.testing.assert_close(found, reduce(whole, 0).to(dtype), rtol=1e-6, atol=1e-6)
                each = transport.gather_rows(found.reshape(-1), group)
                assert torch.equal(each, each[:1].expand_as(each)), (size, dtype, op)


def test_reductions_by_pairs() -> None:
    run_ranks(check_pairs, 7)

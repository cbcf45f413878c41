"""A share of the random programs; ``python -m tests.programs --count 5000`` runs more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scidata.shard import ShardTensor, memory
from scidata.shard.op_table import BOUND, HANDLERS
from tests.programs import compiled
from tests.programs.__main__ import BAD, outcomes
from tests.programs.make import make
from tests.programs.program import Given, Program
from tests.programs.run import Outcome, on_ranks
from tests.programs.shrink import shrink

BASE = 7_000_000


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_nothing_is_wrong(mesh):
    found = list(outcomes([make(seed, mesh) for seed in range(BASE, BASE + 12)]))
    assert not [f"{o.kind}: {o.note}\n{program}" for program, o in found if o.kind in BAD]
    assert sum(o.lines for _, o in found) > 60
    assert sum(o.refused.total() for _, o in found) < 20


def test_a_program_is_that_of_its_seed():
    assert make(5) == make(5) != make(6)


def forgetful(rank: int, num_ranks: int, programs: list[Program], done: Path) -> None:
    """Do as handlers would that write to a copy, and forget the original."""
    handler = HANDLERS[Tensor.mul_]

    def write(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        target = args[0]
        if not isinstance(target, ShardTensor):
            return handler(func, types, args, kwargs)
        copied, target.copied = target.copied, None
        result = handler(func, types, args, kwargs)
        target.copied = copied
        return result

    HANDLERS.update({func: write for func, found in HANDLERS.items() if found is handler})
    on_ranks(rank, num_ranks, programs, done)


def lonely(rank: int, num_ranks: int, programs: list[Program], done: Path) -> None:
    """Do as a handler would that asks its own part what to do."""
    handler = HANDLERS[Tensor.cumsum]

    def cumsum(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not args[0].local.numel():
            raise RuntimeError("nothing to do")
        return handler(func, types, args, kwargs)

    HANDLERS[Tensor.cumsum] = cumsum
    del BOUND[Tensor.cumsum]  # the way of calls by position, past the handler
    on_ranks(rank, num_ranks, programs, done)


PLANTED = Program(
    0,
    (2,),
    (Given("x0", (4, 3), True, (0,), ((3, 1),)), Given("x1", (4, 3), False, (1,), ((2, 1),))),
    ("v0 = x1 * 2", "v1 = v0.view(-1)", "v2 = x0.sin()", "v1.mul_(2)", "v3 = v0[:, :1].cumsum(0)"),
)


def test_a_forgotten_original_is_found():
    programs = [PLANTED, *(make(seed, (2,)) for seed in range(30))]
    kinds = [o.kind for _, o in outcomes(programs, forgetful)]
    assert kinds[0] == "wrong"
    assert "wrong" in kinds[1:]


EXPANDED = Program(
    0,
    (2,),
    (Given("x0", (4, 2), True, (0,), ((3, 1),)), Given("x1", (4, 1), False, (0,), ((3, 1),))),
    ("v0 = x1.expand(4, 2).take_along_dim(x0.argsort(0), 0)", "v1 = x0.sin() * v0", "v1[1:] += x0[:3]"),
)


def losing(rank: int, num_ranks: int, programs: list[Program], done: Path) -> None:
    """Lay an expanded tensor out by a write to its first element, which graphs do not see in the others."""

    def expanded(x: Tensor, strides: tuple[int, ...]) -> Tensor:
        result = torch.empty_strided(x.shape, strides, dtype=x.dtype)
        once = tuple([slice(0, 1) if step == 0 else slice(None) for step in strides])
        result[once].copy_(x[once])
        return result

    memory._expanded = expanded
    compiled.on_ranks(rank, num_ranks, programs, done)


def test_compiled_programs():
    programs = [EXPANDED, *(make(seed, (2,)) for seed in range(BASE + 100, BASE + 106))]
    found = [*outcomes(programs, compiled.on_ranks)]
    assert not [f"{o.kind}: {o.note}\n{program}" for program, o in found if o.kind in BAD]
    assert sum(o.refused["captured"] for _, o in found) >= 4
    assert [o.kind for _, o in outcomes([EXPANDED], losing)] == ["wrong"]


def test_a_program_is_made_small():
    needed = ["v0 = x1 * 2", "v1 = v0.view(-1)", "v1.mul_(2)"]

    def run(program: Program) -> Outcome:
        return Outcome("wrong" if set(needed) <= set(program.lines) else "right")

    small, outcome = shrink(PLANTED, Outcome("wrong"), run)
    assert outcome.kind == "wrong"
    assert list(small.lines) == needed
    assert [given.name for given in small.given] == ["x1"]


def test_ranks_that_differ_are_found_and_the_rest_is_run():
    found = [o for _, o in outcomes([PLANTED, make(3, (2,))], lonely)]
    assert [o.kind for o in found] == ["divergent", "right"]
    assert "cumsum" in found[0].note

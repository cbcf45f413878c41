"""Run programs as functions that scidata has compiled, and compare each call with an eager one on the same shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardTensor
from scidata.shard.compile import regions_of
from tests.programs.program import NAMES, Program, run_line, tensors_of, total
from tests.programs.run import TOLERANCE, Trial, error_of, placed, write_outcomes

CALLS = 4  # eager, captured, and by the graph
#: Lines that are no part of a model's forward.
LEFT_OUT = re.compile(r"backward|retain_grad|register_hook|autograd\.grad|\.grad\b|requires_grad|seeded")
NEW = re.compile(r"\bv\d+")


def on_ranks(rank: int, num_ranks: int, programs: Sequence[Program], done: Path) -> None:
    """Run programs of the same mesh, as ``tests.programs.run.on_ranks`` does. Collective."""
    write_outcomes(rank, programs, done, _Compiled)


def by_inductor(rank: int, num_ranks: int, programs: Sequence[Program], done: Path) -> None:
    """Run programs as :func:`on_ranks` does, by inductor's code. Collective."""
    write_outcomes(rank, programs, done, _ByInductor)


class _Compiled(Trial):
    """Each line that runs is one of a function's, which is called with new tensors."""

    differentiates = True
    backend = "aot_eager"

    def run(self) -> None:
        kept = []
        for line in self.program.lines:
            if LEFT_OUT.search(line):
                continue
            error = error_of(run_line, line, self.parts)
            self._agreed(error, line)
            if error is None:
                kept.append(line)
        while kept and not self._is_captured(kept):
            kept = kept[: len(kept) // 2]
        self.finished = True

    def _is_captured(self, lines: Sequence[str]) -> bool:
        """Compare compiled calls with an eager one; returns False where the function runs eagerly."""
        names = [given.name for given in self.program.given]
        made = sorted({name for line in lines for name in NEW.findall(line)} & tensors_of(self.parts).keys())
        returned = f"return dict({', '.join(f'{name}={name}' for name in made)})"
        scope = dict(NAMES)
        exec("\n    ".join([f"def program({', '.join(names)}):", *lines, returned]), scope)
        self.outcome.lines = len(lines)
        compiled = scidata.compile(scope["program"], backend=self.backend)
        self.differentiates = self._called(scope["program"], whole=True)[1] is None
        want, error = self._called(scope["program"])
        self._agreed(error, "eager")
        for _ in range(CALLS if error is None else 0):
            got, error = self._called(compiled)
            self._agreed(error, "compiled")
            different = f"{type(error).__name__}: {error}" if error else _differing(want, got)
            notes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(notes, different, group=self.control)
            if any(notes):
                self._found("other error" if error else "wrong", next(filter(None, notes)))
                return True
        reasons: list[Any] = [None] * dist.get_world_size()  # one rank may run eagerly alone
        (region,) = regions_of(compiled)
        dist.all_gather_object(reasons, region.reason or ("" if region.captured else "never"), group=self.control)
        reason = next(filter(None, reasons), "")
        self.outcome.refused[f"eager: {reason[:90]}" if reason else "captured"] += 1
        return not reason

    def _called(
        self, function: Callable[..., dict[str, Any]], *, whole: bool = False
    ) -> tuple[dict[str, Any], Exception | None]:
        """Call a function with new tensors, and differentiate what it gives, unless one process cannot; returns what
        is left, and an error.
        """
        given: dict[str, Any] = {
            g.name: (g.whole() if whole else placed(g, self.mesh)).requires_grad_(g.requires_grad)
            for g in self.program.given
        }
        left = dict(given)

        def run() -> None:
            torch.default_generator.manual_seed(0)
            left.update(function(**given))

        def differentiate() -> None:
            if losses := [total(x) for x in left.values() if _is_differentiable(x)]:
                torch.stack(losses).sum().backward()

        error = error_of(run)
        if error is None and (whole or self.differentiates):
            failed = error_of(differentiate)
            if whole:
                return left, failed
            self._agreed(failed, "backward")
            left |= {"error in backward": type(failed).__name__}
            left |= {f"{name}.grad": None if failed else x.grad for name, x in given.items()}
        return left, error


class _ByInductor(_Compiled):
    backend = "inductor"


def _is_differentiable(x: Tensor) -> bool:
    return x.requires_grad and error_of(lambda: x.grad_fn) is None


def _differing(want: dict[str, Any], got: dict[str, Any]) -> str:
    """Return what differs between two calls on this rank; "" if nothing does."""
    for name, x in want.items():
        y = got[name]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            facts = [(type(t), t.dtype, tuple(t.shape), t.requires_grad) for t in (x, y)]
            if facts[0] != facts[1]:
                return f"{name}: {facts[1]}, not {facts[0]}"
            if isinstance(x, ShardTensor) and (x.spec, x.global_strides) != (y.spec, y.global_strides):
                return f"{name}: {y.spec}, {y.global_strides}, not {x.spec}, {x.global_strides}"
            try:
                mine, theirs = ((t.to_local() if isinstance(t, ShardTensor) else t).detach().cdouble() for t in (x, y))
            except UnsupportedShardOp:  # to read it
                continue
            loose = max(TOLERANCE.get(x.dtype, 0.0), TOLERANCE[torch.get_default_dtype()])
            if not torch.allclose(mine, theirs, rtol=loose, atol=loose, equal_nan=True):
                return f"{name}: values differ"
        elif isinstance(x, Tensor) or isinstance(y, Tensor) or x != y:
            return f"{name}: {y}, not {x}"
    return ""

"""Make a failing program smaller: fewer lines, fewer given tensors, fewer of them sharded or with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.program import Program
from tests.programs.run import Outcome


def shrink(program: Program, outcome: Outcome, run: Callable[[Program], Outcome]) -> tuple[Program, Outcome]:
    """Take away whatever the program fails without, in the same manner."""
    again = run(program)
    if again.kind != outcome.kind:
        return program, Outcome(outcome.kind, f"not again when run alone ({again.kind}); {outcome.note}")
    outcome, changed = again, True
    while changed:
        changed = False
        for smaller in _smaller(program):
            found = run(smaller)
            if found.kind == outcome.kind:
                program, outcome, changed = smaller, found, True
                break
    return program, outcome


def _smaller(program: Program) -> Iterator[Program]:
    count = len(program.lines)
    size = count // 2
    while size:
        for start in range(count - size, -1, -size):
            yield replace(program, lines=program.lines[:start] + program.lines[start + size :])
        size //= 2
    for i, given in enumerate(program.given):
        before, after = program.given[:i], program.given[i + 1 :]
        if not any(given.name in line for line in program.lines):
            yield replace(program, given=before + after)
        if given.requires_grad:
            yield replace(program, given=(*before, replace(given, requires_grad=False), *after))
        if given.dims is not None:
            yield replace(program, given=(*before, replace(given, dims=None, sizes=()), *after))

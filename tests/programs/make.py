"""Make a random program: each line is tried in one process as it is drawn."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import torch
from torch import Tensor

from tests.programs.expressions import Scope
from tests.programs.program import NAMES, Given, Program, run_line
from tests.programs.statements import statement

#: Of tensors without elements torch's own have other shapes than of others, or raise.
OF_NUMBERS = re.compile("attention|bilinear")
MESHES = ((2,), (3,), (3,), (2, 2))


def _sizes(draw: random.Random, extent: int, num_ranks: int) -> tuple[int, ...]:
    """Cut anywhere: parts are uneven, some empty."""
    cuts = sorted(draw.randrange(extent + 1) for _ in range(num_ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))


def _given(draw: random.Random, mesh: tuple[int, ...]) -> tuple[Given, ...]:
    """Draw tensors whose shapes fit together: the same, another order of dims, or some dims of extent 1 or left out."""
    shape = [draw.choice([1, 2, 3, 4, 4, 5, 6]) for _ in range(draw.randrange(2, 4))]
    known = [_sizes(draw, n, m) for m in mesh for n in shape]
    result = []
    for i in range(draw.randrange(2, 5)):
        own = list(shape)
        if i and draw.random() < 0.3:
            draw.shuffle(own)
        if i > 1 and draw.random() < 0.5:
            own = [n if draw.random() < 0.6 else 1 for n in own][draw.randrange(2) :]
        dims: list[int | None] | None = None
        sizes: list[tuple[int, ...] | None] = []
        if i == 0 or draw.random() < 0.75:
            dims = [*draw.sample(range(len(own)), min(len(own), len(mesh))), None][: len(mesh)]
            if len(mesh) > 1 and draw.random() < 0.25:
                dims[draw.randrange(len(mesh))] = None
            for d, m in zip(dims, mesh, strict=True):
                fits = [] if d is None else [n for n in known if len(n) == m and sum(n) == own[d]]
                shared = draw.choice(fits) if fits and draw.random() < 0.6 else None
                sizes.append(None if d is None else shared or _sizes(draw, own[d], m))
        grad = draw.random() < 0.4
        result.append(Given(f"x{i}", tuple(own), grad, None if dims is None else tuple(dims), tuple(sizes)))
    return tuple(result)


def _run(given: tuple[Given, ...], lines: list[str]) -> dict[str, Any]:
    scope = {**NAMES, **{g.name: g.whole().requires_grad_(g.requires_grad) for g in given}}
    for line in lines:
        _try(line, scope)
    return scope


def _try(line: str, scope: dict[str, Any]) -> Exception | None:
    try:
        run_line(line, scope)
    except Exception as error:
        return error
    return None


def make(seed: int, mesh: tuple[int, ...] | None = None) -> Program:
    """Return the program of a seed, in torch's default dtype: 4 to 15 lines, few of which raise in one process."""
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    chosen = draw.choice(MESHES)
    mesh = mesh or chosen
    given = _given(draw, mesh)
    lines: list[str] = []
    scope = _run(given, lines)
    wanted, names = draw.randrange(4, 15), 0
    for _ in range(wanted * 6):
        if len(lines) == wanted:
            break
        line = _drawn(draw, scope)
        if line is None or (OF_NUMBERS.search(line) and _names_empty(line, scope)):
            continue
        line = re.sub(r"NEW(\d)", lambda found: f"v{names + int(found[1])}", line)  # noqa: B023
        error = _try(line, scope)
        unfit = error is not None and ("modified" in str(error) or draw.random() > 0.05)
        if unfit or not _is_tame(scope):
            scope = _run(given, lines)  # it may have written something
            continue
        lines.append(line)
        names = 1 + max((int(n[1:]) for n in scope if re.fullmatch(r"v\d+", n)), default=-1)
    return Program(seed, mesh, given, (*lines, *_end(scope)), str(torch.get_default_dtype()))


def _names_empty(line: str, scope: dict[str, Any]) -> bool:
    return any(isinstance(x := scope.get(name), Tensor) and not x.numel() for name in re.findall(r"[xv]\d+", line))


def _is_tame(scope: dict[str, Any]) -> bool:
    """Whether all values are finite and not so large that rounding shows, and no tensor is large."""
    try:
        tensors = [x for x in scope.values() if isinstance(x, Tensor)]
        tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    except RuntimeError:  # one of several views, such as those of unbind(), that torch does not let be used any more
        return False
    for x in tensors:
        if x.numel() > 600 or x.ndim > 5 or not torch.isfinite(x).all():
            return False
        if x.numel() and x.detach().abs().max() > 1e3:
            return False
    return True


def _drawn(draw: random.Random, scope: dict[str, Any]) -> str | None:
    try:
        return statement(Scope(draw, scope))
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):  # of what it has looked at
        return None


def _end(scope: dict[str, Any]) -> list[str]:
    """Return lines that differentiate what is left to be."""
    names = [name for name, x in scope.items() if re.fullmatch(r"[xv]\d+", name) and x is not None and x.requires_grad]
    lines = [f"total({name}).backward(retain_graph=True)" for name in names[-3:]]
    return [line for line in lines if _try(line, scope) is None]  # torch refuses where what it saved was written to

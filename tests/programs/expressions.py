"""Random expressions over tensors: what they are drawn from is the whole tensors as they are at that line."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.programs.program import ramp, tensors_of


class Scope:
    """The variables so far, with values, and the dice."""

    def __init__(self, draw: random.Random, scope: dict[str, Any]) -> None:
        self.draw, self.scope = draw, scope

    def value(self, expression: str) -> Any:
        """Evaluate an expression that writes nothing."""
        return eval(expression, self.scope)

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True, *, dims: int = 0) -> tuple[str, Tensor]:
        """Return a tensor of floats with at least so many dims, a late one with preference; LookupError for none."""
        found = [
            (name, x)
            for name, x in tensors_of(self.scope).items()
            if x.dtype == ramp().dtype and x.ndim >= dims and fits(x)
        ]
        if not found:
            raise LookupError
        return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))]

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def dim(self, x: Tensor) -> int:
        """Return a dim, counted from either end."""
        return self.draw.randrange(-x.ndim, x.ndim)

    def number(self) -> float:
        return self.draw.choice([0.5, -1.0, 0.25, 2.0, -0.3, 0.0])

    def number_tensor(self, shape: Sequence[int]) -> str:
        """Return a plain tensor that broadcasts to a shape."""
        shape = [1 if self.chance(0.2) else n for n in shape][self.draw.randrange(len(shape) + 1) :]
        return f"ramp({', '.join(map(str, shape))})"

    def fitting(self, shape: Sequence[int]) -> str:
        """Return a number or a tensor that broadcasts to a shape."""
        if self.chance(0.2):
            return str(self.number())
        if self.chance(0.15):
            return self.number_tensor(shape)

        def fits(x: Tensor) -> bool:
            tail = shape[len(shape) - x.ndim :]
            return x.ndim <= len(shape) and all(n in (1, m) for n, m in zip(x.shape, tail, strict=True))

        same = [name for name, x in tensors_of(self.scope).items() if x.dtype == ramp().dtype and fits(x)]
        if same and self.chance(0.8):
            name = self.draw.choice(same)
            return self.draw.choice(
                [name, name, f"{name} * 0.5", f"{name}.detach()", f"{name}.clone()", f"{name}.sin()"]
            )
        name, x = self.pick()
        sized = index_to(self.draw, x, shape)
        return f"{name}{sized}" if sized is not None else self.number_tensor(shape)

    def apart(self, expression: str, target: Tensor) -> str:
        """Clone what may overlap with what is written to: torch leaves open what comes of it."""
        value = self.value(expression)
        shared = isinstance(value, Tensor) and value.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        return f"({expression}).clone()" if shared else expression


def index_to(draw: random.Random, x: Tensor, shape: Sequence[int]) -> str | None:
    """Return an index that takes a part of a shape, where the tensor is large enough."""
    if x.ndim != len(shape) or not shape or any(n > m for n, m in zip(shape, x.shape, strict=True)):
        return None
    starts = [draw.randrange(m - n + 1) for n, m in zip(shape, x.shape, strict=True)]
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(starts, shape, strict=True)) + "]"


def index(s: Scope, x: Tensor, rows: float = 0.25) -> str:
    """Return a basic index: slices, single rows, new dims, an ellipsis."""
    items = []
    for n in x.shape:
        start = s.draw.randrange(n + 1)
        stop = s.draw.randrange(start, n + 1)
        chosen = [":", ":", f"{start}:", f":{stop}", f"{start}:{stop}", f"{s.draw.randrange(2)}::2", ":-1", "1:"]
        items.append(str(s.draw.randrange(-n, n)) if n and s.chance(rows) else s.draw.choice(chosen))
    if s.chance(0.1):
        items.insert(s.draw.randrange(len(items) + 1), "None")
    elif items and s.chance(0.15):
        items = [*items[: s.draw.randrange(len(items))], "..."]
    while items and items[-1] == ":" and s.chance(0.5):
        items.pop()
    return f"[{', '.join(items)}]" if items else "[...]"


def rows_of(s: Scope, extent: int, count: int | None = None, *, distinct: bool = False) -> str:
    """Return a tensor of row numbers."""
    if distinct:
        chosen = s.draw.sample(range(extent), s.draw.randrange(extent + 1) if count is None else count)
    else:
        wanted = s.draw.randrange(5) if count is None else count
        chosen = [s.draw.randrange(extent) for _ in range(wanted if extent else 0)]
    return f"torch.tensor({chosen}, dtype=torch.int64)"


def ids(s: Scope, extent: int, count: int) -> str:
    """Return so many row numbers, or one of extent 1: of shards, or plain; sometimes a column."""
    count = 1 if s.chance(0.25) else count
    column = "[:, None]" * s.chance(0.25)
    if s.chance(0.4) or not extent:
        return f"{rows_of(s, extent, count)}{column}"
    name, x = s.pick(lambda y: y.ndim > 0 and y.shape[0] >= count and 0 not in y.shape)
    row = ", 0" * (x.ndim - 1)
    return f"({name}[:{count}{row}] > {s.number()}).long(){column} * {s.draw.randrange(-1, extent)}"


def several_ids(s: Scope, x: Tensor) -> str:
    """Return an index by several tensors of row numbers that broadcast, with slices, new dims and an ellipsis."""
    count = s.draw.choice([0, 1, 1, 2, 3])
    items = [ids(s, n, count) if s.chance(0.7) else s.draw.choice([":", ":", "1:", "::2", ":1"]) for n in x.shape]
    if s.chance(0.2):
        items[s.draw.randrange(len(items))] = "..."
    for _ in range(s.draw.choice([0, 0, 1, 1, 2])):
        items.insert(s.draw.randrange(len(items) + 1), "None")
    return f"[{', '.join(items)}]"


def mask(s: Scope, name: str, x: Tensor) -> str:
    """Return a mask of a tensor's leading dims: its own, another tensor's or a plain one."""
    bound = s.draw.choice(["> 0", "< 0.2", ">= -0.4"])
    if s.chance(0.4):
        return f"{name} {bound}"
    dims = s.draw.randrange(1, x.ndim + 1)
    same = [n for n, y in tensors_of(s.scope).items() if y.dtype == ramp().dtype and y.shape == x.shape[:dims]]
    if same and s.chance(0.7):
        return f"{s.draw.choice(same)} {bound}"
    return f"ramp({', '.join(map(str, x.shape[:dims]))}) {bound}"


def shape_of(s: Scope, count: int) -> list[int]:
    """Return some shape of so many elements."""
    shape = []
    while count > 1 and len(shape) < 4:
        shape.append(s.draw.choice([f for f in range(2, count + 1) if count % f == 0]))
        count //= shape[-1]
    if s.chance(0.2):
        shape.insert(s.draw.randrange(len(shape) + 1), 1)
    return [*shape, count] if count != 1 or not shape else shape


def view(s: Scope, name: str, x: Tensor) -> str:
    """Return an expression for a view of a tensor, sometimes a view of that."""
    found = _view(s, name, x)
    if s.chance(0.25):
        found = _view(s, found, s.value(found))
    return found


def _view(s: Scope, name: str, x: Tensor) -> str:
    draw = s.draw
    if not x.ndim:
        return f"{name}.{draw.choice(['unsqueeze(0)', 'view(1)', 'expand(3)', 'detach()', 'reshape(1, 1)'])}"
    a, b = s.dim(x), s.dim(x)
    n = x.shape[a]
    start = draw.randrange(n + 1)
    first = draw.randrange(x.ndim)
    single = [d for d, n in enumerate(x.shape) if n == 1]
    ways = [
        *[f"{name}{index(s, x)}"] * 6,
        f"{name}.transpose({a}, {b})",
        f"{name}.permute({', '.join(map(str, draw.sample(range(x.ndim), x.ndim)))})",
        f"{name}.movedim({a}, {b})",
        f"{name}.mT" if x.ndim > 1 else f"{name}[None]",
        *[f"{name}.{draw.choice(['reshape', 'view'])}({', '.join(map(str, shape_of(s, x.numel())))})"] * 2,
        f"{name}.{draw.choice(['reshape', 'view'])}(-1)",
        f"{name}.flatten({first}, {draw.randrange(first, x.ndim)})",
        f"{name}.unsqueeze({draw.randrange(-x.ndim - 1, x.ndim + 1)})",
        f"{name}.squeeze({draw.choice(single) if single else ''})",
        f"{name}.narrow({a}, {start}, {draw.randrange(n - start + 1)})",
        f"{name}.unsqueeze({first}).expand({', '.join(['-1'] * first + ['2'] + ['-1'] * (x.ndim - first))})",
        f"{name}.detach()",
        f"{name}.contiguous()",
        f"{name}.view_as({name})",
        f"{name}.to({torch.get_default_dtype()})",
        f"{name}.swapaxes({a}, {b})",
    ]
    if n:
        row = draw.randrange(-n, n)
        ways += [f"{name}.select({a}, {row})", f"{name}.unbind({a})[{row}]"]
        ways += [f"{name}.chunk(2, {a})[0]", f"{name}.split({draw.randrange(1, n + 1)}, {a})[-1]"]
        ways += [f"{name}.tensor_split(3, {a})[{draw.randrange(3)}]"]
        ways += [f"{name}.unfold({a}, {draw.randrange(1, n + 1)}, {draw.randrange(1, 3)})"] if s.chance(0.3) else []
    if n % 2 == 0 and n:
        ways += [f"{name}.unflatten({a}, (2, {n // 2}))", f"{name}.unflatten({a}, ({n // 2}, -1))"]
    if single:
        d = draw.choice(single)
        ways += [f"{name}.expand({', '.join('3' if i == d else '-1' for i in range(x.ndim))})"] * 2
    if x.ndim > 1 and a % x.ndim != b % x.ndim:
        ways += [f"{name}.diagonal({draw.randrange(-1, 2)}, {a}, {b})"]
    return draw.choice(ways)

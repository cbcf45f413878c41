"""What a program is: tensors that are given, some of them sharded, and lines of Python over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def ramp(*shape: int) -> Tensor:
    """Return a plain tensor whose elements all differ."""
    count = torch.Size(shape).numel()
    return torch.linspace(-0.9, 1.1, count, dtype=torch.float64).reshape(shape).to(torch.get_default_dtype())


def total(x: Any) -> Any:
    """Return a loss to which each element adds another share."""
    y = x.real + x.imag if x.is_complex() else x
    return (y * ramp(*y.shape)).sum()


class Cube(torch.autograd.Function):
    """A custom function that can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x * x * 0.1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x * x * 0.3


#: What lines may name besides their tensors.
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "ramp": ramp,
    "total": total,
    "cube": lambda x: Cube.apply(x),  # noqa: PLW0108 - looked up when there are shards
    "seeded": lambda seed: torch.Generator().manual_seed(seed),
}


@dataclass(frozen=True)
class Given:
    """A tensor that a program starts with; ``dims`` and ``sizes`` have an entry for each mesh axis, None if plain."""

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    dims: tuple[int | None, ...] | None
    sizes: tuple[tuple[int, ...] | None, ...] = ()

    def whole(self) -> Tensor:
        """Return its values, which follow from its name."""
        generator = torch.Generator().manual_seed(ord(self.name[-1]))
        return torch.randn(self.shape, dtype=torch.float64, generator=generator).to(torch.get_default_dtype())

    def __str__(self) -> str:
        layout = "plain"
        if self.dims is not None:
            split = [f"dim {d} in {n}" for d, n in zip(self.dims, self.sizes, strict=True) if d is not None]
            layout = "sharded: " + (", ".join(split) or "on no axis")
        return f"{self.name} = randn{self.shape}{'.requires_grad_()' * self.requires_grad}  # {layout}"


@dataclass(frozen=True)
class Program:
    """Lines of Python that run on whole tensors and on shards alike, in torch's default dtype of that name."""

    seed: int
    mesh: tuple[int, ...]
    given: tuple[Given, ...]
    lines: tuple[str, ...]
    dtype: str = "torch.float64"

    def __str__(self) -> str:
        return "\n".join([f"# seed {self.seed}, mesh {self.mesh}, {self.dtype}", *map(str, self.given), *self.lines])


def run_line(line: str, scope: dict[str, Any]) -> None:
    """Run a line from the same state of the random numbers, whatever ran before."""
    torch.default_generator.manual_seed(0)
    exec(line, scope)


def tensors_of(scope: dict[str, Any]) -> dict[str, Any]:
    """Return a program's own variables."""
    return {name: x for name, x in scope.items() if isinstance(x, Tensor)}

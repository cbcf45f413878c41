"""Differences, derivatives and integrals along a dim: torch's own formulas, in the same order of operations.

Others that are equal on paper differ where integers wrap, and where NaN, infinite or large values meet a factor of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scidata.shard.op_table import find
from scidata.shard.ops.arguments import handles, normal_dim

Step = float | Tensor

# -- derivatives ---------------------------------------------------------------------------------------------------


def _between(x: Tensor, dim: int, first: int, last: int) -> Tensor:
    """Return the rows from ``first`` on, without the last ``last``."""
    return x.narrow(dim, first, x.shape[dim] - first - last)


@handles(*find("diff"))
def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along a dim, ``n`` times."""
    dim = normal_dim(dim, len(input.shape))
    given = [x for x in (prepend, input, append) if x is not None and n]
    x = torch.cat(given, dim) if len(given) > 1 else input
    if n == 0:
        return x.clone()
    for _ in range(min(n, x.shape[dim])):
        upper, lower = _between(x, dim, 1, 0), _between(x, dim, 0, 1)
        x = upper ^ lower if x.dtype == torch.bool else upper - lower
    return x


@handles(torch.gradient)
def gradient(
    input: Tensor,
    *,
    spacing: Step | Sequence[Step] | None = None,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> list[Tensor]:
    """Central differences along each dim, one-sided ones of first or second order at its ends."""
    ndim = len(input.shape)
    asked = range(ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [normal_dim(d, ndim) for d in asked]
    if spacing is None or isinstance(spacing, int | float | Tensor):
        steps: list[Step] = [1 if spacing is None else spacing] * len(dims)
    else:
        steps = [*spacing]
    if len(steps) != len(dims) or edge_order not in (1, 2):
        raise RuntimeError(f"gradient: {len(steps)} spacings for {len(dims)} dims, edges of order {edge_order}")
    if input.dtype in (torch.uint8, torch.bool):
        raise RuntimeError(f"gradient: it takes no {input.dtype}, whose differences wrap")
    short = [d for d in dims if input.shape[d] <= edge_order]
    if short:
        raise RuntimeError(f"gradient: dim {short[0]} has {input.shape[short[0]]} rows, too few for {edge_order}")
    return [_gradient(input, d, step, edge_order) for d, step in zip(dims, steps, strict=True)]


def _gradient(x: Tensor, dim: int, step: Step, edge_order: int) -> Tensor:
    """Differentiate along a dim, between rows that are ``step`` apart, or lie at the places in it."""
    count = x.shape[dim]
    if not isinstance(step, Tensor) or not step.ndim:
        inside = (_between(x, dim, 2, 0) - _between(x, dim, 0, 2)) / step / 2
        ends = _ends(x, dim, step, step) if edge_order == 1 else _even_ends(x, dim, step)
        return torch.cat([ends[0], inside, ends[1]], dim)
    h = torch.diff(step.to(x.device))
    if len(h) != count - 1:
        raise RuntimeError(f"gradient: {len(h) + 1} coordinates for {count} rows of dim {dim}")
    shape = [-1 if d == dim else 1 for d in range(len(x.shape))]
    low, high = h[:-1].view(shape), h[1:].view(shape)
    inside = (
        -high / (low * (low + high)) * _between(x, dim, 0, 2)
        + (high - low) / (low * high) * _between(x, dim, 1, 1)
        + low / (high * (low + high)) * _between(x, dim, 2, 0)
    )
    ends = _ends(x, dim, h[0], h[-1]) if edge_order == 1 else _curved_ends(x, dim, h)
    return torch.cat([ends[0], inside, ends[1]], dim)


def _row(x: Tensor, dim: int, place: int) -> Tensor:
    return x.narrow(dim, place % x.shape[dim], 1)


def _ends(x: Tensor, dim: int, first: Step, last: Step) -> tuple[Tensor, Tensor]:
    """Return the slopes of the lines through the first two rows, and the last two, so far apart."""
    return (_row(x, dim, 1) - _row(x, dim, 0)) / first, (_row(x, dim, -1) - _row(x, dim, -2)) / last


def _even_ends(x: Tensor, dim: int, step: Step) -> tuple[Tensor, Tensor]:
    """Return the slopes at the ends of the parabolas through three rows."""
    first = (-1.5 * _row(x, dim, 0) + 2 * _row(x, dim, 1) - 0.5 * _row(x, dim, 2)) / step
    return first, (0.5 * _row(x, dim, -3) - 2 * _row(x, dim, -2) + 1.5 * _row(x, dim, -1)) / step


def _curved_ends(x: Tensor, dim: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slopes at the ends of the parabolas through three rows that are ``h`` apart."""
    a = -(2.0 * h[0] + h[1]) / (h[0] * (h[0] + h[1]))
    b, c = (h[0] + h[1]) / (h[0] * h[1]), -h[0] / (h[1] * (h[0] + h[1]))
    first = a * _row(x, dim, 0) + b * _row(x, dim, 1) + c * _row(x, dim, 2)
    a, b = h[-1] / (h[-2] * (h[-1] + h[-2])), -(h[-1] + h[-2]) / (h[-1] * h[-2])
    c = (2.0 * h[-1] + h[-2]) / (h[-1] * (h[-1] + h[-2]))
    return first, a * _row(x, dim, -3) + b * _row(x, dim, -2) + c * _row(x, dim, -1)


# -- integrals -----------------------------------------------------------------------------------------------------


def _steps(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return the distances between rows, which broadcast with ``y``."""
    if len(x.shape) == 1:
        x = x.reshape([-1 if d == dim else 1 for d in range(len(y.shape))])
    else:
        x = x.reshape((1,) * (len(y.shape) - len(x.shape)) + tuple(x.shape))
    return torch.diff(x, dim=dim)


def _heights(y: Tensor, dim: int) -> Tensor:
    """Return the sums of neighbours."""
    return _between(y, dim, 0, 1) + _between(y, dim, 1, 0)


def _dim_of(y: Tensor, x: Tensor | None, dim: int) -> int:
    if torch.bool in (y.dtype, None if x is None else x.dtype):
        raise RuntimeError("trapezoid: it takes no bools")
    return normal_dim(dim, len(y.shape))


@handles(torch.trapezoid, torch.trapz)
def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Integral along a dim by the trapezoidal rule."""
    dim = _dim_of(y, x, dim)
    if not y.shape[dim]:
        return y.sum(dim, dtype=y.dtype)
    if x is not None:
        return (_heights(y, dim) * _steps(y, x, dim)).sum(dim) / 2.0
    result: Tensor = (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * float(dx)
    return result


@handles(torch.cumulative_trapezoid)
def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Integrals from the first row to each other one."""
    dim = _dim_of(y, x, dim)
    if not y.shape[dim]:
        return y.clone()
    if x is not None:
        return (_heights(y, dim) * _steps(y, x, dim)).cumsum(dim) / 2.0
    return (float(dx) / 2.0 * _heights(y, dim)).cumsum(dim)

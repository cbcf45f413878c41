"""Rectilinear grids: the rows between which points lie, along each dim, and the weights of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scidata.core.checks import check_choice
from scidata.core.types import FloatArray
from scidata.errors import ConfigError
from scidata.shard.tensor import ShardTensor

_METHODS = ("bilinear", "nearest")
_OUTSIDE = ("nan", "error", "clip")


@dataclass(frozen=True, kw_only=True, eq=False)
class GridAxis:
    """Coordinates of one dim of the grid, ascending; where they wrap, the first comes again at the end."""

    values: FloatArray
    num_rows: int
    descends: bool
    period: float
    outside: str

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return places wrapped or clipped, and whether each lies inside; no NaN does."""
        first, last = self.values[0], self.values[-1]
        x = x.to(torch.float64)
        if self.period:
            x = first + torch.remainder(x - first, self.period)
        elif self.outside == "clip":
            x = x.clamp(first, last)
        return x, (x >= first) & (x <= last)

    def locate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows before and after each place, and its share of the way between.

        A place on a row has share 0 of the next, as SciPy does; on the last row, share 1 of that.
        """
        values = torch.from_numpy(self.values).to(x.device)
        low = torch.searchsorted(values, x.detach(), right=True).sub_(1).clamp_(0, len(values) - 2)
        share = (x - values[low]) / (values[low + 1] - values[low])
        rows = [row % self.num_rows for row in (low, low + 1)]
        before, after = [self.num_rows - 1 - row for row in rows] if self.descends else rows
        return before, after, share


def _axis(number: int, coordinate: object, extent: int, period: float, outside: str) -> GridAxis:
    if isinstance(coordinate, Tensor):
        coordinate = (coordinate.full_tensor() if isinstance(coordinate, ShardTensor) else coordinate).cpu().numpy()
    given = np.arange(extent) if coordinate is None else np.asarray(coordinate)
    name = f"coordinate {number} of the grid"
    if given.shape != (extent,) or given.dtype.kind not in "iuf":
        raise ConfigError(
            f"{name} has shape {given.shape} and dtype {given.dtype}, but the dim has {extent} rows; pass one number "
            "for each row of the whole dim, on every rank"
        )
    values = given.astype(np.float64)
    descends = extent > 1 and bool(values[0] > values[-1])
    values = np.ascontiguousarray(values[::-1] if descends else values)
    if extent + bool(period) < 2:
        raise ConfigError(f"{name} has {extent} rows; two are needed to interpolate between")
    if not (np.diff(values) > 0).all() or not np.isfinite(values).all():
        raise ConfigError(f"{name} must ascend or descend strictly; sort its rows, or drop those that come twice")
    if period:
        if not 0 < values[-1] - values[0] < period < np.inf and extent > 1:
            raise ConfigError(
                f"{name} spans {values[-1] - values[0]:g}, which must be less than its period {period:g}; the row that "
                "comes again at the end is to be left out"
            )
        values = np.append(values, values[0] + period)
    return GridAxis(values=values, num_rows=extent, descends=descends, period=period, outside=outside)


class Corner(NamedTuple):
    """One corner of the cell of each point: its row by dim, and its weight, None for 1."""

    rows: tuple[Tensor, ...]
    weight: Tensor | None


class Found(NamedTuple):
    """Where points lie in the grid: whether inside, and whether outside where that is an error."""

    inside: Tensor
    refused: Tensor
    corners: list[Corner]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """A grid, and how points in it are interpolated."""

    axes: tuple[GridAxis, ...]
    method: str

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return a short text of the grid, equal on all ranks."""
        return self.method, *[(a.values.tobytes(), a.num_rows, a.descends, a.period, a.outside) for a in self.axes]

    @property
    def refuses(self) -> bool:
        """Whether a point outside is an error."""
        return any(axis.outside == "error" for axis in self.axes)

    def find(self, positions: Tensor) -> Found:
        """Return where points ``(num_points, num_dims)`` lie."""
        entered = [axis.enter(x) for axis, x in zip(self.axes, positions.unbind(1), strict=True)]
        inside = torch.stack([is_in for _, is_in in entered]).all(0)
        refused, corners = torch.zeros_like(inside), [Corner((), None)]
        for axis, (x, is_in) in zip(self.axes, entered, strict=True):
            refused = refused | ~is_in if axis.outside == "error" else refused
            # places outside lie on the first row of each dim: so nothing that is NaN meets their gradients
            before, after, share = axis.locate(torch.where(inside, x, axis.values[0]))
            if self.method == "nearest":
                corners = [Corner((*corners[0].rows, torch.where(share <= 0.5, before, after)), None)]
                continue
            corners = [
                Corner((*rows, row), factor if weight is None else weight * factor)
                for rows, weight in corners
                for row, factor in ((before, 1 - share), (after, share))
            ]
        return Found(inside, refused, corners)


def grid_of(
    extents: Sequence[int],
    coords: Sequence[object] | None,
    method: str,
    period: Sequence[float] | None,
    outside: str | Sequence[str],
    *,
    has_nan: bool,
) -> Grid:
    """Check the user's description of the grid; integers have no NaN for points outside."""
    check_choice("method", method, _METHODS)
    num = len(extents)
    coords, period = [None] * num if coords is None else coords, [0.0] * num if period is None else period
    outside = [outside] * num if isinstance(outside, str) else outside
    for name, given in {"coords": coords, "period": period, "outside": outside}.items():
        if not hasattr(given, "__len__"):
            raise ConfigError(f"interpolate: {name}={given!r}: expected one for each of the {num} dims of the grid")
        if len(given) != num:
            raise ConfigError(f"interpolate: {name} has {len(given)} entries for {num} dims of the grid")
    for width in period:
        if not isinstance(width, int | float | np.number) or isinstance(width, bool) or not 0 <= width < np.inf:
            raise ConfigError(f"interpolate: period={period!r}: expected a width of each dim, 0 where it does not wrap")
    axes = []
    for number, (extent, values, width, beyond) in enumerate(zip(extents, coords, period, outside, strict=True)):
        check_choice("outside", beyond, _OUTSIDE)
        axes.append(_axis(number, values, extent, width, "error" if beyond == "nan" and not has_nan else beyond))
    return Grid(axes=tuple(axes), method=method)

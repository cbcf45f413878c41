"""Assign points to the ranks of a split grid by their coordinates. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import ConfigError

#: Position column of each coordinate role.
COLUMNS: Mapping[str | None, int] = {"X": 0, "Y": 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class _CutDim:
    """One split dim of a grid; a descending coordinate is stored negated."""

    column: int
    sign: float
    first: float
    starts: FloatArray  # first coordinate of each part but the first, relative to ``first``

    def parts_of(self, x: AnyArray, period: float) -> IntArray:
        """Return the part of each place: the owner of the row below it, which owns the cell above that row."""
        y, ascends = self.sign * x - self.first, self.sign > 0
        if period:
            y = np.remainder(y, period) if ascends else period - np.remainder(-y, period)
        # a row of a descending grid belongs to the cell before it, as in interpolation
        return np.searchsorted(self.starts, y, side="right" if ascends else "left")


@dataclass(frozen=True, kw_only=True, eq=False)
class GridCut:
    """Split of a grid over ranks by coordinates: one dim per mesh axis, the last axis varying fastest."""

    dims: tuple[_CutDim, ...]

    @classmethod
    def of(cls, dims: Sequence[tuple[int, npt.ArrayLike, npt.ArrayLike, bool]]) -> GridCut:
        """Build a cut from each dim's position column, coordinate, bounds, and whether it wraps."""
        made = []
        for column, values, bounds, wraps in dims:
            rows, cuts = np.asarray(values, np.float64), np.asarray(bounds)[1:-1]
            sign = -1.0 if len(rows) > 1 and rows[0] > rows[-1] else 1.0
            if len(rows) < 2 or not (np.diff(sign * rows) > 0).all():
                raise ConfigError("cut_like: coordinates must ascend or descend strictly, and be two at least")
            starts = sign * (rows[np.minimum(cuts, len(rows) - 1)] - rows[0])
            starts = np.where(cuts > len(rows) - 2 + wraps, np.inf, np.where(cuts == 0, -np.inf, starts))
            made.append(_CutDim(column=column, sign=sign, first=float(sign * rows[0]), starts=starts))
        return cls(dims=tuple(made))

    @property
    def num_parts(self) -> int:
        """Number of ranks."""
        return math.prod(len(dim.starts) + 1 for dim in self.dims)

    def owners(self, points: AnyArray, *, on_sphere: bool) -> IntArray:
        """Return the rank of each point ``(num, 2 or 3)``: x or longitude, y or latitude. NaN goes to the last rank."""
        owner = np.zeros(len(points), np.int64)
        for dim in self.dims:
            period = 360.0 if on_sphere and dim.column == 0 else 0.0
            owner = owner * (len(dim.starts) + 1) + dim.parts_of(points[:, dim.column], period)
        return owner

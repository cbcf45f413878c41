"""Exact count, sums, squares and extremes of any number of values: equal bits for any split and order.

Numbers are cut into slices of few bits on a common grid, so that float64 holds sums of slices, and of products of
slices, without rounding; those sums are then added up as Python's integers, which round nothing. The slices are those
of K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, "Error-free transformations of matrix multiplication by using fast routines
of matrix multiplication and its applications", Numerical Algorithms 59 (2012). Mean and deviation are rounded once, at
the end. So merging is addition: no tree of merges, whose shape the result could depend on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray

#: JSON form of moments: counts as integers, other numbers in hexadecimal.
State: TypeAlias = dict[str, list[int | str]]

_PIECE = 1 << 14  # values per batch: its slices fit in a core's L2 cache
_BITS = 19  # bits of a slice: products have 38, sums of _PIECE products 52, which float64 holds
_MAX_SLICES = 4  # 79 bits in all; numbers with lower bits are added separately
_DOT = 1 << 13  # BLAS uses several threads for vectors of 10000 and more
_FAR = 300  # binary exponents beyond which squares approach float64's limits
_COUNTS, _EXTREMES, _SUMS = ("count", "missing", "infinite"), ("min", "max"), ("sums", "squares")
_UNIT = 1200  # sums are integers in units of 2**-1200, squares in units of 2**-2400


class Moments:
    """Exact moments in each of ``num_cells`` cells, for example levels.

    NaN is counted as missing, infinite numbers apart from it; neither enters the sums or the extremes. Integers of more
    than 53 bits are rounded to float64 first, as NumPy does.

    ``count, missing, infinite``: ``(num_cells,)`` int64: finite numbers, NaN, and infinite ones.
    ``min, max``: ``(num_cells,)`` float64, ``inf`` and ``-inf`` if there is no finite number.
    """

    def __init__(self, num_cells: int = 1) -> None:
        self.count, self.missing, self.infinite = (np.zeros(num_cells, np.int64) for _ in range(3))
        self.min, self.max = np.full(num_cells, np.inf), np.full(num_cells, -np.inf)
        self._sums, self._squares = [0] * num_cells, [0] * num_cells

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.count)

    def add(self, values: AnyArray, minus: AnyArray | None = None) -> None:
        """Add values, ``(num_cells, n)`` of any real dtype, or their differences from ``minus`` in float64."""
        num_cells, num = values.shape
        at_once = max(1, _PIECE // max(1, num))  # cells
        work = np.empty((_MAX_SLICES + 2, min(_PIECE, at_once * num)))  # fresh memory costs as much as the sums
        for first in range(0, num_cells if num else 0, at_once):
            cells = slice(first, min(first + at_once, num_cells))
            for start in range(0, num, _PIECE):
                columns = slice(start, start + _PIECE)
                piece = values[cells, columns]
                with np.errstate(invalid="ignore", over="ignore"):
                    x = work[0, : piece.size].reshape(piece.shape)
                    if minus is None:
                        np.copyto(x, piece)
                    else:
                        np.subtract(piece, minus[cells, columns], out=x, dtype=np.float64)
                self._add_piece(first, x, work[1:])

    def _add_piece(self, first: int, x: FloatArray, work: FloatArray) -> None:
        cells = slice(first, first + len(x))
        low, high = x.min(axis=1), x.max(axis=1)
        self.count[cells] += x.shape[1]
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            missing, finite = np.isnan(x), np.isfinite(x)
            num_missing, num_finite = missing.sum(axis=1), finite.sum(axis=1)
            self.missing[cells] += num_missing
            self.infinite[cells] += x.shape[1] - num_finite - num_missing
            self.count[cells] -= x.shape[1] - num_finite
            low, high = np.where(finite, x, np.inf).min(axis=1), np.where(finite, x, -np.inf).max(axis=1)
            x = np.where(finite, x, 0.0)
        # -0.0 equals 0.0, and the split decides which comes first
        self.min[cells] = np.minimum(self.min[cells], low + 0.0)
        self.max[cells] = np.maximum(self.max[cells], high + 0.0)
        self._add_finite(first, x, 0, work, max(float(high.max()), -float(low.min()), 0.0))

    def _add_finite(
        self, first: int, x: FloatArray, scaled: int, work: FloatArray | None = None, peak: float = -1.0
    ) -> None:
        """Add values, scaled by ``2**scaled``, to the sums of cells from ``first`` on."""
        if peak < 0:
            peak = max(float(x.max()), -float(x.min()))
        if peak == 0:
            return
        exponent = math.frexp(peak)[1]  # no number is larger than 2**exponent
        if abs(exponent) > _FAR and not scaled:  # a huge or tiny maximum needs another power of two
            scaled = -2 * _FAR if exponent > 0 else 2 * _FAR
            far = np.abs(x) > 2.0**_FAR if exponent > 0 else np.ones(x.shape, np.bool_)
            self._add_finite(first, np.where(far, np.ldexp(x, scaled), 0.0), scaled)
            self._add_finite(first, np.where(far, 0.0, x), 0)
            return
        slices, left = _sliced(x, exponent, np.empty((_MAX_SLICES + 1, x.size)) if work is None else work)
        for i, a in enumerate(slices):
            self._put(self._sums, first, np.asarray(a.sum(axis=1)), _UNIT - scaled)
            for b in slices[: i + 1]:
                self._put(self._squares, first, _row_dots(a, b), 2 * (_UNIT - scaled) + (b is not a))
        for row in np.flatnonzero(left.any(axis=1)) if left is not None else ():
            self._add_finite(first + int(row), x[row][left[row]][None], scaled)  # type: ignore[index]

    @staticmethod
    def _put(to: list[int], first: int, sums: FloatArray, unit: int) -> None:
        """Add exact sums to integers in units of ``2**-unit``."""
        for cell, value in enumerate(sums.tolist(), first):
            if value:
                mantissa, exponent = math.frexp(value)
                shift = exponent - 53 + unit
                number = int(mantissa * 2.0**53)
                to[cell] += number << shift if shift >= 0 else number >> -shift  # multiples of the unit: exact

    def merge(self, other: Moments, cells: IntArray | None = None) -> None:
        """Add other moments of the same cells, or of the cells ``cells``."""
        at = np.arange(self.num_cells) if cells is None else cells
        for name in _COUNTS:
            getattr(self, name)[at] += getattr(other, name)
        self.min[at], self.max[at] = np.minimum(self.min[at], other.min), np.maximum(self.max[at], other.max)
        for cell, total, square in zip(at.tolist(), other._sums, other._squares, strict=True):
            self._sums[cell] += total
            self._squares[cell] += square

    def state(self) -> State:
        """Return the state as JSON values, for other processes."""
        state: State = {name: getattr(self, name).tolist() for name in _COUNTS}
        state |= {name: [value.hex() for value in getattr(self, name).tolist()] for name in _EXTREMES}
        return state | {name: [hex(value) for value in getattr(self, f"_{name}")] for name in _SUMS}

    @classmethod
    def of(cls, state: State) -> Moments:
        """Restore moments from :meth:`state`."""
        made = cls(len(state["count"]))
        for name in _COUNTS:
            setattr(made, name, np.array(state[name], np.int64))
        for name in _EXTREMES:
            setattr(made, name, np.array([float.fromhex(str(text)) for text in state[name]], np.float64))
        for name in _SUMS:
            setattr(made, f"_{name}", [int(str(text), 16) for text in state[name]])
        return made

    def result(self) -> RoundedMoments:
        """Return the moments as float64; NaN for cells without finite values."""
        some = self.count > 0
        cells = list(zip(self.count.tolist(), self._sums, self._squares, strict=True))
        return RoundedMoments(
            count=self.count.copy(),
            missing=self.missing.copy(),
            infinite=self.infinite.copy(),
            mean=np.array([total / (num << _UNIT) if num else math.nan for num, total, _ in cells], np.float64),
            std=np.array([_deviation(*cell) if cell[0] else math.nan for cell in cells], np.float64),
            min=np.where(some, self.min, np.nan),
            max=np.where(some, self.max, np.nan),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundedMoments:
    """Moments rounded to float64, counts int64, all of one shape; ``std`` is the population's."""

    count: IntArray
    missing: IntArray
    infinite: IntArray
    mean: FloatArray
    std: FloatArray
    min: FloatArray
    max: FloatArray

    def parts(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in (*_COUNTS, "mean", "std", *_EXTREMES)}

    def reshaped(self, shape: tuple[int, ...]) -> RoundedMoments:
        """Return the moments in another shape."""
        return RoundedMoments(**{name: array.reshape(shape) for name, array in self.parts().items()})


def _sliced(x: FloatArray, exponent: int, work: FloatArray) -> tuple[list[FloatArray], BoolArray | None]:
    """Cut values of at most ``2**exponent`` into slices that add up to them, except those in the returned mask.

    Slice k consists of multiples of ``2**(exponent - 19 - 20 k)``, at most ``2**19`` of them. They lie in ``work``.
    """
    # With slices of 2 decimal digits instead of 19 bits 0.1234 is 0.12 + 0.0034. Adding a number so large that its last
    # place is 0.01, and subtracting it again, rounds to 0.12; the rest goes through the next round, with 0.0001.
    slices: list[FloatArray] = []
    room = [row[: x.size].reshape(x.shape) for row in work]
    rest = x
    for a in room[1:]:
        big = math.ldexp(1.5, 52 + exponent - _BITS)  # adding it rounds to multiples of its last place
        np.add(rest, big, out=a)
        np.subtract(a, big, out=a)
        rest = np.subtract(rest, a, out=room[0])
        slices.append(a)
        if not rest.any():
            return slices, None
        exponent -= _BITS + 1
    left = rest != 0
    for a in slices:
        a[left] = 0
    return slices, left


def _row_dots(a: FloatArray, b: FloatArray) -> FloatArray:
    if len(a) > 1:
        return np.asarray(np.einsum("ij,ij->i", a, b))
    pieces = range(0, a.shape[1], _DOT)
    return np.array([sum(float(np.dot(a[0, i : i + _DOT], b[0, i : i + _DOT])) for i in pieces)])


def _deviation(num: int, total: int, square: int) -> float:
    """Return ``sqrt(square / num - (total / num)**2)``, to one unit in the last place."""
    top = num * square - total * total  # times num**-2 and 2**-2400
    if top == 0:
        return 0.0
    shift = max(0, 130 - top.bit_length() + 2 * num.bit_length())
    shift += shift % 2
    root = math.isqrt((top << shift) // (num * num))
    # of 64 bits and more, of which the division makes 53
    try:
        return root / (1 << (_UNIT + shift // 2))
    except OverflowError:  # of numbers near the largest of float64
        return math.inf

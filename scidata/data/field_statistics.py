"""``FieldStatistics``: statistics of one field over the samples of a data set. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.moments import RoundedMoments
from scidata.errors import UnknownNameError

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

#: Labels of the rows along a dim; None where it has none.
Labels: TypeAlias = tuple[float | int | str, ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldStatistics(RoundedMoments):
    """Statistics of one field: arrays of shape ``()``, or one number for each row of the dims they are kept by.

    Attributes
    ----------
    dims
        The dims of the arrays.
    count, missing, infinite
        int64: numbers of finite values, of NaN (also from decoded fill values), and of infinite values.
    mean, std, min, max
        float64, of the finite values; NaN where ``count`` is 0. ``std`` is the population's (``ddof=0``).
    differences
        The same of the differences from one step to the next; None where there are none.
    skipped
        Pairs of rows that follow each other but are not one usual step apart, so that they make no difference.
    units, dtype
        Of the field, as it was read; None where they are not known.
    """

    dims: tuple[str, ...]
    differences: RoundedMoments | None = None
    skipped: int = 0
    units: str | None = None
    dtype: str | None = None

    @property
    def _steps(self) -> RoundedMoments:
        if self.differences is None:
            raise UnknownNameError("these statistics have no differences from one step to the next")
        return self.differences

    @property
    def difference_count(self) -> Counts:
        """Differences between two finite values, one step apart."""
        return self._steps.count

    @property
    def difference_mean(self) -> Floats:
        """Mean of these differences."""
        return self._steps.mean

    @property
    def difference_std(self) -> Floats:
        """Their standard deviation, of the population."""
        return self._steps.std

    @property
    def difference_min(self) -> Floats:
        """The least of them."""
        return self._steps.min

    @property
    def difference_max(self) -> Floats:
        """The greatest of them."""
        return self._steps.max

    def __repr__(self) -> str:
        by = f" by {', '.join(self.dims)}" if self.dims else ""
        return f"FieldStatistics({int(self.count.sum())} values{by}, mean {span(self.mean)}, std {span(self.std)})"


def span(values: Floats) -> str:
    """Return a number, or the least and the greatest of several."""
    known = values[np.isfinite(values)]
    if not known.size:
        return "nan"
    low, high = float(known.min()), float(known.max())
    return f"{low:.6g}" if low == high or math.isclose(low, high, rel_tol=1e-6) else f"{low:.4g} to {high:.4g}"

"""Bounds of irregular data: cuts of a prefix sum of costs, for any number of parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import at_least_one_each, even_bounds, weighted_bounds
from scidata.core.checks import is_int
from scidata.core.keywords import checked_keywords
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError


def prefix_of(weights: npt.ArrayLike) -> FloatArray:
    """Return ``(num + 1,)`` float64: the sum of the weights before each row, and of all.

    Raises ConfigError: not one weight per row, or one that is negative, NaN or infinite.
    """
    cost = np.asarray(weights, np.float64)
    if cost.ndim != 1:
        raise ConfigError(f"weights must have one value per row, not shape {cost.shape}")
    if not np.all(np.isfinite(cost)) or np.any(cost < 0):
        bad = np.flatnonzero(~np.isfinite(cost) | (cost < 0))
        raise ConfigError(
            f"{len(bad)} weights are negative, NaN or infinite (first rows: {bad[:5].tolist()}); a cost is 0 or more"
        )
    return np.concatenate([[0.0], np.cumsum(cost)])


def equal_bounds(num_rows: int, num_parts: int) -> IntArray:
    """Cut rows into parts of equal numbers of them; where there are fewer rows than parts, the last parts are empty."""
    if num_parts >= num_rows:
        return np.minimum(np.arange(num_parts + 1, dtype=np.int64), num_rows)
    return even_bounds(num_rows, num_parts)


def cut_bounds(prefix: npt.ArrayLike, num_parts: int, *, rows: npt.ArrayLike | None = None) -> IntArray:
    """Cut rows into parts of about equal cost.

    Every part gets at least one row if there are enough; beyond that the last parts are empty, which is legal for
    irregular data.

    - ``prefix``: sum of the costs before row ``rows[i]``, non-decreasing, first 0. ``csr.indptr`` balances edges.
    - ``rows``: the row of each entry, from 0 to the number of rows; default ``0, 1, 2, …``. Between entries that lie
      further apart (a store keeps one per block) the cost counts as even.

    Returns ``(num_parts + 1,)`` int64. Raises ConfigError: fewer than one part, or a prefix that decreases, is not
    finite or does not fit ``rows``.
    """
    sums = np.asarray(prefix, np.float64)
    places = np.arange(len(sums), dtype=np.int64) if rows is None else np.asarray(rows, np.int64)
    if num_parts < 1:
        raise ConfigError(f"number of parts must be at least 1, not {num_parts}")
    if sums.ndim != 1 or len(sums) < 1 or places.shape != sums.shape:
        raise ConfigError(f"a prefix sum has one entry per row and one more, not shape {sums.shape} for {places.shape}")
    costs = np.diff(sums)
    if not np.all(np.isfinite(sums)) or np.any(costs < 0) or places[0] != 0 or np.any(np.diff(places) < 0):
        raise ConfigError("a prefix sum of costs must be finite, start at row 0 and never decrease")
    num_global = int(places[-1])
    if num_parts >= num_global or (rows is not None and sums[-1] == sums[0]):
        return equal_bounds(num_global, num_parts)
    if rows is None:
        return weighted_bounds(costs, num_parts)
    targets = sums[0] + (sums[-1] - sums[0]) * np.arange(1, num_parts) / num_parts
    return at_least_one_each(np.rint(np.interp(targets, sums, places)).astype(np.int64), num_global)


@checked_keywords
def balanced_bounds(bounds: Sequence[int], seconds: Sequence[float], num_parts: int | None = None) -> IntArray:
    """Return the bounds of parts of equal cost, from what the parts of an earlier cut took.

    Between two bounds each row counts as much as the others. So it is exact where the cost of rows is even in each
    part, and comes nearer with each cut otherwise, also where one rank is slower than the others. Pure arithmetic: the
    same on every rank of which the arguments are.

    Parameters
    ----------
    bounds : Sequence[int]
        The cut, ``[0, …, N]``: of rows along a dimension of a grid, of points, nodes or cells.
    seconds : Sequence[float]
        What each part took, without waiting for others: one fewer than bounds.
    num_parts : int or None, optional
        Parts of the new cut; default as many.

    Returns
    -------
    ndarray
        ``(num_parts + 1,)`` int64, for ``open_dataset(bounds=)``. At least one row for each part, as far as there are.

    Raises
    ------
    ConfigError
        Seconds that are negative, not finite or not one for each part; bounds that decrease.

    Examples
    --------
    >>> scidata.balanced_bounds([0, 40, 80, 120], [2.0, 1.0, 1.0]).tolist()
    [0, 27, 67, 120]
    """
    if num_parts is not None and (not is_int(num_parts) or num_parts < 1):
        raise ConfigError(f"balanced_bounds: num_parts={num_parts!r}: expected a number from 1 on")
    try:
        rows, costs = np.asarray(bounds), np.asarray(seconds, np.float64)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"balanced_bounds: bounds={bounds!r}, seconds={seconds!r}: expected numbers") from e
    if rows.dtype.kind not in "iu":
        raise ConfigError(f"balanced_bounds: bounds={bounds!r}: expected integers")
    if rows.ndim != 1 or costs.shape != (len(rows) - 1,):
        raise ConfigError(f"balanced_bounds: {costs.shape} seconds for bounds of shape {rows.shape}; one for each part")
    return cut_bounds(prefix_of(np.where(np.diff(rows) > 0, costs, 0)), num_parts or len(costs), rows=rows)

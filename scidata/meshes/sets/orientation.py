"""On which side of a plane through the origin a point lies, without error: the sign of a 3 x 3 determinant.

With points of the unit sphere this says on which side of an arc a third point is; with ``(x, y, 1)`` of which side of a
line in the plane. A floating-point value decides wherever its error bound allows (Shewchuk, "Adaptive precision
floating-point arithmetic and fast robust geometric predicates", Discrete and Computational Geometry 18, 1997), whole
numbers of any length decide the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.meshes.sets.sphere import Floats

Signs = npt.NDArray[np.int8]

# Products, differences and sums round at most five times on the way to each of the terms; 8 leaves room for the bound's
# own rounding. Below the second number products may have lost bits to underflow.
_ROUNDED = 8 * 2.0**-53
_TINY = 1e-280
_BLOCK = 1 << 14


def orientations(one: Floats, two: Floats, points: Floats) -> Signs:
    """Return the sign of ``det(one, two, point)``, exactly, for rows of ``(num, 3)`` float64 each.

    1 where ``point`` lies to the left of the way from ``one`` to ``two``, seen from outside; 0 on it.
    """
    (ax, ay, az), (bx, by, bz), (px, py, pz) = one.T, two.T, points.T
    value, size = np.zeros(len(points)), np.zeros(len(points))
    for (u, v), (s, t), w in (((ay, az), (by, bz), px), ((az, ax), (bz, bx), py), ((ax, ay), (bx, by), pz)):
        first, second = u * t, v * s
        value += (first - second) * w
        size += (np.abs(first) + np.abs(second)) * np.abs(w)
    signs = np.sign(value).astype(np.int8)
    open_rows = np.flatnonzero(~(np.abs(value) > _ROUNDED * size + _TINY))
    # a point at an end of the way is on it: no arithmetic for the commonest case
    ends = (one[open_rows] == points[open_rows]).all(axis=1) | (two[open_rows] == points[open_rows]).all(axis=1)
    ends |= (one[open_rows] == two[open_rows]).all(axis=1)
    signs[open_rows[ends]] = 0
    rest = open_rows[~ends]
    for start in range(0, len(rest), _BLOCK):
        rows = rest[start : start + _BLOCK]
        signs[rows] = _exact_signs(one[rows], two[rows], points[rows])
    return signs


def _exact_signs(one: Floats, two: Floats, points: Floats) -> Signs:
    a, b, p = _integers(one), _integers(two), _integers(points)
    value = (a[:, 1] * b[:, 2] - a[:, 2] * b[:, 1]) * p[:, 0]
    value += (a[:, 2] * b[:, 0] - a[:, 0] * b[:, 2]) * p[:, 1]
    value += (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) * p[:, 2]
    signs: Signs = (value > 0).astype(np.int8) - (value < 0).astype(np.int8)
    return signs


def _integers(values: Floats) -> npt.NDArray[Any]:
    """Return whole numbers of any length in the ratios of the values of each row."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    exponent = np.where(whole == 0, np.iinfo(exponent.dtype).max, exponent)  # zeros say nothing about the common factor
    shift = np.where(whole == 0, 0, exponent - exponent.min(axis=1, keepdims=True))
    return np.asarray(whole.astype(object) << shift.astype(object))

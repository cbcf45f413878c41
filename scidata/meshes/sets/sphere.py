"""From longitude and latitude in degrees to the unit sphere and back, exact at round angles."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.meshes.order.ids import blocks

Floats: TypeAlias = npt.NDArray[np.float64]

_BLOCK = 1 << 16


def sin_cos(degrees: Floats) -> tuple[Floats, Floats]:
    """Return sine and cosine of angles in degrees, of the same bits wherever the angles are mirror images.

    The angle is reduced to 45 degrees around the nearest multiple of 90, which is exact in degrees, before it becomes
    radians: so the poles are at one point each, 360 is 0, and distances that are equal by symmetry come out equal.
    """
    whole = np.fmod(degrees, 360.0)
    quarter = np.rint(whole / 90.0)
    rest = np.deg2rad(whole - 90.0 * quarter)
    sine, cosine = np.sin(rest), np.cos(rest)
    turn = quarter.astype(np.int64) & 3
    odd, back = (turn & 1).astype(np.bool_), turn >= 2
    cosine_back = (turn == 1) | (turn == 2)
    # adding 0 leaves no negative zero: -0.0 and 0.0 would send arctan2 to opposite sides
    sines = np.where(odd, cosine, sine) * np.where(back, -1.0, 1.0) + 0.0
    cosines = np.where(odd, sine, cosine) * np.where(cosine_back, -1.0, 1.0) + 0.0
    return sines, cosines


def unit_vectors(points: Floats) -> Floats:
    """Return ``(num, 3)`` points of the unit sphere for ``(num, 2)`` longitude and latitude in degrees."""
    out = np.empty((len(points), 3))
    for rows in blocks(len(points), _BLOCK):
        (sin_lon, cos_lon), (sin_lat, cos_lat) = sin_cos(points[rows, 0]), sin_cos(points[rows, 1])
        out[rows, 0] = cos_lat * cos_lon
        out[rows, 1] = cos_lat * sin_lon
        out[rows, 2] = sin_lat
    return out


def degrees_of(vectors: Floats) -> Floats:
    """Return ``(num, 2)`` longitude in [0, 360) and latitude in degrees of ``(num, 3)`` vectors of any length."""
    x, y, z = vectors.T
    out = np.empty((len(vectors), 2))
    out[:, 0] = np.rad2deg(np.arctan2(y, x)) % 360.0
    out[:, 0] *= out[:, 0] < 360.0  # of the smallest negative angle the remainder is rounded to 360
    out[:, 1] = np.rad2deg(np.arctan2(z, np.hypot(x, y)))
    return out

"""Coordinates as the orders need them: checked, and longitudes and latitudes on the unit sphere."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.errors import ConfigError

#: Lower and upper corner, ``(dims,)`` each.
Box: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]

_BLOCK = 1 << 20
_SAMPLE = 4096


def finite_points(points: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the points as an array, unchanged, after checking shape and values.

    Raises
    ------
    ConfigError
        Not ``(num, 2)`` or ``(num, 3)`` real numbers, or a coordinate that is NaN or infinite: the count and the
        first rows are named.
    """
    array = np.asarray(points)
    if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iuf":
        raise ConfigError(f"points must be (num, 2) or (num, 3) real numbers, not {array.dtype} of shape {array.shape}")
    bad: list[int] = []
    count = 0
    for start in range(0, len(array), _BLOCK):
        rows = np.flatnonzero(~np.isfinite(array[start : start + _BLOCK]).all(axis=1))
        count += len(rows)
        bad += (start + rows[: 5 - len(bad)]).tolist()
    if count:
        raise ConfigError(
            f"{count} of {len(array)} points have a NaN or infinite coordinate (first rows: {bad}): no order has a "
            f"place for them; drop or mend these rows first"
        )
    return array


def unit_sphere(points: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Turn ``(num, 2)`` longitude and latitude in degrees into ``(num, 3)`` float64 points of the unit sphere."""
    array = finite_points(points)
    if array.shape[1] != 2:
        raise ConfigError(f"points on a sphere are (num, 2) longitude and latitude in degrees, not {array.shape}")
    lon, lat = np.deg2rad(array.astype(np.float64)).T
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def middle_box(points: npt.NDArray[Any]) -> Box:
    """Return a box that holds the middle 96 % of each axis, of a sample of the points."""
    sample = np.sort(points[:: -(-len(points) // _SAMPLE)].astype(np.float64), axis=0)
    left_out = min(max(len(sample) // 50, 1), (len(sample) - 1) // 2)
    return sample[left_out], sample[-1 - left_out]


def robust_box(points: npt.NDArray[Any]) -> Box:
    """Return the bounding box of the points, but for those that lie farther off than the middle ones are apart."""
    lower, upper = middle_box(points)
    with np.errstate(over="ignore"):
        reach = upper - lower
        return np.maximum(points.min(axis=0), lower - reach), np.minimum(points.max(axis=0), upper + reach)

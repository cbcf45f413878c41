"""Regular grids of latitude and longitude as node sets, with their quads and the areas of their nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.sets.node_set import NodeSet
from scidata.meshes.sets.sphere import Floats, sin_cos

_QUAD = 9
# A gap between the last longitude and the first that is this much wider than any other is the end of a region.
_CLOSED = 1.5


def lat_lon(resolution_degrees: float, *, poles: bool = True) -> NodeSet:
    """Return the global grid with one spacing for latitude and longitude, from north to south, eastward from 0.

    With poles it is ERA5's as ECMWF's Climate Data Store gives it (0.25 degrees: 721 x 1440), GraphCast's input.

    Parameters
    ----------
    resolution_degrees
        Divides 180.
    poles
        The first and last row of nodes lie at the poles; else half a spacing from them.

    Returns
    -------
    NodeSet
        As :func:`latitude_longitude` makes it.

    Raises
    ------
    ConfigError
        A spacing that does not divide 180, or is not positive.
    """
    rows = 180.0 / resolution_degrees if resolution_degrees > 0 else 0.0
    num = round(rows)
    if num < 1 or abs(rows - num) > 1e-9 * rows:
        raise ConfigError(f"the spacing of a global grid must divide 180 degrees; {resolution_degrees} does not")
    steps = np.arange(num + 1) if poles else np.arange(num) + 0.5
    return latitude_longitude(90.0 - steps * 180.0 / num, np.arange(2 * num) * 180.0 / num)


def latitude_longitude(latitudes: npt.ArrayLike, longitudes: npt.ArrayLike) -> NodeSet:
    """Return a grid of latitudes times longitudes, row-major: longitude varies fastest.

    Parameters
    ----------
    latitudes, longitudes
        Degrees, strictly increasing or strictly decreasing, at least one each; longitudes over 360 degrees at most.

    Returns
    -------
    NodeSet
        ``cells``: the quads between neighbours, also between the last longitude and the first where the gap between
        them is no wider than elsewhere. ``fields["area"]``: steradians of the box that reaches half-way to each
        neighbour, at most to the pole (the sum is 4 pi on a global grid). Neither where there is but one latitude or
        longitude.

    Raises
    ------
    ConfigError
        Values that are NaN, repeat, change direction, or reach too far.
    """
    lats, lons = _axis(latitudes, "latitudes", 180.0), _axis(longitudes, "longitudes", 360.0)
    points = np.empty((len(lats), len(lons), 2))
    points[:, :, 0], points[:, :, 1] = lons, lats[:, None]
    shape = (len(lats), len(lons))
    if min(shape) < 2:
        return NodeSet(points=points.reshape(-1, 2), on_sphere=True, grid_shape=shape)
    gaps = np.abs(np.diff(lons))
    closed = bool(0 < 360.0 - abs(lons[-1] - lons[0]) <= _CLOSED * gaps.max())
    # each column covers the degrees of longitude half-way to its neighbours
    ends = (360.0 - gaps.sum(),) * 2 if closed else (gaps[0], gaps[-1])
    widths = (np.concatenate([ends[:1], gaps]) + np.concatenate([gaps, ends[1:]])) / 2
    area = np.outer(_heights(lats), np.deg2rad(widths)).reshape(-1)
    return NodeSet(
        points=points.reshape(-1, 2),
        on_sphere=True,
        cells=_quads(lats, lons, closed),
        grid_shape=shape,
        fields={"area": area},
    )


def _axis(values: npt.ArrayLike, what: str, reach: float) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ConfigError(f"{what} of a grid are one dimension of finite numbers, not shape {array.shape} or NaN")
    steps = np.diff(array)
    if len(steps) and not ((steps > 0).all() or (steps < 0).all()):
        wrong = np.flatnonzero(steps * np.sign(array[-1] - array[0]) <= 0)
        raise ConfigError(
            f"{what} of a grid must increase or decrease throughout, but {len(wrong)} steps do not (first after "
            f"position {wrong[:1].tolist()}); begin where they jump by 360"
        )
    if abs(array[-1] - array[0]) > reach:
        raise ConfigError(f"{what} of a grid reach over {abs(array[-1] - array[0])} degrees, more than {reach:g}")
    return array


def _heights(lats: Floats) -> Floats:
    """Return the difference of the sine of latitude over each row, half-way to its neighbours."""
    middles = (lats[1:] + lats[:-1]) / 2
    first, last = lats[0] - (lats[1] - lats[0]) / 2, lats[-1] + (lats[-1] - lats[-2]) / 2
    bounds = np.clip(np.concatenate([[first], middles, [last]]), -90, 90)
    # sin(a) - sin(b), without the cancellation near the poles
    cosine, sine = sin_cos((bounds[1:] + bounds[:-1]) / 2)[1], sin_cos(np.abs(bounds[1:] - bounds[:-1]) / 2)[0]
    return 2 * cosine * sine


def _quads(lats: Floats, lons: Floats, closed: bool) -> RawCells:
    num_lat, num_lon = len(lats), len(lons)
    west = np.arange(num_lon if closed else num_lon - 1)
    east = (west + 1) % num_lon
    row = num_lon * np.arange(num_lat - 1)[:, None]
    corners = [row + west, row + num_lon + west, row + num_lon + east, row + east]
    if (lats[-1] > lats[0]) != (lons[-1] < lons[0]):  # rows go north, or columns west, but not both
        corners.reverse()
    nodes: IntArray = np.stack(corners, axis=-1).reshape(-1)
    num = len(nodes) // 4
    offsets = np.arange(0, 4 * num + 1, 4, dtype=np.int64)
    return RawCells(offsets=offsets, connectivity=nodes, cell_type=np.full(num, _QUAD, np.uint8))

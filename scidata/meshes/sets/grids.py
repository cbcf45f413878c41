"""Regular grids of latitude and longitude as node sets, with their quads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.sets.node_set import NodeSet
from scidata.meshes.sets.sphere import Floats

_QUAD = 9
# A gap between the last longitude and the first that is this much wider than any other is the end of a region.
_CLOSED = 1.5


def lat_lon(resolution_degrees: float) -> NodeSet:
    """Return the global grid with one spacing for latitude and longitude, from north to south, eastward from 0.

    The first and last row lie at the poles, as in ERA5 of ECMWF's Climate Data Store (0.25 degrees: 721 x 1440),
    GraphCast's input.

    Parameters
    ----------
    resolution_degrees
        Divides 180.

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
    return latitude_longitude(90.0 - np.arange(num + 1) * 180.0 / num, np.arange(2 * num) * 180.0 / num)


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
        them is no wider than elsewhere; None where there is but one latitude or longitude.

    Raises
    ------
    ConfigError
        Values that are NaN, repeat, change direction, or reach too far.
    """
    lats, lons = _axis(latitudes, "latitudes", 180.0), _axis(longitudes, "longitudes", 360.0)
    points = np.empty((len(lats), len(lons), 2))
    points[:, :, 0], points[:, :, 1] = lons, lats[:, None]
    cells = None
    if min(len(lats), len(lons)) > 1:
        closed = bool(0 < 360.0 - abs(lons[-1] - lons[0]) <= _CLOSED * np.abs(np.diff(lons)).max())
        cells = _quads(lats, lons, closed)
    return NodeSet(points=points.reshape(-1, 2), on_sphere=True, cells=cells)


def _axis(values: npt.ArrayLike, name: str, reach: float) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ConfigError(f"{name} of a grid are one dimension of finite numbers, not shape {array.shape} or NaN")
    steps = np.diff(array)
    if len(steps) and not ((steps > 0).all() or (steps < 0).all()):
        wrong = np.flatnonzero(steps * np.sign(array[-1] - array[0]) <= 0)
        raise ConfigError(
            f"{name} of a grid must increase or decrease throughout, but {len(wrong)} steps do not (first after "
            f"position {wrong[:1].tolist()}); begin where they jump by 360"
        )
    if abs(array[-1] - array[0]) > reach:
        raise ConfigError(f"{name} of a grid reach over {abs(array[-1] - array[0])} degrees, more than {reach:g}")
    return array


def _quads(lats: Floats, lons: Floats, closed: bool) -> RawCells:
    num_lat, num_lon = len(lats), len(lons)
    west = np.arange(num_lon if closed else num_lon - 1)
    east = (west + 1) % num_lon
    row = num_lon * np.arange(num_lat - 1)[:, None]
    corners = [row + west, row + num_lon + west, row + num_lon + east, row + east]
    if (lats[-1] > lats[0]) != (lons[-1] < lons[0]):  # rows go north, or columns west, but not both
        corners.reverse()
    return RawCells.of_kind(np.stack(corners, axis=-1).reshape(-1, 4), _QUAD)

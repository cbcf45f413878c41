"""Grids of the sphere as node sets.

Regular ones of latitude and longitude, with their quads; HEALPix, by astropy-healpix; and Gaussian grids as ECMWF has
them: full (F), octahedral (O), and classical reduced ones (N) by their list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scidata.core.checks import optional_module
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.sets.node_set import NodeSet

_QUAD = 9
# A gap between the last longitude and the first that is this much wider than any other is the end of a region.
_CLOSED = 1.5


def lat_lon(resolution_degrees: float) -> NodeSet:
    """Return the global grid with one spacing for latitude and longitude, from north to south, eastward from 0.

    The first and last row lie at the poles, as in ERA5 of ECMWF's Climate Data Store (0.25 degrees: 721 x 1440),
    GraphCast's input.

    - ``resolution_degrees``: divides 180.

    As :func:`latitude_longitude` makes it.
    """
    rows = 180.0 / resolution_degrees if resolution_degrees > 0 else 0.0
    num = round(rows)
    if num < 1 or abs(rows - num) > 1e-9 * rows:
        raise ConfigError(f"the spacing of a global grid must divide 180 degrees; {resolution_degrees} does not")
    return latitude_longitude(90.0 - np.arange(num + 1) * 180.0 / num, np.arange(2 * num) * 180.0 / num)


def latitude_longitude(latitudes: npt.ArrayLike, longitudes: npt.ArrayLike) -> NodeSet:
    """Return a grid of latitudes times longitudes, row-major: longitude varies fastest.

    - ``latitudes``, ``longitudes``: degrees, strictly increasing or strictly decreasing, at least one each; longitudes
      over 360 degrees at most.

    Returns ``cells``: the quads between neighbours, also between the last longitude and the first where the gap between
    them is no wider than elsewhere; None if there is but one latitude or longitude. Raises ConfigError: values that
    are NaN, repeat, change direction, or reach too far.
    """
    lats, lons = _axis(latitudes, "latitudes", 180.0), _axis(longitudes, "longitudes", 360.0)
    points = np.empty((len(lats), len(lons), 2))
    points[:, :, 0], points[:, :, 1] = lons, lats[:, None]
    cells = None
    if min(len(lats), len(lons)) > 1:
        closed = bool(0 < 360.0 - abs(lons[-1] - lons[0]) <= _CLOSED * np.abs(np.diff(lons)).max())
        cells = _quads(lats, lons, closed)
    return NodeSet(points=points.reshape(-1, 2), on_sphere=True, cells=cells)


def _axis(values: npt.ArrayLike, name: str, reach: float) -> FloatArray:
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


def _quads(lats: FloatArray, lons: FloatArray, closed: bool) -> RawCells:
    num_lat, num_lon = len(lats), len(lons)
    west = np.arange(num_lon if closed else num_lon - 1)
    east = (west + 1) % num_lon
    row = num_lon * np.arange(num_lat - 1)[:, None]
    corners = [row + west, row + num_lon + west, row + num_lon + east, row + east]
    if (lats[-1] > lats[0]) != (lons[-1] < lons[0]):  # rows go north, or columns west, but not both
        corners.reverse()
    return RawCells.of_kind(np.stack(corners, axis=-1).reshape(-1, 4), _QUAD)


_MAX_NSIDE = 1 << 12  # 201 M nodes


def healpix(nside: int) -> NodeSet:
    """Return the ``12 * nside**2`` centres of the pixels of a HEALPix grid, in nested order.

    Defined in Gorski et al., "HEALPix: a framework for high-resolution discretization and fast analysis of data
    distributed on the sphere", Astrophysical Journal 622, 2005.

    - ``nside``: pixels along a side of each of the 12 base pixels, a power of two.

    Raises ConfigError: an ``nside`` that is no power of two up to 4096; MissingDependencyError: astropy-healpix is not
    installed.
    """
    if not isinstance(nside, int | np.integer) or not 1 <= nside <= _MAX_NSIDE or nside & (nside - 1):
        raise ConfigError(f"nside of a HEALPix grid is a power of two from 1 to {_MAX_NSIDE}, not {nside!r}")
    astropy_healpix = optional_module("astropy_healpix", "HEALPix needs astropy-healpix", "healpix")
    lon, lat = astropy_healpix.healpix_to_lonlat(np.arange(12 * int(nside) ** 2), int(nside), order="nested")
    points = np.stack([lon.to_value("deg"), lat.to_value("deg")], axis=1)
    return NodeSet(points=points, on_sphere=True)


_NEWTON_STEPS = 5  # from Tricomi's first guess; 3 are enough for 10,000 latitudes


def reduced_gaussian(name: str, pl: Sequence[int] | None = None) -> NodeSet:
    """Return the nodes of a Gaussian grid, from north to south, each latitude eastward from 0.

    The ``2 * N`` latitudes are those of Gauss-Legendre quadrature. An octahedral grid has ``4 * i + 16`` points on the
    i-th latitude from a pole (Malardel et al., "A new grid for the IFS", ECMWF Newsletter 146, 2016), a full one
    ``4 * N`` on each. How many the classical reduced grids have is a table (Hortal and Simmons, Monthly Weather Review
    119, 1991, made it for a given accuracy), not a formula: it comes with the data, as ``pl`` in GRIB.

    - ``name``: ``"O96"``, ``"F32"``, or ``"N32"`` with ``pl``.
    - ``pl``: points on each of the ``2 * N`` latitudes, from north to south.
    """
    found = re.fullmatch(r"([ONF])([1-9]\d{0,4})", str(name), re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"{name!r} is no Gaussian grid: expected O (octahedral), N (reduced) or F (full), such as O96"
        )
    kind, number = found[1].upper(), int(found[2])
    counts = _counts(kind, number, pl)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    points = np.empty((int(counts.sum()), 2))
    points[:, 0] = (np.arange(len(points)) - starts) * 360.0 / np.repeat(counts, counts)
    points[:, 1] = np.repeat(np.rad2deg(np.arcsin(gaussian_latitudes(2 * number))), counts)
    return NodeSet(points=points, on_sphere=True)


def _counts(kind: str, number: int, pl: Sequence[int] | None) -> IntArray:
    if pl is not None:
        counts = np.asarray(pl, np.int64)
        if len(counts) != 2 * number or int(counts.min()) < 1:
            raise ConfigError(
                f"{kind}{number} has {2 * number} latitudes; pl must be as many positive numbers, not {len(counts)}"
            )
        return counts
    if kind == "N":
        raise ConfigError(
            f"how many points N{number} has on each latitude is a table of ECMWF's: give pl=, GRIB's key of that "
            f"name (gaussian:FILE where it is built around a file), or take O{number} (octahedral) or F{number} "
            "(full), which need none"
        )
    half = 4 * np.arange(1, number + 1, dtype=np.int64) + 16 if kind == "O" else np.full(number, 4 * number)
    return np.concatenate([half, half[::-1]])


def gaussian_latitudes(num: int) -> FloatArray:
    """Return the sines of ``num`` (even) Gaussian latitudes, north to south, by Newton's method on the polynomial."""
    order = np.arange(1, num // 2 + 1)
    x = np.cos(np.pi * (order - 0.25) / (num + 0.5))  # Tricomi's first term, good to 1 / num**2
    for _ in range(_NEWTON_STEPS):
        before, value = np.ones_like(x), x
        for degree in range(2, num + 1):
            before, value = value, ((2 * degree - 1) * x * value - (degree - 1) * before) / degree
        slope = num * (before - x * value) / ((1 - x) * (1 + x))
        x = x - value / slope
    return np.concatenate([x, -x[::-1]])

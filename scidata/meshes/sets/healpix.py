"""HEALPix as a node set, by astropy-healpix."""

from __future__ import annotations

import numpy as np

from scidata.core.checks import optional_module
from scidata.errors import ConfigError
from scidata.meshes.sets.node_set import NodeSet

_MAX_NSIDE = 1 << 12  # 201 M nodes


def healpix(nside: int) -> NodeSet:
    """Return the ``12 * nside**2`` centres of the pixels of a HEALPix grid, in nested order.

    Defined in Gorski et al., "HEALPix: a framework for high-resolution discretization and fast analysis of data
    distributed on the sphere", Astrophysical Journal 622, 2005.

    Parameters
    ----------
    nside
        Pixels along a side of each of the 12 base pixels, a power of two.

    Raises
    ------
    ConfigError
        An ``nside`` that is no power of two up to 4096.
    MissingDependencyError
        astropy-healpix is not installed.
    """
    if not isinstance(nside, int | np.integer) or not 1 <= nside <= _MAX_NSIDE or nside & (nside - 1):
        raise ConfigError(f"nside of a HEALPix grid is a power of two from 1 to {_MAX_NSIDE}, not {nside!r}")
    astropy_healpix = optional_module("astropy_healpix", "HEALPix needs astropy-healpix", "healpix")
    lon, lat = astropy_healpix.healpix_to_lonlat(np.arange(12 * int(nside) ** 2), int(nside), order="nested")
    points = np.stack([lon.to_value("deg"), lat.to_value("deg")], axis=1)
    return NodeSet(points=points, on_sphere=True)

"""Gaussian grids as ECMWF has them: full (F), octahedral (O), and classical reduced ones (N) by their list."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.sets.node_set import NodeSet
from scidata.meshes.sets.sphere import Floats

_NEWTON_STEPS = 5  # from Tricomi's first guess; 3 are enough for 10,000 latitudes


def reduced_gaussian(name: str, pl: Sequence[int] | None = None) -> NodeSet:
    """Return the nodes of a Gaussian grid, from north to south, each latitude eastward from 0.

    The ``2 * N`` latitudes are those of Gauss-Legendre quadrature. An octahedral grid has ``4 * i + 16`` points on the
    i-th latitude from a pole (Malardel et al., "A new grid for the IFS", ECMWF Newsletter 146, 2016), a full one
    ``4 * N`` on each. How many the classical reduced grids have is a table (Hortal and Simmons, Monthly Weather Review
    119, 1991, made it for a given accuracy), not a formula: it comes with the data, as ``pl`` in GRIB.

    Parameters
    ----------
    name
        ``"O96"``, ``"F32"``, or ``"N32"`` with ``pl``.
    pl
        Points on each of the ``2 * N`` latitudes, from north to south.

    Raises
    ------
    ConfigError
        A name of another form, an N grid without ``pl``, or a ``pl`` of another length.
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
    """Return the points of each latitude, from north to south."""
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


def gaussian_latitudes(num: int) -> Floats:
    """Return the sines of the Gaussian latitudes from north to south, ``(num,)``, for an even ``num``.

    By Newton's method on the Legendre polynomial: NumPy takes the eigenvalues of a dense matrix.
    """
    order = np.arange(1, num // 2 + 1)
    x = np.cos(np.pi * (order - 0.25) / (num + 0.5))  # Tricomi's first term, good to 1 / num**2
    for _ in range(_NEWTON_STEPS):
        before, value = np.ones_like(x), x
        for degree in range(2, num + 1):
            before, value = value, ((2 * degree - 1) * x * value - (degree - 1) * before) / degree
        slope = num * (before - x * value) / ((1 - x) * (1 + x))
        x = x - value / slope
    return np.concatenate([x, -x[::-1]])

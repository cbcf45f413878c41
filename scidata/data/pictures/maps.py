"""Axes of a map where cartopy is installed, plain ones else."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class MapAxes(NamedTuple):
    """Axes, and the longitude that they have as 0: places are drawn at ``longitude - centre``."""

    axes: Axes
    centre: float


def map_axes(figure: Figure, place: tuple[int, int, int], west: float, east: float) -> MapAxes | None:
    """Return axes of longitude and latitude, degrees, from ``west`` to ``east``; None without cartopy.

    Coastlines are drawn where cartopy has them on this machine: nothing is fetched.
    """
    if importlib.util.find_spec("cartopy") is None:
        return None
    from cartopy.crs import PlateCarree

    centre = 180.0 if east > 180 + 1e-6 else 0.0
    axes = figure.add_subplot(*place, projection=PlateCarree(central_longitude=centre))
    if _has_coastlines():
        axes.coastlines("110m", lw=0.6, color="0.3")
    lines = axes.gridlines(draw_labels=True, lw=0.3, color="0.6", alpha=0.5)
    lines.top_labels = lines.right_labels = False
    return MapAxes(axes, centre)


def _has_coastlines() -> bool:
    from cartopy import config

    name = os.path.join("shapefiles", "natural_earth", "physical", "ne_110m_coastline.shp")
    folders = (config.get(key) for key in ("pre_existing_data_dir", "data_dir", "repo_data_dir"))
    return any(folder and os.path.isfile(os.path.join(folder, name)) for folder in map(str, folders))

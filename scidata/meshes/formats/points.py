"""Point clouds: coordinates and fields by name, in Zarr, HDF5 or NetCDF.

Coordinates are one ``(N, 2 or 3)`` array (``points``, ``pos``, ``positions``, ``coordinates``, ``xyz``) or two or three
``(N,)`` ones, found by CF's attributes or the usual names (``x``, ``y``, ``z``, ``lon``, ``lat``). Fields have one row
per point: along the same dimension, or, where dimensions have no names, along their first. An attribute ``period`` of
the coordinates is the width of the domain where it wraps, 0 if it does not.
"""

from __future__ import annotations

from functools import partial

from scidata.core.types import Source
from scidata.errors import FieldMismatchError
from scidata.meshes.formats.base import Blocks, Options, RawTopology
from scidata.meshes.formats.coordinates import find_points, period_of, points_by_blocks, read_points
from scidata.meshes.geometry import Geometry


class PointsTopology(RawTopology):
    """A point cloud."""

    def load(self) -> Geometry:
        """Read the points."""
        return Geometry(points=read_points(self))

    def by_blocks(self) -> Blocks:
        """Describe how points are read some at a time."""
        return Blocks(points=partial(points_by_blocks, self))


def open_topology(source: Source, options: Options) -> PointsTopology:
    """Describe the cloud of a file."""
    found = find_points(source, options)
    if found is None:
        shown = ", ".join(f"{name} {layout.shape}" for name, layout in list(source.arrays.items())[:12])
        raise FieldMismatchError(
            f"{source.path}: no coordinates of points were found among {shown or 'no arrays'}; "
            "name them with points=, such as points=['x', 'y', 'z'] or points=['pos']"
        )
    layouts, on_sphere = found
    entity = "node" if made_into_graph(options) else "point"
    return PointsTopology(
        source=source,
        options=options,
        kind="graph" if entity == "node" else "points",
        on_sphere=on_sphere,
        sizes={entity: layouts[0].shape[0]},
        entity_of_dim={layouts[0].dims[0]: entity},
        not_fields=frozenset(layout.name for layout in layouts),
        period=period_of(layouts, on_sphere=on_sphere),
        leading_only=True,
        coordinates=tuple(layout.name for layout in layouts),
    )


def made_into_graph(options: Options) -> bool:
    """Return True if edges are to be made from the points."""
    return options.edges is not None and options.edges.startswith(("knn:", "radius:"))

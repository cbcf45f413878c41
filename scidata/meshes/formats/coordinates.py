"""Coordinates of nodes and points: by name, in their order, in degrees on the sphere, with the period of the domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, FloatArray, Source
from scidata.errors import FieldMismatchError, check_known
from scidata.meshes.formats.arrays import at_once
from scidata.meshes.formats.base import Options, RawTopology, read_values
from scidata.meshes.order.ids import blocks
from scidata.sources.cf import array_of, role_of
from scidata.sources.kinds import common_points

_NETCDF_FILL = 9.969209968386869e36  # of floats and doubles, the same number


def _units(layout: ArrayLayout) -> str:
    return str(layout.attributes.get("units", "")).strip().lower()


def is_angle(layout: ArrayLayout) -> bool:
    """Return True if a coordinate is a longitude or latitude: by units or standard name."""
    standard = str(layout.attributes.get("standard_name", "")).lower()
    return _units(layout).startswith(("degree", "rad")) or standard in ("longitude", "latitude")


def named_arrays(source: Source, names: Sequence[str]) -> list[ArrayLayout]:
    """Return the coordinates that the user names."""
    check_known(f"{source.path}: no coordinate", names, source.arrays)
    return [source.arrays[name] for name in names]


def find_points(source: Source, options: Options) -> tuple[list[ArrayLayout], bool] | None:
    """Return the coordinates, as the user names them or by habit, and whether they lie on the sphere.

    Raises UnknownNameError, FieldMismatchError: one that the user names is not there; or they are not coordinates of
    one set of points.
    """
    found = common_points(source) if options.points is None else named_arrays(source, options.points)
    return None if found is None else as_coordinates(source, found)


def as_coordinates(source: Source, layouts: list[ArrayLayout]) -> tuple[list[ArrayLayout], bool]:
    """Check that arrays are one ``(N, 2 or 3)`` or two or three ``(N,)``; return them and whether on the sphere."""
    if len(layouts) == 1 and len(layouts[0].shape) == 2 and layouts[0].shape[1] in (2, 3):
        return layouts, is_angle(layouts[0])
    if len(layouts) in (2, 3) and {layout.shape for layout in layouts} == {layouts[0].shape[:1]}:
        return coordinate_columns(layouts)
    shown = ", ".join(f"{layout.name!r} {layout.shape}" for layout in layouts)
    raise FieldMismatchError(
        f"{source.path}: coordinates must be one array of shape (N, 2) or (N, 3), or two or three of shape (N,); "
        f"found {shown}"
    )


def coordinate_columns(layouts: list[ArrayLayout]) -> tuple[list[ArrayLayout], bool]:
    """Put coordinates into the order x (longitude), y (latitude), z; return True if they lie on the sphere.

    Coordinates whose roles are not all known and different keep the order given.
    """
    roles = [role_of(layout) for layout in layouts]
    if len(set(roles)) == len(roles) and set(roles) <= {"X", "Y", "Z"}:
        layouts = [layout for _, layout in sorted(zip(roles, layouts, strict=True), key=lambda pair: str(pair[0]))]
    return layouts, len(layouts) > 1 and all(map(is_angle, layouts[:2]))


def read_points(topology: RawTopology) -> FloatArray:
    """Read a topology's coordinates, as :func:`read_columns` does."""
    return read_columns(topology.source, topology.coordinates, topology.options, on_sphere=topology.on_sphere)


def points_by_blocks(topology: RawTopology, num: int) -> Iterator[FloatArray]:
    """Read the same, at most ``num`` rows at a time."""
    source, names, options = topology.source, topology.coordinates, topology.options
    layout = source.arrays[names[0]]
    for rows in blocks(layout.shape[0], at_once(layout, num)) if layout.shape[0] else [slice(0, 0)]:
        yield read_columns(source, names, options, on_sphere=topology.on_sphere, rows=rows)


def read_columns(
    source: Source, names: Sequence[str], options: Options, *, on_sphere: bool, rows: slice = slice(None)
) -> FloatArray:
    """Read coordinates as ``(N, 2 or 3)`` float64 columns; angles in degrees.

    A single ``(N, 2 or 3)`` array is its columns. Longitudes stay in the range that the file has.
    """
    layouts = [source.arrays[name] for name in names]
    columns: list[FloatArray] = []
    for layout in layouts:
        column = read_values(source, layout.name, options, box=(rows,)).astype(np.float64, copy=False)
        if source.format.startswith("netcdf") and layout.dtype.kind == "f" and "_FillValue" not in layout.attributes:
            column[column == _NETCDF_FILL] = np.nan  # NetCDF's own fill value: nothing was ever written
        columns.append(column)
        if len(layouts) > 1 and layout.shape != layouts[0].shape[:1]:
            raise FieldMismatchError(
                f"{source.path}: coordinate {layout.name!r} has shape {layout.shape}, but {layouts[0].name!r} "
                f"has {layouts[0].shape}; one value per node was expected"
            )
    points = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return in_degrees(points, layouts) if on_sphere else points


def in_degrees(points: AnyArray, layouts: Sequence[ArrayLayout]) -> AnyArray:
    """Turn columns of coordinates on a sphere that are in radians into degrees; one array's are its first two."""
    given = [_units(layout).startswith("rad") for layout in layouts]
    angles = np.flatnonzero(given * 2 if len(given) == 1 else given)
    if not len(angles):
        return points
    points = points.astype(np.float64)
    points[:, angles] = np.degrees(points[:, angles])
    return points


def period_of(layouts: list[ArrayLayout], *, on_sphere: bool) -> tuple[float, ...] | None:
    """Return the attribute ``period`` of the coordinates: a number for each of them, 0 if the domain does not wrap.

    Raises FieldMismatchError: it is none, or the coordinates are longitude and latitude, which wrap without being told.
    """
    if not any("period" in layout.attributes for layout in layouts):
        return None
    columns = layouts[0].shape[1] if len(layouts[0].shape) > 1 else len(layouts)
    said = [np.ravel(array_of(layout.attributes.get("period", 0.0))).tolist() for layout in layouts]
    period = [width for widths in said for width in widths]
    numbers = all(isinstance(width, int | float) and 0 <= width < np.inf for width in period)
    if not numbers or len(period) != columns or on_sphere:
        names = ", ".join(layout.name for layout in layouts)
        raise FieldMismatchError(
            f"{layouts[0].store}: attribute period of {names} is {period}, but {columns} widths of a flat domain were "
            "expected, 0 where it does not wrap"
        )
    return tuple(map(float, period)) if any(period) else None

"""Coordinates of point clouds and graphs by name, as the user gives them or by habit."""

from __future__ import annotations

from collections.abc import Sequence

from scidata.core.types import ArrayLayout, Source
from scidata.errors import FieldMismatchError, UnknownNameError, near_matches
from scidata.meshes.formats.arrays import coordinate_columns, is_angle


def named_points(source: Source, names: Sequence[str]) -> tuple[list[ArrayLayout], bool]:
    """Return the coordinates that the user names, and whether they lie on the sphere.

    Raises
    ------
    UnknownNameError
        One is not there.
    FieldMismatchError
        They are not coordinates of one set of points.
    """
    for name in names:
        if name not in source.arrays:
            raise UnknownNameError(f"{source.path}: no coordinate {name!r}{near_matches(name, source.arrays)}")
    return as_coordinates(source, [source.arrays[name] for name in names])


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

"""What kind of data a file holds, by names, shapes and attributes of its arrays: grids open without mesh formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scidata.core.types import ArrayLayout, Source
from scidata.sources.cf import role_of

VTKHDF_ROOT = "VTKHDF"
EXODUS_CONNECT = re.compile(r"connect(\d+)")
EDGE_PAIRS = ("edge_index", "edges", "edge/index")
CELL_ROWS = ("cells", "cell", "faces", "elements", "cells/nodes")
CELL_OFFSETS = ("cells/offsets", "cells_offsets", "cell/offsets")
_EDGE_POINTERS = (("indptr", "indices"), ("csr/indptr", "csr/src"), ("csr/indptr", "csr/indices"))
_POINTS = ("points", "pos", "positions", "position", "coordinates", "coords", "xyz", "xy", "node/pos", "point/pos")


def kind_of(source: Source, *, like_grid: bool = False) -> str:
    """Return ``"mesh"``, ``"graph"``, ``"points"`` or ``"grid"``.

    ``like_grid`` says that it is opened as grids are: what is a cloud, or a mesh, by common names alone is a grid then.
    """
    if is_vtkhdf(source) or is_ugrid(source) or is_mpas(source) or is_exodus(source):
        return "mesh"
    if has_edges(source):
        return "graph"
    if not like_grid and has_cells(source) and has_points(source):
        return "mesh"
    return "points" if not like_grid and is_cloud(source) else "grid"


def find_array(source: Source, names: Sequence[str]) -> str | None:
    """Return the first of some names that the file has."""
    return next((name for name in names if name in source.arrays), None)


# -- formats that say so ---------------------------------------------------------------------------------------------


def is_vtkhdf(source: Source) -> bool:
    """Say whether a file is VTKHDF."""
    return source.format in ("hdf5", "netcdf4") and any(n.startswith(f"{VTKHDF_ROOT}/") for n in source.arrays)


def is_ugrid(source: Source) -> bool:
    """Say whether a file describes its mesh by UGRID."""
    return bool(ugrid_meshes(source)) or bool(ugrid_connectivity(source))


def ugrid_meshes(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the attributes of each mesh variable. They have no values, so some writers (SCHISM) make them text."""
    attributes: dict[str, Mapping[str, Any]] = {name: layout.attributes for name, layout in source.arrays.items()}
    found = {n: a for n, a in attributes.items() if _is_mesh(a)}
    if found or not getattr(source, "skipped", {}):
        return found
    from scidata.sources.text import text_attributes  # with HDF5, which Zarr does without

    return {n: a for n, a in text_attributes(source).items() if _is_mesh(a)}


def _is_mesh(attributes: Mapping[str, Any]) -> bool:
    return str(attributes.get("cf_role", "")) == "mesh_topology"


def ugrid_connectivity(source: Source) -> list[str]:
    """Return the nodes of faces that lie there without a mesh variable."""
    return [n for n, a in source.arrays.items() if str(a.attributes.get("cf_role", "")) == "face_node_connectivity"]


def is_mpas(source: Source) -> bool:
    """Say whether a file holds an MPAS mesh."""
    return {"verticesOnCell", "nEdgesOnCell"} <= set(source.arrays)


def is_exodus(source: Source) -> bool:
    """Say whether a file is Exodus II."""
    arrays = source.arrays
    return any(map(EXODUS_CONNECT.fullmatch, arrays)) and ("coordx" in arrays or "coord" in arrays)


# -- arrays by common names ------------------------------------------------------------------------------------------


def has_edges(source: Source) -> bool:
    """Say whether a file holds a graph."""
    name = find_array(source, EDGE_PAIRS)
    return (name is not None and len(source.arrays[name].shape) == 2) or edge_pointers(source) is not None


def edge_pointers(source: Source) -> tuple[str, str] | None:
    """Return the names of the two arrays of compressed rows, None where there are none."""
    return next((pair for pair in _EDGE_POINTERS if set(pair) <= set(source.arrays)), None)


def has_cells(source: Source) -> bool:
    """Say whether a file has cells by the names of the plain layout."""
    rows = find_array(source, CELL_ROWS)
    return find_array(source, CELL_OFFSETS) is not None or (rows is not None and len(source.arrays[rows].shape) == 2)


def has_points(source: Source) -> bool:
    """Say whether a file has coordinates of points."""
    return common_points(source) is not None


def common_points(source: Source) -> list[ArrayLayout] | None:
    """Find coordinates by their usual names, or by CF's roles on one dimension; None where there are none."""
    for name in _POINTS:
        layout = source.arrays.get(name)
        if layout is not None and len(layout.shape) == 2 and layout.shape[1] in (2, 3):
            return [layout]
    by_rows: dict[tuple[str, int], dict[str, ArrayLayout]] = {}
    for name, layout in source.arrays.items():
        role = role_of(layout) if len(layout.shape) == 1 and layout.dims != (name.rpartition("/")[2],) else None
        if role in ("X", "Y", "Z"):
            by_rows.setdefault((layout.dims[0], layout.shape[0]), {}).setdefault(role, layout)
    found = [roles for roles in by_rows.values() if {"X", "Y"} <= set(roles)]
    if len(found) != 1:
        return None
    return [found[0][role] for role in "XYZ" if role in found[0]]


def is_cloud(source: Source) -> bool:
    """Say whether a file is a cloud and nothing else: its arrays have the points as their first dimension, no time."""
    found = common_points(source)
    if found is None:
        return False
    rows = found[0].dims[0]
    return len(found[0].shape) == 2 or all(a.dims[0] == rows for a in source.arrays.values() if rows in a.dims)

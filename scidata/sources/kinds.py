"""The kind of a file's data, by names, shapes and attributes of its arrays: grids open without mesh formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scidata.core.checks import names_of
from scidata.core.types import ArrayLayout, Source
from scidata.errors import UnsupportedFormatError
from scidata.sources.cf import is_coordinate, role_of, role_of_name

VTKHDF_ROOT = "VTKHDF"
#: Suffixes of meshes that may be HDF5, by the format's name; their arrays are no fields.
MESHES_IN_HDF5 = {".cgns": "CGNS", **dict.fromkeys((".cas.h5", ".msh.h5", ".dat.h5"), "Fluent")}
EXODUS_CONNECT = re.compile(r"connect(\d+)")
EDGE_PAIRS = ("edge_index", "edges", "edge/index")
CELL_ROWS = ("cells", "cell", "faces", "elements", "connectivity", "triangles", "cells/nodes")
CELL_OFFSETS = ("cells/offsets", "cells_offsets", "cell/offsets")
RELATION = re.compile(r"edges/((?:(?!__)[^/])+__(?:(?!__)[^/])+__(?:(?!__)[^/])+)/edge_index")
_EDGE_POINTERS = (("indptr", "indices"), ("csr/indptr", "csr/src"), ("csr/indptr", "csr/indices"))
_POINTS = (
    "points", "pos", "positions", "position", "coordinates", "coords", "xyz", "xy", "vertices", "mesh_pos", "node/pos",
    "point/pos",
)  # fmt: skip
_MESH_DIMS = re.compile(
    r"(.*_)?n?_?(col|column|cell|face|node|nod|vertex|vertice|edge|element|elem)s?([23]d?)?", re.IGNORECASE
)
_ROWS_OF_POINTS = re.compile(r"(.*_)?n?_?(point|value|station|location|site|particle)s?", re.IGNORECASE)
TENSOR_KINDS = "biufc"  # NumPy kinds that torch has: not times, strings or records
#: Dimensions that have no variable of their own, by model: WRF, ROMS, NEMO and CICE, POP, MOM6, MITgcm, FV3, CMIP6.
_ROWS = re.compile(r"(south_north|eta_(rho|u|v|psi)|nj|j|nlat|y[hqcg]|grid_yt?|jpj|lat_\d+)(_stag)?", re.IGNORECASE)
_COLUMNS = re.compile(r"(west_east|xi_(rho|u|v|psi)|ni|i|nlon|x[hqcg]|grid_xt?|jpi|lon_\d+)(_stag)?", re.IGNORECASE)
_LEVELS = re.compile(
    r"(bottom_top|(soil_?)?(layer|level)s?|s_(rho|w)|nz|z_[lti]|pfull|phalf|deptht)(_stag)?", re.IGNORECASE
)
_NUMBERED = re.compile(r"\d")
#: How the reason ends where a file has fields of a mesh, and not the mesh.
ELSEWHERE = "the topology is in another file"


def check_no_mesh(path: str) -> None:
    """Raise UnsupportedFormatError for a file whose HDF5 has a mesh of a format with a suffix of its own."""
    for suffix, name in MESHES_IN_HDF5.items():
        if path.lower().endswith(suffix):
            raise UnsupportedFormatError(f"{path}: is a mesh as {name}, which a store is made of: scidata partition")


def kind_of(source: Source, *, like_grid: bool = False, fields: Sequence[str] | str | None = None) -> tuple[str, str]:
    """Return ``"mesh"``, ``"graph"``, ``"hetero"``, ``"points"`` or ``"grid"``, and the reason in words.

    Opening, planning, partitioning and describing a file all use this. ``like_grid`` says that it is opened as grids
    are: a cloud or mesh recognised by common names or dimensions alone is a grid then. ``fields`` are those that the
    user names, if they are known: Zarr's arrays, of which each has a file of its own, are then asked for no more
    than they need, and lie on a grid if the largest has latitudes and longitudes. Raises UnsupportedFormatError: its
    groups are samples: none of them is the file. Or it is a mesh that is not read.
    """
    if fields is not None and source.format in ("zarr2", "zarr3") and (reason := _on_grid(source, fields)) is not None:
        return "grid", reason
    if not like_grid:
        check_kind(source)
    if (relation := next((m[1] for name in source.arrays if (m := RELATION.fullmatch(name))), None)) is not None:
        return "hetero", f"edges/{relation} holds edges between node sets"
    if source.format == "vtp points":
        return "points", "VTP with points and no cells but vertices"
    lists = [source.arrays.get(f"{VTKHDF_ROOT}/{name}/Connectivity") for name in ("Polygons", "Strips")]
    if all(each is not None and each.shape == (0,) for each in lists):
        return "points", "VTKHDF with points and no cells but vertices"
    if (reason := _format_of_mesh(source)) is not None:
        return "mesh", reason
    if has_edges(source):
        name = find_array(source, EDGE_PAIRS)
        pair = edge_pointers(source)
        return "graph", f"{name} holds edges" if pair is None else f"{' and '.join(pair)} hold edges"
    if not like_grid:
        if has_cells(source) and common_points(source) is not None:
            return "mesh", f"{find_array(source, (*CELL_OFFSETS, *CELL_ROWS))} holds cells"
        if is_cloud(source):
            points = ", ".join(layout.name for layout in common_points(source) or ())
            return "points", f"{points}: coordinates of points"
    return _kind_of_largest(source, like_grid=like_grid)


def _on_grid(source: Source, fields: Sequence[str] | str) -> str | None:
    """Say on which latitudes and longitudes the largest of some fields at the top lies; None if it does not."""
    names = names_of("fields", fields)
    if not names or not all(isinstance(name, str) and "/" not in name and name in source.arrays for name in names):
        return None
    largest = max((source.arrays[name] for name in names), key=lambda layout: layout.nbytes)
    roles = dim_roles(source, largest.dims)
    space = [dim for dim in largest.dims if roles.get(dim) in ("Y", "X")]
    return f"{largest.name} lies on {' x '.join(space)}" if {roles[dim] for dim in space} == {"Y", "X"} else None


def _format_of_mesh(source: Source) -> str | None:
    if source.format == "meshio":
        return "a mesh that meshio reads"
    if source.format == "openfoam":
        return "a case of OpenFOAM"
    if source.format in ("vtp", "vtu"):
        return "a surface as VTP" if source.format == "vtp" else "a mesh as VTU"
    if source.format in MESHES_IN_HDF5.values():
        return f"a mesh as {source.format}"
    checks = (is_vtkhdf, "VTKHDF"), (is_ugrid, "UGRID"), (is_mpas, "MPAS"), (is_exodus, "Exodus II"), (is_esmf, "ESMF")
    found = next((name for check, name in checks if check(source)), None)
    return None if found is None else f"a mesh as {found}"


def _kind_of_largest(source: Source, *, like_grid: bool) -> tuple[str, str]:
    """Name the place of the largest field: a grid, or nodes and cells whose topology is in another file."""
    fields = [source.arrays[name] for name in data_fields(source)]
    largest = max(fields, key=lambda layout: layout.nbytes, default=None)
    if largest is None:
        return "grid", "no data fields, only coordinates"
    roles = dim_roles(source, largest.dims)
    space = [dim for dim in largest.dims if roles.get(dim) in ("Y", "X")]
    if len(space) < 2 and not like_grid:
        rows = next((dim for dim in largest.dims if _MESH_DIMS.fullmatch(dim)), None)
        points = common_points(source)
        if rows is not None and points is not None and points[0].dims[0] == rows:
            return "grid", f"{largest.name} lies on {rows}, which has coordinates"
        if rows is not None or "mesh" in largest.attributes:
            where = f"dimension {rows}" if rows is not None else f"attribute mesh={largest.attributes['mesh']!r}"
            return "mesh", f"{largest.name} has {where}; {ELSEWHERE}"
    on = f"lies on {' x '.join(space)}" if len(space) >= 2 else f"has dimensions {', '.join(largest.dims)}"
    return "grid", f"{largest.name} {on}"


def numbers_cells(dim: str) -> bool:
    """Whether a dimension numbers the nodes, cells or columns of a mesh, or points, by its name."""
    return _MESH_DIMS.fullmatch(dim) is not None or _ROWS_OF_POINTS.fullmatch(dim) is not None


def check_kind(source: Source) -> None:
    """Refuse a mesh as SCRIP, and a file whose groups are samples: numbered ones, of the same arrays, and no others."""
    if {"grid_corner_lat", "grid_corner_lon"} <= set(source.arrays):
        raise UnsupportedFormatError(
            f"{source.path}: a mesh as SCRIP, whose cells share no nodes; write it as one that ESMF describes: "
            f"ESMF_Scrip2Unstruct {source.path} OUT.nc 0"
        )
    groups: dict[str, set[str]] = {}
    for name in source.arrays:
        group, _, rest = name.partition("/")
        groups.setdefault(group, set()).add(rest)
    if len(groups) < 2 or not all(map(_NUMBERED.search, groups)) or any("" in names for names in groups.values()):
        return
    ((_, num_alike),) = Counter(map(frozenset, groups.values())).most_common(1)
    if num_alike < max(2, len(groups) / 2):
        return
    first, *_, last = sorted(groups, key=lambda name: (len(name), name))
    raise UnsupportedFormatError(
        f"{source.path}: its {len(groups)} groups, {first} to {last}, are samples, each with {_some(groups[first])}: "
        f"name one, {source.path}/{first}, or all of them, '{source.path}/*'; kind='grid' takes them for fields of one"
    )


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "")


def data_fields(source: Source) -> list[str]:
    """Return the arrays that hold data: not coordinates, with at least one dimension, of a dtype that torch has."""
    return [
        name
        for name, layout in source.arrays.items()
        if layout.shape and layout.dtype.kind in TENSOR_KINDS and not is_coordinate(layout, source.arrays)
        if len(layout.dims) > 1 or not numbers_cells(layout.dims[0]) or role_of(layout) not in ("X", "Y")
        if not _is_statistic(source, layout)
    ]


def _is_statistic(source: Source, layout: ArrayLayout) -> bool:
    """Whether an array holds a figure of each variable, beside the field that has them: anemoi's ``mean`` and such."""
    dim = layout.dims[0]
    holds = (x for x in source.arrays.values() if len(x.dims) > 2 and dim in x.dims)
    return len(layout.dims) == 1 and dim == "variable" and f"{dim}s" in source.attributes and any(holds)


def dim_roles(source: Source, dims: Sequence[str]) -> dict[str, str]:
    """Return the CF role (``T Z Y X``) of each dimension that has one, from its coordinate variable or its name."""
    roles = {}
    for dim in dims:
        layout = source.arrays.get(dim)
        role = role_of(layout) if layout is not None and layout.dims == (dim,) else role_of_name(dim)
        if role is None:
            named = ("Y", _ROWS), ("X", _COLUMNS), ("Z", _LEVELS)
            role = next((role for role, pattern in named if pattern.fullmatch(dim)), None)
        if role is not None:
            roles[dim] = role
    return roles


def find_array(source: Source, names: Sequence[str]) -> str | None:
    """Return the first of some names that the file has."""
    return next((name for name in names if name in source.arrays), None)


# -- formats that say so ---------------------------------------------------------------------------------------------


def is_vtkhdf(source: Source) -> bool:
    """Return True if a file is VTKHDF."""
    return source.format in ("hdf5", "netcdf4") and any(n.startswith(f"{VTKHDF_ROOT}/") for n in source.arrays)


def is_ugrid(source: Source) -> bool:
    """Return True if a file describes its mesh by UGRID."""
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
    """Return True if a file holds an MPAS mesh."""
    return {"verticesOnCell", "nEdgesOnCell"} <= set(source.arrays)


def is_exodus(source: Source) -> bool:
    """Return True if a file is Exodus II."""
    arrays = source.arrays
    return any(map(EXODUS_CONNECT.fullmatch, arrays)) and ("coordx" in arrays or "coord" in arrays)


def is_esmf(source: Source) -> bool:
    """Return True if a file holds a mesh as ESMF writes it."""
    return {"elementConn", "nodeCoords"} <= set(source.arrays)


# -- arrays by common names ------------------------------------------------------------------------------------------


def has_edges(source: Source) -> bool:
    """Return True if a file holds a graph."""
    name = find_array(source, EDGE_PAIRS)
    return (name is not None and len(source.arrays[name].shape) == 2) or edge_pointers(source) is not None


def edge_pointers(source: Source) -> tuple[str, str] | None:
    """Return the names of the two arrays of compressed rows, None if there are none."""
    return next((pair for pair in _EDGE_POINTERS if set(pair) <= set(source.arrays)), None)


def has_cells(source: Source) -> bool:
    """Return True if a file has cells by the names of the plain layout."""
    rows = find_array(source, CELL_ROWS)
    return find_array(source, CELL_OFFSETS) is not None or (rows is not None and len(source.arrays[rows].shape) == 2)


def has_points(source: Source) -> bool:
    """Return True if a file has coordinates of points: one array of them, or several that its largest field lies on."""
    found = common_points(source)
    if found is None or len(found) == 1:
        return found is not None
    names = {layout.name for layout in found}
    fields = [layout for name, layout in source.arrays.items() if name not in names and layout.shape]
    largest = max(fields, key=lambda layout: layout.nbytes, default=None)
    (rows,), (count,) = found[0].dims, found[0].shape
    return largest is None or (rows, count) in zip(largest.dims, largest.shape, strict=True)


def common_points(source: Source) -> list[ArrayLayout] | None:
    """Find coordinates by their usual names, or by CF's roles on one dimension; None if there are none."""
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
    if found is None or not has_points(source):
        return False
    rows = found[0].dims[0]
    return len(found[0].shape) == 2 or all(a.dims[0] == rows for a in source.arrays.values() if rows in a.dims)

"""CGNS: structured zones, zones of elements, and polyhedra (NGON_n, NFACE_n), joined where the file says they meet.

Zones are joined at the interfaces that their ``ZoneGridConnectivity`` calls 1-to-1: nodes of both sides at one place
become one, which has the values of the first zone. Other zones lie side by side, and so do both sides of a periodic
interface. Cells are the elements of the base's dimension; those of boundaries are left out.

Source: the Standard Interface Data Structures, https://cgns.github.io/standard/SIDS/CGNS_SIDS.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.meshes.formats.arrays import as_indices, join_cells, polygon_types
from scidata.meshes.formats.base import damage_named
from scidata.meshes.formats.cgns_tree import Node, open_tree
from scidata.meshes.formats.mesh_data import MeshData
from scidata.meshes.formats.vtk_pieces import polyhedra_as_rows
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import NUM_NODES, POLYGON, POLYHEDRON
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.polyhedra import CellFaces

#: VTK's types by CGNS' codes of elements; others are not read.
_TYPES = {2: 1, 3: 3, 4: 21, 5: 5, 6: 22, 7: 9, 8: 23, 10: 10, 11: 24, 12: 14, 14: 13, 15: 26, 17: 12, 18: 25, 21: 27}
_SIZES = {code: NUM_NODES[kind] for code, kind in _TYPES.items()}
_MIXED, _NGON, _NFACE = 20, 22, 23
#: VTK's order of nodes on edges: those of the top come before those of the sides.
_REORDERED = {26: [*range(9), 12, 13, 14, 9, 10, 11], 25: [*range(12), 16, 17, 18, 19, 12, 13, 14, 15]}
_DIMS = np.full(256, 3)
_DIMS[[1, 3, 21, 5, 22, 9, 23, POLYGON]] = [0, 1, 1, 2, 2, 2, 2, 2]
_CORNERS = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)])
_SAME_PLACE = 1e-5  # of the extent of an interface: files keep points with as few as seven digits
_AGAIN = "copy or write it again"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Zone:
    """A zone, its nodes counted from 0: nodes along each index, and elements, in sections of numbers from ``first`` on.

    ``rows``: where each section begins among the elements.
    """

    where: str
    name: str
    node: Node
    shape: IntArray
    points: FloatArray
    elements: RawCells
    first: IntArray
    rows: IntArray
    cells: RawCells
    faces: CellFaces | None = None
    data: dict[str, dict[str, AnyArray]] = field(default_factory=dict)


def is_cgns(path: str) -> bool:
    """Whether a file has labels, as CGNS says; those that meshio writes have none."""
    with damage_named(path), open_tree(path) as root:
        base = root.child("Base")
        return base is None or base.label != ""


def read_zones(path: str, left_out: dict[str, str]) -> tuple[list[_Zone], IntArray, IntArray]:
    """Return the zones of a file, which of all their nodes stay, and the new number of each."""
    with damage_named(path), open_tree(path) as root, damage_named(path):
        found = [(base, zone) for base in root.of("CGNSBase_t") for zone in base.of("Zone_t")]
        dims = {tuple(base.values().tolist()) for base, _ in found}
        if len(dims) != 1:
            raise UnsupportedFormatError(
                f"{path}: has {len(found)} zones in bases of {len(dims)} dimensions; keep one mesh in a file"
            )
        cell_dim, physical_dim = map(int, dims.pop())
        zones = [_zone(path, base.name, zone, cell_dim, physical_dim, left_out) for base, zone in found]
        return zones, *_joined(zones, bounds_of([len(zone.points) for zone in zones]), left_out)


def read_cgns(path: str, *, as_rows: bool = True) -> MeshData:
    """Return the mesh of all zones of a file, in the file's order; polyhedra as rows, or as they are.

    Raises UnsupportedFormatError: elements of other types, moving grids, coordinates other than X, Y, Z, bases of
    several dimensions.
    Raises CorruptDataError: parts are missing or do not fit together.
    """
    left_out: dict[str, str] = {}
    zones, kept, new = read_zones(path, left_out)
    first = bounds_of([len(zone.points) for zone in zones])
    points = np.concatenate([zone.points for zone in zones])[kept]
    at_node, at_cell = first.tolist(), bounds_of([zone.cells.num_cells for zone in zones]).tolist()
    cells = join_cells(
        [replace(z.cells, connectivity=new[z.cells.connectivity + at]) for z, at in zip(zones, at_node, strict=False)]
    )
    of_nodes, of_cells = (_of_all([zone.data[name] for zone in zones], left_out) for name in ("Vertex", "CellCenter"))
    faces = [
        (zone.faces[0], new[zone.faces[1] + at], zone.faces[2] + cell)
        for zone, at, cell in zip(zones, at_node, at_cell, strict=False)
        if zone.faces is not None
    ]
    if faces and as_rows:
        return polyhedra_as_rows(path, points, cells, faces, of_nodes, of_cells, left_out)
    of_nodes = {name: values[kept] for name, values in of_nodes.items()}
    return MeshData(points=points, cells=cells, point_data=of_nodes, cell_data=of_cells, left_out=left_out, faces=faces)


def _of_all(data: list[dict[str, AnyArray]], left_out: dict[str, str]) -> dict[str, AnyArray]:
    """Join the fields that all zones have."""
    common = set.intersection(*map(set, data))
    left_out |= dict.fromkeys(sorted(set().union(*data) - common), "only some of the zones have it")
    return {name: np.concatenate([each[name] for each in data]) for name in data[0] if name in common}


def _zone(path: str, base: str, node: Node, cell_dim: int, physical_dim: int, left_out: dict[str, str]) -> _Zone:
    where, (shape, num_cells, _) = f"{path}: zone {base}/{node.name}", node.values().astype(np.int64).reshape(3, -1)
    grids, names = node.of("GridCoordinates_t"), [f"Coordinate{x}" for x in "XYZ"[:physical_dim]]
    found = {each.name: each for grid in grids for each in grid.of("DataArray_t")}
    if len(grids) != 1 or not found.keys() >= {*names}:
        raise UnsupportedFormatError(
            f"{where}: has {len(grids)} grids with {', '.join(found) or 'no coordinates'}; expected one, with "
            f"{', '.join(names)}: convert it, or write the plain layout"
        )
    points = [_inner(where, found[name], shape, grids[0]).astype(np.float64) for name in names]
    kind, faces = node.child("ZoneType"), None
    if kind is not None and kind.text == "Structured":
        if not np.array_equal(num_cells, np.maximum(shape - 1, 0)):
            raise CorruptDataError(
                f"{where}: says {num_cells.tolist()} cells between {shape.tolist()} nodes along its indices; {_AGAIN}"
            )
        nodes, dim = np.arange(math.prod(shape.tolist())).reshape(shape[::-1]), len(shape)
        corners = [
            nodes[tuple(slice(c, c + n) for c, n in zip(corner[:dim][::-1], num_cells[::-1], strict=True))].ravel()
            for corner in _CORNERS[: 2**dim].tolist()
        ]
        cells = elements = RawCells.of_kind(np.stack(corners, axis=1), {1: 3, 2: 9, 3: 12}[dim])
        first, rows = np.ones(1, np.int64), np.array([0, cells.num_cells])
    else:
        sections = sorted(((*_range(where, each), each) for each in node.of("Elements_t")), key=lambda each: each[0])
        parts = [_section(f"{where}: section {each.name}", each, last - first + 1) for first, last, each in sections]
        elements, first = join_cells(parts), np.array([each[0] for each in sections], np.int64)
        if any(begin <= end for (_, end, _), (begin, _, _) in pairwise(sections)):
            raise CorruptDataError(f"{where}: two sections have elements of the same numbers; {_AGAIN}")
        rows = bounds_of([part.num_cells for part in parts])
        for part in parts:  # those of polyhedra are numbers of faces; other zones' nodes follow this one's
            wrong = (part.connectivity < 0) | (part.connectivity >= len(points[0]))
            if not (part.cell_type == POLYHEDRON).any() and wrong.any():
                named = int(part.connectivity[wrong][0]) + 1
                raise CorruptDataError(
                    f"{where}: an element names node {named}, but has {len(points[0])} nodes; {_AGAIN}"
                )
        cells, faces = _cells(where, elements, first, rows, cell_dim, [each for _, _, each in sections])
        if int(num_cells[0]) not in (cells.num_cells, elements.num_cells):  # some writers count boundaries
            raise CorruptDataError(f"{where}: has {cells.num_cells} cells, but says {int(num_cells[0])}; {_AGAIN}")
    data: dict[str, dict[str, AnyArray]] = {"Vertex": {}, "CellCenter": {}}
    for each in node.of("FlowSolution_t"):
        if _location(each) not in data:
            left_out |= {array.name: f"lives at {_location(each)}" for array in each.of("DataArray_t")}
    for location, own in data.items():
        solutions = [each for each in node.of("FlowSolution_t") if _location(each) == location]
        arrays = [(each, array) for each in solutions for array in each.of("DataArray_t")]
        several = len({array.name for _, array in arrays}) < len(arrays)
        for each, array in arrays:
            name = f"{each.name}_{array.name}" if several else array.name
            if each.child("PointList") or each.child("PointRange"):
                left_out[name] = "lives on a part of a zone"
            else:
                own[name] = _inner(where, array, shape if location == "Vertex" else num_cells, each)
    return _Zone(
        where=where, name=f"{base}/{node.name}", node=node, shape=shape, points=np.stack(points, axis=1),
        elements=elements, first=first, rows=rows, cells=cells, faces=faces, data=data,
    )  # fmt: skip


def _location(node: Node) -> str:
    found = node.child("GridLocation")
    return "Vertex" if found is None else found.text


def _inner(where: str, array: Node, shape: IntArray, holder: Node) -> AnyArray:
    """Read an array without its rind, which are rows of other zones around it."""
    rind = holder.child("Rind")
    low, high = (np.zeros((len(shape), 2), np.int64) if rind is None else rind.values().reshape(-1, 2).astype(int)).T
    values, full = array.values(), shape + low + high
    if len(values) != math.prod(full.tolist()):
        raise CorruptDataError(f"{where}: {array.name} has {len(values)} values, expected {full.tolist()}; {_AGAIN}")
    begins = low if len(shape) > 1 else low * 0  # without a structure the rind comes last
    box = tuple(slice(b, b + n) for b, n in zip(begins[::-1].tolist(), shape[::-1].tolist(), strict=True))
    return values.reshape(full[::-1])[box].ravel()


# -- elements --------------------------------------------------------------------------------------------------------


def _range(where: str, section: Node) -> tuple[int, int]:
    if (found := section.child("ElementRange")) is None:
        raise CorruptDataError(f"{where}: section {section.name} has no ElementRange; {_AGAIN}")
    first, last = found.values().astype(np.int64).tolist()
    return first, last


def _section(where: str, section: Node, num: int) -> RawCells:
    """Return the elements of a section, with nodes from 0 on; of polyhedra the faces' numbers, as the file has them."""
    code, found = int(section.values()[0]), {each.name: each for each in section.children()}
    nodes = as_indices(found["ElementConnectivity"].values(), where)
    starts = as_indices(found["ElementStartOffset"].values(), where) if "ElementStartOffset" in found else None
    if code in (_NGON, _NFACE):
        if starts is None:  # before version 3.4: each begins with its length
            at = _walk(nodes, lambda length: length)
            starts, nodes = bounds_of(nodes[at]), nodes[ranges(at + 1, at + 1 + nodes[at])]
        fits = not starts[0] and bool((np.diff(starts) >= 0).all())
        types = polygon_types(starts) if code == _NGON else np.full(len(starts) - 1, POLYHEDRON, np.uint8)
    else:
        at = np.empty(0, np.int64)
        if code == _MIXED:
            at = _walk(nodes, lambda code: _SIZES.get(code, 0)) if starts is None else starts[:-1]
        codes = nodes[at] if code == _MIXED else np.full(num, code)
        if unknown := set(np.unique(codes).tolist()) - set(_TYPES):
            raise UnsupportedFormatError(
                f"{where}: has elements of CGNS' type {min(unknown)}; read are NGON_n, NFACE_n, MIXED, and linear and "
                "quadratic elements without nodes inside: convert it"
            )
        sizes = np.array([_SIZES.get(each, 0) for each in range(_MIXED + 2)])[codes]
        types = np.array([_TYPES.get(each, 0) for each in range(_MIXED + 2)], np.uint8)[codes]
        fits = code != _MIXED or starts is None or np.array_equal(starts, bounds_of(sizes + 1))
        starts, nodes = bounds_of(sizes), nodes[ranges(at + 1, at + 1 + sizes)] if code == _MIXED else nodes
    if not fits or len(types) != num or len(nodes) != starts[-1]:
        raise CorruptDataError(
            f"{where}: has {len(types)} elements with {len(nodes)} nodes, but says {num}, or its ElementStartOffset "
            f"does not fit; {_AGAIN}"
        )
    for kind, order in _REORDERED.items():
        row = starts[:-1][types == kind][:, None]
        nodes[row + np.arange(len(order))] = nodes[row + np.array(order)]
    return RawCells(offsets=starts, connectivity=nodes - (code != _NFACE), cell_type=types)


def _walk(nodes: IntArray, length: Callable[[int], int]) -> IntArray:
    """Return where each element begins, of a list in which each has its type or length before its nodes."""
    at, numbers, starts = 0, nodes.tolist(), []
    while at < len(numbers):
        starts.append(at)
        at += 1 + max(length(numbers[at]), 0)
    return np.array(starts, np.int64)


def _cells(
    where: str, elements: RawCells, first: IntArray, rows: IntArray, cell_dim: int, sections: Sequence[Node]
) -> tuple[RawCells, CellFaces | None]:
    """Return the elements that are cells, and the faces of polyhedra."""
    is_cell, polyhedra = _DIMS[elements.cell_type] == cell_dim, np.flatnonzero(elements.cell_type == POLYHEDRON)
    begins, ends = elements.offsets[:-1], elements.offsets[1:]
    parents = [(at, x.values().astype(np.int64)) for at, each in zip(first.tolist(), sections, strict=True)
               if (x := each.child("ParentElements")) is not None]  # fmt: skip
    if len(polyhedra) or (cell_dim == 3 and parents and not is_cell.any()):
        if len(polyhedra):
            face = elements.connectivity[ranges(begins[polyhedra], ends[polyhedra])]
            cell = np.repeat(np.cumsum(is_cell)[polyhedra] - 1, (ends - begins)[polyhedra])
            turned = face < 0
            ends = np.where(elements.cell_type == POLYHEDRON, begins, ends)
        else:  # faces name the cells on both sides, which are no elements
            face = np.concatenate([np.tile(at + np.arange(len(each) // 2), 2) for at, each in parents])
            cell = np.concatenate([each for _, each in parents])
            turned = np.concatenate([np.arange(len(each)) >= len(each) // 2 for _, each in parents])
            face, turned, cell = face[cell > 0], turned[cell > 0], cell[cell > 0] - cell[cell > 0].min()
            is_cell = np.zeros(cell.max() + 1, bool)
        one, other = _places(where, elements, first, rows, np.abs(face))
        at, sizes = ranges(one, other), other - one
        at = np.where(np.repeat(turned, sizes), np.repeat(one + other - 1, sizes) - at, at)
        faces = sizes, elements.connectivity[at], cell
        if not len(polyhedra):
            none = np.zeros(len(is_cell) + 1, np.int64)
            return RawCells(offsets=none, connectivity=none[:0], cell_type=np.full(len(is_cell), 42, np.uint8)), faces
    begins, ends = begins[is_cell], ends[is_cell]
    cells = RawCells(
        offsets=bounds_of(ends - begins),
        connectivity=elements.connectivity[ranges(begins, ends)],
        cell_type=elements.cell_type[is_cell],
    )
    return cells, faces if len(polyhedra) else None


def _places(
    where: str, elements: RawCells, first: IntArray, rows: IntArray, numbers: IntArray
) -> tuple[IntArray, IntArray]:
    """Return where the nodes of some elements begin and end."""
    section = np.searchsorted(first, numbers, "right") - 1
    row = rows[section] + numbers - first[section]
    if ((section < 0) | (row >= rows[section + 1])).any():
        raise CorruptDataError(f"{where}: names elements up to {int(numbers.max())}, some of which it lacks; {_AGAIN}")
    return elements.offsets[row], elements.offsets[row + 1]


# -- interfaces ------------------------------------------------------------------------------------------------------


def _joined(zones: list[_Zone], first: IntArray, left_out: dict[str, str]) -> tuple[IntArray, IntArray]:
    """Return the nodes that stay, and the new number of each; those at one place of an interface become the first."""
    # not at the top: each process of --jobs imports this module
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    by_name = {zone.name: (zone, at) for zone, at in zip(zones, first, strict=False)}
    pairs = [np.empty((2, 0), np.int64)]
    for zone, at in by_name.values():
        for each in (x for group in zone.node.of("ZoneGridConnectivity_t") for x in _one_to_one(group)):
            where = f"{zone.where}: interface {each.name}"
            name = each.text if "/" in each.text else f"{zone.name.partition('/')[0]}/{each.text}"
            if name not in by_name:
                raise CorruptDataError(f"{where}: leads to zone {name}, which the file lacks; {_AGAIN}")
            donor, at_donor = by_name[name]
            here, there = _nodes(zone, each, ""), _nodes(donor, each, "Donor")
            if not (np.isfinite(zone.points[here]).all() and np.isfinite(donor.points[there]).all()):
                raise CorruptDataError(f"{where}: a coordinate of its points is NaN or infinite; {_AGAIN}")
            distance, nearest = cKDTree(donor.points[there]).query(zone.points[here])
            most = _SAME_PLACE * float(np.ptp(zone.points[here], axis=0).max())
            near = distance <= most
            there = there[nearest]
            if near.all() and len(np.unique(there)) < len(here):  # nodes at one place, such as those on an axis
                here, there = _pairs(zone, donor, each) or (here, there)
                near = np.linalg.norm(zone.points[here] - donor.points[there], axis=1) <= most
            if not near.any():
                left_out[f"{zone.name}/{each.name}"] = "an interface whose nodes are not where the other zone's are"
            elif not near.all() or len(np.unique(there)) != len(here):
                raise CorruptDataError(
                    f"{where}: is 1-to-1, but of its {len(here)} nodes {int((~near).sum())} are not at a node of "
                    f"{name}, or several at one (up to {distance.max():.3g} away); {_AGAIN}"
                )
            else:
                pairs.append(np.stack([here + at, there + at_donor]))
    one, other = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(len(one), bool), (one, other)), shape=(int(first[-1]),) * 2)
    group = connected_components(graph, directed=False)[1]
    _, kept, new = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(kept)
    return kept[order], np.argsort(order)[new]


def _one_to_one(group: Node) -> Iterator[Node]:
    """Yield the interfaces whose nodes are at the places of the other zone's."""
    for each in group.of("GridConnectivity1to1_t", "GridConnectivity_t"):
        kind = each.child("GridConnectivityType")
        is_periodic = any(x.of("Periodic_t") for x in each.of("GridConnectivityProperty_t"))
        is_matched = each.label == "GridConnectivity1to1_t" or (kind is not None and kind.text == "Abutting1to1")
        if is_matched and not is_periodic and (each.child("PointListDonor") or each.child("PointRangeDonor")):
            yield each


def _pairs(zone: _Zone, donor: _Zone, interface: Node) -> tuple[IntArray, IntArray] | None:
    """Return the nodes of both sides as the file pairs them, by its ranges or lists of nodes; None of faces."""
    if _location(interface) != "Vertex":
        return None
    here, there = _indices(zone, interface, ""), _indices(donor, interface, "Donor")
    if (turn := interface.child("Transform")) is not None and interface.child("PointRangeDonor"):
        to = turn.values().astype(np.int64)
        first, first_donor = (interface.child(f"PointRange{x}").values().astype(np.int64) for x in ("", "Donor"))  # type: ignore[union-attr]
        there = np.empty_like(here)
        there[:, np.abs(to) - 1] = (here - first[: len(to)]) * np.sign(to)
        there += first_donor[: len(to)]
    return _numbers(zone, interface, here), _numbers(donor, interface, there)


def _indices(zone: _Zone, interface: Node, side: str) -> IntArray:
    """Return the indices of one side, ``(num, dim)``: of its nodes, or of its faces."""
    dim, found = len(zone.shape), {each.name: each for each in interface.children()}
    if (box := found.get(f"PointRange{side}")) is None:
        return found[f"PointList{side}"].values().astype(np.int64).reshape(-1, dim)
    ends = np.sort(box.values().astype(np.int64).reshape(2, dim), axis=0)
    _numbers(zone, interface, ends)  # before room is made for what it claims
    return np.stack(np.meshgrid(*[np.arange(a, b + 1) for a, b in ends.T], indexing="ij"), -1).reshape(-1, dim)


def _numbers(zone: _Zone, interface: Node, indices: IntArray) -> IntArray:
    """Return the number of the node at each place along the indices."""
    if (indices < 1).any() or (indices > zone.shape).any():
        raise CorruptDataError(f"{zone.where}: interface {interface.name} leads to nodes that it lacks; {_AGAIN}")
    return (indices - 1) @ np.cumprod([1, *zone.shape[:-1].tolist()])


def _nodes(zone: _Zone, interface: Node, side: str) -> IntArray:
    """Return the nodes of one side of an interface, each once."""
    dim, indices = len(zone.shape), _indices(zone, interface, side)
    if (on_faces := _location(interface) != "Vertex") and dim == 1:
        each = _places(zone.where, zone.elements, zone.first, zone.rows, indices[:, 0])
        return np.unique(zone.elements.connectivity[ranges(*each)])
    if on_faces:  # each is named by its lowest node; across them one index is the same
        across = int(np.argmin(np.ptp(indices, axis=0)))
        corners = np.unique(np.where(np.arange(dim) == across, 0, _CORNERS[:, :dim]), axis=0)
        indices = (indices[:, None] + corners).reshape(-1, dim)
    return np.unique(_numbers(zone, interface, indices))

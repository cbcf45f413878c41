"""VTK's XML files of surfaces and clouds (``.vtp``, PolyData) and of cells of any type (``.vtu``, UnstructuredGrid).

Files of one mesh (``.pvtu``, ``.pvtp``, the parts of a time of a ``.pvd``) are joined at their points: those of other
files that have the same global id or, without ids, the very same place are one. Ghost cells are left out.

In PolyData polygons and triangle strips are a mesh, vertices alone a cloud. A piece keeps four lists of cells, and the
rows of its cell fields follow them: vertices, lines, polygons, strips. A strip becomes its triangles, each of which has
the strip's values, as vtkTriangleFilter has it. Lines, and vertices beside polygons, are refused: in the models of this
field they are no cells, and left out they would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, ByteArray, IntArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.meshes.formats.arrays import GHOSTS, as_indices, nodes_of_piece, polygon_types
from scidata.meshes.formats.mesh_data import MeshData, connect, marked, take_copies
from scidata.meshes.formats.vtk_xml import AGAIN, VTKFile, parse
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import POLYHEDRON
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.polyhedra import CellFaces, join_polyhedra

#: The lists of cells in the order of cell data, and the kind of cell in each.
_LISTS = {"Verts": "vertices", "Lines": "lines", "Polys": "polygons", "Strips": "triangle strips"}
_KINDS = {".vtp": "PolyData", ".vtu": "UnstructuredGrid"}
#: Suffixes of the files that :func:`read_vtk` reads.
SUFFIXES = tuple(_KINDS)


def read_vtk(path: str, data: bytes, suffix: str = "") -> MeshData:
    """Return the surface, cloud or grid of a file, as :func:`read_files`."""
    return read_files(path, {path: data}, suffix)


def read_files(path: str, files: Mapping[str, bytes], suffix: str = "", *, as_rows: bool = True) -> MeshData:
    """Return the surface, cloud or grid of one file, or of the several that ``path`` names; ``files``: their contents.

    ``as_rows``: of a grid with polyhedra the cells as rows.

    Raises UnsupportedFormatError: its type is not that of its suffix; or it has lines, or vertices beside polygons.
    Raises CorruptDataError: an array is damaged, missing, or too short or long.
    """
    suffix, found = suffix or next(iter(files))[-4:].lower(), [parse(*each) for each in files.items()]
    for file in found:
        if file.kind != _KINDS.get(suffix):
            raise UnsupportedFormatError(
                f"{file.path}: is a VTK XML file of type {file.kind!r}, but the suffix {suffix} is that of "
                f"{_KINDS.get(suffix)}; name it by its type "
                f"({', '.join(f'{kind}: {end}' for end, kind in _KINDS.items())}), or convert it"
            )
    every = [(file, element) for file in found for element in file.root.findall(f"{file.kind}/Piece")]
    if not every:
        raise CorruptDataError(f"{path}: has no Piece, in which points and cells lie; {AGAIN}")
    counts = {name: sum(count_of(path, element, f"NumberOf{name}", 0) for _, element in every) for name in _LISTS}
    has_surface = suffix == ".vtp" and is_surface(path, counts)
    pieces = [_Piece(*each) for each in every]
    if len(found) > 1:  # writers leave the arrays of a piece out that has no rows
        pieces = [piece for piece in pieces if len(piece.points)] or pieces[:1]
    first = np.cumsum([0, *(len(piece.points) for piece in pieces)])
    points, left_out = np.concatenate([piece.points for piece in pieces]), dict[str, str]()
    of_points = [piece.data("PointData", len(piece.points)) for piece in pieces]
    of_cells = [piece.data("CellData", piece.num_cells) for piece in pieces]
    if len(found) > 1:
        of_points = [marked(data, len(piece.points)) for data, piece in zip(of_points, pieces, strict=True)]
        of_cells = [marked(data, piece.num_cells) for data, piece in zip(of_cells, pieces, strict=True)]
    point_data, cell_data = (_joined(path, d, left_out if len(found) > 1 else None) for d in (of_points, of_cells))
    faces: list[CellFaces] = []
    if suffix == ".vtu":
        lists = [piece.cells("Cells") for piece in pieces]
        cells = RawCells(
            offsets=bounds_of(np.concatenate([sizes for sizes, _ in lists])),
            connectivity=np.concatenate(
                [nodes_of_piece(nodes, *each) for (_, nodes), *each in zip(lists, np.diff(first), first, strict=False)]
            ),
            cell_type=np.concatenate([piece.types() for piece in pieces]),
        )
        if (cells.cell_type == POLYHEDRON).any():
            at_cell = bounds_of([piece.num_cells for piece in pieces])
            faces = [piece.faces(*each) for piece, *each in zip(pieces, first, at_cell, strict=False)]
    elif not has_surface:
        moved = [piece.points_of("Verts")[1] + at for piece, at in zip(pieces, first, strict=False)]
        on_vertices = {name: values for name, values in cell_data.items() if name != GHOSTS or len(found) == 1}
        mesh = _cloud(points, np.concatenate(moved), pieces, point_data, on_vertices)
        if len(found) == 1:
            return mesh
        data = dict(mesh.point_data)
        own = ~take_copies(data)
        data = {name: values[own] for name, values in data.items()}
        return replace(mesh, points=points[own], point_data=data, left_out=mesh.left_out | left_out)
    else:
        of_pieces, rows = [], []
        num_cells = 0
        for piece, at in zip(pieces, first, strict=False):
            sizes, nodes, of_cell = piece.surface()
            of_pieces.append((sizes, nodes + at))
            rows.append(of_cell + num_cells)
            num_cells += piece.num_cells
        offsets = bounds_of(np.concatenate([sizes for sizes, _ in of_pieces]))
        nodes, of_cell = np.concatenate([nodes for _, nodes in of_pieces]), np.concatenate(rows)
        cells = RawCells(offsets=offsets, connectivity=nodes, cell_type=polygon_types(offsets))
        cell_data = {name: values[of_cell] for name, values in cell_data.items()}
    mesh = MeshData(points=points, cells=cells, point_data=point_data, cell_data=cell_data, left_out=left_out)
    if len(found) > 1 and len(points):
        names = {piece.name_of_ids for piece in pieces}
        ids = point_data.get(names.pop() or "") if len(names) == 1 else None
        mesh, faces = connect(path, mesh, faces, first, ids)
        of_files = [[piece for piece in pieces if piece.file is file] for file in found]
        num = {"PointData": [sum(len(each.points) for each in own) for own in of_files]}
        num["CellData"] = [sum(each.num_cells for each in own) for own in of_files]
        mesh = replace(mesh, rows={name: np.split(x, np.cumsum(num[name])[:-1]) for name, (x,) in mesh.rows.items()})
    if faces and not as_rows:
        return replace(mesh, faces=faces)
    if faces:
        assert mesh.cells is not None
        return polyhedra_as_rows(
            path, mesh.points, mesh.cells, faces, mesh.point_data, dict(mesh.cell_data), mesh.left_out
        )
    return mesh


def is_surface(path: str, counts: Mapping[str, int]) -> bool:
    """Say whether there are polygons or strips; False: vertices or points alone. ``counts``: of each list of cells."""
    surface = counts["Polys"] + counts["Strips"]
    if counts["Lines"] or (counts["Verts"] and surface):
        has = " and ".join(f"{n} {_LISTS[name]}" for name, n in counts.items() if n)
        keep = (
            "keep the polygons and strips, or the vertices, in a file of their own (vtkExtractCellsByType; "
            "ParaView: Extract Cells By Type)"
            if surface or counts["Verts"]
            else "a network of lines is a graph: write its points and edge_index (the plain layout)"
        )
        raise UnsupportedFormatError(
            f"{path}: has {has}; read are polygons and triangle strips (a mesh), or vertices alone (a cloud): {keep}"
        )
    return surface > 0


def count_of(path: str, piece: ElementTree.Element, name: str, default: int | None) -> int:
    """Return a number that a piece says, such as ``NumberOfPoints``; of None as default it must."""
    text = piece.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or len(text) > 18:
        raise CorruptDataError(f"{path}: a Piece says {name}={text!r}, but a number was expected; {AGAIN}")
    return int(text)


class _Piece:
    """A part of the file with points and cells of its own."""

    def __init__(self, file: VTKFile, element: ElementTree.Element) -> None:
        self.file, self._element = file, element
        num_points = count_of(file.path, element, "NumberOfPoints", None)
        self._counts = {name: count_of(file.path, element, f"NumberOf{name}", 0) for name in (*_LISTS, "Cells")}
        self.num_cells = sum(self._counts.values())
        array = element.find("Points/DataArray")
        if array is None and num_points:
            raise CorruptDataError(f"{file.path}: a Piece has {num_points} points, but no array of them; {AGAIN}")
        self.points = np.empty((0, 3), np.float32) if array is None else self._rows(array, num_points)
        if self.points.ndim != 2 or self.points.shape[1] != 3:
            if len(self.points):
                raise CorruptDataError(
                    f"{file.path}: has points of shape {self.points.shape}, but (N, 3) was expected; {AGAIN}"
                )
            self.points = np.empty((0, 3), self.points.dtype)

    @property
    def name_of_ids(self) -> str | None:
        """The name of the array that has the number of each point among those of all files; None without one."""
        found = self._element.find("PointData")
        return None if found is None else found.get("GlobalIds")

    def data(self, group: str, num_rows: int) -> dict[str, AnyArray]:
        """Read the fields of a group; text is passed over."""
        arrays = self._element.findall(f"{group}/DataArray")
        return {a.get("Name", group): self._rows(a, num_rows) for a in arrays if a.get("type") not in ("String", "Bit")}

    def surface(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return sizes and nodes of polygons and then strips' triangles, and the row of cell data of each."""
        sizes, nodes = self.points_of("Polys")
        lengths, strip_nodes = self.points_of("Strips")
        triangles, of_strip = triangles_of_strips(lengths, strip_nodes)
        first = self._counts["Verts"] + self._counts["Lines"]
        rows = np.concatenate([np.arange(len(sizes)), len(sizes) + of_strip]) + first
        all_sizes = np.concatenate([sizes, np.full(len(triangles), 3, np.int64)])
        return all_sizes, np.concatenate([nodes, triangles.ravel()]), rows

    def types(self) -> ByteArray:
        """Return VTK's code of each cell of a grid."""
        if not self._counts["Cells"]:
            return np.empty(0, np.uint8)
        path = self.file.path
        types = as_indices(self._rows(self._array("Cells", "types"), self.num_cells), f"{path}: Cells: array 'types'")
        wrong = np.flatnonzero((types < 0) | (types > 255))
        if len(wrong):
            raise UnsupportedFormatError(
                f"{path}: cell {int(wrong[0])} is of VTK type {int(types[wrong[0]])}, which there is not, as are "
                f"{len(wrong)} of {len(types)} cells; {AGAIN}"
            )
        return types.astype(np.uint8)

    def cells(self, name: str) -> tuple[IntArray, IntArray]:
        """Read sizes and nodes of a list of cells. Nodes that the piece does not have are left for checks to name."""
        if not self._counts[name]:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        path, where = self.file.path, f"{self.file.path}: {name}: array"
        ends = as_indices(self._rows(self._array(name, "offsets"), self._counts[name]), f"{where} 'offsets'")
        nodes = as_indices(self.file.read(self._array(name, "connectivity"), int(ends[-1])), f"{where} 'connectivity'")
        sizes = np.diff(ends, prepend=0)
        if sizes.min() < 0 or int(ends[-1]) != len(nodes):
            raise CorruptDataError(
                f"{path}: {name}: array 'offsets' must rise to {len(nodes)}, the length of 'connectivity'; it ends at "
                f"{int(ends[-1])}; {AGAIN}"
            )
        return sizes, nodes

    def points_of(self, name: str) -> tuple[IntArray, IntArray]:
        """Read sizes and nodes of a list of cells, all of which the piece has."""
        sizes, nodes = self.cells(name)
        if nodes.size and (nodes.min() < 0 or nodes.max() >= len(self.points)):
            raise CorruptDataError(
                f"{self.file.path}: {name}: array 'connectivity' has points {int(nodes.min())} to {int(nodes.max())}, "
                f"but the piece has {len(self.points)}; {AGAIN}"
            )
        return sizes, nodes

    def faces(self, first_point: int, first_cell: int) -> CellFaces:
        """Read the faces of the polyhedra; numbers of points and cells are moved on."""
        polyhedra = np.flatnonzero(self.types() == POLYHEDRON)
        sizes, nodes, counts = self._lists_of_faces(polyhedra) if len(polyhedra) else (polyhedra,) * 3
        return sizes, nodes_of_piece(nodes, len(self.points), first_point), np.repeat(polyhedra + first_cell, counts)

    def _lists_of_faces(self, polyhedra: IntArray) -> CellFaces:
        """Return sizes and nodes of the faces of each polyhedron, and how many it has."""
        path = self.file.path
        if self._find("Cells", "polyhedron_offsets") is None:
            ends, stream = self._numbers("faceoffsets", self.num_cells)[polyhedra], self._numbers("faces")
            at, counts = _unroll(path, stream, ends)
            return stream[at], stream[ranges(at + 1, at + 1 + stream[at])], counts
        # VTK 9.4: faces are numbered, and cells have lists of the numbers
        face, nodes = self._numbers("polyhedron_to_faces"), self._numbers("face_connectivity")
        of_cell, of_face = (
            np.insert(self._numbers(name, num), 0, 0)
            for name, num in (("polyhedron_offsets", self.num_cells), ("face_offsets", None))
        )
        return faces_by_number(f"{path}: Cells", of_cell, face, of_face, nodes, polyhedra)

    def _numbers(self, name: str, num_rows: int | None = None) -> IntArray:
        array = self._array("Cells", name)
        values = self.file.read(array) if num_rows is None else self._rows(array, num_rows)
        return as_indices(values, f"{self.file.path}: Cells: array {name!r}")

    def _find(self, group: str, name: str) -> ElementTree.Element | None:
        return next((array for array in self._element.findall(f"{group}/DataArray") if array.get("Name") == name), None)

    def _array(self, group: str, name: str) -> ElementTree.Element:
        if (array := self._find(group, name)) is None:
            raise CorruptDataError(f"{self.file.path}: {group} has no array {name!r}; {AGAIN}")
        return array

    def _rows(self, array: ElementTree.Element, num_rows: int) -> AnyArray:
        values = self.file.read(array, num_rows)
        if len(values) != num_rows:
            raise CorruptDataError(
                f"{self.file.path}: array {array.get('Name', '')!r} has {len(values)} rows, but the piece says "
                f"{num_rows}; {AGAIN}"
            )
        return values


def faces_by_number(
    where: str, of_cell: IntArray, face: IntArray, of_face: IntArray, nodes: IntArray, polyhedra: IntArray
) -> CellFaces:
    """Return sizes and nodes of the faces of each polyhedron, and how many it has, as VTK 9.4 has them.

    Cell ``i`` has the faces ``face[of_cell[i] : of_cell[i + 1]]``, and a face the nodes that ``of_face`` says.
    """
    each = (of_cell, len(face)), (of_face, len(nodes)), (np.sort(face), len(of_face) - 2)
    if any(x.size and (x[0] < 0 or x[-1] > most or (np.diff(x) < 0).any()) for x, most in each):
        raise CorruptDataError(f"{where}: polyhedra's lists of faces and faces' lists of nodes do not fit; {AGAIN}")
    begins, ends = of_cell[polyhedra], of_cell[polyhedra + 1]
    own = face[ranges(begins, ends)]
    return np.diff(of_face)[own], nodes[ranges(of_face[own], of_face[own + 1])], ends - begins


def _unroll(path: str, stream: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return where each face begins in ``faces``, and how many each polyhedron has, whose part ends at ``ends``.

    A part is the number of faces and, of each, the number of its nodes and these.
    """
    at = np.insert(ends[:-1], 0, 0)
    fits = (np.diff(ends, prepend=0) > 0).all() and ends[-1] <= len(stream)
    counts = stream[at] if fits else at
    fits = fits and counts.min() > 0 and counts.max() < len(stream) and counts.sum() < len(stream)
    places, at = np.empty(counts.sum() if fits else 0, np.int64), at + 1
    first = bounds_of(counts) if fits else at
    for number in range(counts.max()) if fits else ():
        here = np.flatnonzero(counts > number)
        inside = (at[here] >= 0) & (at[here] < ends[here])
        if not (fits := bool(inside.all())):
            break
        places[first[here] + number] = at[here]
        at[here] += 1 + np.maximum(stream[at[here]], 0)
    if not fits or not np.array_equal(at, ends):
        raise CorruptDataError(f"{path}: Cells: arrays 'faces' and 'faceoffsets' do not fit each other; {AGAIN}")
    return places, counts


def polyhedra_as_rows(
    path: str, points: AnyArray, cells: RawCells, faces: Sequence[CellFaces], of_points: Iterable[str],
    cell_data: dict[str, AnyArray], left_out: Mapping[str, str] | None = None,
) -> MeshData:  # fmt: skip
    """Return the cells as rows: their centres, the edges across their faces, and their volumes."""
    centres, volumes, edges = join_polyhedra(path, np.asarray(points, np.float64), cells, faces)
    reason = "lives on the nodes, but the rows of a grid with polyhedra are its cells"
    return MeshData(
        points=centres,
        cells=None,
        point_data={},
        cell_data={"volume": volumes} | cell_data,
        left_out=dict.fromkeys(of_points, reason) | dict(left_out or {}),
        edge_index=edges,
    )


def triangles_of_strips(lengths: IntArray, nodes: IntArray) -> tuple[IntArray, IntArray]:
    """Cut strips into triangles, ``(n, 3)``, and return the strip of each; every other one is turned around."""
    counts = np.maximum(lengths - 2, 0)
    of_strip = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(of_strip)) - np.repeat(bounds_of(counts)[:-1], counts)
    at = np.repeat(bounds_of(lengths)[:-1], counts) + place
    odd = place % 2
    return nodes[np.stack([at + odd, at + 1 - odd, at + 2], axis=1)], of_strip


def _joined(
    path: str, pieces: list[dict[str, AnyArray]], left_out: dict[str, str] | None = None
) -> dict[str, AnyArray]:
    """Join the fields of the pieces, all of which must have the same; with ``left_out``, those that all have."""
    for name in sorted(set().union(*pieces)):
        found = [piece[name] for piece in pieces if name in piece]
        if len(found) < len(pieces) and left_out is None:
            raise UnsupportedFormatError(
                f"{path}: only some of its {len(pieces)} pieces have the field {name!r}; write it in all of them"
            )
        if len({values.shape[1:] for values in found}) > 1:
            raise CorruptDataError(f"{path}: field {name!r} has other components in other pieces; {AGAIN}")
        if len(found) < len(pieces) and left_out is not None:
            left_out[name] = f"only {len(found)} of {len(pieces)} pieces have it"
    return {n: np.concatenate([piece[n] for piece in pieces]) for n in pieces[0] if all(n in piece for piece in pieces)}


def _cloud(
    points: AnyArray,
    vertices: IntArray,
    pieces: list[_Piece],
    point_data: dict[str, AnyArray],
    cell_data: dict[str, AnyArray],
) -> MeshData:
    """Return a cloud: all points. Fields of vertices go with their points, where each point has one vertex."""
    one_each = len(vertices) == sum(piece.num_cells for piece in pieces) == len(points)
    one_each = one_each and len(np.unique(vertices)) == len(points)
    data, left_out = dict(point_data), {}
    for name, values in cell_data.items():
        if name in point_data:
            left_out[f"cell/{name}"] = "lives on vertices, where a field of the points has its name"
        elif one_each:
            data[name] = np.empty_like(values)
            data[name][vertices] = values
        else:
            left_out[name] = "lives on vertices, of which there is not one for each point"
    return MeshData(points=points, cells=None, point_data=data, cell_data={}, left_out=left_out)

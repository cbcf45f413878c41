"""VTK's XML files, written: arrays added to a file that is there, and files of a mesh or a cloud.

A file that is added to keeps all it has, byte for byte where its arrays are appended. New arrays are appended behind
them, in the file's byte order, and packed as it says. Format: "XML file formats" of the VTK User's Guide.
"""

from __future__ import annotations

import base64
import lzma
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numcodecs import lz4

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray
from scidata.errors import ConfigError, UnsupportedFormatError
from scidata.meshes.formats.vtk_pieces import count_of
from scidata.meshes.formats.vtk_xml import TYPES, VTKFile, parse
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import POLYHEDRON
from scidata.meshes.order.ids import distinct, ranges
from scidata.meshes.order.polyhedra import CellFaces

_BLOCK = 1 << 20  # bytes that are packed together
_NAMES = {code: name for name, code in TYPES.items()}
_FACES = (5, 6, 7, 8, 9)  # cells that PolyData has
_VERTEX = 1

#: Values of points and of cells, by name: ``(num_rows,)``, or ``(num_rows, num_components)``.
Arrays = Mapping[str, AnyArray]


def add_to_vtk(path: str, data: bytes, target: str, point_data: Arrays, cell_data: Arrays) -> ElementTree.Element:
    """Write a file like a VTP or VTU file of some content, with more arrays, or others in the place of those it has.

    Returns what it says of its arrays.

    Raises UnsupportedFormatError for cells of triangle strips, ConfigError for arrays of other rows, or too large.
    """
    file = parse(path, data)
    pieces = file.root.findall(f"{file.kind}/Piece")
    if cell_data and any(count_of(path, piece, "NumberOfStrips", 0) for piece in pieces):
        raise UnsupportedFormatError(
            f"{path}: has triangle strips, whose triangles are the cells that were read; give create(format='vtp')"
        )
    appended = _Appended(file)
    for group, arrays, kinds in (
        ("PointData", point_data, ("Points",)),
        ("CellData", cell_data, ("Cells",) if file.kind == "UnstructuredGrid" else ("Verts", "Polys")),
    ):
        counts = [sum(count_of(path, piece, f"NumberOf{kind}", 0) for kind in kinds) for piece in pieces]
        for name, values in arrays.items():
            if len(values) != sum(counts):
                raise ConfigError(f"{path}: array {name!r} has {len(values)} rows, but the file has {sum(counts)}")
            for piece, part in zip(pieces, np.split(values, np.cumsum(counts[:-1])), strict=True):
                appended.add(piece, group, name, part)
    appended.write(target)
    return file.root


def write_index(target: str, files: Mapping[str, ElementTree.Element]) -> None:
    """Write a parallel file of the files of a mesh, by their names; its arrays are those that all with rows have."""
    kind = next(iter(files.values())).get("type", "")
    root = ElementTree.Element(
        "VTKFile", type=f"P{kind}", version="1.0", byte_order="LittleEndian", header_type="UInt64"
    )
    whole = ElementTree.SubElement(root, f"P{kind}", GhostLevel="0")
    pieces = [piece for file in files.values() for piece in file.iter("Piece") if piece.get("NumberOfPoints") != "0"]
    for group in ("PointData", "CellData", "Points"):
        held = [{array.get("Name"): array.attrib for array in piece.iterfind(f"{group}/DataArray")} for piece in pieces]
        said = {key: value for piece in pieces for key, value in getattr(piece.find(group), "attrib", {}).items()}
        holder = ElementTree.SubElement(whole, f"P{group}", said)
        for name, array in held[0].items() if held else ():
            kept = {key: value for key, value in array.items() if key in ("type", "Name", "NumberOfComponents")}
            if all(name in each for each in held):
                ElementTree.SubElement(holder, "PDataArray", kept)
    for name in files:
        ElementTree.SubElement(whole, "Piece", Source=name)
    ElementTree.ElementTree(root).write(target)


def write_vtk(
    target: str, kind: str, points: AnyArray, cells: RawCells | None, point_data: Arrays, cell_data: Arrays, *,
    is_packed: bool = False, faces: Sequence[CellFaces] = (),
) -> None:  # fmt: skip
    """Write a mesh, or a cloud, where ``cells`` is None, as ``"PolyData"`` or ``"UnstructuredGrid"``.

    Points are ``(num_points, 3)``; ``faces`` are those of polyhedra among the cells; arrays are packed by zlib, or not.
    Raises UnsupportedFormatError for cells of a volume, or lines, as PolyData.
    """
    if cells is None:
        cells = RawCells.of_kind(np.arange(len(points))[:, None], _VERTEX)
    said = {"type": kind, "version": "1.0", "byte_order": "LittleEndian", "header_type": "UInt64"}
    root = ElementTree.Element("VTKFile", said | ({"compressor": "vtkZLibDataCompressor"} if is_packed else {}))
    is_grid = kind == "UnstructuredGrid"
    lists = "Cells" if is_grid else "Verts" if len(cells.cell_type) and cells.cell_type[0] == _VERTEX else "Polys"
    wrong = cells.cell_type[~np.isin(cells.cell_type, (_VERTEX,) if lists == "Verts" else _FACES)]
    if not is_grid and len(wrong):
        raise UnsupportedFormatError(
            f"{target}: VTP holds faces, or points alone, but {len(wrong)} of {cells.num_cells} cells are of others of "
            f"VTK's types ({int(wrong[0])}, say); write format='vtu'"
        )
    counts = {"NumberOfPoints": len(points), f"NumberOf{lists}": cells.num_cells}
    piece = ElementTree.SubElement(ElementTree.SubElement(root, kind), "Piece", {k: str(n) for k, n in counts.items()})
    appended = _Appended(VTKFile(path=target, root=root, appended=b"", is_raw=True))
    of_polyhedra: dict[str, AnyArray] = {}
    if faces:
        cells, of_polyhedra = with_faces(cells, faces)
    for_cells: dict[str, AnyArray] = {"connectivity": cells.connectivity, "offsets": cells.offsets[1:]}
    for_cells |= {"types": cells.cell_type, **of_polyhedra} if is_grid else {}
    content = {"PointData": point_data, "CellData": cell_data, "Points": {"Points": points}, lists: for_cells}
    for group, arrays in content.items():
        for name, values in arrays.items():
            appended.add(piece, group, name, values)
    appended.write(target)


def with_faces(cells: RawCells, faces: Sequence[CellFaces]) -> tuple[RawCells, dict[str, AnyArray]]:
    """Return cells of which polyhedra have their nodes, and VTK's two arrays of their faces.

    ``faces`` has, of each polyhedron, their number and, of each, its size and nodes; ``faceoffsets`` where that ends.
    """
    sizes, nodes, cell = map(np.concatenate, zip(*faces, strict=True))
    order, first, others = np.argsort(cell, kind="stable"), bounds_of(sizes), cells.cell_type != POLYHEDRON
    begins, ends = cells.offsets[:-1][others], cells.offsets[1:][others]
    most = int(nodes.max(initial=0)) + 1
    own = distinct(np.repeat(cell, sizes) * most + nodes)
    every = np.append(np.repeat(np.flatnonzero(others), ends - begins), own // most)
    connectivity = np.append(cells.connectivity[ranges(begins, ends)], own % most)[np.argsort(every, kind="stable")]
    cell, sizes, at = cell[order], sizes[order], first[:-1][order]
    begun = np.diff(cell, prepend=-1) != 0
    ends = np.cumsum(1 + sizes + begun)
    stream, place = np.empty(ends[-1], np.int64), ends - sizes - 1
    is_node = np.ones(len(stream), bool)
    stream[place], stream[place[begun] - 1] = sizes, np.bincount(cell)[cell[begun]]
    is_node[place] = is_node[place[begun] - 1] = False
    stream[is_node] = nodes[ranges(at, at + sizes)]
    offsets = np.full(cells.num_cells, -1, np.int64)
    offsets[cell] = ends  # of its faces the last one stays
    of_each = bounds_of(np.bincount(every, minlength=cells.num_cells))
    joined = RawCells(offsets=of_each, connectivity=connectivity, cell_type=cells.cell_type)
    return joined, {"faces": stream, "faceoffsets": offsets}


class _Appended:
    """Arrays that are appended to a file's."""

    def __init__(self, file: VTKFile) -> None:
        self._file, self._is_raw = file, file.is_raw or not file.appended
        self._parts: list[Any] = [file.appended]
        self._at = len(file.appended)
        if all(array.get("format") == "ascii" for array in file.root.iter("DataArray")):
            file.root.attrib.update(header_type="UInt64", byte_order="LittleEndian")

    def add(self, piece: ElementTree.Element, group: str, name: str, values: AnyArray) -> None:
        """Add an array to a group of a piece, in the place of one of its name."""
        found = piece.find(group)
        holder = ElementTree.SubElement(piece, group) if found is None else found
        for old in [array for array in holder if array.get("Name") == name]:
            holder.remove(old)
        if values.dtype.kind == "b" or (values.dtype.itemsize == 2 and values.dtype.kind == "f"):
            values = values.astype(np.uint8 if values.dtype.kind == "b" else np.float32)
        code = values.dtype.str[1:]
        if code not in _NAMES:
            raise ConfigError(f"{self._file.path}: array {name!r} is {values.dtype}, which VTK has not")
        said = {"type": _NAMES[code], "Name": name, "format": "appended", "offset": str(self._at)}
        if values.ndim > 1:
            said["NumberOfComponents"] = str(values.shape[1])
        ElementTree.SubElement(holder, "DataArray", said)
        stored = np.ascontiguousarray(values, values.dtype.newbyteorder(self._file.order))
        flat: Any = stored.reshape(-1).view(np.uint8)
        for part in self._encoded(name, memoryview(flat)):
            self._parts.append(part)
            self._at += len(part)

    def _encoded(self, name: str, data: memoryview) -> list[Any]:
        """Return what is appended for the bytes of an array; see :class:`VTKFile`."""
        word = self._file.word
        if (packer := self._file.compressor) == "":
            if len(data) >= 2 ** (8 * word.size):
                raise ConfigError(
                    f"{self._file.path}: array {name!r} has {len(data)} bytes, but the file counts them in 32 bits; "
                    "give create(format=...), which writes a new one"
                )
            found: list[Any] = [word.pack(len(data)), data]
            return found if self._is_raw else [base64.b64encode(b"".join(found))]
        blocks = [_pack(data[at : at + _BLOCK], packer) for at in range(0, len(data), _BLOCK)]
        numbers = [len(blocks), _BLOCK, len(data) % _BLOCK, *map(len, blocks)] if blocks else [0]
        found = [b"".join(map(word.pack, numbers)), b"".join(blocks)]
        return found if self._is_raw else [base64.b64encode(part) for part in found]

    def write(self, target: str) -> None:
        """Write the file."""
        head = ElementTree.tostring(self._file.root, encoding="utf-8").rstrip().removesuffix(b"</VTKFile>")
        encoding = b"raw" if self._is_raw else b"base64"
        with open(target, "wb") as file:
            file.write(b'<?xml version="1.0"?>\n' + head + b'<AppendedData encoding="' + encoding + b'">\n_')
            file.writelines(self._parts)
            file.write(b"\n</AppendedData>\n</VTKFile>\n")


def _pack(block: memoryview, compressor: str) -> bytes:
    if compressor == "vtkLZ4DataCompressor":
        return bytes(lz4.compress(block))[4:]  # without the size, which numcodecs puts before it
    return zlib.compress(block, 1) if compressor == "vtkZLibDataCompressor" else lzma.compress(block)

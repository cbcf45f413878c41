"""VTK's XML files that meshio does not read, or wrongly, as those that it does.

Surfaces (``.vtp``) have the arrays that unstructured grids (``.vtu``) have, under other names: ``Polys`` become cells.
In both, arrays that are appended as raw bytes go where they belong, in base64: meshio 5.3 looks them up by offsets that
it changes meanwhile, and gives one array's values for another's where two of these meet.

Format: "XML file formats" of the VTK User's Guide.
"""

from __future__ import annotations

import base64
import re
import struct

from scidata.errors import CorruptDataError, UnsupportedFormatError

_POLYGON = b"7"
_APPENDED = re.compile(rb"<AppendedData\b[^>]*>\s*_")
_IS_RAW = re.compile(rb"""\bencoding\s*=\s*["']raw["']""")
_COUNTS = re.compile(rb"""\bNumberOf(Verts|Lines|Strips)\s*=\s*["']\s*(\d+)""")
_PIECE = re.compile(rb"""<Piece\b[^>]*?\bNumberOfPolys\s*=\s*["']\s*(\d+)\s*["'][^>]*>(.*?)</Piece\s*>""", re.DOTALL)
_OTHERS = re.compile(rb"<(Verts|Lines|Strips)\b[^>]*?(/>|>.*?</\1\s*>)", re.DOTALL)
_ARRAY = re.compile(
    rb"""<DataArray\b([^>]*?)\bformat\s*=\s*["']appended["']([^>]*?)(/>|>.*?</DataArray\s*>)""", re.DOTALL
)
_OFFSET = re.compile(rb"""\boffset\s*=\s*["']\s*(\d+)\s*["']""")
_COMPRESSOR = re.compile(rb"""\bcompressor\s*=\s*["'](\w+)["']""")
_WIDE = re.compile(rb"""\bheader_type\s*=\s*["']UInt64["']""")
_BIG = re.compile(rb"""\bbyte_order\s*=\s*["']BigEndian["']""")
_READ = (b"vtkZLibDataCompressor", b"vtkLZMADataCompressor")
_PART = re.compile(rb"(</?)(PolyData|Polys)\b")
_UNSTRUCTURED = {b"PolyData": b"UnstructuredGrid", b"Polys": b"Cells"}


def as_read(path: str, data: bytes) -> bytes | None:
    """Return what meshio reads in place of a VTU or VTP file; None where that is the file itself.

    Raises
    ------
    UnsupportedFormatError
        It has other cells than polygons, or is compressed by what meshio does not know.
    CorruptDataError
        An array lies outside the file.
    """
    is_surface = path.lower().endswith(".vtp")
    found = _APPENDED.search(data)
    head, tail = (data, b"") if found is None else (data[: found.start()], data[found.start() :])
    packed = _COMPRESSOR.search(head)
    if packed is not None and packed[1] not in _READ:
        raise UnsupportedFormatError(
            f"{path}: is compressed by {packed[1].decode()}, which meshio does not read; write it with zlib"
        )
    is_raw = found is not None and _IS_RAW.search(found[0]) is not None
    if not (is_surface or is_raw):
        return None
    if found is not None and is_raw:
        head = _inlined(path, head, data[found.end() :], packed=packed is not None)
        tail = b"\n</VTKFile>\n"
    return (_unstructured(path, head) if is_surface else head) + tail


def _inlined(path: str, head: bytes, raw: bytes, *, packed: bool) -> bytes:
    """Put what is appended where it belongs; each array begins with its number of bytes, or those of its blocks."""
    order = ">" if _BIG.search(head) else "<"
    word = struct.Struct(order + ("Q" if _WIDE.search(head) else "I"))

    def number(at: int) -> int:
        found: int = word.unpack_from(raw, at)[0]
        return found

    def inline(array: re.Match[bytes]) -> bytes:
        place = _OFFSET.search(array[0])
        try:
            at = int(place[1]) if place is not None else len(raw)
            header = (3 + number(at)) * word.size if packed else word.size
            sizes = [number(at + k) for k in range(3 * word.size, header, word.size)] if packed else [number(at)]
        except struct.error:
            raise CorruptDataError(f"{path}: an appended array lies outside the file; copy or write it again") from None
        end = at + header + sum(sizes)
        if end > len(raw):
            raise CorruptDataError(f"{path}: an appended array ends behind the file; copy or write it again")
        text = base64.b64encode(raw[at : at + header]) + base64.b64encode(raw[at + header : end])
        if not packed:
            text = base64.b64encode(raw[at:end])
        attributes = array[1] + b'format="binary"' + _OFFSET.sub(b"", array[2])
        return b"<DataArray" + _OFFSET.sub(b"", attributes) + b">" + text + b"</DataArray>"

    return _ARRAY.sub(inline, head)


def _unstructured(path: str, head: bytes) -> bytes:
    """Call the parts of a surface what they are called in an unstructured grid."""
    if not re.search(rb"""\btype\s*=\s*["']PolyData["']""", head):
        raise UnsupportedFormatError(f"{path}: is no VTK XML file of type PolyData, as its suffix says")
    for what, count in _COUNTS.findall(head):
        if int(count):
            raise UnsupportedFormatError(
                f"{path}: has {int(count)} {what.decode().lower()} beside its polygons, which are not read; leave "
                "polygons alone (vtkTriangleFilter), or write VTU"
            )
    head = _PIECE.sub(_as_cells, head)
    head = re.sub(rb"""(\btype\s*=\s*["'])PolyData(["'])""", rb"\1UnstructuredGrid\2", head, count=1)
    return _PART.sub(lambda part: part[1] + _UNSTRUCTURED[part[2]], head)


def _as_cells(piece: re.Match[bytes]) -> bytes:
    """Rewrite a piece: its polygons are cells, which have types."""
    codes = b" ".join([_POLYGON] * int(piece[1]))
    types = b'<DataArray type="UInt8" Name="types" format="ascii">' + codes + b"</DataArray>"
    text = _OTHERS.sub(b"", piece[0]).replace(b"NumberOfPolys", b"NumberOfCells", 1)
    return re.sub(rb"</Polys\s*>", lambda end: types + end[0], text)

"""VTK's XML files: their elements, and the arrays in them however those are encoded and compressed.

An array is text, base64 in its element, or lies in ``AppendedData``, as base64 or raw bytes. Binary arrays begin with
their number of bytes, or, where the file names a compressor, with the number and sizes of the blocks that follow.

meshio reads unstructured grids (``.vtu``), but looks raw appended arrays up by offsets that it changes meanwhile, and
knows no LZ4: :func:`as_read` writes such files anew for it.

Format: "XML file formats" of the VTK User's Guide.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from numcodecs import lz4

from scidata.errors import CorruptDataError, UnsupportedFormatError

_APPENDED = re.compile(rb"<AppendedData\b[^>]*>\s*_")
_COMPRESSORS = ("vtkZLibDataCompressor", "vtkLZ4DataCompressor", "vtkLZMADataCompressor")
_OF_MESHIO = ("", "vtkZLibDataCompressor", "vtkLZMADataCompressor")
_MAX_LZ4_RATIO = 255  # a block cannot say more: one byte adds at most 255 to a length
_TYPES = {
    **{f"Float{8 * n}": f"f{n}" for n in (4, 8)},
    **{f"Int{8 * n}": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"UInt{8 * n}": f"u{n}" for n in (1, 2, 4, 8)},
}
_AGAIN = "copy or write it again"


@dataclass(frozen=True, kw_only=True)
class VTKFile:
    """A parsed file.

    Attributes
    ----------
    path
        Of the file, for messages.
    root
        The element ``VTKFile``, without what is appended.
    appended
        What follows the underscore in ``AppendedData``.
    is_raw
        Whether that is raw bytes, not base64.
    """

    path: str
    root: ElementTree.Element
    appended: bytes
    is_raw: bool

    @property
    def kind(self) -> str:
        """The type of data set, such as ``PolyData``."""
        return self.root.get("type", "")

    @property
    def compressor(self) -> str:
        """VTK's class that packed the arrays, empty where none did."""
        return self.root.get("compressor", "")

    def read(self, array: ElementTree.Element) -> npt.NDArray[Any]:
        """Return the values of a ``DataArray``: ``(num_values,)``, or ``(num_tuples, num_components)`` of several.

        Raises
        ------
        UnsupportedFormatError
            It is of a type that is no number.
        CorruptDataError
            It is damaged, or lies outside the file.
        """
        name, kind = array.get("Name", ""), array.get("type", "")
        if kind not in _TYPES:
            raise UnsupportedFormatError(
                f"{self.path}: array {name!r} is of type {kind!r}; read are {', '.join(_TYPES)}"
            )
        dtype = np.dtype(self._order + _TYPES[kind])
        try:
            if array.get("format") == "ascii":
                values = _of_text(array.text or "", dtype)
            else:
                values = np.frombuffer(self._bytes(array), dtype)
            return _in_tuples(values.astype(dtype.newbyteorder("=")), array.get("NumberOfComponents", ""))
        except (ValueError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, DeprecationWarning) as e:
            raise CorruptDataError(f"{self.path}: array {name!r} cannot be decoded ({e}); {_AGAIN}") from e

    @property
    def _order(self) -> str:
        return ">" if self.root.get("byte_order") == "BigEndian" else "<"

    @property
    def _word(self) -> struct.Struct:
        return struct.Struct(self._order + ("Q" if self.root.get("header_type") == "UInt64" else "I"))

    def _bytes(self, array: ElementTree.Element) -> bytes:
        if array.get("format") == "appended":
            at = int(array.get("offset", "").strip() or -1)
            if not 0 <= at < len(self.appended):
                raise ValueError(f"it begins at {at} of {len(self.appended)} appended bytes")
            stream = _Raw(self.appended, at) if self.is_raw else _Base64(self.appended, at)
        else:
            stream = _Base64("".join((array.text or "").split()).encode(), 0)
        return self._unpacked(stream) if self.compressor else stream.counted(self._word)

    def _unpacked(self, stream: _Raw) -> bytes:
        """Return the bytes of an array in blocks: their number, their size, that of the last, their packed sizes."""
        word = self._word
        num = word.unpack(stream.peek(word.size))[0]
        header = stream.take((3 + num if num else 1) * word.size)
        if not num:
            return b""
        _, size, last, *packed = struct.unpack(f"{self._order}{3 + num}{word.format[-1]}", header)
        data, at, parts = stream.take(sum(packed)), 0, []
        for number, length in enumerate(packed):
            wanted = last if last and number == num - 1 else size
            parts.append(_block(data[at : at + length], wanted, self.compressor))
            at += length
        return b"".join(parts)


class _Raw:
    """Bytes, taken in turn; what is taken together was encoded together."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def peek(self, num: int) -> bytes:
        found = self._data[self._at : self._at + num]
        if len(found) < num:
            raise ValueError(f"it ends {num - len(found)} bytes behind what the file has")
        return found

    def take(self, num: int) -> bytes:
        found = self.peek(num)
        self._at += num
        return found

    def counted(self, word: struct.Struct) -> bytes:
        """Take a number of bytes, and as many bytes as it says."""
        return self.take(word.size + word.unpack(self.peek(word.size))[0])[word.size :]


class _Base64(_Raw):
    """The same from base64, in which what was encoded together fills whole groups of four characters."""

    def peek(self, num: int) -> bytes:
        text = super().peek(-(-num // 3) * 4)
        try:
            found = base64.b64decode(text)
        except binascii.Error as e:
            raise ValueError(f"it is no base64: {e}") from e
        if len(found) < num:
            raise ValueError(f"{num} bytes were expected in base64, but it is padded after {len(found)}")
        return found[:num]

    def take(self, num: int) -> bytes:
        found = self.peek(num)
        self._at += -(-num // 3) * 4
        return found

    def counted(self, word: struct.Struct) -> bytes:
        num = word.unpack(self.peek(word.size))[0]
        apart = base64.b64encode(self.peek(word.size))
        if num and self._data.startswith(apart, self._at):  # some writers encode the number by itself
            self._at += len(apart)
            return self.take(num)
        return super().counted(word)


def _block(packed: bytes, size: int, compressor: str) -> bytes:
    """Unpack a block, making no more of it than its size."""
    if compressor == "vtkLZ4DataCompressor":
        if size > _MAX_LZ4_RATIO * len(packed):
            raise ValueError(f"a block of {len(packed)} bytes claims {size}")
        found = bytes(lz4.decompress(struct.pack("<I", size) + packed)) if size else b""
    elif compressor == "vtkZLibDataCompressor":
        found = zlib.decompressobj().decompress(packed, size)
    else:
        found = lzma.LZMADecompressor().decompress(packed, size)
    if len(found) != size:
        raise ValueError(f"a block has {len(found)} bytes where {size} were expected")
    return found


def _of_text(text: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not text.strip():  # of which NumPy makes one value
        return np.empty(0, dtype)
    with warnings.catch_warnings():  # NumPy takes what it can of text that holds other things than numbers
        warnings.simplefilter("error", DeprecationWarning)
        values: npt.NDArray[Any] = np.fromstring(text, dtype.newbyteorder("="), sep=" ")
    return values


def _in_tuples(values: npt.NDArray[Any], num_components: str) -> npt.NDArray[Any]:
    num = int(num_components.strip() or 1)
    if num <= 1:
        return values
    if len(values) % num:
        raise ValueError(f"it has {len(values)} values, which are no tuples of {num}")
    return values.reshape(-1, num)


def parse(path: str, data: bytes) -> VTKFile:
    """Parse a file; its arrays are decoded when they are read.

    Raises
    ------
    CorruptDataError
        It is no XML.
    UnsupportedFormatError
        It is compressed by something that VTK does not have.
    """
    found = _APPENDED.search(data)
    head, appended = data, b""
    if found is not None:
        head, end = data[: found.start()] + b"</VTKFile>", data.rfind(b"</AppendedData")
        appended = data[found.end() : end if end > found.end() else None]
    is_raw = found is not None and re.search(rb"""\bencoding\s*=\s*["']raw["']""", found[0]) is not None
    try:
        root = ElementTree.fromstring(head)
    except (ElementTree.ParseError, ValueError, LookupError) as e:
        raise CorruptDataError(f"{path}: is not well-formed XML: {e}; {_AGAIN}") from e
    file = VTKFile(path=path, root=root, appended=appended, is_raw=is_raw)
    if file.compressor not in ("", *_COMPRESSORS):
        raise UnsupportedFormatError(
            f"{path}: is compressed by {file.compressor!r}; read are {', '.join(_COMPRESSORS)}, and files without"
        )
    return file


def as_read(path: str, data: bytes) -> bytes | None:
    """Return what meshio reads in place of a VTU file; None where that is the file itself.

    Raises
    ------
    UnsupportedFormatError, CorruptDataError
        As :func:`parse` and :meth:`VTKFile.read` say.
    """
    found = _APPENDED.search(data)
    is_raw = found is not None and b"raw" in found[0]
    compressor = re.search(rb"""<VTKFile\b[^>]*\bcompressor\s*=\s*["'](\w+)["']""", data)
    if not is_raw and (compressor[1].decode() if compressor else "") in _OF_MESHIO:
        return None
    file = parse(path, data)
    for array in _numbers(file.root):
        values = file.read(array)
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        for name in ("offset", "RangeMin", "RangeMax"):
            array.attrib.pop(name, None)
        array.set("format", "binary")
        for child in list(array):
            array.remove(child)
        array.text = base64.b64encode(struct.pack("<Q", values.nbytes) + values.tobytes()).decode()
    file.root.attrib.pop("compressor", None)
    file.root.set("byte_order", "LittleEndian")
    file.root.set("header_type", "UInt64")
    return ElementTree.tostring(file.root)


def _numbers(root: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield the arrays of numbers; others, which belong to the file as a whole, are taken out."""
    for parent in list(root.iter()):
        for array in [child for child in parent if child.tag == "DataArray"]:
            if array.get("type") in _TYPES:
                yield array
            else:
                parent.remove(array)

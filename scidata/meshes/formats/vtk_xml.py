"""VTK's XML files: their elements, and the arrays in them however those are encoded and compressed.

An array is text, base64 in its element, or lies in ``AppendedData``, as base64 or raw bytes. Binary arrays begin with
their number of bytes, or, where the file names a compressor, with the number and sizes of the blocks that follow.

Format: "XML file formats" of the VTK User's Guide.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import re
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
from numcodecs import lz4

from scidata.core.checks import allocate
from scidata.core.types import AnyArray, ByteArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.read import inflate

_APPENDED = re.compile(rb"<AppendedData\b[^>]*>\s*_")
_COMPRESSORS = ("vtkZLibDataCompressor", "vtkLZ4DataCompressor", "vtkLZMADataCompressor")
_MAX_LZ4_RATIO = 255  # a block cannot say more: one byte adds at most 255 to a length
#: NumPy's codes, without byte order, by names of types of arrays.
TYPES = {
    **{f"Float{8 * n}": f"f{n}" for n in (4, 8)},
    **{f"Int{8 * n}": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"UInt{8 * n}": f"u{n}" for n in (1, 2, 4, 8)},
}
AGAIN = "copy or write it again"


@dataclass(frozen=True, kw_only=True)
class VTKFile:
    """A parsed file."""

    path: str  # of the file, for messages
    root: ElementTree.Element  # the element ``VTKFile``, without the appended data
    appended: bytes  # what follows the underscore in ``AppendedData``
    is_raw: bool  # whether that is raw bytes, not base64

    @property
    def kind(self) -> str:
        """The type of data set, such as ``PolyData``."""
        return self.root.get("type", "")

    @property
    def compressor(self) -> str:
        """VTK's class that packed the arrays, empty if none did."""
        return self.root.get("compressor", "")

    def read(self, array: ElementTree.Element, num_rows: int | None = None) -> AnyArray:
        """Return the values of a ``DataArray``: ``(num_values,)``, or ``(num_tuples, num_components)`` of several.

        ``num_rows``: how many values or tuples it has, if that is known: packed bytes that claim others are not
        unpacked.
        Raises UnsupportedFormatError: it is of a type that is no number.
        Raises CorruptDataError: it is damaged, or lies outside the file.
        """
        name, kind = array.get("Name", ""), array.get("type", "")
        if kind not in TYPES:
            raise UnsupportedFormatError(
                f"{self.path}: array {name!r} is of type {kind!r}; read are {', '.join(TYPES)}"
            )
        dtype = np.dtype(self.order + TYPES[kind])
        try:
            if array.get("format") == "ascii":
                values = values_of_text(array.text or "", dtype)
            else:
                values = np.frombuffer(self._bytes(array, num_rows), dtype)
            values = values.astype(dtype.newbyteorder("="), copy=False)
            num = int(array.get("NumberOfComponents", "").strip() or 1)
            if num > 1 and len(values) % num:
                raise ValueError(f"it has {len(values)} values, which are no tuples of {num}")
            return values.reshape(-1, num) if num > 1 else values
        except (
            ValueError,
            RuntimeError,
            struct.error,
            inflate.engine().error,
            lzma.LZMAError,
            DeprecationWarning,
        ) as e:
            raise CorruptDataError(f"{self.path}: array {name!r} cannot be decoded ({e}); {AGAIN}") from e

    @property
    def order(self) -> Literal["<", ">"]:
        """NumPy's character for the byte order."""
        return ">" if self.root.get("byte_order") == "BigEndian" else "<"

    @property
    def word(self) -> struct.Struct:
        """The numbers of bytes and blocks."""
        return struct.Struct(self.order + ("Q" if self.root.get("header_type") == "UInt64" else "I"))

    def _bytes(self, array: ElementTree.Element, num_rows: int | None) -> bytes | ByteArray:
        if not self.compressor:
            return self._stream(array).counted(self.word)
        total, blocks = self._blocks(array, num_rows)
        out, at = allocate(f"{self.path}: array {array.get('Name', '')!r}", (total,), np.uint8), 0
        for block in blocks:
            out[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        return out

    def _stream(self, array: ElementTree.Element) -> _Raw:
        if array.get("format") == "appended":
            at = int(array.get("offset", "").strip() or -1)
            if not 0 <= at < len(self.appended):
                raise ValueError(f"it begins at {at} of {len(self.appended)} appended bytes")
            return _Raw(self.appended, at) if self.is_raw else _Base64(self.appended, at)
        return _Base64("".join((array.text or "").split()).encode(), 0)

    def _blocks(self, array: ElementTree.Element, num_rows: int | None) -> tuple[int, Iterator[bytes]]:
        """Return how many bytes an array has, and its unpacked blocks, each made as it is asked for.

        It begins with the number of blocks, their size, that of the last, and their packed sizes.
        """
        stream, word = self._stream(array), self.word
        num = word.unpack(stream.peek(word.size))[0]
        header = stream.take((3 + num if num else 1) * word.size)
        _, size, last, *packed = (
            struct.unpack(f"{self.order}{len(header) // word.size}{word.format[-1]}", header) if num else (0, 0, 0)
        )
        sizes = [last if last and number == num - 1 else size for number in range(num)]
        components = int(array.get("NumberOfComponents", "").strip() or 1)
        expected = (
            None
            if num_rows is None
            else num_rows * max(components, 1) * np.dtype(TYPES[array.get("type", "")]).itemsize
        )
        if expected is not None and sum(sizes) != expected:
            raise ValueError(f"it claims {sum(sizes)} bytes, but {num_rows} rows take {expected}")
        bounds = np.cumsum([0, *packed]).tolist()
        data = stream.take(sum(packed))
        return sum(sizes), (
            _block(data[start:stop], wanted, self.compressor)
            for start, stop, wanted in zip(bounds[:-1], bounds[1:], sizes, strict=True)
        )


class _Raw:
    """Bytes, taken in turn; bytes taken together were encoded together."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def peek(self, num: int) -> bytes:
        found = self._data[self._at : self._at + num]
        if len(found) < num:
            raise ValueError(f"it ends {num - len(found)} bytes behind the end of the file")
        return found

    def take(self, num: int) -> bytes:
        found = self.peek(num)
        self._at += num
        return found

    def counted(self, word: struct.Struct) -> bytes:
        """Take a number of bytes, and as many bytes as it says."""
        return self.take(word.size + word.unpack(self.peek(word.size))[0])[word.size :]


class _Base64(_Raw):
    """The same from base64, in which bytes that were encoded together fill whole groups of four characters."""

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
        found = inflate.engine().decompressobj().decompress(packed, size + 1)  # one more, to see that there is no more
    else:
        found = lzma.LZMADecompressor().decompress(packed, size + 1)
    if len(found) != size:
        more = "more" if len(found) > size else str(len(found))
        raise ValueError(f"a block has {more} bytes where {size} were expected")
    return found


def values_of_text(text: str | bytes, dtype: np.dtype[Any]) -> AnyArray:
    """Read numbers between blanks; raises DeprecationWarning or ValueError at anything else."""
    if not text.strip():  # of which NumPy makes one value
        return np.empty(0, dtype)
    with warnings.catch_warnings():  # NumPy reads numbers up to the first other word
        warnings.simplefilter("error", DeprecationWarning)
        values: AnyArray = np.fromstring(text, dtype.newbyteorder("="), sep=" ")
    return values


def parse(path: str, data: bytes) -> VTKFile:
    """Parse a file; its arrays are decoded when they are read."""
    found = _APPENDED.search(data)
    head, appended = data, b""
    if found is not None:
        head, end = data[: found.start()] + b"</VTKFile>", data.rfind(b"</AppendedData")
        appended = data[found.end() : end if end > found.end() else None]
    is_raw = found is not None and re.search(rb"""\bencoding\s*=\s*["']raw["']""", found[0]) is not None
    try:
        root = ElementTree.fromstring(head)
    except (ElementTree.ParseError, ValueError, LookupError) as e:
        raise CorruptDataError(f"{path}: is not well-formed XML: {e}; {AGAIN}") from e
    file = VTKFile(path=path, root=root, appended=appended, is_raw=is_raw)
    if file.compressor not in ("", *_COMPRESSORS):
        raise UnsupportedFormatError(
            f"{path}: is compressed by {file.compressor!r}; read are {', '.join(_COMPRESSORS)}, and files without"
        )
    return file

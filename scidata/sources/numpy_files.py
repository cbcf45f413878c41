"""NumPy's own files: ``.npy``, one array, and ``.npz``, a zip archive of them.

An array that is not compressed lies in one piece, so that any part of it is read by ranges of bytes, from URLs too.
Those of ``np.savez_compressed`` are decompressed whole, by NumPy where they are small enough to be kept.
Formats: ``numpy.lib.format``, and APPNOTE.TXT of PKWARE for the local headers of a zip archive.
"""

from __future__ import annotations

import math
import os
import posixpath
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Array, ArrayLayout, ChunkRefs, IntArray
from scidata.errors import CorruptDataError, ShortReadError
from scidata.sources.access.files import files
from scidata.sources.access.url_file import BeforeFileError, UrlFile
from scidata.sources.file_source import FileSource

MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16  # bytes: NumPy's own limit is 10,000
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_KEPT = 256 << 20  # bytes of decompressed arrays
_PIECE = 4 << 20  # bytes of one that are decompressed at a time
_MAX_DEFLATE = 1032  # bytes that one byte of deflate may stand for


@dataclass(frozen=True, kw_only=True)
class _Member:
    layout: ArrayLayout
    begin: int
    end: int
    header: int  # bytes of its header


class NumpySource(FileSource[dict[str, _Member]]):
    """One ``.npy`` or ``.npz`` file. Arrays of the second are named as they were saved.

    That of the first is ``points`` if it can be a cloud, two or three columns of floating numbers; else ``data``.
    """

    attributes: Mapping[str, Any] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._whole: Cache[Array] = Cache(_KEPT, "lru")
        self.skipped: dict[str, str] = {}

    @cached_property
    def format(self) -> str:
        """``"npy"`` or ``"npz"``."""
        return "npy" if bytes(files().read(self.path, 0, len(MAGIC))) == MAGIC else "npz"

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every array of numbers, in the order of the file."""
        return {name: member.layout for name, member in self._read().items()}

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates: all are the whole array."""
        member = self._item(layout, self._read())
        begin, nbytes = np.int64(member.begin), np.int64(member.end - member.begin)
        places = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(str(self.path),), path_index=places, offset=places + begin, nbytes=places + nbytes)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: Array) -> None:
        """Read a box (positive steps) with NumPy into ``out``."""

        def load() -> Array:
            with UrlFile(self.path) as stream:
                found = np.load(stream, allow_pickle=False)
                return found if isinstance(found, np.ndarray) else found[layout.name]

        try:
            if layout.nbytes > _KEPT:
                self._read_packed(layout, box, out)
                return
            out[...] = self._whole.get_or_make(layout.name, load, lambda values: values.nbytes, once=True)[box]
        except (ValueError, zipfile.BadZipFile, EOFError, zlib.error) as e:
            raise CorruptDataError(f"{self.path}: field {layout.name!r} cannot be decompressed: {e}") from e

    def _read_packed(self, layout: ArrayLayout, box: tuple[slice, ...], out: Array) -> None:
        """Decompress all of an array, for its checksum, and keep some rows of its slowest dim at a time."""
        order = layout.axis_order
        shape = [layout.shape[i] for i in order]
        wanted, *rest = [range(*box[i].indices(layout.shape[i])) for i in order]
        inner = tuple(slice(r.start, r.stop, r.step) for r in rest)
        target, row_nbytes = out.transpose(order), math.prod(shape[1:]) * layout.dtype.itemsize
        step = max(1, _PIECE // max(row_nbytes, 1))
        with (
            UrlFile(self.path) as stream,
            zipfile.ZipFile(stream) as archive,
            archive.open(f"{layout.name}.npy") as file,
        ):
            begin = self._item(layout, self._read()).header
            for first in range(wanted.start, wanted.stop, step) if row_nbytes else ():
                rows = np.arange(first, min(first + step, wanted.stop))
                file.seek(begin + first * row_nbytes)
                data = file.read(len(rows) * row_nbytes)
                values = np.frombuffer(data, layout.dtype).reshape(len(rows), *shape[1:])
                here = (rows - wanted.start) % wanted.step == 0
                target[(rows[here] - wanted.start) // wanted.step] = values[here][(slice(None), *inner)]
            while file.read(_PIECE):
                pass

    def close(self) -> None:
        """Forget headers and values; the next use reads them again."""
        super().close()
        self._whole.clear()

    def _parse(self) -> dict[str, _Member]:
        with UrlFile(self.path) as stream:
            if self.format == "npy":
                found = [self._array("", stream, 0, files().size(self.path), packed=False)]
            else:
                found = self._archive(stream)
        return {member.layout.name: member for member in found if member is not None}

    def _archive(self, stream: UrlFile) -> list[_Member | None]:
        found = []
        try:
            with zipfile.ZipFile(stream) as archive:
                for info in archive.infolist():
                    name, suffix = posixpath.splitext(info.filename)
                    if suffix != ".npy":
                        self.skipped[info.filename] = "is no array of NumPy's"
                        continue
                    if info.file_size > _MAX_DEFLATE * info.compress_size + _MAX_HEADER and info.compress_type in (
                        0,
                        8,
                    ):
                        raise zipfile.BadZipFile(
                            f"{info.filename} claims {info.file_size} bytes in {info.compress_size} packed ones"
                        )
                    with archive.open(info) as file:
                        packed = info.compress_type != zipfile.ZIP_STORED
                        begin = 0 if packed else _begin_of(stream, info)
                        found.append(self._array(name, file, begin, info.file_size, packed=packed))
        except _DAMAGED as e:
            raise CorruptDataError(f"{self.path}: is no whole zip archive ({e}); copy or write it again") from e
        return found

    def _array(self, name: str, file: Any, begin: int, size: int, *, packed: bool) -> _Member | None:
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file, max_header_size=_MAX_HEADER)
        except (ValueError, EOFError, SyntaxError, TypeError, tokenize.TokenError) as e:
            raise CorruptDataError(f"{self.path}: the header of {name!r} is damaged: {e}; write it again") from e
        if dtype.hasobject:
            self.skipped[name] = "holds Python objects, which are never unpickled"
            return None
        is_cloud = len(shape) == 2 and shape[1] in (2, 3) and dtype.kind == "f"
        axes = tuple(range(len(shape)))
        layout = ArrayLayout(
            store=str(self.path),
            name=name or ("points" if is_cloud else "data"),
            shape=shape,
            dims=tuple(f"dim_{i}" for i in axes),
            dtype=dtype,
            chunks=shape,
            axis_order=axes[::-1] if is_fortran else axes,
            fallback=packed,
        )
        header = file.tell()
        if header + layout.nbytes > size:
            raise ShortReadError(
                f"{self.path}: {layout.name!r} of shape {shape} and dtype {dtype} needs {layout.nbytes} bytes, but has "
                f"{size - header}; it is truncated: copy or write it again"
            )
        return _Member(layout=layout, begin=begin + header, end=begin + header + layout.nbytes, header=header)


def names_in_archive(path: str) -> list[str]:
    """Return the names of the members of a zip archive; none where it is damaged."""
    with UrlFile(path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                return archive.namelist()
        except _DAMAGED:
            return []


def _begin_of(stream: UrlFile, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member begin: behind its local header, whose names may be longer than the index's."""
    stream.seek(info.header_offset)
    mark, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    if mark != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{info.filename} does not begin where the archive says")
    return info.header_offset + _LOCAL_HEADER.size + name + extra


#: What Python's zipfile raises of archives that are damaged, encrypted, or compressed in a way that it does not know.
_DAMAGED = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, struct.error, UnicodeDecodeError,
    BeforeFileError,
)  # fmt: skip

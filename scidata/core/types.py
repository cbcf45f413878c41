"""Descriptions shared by all layers: a store's arrays, byte locations, selections.

Frozen dataclasses without behaviour beyond arithmetic on themselves. No I/O, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
#: Any dtype; its operations are not type-checked.
AnyArray: TypeAlias = npt.NDArray[Any]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

#: Makes an uninitialised array of a shape and a dtype: ``numpy.empty``, or memory that is used again.
Empty: TypeAlias = Callable[[tuple[int, ...], Any], npt.NDArray[Any]]

#: Undoes a codec of an externally registered format: see :attr:`Codec.decoder`.
Decoder: TypeAlias = Callable[[memoryview, int], bytes | bytearray | memoryview | npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """An arithmetic run of indices along one dimension, and its destination.

    Indices ``start, start + step, …`` (``count`` of them, ``step`` may be negative, never 0) of the source go to
    ``[offset, offset + count)`` of the destination.
    """

    start: int
    count: int
    step: int = 1
    offset: int = 0


class SegmentTable(Sequence[Segment]):
    """Many segments in one table: replaces a tuple if a list of indices makes thousands.

    ``table``: ``(num, 4)`` int64: start, count, step, offset.
    """

    def __init__(self, table: IntArray) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Segment]:
        for start, count, step, offset in self.table.tolist():
            yield Segment(start=start, count=count, step=step, offset=offset)

    @overload
    def __getitem__(self, at: int) -> Segment: ...
    @overload
    def __getitem__(self, at: slice) -> SegmentTable: ...
    def __getitem__(self, at: int | slice) -> Segment | SegmentTable:
        if isinstance(at, slice):
            return SegmentTable(self.table[at])
        start, count, step, offset = self.table[at].tolist()
        return Segment(start=start, count=count, step=step, offset=offset)


#: Segments of one dimension: they do not overlap in the destination and together fill it without gaps. A periodic halo
#: that wraps is simply a second segment.
Segments: TypeAlias = tuple[Segment, ...] | SegmentTable

#: Segments of each dimension of the source array.
Selection: TypeAlias = tuple[Segments, ...]


def segment_table(segments: Sequence[Segment]) -> IntArray:
    """Return segments as ``(num, 4)`` int64: start, count, step, offset."""
    if isinstance(segments, SegmentTable):
        return segments.table
    return np.array([(s.start, s.count, s.step, s.offset) for s in segments], np.int64).reshape(-1, 4)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One encoding step of a chunk; readers undo the steps last to first.

    ``name`` is numcodecs' id if there is one (``blosc zstd gzip zlib lz4 bz2 lzma shuffle fletcher32 crc32c
    lzf``); HDF5 filters that scidata does not know are named ``hdf5:<filter id>``.

    Attributes
    ----------
    decoder
        Undoes a codec that scidata does not know: gets the encoded bytes, and how many decoded ones are expected, or
        the most that there may be; returns them as any buffer. Thread-safe; no file can name one.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    decoder: Decoder | None = None


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """Shape, dtype and chunks of one array and their decoding: all inputs of planning.

    Attributes
    ----------
    store, name
        Path or URL of the store as the user gave it, and the array's path inside it (``"group/u"``).
    shape, dims
        Global shape and one name per dimension (``dim_0`` … where the format gives none).
    dtype
        As stored, byte order included.
    chunks
        Shape of one decoded chunk: the unit that is decoded at once. A contiguous array is one chunk of its own
        shape. Chunks at the upper edge hold a full chunk. Where chunks differ in size, the largest of each dimension.
    edges
        Of arrays whose chunks differ in size, for each dimension: where its chunks begin and the last one ends, or
        empty if all are alike. Empty of other arrays.
    axis_order
        The array's axes from slowest to fastest varying inside a chunk: ``(0, 1, 2)`` is C order, ``(2, 1, 0)`` F.
    codecs
        In the order in which they were applied when writing; empty means the chunk's bytes are the array's.
    shards
        Shape of one file of the sharding codec, where used: chunks inside it share a file.
    fill_value
        What an absent chunk stands for, as a 0-d array of ``dtype``; None if the format has none.
    attributes
        The array's attributes, as plain Python or NumPy values.
    fallback
        True if only the format's own library can decode it: the plan then names boxes, not bytes.
    """

    store: str
    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    axis_order: tuple[int, ...]
    codecs: tuple[Codec, ...] = ()
    shards: tuple[int, ...] | None = None
    fill_value: npt.NDArray[Any] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    fallback: bool = False
    edges: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def num_chunks(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        regular = [-(-n // c) if c else 0 for n, c in zip(self.shape, self.chunks, strict=True)]
        return tuple(len(e) - 1 if e else n for n, e in zip(regular, self.edges or itertools.repeat(()), strict=False))

    def chunk_grid(self, dim: int) -> int | IntArray:
        """Return a dimension's chunk size, or the bounds of its chunks if they differ."""
        edges = self.edges[dim] if self.edges else ()
        return np.array(edges, np.int64) if edges else self.chunks[dim]

    def chunk_shapes(self, chunks: IntArray) -> IntArray:
        """Return the shapes of decoded chunks: ``(num, ndim)`` for coordinates, or ``(ndim,)`` if all are alike."""
        shapes = np.array(self.chunks, np.int64)
        if self.edges:
            shapes = np.tile(shapes, (len(chunks), 1))
            for dim in np.flatnonzero([bool(e) for e in self.edges]).tolist():
                shapes[:, dim] = np.diff(self.edges[dim])[chunks[:, dim]]
        return shapes

    @cached_property
    def geometry(self) -> tuple[object, ...]:
        """The facts that decide how selections are cut: layouts of equal geometry share cuts."""
        order, item = self.axis_order, self.dtype.itemsize
        return self.shape, self.chunks, order, item, bool(self.codecs), self.fallback, self.edges

    @cached_property
    def derived(self) -> dict[object, Any]:
        """Derived facts by question, shared with its twins (:meth:`in_store`)."""
        return {}

    def in_store(self, store: str) -> ArrayLayout:
        """Return a twin in another store: only the store differs, and ``derived`` is shared."""
        made = object.__new__(ArrayLayout)
        made.__dict__.update(self.__dict__, derived=self.derived, store=store)
        return made

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one full decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, decoded."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ChunkRefs:
    """Byte locations of some chunks, one row per requested chunk.

    Attributes
    ----------
    paths
        The distinct files or URLs.
    path_index
        ``(num,)`` int64 into ``paths``; -1 where the chunk is absent from the store.
    offset, nbytes
        ``(num,)`` int64: first byte and encoded size inside the file.
    skipped_codecs
        ``(num,)`` uint32 bit mask: bit ``i`` set means ``layout.codecs[i]`` was not applied to this chunk (HDF5's
        filter mask). None if no chunk skips any.
    checksums
        ``(num,)`` uint32: the crc32c that was recorded of each chunk apart from the file that holds it, so that a
        chunk in another's place is found. Only of chunks whose one codec is a crc32c at their end; None: not known.
    unseen
        Each chunk is a file of its own, for which nobody has looked yet: where a read finds none, the chunk is absent;
        ``nbytes`` is the size that it must have, or 0 if any will do.
    """

    paths: tuple[str, ...]
    path_index: IntArray
    offset: IntArray
    nbytes: IntArray
    skipped_codecs: npt.NDArray[np.uint32] | None = None
    checksums: npt.NDArray[np.uint32] | None = None
    unseen: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """CF decoding of packed values: ``value = raw * scale + offset``, fill values to NaN."""

    dtype: np.dtype[Any]  # floating or complex, of the decoded values, native byte order; all arithmetic is done in it
    # scale, offset: None if the attribute is absent (then that step is skipped, so that plain floats stay bit for
    # bit)
    scale: float | None = None
    offset: float | None = None
    # raw values (after ``view_as``) that mark missing data: ``_FillValue`` and every ``missing_value``
    fill_values: tuple[Any, ...] = ()
    # raw bytes are viewed as this dtype first (CF ``_Unsigned``); None for no view
    view_as: np.dtype[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """Shape and NumPy dtype of one destination buffer of a sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Files(NamedTuple):
    """The files that decide some chunks' values.

    Attributes
    ----------
    paths
        Files, or URLs, that may change.
    places
        A digest of which parts of files the chunks are, where that may change too, or of files that never change.
    """

    paths: tuple[str, ...]
    places: bytes = b""


#: Finds one chunk by its number, in C order of the grid, inside of which it is, faster than ``Source.locate`` finds
#: several: its file, first byte and bytes. None if ``locate`` has more to say of it, or an error. A source's
#: ``finder(layout)`` makes it for an array.
FindChunk: TypeAlias = Callable[[int], tuple[str, int, int] | None]


@runtime_checkable
class Source(Protocol):
    """One open store of one format: finds arrays and their byte locations, and reads nothing else.

    Opening is lazy and once per process; a source pickles as its path and options, and the versions of the files that
    describe it, so that no other process reads others.
    """

    path: str

    @property
    def format(self) -> str:
        """Format name: ``"zarr3"``, ``"hdf5"``, …."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The store's own attributes."""

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """All arrays by path in the store, in the store's order."""

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks by ``(num, ndim)`` int64 chunk coordinates."""

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[Any]) -> None:
        """Read a box (positive steps) with the format's own library into ``out``: the fallback and an oracle."""

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if files just read, or their metadata, differ from those opened."""

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name all files or URLs that decide chunks' values, without checking that they exist.

        None if values may lie in others, which only the format's own library knows.
        """

    def close(self) -> None:
        """Close all files; the next use opens them again."""

"""Describe one HDF5 dataset: dtype, filters, places of its chunks. No naming, no walking.

HDF5 file format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t4.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import h5py
import numpy as np

from scidata.core.install import install_hint
from scidata.core.types import Array, ArrayLayout, Codec, IntArray
from scidata.errors import CorruptDataError, MissingDependencyError
from scidata.sources.hdf5.parts import iterate_chunks, rows_of_parts
from scidata.sources.twins import At

#: HDF5 filter ids whose payload ``scidata.read.codecs`` decodes as it is; lzf (32000) and lz4 (32004, with a header of
#: its own) are not among them because numcodecs has no such decoder. netCDF puts fletcher32 before shuffle, which then
#: meets bytes that do not fill an element: they stay where they are.
_KNOWN_FILTERS = {
    h5py.h5z.FILTER_DEFLATE: "zlib",
    h5py.h5z.FILTER_SHUFFLE: "shuffle",
    h5py.h5z.FILTER_FLETCHER32: "fletcher32",
    307: "bz2",
    32001: "blosc",
    32015: "zstd",
}
_LZF = 32000
_LEAF_HEAD = 24  # bytes of a node of chunks before its entries
_FEW_IN_LEAF = 64  # entries that HDF5 makes room for in a node, unless told otherwise


class Unreadable(Exception):  # noqa: N818 - caught by the walk, never seen by users
    """A dataset that scidata leaves out; the text is the reason shown in ``source.skipped``."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one dataset is kept: its path in the file, and the byte range of a contiguous one (None: not allocated)."""

    path: str
    shape: tuple[int, ...]
    chunked: bool
    offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What was found in a file."""

    attributes: Mapping[str, Any]
    arrays: Mapping[str, ArrayLayout]
    storage: Mapping[str, Storage]
    skipped: Mapping[str, str]
    file_size: int


@dataclass(frozen=True)
class ChunkIndex:
    """Every stored chunk of one dataset: its number in C order of the chunk grid, ascending, and its place.

    - ``places``: ``(3, num)`` int64: offsets, bytes, filter masks.
    """

    numbers: IntArray
    places: IntArray

    def find(self, numbers: IntArray) -> IntArray:
        """Return the places of chunks, ``(3, num)``; -1, 0, 0 if none is stored."""
        nowhere = np.array([[-1], [0], [0]], np.int64)
        if len(self.numbers) == 0:
            return nowhere.repeat(len(numbers), axis=1)
        rows = np.minimum(self.numbers.searchsorted(numbers), len(self.numbers) - 1)
        return np.where(self.numbers[rows] == numbers, self.places[:, rows], nowhere)

    def find_one(self, number: int) -> tuple[int, int, int] | None:
        """Return offset, bytes and filter mask of one chunk; None if it is not stored."""
        numbers, row = self.numbers, number  # of an array of which every chunk is stored
        if row >= len(numbers) or numbers[row] != number:
            row = int(numbers.searchsorted(number))
            if row == len(numbers) or numbers[row] != number:
                return None
        offset, nbytes, mask = self.places[:, row].tolist()
        return offset, nbytes, mask

    def as_numbers(self) -> list[int]:
        """Return it as an index of files keeps it."""
        return [*self.numbers.tolist(), *self.places.ravel().tolist()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int] | IntArray) -> ChunkIndex:
        """Undo :meth:`as_numbers`."""
        table = np.asarray(numbers, np.int64).reshape(4, -1)
        return cls(table[0], table[1:])

    @classmethod
    def of(cls, starts: IntArray, places: IntArray, layout: ArrayLayout) -> ChunkIndex:
        """Make an index of where each chunk begins in the array, ``(num, ndim)``, and of the places."""
        # of many chunks, what was found is kept by the caller alone
        find = _numbers_of if starts.size <= _FEW_IN_LEAF * 8 else _numbers_of.__wrapped__
        numbers, rows = find(starts.tobytes(), layout.chunks, layout.num_chunks)
        return cls(numbers, places if rows is None else places[:, rows])


@lru_cache(maxsize=64)  # files of a series have the same
def _numbers_of(starts: bytes, chunks: Sequence[int], grid: Sequence[int]) -> tuple[IntArray, IntArray | None]:
    """Return the numbers of chunks that begin there, ascending, and which rows these are; None for all in order."""
    ndim = len(grid)
    coords = np.frombuffer(starts, np.int64).reshape(-1, ndim) // np.array(chunks, np.int64)
    numbers = coords @ np.array([math.prod(grid[k + 1 :]) for k in range(ndim)], np.int64)
    inside = (coords < np.array(grid, np.int64)).all(axis=1)
    if inside.all() and (numbers[1:] > numbers[:-1]).all():
        return numbers, None
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(numbers[rows], kind="stable")]
    return numbers[rows], rows


def stored_dtype(dset: h5py.Dataset) -> tuple[np.dtype[np.generic], bool]:
    """Return the dtype, byte order included, and whether the stored bytes are exactly that dtype.

    An enum is its integers, h5py's boolean enum is bool. Types that NumPy only approximates (odd precisions, other
    exponent widths) are not exact: HDF5 has to convert them.
    """
    tid = dset.id.get_type()
    try:
        dtype = np.dtype(tid.dtype)
    except (TypeError, ValueError) as e:
        raise Unreadable(f"its type has no NumPy equivalent ({e})") from e
    if tid.get_class() in (h5py.h5t.STRING, h5py.h5t.VLEN) or dtype.kind in "OSU":
        raise Unreadable("text, references and variable-length values are not read")
    if dtype.kind not in "biufc" or dtype.subdtype is not None:
        raise Unreadable(f"values of type {dtype} (compound, array or opaque) are not read")
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise Unreadable(f"values of type {dtype} are no real number of at most 64 bits; write them as float64")
    if tid.get_class() == h5py.h5t.ENUM:
        base = np.dtype(np.int8) if dtype.kind == "b" else np.dtype(dtype.str)  # drops the enum's metadata
        return (dtype if dtype.kind == "b" else base), tid.get_super() == h5py.h5t.py_create(base)
    return dtype, tid == h5py.h5t.py_create(dtype, logical=True)


def _codec(filter_id: int, values: Sequence[int]) -> Codec:
    name = _KNOWN_FILTERS.get(filter_id)
    if name == "zlib":
        return Codec(name=name, config={"level": int(values[0])} if values else {})
    if name == "shuffle":
        return Codec(name=name, config={"elementsize": int(values[0]) if values else 1})
    if name is not None:
        return Codec(name=name)
    if filter_id == _LZF:
        return Codec(name="lzf")
    return Codec(name=f"hdf5:{filter_id}", config={"values": tuple(map(int, values))})


def _filters(plist: h5py.h5p.PropDCID) -> tuple[tuple[Codec, ...], bool]:
    pairs = [(f[0], f[2]) for f in (plist.get_filter(i) for i in range(plist.get_nfilters()))]
    codecs = tuple(_codec(*pair) for pair in pairs)
    decodable = all(filter_id in _KNOWN_FILTERS for filter_id, _ in pairs)
    return codecs, decodable and all(codec.config.get("elementsize", 1) > 0 for codec in codecs)


def describe(
    dset: h5py.Dataset,
    plist: h5py.h5p.PropDCID,
    *,
    store: str,
    path: str,
    name: str,
    dims: tuple[str, ...],
    attributes: dict[str, Any],
    foreign: bool = False,
) -> tuple[ArrayLayout, Storage]:
    """Describe one dataset.

    - ``plist``: the properties that it was created with.
    - ``foreign``: it keeps its bytes outside the file (the caller has allowed that): only HDF5 itself can read it.

    Raises Unreadable: it is of a type that scidata does not read, or holds nothing.
    """
    shape = dset.shape
    if shape is None:
        raise Unreadable("it is empty (a null dataspace)")
    dtype, exact = stored_dtype(dset)
    kind = plist.get_layout()
    chunked = kind == h5py.h5d.CHUNKED
    chunks = tuple(map(int, plist.get_chunk())) if chunked else shape
    if kind == h5py.h5d.VIRTUAL and shape:
        chunks = (rows_of_parts(dset), *shape[1:])
    codecs, decodable = _filters(plist) if chunked else ((), True)
    located = chunked or kind == h5py.h5d.CONTIGUOUS  # compact data lie in the object's header
    layout = ArrayLayout(
        store=store,
        name=name,
        shape=shape,
        dims=dims,
        dtype=dtype,
        chunks=chunks,
        axis_order=tuple(range(len(shape))),
        codecs=codecs,
        fill_value=_fill_value(dset, plist, dtype, exact=exact),
        attributes=attributes,
        fallback=foreign or not (exact and decodable and located),
    )
    offset = None
    if kind == h5py.h5d.CONTIGUOUS and not foreign and dset.id.get_storage_size():
        offset = dset.id.get_offset()
    return layout, Storage(path=path, shape=shape, chunked=chunked, offset=offset)


def _fill_value(dset: h5py.Dataset, plist: h5py.h5p.PropDCID, dtype: np.dtype[np.generic], *, exact: bool) -> Array:
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return np.zeros((), dtype)  # as HDF5 itself gives
    try:
        if exact and dtype.kind != "b":
            plist.get_fill_value(value := np.zeros((), dtype))
            return value
        return np.asarray(dset.fillvalue).astype(dtype).reshape(())
    except (TypeError, ValueError, RuntimeError) as e:
        raise CorruptDataError(f"{dset.file.filename}: field {dset.name!r}: its fill value cannot be read: {e}") from e


@lru_cache(maxsize=1)
def _offsets_include_user_block() -> bool:
    """Return True if this HDF5 counts chunk offsets from the start of the file. Releases differ."""
    block = 1 << 16
    with h5py.File("probe", "w", driver="core", backing_store=False, userblock_size=block) as probe:
        dset = probe.create_dataset("x", data=np.zeros(8, np.int8), chunks=(8,))
        probe.flush()
        return int(dset.id.get_chunk_info(0).byte_offset) >= block


def chunk_index(h5: h5py.File, path: str, layout: ArrayLayout) -> ChunkIndex:
    """Read the address of every stored chunk of a dataset in one pass (2.9 µs a chunk, measured with h5py 3.16)."""
    rows: list[tuple[int, ...]] = []

    def keep(info: h5py.h5d.StoreInfo) -> None:
        rows.append((*info.chunk_offset, info.byte_offset, info.size, info.filter_mask))

    iterate_chunks(h5py.h5d.open(h5.id, path.encode()), keep)  # a tenth of the time of h5[path]
    ndim = len(layout.shape)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), ndim + 3)
    index = ChunkIndex.of(table[:, :ndim], table[:, ndim:].T.copy(), layout)
    block = int(h5.id.get_create_plist().get_userblock())
    if block and not _offsets_include_user_block():
        index.places[0] += block
    return index


def leaf_nbytes(layout: ArrayLayout) -> int:
    """Return the bytes of a B-tree node that has an entry for each of an array's chunks, if they are few."""
    return _LEAF_HEAD + min(math.prod(layout.num_chunks), _FEW_IN_LEAF) * (24 + 8 * len(layout.shape))


def leaf_of_chunks(at: At, address: int, layout: ArrayLayout) -> ChunkIndex | None:
    """Read the only node of a B-tree of chunks, version 1; None if the index is another, or has more nodes."""
    entry = _entry_of(len(layout.shape))
    head = at(address, _LEAF_HEAD) or b""
    if head[:6] != b"TREE\x01\x00" or head[8:] != b"\xff" * 16:
        return None
    entries = at(address + _LEAF_HEAD, int.from_bytes(head[6:8], "little") * entry.itemsize)
    if entries is None:
        return None
    found = np.frombuffer(entries, entry)
    places = np.empty((3, len(found)), np.int64)
    places[0], places[1], places[2] = found["offset"], found["nbytes"], found["mask"]
    return ChunkIndex.of(found["start"], places, layout)


@cache
def _entry_of(ndim: int) -> np.dtype[np.void]:
    """Return the layout of an entry of such a node; the last number of where a chunk begins is 0."""
    names = ["nbytes", "mask", "start", "offset"]
    formats = ["<u4", "<u4", ("<i8", (ndim,)), "<i8"]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": [0, 4, 8, 16 + 8 * ndim], "itemsize": 24 + 8 * ndim}
    )


def check_filters(dset: h5py.Dataset, label: str) -> None:
    """Raise MissingDependencyError if HDF5 has no decoder for a filter, after trying hdf5plugin's."""
    plist = dset.id.get_create_plist()
    needed = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    missing = [i for i in needed if not h5py.h5z.filter_avail(i)]
    if not missing:
        return
    try:
        import hdf5plugin  # noqa: F401 - importing it registers its filters
    except ImportError as e:
        raise MissingDependencyError(
            f"{label}: HDF5 filter {missing} is not installed; {install_hint('filters')}"
        ) from e
    missing = [i for i in missing if not h5py.h5z.filter_avail(i)]
    if missing:
        raise MissingDependencyError(
            f"{label}: HDF5 filter {missing} is neither in HDF5 nor in hdf5plugin; "
            "write the data again with gzip or zstd"
        )

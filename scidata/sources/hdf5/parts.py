"""Parts of HDF5 data sets that lie elsewhere: check that all parts of a read are there, and agree with the data set.

HDF5 itself reads the fill value for the part of a virtual data set whose file or data set is missing, or cannot be
opened, and zeros behind the end of an external raw file; a part of another shape it reads in another order.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import h5py
import numpy as np

from scidata.errors import CorruptDataError, ShortReadError

Ranges: TypeAlias = Sequence[range]

_UNLIMITED = 1 << 62  # a count or block without end
_MAX_DEPTH = 16  # of virtual data sets in virtual data sets


def lies_within(dset: h5py.Dataset, depth: int = 0) -> bool:
    """Return True if all parts of a virtual data set are data sets of its own file, which keep their values there."""
    plist, file = dset.id.get_create_plist(), dset.file
    for i in range(plist.get_virtual_count()):
        if not _is_own(plist.get_virtual_filename(i), file) or b"%" in plist.get_virtual_dsetname(i).encode():
            return False
        part = _local(file, plist.get_virtual_dsetname(i))
        if part is None or part.external or depth > _MAX_DEPTH:
            return False
        if part.is_virtual and not lies_within(part, depth + 1):
            return False
    return True


def rows_of_parts(dset: h5py.Dataset) -> int:
    """Return into how many rows of its first dim each a virtual data set falls, so that no part is cut."""
    num_rows, step = dset.shape[0], 0
    for mapping in _mappings(dset):
        if mapping.slab is None:
            return int(num_rows)
        start, stride, count, size = mapping.slab[0]
        step = math.gcd(step, start, stride if count > 1 else 0, size if size < _UNLIMITED else 0)
    return min(step, num_rows) or int(num_rows)


def _is_own(name: str, file: h5py.File) -> bool:
    return name == "." or os.path.join(os.path.dirname(file.filename), name) == file.filename


def _local(file: h5py.File, path: str) -> h5py.Dataset | None:
    node, names = file, [name for name in path.split("/") if name not in ("", ".")]
    for name in names:
        if not isinstance(node, h5py.Group) or not isinstance(node.get(name, getlink=True), h5py.HardLink):
            return None
        node = node[name]
    return node if isinstance(node, h5py.Dataset) else None


def missing_part(dset: h5py.Dataset, ranges: Ranges, kept: dict[str, list[VirtualMapping]]) -> str | None:
    """Say which part of a data set, the first that is needed for some rows of its dims, is not there.

    - ``kept``: mappings of virtual data sets, by their names: finding them takes 40 µs a part.

    Raises CorruptDataError, ShortReadError: a part is there, and contradicts the data set.
    """
    if dset.is_virtual and dset.name not in kept:
        kept[dset.name] = _mappings(dset)
    return next(_missing(dset, ranges, 0, kept.get(dset.name)), None)


def _missing(
    dset: h5py.Dataset, ranges: Ranges | None, depth: int, mappings: list[VirtualMapping] | None = None
) -> Iterator[str]:
    if ranges is None:
        ranges = [range(n) for n in dset.shape]
    ranges = [r[: len(range(r.start, n, r.step))] for r, n in zip(ranges, dset.shape, strict=True)]
    if not all(ranges):
        return
    if depth > _MAX_DEPTH:
        raise CorruptDataError(f"{_named(dset)}: virtual data sets lie in each other more than {_MAX_DEPTH} deep")
    if dset.is_virtual:
        yield from _missing_of_virtual(dset, ranges, depth, mappings or _mappings(dset))
    elif dset.external:
        yield from _missing_of_external(dset, ranges)
    elif dset.chunks is not None:
        yield from _missing_chunks(dset, ranges)
    elif not dset.id.get_storage_size():
        yield f"{_named(dset)} was never written"


def _named(dset: h5py.Dataset) -> str:
    return f"data set {dset.name!r} of {dset.file.filename}"


def _missing_chunks(dset: h5py.Dataset, ranges: Ranges) -> Iterator[str]:
    """Say that a data set lacks a chunk of a box."""
    grid = [-(-n // c) for n, c in zip(dset.shape, dset.chunks, strict=True)]
    if dset.id.get_num_chunks() >= math.prod(grid):
        return
    found: list[tuple[int, ...]] = []
    iterate_chunks(dset.id, lambda info: found.append(info.chunk_offset))
    chunks = np.array(found, np.int64).reshape(-1, len(grid)) // np.array(dset.chunks, np.int64)
    bounds = [(r[0] // c, r[-1] // c) for r, c in zip(ranges, dset.chunks, strict=True)]
    low, high = np.array(bounds, np.int64).T
    if ((chunks >= low) & (chunks <= high)).all(axis=1).sum() < math.prod((high - low + 1).tolist()):
        yield f"a chunk of {_named(dset)} was never written"


def iterate_chunks(dset: h5py.h5d.DatasetID, keep: Callable[[h5py.h5d.StoreInfo], None]) -> None:
    """Call ``keep`` with the address of each stored chunk, as h5py gives it."""
    most = dset.get_space().get_simple_extent_dims(True)
    unlimited = [k for k, n in enumerate(most) if n == h5py.h5s.UNLIMITED]
    told, found = keep, list[h5py.h5d.StoreInfo]()
    if len(unlimited) == 1 and unlimited[0] > 0:
        keep = found.append
    if hasattr(dset, "chunk_iter"):  # HDF5 1.12.3 and later
        dset.chunk_iter(keep)
    else:
        for i in range(dset.get_num_chunks()):
            keep(dset.get_chunk_info(i))
    for info in _in_place(dset, found, most, unlimited[0]) if found else ():
        told(info)


def _in_place(
    dset: h5py.h5d.DatasetID, found: Sequence[h5py.h5d.StoreInfo], most: tuple[int, ...], unlimited: int
) -> Sequence[h5py.h5d.StoreInfo]:
    """Return addresses with the chunks that they are of.

    The newest format counts chunks with the unlimited dimension as the slowest. HDF5 (2.0) finds chunks so, and lists
    them as if it were in its place: those of all rows of the dimensions before as if they were of the first.
    """
    if any(any(info.chunk_offset[:unlimited]) for info in found):
        return found
    chunks = dset.get_create_plist().get_chunk()
    grid = [1 if k == unlimited else -(-n // c) for k, (n, c) in enumerate(zip(most, chunks, strict=True))]
    coords = np.array([info.chunk_offset for info in found], np.int64) // np.array(chunks, np.int64)
    numbers = coords[:, unlimited:] @ np.array(
        [math.prod(grid[k + 1 :]) for k in range(unlimited, len(grid))], np.int64
    )
    firsts, rest = np.divmod(numbers, math.prod(grid))
    places = np.stack(np.unravel_index(rest, grid), axis=1)
    places[:, unlimited] = firsts
    moved = [info._replace(chunk_offset=tuple(x)) for info, x in zip(found, (places * chunks).tolist(), strict=True)]
    listed = {info.chunk_offset for info in found}
    other = next((info.chunk_offset for info in moved if info.chunk_offset not in listed), None)
    if other is None:
        return found
    try:
        dset.read_direct_chunk(other)
    except (OSError, RuntimeError, ValueError):  # there is no such chunk: the list is right
        return found
    return moved


def _missing_of_external(dset: h5py.Dataset, ranges: Ranges) -> Iterator[str]:
    itemsize, begin = dset.dtype.itemsize, 0
    first, last = (int(np.ravel_multi_index([r[i] for r in ranges], dset.shape)) for i in (0, -1))
    needed = range(first * itemsize, (last + 1) * itemsize)
    prefix = os.fsdecode(dset.id.get_access_plist().get_efile_prefix())
    for name, offset, size in dset.external:
        low, high = max(begin, needed.start), min(begin + size, needed.stop)
        if low < high:
            path = os.path.join(prefix, os.fsdecode(name))
            if not os.path.isfile(path):
                yield f"the external file {path!r} of {_named(dset)} is not there"
            elif (found := os.path.getsize(path)) < (end := offset + high - begin):
                raise ShortReadError(
                    f"{_named(dset)}: its external file {path!r} has {found} bytes, and {end} are needed; it is "
                    "truncated: copy or write it again"
                )
        begin += size


class VirtualMapping:
    """One entry of a virtual data set: which of its elements are which of another's."""

    def __init__(self, plist: h5py.h5p.PropDCID, index: int) -> None:
        self.file, self.name = plist.get_virtual_filename(index), plist.get_virtual_dsetname(index)
        self.space, self.source = plist.get_virtual_vspace(index), plist.get_virtual_srcspace(index)
        self.slab = _slab(self.space)
        self.block_dim = None  # along which parts of a name with %b follow each other
        if self.slab is not None and re.search("%(%%)*b", self.file.replace("%%", "") + self.name.replace("%%", "")):
            self.block_dim = next((d for d, (_, _, count, _) in enumerate(self.slab) if count >= _UNLIMITED), None)

    @property
    def is_unlimited(self) -> bool:
        """Whether it grows with its part."""
        return self.slab is not None and any(max(count, block) >= _UNLIMITED for _, _, count, block in self.slab)

    def names(self, block: int) -> tuple[str, str]:
        """Return file and data set of a block."""
        return _filled(self.file, block), _filled(self.name, block)

    def blocks(self, ranges: Ranges) -> range:
        """Return which blocks of a name with %b may have elements of a box; the only one of other names is 0."""
        if self.slab is None or self.block_dim is None:
            return range(1)
        start, stride, _, _ = self.slab[self.block_dim]
        rows = ranges[self.block_dim]
        return range(max(0, (rows[0] - start) // stride), (rows[-1] - start) // stride + 1)

    def count(self, ranges: Ranges, block: int) -> int:
        """Return how many elements of a box it maps."""
        if self.slab is None:
            if self.space.get_select_type() == h5py.h5s.SEL_ALL:
                return math.prod(map(len, ranges))
            both = self.space.copy()
            box = tuple(tuple(each) for each in zip(*((r.start, len(r), r.step) for r in ranges), strict=True))
            both.select_hyperslab(box[0], box[1], box[2], op=h5py.h5s.SELECT_AND)
            return int(both.get_select_npoints())
        slab = list(self.slab)
        if self.block_dim is not None:
            start, stride, _, size = slab[self.block_dim]
            slab[self.block_dim] = (start + block * stride, stride, 1, size)
        num = 1
        for rows, (start, stride, count, size) in zip(ranges, slab, strict=True):
            if num and (rows[-1] < start or (count < _UNLIMITED and rows[0] >= start + (count - 1) * stride + size)):
                return 0
            at = np.arange(rows.start, rows.stop, rows.step) - start
            num *= int(((at >= 0) & (at // stride < count) & (at % stride < size)).sum())
        return num

    def shape(self) -> list[int] | None:
        """Return the shape of its elements, None if they are no block of one size."""
        if self.slab is None or (self.is_unlimited and self.block_dim is None):
            return None
        sizes = [size if d == self.block_dim else count * size for d, (_, _, count, size) in enumerate(self.slab)]
        return [n for n in sizes if n != 1]


def _slab(space: h5py.h5s.SpaceID) -> list[tuple[int, int, int, int]] | None:
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return None
    each = zip(*([min(int(v), _UNLIMITED) for v in values] for values in space.get_regular_hyperslab()), strict=True)
    return [
        (start, max(stride, block), count, block) for start, stride, count, block in each
    ]  # of one block: any stride


def _filled(name: str, block: int) -> str:
    return re.sub("%[%b]", lambda m: "%" if m[0] == "%%" else str(block), name)


def _mappings(dset: h5py.Dataset) -> list[VirtualMapping]:
    plist = dset.id.get_create_plist()
    return [VirtualMapping(plist, i) for i in range(plist.get_virtual_count())]


def _missing_of_virtual(
    dset: h5py.Dataset, ranges: Ranges, depth: int, mappings: list[VirtualMapping]
) -> Iterator[str]:
    left = math.prod(map(len, ranges))
    for mapping in mappings:
        for block in mapping.blocks(ranges):
            if count := mapping.count(ranges, block):
                left -= count
                yield from _missing_of_part(dset, mapping, mapping.names(block), depth)
    if left > 0:
        yield f"{left} elements of {_named(dset)} are of no part"


def _missing_of_part(dset: h5py.Dataset, mapping: VirtualMapping, names: tuple[str, str], depth: int) -> Iterator[str]:
    file = _open(dset, names[0])
    if file is None:
        yield _no_file(dset, names)
        return
    try:
        part = file.get(names[1])
        if not isinstance(part, h5py.Dataset):
            yield f"data set {names[1]!r} of file {names[0]!r}, a part of {_named(dset)}, is not there"
            return
        fault = _fault(dset, mapping, part)
        if fault is not None:
            raise CorruptDataError(
                f"{_named(dset)} maps {_named(part)} of shape {part.shape} and dtype {part.dtype}, but {fault}; the "
                "part was written anew, or the map is wrong: make the one or the other again"
            )
        yield from _missing(part, _selected(mapping.source, part), depth + 1)
    finally:
        if file.id != dset.file.id:
            file.close()


def _fault(dset: h5py.Dataset, mapping: VirtualMapping, part: h5py.Dataset) -> str | None:
    if not np.can_cast(part.dtype, dset.dtype, "safe"):
        return f"its values do not fit {dset.dtype}"
    source = mapping.source
    if source.get_select_type() == h5py.h5s.SEL_ALL:
        shape = mapping.shape()
        found, wanted = [n for n in part.shape if n != 1], mapping.space.get_select_npoints
        if (found != shape) if shape is not None else (not mapping.is_unlimited and part.size != wanted()):
            return f"elements of shape {shape or wanted()} were expected"
        return None
    if len(part.shape) != len(source.shape):
        return f"{len(source.shape)} dims were expected"
    slab = _slab(source)
    if slab is None:
        ends = [n + 1 for n in source.get_select_bounds()[1]]
    else:
        ends = [0 if max(c, b) >= _UNLIMITED else start + (c - 1) * stride + b for start, stride, c, b in slab]
    return f"{ends} were expected at least" if any(e > n for e, n in zip(ends, part.shape, strict=True)) else None


def _selected(source: h5py.h5s.SpaceID, part: h5py.Dataset) -> Ranges | None:
    """Return the box around the mapped elements of a part."""
    slab = _slab(source)
    if source.get_select_type() == h5py.h5s.SEL_ALL:
        return None
    if slab is None:
        return [range(low, high + 1) for low, high in zip(*source.get_select_bounds(), strict=True)]
    return [
        range(start, n if max(c, b) >= _UNLIMITED else start + (c - 1) * stride + b)
        for (start, stride, c, b), n in zip(slab, part.shape, strict=True)
    ]


def _places(dset: h5py.Dataset, name: str) -> list[str]:
    """Return where HDF5 looks for the file of a part, in its order."""
    main = dset.file.filename
    last = os.path.basename(name) if os.path.isabs(name) else name
    prefix = os.fsdecode(dset.id.get_access_plist().get_virtual_prefix())
    folders = [*([prefix] if prefix else []), os.path.dirname(main), "", os.path.dirname(os.path.realpath(main))]
    return [*([name] if os.path.isabs(name) else []), *(os.path.join(folder, last) for folder in folders)]


def _open(dset: h5py.Dataset, name: str) -> h5py.File | None:
    """Open the file of a part as HDF5 finds it; None if there is none that it can open."""
    if name == ".":
        return dset.file
    for path in _places(dset, name):
        if os.path.isfile(path):
            try:
                return h5py.File(path, "r", locking="best-effort")
            except OSError:
                continue
    return None


def check_extent(dset: h5py.Dataset) -> str | None:
    """Say which part of a virtual data set is not there, where its size follows its parts: it is too short then."""
    for mapping in _mappings(dset):
        if not mapping.is_unlimited:
            continue
        if mapping.block_dim is None:
            found = next(_missing_of_part(dset, mapping, mapping.names(0), 0), None)
        else:
            start, stride, _, _ = (mapping.slab or [])[mapping.block_dim]
            found = _later(dset, mapping, max(0, -(-(dset.shape[mapping.block_dim] - start) // stride)))
        if found is not None:
            return found
    return None


def _later(dset: h5py.Dataset, mapping: VirtualMapping, num_blocks: int) -> str | None:
    """Say which block HDF5 has not found, where there are others after it."""
    file, name = mapping.names(num_blocks)
    if "%b" in mapping.file.replace("%%", ""):
        folders = dict.fromkeys(os.path.dirname(path) or "." for path in _places(dset, file))
        listed = {each for folder in folders if os.path.isdir(folder) for each in os.listdir(folder)}
        pattern, missing = os.path.basename(mapping.file), f"file {file!r}"
    else:
        opened = _open(dset, file)
        if opened is None:
            return _no_file(dset, (file, name))
        group, _, pattern = mapping.name.rpartition("/")
        listed, missing = set(opened.get(group or "/", ())), f"data set {name!r} of file {file!r}"
        if opened.id != dset.file.id:
            opened.close()
    words = (r"%" if w == "%%" else r"(\d+)" if w == "%b" else re.escape(w) for w in re.split("(%[%b])", pattern))
    found = [m for m in map(re.compile("".join(words)).fullmatch, listed) if m and m.groups()]
    if not any(int(m[1]) >= num_blocks for m in found):
        return None
    return f"{missing}, a part of {_named(dset)} that others follow, is not there"


def _no_file(dset: h5py.Dataset, names: tuple[str, str]) -> str:
    return f"file {names[0]!r}, whose {names[1]!r} is a part of {_named(dset)}, is not there, or HDF5 cannot open it"

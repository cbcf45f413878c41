"""Files whose metadata repeat another file's, byte for byte but for addresses: described without a library.

A library reads blocks of bytes, and finds each by an address in an earlier one. If the same way through another file
leads to the same bytes, and all addresses of one block agree, then the library would describe it alike. Texts of
attributes may differ if they are as long. A file that differs in anything else is of another kind, and the library
describes it.
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numcodecs.jenkins import jenkins_lookup3

from scidata.core.types import AnyArray, ArrayLayout, IntArray
from scidata.sources.access.files import files
from scidata.sources.index import FileFacts, FileRow, Part, Values, text_of_attributes, text_of_layout
from scidata.sources.unfinished import UNFINISHED, UNFINISHED_NAME

MOST_VALUES = 1 << 16  # bytes of a coordinate that are kept; of a larger one, a digest
_MOST_METADATA = 1 << 20  # bytes of an example
_MOST_HEAD = 1 << 16  # bytes that are read at once
_FIRST_TO_MOVE = 256  # smaller addresses lie at the begin of all files, and look like text
_MOST_READ = 1 << 26  # bytes of a coordinate
_SHORTEST = 8  # text that may differ
_FIXED = frozenset({UNFINISHED, "CLASS", "NAME"})  # attributes that say how others are read
_MOST_EXAMPLES = 8

#: Returns bytes from a place in a file on; None if it ends before.
At: TypeAlias = Callable[[int, int], bytes | None]


class Block(NamedTuple):
    """Bytes that a library has read at once.

    - ``address``: where they begin.
    - ``unused``: an address in them that was not followed.
    - ``checksum``: where their checksum is; None of those that have none.
    """

    address: int
    data: bytes
    unused: slice = slice(0, 0)
    checksum: int | None = None


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The bytes of a file that describe it: blocks as found, and by array the addresses of values or chunk indexes."""

    blocks: Sequence[Block]
    size: int
    addresses: Mapping[str, int]

    def may_be_read(self, path: str) -> bool:
        """Return True if no program writes another file just now, as far as the format shows that."""
        return True

    @abstractmethod
    def numbers(self, name: str, address: int, at: At) -> Sequence[int] | None:
        """Return the numbers that an index keeps of an array in a twin; None if they cannot be told."""

    @abstractmethod
    def pieces(self, layout: ArrayLayout, numbers: Sequence[int]) -> Sequence[tuple[int, int]] | None:
        """Return place and bytes of each chunk of a coordinate; None if they are not stored one after the other."""


class Example:
    """A described file, whose twins are found; ValueError where addresses lead nowhere or metadata are too large."""

    def __init__(self, metadata: Metadata, facts: FileFacts, names: Sequence[str]) -> None:
        self._metadata, self._facts = metadata, facts
        self._parts = facts.parts({})
        self._coordinates = {x.name: x for x, _, _ in facts.arrays if x.name in names and x.dims == (x.name,)}
        self._values: dict[str, tuple[bytes, Values]] = {}
        self._blocks = metadata.blocks
        self._joined = np.frombuffer(b"".join([block.data for block in self._blocks]), np.uint8)
        if len(self._joined) > _MOST_METADATA or metadata.size < _FIRST_TO_MOVE:
            raise ValueError("too much metadata, or no file")
        self._head_nbytes = min(_MOST_HEAD, max(block.address + len(block.data) for block in self._blocks))
        self._find_addresses()
        self._find_what_may_differ()

    def _find_addresses(self) -> None:
        sizes = [len(block.data) for block in self._blocks]
        self._starts = np.cumsum([0, *sizes]).tolist()
        block_of = np.repeat(np.arange(len(sizes)), sizes)
        addresses = {self._metadata.size, *self._metadata.addresses.values()} | {
            block.address for block in self._blocks
        }
        self._targets = sorted(address for address in addresses if address >= _FIRST_TO_MOVE)
        number_of = {address: k for k, address in enumerate(self._targets)}
        words = np.lib.stride_tricks.sliding_window_view(self._joined, 8).copy().view("<u8").reshape(-1)
        found = np.flatnonzero(np.isin(words, np.array(self._targets, np.uint64)) & (block_of[:-7] == block_of[7:]))
        found = found[(words[found] != self._metadata.size) | (found < sizes[0])]
        self._holes: IntArray = found[:, None] + np.arange(8)
        self._target_of: IntArray = np.array([number_of[int(word)] for word in words[found]], np.int64)
        first = {int(words[at]): int(at) for at in found[::-1]}
        self._ways: list[int | tuple[int, int]] = []  # to each block: a fixed address, or which block says where
        for start, (address, *_) in zip(self._starts, self._blocks, strict=False):
            at = first.get(address, start)
            if at < start:
                block = int(block_of[at])
                self._ways.append((block, at - self._starts[block]))
            elif address < _FIRST_TO_MOVE:
                self._ways.append(address)
            else:
                raise ValueError(f"no address leads to byte {address}")
        # numbers that could be taken for an address
        lengths = {n for layout, _, _ in self._facts.arrays for n in (*layout.shape, *layout.chunks)}
        self._stay = [k for k, address in enumerate(self._targets) if address in lengths]

    def _find_what_may_differ(self) -> None:
        """Find checksums, and the texts of attributes that are there once."""
        may_differ = np.zeros(len(self._joined), np.bool_)
        whole, self._texts = self._joined.tobytes(), dict[tuple[int, str], slice]()
        may_differ[self._holes] = True
        for k, attributes in enumerate([self._facts.attributes, *(x.attributes for x, _, _ in self._facts.arrays)], 1):
            for name, value in attributes.items():
                text = value.encode() if isinstance(value, str) and value.isascii() and name not in _FIXED else b""
                at = whole.find(text)
                place = slice(at, at + len(text))
                if len(text) >= _SHORTEST and at == whole.rfind(text) >= 0 and not may_differ[place].any():
                    self._texts[k, name] = place
                    may_differ[place] = True
        for start, (_, data, unused, checksum) in zip(self._starts, self._blocks, strict=False):
            mine = may_differ[start : start + len(data)]
            mine[unused] = True
            if checksum is not None:
                mine[checksum : checksum + 4] = True
        self._same = np.flatnonzero(~may_differ)
        self._expected = self._joined[self._same]

    def row_of(self, path: str) -> FileRow | None:
        """Describe a local file; None if it is no twin, or may not be read."""
        try:
            size = files().open_size(path)
            version = files().version(path)
            if not self._metadata.may_be_read(path):
                return None
            at = reader(path, self._head_nbytes, size)
            found = None if at is None else self._match(at, size)
            parts = None if at is None or found is None else self._parts_of(found, at, size)
            return FileRow("", version, parts) if parts is not None and files().version(path) == version else None
        except OSError:  # opening it says why
            return None

    def _match(self, at: At, size: int) -> tuple[npt.NDArray[np.uint8], dict[int, int]] | None:
        blocks: list[bytes] = []
        for mine, way in zip(self._blocks, self._ways, strict=True):
            address = way if isinstance(way, int) else int.from_bytes(blocks[way[0]][way[1] : way[1] + 8], "little")
            data = at(address, len(mine.data))
            if data is None:
                return None
            blocks.append(data)
        joined = np.frombuffer(b"".join(blocks), np.uint8)
        if not np.array_equal(joined[self._same], self._expected):
            return None
        words = joined[self._holes].view("<u8").reshape(-1)
        moved = dict(zip(self._target_of.tolist(), words.tolist(), strict=True))
        found = {address: moved.get(k, address) for k, address in enumerate(self._targets)}
        agree = words == np.array(list(found.values()), np.uint64)[self._target_of]
        stays = all(found[self._targets[k]] == self._targets[k] for k in self._stay)
        if not agree.all() or not stays or found[self._metadata.size] != size or max(found.values()) > size:
            return None
        for mine, data in zip(self._blocks, blocks, strict=True):
            if mine.checksum is not None and mine.data != data and not has_checksum(data, mine.checksum):
                return None
        return joined, found

    def _parts_of(
        self, found: tuple[npt.NDArray[np.uint8], dict[int, int]], at: At, size: int
    ) -> Sequence[Part] | None:
        joined, addresses = found
        texts = self._texts_of(joined)
        if texts is None:
            return None
        head = self._parts[0]
        parts = [Part(head.text, [*head.numbers[:-1], size]), Part(texts[1])]
        for layout, _, kept in self._facts.arrays:
            numbers: Sequence[int] | None = kept
            values, address = None, self._metadata.addresses.get(layout.name)
            if address is not None:
                numbers = self._metadata.numbers(layout.name, addresses.get(address, address), at)
            if numbers is not None and layout.name in self._coordinates:
                values = self._values_of(layout, numbers, at)
            if numbers is None or (values is None and layout.name in self._coordinates):
                return None
            parts.append(Part(texts[len(parts)], numbers, values))
        return parts

    def _texts_of(self, joined: npt.NDArray[np.uint8]) -> list[str] | None:
        texts, changed = [part.text for part in self._parts], dict[int, dict[str, str]]()
        for (k, name), place in self._texts.items():
            data = joined[place].tobytes()
            if data != self._joined[place].tobytes():
                if b"\0" in data or data.endswith(b" ") or not data.isascii():  # HDF5 cuts off padding
                    return None
                changed.setdefault(k, {})[name] = data.decode()
        for k, found in changed.items():
            if k == 1:
                texts[k] = text_of_attributes({**self._facts.attributes, **found})
            else:
                layout, more, _ = self._facts.arrays[k - 2]
                texts[k] = text_of_layout(replace(layout, attributes={**layout.attributes, **found}), more)
        return texts

    def _values_of(self, layout: ArrayLayout, numbers: Sequence[int], at: At) -> Values | None:
        pieces = self._metadata.pieces(layout, numbers)
        num_bytes = sum(nbytes for _, nbytes in pieces or ())
        if pieces is None or num_bytes > _MOST_READ:
            return None
        data = b"".join([found for piece in pieces if (found := at(*piece)) is not None])
        if len(data) != num_bytes:
            return None
        known = self._values.get(layout.name)
        if known is None or known[0] != data:
            plain = not layout.codecs and all(nbytes == layout.chunk_nbytes for _, nbytes in pieces) and bool(pieces)
            native = layout.dtype.newbyteorder("=")
            stored: AnyArray = np.frombuffer(data, layout.dtype)[: layout.shape[0]] if plain else np.empty(0, native)
            known = data, values_kept(layout, stored.astype(native)) if plain else _digest(data)
            self._values.setdefault(layout.name, known)
        return known[1]


class Examples:
    """Some files that were described; others may be their twins."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._kept: list[tuple[tuple[str, bool], Example]] = []  # the one that was of use last comes first
        self._num_made = self._num_twins = 0

    @property
    def takes_more(self) -> bool:
        """Whether twins have been found often enough to make another example."""
        return self._num_made < 4 + self._num_twins // 8

    def row_of(self, path: str) -> FileRow | None:
        """Describe a local file that is the twin of an example; None for all others."""
        for k, (suffix, example) in enumerate(self._kept):
            row = example.row_of(path) if suffix == _suffix(path) else None
            if row is not None:
                self._kept.insert(0, self._kept.pop(k))
                self._num_twins += 1
                return row
        return None

    def take(self, path: str, metadata: Metadata | None, facts: FileFacts) -> FileRow | None:
        """Take a file as an example, if it can be one; return its row."""
        self._num_made += 1
        try:
            example = None if metadata is None else Example(metadata, facts, self._names)
        except ValueError:
            return None
        row = None if example is None else example.row_of(path)
        if example is not None and row is not None:
            self._kept = [(_suffix(path), example), *self._kept][:_MOST_EXAMPLES]
        return row


def _suffix(path: str) -> tuple[str, bool]:
    """Return what a path says of its file: names decide between HDF5 and NetCDF-4, and tell what is unfinished."""
    return os.path.splitext(path)[1].lower(), UNFINISHED_NAME.search(path) is not None


def values_kept(layout: ArrayLayout, values: AnyArray) -> Values:
    """Return the values of a coordinate, in native byte order, as an index keeps them: of many, a digest."""
    data, is_kept = values.tobytes(), layout.nbytes <= MOST_VALUES and layout.dtype.kind in "iuf"
    return (values.dtype.str, data) if is_kept else _digest(data)


def _digest(data: bytes) -> Values:
    return "V32", hashlib.sha256(data).digest()


def reader(path: str, head_nbytes: int, size: int, begin: int = 0) -> At | None:
    """Return the function that reads from a file; it reads a head, from ``begin`` on, at once, or returns None."""
    head = bytearray(max(0, min(head_nbytes, size - begin)))
    if head and not files().read_at_once(path, begin, memoryview(head)):
        return None
    first = bytes(head)

    def at(offset: int, nbytes: int) -> bytes | None:
        if 0 <= offset - begin <= len(first) - nbytes:
            return first[offset - begin : offset - begin + nbytes]
        data = bytearray(nbytes)
        is_there = 0 <= offset <= size - nbytes and files().read_at_once(path, offset, memoryview(data))
        return bytes(data) if is_there else None

    return at


def has_checksum(data: bytes, at: int) -> bool:
    """Return True if a block of HDF5 has its checksum there: behind what it is of, or counted as zeros."""
    counted = data[:at] if at == len(data) - 4 else data[:at] + bytes(4) + data[at + 4 :]
    return jenkins_lookup3(counted, 0) == int.from_bytes(data[at : at + 4], "little")

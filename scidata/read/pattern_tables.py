"""Tables derived from a plan's pattern, kept as long as the pattern is: plans that share one share them, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from scidata.core.cache import Cache
from scidata.core.types import BoolArray, IntArray
from scidata.plan.chunk_tables import Pattern
from scidata.read.copies import Copies

#: A unit of work: ``"raw"`` or ``"encoded"`` read, or ``"box"`` of an array that only its own library reads; its row.
Task: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class RawTables:
    """Where the raw reads of a pattern land; lists, because single items of arrays are slow to get."""

    path_index: list[int]  # of each read
    direct: list[bool]  # which reads go straight to the destination; the spans of a read agree about it
    single: list[slice | None]  # the bytes of ``out`` that a direct read fills, if they are one run; else None
    # bounds, skip, begin, end: direct spans, joined where they adjoin on disk and in memory: read ``i`` has
    # ``[bounds[i], bounds[i + 1])``, with bytes to skip before each, and its bytes in ``out``
    bounds: list[int]
    skip: list[int]
    begin: list[int]
    end: list[int]
    # groups, room: small reads come together into one buffer: group ``i`` has reads ``[groups[i], groups[i + 1])`` and
    # takes ``room[i]`` bytes. Direct reads are alone
    groups: list[int]
    room: list[int]
    place: list[slice]  # the bytes of each read in its group's buffer
    copies: Copies | None  # by group, of reads that are not direct


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTables:
    """Where the decoded chunks of a pattern go; lists, because single items of arrays are slow to get."""

    direct: list[bool]  # which chunks are decoded straight into the destination
    dest: list[int]  # first byte of each chunk in the destination, where direct
    slot: list[int]  # first byte of each chunk in the scratch of its read: chunks that are decoded in place take none
    room: list[int]  # bytes of scratch of each read
    few: list[bool]  # which chunks are large and little of them is wanted
    box_source: IntArray  # ``(num_boxes,)`` first byte of every box in its decoded chunk
    copies: Copies | None  # out of scratch; None if every chunk is direct
    # by chunk and block size, the Blosc blocks that hold a wanted element: ``(num_blocks,)`` bool. Filled as found
    blocks: dict[tuple[int, int], BoolArray] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class PatternTables:
    """Tables derived from a pattern for one kind of destination; None if they were not needed yet."""

    # strides in bytes of every box, in its chunk and in the destination: ``(num_boxes, ndim)`` each
    box_strides: tuple[IntArray, IntArray] | None = None
    raw: RawTables | None = None  # of the raw reads
    # of the encoded ones; by where the chunks begin in the bytes read, of those that are copied from there
    encoded: Cache[EncodedTables] = field(default_factory=lambda: Cache(4))
    tasks: tuple[list[Task], list[int]] | None = None  # units of work, and the bytes that each moves or decodes


_kept: WeakKeyDictionary[Pattern, Cache[PatternTables]] = WeakKeyDictionary()


def tables_of(pattern: Pattern, out_item: int, in_place: bool) -> PatternTables:
    """Return the tables for destinations of ``out_item`` bytes a value, where raw bytes are read to or not."""
    kinds = _kept.get(pattern)
    if kinds is None:
        kinds = _kept.setdefault(pattern, Cache(4))
    return kinds.get_or_make((out_item, in_place), PatternTables)

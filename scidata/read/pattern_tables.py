"""Tables derived from a plan's pattern, with its lifetime: plans that share a pattern share them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from scidata.core.cache import Cache
from scidata.core.types import BoolArray, IntArray
from scidata.plan.chunk_tables import Pattern
from scidata.read.copies import Copies

#: A unit of work: ``"raw"`` or ``"encoded"`` read, or ``"box"`` for the format's own library; and its row.
Task: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class RawTables:
    """Destinations of a pattern's raw reads; lists, because getting single array items is slow."""

    path_index: list[int]  # by read
    direct: list[bool]  # which reads are direct; all spans of a read agree
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
    place: list[slice]  # offset of each read in its group's buffer
    copies: Copies | None  # by group, for reads that are not direct


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTables:
    """Destinations of a pattern's decoded chunks; lists, because getting single array items is slow."""

    direct: list[bool]  # chunks that are decoded straight into the destination
    dest: list[int]  # first byte of each direct chunk in the destination
    slot: list[int]  # first byte of each chunk in its read's scratch; chunks decoded in place need none
    room: list[int]  # scratch bytes of each read
    few: list[bool]  # large chunks with few wanted elements
    box_source: IntArray  # ``(num_boxes,)`` first byte of each box in its decoded chunk
    copies: Copies | None  # out of scratch; None if every chunk is direct
    # by chunk and block size, the Blosc blocks that hold a wanted element: ``(num_blocks,)`` bool. Filled as found
    blocks: dict[tuple[int, int], BoolArray] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class PatternTables:
    """A pattern's tables for one kind of destination; None until first needed."""

    # strides in bytes of each box, in chunk and destination: ``(num_boxes, ndim)`` each
    box_strides: tuple[IntArray, IntArray] | None = None
    raw: RawTables | None = None  # of the raw reads
    # of encoded reads; by chunk offset in the bytes read, for chunks copied from there
    encoded: Cache[EncodedTables] = field(default_factory=lambda: Cache(4))
    tasks: tuple[list[Task], list[int]] | None = None  # units of work, and the bytes each moves or decodes


_kept: WeakKeyDictionary[Pattern, Cache[PatternTables]] = WeakKeyDictionary()


def tables_of(pattern: Pattern, out_item: int, in_place: bool) -> PatternTables:
    """Return the tables for destinations of ``out_item`` bytes per value, with raw reads direct or not."""
    kinds = _kept.get(pattern)
    if kinds is None:
        kinds = _kept.setdefault(pattern, Cache(4))
    return kinds.get_or_make((out_item, in_place), PatternTables)

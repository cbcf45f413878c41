"""Blocks of decoded rows on local disk: what is behind URLs, or has to be decoded, is read from there the next time.

A block is one rank's part, halo included, of the steps of a field that chunks hold together. Its name on disk is a
digest of all that decides its values: the array, the rows, how they are decoded, and the validators of the source's
files (:mod:`scidata.sources.access.validators`). So a block whose source has changed is simply not found. Validators
are asked for at the first use of a block in each process, and not again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Files, IntArray, Selection
from scidata.core.urls import Url, local_path
from scidata.grids.parts import Field, Part
from scidata.grids.series import Series
from scidata.grids.steps import Places
from scidata.plan.array import chunks_needed
from scidata.plan.as_json import inputs_to_json
from scidata.read.context import ReadStats
from scidata.read.disk_cache import DiskCache
from scidata.sources.access.fetches import run_each
from scidata.sources.access.mounts import is_on_network
from scidata.sources.access.validators import Validator, Validators

_log = logging.getLogger("scidata")

_VALUES = 1  # to be raised when the same bytes decode to other values than before
MAX_WAIT = 3.0  # seconds for files to settle; what has a later time comes from a clock that is wrong
_MAX_KEYS = 1 << 18  # blocks that are known to be as they were; some 0.3 kB each

Rows: TypeAlias = npt.NDArray[Any]


class Blocks(Protocol):
    """What cuts a field into blocks, and reads them from the source."""

    @property
    def steps_per_block(self) -> Mapping[str, int]:
        """Steps of a block of each field."""

    def selection_of(self, name: str, i: int, start: int, part: Part) -> tuple[ArrayLayout, Selection, tuple[int, ...]]:
        """Return what a block, which begins at a row of a file, is of the array, and its shape."""

    def read_block(self, name: str, i: int, start: int, part: Part) -> tuple[Rows, ReadStats]:
        """Read it."""

    def members_at_once(self, name: str, i: int, part: Part) -> tuple[int, ...]:
        """Return the trajectories that the same chunks hold, the ``i``-th among them."""

    def read_blocks(self, name: str, i: int, start: int, part: Part) -> tuple[dict[int, Rows], ReadStats]:
        """Read a block of each of these."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        """Return an array for it."""


class Pool(Protocol):
    """What keeps blocks in memory."""

    @property
    def reader(self) -> Blocks:
        """Reads them."""


@dataclass(frozen=True, slots=True)
class _Key:
    """What a block is found by; nothing where its source's files are not known by anything."""

    digest: bytes
    validator: Validator


_UNKNOWN = _Key(b"", Validator(b""))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows of a block, and where each goes in the field of a sample."""

    name: str
    i: int
    start: int
    rows: list[tuple[int, int]]


class DiskBlocks:
    """A reader's blocks on disk. Thread-safe; pickles without what it knows of the source's files.

    Parameters
    ----------
    pool
        What keeps blocks in memory, and reads them.
    series, fields
        The reader's.
    disk
        Where they are kept; None keeps none.
    allow_missing
        Whether absent chunks are read as the fill value.
    """

    def __init__(
        self,
        pool: Pool,
        series: Series,
        fields: Mapping[str, Field],
        *,
        disk: DiskCache | None,
        allow_missing: bool,
    ) -> None:
        self.disk = disk
        self._pool, self._series, self._fields = pool, series, fields
        self._allow_missing = allow_missing
        self.forget()

    def forget(self) -> None:
        """Forget what the source's files are known by; the next use of each block asks again."""
        self._keys: Cache[_Key] = Cache(_MAX_KEYS, "lru")
        self._always: Cache[bytes] = Cache(1 << 10)
        self._filling: Cache[dict[int, Rows]] = Cache(0, "lru")
        self._validators = self._series.by_file([Validators(source.path) for source in self._series.files])
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("disk", "_pool", "_series", "_fields", "_allow_missing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """The fields that are kept: those which take fetching or decoding."""
        firsts = self._series.firsts
        return frozenset(
            name for name in self._fields if self.disk is not None and any(self._is_worth_it(name, i) for i in firsts)
        )

    def _is_worth_it(self, name: str, i: int) -> bool:
        layout, source = self._series.layout_in(i, name), self._series.sources[i]
        if layout.codecs or layout.fallback or _is_far(layout.store):
            return True
        first = np.zeros((min(1, math.prod(layout.shape)), len(layout.shape)), np.int64)
        files = source.files_of(layout, first)  # others lie where those of the first chunk do
        return files is not None and any(map(_is_far, files.paths))

    def fields_of(self, part: Part, out: Mapping[str, Rows], others: Sequence[str]) -> tuple[str, ...]:
        """Return the fields whose rows come from here into a sample, but for those that come another way."""
        if not self.fields:
            return ()
        return tuple(
            name
            for name, values in out.items()
            if name in self.fields and name not in others and values.size and values.shape == part.shapes[name]
        )

    # -- keys --------------------------------------------------------------------------------------------------------

    def _key(self, name: str, i: int, start: int, part: Part) -> _Key:
        find = functools.partial(self._find_key, name, i, start, part)
        return self._keys.get_or_make((part.position, name, i, start), find, once=True)

    def _find_key(self, name: str, i: int, start: int, part: Part) -> _Key:
        layout, selection, shape = self._pool.reader.selection_of(name, i, start, part)
        found, source = self._files_of(i, layout, selection), self._series.sources[i]
        if found is None:
            self._warn(
                f"{source.path}: its chunks lie in files that only a library knows; cache_dir keeps none of them"
            )
            return _UNKNOWN
        source.check_unchanged(layout, found.paths)
        validator = self._validators[i].of(*found)
        if not validator.digest:
            self._warn(
                f"{source.path}: nothing tells a change of its objects (neither ETags nor times, or a chain of file "
                "systems); cache_dir keeps none of them"
            )
            return _UNKNOWN
        always = self._always.get_or_make((part.position, name, i), lambda: self._digest_of(name, i, layout, selection))
        steps = f"{start} {shape}".encode()
        return _Key(hashlib.sha256(b"\n".join([always, steps, validator.digest])).digest(), validator)

    def _digest_of(self, name: str, i: int, layout: ArrayLayout, selection: Selection) -> bytes:
        """Return a digest of what decides the values of all blocks of a part, but for their steps and their files."""
        field, dim = self._fields[name], self._series.sample_dim
        rows = tuple(() if d == dim else rows for d, rows in zip(layout.dims, selection, strict=True))
        content = inputs_to_json(self._lasting(layout, self._series.sources[i].path), rows, None, ()) | {
            "values": _VALUES,
            "decoding": repr(field.decodings[i]),  # and the dtype
            "allow_missing": self._allow_missing,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    def _files_of(self, i: int, layout: ArrayLayout, selection: Selection) -> Files | None:
        return self._series.sources[i].files_of(layout, chunks_needed(layout, selection))

    def _lasting(self, layout: ArrayLayout, path: str) -> ArrayLayout:
        """Return what of an array does not change when steps are added at its end, and where it lies for good."""
        dim = self._series.sample_dim
        shape = tuple(0 if d == dim else n for d, n in zip(layout.dims, layout.shape, strict=True))
        return replace(layout, store=path.identity if isinstance(path, Url) else os.path.abspath(path), shape=shape)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s", text)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(
        self,
        names: Sequence[str],
        places: Places,
        part: Part,
        out: Mapping[str, Rows],
        *,
        side_by_side: bool,
    ) -> ReadStats:
        """Read a sample's rows, ``places`` in the files, of some fields; return what had to be read for it.

        ``side_by_side``: blocks that are not there on threads of their own, because reading them takes round trips.
        """
        begin = time.perf_counter_ns()
        wanted = [each for name in names for each in self._wanted(name, places)]
        values = {name: self.rows_first(name, out[name].reshape(part.families[name].out_shape)) for name in names}
        missing = [each for each in wanted if not self._is_read(each, part, values[each.name], known=True)]
        stats = ReadStats(read_ns=time.perf_counter_ns() - begin)
        reads = [functools.partial(self._read, each, part, values[each.name]) for each in missing]
        return sum(run_each(reads) if side_by_side else [read() for read in reads], start=stats)

    def _wanted(self, name: str, places: Places) -> list[_Wanted]:
        if self._series.sample_dim not in self._fields[name].source_dims:
            i = self._series.member_of(name, places.member) if self._series.outer else 0
            return [_Wanted(name, i, 0, [(0, 0)])]
        size = self._pool.reader.steps_per_block[name]
        blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for member, segments in places.of(name):
            i = self._series.member_of(name, member)
            for row, place in [(s.start + k * s.step, s.offset + k) for s in segments for k in range(s.count)]:
                start = row - row % size
                blocks.setdefault((i, start), []).append((row - start, place))
        return [_Wanted(name, i, start, rows) for (i, start), rows in blocks.items()]

    def rows_first(self, name: str, values: Rows) -> Rows:
        """View a field's values, dims in the source's order, with the steps first; what has none, as one step."""
        axis = self._axis(name)
        return values[None] if axis is None else np.moveaxis(values, axis, 0)

    def _axis(self, name: str) -> int | None:
        dims, dim = self._fields[name].source_dims, self._series.sample_dim
        return dims.index(dim) if dim in dims else None

    def shape_of(self, name: str, i: int, start: int, part: Part) -> tuple[int, ...]:
        """Return the shape of a block with its steps first."""
        _, _, shape = self._pool.reader.selection_of(name, i, start, part)
        axis = self._axis(name)
        return (1, *shape) if axis is None else (shape[axis], *shape[:axis], *shape[axis + 1 :])

    def _is_read(self, wanted: _Wanted, part: Part, values: Rows, *, known: bool) -> bool:
        """Read rows from disk; ``known``: only of what was asked for before, which takes no round trip."""
        name, i, start = wanted.name, wanted.i, wanted.start
        key = self._keys.get((part.position, name, i, start)) if known else self._key(name, i, start, part)
        if key is None or not key.digest or self.disk is None:
            return False
        rows = [(row, place, values[place : place + 1]) for row, place in wanted.rows]
        buffers = [each if each.flags.c_contiguous else np.empty(each.shape, each.dtype) for _, _, each in rows]
        num_rows = self.shape_of(name, i, start, part)[0]
        into = [(row, _bytes_of(buffer).data) for (row, _, _), buffer in zip(rows, buffers, strict=True)]
        if not self.disk.read(key.digest, (num_rows, buffers[0].nbytes), into):
            return False
        for (_, _, each), buffer in zip(rows, buffers, strict=True):
            if each is not buffer:
                each[...] = buffer
        return True

    def _read(self, wanted: _Wanted, part: Part, values: Rows) -> ReadStats:
        """Read rows from disk, or the block from the source, and keep it."""
        if self._is_read(wanted, part, values, known=False):
            return ReadStats()
        block, stats = self._fill(wanted.name, wanted.i, wanted.start, part)
        for row, place in wanted.rows:
            values[place] = block[row]
        return stats

    def block(self, name: str, i: int, start: int, part: Part) -> tuple[Rows, ReadStats]:
        """Return a block, its dims in the source's order, from disk or from the source; and what had to be read."""
        if name not in self.fields:
            return self._pool.reader.read_block(name, i, start, part)
        begin, stats = time.perf_counter_ns(), ReadStats()
        block = self._pool.reader.empty(self.shape_of(name, i, start, part), self._fields[name].dtype)
        if not self._is_whole(name, i, start, part, block):
            block, stats = self._fill(name, i, start, part)
        else:
            stats = ReadStats(read_ns=time.perf_counter_ns() - begin)
        axis = self._axis(name)
        return block[0] if axis is None else np.moveaxis(block, 0, axis), stats

    def _is_whole(self, name: str, i: int, start: int, part: Part, block: Rows) -> bool:
        key = self._key(name, i, start, part)
        shape = len(block), block.nbytes // max(1, len(block))
        return bool(
            key.digest and self.disk is not None and self.disk.read(key.digest, shape, [(0, _bytes_of(block).data)])
        )

    # -- filling -----------------------------------------------------------------------------------------------------

    def _fill(self, name: str, i: int, start: int, part: Part) -> tuple[Rows, ReadStats]:
        """Read a block from the source and keep it, and those of other trajectories in its chunks; return it, and
        what was read.

        Of threads that want the same ones, one reads; only its caller counts what was read.
        """
        mine: list[ReadStats] = []
        members = self._pool.reader.members_at_once(name, i, part)

        def make() -> dict[int, Rows]:
            block = self._pool.reader.empty(self.shape_of(name, i, start, part), self._fields[name].dtype)
            if self._is_whole(name, i, start, part, block):  # another thread has just kept it
                return {i: block}
            ready = [member for member in members if self.is_ready(name, member, start, part)]
            if i in ready:
                found, took = self._pool.reader.read_blocks(name, i, start, part)
            else:
                values, took = self._pool.reader.read_block(name, i, start, part)
                found = {i: values}
            mine.append(took)
            blocks = {each: np.ascontiguousarray(self.rows_first(name, values)) for each, values in found.items()}
            for each in blocks.keys() & set(ready):
                self.keep(name, each, start, part, blocks[each])
            return blocks

        slot = part.position, name, members[0], start
        while True:  # a thread that waited for another's trajectory finds its own on disk
            blocks = self._filling.get_or_make(slot, make, lambda _: 1, once=True)
            if i in blocks:
                return blocks[i], sum(mine, start=ReadStats())

    def is_ready(self, name: str, i: int, start: int, part: Part, *, waits: bool = False) -> bool:
        """Say, before a block is read, whether it may be kept; ``waits``: until it may.

        Not where nothing would tell a change of its source: the server says nothing, or a file was changed just now
        and could be once more without another time.
        """
        key = self._key(name, i, start, part)
        if key.digest and waits and key.validator.settles_in <= MAX_WAIT:
            time.sleep(key.validator.settles_in)
        return bool(key.digest) and not key.validator.settles_in

    def keep(self, name: str, i: int, start: int, part: Part, block: Rows) -> bool:
        """Keep a block that was read, its steps first; not where its source's files are others than before."""
        key = self._key(name, i, start, part)
        if self.disk is None or not (key.digest and block.nbytes):
            return False
        layout, selection, _ = self._pool.reader.selection_of(name, i, start, part)
        found = self._files_of(i, layout, selection)
        if found is None or not self._validators[i].are_still(found.paths, key.validator, found.places):
            return False
        return self.disk.put(key.digest, _bytes_of(block).reshape(len(block), -1))

    def starts(self, name: str, rows: IntArray) -> IntArray:
        """Return the blocks of a field that rows of all members lie in: member and first row, ``(num, 2)``, sorted."""
        bounds = self._series.row_bounds
        members = np.searchsorted(bounds, rows, side="right") - 1
        inside = rows - bounds[members]
        members = np.array([self._series.member_of(name, i) for i in range(len(bounds) - 1)])[members]
        size = self._pool.reader.steps_per_block[name]
        starts = 0 * inside if self._axis(name) is None else inside - inside % size
        found: IntArray = np.unique(np.stack([members, starts], axis=1), axis=0)
        return found

    def is_there(self, name: str, i: int, start: int, part: Part) -> bool:
        """Say whether a block is kept; of what it holds, only the header is read."""
        key, shape = self._key(name, i, start, part), self.shape_of(name, i, start, part)
        nbytes = math.prod(shape[1:]) * self._fields[name].dtype.itemsize
        return bool(key.digest and self.disk is not None and self.disk.read(key.digest, (shape[0], nbytes), []))


def _is_far(path: str) -> bool:
    local = local_path(path)
    return local is None or is_on_network(local)


def _bytes_of(values: Rows) -> npt.NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)

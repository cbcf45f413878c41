"""The stage of blocks on local disk: rows from URLs, and decoded ones, are read from there the next time.

An entry holds a block of one trajectory. Its name is a digest of all that decides its values: the array, the rows, how
they are decoded, and the validators of the source's files (:mod:`scidata.sources.access.validators`). So a block whose
source has changed is simply not found. Validators are asked for at the first use of a block in each process, and not
again.

A block that is not there is taken from the next stage, and written. Example: chunks hold 2 trajectories, which are
wanted in turn. At the first use of trajectory 0 the next stage is asked for a block of both; two entries are written,
and the first use of trajectory 1 finds its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scidata.core.cache import Cache
from scidata.core.memory import ArrayPool
from scidata.core.types import ArrayLayout, ByteArray, Files, Selection
from scidata.core.urls import Url
from scidata.grids.blocks.key import BlockKey, BlockStage, Rows, SampleRead, Wanted
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.planner import Planner
from scidata.plan.array import chunks_needed, inputs_to_json
from scidata.read.context import NO_READ, ReadStats
from scidata.read.disk_cache import DiskCache
from scidata.sources.access.fetches import run_each
from scidata.sources.access.validators import Validator, Validators

_log = logging.getLogger("scidata")

_VALUES = 1  # to be raised when the same bytes decode to other values than before
MAX_WAIT = 3.0  # seconds for files to settle; later times come from a clock that is wrong
_MAX_ENTRIES = 1 << 18  # blocks that are known to be as they were; some 0.3 kB each


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    validator: Validator
    shape: tuple[int, ...]  # steps first


class DiskBlocks:
    """A reader's blocks on disk. Thread-safe; pickles without the versions of the source's files.

    Behind URLs, blocks are read on threads of their own, because that takes round trips.
    """

    def __init__(
        self, following: BlockStage, sizes: BlockSizes, planner: Planner, *, disk: DiskCache, memory: ArrayPool
    ) -> None:
        self.disk = disk
        self._next, self._layout, self._sizes, self._memory = following, sizes.layout, sizes, memory
        self._series, self._planner = sizes.layout.series, planner
        self._forget()

    def _forget(self) -> None:
        self._entries: Cache[_Entry] = Cache(_MAX_ENTRIES, "lru")
        self._always: Cache[bytes] = Cache(1 << 10)
        self._filling: Cache[dict[int, Rows]] = Cache(0, "lru")
        self._validators = self._series.by_file(list(map(Validators, self._series.paths)))
        self._warned = False

    def __getstate__(self) -> dict[str, object]:
        forgotten = ("_entries", "_always", "_filling", "_validators", "_warned")
        return {name: value for name, value in self.__dict__.items() if name not in forgotten}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()

    def clear(self) -> None:
        """Forget the versions of the source's files; the next use of each block asks again."""
        self._forget()
        self._next.clear()

    # -- names of entries --------------------------------------------------------------------------------------------

    def _entry(self, key: BlockKey) -> _Entry:
        return self._entries.get_or_make(key, functools.partial(self._find_entry, key), once=True)

    def _find_entry(self, key: BlockKey) -> _Entry:
        layout, selection, shape = self._layout.selection_of(key)
        found, source = self._files_of(key.member, layout, selection), self._series.sources[key.member]
        steps_first = self._layout.steps_first(key.name, shape)
        unknown = _Entry(b"", Validator(b""), steps_first)
        if found is None:
            self._warn(
                f"{source.path}: its chunks lie in files that only a library knows; cache_dir keeps none of them"
            )
            return unknown
        source.check_unchanged(layout, found.paths)
        validator = self._validators[key.member].of(*found)
        if not validator.digest:
            self._warn(
                f"{source.path}: nothing tells a change of its objects (neither ETags nor times, or a chain of file "
                "systems); cache_dir keeps none of them"
            )
            return unknown
        place = key.part, key.name, key.member
        always = self._always.get_or_make(place, lambda: self._digest_of(key, layout, selection))
        steps = f"{key.start} {shape}".encode()
        digest = hashlib.sha256(b"\n".join([always, steps, validator.digest])).digest()
        return _Entry(digest, validator, steps_first)

    def _digest_of(self, key: BlockKey, layout: ArrayLayout, selection: Selection) -> bytes:
        """Return a digest of all that decides the values of a part's blocks, but for their steps and their files."""
        field, dim = self._layout.fields[key.name], self._series.sample_dim
        rows = tuple(() if d == dim else rows for d, rows in zip(layout.dims, selection, strict=True))
        lasting = self._lasting(layout, self._series.sources[key.member].path)
        content = inputs_to_json(lasting, rows, None, ()) | {
            "values": _VALUES,
            "decoding": repr(field.decodings[key.member]),  # and the dtype
            "allow_missing": self._planner.allow_missing,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    def _files_of(self, i: int, layout: ArrayLayout, selection: Selection) -> Files | None:
        return self._series.sources[i].files_of(layout, chunks_needed(layout, selection))

    def _lasting(self, layout: ArrayLayout, path: str) -> ArrayLayout:
        """Return an array's layout but for its length, which grows when steps are added, with its lasting address."""
        dim = self._series.sample_dim
        shape = tuple(0 if d == dim else n for d, n in zip(layout.dims, layout.shape, strict=True))
        return replace(layout, store=path.identity if isinstance(path, Url) else os.path.abspath(path), shape=shape)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s", text)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Read a sample's rows of the fields that are kept; pass the others on, and patches."""
        if sample.patch is not None:
            return self._next.read_into(sample, names)
        shapes = sample.part.shapes
        mine = [
            n
            for n in names
            if n in self._sizes.worth.on_disk and (out := sample.out[n]).size and out.shape == shapes[n]
        ]
        if not mine:
            return self._next.read_into(sample, names)
        begin, missing = time.perf_counter_ns(), []
        for name in mine:
            values = self._layout.rows_first(name, sample.out[name].reshape(sample.part.families[name].out_shape))
            for wanted in sample.wanted[name]:
                entry = self._entries.get(wanted.key)  # of blocks that were asked for before: takes no round trip
                if entry is None or not self._rows_are_read(entry, wanted, values):
                    missing.append(functools.partial(self._read, wanted, values))
        stats = ReadStats(read_ns=time.perf_counter_ns() - begin)
        stats = sum(run_each(missing) if self._planner.is_remote else [read() for read in missing], start=stats)
        return stats + self._next.read_into(sample, [name for name in names if name not in mine])

    def _read(self, wanted: Wanted, values: Rows) -> ReadStats:
        """Read rows from disk, or the block from the next stage, and keep it."""
        if self._rows_are_read(self._entry(wanted.key), wanted, values):
            return NO_READ
        block, stats = self._fill(wanted.key)
        for row, place in wanted.rows:
            values[place] = block[row]
        return stats

    def _rows_are_read(self, entry: _Entry, wanted: Wanted, values: Rows) -> bool:
        """Read rows of a block from disk; return True if they were there."""
        if not entry.digest:
            return False
        targets = [values[place : place + 1] for _, place in wanted.rows]
        buffers = [each if each.flags.c_contiguous else np.empty(each.shape, each.dtype) for each in targets]
        into = [(row, _bytes_of(buffer).data) for (row, _), buffer in zip(wanted.rows, buffers, strict=True)]
        if not self.disk.read(entry.digest, (entry.shape[0], buffers[0].nbytes), into):
            return False
        for target, buffer in zip(targets, buffers, strict=True):
            if target is not buffer:
                target[...] = buffer
        return True

    def block(self, key: BlockKey, *, wait: bool = True) -> tuple[Rows, ReadStats]:
        """Return a block from disk, or from the next stage; one that is not kept there is left to that."""
        if key.name not in self._sizes.worth.on_disk:
            return self._next.block(key, wait=wait)
        block, stats = self._fill(key)
        return self._layout.rows_back(key.name, block), stats

    def _whole(self, key: BlockKey) -> Rows | None:
        """Return a block with its steps first; None if it is not on disk."""
        entry = self._entry(key)
        if not entry.digest:
            return None
        block = self._memory.empty(entry.shape, self._layout.fields[key.name].dtype, keep=2)
        shape = len(block), block.nbytes // max(1, len(block))
        return block if self.disk.read(entry.digest, shape, [(0, _bytes_of(block).data)]) else None

    # -- filling -----------------------------------------------------------------------------------------------------

    def _fill(self, key: BlockKey) -> tuple[Rows, ReadStats]:
        """Return a block from disk, or read it from the next stage and keep it, with other trajectories in its chunks.

        Its steps come first; the statistics come with it. Of threads that want the same blocks, one reads; only its
        caller counts the read.
        """
        mine: list[ReadStats] = []
        together = self._sizes.of(key.part).at_once(key.name, key.member)
        wide = key._replace(member=together.member, num=together.num)

        def make() -> dict[int, Rows]:
            begin = time.perf_counter_ns()
            block = self._whole(key)
            if block is not None:  # perhaps another thread has just kept it
                mine.append(ReadStats(read_ns=time.perf_counter_ns() - begin))
                return {key.member: block}
            keys = {i: key._replace(member=i, num=1) for i in together.members}
            ready = {i for i, each in keys.items() if self.is_ready(each)}
            if key.member in ready:
                values, took = self._next.block(wide)
                found = {i: values[self._layout.place_in(key.name, i, together)] for i in keys}
            else:
                values, took = self._next.block(key)
                found = {key.member: values}
            mine.append(took)
            blocks = {i: np.ascontiguousarray(self._layout.rows_first(key.name, rows)) for i, rows in found.items()}
            for i in blocks.keys() & ready:
                self.keep(keys[i], blocks[i])
            return blocks

        while True:  # a thread that waited for another's trajectory finds its own on disk
            blocks = self._filling.get_or_make(wide, make, lambda _: 1, once=True)
            if key.member in blocks:
                return blocks[key.member], sum(mine, start=NO_READ)

    def is_ready(self, key: BlockKey, *, waits: bool = False) -> bool:
        """Say, before a block is read, whether it may be kept; ``waits``: until it may.

        Not where nothing would tell a change of its source: the server says nothing, or a file was changed just now
        and could be once more without another time.
        """
        entry = self._entry(key)
        settles_in = entry.validator.settles_in
        if entry.digest and waits and settles_in <= MAX_WAIT:
            time.sleep(settles_in)
            settles_in = entry.validator.settles_in
        return bool(entry.digest) and not settles_in

    def keep(self, key: BlockKey, block: Rows) -> bool:
        """Keep a block that was read, its steps first; not where its source's files are others than before."""
        entry = self._entry(key)
        if not (entry.digest and block.nbytes):
            return False
        layout, selection, _ = self._layout.selection_of(key)
        found = self._files_of(key.member, layout, selection)
        if found is None or not self._validators[key.member].are_still(found.paths, entry.validator, found.places):
            return False
        return self.disk.put(entry.digest, _bytes_of(block).reshape(len(block), -1))

    def is_there(self, key: BlockKey) -> bool:
        """Return True if a block is kept; of its entry, only the header is read."""
        entry = self._entry(key)
        nbytes = int(np.prod(entry.shape[1:], dtype=np.int64)) * self._layout.fields[key.name].dtype.itemsize
        return bool(entry.digest) and self.disk.read(entry.digest, (entry.shape[0], nbytes), [])


def _bytes_of(values: Rows) -> ByteArray:
    return values.reshape(-1).view(np.uint8)

"""Fills a cache of decoded parts ahead of a job: all that some ranks of a domain need of all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import rows_of, segments_of_slice
from scidata.core.cache import Cache
from scidata.core.types import IntArray
from scidata.errors import ConfigError, OutputError, SourceChangedError
from scidata.grids.blocks.on_disk import Rows
from scidata.grids.parts import Part
from scidata.grids.reader import GridReader
from scidata.plan.family import PlanFamily
from scidata.read.context import ReadStats

#: Of a block of several ranks' parts, which is read at once so that chunks that ranks share are decoded once.
MAX_SHARED_BYTES = 256 << 20

#: Field, member, first row.
_Block: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was done of a plan; sums of parts of blocks, and of their bytes on disk.

    Attributes
    ----------
    written, there
        Kept now, and before.
    unknown
        Not kept, because the server of their source says nothing that would show a change.
    """

    written: int = 0
    there: int = 0
    unknown: int = 0
    bytes_written: int = 0
    bytes_there: int = 0
    stats: ReadStats = field(default_factory=ReadStats)

    def __add__(self, other: Staged) -> Staged:
        return Staged(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class Staging:
    """A plan of what some ranks of a reader's domain need, block by block in the order of the samples.

    Attributes
    ----------
    num_parts, num_bytes
        All parts of blocks, and what they take on disk.
    num_left, bytes_left
        Those at the end that do not fit: they would push out what comes before them.
    """

    def __init__(self, reader: GridReader, ranks: Sequence[int]) -> None:
        kept = reader.pool.kept
        if kept.disk is None:
            raise ConfigError("staging needs a reader with a disk to stage to")
        self._reader, self._disk = reader, kept.disk
        places = [reader.partition.coordinate(rank) for rank in ranks]
        self._parts = [reader.part_of(place) for place in places]
        self._itemsizes = {name: spec.dtype.itemsize for name, spec in reader.buffer_specs(places[0]).items()}
        self._blocks = list(_blocks_of(reader))
        sizes = np.array([self._bytes_of(block) for block in self._blocks], np.int64).reshape(-1, len(self._parts))
        sums = sizes.sum(axis=1)
        fitting = int(np.searchsorted(np.cumsum(sums), kept.disk.max_bytes, side="right"))
        self.num_parts, self.num_bytes = int((sizes > 0).sum()), int(sums.sum())
        self.num_left, self.bytes_left = int((sizes[fitting:] > 0).sum()), int(sums[fitting:].sum())
        self._blocks = self._blocks[:fitting]

    def _bytes_of(self, block: _Block) -> list[int]:
        """Return the bytes on disk of each rank's part of a block."""
        name, found = block[0], []
        for part in self._parts:
            shape = self._reader.pool.kept.shape_of(*block, part)
            row_nbytes = math.prod(shape[1:]) * self._itemsizes[name]
            found.append(self._disk.entry_nbytes(shape[0], row_nbytes) if row_nbytes * shape[0] else 0)
        return found

    def run(self, *, jobs: int = 4, tick: Callable[[], None] = lambda: None) -> Staged:
        """Fill what is not there; call ``tick`` for each part that is done, in this thread.

        Raises
        ------
        OutputError
            The disk is full, or cannot be written.
        SciDataError, OSError
            The source cannot be read.
        """
        total, waiting = Staged(), iter(self._groups())
        with ThreadPoolExecutor(jobs, thread_name_prefix="scidata-stage") as pool:
            running: set[Future[Staged]] = set()
            try:
                while True:
                    running |= {pool.submit(self._stage, b) for b in islice(waiting, 2 * jobs - len(running))}
                    if not running:
                        return total
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        found = future.result()
                        total += found
                        for _ in range(found.written + found.there + found.unknown):
                            tick()
            except BaseException:
                for future in running:
                    future.cancel()
                raise

    def _groups(self) -> list[list[_Block]]:
        """Return the blocks of trajectories that lie in the same chunks together, in the order of the first."""
        union, groups = _union(self._reader, self._parts), dict[_Block, list[_Block]]()
        for name, i, start in self._blocks:
            first = self._reader.pool.reader.members_at_once(name, i, union)[0]
            groups.setdefault((name, first, start), []).append((name, i, start))
        return list(groups.values())

    def _stage(self, blocks: Sequence[_Block]) -> Staged:
        """Keep all parts of some blocks, each chunk decoded once for all of them where that fits into memory."""
        kept, done = self._reader.pool.kept, Staged()
        wanted: dict[_Block, list[Part]] = {}
        for block in blocks:
            sizes = {k: nbytes for k, nbytes in enumerate(self._bytes_of(block)) if nbytes}
            there = [k for k in sizes if kept.is_there(*block, self._parts[k])]
            missing = {k: self._parts[k] for k in sizes if k not in there}
            ready = {k: part for k, part in missing.items() if kept.is_ready(*block, part, waits=True)}
            done += Staged(
                there=len(there), bytes_there=sum(sizes[k] for k in there), unknown=len(missing) - len(ready),
                written=len(ready), bytes_written=sum(sizes[k] for k in ready),
            )  # fmt: skip
            if ready:
                wanted[block] = list(ready.values())
        return done + Staged(stats=self._fill(wanted)) if wanted else done

    def _fill(self, wanted: Mapping[_Block, Sequence[Part]]) -> ReadStats:
        """Read some ranks' parts of blocks that lie in the same chunks, and keep them."""
        pool, (name, i, start) = self._reader.pool, next(iter(wanted))
        union = _union(self._reader, [part for parts in wanted.values() for part in parts])
        nbytes = math.prod(pool.kept.shape_of(name, i, start, union)) * self._itemsizes[name]
        stats, found = ReadStats(), dict[int, Rows]()
        if len(wanted) > 1:
            found, stats = pool.reader.read_blocks(name, i, start, union)
        elif len(wanted[name, i, start]) > 1 and nbytes <= MAX_SHARED_BYTES:
            found[i], stats = pool.reader.read_block(name, i, start, union)
        dims = [dim for dim in self._reader.layout(name).dims if dim != self._reader.sample_dim]
        for block, parts in wanted.items():
            for part in parts:
                if found:
                    values = _cut(pool.kept.rows_first(name, found[block[1]]), dims, union, part)
                else:
                    read, took = pool.reader.read_block(*block, part)
                    values, stats = pool.kept.rows_first(name, read), stats + took
                self._keep(block, part, values)
        return stats

    def _keep(self, block: _Block, part: Part, values: Rows) -> None:
        if self._reader.pool.kept.keep(*block, part, np.ascontiguousarray(values)):
            return
        if self._disk.failure:
            raise OutputError(self._disk.failure)
        path = self._reader.sources[block[1]].path
        raise SourceChangedError(f"{path}: was changed while it was read; stage it again once it changes no more")


def _blocks_of(reader: GridReader) -> Iterator[_Block]:
    """Yield field, file and first row of each block that a sample needs, in the order of the samples."""
    moves = set(reader.sample_dims)
    names = [name for name in reader.fields if name in reader.pool.kept.fields]
    moving = [name for name in names if moves & set(reader.layout(name).dims)]
    yield from ((name, 0, 0) for name in names if name not in moving)
    if not moving:
        return
    starts = [reader.pool.kept.starts(name, _rows_of(reader, name)) for name in moving]
    tables = [np.column_stack([found, np.full(len(found), k)]) for k, found in enumerate(starts)]
    for i, start, k in np.unique(np.concatenate(tables), axis=0).tolist():
        yield moving[k], i, start


def _rows_of(reader: GridReader, name: str) -> IntArray:
    """Return the rows that any sample has of a field, in the numbering of all members."""
    found: IntArray = np.unique(np.concatenate([reader.sample_rows.at(step) for step in reader.field_steps.of(name)]))
    return found


def _union(reader: GridReader, parts: Sequence[Part]) -> Part:
    """Return the smallest part that holds all of these."""
    rows = {dim: np.unique(np.concatenate([rows_of(p.segments[dim]) for p in parts])) for dim in parts[0].segments}
    segments = {dim: segments_of_slice(found.tolist(), int(found[-1]) + 1) for dim, found in rows.items()}
    sizes: dict[str | None, int] = {dim: len(found) for dim, found in rows.items()}
    families = {}
    for name in reader.fields:
        sizes[reader.sample_dim] = reader.field_steps.num(name)
        families[name] = PlanFamily((), tuple([sizes.get(d, 1) for d in reader.layout(name).dims]))
    position = (-1, *(at for part in parts for at in part.position))  # nobody's, and another one for others
    return Part(position=position, segments=segments, shapes={}, families=families, jobs=Cache(0, "none"))


def _cut(values: Rows, dims: Sequence[str], union: Part, part: Part) -> Rows:
    """Cut a part out of a block of the union of several, whose steps come first."""
    for axis, dim in enumerate(dims, start=1):
        if dim not in part.segments:
            continue  # a trajectory's own row
        at: IntArray = np.searchsorted(rows_of(union.segments[dim]), rows_of(part.segments[dim]))
        if len(at) and (np.diff(at) == 1).all():
            values = values[(slice(None),) * axis + (slice(int(at[0]), int(at[-1]) + 1),)]
        else:
            values = np.take(values, at, axis=axis)
    return values

"""Fills a cache of decoded parts ahead of a job: all that some ranks of a domain need of all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scidata.core.bounds import rows_of, segments_of_slice
from scidata.core.tasks.work import in_threads
from scidata.core.types import IntArray
from scidata.errors import OutputError, SourceChangedError
from scidata.grids.blocks.key import BlockKey, Rows
from scidata.grids.parts import Part
from scidata.grids.reader import GridReader
from scidata.read.context import NO_READ, ReadStats, Staged

#: Of a block of several ranks' parts, which is read at once so that chunks that ranks share are decoded once.
MAX_SHARED_BYTES = 256 << 20


class Staging:
    """A plan of the blocks that some ranks of a reader's domain need, in the order of the samples.

    - ``num_parts``, ``num_bytes``: all parts of blocks, and their bytes on disk.
    - ``num_left``, ``bytes_left``: those at the end that do not fit: they would push out those before them.
    """

    def __init__(self, reader: GridReader, ranks: Sequence[int]) -> None:
        self._reader, self._layout, self._sizes = reader, reader.chain.layout, reader.chain.sizes
        assert reader.chain.disk is not None
        self._disk = reader.chain.disk
        self._parts = [reader.part_of(reader.partition.coordinate(rank)) for rank in ranks]
        self._unions: dict[tuple[Part, ...], Part] = {}
        self._blocks = list(self._find_blocks())
        sizes = np.array([self._bytes_of(block) for block in self._blocks], np.int64).reshape(-1, len(self._parts))
        sums = sizes.sum(axis=1)
        fitting = int(np.searchsorted(np.cumsum(sums), self._disk.disk.max_bytes, side="right"))
        self.num_parts, self.num_bytes = int((sizes > 0).sum()), int(sums.sum())
        self.num_left, self.bytes_left = int((sizes[fitting:] > 0).sum()), int(sums[fitting:].sum())
        self._blocks = self._blocks[:fitting]

    def _find_blocks(self) -> Iterator[BlockKey]:
        reader, part = self._reader, self._parts[0]
        moves = set(reader.sample_dims)
        names = [name for name in reader.fields if name in reader.pool.worth.on_disk]
        moving = [name for name in names if moves & set(reader.layout(name).dims)]
        yield from (BlockKey(part, name, 0, 1, 0) for name in names if name not in moving)
        steps = {name: reader.field_steps.of(name) for name in moving}
        rows = {n: np.unique(np.concatenate([reader.sample_rows.at(step) for step in steps[n]])) for n in moving}
        found = [key for name in moving for key in self._layout.alone(name, rows[name], part)]
        yield from sorted(found, key=lambda key: (key.member, key.start))  # stable: fields in their order

    def _itemsize(self, key: BlockKey) -> int:
        return self._layout.fields[key.name].dtype.itemsize

    def _bytes_of(self, block: BlockKey) -> list[int]:
        found = []
        for part in self._parts:
            steps, *shape = self._layout.shape_of(block._replace(part=part))
            row_nbytes = math.prod(shape) * self._itemsize(block)
            found.append(self._disk.disk.entry_nbytes(steps, row_nbytes) if row_nbytes * steps else 0)
        return found

    def run(self, *, jobs: int = 4, tick: Callable[[], None] = lambda: None) -> Staged:
        """Fill the missing parts; call ``tick`` for each part that is done, in this thread."""
        total = Staged()

        def take(blocks: Sequence[BlockKey], found: Staged) -> None:
            nonlocal total
            total += found
            for _ in range(found.written + found.there + found.unknown):
                tick()

        in_threads(self._stage, self._groups(), jobs, take)
        return total

    def _groups(self) -> list[list[BlockKey]]:
        sizes, groups = self._sizes.of(self._union(self._parts)), dict[tuple[str, int, int], list[BlockKey]]()
        for key in self._blocks:
            first = sizes.at_once(key.name, key.member).member
            groups.setdefault((key.name, first, key.start), []).append(key)
        return list(groups.values())

    def _stage(self, blocks: Sequence[BlockKey]) -> Staged:
        done, ready = Staged(), list[BlockKey]()
        for block in blocks:
            for part, nbytes in zip(self._parts, self._bytes_of(block), strict=True):
                key = block._replace(part=part)
                if not nbytes:
                    continue
                if self._disk.is_there(key):
                    done += Staged(there=1, bytes_there=nbytes)
                elif self._disk.is_ready(key, waits=True):
                    done += Staged(written=1, bytes_written=nbytes)
                    ready.append(key)
                else:
                    done += Staged(unknown=1)
        return done + Staged(stats=self._fill(ready)) if ready else done

    def _fill(self, wanted: Sequence[BlockKey]) -> ReadStats:
        """Read some ranks' parts of blocks that lie in the same chunks, and keep them.

        Example: ranks 0 and 1 need rows of the same chunks. The block of both parts' rows is read, each chunk decoded
        once; then each rank's rows are cut out of it.
        """
        first, source, layout = wanted[0], self._reader.chain.source, self._layout
        union = self._union([key.part for key in wanted])
        together = self._sizes.of(union).at_once(first.name, first.member)
        several = len({key.member for key in wanted}) > 1
        whole = None
        if several:
            whole = first._replace(part=union, member=together.member, num=together.num)
        elif len(wanted) > 1:
            alone = first._replace(part=union)
            nbytes = math.prod(layout.shape_of(alone)) * self._itemsize(alone)
            whole = alone if nbytes <= MAX_SHARED_BYTES else None
        values, stats = (None, NO_READ) if whole is None else source.block(whole)
        for key in wanted:
            if values is None or whole is None:
                rows, took = source.block(key)
                rows, stats = layout.rows_first(key.name, rows), stats + took
            else:
                held = layout.together(whole.name, whole.member, alone=whole.num == 1)
                inside = layout.place_in(key.name, key.member, held)
                rows = self._cut(layout.rows_first(key.name, values[inside]), union, key)
            self._keep(key, rows)
        return stats

    def _keep(self, key: BlockKey, values: Rows) -> None:
        if self._disk.keep(key, np.ascontiguousarray(values)):
            return
        if self._disk.disk.failure:
            raise OutputError(self._disk.disk.failure)
        path = self._reader.sources[key.member].path
        raise SourceChangedError(f"{path}: was changed while it was read; stage it again once it changes no more")

    def _union(self, parts: Sequence[Part]) -> Part:
        """Return the smallest part that holds all of these, the same object each time."""
        some = tuple(dict.fromkeys(parts))
        found = self._unions.get(some)
        if found is None:
            rows = {
                dim: np.unique(np.concatenate([rows_of(p.segments[dim]) for p in some])) for dim in some[0].segments
            }
            segments = {dim: segments_of_slice(each.tolist(), int(each[-1]) + 1) for dim, each in rows.items()}
            found = self._unions.setdefault(some, self._reader.planner.make_part((-1,), segments))  # nobody's position
        return found

    def _cut(self, values: Rows, union: Part, key: BlockKey) -> Rows:
        """Cut a part out of a block of the union of several, whose steps come first."""
        dims = [dim for dim in self._reader.layout(key.name).dims if dim != self._reader.sample_dim]
        for axis, dim in enumerate(dims, start=1):
            if dim not in key.part.segments:
                continue  # a trajectory's own row
            at: IntArray = np.searchsorted(rows_of(union.segments[dim]), rows_of(key.part.segments[dim]))
            if len(at) and (np.diff(at) == 1).all():
                values = values[(slice(None),) * axis + (slice(int(at[0]), int(at[-1]) + 1),)]
            else:
                values = np.take(values, at, axis=axis)
        return values

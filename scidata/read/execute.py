"""One plan being run: checks beforehand, absent chunks, and the list of tasks that threads share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import Decoding, IntArray, Source
from scidata.errors import CorruptDataError, MissingChunkError, ShortReadError
from scidata.plan import ArrayPlan
from scidata.plan.pieces import slice_of
from scidata.plan.spans import Reads, chunk_shapes
from scidata.read.codecs import largest_encoded
from scidata.read.context import COPY, READ, Context, Tally, thread_scratch
from scidata.read.run_encoded import EncodedRun
from scidata.read.run_raw import RawRun
from scidata.sources.bytes.fetches import Range
from scidata.sources.bytes.files import Url, is_url

__all__ = ["Execution", "Task"]

#: A unit of work: ``"raw"`` or ``"encoded"`` read, or ``"box"`` of an array that only its own library reads; its row.
Task = tuple[str, int]


class Execution:
    """One plan, one destination. Tasks may run on any threads, each task once."""

    def __init__(self, plan: ArrayPlan, out: npt.NDArray[Any], *, source: Source, decoding: Decoding | None) -> None:
        self.is_remote = plan.refs is not None and not plan.layout.fallback and any(map(is_url, plan.refs.paths))
        self._plan, self._context = plan, Context(plan, out, source, decoding, is_remote=self.is_remote)
        self.source, self.layout = source, plan.layout
        self._raw: RawRun | None = None
        self._encoded: EncodedRun | None = None
        plain = not plan.layout.codecs and not plan.layout.fallback
        self.is_raw = plain and self._context.convert.trivial  # bytes are copied and no more

    def prepare(self, *, allow_missing: bool) -> None:
        """Check what the places of the chunks say by themselves, before anything is read, and fill absent chunks.

        Raises
        ------
        MissingChunkError, ShortReadError, CorruptDataError, UnsupportedFormatError
        """
        plan, context = self._plan, self._context
        absent = plan.absent
        if plan.layout.fallback and not allow_missing:
            # the format's own library would read the fill value without a word
            absent = np.flatnonzero(context.source.locate(plan.layout, plan.chunks).path_index < 0)
        if len(absent) and not allow_missing:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise MissingChunkError(
                f"{context.where(int(absent[0]))}: the store does not have it{more}; copy the store again, or "
                "give allow_missing=True if absent chunks stand for the fill value"
            )
        if plan.span_reads is not None:
            plan.pattern.memo.get("raw sizes", self._check_raw)
            self._raw = RawRun(context, plan.span_reads)
        if plan.encoded is not None and plan.encoded_reads is not None:
            self._check_encoded(plan.encoded.chunk_row, plan.encoded.nbytes)
            self._encoded = EncodedRun(context, plan.encoded, plan.encoded_reads)
        self._fill_absent()

    def _check_raw(self) -> bool:
        """Check the sizes of raw chunks; once for a pattern, of which they are a part."""
        plan, context = self._plan, self._context
        assert plan.spans is not None
        rows = np.unique(plan.boxes.chunk_row[plan.spans.box])
        expected = chunk_shapes(plan.layout, plan.chunks[rows]).prod(axis=1) * plan.layout.dtype.itemsize
        found = context.refs.nbytes[rows]
        for i in np.flatnonzero(found != expected)[:1].tolist():
            wanted = expected[i if len(expected) > 1 else 0]
            kind = ShortReadError if found[i] < wanted else CorruptDataError
            raise kind(
                f"{context.where(int(rows[i]))}: it has {found[i]} bytes, but {wanted} were expected; "
                "the file is damaged: copy or write it again"
            )
        return True

    def _check_encoded(self, rows: IntArray, decoded: IntArray) -> None:
        found = self._context.refs.nbytes[rows]
        bad = found > largest_encoded(decoded)
        if bad.any():
            i = int(bad.argmax())
            raise CorruptDataError(
                f"{self._context.where(int(rows[i]))}: {found[i]} encoded bytes for {decoded[i]} decoded ones make no "
                "sense; the store's index is damaged: copy or write it again"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it reads; none of an array that only its own library reads."""
        return () if self._plan.refs is None else self._plan.refs.paths

    def tasks(self) -> tuple[list[Task], list[int]]:
        """Return the tasks, and the bytes that each moves or decodes."""
        return self._plan.pattern.memo.get(("tasks", *self._context.kind), self._make_tasks)

    def _make_tasks(self) -> tuple[list[Task], list[int]]:
        plan = self._plan
        if plan.layout.fallback:
            sizes = plan.boxes.gather(plan.pieces, "count").prod(axis=1) * plan.layout.dtype.itemsize
            return [("box", i) for i in range(len(sizes))], sizes.tolist()
        tasks: list[Task] = []
        costs: list[int] = []
        if self._raw is not None:
            tasks += [("raw", i) for i in range(len(self._raw.costs))]
            costs += self._raw.costs
        if plan.encoded is not None and plan.encoded_reads is not None:
            tasks += [("encoded", i) for i in range(len(plan.encoded_reads.nbytes))]
            costs += np.add.reduceat(plan.encoded.nbytes, plan.encoded_reads.bounds[:-1]).tolist()
        return tasks, costs

    def range_of(self, task: Task) -> Range:
        """Return what a task fetches of a URL."""
        reads, (_, row) = self._reads_of(task), task
        url = self._context.paths[reads.path_index[row]]
        assert isinstance(url, Url)
        return url, int(reads.offset[row]), int(reads.nbytes[row])

    def run_fetched(self, task: Task, data: bytes | Exception, tally: Tally) -> None:
        """Do a task whose bytes are here; an error in their place is raised with the chunk's name."""
        self._context.arrived[id(self._reads_of(task)), task[1]] = data
        self.run([task], tally)

    def _reads_of(self, task: Task) -> Reads:
        reads = self._plan.span_reads if task[0] == "raw" else self._plan.encoded_reads
        assert reads is not None
        return reads

    def run(self, tasks: Sequence[Task], tally: Tally) -> None:
        """Do some tasks."""
        tally.trace = self._context.tracer
        raw = [row for kind, row in tasks if kind == "raw"]
        if raw and self._raw is not None:
            self._raw.run(raw, tally)
        for kind, row in tasks if len(raw) < len(tasks) else ():
            if kind == "encoded" and self._encoded is not None:
                self._encoded.run(row, tally)
            elif kind == "box":
                self._run_box(row, tally)

    def _fill_absent(self) -> None:
        plan, layout, context = self._plan, self._plan.layout, self._context
        if not len(plan.absent):
            return
        fill = layout.fill_value if layout.fill_value is not None else np.zeros((), layout.dtype)
        raw = fill.astype(layout.dtype).reshape(1).view(context.convert.stored)
        value = np.empty(1, context.out.dtype)
        context.convert.copy(value, raw, thread_scratch())
        out = context.out.reshape(plan.out_shape)
        for row in plan.absent.tolist():
            for box in range(int(plan.boxes.bounds[row]), int(plan.boxes.bounds[row + 1])):
                out[self._dest_slices(box)] = value[0]

    def _dest_slices(self, box: int) -> tuple[slice, ...]:
        return tuple(
            slice_of(int(p.dest[i]), int(p.count[i]), int(p.sign[i]))
            for p, i in zip(self._plan.pieces, self._plan.boxes.piece[box].tolist(), strict=True)
        )

    def _run_box(self, box: int, tally: Tally) -> None:
        """Read one box through the format's own library."""
        plan, layout, context, scratch = self._plan, self._plan.layout, self._context, thread_scratch()
        place = []
        for p, i, chunk in zip(plan.pieces, plan.boxes.piece[box].tolist(), layout.chunks, strict=True):
            start, step = int(p.chunks[p.chunk_row[i]]) * chunk + int(p.start[i]), int(p.step[i])
            place.append(slice(start, start + (int(p.count[i]) - 1) * step + 1, step))
        piece = context.out.reshape(plan.out_shape)[self._dest_slices(box)]
        nbytes = piece.size * layout.dtype.itemsize
        raw = scratch.get("read", nbytes).view(layout.dtype).reshape(piece.shape)
        now = time.perf_counter_ns()
        context.source.read_box(layout, tuple(place), raw)
        now = tally.mark(READ, now, nbytes)
        context.convert.copy(piece, raw.view(context.convert.stored), scratch)
        tally.mark(COPY, now, nbytes)
        tally.fetched += nbytes
        tally.decoded += nbytes
        tally.num_reads += 1

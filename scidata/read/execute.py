"""Execution of one plan: checks, absent chunks, and the tasks that threads share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from scidata.core.checks import largest_encoded
from scidata.core.types import Array, Decoding, IntArray, Source
from scidata.core.urls import Url
from scidata.errors import CorruptDataError, MissingChunkError, ShortReadError
from scidata.plan.array import ArrayPlan
from scidata.plan.cut import slice_of
from scidata.plan.spans import Reads
from scidata.read.context import COPY, READ, Context, Tally, Target, thread_scratch
from scidata.read.pattern_tables import Task
from scidata.read.places import Places
from scidata.read.run_encoded import EncodedRun
from scidata.read.run_raw import RawRun
from scidata.sources.access.fetches import Range

#: Bytes of a range; bytes and size of a file of unknown size; or an error.
Answer: TypeAlias = bytes | tuple[bytes, int] | Exception


class Execution:
    """One plan for one kind of destination. May be executed repeatedly; tasks run on any thread, once per execution.

    ``tasks, costs, cost``: units of work, and the bytes that each moves or decodes, and all of them.
    ``is_raw``: whether bytes are copied and no more; ``is_whole``: and one local read fills the destination.
    Raises MissingChunkError, ShortReadError, CorruptDataError, UnsupportedFormatError: errors that the places of the
    chunks show, before anything is read.
    """

    def __init__(
        self,
        plan: ArrayPlan,
        dtype: np.dtype[np.generic],
        *,
        places: Places,
        decoding: Decoding | None,
        allow_missing: bool,
    ) -> None:
        self._plan, self.is_remote, self.layout = plan, plan.remote, plan.layout
        self._context, self._has_absent = Context(plan, decoding, dtype), bool(len(plan.absent))
        self._is_unseen = plan.refs is not None and plan.refs.unseen
        self._absent: list[int] = []  # chunks that reads did not find
        self._allow_missing = allow_missing
        self.is_raw = not plan.layout.codecs and not plan.layout.fallback and self._context.convert.trivial
        self._check_absent(plan.absent, places)
        self._raw = None if plan.span_reads is None else RawRun(self._context, plan.span_reads, places)
        self._encoded: EncodedRun | None = None
        encoded = plan.encoded
        if encoded is not None and plan.encoded_reads is not None:
            self._check_encoded(encoded.chunk_row, encoded.nbytes, places)
            self._encoded = EncodedRun(self._context, encoded, plan.encoded_reads, places)
        tables = self._context.tables
        if tables.tasks is None:
            tables.tasks = self._make_tasks()
        self.tasks, self.costs = tables.tasks
        self.cost = sum(self.costs)
        self._raw_rows = [row for kind, row in self.tasks if kind == "raw"]
        self.is_whole = self.is_raw and self._raw is not None and self._raw.is_whole and not self._has_absent

    def begin(self, out: Array, places: Places) -> Target:
        """Begin reading chunks at these locations into ``out``: fill absent ones."""
        target = Target(out, places)
        if self._has_absent or self._absent:
            self._fill_absent(target, [*self._plan.absent.tolist(), *self._absent])
        if self.layout.fallback and not self._allow_missing:
            # the format's own library would silently return the fill value
            found = places.source.locate(self.layout, self._plan.chunks)
            self._check_absent(np.flatnonzero(found.path_index < 0), places)
        return target

    def _check_absent(self, absent: IntArray, places: Places) -> None:
        if len(absent) and not self._allow_missing:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise MissingChunkError(
                f"{places.where(int(absent[0]))}: the store does not have it{more}; copy the store again, or "
                "give allow_missing=True if absent chunks stand for the fill value"
            )

    def _check_encoded(self, rows: IntArray, decoded: IntArray, places: Places) -> None:
        found = self._context.refs.nbytes[rows]
        bad = found > largest_encoded(decoded)
        if bad.any():
            i = int(bad.argmax())
            raise CorruptDataError(
                f"{places.where(int(rows[i]))}: {found[i]} encoded bytes for {decoded[i]} decoded ones make no "
                "sense; the store's index is damaged: copy or write it again"
            )

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

    def range_of(self, task: Task, places: Places) -> Range:
        """Return the URL range that a task fetches."""
        reads, (_, row) = self._reads_of(task), task
        url = places.paths[reads.path_index[row]]
        assert isinstance(url, Url)
        nbytes = int(reads.nbytes[row])
        if nbytes:
            return Range(url, int(reads.offset[row]), nbytes)
        return Range(url, 0, largest_encoded(self.layout.chunk_nbytes), is_first=True)

    def run_fetched(self, task: Task, answer: Answer, target: Target, tally: Tally) -> None:
        """Do a task with its fetched bytes; if these are an error, raise it with the chunk's name."""
        data = self._seen(task, answer, target) if self._is_unseen else answer
        if data is None:
            return
        assert not isinstance(data, tuple)
        target.arrived[task] = data
        self.run([task], target, tally)

    def _seen(self, task: Task, answer: Answer, target: Target) -> bytes | Exception | None:
        """Check the answer for a chunk that was not looked up before; None if it is absent, and filled."""
        reads, row, places = self._reads_of(task), task[1], target.places
        item = int(reads.bounds[row])
        if task[0] == "encoded":
            assert self._plan.encoded is not None
            chunk = int(self._plan.encoded.chunk_row[item])
        else:
            assert self._plan.spans is not None
            chunk = int(self._plan.boxes.chunk_row[self._plan.spans.box[item]])
        if isinstance(answer, FileNotFoundError):
            self._check_absent(np.array([chunk]), places)
            self._fill_absent(target, [chunk])
            self._note_absent(task, chunk, places.source)
            return None
        url, expected = places.paths[reads.path_index[row]], int(places.refs.nbytes[chunk])
        assert isinstance(url, Url)
        if isinstance(answer, Exception):
            return answer
        if isinstance(answer, tuple):
            data, size = answer
            if size > len(data):
                return CorruptDataError(
                    f"{places.where(chunk)}: {size} encoded bytes for {self.layout.chunk_nbytes} decoded ones "
                    "make no sense; the file is damaged: copy or write it again"
                )
        else:
            data = answer
            known = url.seen.get(str(url))
            size = expected if known is None or known.size is None else known.size
        if size == 0 or size != (expected or size):
            error = ShortReadError if size < (expected or 1) else CorruptDataError
            return error(
                f"{places.where(chunk)}: {url} has {size} bytes, but {expected or 'some'} were expected; "
                "the file is truncated or damaged: copy or write it again"
            )
        return data

    def _note_absent(self, task: Task, chunk: int, source: Source) -> None:
        """Skip a task in later executions: its chunk is filled at their start."""
        self._absent.append(chunk)
        self.tasks = [each for each in self.tasks if each != task]
        note_absent = getattr(source, "note_absent", None)
        if note_absent is not None:
            note_absent(self.layout, self._plan.chunks[chunk])

    def _reads_of(self, task: Task) -> Reads:
        reads = self._plan.span_reads if task[0] == "raw" else self._plan.encoded_reads
        assert reads is not None
        return reads

    def run(self, tasks: Sequence[Task], target: Target, tally: Tally) -> None:
        """Do the given tasks."""
        tally.trace = target.tracer
        raw: Sequence[int] = ()
        if self._raw is not None:
            raw = self._raw_rows if tasks is self.tasks else [row for kind, row in tasks if kind == "raw"]
            if raw:
                self._raw.run(raw, target, tally)
        for kind, row in tasks if len(raw) < len(tasks) else ():
            if kind == "encoded" and self._encoded is not None:
                self._encoded.run(row, target, tally)
            elif kind == "box":
                self._run_box(row, target, tally)

    def _fill_absent(self, target: Target, chunks: Sequence[int]) -> None:
        plan, layout, context = self._plan, self._plan.layout, self._context
        fill = layout.fill_value if layout.fill_value is not None else np.zeros((), layout.dtype)
        raw = fill.astype(layout.dtype).reshape(1).view(context.convert.stored)
        value = np.empty(1, target.out.dtype)
        context.convert.copy(value, raw, thread_scratch())
        out = target.out.reshape(plan.out_shape)
        for row in chunks:
            for box in range(int(plan.boxes.bounds[row]), int(plan.boxes.bounds[row + 1])):
                out[self._dest_slices(box)] = value[0]

    def _dest_slices(self, box: int) -> tuple[slice, ...]:
        return tuple(
            slice_of(int(p.dest[i]), int(p.count[i]), int(p.sign[i]))
            for p, i in zip(self._plan.pieces, self._plan.boxes.piece[box].tolist(), strict=True)
        )

    def _run_box(self, box: int, target: Target, tally: Tally) -> None:
        """Read one box with the format's own library."""
        plan, layout, context, scratch = self._plan, self._plan.layout, self._context, thread_scratch()
        place = []
        for p, i, chunk in zip(plan.pieces, plan.boxes.piece[box].tolist(), layout.chunks, strict=True):
            start, step = int(p.chunks[p.chunk_row[i]]) * chunk + int(p.start[i]), int(p.step[i])
            place.append(slice(start, start + (int(p.count[i]) - 1) * step + 1, step))
        out = target.out.reshape(plan.out_shape)
        piece = out[self._dest_slices(box)] if out.ndim else out
        nbytes = piece.size * layout.dtype.itemsize
        raw = scratch.get("read", nbytes).view(layout.dtype).reshape(piece.shape)
        now = time.perf_counter_ns()
        try:
            target.places.source.read_box(layout, tuple(place), raw)
        except MissingChunkError:  # ``raw`` has all but that, and the fill value there
            if not self._allow_missing:
                raise
        now = tally.mark(READ, now, nbytes)
        context.convert.copy(piece, raw.view(context.convert.stored), scratch)
        tally.mark(COPY, now, nbytes)
        tally.fetched += nbytes
        tally.decoded += nbytes
        tally.num_reads += 1

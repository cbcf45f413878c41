"""State shared by all parts of one running read: tables, destination, conversion, fetching."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from scidata.core import trace
from scidata.core.types import Array, ByteArray, ChunkRefs, Decoding, IntArray
from scidata.errors import MissingChunkError, ShortReadError
from scidata.plan.array import ArrayPlan
from scidata.plan.spans import dest_strides, element_strides
from scidata.read.codecs import Scratch
from scidata.read.convert import converter
from scidata.read.copies import Copies, at_any_byte
from scidata.read.pattern_tables import Task, tables_of
from scidata.read.places import Places
from scidata.sources.access.files import files, scatter

READ, DECODE, COPY = range(3)  # stages, as indices of _STAGES
_STAGES = ("read", "decode", "copy")

#: Destination buffer of a read.
ByteBuffer: TypeAlias = ByteArray | memoryview

#: Records a stage with begin, end and bytes.
Tracer: TypeAlias = Callable[..., None]

_thread = threading.local()


def thread_scratch() -> Scratch:
    """Return this thread's buffers; they live as long as the thread, because fresh pages cost more than the read."""
    scratch: Scratch | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = Scratch()
    return scratch


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """Statistics of a read: bytes read from files, decoded bytes, ranged reads.

    ``read_ns``, ``decode_ns`` and ``copy_ns`` (of values that do not come to lie where they belong at once, their
    conversion included) are nanoseconds, summed over threads.
    """

    bytes_fetched: int = 0
    bytes_decoded: int = 0
    num_reads: int = 0
    read_ns: int = field(default=0, compare=False)
    decode_ns: int = field(default=0, compare=False)
    copy_ns: int = field(default=0, compare=False)

    def __add__(self, other: ReadStats) -> ReadStats:
        if self is NO_READ or other is NO_READ:  # of most sums one term is: making one takes as long as a small read
            return other if self is NO_READ else self
        return ReadStats(**{name: count + getattr(other, name) for name, count in vars(self).items()})


#: Statistics of rows that were already in memory.
NO_READ = ReadStats()


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Sums of parts that were to be kept ahead of a job: a rank's of a block, or of a sample; and of bytes on disk.

    - ``written``, ``there``: kept now, and before; of those that several parts share, the bytes are counted once.
    - ``left``: from the first that does not fit on.
    - ``unknown``: not kept, because the server of their source says nothing that would show a change.
    """

    written: int = 0
    there: int = 0
    left: int = 0
    unknown: int = 0
    bytes_written: int = 0
    bytes_there: int = 0
    stats: ReadStats = field(default_factory=ReadStats)

    def __add__(self, other: Staged) -> Staged:
        return Staged(**{name: count + getattr(other, name) for name, count in vars(self).items()})


class Tally:
    """Counters of one thread's work on a read, shared by its tasks, since a ReadStats per task would cost more.

    ``trace``: called with stage, begin, end and bytes of each piece of work; None while nothing is traced.
    """

    __slots__ = ("_ns", "decoded", "fetched", "num_reads", "trace")

    def __init__(self) -> None:
        self.fetched = self.decoded = self.num_reads = 0
        self._ns = [0, 0, 0]
        self.trace: Tracer | None = None

    def mark(self, stage: int, begin: int, nbytes: int) -> int:
        """Add the time since ``begin`` to a stage; return the current time."""
        now = time.perf_counter_ns()
        self._ns[stage] += now - begin
        if self.trace is not None:
            self.trace(_STAGES[stage], begin, now, bytes=nbytes)
        return now

    def stats(self) -> ReadStats:
        """Return the sums."""
        read, decode, copy = self._ns
        return ReadStats(
            bytes_fetched=self.fetched,
            bytes_decoded=self.decoded,
            num_reads=self.num_reads,
            read_ns=read,
            decode_ns=decode,
            copy_ns=copy,
        )


class Target:
    """Destination of one execution of a plan. Immutable, so that any thread may use it.

    ``out, out_bytes, out_view``: the destination, 1-D, as values, bytes and a memoryview.
    ``tracer``: of a :class:`Tally`; knows the field and the sample, that of the thread which made this.
    ``arrived``: of URLs: bytes fetched ahead for tasks that are not run yet, or the error.
    """

    __slots__ = ("arrived", "out", "out_bytes", "out_view", "places", "tracer")

    def __init__(self, out: Array, places: Places) -> None:
        self.places = places
        self.out = out.reshape(-1)
        self.out_bytes: ByteArray = self.out.view(np.uint8)
        self.out_view = self.out_bytes.data
        self.tracer: Tracer | None = None
        if trace.active is not None:
            self.tracer = functools.partial(trace.active.add, field=places.layout.name, sample=trace.get_sample())
        self.arrived: dict[Task, bytes | Exception] = {}


class Context:
    """A plan's tables and kind of destination. Any thread may use it.

    ``item, out_item``: bytes of one stored and of one destination value.
    """

    def __init__(self, plan: ArrayPlan, decoding: Decoding | None, dtype: np.dtype[np.generic]) -> None:
        self.plan, self.layout, self.is_remote = plan, plan.layout, plan.remote
        self.convert = converter(plan.layout.dtype, decoding, dtype)
        self.item, self.out_item = plan.layout.dtype.itemsize, dtype.itemsize
        self.tables = tables_of(plan.pattern, self.out_item, self.convert.in_place)

    @property
    def refs(self) -> ChunkRefs:
        """Locations of the plan's chunks."""
        assert self.plan.refs is not None
        return self.plan.refs

    @property
    def box_strides(self) -> tuple[IntArray, IntArray]:
        """Strides in bytes of every box, in chunk and destination: ``(num_boxes, ndim)`` each."""
        strides = self.tables.box_strides
        if strides is None:
            strides = self.tables.box_strides = self._make_box_strides()
        return strides

    def _make_box_strides(self) -> tuple[IntArray, IntArray]:
        plan = self.plan
        strides = element_strides(self.layout, plan.cut.chunks[plan.boxes.chunk_row]) * self.item
        to = dest_strides(plan.out_shape) * self.out_item
        return strides * plan.boxes.gather(plan.pieces, "step"), to * plan.boxes.gather(plan.pieces, "sign")

    def fetch(
        self,
        task: Task,
        path: str,
        offset: int,
        buffers: list[ByteBuffer],
        chunks: Callable[[Places], Iterable[tuple[int, int]]],
        target: Target,
    ) -> None:
        """Read one range into ``buffers``, unless it was prefetched for ``target``.

        ``chunks``: gives the chunk row of each item of the read and the end of its bytes in the file, for messages.
        """
        try:
            data = target.arrived.pop(task, None)
            if isinstance(data, Exception):
                raise data
            if data is not None:
                scatter(data, buffers)
            else:
                files().read_into(path, offset, buffers)
        except FileNotFoundError as e:
            chunk, _ = next(iter(chunks(target.places)))
            raise MissingChunkError(
                f"{target.places.where(chunk)}: {path} is not there; it was there when the store was opened: copy it "
                "again"
            ) from e
        except ShortReadError as e:
            size, found = files().size(path), list(chunks(target.places))
            chunk = next((c for c, end in found if end > size), found[0][0])
            raise ShortReadError(f"{target.places.where(chunk)}: {e}") from e

    def copy(self, copies: Copies, read: int, buffer: ByteArray, target: Target, scratch: Scratch) -> None:
        """Do the copies of one read."""
        stored, dtype, out, convert = self.convert.stored, self.convert.dtype, target.out_bytes, self.convert.copy
        for i in range(copies.bounds[read], copies.bounds[read + 1]):
            shape = copies.shape[i]
            raw: Array = np.ndarray(shape, stored, buffer, copies.source[i], copies.source_strides[i])
            piece: Array = np.ndarray(shape, dtype, out, copies.dest[i], copies.dest_strides[i])
            convert(piece, raw, scratch)
        for gather in copies.gathers.get(read, ()):
            if self.convert.trivial:
                gather.run(buffer, out, stored)
                continue
            view, places = at_any_byte(buffer, stored, gather.shape, gather.source_strides, gather.source)
            values = view[places]
            converted = np.empty(values.shape, dtype)
            convert(converted, values, scratch)
            view, places = at_any_byte(out, dtype, gather.shape, gather.dest_strides, gather.dest)
            view[places] = converted

    def finish(self, begin: int, end: int, target: Target, scratch: Scratch) -> None:
        """Convert raw values in bytes ``[begin, end)`` of the destination to final ones."""
        if not self.convert.trivial:
            self.convert.finish(target.out[begin // self.out_item : end // self.out_item], scratch)

"""The last stage of blocks: plans which bytes of the files a block, or a sample, takes, and reads them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from scidata.core.cache import Cache
from scidata.core.memory import ArrayPool
from scidata.core.types import Selection
from scidata.grids.blocks.key import BlockKey, Rows, SampleRead
from scidata.grids.blocks.layout import BlockLayout
from scidata.grids.planner import Planner
from scidata.plan.array import MAX_PLAN_BYTES, PlanFamily
from scidata.read import Job, read_plans
from scidata.read.context import NO_READ, ReadStats
from scidata.read.threads import ReaderThreads


class SourceBlocks:
    """Reads blocks, and rows of samples, from the files. Thread-safe."""

    def __init__(self, layout: BlockLayout, planner: Planner, *, threads: ReaderThreads, memory: ArrayPool) -> None:
        self._layout, self._planner, self._threads, self._memory = layout, planner, threads, memory
        self._families: Cache[PlanFamily] = Cache(1024)
        self._jobs: Cache[Job] = Cache(MAX_PLAN_BYTES, "none")  # other epochs read the same blocks again

    def block(self, key: BlockKey, *, wait: bool = True) -> tuple[Rows, ReadStats]:
        """Return a block and the statistics of its read; there is no other rank to wait for."""
        job = self.job(key)
        values = self._memory.empty(job.out_shape, self._layout.fields[key.name].dtype, keep=2)
        return values, self.read([(job, values)])

    def job(self, key: BlockKey, which: Hashable = None, rows: Selection = (), shape: tuple[int, ...] = ()) -> Job:
        """Plan the read of a block, or find the plan of an earlier epoch; ``which``: of these rows of it."""

        def make() -> Job:
            layout, selection, whole = self._layout.selection_of(key)
            moving, out = self._layout.series.moving(layout.dims), whole if which is None else shape
            place = key.part, key.name, layout.geometry, which, out
            family = self._families.get_or_make(place, lambda: PlanFamily(moving, out))
            return self._planner.job(key.name, key.member, family, layout, selection if which is None else rows)

        return self._jobs.get_or_make((key, which), make, lambda job: job.num_bytes)

    def read(self, jobs: Sequence[tuple[Job, Rows]]) -> ReadStats:
        """Read plans into a buffer each."""
        return read_plans(jobs, executor=self._threads.executor())

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Read some fields of a sample into its buffers, all at once."""
        if not names:
            return NO_READ
        find = self._planner.jobs_of if sample.keep else self._planner.plan_fields
        part = sample.part if sample.patch is None else sample.patch.part
        jobs, shapes = find(sample.number, part, tuple(names)), part.shapes
        reads = []
        for name in names:
            values = sample.out[name]
            fits = values.shape == shapes[name]
            for job in jobs[name]:  # a dimension that the sample dropped has one row in the source
                reads.append((job, values.reshape(job.out_shape) if fits else values))
        return self.read(reads)

    def clear(self) -> None:
        """Forget plans, and free memory."""
        self._jobs.clear()
        self._memory.clear()
        self._planner.forget()

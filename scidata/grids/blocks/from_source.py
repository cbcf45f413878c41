"""The last stage of blocks: plans which bytes of the files a block, or a sample, takes, and reads them."""

from __future__ import annotations

from collections.abc import Sequence

from scidata.core.cache import Cache
from scidata.core.memory import ArrayPool
from scidata.grids.blocks.key import BlockKey, Rows, SampleRead
from scidata.grids.blocks.layout import BlockLayout
from scidata.grids.planner import Planner
from scidata.plan.array import MAX_PLAN_BYTES
from scidata.plan.family import PlanFamily
from scidata.read import Job, read_plans
from scidata.read.context import NO_READ, ReadStats
from scidata.read.threads import ReaderThreads


class SourceBlocks:
    """Reads blocks, and rows of samples, from the files. Thread-safe.

    Parameters
    ----------
    layout, planner, threads, memory
        The chain's.
    """

    def __init__(self, layout: BlockLayout, planner: Planner, *, threads: ReaderThreads, memory: ArrayPool) -> None:
        self._layout, self._planner, self._threads, self._memory = layout, planner, threads, memory
        self._families: Cache[PlanFamily] = Cache(256)
        self._jobs: Cache[Job] = Cache(MAX_PLAN_BYTES, "none")  # other epochs read the same blocks again

    def block(self, key: BlockKey, *, wait: bool = True) -> tuple[Rows, ReadStats]:
        """Return a block and the statistics of its read; there is no other rank to wait for."""
        job = self._jobs.get(key)
        if job is None:
            job = self._plan(key)
            self._jobs.put(key, job, job.plan.num_bytes)
        values = self._memory.empty(job.plan.out_shape, self._layout.fields[key.name].dtype, keep=2)
        return values, read_plans([(job, values)], executor=self._threads.executor())

    def _plan(self, key: BlockKey) -> Job:
        layout, selection, shape = self._layout.selection_of(key)
        moving = self._layout.series.moving(layout.dims)
        family = self._families.get_or_make((key.part, key.name, shape), lambda: PlanFamily(moving, shape))
        return self._planner.job(key.name, key.member, family, layout, selection)

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Read some fields of a sample into its buffers, all in one go."""
        if not names:
            return NO_READ
        jobs, shapes = self._planner.jobs_of(sample.number, sample.part, tuple(names)), sample.part.shapes
        reads = []
        for name in names:
            values = sample.out[name]
            fits = values.shape == shapes[name]
            for job in jobs[name]:  # a dimension that the sample dropped has one row in the source
                reads.append((job, values.reshape(job.plan.out_shape) if fits else values))
        return read_plans(reads, executor=self._threads.executor())

    def clear(self) -> None:
        """Forget plans, and free memory."""
        self._jobs.clear()
        self._memory.clear()
        self._planner.forget()

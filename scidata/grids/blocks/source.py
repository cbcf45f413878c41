"""Reading blocks of decoded rows: which part of an array each is, its plan, and the memory it is read into.

What is kept of them, and for whom: :mod:`scidata.grids.blocks.pool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.memory import ArrayPool
from scidata.core.types import ArrayLayout, Segment, Selection
from scidata.grids.blocks.on_node import NodeDecoder
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.blocks.trajectories import Together
from scidata.grids.parts import Field, Part
from scidata.grids.series import Series
from scidata.plan.array import MAX_PLAN_BYTES
from scidata.plan.family import PlanFamily
from scidata.read import Job, read_plans
from scidata.read.context import ReadStats
from scidata.read.threads import ReaderThreads


class BlockReader:
    """Reads blocks of a reader's fields. Thread-safe.

    Parameters
    ----------
    series, fields
        The reader's.
    sizes
        How large blocks are.
    node
        Decodes chunks together with the other ranks of the node.
    """

    def __init__(
        self,
        series: Series,
        fields: Mapping[str, Field],
        sizes: BlockSizes,
        *,
        threads: ReaderThreads,
        allow_missing: bool,
        node: NodeDecoder | None,
    ) -> None:
        self._series, self._fields, self._sizes = series, fields, sizes
        self._threads, self._allow_missing, self._node = threads, allow_missing, node
        self._memory = ArrayPool()
        self._families: Cache[PlanFamily] = Cache(256)
        self._jobs: Cache[Job] = Cache(MAX_PLAN_BYTES, "none")  # other epochs read the same blocks again

    @property
    def steps_per_block(self) -> Mapping[str, int]:
        """Steps of a block of each field; 1 where chunks share no decoding."""
        return self._sizes.steps_per_block

    def clear(self) -> None:
        """Forget plans, and let go of memory."""
        self._jobs.clear()
        self._memory.clear()

    def place_in(self, name: str, i: int, together: Together) -> tuple[slice, ...]:
        """Return where a trajectory lies in blocks that hold several."""
        at = self._series.trajectory_of(i)
        first = {dim: at[dim] - segment.start for dim, (segment,) in together.segments.items()}
        dims = self._fields[name].source_dims
        return tuple([slice(first[dim], first[dim] + 1) if dim in first else slice(None) for dim in dims])

    def selection_of(self, name: str, i: int, start: int, part: Part) -> tuple[ArrayLayout, Selection, tuple[int, ...]]:
        """Return what a block, which begins at a row of a file, is of the array, and its shape."""
        return self._selection_of(name, i, start, part, self._sizes.together(name, i, part))

    def _selection_of(
        self, name: str, i: int, start: int, part: Part, together: Together
    ) -> tuple[ArrayLayout, Selection, tuple[int, ...]]:
        dims, layout = self._fields[name].source_dims, self._series.layout_in(i, name)
        dim, runs = self._series.sample_dim, together.segments
        shape = [runs[d][0].count if d in runs else n for d, n in zip(dims, part.families[name].out_shape, strict=True)]
        space = {**part.segments, **runs}
        if dim not in dims:
            return layout, tuple(space[d] for d in dims), tuple(shape)
        axis = dims.index(dim)
        shape[axis] = count = min(self.steps_per_block[name], layout.shape[axis] - start)
        rows = (Segment(start=start, count=count),)
        return layout, tuple(rows if d == dim else space[d] for d in dims), tuple(shape)

    def read_block(
        self, name: str, i: int, start: int, part: Part, *, wait: bool = True
    ) -> tuple[npt.NDArray[Any], ReadStats]:
        """Read a block of a file, from its first row on; return what that took, too.

        Raises BusyError, ``wait`` being false, where another rank decodes it right now.
        """
        return self._read(name, i, start, part, self._sizes.together(name, i, part), wait=wait)

    def members_at_once(self, name: str, i: int, part: Part) -> tuple[int, ...]:
        """Return the trajectories that :meth:`read_blocks` reads."""
        return self._sizes.at_once(name, i, part).members

    def read_blocks(self, name: str, i: int, start: int, part: Part) -> tuple[dict[int, npt.NDArray[Any]], ReadStats]:
        """Read a block of each trajectory that the same chunks hold; return them by member, and what that took."""
        together = self._sizes.at_once(name, i, part)
        values, stats = self._read(name, together.member, start, part, together)
        return {each: values[self.place_in(name, each, together)] for each in together.members}, stats

    def _read(
        self, name: str, i: int, start: int, part: Part, together: Together, *, wait: bool = True
    ) -> tuple[npt.NDArray[Any], ReadStats]:
        field = self._fields[name]
        if self._node is not None and name in self._sizes.by_node and self._node.is_mine(part.position):
            layout, selection, shape = self._selection_of(name, i, start, part, together)
            values = self.empty(shape, field.dtype)
            if values.size:
                source, decoding = self._series.sources[i], field.decodings[i]
                return values, self._node.read(layout, selection, source, decoding, values, wait=wait)
        key = part.position, name, together.member, together.num, start
        job = self._jobs.get(key)
        if job is None:
            job = self._plan(name, i, start, part, together)
            self._jobs.put(key, job, job.plan.num_bytes)
        values = self.empty(job.plan.out_shape, field.dtype)
        return values, read_plans([(job, values)], executor=self._threads.executor())

    def _plan(self, name: str, i: int, start: int, part: Part, together: Together) -> Job:
        field, source = self._fields[name], self._series.sources[i]
        layout, selection, shape = self._selection_of(name, i, start, part, together)
        moving = self._series.moving(field.source_dims)
        family = self._families.get_or_make((part.position, name, shape), lambda: PlanFamily(moving, shape))
        plan = family.plan(layout, selection, source.locate)
        return Job(plan, source, field.decodings[i], allow_missing=self._allow_missing)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array for a block, in memory that earlier ones had."""
        values = self._memory.empty(shape, dtype)
        self._memory.max_free = max(self._memory.max_free, 2 * values.nbytes)
        return values

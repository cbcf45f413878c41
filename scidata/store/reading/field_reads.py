"""Fields of parts of samples: planned once, read with their ghosts, kept where other times have the same values."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Array, IntArray
from scidata.plan.array import MAX_PLAN_BYTES, ArrayPlan
from scidata.sources.access.fetches import run_each
from scidata.store.format.manifest import FieldInfo
from scidata.store.reading.numbering import Numbering
from scidata.store.reading.part import LocalTopology
from scidata.store.reading.rows import FieldPlan, GatherPlan, RowAccess, in_order, merge_ranges

_SHARED_BYTES = 128 << 20  # of fields without times, whose values are kept for the other times


class FieldReads:
    """Plans and reads fields of any part, given its rows. Thread-safe.

    ``infos, dtypes``: by the names that users type; dtypes as read, where values do not stay as they are decoded.
    ``with_ghosts``: whether the rows of ghosts are read, too.
    ``max_bytes``: bound of the plans, and of the values, that are kept, where it is below theirs.
    """

    def __init__(
        self,
        numbering: Numbering,
        infos: Mapping[str, FieldInfo],
        dtypes: Mapping[str, np.dtype[np.generic]],
        *,
        with_ghosts: bool,
        max_bytes: int,
    ) -> None:
        self._numbering, self._infos, self._dtypes, self._with_ghosts = numbering, infos, dtypes, with_ghosts
        self._plans: Cache[FieldPlan] = Cache(min(max_bytes, MAX_PLAN_BYTES), "none")
        self._shared: Cache[Array] = Cache(min(max_bytes, _SHARED_BYTES), "lru")

    def forget(self) -> None:
        """Release all plans and values."""
        self._plans.clear()
        self._shared.clear()

    def plans(self, access: RowAccess, name: str, index: int, topology: LocalTopology) -> list[ArrayPlan]:
        """Plan the rows of a field that a part has of a sample, as for a first read."""
        if topology.rows is None:
            return [self._plan(access, name, index, topology)[0]]
        return [plan for plan, _ in self._gather(access, name, index, topology.rows)]

    def read(self, access: RowAccess, names: Sequence[str], index: int, topology: LocalTopology) -> dict[str, Array]:
        """Read fields of a part: behind a URL together, so that they wait for round trips once."""
        if not self._numbering.store.is_remote:
            return {name: self._read(access, name, index, topology) for name in names}
        held = [name for name in names if topology.rows is None and self._is_held(name, index, topology)]
        found = {name: self._read(access, name, index, topology) for name in held}
        rest = [name for name in names if name not in found]
        alone = topology.rows is not None or any(self._is_kept(name, index, topology) for name in rest)
        plans = {name: None if alone else self._known(name, index, topology) for name in rest}
        known = {name: plan for name, plan in plans.items() if plan is not None}
        if len(known) < len(rest):  # sizes and indexes of files take round trips, too, before those of the values
            found |= self._side_by_side(rest, access, index, topology)
            return {name: found[name] for name in names}
        values = access.run_each([(plan.job, self._dtypes.get(name)) for name, plan in known.items()])
        for (name, plan), each in zip(known.items(), values, strict=True):
            found[name] = self._finished(each, name, plan, topology)
        return {name: found[name] for name in names}

    def _is_held(self, name: str, index: int, topology: LocalTopology) -> bool:
        """Whether the values are in memory, for all times."""
        return self._is_kept(name, index, topology) and self._shared.get(self._slot(name, index, topology)) is not None

    def _slot(self, name: str, index: int, topology: LocalTopology) -> tuple[int, int, str]:
        part = topology.index_maps[self._infos[name].entity].part
        return self._numbering.locate(index)[0], part, name

    def _side_by_side(
        self, names: Sequence[str], access: RowAccess, index: int, topology: LocalTopology
    ) -> dict[str, Array]:
        """Read each of some fields on a thread of its own."""
        own = [access.anew(access.empty) for _ in names]
        calls = [
            functools.partial(self._read, each, name, index, topology) for each, name in zip(own, names, strict=True)
        ]
        found = dict(zip(names, run_each(calls), strict=True))
        access.stats = sum((each.stats for each in own), access.stats)
        return found

    def _read(self, access: RowAccess, name: str, index: int, topology: LocalTopology) -> Array:
        if topology.rows is not None:
            gather, dim = self._gather(access, name, index, topology.rows), self._infos[name].entity_dim
            drawn = access.run_gather(gather, self._dtypes.get(name), dim=dim)
            back = in_order(topology.rows[self._infos[name].entity])[1]
            if back is not None:
                drawn = drawn.take(back, axis=dim)
            return self._shaped(drawn, name, self._numbering.shape(self._infos[name], index))
        if not self._is_kept(name, index, topology):
            return self._read_rows(access, name, index, topology)

        def make() -> Array:
            own = access.anew(np.empty)  # not in the memory of a batch
            values = self._read_rows(own, name, index, topology)
            access.stats += own.stats
            return values

        kept = self._shared.get_or_make(
            self._slot(name, index, topology), make, lambda values: values.nbytes, once=True
        )
        values = access.empty(kept.shape, kept.dtype)
        np.copyto(values, kept)
        return values

    def _is_kept(self, name: str, index: int, topology: LocalTopology) -> bool:
        """Whether other times have the same values, and they are few enough to be kept for those."""
        info = self._infos[name]
        if not self._numbering.is_shared(info, index):
            return False
        rows, dim = topology.index_maps[info.entity], self._numbering.entity_dim(info)
        shape = list(self._numbering.shape(info, index))
        shape[dim] = rows.num_local if self._with_ghosts else rows.num_owned
        return math.prod(shape) * np.dtype(self._dtypes.get(name)).itemsize <= self._shared.max_size

    def _read_rows(self, access: RowAccess, name: str, index: int, topology: LocalTopology) -> Array:
        """Read owned rows and ghosts."""
        found = self._field_plan(access, name, index, topology)
        return self._finished(access.run_each([(found.job, self._dtypes.get(name))])[0], name, found, topology)

    def _known(self, name: str, index: int, topology: LocalTopology) -> FieldPlan | None:
        part = topology.index_maps[self._infos[name].entity].part
        return self._plans.get((index % self._numbering.num_samples, part, name))

    def _field_plan(self, access: RowAccess, name: str, index: int, topology: LocalTopology) -> FieldPlan:
        """Plan owned rows and ghosts, unless they are planned."""
        found = self._known(name, index, topology)
        if found is None:
            info = self._infos[name]
            plan, pick = self._plan(access, name, index, topology)
            found = FieldPlan(access.job(plan), pick, self._numbering.shape(info, index))
            slot = index % self._numbering.num_samples, topology.index_maps[info.entity].part, name
            self._plans.put(slot, found, found.num_bytes())
        return found

    def _finished(self, values: Array, name: str, found: FieldPlan, topology: LocalTopology) -> Array:
        """Drop the dims that a sample does not have, and the rows that were read between ghosts."""
        info, pick = self._infos[name], found.pick
        values = self._shaped(values, name, found.shape)
        if pick is None:
            return values
        lead: tuple[Any, ...] = (slice(None),) * self._numbering.entity_dim(info)
        num = topology.index_maps[info.entity].num_owned
        # ghosts move up in place; the rows between them are left behind at the end of the buffer
        values[(*lead, slice(num, num + len(pick)))] = values[(*lead, num + pick)]
        return np.ascontiguousarray(values[(*lead, slice(0, num + len(pick)))])

    def _shaped(self, values: Array, name: str, shape: tuple[int, ...]) -> Array:
        """Drop the dims that a sample does not have."""
        info = self._infos[name]
        dim = self._numbering.entity_dim(info)
        return values.reshape(*shape[:dim], values.shape[info.entity_dim], *shape[dim + 1 :])

    def _gather(self, access: RowAccess, name: str, index: int, rows: Mapping[str, IntArray]) -> GatherPlan:
        """Plan the drawn rows of a field."""
        info = self._infos[name]
        others = self._numbering.segments(info, index)
        return access.plan_gather(info.path, in_order(rows[info.entity])[0], dim=info.entity_dim, others=others)

    def _plan(
        self, access: RowAccess, name: str, index: int, topology: LocalTopology
    ) -> tuple[ArrayPlan, IntArray | None]:
        """Plan owned rows and ghosts in one; with it where the ghosts lie among the rows after the owned ones."""
        info = self._infos[name]
        rows = topology.index_maps[info.entity]
        start, stop = rows.owned
        ghosts = rows.ghosts if self._with_ghosts else rows.ghosts[:0]
        runs = merge_ranges(ghosts, ghosts + 1)
        starts, stops = np.append(start, runs.starts), np.append(stop, runs.stops)
        others = self._numbering.segments(info, index)
        return access.plan(info.path, starts, stops, dim=info.entity_dim, others=others), runs.pick

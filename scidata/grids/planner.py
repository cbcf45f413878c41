"""Plans any rank's part of any sample of a gridded data set. No I/O, but for finding where chunks lie."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from operator import mul, sub
from typing import Any, NamedTuple

from scidata.core.bounds import num_rows_of
from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, BufferSpec, FindChunk, Segment, Segments, Selection
from scidata.core.urls import Url, is_url
from scidata.grids.partition import GridPartition
from scidata.grids.parts import Field, First, Jobs, Part
from scidata.grids.sample_rows import Places, Runs, SampleRows
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps
from scidata.plan.array import MAX_PLAN_BYTES, PlanFamily
from scidata.plan.spans import dest_strides
from scidata.read import Job
from scidata.read.places import expecting
from scidata.sources.access.fetches import run_each

_LIE_BYTES = 1 << 10  # about: of one field in one file
_MAX_FIRSTS = 256  # of fields planned together: places of a sample's rows in their chunks, in kinds of files


class _Lie(NamedTuple):
    """Fields in one member of a series whose chunks of a sample begin alike.

    - ``fields``: each one's name, layout, function that finds single chunks, and the first field that is cut and
      decoded as it is.
    - ``kind``: a number that members have in common whose arrays are cut, converted and decoded alike.
    - ``dim``, ``size``: that of samples, and how long chunks are along it.
    - ``strides``: by how much the numbers of chunks differ that adjoin along each dimension.
    - ``chunks``, ``inside``: of the other dimensions: the chunk where a read begins, and the row in it.
    """

    fields: list[tuple[str, ArrayLayout, FindChunk | None, int]]
    kind: int
    is_raw: bool
    dim: int
    size: int
    strides: tuple[int, ...]
    chunks: tuple[int, ...]
    inside: tuple[int, ...]


def _facts_of(layout: ArrayLayout) -> tuple[tuple[int, ...], str]:
    """Return the strides of chunks' numbers, and what is alike in arrays that are cut and converted alike."""
    found: tuple[tuple[int, ...], str] | None = layout.derived.get(_facts_of)
    if found is None:
        strides = tuple(dest_strides(layout.num_chunks).tolist())
        text = repr((layout.dims, layout.geometry, layout.dtype.str, layout.codecs))
        found = layout.derived[_facts_of] = strides, text
    return found


class Planner:
    """Plans the reads of any rank of a domain, for any sample. Thread-safe; pickles without its plans."""

    def __init__(
        self, series: Series, fields: Mapping[str, Field], *, partition: GridPartition, steps: FieldSteps,
        sample_rows: SampleRows, allow_missing: bool,
    ) -> None:  # fmt: skip
        self._series, self._fields, self._partition = series, fields, partition
        self._steps, self._sample_rows, self.allow_missing = steps, sample_rows, allow_missing
        self._parts: dict[tuple[int, ...], Part] = {}
        self._groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}  # of fields that are asked for
        self._lies: Cache[list[_Lie]] = Cache(MAX_PLAN_BYTES)  # by member and group
        self._kinds: dict[Hashable, int] = {}
        self._jobs: Cache[Jobs] = Cache(MAX_PLAN_BYTES, "none")

    @functools.cached_property
    def is_remote(self) -> bool:
        """Whether the files lie behind URLs."""
        return isinstance(self._series.files[0].path, Url)

    def forget(self) -> None:
        """Drop all plans: the files may be others when they are opened again."""
        self._jobs.clear()
        self._lies.clear()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_parts": {}}

    # -- a rank's part -------------------------------------------------------------------------------------------

    def buffer_specs(self, coordinate: Mapping[str, int]) -> dict[str, BufferSpec]:
        """Return shape and dtype of each field's local part with halo, for the rank at ``coordinate``."""
        shapes = self.part_of(coordinate).shapes
        return {name: BufferSpec(shape=shapes[name], dtype=field.dtype) for name, field in self._fields.items()}

    def part_of(self, coordinate: Mapping[str, int]) -> Part:
        """Return the part of the rank at ``coordinate``, the same object each time: a rank reads one."""
        position = tuple(map(coordinate.__getitem__, self._partition.axis_sizes))
        part = self._parts.get(position)
        if part is None:  # setdefault is atomic, so that all threads have the same
            part = self._parts.setdefault(position, self.part_of_cut(self._partition, coordinate))
        return part

    def part_of_cut(self, cut: GridPartition, coordinate: Mapping[str, int]) -> Part:
        """Return the part that the rank at ``coordinate`` has of another cut."""
        numbers = {self._series.sample_dim, *self._series.outer}
        rows = {dim: cut.segments(dim, coordinate) for dim in cut.sizes if dim not in numbers}
        return self.make_part(tuple(map(coordinate.__getitem__, cut.axis_sizes)), rows)

    def make_part(self, position: tuple[int, ...], segments: Mapping[str, Segments]) -> Part:
        """Return the part that has these rows of each dimension but those of samples."""
        sizes: dict[str | None, int] = {d: num_rows_of(rows) for d, rows in segments.items()}
        families, shapes = {}, {}
        for name, field in self._fields.items():
            sizes[self._series.sample_dim] = self._steps.num(name)
            shapes[name] = tuple([sizes[d] for d in field.dims])
            shape = tuple([sizes.get(d, 1) for d in field.source_dims])
            families[name] = PlanFamily(self._series.moving(field.source_dims), shape)
        firsts = Cache[list[First]](_MAX_FIRSTS)
        return Part(position=position, segments=segments, shapes=shapes, families=families, firsts=firsts)

    # -- a sample ------------------------------------------------------------------------------------------------

    def number(self, index: int) -> int:
        """Return a sample's number from 0 on."""
        num = self._sample_rows.num
        if not -num <= index < num:
            steps = self._steps.every
            raise IndexError(
                f"{self._series.files[0].path}: sample {index} is out of range: there are {num} samples"
                + (f" with steps {steps}" if steps != (0,) else "")
            )
        return index % num

    def places_of(self, index: int) -> Places:
        """Return where a sample's rows lie."""
        return Places(self._series, self._steps, self._sample_rows, self.number(index))

    def selections(self, name: str, places: Places, part: Part) -> list[tuple[int, ArrayLayout, Selection]]:
        """Return the reads of a field: for each file involved its position, layout and selection."""
        dim, dims = self._series.sample_dim, self._fields[name].source_dims
        fixed: Runs = [(places.member if self._series.outer else 0, ())]
        found = []
        for i, rows in places.of(name) if dim in dims else fixed:
            space = self._series.space(i, part.segments)
            found.append((i, self._series.layout_in(i, name), tuple([rows if d == dim else space[d] for d in dims])))
        return found

    def jobs_of(self, index: int, part: Part, names: tuple[str, ...]) -> Jobs:
        """Plan some fields, or find the plans of an earlier epoch."""
        jobs = self._jobs.get((part, index, names))
        if jobs is None:
            jobs = self.plan_fields(index, part, names)
            size = sum([job.num_bytes for each in jobs.values() for job in each])
            self._jobs.put((part, index, names), jobs, size)
        return jobs

    def plan_fields(self, index: int, part: Part, names: Sequence[str]) -> Jobs:
        """Plan fields, those of the same steps together; behind URLs side by side: finding chunks takes round trips."""
        places, found = self.places_of(index), Jobs()
        groups = self._groups.get(tuple(names)) or self._group(tuple(names))
        for group in groups:
            for i, rows in places.of(group[0]):
                for lie in self._lies.get((i, group)) or self._find_lies(i, group):
                    self._plan_alike(lie, i, rows, part, found)
        if len(found) < len(names):
            others = [name for name in names if name not in found]
            plans = [functools.partial(self._plan_field, name, places, part) for name in others]
            found |= zip(others, run_each(plans) if self.is_remote else [plan() for plan in plans], strict=True)
        return found

    def _group(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        by_steps, dim = dict[tuple[int, ...], tuple[str, ...]](), self._series.sample_dim
        for name in names:
            has_edges = any(self._series.layouts(f)[name].edges for f in self._series.kinds)
            if dim in self._fields[name].source_dims and not self.is_remote and not has_edges:
                by_steps[self._steps.of(name)] = (*by_steps.get(self._steps.of(name), ()), name)
        groups = self._groups[names] = list(by_steps.values())
        return groups

    def _plan_field(self, name: str, places: Places, part: Part) -> list[Job]:
        selections = self.selections(name, places, part)
        return [self.job(name, i, part.families[name], layout, rows) for i, layout, rows in selections]

    def _plan_alike(self, lie: _Lie, i: int, rows: tuple[Segment, ...], part: Part, found: Jobs) -> None:
        """Plan reads of fields in the ``i``-th member; where their chunks lie alike, by the tables of other reads."""
        # Of chunks of 4 steps, the samples 2, 6, 10, … take the same rows of other chunks: all that differs is where
        # these lie. Of raw chunks, 3 is like 2, too, a row further on.
        first, dim, source = rows[0], lie.dim, self._series.sources[i]
        chunk, row = divmod(first.start, lie.size)
        moves = lie.is_raw and len(rows) == 1 and row + first.count <= lie.size
        runs = [(s.start - first.start, s.count, s.offset) for s in rows] if len(rows) > 1 else ()
        key = lie.kind, None if moves else row, first.count, first.offset, *runs
        chunks = (*lie.chunks[:dim], chunk, *lie.chunks[dim:])
        inside = (*lie.inside[:dim], row, *lie.inside[dim:])
        firsts = part.firsts.get(key) or part.firsts.put(key, [])
        begins: tuple[int, ...] | None = None
        for k, (name, layout, find, twin) in enumerate(lie.fields):
            job, is_new = None, k >= len(firsts)
            like = firsts[twin if is_new else k] if not is_new or twin < k else None
            if find is not None and like is not None:
                if like[1] is not begins:  # of most fields it is the same
                    begins, by = like[1], tuple(map(sub, chunks, like[1]))
                    num = sum(map(mul, by, lie.strides))
                    inner = () if inside == like[2] else tuple(map(sub, inside, like[2]))
                job = like[0].moved(source, layout, find, by, inner, num)
            if job is None or like is None:
                space = self._series.space(i, part.segments)
                selection = tuple([rows if j == dim else space[d] for j, d in enumerate(layout.dims)])
                job = self.job(name, i, part.families[name], layout, selection)
                like, is_new = (job, chunks, inside), True
            if is_new:
                firsts[k : k + 1] = [like]
            found.setdefault(name, []).append(job)

    def _find_lies(self, i: int, names: tuple[str, ...]) -> list[_Lie]:
        source, rows, sample_dim = self._series.sources[i], self._series.trajectory_of(i), self._series.sample_dim
        finder = None if is_url(source.path) else getattr(source, "finder", None)
        groups = dict[tuple[Any, ...], dict[str, ArrayLayout]]()
        for name in names:
            layout = self._series.layout_in(i, name)
            at = [divmod(rows.get(d, 0), size) for d, size in zip(layout.dims, layout.chunks, strict=True)]
            dim = layout.dims.index(str(sample_dim))
            del at[dim]
            strides, _ = _facts_of(layout)
            place = dim, layout.chunks[dim], strides, tuple([a for a, _ in at]), tuple([b for _, b in at])
            groups.setdefault((not layout.codecs, *place), {})[name] = layout
        found = []
        for (is_raw, dim, size, strides, chunks, inside), layouts in groups.items():
            facts = [(_facts_of(each)[1], repr(self._fields[name].decodings[i])) for name, each in layouts.items()]
            key = *layouts, *facts, () if is_raw else inside
            kind = self._kinds.setdefault(key, len(self._kinds))
            fields = [
                (name, each, None if finder is None else finder(each), facts.index(alike))
                for (name, each), alike in zip(layouts.items(), facts, strict=True)
            ]
            found.append(_Lie(fields, kind, is_raw, dim, size, strides, chunks, inside))
        return self._lies.put((i, names), found, _LIE_BYTES * len(names))

    def job(self, name: str, i: int, family: PlanFamily, layout: ArrayLayout, selection: Selection) -> Job:
        """Plan a read of a field in the file of the ``i``-th member."""
        source = self._series.sources[i]
        plan = family.plan(layout, selection, expecting(source))
        return Job(plan, source, self._fields[name].decodings[i], allow_missing=self.allow_missing)

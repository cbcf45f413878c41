"""Reads any rank's part of any sample of a gridded data set: sources, cut and plans put together.

No torch and no communication. A rank is named by its position along the mesh axes, so one process can plan, or read,
the part of any rank of any world size.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scidata.core.apart import check_apart
from scidata.core.bounds import rows_of
from scidata.core.grid_cut import COLUMNS, GridCut
from scidata.core.options import DEFAULTS, ReadOptions
from scidata.core.sample_source import SampleSource
from scidata.core.types import AnyArray, ArrayLayout, BufferSpec, IntArray, Selection, Source
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, near_matches
from scidata.grids.blocks.chain import BlockChain
from scidata.grids.blocks.key import SampleRead
from scidata.grids.blocks.node_shares import NodeRanks, NodeShares
from scidata.grids.blocks.pool import BlockRead
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.choices import choose, choose_split, largest_chunks, row_weights, sizes_of
from scidata.grids.gaps import rows_of_samples, without_missing
from scidata.grids.labels import Labels, chosen_rows
from scidata.grids.partition import GridPartition, make_partition, resolve_dim
from scidata.grids.parts import Field, Jobs, Part
from scidata.grids.passes import GridPass
from scidata.grids.planner import Planner
from scidata.grids.series import Series
from scidata.grids.staggered import CentredSource
from scidata.grids.steps import FieldSteps, checked_steps
from scidata.plan.totals import ReadPlan
from scidata.read.arrays import read_array
from scidata.read.context import ReadStats
from scidata.read.disk_cache import DiskCache, make_cache
from scidata.read.threads import ReaderThreads
from scidata.sources import open_source
from scidata.sources.cf import decoding_of
from scidata.sources.indexed import IndexedFiles
from scidata.sources.kinds import dim_roles
from scidata.sources.paths import expand_paths
from scidata.sources.unfinished import check_finished


class GridReader:
    """A gridded data set, cut for a domain.

    - ``axis_sizes``: ranks along each domain axis, in mesh order: ``{"domain": 4}``, ``{"h": 2, "w": 2}``, or ``{}``
      for one rank.
    - ``memory_bytes``: the most decoded rows that are kept for other samples where ``options.pool_bytes`` leaves it
      open, and no more than those need: see :class:`~scidata.grids.blocks.chain.BlockChain`.
    - ``node``: the ranks that share the decoding of chunks; None: each decodes its own.
    - ``first``, ``files``: the first file, or all of them, where they are open already.
    - ``partition``, ``cut``: how the grid is cut over the ranks, and how a sample is: the same, unless samples are
      patches.

    Raises SciDataError: whatever metadata alone shows to be wrong; the same on every rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        options: ReadOptions = DEFAULTS,
        *,
        axis_sizes: Mapping[str, int] | None = None,
        memory_bytes: int = 0,
        node: NodeRanks | None = None,
        first: Source | None = None,
        files: IndexedFiles | None = None,
    ) -> None:
        _check(options)
        self._again = functools.partial(type(self), axis_sizes=axis_sizes, memory_bytes=memory_bytes, node=node)
        self.options, self.paths = options, expand_paths(path)
        disk = _disk_of(options, self.paths)
        opened, plain = functools.partial(_opened, options=options, first=first), not options.destagger
        look = plain and not options.allow_external
        self._files = files = files or IndexedFiles(self.paths, options.cache_dir, opened, look=look)
        self.choice = choose(files[0], options)
        self.fields, self.sample_dims = self.choice.fields, self.choice.sample_dims
        self.sample_dim = self.choice.sample_dim
        self.series = Series(files, self.fields, self.sample_dim, outer=self.sample_dims[:-1])
        files.keep(read_array)
        layouts = {name: self.series.combined(name) for name in self.fields}
        sizes = sizes_of(layouts.values())
        crop = chosen_rows(self.series, options.isel or {}, options.sel or {}, sizes)
        crop, missing = without_missing(self.series, crop, sizes, options.gaps)
        options = self._resolved(options, sizes, crop)
        self.field_steps = checked_steps(options.steps, self.sample_dim, {name: x.dims for name, x in layouts.items()})
        self.chunks = largest_chunks(layouts.values())
        self.partition, self.cut = self._cuts(files[0], options, sizes, crop, axis_sizes or {})
        self.sample_rows, gaps = rows_of_samples(self.series, self.partition.selected, self.field_steps, options.gaps)
        self.num_samples = self.sample_rows.num  # for which every step exists
        self.gap_texts = tuple(filter(None, (missing, gaps)))
        self.labels = Labels(self.series)
        single = {dim for dim, rows in crop.items() if isinstance(rows, int | np.integer)}
        self._dropped = single.union(self.sample_dims[:-1])
        self._threads = ReaderThreads(options.num_threads)
        self._fields = {name: self._field(name) for name in self.fields}
        self.planner = Planner(
            self.series, self._fields, partition=self._kept_cut(), steps=self.field_steps, sample_rows=self.sample_rows,
            allow_missing=options.allow_missing,
        )  # fmt: skip
        self.chain = BlockChain(
            self.series, self._fields, self.planner, steps=self.field_steps, selected=self.partition.selected,
            threads=self._threads, pool_bytes=memory_bytes if options.pool_bytes is None else options.pool_bytes,
            pool_fits=options.pool_bytes is None, disk=disk, shares=None if node is None else self.node_shares(node),
            share_of_patch=self._share_of_patch(),
        )  # fmt: skip
        self.pool = self.chain.pool

    def _resolved(self, options: ReadOptions, sizes: Mapping[str, int], crop: Mapping[str, Any]) -> ReadOptions:
        """Return options that the grid's dims complete."""
        return options

    def _kept_cut(self) -> GridPartition:
        """Return the cut whose rows, of one rank, are kept for other samples."""
        return self.partition

    def _share_of_patch(self) -> Callable[[str], tuple[float, int]] | None:
        return None

    def _cuts(
        self, head: Source, options: ReadOptions, sizes: Mapping[str, int], crop: Mapping[str, Any],
        axis_sizes: Mapping[str, int],
    ) -> tuple[GridPartition, GridPartition]:  # fmt: skip
        weights = options.weights
        split = choose_split(head, self.choice, options.shard, sizes=sizes, crop=crop, axis_sizes=axis_sizes)
        costs = row_weights(head, weights, split, crop) if isinstance(weights, str) else weights
        made = replace(options, isel=crop, shard=dict[str | int, str](split.items()), weights=costs)
        layouts = [layout for layout in map(self.series.combined, self.fields) if layout.edges]
        edges = {dim: x.chunk_grid(k) for x in layouts for k, dim in enumerate(x.dims) if x.edges[k]}
        partition = make_partition(sizes, made, axis_sizes=axis_sizes, chunks={**self.chunks, **edges})
        self._check_halos(partition)
        return partition, partition

    def _check_halos(self, cut: GridPartition) -> None:
        for dim in self.sample_dims:
            if dim in cut.halo:
                raise ConfigError(f"{dim!r} is the sample dimension and cannot have a halo; use steps")
        cut.check_halos()

    def view(self, **changed: Any) -> GridReader:
        """Return a reader of the same open files, cut alike, with other ``fields`` or ``steps``."""
        cut = self.cut
        same: dict[str, Any] = {"sample_dim": self.sample_dims or False, "weights": None, "align": 1}
        if cut.axis_of_dim:
            same |= {"shard": cut.axis_of_dim, "bounds": {dim: cut.bounds[dim].tolist() for dim in cut.axis_of_dim}}
        return self._again(self.paths, replace(self.options, **same, **changed), files=self._files)

    def node_shares(self, node: NodeRanks) -> NodeShares:
        """Return which chunks several ranks of a node share."""
        return NodeShares(self._kept_cut(), self.sample_dim, node)

    # -- the data set --------------------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[Source]:
        """The opened stores, in order; of several trajectories in a file, once for each."""
        return self.series.sources

    def layout(self, name: str) -> ArrayLayout:
        """Return a field's layout in the first file."""
        return self.series.layout_in(0, self._known(name))

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample; several steps keep the sample dimension."""
        return self._fields[self._known(name)].dims

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample."""
        dims, sizes, num = self.dims(name), self.cut.sizes, self.field_steps.num(name)
        return tuple(num if dim == self.sample_dim else sizes[dim] for dim in dims)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype that a field is read as."""
        return self._fields[self._known(name)].dtype

    def coordinate(self, dim: str) -> AnyArray | None:
        """Return the selected values along a dimension, or None if it has no coordinate variable."""
        dim = resolve_dim(dim, list(self.partition.sizes), "coordinate")
        values = self.series.coordinate(dim)
        if values is None:
            return None
        return values[rows_of(self.partition.selected[dim])]

    def grid_cut(self) -> GridCut:
        """Return the cut of longitudes and latitudes, or x and y; raises ConfigError where other dims are split."""
        split = {axis: dim for dim, axis in self.partition.axis_of_dim.items()}
        roles, dims = dim_roles(self.sources[0], list(split.values())), []
        for dim in map(split.__getitem__, self.partition.axis_sizes):
            values, column = self.coordinate(dim), COLUMNS.get(roles.get(dim))
            if values is None or column is None:
                raise ConfigError(f"cut_like: {self.paths[0]} is split along {dim!r}, which has no coordinate x or y")
            steps = np.abs(np.diff(values))
            wraps = column == 0 and steps.sum() + 1.5 * steps.max(initial=0) >= 360
            dims.append((column, values, self.partition.bounds[dim], bool(wraps)))
        return GridCut.of(dims)

    def sample_labels(self, index: int, step: int | None = None) -> dict[str, AnyArray]:
        """Return the labels of a sample, or of one of its steps, by dim; ``"u_time"`` of fields with other steps."""
        steps = self.field_steps if step is None else FieldSteps(every=(step,), by_field={})
        return self.labels.of_sample(self._rows_of(index, steps), steps)

    def _rows_of(self, index: int, steps: FieldSteps) -> list[int]:
        return list(map(self.sample_rows.start_of(self.planner.number(index)), steps.every))

    def steps_of(self, name: str) -> tuple[str | None, tuple[int, ...]]:
        """Return the dimension of steps, and those that samples have of a field: none of static ones."""
        return self.sample_dim, () if name in self.static_fields else self.field_steps.of(name)

    def sample_keys(self, on: str) -> AnyArray:
        """Return each sample's value of an array on dims of samples, ``(num,)``: at the step 0, else at the first."""
        steps = self.field_steps.every
        return self.labels.of_samples(on, self.sample_rows.at(0 if 0 in steps else steps[0]))

    def sources_of(self, index: int, step: int | None = None) -> tuple[SampleSource, ...]:
        """Return file, row and label of each step of a sample, or of one."""
        steps = self.field_steps if step is None else FieldSteps(every=(step,), by_field={})
        return self.labels.sources_of(self._rows_of(index, steps))

    def fingerprint(self) -> str:
        """Return a digest of fields, shapes, dtypes, crop, steps, and the labels of the sample dimension.

        Not of where the data lie, so that they may move; nor of their values, which would have to be read. Of sources
        that have revisions (Icechunk) also those, since ranks that open at different times could see different ones.
        """
        revisions = [found for x in self.series.examples if (found := getattr(x, "revision", None)) is not None]
        labels, selected = self.coordinate(self.sample_dim) if self.sample_dim else None, self.partition.selected
        content: dict[str, object] = {
            "fields": {name: (self.global_shape(name), str(self.dtype(name))) for name in self.fields},
            "samples": self.num_samples,
            "steps": self.field_steps.as_json(),
            "coordinate": None if labels is None else hashlib.sha256(str(labels.tolist()).encode()).hexdigest(),
            "selected": {dim: [(s.start, s.count, s.step) for s in segments] for dim, segments in selected.items()},
        } | ({"revisions": revisions} if revisions else {})
        if len(self.sample_dims) > 1:
            content["sample_dims"] = self.sample_dims
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def blocks(self) -> IntArray:
        """Return which samples share chunks, ``(num_samples,)``: see :meth:`scidata.data.ShardedDataset.blocks`."""
        return self._numbers(lambda sizes: sizes.steps_in_order)

    def stretches(self) -> IntArray:
        """Return which samples are of blocks in a row, ``(num_samples,)``: see :class:`scidata.data.ShardedDataset`."""
        return self._numbers(lambda sizes: sizes.steps_in_stretch)

    def _numbers(self, size_of: Callable[[BlockSizes], int]) -> IntArray:
        if self.sample_dim is None:
            return np.zeros(1, np.int64)
        sizes, rows = self.chain.sizes, self.sample_rows.at(min(self.field_steps.every))
        return sizes.numbers_of(rows, size_of(sizes))

    def block_bytes(self, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return the decoded bytes that a rank's sample, and a block of samples, share with others; 0 for one step."""
        sizes = self.chain.sizes.of(self.part_of(coordinate))
        return sizes.bytes_of_sample, sizes.bytes_of_block

    @functools.cached_property
    def static_fields(self) -> tuple[str, ...]:
        """The fields that are the same in all samples: those without any of the dimensions that number them."""
        moving = self._moving_dims()
        return tuple(name for name in self.fields if moving and not moving & set(self._fields[name].source_dims))

    def _moving_dims(self) -> set[str]:
        return set(self.sample_dims)

    def buffer_specs(self, coordinate: Mapping[str, int]) -> dict[str, BufferSpec]:
        """Return shape and dtype of each field's local part with halo, for the rank at ``coordinate``."""
        return self.planner.buffer_specs(coordinate)

    def _known(self, name: str) -> str:
        if name not in self._fields and name not in self.fields:
            raise UnknownNameError(f"{self.paths[0]}: no field {name!r}{near_matches(name, self.fields)}")
        return name

    def _field(self, name: str) -> Field:
        layout = self.series.combined(name)
        dtype = None if self.options.dtype is None else np.dtype(self.options.dtype)
        found = self.series.of_files(
            lambda f: decoding_of(self.series.layouts(f)[name], dtype) if self.options.decodes else None
        )
        dtypes = {d.dtype if d is not None else layout.dtype.newbyteorder("=") for d in found}
        if len(dtypes) > 1:
            raise FieldMismatchError(
                f"{self.paths[0]}: field {name!r} decodes to {sorted(map(str, dtypes))} in different files; "
                "ask for one with dtype"
            )
        several = self.field_steps.num(name) > 1
        dims = tuple(d for d in layout.dims if d not in self._dropped and (several or d != self.sample_dim))
        return Field(dims=dims, source_dims=layout.dims, dtype=dtypes.pop(), decodings=self.series.by_file(found))

    # -- planning ------------------------------------------------------------------------------------------------

    def part_of(self, coordinate: Mapping[str, int]) -> Part:
        """Return the part of the rank at ``coordinate``."""
        return self.planner.part_of(coordinate)

    def selections(
        self, name: str, index: int, coordinate: Mapping[str, int]
    ) -> list[tuple[int, ArrayLayout, Selection]]:
        """Return the reads of a field: for each file involved its position, layout and selection."""
        planner = self.planner
        return planner.selections(name, planner.places_of(index), planner.part_of(coordinate))

    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for the ``rank``-th rank of the domain (see :meth:`GridPartition.coordinate`)."""
        jobs = self._jobs_of(index, rank, epoch)
        fields = {name: tuple([job.exact_plan() for job in each]) for name, each in jobs.items()}
        return ReadPlan(index=index, rank=rank, fields=fields)

    def _jobs_of(self, index: int, rank: int, epoch: int) -> Jobs:
        return self.planner.jobs_of(index, self.part_of(self.partition.coordinate(rank)), self.fields)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_into(
        self, index: int, out: Mapping[str, AnyArray], coordinate: Mapping[str, int], *, once: bool = False,
        epoch: int = 0,
    ) -> ReadStats:  # fmt: skip
        """Read one rank's part of a sample into buffers as :meth:`buffer_specs`, or some of them. Thread-safe.

        ``once``: fields that are the same in other samples are not kept in memory for them; the caller keeps them.
        ``epoch`` matters where places are drawn.
        """
        part = self.planner.part_of(coordinate)
        return self.pool.read_into(SampleRead(part, index, out, once), [name for name in self.fields if name in out])

    def shared_reads(self, index: int, coordinate: Mapping[str, int]) -> list[BlockRead]:
        """Return the blocks that one rank's part of a sample shares with others; none if there is no room."""
        return self.pool.shared_reads(self.part_of(coordinate), index)

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> GridPass:
        """Return a pass over all rows of a field that some samples have, of one rank's own part."""
        return GridPass(
            name, self._fields[self._known(name)], series=self.series, partition=self.partition,
            sample_rows=self.sample_rows, samples=samples, coordinate=self.partition.coordinate(rank),
            threads=self._threads, allow_missing=self.options.allow_missing,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads and close the files; the next read starts them again."""
        self._threads.close()
        self.pool.clear()
        self.series.close()


def _check(options: ReadOptions) -> None:
    if options.by_node and options.pool_bytes == 0:
        raise ConfigError("decode='node' keeps what was decoded in the pool, of which pool_bytes=0 leaves none")
    if options.ghosts is not None:
        raise ConfigError(f"ghosts={options.ghosts!r}: the halo of a grid is always read from disk; leave it out")
    if options.subsample is not None:
        raise ConfigError(f"subsample={options.subsample}: grids are not drawn from; crop or stride them with isel")
    options.refuse("subsample_block", "subsample_seed", why="means nothing for grids, which are not drawn from")


def _opened(path: str, *, options: ReadOptions, first: Source | None) -> Source:
    """Open a file, unless it is the first, which is open; refuse one that is not written to its end."""
    is_open = first is not None and first.path == path
    source = first if is_open else open_source(path, allow_external=options.allow_external)
    assert source is not None
    if not options.allow_missing:
        check_finished(source)
    return CentredSource(source, allow_missing=options.allow_missing) if options.destagger else source


def _disk_of(options: ReadOptions, paths: Sequence[str]) -> DiskCache | None:
    if options.cache_dir is None:
        return None
    disk = make_cache(options.cache_dir, options.cache_disk_bytes)
    check_apart(disk.directory, paths, "the cache", may_hold=True)
    return disk

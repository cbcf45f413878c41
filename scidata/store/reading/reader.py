"""Reads any rank's part of any sample of a partitioned store. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scidata.core.bounds import num_rows_of, segments_of_slice
from scidata.core.checks import names_of, refuse
from scidata.core.options import DEFAULTS, ONLY_GRIDS, ReadOptions
from scidata.core.passes import PASS_BYTES, FieldPass, merged_blocks
from scidata.core.types import Array, BoolArray, IntArray
from scidata.core.urls import local_path
from scidata.errors import ConfigError
from scidata.meshes.hetero import is_relation
from scidata.meshes.order.cuts import balanced_bounds, equal_bounds
from scidata.meshes.order.shuffle import leaf_rows_of
from scidata.plan.array import ArrayPlan
from scidata.read.context import ReadStats
from scidata.read.disk_cache import make_cache
from scidata.store.format.manifest import StoredMoments
from scidata.store.format.node_sets import folder_of_edges
from scidata.store.format.places import join
from scidata.store.format.store import Store, open_store
from scidata.store.reading.base import PartReader, sound
from scidata.store.reading.choices import check_subsample, checked_ghosts, checked_halo, checked_layers, named_fields
from scidata.store.reading.cuts import MEASURED, PartCosts, bounds_of_sample, check_cut, checked_weights, cut_sample
from scidata.store.reading.numbering import number_samples
from scidata.store.reading.part import SamplePart
from scidata.store.reading.rows import RowAccess


class StorePass(FieldPass):
    """One part's rows of one field, over some samples; see :class:`~scidata.core.passes.FieldPass`.

    Each time of a stored sample counts once; a field without times once a stored sample.
    """

    def __init__(
        self, reader: StoreReader, name: str, samples: IntArray, part: int, max_bytes: int = PASS_BYTES
    ) -> None:
        self._reader, self.name, self._part, info, numbering = reader, name, part, reader.info(name), reader.numbering
        self._info, self.dtype, self.units = info, reader.dtype(name), info.units
        self.has_steps = has_times = numbering.sample_dim in info.dims
        self._axis = info.dims.index(str(numbering.sample_dim)) if has_times else None
        self.dims = tuple(d for k, d in enumerate(info.dims) if k != self._axis)
        self.kept = tuple(d for k, d in enumerate(info.dims) if k not in (self._axis, info.entity_dim))
        found = {place if has_times else (place[0], 0) for i in samples.tolist() for place in numbering.times(i)}
        rows = np.array(sorted(found), np.int64).reshape(-1, 2)
        self._stored, self._times = rows[:, 0], rows[:, 1]
        self.is_step = np.zeros(len(rows), np.bool_)
        if has_times:
            self.is_step[1:] = (np.diff(self._stored) == 0) & (np.diff(self._times) == 1)
        apart = np.concatenate([[True], np.diff(self._stored) != 0])[: len(rows)]
        self._cut_tiles(apart, max_bytes)

    def _cut_tiles(self, apart: BoolArray, max_bytes: int) -> None:
        most = max((self._row_bytes(i) for i in np.unique(self._stored).tolist()), default=1)
        self.num_tiles, at_once = 1, max(1, max_bytes // max(1, most))
        num_rows = len(self._stored)
        starts = np.arange(num_rows)
        if self._axis is not None and self._axis > self._info.entity_dim:  # chunks have all times of some rows
            at_once, starts, apart = num_rows, np.flatnonzero(apart), apart[apart]
            longest = int(np.bincount(self._stored).max(initial=0))
            self.num_tiles = max(1, -(-most * longest // max_bytes))
        self.bounds = merged_blocks(starts, num_rows, max(1, at_once), apart)

    def _shape(self, stored: int) -> tuple[int, ...]:
        return self._reader.store.sample(stored).arrays[self._info.path].shape

    def _row_bytes(self, stored: int) -> int:
        """Return the bytes of one row, about: where parts begin exactly takes reading, which may fail on one rank."""
        shape = self._shape(stored)
        others = math.prod(n for k, n in enumerate(shape) if k != self._axis)
        return -(-others // self._reader.num_parts) * self.dtype.itemsize

    def read(self, tile: int, start: int, stop: int) -> Array:
        """Read rows of a block, ``(stop - start, *row)``."""
        stored, info, numbering = int(self._stored[start]), self._info, self._reader.numbering
        cut, access = self._reader.cut_of(stored)
        first, end = cut.owned(info.entity, self._part)
        bounds = [first + (end - first) * k // self.num_tiles for k in (tile, tile + 1)]
        times = [] if self._axis is None else numbering.times_at(stored, self._times[start:stop]).tolist()
        others = numbering.segments_at(info, stored, times)
        starts, stops = (np.array([row], np.int64) for row in bounds)
        plan = access.plan(info.path, starts, stops, dim=info.entity_dim, others=others)
        values = access.run(plan, self.dtype)
        return values[None] if self._axis is None else np.moveaxis(values, self._axis, 0)

    def size(self, dim: str) -> int:
        """Return how many rows the field has along a dim other than its entity's."""
        axis = self._info.dims.index(dim)
        stored = int(self._stored[0]) if len(self._stored) else 0
        crop = self._reader.numbering.isel.get(dim, slice(None))
        return num_rows_of(segments_of_slice(crop, self._shape(stored)[axis]))


class StoreReader(PartReader):
    """A partitioned store, cut into ``num_parts`` for each sample.

    ``path``: the store.
    ``options``: what is read, and how it is cut. ``fields``: a name that several entities have comes with its entity,
    ``"cell/u"``. ``halo``: hops along edges, or a radius for points (in the unit of the positions; on a sphere the
    angle in degrees; where the domain wraps, to the nearest images); of a graph between several node sets also which
    relations the layers of a model follow: :func:`~scidata.store.reading.choices.checked_layers`. ``bounds`` by stored
    sample: ``{stored sample: [0, …, N]}``.
    ``num_parts``: ranks of the domain.
    ``costs``: of stored samples that were measured, with ``weights="measured"``, whose cut follows them.
    Raises SciDataError: whatever the manifest alone shows to be wrong; the same on every rank.
    """

    store: Store  # the store, where it is open already

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ReadOptions = DEFAULTS,
        *,
        num_parts: int = 1,
        store: Store | None = None,
        costs: Mapping[int, PartCosts] | None = None,
    ) -> None:
        _check(options, str(path))
        disk = None if options.cache_dir is None else make_cache(options.cache_dir, options.cache_disk_bytes)
        store = store or open_store(path, disk)
        super().__init__(store, options, num_parts)
        manifest = store.manifest
        self.path, self.period = store.path, manifest.period
        self.kind, self.entity, self.entities = manifest.kind, manifest.entity, manifest.entities
        if options.kind not in (None, self.kind):
            raise ConfigError(f"kind={options.kind!r}: {self.path} is a store of kind {self.kind!r}")
        if self.kind == "hetero":
            layers = checked_layers(self.store, options.halo)
            self.halo = len(layers)
            self.layers = self._layers = layers or checked_layers(self.store, 1)
        else:
            self.halo = checked_halo(self.store, options.halo)
            self.ghost_cells = isinstance(options.halo, str) and self.entity != "cell"
            hops = 1 if self.kind == "points" else max(1, int(self.halo))  # edges need their sources
            self._layers = (("edge",),) * (hops if "edge" in self.entities else 0)
        self._take_edges(int(manifest.samples.column("counts", self.entity).max(initial=0)))
        self.ghosts = checked_ghosts(options.ghosts, self.halo)
        if self.subsample is not None:
            check_subsample(self.store, self.subsample)
        if self.subsample is not None and self.halo:
            raise ConfigError(
                f"{self.path}: halo={self.halo} means nothing with subsample: most neighbours of a row are not drawn; "
                "leave out one of them"
            )
        self._infos = named_fields(self.store)
        self.fields = self._chosen(options.fields)
        chosen = [self._infos[name] for name in self.fields]
        self._weights = checked_weights(self.store, options.weights)
        self.is_measured = isinstance(options.weights, str) and options.weights == MEASURED
        self.costs = dict(costs or {})
        check_cut(options.bounds, options.weights, what="irregular data is")
        order = str(manifest.samples.firsts()[0].settings.get("order"))
        if self.subsample is not None and leaf_rows_of(order) is not None:
            options.refuse(
                "bounds", "weights", "subsample_block",
                why="means nothing with subsample of a shuffled store, of which each rank draws as much",
            )  # fmt: skip
        dtypes = {name: self.dtype(name) for name in self.fields}
        self._number(number_samples(self.store, chosen, options), self._infos, dtypes)

    def view(self, **changed: Any) -> StoreReader:
        """Return a reader of the same open store with other ``fields`` or ``steps``."""
        options = replace(self.options, **changed)
        return StoreReader(self.path, options, num_parts=self.num_parts, store=self.store, costs=self.costs)

    def recut(self, costs: Mapping[int, PartCosts]) -> StoreReader:
        """Return a reader of the same open store that cuts by other costs."""
        made = StoreReader(self.path, self.options, num_parts=self.num_parts, store=self.store, costs=costs)
        made._threads = self._threads
        return made

    def measured_bounds(self, stored: int) -> IntArray:
        """Return how the rows of a stored sample are cut, with ``weights="measured"``."""
        if stored in self.costs:
            return balanced_bounds(*self.costs[stored], self.num_parts)
        return equal_bounds(self.store.sample(stored).counts[self.entity], self.num_parts)

    def statistics(self, name: str) -> StoredMoments | None:
        """Return figures of a field over all samples, one for each component that samples have; None without any."""
        info = self.info(name)
        figures = self.store.manifest.statistics.get(info.path)
        return None if figures is None else self.numbering.statistics(info, figures)

    def _path_of(self, stored: int) -> str:
        return join(self.path, self.store.sample(stored).folder)

    def inputs_of(self, stored: int) -> tuple[str, ...]:
        """Return where the files that a sample was made of lie, as seen from the store; ``()`` if it does not say."""
        inputs, here = self.store.sample(stored).inputs, local_path(self.path)
        if here is None or any(each.relative_folder is None for each in inputs):
            return ()
        beside = os.path.dirname(os.path.abspath(here))
        return tuple([os.path.normpath(os.path.join(beside, each.relative_folder or "", each.name)) for each in inputs])

    def fingerprint(self) -> str:
        """Return a digest of the samples: of their values and the choice of fields and rows; not of their cut."""
        chosen = [self._infos[name] for name in self.fields]
        paths = [info.path for info in chosen]
        content: dict[str, object] = {
            "fields": {name: [self.dims(name), str(self.dtype(name))] for name in self.fields},
            "numbering": self.numbering.describe(chosen),
            "samples": _contents(self.store, paths),
        }
        return self._digest(content)

    def counts(self, entity: str) -> IntArray:
        """Return the rows of an entity in each sample, ``(num_samples,)`` int64."""
        self._check_entity(entity)
        return np.repeat(self.store.manifest.samples.column("counts", entity), np.diff(self.numbering.firsts))

    def _chosen(self, fields: Sequence[str] | str | None) -> tuple[str, ...]:
        if fields is None:
            return tuple(self._infos)
        by_path = {info.path: name for name, info in self._infos.items()}
        names = names_of("fields", fields)
        return tuple(dict.fromkeys(self._known(by_path.get(name, name)) for name in names))

    def _cut(self, stored: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        access = RowAccess(self.store, stored, self._threads.executor())
        rows = bounds_of_sample(self.options.bounds, stored)
        info = self.store.sample(stored)
        explicit, weights = None if isinstance(rows, str) else rows, self._weights
        if self.is_measured:
            explicit, weights = self.measured_bounds(stored), None
        bounds = cut_sample(access, info, self.num_parts, explicit=explicit, weights=weights)
        return SamplePart(index=stored, entity=self.entity, bounds=bounds), access.plans

    @sound
    def ranges(self, index: int, part: int) -> tuple[list[tuple[str, int, int]], ReadStats]:
        """Return where the fields of one part of a sample lie: path, first byte and bytes of each range.

        The part's edges and cells are read for it, unless they are in memory; the cost of that comes along.
        """
        cut, access = self._opened(index)
        topology = self.topology_of(access, cut, self._checked_part(part))
        found = []
        for plan in [each for name in self.fields for each in self._reads.plans(access, name, index, topology)]:
            paths, table = plan.ranges()
            found += [(paths[i], offset, nbytes) for i, offset, nbytes in table.tolist()]
        return found, access.stats

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> StorePass:
        """Return a pass over all rows of a field in some samples: those that one part owns, drawn or not."""
        return StorePass(self, self._known(name), samples, self._checked_part(rank))

    @sound
    def original_id(self, index: int, part: int, entity: str, *, rows: IntArray | None = None) -> IntArray:
        """Read the source's row of each row that a part owns, or of ``rows`` of the store, ``(num,)`` int64."""
        cut, access = self._opened(index)
        self._check_entity(entity)
        start, stop = cut.owned(entity, self._checked_part(part))
        of_edges = entity == "edge" or is_relation(entity)
        path = f"{folder_of_edges(entity)}/{'edge_id' if of_edges else 'original_id'}"
        return access.rows(path, start, stop) if rows is None else access.gather(path, rows)


def _contents(store: Store, paths: Sequence[str]) -> list[object]:
    """Return the recipe, the counts, and the digests of some arrays of each sample."""
    samples, manifest = store.manifest.samples, store.manifest
    counts = {entity: samples.column("counts", entity).tolist() for entity in manifest.entities}
    digests = [samples.column("arrays", path, "digest").tolist() for path in paths]
    return [
        [manifest.recipe, dict(zip(counts, each, strict=True)), [digest[i] for digest in digests]]
        for i, each in enumerate(zip(*counts.values(), strict=True))
    ]


def _check(options: ReadOptions, path: str) -> None:
    """Refuse options that mean nothing for stores."""
    alone = (*ONLY_GRIDS, "decode", "allow_missing", "allow_external")
    none = f"means nothing for {path}, a partitioned store"
    options.refuse(*alone, why=none)
    refuse({"steps by field": isinstance(options.steps, Mapping)}, none)
    if options.pool_bytes:
        options.refuse("pool_bytes", why="means nothing for a partitioned store, whose chunks are of one sample")

"""Reads any rank's part of any sample of a partitioned store: rows, edges, cells and ghosts. No torch.

Nothing communicates: a rank's ghosts follow from the edges that end at its own rows, or from the positions of its own
points, so any process can plan, or read, what any rank of any number of ranks would.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from scidata.core.cache import Cache
from scidata.core.checks import names_of, refuse
from scidata.core.options import DEFAULTS, ONLY_GRIDS, ReadOptions
from scidata.core.types import Empty, IntArray
from scidata.errors import ConfigError, CorruptDataError, RefusedError, UnsupportedFormatError
from scidata.meshes.hetero import is_relation
from scidata.plan.array import ArrayPlan
from scidata.plan.totals import ReadPlan
from scidata.read.context import ReadStats
from scidata.read.disk_cache import make_cache
from scidata.read.threads import ReaderThreads
from scidata.store.format.arrays import CHUNK_ROWS
from scidata.store.format.manifest import SampleInfo, StoredMoments
from scidata.store.format.store import open_store
from scidata.store.format.values import decode_values
from scidata.store.reading.base import PartReader
from scidata.store.reading.choices import checked_ghosts, checked_halo, checked_subsample, named_fields
from scidata.store.reading.cuts import bounds_of_rows, bounds_of_sample, check_cut, checked_weights
from scidata.store.reading.field_reads import FieldReads
from scidata.store.reading.layers import checked_layers, read_relations
from scidata.store.reading.numbering import number_samples
from scidata.store.reading.part import LocalPart, LocalTopology, SamplePart
from scidata.store.reading.passes import StorePass
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.sets import cut_sets
from scidata.store.reading.subsample import make_subsample
from scidata.store.reading.subsample_part import drawn_part, drawn_sets
from scidata.store.reading.topology import read_topology

_T = TypeVar("_T")

#: Of the edges, cells and index maps that are kept between reads.
CACHE_BYTES = 512 << 20
_PARTITION_BYTES = 4 << 20  # of bounds that are kept: each saves the reads of a few chunks
_PLANS_BYTES = 2048  # of those reads' plans, about


class StoreReader(PartReader):
    """A partitioned store, cut into ``num_parts`` for each sample.

    Parameters
    ----------
    path
        The store.
    options
        What is read, and how it is cut. ``fields``: a name that several entities have comes with its entity,
        ``"cell/u"``. ``halo``: hops along edges, or a radius for points (in the unit of the positions; on a sphere the
        angle in degrees; where the domain wraps, to the nearest images); of a graph between several node sets also
        which relations the layers of a model follow: :func:`~scidata.store.reading.layers.checked_layers`. ``bounds``
        by stored sample: ``{stored sample: [0, …, N]}``.
    num_parts
        Ranks of the domain.

    Raises
    ------
    SciDataError
        Whatever the manifest alone shows to be wrong; the same on every rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ReadOptions = DEFAULTS,
        *,
        num_parts: int = 1,
    ) -> None:
        _check(options, str(path))
        disk = None if options.cache_dir is None else make_cache(options.cache_dir, options.cache_disk_bytes)
        self.options, self.store = options, open_store(path, disk)
        manifest = self.store.manifest
        self.path, self.period = self.store.path, manifest.period
        self.kind, self.entity, self.entities = manifest.kind, manifest.entity, manifest.entities
        self.num_parts = num_parts
        if num_parts < 1:
            raise ConfigError(f"number of parts must be at least 1, not {num_parts}")
        if options.kind not in (None, self.kind):
            raise ConfigError(f"kind={options.kind!r}: {self.path} is a store of kind {self.kind!r}")
        if self.kind == "hetero":
            layers = checked_layers(self.store, options.halo)
            self.halo: float = len(layers)
            self.layers = layers or checked_layers(self.store, 1)  # edges need their sources
        else:
            self.halo = checked_halo(self.store, options.halo)
        self.ghosts = checked_ghosts(options.ghosts, self.halo)
        draw = make_subsample(options.subsample, block=options.subsample_block, seed=options.subsample_seed)
        self.subsample = checked_subsample(self.store, draw)
        if draw is not None and self.halo:
            raise ConfigError(
                f"{self.path}: halo={self.halo} means nothing with subsample: most neighbours of a row are not drawn; "
                "leave out one of them"
            )
        self._infos = named_fields(self.store)
        self.fields = self._chosen(options.fields)
        chosen = [self._infos[name] for name in self.fields]
        self.numbering = number_samples(self.store, chosen, options)
        self._dtype = None if options.dtype is None else np.dtype(options.dtype)
        self._bounds = options.bounds
        self._weights = checked_weights(self.store, options.weights)
        check_cut(options.bounds, options.weights, what="irregular data is")
        self._threads = ReaderThreads(options.num_threads)
        self._partitions: Cache[tuple[SamplePart, dict[str, list[ArrayPlan]]]] = Cache(_PARTITION_BYTES, "lru")
        max_bytes = CACHE_BYTES if options.cache_bytes is None else options.cache_bytes
        self.topologies: Cache[LocalTopology] = Cache(max_bytes, "lru")
        dtypes = {name: self.dtype(name) for name in self.fields}
        self._reads = FieldReads(
            self.numbering, self._infos, dtypes, with_ghosts=self.ghosts == "disk", max_bytes=max_bytes
        )
        self._token = uuid.uuid4().hex  # of this data set, also where it was pickled: ranks have their own

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Number of samples: of all stored samples, and of their times."""
        return self.numbering.num_samples

    def counts(self, entity: str) -> IntArray:
        """Return the rows of an entity in each sample, ``(num_samples,)``."""
        self._check_entity(entity)
        stored = [self.numbering.locate(index)[0] for index in range(self.num_samples)]
        return np.array([self.store.manifest.samples[number].counts[entity] for number in stored], np.int64)

    @property
    def num_hops(self) -> int:
        """Hops along edges that ghosts are away; edges need at least one, for their sources."""
        if self.kind == "hetero":
            return len(self.layers)
        if "edge" not in self.entities:
            return 0
        return 1 if self.kind == "points" else max(1, int(self.halo))

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dims of a field of one sample."""
        return self.numbering.dims(self.info(name))

    def entity_dim(self, name: str) -> int:
        """Return which of a field's dims its entity's is."""
        return self.numbering.entity_dim(self.info(name))

    def sample_info(self, index: int) -> SampleInfo:
        """Return the description of the stored sample that a sample is of."""
        return self.store.sample(self.numbering.locate(index)[0])

    def graph_values(self, index: int) -> dict[str, Any]:
        """Return values of a whole sample: arrays, and what JSON has."""
        return decode_values(self.sample_info(index).values)

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the dtype in which a field is read."""
        stored = np.dtype(self.info(name).dtype).newbyteorder("=")
        return self._dtype if self._dtype is not None and stored.kind == "f" else stored

    def global_shape(self, name: str, index: int, *, epoch: int = 0) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample, or of what ``epoch`` draws from it."""
        shape = self.numbering.shape(self.info(name), index)
        if self.subsample is None:
            return shape

        def draw() -> LocalTopology:
            cut, access = self._opened(index)
            return self._drawn(access, cut, index, 0, epoch)

        dim, rows = self.entity_dim(name), self._sound(index, draw).index_maps[self.info(name).entity]
        return (*shape[:dim], rows.num_global, *shape[dim + 1 :])

    def statistics(self, name: str) -> StoredMoments | None:
        """Return figures of a field over all samples, one for each component that samples have; None without any."""
        info = self.info(name)
        figures = self.store.manifest.statistics.get(info.path)
        return None if figures is None else self.numbering.statistics(info, figures)

    def fingerprint(self) -> str:
        """Return a digest of what decides the samples: values, and what is chosen of them; not how they are cut."""
        chosen = [self._infos[name] for name in self.fields]
        paths = [info.path for info in chosen]
        content: dict[str, object] = {
            "fields": {name: [self.dims(name), str(self.dtype(name))] for name in self.fields},
            "numbering": self.numbering.describe(chosen),
            "samples": [
                [s.recipe, dict(s.counts), [s.arrays[path].digest for path in paths]]
                for s in self.store.manifest.samples
            ],
        }
        return self._digest(content)

    def _chosen(self, fields: Sequence[str] | str | None) -> tuple[str, ...]:
        if fields is None:
            return tuple(self._infos)
        by_path = {info.path: name for name, info in self._infos.items()}
        names = names_of("fields", fields)
        return tuple(dict.fromkeys(self._known(by_path.get(name, name)) for name in names))

    # -- cutting -------------------------------------------------------------------------------------------------

    def partition_of(self, index: int) -> SamplePart:
        """Cut a sample. Reads the few rows of index arrays that say where the parts begin, once for each stored one."""
        return self._sound(index, lambda: self._partition(self.numbering.locate(index)[0])[0])

    def _partition(self, index: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        size = lambda made: _PLANS_BYTES + sum(bounds.nbytes for bounds in made[0].bounds.values())  # noqa: E731
        return self._partitions.get_or_make(index, lambda: self._cut(index), size, once=True)

    def _cut(self, index: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        access = RowAccess(self.store, index, self._threads.executor())
        rows = bounds_of_sample(self._bounds, index)
        info = self.store.sample(index)
        explicit = None if isinstance(rows, str) else rows
        if info.kind == "hetero":
            sets = cut_sets(access, info, self.num_parts, explicit=explicit, weights=self._weights)
            return SamplePart(index=index, entity=self.entity, bounds=sets), access.plans
        assert not isinstance(self._weights, dict)  # which graphs between sets alone may have
        bounds = bounds_of_rows(access, info, self.num_parts, explicit=explicit, weights=self._weights)
        every = {self.entity: bounds}
        cuts, back = np.unique(bounds, return_inverse=True)
        if "cell/indptr" in info.arrays:
            every["cell"] = access.take("cell/indptr", cuts)[back]
        if "edge" in info.counts:
            every["edge"] = access.take("csr/indptr", cuts)[back]
        return SamplePart(index=index, entity=self.entity, bounds=every), access.plans

    def _topology(self, access: RowAccess, cut: SamplePart, part: int) -> LocalTopology:
        """Read this part's edges and cells, and find its ghosts."""
        if self.kind == "hetero":
            info = self.store.sample(cut.index)
            return read_relations(access, info, cut, part, layers=self.layers, token=self._token)
        return read_topology(
            access,
            self.store.sample(cut.index),
            cut,
            part,
            num_hops=self.num_hops,
            radius=self.halo if self.kind == "points" else 0,
            token=self._token,
        )

    def topology_of(self, access: RowAccess, cut: SamplePart, part: int) -> LocalTopology:
        """Return this part's edges and cells, and its ghosts: read, unless they are kept."""
        make = lambda: self._topology(access, cut, part)  # noqa: E731
        return self.topologies.get_or_make((cut.index, part), make, LocalTopology.num_bytes, once=True)

    def _drawn(self, access: RowAccess, cut: SamplePart, index: int, part: int, epoch: int) -> LocalTopology:
        """Find what a part holds of an epoch's draw from a sample."""
        assert self.subsample is not None
        info, entity = self.store.sample(cut.index), self.subsample.entity
        when = {"epoch": epoch, "index": index % self.num_samples, "chunk_rows": CHUNK_ROWS}
        if self.kind == "hetero":
            draws = {
                name: self.subsample.draw_of_set(name, info.counts[name], **when) for name in self.subsample.counts
            }
            return drawn_sets(access, info, cut, part, draws)
        return drawn_part(access, cut, part, self.subsample.draw(info.counts[entity], **when), entity)

    def _found(self, access: RowAccess, cut: SamplePart, index: int, part: int, epoch: int) -> LocalTopology:
        if self.subsample is None:
            return self._topology(access, cut, part)
        return self._drawn(access, cut, index, part, epoch)

    # -- planning and reading ------------------------------------------------------------------------------------

    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for one rank: index arrays by their paths in the store, and fields by name.

        The rank's ghosts have to be found for it, so its edges are read. It is the plan of a first read: a later one
        of the same stored sample finds the index arrays in memory, unless ``cache_bytes`` is too small. ``epoch``
        matters where rows are drawn.

        Raises
        ------
        IndexError, ConfigError
            Sample or rank out of range.
        """
        return self._sound(index, lambda: self._plan(index, rank, epoch))

    def _plan(self, index: int, rank: int, epoch: int) -> ReadPlan:
        cut, access = self._opened(index)
        first = self._partition(cut.index)[1]
        topology = self._found(access, cut, index, self._checked_part(rank), epoch)
        plans: dict[str, tuple[ArrayPlan, ...]] = {path: tuple(found) for path, found in first.items()}
        for path, found in access.plans.items():
            plans[path] = (*plans.get(path, ()), *found)
        for name in self.fields:
            plans[name] = (*plans.get(name, ()), *self._reads.plans(access, name, index, topology))
        return ReadPlan(index=index % self.num_samples, rank=rank, fields=plans)

    def read(self, index: int, part: int, *, epoch: int = 0, empty: Empty = np.empty) -> LocalPart:
        """Read one part of a sample, or of what ``epoch`` draws from it. Thread-safe; communicates nothing.

        ``empty`` makes the arrays that are read into.

        Raises
        ------
        IndexError, ConfigError
            Sample or part out of range.
        MissingChunkError, ShortReadError, ChecksumError, CorruptDataError
            The store is damaged.
        """
        return self._sound(index, lambda: self._read(index, part, epoch, empty))

    def _read(self, index: int, part: int, epoch: int, empty: Empty) -> LocalPart:
        cut, access = self._opened(index, empty)
        self._checked_part(part)
        if self.subsample is None:
            topology = self.topology_of(access, cut, part)
        else:
            topology = self._drawn(access, cut, index, part, epoch)
        fields = self._reads.read(access, self.fields, index, topology)
        return LocalPart(index=index % self.num_samples, part=cut, fields=fields, stats=access.stats, **vars(topology))

    def ranges(self, index: int, part: int) -> tuple[list[tuple[str, int, int]], ReadStats]:
        """Return where the fields of one part of a sample lie: path, first byte and bytes of each range.

        The part's edges and cells are read for it, unless they are in memory; what that took comes along.
        """
        return self._sound(index, lambda: self._ranges(index, self._checked_part(part)))

    def _ranges(self, index: int, part: int) -> tuple[list[tuple[str, int, int]], ReadStats]:
        cut, access = self._opened(index)
        topology = self.topology_of(access, cut, part)
        found = []
        for plan in [each for name in self.fields for each in self._reads.plans(access, name, index, topology)]:
            paths, table = plan.ranges()
            found += [(paths[i], offset, nbytes) for i, offset, nbytes in table.tolist()]
        return found, access.stats

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> StorePass:
        """Return what goes over all rows of a field that some samples have, of one part's own rows, drawn or not."""
        return StorePass(
            name, self.info(name), self.dtype(name), numbering=self.numbering, samples=samples,
            part=self._checked_part(rank), num_parts=self.num_parts, cut=self._stored_cut, threads=self._threads,
        )  # fmt: skip

    def _stored_cut(self, stored: int) -> SamplePart:
        return self._partition(stored)[0]

    def original_id(self, index: int, part: int, entity: str, *, rows: IntArray | None = None) -> IntArray:
        """Read the source's row of each row that a part owns, or of ``rows`` of the store, ``(num,)`` int64."""
        return self._sound(index, lambda: self._original_id(index, part, entity, rows))

    def _original_id(self, index: int, part: int, entity: str, rows: IntArray | None) -> IntArray:
        cut, access = self._opened(index)
        self._check_entity(entity)
        start, stop = cut.owned(entity, self._checked_part(part))
        of_edges = entity == "edge" or is_relation(entity)
        path = f"{'csr' if entity == 'edge' else entity}/{'edge_id' if of_edges else 'original_id'}"
        ids: IntArray = access.rows(path, start, stop) if rows is None else access.gather(path, rows)
        return ids

    def _opened(self, index: int, empty: Empty = np.empty) -> tuple[SamplePart, RowAccess]:
        """Return how the stored sample of a sample is cut, and access to it."""
        stored = self.numbering.locate(index)[0]
        cut = self._partition(stored)[0]
        return cut, RowAccess(self.store, stored, self._threads.executor(), empty)

    def _sound(self, index: int, call: Callable[[], _T]) -> _T:
        """Return what a call reads of a sample; where that is damaged, what the store itself has, and not the cache."""
        try:
            return call()
        except (CorruptDataError, UnsupportedFormatError, RefusedError):
            self.store.check_unchanged()
            stored = self.numbering.locate(index)[0]
            if not self.store.doubt(stored):
                raise
        self._reads.forget()
        found = call()
        self.store.trust(stored)
        return found

    def close(self) -> None:
        """End the threads and close the files; the next read starts them again."""
        self._threads.close()
        self.store.close()
        self._reads.forget()


def _check(options: ReadOptions, path: str) -> None:
    """Refuse what means nothing for stores."""
    alone = (*ONLY_GRIDS, "decode", "allow_missing", "allow_external")
    none = f"means nothing for {path}, a partitioned store"
    options.refuse(*alone, why=none)
    refuse({"steps by field": isinstance(options.steps, Mapping)}, none)
    if options.pool_bytes:
        options.refuse("pool_bytes", why="means nothing for a partitioned store, whose chunks are of one sample")

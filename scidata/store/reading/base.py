"""Reads any rank's part of any irregular sample: rows, edges, cells and ghosts. No torch.

Nothing communicates: a rank's ghosts follow from the edges that end at its own rows, or from the positions of its own
points, so any process can plan, or read, the part of any rank of any number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scidata.core.cache import Cache
from scidata.core.index_map import IndexMap
from scidata.core.options import ReadOptions
from scidata.core.sample_source import SampleSource
from scidata.core.types import AnyArray, Array, Empty, IntArray
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    RefusedError,
    UnsupportedFormatError,
    check_known,
    near_matches,
)
from scidata.meshes.order.shuffle import leaf_rows_of
from scidata.plan.array import ArrayPlan, exact_plan
from scidata.plan.totals import ReadPlan
from scidata.read.threads import ReaderThreads
from scidata.store.format.arrays import CHUNK_ROWS
from scidata.store.format.manifest import FieldInfo, SampleInfo
from scidata.store.format.values import decode_values
from scidata.store.reading.choices import Layers
from scidata.store.reading.field_reads import FieldReads
from scidata.store.reading.near import NearEdges
from scidata.store.reading.numbering import Numbering
from scidata.store.reading.part import LocalPart, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess, StoredSamples
from scidata.store.reading.subsample import Draw, Subsample, Walk, make_subsample
from scidata.store.reading.subsample_part import drawn_part
from scidata.store.reading.topology import read_topology

_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R", bound="PartReader")

#: Of the edges, cells and index maps that are kept between reads.
CACHE_BYTES = 512 << 20
_PARTITION_BYTES = 4 << 20  # of bounds that are kept: each saves the reads of a few chunks
_PLANS_BYTES = 2048  # of those reads' plans, about


def sound(method: Callable[Concatenate[_R, int, _P], _T]) -> Callable[Concatenate[_R, int, _P], _T]:
    """Make a method that reads a sample read the store itself where the cache of the sample is damaged."""

    @functools.wraps(method)
    def call(self: _R, index: int, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, index, *args, **kwargs)
        except (CorruptDataError, UnsupportedFormatError, RefusedError):
            self.store.check_unchanged()
            stored = self.numbering.locate(index)[0]
            if not self.store.doubt(stored):
                raise
        self._reads.forget()
        found = method(self, index, *args, **kwargs)
        self.store.trust(stored)
        return found

    return call


class PartReader:
    """Samples, cut into ``num_parts`` each.

    ``num_parts``: parts of each sample: ranks of the domain.
    """

    path: str  # the store, or the first file, as the user gave it
    kind: str
    entity: str
    entities: tuple[str, ...]  # those that the samples have
    fields: tuple[str, ...]  # names of those that are read
    # width of the domain along each coordinate where it wraps, 0 if it does not; None if it does in none
    period: tuple[float, ...] | None
    subsample: Subsample | None  # the draw of each epoch; None reads all
    # halo, ghosts: hops, layers or a radius that ghosts are away, and how their values come: from ``"disk"`` or by
    # ``"exchange"``
    halo: float = 0
    ghost_cells: bool = False  # whether parts have the cells of others that have an owned node
    ghosts: str = "exchange"
    # of a graph between several node sets: of each layer of a model that the ghosts are enough for, its relations
    layers: Layers = ()
    near: NearEdges | None = None  # how edges between points are found; None if they are stored, or there are none
    _layers: Layers = ()  # those whose edges are read
    _infos: Mapping[str, FieldInfo]  # by the names that users type

    def __init__(self, store: StoredSamples, options: ReadOptions, num_parts: int) -> None:
        if num_parts < 1:
            raise ConfigError(f"number of parts must be at least 1, not {num_parts}")
        self.store, self.options, self.num_parts = store, options, num_parts
        self.subsample = make_subsample(options.subsample, block=options.subsample_block, seed=options.subsample_seed)
        self._dtype = None if options.dtype is None else np.dtype(options.dtype)
        self._threads = ReaderThreads(options.num_threads)
        self._partitions: Cache[tuple[SamplePart, dict[str, list[ArrayPlan]]]] = Cache(_PARTITION_BYTES, "lru")
        self._max_bytes = CACHE_BYTES if options.cache_bytes is None else options.cache_bytes
        self.topologies: Cache[LocalTopology] = Cache(self._max_bytes, "lru")
        self._token = uuid.uuid4().hex  # of this data set, also where it was pickled: ranks have their own

    def _number(
        self, numbering: Numbering, infos: Mapping[str, FieldInfo], dtypes: Mapping[str, np.dtype[np.generic]]
    ) -> None:
        """Take in the numbers of samples, and the arrays that are read with their dtypes."""
        self.numbering = numbering
        with_ghosts = self.ghosts == "disk"
        self._reads = FieldReads(numbering, infos, dtypes, with_ghosts=with_ghosts, max_bytes=self._max_bytes)

    # -- contents ------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Number of samples: of all stored samples, and of their times."""
        return self.numbering.num_samples

    @property
    def num_hops(self) -> int:
        """Hops along edges that ghosts are away; edges need at least one, for their sources."""
        return 1 if self.near is not None else len(self._layers)

    def counts(self, entity: str) -> IntArray:
        """Return the rows of an entity in each sample, ``(num_samples,)`` int64. Opens every file of raw points."""
        self._check_entity(entity)
        return np.array([self.sample_info(index).counts[entity] for index in range(self.num_samples)], np.int64)

    def sample_keys(self, on: str) -> AnyArray:
        """Return the name (``"name"``), or a value of the whole sample, of each sample, ``(num_samples,)``.

        Raises ConfigError: a stored sample has no single value of that name.
        """
        found = []
        for stored in range(len(self.numbering.firsts) - 1):
            info = self.store.sample(stored)
            known = {"name": info.name} | decode_values(info.values)
            if on not in known or np.size(known[on]) != 1:
                raise ConfigError(f"{self.path}: sample {stored} has no value {on!r}{near_matches(on, known)}")
            found.append(np.asarray(known[on]).item())
        return np.repeat(np.array(found), np.diff(self.numbering.firsts))

    def info(self, name: str) -> FieldInfo:
        """Return the description of a field: entity, units, attributes, dims and dtype as it is stored."""
        return self._infos[self._known(name)]

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dims of a field of one sample."""
        return self.numbering.dims(self.info(name))

    def entity_dim(self, name: str) -> int:
        """Return the place of its entity's dim among a field's dims."""
        return self.numbering.entity_dim(self.info(name))

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the dtype in which a field is read."""
        stored = np.dtype(self.info(name).dtype).newbyteorder("=")
        return self._dtype if self._dtype is not None and stored.kind == "f" else stored

    def sample_info(self, index: int) -> SampleInfo:
        """Return the description of the stored sample that a sample is of."""
        return self.store.sample(self.numbering.locate(index)[0])

    def steps_of(self, name: str) -> tuple[str | None, tuple[int, ...]]:
        """Return the dim of steps, and those that samples have of a field: none of one without times."""
        return self.numbering.sample_dim, self.numbering.steps_of(self._infos.get(name))

    def sources_of(self, index: int, step: int | None = None) -> tuple[SampleSource, ...]:
        """Return the stored sample, or file, of a sample, and the row of each of its steps, or of one."""
        path, rows = self._path_of(self.numbering.locate(index)[0]), self.numbering.rows(index) or [0]
        kept = rows if step is None else [rows[self.numbering.steps.index(step)]]
        inputs = self.inputs_of(self.numbering.locate(index)[0])
        return tuple([SampleSource(path, row, inputs=inputs) for row in kept])

    def inputs_of(self, stored: int) -> tuple[str, ...]:
        """Return the files that a stored sample was made of, if it is no file itself and they are known."""
        return ()

    def _path_of(self, stored: int) -> str:
        """Return where a stored sample lies."""
        raise NotImplementedError

    def graph_values(self, index: int) -> dict[str, Any]:
        """Return values of a whole sample: arrays, and JSON values. Files have none."""
        return decode_values(self.sample_info(index).values)

    def global_shape(self, name: str, index: int, *, epoch: int = 0) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample, or of the rows that ``epoch`` draws from it."""
        shape = self.numbering.shape(self.info(name), index)
        if self.subsample is None:
            return shape
        dim, num = self.entity_dim(name), self._num_drawn(index, self.info(name).entity, epoch)
        return (*shape[:dim], num, *shape[dim + 1 :])

    @sound
    def _num_drawn(self, index: int, entity: str, epoch: int) -> int:
        cut, access = self._opened(index)
        info, draws = self.store.sample(cut.index), self._draws(cut, index, epoch)
        return drawn_part(access, info, cut, 0, draws).index_maps[entity].num_global

    def _known(self, name: str) -> str:
        if name not in self._infos:  # the message is made if it is needed: this is asked with each field
            check_known(f"{self.path}: no field", [name], self._infos)
        return name

    def _check_entity(self, entity: str) -> None:
        check_known(f"{self.path}: no entity", [entity], self.entities)

    def _checked_part(self, part: int) -> int:
        if not 0 <= part < self.num_parts:
            raise ConfigError(f"rank {part} does not exist: the domain has {self.num_parts} ranks")
        return part

    def _digest(self, content: dict[str, object]) -> str:
        """Return the digest of all that decides the samples, and the rows drawn from them."""
        if self.subsample is not None:
            content["subsample"] = self.subsample.recipe
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    # -- cutting -------------------------------------------------------------------------------------------------

    @sound
    def partition_of(self, index: int) -> SamplePart:
        """Cut a sample. Reads the few rows of index arrays that say where the parts begin, once for each stored one."""
        return self._partition(self.numbering.locate(index)[0])[0]

    def _partition(self, stored: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        """Return how a stored sample is cut, and the plans of the reads that this took."""

        def size(made: tuple[SamplePart, object]) -> int:
            rows = [] if made[0].rows is None else [made[0].rows]
            return _PLANS_BYTES + sum(each.nbytes for each in (*made[0].bounds.values(), *rows))

        return self._partitions.get_or_make(stored, lambda: self._cut(stored), size, once=True)

    def _cut(self, stored: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        raise NotImplementedError

    def _chunk_rows(self, stored: int) -> int:
        """Return the rows that are drawn together as a chunk."""
        return CHUNK_ROWS

    def _take_edges(self, most: int) -> None:
        """Take in how edges between points are found: a hop, whose sources are ghosts. No sample has ``most`` + 1."""
        self.near = NearEdges.of(self.options.edges, self.kind, self.path)
        if self.subsample is not None:
            most = min(most, *self.subsample.counts.values())
        if self.near is not None and self.near.rule == "knn" and self.near.number >= most > 0:
            raise ConfigError(
                f"{self.path}: edges={self.options.edges!r}: no sample has more than {most} points that are read, each "
                f"with {most - 1} others; ask for at most knn:{most - 1}"
            )

    def _topology(self, access: RowAccess, cut: SamplePart, part: int) -> LocalTopology:
        """Read this part's edges and cells, and find its ghosts."""
        info, radius = self.store.sample(cut.index), self.halo if self.kind == "points" else 0
        found = read_topology(access, info, cut, part, layers=self._layers, radius=radius,
                              ghost_cells=self.ghost_cells, token=self._token)  # fmt: skip
        if self.near is None:
            return found
        rows = self.near.candidates(access, info, *cut.owned(cut.entity, part))
        return self.near.added(found, info, rows, self._positions(access, cut.index, rows))

    def _positions(self, access: RowAccess, stored: int, rows: IntArray) -> AnyArray:
        """Read the positions of some rows."""
        return access.gather(f"{self.entity}/pos", rows)

    @sound
    def topology(self, index: int, part: int) -> LocalTopology:
        """Return the edges, cells and ghosts of one part of a whole sample."""
        cut, access = self._opened(index)
        return self.topology_of(access, cut, self._checked_part(part))

    def topology_of(self, access: RowAccess, cut: SamplePart, part: int) -> LocalTopology:
        """Return this part's edges and cells, and its ghosts: read, unless they are kept."""
        if cut.rows is not None:  # as many as the sample has, which no other shares
            return self._topology(access, cut, part)
        make = lambda: self._topology(access, cut, part)  # noqa: E731
        return self.topologies.get_or_make((cut.index, part), make, LocalTopology.num_bytes, once=True)

    def _draws(self, cut: SamplePart, index: int, epoch: int) -> dict[str, Draw | Walk]:
        assert self.subsample is not None
        info, chunk_rows = self.store.sample(cut.index), self._chunk_rows(cut.index)
        draw = functools.partial(
            self.subsample.draw, epoch=epoch, index=index % self.num_samples, chunk_rows=chunk_rows,
            is_set=self.kind == "hetero", leaf_rows=leaf_rows_of(str(info.settings.get("order"))),
        )  # fmt: skip
        return {name: draw(name, info.counts[name]) for name in self.subsample.counts}

    def _drawn(self, access: RowAccess, cut: SamplePart, index: int, part: int, epoch: int) -> LocalTopology:
        """Find the rows, edges and cells of an epoch's draw that a part holds."""
        info, draws = self.store.sample(cut.index), self._draws(cut, index, epoch)
        found = drawn_part(access, info, cut, part, draws)
        if self.near is None:
            return found
        rows = draws[cut.entity].rows()  # every part knows where all that was drawn lies: it is little
        return self.near.added(found, info, np.arange(len(rows)), self._positions(access, cut.index, rows))

    # -- planning and reading ------------------------------------------------------------------------------------

    @sound
    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for one rank: index arrays by their paths in the store, and fields by name.

        The rank's ghosts have to be found for it, so its edges are read. It is the plan of a first read: a later one
        of the same stored sample finds the index arrays in memory, unless ``cache_bytes`` is too small. ``epoch``
        matters where rows are drawn.
        """
        cut, access = self._opened(index)
        first = self._partition(cut.index)[1]
        part = self._checked_part(rank)
        if self.subsample is None:
            topology = self._topology(access, cut, part)
        else:
            topology = self._drawn(access, cut, index, part, epoch)
        plans: dict[str, tuple[ArrayPlan, ...]] = {path: tuple(found) for path, found in first.items()}
        for path, found in access.plans.items():
            plans[path] = (*plans.get(path, ()), *found)
        for name in self._arrays(cut.index):
            plans[name] = (*plans.get(name, ()), *self._reads.plans(access, name, index, topology))
        locate = self.store.source(cut.index).locate
        fields = {name: tuple([exact_plan(each, locate) for each in found]) for name, found in plans.items()}
        return ReadPlan(index=index % self.num_samples, rank=rank, fields=fields)

    @sound
    def read(self, index: int, part: int, *, epoch: int = 0, empty: Empty = np.empty) -> LocalPart:
        """Read one part of a sample, or of the rows that ``epoch`` draws. Thread-safe; communicates nothing.

        ``empty`` makes the arrays that are read into.

        Raises IndexError, ConfigError: sample or part out of range.
        Raises FieldMismatchError: a file of raw points that does not have the first one's fields.
        Raises MissingChunkError, ShortReadError, ChecksumError, CorruptDataError: the store is damaged.
        """
        cut, access = self._opened(index, empty)
        self._checked_part(part)
        if self.subsample is None:
            topology = self.topology_of(access, cut, part)
        else:
            topology = self._drawn(access, cut, index, part, epoch)
        fields = self._read_fields(access, index, topology, cut.index)
        return LocalPart(index=index % self.num_samples, part=cut, fields=fields, stats=access.stats, **vars(topology))

    def read_rows(
        self, access: RowAccess, names: Sequence[str], index: int, topology: LocalTopology
    ) -> dict[str, Array]:
        """Read those rows of fields of a sample that a topology names."""
        return self._reads.read(access, names, index, topology)

    def empty_part(self, part: int) -> LocalPart:
        """Return one part of a cloud without points: of no sample, so its index is -1."""
        none, shapes = (
            np.empty(0, np.int64),
            {name: list(self.numbering.shape(self.info(name), 0)) for name in self.fields},
        )
        for name, shape in shapes.items():
            shape[self.entity_dim(name)] = 0
        bounds = np.zeros(self.num_parts + 1, np.int64)
        return LocalPart(
            index=-1,
            part=SamplePart(index=-1, entity=self.entity, bounds={self.entity: bounds}),
            fields={name: np.empty(shape, self.dtype(name)) for name, shape in shapes.items()},
            index_maps={self.entity: IndexMap(bounds=bounds, part=part, ghosts=none)},
            rows={self.entity: none},
        )

    def _arrays(self, stored: int) -> tuple[str, ...]:
        """Return the arrays that the fields are read from."""
        return self.fields

    def _read_fields(self, access: RowAccess, index: int, topology: LocalTopology, stored: int) -> Mapping[str, Array]:
        return self._reads.read(access, self.fields, index, topology)

    def _opened(self, index: int, empty: Empty = np.empty) -> tuple[SamplePart, RowAccess]:
        """Return how the stored sample of a sample is cut, and access to it."""
        return self.cut_of(self.numbering.locate(index)[0], empty)

    def cut_of(self, stored: int, empty: Empty = np.empty) -> tuple[SamplePart, RowAccess]:
        """Return how a stored sample is cut, and access to it."""
        return self._partition(stored)[0], RowAccess(self.store, stored, self._threads.executor(), empty)

    def close(self) -> None:
        """End the threads and close the files; the next read starts them again."""
        self._threads.close()
        self.store.close()
        self._reads.forget()

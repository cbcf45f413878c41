"""Reads any rank's part of raw point clouds, in the order of their files, without a store. No torch.

One file is one sample. What a store adds: rows in curve order, ghosts within a radius, checksums, statistics.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import chunk_bounds, explicit_bounds
from scidata.core.cache import Cache
from scidata.core.checks import names_of, refuse
from scidata.core.index_map import IndexMap
from scidata.core.options import DEFAULTS, ONLY_GRIDS, SAMPLES, ReadOptions
from scidata.core.types import Empty, IntArray
from scidata.core.urls import Url
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.meshes.order.cuts import cut_bounds, equal_bounds, prefix_of
from scidata.meshes.sample import SampleHeader
from scidata.meshes.samples import read_samples
from scidata.plan.array import MAX_PLAN_BYTES, ArrayPlan
from scidata.plan.totals import ReadPlan
from scidata.read import Job
from scidata.read.context import NO_READ
from scidata.read.threads import ReaderThreads
from scidata.sources.access.fetches import run_each
from scidata.store.format.manifest import StoredMoments
from scidata.store.raw_points.file import FileAccess, PointsFile, described_file
from scidata.store.reading.base import PartReader
from scidata.store.reading.cuts import bounds_of_sample, check_cut
from scidata.store.reading.part import LocalPart, SamplePart
from scidata.store.reading.rows import GatherPlan, RowAccess
from scidata.store.reading.subsample import Draw, make_subsample

_KEPT_SAMPLES = 1024
_RUN_ROWS = 1024  # drawn together as a "chunk" of files that have none


class PointsReader(PartReader):
    """Raw point clouds, cut into ``num_parts`` each: what a ``StoreReader`` is to a store.

    Parameters
    ----------
    path
        A file, a list or a glob; each file is a sample.
    options
        What is read, and how it is cut. ``fields``: default all that have one row per point, and ``pos``, the positions
        as ``(num, 2 or 3)``: float64 unless ``dtype`` says otherwise, angles in degrees. ``bounds`` by sample:
        ``{index: [0, …, N]}``.
    num_parts
        Ranks of the domain.

    Raises
    ------
    SciDataError
        What the first file's metadata shows to be wrong; the same on every rank.
    """

    kind = "points"
    entity = "point"
    entities = ("point",)
    ghosts = "exchange"
    num_hops = 0

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        options: ReadOptions = DEFAULTS,
        *,
        num_parts: int = 1,
    ) -> None:
        _check(options, path if isinstance(path, str) else "SOURCE...")
        wanted = None if options.fields is None else names_of("fields", options.fields)
        self._samples = read_samples(
            path,
            kind="points",
            fields=None if wanted is None else [name for name in wanted if name != "pos"],
            allow_missing=options.allow_missing,
            allow_external=options.allow_external,
        )
        self._num_samples = len(self._samples)
        self.num_parts, self.options = num_parts, options
        self.subsample = make_subsample(options.subsample, block=options.subsample_block, seed=options.subsample_seed)
        self._dtype = None if options.dtype is None else np.dtype(options.dtype)
        self._threads = ReaderThreads(options.num_threads)
        self._clouds: dict[int, PointsFile] = {}
        self._cuts: Cache[SamplePart] = Cache(_KEPT_SAMPLES)
        self._jobs: Cache[Job] = Cache(MAX_PLAN_BYTES, "none")
        self._maps: Cache[IndexMap] = Cache(_KEPT_SAMPLES)
        first = self._cloud(0)
        self.path, self.period = first.source.path, first.period
        self.paths = [path for index in range(self._num_samples) for path in self._samples.inputs(index)]
        self._infos = first.infos
        short = {name.rpartition("/")[2]: name for name in self._infos}
        self.fields = tuple(self._infos)
        if wanted is not None:
            self.fields = tuple(dict.fromkeys(self._known(short.get(name, name)) for name in wanted))
        draw = self.subsample
        if draw is not None and draw.only_one(str(self.path)).entity != "point":
            raise UnknownNameError(f"{self.path}: subsample draws rows of point, not of {draw.entity!r}")
        check_cut(options.bounds, options.weights, what="points are", known=("even", "chunk"))

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Number of files."""
        return self._num_samples

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the samples, after their files."""
        return self._samples.names

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dims of a field."""
        return self.info(name).dims

    def entity_dim(self, name: str) -> int:
        """Return which of them counts the points."""
        return self.info(name).entity_dim

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the dtype in which a field is read."""
        return np.dtype(self.info(name).dtype)

    def counts(self, entity: str) -> IntArray:
        """Return the rows of each sample, ``(num_samples,)`` int64. Opens every file."""
        self._check_entity(entity)
        return np.array([self._cloud(i).num_rows for i in range(self.num_samples)], np.int64)

    def global_shape(self, name: str, index: int, *, epoch: int = 0) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample, or of what ``epoch`` draws from it."""
        cloud, dim = self._cloud(self._checked_index(index)), self.entity_dim(name)
        shape = cloud.shape(self._known(name))
        draw = self._draw(cloud, index % self.num_samples, epoch)
        if draw is None:
            return shape
        return (*shape[:dim], int(draw.count_before(np.array([cloud.num_rows]))[0]), *shape[dim + 1 :])

    def statistics(self, name: str) -> StoredMoments | None:
        """Return None: only a store has them."""
        self._known(name)
        return None

    def fingerprint(self) -> str:
        """Return a digest of what decides the samples: names, sizes and fields. Opens every file."""
        content: dict[str, object] = {
            "samples": [self._samples.names, self.counts("point").tolist()],
            "fields": {name: [self.dims(name), str(self.dtype(name))] for name in self.fields},
            "subsample": None,
        }
        return self._digest(content)

    def _checked_index(self, index: int) -> int:
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"{self.path}: sample {index} is out of range: there are {self.num_samples} samples")
        return index % self.num_samples

    def _cloud(self, index: int) -> PointsFile:
        """Describe a file, which must have the first one's fields."""
        cloud = self._clouds.get(index)
        if cloud is None:
            header = self._samples.header(index)
            assert isinstance(header, SampleHeader)  # of this kind
            cloud = described_file(header, dtype=self._dtype, decode=self.options.decodes)
            if index and cloud.infos != self._infos:
                self._refuse(cloud)
            if len(self._clouds) >= _KEPT_SAMPLES:
                self._clouds.clear()
            self._clouds[index] = cloud
        return cloud

    def _refuse(self, cloud: PointsFile) -> None:
        for name in {**self._infos, **cloud.infos}:
            here, first = cloud.infos.get(name), self._infos.get(name)
            if here != first:
                shown = ["no such field" if x is None else f"{x.dims} {np.dtype(x.dtype)}" for x in (here, first)]
                raise FieldMismatchError(
                    f"{cloud.source.path}: field {name!r}: {shown[0]}, but {self.path} has {shown[1]}; all files of a "
                    "data set have the same fields: choose those that agree with fields="
                )

    # -- cutting -------------------------------------------------------------------------------------------------

    def partition_of(self, index: int) -> SamplePart:
        """Cut a sample; reads the field that weights name."""
        index = self._checked_index(index)
        make = lambda: SamplePart(index=index, entity="point", bounds={"point": self._cut(index)})  # noqa: E731
        return self._cuts.get_or_make(index, make)

    def _cut(self, index: int) -> IntArray:
        cloud, bounds = self._cloud(index), bounds_of_sample(self.options.bounds, index)
        num_rows, num_parts = cloud.num_rows, self.num_parts
        if not isinstance(bounds, str):
            return explicit_bounds(bounds, num_rows, num_parts)
        if self.options.weights is not None:
            return cut_bounds(prefix_of(self._costs(cloud)), num_parts)
        if bounds == "chunk" and cloud.chunk_rows and num_parts < num_rows:
            return chunk_bounds(num_rows, num_parts, edges=np.arange(0, num_rows, cloud.chunk_rows))
        return equal_bounds(num_rows, num_parts)

    def _costs(self, cloud: PointsFile) -> npt.NDArray[np.float64]:
        if isinstance(self.options.weights, str):
            self._known(self.options.weights)
            values = self._access(cloud).rows(self.options.weights, 0, cloud.num_rows)
        else:
            values = np.asarray(self.options.weights)
        if values.shape != (cloud.num_rows,):
            raise ConfigError(
                f"{cloud.source.path}: weights of shape {values.shape} for {cloud.num_rows} points; one cost of each "
                "was expected"
            )
        return values.astype(np.float64)

    def _draw(self, cloud: PointsFile, index: int, epoch: int) -> Draw | None:
        if self.subsample is None:
            return None
        chunk = cloud.chunk_rows or _RUN_ROWS
        return self.subsample.draw(cloud.num_rows, epoch=epoch, index=index, chunk_rows=chunk)

    # -- planning and reading ------------------------------------------------------------------------------------

    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for one rank, from metadata alone (weights named by a field are read).

        Raises
        ------
        IndexError, ConfigError
            Sample or rank out of range.
        """
        index, part = self._checked_index(index), self._checked_part(rank)
        cloud = self._cloud(index)
        access = self._access(cloud)
        start, stop, _, rows = self._rows(cloud, index, part, epoch)
        fields = {}
        for name in self.fields:
            plans: list[ArrayPlan] = []
            for path in cloud.paths(name):
                if rows is None:
                    plans.append(self._job(access, index, name, path, start, stop).plan)
                else:
                    plans += [plan for plan, _ in self._gather(access, path, rows)]
            fields[name] = tuple(plans)
        return ReadPlan(index=index, rank=rank, fields=fields)

    def read(self, index: int, part: int, *, epoch: int = 0, empty: Empty = np.empty) -> LocalPart:
        """Read one part of a sample, or of what ``epoch`` draws from it. Thread-safe; communicates nothing.

        ``empty`` makes the arrays that are read into.

        Raises
        ------
        IndexError, ConfigError, FieldMismatchError
            Sample or part out of range, or a file that does not have the first one's fields.
        MissingChunkError, ShortReadError, ChecksumError, CorruptDataError
            The file is damaged.
        """
        index, part = self._checked_index(index), self._checked_part(part)
        cloud = self._cloud(index)
        start, stop, bounds, rows = self._rows(cloud, index, part, epoch)
        arrays = [(name, path) for name in self.fields for path in cloud.paths(name)]
        own = [self._access(cloud, empty) for _ in arrays]

        def read(access: RowAccess, name: str, path: str) -> npt.NDArray[np.generic]:
            if rows is None:
                return access.run_each([(self._job(access, index, name, path, start, stop), None)])[0]
            gather = self._gather(access, path, rows)
            return access.run_gather(gather, self._dtype_of(name), dim=self.entity_dim(name))

        calls = [functools.partial(read, each, name, path) for each, (name, path) in zip(own, arrays, strict=True)]
        # side by side behind a URL, so that they wait for round trips together
        found = run_each(calls) if isinstance(cloud.source.path, Url) else [call() for call in calls]
        fields = {}
        for name in self.fields:
            parts = [values for (owner, _), values in zip(arrays, found, strict=True) if owner == name]
            fields[name] = cloud.positions(parts, self.dtype("pos")) if name == "pos" else parts[0]
        return LocalPart(
            index=index,
            part=self.partition_of(index),
            index_maps={"point": self._map(index, part, bounds, drawn=rows is not None)},
            fields=fields,
            rows=None if rows is None else {"point": rows},
            stats=sum([each.stats for each in own], NO_READ),
        )

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> PointsPass:
        """Return what goes over all rows of a field that some samples have, of one part's own rows, drawn or not."""
        return PointsPass(self, self._known(name), samples, self._checked_part(rank))

    def original_id(self, index: int, part: int, entity: str, *, rows: IntArray | None = None) -> IntArray:
        """Return the file's row of each row that a part owns, ``(num_owned,)`` int64; ``rows`` are such rows."""
        self._check_entity(entity)
        if rows is not None:
            return rows
        start, stop = self.partition_of(index).owned(entity, self._checked_part(part))
        return np.arange(start, stop, dtype=np.int64)

    def _access(self, cloud: PointsFile, empty: Empty = np.empty) -> RowAccess:
        executor = self._threads.executor()
        return FileAccess(cloud, executor, empty, decode=self.options.decodes, allow_missing=self.options.allow_missing)

    def _rows(self, cloud: PointsFile, index: int, part: int, epoch: int) -> tuple[int, int, IntArray, IntArray | None]:
        """Return the range of rows that a part owns, the bounds of its sample, and the rows where they are drawn."""
        bounds = self.partition_of(index).bounds["point"]
        start, stop = int(bounds[part]), int(bounds[part + 1])
        draw = self._draw(cloud, index, epoch)
        if draw is None:
            return start, stop, bounds, None
        return start, stop, draw.count_before(bounds), draw.rows(start, stop)

    def _gather(self, access: RowAccess, path: str, rows: IntArray) -> GatherPlan:
        return access.plan_gather(path, rows, dim=self._dim(path))

    def _job(self, access: RowAccess, index: int, name: str, path: str, start: int, stop: int) -> Job:
        """Return how a part's rows of an array are read, found once."""
        key = index, path, start, stop
        job = self._jobs.get(key)
        if job is None:
            plan = access.plan(path, np.array([start]), np.array([stop]), dim=self._dim(path))
            job = access.job(plan, self._dtype_of(name))
            self._jobs.put(key, job, plan.num_bytes)
        return job

    def _dim(self, path: str) -> int:
        return self._infos[path].entity_dim if path in self._infos else 0

    def _dtype_of(self, name: str) -> np.dtype[np.generic] | None:
        return None if name == "pos" else self._dtype

    def _map(self, index: int, part: int, bounds: IntArray, *, drawn: bool) -> IndexMap:
        found = None if drawn else self._maps.get((index, part))
        if found is None:
            found = IndexMap(bounds=bounds, part=part, ghosts=np.empty(0, np.int64))
            if not drawn:
                self._maps.put((index, part), found)
        return found

    def close(self) -> None:
        """End the threads and close the files; the next read starts them again."""
        self._threads.close()
        self._jobs.clear()
        for cloud in list(self._clouds.values()):
            cloud.source.close()


def _check(options: ReadOptions, shown: str) -> None:
    """Refuse what means nothing for raw points; ``shown`` are their files."""
    none = "means nothing for points, of which each file is a sample"
    options.refuse(*ONLY_GRIDS, *SAMPLES, why=none)
    refuse({"pool_bytes": bool(options.pool_bytes), "decode": options.by_node}, none)
    options.refuse(
        "cache_dir",
        why="keeps grids and partitioned stores, not raw points; write a store of them (scidata partition SOURCE OUT "
        "--kind points), or copy the files to a local disk as they are",
    )
    if options.halo or options.ghosts is not None:
        given = f"halo={options.halo}" if options.halo else f"ghosts={options.ghosts!r}"
        raise ConfigError(
            f"{given}: raw points are read in the order of their file, in which neighbours lie anywhere; put them "
            f"in order once: scidata partition {shown} OUT --kind points, then open OUT"
        )


class PointsPass:
    """One part of one field of some files, each of which is a row; see :class:`~scidata.core.passes.FieldPass`."""

    num_skipped = 0
    num_tiles = 1
    has_steps = False

    def __init__(self, reader: PointsReader, name: str, samples: IntArray, part: int) -> None:
        self._reader = copy.copy(reader)
        self._reader.fields, self._reader.subsample = (name,), None
        self.name, self._part = name, part
        self.dims = reader.dims(name)
        self.kept = tuple(d for k, d in enumerate(self.dims) if k != reader.entity_dim(name))
        self.dtype, self.units = reader.dtype(name), reader.info(name).units
        self._files = np.unique(samples)
        self.bounds = np.arange(len(self._files) + 1, dtype=np.int64)
        self.is_step = np.zeros(len(self._files), np.bool_)

    def read(self, tile: int, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Read a file's own rows, ``(1, *row)``."""
        return self._reader.read(int(self._files[start]), self._part).fields[self.name][None]

    def places(self, tile: int, dim: str) -> IntArray:
        """Return which of the whole field's rows along ``dim`` a tile has: all of them."""
        return np.arange(self.size(dim), dtype=np.int64)

    def size(self, dim: str) -> int:
        """Return how many rows the field has along a dim other than the points'."""
        return self._reader.global_shape(self.name, 0)[self.dims.index(dim)]

    def labels(self, dim: str) -> None:
        """Return None: points label nothing."""

    def span(self) -> None:
        """Return None: nothing labels files."""

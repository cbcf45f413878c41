"""Reads any rank's part of raw point clouds, in the order of their files, without a store. No torch.

One file is one sample. What a store adds: rows in curve order, ghosts within a radius, checksums, statistics.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from scidata.core.bounds import bounds_of, chunk_bounds, explicit_bounds
from scidata.core.cache import Cache
from scidata.core.checks import names_of, refuse
from scidata.core.index_map import IndexMap
from scidata.core.options import DEFAULTS, ONLY_GRIDS, SAMPLES, ReadOptions
from scidata.core.passes import FieldPass
from scidata.core.types import AnyArray, Array, FloatArray, IntArray
from scidata.errors import ConfigError, UnknownNameError
from scidata.meshes.order.cuts import cut_bounds, equal_bounds, prefix_of
from scidata.meshes.samples import RawSamples, read_samples
from scidata.plan.array import ArrayPlan
from scidata.plan.totals import ReadPlan
from scidata.store.format.manifest import FieldInfo, StoredMoments
from scidata.store.raw_points.files import POS, PointsFiles, coordinate
from scidata.store.reading.base import PartReader
from scidata.store.reading.cuts import bounds_of_sample, check_cut
from scidata.store.reading.numbering import Numbering
from scidata.store.reading.part import LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess, StoredSamples


class PointsReader(PartReader):
    """Raw point clouds, cut into ``num_parts`` each.

    ``path``: a file, a list or a glob; each file is a sample.
    ``options``: the fields, rows and cut. ``fields``: default all that have one row per point, and ``pos``, the
    positions as ``(num, 2 or 3)``: float64 unless ``dtype`` says otherwise, angles in degrees. ``bounds`` by sample:
    ``{index: [0, …, N]}``.
    ``num_parts``: ranks of the domain.
    Raises SciDataError: a fault that the first file's metadata shows; the same on every rank.
    """

    kind = "points"
    entity = "point"
    entities = ("point",)
    files: PointsFiles

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        options: ReadOptions = DEFAULTS,
        *,
        num_parts: int = 1,
    ) -> None:
        self._check(options, path if isinstance(path, str) else "SOURCE...")
        wanted = None if options.fields is None else names_of("fields", options.fields)
        added = {"pos", options.time}  # no fields of the files
        samples = read_samples(
            path,
            kind="points",
            points=options.positions,
            fields=None if wanted is None else [name for name in wanted if name not in added],
            allow_missing=options.allow_missing,
            allow_external=options.allow_external,
            of_files=True,
        )
        self.files = self._files_of(samples, options)
        super().__init__(self.files, options, num_parts)
        self.path, self.period = self.files.path, self.files.file(0).info.period
        self._take_edges(self.files.file(0).info.counts["point"] if len(samples) == 1 else sys.maxsize)
        self.names = samples.names
        self.paths = [path for index in range(len(samples)) for path in samples.inputs(index)]
        self._infos = self._all_fields()
        short = {name.rpartition("/")[2]: name for name in self._infos}
        self.fields = tuple(self._infos)
        if wanted is not None:
            self.fields = tuple(dict.fromkeys(self._known(short.get(name, name)) for name in wanted))
        draw = self.subsample
        if draw is not None and (entity := draw.only_one(str(self.path))) != "point":
            raise UnknownNameError(f"{self.path}: subsample draws rows of point, not of {entity!r}")
        check_cut(options.bounds, options.weights, what="points are", known=("even", "chunk"))
        if isinstance(options.weights, str):
            if options.weights == "measured":
                raise ConfigError(f"{self.path}: weights='measured' is for stores: scidata partition makes one")
            self._known(options.weights)
        if options.cut_like is not None:
            options.refuse(
                "bounds", "weights", "subsample", "edges", why="means nothing where points follow a grid (cut_like)"
            )
            if options.cut_like.num_parts != num_parts:
                raise ConfigError(
                    f"cut_like: a grid in {options.cut_like.num_parts} parts, for a domain of {num_parts} ranks; open "
                    "it with the same mesh"
                )
        self._number_samples()

    def _files_of(self, samples: RawSamples, options: ReadOptions) -> PointsFiles:
        return PointsFiles(samples, options)

    def _all_fields(self) -> Mapping[str, FieldInfo]:
        """Return all fields that samples may have, by the names that users type."""
        return self.files.infos

    def _number_samples(self) -> None:
        """Have each file be a sample."""
        self._number_stored(self.files, len(self.files))

    def _number_stored(self, store: StoredSamples, num: int) -> None:
        """Have each of some stored samples be one."""
        self.store = store
        pos = self._infos["pos"]
        parts = {name: replace(pos, name=name, dims=pos.dims[:1]) for name in map(coordinate, range(3))}
        dtypes = {name: self.dtype(name) for name in self._infos if name != "pos"}  # positions as they are
        numbering = Numbering(store=store, firsts=range(num + 1))
        self._number(numbering, {**self._infos, **parts}, dtypes)

    def _check(self, options: ReadOptions, shown: str) -> None:
        """Refuse options that mean nothing for raw points; ``shown`` are their files."""
        none = "means nothing for points, of which each file is a sample"
        options.refuse(*ONLY_GRIDS, *SAMPLES, why=none)
        refuse({"pool_bytes": bool(options.pool_bytes), "decode": options.by_node}, none)
        options.refuse(
            "cache_dir",
            why="keeps grids and partitioned stores, not raw points; write a store of them (scidata partition SOURCE "
            "OUT --kind points), or copy the files to a local disk as they are",
        )
        check_no_ghosts(options, shown)

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the dtype in which a field is read."""
        return np.dtype(self.info(name).dtype)

    def statistics(self, name: str) -> StoredMoments | None:
        """Return None: only a store has them."""
        self._known(name)
        return None

    def _path_of(self, stored: int) -> str:
        return self.store.source(stored).path

    def fingerprint(self) -> str:
        """Return a digest of the samples' names, sizes and fields. Opens every file."""
        content: dict[str, object] = {
            "samples": [self.names, self.counts("point").tolist()],
            "fields": {name: [self.dims(name), str(self.dtype(name))] for name in self.fields},
            "subsample": None,
        }
        return self._digest(content)

    def _cut(self, stored: int) -> tuple[SamplePart, dict[str, list[ArrayPlan]]]:
        cut, rows = self.options.cut_like, None
        if cut is None:
            bounds = self._bounds(stored)
        else:
            points = self._whole().read(stored, 0).fields["pos"]
            owners = cut.owners(points, on_sphere=self.files.sample(0).on_sphere)
            bounds = bounds_of(np.bincount(owners, minlength=self.num_parts))
            rows = np.argsort(owners, kind="stable")
        return SamplePart(index=stored, entity="point", bounds={"point": bounds}, rows=rows), {}

    def _positions(self, access: RowAccess, stored: int, rows: IntArray) -> AnyArray:
        file = self.files.file(stored)
        paths = [POS if name == "pos" else f"point/{name}" for name in file.positions]
        return file.joined([access.gather(path, rows) for path in paths], np.float64)

    def _whole(self) -> Self:
        """Return a reader of the positions alone, whose samples are one part."""
        reader = copy.copy(self)
        reader.options, reader.num_parts, reader.fields = replace(self.options, cut_like=None), 1, ("pos",)
        reader._partitions, reader.topologies = Cache(0), Cache(0)
        return reader

    def _topology(self, access: RowAccess, cut: SamplePart, part: int) -> LocalTopology:
        if cut.rows is None:
            return super()._topology(access, cut, part)
        rows = IndexMap(bounds=cut.bounds["point"], part=part, ghosts=np.empty(0, np.int64))
        return LocalTopology(index_maps={"point": rows}, rows={"point": cut.rows[slice(*rows.owned)]})

    def _planned(self, index: int, rank: int, fields: Mapping[str, Sequence[ArrayPlan]]) -> ReadPlan:
        """Return the plan of a sample, with the positions of all points where these follow a grid."""
        found = {name: tuple(plans) for name, plans in fields.items()}
        if self.options.cut_like is not None:
            found["pos"] = (*found.get("pos", ()), *self._whole().plan(index).fields["pos"])
        return ReadPlan(index=index, rank=rank, fields=found)

    def _bounds(self, stored: int) -> IntArray:
        bounds, num_rows, num_parts = (
            bounds_of_sample(self.options.bounds, stored),
            self._num_rows(stored),
            self.num_parts,
        )
        if not isinstance(bounds, str):
            return explicit_bounds(bounds, num_rows, num_parts)
        if self.options.weights is not None:
            return cut_bounds(prefix_of(self._costs(stored)), num_parts)
        if bounds == "chunk" and num_parts < num_rows and len(edges := self._chunk_edges(stored)):
            return chunk_bounds(num_rows, num_parts, edges=edges)
        return equal_bounds(num_rows, num_parts)

    def _num_rows(self, stored: int) -> int:
        return self.files.file(stored).num_rows

    def _chunk_edges(self, stored: int) -> IntArray:
        """Return the rows that begin a chunk of the largest array; none if it is not cut along the points."""
        file = self.files.file(stored)
        return np.arange(0, file.num_rows, file.chunk_rows) if file.chunk_rows else np.empty(0, np.int64)

    def _costs(self, stored: int) -> FloatArray:
        """Return the cost of each row: values of a field, which are read, or those given."""
        num_rows = self._num_rows(stored)
        if isinstance(self.options.weights, str):
            access = RowAccess(self.store, stored, self._threads.executor())
            plan = access.plan(self.info(self.options.weights).path, np.array([0]), np.array([num_rows]))
            values = access.run_each([(self.files.job(stored, plan, as_stored=True), None)])[0]
        else:
            values = np.asarray(self.options.weights)
        return self._checked_costs(values, num_rows, self.files.file(stored).source.path)

    def _checked_costs(self, values: Array, num_rows: int, path: str) -> FloatArray:
        if values.shape != (num_rows,):
            raise ConfigError(
                f"{path}: weights of shape {values.shape} for {num_rows} points; one cost of each was expected"
            )
        return values.astype(np.float64)

    def _chunk_rows(self, stored: int) -> int:
        return self.files.file(stored).chunk_rows or super()._chunk_rows(stored)

    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for one rank, from metadata alone (weights named by a field are read)."""
        plan = super().plan(index, rank, epoch=epoch)
        parts = self.files.file(plan.index).positions
        names = [*parts, *(path for path in plan.fields if path.startswith(POS))]
        pos = [each for name in names for each in plan.fields.get(name, ())]
        fields = {name: tuple(pos) if name == "pos" else plan.fields[name] for name in self.fields}
        return self._planned(plan.index, rank, fields)

    def _arrays(self, stored: int) -> tuple[str, ...]:
        pos = self.files.file(stored).positions
        return tuple(array for name in self.fields for array in (pos if name == "pos" else (name,)))

    def _read_fields(self, access: RowAccess, index: int, topology: LocalTopology, stored: int) -> Mapping[str, Array]:
        arrays = self._reads.read(access, self._arrays(stored), index, topology)
        if "pos" not in self.fields:
            return arrays
        file = self.files.file(stored)
        pos = file.joined([arrays[name] for name in file.positions], self.dtype("pos"))
        return {name: pos if name == "pos" else arrays[name] for name in self.fields}

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> PointsPass:
        """Return a pass over all rows of a field in some samples: those that one part owns, drawn or not."""
        return PointsPass(self, self._known(name), samples, self._checked_part(rank))

    def original_id(self, index: int, part: int, entity: str, *, rows: IntArray | None = None) -> IntArray:
        """Return the file's row of each row that a part owns, ``(num_owned,)`` int64; ``rows`` are such rows."""
        self._check_entity(entity)
        if rows is not None:
            return rows
        start, stop = self.partition_of(index).owned(entity, self._checked_part(part))
        return np.arange(start, stop, dtype=np.int64)


def check_no_ghosts(options: ReadOptions, shown: str) -> None:
    """Refuse ghosts of raw points; ``shown`` are their files."""
    if options.halo or options.ghosts is not None:
        given = f"halo={options.halo}" if options.halo else f"ghosts={options.ghosts!r}"
        raise ConfigError(
            f"{given}: raw points are read in the order of their file, in which neighbours lie anywhere; put them "
            f"in order once: scidata partition {shown} OUT --kind points, then open OUT"
        )


class PointsPass(FieldPass):
    """One part of one field of some files, each of which is a row; see :class:`~scidata.core.passes.FieldPass`."""

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

    def read(self, tile: int, start: int, stop: int) -> Array:
        """Read a file's own rows, ``(1, *row)``."""
        return self._reader.read(int(self._files[start]), self._part).fields[self.name][None]

    def size(self, dim: str) -> int:
        """Return how many rows the field has along a dim other than the points'."""
        return self._reader.global_shape(self.name, 0)[self.dims.index(dim)]

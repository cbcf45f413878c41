"""One file of points: what is in it, and its rows, decoded. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout, Empty, Source
from scidata.meshes.formats.base import ArrayReader, without_default_fill
from scidata.meshes.formats.coordinates import in_degrees
from scidata.meshes.formats.points import PointsTopology
from scidata.meshes.sample import SampleHeader
from scidata.plan.array import ArrayPlan
from scidata.read import Job
from scidata.read.context import NO_READ
from scidata.sources.cf import decoding_of
from scidata.store.format.manifest import FieldInfo
from scidata.store.reading.rows import RowAccess


@dataclass(frozen=True, kw_only=True, eq=False)
class PointsFile:
    """One file: its coordinates, in the order x, y, z or as one array, and its fields; not read yet."""

    source: Source
    num_rows: int
    on_sphere: bool
    period: tuple[float, ...] | None
    coordinates: tuple[ArrayLayout, ...]
    layouts: Mapping[str, ArrayLayout]  # of fields and coordinates, by name; coordinates as "pos/<i>"
    infos: Mapping[str, FieldInfo]

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk of the largest array; 0 where it is not cut along the points."""
        name = max(self.layouts, key=lambda n: self.layouts[n].nbytes)
        rows = self.layouts[name].chunks[self.infos[name].entity_dim if name in self.infos else 0]
        return rows if rows < self.num_rows else 0

    def paths(self, name: str) -> list[str]:
        """Return the arrays that a field is read from."""
        return [f"pos/{i}" for i in range(len(self.coordinates))] if name == "pos" else [name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a field, or of the positions."""
        if name != "pos":
            return self.layouts[name].shape
        first = self.coordinates[0]
        return first.shape if len(first.shape) == 2 else (self.num_rows, len(self.coordinates))

    def positions(self, parts: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return rows of the coordinates as ``(num, 2 or 3)``, angles in degrees."""
        points = parts[0] if parts[0].ndim == 2 else np.stack(parts, axis=1)
        if self.on_sphere:
            points = in_degrees(points, self.coordinates)
        return np.ascontiguousarray(points, dtype)


class FileAccess(RowAccess):
    """Rows of the arrays of one file, decoded; coordinates always."""

    def __init__(
        self,
        file: PointsFile,
        executor: Executor | None,
        empty: Empty,
        *,
        decode: bool,
        allow_missing: bool,
    ) -> None:
        self.plans, self.stats, self.empty = {}, NO_READ, empty
        self._file, self._executor, self._decode, self._allow_missing = file, executor, decode, allow_missing

    @property
    def source(self) -> Source:
        """The file."""
        return self._file.source

    def layout(self, path: str) -> ArrayLayout:
        """Return an array's layout."""
        return self._file.layouts[path]

    def run(self, plan: ArrayPlan, dtype: npt.DTypeLike | None = None) -> npt.NDArray[np.generic]:
        """Read what a plan of this object says, decoded."""
        return self.run_each([(self.job(plan, dtype), None)])[0]

    def job(self, plan: ArrayPlan, dtype: npt.DTypeLike | None = None) -> Job:
        """Return a plan of this object, and how its values are decoded, as what can be run any number of times."""
        decode = self._decode or any(plan.layout is layout for layout in self._file.coordinates)
        decoding = decoding_of(plan.layout, None if dtype is None else np.dtype(dtype)) if decode else None
        return Job(plan, self.source, decoding, allow_missing=self._allow_missing)


def described_file(header: SampleHeader, *, dtype: np.dtype[np.generic] | None, decode: bool) -> PointsFile:
    """Return what is in a file; ``dtype`` and ``decode`` say how its values are read."""
    topology = header.topology
    assert isinstance(topology, PointsTopology)
    source = topology.source
    coordinates = tuple(without_default_fill(source, source.arrays[name]) for name in topology.coordinates)
    pos_dtype = np.dtype(np.float64) if dtype is None else dtype
    first = coordinates[0]
    pos = FieldInfo(name="pos", entity="point", dtype=pos_dtype.str, dims=(first.dims[0], "xyz"), entity_dim=0)
    infos, layouts = {"pos": pos}, {f"pos/{i}": layout for i, layout in enumerate(coordinates)}
    for name, field in header.fields.items():
        assert isinstance(field.reader, ArrayReader)
        layouts[name] = layout = field.reader.layout
        decoding = decoding_of(layout, dtype) if decode else None
        read_as = decoding.dtype if decoding is not None else layout.dtype.newbyteorder("=")
        infos[name] = FieldInfo(
            name=name, entity="point", dtype=read_as.str, dims=field.dims, entity_dim=field.entity_dim
        )
    return PointsFile(
        source=source,
        num_rows=topology.sizes["point"],
        on_sphere=topology.on_sphere,
        period=topology.period,
        coordinates=coordinates,
        layouts=layouts,
        infos=infos,
    )

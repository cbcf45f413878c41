"""Files of points: the coordinates and fields of each, described by metadata alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.options import ReadOptions
from scidata.core.types import Array, ArrayLayout, Source
from scidata.core.urls import Url
from scidata.errors import FieldMismatchError
from scidata.meshes.formats.base import ArrayReader, without_default_fill
from scidata.meshes.formats.coordinates import in_degrees
from scidata.meshes.formats.points import PointsTopology
from scidata.meshes.sample import SampleHeader
from scidata.meshes.samples import RawSamples
from scidata.plan.array import ArrayPlan
from scidata.read import Job
from scidata.sources.cf import decoding_of
from scidata.store.format.manifest import ArrayInfo, FieldInfo, SampleInfo

_KEPT_FILES = 1024
POS = "point/pos"


def coordinate(i: int) -> str:
    """Return the name of the array of one of several coordinates."""
    return f"pos/{i}"


@dataclass(frozen=True, kw_only=True, eq=False)
class PointsFile:
    """One file: its coordinates, in the order x, y, z or as one array, and its fields.

    - ``info``: its description as in a store; fields by the names that users type.
    - ``layouts``: of fields and coordinates, by path.
    """

    source: Source
    info: SampleInfo
    coordinates: tuple[ArrayLayout, ...]
    layouts: Mapping[str, ArrayLayout]

    @property
    def num_rows(self) -> int:
        """Number of points."""
        return self.info.counts["point"]

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk of the largest array; 0 if it is not cut along the points."""
        path, layout = max(self.layouts.items(), key=lambda item: item[1].nbytes)
        field = self.info.fields.get(path.removeprefix("point/"))
        rows = layout.chunks[0 if field is None else field.entity_dim]
        return rows if rows < self.num_rows else 0

    @property
    def positions(self) -> tuple[str, ...]:
        """The arrays that positions are read from."""
        return ("pos",) if POS in self.layouts else tuple(map(coordinate, range(len(self.coordinates))))

    def joined(self, parts: Sequence[Array], dtype: npt.DTypeLike) -> Array:
        """Return rows of the coordinates as ``(num, 2 or 3)``, angles in degrees."""
        points = parts[0] if parts[0].ndim == 2 else np.stack(parts, axis=1)
        if self.info.on_sphere:
            points = in_degrees(points, self.coordinates)
        return np.ascontiguousarray(points, dtype)


class PointsFiles:
    """Files of points, of which each is a sample, as :class:`~scidata.store.reading.rows.StoredSamples`."""

    def __init__(self, samples: RawSamples, options: ReadOptions) -> None:
        self._samples, self._options = samples, options
        self._dtype = None if options.dtype is None else np.dtype(options.dtype)
        self._files: dict[int, PointsFile] = {}
        first = self.file(0)
        self.path, self.infos = first.source.path, first.info.fields

    def __len__(self) -> int:
        return len(self._samples)

    def file(self, index: int) -> PointsFile:
        """Describe a file, which must have the first one's fields."""
        file = self._files.get(index)
        if file is None:
            header = self._samples.header(index)
            assert isinstance(header, SampleHeader)  # of this kind
            file = self._described(index, header)
            if index and file.info.fields != self.infos:
                self._refuse(file)
            if len(self._files) >= _KEPT_FILES:
                self._files.clear()
            self._files[index] = file
        return file

    def _refuse(self, file: PointsFile) -> None:
        for name in {**self.infos, **file.info.fields}:
            here, first = file.info.fields.get(name), self.infos.get(name)
            if here != first:
                shown = ["no such field" if x is None else f"{x.dims} {np.dtype(x.dtype)}" for x in (here, first)]
                raise FieldMismatchError(
                    f"{file.source.path}: field {name!r}: {shown[0]}, but {self.path} has {shown[1]}; all files of a "
                    "data set have the same fields: choose those that agree with fields="
                )

    def _described(self, index: int, header: SampleHeader) -> PointsFile:
        topology = header.topology
        assert isinstance(topology, PointsTopology)
        source, num_rows = topology.source, topology.sizes["point"]
        coordinates = tuple(without_default_fill(source, source.arrays[name]) for name in topology.coordinates)
        first = coordinates[0]
        pos_dtype = np.dtype(np.float64) if self._dtype is None else self._dtype
        pos = FieldInfo(name="pos", entity="point", dtype=pos_dtype.str, dims=(first.dims[0], "xyz"), entity_dim=0)
        infos, layouts, shapes = {"pos": pos}, {POS: first}, {POS: first.shape}
        if len(first.shape) != 2:
            layouts = {f"point/{coordinate(i)}": layout for i, layout in enumerate(coordinates)}
            shapes[POS] = num_rows, len(coordinates)
        fields = {name: field for name, field in header.fields.items() if name != self._options.time}
        for name, field in fields.items():
            assert isinstance(field.reader, ArrayReader)
            layout = field.reader.layout
            decoding = decoding_of(layout, self._dtype) if self._options.decodes else None
            dtype = decoding.dtype if decoding is not None else layout.dtype.newbyteorder("=")
            infos[name] = FieldInfo(
                name=name, entity="point", dtype=dtype.str, dims=field.dims, entity_dim=field.entity_dim
            )
            layouts[infos[name].path] = layout
        shapes |= {path: layout.shape for path, layout in layouts.items()}
        info = SampleInfo(
            index=index, num_samples=len(self), name=self._samples.names[index], kind="points", entity="point",
            on_sphere=topology.on_sphere, recipe="", period=topology.period, folder="", counts={"point": num_rows},
            source_counts={"point": num_rows}, bbox=None, block_space=None, fields=infos, statistics={},
            arrays={path: ArrayInfo(shape=shape, dtype="", digest="") for path, shape in shapes.items()},
        )  # fmt: skip
        return PointsFile(source=source, info=info, coordinates=coordinates, layouts=layouts)

    @property
    def is_remote(self) -> bool:
        """Whether reading takes requests, which are best made side by side."""
        return isinstance(self.path, Url)

    def sample(self, index: int) -> SampleInfo:
        """Return the description of a file."""
        return self.file(index).info

    def source(self, index: int) -> Source:
        """Return the source of a file."""
        return self.file(index).source

    def array(self, index: int, path: str) -> ArrayLayout:
        """Return the layout of a file's array."""
        return self.file(index).layouts[path]

    def job(self, index: int, plan: ArrayPlan, *, as_stored: bool = False) -> Job:
        """Return a plan of a file's array, and how its values are decoded: coordinates always.

        ``as_stored``: not as the ``dtype`` that floating fields are read as.
        """
        is_pos = any(plan.layout is layout for layout in self.file(index).coordinates)
        dtype = None if is_pos or as_stored else self._dtype
        decoding = decoding_of(plan.layout, dtype) if is_pos or self._options.decodes else None
        return Job(plan, self.source(index), decoding, allow_missing=self._options.allow_missing)

    def check_unchanged(self) -> None:
        """Do nothing: no manifest describes the files."""

    def doubt(self, index: int) -> bool:
        """Return False: nothing of the files is kept on disk."""
        return False

    def trust(self, index: int) -> None:
        """Do nothing, either."""

    def close(self) -> None:
        """Close all files; the next use opens them again."""
        for file in list(self._files.values()):
            file.source.close()

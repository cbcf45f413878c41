"""Layouts of outputs like an opened mesh, cloud or graph: fields on rows, in the source's order or the store's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scidata.core.types import IntArray, Source
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.output.fields import OutputField, OutputVariable
from scidata.data.output.like import Like
from scidata.data.output.packing import Packing, packing_given
from scidata.data.output.steps import copied_variable, given_steps, kept_attributes
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.geometry import Geometry
from scidata.meshes.samples import read_samples
from scidata.read.arrays import read_array
from scidata.sources import open_source

_NUMBERED = re.compile(r"dim_\d+")  # dims of files that do not name them
_OPTIONS = ("like", "dtype", "scale_factor", "add_offset", "_FillValue", "attributes")
_LOCATIONS = {"node": "node", "cell": "face", "edge": "edge"}  # as the UGRID conventions call them


class RowsLike(Like):
    """The fields of an opened mesh, cloud or graph, as they are to be written; see :func:`scidata.create`."""

    def __init__(
        self, ds: IrregularDataset[Any], fields: object, order: str, sample: int, topology: str | None
    ) -> None:
        if ds.reader.subsample is not None:
            raise ConfigError("create: a data set that draws rows cannot say where all of them belong; open it without")
        if topology is not None and order != "source":
            raise ConfigError("create: topology= has its rows in the source's order; leave out order='store'")
        paths = getattr(ds.reader, "paths", [ds.reader.path])
        self.inputs: list[str] = [*paths, *([] if topology is None else [topology])]  # all that is read
        self._ds, self._reader, self._in_source = ds, ds.reader, order == "source"
        self._sample = range(len(ds))[sample]
        numbering = getattr(ds.reader, "numbering", None)
        self._own_dim: str | None = None if numbering is None else numbering.sample_dim
        self._topology: Source | None = None if topology is None else open_source(topology)
        super().__init__(fields, self._moving, (self._own_dim or "time",), _OPTIONS)

    def _moving(self) -> list[str]:
        """Return the fields that have times; where none has, all but positions."""
        found = [name for name in self._ds.fields if self._own_dim in self._reader.info(name).dims]
        return found or [name for name in self._ds.fields if name != "pos"]

    # -- fields --------------------------------------------------------------------------------------------------

    def _field(self, name: str, options: dict[str, Any]) -> tuple[OutputField, None]:
        what, ds, reader = f"create: field {name!r}", self._ds, self._reader
        like = options.get("like", name)
        if like not in ds.fields:
            raise UnknownNameError(
                f"{what}: {like!r} is none of the data set's{near_matches(str(like), ds.fields)}; say which field a "
                f"new one is like: {{{name!r}: {{'like': {ds.fields[-1]!r}}}}}"
            )
        info, dim = reader.info(like), reader.entity_dim(like)
        given = tuple(ds.global_shape(like, self._sample))
        num_rows = self._counts()[info.entity]
        shape = (*given[:dim], num_rows, *given[dim + 1 :])
        dims = list(reader.dims(like))
        dims[dim] = self._dim_of(info.entity, dims[dim], num_rows)
        attributes = kept_attributes(info.attributes)
        if info.units is not None:
            attributes.setdefault("units", info.units)
        attributes |= self._place_of(info.entity) | (options.get("attributes") or {})
        made = OutputField(
            name=name, dims=tuple(dims), shape=shape, chunks=shape, attributes=attributes, entity=info.entity,
            packing=packing_given(what, options, Packing(dtype=np.dtype(info.dtype).newbyteorder("="))),
            entity_dim=dim, given_shape=given,
        )  # fmt: skip
        return made, None

    def _counts(self) -> Mapping[str, int]:
        """Return the number of rows of each entity in the output."""
        described = getattr(self._reader, "sample_info", None)
        if described is None:
            return {entity: int(self._reader.counts(entity)[self._sample]) for entity in self._reader.entities}
        info = described(self._sample)
        return info.source_counts if self._in_source else info.counts

    def _dim_of(self, entity: str, dim: str, num_rows: int) -> str:
        """Return the name of an entity's dim: the topology's, where its file has another name for that."""
        own = entity if _NUMBERED.fullmatch(dim) else dim
        if self._topology is None:
            return own
        pairs = {p for x in self._topology.arrays.values() for p in zip(x.dims, x.shape, strict=True)}
        sizes = {name: size for name, size in pairs if not _NUMBERED.fullmatch(name)}
        same = [name for name, size in sizes.items() if size == num_rows and name not in self.step_dims]
        if sizes.get(own, num_rows) != num_rows or num_rows not in {size for _, size in pairs}:
            raise ConfigError(
                f"create: topology {self._topology.path} has no dimension {own!r} of {num_rows} rows, which is how "
                f"many of {entity!r} the data set has; give the file that the store was made of"
            )
        return same[0] if own not in sizes and len(same) == 1 else own

    def _place_of(self, entity: str) -> dict[str, str]:
        """Return the attributes by which a field of a UGRID file says where it lives."""
        arrays = {} if self._topology is None else self._topology.arrays
        meshes = [x.name for x in arrays.values() if x.attributes.get("cf_role") == "mesh_topology"]
        if len(meshes) != 1 or entity not in _LOCATIONS:
            return {}
        return {"mesh": meshes[0], "location": _LOCATIONS[entity]}

    def rows(self) -> dict[str, IntArray] | None:
        """Return the source's row of each row that this rank owns, by entity; None where the store's order is kept."""
        if not self._in_source:
            return None
        entities = {self._reader.info(options.get("like", name)).entity for name, options in self._given.items()}
        return {entity: self._reader.original_id(self._sample, self._ds.rank, entity) for entity in sorted(entities)}

    # -- arrays that describe them --------------------------------------------------------------------------------

    def attributes(self) -> dict[str, object]:
        """Return the attributes of the topology's file."""
        return {} if self._topology is None else kept_attributes(self._topology.attributes)

    def variables(self, fields: Mapping[str, OutputField]) -> list[OutputVariable]:
        """Return the arrays of the topology's file that have no times."""
        if self._topology is None:
            return []
        found = []
        for layout in self._constant(self._topology, self._topology.arrays, fields):
            read = functools.partial(read_array, self._topology, layout, allow_missing=True)
            dims = tuple(f"{layout.name}_{dim}" if _NUMBERED.fullmatch(dim) else dim for dim in layout.dims)
            found.append(copied_variable(layout, read, dims, layout.shape))
        return found

    def geometry(self) -> Callable[[], Geometry]:
        """Return a function that reads the mesh of the topology's file, in its order."""
        if self._topology is None:
            raise ConfigError("create: VTKHDF holds the mesh; name the file that has it with topology=")
        return functools.partial(_read_mesh, self._topology.path)

    # -- steps ---------------------------------------------------------------------------------------------------

    def steps(self, times: object) -> tuple[dict[str, int], list[OutputVariable]]:
        """Return the sizes of the steps' dims, and their coordinates."""
        known = [d for name in self._given for d in self._reader.dims(self._given[name].get("like", name))]
        return given_steps(len(self._ds) if times is None else times, self.step_dims[-1], known, {})


def _read_mesh(path: str) -> Geometry:
    raw = read_samples(path, kind="mesh")[0]
    assert isinstance(raw, Geometry)  # of this kind
    return raw

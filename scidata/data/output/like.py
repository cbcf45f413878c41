"""Layouts of outputs like an opened grid, mesh, cloud or graph: fields, coordinates and attributes."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.checks import check_int, names_of
from scidata.core.types import Array, ArrayLayout, IntArray, Source
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.output.fields import (
    OutputField,
    OutputVariable,
    chunks_of,
    coordinate_of,
    copied_variable,
    given_steps,
    kept_attributes,
    shards_of,
    sizes_by_dim,
)
from scidata.data.output.packing import Packing, packing_given, packing_of
from scidata.errors import ConfigError, UnknownNameError, check_known, near_matches
from scidata.grids.labels import known_labels
from scidata.grids.reader import GridReader
from scidata.meshes.geometry import Geometry
from scidata.meshes.samples import read_samples
from scidata.read.arrays import read_array
from scidata.sources import open_source
from scidata.store.format.manifest import FieldInfo


class Like(ABC):
    """The fields of an opened data set, laid out for an output.

    - ``fields``: names, or options by name: see :func:`scidata.create`.
    - ``default``: returns the names where none are given.
    - ``step_dims``: dims of the steps.
    - ``options``: known options of a field.
    """

    def __init__(
        self, fields: object, default: Callable[[], Sequence[str]], step_dims: Sequence[str], options: Sequence[str]
    ) -> None:
        self.step_dims = tuple(step_dims)
        if isinstance(fields, Mapping):
            self._given = {name: dict(given or {}) for name, given in fields.items()}
        else:
            self._given = {name: {} for name in (default() if fields is None else names_of("fields", fields))}
        if not self._given:
            raise ConfigError("create: fields names none; give those that are written")
        for name, given in self._given.items():
            check_known(f"create: field {name!r} has no option", given, options)

    def fields(self, chunks: Mapping[str, int] | None, shards: Mapping[str, int] | None) -> dict[str, OutputField]:
        """Return the fields, with chunks and shards by dimension if given."""
        made = {name: self._field(name, options) for name, options in self._given.items()}
        known = [dim for each, _ in made.values() for dim in each.dims]
        chunk_sizes = sizes_by_dim("chunks", chunks, [*known, *self.step_dims])
        shard_sizes = sizes_by_dim("shards", shards, known)
        fields = {}
        for name, (each, source) in made.items():
            parts = chunks_of(each.dims, each.shape, each.packing.dtype.itemsize, chunk_sizes, source)
            shard = shards_of(name, each.dims, each.shape, parts, shard_sizes)
            fields[name] = replace(each, chunks=parts, shards=shard)
        return fields

    @abstractmethod
    def _field(self, name: str, options: dict[str, Any]) -> tuple[OutputField, Sequence[int] | None]:
        """Return a field in one chunk, and the source's chunks if it suggests any."""

    def _constant(self, source: Source, names: Iterable[str], fields: Mapping[str, object]) -> Iterator[ArrayLayout]:
        """Yield the named arrays of a source that can be copied and have no steps."""
        for name in dict.fromkeys(names):
            layout = source.arrays[name]
            has_steps = bool(set(layout.dims) & set(self.step_dims))
            if name not in fields and not layout.fallback and not has_steps and layout.dtype.kind in "biufSU":
                yield layout


_NAMING = ("coordinates", "grid_mapping", "bounds", "cell_measures", "ancillary_variables")
_GRID_OPTIONS = ("like", "dims", "sizes", "dtype", "scale_factor", "add_offset", "_FillValue", "attributes")


class GridLike(Like):
    """Fields, coordinates and attributes of an opened grid, laid out for an output; see :func:`scidata.create`."""

    def __init__(self, reader: GridReader, fields: object, encoding: str) -> None:
        self.inputs = list(reader.paths)  # all that is read
        self._reader, self._source, self._plain = reader, reader.sources[0], encoding == "plain"
        super().__init__(fields, lambda: reader.fields, reader.sample_dims or ("time",), _GRID_OPTIONS)

    # -- fields --------------------------------------------------------------------------------------------------

    def _field(self, name: str, options: dict[str, Any]) -> tuple[OutputField, Sequence[int] | None]:
        what, reader = f"create: field {name!r}", self._reader
        like = options.get("like", name if name in reader.fields else None)
        check_known(f"{what} is to be like", [] if like is None else [like], reader.fields, ", which is no field")
        if like is None and ("dims" not in options or "dtype" not in options):
            raise UnknownNameError(
                f"{what} is none of the data set's{near_matches(name, reader.fields)}; of another one say what it is: "
                f"{{{name!r}: {{'dims': {reader.dims(reader.fields[0])!r}, 'dtype': 'float32'}}}}"
            )
        layout = None if like is None else reader.layout(like)
        sizes = {dim: size for dim, size in reader.partition.sizes.items() if dim not in self.step_dims}
        sizes |= sizes_by_dim(f"sizes of field {name!r}", options.get("sizes"), list(options.get("dims", ())))
        dims = options.get("dims")
        if dims is None:
            dims = tuple(dim for dim in reader.dims(str(like)) if dim not in self.step_dims)
        for dim in dims:
            if dim not in sizes:
                raise UnknownNameError(
                    f"{what} has dim {dim!r}, which is none of the data set's{near_matches(str(dim), sizes)}; "
                    f"give its size: 'sizes': {{{dim!r}: N}}"
                )
        default = Packing(dtype=np.dtype(np.float32))
        if layout is not None and like is not None:
            decoded = reader.buffer_specs(dict.fromkeys(reader.partition.axis_sizes, 0))[like].dtype
            as_stored = packing_of(layout, is_packed=not reader.options.decodes)
            default = Packing(dtype=np.dtype(decoded)) if self._plain else as_stored
        packing = packing_given(what, options, default)
        attributes = {} if layout is None else kept_attributes(layout.attributes)
        attributes |= options.get("attributes") or {}
        source = None
        if layout is not None and layout.codecs:  # a contiguous array suggests no chunks
            by_dim = dict(zip(layout.dims, layout.chunks, strict=True))
            source = [by_dim.get(dim, 0) for dim in dims]
        shape = tuple(sizes[dim] for dim in dims)
        made = OutputField(
            name=name, dims=tuple(dims), shape=shape, packing=packing, chunks=shape, attributes=attributes
        )
        return made, source

    # -- arrays that describe them --------------------------------------------------------------------------------

    def attributes(self) -> dict[str, object]:
        """Return the source's global attributes."""
        return kept_attributes(self._source.attributes)

    def variables(self, fields: Mapping[str, OutputField]) -> list[OutputVariable]:
        """Return the coordinates of the fields' dims, and the arrays named by them and the fields; none with steps."""
        arrays = self._source.arrays
        dims = list(dict.fromkeys(dim for each in fields.values() for dim in each.dims))
        wanted = [dim for dim in dims if dim in arrays and arrays[dim].dims == (dim,)]
        named = [arrays[name].attributes for name in wanted] + [each.attributes for each in fields.values()]
        for attributes in named:
            for key in _NAMING:
                wanted += [name for name in str(attributes.get(key, "")).replace(":", " ").split() if name in arrays]
        found = [self._variable(layout) for layout in self._constant(self._source, wanted, fields)]
        for dim in [dim for dim in dims if dim not in arrays]:
            names = known_labels(self._reader.series, dim)  # text, which sources leave out
            if names is not None and names.dtype.kind == "U":
                found.append(OutputVariable.of(dim, names[rows_of(self._reader.partition.selected[dim])], {}))
        return found

    def _variable(self, layout: ArrayLayout) -> OutputVariable:
        partition = self._reader.partition
        shape = tuple(partition.sizes.get(dim, size) for dim, size in zip(layout.dims, layout.shape, strict=True))

        def read() -> Array:
            values = read_array(self._source, layout, allow_missing=True)
            for axis, dim in enumerate(layout.dims):
                if dim in partition.selected:
                    values = values.take(rows_of(partition.selected[dim]), axis=axis)
            return values

        return copied_variable(layout, read, layout.dims, shape)

    # -- steps ---------------------------------------------------------------------------------------------------

    def steps(self, times: object) -> tuple[dict[str, int], list[OutputVariable]]:
        """Return the sizes of the step dims, and their coordinates."""
        reader = self._reader
        if times is None:
            if len(self.step_dims) > 1 or reader.field_steps.every != (0,):
                raise ConfigError(
                    "create: samples of several steps, or dimensions, are not one step each; say which steps are "
                    "written with times=[...], a number of steps, or {dim: values}"
                )
            (dim,) = self.step_dims
            return {dim: reader.sample_rows.num}, self._own_times(dim)
        known = [dim for dim in reader.partition.sizes if dim not in self.step_dims]
        said = {name: layout.attributes for name, layout in self._source.arrays.items()}
        return given_steps(times, self.step_dims[-1], known, said)

    def _own_times(self, dim: str) -> list[OutputVariable]:
        layout = self._source.arrays.get(dim)
        if layout is None or layout.dims != (dim,) or dim not in self._reader.partition.sizes:
            return []
        values = self._reader.coordinate(dim)
        return [] if values is None else [coordinate_of(dim, values, layout.attributes)]


_NUMBERED = re.compile(r"dim_\d+")  # dims of files that do not name them
_ROW_OPTIONS = (
    "like", "entity", "components", "dtype", "scale_factor", "add_offset", "_FillValue", "attributes",
)  # fmt: skip
_LOCATIONS = {"node": "node", "cell": "face", "edge": "edge"}  # as the UGRID conventions call them


class RowsLike(Like):
    """The fields of an opened mesh, cloud or graph, laid out for an output; see :func:`scidata.create`."""

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
        super().__init__(fields, self._moving, (self._own_dim or "time",), _ROW_OPTIONS)

    def _moving(self) -> list[str]:
        """Return the fields that have times; if none has, all but positions."""
        found = [name for name in self._ds.fields if self._own_dim in self._reader.info(name).dims]
        return found or [name for name in self._ds.fields if name != "pos"]

    # -- fields --------------------------------------------------------------------------------------------------

    def _field(self, name: str, options: dict[str, Any]) -> tuple[OutputField, None]:
        what = f"create: field {name!r}"
        info, own, dim = self._described(name)
        given = self.tensor_shape(name, self._sample)
        num_rows = self._counts()[info.entity]
        shape = (*given[:dim], num_rows, *given[dim + 1 :])
        dims = list(own)
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

    def _described(self, name: str) -> tuple[FieldInfo, tuple[str, ...], int]:
        """Return a field's description, its dims in a sample, and which of these is its entity's."""
        options, ds, reader = self._given[name], self._ds, self._reader
        what, like, entity = f"create: field {name!r}", options.get("like", name), options.get("entity")
        if entity is not None and "like" not in options:
            check_known(f"{what}: no entity", [entity], reader.entities)
            components = check_int(f"{what}: components", options.get("components", 1), least=1)
            dims = (entity,) if components == 1 else (entity, f"{name}_component")
            dtype = packing_given(what, options, Packing(dtype=np.dtype(np.float32))).dtype.str
            return FieldInfo(name=name, entity=entity, dtype=dtype, dims=dims, entity_dim=0), dims, 0
        if like not in ds.fields:
            raise UnknownNameError(
                f"{what}: {like!r} is none of the data set's{near_matches(str(like), ds.fields)}; say which field a "
                f"new one is like, or what it lives on: {{{name!r}: {{'like': {ds.fields[-1]!r}}}}}, "
                f"{{{name!r}: {{'entity': {reader.entity!r}}}}}"
            )
        return reader.info(like), reader.dims(like), reader.entity_dim(like)

    def tensor_shape(self, name: str, index: int) -> tuple[int, ...]:
        """Return the shape of the tensors to be passed for a field of a sample."""
        info, dims, _ = self._described(name)
        options = self._given[name]
        if info.name == name and "entity" in options and "like" not in options:
            rows = self._reader.sample_info(index).counts[info.entity]
            return (rows, *(options["components"] for _ in dims[1:]))
        return tuple(self._ds.global_shape(options.get("like", name), index))

    def _counts(self) -> Mapping[str, int]:
        """Return the number of rows of each entity in the output."""
        described = getattr(self._reader, "sample_info", None)
        if described is None:
            return {entity: int(self._reader.counts(entity)[self._sample]) for entity in self._reader.entities}
        info = described(self._sample)
        return info.source_counts if self._in_source else info.counts

    def _dim_of(self, entity: str, dim: str, num_rows: int) -> str:
        """Return the name of an entity's dim: the topology's, if its file has another name."""
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
        """Return the attributes that state a field's place in a UGRID file."""
        arrays = {} if self._topology is None else self._topology.arrays
        meshes = [x.name for x in arrays.values() if x.attributes.get("cf_role") == "mesh_topology"]
        if len(meshes) != 1 or entity not in _LOCATIONS:
            return {}
        return {"mesh": meshes[0], "location": _LOCATIONS[entity]}

    def rows(self) -> dict[str, IntArray] | None:
        """Return the source's row of each row that this rank owns, by entity; None if the store's order is kept."""
        if not self._in_source:
            return None
        entities = {self._described(name)[0].entity for name in self._given}
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
        """Return the sizes of the step dims, and their coordinates."""
        known = [dim for name in self._given for dim in self._described(name)[1]]
        return given_steps(len(self._ds) if times is None else times, self.step_dims[-1], known, {})


def _read_mesh(path: str) -> Geometry:
    raw = read_samples(path, kind="mesh")[0]
    assert isinstance(raw, Geometry)  # of this kind
    return raw

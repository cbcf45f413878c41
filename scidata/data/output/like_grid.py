"""Layouts of outputs like an opened grid: its fields, coordinates and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.types import Array, ArrayLayout
from scidata.data.output.fields import OutputField, OutputVariable, sizes_by_dim
from scidata.data.output.like import Like
from scidata.data.output.packing import Packing, packing_given, packing_of
from scidata.data.output.steps import copied_variable, given_steps, kept_attributes, stored_attributes
from scidata.errors import ConfigError, UnknownNameError, check_known, near_matches
from scidata.grids.reader import GridReader
from scidata.read.arrays import read_array

_NAMING = ("coordinates", "grid_mapping", "bounds", "cell_measures", "ancillary_variables")
_OPTIONS = ("like", "dims", "sizes", "dtype", "scale_factor", "add_offset", "_FillValue", "attributes")


class GridLike(Like):
    """Fields, coordinates and attributes of an opened grid, as they are to be written; see :func:`scidata.create`."""

    def __init__(self, reader: GridReader, fields: object, encoding: str) -> None:
        self.inputs = list(reader.paths)  # all that is read
        self._reader, self._source, self._plain = reader, reader.sources[0], encoding == "plain"
        super().__init__(fields, lambda: reader.fields, reader.sample_dims or ("time",), _OPTIONS)

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
        default = Packing(dtype=np.dtype(options.get("dtype", np.float32)))
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
        """Return the attributes of the source itself."""
        return kept_attributes(self._source.attributes)

    def variables(self, fields: Mapping[str, OutputField]) -> list[OutputVariable]:
        """Return the coordinates of the fields' dims, and the arrays that they and the fields name; none with steps."""
        arrays = self._source.arrays
        dims = list(dict.fromkeys(dim for each in fields.values() for dim in each.dims))
        wanted = [dim for dim in dims if dim in arrays and arrays[dim].dims == (dim,)]
        named = [arrays[name].attributes for name in wanted] + [each.attributes for each in fields.values()]
        for attributes in named:
            for key in _NAMING:
                wanted += [name for name in str(attributes.get(key, "")).replace(":", " ").split() if name in arrays]
        return [self._variable(layout) for layout in self._constant(self._source, wanted, fields)]

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
        """Return the sizes of the steps' dims, and their coordinates."""
        reader = self._reader
        if times is None:
            if len(self.step_dims) > 1 or reader.field_steps.every != (0,):
                raise ConfigError(
                    "create: samples of several steps, or dimensions, are not one step each; say which steps are "
                    "written with times=[...], a number of steps, or {dim: values}"
                )
            (dim,) = self.step_dims
            return {dim: reader.num_samples}, self._own_times(dim)
        known = [dim for dim in reader.partition.sizes if dim not in self.step_dims]
        said = {name: layout.attributes for name, layout in self._source.arrays.items()}
        return given_steps(times, self.step_dims[-1], known, said)

    def _own_times(self, dim: str) -> list[OutputVariable]:
        layout = self._source.arrays.get(dim)
        if layout is None or layout.dims != (dim,) or dim not in self._reader.partition.sizes:
            return []
        values = self._reader.coordinate(dim)
        attributes = stored_attributes(layout.attributes)
        return [] if values is None else [OutputVariable.of(dim, values, attributes)]

"""One NetCDF-4 or HDF5 file with contiguous arrays, in which ranks write their rows in place.

The file is made once with the format's own library, which gives each array its place and writes all that describes it.
From then on nothing but values changes, at offsets that are known: each rank writes its own, none needs another's, and
a run that was killed leaves a file as good as before.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from scidata.core.checks import optional_module
from scidata.core.types import Array
from scidata.data.output.fields import OutputField, OutputLayout, stored_attributes
from scidata.data.output.packing import fill_said
from scidata.data.output.places import LocalPlace
from scidata.errors import ConfigError
from scidata.plan.owners import Box
from scidata.sources.unfinished import UNFINISHED


class FlatOutput:
    """A file under construction; every rank writes into it.

    - ``kind``: ``"netcdf"`` or ``"hdf5"``, or that of a class made from this one.
    - ``zlib_level``: of arrays of compressed chunks; None for contiguous ones.
    """

    def __init__(self, place: LocalPlace, layout: OutputLayout, *, kind: str, zlib_level: int | None = None) -> None:
        self._place, self._layout, self._kind, self._zlib_level = place, layout, kind, zlib_level
        self._offsets: dict[str, int] = {}
        self._file = -1

    def create(self) -> None:
        """Make the file, with space for all arrays. For one process."""
        if self._kind == "netcdf":
            self._create_netcdf()
        else:
            self._create_hdf5()

    def _create_netcdf(self) -> None:
        netcdf4 = optional_module("netCDF4", f"{self._place.path}: NetCDF files are made by netCDF4", "netcdf")
        layout = self._layout
        with netcdf4.Dataset(self._place.target, "w", format="NETCDF4") as file:
            file.set_fill_off()
            for dim, size in self._sizes().items():
                file.createDimension(dim, size)
            for each in layout.variables:
                dtype: object = {"e": "f4", "?": "i1", "U": str}.get(each.dtype.char, each.dtype)  # as NetCDF has it
                made = file.createVariable(
                    each.name, dtype, each.dims, fill_value=fill_said(each.attributes, each.dtype)
                )
                made.set_auto_maskandscale(False)  # values are as they are stored
                made.setncatts(attributes_held(each.attributes, "_FillValue"))
                made[...] = each.read()
            for field in layout.fields.values():
                dims, packing = (*layout.step_dims, *field.dims), field.packing
                how: dict[str, object] = {"contiguous": True}
                if self._zlib_level is not None:
                    how = {"chunksizes": layout.chunks_of(field), "zlib": True, "complevel": self._zlib_level}
                made = file.createVariable(
                    field.name, packing.dtype, dims, fill_value=packing.fill, **how
                )  # a step that is missing at the end is an error, so nothing is filled
                made.set_auto_maskandscale(False)
                made.setncatts(attributes_held({**field.attributes, **packing.attributes()}, "_FillValue"))
                if made.size and self._zlib_level is None:
                    made[(0,) * len(dims)] = np.zeros((), packing.dtype)  # now its place in the file is allocated
            file.setncatts(attributes_held(layout.attributes, "_FillValue"))

    def _create_hdf5(self) -> None:
        import h5py

        layout = self._layout
        with h5py.File(self._place.target, "w") as file:
            scales = {v.name for v in layout.variables if v.dims == (v.name,)}
            for each in layout.variables:
                values = each.read() if each.dtype.kind != "U" else each.read().astype(object)
                file.create_dataset(each.name, data=values).attrs.update(attributes_held(each.attributes))
            for dim, size in self._sizes().items():
                if dim not in scales and dim not in file:  # a dimension scale without values holds the name
                    file.create_dataset(dim, shape=(size,), dtype="f4")
                    file[dim].make_scale("This is a netCDF dimension but not a netCDF variable.")
                elif dim in scales:
                    file[dim].make_scale(dim)
            for field in layout.fields.values():
                self._make_array(file, field)
            dims_of = {v.name: v.dims for v in layout.variables}
            dims_of |= {f.name: (*layout.step_dims, *f.dims) for f in layout.fields.values()}
            for name, dims in dims_of.items():
                for i, dim in enumerate(dims):
                    if dim in file and dim != name:
                        file[name].dims[i].attach_scale(file[dim])
            file.attrs.update(attributes_held(layout.attributes))

    def _make_array(self, file: Any, field: OutputField) -> None:
        """Allocate a field in an HDF5 file: contiguous, at once and unfilled; or compressed."""
        import h5py

        created, packing, name = h5py.h5p.create(h5py.h5p.DATASET_CREATE), field.packing, self._name_of(field)
        if self._zlib_level is None:
            created.set_layout(h5py.h5d.CONTIGUOUS)
            created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        else:
            created.set_chunk(self._layout.chunks_of(field))
            created.set_shuffle()
            created.set_deflate(self._zlib_level)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_obj_track_times(False)  # otherwise equal outputs would give different files
        group = file.require_group(name.rpartition("/")[0]) if "/" in name else file
        space, kind = h5py.h5s.create_simple(self._shape_of(field)), h5py.h5t.py_create(packing.dtype)
        h5py.h5d.create(group.id, name.rpartition("/")[2].encode(), kind, space, created)
        file[name].attrs.update(attributes_held({**field.attributes, **packing.attributes()}))

    def _name_of(self, field: OutputField) -> str:
        return field.name

    def _shape_of(self, field: OutputField) -> tuple[int, ...]:
        return (*self._layout.step_dims.values(), *field.shape)

    def _sizes(self) -> dict[str, int]:
        sizes = dict(self._layout.step_dims)
        for variable in self._layout.variables:
            sizes |= dict(zip(variable.dims, variable.shape, strict=True))
        for field in self._layout.fields.values():
            sizes |= dict(zip(field.dims, field.shape, strict=True))
        return sizes

    def resume(self) -> None:
        """Do nothing: rows that a killed process left unfinished are written again, in the same place."""

    def open(self, run: str) -> None:
        """Open the file for writing. For each process, once the file exists."""
        import h5py

        with h5py.File(self._place.target, "r") as file:
            for name, field in self._layout.fields.items():
                array = file[self._name_of(field)]
                found = array.id.get_offset() if array.size else 0
                if found is None or array.shape != self._shape_of(field):
                    raise ConfigError(f"{self._place.path}: field {name!r} has no place in the file")
                self._offsets[name] = found
        self._file = os.open(self._place.target, os.O_RDWR)

    def write(self, each: OutputField, at: Box, values: Array) -> None:
        """Write a box of the array of all steps, as stored."""
        shape = (*self._layout.step_dims.values(), *each.shape)
        _write_box(self._file, self._offsets[each.name], shape, [rows.start for rows in at], values)

    def finish(self) -> None:
        """Do nothing: the file is complete, and its final name says so."""

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_box(file: int, offset: int, shape: tuple[int, ...], starts: list[int], values: Array) -> None:
    """Write a box of an array that lies in C order from ``offset`` on, in as few byte ranges as possible."""
    if not values.size:
        return
    item, lead = values.dtype.itemsize, len(shape)
    while lead and (lead == len(shape) or values.shape[lead] == shape[lead]):
        lead -= 1  # from this dimension on the box is contiguous
    strides = [item * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = offset + sum(start * stride for start, stride in zip(starts, strides, strict=True))
    for index in itertools.product(*(range(n) for n in values.shape[:lead])):
        at = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        run = memoryview(values[index].reshape(-1).view(np.uint8))
        while run:
            written = os.pwrite(file, run, at)
            run, at = run[written:], at + written


def attributes_held(attributes: Mapping[str, object], *left_out: str) -> dict[str, object]:
    """Return the attributes that a file can hold, except those that its format creates, and some others."""
    kept = stored_attributes(attributes).items()
    return {k: v for k, v in kept if k not in (*left_out, UNFINISHED) and not isinstance(v, dict) and v is not None}

"""NetCDF files: NetCDF-4, which is HDF5 with conventions for names, and the flat NetCDF-3.

netCDF4-python is not used: it crashes when threads read. It is the oracle of the tests.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout, ChunkRefs, FindChunk, IntArray
from scidata.sources.access.files import files
from scidata.sources.file_source import FileSource
from scidata.sources.hdf5.source import HDF5Source, check_ends, check_inside
from scidata.sources.hdf5.walk import Attributes, Naming, is_scale, scale_paths, walk
from scidata.sources.index import FileFacts, KeptFile, OnDemand
from scidata.sources.netcdf3 import Header, Variable, read_header
from scidata.sources.twins import At, Block, Metadata

_RENAMED = "_nc4_non_coord_"  # a variable named like a dimension that it does not lie on


class _NetCDF4Naming(Naming):
    hidden_attributes = Naming.hidden_attributes | {
        "_Netcdf4Dimid",
        "_Netcdf4Coordinates",
        "_nc3_strict",
        "_NCProperties",
    }

    def __init__(self, h5: h5py.File) -> None:
        super().__init__(h5)
        self._dim_names: dict[int, str] | None = None
        self._unlimited: dict[str, tuple[str | None, ...]] = {}  # by array: the scale of each axis that can grow

    def array_name(self, path: str) -> str:
        group, base = posixpath.split(path)
        return posixpath.join(group, base.removeprefix(_RENAMED))

    def dims(self, attributes: Attributes, path: str) -> tuple[str, ...]:
        dset = attributes.obj
        if not dset.shape:
            return ()
        scales = scale_paths(attributes, path)
        if None in (largest := dset.maxshape):
            self._unlimited[self.array_name(path)] = tuple(
                scale if most is None else None for scale, most in zip(scales, largest, strict=True)
            )
        ids = attributes.read("_Netcdf4Coordinates") if "_Netcdf4Coordinates" in attributes else None
        if len(scales) > 1 and not any(scales) and ids is not None and len(ids) == len(scales):
            # a coordinate variable of several dimensions is a scale itself, so it can have none attached
            names = self._names_by_id()
            return tuple(names.get(int(d), f"dim_{i}") for i, d in enumerate(ids))
        return tuple(posixpath.basename(scale) if scale else f"dim_{i}" for i, scale in enumerate(scales))

    def finish(self, arrays: dict[str, ArrayLayout]) -> dict[str, ArrayLayout]:
        """Give variables the length of their unlimited dimensions: that of the longest variable on them."""
        lengths: dict[str, int] = {}
        for name, scales in self._unlimited.items():
            for axis, scale in enumerate(scales):
                if scale is not None and name in arrays:
                    lengths[scale] = max(lengths.get(scale, 0), arrays[name].shape[axis])
        for name, scales in self._unlimited.items():
            if name in arrays:
                shape = arrays[name].shape
                full = tuple(n if s is None else lengths[s] for n, s in zip(shape, scales, strict=True))
                if full != shape:
                    arrays[name] = replace(arrays[name], shape=full)
        return arrays

    def _names_by_id(self) -> dict[int, str]:
        if self._dim_names is None:
            self._dim_names = {}
            for path, node, _ in walk(self.h5, allow_external=False, skipped={}):
                attributes = Attributes(node)
                if isinstance(node, h5py.Dataset) and "_Netcdf4Dimid" in attributes and is_scale(attributes):
                    self._dim_names[int(attributes.read("_Netcdf4Dimid"))] = posixpath.basename(path)
        return self._dim_names


class NetCDF4Source(HDF5Source):
    """One NetCDF-4 file: HDF5 with netCDF's names.

    Variables in groups are ``group/name``. Dimensions without a variable are not arrays; text is left out and named
    in ``skipped``; attributes come without HDF5's and netCDF's bookkeeping. A variable that is shorter than its
    unlimited dimension has the dimension's length, and the rest are chunks that were never written.
    """

    format = "netcdf4"
    naming = _NetCDF4Naming


#: Of a NetCDF-3 file: its header, the layouts of its arrays, and all variables.
_Contents: TypeAlias = tuple[Header, Mapping[str, ArrayLayout], Mapping[str, Variable]]


@dataclass(frozen=True, kw_only=True)
class _NetCDF3Metadata(Metadata):
    record_nbytes: int

    def numbers(self, name: str, address: int, at: At) -> Sequence[int]:
        return [address]

    def pieces(self, layout: ArrayLayout, numbers: Sequence[int]) -> Sequence[tuple[int, int]]:
        (num,) = layout.num_chunks
        return [(numbers[0] + k * self.record_nbytes, layout.chunk_nbytes) for k in range(num)]


class NetCDF3Source(FileSource[_Contents]):
    """One NetCDF-3 file: classic, 64-bit offset or 64-bit data.

    A variable without the record dimension is one contiguous chunk; a record variable has one chunk per record,
    which lie ``record_nbytes`` apart. Bytes are big-endian. Text variables are left out and named in ``skipped``.
    """

    format = "netcdf3"

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file."""
        return self._read()[0].attributes

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every numeric variable, in the file's order."""
        return self._read()[1]

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why some variables are not among the arrays, by name."""
        _, arrays, variables = self._read()
        return {name: "text is not read" for name in variables if name not in arrays}

    @property
    def variables(self) -> Mapping[str, Variable]:
        """Every variable, text included."""
        return self._read()[2]

    def read_characters(self, name: str) -> npt.NDArray[np.bytes_]:
        """Read all of a text variable."""
        header, _, variables = self._read()
        layout = self._layout(header, variables[name])
        text = np.empty(layout.shape, "S1")
        self.read_box(layout, tuple(slice(None) for _ in layout.shape), text)
        return text

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates. Pure arithmetic."""
        header, _, variables = self._read()
        variable = self._item(layout, variables)
        chunks = np.asarray(chunks, np.int64).reshape(len(chunks), len(layout.shape))
        check_inside(layout, chunks)
        records: IntArray = chunks[:, 0] if chunks.shape[1] else np.zeros(len(chunks), np.int64)
        apart = bool(layout.shape) and layout.chunks[0] != layout.shape[0]
        offset = records * (header.record_nbytes if apart else 0) + variable.begin
        nbytes = layout.chunk_nbytes
        check_ends(layout, chunks, offset + nbytes, header.file_size)
        return ChunkRefs(
            paths=(str(self.path),),
            path_index=np.zeros(len(chunks), np.int64),
            offset=offset,
            nbytes=np.full(len(chunks), nbytes, np.int64),
        )

    def finder(self, layout: ArrayLayout) -> FindChunk | None:
        """Return the function that finds one chunk: see :obj:`~scidata.core.types.FindChunk`."""
        header, _, variables = self._read()
        if layout.name not in variables:
            return None
        begin, nbytes, path = variables[layout.name].begin, layout.chunk_nbytes, self.path
        step = header.record_nbytes if layout.shape and layout.chunks[0] != layout.shape[0] else 0

        def find(number: int) -> tuple[str, int, int] | None:  # of arrays that are cut along the first dimension alone
            offset = begin + number * step
            return (path, offset, nbytes) if offset + nbytes <= header.file_size else None

        return find

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[np.generic]) -> None:
        """Read a box (positive steps) into ``out``, by the span of bytes that it lies in."""
        header, _, variables = self._read()
        variable = self._item(layout, variables)
        if 0 in out.shape:
            return
        row = np.dtype((layout.dtype, layout.shape[1:]))
        rows = range(*box[0].indices(layout.shape[0])) if box else range(1)
        step = header.record_nbytes if variable.is_record else row.itemsize
        first = variable.begin + rows[0] * step
        nbytes = (rows[-1] - rows[0]) * step + row.itemsize
        raw = files().read(self.path, first, nbytes)  # a memory map ends the process where the file is cut off
        span: npt.NDArray[np.generic] = np.ndarray((rows[-1] - rows[0] + 1,), row, buffer=raw, strides=(step,))
        out[...] = span[(slice(None, None, rows.step), *box[1:])] if box else span[0]

    def _parse(self) -> _Contents:
        header = read_header(self.path)
        numeric = {v.name: self._layout(header, v) for v in header.variables if v.dtype.kind != "S"}
        return header, numeric, {v.name: v for v in header.variables}

    def facts(self, *, look: bool = True) -> FileFacts:
        """Return the description as an index keeps it; variables of text are among its arrays."""
        header, _, variables = self._read()
        arrays = [(self._layout(header, v), {"is_record": v.is_record}, [v.begin]) for v in variables.values()]
        return FileFacts(
            format=self.format, skipped=self.skipped, attributes=header.attributes, arrays=arrays,
            numbers=[header.version, header.num_records, header.record_nbytes, header.file_size],
        )  # fmt: skip

    def metadata(self) -> Metadata:
        """Return the bytes that it was described by."""
        header, _, variables = self._read()
        nbytes = min((variable.begin for variable in variables.values()), default=header.file_size)
        blocks = [Block(0, bytes(files().read(self.path, 0, nbytes)))]
        return _NetCDF3Metadata(blocks=blocks, size=header.file_size, addresses={}, record_nbytes=header.record_nbytes)

    def _restored(self, kept: KeptFile) -> _Contents:
        skipped, names = kept.head.skipped, kept.head.places
        version, num_records, record_nbytes, file_size = kept.numbers

        def variable(name: str) -> Variable:
            layout, more = kept.layout(name)
            return Variable(
                name=name, dims=layout.dims, shape=layout.shape, dtype=layout.dtype, is_record=more["is_record"],
                begin=int(kept.numbers_of(name)[0]), attributes=dict(layout.attributes),
            )  # fmt: skip

        header = Header(
            version=version, num_records=num_records, record_nbytes=record_nbytes, attributes=kept.attributes,
            variables=(), file_size=file_size,
        )  # fmt: skip
        numeric = [name for name in names if name not in skipped]
        arrays = OnDemand(dict.fromkeys(numeric), lambda name: kept.layout(name)[0].in_store(self.path))
        return header, arrays, OnDemand(names, variable)

    def _layout(self, header: Header, variable: Variable) -> ArrayLayout:
        shape = variable.shape
        # records that follow each other without a gap are one contiguous array
        apart = variable.is_record and header.record_nbytes != variable.row_nbytes
        return ArrayLayout(
            store=str(self.path),
            name=variable.name,
            shape=shape,
            dims=variable.dims,
            dtype=variable.dtype,
            chunks=(1, *shape[1:]) if apart else shape,
            axis_order=tuple(range(len(shape))),
            attributes=variable.attributes,
        )

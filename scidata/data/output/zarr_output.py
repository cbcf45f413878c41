"""Zarr v3 and v2: arrays are made once, and one rank writes each chunk."""

from __future__ import annotations

import base64
import functools
import os
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from crc32c import crc32c

from scidata.core.types import Array
from scidata.core.urls import Url
from scidata.data.output.chunks import ChunkFiles, Piece, encoding_threads
from scidata.data.output.fields import OutputField, OutputLayout, OutputVariable
from scidata.data.output.packing import fill_said
from scidata.data.output.places import Place
from scidata.errors import ConfigError, near_matches
from scidata.plan.owners import Box
from scidata.sources.unfinished import UNFINISHED
from scidata.store.format.durable import remove

_CODECS = ("blosc", "lz4", "zstd", "none")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")  # zarr-python writes a chunk under such a name, and renames it
_BLOSC: dict[str, tuple[Literal["zstd", "lz4"], int]] = {
    "blosc": ("zstd", 3),
    "lz4": ("lz4", 5),
}  # codec and level, behind a byte shuffle


class ZarrOutput:
    """A Zarr group of ``zarr_format`` 2 or 3 under construction; codecs as for :func:`scidata.create`."""

    def __init__(self, place: Place, layout: OutputLayout, *, zarr_format: int, codec: str) -> None:
        if codec not in _CODECS:
            raise ConfigError(
                f"create: codec={codec!r} is none that Zarr is written with{near_matches(codec, _CODECS)}"
            )
        self._place, self._layout, self._format, self._codec = place, layout, zarr_format, codec
        self._arrays: dict[str, Any] = {}
        self._files: dict[str, ChunkFiles] = {}  # of arrays written without zarr-python
        self._threads: ThreadPoolExecutor | None = None

    def _store(self) -> Any:
        from zarr.storage import FsspecStore, LocalStore

        target = self._place.target
        if isinstance(target, Url):
            return FsspecStore.from_url(target.target, storage_options=dict(target.options))
        return LocalStore(target)

    def create(self) -> None:
        """Make the group, its arrays and coordinates. For one process."""
        import zarr

        group = zarr.create_group(self._store(), zarr_format=self._format)  # type: ignore[arg-type]
        layout = self._layout
        for each in layout.fields.values():
            self._make(group, each)
        for variable in layout.variables:
            self._put(group, variable)
        text = "written by scidata.create, which has not come to its end; go on with resume=True"
        group.attrs.update({**_plain(layout.attributes), UNFINISHED: text})

    def _make(self, group: Any, each: OutputField) -> None:
        layout, packing = self._layout, each.packing
        fill = packing.fill if packing.fill is not None else (np.nan if packing.dtype.kind == "f" else None)
        said = packing.attributes()
        if packing.fill is not None:
            said["_FillValue"] = _fill_attribute(packing.fill, self._format)
        group.create_array(
            each.name,
            shape=(*layout.step_dims.values(), *each.shape),
            dtype=packing.dtype.newbyteorder("<"),
            chunks=layout.chunks_of(each),
            shards=layout.shards_of(each),
            filters=None,
            compressors=self._compressors(packing.dtype.itemsize),
            # v3 requires a fill value; 0 has no meaning, as readers use the attribute
            fill_value=0 if fill is None and self._format == 3 else fill,
            config={"write_empty_chunks": True},  # else a chunk of fill values cannot be told from a lost one
            **self._named((*layout.step_dims, *each.dims), {**_plain(each.attributes), **_plain(said)}),
        )

    def _named(self, dims: tuple[str, ...], attributes: dict[str, object]) -> dict[str, Any]:
        if self._format == 3:
            return {"dimension_names": list(dims), "attributes": attributes}
        return {"attributes": {**attributes, "_ARRAY_DIMENSIONS": list(dims)}}

    def _compressors(self, itemsize: int) -> list[Any] | None:
        if self._format == 2:
            return None if self._codec == "none" else [self._numcodec()]
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        if self._codec in _BLOSC:
            name, level = _BLOSC[self._codec]
            return [BloscCodec(typesize=itemsize, cname=name, clevel=level, shuffle="shuffle"), Crc32cCodec()]
        return [ZstdCodec(level=3), Crc32cCodec()] if self._codec == "zstd" else [Crc32cCodec()]

    def _numcodec(self) -> Any:
        import numcodecs

        if self._codec in _BLOSC:
            return numcodecs.Blosc(*_BLOSC[self._codec], numcodecs.Blosc.SHUFFLE)
        return numcodecs.Zstd(3)

    def _put(self, group: Any, variable: OutputVariable) -> None:
        values = variable.read()
        fill = fill_said(variable.attributes, values.dtype)
        said = {name: value for name, value in variable.attributes.items() if name != "_FillValue"}
        said |= {} if fill is None else {"_FillValue": _fill_attribute(fill, self._format)}
        array = group.create_array(
            variable.name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=tuple(max(1, size) for size in values.shape),
            filters=None,
            compressors=None,
            fill_value=fill if self._format == 2 else np.zeros((), values.dtype)[()],
            config={"write_empty_chunks": True},
            **self._named(variable.dims, _plain(said)),
        )
        if values.size:
            array[...] = values

    def resume(self) -> None:
        """Remove partial files of a killed process. For one process, while none writes."""
        if not isinstance(self._place.target, Url):
            for folder, _, names in os.walk(self._place.target):
                for name in filter(_PARTIAL.search, names):
                    remove(os.path.join(folder, name))

    def open(self, run: str) -> None:
        """Prepare to write. For each process, once the group exists."""
        import zarr

        group: Any = zarr.open_group(self._store(), mode="r+", zarr_format=self._format)  # type: ignore[arg-type]
        self._arrays = {name: group[name].with_config({"write_empty_chunks": True}) for name in self._layout.fields}
        target = self._place.target
        if not isinstance(target, Url) and self._format == 3:
            self._threads = encoding_threads()
            as_bytes = lambda chunk: chunk.reshape(-1).view(np.uint8)  # noqa: E731
            encode = as_bytes if self._codec == "none" else self._numcodec().encode
            self._files = {
                name: ChunkFiles(
                    os.path.join(target, name), self._threads, chunks=array.chunks, fill=array.fill_value,
                    name_of=array.metadata.encode_chunk_key, encode=functools.partial(with_checksum, encode),
                )
                for name, array in self._arrays.items()
                if self._layout.fields[name].shards is None
            }  # fmt: skip

    def write(self, each: OutputField, at: Box, values: Array) -> None:
        """Write a box of whole chunks of the array of all steps, as stored values."""
        if each.name in self._files:
            self._files[each.name].write(at, values)
        else:
            self._arrays[each.name][at] = values

    def finish(self) -> None:
        """Mark the group as complete and consolidate its metadata. For one process, after all have ended."""
        import zarr

        group = zarr.open_group(self._store(), mode="r+", zarr_format=self._format)  # type: ignore[arg-type]
        group.attrs.put({k: v for k, v in group.attrs.asdict().items() if k != UNFINISHED})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of v3, that other libraries may not know it; xarray does
            zarr.consolidate_metadata(self._store(), zarr_format=self._format)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all files."""
        self._arrays, self._files = {}, {}
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def with_checksum(encode: Callable[[Array], Any], chunk: Array) -> list[Piece]:
    """Append the crc32c to an encoded chunk."""
    body = memoryview(encode(chunk)).cast("B")
    return [body, crc32c(body).to_bytes(4, "little")]


def _fill_attribute(fill: object, zarr_format: int) -> object:
    """Return a fill value as xarray writes it: floats in v3 as a double's bytes in base64, since JSON has no NaN."""
    value = np.asarray(fill)
    if zarr_format == 3 and value.dtype.kind == "f":
        return base64.standard_b64encode(struct.pack("<d", float(value))).decode()
    return value.item()


def _plain(attributes: Mapping[str, object]) -> dict[str, Any]:
    return {name: _as_json(value) for name, value in attributes.items()}


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | np.generic):
        return _as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value

"""Zarr array metadata, v2 and v3, to :class:`~scidata.core.types.ArrayLayout`. Pure: JSON in, descriptions out.

Read from the JSON rather than through zarr-python's array objects, so that a store of thousands of arrays opens in
milliseconds and one array that zarr-python refuses does not keep the others from being listed.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scidata.core.types import ArrayLayout, Codec, IntArray
from scidata.errors import UnsupportedFormatError
from scidata.sources.zarr.codecs import Chain, chain_v2, chain_v3, refuse_pickle
from scidata.sources.zarr.shards import ShardIndex
from scidata.sources.zarr.values import cf_fill_value, check_named, dtype_v2, dtype_v3, fill_value_of

_MAX_BYTES = 2**63 - 1  # offsets and counts are int64
_MAX_INDEX_CHUNKS = 2**24  # of one shard: 16 bytes each are read and held
_MAX_DEPTH = 64  # of lists and objects in each other; so deep is neither an attribute nor a codec
_MAX_CHUNK_BYTES = 2**40  # decoded at once, so a larger claim is a mistake or an attack
_ADDED_BYTES = {"shuffle": 0, "crc32c": 4, "fletcher32": 4}  # codecs whose output has a fixed size
_OWN_CODECS = (Codec(name="crc32c", config={}),)  # of scidata's stores
_KEYS_V3 = frozenset([
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
    "attributes", "dimension_names", "storage_transformers", "consolidated_metadata",
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array's layout, and the naming of its chunks' files.

    - ``prefix``: path of the array's folder inside the store; empty if the store is the array.
    - ``separator``, ``key_start``: between the coordinates of a chunk's key, and the text before them (``"c"`` or
      nothing).
    """

    layout: ArrayLayout
    prefix: str
    separator: str
    key_start: str
    index: ShardIndex | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the part of the array that one file holds."""
        return self.layout.shards or self.layout.chunks

    @cached_property
    def num_files(self) -> tuple[int, ...]:
        """Number of files along each dimension."""
        shards = self.layout.shards
        return (
            tuple(-(-n // c) for n, c in zip(self.layout.shape, shards, strict=True))
            if shards
            else self.layout.num_chunks
        )

    @cached_property
    def per_file(self) -> tuple[int, ...]:
        """Number of chunks that a file holds along each dimension."""
        return tuple(s // c for s, c in zip(self.file_shape, self.layout.chunks, strict=True))

    @cached_property
    def fixed_nbytes(self) -> int | None:
        """Encoded size of every chunk where the codecs leave no choice, else None."""
        if self.layout.fallback or self.layout.edges or any(c.name not in _ADDED_BYTES for c in self.layout.codecs):
            return None
        return self.layout.chunk_nbytes + sum(_ADDED_BYTES[c.name] for c in self.layout.codecs)

    def keys(self, coordinates: IntArray) -> list[str]:
        """Return the keys of files at ``(num, ndim)`` coordinates, relative to the store."""
        return list(map(self.key, coordinates.tolist()))

    def key(self, coordinate: Sequence[int]) -> str:
        """Return the key of one file."""
        return self.key_template % tuple(coordinate)

    def place_of(self, key: str) -> list[int] | None:
        """Return which file of the array has this key, relative to the store; None if none has."""
        parts = re.split("[./]", key[len(self.prefix) :])
        numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 19]
        if len(numbers) < len(self.num_files):
            return None
        place = numbers[len(numbers) - len(self.num_files) :]
        inside = all(i < n for i, n in zip(place, self.num_files, strict=True))
        return place if inside and key == self.key(place) else None  # "007" is no chunk

    @cached_property
    def key_template(self) -> str:
        """The key of a file, with a ``%s`` for each coordinate."""
        parts = [self.key_start] * bool(self.key_start) + ["%s"] * len(self.layout.shape)
        template = self.separator.join(parts) or "0"
        return self.prefix.replace("%", "%%") + "/" + template if self.prefix else template

    @cached_property
    def grid(self) -> IntArray:
        """Number of chunks along each dimension, as an array."""
        return np.array(self.layout.num_chunks, np.int64)


def _sizes(value: object, part: str, where: str, *, least: int, ndim: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise UnsupportedFormatError(f"{where}: {part} must be a list of integers, not {value!r}")
    if ndim is not None and len(value) != ndim:
        raise UnsupportedFormatError(f"{where}: {part} {value} must have {ndim} entries, one per dimension")
    if any(n < least for n in value):
        raise UnsupportedFormatError(f"{where}: {part} {value} has an entry below {least}")
    if math.prod(max(n, 1) for n in value) > _MAX_BYTES // 16:  # 16 bytes: the largest number there is
        raise UnsupportedFormatError(f"{where}: {part} {value} claims more bytes than 64-bit offsets can count")
    return tuple(value)


def _check_chunk(chunks: tuple[int, ...], dtype: np.dtype[np.generic], where: str) -> None:
    nbytes = math.prod(chunks) * dtype.itemsize
    if nbytes > _MAX_CHUNK_BYTES:
        raise UnsupportedFormatError(
            f"{where}: one chunk of shape {chunks} claims {nbytes} bytes, more than the {_MAX_CHUNK_BYTES} that are "
            "decoded at once; the metadata is damaged, or write the array again with smaller chunks"
        )


def _check_depth(meta: object, where: str) -> None:
    """Refuse metadata that nest without end: whoever copies, compares or prints them would run out of stack."""
    level = [meta]
    for _ in range(_MAX_DEPTH):
        inner = [v for node in level for v in (node.values() if isinstance(node, dict) else node)]  # type: ignore[attr-defined]
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return
    raise UnsupportedFormatError(f"{where}: its metadata nest more than {_MAX_DEPTH} deep; write them flatter")


def _attributes(raw: object, where: str) -> dict[str, object]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UnsupportedFormatError(f"{where}: attributes must be an object, not {type(raw).__name__}")
    return dict(raw)


def _dims(names: object, ndim: int) -> tuple[str, ...] | None:
    if not isinstance(names, list) or len(names) != ndim or any(isinstance(n, str) and "\0" in n for n in names):
        return None
    return tuple(n if isinstance(n, str) and n else f"dim_{i}" for i, n in enumerate(names))


# -- v2 -------------------------------------------------------------------------------------------------------------


def _dims_v2(meta: Mapping[str, object], attributes: Mapping[str, object], ndim: int) -> tuple[str, ...] | None:
    """xarray's names, else NCZarr's (which are paths from the root)."""
    names = attributes.get("_ARRAY_DIMENSIONS")
    if names is None:
        for holder in (attributes.get("_nczarr_array"), meta.get("_NCZARR_ARRAY")):
            references = holder.get("dimrefs") if isinstance(holder, dict) else None
            if isinstance(references, list):
                names = [posixpath.basename(r) if isinstance(r, str) else None for r in references]
    return _dims(names, ndim)


def parse_v2(meta: Mapping[str, object], attributes: object, *, store: str, name: str, prefix: str) -> ArrayRecord:
    """Describe an array from its ``.zarray`` and ``.zattrs``.

    ``fallback`` is set if a filter is not one that scidata undoes; whether zarr-python does is not known here.
    Raises UnsupportedFormatError: not an array of numbers, or metadata that makes no sense; RefusedError: a pickle
    among the filters.
    """
    where = f"{store}: array {name!r}"
    if meta.get("zarr_format") != 2:
        raise UnsupportedFormatError(f"{where}: .zarray says zarr_format {meta.get('zarr_format')!r}, not 2")
    _check_depth([meta, attributes], where)
    refuse_pickle([meta.get("filters"), meta.get("compressor")], where)
    dtype = dtype_v2(meta.get("dtype"), where)
    shape = _sizes(meta.get("shape"), "shape", where, least=0)
    chunks = _sizes(meta.get("chunks"), "chunks", where, least=1, ndim=len(shape))
    _check_chunk(chunks, dtype, where)
    separator = meta.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise UnsupportedFormatError(f"{where}: dimension_separator must be '.' or '/', not {separator!r}")
    chain = chain_v2(meta, len(shape), dtype.itemsize, where)
    fill = fill_value_of(meta.get("fill_value"), dtype, where)
    shown = _attributes(attributes, where)
    dims = _dims_v2(meta, shown, len(shape))
    # xarray reads a v2 fill value as CF's _FillValue, and opens only arrays whose dimensions are named
    if dims is not None and fill is not None and dtype.kind in "iufc":
        shown["_FillValue"] = fill.astype(dtype.newbyteorder("="))[()]
    elif "_FillValue" in shown:
        shown["_FillValue"] = cf_fill_value(shown["_FillValue"], dtype)
    layout = ArrayLayout(
        store=store,
        name=name,
        shape=shape,
        dims=dims or tuple(f"dim_{i}" for i in range(len(shape))),
        dtype=dtype,
        chunks=chunks,
        axis_order=chain.axis_order,
        codecs=chain.codecs,
        fill_value=fill,
        attributes={k: v for k, v in shown.items() if k != "_ARRAY_DIMENSIONS" and not k.lower().startswith("_nc")},
        fallback=bool(chain.odd),
    )
    return ArrayRecord(layout=layout, prefix=prefix, separator=separator, key_start="")


# -- v3 -------------------------------------------------------------------------------------------------------------


def _shard_index(config: Mapping[str, object], per_shard: tuple[int, ...], where: str) -> ShardIndex | None:
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise UnsupportedFormatError(f"{where}: shard index_location must be 'start' or 'end', not {location!r}")
    entries = config.get("index_codecs")
    if not isinstance(entries, list):
        raise UnsupportedFormatError(f"{where}: sharding codec without index_codecs")
    chain = chain_v3(entries, len(per_shard) + 1, 8, where)
    names = [c.name for c in chain.codecs]
    if chain.odd or names not in ([], ["crc32c"]) or chain.axis_order != tuple(range(len(per_shard) + 1)):
        return None
    num_chunks = _checked_index(math.prod(per_shard), where)
    return ShardIndex(num_chunks=num_chunks, at_end=location == "end", endian=chain.endian, checksum=bool(names))


def _checked_index(num_chunks: int, where: str) -> int:
    if num_chunks > _MAX_INDEX_CHUNKS:
        raise UnsupportedFormatError(
            f"{where}: a shard of {num_chunks} chunks, but at most {_MAX_INDEX_CHUNKS} are read; the "
            "metadata is damaged, or write the array again with smaller shards or larger chunks"
        )
    return num_chunks


def _sharded(
    entries: Sequence[object], outer: tuple[int, ...], dtype: np.dtype[np.generic], where: str
) -> tuple[Chain, tuple[int, ...], ShardIndex | None]:
    """Read the codecs of a sharded array: inner chain, inner chunk shape and index; odd if not plain sharding."""
    names = [check_named(e, "codec", where)[0] for e in entries]
    _, config = check_named(entries[names.index("sharding_indexed")], "codec", where)
    inner = _sizes(config.get("chunk_shape"), "chunk_shape of shards", where, least=1, ndim=len(outer))
    if any(n % c for n, c in zip(outer, inner, strict=True)):
        raise UnsupportedFormatError(f"{where}: shards of shape {outer} do not divide into chunks of shape {inner}")
    inside = config.get("codecs")
    if not isinstance(inside, list):
        raise UnsupportedFormatError(f"{where}: sharding codec without codecs")
    index = _shard_index(config, tuple(n // c for n, c in zip(outer, inner, strict=True)), where)
    chain = chain_v3(inside, len(outer), dtype.itemsize, where, dtype)
    odd = chain.odd
    if len(names) > 1 or index is None:
        odd += (*(n for n in names if n != "sharding_indexed"), "sharding_indexed")
    return replace(chain, odd=odd), inner, index


def _check_extensions(meta: Mapping[str, object], where: str) -> None:
    if meta.get("storage_transformers"):
        raise UnsupportedFormatError(f"{where}: storage transformers {meta['storage_transformers']!r} are not known")
    for key in meta.keys() - _KEYS_V3:
        entry = meta[key]
        if not (isinstance(entry, dict) and entry.get("must_understand") is False):
            raise UnsupportedFormatError(f"{where}: metadata has an extension {key!r} that must be understood")


def _key_encoding(meta: Mapping[str, object], where: str) -> tuple[str, str]:
    name, config = check_named(meta.get("chunk_key_encoding"), "chunk_key_encoding", where)
    if name not in ("default", "v2"):
        raise UnsupportedFormatError(f"{where}: chunk key encoding {name!r} is not known")
    separator = config.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise UnsupportedFormatError(f"{where}: chunk key separator must be '/' or '.', not {separator!r}")
    return separator, "c" if name == "default" else ""


def _rectilinear(shapes: object, shape: tuple[int, ...], where: str) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the largest chunk of each dimension, and the edges of chunks as in :class:`ArrayLayout`.

    ``shapes``: of each dimension the size of all chunks, or their sizes in turn, some as [size, how many].
    """
    if not isinstance(shapes, list) or len(shapes) != len(shape):
        raise UnsupportedFormatError(f"{where}: chunk_shapes {shapes!r} must have an entry for each of {shape}")
    largest, edges = list[int](), list[tuple[int, ...]]()
    for given, size in zip(shapes, shape, strict=True):
        wrong = f"{where}: chunk_shapes {given!r} are no sizes, or pairs of size and count, that hold {size} rows"
        runs = [run if isinstance(run, list) else [run, 1] for run in (given if isinstance(given, list) else [given])]
        if not runs or any(len(run) != 2 for run in runs):
            raise UnsupportedFormatError(wrong)
        sizes, counts = np.array([_sizes(run, "chunk_shapes", where, least=1) for run in runs], np.int64).T
        largest.append(int(sizes.max()))
        if not isinstance(given, list):
            edges.append(())
            continue
        if counts.sum() > max(size, 1) or sizes @ counts < size:  # at most as many chunks as rows
            raise UnsupportedFormatError(wrong)
        ends = np.cumsum(np.repeat(sizes, counts))
        used = ends[: np.searchsorted(ends, size) + 1] if size else ends[:0]  # chunks past the end hold nothing
        edges.append(() if (sizes == sizes[0]).all() else (0, *used.tolist()))
    return largest, tuple(edges) if any(edges) else ()


def parse_v3(meta: Mapping[str, object], *, store: str, name: str, prefix: str) -> ArrayRecord:
    """Describe an array from its ``zarr.json``; ``fallback`` and errors as for :func:`parse_v2`."""
    where = f"{store}: array {name!r}"
    if meta.get("zarr_format") != 3:
        raise UnsupportedFormatError(f"{where}: zarr.json says zarr_format {meta.get('zarr_format')!r}, not 3")
    _check_depth([meta], where)
    _check_extensions(meta, where)
    refuse_pickle(meta.get("codecs"), where)
    dtype = dtype_v3(meta.get("data_type"), where)
    shape = _sizes(meta.get("shape"), "shape", where, least=0)
    grid, config = check_named(meta.get("chunk_grid"), "chunk_grid", where)
    if grid not in ("regular", "rectilinear"):
        raise UnsupportedFormatError(f"{where}: chunk grid {grid!r} is neither regular nor rectilinear")
    given, edges = config.get("chunk_shape"), tuple[tuple[int, ...], ...]()
    if grid == "rectilinear":
        given, edges = _rectilinear(config.get("chunk_shapes"), shape, where)
    outer = _sizes(given, "chunk_shape", where, least=1, ndim=len(shape))
    entries = meta.get("codecs")
    if not isinstance(entries, list) or not entries:
        raise UnsupportedFormatError(f"{where}: codecs must be a list with at least one entry, not {entries!r}")
    index: ShardIndex | None = None
    if "sharding_indexed" in [check_named(e, "codec", where)[0] for e in entries]:
        chain, chunks, index = _sharded(entries, outer, dtype, where)
    else:
        chain, chunks = chain_v3(entries, len(shape), dtype.itemsize, where, dtype), outer
    if chain.odd:  # the plan then names boxes, and locate() whole files
        chain, chunks, index = replace(chain, axis_order=tuple(range(len(shape)))), outer, None
    if edges and (chain.odd or index is not None):
        odd = "shards" if index is not None else f"codecs {list(chain.odd)}"
        raise UnsupportedFormatError(
            f"{where}: chunks that differ in size, in {odd}; write it without, or in chunks alike"
        )
    _check_chunk(chunks, dtype, where)
    dtype = np.dtype(chain.endian + dtype.str[1:] if dtype.itemsize > 1 else dtype)
    separator, key_start = _key_encoding(meta, where)
    dims = meta.get("dimension_names")
    names = _dims(dims, len(shape))
    spelled = isinstance(dims, list) and all(n is None or isinstance(n, str) for n in dims)
    if dims is not None and (names is None or not spelled):
        raise UnsupportedFormatError(f"{where}: dimension_names {dims!r} do not name {len(shape)} dimensions")
    attributes = _attributes(meta.get("attributes"), where)
    if "_FillValue" in attributes:
        attributes["_FillValue"] = cf_fill_value(attributes["_FillValue"], dtype)
    layout = ArrayLayout(
        store=store,
        name=name,
        shape=shape,
        dims=names or tuple(f"dim_{i}" for i in range(len(shape))),
        dtype=dtype,
        chunks=chunks,
        axis_order=chain.axis_order,
        codecs=chain.codecs,
        shards=outer if index is not None else None,
        fill_value=fill_value_of(meta.get("fill_value"), dtype, where),
        attributes=attributes,
        fallback=bool(chain.odd),
        edges=edges,
    )
    return ArrayRecord(layout=layout, prefix=prefix, separator=separator, key_start=key_start, index=index)


def known_v3(
    shape: tuple[int, ...],
    dtype: str,
    chunks: tuple[int, ...],
    shards: tuple[int, ...],
    *,
    store: str,
    name: str,
    prefix: str,
) -> ArrayRecord:
    """Describe an array of a scidata store without its ``zarr.json``; ``shards``: the files' shape, empty of chunks."""
    found, where = np.dtype(dtype), f"{store}: array {name!r}"
    _check_chunk(chunks, found, where)
    index = None
    if shards:
        num_chunks = _checked_index(math.prod(shards) // math.prod(chunks), where)
        index = ShardIndex(num_chunks=num_chunks, at_end=True, endian="<", checksum=True)
    layout = ArrayLayout(
        store=store,
        name=name,
        shape=shape,
        dims=tuple(f"dim_{i}" for i in range(len(shape))),
        dtype=found,
        chunks=chunks,
        axis_order=tuple(range(len(shape))),
        codecs=_OWN_CODECS,
        shards=shards or None,
        fill_value=np.zeros((), found),
    )
    return ArrayRecord(layout=layout, prefix=prefix, separator="/", key_start="c", index=index)

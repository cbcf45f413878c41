"""Checks the numbers of samples' descriptions against each other: of one sample, or of many rows at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from scidata.errors import RefusedError
from scidata.store.format.entries import MOST, Entry
from scidata.store.format.manifest import CHECKSUMS, SampleInfo
from scidata.store.format.node_sets import relations_of, rows_of_sets, sets_of
from scidata.store.format.samples import Column, value_at
from scidata.store.format.write import BLOCK_ROWS

#: A number of a sample, or that of each of some rows.
_Numbers: TypeAlias = Any
_Shapes: TypeAlias = Mapping[str, Sequence[_Numbers]]


def check_sample(entry: Entry, info: SampleInfo, rows: Mapping[Column, _Numbers] | None = None) -> None:
    """Check a sample whose keys have values of the right kinds, or many that differ from it in numbers.


    Raises CorruptDataError, RefusedError: numbers that no sample has, or not together; the message names the key.
    """
    values = {column.way: numbers for column, numbers in (rows or {}).items()}
    at: Callable[..., _Numbers] = lambda *way: values[way] if way in values else value_at(info, way)  # noqa: E731
    for column, numbers in (rows or {}).items():
        _check_range(entry, column, numbers)
    if info.entity not in info.counts:
        entry.wrong("entity", f"one of {', '.join(info.counts)}")
    if not info.source_counts.keys() >= info.counts.keys():
        entry.wrong("source_counts", f"a number for each of {', '.join(info.counts)}")
    for path in info.arrays:
        if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
            raise RefusedError(f"{entry.where}: 'arrays' names {ascii(path)[:120]}, which is no path inside a sample")
    shapes = {path: [at("arrays", path, "shape", i) for i in range(len(a.shape))] for path, a in info.arrays.items()}
    counts = {name: at("counts", name) for name in info.counts}
    _check_rows(entry, info, shapes, counts)
    _check_layouts(entry, info, shapes, at)
    if info.block_space is not None:
        _check_coordinates(entry, info)
    _check_fields(entry, info, shapes, counts)


def _check_range(entry: Entry, column: Column, numbers: _Numbers) -> None:
    key = column.way[0]
    is_figure = key == "statistics" and column.way[2] != "count"
    negative = column.kind == "int" and not is_figure and key != "bbox" and numbers.min() < 0
    infinite = column.kind == "float" and not np.all(np.isfinite(numbers) | (np.isnan(numbers) & is_figure))
    if negative or infinite:
        entry.fail(str(key), "has a number that no sample has there")


def _any(bad: _Numbers) -> bool:
    return bad if isinstance(bad, bool) else bool(np.any(bad))


def _product(numbers: Sequence[_Numbers]) -> _Numbers:
    return math.prod(numbers, start=1.0)


def _check_rows(entry: Entry, info: SampleInfo, shapes: _Shapes, counts: Mapping[str, _Numbers]) -> None:
    sets, num_rows, num_cells = sets_of(info), counts[info.entity], counts.get("cell", 0)
    if _any(sum(counts[name] for name in sets) != num_rows):
        entry.wrong("counts", f"as many of {info.entity} as of {', '.join(sets)} together")
    for name, (source, _, target) in relations_of(info).items():
        for end in {source, target} - {*sets}:
            entry.wrong("counts", f"rows of the set {end[:80]!a}, of relation {name[:80]!a},")
    num_blocks = -(-num_rows // BLOCK_ROWS)
    rows = {**rows_of_sets(info, counts), "blocks/weight_prefix": num_blocks + 1}
    if info.block_space is not None:
        rows |= {f"{info.entity}/pos": num_rows, "blocks/bbox": num_blocks}
    if "cell/indptr" in info.arrays:
        rows |= {"cell/offsets": num_cells + 1, "cell/connectivity": None, "cell/type": num_cells}
        rows |= {"cell/original_id": num_cells, "cell/indptr": num_rows + 1}
    if {"blocks/touched_by", "blocks/touched_indptr"} & info.arrays.keys():
        rows |= {"blocks/touched_by": None, "blocks/touched_indptr": num_blocks + 1}
    if info.documents is not None:
        rows[CHECKSUMS] = None
    for path, num in rows.items():
        if path not in info.arrays:
            entry.fail("arrays", f"lacks {path!r}, which every such sample has")
        if not shapes[path] or (num is not None and _any(shapes[path][0] != num)):
            entry.fail("arrays", f"has {path!r} of shape {info.arrays[path].shape}, but {num} rows are counted")


def _check_layouts(entry: Entry, info: SampleInfo, shapes: _Shapes, at: Callable[..., _Numbers]) -> None:
    """Check sizes of arrays, of their chunks and files, and that each chunk has a checksum."""
    total: _Numbers = 0.0
    for path, array in info.arrays.items():
        inner = Entry(entry.data["arrays"][path], entry.where, f"'arrays'[{ascii(path)[:80]}]", optional=None)
        itemsize = np.dtype(array.dtype).itemsize
        if _any(
            _product([max(n, 1) if isinstance(n, int) else np.maximum(n, 1) for n in shapes[path]]) * itemsize > MOST
        ):
            inner.wrong("shape", f"a shape of less than 2**63 bytes of {array.dtype}")
        if info.documents is not None and array.chunks is None:
            entry.fail("arrays", f"says nothing of the chunks of {ascii(path)[:80]}")
        if info.documents is not None and (array.shards is None) != (info.version < 3):
            entry.fail("arrays", f"says of some arrays alone how they lie in files, not of {ascii(path)[:80]}")
        chunks = [at("arrays", path, "chunks", i) for i in range(len(array.chunks or ()))]
        if any(_any(n == 0) for n in chunks) or _any(_product(chunks) * itemsize > MOST):
            inner.wrong("chunks", f"the shape of chunks of {array.shape}")
        for i, chunk in enumerate(chunks if array.shards else ()):
            shard = at("arrays", path, "shards", i)
            if _any(shard == 0) or _any(shard % chunk != 0):
                inner.wrong("shards", f"the shape of files of chunks of {array.chunks}")
        if path != CHECKSUMS and array.chunks is not None:
            total = total + _product([-(-n // c) for n, c in zip(shapes[path], chunks, strict=True)])
    if info.documents is None:
        return
    sums = info.arrays[CHECKSUMS]
    fits = len(sums.shape) == 1 and sums.dtype == "<u4" and sums.shards == (None if info.version < 3 else ())
    if not fits or any(_any(at("arrays", CHECKSUMS, key, 0) != total) for key in ("shape", "chunks")):
        entry.fail("arrays", f"has {CHECKSUMS!r} that are not one for each chunk")


def _check_coordinates(entry: Entry, info: SampleInfo) -> None:
    shape = info.arrays[f"{info.entity}/pos"].shape
    if len(shape) != 2:
        entry.fail("arrays", f"has positions of shape {shape}, not a row of coordinates each")
    if info.bbox is not None and len(info.bbox[0]) != shape[1]:
        entry.wrong("bbox", f"corners of {shape[1]} coordinates")
    if info.period is not None and len(info.period) != shape[1]:
        entry.wrong("period", f"a width along each of {shape[1]} coordinates")


def _check_fields(entry: Entry, info: SampleInfo, shapes: _Shapes, counts: Mapping[str, _Numbers]) -> None:
    for path, field in info.fields.items():
        array, name = info.arrays.get(path), ascii(path)[:80]
        if array is None or len(array.shape) != len(field.dims) or array.dtype != field.dtype:
            entry.fail("fields", f"has {name}, of which there is no array of such dims and dtype")
        if field.entity not in counts or _any(shapes[path][field.entity_dim] != counts[field.entity]):
            entry.fail("fields", f"has {name}, whose array has not a row for each {field.entity[:80]!a}")
    for path, figures in info.statistics.items():
        if path not in info.fields:
            entry.fail("statistics", f"has {ascii(path)[:80]}, which is no field")
        tail = shapes[path][info.fields[path].entity_dim + 1 :]
        num = len(figures.count) if isinstance(figures.count, tuple) else None
        if (num is None) != (not tail) or (num is not None and _any(_product(tail) != num)):
            entry.fail("statistics", f"has figures of {ascii(path)[:80]} that are not one for each component")

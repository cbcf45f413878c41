"""Arithmetic that the adapters share: padded connectivity to offsets, blocks of cells, VTK's cell codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, ArrayLayout, BoolArray, ByteArray, IntArray, Source
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError
from scidata.meshes.formats.base import Box, Options, fill_values, read_values
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.ids import blocks
from scidata.sources.cf import array_of

TRIANGLE, POLYGON, QUAD = 5, 7, 9  # VTK's codes


def as_indices(values: AnyArray, where: str) -> IntArray:
    """Return integers as int64; floats are taken where they are whole numbers, NaN becoming the smallest int64."""
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        whole = np.where(missing, 0, values)
        if (whole != np.rint(whole)).any() or (np.abs(whole) > 2**53).any():
            raise CorruptDataError(f"{where}: holds values that are no integers; rows of nodes were expected")
        return np.where(missing, np.iinfo(np.int64).min, whole.astype(np.int64))
    if values.dtype.kind not in "iu":
        raise CorruptDataError(f"{where}: has dtype {values.dtype}, but integers were expected")
    if values.dtype == np.uint64 and (values > np.iinfo(np.int64).max).any():
        # a padding value such as 2**64 - 1 has no int64; any other value as large is out of range in any case
        values = np.where(values > np.iinfo(np.int64).max, np.iinfo(np.int64).max, values)
    return values.astype(np.int64)


def nodes_of_piece(nodes: IntArray, num_nodes: int, first: int) -> IntArray:
    """Return the numbers, among the nodes of all pieces of a mesh, of nodes of the piece that begins at ``first``.

    Numbers that the piece does not have are left for checks to name: another piece's nodes would go unnoticed.
    """
    moved = np.where(nodes < 0, nodes, nodes + first)
    return np.where(nodes >= num_nodes, np.iinfo(np.int64).max, moved)


def read_indices(source: Source, name: str, options: Options, *, box: Box = ()) -> IntArray:
    """Read an array of indices or counts as int64: all of it, or a box of its first dims."""
    return as_indices(read_values(source, name, options, decode=False, box=box), f"{source.path}: field {name!r}")


def check_pointers(source: Source, names: tuple[str, str], pointers: IntArray, num: int, item: str) -> None:
    """Raise CorruptDataError unless the first of two arrays has pointers into the second, ``num`` long, one for each
    ``item`` and the end.
    """
    falls = np.flatnonzero(np.diff(pointers) < 0)
    if pointers[0] != 0 or pointers[-1] != num or len(falls):
        raise CorruptDataError(
            f"{source.path}: field {names[0]!r} must rise from 0 to {num}, the length of {names[1]!r}; it runs from "
            f"{int(pointers[0])} to {int(pointers[-1])}"
            + (f" and falls after {item} {int(falls[0])}" if len(falls) else "")
        )


def start_of(layout: ArrayLayout) -> int:
    """Return the attribute ``start_index`` of an array of node indices: 0 if it has none."""
    said = np.ravel(array_of(layout.attributes.get("start_index", 0))).tolist()
    try:
        start = float(said[0])
        if start == int(start) and abs(start) < 2**53:
            return int(start)
    except (ValueError, IndexError, OverflowError, TypeError):
        pass
    raise CorruptDataError(
        f"{layout.store}: field {layout.name!r}: attribute start_index is {layout.attributes['start_index']}, but an "
        "integer was expected"
    )


def check_start(layout: ArrayLayout, nodes: IntArray, num_nodes: int) -> None:
    """Refuse indices that count from 1 without saying so: read as they are, every node would be the next one's."""
    if "start_index" in layout.attributes or not nodes.size:
        return
    if int(nodes.min()) >= 1 and int(nodes.max()) == num_nodes:
        raise CorruptDataError(
            f"{layout.store}: field {layout.name!r} has no start_index, which means 0, but its indices run from "
            f"{int(nodes.min())} to {num_nodes}, the number of nodes; give it the attribute start_index = 1 (0, if "
            "that is meant)"
        )


def find_padding(
    source: Source, layout: ArrayLayout, raw: AnyArray, rows: IntArray, *, start_index: int, num_nodes: int
) -> BoolArray:
    """Find the padding of rows of nodes: fill values, or anything below the first index if there are none.

    Raises CorruptDataError: a fill value is the index of a node as well; or nothing says whether the number below the
    first index pads rows, or is the first node of indices that begin lower than said.
    """
    padding = np.isnan(raw) if raw.dtype.kind == "f" else np.zeros(raw.shape, bool)
    fills = fill_values(source, layout)
    for fill in fills:
        if start_index <= fill < start_index + num_nodes and (raw == fill).any():
            raise CorruptDataError(
                f"{layout.store}: field {layout.name!r} has the fill value {fill}, which is also the index of a node "
                f"(they run from {start_index} to {start_index + num_nodes - 1}); pad with another value, such as -1"
            )
        padding |= raw == fill
    if fills:
        return padding
    last = start_index + num_nodes - 1
    if start_index > 0 and int(rows.max(initial=0)) == last - 1 and bool((rows == start_index - 1).any()):
        raise CorruptDataError(
            f"{layout.store}: field {layout.name!r} has start_index {start_index}, but its indices run from "
            f"{start_index - 1} to {last - 1}, where {start_index} to {last} were expected; give it the right "
            f"start_index or, where {start_index - 1} pads the rows, the attribute _FillValue = {start_index - 1}"
        )
    return padding | (rows < start_index)


def read_padded_rows(
    source: Source, name: str, options: Options, num_nodes: int, *, rows_first: bool = True, box: Box = ()
) -> tuple[IntArray, BoolArray, int]:
    """Read the nodes of cells or edges as ``(rows, most)`` int64; return them, their padding and their start index.

    ``rows_first`` is False if the array is transposed. Raises the errors of :func:`find_padding`.
    """
    layout, raw = source.arrays[name], read_values(source, name, options, decode=False, box=box)
    raw, start = raw if rows_first else np.ascontiguousarray(raw.T), start_of(layout)
    rows = as_indices(raw, f"{source.path}: field {name!r}")
    return rows, find_padding(source, layout, raw, rows, start_index=start, num_nodes=num_nodes), start


def read_counted_rows(
    source: Source, name: str, sizes_name: str, options: Options, *, counted: str
) -> tuple[IntArray, BoolArray]:
    """Read padded rows whose sizes are in another array; return them, and their padding.

    Raises FieldMismatchError: there is not one size for each row, or one that a row cannot hold; ``counted`` names the
    things.
    """
    rows, sizes = read_indices(source, name, options), read_indices(source, sizes_name, options)
    if sizes.shape != rows.shape[:1] or (sizes.size and (sizes.min() < 0 or sizes.max() > rows.shape[1])):
        raise FieldMismatchError(
            f"{source.path}: field {sizes_name!r} of shape {sizes.shape} has values that {name!r} of shape "
            f"{rows.shape} cannot hold; the number of {counted} was expected"
        )
    return rows, np.arange(rows.shape[1]) >= sizes[:, None]


def ragged_of_padded(rows: IntArray, *, padding: BoolArray, start_index: int) -> tuple[IntArray, IntArray]:
    """Turn ``(num_cells, most)`` padded rows into offsets and 0-based connectivity.

    ``padding`` after a row's last node is dropped; before it, it is a hole, which becomes -1.
    """
    if not padding.any():
        offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
        return offsets, (rows - start_index if start_index else rows).reshape(-1)
    places = np.arange(1, rows.shape[1] + 1)
    sizes = np.where(padding, 0, places).max(axis=1, initial=0)
    kept = places <= sizes[:, None]
    connectivity = rows[kept] - start_index
    connectivity[padding[kept]] = -1
    return bounds_of(sizes), connectivity


def polygon_types(offsets: IntArray) -> ByteArray:
    """Return VTK's code of each face by its number of nodes."""
    sizes = np.diff(offsets)
    types = np.full(len(sizes), POLYGON, np.uint8)
    types[sizes == 3] = TRIANGLE
    types[sizes == 4] = QUAD
    return types


def join_cells(pieces: Sequence[RawCells]) -> RawCells:
    """Put pieces of cells of the same nodes one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    sizes = [np.diff(block.offsets) for block in pieces]
    return RawCells(
        offsets=bounds_of(np.concatenate([np.empty(0, np.int64), *sizes])),
        connectivity=np.concatenate([np.empty(0, np.int64), *(block.connectivity for block in pieces)]),
        cell_type=np.concatenate([np.empty(0, np.uint8), *(block.cell_type for block in pieces)]),
    )


def cells_of_rows(rows: IntArray, *, padding: BoolArray, start_index: int) -> RawCells:
    """Return padded rows as polygons."""
    offsets, connectivity = ragged_of_padded(rows, padding=padding, start_index=start_index)
    return RawCells(offsets=offsets, connectivity=connectivity, cell_type=polygon_types(offsets))


def read_pairs(source: Source, name: str, options: Options, num_nodes: int | None = None) -> IntArray:
    """Read ``edge_index``, 0-based; ``num_nodes``, if it is known, tells indices from 1 that do not say so."""
    return next(pairs_by_blocks(source, name, options, num_nodes, source.arrays[name].shape[1]))


def pairs_by_blocks(source: Source, name: str, options: Options, num_nodes: int | None, num: int) -> Iterator[IntArray]:
    """Read ``edge_index`` as :func:`read_pairs`, at most ``num`` edges at a time; the last come after the check."""
    layout = source.arrays[name]
    start, seen = start_of(layout), Seen()
    for columns in blocks(layout.shape[1], at_once(layout, num, dim=1)) if layout.shape[1] else [slice(0, 0)]:
        pairs = seen.add(read_indices(source, name, options, box=(slice(None), columns)))
        if num_nodes is not None and columns.stop == layout.shape[1]:
            check_start(layout, seen.ends, num_nodes)
        yield pairs - start if start else pairs


def at_once(layout: ArrayLayout, num: int, *, dim: int = 0, num_rows: int | None = None) -> int:
    """Return how many rows, about ``num``, are read at once, so that chunks which must be decoded are once or twice.

    ``num_rows``: of the things that the array has several entries of each, as many on average. All of them, or more,
    stay in one block.
    """
    num_rows = layout.shape[dim] if num_rows is None else num_rows
    if not layout.codecs or not layout.shape[dim] or num >= num_rows:
        return max(num, 1)
    chunk = max(layout.chunks[dim] * num_rows // layout.shape[dim], 1)
    return max(num // chunk, 1) * chunk


class Seen:
    """The lowest and the highest of numbers that come block by block."""

    def __init__(self) -> None:
        self.ends: IntArray = np.empty(0, np.int64)

    def add(self, numbers: IntArray) -> IntArray:
        """Take in some numbers, and return them."""
        if numbers.size:
            every = (*self.ends.tolist(), int(numbers.min()), int(numbers.max()))
            self.ends = np.array([min(every), max(every)])
        return numbers


def num_pairs(layout: ArrayLayout) -> int:
    """Return the number of edges, after checking the shape of ``edge_index``."""
    if len(layout.shape) != 2 or layout.shape[0] != 2:
        remedy = "; transpose it" if len(layout.shape) == 2 and layout.shape[1] == 2 else ""
        raise FieldMismatchError(
            f"{layout.store}: field {layout.name!r} has shape {layout.shape}, but (2, num_edges) was expected: sources "
            f"and destinations{remedy}"
        )
    return layout.shape[1]


GHOSTS = "vtkGhostType"
DUPLICATE, _HIDDEN_POINT, _REFINED_CELL, _HIDDEN_CELL = 1, 2, 8, 32


def check_ghosts(path: str, name: str, values: AnyArray, *, of_cells: bool) -> None:
    """Raise UnsupportedFormatError for copies and hidden rows: read as others are, they would be there twice, or count
    though they do not.
    """
    bits = values.astype(np.int64)
    duplicate = int((bits & DUPLICATE != 0).sum())
    hidden = int((bits & (_HIDDEN_CELL | _REFINED_CELL if of_cells else _HIDDEN_POINT) != 0).sum())
    if duplicate or hidden:
        rows = "cells" if of_cells else "points"
        marked_as = "hidden, or replaced by finer ones"
        if duplicate:
            marked_as = "ghosts, copies that pieces hold of each other's rows"
        raise UnsupportedFormatError(
            f"{path}: {name!r} marks {duplicate or hidden} of {values.size} {rows} as {marked_as}; write the file "
            "without them (ParaView's filter Remove Ghost Information)"
        )

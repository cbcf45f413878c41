"""Exodus II: element blocks of one type each, in NetCDF-3 or NetCDF-4. All blocks are joined, in their order.

The format: SAND92-2137, and the names in the header ``exodusII_int.h``. Variables of nodes and of elements become
fields over time; a block that a variable does not exist on gets NaN. Nodes of quadratic cells are put into VTK's order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, ArrayLayout, Source
from scidata.errors import CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.meshes.formats.arrays import join_cells, polygon_types, read_indices
from scidata.meshes.formats.base import (
    ArrayReader,
    Box,
    Joined,
    Options,
    RawField,
    RawTopology,
    Reader,
    read_values,
)
from scidata.meshes.geometry import Geometry, RawCells
from scidata.sources.kinds import EXODUS_CONNECT
from scidata.sources.text import read_text

#: VTK's code by the first letters of the type and the number of nodes of an element
_TYPES: tuple[tuple[tuple[str, ...], dict[int, int]], ...] = (
    (("SPH", "CIR"), {1: 1}),
    (("BAR", "BEA", "TRU", "ROD", "EDG"), {2: 3, 3: 21}),
    (("TRI",), {3: 5, 6: 22, 7: 34}),
    (("QUA", "SHE"), {3: 5, 4: 9, 8: 23, 9: 28}),
    (("TET",), {4: 10, 10: 24}),
    (("PYR",), {5: 14, 13: 27}),
    (("WED",), {6: 13, 15: 26}),
    (("HEX",), {8: 12, 20: 25, 27: 29}),
)
#: Exodus' position of each of VTK's nodes: edges in the middle come before those on top, face nodes in another order
_ORDERS: dict[int, tuple[int, ...]] = {
    25: (*range(12), *range(16, 20), *range(12, 16)),
    29: (*range(12), *range(16, 20), *range(12, 16), 23, 24, 25, 26, 21, 22, 20),
    26: (*range(9), *range(12, 15), *range(9, 12)),
}


#: How the values of a variable are read, their shape and dtype.
_Values: TypeAlias = tuple[Reader, tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class ExodusTopology(RawTopology):
    """An Exodus mesh; ``blocks`` are the numbers of its element blocks in order."""

    blocks: tuple[int, ...]
    num_dims: int

    def load(self) -> Geometry:
        """Read points and cells."""
        arrays = self.source.arrays
        if "coord" in arrays and "coordx" not in arrays:
            points = np.ascontiguousarray(read_values(self.source, "coord", self.options).T.astype(np.float64))
        else:
            columns = [read_values(self.source, f"coord{c}", self.options) for c in "xyz"[: self.num_dims]]
            points = np.stack(columns, axis=1).astype(np.float64)
        return Geometry(points=points, cells=join_cells([self._block(block) for block in self.blocks]))

    def _block(self, block: int) -> RawCells:
        name = f"connect{block}"
        layout = self.source.arrays[name]
        nodes = read_indices(self.source, name, self.options)
        nodes -= 1
        kind = str(layout.attributes.get("elem_type", "")).strip("\x00 ").upper()
        if kind.startswith("NSI"):
            counts = read_indices(self.source, f"ebepecnt{block}", self.options)
            if counts.sum() != nodes.size:
                raise FieldMismatchError(
                    f"{self.source.path}: field {name!r} has {nodes.size} nodes, but 'ebepecnt{block}' counts "
                    f"{int(counts.sum())}"
                )
            offsets = bounds_of(counts)
            return RawCells(offsets=offsets, connectivity=nodes.reshape(-1), cell_type=polygon_types(offsets))
        size = layout.shape[1] if len(layout.shape) == 2 else 0
        code = next((codes.get(size) for letters, codes in _TYPES if kind.startswith(letters)), None)
        if code is None:
            raise UnsupportedFormatError(
                f"{self.source.path}: field {name!r} of shape {layout.shape} has elem_type {kind!r}, which is not "
                "read; read are SPHERE, BAR, TRI, QUAD, SHELL, TETRA, PYRAMID, WEDGE, HEX and NSIDED of the usual sizes"
            )
        return RawCells.of_kind(nodes[:, _ORDERS[code]] if code in _ORDERS else nodes, code)


@dataclass(frozen=True, kw_only=True)
class Picked:
    """One index of a reader's dimension 1: a variable among those that old files keep in one array."""

    part: Reader
    index: int

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        return self.part((box[0], slice(self.index, self.index + 1), *box[1:]))[:, 0]


def open_topology(source: Source, options: Options) -> ExodusTopology:
    """Describe the mesh of a file."""
    arrays = source.arrays
    blocks = tuple(sorted(int(m[1]) for m in map(EXODUS_CONNECT.fullmatch, arrays) if m))
    if "coordx" in arrays:
        num_dims = next((i for i, c in enumerate("xyz") if f"coord{c}" not in arrays), 3)
        num_nodes = arrays["coordx"].shape[0]
    else:
        num_dims, num_nodes = arrays["coord"].shape
    if num_dims < 2:
        raise UnknownNameError(f"{source.path}: has 'coordx' but no 'coordy'{near_matches('coordy', arrays)}")
    for block in blocks:
        kind = str(arrays[f"connect{block}"].attributes.get("elem_type", "")).upper()
        if kind.startswith("NSI") and f"ebepecnt{block}" not in arrays:
            raise UnknownNameError(f"{source.path}: block {block} has polygons but no 'ebepecnt{block}', their sizes")
    counts = [arrays[f"ebepecnt{b}" if f"ebepecnt{b}" in arrays else f"connect{b}"].shape[0] for b in blocks]
    fields, left_out = _fields(source, options, num_nodes, blocks, counts)
    return ExodusTopology(
        source=source,
        options=options,
        sizes={"node": num_nodes, "cell": sum(counts)},
        not_fields=frozenset(arrays),
        fields=fields,
        left_out=left_out,
        blocks=blocks,
        num_dims=num_dims,
    )


def _fields(
    source: Source, options: Options, num_nodes: int, blocks: tuple[int, ...], counts: list[int]
) -> tuple[dict[str, RawField], dict[str, str]]:
    fields: dict[str, RawField] = {}
    of_nodes = _variables(source, "nod", r"vals_nod_var(\d+)")
    of_elements = _variables(source, "elem", r"vals_elem_var(\d+)eb\d+")
    for entity, kind, variables in (("node", "nodes", of_nodes), ("cell", "elements", of_elements)):
        for k, name in variables:
            parts = [(f"vals_nod_var{k}", num_nodes)]
            if entity == "cell":
                parts = [(f"vals_elem_var{k}eb{block}", count) for block, count in zip(blocks, counts, strict=True)]
            reader, shape, dtype = _values(source, options, parts, k, kind)
            fields[f"{entity}/{name}"] = RawField(
                name=f"{entity}/{name}",
                entity=entity,
                dims=("time_step", entity),
                shape=shape,
                entity_dim=1,
                dtype=dtype,
                reader=reader,
            )
    others = [n for n in source.arrays if re.match(r"vals_(glo|edge|face|nset|sset)_var", n)]
    return fields, dict.fromkeys(others, "lives on neither nodes nor elements")


def _variables(source: Source, kind: str, pattern: str) -> list[tuple[int, str]]:
    """Return number and name of each variable that has values; unnamed ones get Exodus' own."""
    numbers = {int(m[1]) for m in (re.fullmatch(pattern, name) for name in source.arrays) if m}
    if kind == "nod" and "vals_nod_var" in source.arrays:
        numbers |= set(range(1, source.arrays["vals_nod_var"].shape[1] + 1))
    if not numbers:
        return []
    if (layout := source.arrays.get(f"name_{kind}_var")) is not None:
        raise CorruptDataError(f"{source.path}: field {layout.name!r} has shape {layout.shape} of numbers, not of text")
    found = read_text(source, f"name_{kind}_var")
    names = [] if found is None else found[1].ravel().tolist()
    return [(k, names[k - 1] if k <= len(names) and names[k - 1] else f"{kind}_var{k}") for k in sorted(numbers)]


def _values(source: Source, options: Options, parts: Sequence[tuple[str, int]], number: int, kind: str) -> _Values:
    """Return a variable's reader: of the nodes, or of each block that has the variable; of others it is NaN."""
    found: list[Reader | None] = []
    layouts: list[ArrayLayout] = []
    for name, count in parts:
        joint = name not in source.arrays and kind == "nodes"  # old files keep all variables of nodes in one array
        layout = source.arrays.get("vals_nod_var" if joint else name)
        if layout is None:
            found.append(None)
            continue
        if layout.shape[-1:] != (count,) or len(layout.shape) != 2 + joint:
            raise FieldMismatchError(
                f"{source.path}: field {layout.name!r} has shape {layout.shape}, but (time steps, {count} {kind}) was "
                "expected"
            )
        array = ArrayReader(source=source, layout=layout, allow_missing=options.allow_missing)
        found.append(Picked(part=array, index=number - 1) if joint else array)
        layouts.append(layout)
    if not layouts:
        raise FieldMismatchError(
            f"{source.path}: element variable {number} has values only on blocks without a connectivity; "
            f"blocks have {[count for _, count in parts]} elements"
        )
    dtype = np.result_type(*(ArrayReader(source=source, layout=layout).dtype for layout in layouts))
    counts = [count for _, count in parts]
    shape = (max(layout.shape[0] for layout in layouts), sum(counts))
    if len(found) == 1 and found[0] is not None:
        return found[0], shape, dtype
    bounds = tuple(bounds_of(counts).tolist())
    return Joined(parts=tuple(found), dim=1, bounds=bounds, shape=shape, dtype=dtype), shape, dtype

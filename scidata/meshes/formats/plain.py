"""The plain layout: points and cells as arrays of a Zarr, HDF5 or NetCDF store. The one to write when in doubt.

======================== ==================== ================================================================
array                    shape                meaning
======================== ==================== ================================================================
``points``               (N, 2 or 3) float    positions of the nodes. Attribute ``units`` "degrees" or "radians":
                                              longitude and latitude on a sphere. Attribute ``period``: width of
                                              the domain along each coordinate where it wraps, else 0
``cells``                (C, k) integer       the nodes of each cell, 0-based (attribute ``start_index`` for others);
                                              rows may be padded with ``_FillValue``; if missing, with
                                              numbers below the first index
*or* ``cells/offsets``   (C + 1,) integer     the nodes of cell i are ``connectivity[offsets[i]:offsets[i + 1]]``
``cells/connectivity``   (sum of sizes,)
``cells/types``          (C,) integer         VTK's codes (5 triangle, 7 polygon, 9 quad, 10 tetrahedron, 12
                                              hexahedron, 13 wedge, 14 pyramid, …). Optional where all cells are
                                              faces of a 2-D mesh, or where ``cells`` has the attribute
                                              ``cell_type`` ("triangle", "quad", "polygon", "tetra", "hexahedron",
                                              "wedge", "pyramid")
``<name>``               (N, …) or (C, …)     a field of nodes or of cells, by its first dimension
``edge_index``           (2, E) integer       optional, read where ``edges="edge_index"`` asks for it
``node/<name>``,         any                  the same, said by the group: needed where N = C. Other dimensions may
``cell/<name>``                               come first here, such as (time, N)
``graph/<name>``         any                  values of the whole mesh
======================== ==================== ================================================================

Where a store has no groups (NetCDF-3), ``cells_offsets``, ``cells_connectivity`` and ``cells_types`` are read as well.
Named dimensions are believed before lengths. Zarr leaves out chunks of zeros unless told otherwise, and chunks that are
not there are an error: write with ``config={"write_empty_chunks": True}``, or read with ``allow_missing=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from scidata.core.types import ByteArray, IntArray, Source
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, near_matches
from scidata.meshes.formats.arrays import (
    Seen,
    at_once,
    check_pointers,
    check_start,
    num_pairs,
    pairs_by_blocks,
    polygon_types,
    ragged_of_padded,
    read_indices,
    read_padded_rows,
    read_pairs,
    start_of,
)
from scidata.meshes.formats.base import Blocks, Options, RawTopology, fill_values
from scidata.meshes.formats.coordinates import find_points, period_of, points_by_blocks, read_points
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import NUM_NODES
from scidata.meshes.order.ids import blocks
from scidata.sources.kinds import CELL_OFFSETS, CELL_ROWS, EDGE_PAIRS, find_array
from scidata.sources.torch_files import ENTITY_DIMS

_TYPES = {"line": 3, "triangle": 5, "polygon": 7, "quad": 9, "tetra": 10, "hexahedron": 12, "wedge": 13, "pyramid": 14}


@dataclass(frozen=True, kw_only=True)
class PlainTopology(RawTopology):
    """Points and cells. ``rows`` names padded cells; else ``ragged`` their offsets and connectivity."""

    rows: str | None = None
    ragged: tuple[str, str] | None = None
    types: str | None = None
    pairs: str | None = None

    def load(self) -> Geometry:
        """Read points and cells."""
        cells = next(self._cells(max(self.sizes["cell"], 1)))
        edges = None if self.pairs is None else read_pairs(self.source, self.pairs, self.options, self.sizes["node"])
        return Geometry(points=read_points(self), cells=cells, edge_index=edges)

    def by_blocks(self) -> Blocks | None:
        """Describe how points and cells are read some at a time."""
        if self.rows is not None:
            layout = self.source.arrays[self.rows]
            if start_of(layout) > 0 and not fill_values(self.source, layout):
                return None  # only all rows together show whether the number below the first index is padding
        edges = None
        if self.pairs is not None:
            edges = partial(pairs_by_blocks, self.source, self.pairs, self.options, self.sizes["node"])
        return Blocks(points=partial(points_by_blocks, self), cells=self._cells, edges=edges)

    def _cells(self, num: int) -> Iterator[RawCells]:
        """Read at most ``num`` cells at a time; the last come after the check of all indices."""
        num_cells, seen = self.sizes["cell"], Seen()
        layout = self.source.arrays[self.rows or (self.ragged or ("", ""))[1]]
        num = at_once(layout, num, num_rows=num_cells)
        for rows in blocks(num_cells, num) if num_cells else [slice(0, 0)]:
            if self.rows is None:
                offsets, connectivity = self._ragged(rows, seen)
            else:
                nodes, padding, start = read_padded_rows(
                    self.source, self.rows, self.options, self.sizes["node"], box=(rows,)
                )
                seen.add(nodes[~padding] if padding.any() else nodes)
                offsets, connectivity = ragged_of_padded(nodes, padding=padding, start_index=start)
            if rows.stop == num_cells:
                check_start(layout, seen.ends, self.sizes["node"])
            yield RawCells(offsets=offsets, connectivity=connectivity, cell_type=self._types(offsets, rows))

    def _ragged(self, rows: slice, seen: Seen) -> tuple[IntArray, IntArray]:
        assert self.ragged is not None
        names, layout = self.ragged, self.source.arrays[self.ragged[1]]
        num_nodes, num_cells = layout.shape[0], self.sizes["cell"]
        offsets = read_indices(self.source, names[0], self.options, box=(slice(rows.start, rows.stop + 1),))
        fits = offsets[0] >= 0 and offsets[-1] <= num_nodes and not (np.diff(offsets) < 0).any()
        first, last = rows.start == 0, rows.stop == num_cells
        if not fits or (first and offsets[0] != 0) or (last and offsets[-1] != num_nodes):
            every = offsets if first and last else read_indices(self.source, names[0], self.options)
            check_pointers(self.source, names, every, num_nodes, "cell")
        here = slice(int(offsets[0]), int(offsets[-1]))
        connectivity = seen.add(read_indices(self.source, names[1], self.options, box=(here,)))
        connectivity -= start_of(layout)
        return offsets - offsets[0], connectivity

    def _types(self, offsets: IntArray, rows: slice) -> ByteArray:
        where, sizes = self.source.path, np.diff(offsets)
        named = self.coordinates
        flat = (len(named) if len(named) > 1 else self.source.arrays[named[0]].shape[1]) == 2
        if self.types is not None:
            shape = self.source.arrays[self.types].shape
            codes = read_indices(self.source, self.types, self.options, box=(rows,))
            if shape != (self.sizes["cell"],) or (codes.size and (codes.min() < 0 or codes.max() > 255)):
                raise FieldMismatchError(
                    f"{where}: field {self.types!r} of shape {shape} must hold VTK's code (0 to 255) of each of "
                    f"{self.sizes['cell']} cells"
                )
            return codes.astype(np.uint8)
        holder = self.rows or (self.ragged or ("", ""))[1]
        said = self.source.arrays[holder].attributes.get("cell_type")
        if said is None:
            if flat or set(np.unique(sizes).tolist()) <= {3}:
                return polygon_types(offsets)
            raise ConfigError(
                f"{where}: cells of {sorted(set(sizes.tolist()))[:6]} nodes in three dimensions may be faces or "
                f"volumes; write VTK's codes as cells/types, or give {holder!r} the attribute cell_type, such as "
                "'tetra'"
            )
        if not isinstance(said, str) or said not in _TYPES:
            raise UnknownNameError(
                f"{where}: field {holder!r} has cell_type {said!r}, which is unknown{near_matches(str(said), _TYPES)}"
            )
        code = _TYPES[str(said)]
        wrong = np.flatnonzero(sizes != NUM_NODES[code]) if code in NUM_NODES else np.empty(0)
        if len(wrong):
            raise FieldMismatchError(
                f"{where}: field {holder!r}: cell {rows.start + int(wrong[0])} has "
                f"{int(sizes[int(wrong[0])])} nodes, but a {said} has {NUM_NODES[code]}"
            )
        return polygon_types(offsets) if said == "polygon" else np.full(len(sizes), code, np.uint8)


def open_topology(source: Source, options: Options) -> PlainTopology:
    """Describe the mesh of a store.

    Raises UnknownNameError, FieldMismatchError: arrays of the layout are not there, or have not the shapes that were
    expected.
    """
    found = find_points(source, options)
    if found is None:
        raise UnknownNameError(
            f"{source.path}: has cells but no 'points' (N, 2 or 3){near_matches('points', source.arrays)}; "
            "name the coordinates with points="
        )
    layouts, on_sphere = found
    offsets, rows = find_array(source, CELL_OFFSETS), find_array(source, CELL_ROWS)
    ragged: tuple[str, str] | None = None
    arrays = source.arrays
    if offsets is not None:
        stem = offsets.removesuffix("offsets")
        connectivity = find_array(source, [f"{stem}connectivity"])
        types = find_array(source, [f"{stem}{part}" for part in ("types", "type")])
        if connectivity is None:
            raise UnknownNameError(
                f"{source.path}: has {offsets!r} but no {stem + 'connectivity'!r}"
                f"{near_matches(stem + 'connectivity', arrays)}"
            )
        ragged = offsets, connectivity
        for name in ragged:
            if len(arrays[name].shape) != 1 or arrays[offsets].shape[0] < 1:
                raise FieldMismatchError(
                    f"{source.path}: field {name!r} has shape {arrays[name].shape}, but one dimension (and at least "
                    "one offset) was expected"
                )
        num_cells, rows = arrays[offsets].shape[0] - 1, None
    else:
        if rows is None or len(arrays[rows].shape) != 2:
            raise UnknownNameError(f"{source.path}: no cells: neither 'cells' (C, k) nor 'cells/offsets'")
        types = find_array(source, ["cells_types", "cells/types", "cell_types"])
        num_cells = arrays[rows].shape[0]
    sizes = {"node": layouts[0].shape[0], "cell": num_cells}
    pairs = find_array(source, EDGE_PAIRS)
    own_edges = pairs if options.edges == "edge_index" else None
    if own_edges is not None:
        sizes["edge"] = num_pairs(arrays[own_edges])
    structure = {n for n in (rows, *(ragged or ()), types, pairs) if n} | {layout.name for layout in layouts}
    entity_of_dim = dict(ENTITY_DIMS) if source.format == "torch" else {}
    entity_of_dim[layouts[0].dims[0]] = "node"
    for per_cell in (rows, types):
        if per_cell is not None:
            entity_of_dim[arrays[per_cell].dims[0]] = "cell"
    return PlainTopology(
        source=source,
        options=options,
        on_sphere=on_sphere,
        sizes=sizes,
        entity_of_dim=entity_of_dim,
        not_fields=frozenset(structure),
        period=period_of(layouts, on_sphere=on_sphere),
        leading_only=True,
        coordinates=tuple(layout.name for layout in layouts),
        rows=rows,
        ragged=ragged,
        types=types,
        pairs=own_edges,
    )

"""One raw sample put in order: its edges made, its rows ordered, everything numbered anew. What the store writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import IntArray
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, near_matches
from scidata.meshes.formats.base import RawField
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import cell_owner, edges_of_cells
from scidata.meshes.order.csr import CSR, csr_from_edges
from scidata.meshes.order.faces import edges_across_faces
from scidata.meshes.order.faults import Repaired
from scidata.meshes.order.hilbert import order_hilbert
from scidata.meshes.order.ids import NodeIds, id_dtype
from scidata.meshes.order.mesh_edges import AlongMesh, along_mesh_edges
from scidata.meshes.order.neighbours import knn_edges, radius_edges
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.order.rcb import order_rcb
from scidata.meshes.sample import RawSample, parse_edges
from scidata.store.format.arrays import stored_dtype
from scidata.store.format.manifest import FieldInfo, SampleHead
from scidata.store.format.write import FieldData, OrderedCells, OrderedSample

#: The orders that there are.
ORDERS = ("hilbert", "rcb", "metis", "rows")


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """How rows are ordered: ``order``, and the ``weights`` whose prefix sums the store keeps.

    ``weights``: None for 1 a row, ``"edges"`` for the edges that end at it, else a field of the nodes or points.

    Raises
    ------
    ConfigError
        There is no such order.
    """

    order: str = "hilbert"
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            hint = near_matches(self.order, ORDERS)
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}{hint}")


def order_sample(
    raw: RawSample, options: OrderOptions, head: SampleHead, repaired: Repaired | None = None
) -> OrderedSample:
    """Make a sample's edges, order its rows and number everything anew.

    Parameters
    ----------
    raw
        As read.
    head
        What is said of it; what there is to say of its order is added to the notes.
    repaired
        Its arrays without the rows that cannot be used; None where ``raw`` was found sound: ids in range, no cell
        without nodes, finite coordinates.

    Raises
    ------
    ConfigError
        The order needs coordinates or edges that the sample lacks.
    FieldMismatchError
        A field has not one row per entity.
    """
    entity = raw.entity
    sound = raw if repaired is None else _sound(raw, repaired)
    pos, kept = raw.points, None if repaired is None else repaired.kept_nodes
    if entity == "cell":
        kept = None if repaired is None else repaired.kept_cells
        sound = _with_cells_as_rows(sound)
        pos = _at_source_rows(sound.points, kept, raw.sizes["cell"])
    edge_index, made = _edges_of(sound)
    order, found = _order_of(sound, edge_index, options.order)
    new_ids: NodeIds = np.empty(len(order), id_dtype(len(order)))
    new_ids[order] = np.arange(len(order))
    edges = None if edge_index is None else csr_from_edges(new_ids[edge_index[0]], new_ids[edge_index[1]], len(order))
    along = _along_mesh(raw, edge_index, repaired)
    signs: tuple[FieldData, ...] = ()
    if along is not None and edges is not None:
        signs = (_orientation(along.orientation[edges.edge_id]),)
        edges = replace(edges, edge_id=along.rows[edges.edge_id])
        if along.num_unused:
            made.append(f"{along.num_unused} edges of the mesh belong to no cell: their values are left out")
    cells = None if sound.cells is None else _ordered_cells(sound.cells, new_ids)
    if repaired is not None:  # from here on rows are the source's
        order = _source_rows(order, kept)
        if cells is not None:
            cells = replace(cells, original_id=_source_rows(cells.original_id, repaired.kept_cells))
        if edges is not None and along is None:
            edges = replace(edges, edge_id=_source_rows(edges.edge_id, repaired.kept_edges))
    return OrderedSample(
        **replace(head, notes=(*head.notes, *made, *found)).head(),
        order=order,
        pos=pos,
        weights=_weights_of(raw, options.weights, entity, edges, order),
        cells=cells,
        edges=edges,
        source_counts=raw.sizes,
        fields=(*(_field_data(raw, name, field) for name, field in raw.fields.items()), *signs),
    )


def _sound(raw: RawSample, repaired: Repaired) -> RawSample:
    """Return the repaired arrays as a sample without fields, in the numbering of the rows that were kept."""
    num_nodes = raw.num_nodes if repaired.kept_nodes is None else len(repaired.kept_nodes)
    return replace(raw, **vars(repaired.geometry), num_nodes=num_nodes, fields={})


def _with_cells_as_rows(raw: RawSample) -> RawSample:
    """Return a sample whose rows are the cells of ``raw``, at their centres, with their edges made."""
    if raw.cells is None or raw.points is None:
        raise ConfigError(f"sample {raw.name}: entity='cell', but it has no cells")
    cells, edges, edge_index = raw.cells, raw.edges, None
    if edges == "faces":
        edge_index = edges_across_faces(cells, raw.num_nodes)
        edges = "edge_index"
    centres = cell_centres(raw.points, cells, on_sphere=raw.on_sphere, period=raw.period)
    return replace(
        raw, points=centres, num_nodes=len(centres), cells=None, edge_index=edge_index, edges=edges, fields={}
    )


def _at_source_rows(
    points: npt.NDArray[np.float64] | None, kept: IntArray | None, num_rows: int
) -> npt.NDArray[np.float64] | None:
    """Return points at the rows of the source that they were kept from; NaN at the others."""
    if points is None or kept is None:
        return points
    every = np.full((num_rows, points.shape[1]), np.nan)
    every[kept] = points
    return every


def _source_rows(rows: IntArray, kept: IntArray | None) -> IntArray:
    return rows if kept is None else kept[rows]


def _edges_of(raw: RawSample) -> tuple[IntArray | None, list[str]]:
    """Return ``(2, num_edges)`` source and destination in the source's numbering, and what there is to say."""
    if raw.edges is None:
        return None, []
    rule, number = parse_edges(raw.edges)
    if rule == "edge_index":
        if raw.edge_index is None:
            raise ConfigError(f"sample {raw.name}: edges='edge_index', but it has no edges of its own")
        return raw.edge_index, []
    if rule == "cells":
        if raw.cells is None:
            raise ConfigError(f"sample {raw.name}: edges='cells', but it has no cells")
        return edges_of_cells(raw.cells, raw.num_nodes), []
    if raw.points is None:
        raise ConfigError(f"sample {raw.name}: edges={raw.edges!r} need coordinates, and it has none")
    points = _flat(raw)
    if rule == "knn":
        return knn_edges(points, int(number), on_sphere=raw.on_sphere, period=raw.period), []
    return radius_edges(points, number, on_sphere=raw.on_sphere, period=raw.period), []


def _flat(raw: RawSample) -> npt.NDArray[np.float64]:
    """Return the coordinates that orders and distances use: on a sphere without the height."""
    assert raw.points is not None
    return raw.points[:, :2] if raw.on_sphere else raw.points


def _order_of(raw: RawSample, edge_index: IntArray | None, order: str) -> tuple[IntArray, list[str]]:
    if order == "rows":
        return np.arange(raw.num_nodes, dtype=np.int64), []
    if order == "metis":
        from scidata.meshes.order.metis import order_metis

        if edge_index is None:
            raise ConfigError(f"sample {raw.name}: order 'metis' cuts edges, and there are none; use hilbert or rcb")
        points = None if raw.points is None else _flat(raw)
        return order_metis(edge_index, raw.num_nodes, points, on_sphere=raw.on_sphere)
    if raw.points is None:
        raise ConfigError(
            f"sample {raw.name}: order {order!r} needs coordinates, and it has none; name them with --points, or use "
            "--order metis or rows"
        )
    if order == "rcb":
        return order_rcb(_flat(raw), on_sphere=raw.on_sphere), []
    return order_hilbert(_flat(raw), on_sphere=raw.on_sphere)


def _along_mesh(raw: RawSample, edge_index: IntArray | None, repaired: Repaired | None) -> AlongMesh | None:
    """Find the mesh edge of each edge that was made of the cells, where fields live on mesh edges."""
    if raw.mesh_edges is None or edge_index is None:
        return None
    kept = None if repaired is None else repaired.kept_nodes
    pairs = edge_index if kept is None else kept[edge_index]
    return along_mesh_edges(pairs, raw.mesh_edges, raw.num_nodes, f"sample {raw.name}")


def _orientation(signs: npt.NDArray[np.int8]) -> FieldData:
    """Describe the field that says which way each directed edge runs along its mesh edge."""
    about = "1 where source to destination is the mesh edge's first node to its second, else -1"
    info = FieldInfo(
        name="orientation",
        entity="edge",
        dtype=stored_dtype(signs.dtype).str,
        dims=("edge",),
        entity_dim=0,
        attributes={"long_name": about},
    )
    rows = np.arange(len(signs), dtype=np.int64)
    return FieldData(info=info, shape=signs.shape, read=lambda box: signs[box], rows=rows)


def _ordered_cells(cells: RawCells, new_ids: NodeIds) -> OrderedCells:
    """Number the nodes of the cells anew, and sort the cells by the lowest of them."""
    nodes: npt.NDArray[Any] = new_ids[cells.connectivity]
    owners = cell_owner(cells.offsets, nodes)
    order = np.argsort(owners, kind="stable")
    sizes = np.diff(cells.offsets)[order]
    offsets = bounds_of(sizes)
    corners = np.arange(len(nodes), dtype=np.int64) + np.repeat(cells.offsets[:-1][order] - offsets[:-1], sizes)
    return OrderedCells(
        offsets=offsets,
        connectivity=nodes[corners],
        cell_type=cells.cell_type[order],
        original_id=order,
        indptr=np.searchsorted(owners[order], np.arange(len(new_ids) + 1)).astype(np.int64),
    )


def _weights_of(
    raw: RawSample, weights: str | None, entity: str, edges: CSR | None, order: IntArray
) -> npt.NDArray[np.float64] | None:
    """Return the cost of each row, in the source's order."""
    if weights is None:
        return None
    if weights == "edges":
        if edges is None:
            raise ConfigError(f"sample {raw.name}: weights='edges', but it has no edges; make some with --edges")
        costs = np.zeros(raw.sizes[entity])
        costs[order] = np.diff(edges.indptr)
        return costs
    field = raw.fields.get(weights)
    if field is None:
        hint = near_matches(weights, [*raw.fields, "edges"])
        raise UnknownNameError(f"sample {raw.name}: no field {weights!r} for weights{hint}")
    if field.entity != entity or len(field.shape) != 1:
        raise ConfigError(
            f"sample {raw.name}: weights are one number per {entity}, but field {weights!r} lives on {field.entity} "
            f"with shape {field.shape}"
        )
    values = field.read().astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise ConfigError(
            f"sample {raw.name}: weights {weights!r} are negative, NaN or infinite in {len(bad)} rows (first rows: "
            f"{bad[:5].tolist()}); a cost is 0 or more"
        )
    with np.errstate(over="ignore"):
        total = values.sum()
    if not np.isfinite(total):
        raise ConfigError(f"sample {raw.name}: weights {weights!r} have no finite sum: scale them down")
    return values


def _field_data(raw: RawSample, name: str, field: RawField) -> FieldData:
    made = field.entity == "edge" and raw.edges not in (None, "edge_index") and raw.mesh_edges is None
    if made:
        raise FieldMismatchError(
            f"sample {raw.name}: field {name!r} lives on {field.entity}, but the edges are made ({raw.edges}); leave "
            "it out with --fields"
        )
    return field_data(raw.name, raw.sizes, name, field)


def field_data(sample: str, sizes: Mapping[str, int], name: str, field: RawField) -> FieldData:
    """Describe a field as the store has it.

    Raises
    ------
    FieldMismatchError
        It has not one row per entity, of which ``sizes`` says how many there are.
    """
    expected = sizes.get(field.entity)
    if expected is None:
        raise FieldMismatchError(
            f"sample {sample}: field {name!r} lives on {field.entity}, but the sample has none of these, but "
            f"{', '.join(sizes)}; leave it out with --fields"
        )
    if field.num_rows != expected:
        raise FieldMismatchError(
            f"sample {sample}: field {name!r} has {field.num_rows} rows along {field.dims[field.entity_dim]!r}, but "
            f"there are {expected} {field.entity}s"
        )
    short = name.removeprefix(f"{field.entity}/")  # a name that two entities have comes with its entity
    info = FieldInfo(
        name=short,
        entity=field.entity,
        dtype=stored_dtype(field.dtype).str,
        dims=field.dims,
        entity_dim=field.entity_dim,
        units=field.units or None,
        attributes={key: value for key, value in field.attributes.items() if key != "units" and key not in _PACKING},
    )
    return FieldData(info=info, shape=field.shape, read=field.read_box)


#: Attributes of how values were packed or linked in the source: they are not any more.
_PACKING = frozenset({
    "scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "valid_range", "valid_min", "valid_max",
    "DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "_Netcdf4Dimid", "_Netcdf4Coordinates",
})  # fmt: skip

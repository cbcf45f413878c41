"""One raw sample put in order: edges made, rows ordered, everything numbered anew, as the store writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, near_matches
from scidata.meshes.checks import Kept, without_faults
from scidata.meshes.formats.base import RawField
from scidata.meshes.geometry import RawCells
from scidata.meshes.hetero import JOINT, RawSet, is_relation, relation_ends
from scidata.meshes.order.cells import cell_owner, edges_of_cells, take_cells
from scidata.meshes.order.csr import CSR, csr_from_edges
from scidata.meshes.order.faces import AlongMesh, along_mesh_edges, edges_across_faces, edges_at_nodes
from scidata.meshes.order.faults import Finding
from scidata.meshes.order.hilbert import order_hilbert, order_rcb
from scidata.meshes.order.ids import NodeIds, contains, id_bits, id_dtype, pair_keys, stable_sort
from scidata.meshes.order.measures import BOUNDARY, SIZES, measures_of_cells, measures_of_nodes, triangles_of
from scidata.meshes.order.neighbours import near_edges
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.order.shuffle import SHUFFLE, leaf_rows_of, shuffled
from scidata.meshes.order.surfaces import border_of, curvature_of_cells, curvature_of_nodes, signed_distance
from scidata.meshes.sample import RawSample, parse_edges
from scidata.meshes.samples import read_samples
from scidata.store.format.arrays import stored_dtype
from scidata.store.format.manifest import ACROSS, FieldInfo, SampleHead
from scidata.store.format.write import FieldData, OrderedCells, OrderedSample, OrderedSet
from scidata.store.partitioning.by_time import TIME, order_by_time, time_of

#: The orders that there are.
ORDERS = ("hilbert", "rcb", "metis", "rows", SHUFFLE, TIME)


def order_sample(
    raw: RawSample, head: SampleHead, *, by: str, weights: str | None, findings: Collection[Finding] = ()
) -> OrderedSample:
    """Make a sample's edges, order its rows and number everything anew.

    The rows of several node sets are ordered together, and the order of a set is that of its rows in this joint order:
    so a cut of the joint rows is a cut of every set, and rows of any sets that lie near in space lie in the same part.
    With grid rows 0 to 3, mesh rows 4 and 5 and the joint order ``0 4 1 2 5 3``, the grid's order is ``0 1 2 3`` and
    the mesh's ``4 5``; cut in the middle, each part has two grid rows and one mesh row.

    ``raw``: as read.
    ``head``: its description; remarks on its order are added to the notes.
    ``by, weights``: one of ``ORDERS``, ``shuffle:ROWS`` or ``time:COLUMN``; and the costs whose prefix sums the store
    keeps: None for 1 a row, ``"edges"`` for the edges that end at it, else a field of the nodes or points.
    ``findings``: faults, whose rows are left out.
    Raises ConfigError: the order needs coordinates or edges that the sample lacks.
    Raises FieldMismatchError: a field has not one row per entity.
    """
    entity = raw.entity
    sound, kept = without_faults(raw, findings)
    pos = raw.points
    measures = _measures(raw, sound) if raw.measures else {}
    if raw.as_points and entity == "node":
        sound = replace(sound, cells=None)
    is_across: BoolArray | None = None
    if raw.edges == "nodes":
        sound, is_across = _with_edges_at_nodes(sound, raw, kept.get("cell"))
    if entity == "cell" and (raw.cells is not None or raw.points is None):
        sound = _with_cells_as_rows(sound)
        pos, rows = sound.points, kept.get("cell")
        if (
            pos is not None and rows is not None
        ):  # at the rows of the source that they were kept from; NaN at the others
            pos = np.full((raw.sizes["cell"], pos.shape[1]), np.nan)
            pos[rows] = sound.points
    pairs = sound.relations if raw.sets else _edges_of(sound)
    sets = sound.sets or {entity: RawSet(num_nodes=sound.num_nodes, points=sound.points)}
    leaf_rows = leaf_rows_of(by)
    if leaf_rows is not None and head.kind != "points":
        raise ConfigError(f"sample {raw.name}: order {by!r} is for points, not for a {head.kind}; use hilbert or rcb")
    if time_of(by) is not None:
        order, notes = order_by_time(raw, by, kept.get(entity)), list[str]()
    else:
        order, notes = order_of(sound, sets, pairs, by if leaf_rows is None else "hilbert")
    if leaf_rows is not None:
        order = shuffled(order, leaf_rows, head.index)
    rule, number = parse_edges(raw.edges or "edge_index")
    if rule == "knn" and number >= sound.num_nodes > 0:
        notes = [f"edges={raw.edges!r}: there are but {sound.num_nodes} points: all are neighbours of each", *notes]
    if num := int(np.isnan(measures.get("curvature", np.zeros(0))).sum()):
        notes = [f"curvature is NaN in {num} rows, at borders of the surface and where it branches or turns", *notes]
    new_ids, ordered = _numbered(raw, sets, order, kept)
    relations = {name: _csr(name, each, new_ids, entity) for name, each in pairs.items()}
    along = _along_mesh(raw, pairs.get("edge"), kept)
    signs: tuple[FieldData, ...] = ()
    if is_across is not None:
        about = "1 where both cells share a face, 0 where they share nodes alone"
        values = is_across[relations["edge"].edge_id].astype(np.int8)
        signs = (_computed(ACROSS, values, "edge", rows=np.arange(len(values)), long_name=about),)
    if along is not None:
        edges = relations["edge"]
        signs = (_orientation(along.orientation[edges.edge_id]),)
        relations["edge"] = replace(edges, edge_id=along.rows[edges.edge_id])
        if along.num_unused:
            notes = [f"{along.num_unused} edges of the mesh belong to no cell: their values are left out", *notes]
    else:
        relations = {n: replace(each, edge_id=_source_rows(each.edge_id, kept.get(n))) for n, each in relations.items()}
    cells = None
    if sound.cells is not None:
        ids = new_ids[entity]
        cells = ordered_cells(replace(sound.cells, connectivity=ids[sound.cells.connectivity]), 0, len(ids))
        cells = replace(cells, original_id=_source_rows(cells.original_id, kept.get("cell")))
    fields = [field_data_of(raw, name, field) for name, field in raw.fields.items()]
    counts = raw.sizes | ({JOINT: len(order)} if raw.sets else {})
    stored = raw.stored_as[1]
    if raw.as_points:
        fields = [_moved(each, stored) for each in fields]
        counts = {stored: counts[entity]}
    fields += [_computed(name, values, stored, rows=order) for name, values in measures.items()]
    order = order if raw.sets else _source_rows(order, kept.get(entity))
    return OrderedSample(
        **replace(head, notes=(*head.notes, *notes)).head(),
        order=order,
        pos=pos,
        weights=weights_of(raw, weights, relations, order, ordered),
        cells=cells,
        source_counts=counts,
        fields=(*fields, *signs),
        sets=ordered,
        relations=relations,
    )


def _numbered(
    raw: RawSample, sets: Mapping[str, RawSet], order: IntArray, kept: Kept
) -> tuple[dict[str, NodeIds], dict[str, OrderedSet]]:
    """Return the new id of each row of each set; and of several sets how they are stored."""
    firsts = bounds_of(np.array([each.num_nodes for each in sets.values()], np.int64))
    new_ids: dict[str, NodeIds] = {}
    ordered: dict[str, OrderedSet] = {}
    for name, first, stop in zip(sets, firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        ids = new_ids[name] = np.empty(stop - first, id_dtype(stop - first))
        here = (order >= first) & (order < stop) if raw.sets else slice(None)
        own = order[here] - first if first else order[here]
        ids[own] = np.arange(len(own))
        if raw.sets:
            ordered[name] = OrderedSet(
                order=_source_rows(own, kept.get(name)),
                indptr=bounds_of(np.asarray(here, np.int64)),
                pos=raw.sets[name].points,
            )
    return new_ids, ordered


def _csr(relation: str, pairs: IntArray, new_ids: Mapping[str, NodeIds], rows: str) -> CSR:
    """Return edges by their targets; ``rows`` are those of the one set that there is, where no name says the ends."""
    source, target = relation_ends(relation) if is_relation(relation) else (rows, rows)
    num_targets = len(new_ids[target])
    made = csr_from_edges(new_ids[source][pairs[0]], new_ids[target][pairs[1]], max(num_targets, len(new_ids[source])))
    return replace(made, indptr=made.indptr[: num_targets + 1])


def _with_cells_as_rows(raw: RawSample) -> RawSample:
    """Return a sample whose rows are the cells of ``raw``, at their centres, with their edges made."""
    if raw.cells is None or raw.points is None:
        raise ConfigError(f"sample {raw.name}: entity='cell', but it has no cells")
    cells, edges, edge_index = raw.cells, raw.edges, raw.edge_index
    if edges == "faces":
        edge_index = edges_across_faces(cells, raw.num_nodes)
        edges = "edge_index"
    centres = cell_centres(raw.points, cells, on_sphere=raw.on_sphere, period=raw.period)
    return replace(
        raw, points=centres, num_nodes=len(centres), cells=None, edge_index=edge_index, edges=edges, fields={}
    )


def _with_edges_at_nodes(sound: RawSample, raw: RawSample, kept: IntArray | None) -> tuple[RawSample, BoolArray]:
    """Return a sample with the edges between cells that share a node, and which of these cells share a face."""
    if sound.cells is not None:
        faces, num = edges_across_faces(sound.cells, sound.num_nodes), sound.cells.num_cells
        nodes, owners = sound.cells.connectivity, np.repeat(np.arange(num), np.diff(sound.cells.offsets))
    else:  # polyhedra
        assert sound.edge_index is not None
        assert raw.corners is not None
        faces, num, (nodes, owners) = sound.edge_index, sound.num_nodes, raw.corners
        if kept is not None:
            is_kept = contains(kept, owners)
            nodes, owners = nodes[is_kept], np.searchsorted(kept, owners[is_kept])
    edges = edges_at_nodes(nodes, owners, int(nodes.max(initial=-1)) + 1, num)
    is_across = contains(*(pair_keys(each[1], each[0], num) for each in (faces, edges)))
    return replace(sound, edge_index=edges, edges="edge_index"), is_across


def _source_rows(rows: IntArray, kept: IntArray | None) -> IntArray:
    return rows if kept is None else kept[rows]


def _edges_of(raw: RawSample) -> dict[str, IntArray]:
    """Return the edges of a sample of one node set, ``(2, num_edges)``, by ``"edge"``; nothing if it has none."""
    if raw.edges is None:
        return {}
    rule, number = parse_edges(raw.edges)
    if rule == "edge_index":
        if raw.edge_index is None:
            raise ConfigError(f"sample {raw.name}: edges='edge_index', but it has no edges of its own")
        return {"edge": raw.edge_index}
    if rule == "cells":
        if raw.cells is None:
            raise ConfigError(f"sample {raw.name}: edges='cells', but it has no cells")
        return {"edge": edges_of_cells(raw.cells, raw.num_nodes)}
    if raw.points is None:
        raise ConfigError(f"sample {raw.name}: edges={raw.edges!r} need coordinates, and it has none")
    points = raw.points[:, :2] if raw.on_sphere else raw.points
    return {"edge": near_edges(points, rule, number, on_sphere=raw.on_sphere, period=raw.period)}


def order_of(
    raw: RawSample, sets: Mapping[str, RawSet], pairs: Mapping[str, IntArray], order: str
) -> tuple[IntArray, list[str]]:
    """Return the order of the rows of all sets, numbered one set after the other, and remarks on it."""
    sizes = [each.num_nodes for each in sets.values()]
    if order == "rows":  # each set evenly along the others
        keys = [(np.arange(num) + 0.5) / max(num, 1) for num in sizes]
        return np.argsort(np.concatenate(keys), kind="stable") if len(keys) > 1 else np.arange(sizes[0]), []
    points = _points_of(raw, sets)
    if order == "metis":
        from scidata.meshes.order.metis import order_metis

        if not pairs:
            raise ConfigError(f"sample {raw.name}: order 'metis' cuts edges, and there are none; use hilbert or rcb")
        edges = list(pairs.values())
        if raw.sets:
            firsts = dict(zip(sets, bounds_of(np.array(sizes, np.int64)).tolist(), strict=False))
            edges = [each + np.array([[firsts[end]] for end in relation_ends(n)]) for n, each in pairs.items()]
        every = edges[0] if len(edges) == 1 else np.concatenate(edges, axis=1)
        return order_metis(every, sum(sizes), points, on_sphere=raw.on_sphere)
    if points is None:
        without = next(name for name, each in sets.items() if each.points is None)
        raise ConfigError(
            f"sample {raw.name}: order {order!r} needs coordinates, and "
            + (
                f"node set {without!r} has none (pos, or lon and lat); use --order metis or rows"
                if raw.sets
                else "it has none; name them with --points, or use --order metis or rows"
            )
        )
    if order == "rcb":
        return order_rcb(points, on_sphere=raw.on_sphere), []
    return order_hilbert(points, on_sphere=raw.on_sphere)


def _points_of(raw: RawSample, sets: Mapping[str, RawSet]) -> FloatArray | None:
    """Return the positions of all sets, set by set, on a sphere without the height; None if a set has none."""
    found = [each.points for each in sets.values() if each.points is not None]
    if not found or any(each.points is None and each.num_nodes for each in sets.values()):
        return None
    flat = [points[:, :2] if raw.on_sphere else points for points in found]
    widths = {points.shape[1] for points in flat}
    if len(widths) > 1:
        raise ConfigError(
            f"sample {raw.name}: sets have {' and '.join(map(str, sorted(widths)))} coordinates; give all as many"
        )
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _along_mesh(raw: RawSample, edge_index: IntArray | None, kept: Kept) -> AlongMesh | None:
    """Find the mesh edge of each edge that was made of the cells, where fields live on mesh edges."""
    if raw.mesh_edges is None or edge_index is None:
        return None
    return along_mesh_edges(
        _source_rows(edge_index, kept.get("node")), raw.mesh_edges, raw.num_nodes, f"sample {raw.name}"
    )


def _orientation(signs: npt.NDArray[np.int8]) -> FieldData:
    """Describe the field that says which way each directed edge runs along its mesh edge."""
    about = "1 where source to destination is the mesh edge's first node to its second, else -1"
    rows = np.arange(len(signs), dtype=np.int64)
    return _computed("orientation", signs, "edge", rows=rows, long_name=about)


def _measures(raw: RawSample, sound: RawSample) -> dict[str, FloatArray]:
    """Return the geometry of the rows of a sample without faults that is asked for, but for what the file has."""
    wanted, of_cells, cells, points = raw.measures, raw.entity == "cell", sound.cells, sound.points
    refused = f"sample {raw.name}: geometry ({', '.join(wanted)}) "
    if raw.on_sphere or raw.period is not None:
        raise ConfigError(f"{refused}is that of flat cells, and it lies on a sphere, or wraps")
    if points is None or (points.shape[1] != 3 and not wanted.keys() <= {*SIZES}):
        raise ConfigError(f"{refused}needs points in space")
    if cells is None and (wanted.keys() - {"sdf"} or wanted["sdf"] == BOUNDARY):
        raise ConfigError(f"{refused}is that of cells, and it has none here")
    made: dict[str, FloatArray] = {}
    if cells is not None and (sizes := wanted.keys() & {*SIZES}):
        found = (measures_of_cells if of_cells else measures_of_nodes)(points, cells)
        if sizes != {*SIZES} and (without := sizes - found.keys()):
            raise ConfigError(f"{refused}: its cells have no {' or '.join(without)}, but {' and '.join(found)}")
        made = {name: found[name] for name in SIZES if name in found and name in sizes}
    if cells is not None and "curvature" in wanted:
        made["curvature"] = (curvature_of_cells if of_cells else curvature_of_nodes)(points, cells)
    if "sdf" in wanted:
        at = cell_centres(points, cells) if of_cells and cells is not None else points
        made["sdf"] = signed_distance(at, *_surface(wanted["sdf"], points, cells), f"sample {raw.name}")
    here = {field.base for field in raw.fields.values() if field.entity == raw.entity}
    return {name: values for name, values in made.items() if name not in here}


def _surface(path: str, points: FloatArray, cells: RawCells | None) -> tuple[FloatArray, IntArray]:
    """Return the points and triangles of the surface in a file, or of the boundary of some cells."""
    if cells is not None and path == BOUNDARY:
        return points, border_of(cells)
    surface = read_samples(path, kind="mesh").header(0).read()
    if surface.points is None or surface.cells is None or surface.points.shape[1] != 3:
        raise ConfigError(f"{path}: sdf: is no surface in space")
    return surface.points, triangles_of(surface.cells)


def _moved(data: FieldData, entity: str) -> FieldData:
    """Return a field of nodes or cells as one of what these are stored as."""
    dims = tuple(entity if dim == data.info.entity else dim for dim in data.info.dims)
    return replace(data, info=replace(data.info, entity=entity, dims=dims))


def _computed(name: str, values: AnyArray, entity: str, *, rows: IntArray, **attributes: str) -> FieldData:
    """Describe a field that is in memory, of which ``rows`` are stored."""
    info = FieldInfo(
        name=name,
        entity=entity,
        dtype=stored_dtype(values.dtype).str,
        dims=(entity, "xyz")[: values.ndim],
        entity_dim=0,
        attributes=attributes,
    )
    return FieldData(info=info, shape=values.shape, read=lambda box: values[box], rows=rows)


def ordered_cells(cells: RawCells, low: int, num_owners: int) -> OrderedCells:
    """Sort cells by the lowest of their nodes, which are new ids; that is at least ``low``, below ``low + num_owners``.

    ``indptr`` counts from ``low`` on.
    """
    owners = cell_owner(cells.offsets, cells.connectivity)
    owners += 1 - low  # a cell without nodes has -1
    indptr = np.cumsum(np.bincount(owners, minlength=num_owners + 1))
    order = stable_sort(owners.view(np.uint64), id_bits(num_owners + 1), overwrite=True)[1]
    offsets, connectivity = take_cells(cells.offsets, cells.connectivity, order)
    return OrderedCells(
        offsets=offsets,
        connectivity=connectivity,
        cell_type=cells.cell_type[order],
        original_id=order,
        indptr=indptr,
    )


def weights_of(
    raw: RawSample, weights: str | None, relations: Mapping[str, CSR], order: IntArray, sets: Mapping[str, OrderedSet]
) -> FloatArray | None:
    """Return the cost of each row, in the source's order; of several sets, of those that are kept, set by set."""
    entity = raw.entity
    if weights is None:
        return None
    if raw.sets and weights != "edges":
        raise ConfigError(
            f"sample {raw.name}: weights of a graph between several sets are None or 'edges' here; give costs by set "
            "where the store is opened, weights={'grid': 1, 'mesh': 8}"
        )
    if weights == "edges":
        if not relations and not raw.sets:
            raise ConfigError(f"sample {raw.name}: weights='edges', but it has no edges; make some with --edges")
        costs = np.zeros(raw.sizes[entity])
        for name, each in relations.items():
            of_targets = np.diff(sets[relation_ends(name)[1]].indptr) > 0 if raw.sets else slice(None)
            costs[order[of_targets]] += np.diff(each.indptr)
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


def field_data_of(raw: RawSample, name: str, field: RawField) -> FieldData:
    """Describe a field of a sample as the store has it; one on edges that were made is refused."""
    made = field.entity == "edge" and raw.edges not in (None, "edge_index") and raw.mesh_edges is None
    if made:
        raise FieldMismatchError(
            f"sample {raw.name}: field {name!r} lives on {field.entity}, but the edges are made ({raw.edges}); leave "
            "it out with --fields"
        )
    return field_data(raw.name, raw.sizes, name, field)


def field_data(sample: str, sizes: Mapping[str, int], name: str, field: RawField) -> FieldData:
    """Describe a field as the store has it.

    Raises FieldMismatchError: it has not one row per entity, of which ``sizes`` says how many there are.
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

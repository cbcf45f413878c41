"""A raw graph between several node sets put in order: one order in space of all sets together, each numbered anew.

The order of a set is that of its rows in the joint order, so that a cut of the joint rows is a cut of every set, and
what lies near in space lies in the same part, whatever set it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.hetero import JOINT, HeteroFinding, RawHetero, kept_rows, relation_parts
from scidata.meshes.order.csr import CSR, csr_from_edges
from scidata.meshes.order.hilbert import order_hilbert
from scidata.meshes.order.ids import id_dtype
from scidata.meshes.order.rcb import order_rcb
from scidata.store.format.manifest import SampleHead
from scidata.store.format.write import OrderedSample, OrderedSet
from scidata.store.partitioning.ordered import OrderOptions, field_data


def order_hetero(
    raw: RawHetero, options: OrderOptions, head: SampleHead, findings: list[HeteroFinding]
) -> OrderedSample:
    """Order the rows of all sets together and number everything anew; ``findings`` are left out.

    Raises
    ------
    ConfigError
        The order needs coordinates or edges that a set lacks.
    FieldMismatchError
        A field has not one row per node of its set, or edge of its relation.
    """
    kept, kept_edges = kept_rows(raw, findings)
    rows = {name: np.arange(each.num_nodes) if kept[name] is None else kept[name] for name, each in raw.sets.items()}
    counts = {name: len(each) for name, each in rows.items() if each is not None}
    firsts = dict(zip(counts, bounds_of(np.array(list(counts.values()), np.int64)).tolist(), strict=False))
    place = {name: _places(kept[name], each.num_nodes) for name, each in raw.sets.items()}
    pairs = {name: _kept_pairs(raw, name, kept_edges[name], place) for name in raw.relations}
    order, notes = _joint_order(raw, kept, counts, firsts, pairs, options.order)
    of_joint = np.searchsorted(np.array(list(firsts.values()), np.int64), order, side="right") - 1  # which set
    sets: dict[str, OrderedSet] = {}
    new_ids: dict[str, npt.NDArray[np.signedinteger]] = {}
    for number, (name, each) in enumerate(raw.sets.items()):
        here = of_joint == number
        own = order[here] - firsts[name]
        ids = np.empty(counts[name], id_dtype(counts[name]))
        ids[own] = np.arange(counts[name])
        new_ids[name] = ids
        source_rows = own if kept[name] is None else kept[name][own]  # type: ignore[index]
        sets[name] = OrderedSet(order=source_rows, indptr=bounds_of(here.astype(np.int64)), pos=each.points)
    relations = {}
    for name, (source, target) in ((n, _ends(n)) for n in raw.relations):
        both = pairs[name]
        num = max(counts[source], counts[target])
        made = csr_from_edges(new_ids[source][both[0]], new_ids[target][both[1]], num)
        some = kept_edges[name]
        edge_id = made.edge_id if some is None else some[made.edge_id]
        relations[name] = CSR(indptr=made.indptr[: counts[target] + 1], src=made.src, edge_id=edge_id)
    if options.weights not in (None, "edges"):
        raise ConfigError(
            f"sample {raw.name}: weights of a graph between several sets are None or 'edges' here; give costs by set "
            "where the store is opened, weights={'grid': 1, 'mesh': 8}"
        )
    weights = _edge_costs(sets, relations) if options.weights == "edges" else None
    return OrderedSample(
        **replace(head, notes=(*head.notes, *notes)).head(),
        order=order,
        pos=None,
        weights=weights,
        cells=None,
        edges=None,
        source_counts={**raw.sizes, JOINT: len(order)},
        fields=tuple(field_data(raw.name, raw.sizes, name, each) for name, each in raw.fields.items()),
        sets=sets,
        relations=relations,
    )


def _ends(relation: str) -> tuple[str, str]:
    source, _, target = relation_parts(relation) or ("", "", "")
    return source, target


def _places(kept: IntArray | None, num_rows: int) -> IntArray | None:
    """Return where each source row lies among those that are kept."""
    if kept is None:
        return None
    found = np.full(num_rows, -1, np.int64)
    found[kept] = np.arange(len(kept))
    return found


def _kept_pairs(raw: RawHetero, relation: str, kept: IntArray | None, place: Mapping[str, IntArray | None]) -> IntArray:
    both = raw.relations[relation] if kept is None else raw.relations[relation][:, kept]
    found = []
    for row, name in zip(both, _ends(relation), strict=True):
        places = place[name]
        found.append(row if places is None else places[row])
    return np.stack(found) if found[0] is not both[0] or found[1] is not both[1] else both


def _joint_order(
    raw: RawHetero, kept: Mapping[str, IntArray | None], counts: Mapping[str, int], firsts: Mapping[str, int],
    pairs: Mapping[str, IntArray], order: str,
) -> tuple[IntArray, list[str]]:  # fmt: skip
    """Return the order of the rows of all sets, one set after the other, and what there is to say of it."""
    total = sum(counts.values())
    if order == "rows":  # each set evenly along the others
        keys = np.concatenate([(np.arange(num) + 0.5) / max(num, 1) for num in counts.values()])
        return np.argsort(keys, kind="stable"), []
    without = [name for name, each in raw.sets.items() if each.points is None and counts[name]]
    points = None
    if not without:
        flat = [
            each.points if kept[name] is None else each.points[kept[name]]
            for name, each in raw.sets.items()
            if each.points is not None
        ]
        widths = {each.shape[1] for each in flat}
        if len(widths) > 1 and not raw.on_sphere:
            raise ConfigError(
                f"sample {raw.name}: sets have {' and '.join(map(str, sorted(widths)))} coordinates; give all as many"
            )
        points = np.concatenate([each[:, :2] if raw.on_sphere else each for each in flat])
    if order == "metis":
        from scidata.meshes.order.metis import order_metis

        joint = [np.stack([p[0] + firsts[_ends(n)[0]], p[1] + firsts[_ends(n)[1]]]) for n, p in pairs.items()]
        if not joint:
            raise ConfigError(f"sample {raw.name}: order 'metis' cuts edges, and there are none; use hilbert or rcb")
        return order_metis(np.concatenate(joint, axis=1), total, points, on_sphere=raw.on_sphere)
    if points is None:
        raise ConfigError(
            f"sample {raw.name}: order {order!r} needs coordinates, and node set {without[0]!r} has none (pos, or lon "
            "and lat); use --order metis or rows"
        )
    if order == "rcb":
        return order_rcb(points, on_sphere=raw.on_sphere), []
    return order_hilbert(points, on_sphere=raw.on_sphere)


def _edge_costs(sets: Mapping[str, OrderedSet], relations: Mapping[str, CSR]) -> npt.NDArray[np.float64]:
    """Return the number of edges that end at each row of all sets, in the joint order."""
    costs = np.zeros(len(next(iter(sets.values())).indptr) - 1)
    for name, each in relations.items():
        rows = np.flatnonzero(np.diff(sets[_ends(name)[1]].indptr))
        costs[rows] += np.diff(each.indptr)
    return costs

"""Faults of a raw sample, of one node set or several, and the sample without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import IntArray
from scidata.meshes.geometry import Geometry
from scidata.meshes.hetero import RawSet, relation_ends
from scidata.meshes.order.faults import Finding, check_sample, repair
from scidata.meshes.sample import RawSample

#: By entity, the rows of the source that are kept; None, or nothing: all of them.
Kept: TypeAlias = Mapping[str, IntArray | None]


def findings_of(raw: RawSample) -> list[Finding]:
    """Look for everything that is wrong with a raw sample, as :func:`scidata.meshes.order.faults.check_sample`.

    With several node sets, each finding names its set or relation.
    """
    if not raw.sets:
        return check_sample(raw, raw.num_nodes)
    of_entities = {name: check_sample(Geometry(points=each.points), each.num_nodes) for name, each in raw.sets.items()}
    of_entities |= {relation: _edge_findings(raw, relation, pairs) for relation, pairs in raw.relations.items()}
    return [
        replace(found, entity=entity, message=f"{entity}: {found.message}")
        for entity, findings in of_entities.items()
        for found in findings
    ]


def _edge_findings(raw: RawSample, relation: str, pairs: IntArray) -> list[Finding]:
    source, target = relation_ends(relation)
    sizes = np.array([[raw.sets[source].num_nodes], [raw.sets[target].num_nodes]])
    total = int(sizes.sum())
    if source == target:
        return check_sample(Geometry(points=None, edge_index=pairs), int(sizes[0, 0]))
    # both sets in one numbering, where no edge leads to itself; an id outside of its set is outside of both
    numbered = pairs + np.array([[0], [int(sizes[0, 0])]])
    numbered[(pairs >= sizes)] = total
    numbered[pairs < 0] = pairs[pairs < 0]
    found = check_sample(Geometry(points=None, edge_index=numbered), total)
    shown = f"the {sizes[0, 0]} of {source} or the {sizes[1, 0]} of {target}"
    return [replace(f, message=f.message.replace(f"the {total}", shown)) for f in found]


def without_faults(raw: RawSample, findings: Collection[Finding]) -> tuple[RawSample, Kept]:
    """Return a sample without fields whose rows are those that can be used, numbered anew; and which these are."""
    if not findings:
        return raw, {}
    if not raw.sets:
        repaired = repair(raw, findings, raw.num_nodes)
        nodes = repaired.kept_nodes
        num_nodes = raw.num_nodes if nodes is None else len(nodes)
        cells = nodes if raw.entity == "cell" and raw.cells is None else repaired.kept_cells
        kept = {"node": nodes, "point": nodes, "cell": cells, "edge": repaired.kept_edges}
        return replace(raw, **vars(repaired.geometry), num_nodes=num_nodes, fields={}), kept
    # With the rows of all sets in one numbering, a graph of 4 grid and 2 mesh nodes is one of 6 nodes: the relation
    # from grid to mesh, source 3 to target 1, is the edge from 3 to 4 + 1. Each relation is repaired as that graph's
    # edges, and numbered by set again: without grid node 0 it is the edge from 2 to 3 + 1, so 2 to 1.
    firsts = _firsts(raw.sets)
    bad = [found.rows + firsts[found.entity] for found in findings if found.entity in raw.sets]
    points = Finding(kind="nan_points", count=0, rows=np.concatenate([np.empty(0, np.int64), *bad]), message="")
    total = sum(each.num_nodes for each in raw.sets.values())
    usable = np.ones(total, np.bool_)
    usable[points.rows] = False
    sets: dict[str, RawSet] = {}
    rows: dict[str, IntArray | None] = {}
    for name, each in raw.sets.items():
        own = np.flatnonzero(usable[firsts[name] : firsts[name] + each.num_nodes])
        rows[name] = None if len(own) == each.num_nodes else own
        sets[name] = RawSet(num_nodes=len(own), points=None if each.points is None else each.points[own])
    left = _firsts(sets)
    relations: dict[str, IntArray] = {}
    for name, pairs in raw.relations.items():
        source, target = relation_ends(name)
        joint = Geometry(edge_index=pairs + np.array([[firsts[source]], [firsts[target]]]))
        faults = [points, *(found for found in findings if found.entity == name)]
        repaired = repair(joint, faults, total)
        assert repaired.geometry.edge_index is not None
        rows[name] = repaired.kept_edges
        relations[name] = repaired.geometry.edge_index - np.array([[left[source]], [left[target]]])
    return replace(raw, sets=sets, relations=relations, fields={}), rows


def _firsts(sets: Mapping[str, RawSet]) -> dict[str, int]:
    """Return the first row of each set if all are numbered one after the other."""
    sizes = np.array([each.num_nodes for each in sets.values()], np.int64)
    return dict(zip(sets, bounds_of(sizes).tolist(), strict=False))

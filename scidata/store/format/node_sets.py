"""Node sets and relations of a stored sample. A mesh, a cloud or a graph has one set, a graph between several more.

Of set ``S`` among several: ``S/indptr``, how many of its rows come before each row of all sets together, so that a cut
of those cuts it; ``S/original_id``, and ``S/pos`` where it has positions. Of relation ``R``, by row of its target set:
``R/indptr``, ``R/src``, rows of its source set, and ``R/edge_id``, rows of the source. The edges of one set are the
relation ``edge`` from that set to itself, and lie in ``csr``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scidata.meshes.hetero import relation_parts
from scidata.store.format.manifest import SampleInfo


def sets_of(info: SampleInfo) -> tuple[str, ...]:
    """Return the node sets of a sample, in the order of their names."""
    if info.kind != "hetero":
        return (info.entity,)
    return tuple(sorted(name for name in info.counts if name != info.entity and relation_parts(name) is None))


def relations_of(info: SampleInfo) -> dict[str, tuple[str, str, str]]:
    """Return the relations of a sample, in the order of their names, taken apart: source set, name, target set."""
    if info.kind != "hetero":
        return {"edge": (info.entity, "edge", info.entity)} if "edge" in info.counts else {}
    return {name: parts for name in sorted(info.counts) if (parts := relation_parts(name)) is not None}


def folder_of_edges(relation: str) -> str:
    """Return the folder of a relation's arrays inside a sample."""
    return "csr" if relation == "edge" else relation


def rows_of_sets(info: SampleInfo, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that node sets and relations have, and their rows, by the numbers of each entity."""
    num_rows = counts[info.entity]
    rows = {f"{info.entity}/original_id": num_rows}
    for name in sets_of(info):
        rows[f"{name}/original_id"] = counts[name]
        if name != info.entity:
            rows[f"{name}/indptr"] = num_rows + 1
        if f"{name}/pos" in info.arrays:
            rows[f"{name}/pos"] = counts[name]
    for name, (_, _, target) in relations_of(info).items():
        num, folder = counts[name], folder_of_edges(name)
        rows |= {f"{folder}/indptr": counts[target] + 1, f"{folder}/src": num, f"{folder}/edge_id": num}
    return rows

"""Node sets and relations of a stored sample. A mesh, a cloud or a graph has one set, a graph between several more.

Of set ``S`` among several: ``S/indptr``, how many of its rows come before each row of all sets together, so that a cut
of those cuts it; ``S/original_id``, and ``S/pos`` where it has positions. Of relation ``R``, by row of its target set:
``R/indptr``, ``R/src``, rows of its source set, and ``R/edge_id``, rows of the source. The edges of one set are the
relation ``edge`` from that set to itself, and lie in ``csr``.
"""

from __future__ import annotations

from scidata.meshes.hetero import relation_parts
from scidata.store.format.entries import Entry
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


def rows_of_sets(entry: Entry, info: SampleInfo) -> dict[str, int | None]:
    """Return the arrays that node sets and relations have, and their rows.

    Raises
    ------
    CorruptDataError
        Sets that are not all rows together, or a relation whose sets are not there.
    """
    num_rows = info.counts[info.entity]
    rows: dict[str, int | None] = {f"{info.entity}/original_id": num_rows}
    sets, relations = sets_of(info), relations_of(info)
    if sum(info.counts[name] for name in sets) != num_rows:
        entry.wrong("counts", f"as many of {info.entity} as of {', '.join(sets)} together")
    for name in sets:
        rows[f"{name}/original_id"] = info.counts[name]
        if name != info.entity:
            rows[f"{name}/indptr"] = num_rows + 1
        if f"{name}/pos" in info.arrays:
            rows[f"{name}/pos"] = info.counts[name]
    for name, (source, _, target) in relations.items():
        for end in (source, target):
            if end not in sets:
                entry.wrong("counts", f"rows of the set {end[:80]!a}, of relation {name[:80]!a},")
        num, folder = info.counts[name], folder_of_edges(name)
        rows |= {f"{folder}/indptr": info.counts[target] + 1, f"{folder}/src": num, f"{folder}/edge_id": num}
    return rows

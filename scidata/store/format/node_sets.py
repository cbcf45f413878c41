"""What a stored graph between several node sets has besides: each set's rows and places, each relation's edges.

Of set ``S``: ``S/indptr``, how many of its rows come before each row of all sets together, so that a cut of those cuts
it; ``S/original_id``, and ``S/pos`` where it has positions. Of relation ``R``, by row of its target set: ``R/indptr``,
``R/src``, rows of its source set, and ``R/edge_id``, rows of the source.
"""

from __future__ import annotations

from scidata.meshes.hetero import relation_parts
from scidata.store.format.entries import Entry
from scidata.store.format.manifest import SampleInfo


def sets_of(info: SampleInfo) -> tuple[str, ...]:
    """Return the node sets of a sample, in the order of their names; none where it is no graph between several."""
    if info.kind != "hetero":
        return ()
    return tuple(sorted(name for name in info.counts if name != info.entity and relation_parts(name) is None))


def relations_of(info: SampleInfo) -> dict[str, tuple[str, str, str]]:
    """Return the relations of a sample, in the order of their names, taken apart: source set, name, target set."""
    if info.kind != "hetero":
        return {}
    return {name: parts for name in sorted(info.counts) if (parts := relation_parts(name)) is not None}


def rows_of_sets(entry: Entry, info: SampleInfo) -> dict[str, int | None]:
    """Return the arrays that node sets and relations have, and their rows.

    Raises
    ------
    CorruptDataError
        Sets that are not all rows together, or a relation whose sets are not there.
    """
    rows: dict[str, int | None] = {}
    sets, relations = sets_of(info), relations_of(info)
    if sum(info.counts[name] for name in sets) != info.counts[info.entity]:
        entry.wrong("counts", f"as many of {info.entity} as of {', '.join(sets)} together")
    for name in sets:
        rows |= {f"{name}/original_id": info.counts[name], f"{name}/indptr": info.counts[info.entity] + 1}
        if f"{name}/pos" in info.arrays:
            rows[f"{name}/pos"] = info.counts[name]
    for name, (source, _, target) in relations.items():
        for end in (source, target):
            if end not in sets:
                entry.wrong("counts", f"rows of the set {end[:80]!a}, of relation {name[:80]!a},")
        num = info.counts[name]
        rows |= {f"{name}/indptr": info.counts[target] + 1, f"{name}/src": num, f"{name}/edge_id": num}
    return rows

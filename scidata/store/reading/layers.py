"""Halos of graphs between several node sets: by the relations that a model's layers follow, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from scidata.core.checks import is_int
from scidata.core.index_map import IndexMap
from scidata.core.types import IntArray
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.hetero import SEPARATOR, is_relation
from scidata.meshes.order.ids import NodeIds
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.reading.ghosts import edges_into
from scidata.store.reading.part import Identity, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess

#: Of each layer of a model, in their order, the relations that it follows.
Layers: TypeAlias = tuple[tuple[str, ...], ...]


def checked_layers(store: Store, halo: Any) -> Layers:
    """Return the layers that a halo is of: none where it is 0.

    Parameters
    ----------
    halo
        How many layers, each along all relations; ``{relation: how many}``, or relations one after the other, in the
        order of the layers. Several relations of one layer are given together: ``[("a__to__b", "b__to__a"), ...]``.

    Raises
    ------
    ConfigError, UnknownNameError
        Something else, or no such relation.
    """
    known = tuple(relations_of(store.manifest.samples[0]))
    if is_int(halo) and halo >= 0:
        return (known,) * int(halo)
    if isinstance(halo, Mapping):
        for name, count in halo.items():
            if not is_int(count) or count < 0:
                raise ConfigError(f"halo={halo!r}: {name!r} needs a number of layers, at least 0, not {count!r}")
        return tuple(layer for name, count in halo.items() for layer in [_layer(store, name, known)] * int(count))
    if isinstance(halo, Sequence) and not isinstance(halo, str):
        return tuple(_layer(store, each, known) for each in halo)
    example = known[0] if known else "grid__to__mesh"
    raise ConfigError(
        f"halo={halo!r}: of a graph between several node sets, a whole number of layers along all relations, or which "
        f"relations the layers of a model follow, in their order: {{{example!r}: 1}} or [{example!r}]"
    )


def _layer(store: Store, given: object, known: Collection[str]) -> tuple[str, ...]:
    """Return the relations of a layer: one, by its name or the three of it, or several."""
    is_triple = isinstance(given, tuple) and len(given) == 3 and not any(is_relation(str(part)) for part in given)
    several = [given] if is_triple or isinstance(given, str) else given
    if not isinstance(several, Collection) or not several:
        raise ConfigError(f"{store.path}: halo: a layer is a relation, or several, not {given!r}")
    names = [SEPARATOR.join(map(str, each)) if isinstance(each, tuple) else str(each) for each in several]
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{store.path}: halo: no relation {name!r}{near_matches(name, known)}")
    return tuple(dict.fromkeys(names))


def read_relations(
    access: RowAccess, info: SampleInfo, cut: SamplePart, part: int, *, layers: Layers, token: str
) -> LocalTopology:
    """Read what a part needs of all relations to compute its rows without exchange, and find the ghosts of each set.

    From the last layer back: to know some rows after a layer, their edges of its relations are needed, and before it
    the rows where these begin. A set's ghosts are what is needed of it before the first layer, and the sources of all
    edges that end at owned rows: so that one exchange of a set's rows serves all relations, too.

    Parameters
    ----------
    token
        Names the data set, for the keys of the index maps.
    """
    ends = {name: (source, target) for name, (source, _, target) in relations_of(info).items()}
    own = {name: _own_edges(access, cut, part, name, target) for name, (_, target) in ends.items()}
    far: dict[str, list[tuple[IntArray, NodeIds, IntArray]]] = {name: [] for name in ends}
    none = np.empty(0, np.int64)
    needed = dict.fromkeys(sets_of(info), none)  # rows of others, of each set
    complete = dict.fromkeys(ends, none)  # of the target's, those all of whose edges are here
    for layer in reversed(layers):
        sources: dict[str, list[NodeIds]] = {name: [needed[name]] for name in needed}
        for name in layer:
            source, target = ends[name]
            new = np.setdiff1d(needed[target], complete[name], assume_unique=True)
            if len(new):
                far[name].append(edges_into(access, new, name))
                complete[name] = needed[target]
            sources[source] += [own[name][0], *(found for _, found, _ in far[name])]
        needed = {name: _others(cut, part, name, every) for name, every in sources.items()}
    for name, (source, _) in ends.items():
        needed[source] = _others(cut, part, source, [needed[source], own[name][0]])
    ghosts = {**dict.fromkeys(cut.bounds, none), **needed}
    relations, far_relations = {}, {}
    ordered = {name: _by_row(steps) for name, steps in far.items()}
    maps = {
        name: IndexMap(
            bounds=bounds, part=part, ghosts=ordered[name][0] if name in ordered else ghosts[name],
            key=(token, cut.index, part, name),
        )
        for name, bounds in cut.bounds.items()
    }  # fmt: skip
    for name, (source, target) in ends.items():
        relations[name] = np.stack([maps[source].to_local(own[name][0]), own[name][1]])
        _, src, dst = ordered[name]
        far_relations[name] = np.stack([maps[source].to_local(src), maps[target].to_local(dst)])
    return LocalTopology(index_maps=maps, relations=relations, far_relations=far_relations, identity=Identity())


def _own_edges(access: RowAccess, cut: SamplePart, part: int, name: str, target: str) -> tuple[IntArray, IntArray]:
    """Read the sources of the edges that end at owned rows, and these rows, counted from the part's first."""
    first, last = cut.owned(target, part)
    indptr = access.rows(f"{name}/indptr", first, last + 1)
    src = access.rows(f"{name}/src", int(indptr[0]), int(indptr[-1])).astype(np.int64)
    return src, np.repeat(np.arange(last - first, dtype=np.int64), np.diff(indptr))


def _others(cut: SamplePart, part: int, name: str, rows: Sequence[NodeIds]) -> IntArray:
    """Return those rows of a set that others own, sorted, each once."""
    start, stop = cut.owned(name, part)
    every: IntArray = np.concatenate(rows).astype(np.int64, copy=False)
    return np.unique(every[(every < start) | (every >= stop)])


def _by_row(steps: Sequence[tuple[IntArray, NodeIds, IntArray]]) -> tuple[IntArray, IntArray, IntArray]:
    """Return rows, sources and targets of edges that were found step by step, in the order of their rows."""
    rows, src, dst = (np.concatenate([np.empty(0, np.int64), *(step[i] for step in steps)]) for i in range(3))
    order = np.argsort(rows)
    return rows[order], src[order], dst[order]

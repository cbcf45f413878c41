"""Edges between points that lie near each other, found when these are read: of all rows, or of those that were drawn.

A part finds the edges that end at its own points. Distances are computed alike whatever else is known, and of points
that are equally far the first rows are taken: so any number of parts has the edges of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.index_map import IndexMap
from scidata.core.types import AnyArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.neighbours import BLOCK_ROWS, TIED, chord, make_tree, nearest_others, wrapped
from scidata.meshes.sample import parse_edges
from scidata.meshes.sets.neighbours import pairs_in_radius
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.write import search_space
from scidata.store.reading.part import LocalTopology
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.topology import rows_within

if TYPE_CHECKING:
    from scipy.spatial import cKDTree


@dataclass(frozen=True, kw_only=True)
class NearEdges:
    """How edges are found: ``"knn"`` or ``"radius"``, and how many or how far, on a sphere in degrees."""

    rule: str
    number: float

    @classmethod
    def of(cls, edges: str | None, kind: str, where: str) -> NearEdges | None:
        """Return what a user asks for; raise ConfigError for other rules, and for rows that are no points."""
        if edges is None:
            return None
        if kind != "points":
            raise ConfigError(
                f"edges={edges!r}: {where} is a {kind}, whose edges are stored; edges are found between points alone "
                "(scidata partition --kind points takes those of a mesh)"
            )
        rule, number = parse_edges(edges)
        if rule not in ("knn", "radius"):
            raise ConfigError(f"edges={edges!r}: points have no edges of their own; find some: 'knn:8' or 'radius:0.1'")
        return cls(rule=rule, number=number)

    def reach(self, *, on_sphere: bool) -> float:
        """Return the radius as a straight line."""
        return chord(self.number) if on_sphere else self.number

    def into(self, tree: cKDTree, own: slice, *, on_sphere: bool, largest: float) -> IntArray:
        """Return the edges that end at the ``own`` points of a tree, ``(2, num)`` int64: sources, targets, by target.

        The tree has all that can be neighbours, in the order of their rows. Distances, to nearest images where it
        wraps, count as equal by the ``largest`` coordinate of the whole sample. No point is its own neighbour.
        """
        tied = TIED * largest
        if self.rule == "knn":
            source, target = nearest_others(tree, own, int(self.number), tied)
        else:
            points, reach, found = tree.data[own], self.reach(on_sphere=on_sphere) + tied, [np.empty((2, 0), np.int64)]
            for rows in blocks(len(points), BLOCK_ROWS) if len(points) else ():
                found += pairs_in_radius(tree, points, rows, reach)
            source, target = np.concatenate(found, axis=1) + np.array([[0], [own.start]])
        edges = np.stack([source, target])[:, source != target]
        return edges[:, np.lexsort(edges)]

    def added(self, topology: LocalTopology, info: SampleInfo, rows: IntArray, pos: AnyArray) -> LocalTopology:
        """Return a part with the edges that end at its rows, and their sources among its ghosts.

        ``rows`` are the ids of all that can be neighbours, sorted, its own among them; ``pos`` are as stored.
        """
        own, on_sphere = topology.index_maps[info.entity], info.on_sphere
        points, width = wrapped(search_space(pos, on_sphere=on_sphere), info.period)
        here, largest = slice(*np.searchsorted(rows, own.owned).tolist()), _largest(info, points)
        found = rows[self.into(make_tree(points, width), here, on_sphere=on_sphere, largest=largest)]
        outside = found[0, (found[0] < own.owned[0]) | (found[0] >= own.owned[1])]
        held = IndexMap(bounds=own.bounds, part=own.part, ghosts=np.union1d(own.ghosts, outside), key=own.key)
        edges = np.stack([held.to_local(ends) for ends in found])
        maps, far = {**topology.index_maps, info.entity: held}, {"edge": edges[:, :0]}
        return replace(topology, index_maps=maps, relations={"edge": edges}, far_relations=far)

    def candidates(self, access: RowAccess, info: SampleInfo, start: int, stop: int) -> IntArray:
        """Return rows of a sample, sorted: ``[start, stop)``, and all that can be neighbours of these."""
        on_sphere, num_rows = info.on_sphere, info.counts[info.entity]
        if info.block_space is None or not 0 < stop - start < num_rows:  # files are in no order of space
            return np.arange(num_rows if stop > start else 0)
        if self.rule == "radius":
            reach = self.reach(on_sphere=on_sphere)
        elif stop - start > self.number:  # those of its own bound how far the nearest of all lie
            pos = search_space(access.rows(f"{info.entity}/pos", start, stop), on_sphere=on_sphere)
            own, width = wrapped(pos, info.period)
            reach = float(make_tree(own, width).query(own, k=[int(self.number) + 1])[0].max())
        else:
            return np.arange(num_rows)
        slack = 4 * TIED * _largest(info, np.empty(0))
        return np.sort(np.concatenate([np.arange(start, stop), rows_within(access, info, start, stop, reach + slack)]))


def _largest(info: SampleInfo, points: AnyArray) -> float:
    """Return the largest coordinate of a sample, by its ``points`` where no store says it."""
    return 1.0 if info.on_sphere else float(np.abs(points if info.bbox is None else info.bbox).max(initial=0.0))

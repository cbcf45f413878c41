"""Edges between points that lie near each other, found when these are read: of all rows, or of those that were drawn.

A part finds the edges that end at its own points. Distances are computed alike whatever else is known, and of points
that are equally far the first rows are taken: so any number of parts has the edges of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scidata.core.index_map import IndexMap
from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.neighbours import make_tree, wrapped
from scidata.meshes.sample import parse_edges
from scidata.meshes.sets.neighbours import BLOCK_ROWS, nearest_rows, pairs_in_radius
from scidata.meshes.sets.node_set import TIED
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.write import search_space
from scidata.store.reading.part import LocalTopology
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.topology import chord, rows_within


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

    def into(
        self, points: FloatArray, first: int, stop: int, *, on_sphere: bool, largest: float, width: FloatArray | None
    ) -> IntArray:
        """Return the edges that end at ``points[first:stop]``, ``(2, num)`` int64: sources, targets, by target.

        ``points`` are all that can be neighbours, in the order of their rows, where distances are Euclidean, or those
        of the nearest images in a ``width``; they count as equal by the ``largest`` coordinate of the whole sample. No
        point is its own neighbour.
        """
        own, tied, tree = points[first:stop], TIED * largest, make_tree(points, width)
        num = min(int(self.number) + 1, len(points))
        found = [np.empty((2, 0), np.int64)]
        for rows in blocks(len(own), BLOCK_ROWS) if len(own) else ():
            if self.rule == "radius":
                found += pairs_in_radius(tree, own, rows, self.reach(on_sphere=on_sphere) + tied)
                continue
            near = nearest_rows(tree, own[rows], num, tied)
            at = np.arange(rows.start, rows.start + len(near))
            itself = near == at[:, None] + first
            itself[~itself.any(axis=1), -1] = True  # so many points in one place that it is not among the first
            found.append(np.stack([near[~itself], np.repeat(at, num - 1)]))
        source, target = np.concatenate(found, axis=1)
        edges = np.stack([source, target + first])[:, source != target + first]
        return edges[:, np.lexsort(edges)]

    def added(self, topology: LocalTopology, info: SampleInfo, rows: IntArray, pos: AnyArray) -> LocalTopology:
        """Return a part with the edges that end at its rows, and their sources among its ghosts.

        ``rows`` are the ids of all that can be neighbours, sorted, its own among them; ``pos`` are as stored.
        """
        own, on_sphere = topology.index_maps[info.entity], info.on_sphere
        first, stop = np.searchsorted(rows, own.owned).tolist()
        points, width = wrapped(search_space(pos, on_sphere=on_sphere), info.period)
        where: dict[str, Any] = {"on_sphere": on_sphere, "largest": _largest(info, points)}
        found = rows[self.into(points, first, stop, **where, width=width if width.any() else None)]
        outside = found[0, (found[0] < own.owned[0]) | (found[0] >= own.owned[1])]
        here = IndexMap(bounds=own.bounds, part=own.part, ghosts=np.union1d(own.ghosts, outside), key=own.key)
        edges = np.stack([here.to_local(ends) for ends in found])
        maps, far = {**topology.index_maps, info.entity: here}, {"edge": edges[:, :0]}
        return replace(topology, index_maps=maps, relations={"edge": edges}, far_relations=far)

    def candidates(self, access: RowAccess, info: SampleInfo, start: int, stop: int) -> IntArray:
        """Return rows of a sample, sorted: ``[start, stop)``, and all that can be neighbours of these."""
        on_sphere, num_rows = info.on_sphere, info.counts[info.entity]
        if info.block_space is None or not 0 < stop - start < num_rows:  # files are in no order of space
            return np.arange(num_rows if stop > start else 0)
        if self.rule == "radius":
            reach = self.reach(on_sphere=on_sphere)
        elif stop - start > self.number:  # those of its own bound how far the nearest of all lie
            rows = access.rows(f"{info.entity}/pos", start, stop)
            own, width = wrapped(search_space(rows, on_sphere=on_sphere), info.period)
            tree = make_tree(own, width if width.any() else None)
            reach = float(tree.query(own, k=[int(self.number) + 1])[0].max())
        else:
            return np.arange(num_rows)
        slack = 4 * TIED * _largest(info, np.empty(0))
        return np.sort(np.concatenate([np.arange(start, stop), rows_within(access, info, start, stop, reach + slack)]))


def _largest(info: SampleInfo, points: AnyArray) -> float:
    """Return the largest coordinate of a sample, by its ``points`` where no store says it."""
    return 1.0 if info.on_sphere else float(np.abs(points if info.bbox is None else info.bbox).max(initial=0.0))

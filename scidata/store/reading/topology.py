"""Edges, cells and ghosts of one part of a stored sample, in local numbering."""

from __future__ import annotations

import numpy as np

from scidata.core.index_map import IndexMap
from scidata.store.format.manifest import SampleInfo
from scidata.store.reading.ghosts import HopGhosts, hop_ghosts, radius_ghosts
from scidata.store.reading.part import Identity, LocalCells, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess


def read_topology(
    access: RowAccess, info: SampleInfo, cut: SamplePart, part: int, *, num_hops: int, radius: float, token: str
) -> LocalTopology:
    """Read a part's edges and cells, and find its ghosts.

    Parameters
    ----------
    num_hops
        Along edges, that ghosts are away.
    radius
        Of points: their ghosts are all rows within it; 0 where there is none.
    token
        Names the data set, for the keys of the index maps.
    """
    entity = cut.entity
    start, stop = cut.owned(entity, part)
    found = [np.empty(0, np.int64)]
    hops: HopGhosts | None = None
    if "edge" in info.counts:
        hops = hop_ghosts(access, start, stop, num_hops)
        found.append(hops.nodes)
    if radius:
        sphere = info.block_space == "unit_sphere"
        rows = info.counts[entity]
        path = f"{entity}/pos"
        found.append(radius_ghosts(access, path, start, stop, rows, radius, on_sphere=sphere, period=info.period))
    has_cells = "cell/indptr" in info.arrays
    if has_cells:
        first, last = cut.owned("cell", part)
        offsets = access.rows("cell/offsets", first, last + 1)
        corners = access.rows("cell/connectivity", int(offsets[0]), int(offsets[-1])).astype(np.int64)
        types = access.rows("cell/type", first, last)
        found.append(corners[(corners < start) | (corners >= stop)])
    ghosts = dict.fromkeys(cut.bounds, np.empty(0, np.int64))
    ghosts[entity] = np.unique(np.concatenate(found))
    if hops is not None:
        ghosts["edge"] = hops.far_edges
    maps = {
        name: IndexMap(bounds=bounds, part=part, ghosts=ghosts[name], key=(token, cut.index, part, name))
        for name, bounds in cut.bounds.items()
    }
    nodes = maps[entity]
    edges, far, cells = {}, {}, None
    if hops is not None:
        edges["edge"] = np.stack([nodes.to_local(hops.src), nodes.to_local(hops.dst)])
        far["edge"] = np.stack([nodes.to_local(hops.far_src), nodes.to_local(hops.far_dst)])
    if has_cells:
        cells = LocalCells(offsets=offsets - offsets[0], connectivity=nodes.to_local(corners), types=types)
    return LocalTopology(index_maps=maps, relations=edges, far_relations=far, cells=cells, identity=Identity())

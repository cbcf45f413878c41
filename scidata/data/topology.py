"""What a mesh, cloud or graph sample has besides fields: its rows, edges and cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from scidata.core.index_map import IndexMap
from scidata.core.types import IntArray
from scidata.shard import ShardSpec, ShardTensor


class Place(NamedTuple):
    """Where a field lives: its entity, and which of its dims that is."""

    entity: str
    dim: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """The cells that this rank owns: ``connectivity[offsets[i]:offsets[i + 1]]`` are local ids of nodes.

    ``offsets`` is ``(num_owned_cells + 1,)`` int64, ``types`` are VTK's codes, uint8.
    """

    offsets: Tensor
    connectivity: Tensor
    types: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Cells:
        """Return them on a device."""
        parts = (self.offsets, self.connectivity, self.types)
        offsets, connectivity, types = (t.to(device, non_blocking=non_blocking) for t in parts)
        return Cells(offsets=offsets, connectivity=connectivity, types=types)


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """What a sample has besides fields.

    Attributes
    ----------
    entity
        ``"node"``, ``"point"`` or ``"cell"``: whose local ids edges and cells hold.
    index_maps
        By entity.
    edge_index, far_edge_index
        ``(2, num)`` int64: edges that end at owned nodes, and those that end at ghosts.
    device_mesh
        The domain's one axis; None where samples are plain.
    read_ids
        Reads the source's row of each owned row of an entity.
    num_hops
        How far away along edges ghosts are held; 0 where there are no edges.
    period
        Width of the domain along each coordinate where it wraps, 0 where it does not; None where it does in none.
    relations
        Of a graph between several node sets, by relation: as ``edge_index``, local ids of its source set and of its
        target set.
    far_relations
        The same, of the edges that end at ghosts.
    layers
        Of each layer of a model that the ghosts are enough for, the relations that it follows.
    """

    entity: str
    index_maps: Mapping[str, IndexMap]
    edge_index: Tensor | None
    far_edge_index: Tensor | None
    cells: Cells | None
    device_mesh: DeviceMesh | None
    read_ids: Callable[[str], IntArray]
    num_hops: int
    period: tuple[float, ...] | None = None
    relations: Mapping[str, Tensor] = field(default_factory=dict)
    far_relations: Mapping[str, Tensor] = field(default_factory=dict)
    layers: tuple[tuple[str, ...], ...] = ()


def shard_rows(local: Tensor, rows: IndexMap, dim: int, device_mesh: DeviceMesh | None) -> Tensor:
    """Wrap the owned rows along ``dim`` as a ShardTensor; plain where there is no mesh. No communication."""
    if device_mesh is None:
        return local
    global_shape = (*local.shape[:dim], rows.num_global, *local.shape[dim + 1 :])
    return ShardTensor(local, ShardSpec.on(device_mesh, (Shard(dim),), global_shape, (rows.sizes,)))

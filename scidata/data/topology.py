"""Rows, edges and cells of a mesh, a cloud or a graph of one or more node sets, without fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from scidata.core.index_map import IndexMap
from scidata.core.types import AnyArray, IntArray
from scidata.meshes.hetero import JOINT, relation_parts
from scidata.shard import ShardSpec, ShardTensor
from scidata.store.reading.part import LocalPart

#: Source set, name and target set, as PyTorch Geometric has them.
EdgeType: TypeAlias = tuple[str, str, str]


class Place(NamedTuple):
    """A field's entity, and the field's dim along it."""

    entity: str
    dim: int


class Cells(NamedTuple):
    """Owned cells: local node ids ``connectivity[offsets[i]:offsets[i + 1]]``; int64 offsets; VTK's types, uint8."""

    offsets: Tensor
    connectivity: Tensor
    types: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Cells:
        """Return the cells on a device."""
        return Cells(*(x.to(device, non_blocking=non_blocking) for x in self))

    @classmethod
    def joined(cls, parts: Sequence[Cells], order: Tensor | None = None) -> Cells:
        """Concatenate the cells of parts, or put them in an ``order``."""
        sizes = torch.cat([torch.diff(part.offsets) for part in parts])
        nodes, types = (torch.cat([part[k] for part in parts]) for k in (1, 2))
        if order is not None:
            starts, sizes, types = (sizes.cumsum(0) - sizes)[order], sizes[order], types[order]
            nodes = nodes[
                torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
                + torch.arange(len(nodes), device=nodes.device)
            ]
        return cls(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), nodes, types)


class Relation(NamedTuple):
    """Edges from one node set to another, or within one: ``(2, num)`` int64, local ids of sources and of targets.

    ``type`` has the names of the sets, ``("node", "edge", "node")`` of one set; ``own`` are the edges that end at owned
    rows, ``far`` those that end at ghosts.
    """

    type: EdgeType
    own: Tensor
    far: Tensor

    @property
    def every(self) -> Tensor:
        """Both, in this order."""
        return torch.cat([self.own, self.far], dim=1)

    def to(self, device: torch.device, non_blocking: bool = False) -> Relation:
        """Return the edges on a device."""
        own, far = (x.to(device, non_blocking=non_blocking) for x in (self.own, self.far))
        return self._replace(own=own, far=far)


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Rows, edges and cells of a sample.

    - ``entity``: the entity that is cut first: ``"node"``, ``"point"`` or ``"cell"``, whose local ids edges and cells
      hold; ``"joint"`` of a graph between several node sets.
    - ``relations``: by entity of the edges: ``"edge"`` of one node set, else ``source__name__target``; empty without
      edges.
    - ``layers``: for each layer of a model that the ghosts are enough for, the relations that it follows: ``("edge",)``
      for each hop of the halo of one node set.
    """

    entity: str
    index_maps: Mapping[str, IndexMap]
    relations: Mapping[str, Relation]
    cells: Cells | None
    device_mesh: DeviceMesh | None
    read_ids: Callable[[str], IntArray]
    layers: tuple[tuple[str, ...], ...] = ()
    period: tuple[float, ...] | None = None
    far_cells: Cells | None = None  # of others

    @property
    def node_sets(self) -> tuple[str, ...]:
        """The node sets; points, or cells that are rows, count as one."""
        if self.entity != JOINT:
            return (self.entity,)
        return tuple(e for e in self.index_maps if e != JOINT and e not in self.relations)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of edges and cells."""
        return [x for relation in self.relations.values() for x in (relation.own, relation.far)] + [
            *(self.cells or ()),
            *(self.far_cells or ()),
        ]


def edge_type(relation: str, rows: str) -> EdgeType:
    """Return source set, name and target set of a relation; an unnamed one has edges among ``rows``."""
    return relation_parts(relation) or (rows, relation, rows)


def shard_rows(local: Tensor, rows: IndexMap, dim: int, device_mesh: DeviceMesh | None) -> Tensor:
    """Wrap the owned rows along ``dim`` as a ShardTensor, or as a plain tensor without a mesh. No communication."""
    if device_mesh is None:
        return local
    global_shape = (*local.shape[:dim], rows.num_global, *local.shape[dim + 1 :])
    return ShardTensor(local, ShardSpec.on(device_mesh, (Shard(dim),), global_shape, (rows.sizes,)))


def edges_and_cells(local: LocalPart) -> dict[str, Any]:
    """Return the edges and cells of a part as tensors, under the names of :class:`Topology`."""
    relations = {
        name: Relation(edge_type(name, local.part.entity), as_tensor(own), as_tensor(local.far_relations[name]))
        for name, own in local.relations.items()
    }
    found: dict[str, Any] = {"relations": relations}
    for name, cells in (("cells", local.cells), ("far_cells", local.far_cells)):
        found[name] = None if cells is None else Cells(*map(as_tensor, vars(cells).values()))
    return found


def as_tensor(values: AnyArray | torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor; the loader may have copied it to a device already."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))

"""How one tensor is split over the ranks of a domain: placements, global shape and the sizes of all parts.

Pure metadata: making or changing a spec never communicates, so the same mistake raises on every rank alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scidata.core.bounds import bounds_of
from scidata.core.cache import Cache
from scidata.core.types import IntArray
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.axes import KEPT, MeshAxis, as_sizes, by_axis, kept_spec, mesh_axes, of_mesh
from scidata.shard.sizes import even_parts, facts_of

#: Sizes by mesh axis, number or name.
Sizes: TypeAlias = Mapping[int | str, Sequence[int]]
#: For each mesh axis the sizes of the parts along its dim, None where it replicates.
PartSizes: TypeAlias = Sequence[Sequence[int] | None]
#: Strides of a whole tensor, one for each dim.
Strides: TypeAlias = tuple[int, ...]
#: Stands for strides that nobody knows.
UNKNOWN: Strides = (-1,)

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int | None, ...], tuple[tuple[int, ...] | None, ...]]
_KEEPS_NOTHING: Cache[Any] = Cache(0)


def _layout(shape: Sequence[int], dims: Sequence[int | None], sizes: PartSizes) -> tuple[Hashable, _Layout]:
    """Return a description, sizes of axes that shard alone, and a short key for it.

    The key has the identity of sizes: a spec that is kept by it holds them, and equal ones are one object.
    """
    new = tuple([None if d is None or s is None else facts_of(s).sizes for d, s in zip(dims, sizes, strict=True)])
    layout = tuple(shape), tuple(dims), new
    return (*layout[:2], *map(id, new)), layout


def dim_of(placement: Placement, ndim: int) -> int | None:
    """Return the dim that a placement shards, counted from the front; None if the placement shards no dim of a tensor
    of this rank.
    """
    is_one = isinstance(placement, Shard) and -ndim <= placement.dim < ndim
    return placement.dim % ndim if is_one else None  # type: ignore[attr-defined]


def row_major(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor, as torch counts them."""
    steps = [1]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * max(extent, 1))
    return tuple(reversed(steps)) if len(shape) else ()


@dataclass(frozen=True, kw_only=True)
class HaloDim:
    """The halo that was asked for along one tensor dim: widths below and above, wrapping or clipped at the edge.

    ``before`` and ``after``: of a patch of a larger grid, rows beyond its edges that were read, too.
    """

    lo: int
    hi: int
    periodic: bool = False
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if self.lo < 0 or self.hi < 0:
            raise ConfigError(f"halo widths must not be negative: ({self.lo}, {self.hi})")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSpec:
    """Layout of a ShardTensor."""

    device_mesh: DeviceMesh  # the domain axes only
    # ``Shard(dim)`` or ``Replicate()``, one per mesh axis. Each axis shards a different dim
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]  # shape of the tensor that all parts form together, ghosts not counted
    # one entry per mesh axis: the extents of all its ranks along the sharded dim (uneven and empty parts are legal), or
    # None where the axis replicates
    sizes: tuple[tuple[int, ...] | None, ...]
    axes: tuple[MeshAxis, ...] = field(default=(), compare=False, repr=False)
    # where the rows along the sharded dim are the edges of a graph: the exchange of the ghosts of its nodes. Carried
    # along by whatever is computed from them, and never compared
    exchange: Any = field(default=None, compare=False, repr=False)
    # the sizes that a mesh axis had at other extents of this tensor's past, by (axis, extent): where a U-Net's way up
    # comes back to an extent of its way down, its parts are split as they were there. Carried along, never compared
    past_sizes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    # where the rows are edges: the parts that each rank's are joined of (edges of the graph, then self-loops), as the
    # sizes of each part on all ranks. In one process, all of one part come before the next. Carried along, of several
    # parts while the sizes stay. None where that is not known
    edge_parts: tuple[tuple[int, ...], ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", mesh_axes(self.device_mesh))
        shape, ndim = self.global_shape, len(self.global_shape)
        if not len(self.placements) == len(self.sizes) == len(self.axes):
            raise ShardLayoutError(
                f"{len(self.axes)} mesh axes need as many placements and sizes, one for each of "
                f"{', '.join(axis.name for axis in self.axes)}, not {len(self.placements)} and {len(self.sizes)}"
            )
        sharding: dict[int, str] = {}
        placements = list(self.placements)
        for i, (axis, placement, sizes) in enumerate(zip(self.axes, self.placements, self.sizes, strict=True)):
            if isinstance(placement, Replicate):
                if sizes is not None:
                    raise ShardLayoutError(f"sizes {sizes} given for axis {axis.name!r}, which replicates")
                continue
            if type(placement) is not Shard:
                raise ShardLayoutError(
                    f"axis {axis.name!r}: placement {placement} is neither Shard(dim) nor Replicate()"
                )
            dim = dim_of(placement, ndim)
            if dim is None:
                raise ShardLayoutError(f"axis {axis.name!r}: {placement} is out of range for global shape {shape}")
            placements[i] = placement if placement.dim == dim else Shard(dim)
            if dim in sharding:
                raise ShardLayoutError(
                    f"mesh axes {sharding[dim]!r} and {axis.name!r} both shard dim {dim}; shard different dims"
                )
            sharding[dim] = axis.name
            if sizes is None or len(sizes) != axis.size:
                raise ShardLayoutError(
                    f"axis {axis.name!r} has {axis.size} ranks, so it needs as many sizes, not {sizes}"
                )
            if min(sizes) < 0 or sum(sizes) != shape[dim]:
                raise ShardLayoutError(
                    f"axis {axis.name!r}: sizes {sizes} add up to {sum(sizes)}, but dim {dim} of the global shape "
                    f"{shape} has {shape[dim]} rows"
                )
        object.__setattr__(self, "placements", tuple(placements))

    @classmethod
    def even(
        cls,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        global_shape: Sequence[int],
        sizes: Sizes | None = None,
    ) -> ShardSpec:
        """Split as evenly as possible along axes that ``sizes`` (by mesh axis, index or name) leaves out."""
        axes, shape = mesh_axes(device_mesh), tuple(int(n) for n in global_shape)
        given = by_axis(sizes or {}, axes, as_sizes)
        parts: list[tuple[int, ...] | None] = []
        for i, (axis, placement) in enumerate(zip(axes, placements, strict=False)):
            dim = dim_of(placement, len(shape))
            wanted: Sequence[int] | None = given.get(i)
            if wanted is None and dim is not None:
                wanted = even_parts(shape[dim], axis.size)
            parts.append(None if wanted is None else facts_of(wanted).sizes)
        return cls.on(device_mesh, tuple(placements), shape, tuple(parts))

    @classmethod
    def on(
        cls,
        device_mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        global_shape: tuple[int, ...],
        sizes: tuple[tuple[int, ...] | None, ...],
    ) -> ShardSpec:
        """Return the cached spec of this description. Raises the errors of the class."""

        shards = tuple(None if s is None else facts_of(s).sizes for s in sizes)

        def make() -> ShardSpec:
            new = cls(
                device_mesh=device_mesh,
                placements=placements,
                global_shape=global_shape,
                sizes=shards,
                axes=mesh_axes(device_mesh),
            )
            key, _ = _layout(global_shape, new.dims, shards)  # where derive() looks
            return kept_spec(device_mesh, key, lambda: new)

        return kept_spec(device_mesh, (placements, global_shape, *map(id, shards)), make)

    def derive(self, global_shape: Sequence[int], dims: Sequence[int | None], sizes: PartSizes) -> ShardSpec:
        """Make a spec on the same mesh: ``dims`` and ``sizes`` have one entry per mesh axis; None replicates.

        Kept: a model asks for the same ones in each step, and equal specs are then one object.
        """
        key, layout = _layout(global_shape, dims, sizes)
        if self.exchange is not None:
            return self._derive_of_graph(key, layout)
        found = self._relatives.get(key)
        if found is None:
            found = self._new(*layout)
            self._relatives.put(key, found)
            found.__dict__["_relatives"] = self._relatives
        return found

    def _derive_of_graph(self, key: Hashable, layout: _Layout) -> ShardSpec:
        """Cache derived specs in the first spec only, which is held weakly: all are freed with their tensors."""
        first: weakref.ref[Cache[ShardSpec]] | None = self.__dict__.get("_relatives_of_first")
        kept = self._relatives if first is None else first()
        found = None if kept is None else kept.get(key)
        if found is None:
            found = self._new(*layout)
            if kept is not None and found.edge_parts is self.edge_parts:  # else specs derived from it differ
                kept.put(key, found)
                found.__dict__["_relatives_of_first"] = weakref.ref(kept)
        return found

    @cached_property
    def _relatives(self) -> Cache[ShardSpec]:
        """Cache shared by all specs of the same mesh, graph and past sizes."""
        return Cache(KEPT) if self.past_sizes or self.exchange is not None else of_mesh(self.device_mesh).specs

    @cached_property
    def plans(self) -> Cache[Any]:
        """Cached plans of operations for tensors of this layout, by the operations' own keys."""
        return Cache(KEPT) if self.exchange is None else _KEEPS_NOTHING

    def _new(
        self, global_shape: tuple[int, ...], dims: Sequence[int | None], new: tuple[tuple[int, ...] | None, ...]
    ) -> ShardSpec:
        one = self.edge_parts is not None and len(self.edge_parts) == 1
        parts = tuple([each for each in new if each is not None]) if one else ()
        return ShardSpec(
            device_mesh=self.device_mesh,
            placements=tuple(Replicate() if d is None else Shard(d) for d in dims),
            global_shape=global_shape,
            sizes=new,
            axes=self.axes,
            exchange=self.exchange,
            past_sizes=self.past_sizes,
            edge_parts=self.edge_parts if new == self.sizes else parts or None,
        )

    def replicated(self, global_shape: Sequence[int]) -> ShardSpec:
        """Make a spec on the same mesh that replicates on all axes."""
        nothing = [None] * len(self.axes)
        return self.derive(global_shape, nothing, nothing)

    def along(self, axis: int, dim: int, global_shape: Sequence[int], sizes: Sequence[int] | None = None) -> ShardSpec:
        """Make a spec on the same mesh in which only one axis shards ``dim``, with its own or other sizes."""
        dims = [dim if a == axis else None for a in range(len(self.axes))]
        return self.derive(global_shape, dims, self.sizes if sizes is None else [sizes] * len(dims))

    def resize(self, global_shape: Sequence[int], sizes: PartSizes) -> ShardSpec:
        """Keep the sharded dims, give them other extents, and remember the old sizes in ``past_sizes``."""
        key = "resize", _layout(global_shape, self.dims, sizes)[0]
        found: ShardSpec | None = self.plans.get(key)
        if found is not None:
            return found
        sizes_before = dict(self.past_sizes)
        for dim, axis in self.sharded.items():
            if global_shape[dim] != self.global_shape[dim]:
                sizes_before[axis, self.global_shape[dim]] = self.sizes_of(axis)
        new = self.derive(global_shape, self.dims, sizes)
        if sizes_before != self.past_sizes:
            new = replace(new, past_sizes=sizes_before)
        self.plans.put(key, new)
        return new

    def with_rows(self, dim: int, rows: int | Sequence[int]) -> ShardSpec:
        """Change the number of rows of one dim: one number, or one per rank if the dim is sharded."""
        axis = self.sharded.get(dim)
        extent, parts = (rows, None) if isinstance(rows, int) else (facts_of(rows).total, rows)
        sizes = [parts if a == axis else s for a, s in enumerate(self.sizes)]
        return self.derive((*self.global_shape[:dim], extent, *self.global_shape[dim + 1 :]), self.dims, sizes)

    def with_edge_parts(self, parts: Sequence[Sequence[int]] | None) -> ShardSpec:
        """Set the parts that the edges of each rank are joined of."""
        return replace(self, edge_parts=None if parts is None else tuple(map(tuple, parts)))

    def with_true_parts(self, counts: Sequence[Sequence[int]]) -> ShardSpec:
        """Set the edge parts that remain after a selection with these counts; a single part changes nothing."""
        left = [part for part in counts if any(part)] or counts[:1]
        return self if len(counts) == 1 or self.exchange is None else self.with_edge_parts(left)

    @cached_property
    def in_order(self) -> bool:
        """Whether the rows of all ranks, one after the other, are in the order of one process; edges may not be."""
        if self.exchange is None or all(self.axes[axis].size == 1 for axis in self.sharded.values()):
            return True
        return self.edge_parts is not None and len(self.edge_parts) == 1

    @cached_property
    def order(self) -> tuple[tuple[int, ...], ...] | None:
        """The edge parts that determine the rows' order: None for the order of one process, () if unknown."""
        return None if self.in_order else self.edge_parts or ()

    def without(self, dims: Collection[int], *, keepdim: bool = False) -> ShardSpec:
        """Drop dims, or leave them with extent 1; axes that shard them replicate."""
        kept = [d for d in range(self.ndim) if keepdim or d not in dims]
        shape = [1 if d in dims else self.global_shape[d] for d in kept]
        new = [None if d is None or d in dims else kept.index(d) for d in self.dims]
        return self.derive(shape, new, self.sizes)

    def move_dims(self, global_shape: Sequence[int], new_dim: Mapping[int, int]) -> ShardSpec:
        """Keep sizes; old dim ``d`` is now ``new_dim[d]``. Every sharded dim must be in ``new_dim``."""
        return self.derive(global_shape, [None if d is None else new_dim[d] for d in self.dims], self.sizes)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ShardSpec):
            return NotImplemented
        mine = (self.global_shape, self.sizes, self.placements, self.order, self.device_mesh)
        return mine == (other.global_shape, other.sizes, other.placements, other.order, other.device_mesh)

    def __hash__(self) -> int:
        return hash((self.global_shape, self.sizes, self.dims))

    def lies_as(self, other: ShardSpec) -> bool:
        """Whether both shard the same dims with the same sizes and order, whatever the other dims are."""
        return self is other or (
            (self.dims, self.sizes, self.ndim, self.order) == (other.dims, other.sizes, other.ndim, other.order)
            and self.device_mesh == other.device_mesh
        )

    @cached_property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.global_shape)

    @cached_property
    def dims(self) -> tuple[int | None, ...]:
        """The tensor dim that each mesh axis shards; None if it replicates."""
        return tuple(p.dim if isinstance(p, Shard) else None for p in self.placements)

    @cached_property
    def sharded(self) -> dict[int, int]:
        """Mesh axis of each sharded tensor dim."""
        return {d: i for i, d in enumerate(self.dims) if d is not None}

    @cached_property
    def is_replicated(self) -> bool:
        """True if no axis shards: every rank holds the whole tensor."""
        return not self.sharded

    @cached_property
    def emptied(self) -> tuple[int, ...]:
        """The sharded tensor dims of which some rank has no rows."""
        return tuple(dim for dim, axis in self.sharded.items() if 0 in self.sizes_of(axis))

    @cached_property
    def last_sharded(self) -> int:
        """The last sharded tensor dim; -1 if no dim is sharded."""
        return max(self.sharded, default=-1)

    @cached_property
    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of the mesh axes that shard, in the order of the axes."""
        return tuple(self.axes[axis].group for axis in self.sharded.values())

    @cached_property
    def global_size(self) -> torch.Size:
        """``global_shape`` as torch gives shapes."""
        return torch.Size(self.global_shape)

    def axis_of_dim(self, dim: int) -> int | None:
        """Return the mesh axis that shards tensor dim ``dim``, or None."""
        return self.sharded.get(dim)

    def sizes_of(self, axis: int) -> tuple[int, ...]:
        """Return the sizes along a mesh axis that shards."""
        sizes = self.sizes[axis]
        if sizes is None:
            raise ShardLayoutError(f"axis {self.axes[axis].name!r} replicates and has no sizes")
        return sizes

    def dim_bounds(self, dim: int) -> tuple[IntArray, int]:
        """Return the bounds of a tensor dim and this rank's part; an unsharded dim is one part."""
        sizes, rank, _ = self.parts(dim)
        return bounds_of(sizes), rank

    def parts(self, dim: int) -> tuple[tuple[int, ...], int, dist.ProcessGroup | None]:
        """Return the sizes of a tensor dim's parts, this rank's part and its group; an unsharded dim is one part."""
        axis = self.sharded.get(dim)
        if axis is None:
            return (self.global_shape[dim],), 0, None
        return self.sizes_of(axis), self.axes[axis].rank, self.axes[axis].group

    def group(self, axis: int) -> dist.ProcessGroup:
        """Return the process group along a mesh axis."""
        return self.axes[axis].group

    def coordinate(self, axis: int) -> int:
        """Return this rank's place along a mesh axis."""
        return self.axes[axis].rank

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        shape = list(self.global_shape)
        for dim, axis in self.sharded.items():
            shape[dim] = self.sizes_of(axis)[self.axes[axis].rank]
        return tuple(shape)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Global index of this rank's first element along each tensor dim."""
        start = [0] * self.ndim
        for dim, axis in self.sharded.items():
            start[dim] = sum(self.sizes_of(axis)[: self.axes[axis].rank])
        return tuple(start)

    def __str__(self) -> str:
        parts = [
            f"Replicate() on {axis.name!r}" if dim is None else f"Shard({dim}) on {axis.name!r} sizes {sizes}"
            for axis, dim, sizes in zip(self.axes, self.dims, self.sizes, strict=True)
        ]
        return f"{', '.join(parts)}, global shape {self.global_shape}"

"""Other layouts for the time being: a dim that has to be whole on a rank is gathered, or another is sharded instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scidata.core.bounds import even_sizes
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.comm.transport import Group
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat``, with graphs of the gradients of empty tensors of one dim too, as other ranks have."""
    if parts[0].ndim != 1 or all(map(len, parts)):
        return torch.cat([*parts], dim)
    return torch.cat([x.unsqueeze(1) for x in parts]).squeeze(1)


def to_layout(x: ShardTensor, spec: ShardSpec) -> ShardTensor:
    """Bring a tensor to another layout on its mesh. Collective if that differs."""
    if (x.spec.dims, x.spec.sizes) == (spec.dims, spec.sizes):
        x.refresh()
        return x
    return x.redistribute(
        placements=spec.placements, sizes={axis: spec.sizes_of(axis) for axis in spec.sharded.values()}
    )


def replicated(x: ShardTensor, axes: Collection[int]) -> ShardTensor:
    """Replicate some mesh axes. Collective if they shard."""
    return x.redistribute(placements=[Replicate() if a in axes else p for a, p in enumerate(x.placements)])


@overload
def whole_along(x: ShardTensor, dim: int) -> ShardTensor: ...
@overload
def whole_along(x: Tensor, dim: int) -> Tensor: ...
@overload
def whole_along(x: None, dim: int) -> None: ...
def whole_along(x: Tensor | None, dim: int) -> Tensor | None:
    """Gather one dim, counted from either end, where it is sharded. Collective then."""
    if not isinstance(x, ShardTensor):
        return x
    axis = x.spec.axis_of_dim(dim if dim >= 0 else dim + x.spec.ndim)
    return x if axis is None else replicated(x, {axis})


def beside(value: Tensor, labels: Sequence[Hashable], spec: ShardSpec) -> Tensor:
    """Split a sharded value as the tensor that it is written to, where it has that dim; gather it along others.

    ``labels`` are the dims of that tensor, by the value's own. Collective if the value was split otherwise.
    """
    if not isinstance(value, ShardTensor) or value.spec.device_mesh != spec.device_mesh:
        return value  # align() says so
    held = value.spec
    dims: list[int | None] = [None] * len(held.dims)
    for axis, dim in enumerate(held.dims):
        goal = spec.dims[axis]
        if (
            dim is not None
            and goal is not None
            and goal in labels
            and held.global_shape[labels.index(goal)] == spec.global_shape[goal]
        ):
            dims[axis] = labels.index(goal)
    return value.redistribute(
        placements=[Replicate() if d is None else Shard(d) for d in dims],
        sizes={axis: spec.sizes_of(axis) for axis, d in enumerate(dims) if d is not None},
    )


def moved_off(x: ShardTensor, dims: Sequence[int]) -> ShardTensor:
    """Shard other dims instead of those in ``dims``, the longest first; gather if there is none. Collective."""
    spec = x.spec
    extents = spec.global_shape
    free = sorted((d for d in range(spec.ndim) if d not in dims and d not in spec.sharded), key=extents.__getitem__)
    there: dict[int, int | None] = {spec.sharded[d]: None for d in dims if d in spec.sharded}
    for axis in there:
        if free and extents[free[-1]] > 1:
            there[axis] = free.pop()
    return x.redistribute(
        placements=_placed(x.placements, there),
        sizes={a: even_sizes(extents[d], spec.axes[a].size) for a, d in there.items() if d is not None},
    )


def moved_back(result: Tensor, dims: Sequence[int], spec: ShardSpec) -> ShardTensor:
    """Shard ``dims`` of a result again as ``spec`` says, evenly where their extents are new ones. Collective."""
    result = as_sharded(result, spec)
    back: dict[int, int | None] = {}
    sizes: dict[int | str, Sequence[int]] = {}
    for d in dims:
        if d in spec.sharded:
            axis, extent = spec.sharded[d], result.shape[d]
            back[axis] = d
            same = extent == spec.global_shape[d]
            sizes[axis] = spec.sizes_of(axis) if same else even_sizes(extent, spec.axes[axis].size)
    return result.redistribute(placements=_placed(result.placements, back), sizes=sizes)


def there_and_back(x: ShardTensor, dims: Sequence[int], transform: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Transform with other dims sharded instead of those in ``dims``. Collective."""
    return moved_back(transform(moved_off(x, dims)), dims, x.spec)


def as_sharded(result: Tensor, spec: ShardSpec) -> ShardTensor:
    """Return a ShardTensor as it is, a plain tensor as one that is replicated on the mesh of ``spec``."""
    if isinstance(result, ShardTensor):
        return result
    return ShardTensor(result, spec.replicated(result.shape))


def sharded_on(x: ShardTensor, axis: int, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """Have a mesh axis shard ``dim`` into these sizes, and no other axis. Collective if that differs."""
    placements = [
        Shard(dim) if a == axis else Replicate() if x.spec.dims[a] == dim else p for a, p in enumerate(x.placements)
    ]
    return x.redistribute(placements=placements, sizes={axis: sizes})


def _placed(placements: Sequence[Placement], dims: Mapping[int, int | None]) -> list[Placement]:
    chosen = [dims.get(axis, placement) for axis, placement in enumerate(placements)]
    return [Shard(d) if isinstance(d, int) else Replicate() if d is None else d for d in chosen]


def without_empty(local: Tensor, spec: ShardSpec) -> Tensor:
    """Give a part one row of zeros along each sharded dim without rows: some kernels take no empty batch."""
    for d in spec.sharded:
        if local.shape[d] == 0:
            local = joined([local, local.new_zeros([1 if i == d else n for i, n in enumerate(local.shape)])], d)
    return local


def gather_from_owners(local: Tensor, dim: int, index: Tensor, start: int, group: Group) -> Tensor:
    """Gather elements along a sharded dim by their global index. Collective.

    Say rows 0 to 4 are on rank 0 and 5 to 9 on rank 1. For index 7, rank 1 takes its own row 2, rank 0 a zero, and
    their sum is the element on both.
    """
    own, size = index - start, local.shape[dim]
    spare = joined([local, local.new_zeros([1 if d == dim else n for d, n in enumerate(local.shape)])], dim)
    found = spare.gather(dim, torch.where((own >= 0) & (own < size), own, size))
    return all_reduce_sum(found, group)


def tied_to(result: Tensor, operands: Iterable[Tensor | None]) -> Tensor:
    """Have backward reach every operand from a result without elements, from which some kernels lead nowhere.

    Sums over ranks in backward wait for each of them, also in that of its gradients.
    """
    for x in operands if result.numel() == 0 else ():
        if x is not None and x.requires_grad:
            result = result + x.tanh().sum() * 0  # finite, also of infinities, and so are its derivatives
    return result


def cut_to(local: Tensor, spec: ShardSpec) -> Tensor:
    """Drop rows beyond the shape of this rank's part, which :func:`without_empty` added."""
    part = local
    for d, size in enumerate(spec.local_shape):
        if local.shape[d] != size:
            part = part.narrow(d, 0, size)
    return part if part is local else part.clone()  # in torch the result is a view of no other tensor

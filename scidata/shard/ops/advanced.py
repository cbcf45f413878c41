"""Rows taken by index tensors and masks on any dims; writes are in ``writing``.

Rows of a sharded dim that an index tensor on all ranks names are split anew: as before where their number stays, else
evenly. An index that is itself sharded gives its layout to the result. Rows that a mask keeps stay on their rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.operators import in_range
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.comm.transport import gather
from scidata.shard.op_table import TorchFunction, unsupported
from scidata.shard.ops.align import finish, is_sharded, local_of, specs_of, whole
from scidata.shard.ops.moving import as_sharded, replicated, sharded_on
from scidata.shard.rows.edge_order import as_joined, places_by_rank, refuse_disorder
from scidata.shard.rows.redistribute import fetch_rows, move_rows, plan_listed
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import version_of

_Index = TypeVar("_Index", bound=Tensor)


def take_advanced(func: TorchFunction, x: Tensor, tensors: Mapping[int, Tensor]) -> Tensor:
    """Take the rows that index tensors, or a mask, name; ``tensors`` is by the first dim that each stands for."""
    found = {d: t if is_sharded(t) else local_of(t) for d, t in tensors.items()}
    if any(map(is_sharded, found.values())) and _each_of_a_dim(found):
        for d, t in sorted(found.items()):
            x = take_advanced(func, x, {d: t.reshape(-1)})
        return x
    if not is_sharded(x):
        if any(map(is_sharded, found.values())):
            return _look_up(func, local_of(x), found)
        plain: Tensor = local_of(x)
        return plain[tuple(found.get(d, slice(None)) for d in range(plain.ndim))]
    masks = {d: t for d, t in found.items() if t.dtype == torch.bool}
    if masks and len(found) == 1:
        ((dim, mask),) = masks.items()
        return _take_mask(func, x, dim, mask)
    if any(is_sharded(mask) for mask in masks.values()):
        raise unsupported(func, "a sharded mask beside other index tensors", *specs_of([x, *found.values()]))
    for dim, mask in masks.items():
        for i, rows in enumerate(mask.nonzero(as_tuple=True)):
            found[dim + i] = rows
    if any(is_sharded(index) for index in found.values()):
        (dim, index), *rest = found.items()
        if not rest and isinstance(index, ShardTensor):
            axes, same = [*index.spec.sharded.values()], index.spec.device_mesh == x.spec.device_mesh
            if index.spec.ndim == 1 and same and axes == [x.spec.axis_of_dim(dim)]:
                return _take_sharded(func, x, dim, index)
        found = {dim: whole(func, index) for dim, index in found.items()}
    return _take_listed(func, x, dict(sorted(found.items())))


def _each_of_a_dim(tensors: Mapping[int, Tensor]) -> bool:
    """Whether index tensors of adjacent dims form a product of their rows: ``x[i[:, None], j]``."""
    dims = sorted(tensors)
    num = len(dims)
    shapes = [(1,) * (num - tensors[d].ndim) + tuple(tensors[d].shape) for d in dims]
    numbers = all(t.dtype not in (torch.bool, torch.uint8) for t in tensors.values())
    alone = all(len(shape) == num and math.prod(shape) == shape[i] for i, shape in enumerate(shapes))
    makes_product = num == max(t.ndim for t in tensors.values())  # not so ``x[i, j]`` of an ``i`` with one row
    return num > 1 and dims == [*range(dims[0], dims[0] + num)] and numbers and alone and makes_product


def _look_up(func: TorchFunction, table: Tensor, tensors: Mapping[int, Tensor]) -> Tensor:
    """Take rows of a plain tensor by each rank's own numbers."""
    (dim, index), *rest = tensors.items()
    if not rest and isinstance(index, ShardTensor) and index.dtype == torch.bool:
        return _take_mask(func, as_sharded(table, index.spec), dim, index)
    if rest or not isinstance(index, ShardTensor):
        raise unsupported(func, "several indices of a plain tensor", *specs_of([*tensors.values()]))
    spec = index.spec
    flat_rows(index.local, dim, table.shape[dim])
    local = replicate_to_shards(table, spec.shard_groups)[(slice(None),) * dim + (index.local,)]
    shape = (*table.shape[:dim], *spec.global_shape, *table.shape[dim + 1 :])
    return ShardTensor(local, spec.derive(shape, [None if d is None else d + dim for d in spec.dims], spec.sizes))


def flat_rows(index: Tensor, dim: int, extent: int) -> Tensor:
    """Flatten an index tensor to non-negative numbers; raises IndexError if one is out of range."""
    rows = index.reshape(-1).to(torch.int64)
    rows = in_range(rows, -extent, extent, f"an index is out of bounds for dimension {dim} with size {extent}")
    return torch.where(rows < 0, rows + extent, rows)


def _take_listed(func: TorchFunction, x: ShardTensor, tensors: dict[int, Tensor]) -> Tensor:
    """Take by index tensors that every rank holds.

    The indexed dims are merged to one, whose rows are then listed. ``x[i, j]`` of shape (6, 4), with dim 0 split 4 and
    2, takes rows ``4 * i + j`` of 24, of which the ranks have 16 and 8. ``move_rows`` sends each where it belongs.
    """
    spec, dims = x.spec, list(tensors)
    indices = torch.broadcast_tensors(*tensors.values())  # type: ignore[no-untyped-call]
    shape = tuple(indices[0].shape)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    place = dims[0] if adjacent else 0
    others = [d for d in range(spec.ndim) if d not in dims]
    new_dim = {d: i if i < place else i + len(shape) for i, d in enumerate(others)}
    new_shape = [spec.global_shape[d] for d in others]
    new_shape[place:place] = shape
    split = [d for d in dims if d in spec.sharded]
    if not spec.in_order:
        tensors = {
            d: places_by_rank(func, flat_rows(index, d, spec.global_shape[d]), spec).view(index.shape)
            if d in split
            else index
            for d, index in tensors.items()
        }
        indices = torch.broadcast_tensors(*tensors.values())  # type: ignore[no-untyped-call]
    if len(split) > 1:  # the first stays sharded, the axes of the others replicate
        x = replicated(x, {spec.sharded[d] for d in split[1:]})
        spec = x.spec
    if not split:
        if any(0 in sizes for sizes in spec.sizes if sizes is not None):  # there torch finds nothing out of bounds
            for d, index in tensors.items():
                flat_rows(index, d, spec.global_shape[d])
        local = x.local[tuple(tensors.get(d, slice(None)) for d in range(spec.ndim))]
        return finish(local, spec.move_dims(new_shape, new_dim))
    order = [split[0], *(d for d in dims if d != split[0])]  # merged with the sharded dim as the slowest
    rows = [flat_rows(indices[dims.index(d)].cpu(), d, spec.global_shape[d]) for d in order]
    linear = rows[0]
    for d, more in zip(order[1:], rows[1:], strict=True):
        linear = linear * spec.global_shape[d] + more
    rest = math.prod(spec.global_shape[d] for d in order[1:])
    axis = spec.sharded[split[0]]
    sizes = spec.sizes_of(axis) if rest == 1 else tuple([size * rest for size in spec.sizes_of(axis)])
    keeps = shape == (spec.global_shape[split[0]],)
    new_sizes = spec.sizes_of(axis) if keeps else even_sizes(shape[0], len(sizes))
    inner = math.prod(shape[1:])
    merged = new_sizes if inner == 1 else tuple([n * inner for n in new_sizes])
    plan = plan_listed(linear.numpy(), sizes, merged, spec.coordinate(axis))
    local = x.local.permute(*others[:place], *order, *others[place:])
    local = local.reshape(*local.shape[:place], sizes[spec.coordinate(axis)], *local.shape[place + len(dims) :])
    local = move_rows(local, plan, place, spec.group(axis))
    if len(shape) > 1:
        own = new_sizes[spec.coordinate(axis)]
        local = local.reshape(*local.shape[:place], own, *shape[1:], *local.shape[place + 1 :])
    new = [place if a == axis else None if d is None else new_dim[d] for a, d in enumerate(spec.dims)]
    result = spec.derive(new_shape, new, [new_sizes if a == axis else s for a, s in enumerate(spec.sizes)])
    if not spec.in_order:
        result = result.with_edge_parts((tuple(new_sizes),))  # in the order of the list
    return ShardTensor(local, result)


def _take_sharded(func: TorchFunction, x: ShardTensor, dim: int, index: ShardTensor) -> Tensor:
    """Take rows by each rank's own ids."""
    spec, ispec, ids = x.spec, index.spec, index.local
    (axis,) = ispec.sharded.values()
    if not spec.in_order:
        ids = places_by_rank(func, flat_rows(ids, dim, spec.global_shape[dim]), spec)
    rows = fetch_rows(x.local, ids, spec.sizes_of(axis), dim, spec.group(axis))
    new = spec.with_rows(dim, ispec.sizes_of(axis))
    if ispec.exchange is not None:
        new = replace(new, exchange=ispec.exchange, edge_parts=ispec.edge_parts)
    elif not spec.in_order:
        new = new.with_edge_parts((ispec.sizes_of(axis),))  # in the order of the ids
    return ShardTensor(rows, new)


def count_true(mask: ShardTensor) -> tuple[int, ...]:
    """Return how many are true on each rank of the one axis that shards; kept. Collective at the first use."""
    return tuple(map(sum, zip(*true_parts(mask), strict=True)))


def true_parts(mask: ShardTensor) -> tuple[tuple[int, ...], ...]:
    """Return the number of true elements on each rank, by edge part if edges were joined; cached."""
    held: tuple[int, tuple[tuple[int, ...], ...]] | None = mask.__dict__.get("_true_counts")
    if held is None or held[0] != version_of(mask.local):
        ((dim, axis),) = mask.spec.sharded.items()
        sizes, rank = mask.spec.sizes_of(axis), mask.spec.coordinate(axis)
        order = mask.spec.order or (sizes,)
        runs = torch.split(mask.local, [part[rank] for part in order], dim)
        mine = torch.stack([run.sum() for run in runs])
        counts = gather(mine, (len(runs),) * len(sizes), 0, mask.spec.group(axis)) if len(sizes) > 1 else mine
        parts = tuple(map(tuple, counts.view(-1, len(runs)).t().tolist()))
        held = mask.__dict__["_true_counts"] = version_of(mask.local), parts
    return held[1]


def as_mask(index: _Index) -> _Index:
    """Return a mask of bools in place of one of 8-bit integers, as torch reads these."""
    return cast("_Index", index.ne(0)) if index.dtype == torch.uint8 and index.ndim else index


def check_mask(spec: ShardSpec, dim: int, mask: Tensor) -> None:
    """Refuse a mask whose shape differs from the dims that it indexes."""
    if tuple(mask.shape) != spec.global_shape[dim : dim + len(mask.shape)]:
        raise IndexError(f"the mask of shape {tuple(mask.shape)} does not fit {spec.global_shape} at dim {dim}")


def split_alike(spec: ShardSpec, dim: int, mask: ShardSpec) -> bool:
    """Whether a mask is unsharded, or split like the dims that it indexes."""
    places = {axis: (dim + d, mask.sizes_of(axis)) for d, axis in mask.sharded.items()}
    if places and spec.order != mask.order:
        return False
    return mask.device_mesh == spec.device_mesh and all(
        (spec.dims[axis], spec.sizes[axis]) == place for axis, place in places.items()
    )


def _take_mask(func: TorchFunction, x: ShardTensor, dim: int, mask: Tensor) -> Tensor:
    """Take the elements where a mask is true: those of this rank's rows, ``x`` and mask split alike first.

    A mask over dims 0 and 1, split along 1, is brought to dim 0: in C order the elements of a rank then come together.
    """
    spec, covered = x.spec, range(dim, dim + len(mask.shape))
    check_mask(spec, dim, mask)
    theirs = {axis: dim + d for d, axis in mask.spec.sharded.items()} if isinstance(mask, ShardTensor) else {}
    axes = {axis for d, axis in spec.sharded.items() if d in covered} | set(theirs)
    if any(other.device_mesh != spec.device_mesh for other in specs_of([mask])):
        raise unsupported(func, "the operands lie on different device meshes", *specs_of([x, mask]))
    if isinstance(mask, ShardTensor) and mask.spec.order != spec.order:
        refuse_disorder(func, spec, mask.spec)
    new_dim = {d: d if d < dim else d - len(mask.shape) + 1 for d in range(spec.ndim) if d not in covered}
    before: tuple[slice | Tensor, ...] = (slice(None),) * dim
    if not axes:
        local = x.local[(*before, *places_of(mask))]
        return finish(local, spec.move_dims(_masked_shape(spec, covered, local.shape[dim]), new_dim))
    if not isinstance(mask, ShardTensor) and dim in spec.sharded:
        mask = as_joined(func, mask, 0, spec)
    # Elements come in C order, so the slowest dim of the mask has to be the sharded one, and the only one.
    axis = min(axes, key=lambda a: (spec.dims[a] != dim, theirs.get(a) != dim, a))
    x = replicated(x, {a for a in axes - {axis} if spec.dims[a] in covered})
    mask = replicated(mask, axes - {axis}) if isinstance(mask, ShardTensor) else mask
    if spec.dims[axis] == dim:
        sizes = spec.sizes_of(axis)
    elif isinstance(mask, ShardTensor) and theirs.get(axis) == dim:
        sizes = mask.spec.sizes_of(axis)
    else:
        sizes = even_sizes(spec.global_shape[dim], spec.axes[axis].size)
    x = sharded_on(x, axis, dim, sizes)
    if isinstance(mask, ShardTensor):
        mask = sharded_on(mask, axis, 0, sizes)
        parts, mine = true_parts(mask), mask.local
    else:
        before_row = F.pad(mask.unsqueeze(-1).flatten(1).sum(1).cumsum(0), (1, 0))  # true before each row
        runs = torch.tensor(spec.order or (sizes,)).t()  # of each rank the parts that its edges were joined of
        bounds = F.pad(runs.flatten().cumsum(0), (1, 0)).to(mask.device)
        parts = tuple(map(tuple, before_row[bounds].diff().view(runs.shape).t().tolist()))
        mine = mask.narrow(0, int(facts_of(sizes).bounds[spec.coordinate(axis)]), sizes[spec.coordinate(axis)])
    counts = tuple(map(sum, zip(*parts, strict=True)))
    shape = _masked_shape(spec, covered, sum(counts))
    dims = [dim if a == axis else None if d is None else new_dim[d] for a, d in enumerate(x.spec.dims)]
    new = spec.derive(shape, dims, [counts if a == axis else s for a, s in enumerate(x.spec.sizes)])
    return ShardTensor(x.local[(*before, *places_of(mine))], new.with_true_parts(parts))


def places_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return the positions of a mask's true elements. Unlike torch's own indexing, this can be captured for a constant
    mask.
    """
    return mask.nonzero(as_tuple=True)


def _masked_shape(spec: ShardSpec, covered: range, count: int) -> tuple[int, ...]:
    return (*spec.global_shape[: covered.start], count, *spec.global_shape[covered.stop :])

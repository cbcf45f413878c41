"""Reshape: match groups of dims with the same elements before and after, and their sharded dims.

Where a part is not a run of rows of the new dim, elements change ranks, in one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import Dtype, finish, map_local, specs_of
from scidata.shard.ops.arguments import handles, integers, normal_dim
from scidata.shard.ops.moving import as_sharded, to_layout
from scidata.shard.ops.shapes import derived
from scidata.shard.rows.redistribute import kept_rows, move_rows, plan_reshape
from scidata.shard.spec import UNKNOWN, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory
from scidata.shard.views import Copy, written


class Group(NamedTuple):
    """Dims of the old shape and dims of the new shape that hold the same elements."""

    old: range
    new: range


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[Group]:
    """Cut two shapes without empty dims and of equal product into the smallest groups of equal product.

    (6, 4, 5) and (3, 8, 5) are cut into (6, 4) with (3, 8) and (5) with (5).
    """
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        if i < len(old) and j < len(new) and old[i] == new[j]:
            i, j = i + 1, j + 1
        elif i < len(old) and old[i] == 1:
            i += 1
        elif j < len(new) and new[j] == 1:
            j += 1
        else:
            left, right = old[i], new[j]
            i, j = i + 1, j + 1
            while left != right:
                if left < right:
                    left, i = left * old[i], i + 1
                else:
                    right, j = right * new[j], j + 1
        groups.append(Group(range(first_i, i), range(first_j, j)))
    return groups


def _full_shape(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Fill in a -1."""
    shape, count = list(new), math.prod(old)
    if shape.count(-1) == 1 and (rest := -math.prod(shape)):
        shape[shape.index(-1)] = count // rest
    if math.prod(shape) != count or min(shape, default=0) < 0:
        raise RuntimeError(f"shape {list(new)} is invalid for a tensor of global shape {tuple(old)}")
    return tuple(shape)


class _Move(NamedTuple):
    """Old dims whose elements change ranks: one of them is sharded, and not into runs of new rows."""

    group: Group
    dim: int
    axis: int
    new: tuple[int, int]  # how many elements of the group come before and behind the new sharded dim
    sizes: tuple[int, ...]  # rows of that dim on each rank


class _Plan(NamedTuple):
    """Steps of a reshape: gather to ``before``, move elements between ranks, view the parts as ``after`` says."""

    before: ShardSpec
    moves: list[_Move]
    after: ShardSpec


def _reshaped(spec: ShardSpec, shape: Sequence[int]) -> _Plan:
    """Return how to reshape, and the layout after it; kept with the layout before."""
    known: dict[tuple[int, ...], _Plan] = spec.__dict__.setdefault("_reshapes", {})
    key = tuple(shape)
    if key not in known:
        known[key] = _find_reshaped(spec, key)
    return known[key]


def _goes_to(group: Group, shape: Sequence[int]) -> int | None:
    """Return the dim that a sharded one of the group becomes: the slowest new one of more than one row."""
    return next((d for d in group.new if shape[d] != 1), group.new[0] if group.new else None)


def _balanced(group: Group, shape: Sequence[int], num_ranks: int) -> int:
    """Return the dim to shard if elements move anyway: the slowest one with a row for each rank, or the longest."""
    return next((d for d in group.new if shape[d] >= num_ranks), max(group.new, key=lambda d: shape[d]))


def _without_merged(spec: ShardSpec, groups: Sequence[Group], shape: Sequence[int]) -> ShardSpec:
    """Replicate axes so that of each group at most the slowest dim stays sharded, and none that vanishes."""
    gathered: set[int] = set()
    for group in groups:
        inside = [d for d in group.old if d in spec.sharded]
        kept = next((d for d in inside if spec.global_shape[d] != 1), next(iter(inside), None))
        gathered |= {spec.sharded[d] for d in inside if d != kept or _goes_to(group, shape) is None}
    return spec.derive(spec.global_shape, [None if a in gathered else d for a, d in enumerate(spec.dims)], spec.sizes)


def _find_reshaped(spec: ShardSpec, shape: Sequence[int]) -> _Plan:
    """Plan a reshape: the new place of each group's sharded dim.

    (8, 3) with dim 0 split 6 and 2 becomes (4, 6) without communication, split 3 and 1: each rank's rows are whole new
    rows. Split 5 and 3 they are not, as 5 rows are two and a half new ones: elements move, to two new rows each.
    """
    new_shape = _full_shape(spec.global_shape, shape)
    if new_shape == spec.global_shape or spec.is_replicated:
        return _Plan(spec, [], spec.derive(new_shape, spec.dims, spec.sizes))
    if 0 in spec.global_shape:  # which rank has nothing of it is no matter
        return _Plan(spec.replicated(spec.global_shape), [], spec.replicated(new_shape))
    groups = reshape_groups(spec.global_shape, new_shape)
    before = _without_merged(spec, groups, new_shape)
    dims, sizes, moves = list(before.dims), list(before.sizes), []
    for group in groups:
        dim = next((d for d in group.old if d in before.sharded), None)
        goes_to = _goes_to(group, new_shape)
        if dim is None or goes_to is None:
            continue
        axis = before.sharded[dim]
        slower = math.prod(spec.global_shape[d] for d in group.old if d < dim)
        old_row = math.prod(spec.global_shape[d] for d in group.old if d > dim)
        new_row = math.prod(new_shape[d] for d in group.new if d > goes_to)
        old_sizes = spec.sizes_of(axis)
        if slower == 1 and not any(size * old_row % new_row for size in old_sizes):
            sizes[axis] = tuple(size * old_row // new_row for size in old_sizes)
        else:
            goes_to = _balanced(group, new_shape, len(old_sizes))
            sizes[axis] = rows = even_sizes(new_shape[goes_to], len(old_sizes))
            around = tuple(
                math.prod(new_shape[d] for d in part)
                for part in (range(group.new.start, goes_to), range(goes_to + 1, group.new.stop))
            )
            moves.append(_Move(group, dim, axis, (around[0], around[1]), rows))
        dims[axis] = goes_to
    return _Plan(before, moves, spec.derive(new_shape, dims, sizes))


def _moved(x: ShardTensor, moves: Sequence[_Move]) -> Tensor:
    """Move elements to their owners after the reshape, with dims merged. Collective."""
    spec, local = x.spec, x.local
    for group, dim, axis, new, sizes in reversed(moves):
        first, last = group.old.start, group.old.stop
        outer = math.prod(spec.global_shape[first:dim])
        inner = math.prod(spec.global_shape[dim + 1 : last])
        old, rank = (outer, inner), spec.coordinate(axis)
        make = partial(plan_reshape, old, spec.sizes_of(axis), new, sizes, rank)
        plan = kept_rows((spec,), ("reshape", axis, old, new), make)
        local = local.reshape(*local.shape[:first], math.prod(local.shape[first:last]), *local.shape[last:])
        local = move_rows(local, plan, first, spec.group(axis))
    return local


def _reshape(func: TorchFunction, x: ShardTensor, shape: Sequence[int]) -> Tensor:
    """Reshape; the result copies what torch views if elements change ranks, or a part inside its halo is not
    contiguous.

    Of several sharded dims that become one, the slowest stays sharded: the mesh axes of the others replicate, by a
    gather. An axis whose dim, of extent 1, vanishes replicates too.
    """
    before, moves, spec = _reshaped(x.spec, shape)
    is_view = _is_view(func, x, spec.global_shape)
    gathered = before is not x.spec and before != x.spec

    def take() -> Tensor:
        source = x.redistribute(placements=before.placements) if gathered else x
        return (_moved(source, moves) if moves else source.local).reshape(spec.local_shape)

    def refuse() -> NoReturn:
        raise unsupported(
            func, "whether this is a view of the tensor that was written to is not known", spec, remedy="clone() it"
        )

    local = take()
    if is_view is None:
        return ShardTensor(local, spec, copied=Copy(x, local, refuse))
    if not is_view:
        return finish(local.clone() if shares_memory(local, x.local) else local, spec)
    if shares_memory(local, x.local):
        return derived(x, local, spec)
    local = local.contiguous()  # of expand(): torch does not differentiate writes to elements that are one in memory

    def put() -> None:
        if moves or gathered:
            back = ShardTensor(local, spec).reshape(x.spec.global_shape)
            x.copy_(to_layout(as_sharded(back, x.spec), x.spec))
        else:
            x.local.copy_(local.reshape(x.local.shape))
            written(x)

    # wrapped even where it is replicated
    return ShardTensor(local, spec, copied=Copy(x, local, take, put))


def _is_view(func: TorchFunction, x: ShardTensor, shape: tuple[int, ...]) -> bool | None:
    """Whether the result of a reshape is a view in one process; None if unknown."""
    must = func is Tensor.view or func is Tensor.view_as
    if x.global_strides is None:
        return True
    if x.global_strides is UNKNOWN:
        return True if must else None
    whole = torch.empty_strided(x.spec.global_shape, x.global_strides, device="meta")
    try:
        whole.view(shape)
    except (RuntimeError, ValueError):  # of a tensor without values
        if must:
            raise
        return False
    return True


@handles("reshape view", torch.reshape, any_order=True)
def reshape(
    func: TensorFunction,
    x: ShardTensor,
    *sizes: int | Sequence[int] | torch.dtype,
    shape: Sequence[int] = (),
    size: Sequence[int] = (),
    dtype: Dtype = None,
) -> Tensor:
    """Reshape to a global shape; copy if the part is not contiguous. Collective if elements change ranks.

    Or view as a dtype of the same width, or of another where the last dim is not split.
    """
    dtype = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], torch.dtype) else dtype
    if dtype is not None:
        if dtype.itemsize == x.dtype.itemsize:
            return map_local(x, lambda part: part.view(dtype))
        if x.ndim - 1 in x.spec.sharded or x.global_strides is UNKNOWN:
            reason = "a dtype of another width changes the last dim, which is split, or lies in an order not known"
            raise unsupported(func, reason, x.spec, remedy="view contiguous() of it, cut along another dim")
        local = x.local.view(dtype)
        shape = (*x.spec.global_shape[:-1], local.shape[-1])
        return finish(local, x.spec.move_dims(shape, {d: d for d in range(x.ndim - 1)}))
    extents = [each for each in (*sizes, *shape, *size) if not isinstance(each, torch.dtype)]
    return _reshape(func, x, integers(*extents))


@handles(Tensor.reshape_as, Tensor.view_as, any_order=True)
def reshape_as(func: TensorFunction, x: Tensor, other: Tensor) -> Tensor:
    """Reshape to another tensor's global shape."""
    if not isinstance(x, ShardTensor):
        raise unsupported(func, "the tensor itself is plain", *specs_of([other]), remedy="use reshape(other.shape)")
    return _reshape(func, x, tuple(other.shape))


@handles("flatten ravel", any_order=True)
def flatten(func: TensorFunction, x: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge neighbouring dims."""
    shape = x.spec.global_shape
    first, last = normal_dim(start_dim, len(shape)), normal_dim(end_dim, len(shape))
    if first > last:
        raise RuntimeError(f"flatten: start_dim {first} comes after end_dim {last}")
    if first == last and func in (torch.flatten, Tensor.flatten):
        return x  # as torch: the tensor itself
    return _reshape(func, x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@handles("unflatten", any_order=True)
def unflatten(func: TensorFunction, x: ShardTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Split one dim."""
    shape = x.spec.global_shape
    dim = normal_dim(dim, len(shape))
    return _reshape(func, x, (*shape[:dim], *_full_shape([shape[dim]], sizes), *shape[dim + 1 :]))

"""Functions that only rearrange: permutations and reshapes.

All follow one idea: say where each sharded dim goes and what its sizes become, then do the same to the local part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.core.types import IntArray
from scidata.shard.memory import UNKNOWN
from scidata.shard.op_table import REFUSES, find, getters, register_op, unsupported
from scidata.shard.ops.align import align, finish, map_local, specs_of
from scidata.shard.rows.redistribute import move_rows, plan_reshape, plan_rows
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory
from scidata.shard.views import Copy, written


def derived(x: ShardTensor, local: Tensor, spec: ShardSpec) -> Tensor:
    """Wrap what shares memory with ``x``."""
    if x._copied is not None:  # also where it is replicated: what is written to it has to reach the original
        return ShardTensor(local, spec, copied=x._copied)
    return finish(local, spec)


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    """Return an argument that was given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def many(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Return integers that were given one by one or as one sequence."""
    given = args[1:] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), ())
    if len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    return tuple(operator.index(n) for n in given)


def normal_dim(dim: int, ndim: int) -> int:
    """Count a dim from the front; raises IndexError."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def keep_dims(x: ShardTensor, part: Tensor) -> Tensor:
    """Wrap a part that differs from ``x`` along unsharded dims only, with the same number of dims."""
    shape = list(part.shape)
    for d in x._spec.sharded:
        shape[d] = x._spec.global_shape[d]
    return derived(x, part, x._spec.derive(shape, x._spec.dims, x._spec.sizes))


# -- permutations ------------------------------------------------------------------------------------------------


def _permute(x: ShardTensor, order: Sequence[int]) -> Tensor:
    spec = x._spec
    new = spec.move_dims([spec.global_shape[d] for d in order], {d: i for i, d in enumerate(order)})
    return derived(x, x._local.permute(*order), new)


@register_op(*find("permute"))
def permute(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reorder all dims."""
    x: ShardTensor = args[0]
    order = [normal_dim(d, x._spec.ndim) for d in many(args, kwargs, "dims")]
    if sorted(order) != list(range(x._spec.ndim)):
        raise RuntimeError(f"permute: {order} is not an order of {x._spec.ndim} dims")
    return _permute(x, order)


@register_op(*find("transpose swapaxes swapdims", namespaces=(torch, Tensor)))
def transpose(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Swap two dims."""
    x: ShardTensor = args[0]
    ndim = x._spec.ndim
    names = ("dim0", "dim1") if "transpose" in func.__name__ or "swapdims" in func.__name__ else ("axis0", "axis1")
    first, second = (argument(args, kwargs, 1 + i, name) for i, name in enumerate(names))
    order = list(range(ndim))
    a, b = normal_dim(first, ndim), normal_dim(second, ndim)
    order[a], order[b] = b, a
    return _permute(x, order)


@register_op(torch.t, Tensor.t, *getters("T mT"), torch.adjoint, Tensor.adjoint)
def transpose_matrix(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Swap the last two dims."""
    x: ShardTensor = args[0]
    ndim = x._spec.ndim
    if func in (torch.adjoint, Tensor.adjoint) and x._local.is_complex():
        raise unsupported(
            func, "complex tensors are not supported here", x._spec, remedy="use transpose(-2, -1).conj()"
        )
    if ndim != 2 and ndim != 1 and func in (torch.t, Tensor.t, *getters("T")):
        raise unsupported(func, f"it wants 2 dims, not {ndim}", x._spec, remedy="use transpose() or permute()")
    return _permute(x, [*range(ndim - 2), ndim - 1, ndim - 2] if ndim > 1 else [0])


@register_op(*find("movedim moveaxis", namespaces=(torch, Tensor)))
def movedim(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Move dims to other places, the rest keep their order."""
    x: ShardTensor = args[0]
    source, destination = argument(args, kwargs, 1, "source"), argument(args, kwargs, 2, "destination")
    ndim = x._spec.ndim
    take = [normal_dim(d, ndim) for d in (source if isinstance(source, tuple | list) else (source,))]
    put = [normal_dim(d, ndim) for d in (destination if isinstance(destination, tuple | list) else (destination,))]
    if len(take) != len(put) or len(set(take)) != len(take) or len(set(put)) != len(put):
        raise RuntimeError(f"movedim: cannot move dims {take} to {put}")
    rest = iter(d for d in range(ndim) if d not in take)
    return _permute(x, [take[put.index(i)] if i in put else next(rest) for i in range(ndim)])


# -- reshapes ----------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Dims of the old shape and dims of the new one that hold the same elements."""

    old: range
    new: range


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[Group]:
    """Cut two shapes without empty dims and of equal product into the smallest groups of equal product."""
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
    """Dims of the old shape whose elements change ranks: one of them is sharded, and not by runs of new rows."""

    group: Group
    dim: int
    axis: int
    new: tuple[int, int]  # how many elements of the group come before and behind the new sharded dim
    sizes: tuple[int, ...]  # rows of that dim on each rank


class _Plan(NamedTuple):
    """How a reshape is done: gather to ``before``, move elements between ranks, view the parts as ``after`` says."""

    before: ShardSpec
    moves: list[_Move]
    after: ShardSpec


def _reshaped(func: Any, spec: ShardSpec, shape: Sequence[int]) -> _Plan:
    """Return how to reshape, and the layout after it; kept with the layout before."""
    known: dict[Any, _Plan] = spec.__dict__.setdefault("_reshapes", {})
    key = tuple(shape)
    if key not in known:
        known[key] = _find_reshaped(func, spec, key)
    return known[key]


def _goes_to(group: Group, shape: Sequence[int]) -> int | None:
    """Return the dim that a sharded one of the group becomes: the slowest new one of more than one row."""
    return next((d for d in group.new if shape[d] != 1), group.new[0] if group.new else None)


def _balanced(group: Group, shape: Sequence[int], num_ranks: int) -> int:
    """Return the dim to shard where elements move anyway: the slowest of which each rank gets a row, or the longest."""
    return next((d for d in group.new if shape[d] >= num_ranks), max(group.new, key=lambda d: shape[d]))


def _without_merged(spec: ShardSpec, groups: Sequence[Group], shape: Sequence[int]) -> ShardSpec:
    """Replicate axes so that of each group at most the slowest dim stays sharded, and none that vanishes."""
    gathered: set[int] = set()
    for group in groups:
        inside = [d for d in group.old if d in spec.sharded]
        kept = next((d for d in inside if spec.global_shape[d] != 1), next(iter(inside), None))
        gathered |= {spec.sharded[d] for d in inside if d != kept or _goes_to(group, shape) is None}
    return spec.derive(spec.global_shape, [None if a in gathered else d for a, d in enumerate(spec.dims)], spec.sizes)


def _find_reshaped(func: Any, spec: ShardSpec, shape: Sequence[int]) -> _Plan:
    new_shape = _full_shape(spec.global_shape, shape)
    if new_shape == spec.global_shape or spec.is_replicated:
        return _Plan(spec, [], spec.derive(new_shape, spec.dims, spec.sizes))
    if 0 in spec.global_shape:  # which rank has nothing of it is no matter
        nothing = [None] * len(spec.axes)
        return _Plan(spec.derive(spec.global_shape, nothing, nothing), [], spec.derive(new_shape, nothing, nothing))
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
    """Bring elements to the ranks that own them after the reshape, their dims merged. Collective."""
    spec, local = x._spec, x._local
    for group, dim, axis, new, sizes in reversed(moves):
        first, last = group.old.start, group.old.stop
        outer = math.prod(spec.global_shape[first:dim])
        inner = math.prod(spec.global_shape[dim + 1 : last])
        plan = plan_reshape((outer, inner), spec.sizes_of(axis), new, sizes, spec.coordinate(axis))
        local = local.reshape(*local.shape[:first], math.prod(local.shape[first:last]), *local.shape[last:])
        local = move_rows(local, plan, first, spec.group(axis))
    return local


def _reshape(func: Any, x: ShardTensor, shape: Sequence[int]) -> Tensor:
    """Reshape; where elements change ranks, or a part inside its halo is not contiguous, torch's view is a copy.

    Of several sharded dims that become one, the slowest stays sharded: the mesh axes of the others replicate, by a
    gather. An axis whose dim, of extent 1, vanishes replicates too.
    """
    before, moves, spec = _reshaped(func, x._spec, shape)
    is_view = _is_view(func, x, spec.global_shape)
    gathered = before is not x._spec and before != x._spec

    def take() -> Tensor:
        source = x.redistribute(placements=before.placements) if gathered else x
        return (_moved(source, moves) if moves else source._local).reshape(spec.local_shape)

    def refuse() -> NoReturn:
        raise unsupported(func, "whether this is a view of what was written to is not known", spec, remedy="clone() it")

    local = take()
    if is_view is None:
        return ShardTensor(local, spec, copied=Copy(x, local, refuse))
    if not is_view:
        return finish(local.clone() if shares_memory(local, x._local) else local, spec)
    if shares_memory(local, x._local):
        return derived(x, local, spec)

    def put() -> None:
        if moves or gathered:
            back: Any = ShardTensor(local, spec).reshape(x._spec.global_shape)
            if isinstance(back, ShardTensor):  # plain where it is replicated: copy_() cuts it
                sizes: dict[int | str, Sequence[int]] = {a: x._spec.sizes_of(a) for a in x._spec.sharded.values()}
                back = back.redistribute(placements=x.placements, sizes=sizes)
            x.copy_(back)
        else:
            x._local.copy_(local.reshape(x._local.shape))
            written(x)

    # wrapped even where it is replicated
    return ShardTensor(local, spec, copied=Copy(x, local, take, put))


def _is_view(func: Any, x: ShardTensor, shape: tuple[int, ...]) -> bool | None:
    """Whether the result of a reshape shares memory with the tensor in one process; None where that is not known."""
    must = func is Tensor.view or func is Tensor.view_as
    if x._memory is None:
        return True
    if x._memory is UNKNOWN:
        return True if must else None
    whole = torch.empty_strided(x._spec.global_shape, x._memory, device="meta")
    try:
        whole.view(shape)
    except RuntimeError:
        if must:
            raise
        return False
    return True


@register_op(*find("reshape view", namespaces=(Tensor,)), torch.reshape)
def reshape(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reshape to a global shape; a copy where the part is not contiguous. Collective where elements change ranks.

    Or view as a dtype of the same width.
    """
    x: ShardTensor = args[0]
    dtype = next((given for given in (*args[1:], *kwargs.values()) if isinstance(given, torch.dtype)), None)
    if dtype is not None:
        if dtype.itemsize != x.dtype.itemsize:
            raise unsupported(func, "a dtype of another width changes the shape", x._spec, remedy="use to(dtype)")
        return map_local(x, lambda part: part.view(dtype))
    return _reshape(func, x, many(args, kwargs, "shape", "size"))


@register_op(Tensor.reshape_as, Tensor.view_as)
def reshape_as(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reshape to another tensor's global shape."""
    if not isinstance(args[0], ShardTensor):
        raise unsupported(func, "the tensor itself is plain", args[1]._spec, remedy="use reshape(other.shape)")
    return _reshape(func, args[0], tuple(args[1].shape))


@register_op(*find("flatten ravel", namespaces=(torch, Tensor)))
def flatten(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Merge neighbouring dims."""
    x: ShardTensor = args[0]
    shape = x._spec.global_shape
    first = normal_dim(argument(args, kwargs, 1, "start_dim", 0), len(shape))
    last = normal_dim(argument(args, kwargs, 2, "end_dim", -1), len(shape))
    if first > last:
        raise RuntimeError(f"flatten: start_dim {first} comes after end_dim {last}")
    if first == last and func in (torch.flatten, Tensor.flatten):
        return x  # as torch: the tensor itself
    return _reshape(func, x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@register_op(*find("unflatten", namespaces=(torch, Tensor)))
def unflatten(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Split one dim."""
    x: ShardTensor = args[0]
    shape = x._spec.global_shape
    dim = normal_dim(argument(args, kwargs, 1, "dim"), len(shape))
    parts = _full_shape([shape[dim]], argument(args, kwargs, 2, "sizes"))
    return _reshape(func, x, (*shape[:dim], *parts, *shape[dim + 1 :]))


@register_op(*find("squeeze", namespaces=(torch, Tensor)))
def squeeze(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Drop dims of global extent 1."""
    x: ShardTensor = args[0]
    shape = x._spec.global_shape
    dim = argument(args, kwargs, 1, "dim")
    asked = range(len(shape)) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    dropped = {normal_dim(d, len(shape)) for d in asked}
    dropped = {d for d in dropped if shape[d] == 1}
    if any(d in x._spec.sharded for d in dropped):  # one rank has it: all get a copy
        return x[tuple(0 if d in dropped else slice(None) for d in range(len(shape)))]
    part = x._local.squeeze(tuple(dropped)) if dropped else x._local.view_as(x._local)
    return derived(x, part, x._spec.without(dropped))


@register_op(*find("unsqueeze", namespaces=(torch, Tensor)))
def unsqueeze(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Add a dim of extent 1."""
    x: ShardTensor = args[0]
    shape = x._spec.global_shape
    dim = normal_dim(argument(args, kwargs, 1, "dim"), len(shape) + 1)
    new_dim = {d: d + (d >= dim) for d in range(len(shape))}
    return derived(x, x._local.unsqueeze(dim), x._spec.move_dims((*shape[:dim], 1, *shape[dim:]), new_dim))


def _expand(x: ShardTensor, shape: Sequence[int], like: ShardSpec | None = None) -> Tensor:
    """Expand; a sharded dim of extent 1 is split as in ``like``, else evenly."""
    spec = x._spec
    added = len(shape) - spec.ndim
    if added < 0:
        raise RuntimeError(f"expand: {list(shape)} has fewer dims than the tensor's {spec.ndim}")
    old = (*[1] * added, *spec.global_shape)
    new = [n if s == -1 else s for s, n in zip(shape, old, strict=True)]
    sizes = list(spec.sizes)
    plans: list[tuple[int, int, Any]] = []
    for d, axis in spec.sharded.items():
        if new[d + added] != spec.global_shape[d]:
            if spec.global_shape[d] != 1:
                raise RuntimeError(f"expand: dim {d} of extent {spec.global_shape[d]} cannot become {new[d + added]}")
            same = like is not None and like.dims[axis] == d + added
            parts = like.sizes_of(axis) if same and like else even_sizes(new[d + added], spec.axes[axis].size)
            sizes[axis] = parts
            plan = plan_rows(_repeated, (new[d + added],), spec.sizes_of(axis), parts, spec.coordinate(axis))
            plans.append((d, axis, plan))
    result = spec.derive(new, [None if d is None else d + added for d in spec.dims], sizes)

    def take() -> Tensor:
        local = x._local
        for d, axis, plan in plans:
            local = move_rows(local, plan, d, spec.group(axis))
        return local

    if not plans:
        return derived(x, x._local.expand(result.local_shape), result)
    local = take()
    return finish(local.expand(result.local_shape), result, copied=Copy(x, local, take))


def _repeated(extent: int, count: int) -> IntArray:
    return np.zeros(count, dtype=np.int64)


@register_op(*find("expand broadcast_to", namespaces=(torch, Tensor)))
def expand(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Repeat dims of extent 1: without a copy, except a sharded one."""
    return _expand(args[0], many(args, kwargs, "size", "shape"))


@register_op(Tensor.expand_as)
def expand_as(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Expand to another tensor's global shape; a plain tensor expands to the shards of the other."""
    x, other = args
    if isinstance(x, ShardTensor):
        return _expand(x, tuple(other.shape), other._spec if isinstance(other, ShardTensor) else None)
    ndim = other._spec.ndim
    (part, _), _, _ = align(func, [x, other], [range(ndim - n, ndim) for n in (x.ndim, ndim)])
    return finish(part.expand(other._spec.local_shape), other._spec)


# -- in place ----------------------------------------------------------------------------------------------------

_IN_PLACE = "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_"


@register_op(*find(_IN_PLACE, namespaces=(Tensor,)), keeps_replicated=True)
def change_shape(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise: a tensor's layout is its own from the start, also where it is replicated."""
    name = func.__name__.rstrip("_")
    remedy = f"assign the result: x = x.{name}(...)" if hasattr(ShardTensor, name) else "make a new tensor"
    raise unsupported(func, "the shape of a ShardTensor does not change in place", *specs_of(args), remedy=remedy)


REFUSES.add(change_shape)

"""Differentiable collectives on parts of uneven size.

A tensor is *sharded* along a dim (each rank of a group holds ``sizes[rank]`` rows of it, possibly none) or
*replicated* (each rank holds all of it). One rule makes every backward follow: **the gradient of a replicated value
is replicated**, each rank holds the full gradient. So these are pairs, each the backward of the other, and a second
derivative works as well:

=============================  =================================
``all_reduce_sum``             ``replicate_to_shards``
``all_gather_v(grad="own")``   ``slice_to_shard``
``all_gather_v(grad="sum")``   ``reduce_scatter_v``
``gather_v``                   ``scatter_v``
``indexed_all_to_all_v``       itself, backwards, adding up
=============================  =================================

All are collective over ``group``, in forward and in backward: ranks must agree on ``sizes``, dtype, the other dims and
on whether ``x`` requires grad. ``group=None`` and a group of one are the identity and never communicate. Ranks are
ranks inside the group. Values that are only moved travel as bytes, so every dtype works on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard._deferred import is_deferred, replicate_deferred
from scidata.shard._transport import (
    DTYPES,
    MAX_DIMS,
    Group,
    all_reduce_max,
    all_reduce_min,
    call,
    exchange,
    gather,
    group_rank,
    group_size,
    reduce,
    reduce_scatter,
    with_dim,
)

__all__ = [
    "all_gather_v",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "exchange",
    "gather_v",
    "group_rank",
    "group_size",
    "indexed_all_to_all_v",
    "reduce_from_shards",
    "reduce_scatter_v",
    "replicate_to_shards",
    "scatter_v",
    "slice_to_shard",
]

_NO_SOURCE = "rank {} is the source of scatter_v and must pass a tensor, not None"


# -- checks ------------------------------------------------------------------------------------------------------


def _normal_dim(shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ShardLayoutError(f"dim {dim} is out of range for a tensor of shape {tuple(shape)}")
    return dim % len(shape)


def _normal_sizes(sizes: Sequence[int], group: Group) -> tuple[int, ...]:
    checked = tuple(int(s) for s in sizes)
    if len(checked) != group_size(group):
        raise ShardLayoutError(f"{len(checked)} sizes {checked} were given for a group of {group_size(group)} ranks")
    if min(checked) < 0:
        raise ShardLayoutError(f"sizes must not be negative: {checked}")
    return checked


def _check_part(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> None:
    rank = group_rank(group)
    if x.shape[dim] != sizes[rank]:
        raise ShardLayoutError(
            f"rank {rank} holds {x.shape[dim]} rows along dim {dim} (shape {tuple(x.shape)}), but sizes {sizes} give "
            f"it {sizes[rank]}; pass the sizes of the parts that the ranks really hold"
        )


def _check_whole(shape: Sequence[int], sizes: tuple[int, ...], dim: int) -> None:
    if shape[dim] != sum(sizes):
        raise ShardLayoutError(
            f"a tensor of shape {tuple(shape)} cannot be split along dim {dim} into {sizes}: they add up to "
            f"{sum(sizes)}, not {shape[dim]}"
        )


def _check_member(rank: int, group: Group, name: str) -> None:
    if not 0 <= rank < group_size(group):
        raise ConfigError(f"{name}={rank} is not a rank of a group of {group_size(group)}")


# -- replicated <-> sharded --------------------------------------------------------------------------------------


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce(x, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_ReplicateToShards, grad, ctx.group), None


class _ReplicateToShards(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_AllReduceSum, grad, ctx.group), None


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum each rank's ``x``: a partial value becomes a replicated one. Backward: the identity. Collective.

    16-bit floats are added in float32.

    Raises
    ------
    ConfigError
        ``x`` is bool.
    """
    if x.dtype == torch.bool:
        raise ConfigError("a sum of bools over ranks is ambiguous; convert to an integer dtype first")
    if group_size(group) == 1:
        return x
    return call(_AllReduceSum, x, group)


reduce_from_shards = all_reduce_sum


def replicate_to_shards(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Say that a replicated value meets shards: forward the identity, backward a sum over each group.

    This is what makes the ``.grad`` of a plain parameter the full gradient on each rank. Collective in backward,
    except for parameters of a parallelized model, whose sums are those of ``parallelize``.
    """
    if is_deferred(x):
        return replicate_deferred(x, groups)
    for group in groups:
        if group_size(group) > 1 and (x.is_floating_point() or x.is_complex()):
            x = call(_ReplicateToShards, x, group)
    return x


class _GatherOwn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, group
        return gather(x, sizes, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_Slice, grad, *ctx.layout), None, None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, group
        rank = group_rank(group)
        return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_GatherOwn, grad, *ctx.layout), None, None, None


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, group
        return gather(x, sizes, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_ReduceScatter, grad, *ctx.layout), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, group
        return reduce_scatter(x, sizes, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_GatherSum, grad, *ctx.layout), None, None, None


def all_gather_v(
    x: Tensor, sizes: Sequence[int], dim: int, group: Group, *, grad: Literal["own", "sum"] = "own"
) -> Tensor:
    """Join the parts of all ranks along ``dim``; each rank gets the whole. Collective.

    Parameters
    ----------
    x
        This rank's part; the parts differ along ``dim`` only.
    dim
        Tensor dim of the parts.
    group
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    sizes
        Rows of each rank's part.
    grad
        ``"own"``: each rank computes the same with the result, so its gradient is replicated and backward keeps the
        own slice. ``"sum"``: each rank uses the result for its own shard (keys and values of attention), so the
        ranks' gradients differ and backward adds them up (a reduce-scatter).

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.
    """
    dim, checked = _normal_dim(x.shape, dim), _normal_sizes(sizes, group)
    _check_part(x, checked, dim, group)
    if grad not in ("own", "sum"):
        raise ConfigError(f"grad must be 'own' or 'sum', not {grad!r}")
    if group_size(group) == 1:
        return x
    function = _GatherOwn if grad == "own" else _GatherSum
    return call(function, x, checked, dim, group)


def reduce_scatter_v(x: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Add up each rank's whole tensor and keep the own part of the sum. Backward: ``all_gather_v``. Collective.

    Parameters
    ----------
    x
        The whole tensor, of the same shape on each rank.
    sizes
        Rows of each rank's part.
    dim
        Tensor dim of the parts.
    group
        Ranks that take part, all of which call it; None or a group of one communicates nothing.

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.
    """
    dim, checked = _normal_dim(x.shape, dim), _normal_sizes(sizes, group)
    _check_whole(x.shape, checked, dim)
    if x.dtype == torch.bool:
        raise ConfigError("a sum of bools over ranks is ambiguous; convert to an integer dtype first")
    if group_size(group) == 1:
        return x
    return call(_ReduceScatter, x, checked, dim, group)


def slice_to_shard(x: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Keep the own part of a replicated tensor. Backward: gather, the full gradient on each rank; collective there."""
    dim, checked = _normal_dim(x.shape, dim), _normal_sizes(sizes, group)
    _check_whole(x.shape, checked, dim)
    if group_size(group) == 1:
        return x
    if is_deferred(x):
        rank = group_rank(group)
        return replicate_deferred(x, [group]).narrow(dim, sum(checked[:rank]), checked[rank]).clone()
    return call(_Slice, x, checked, dim, group)


# -- one rank <-> all --------------------------------------------------------------------------------------------


class _GatherTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, root: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, root, group
        nothing = with_dim(x.shape, dim, 0)
        empty = x.new_empty(nothing)
        parts = [x if rank == root else empty for rank in range(len(sizes))]
        is_root = group_rank(group) == root
        shapes = [with_dim(x.shape, dim, size) if is_root else nothing for size in sizes]
        return torch.cat(exchange(parts, shapes, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_ScatterFrom, grad, *ctx.layout), None, None, None, None


class _ScatterFrom(Function):
    """On ranks other than the root, ``x`` has the right shape but no rows along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, root: int, group: Group) -> Tensor:
        ctx.layout = sizes, dim, root, group
        rank = group_rank(group)
        nothing = with_dim(x.shape, dim, 0)
        parts = list(torch.split(x, list(sizes), dim)) if rank == root else [x] * len(sizes)
        own = with_dim(x.shape, dim, sizes[rank])
        received = exchange(parts, [own if p == root else nothing for p in range(len(sizes))], group)
        return received[root].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_GatherTo, grad, *ctx.layout), None, None, None, None


def gather_v(x: Tensor, sizes: Sequence[int], dim: int, dst: int, group: Group) -> Tensor:
    """Join the parts on rank ``dst``; the others get a tensor without rows along ``dim``. Collective.

    Backward hands each rank its part of ``dst``'s gradient: the other ranks must take part in it, with a loss that
    includes their empty result (its ``sum()`` is 0).

    Parameters
    ----------
    x
        This rank's part; the parts differ along ``dim`` only.
    sizes
        Rows of each rank's part.
    dim
        Tensor dim of the parts.
    dst
        Rank of the group that gets the whole.
    group
        Ranks that take part, all of which call it; None or a group of one communicates nothing.

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.
    """
    dim, checked = _normal_dim(x.shape, dim), _normal_sizes(sizes, group)
    _check_part(x, checked, dim, group)
    _check_member(dst, group, "dst")
    if group_size(group) == 1:
        return x
    return call(_GatherTo, x, checked, dim, dst, group)


def scatter_v(
    x: Tensor | None, sizes: Sequence[int], dim: int, src: int, group: Group, *, device: torch.device | None = None
) -> Tensor:
    """Split rank ``src``'s tensor along ``dim``; each rank gets its part. Collective.

    Parameters
    ----------
    sizes
        Rows of each rank's part.
    dim
        Tensor dim to split.
    src
        Rank of the group that has the whole.
    group
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    x
        Used on ``src`` only; None elsewhere is fine. Shape, dtype and whether it requires grad are sent along. For a
        second derivative the others pass a tensor of that shape without rows along ``dim``, to differentiate by.
    device
        Where ranks without ``x`` put their part; default the device that the group communicates on.

    Raises
    ------
    ShardLayoutError
        On every rank, when ``src``'s tensor does not split into ``sizes``.
    ConfigError
        On every rank, when ``src`` passes None.
    """
    checked = _normal_sizes(sizes, group)
    _check_member(src, group, "src")
    if group is None or group_size(group) == 1:
        if x is None:
            raise ConfigError(_NO_SOURCE.format(src))
        _check_whole(x.shape, checked, _normal_dim(x.shape, dim))
        return x
    if device is None:
        nccl = "nccl" in dist.get_backend(group)
        fallback = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        device = x.device if x is not None else fallback
    shape, dtype, requires_grad = _broadcast_description(x, src, group, device)
    dim = _normal_dim(shape, dim)
    _check_whole(shape, checked, dim)
    if group_rank(group) != src:
        nothing = with_dim(shape, dim, 0)
        if x is None or (tuple(x.shape), x.dtype, x.requires_grad) != (nothing, dtype, requires_grad):
            x = torch.empty(nothing, dtype=dtype, device=device, requires_grad=requires_grad)
    assert x is not None
    return call(_ScatterFrom, x, checked, dim, src, group)


def _broadcast_description(
    x: Tensor | None, src: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape, dtype and requires_grad of the source's tensor, as integers: nothing is pickled."""
    header = torch.zeros(3 + MAX_DIMS, dtype=torch.int64)
    if group_rank(group) == src and x is None:
        header[0] = -2
    elif group_rank(group) == src and x is not None:
        known = x.dtype in DTYPES and x.ndim <= MAX_DIMS
        header[0] = x.ndim if known else -1
        if known:
            header[1], header[2] = DTYPES.index(x.dtype), int(x.requires_grad and torch.is_grad_enabled())
            header[3 : 3 + x.ndim] = torch.tensor(x.shape, dtype=torch.int64)
    header = header.to(device)
    dist.broadcast(header, group=group, group_src=src)
    num_dims, dtype, requires_grad, *shape = header.tolist()
    if num_dims == -2:
        raise ConfigError(_NO_SOURCE.format(src))
    if num_dims < 0:
        raise ConfigError(f"scatter_v cannot send rank {src}'s dtype, or more than {MAX_DIMS} dims")
    return tuple(shape[:num_dims]), DTYPES[dtype], bool(requires_grad)


# -- rows by index -----------------------------------------------------------------------------------------------


class _SendRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: tuple[Tensor, ...], counts: tuple[int, ...], group: Group) -> Tensor:
        ctx.layout = indices, counts, group
        ctx.num_rows = x.shape[0]
        rows = [x.detach().index_select(0, index) for index in indices]
        return torch.cat(exchange(rows, [(count, *x.shape[1:]) for count in counts], group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_ReturnRows, grad, ctx.num_rows, *ctx.layout), None, None, None


class _ReturnRows(Function):
    """The other way round: rows go back to where they came from and are added there."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, num_rows: int, indices: tuple[Tensor, ...], counts: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.layout = indices, counts, group
        shapes = [(len(index), *y.shape[1:]) for index in indices]
        returned = exchange(torch.split(y.detach(), list(counts)), shapes, group)
        sums = y.new_zeros((num_rows, *y.shape[1:]))
        return sums.index_add_(0, torch.cat(indices), torch.cat(returned))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_SendRows, grad, *ctx.layout), None, None, None, None


def indexed_all_to_all_v(x: Tensor, send_indices: Sequence[Tensor], recv_counts: Sequence[int], group: Group) -> Tensor:
    """Send ``x[send_indices[p]]`` to each rank p; return the rows received, in rank order. Collective.

    What fills ghosts of irregular data: one exchange for all neighbours. Backward sends the rows' gradients back and
    adds them where they came from.

    Parameters
    ----------
    group
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    x
        ``(num_owned, ...)``.
    send_indices
        One ``(num,)`` int64 tensor of local rows for each rank of the group, own rank included; repeats are legal.
    recv_counts
        Rows that each rank sends here: the lengths of their ``send_indices`` for this rank.

    Raises
    ------
    ShardLayoutError
        Not one entry for each rank.
    """
    counts = _normal_sizes(recv_counts, group)
    indices = tuple(index.to(device=x.device, dtype=torch.int64) for index in send_indices)
    if len(indices) != len(counts):
        raise ShardLayoutError(f"{len(indices)} index tensors were given for a group of {len(counts)} ranks")
    rank = group_rank(group)
    if counts[rank] != len(indices[rank]):
        raise ShardLayoutError(
            f"rank {rank} sends {len(indices[rank])} rows to itself, but expects {counts[rank]} from itself"
        )
    if len(counts) == 1:
        return x.index_select(0, indices[0])
    return call(_SendRows, x, indices, counts, group)

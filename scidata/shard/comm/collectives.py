"""Differentiable collectives on parts of uneven size.

A tensor is *sharded* along a dim (each rank of a group holds ``sizes[rank]`` rows of it, possibly none) or
*replicated* (each rank holds all of it). One rule makes every backward follow: **the gradient of a replicated value
is replicated**, each rank holds the full gradient. So these are pairs, each the backward of the other, and a second
derivative works as well:

=============================  =================================
``all_reduce_sum``             ``replicate_to_shards``
``all_gather_v(grad="own")``   ``slice_to_shard``
``all_gather_v(grad="sum")``   ``reduce_scatter_v``
``indexed_all_to_all_v``       itself, backwards, adding up
=============================  =================================

The pair with a root rank is in :mod:`scidata.shard.comm.rooted`.

All are collective over ``group``, in forward and in backward: ranks must agree on ``sizes``, dtype, the other dims and
on whether ``x`` requires grad. ``group=None`` and a group of one are the identity and never communicate. Ranks are
ranks inside the group. Values that are only moved travel as bytes, so every dtype works on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.comm.functions import linear
from scidata.shard.comm.sums import deferral, replicate_deferred
from scidata.shard.comm.transport import (
    Counts,
    Group,
    exchange_rows,
    gather,
    group_rank,
    group_size,
    reduce_scatter,
    swap,
)
from scidata.shard.sizes import facts_of


def normal_sizes(sizes: Sequence[int], group: Group) -> tuple[int, ...]:
    """Return the sizes of a group's parts as plain integers."""
    facts = facts_of(sizes)
    checked = facts.sizes
    if len(checked) != group_size(group):
        raise ShardLayoutError(f"{len(checked)} sizes {checked} were given for a group of {group_size(group)} ranks")
    if facts.least < 0:
        raise ShardLayoutError(f"sizes must not be negative: {checked}")
    return checked


def normal_layout(
    shape: Sequence[int], sizes: Sequence[int], dim: int, group: Group, *, is_whole: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the dim from the front and the sizes as plain integers; raise if the part, or the whole, does not fit
    them.
    """
    if not -len(shape) <= dim < len(shape):
        raise ShardLayoutError(f"dim {dim} is out of range for a tensor of shape {tuple(shape)}")
    dim, checked, rank = dim % len(shape), normal_sizes(sizes, group), group_rank(group)
    if is_whole and shape[dim] != facts_of(checked).total:
        raise ShardLayoutError(
            f"a tensor of shape {tuple(shape)} cannot be split along dim {dim} into {checked}: they add up to "
            f"{facts_of(checked).total}, not {shape[dim]}"
        )
    if not is_whole and shape[dim] != checked[rank]:
        raise ShardLayoutError(
            f"rank {rank} holds {shape[dim]} rows along dim {dim} (shape {tuple(shape)}), but sizes {checked} give "
            f"it {checked[rank]}; pass the sizes of the parts that the ranks really hold"
        )
    return dim, checked


def check_member(rank: int, group: Group, name: str) -> None:
    """Refuse a rank that is not in the group."""
    if not 0 <= rank < group_size(group):
        raise ConfigError(f"{name}={rank} is not a rank of a group of {group_size(group)}")


# -- replicated <-> sharded --------------------------------------------------------------------------------------


def _own_part(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
    rank = group_rank(group)
    return x.narrow(dim, int(facts_of(sizes).bounds[rank]), sizes[rank]).clone()  # a view could not be changed in place


@checked_keywords
def all_gather_v(
    x: Tensor, sizes: Sequence[int], dim: int, group: Group, *, grad: Literal["own", "sum"] = "own"
) -> Tensor:
    """Join the parts of all ranks along ``dim``; each rank gets the whole. Collective.

    Parameters
    ----------
    x : Tensor
        This rank's part; the parts differ along ``dim`` only.
    dim : int
        Tensor dim of the parts.
    group : ProcessGroup
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    sizes : Sequence[int]
        Rows of each rank's part.
    grad : {"own", "sum"}, default "own"
        ``"own"``: each rank computes the same with the result, so its gradient is replicated and backward keeps the
        own slice. ``"sum"``: each rank uses the result for its own shard (keys and values of attention), so the
        ranks' gradients differ and backward adds them up (a reduce-scatter).

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> group = mesh["domain"].get_group()
    >>> part = torch.arange(3.0) if mesh.get_rank() == 0 else torch.arange(3.0, 5.0)
    >>> scidata.all_gather_v(part, sizes=[3, 2], dim=0, group=group)
    tensor([0., 1., 2., 3., 4.])
    """
    dim, checked = normal_layout(x.shape, sizes, dim, group, is_whole=False)
    if grad not in ("own", "sum"):
        raise ConfigError(f"grad must be 'own' or 'sum', not {grad!r}")
    if group_size(group) == 1:
        return x
    return linear(gather, _own_part if grad == "own" else reduce_scatter, x, checked, dim, group)


@checked_keywords
def reduce_scatter_v(x: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Add up each rank's whole tensor and keep the own part of the sum. Backward: ``all_gather_v``. Collective.

    Parameters
    ----------
    x : Tensor
        The whole tensor, of the same shape on each rank.
    sizes : Sequence[int]
        Rows of each rank's part.
    dim : int
        Tensor dim of the parts.
    group : ProcessGroup
        Ranks that take part, all of which call it; None or a group of one communicates nothing.

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> group = mesh["domain"].get_group()
    >>> part = scidata.reduce_scatter_v(torch.arange(5.0), sizes=[3, 2], dim=0, group=group)
    >>> [part.tolist()] if mesh.get_rank() == 0 else [[0.0, 2.0, 4.0]]  # rank 1 has [6, 8]
    [[0.0, 2.0, 4.0]]
    """
    dim, checked = normal_layout(x.shape, sizes, dim, group, is_whole=True)
    if x.dtype == torch.bool:
        raise ConfigError("a sum of bools over ranks is ambiguous; convert to an integer dtype first")
    if group_size(group) == 1:
        return x
    return linear(reduce_scatter, gather, x, checked, dim, group)


def slice_to_shard(x: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Keep the own part of a replicated tensor. Backward: gather, the full gradient on each rank; collective there."""
    dim, checked = normal_layout(x.shape, sizes, dim, group, is_whole=True)
    if group_size(group) == 1:
        return x
    put_off = deferral(x)
    if put_off is not None:
        return _own_part(replicate_deferred(x, [group], put_off), checked, dim, group)
    return linear(_own_part, gather, x, checked, dim, group)


# -- rows by index -----------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """The rows of the own part that other ranks get, and the rows that come from them."""

    rows: Tensor  # rows of the own part, those for each rank one after the other
    sent: Counts
    held: Counts
    pairs: int | None = None  # of a sender and a receiver among all ranks, the same on all; None for many


def _send_rows(x: Tensor, num_rows: int, route: Route, group: Group) -> Tensor:
    return exchange_rows(x.index_select(0, route.rows), route.sent, route.held, group, route.pairs)


def _return_rows(y: Tensor, num_rows: int, route: Route, group: Group) -> Tensor:
    """Transpose of sending rows: rows go back to their owners and are added there."""
    returned = exchange_rows(y, route.held, route.sent, group, route.pairs)
    return y.new_zeros((num_rows, *y.shape[1:])).index_add_(0, route.rows, returned)


def send_rows(x: Tensor, route: Route, group: Group) -> Tensor:
    """Send ``x[route.rows]``, and return the rows received, by rank. Collective; see :func:`indexed_all_to_all_v`."""
    if group_size(group) == 1:
        return x.index_select(0, route.rows)
    return linear(_send_rows, _return_rows, x, len(x), route, group)


def return_rows(y: Tensor, num_rows: int, route: Route, group: Group) -> Tensor:
    """Send rows back to the owners from which :func:`send_rows` took them, and add them up in ``num_rows`` rows.

    Its transpose. Collective.
    """
    return linear(_return_rows, _send_rows, y, num_rows, route, group)


def swap_counts(counts: Tensor, group: Group) -> tuple[Tensor, int]:
    """Tell each rank how many rows it will receive, ``(num_ranks,)`` int64. Collective.

    Returns how many rows each rank has for this one, and the number of pairs of ranks that have any (:class:`Route`).
    """
    num_ranks, others = len(counts), counts.clone()
    others[group_rank(group)] = 0
    if num_ranks == 1:
        return counts, 0
    swapped, pairs = swap(torch.stack([counts, others.count_nonzero().expand(num_ranks)], 1), group).unbind(1)
    return swapped, int(pairs.sum())


def nonzero_counts(sizes: npt.ArrayLike) -> Counts:
    """Return the ranks that have any rows, and how many."""
    counts = np.asarray(sizes)
    ranks = np.flatnonzero(counts)
    return list(zip(ranks.tolist(), counts[ranks].tolist(), strict=True))


@checked_keywords
def indexed_all_to_all_v(x: Tensor, send_indices: Sequence[Tensor], recv_counts: Sequence[int], group: Group) -> Tensor:
    """Send ``x[send_indices[p]]`` to each rank p; return the rows received, in rank order. Collective.

    What fills ghosts of irregular data: one exchange for all neighbours. Backward sends the rows' gradients back and
    adds them where they came from.

    Parameters
    ----------
    group : ProcessGroup
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    x : Tensor
        ``(num_owned, ...)``.
    send_indices : Sequence[Tensor]
        One ``(num,)`` int64 tensor of local rows for each rank of the group, own rank included; repeats are legal.
    recv_counts : Sequence[int]
        Rows that each rank sends here: the lengths of their ``send_indices`` for this rank.

    Raises
    ------
    ShardLayoutError
        Not one entry for each rank.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> group = mesh["domain"].get_group()
    >>> rows = torch.arange(3.0) + 10 * mesh.get_rank()
    >>> to_each = [torch.tensor([0]), torch.tensor([1, 2])]  # row 0 to rank 0, rows 1 and 2 to rank 1
    >>> received = scidata.indexed_all_to_all_v(rows, to_each, [1, 1] if mesh.get_rank() == 0 else [2, 2], group)
    >>> received.tolist() == ([0, 10] if mesh.get_rank() == 0 else [1, 2, 11, 12])
    True
    """
    counts = normal_sizes(recv_counts, group)
    indices = tuple(index.to(device=x.device, dtype=torch.int64) for index in send_indices)
    if len(indices) != len(counts):
        raise ShardLayoutError(f"{len(indices)} index tensors were given for a group of {len(counts)} ranks")
    rank = group_rank(group)
    if counts[rank] != len(indices[rank]):
        raise ShardLayoutError(
            f"rank {rank} sends {len(indices[rank])} rows to itself, but expects {counts[rank]} from itself"
        )
    return send_rows(x, Route(torch.cat(indices), nonzero_counts([*map(len, indices)]), nonzero_counts(counts)), group)

"""Differentiable collectives between one rank of a group and all: a pair, each the backward of the other.

See :mod:`scidata.shard.comm.collectives` for the rules of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError
from scidata.shard.comm.collectives import check_member, normal_layout, normal_sizes
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import (
    DTYPES,
    MAX_DIMS,
    Group,
    broadcast,
    device_of,
    exchange,
    group_rank,
    group_size,
    with_dim,
)

_NO_SOURCE = "rank {} is the source of scatter_v and must pass a tensor, not None"


def _gather_to(x: Tensor, sizes: tuple[int, ...], dim: int, root: int, group: Group) -> Tensor:
    sizes_here = list(enumerate(sizes)) if group_rank(group) == root else []
    shapes = [(rank, with_dim(x.shape, dim, size)) for rank, size in sizes_here]
    received = exchange(x, [(root, x)], shapes, group, len(sizes) - 1)
    return torch.cat(received, dim) if received else x.new_empty(with_dim(x.shape, dim, 0))


def scattered(x: Tensor, sizes: tuple[int, ...], dim: int, root: int, group: Group) -> Tensor:
    """Return the own part of the root's ``x``; on other ranks a tensor of the right shape without rows along
    ``dim``.
    """
    rank = group_rank(group)
    parts = list(enumerate(torch.split(x, list(sizes), dim))) if rank == root else []
    (received,) = exchange(x, parts, [(root, with_dim(x.shape, dim, sizes[rank]))], group, len(sizes) - 1)
    return received


def _from_owner(x: Tensor, dim: int, owner: int, group: Group) -> Tensor:
    row = x.detach().clone() if group_rank(group) == owner else x.new_empty(with_dim(x.shape, dim, 1))
    broadcast(row, owner, group)
    return row


def from_owner(x: Tensor, dim: int, owner: int, group: Group) -> Tensor:
    """Return the one row along ``dim`` that only ``owner`` holds. Collective.

    Its gradient is replicated; backward keeps it where the row is owned. Collective in second derivatives.
    """
    own = lambda grad, *_: grad.narrow(dim, 0, int(group_rank(group) == owner)).clone()  # noqa: E731
    return x if group_size(group) == 1 else linear(_from_owner, own, x, dim, owner, group)


@checked_keywords
def gather_v(x: Tensor, sizes: Sequence[int], dim: int, dst: int, group: Group) -> Tensor:
    """Join the parts on rank ``dst``; the others get a tensor without rows along ``dim``. Collective.

    Backward hands each rank its part of ``dst``'s gradient: the other ranks must take part in it, with a loss that
    includes their empty result (its ``sum()`` is 0).

    Parameters
    ----------
    x : Tensor
        This rank's part; the parts differ along ``dim`` only.
    sizes : Sequence[int]
        Rows of each rank's part.
    dim : int
        Tensor dim of the parts.
    dst : int
        Rank of the group that gets the whole.
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
    >>> part = torch.arange(3.0) if mesh.get_rank() == 0 else torch.arange(3.0, 5.0)
    >>> whole = scidata.gather_v(part, sizes=[3, 2], dim=0, dst=0, group=group)
    >>> len(whole) == (5 if mesh.get_rank() == 0 else 0)
    True
    """
    dim, checked = normal_layout(x.shape, sizes, dim, group, is_whole=False)
    check_member(dst, group, "dst")
    if group_size(group) == 1:
        return x
    return linear(_gather_to, scattered, x, checked, dim, dst, group)


@checked_keywords
def scatter_v(
    x: Tensor | None, sizes: Sequence[int], dim: int, src: int, group: Group, *, device: torch.device | None = None
) -> Tensor:
    """Split rank ``src``'s tensor along ``dim``; each rank gets its part. Collective.

    Parameters
    ----------
    sizes : Sequence[int]
        Rows of each rank's part.
    dim : int
        Tensor dim to split.
    src : int
        Rank of the group that has the whole.
    group : ProcessGroup
        Ranks that take part, all of which call it; None or a group of one communicates nothing.
    x : Tensor or None
        Used on ``src`` only; None elsewhere is fine. Shape, dtype and whether it requires grad are sent along. For a
        second derivative the others pass a tensor of that shape without rows along ``dim``, to differentiate by.
    device : torch.device or None, optional
        Where ranks without ``x`` put their part; default the device that the group communicates on.

    Raises
    ------
    ShardLayoutError
        On every rank, when ``src``'s tensor does not split into ``sizes``.
    ConfigError
        On every rank, when ``src`` passes None.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> group = mesh["domain"].get_group()
    >>> whole = torch.arange(5.0) if mesh.get_rank() == 0 else None
    >>> part = scidata.scatter_v(whole, sizes=[3, 2], dim=0, src=0, group=group)
    >>> part.tolist() == ([0, 1, 2] if mesh.get_rank() == 0 else [3, 4])
    True
    """
    normal_sizes(sizes, group)
    check_member(src, group, "src")
    if group is None or group_size(group) == 1:
        if x is None:
            raise ConfigError(_NO_SOURCE.format(src))
        normal_layout(x.shape, sizes, dim, group, is_whole=True)
        return x
    if device is None:
        device = device_of(group) if x is None else x.device
    shape, dtype, requires_grad = _broadcast_description(x, src, group, device)
    dim, checked = normal_layout(shape, sizes, dim, group, is_whole=True)
    if group_rank(group) != src:
        nothing = with_dim(shape, dim, 0)
        if x is None or (tuple(x.shape), x.dtype, x.requires_grad) != (nothing, dtype, requires_grad):
            x = torch.empty(nothing, dtype=dtype, device=device, requires_grad=requires_grad)
    assert x is not None
    return linear(scattered, _gather_to, x, checked, dim, src, group)


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
    broadcast(header, src, group)
    num_dims, dtype, requires_grad, *shape = header.tolist()
    if num_dims == -2:
        raise ConfigError(_NO_SOURCE.format(src))
    if num_dims < 0:
        raise ConfigError(f"scatter_v cannot send rank {src}'s dtype, or more than {MAX_DIMS} dims")
    return tuple(shape[:num_dims]), DTYPES[dtype], bool(requires_grad)

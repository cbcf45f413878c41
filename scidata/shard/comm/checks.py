"""Checks of the arguments of every collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.comm.transport import Group, group_rank, group_size


def normal_dim(shape: Sequence[int], dim: int) -> int:
    """Return a dim counted from the front."""
    if not -len(shape) <= dim < len(shape):
        raise ShardLayoutError(f"dim {dim} is out of range for a tensor of shape {tuple(shape)}")
    return dim % len(shape)


def normal_sizes(sizes: Sequence[int], group: Group) -> tuple[int, ...]:
    """Return the sizes of a group's parts as plain integers."""
    checked = tuple(int(s) for s in sizes)
    if len(checked) != group_size(group):
        raise ShardLayoutError(f"{len(checked)} sizes {checked} were given for a group of {group_size(group)} ranks")
    if min(checked) < 0:
        raise ShardLayoutError(f"sizes must not be negative: {checked}")
    return checked


def check_part(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> None:
    """Refuse a part that is not as large as its size says."""
    rank = group_rank(group)
    if x.shape[dim] != sizes[rank]:
        raise ShardLayoutError(
            f"rank {rank} holds {x.shape[dim]} rows along dim {dim} (shape {tuple(x.shape)}), but sizes {sizes} give "
            f"it {sizes[rank]}; pass the sizes of the parts that the ranks really hold"
        )


def check_whole(shape: Sequence[int], sizes: tuple[int, ...], dim: int) -> None:
    """Refuse sizes that do not add up to the whole."""
    if shape[dim] != sum(sizes):
        raise ShardLayoutError(
            f"a tensor of shape {tuple(shape)} cannot be split along dim {dim} into {sizes}: they add up to "
            f"{sum(sizes)}, not {shape[dim]}"
        )


def check_member(rank: int, group: Group, name: str) -> None:
    """Refuse a rank that is not in the group."""
    if not 0 <= rank < group_size(group):
        raise ConfigError(f"{name}={rank} is not a rank of a group of {group_size(group)}")

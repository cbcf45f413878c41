"""Checks of the arguments of every collective."""

from __future__ import annotations

from collections.abc import Sequence

from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.comm.transport import Group, group_rank, group_size
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
    """Return the dim from the front and the sizes as plain integers; refuse those that the part, or whole, has not."""
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

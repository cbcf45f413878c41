"""Elements of all ranks ordered by value: sort, and selection of the element at a place.

Everything goes by integer keys: a key is less than another where torch sorts its value first, NaN last. The sort
is a sample sort (Frazer and McKellar, 1970): equal values are told apart by their global number, so the result is
stable, and no rank gets more than about its share, whatever repeats. One place of the order is found by counting how
many keys begin with which digits, where no element moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from scidata.shard.comm import transport
from scidata.shard.comm.collectives import nonzero_counts, swap_counts
from scidata.shard.comm.transport import Group, exchange_rows, gather, gather_rows, group_rank, group_size

LARGEST = torch.iinfo(torch.int64).max  # the key of NaN
_SAMPLES = 32  # of each rank for each rank: parts then differ by some percent
_DIGIT = 13  # bits; five rounds for a key, of 64 KiB each


def order_keys(x: Tensor) -> Tensor:
    """Return int64 keys in the order of the values; equal values have equal keys, also -0 and 0."""
    if x.is_complex():
        raise RuntimeError("complex numbers have no order")
    if not x.is_floating_point():
        return x.detach().to(torch.int64)
    bits = (x.detach().double() + 0.0).view(torch.int64)
    return torch.where(bits < 0, bits ^ LARGEST, bits).masked_fill_(x.isnan(), LARGEST)


def sorted_ids(keys: Tensor, sizes: Sequence[int], group: Group) -> tuple[Tensor, tuple[int, ...]]:
    """Return the global numbers of this rank's share in the sorted whole, and how many each rank has. Collective.

    ``keys``: ``(sizes[rank],)`` int64.
    """
    rank, num_ranks = group_rank(group), group_size(group)
    keys, order = torch.sort(keys, stable=True)
    ids = order + sum(sizes[:rank])
    if num_ranks == 1 or not sum(sizes):
        return ids, tuple(sizes)
    pairs = torch.stack([keys, ids], 1)
    step = max(1, sum(sizes) // (_SAMPLES * num_ranks * num_ranks))
    samples = gather(pairs[step // 2 :: step], tuple(len(range(step // 2, n, step)) for n in sizes), 0, group)
    samples = samples[torch.sort(samples[:, 0], stable=True).indices]
    splitters = samples[[i * len(samples) // num_ranks for i in range(1, num_ranks)]]
    cuts = [0, *[_first_not_before(keys, ids, key, number) for key, number in splitters.tolist()], len(pairs)]
    counts = torch.tensor([b - a for a, b in itertools.pairwise(cuts)], device=keys.device)
    held, num_pairs = swap_counts(counts, group)
    received = exchange_rows(pairs, nonzero_counts(counts.cpu()), nonzero_counts(held.cpu()), group, num_pairs)
    # in rank order, so in the order of the global numbers where keys are equal
    ids = received[torch.sort(received[:, 0], stable=True).indices, 1]
    return ids, counts_of(len(ids), group, ids.device)


def _first_not_before(keys: Tensor, ids: Tensor, key: int, number: int) -> int:
    """Return how many of the sorted pairs of key and id come before another pair."""
    low, high = (int(torch.searchsorted(keys, key, right=right)) for right in (False, True))
    return low + int(torch.searchsorted(ids[low:high], number))


def keys_at(keys: Tensor, places: Sequence[int], groups: Sequence[Group]) -> list[int]:
    """Return the keys at these places, counted from 0, of all ranks' sorted keys. Collective over each group.

    The digits of a key are found one after the other, as in a radix select. In decimals, place 2 of 13, 25, 21, 47: one
    key begins with 1, two with 2, one with 4, so place 2 is in the twenties, and there place 2 - 1 = 1 of 5 and 1: 25.
    Each round sums up one table for each place over the ranks.
    """
    lowest = torch.iinfo(torch.int64).min
    active: dict[int, Tensor] = {0: keys.flatten() ^ lowest}  # by leading digits, as if unsigned
    at = [(0, place) for place in places]
    for shift in reversed(range(0, 64, _DIGIT)):
        digits = {prefix: (left >> shift) & ((1 << min(_DIGIT, 64 - shift)) - 1) for prefix, left in active.items()}
        counts = torch.stack([torch.bincount(each, minlength=1 << _DIGIT) for each in digits.values()])
        counts = total_over(counts, groups)
        rows = dict(zip(digits, counts.cumsum(1), strict=True))
        found = [int(torch.searchsorted(rows[prefix], place, right=True)) for prefix, place in at]
        before = [int(rows[prefix][digit - 1]) if digit else 0 for (prefix, _), digit in zip(at, found, strict=True)]
        new = [(prefix << _DIGIT) | digit for (prefix, _), digit in zip(at, found, strict=True)]
        active = {
            longer: active[prefix][digits[prefix] == digit]
            for longer, (prefix, _), digit in zip(new, at, found, strict=True)
        }
        at = [(longer, place - n) for longer, (_, place), n in zip(new, at, before, strict=True)]
    return [prefix - (1 << 63) for prefix, _ in at]  # signed again


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Add up without autograd; a group of one communicates nothing. Collective."""
    return x if group_size(group) == 1 else transport.reduce(x, dist.ReduceOp.SUM, group)


def total_over(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Add up without autograd over several groups. Collective over each."""
    return reduce(sum_over, groups, x)


def least_over(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Return the elementwise least. Collective over each group."""
    return reduce(transport.all_reduce_min, groups, x)


def counts_of(count: int, group: Group, device: torch.device) -> tuple[int, ...]:
    """Return how many each rank has of something. Collective."""
    return tuple(gather_rows(torch.tensor([count], device=device), group)[:, 0].tolist())

"""Sizes of a dim's parts, one for each rank; facts about them are computed once, for any number of ranks.

Operations hand on the same tuples in each step of a model. To hash one, to add it up or to look for its largest part is
a step for each rank; so what follows from it is found by its identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Any

from scidata.core.bounds import bounds_of, even_bounds, sizes_of
from scidata.core.cache import Cache
from scidata.core.types import IntArray

_KEPT = 128  # layouts of a model; at 10^4 ranks some 0.2 MB each


class Sizes:
    """Facts of sizes."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = tuple(map(int, sizes))
        self.plans: Cache[Any] = Cache(_KEPT)  # plans of exchanges between such parts, by the operations' keys
        self.total, self.longest, self.least = sum(self.sizes), max(self.sizes, default=0), min(self.sizes, default=0)

    @property
    def are_even(self) -> bool:
        """Whether all parts are as long."""
        return self.least == self.longest

    @cached_property
    def bounds(self) -> IntArray:
        """``(num + 1,)`` bounds of the parts."""
        return bounds_of(self.sizes)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """The ranks with parts of one size, side by side: the first of them, how many, and the size."""
        runs = [(size, len(list(ranks))) for size, ranks in groupby(self.sizes)]
        firsts = accumulate([num for _, num in runs], initial=0)
        return tuple((first, num, size) for first, (size, num) in zip(firsts, runs, strict=False))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """1 for each rank with rows, 0 for the others."""
        return tuple(int(size > 0) for size in self.sizes)


_by_value: Cache[Sizes] = Cache(_KEPT)
_by_id: Cache[tuple[tuple[int, ...], Sizes]] = Cache(_KEPT)  # with the tuple, so that its id stays its own


def facts_of(sizes: Iterable[int]) -> Sizes:
    """Return the facts of some sizes; equal sizes share one object while it is in use."""
    if type(sizes) is not tuple:
        given = tuple(sizes)
        return _by_value.get_or_make(given, lambda: Sizes(given))
    found = _by_id.get(id(sizes))
    if found is None:
        found = _by_id.put(id(sizes), (sizes, _by_value.get_or_make(sizes, lambda: Sizes(sizes))))
    return found[1]


@lru_cache(maxsize=_KEPT)
def even_parts(num_rows: int, num_parts: int) -> tuple[int, ...]:
    """Return sizes as even as possible; raises ConfigError if a part would be empty."""
    return facts_of(sizes_of(even_bounds(num_rows, num_parts))).sizes


@lru_cache(maxsize=64)
def ones(num_ranks: int) -> tuple[int, ...]:
    """Return the sizes of parts of one row each."""
    return (1,) * num_ranks

"""Plans that are kept for the next epoch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

__all__ = ["KeptPlans"]

_MAX_BYTES = 32 << 20  # of samples of 1 MB, several thousand

T = TypeVar("T")


class KeptPlans(Generic[T]):
    """Plans by key, of about ``max_bytes`` together, 32 MiB at most. Those that came first stay; it pickles empty.

    An epoch asks for every sample once: of more than there is room for, the least recently used would always be the
    one asked for next.

    Thread-safe without a lock, which a fork could leave held: at worst it keeps a few more.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self.max_bytes = min(max_bytes, _MAX_BYTES)
        self.nbytes = 0
        self._plans: dict[Hashable, T] = {}

    def get(self, key: Hashable) -> T | None:
        """Return what is kept for a key."""
        return self._plans.get(key)

    def keep(self, key: Hashable, plans: T, nbytes: int) -> None:
        """Keep plans of about ``nbytes``, if there is room."""
        if self.nbytes + nbytes <= self.max_bytes:
            self.nbytes += nbytes
            self._plans[key] = plans

    def __len__(self) -> int:
        return len(self._plans)

    def __getstate__(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes, "nbytes": 0, "_plans": {}}

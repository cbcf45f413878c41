"""How many batches a loader reads ahead.

With ``max_bytes`` the number follows the loop. It begins with 2, say::

    asked for an item, and it is not read yet            -> waiting: 3 in flight
    asked again, and it is not read yet                  -> waiting: 4
    16 times in a row all 4 were read before they were
    asked for                                            -> spare: 3, and so on down to 1
    one item turns out to have 40 MB of 100 MB           -> 2 at most, whatever the loop does

So a slow loop ends with 1 in flight, and a fast one with as many as its bytes allow.
"""

from __future__ import annotations

_CALM = 16  # steps in a row in which the item read furthest ahead was not needed


class Depth:
    """Items in flight: a fixed number, or as few as keep the loop from waiting, within so many bytes.

    - ``start``: to begin with; for ever without ``max_bytes``. 0 if nothing is read ahead.
    - ``max_bytes``: of the items in flight; one item may always be.
    - ``nbytes``: of the largest item, where that is known beforehand.
    """

    def __init__(self, start: int, max_bytes: int | None = None, nbytes: int = 0) -> None:
        self._now, self._max_bytes, self._largest, self._calm = start, max_bytes, nbytes, 0

    @property
    def now(self) -> int:
        """Items to keep in flight."""
        if self._max_bytes is None or not self._now or not self._largest:
            return self._now
        return max(1, min(self._now, self._max_bytes // self._largest))

    def observe_size(self, nbytes: int) -> None:
        """Take note of an item's size."""
        self._largest = max(self._largest, nbytes)

    def step(self, *, waiting: bool, spare: bool) -> None:
        """Adapt when the loop asks for an item: it has to wait, or all items in flight have been read."""
        if self._max_bytes is None or not self._now:
            return
        self._calm = self._calm + 1 if spare else 0
        if waiting:
            self._now = self.now + 1
        elif self._calm >= _CALM:
            self._now, self._calm = max(1, self.now - 1), 0

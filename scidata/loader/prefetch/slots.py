"""Places for samples whose size is known only once they are read: what stands in for a buffer ring then.

A place holds whatever the reader made, which is the user's from then on; only how many there are at once is bounded.
The memory of large arrays comes from a :class:`~scidata.loader.prefetch.pool.BlockPool`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasArrays(Protocol):
    """A part of a sample whose arrays can be put elsewhere: to a device, or through shared memory."""

    def arrays(self) -> Mapping[str, Any]:
        """Return all that becomes tensors: NumPy arrays by name."""

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Return the part that has others, tensors say, in their places."""


class Slot:
    """Where one sample goes."""

    __slots__ = ("nbytes", "part")

    def __init__(self) -> None:
        self.part: Any = None
        self.nbytes = 0

    def put(self, part: Any) -> None:
        """Hold what was read: fields by name, or what has ``fields``."""
        self.part = part
        fields = part if isinstance(part, Mapping) else getattr(part, "fields", {})
        self.nbytes = sum(values.nbytes for values in fields.values())


class SlotSet:
    """The places of one batch."""

    __slots__ = ("slots",)

    def __init__(self, rows: int) -> None:
        self.slots = [Slot() for _ in range(rows)]

    @property
    def nbytes(self) -> int:
        """Bytes of what was read."""
        return sum(slot.nbytes for slot in self.slots)

    def slot(self, row: int) -> Slot:
        """Return the place of one sample."""
        return self.slots[row]


class SlotRing:
    """Bounds how many batches are being read, or wait for their turn, besides the one that the user works on.

    As with a ``BufferRing``, one thread at a time may call :meth:`acquire`; everything else may be called from anywhere
    and takes no lock.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows = 1  # of the largest batch seen
        self._busy: set[SlotSet] = set()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a batch is being read or waits for its turn."""
        return bool(self._busy)

    def acquire(self, rows: int, closed: Callable[[], bool] = lambda: False) -> SlotSet | None:
        """Return places for ``rows`` samples; wait until there may be more, or return None once ``closed()``."""
        while True:
            while not self._changed.empty():
                self._changed.get()
            if closed():
                return None
            if len(self._busy) < self.limit:
                slots = SlotSet(rows)
                self.rows = max(self.rows, rows)
                self._busy.add(slots)
                return slots
            self._changed.get()

    def give_back(self, slots: SlotSet, event: Any = None) -> None:
        """Let go of a batch: handed out, or wanted by nobody."""
        self._busy.discard(slots)
        self.wake()

    def fit(self, prefetch: int) -> None:
        """Change how many there may be."""
        self.limit = prefetch

    def make_room(self) -> None:
        """Nothing to fit: what the user keeps is not counted."""

    def wake(self) -> None:
        """Make a waiting :meth:`acquire` look again."""
        self._changed.put(None)


class SlotCopier:
    """Hands out what was read."""

    def __init__(self, ring: SlotRing) -> None:
        self._ring = ring

    def start(self, buffers: SlotSet) -> SlotSet:
        """Nothing to begin."""
        return buffers

    def finish(self, ticket: SlotSet) -> list[Any]:
        """Return the samples' parts."""
        parts = [slot.part for slot in ticket.slots]
        self._ring.give_back(ticket)
        return parts

    def abandon(self, ticket: SlotSet) -> None:
        """Let go of a batch that nobody gets."""
        self._ring.give_back(ticket)

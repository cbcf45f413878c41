"""Places for samples whose size is known only once they are read: they stand in for a buffer ring.

A place holds the part that the reader made, which is the user's from then on. The number of places is bounded.
The memory of large arrays comes from a :class:`~scidata.core.memory.ArrayPool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from scidata.loader.prefetch.buffers import Ring


@runtime_checkable
class HasArrays(Protocol):
    """A part of a sample whose arrays can be put elsewhere: to a device, or through shared memory."""

    def arrays(self) -> Mapping[str, object]:
        """Return all that becomes tensors: NumPy arrays by name."""

    def with_arrays(self, arrays: Mapping[str, object]) -> Any:
        """Return the part that has others, tensors say, in their places."""


class Slot:
    """Where one sample goes."""

    __slots__ = ("nbytes", "part")

    def __init__(self) -> None:
        self.part: Any = None
        self.nbytes = 0

    def put(self, part: Any) -> None:
        """Hold a part: fields by name, or an object that has ``fields``."""
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
        """Bytes that were read."""
        return sum(slot.nbytes for slot in self.slots)

    def slot(self, row: int) -> Slot:
        """Return the place of one sample."""
        return self.slots[row]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the arrays of all parts, one part after another; of a part that is no :class:`HasArrays`, none."""
        return [torch.from_numpy(array) for arrays in self._arrays() for array in arrays.values()]

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        """Return the parts, with these in place of their arrays."""
        left = iter(tensors)
        return [
            slot.part.with_arrays({name: next(left) for name in arrays}) if arrays else slot.part
            for slot, arrays in zip(self.slots, self._arrays(), strict=True)
        ]

    def _arrays(self) -> list[Mapping[str, object]]:
        return [slot.part.arrays() if isinstance(slot.part, HasArrays) else {} for slot in self.slots]


class SlotRing(Ring[SlotSet]):
    """Bounds how many batches are being read, or wait for their turn, besides the one that the user works on."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.rows = 1  # of the largest batch seen

    def _take(self, rows: int) -> SlotSet | None:
        if len(self._busy) >= self.limit:
            return None
        slots = SlotSet(rows)
        self.rows = max(self.rows, rows)
        self._busy.add(slots)
        return slots

    def hand_out(self, buffers: SlotSet) -> list[object]:
        """Return the samples' parts."""
        parts = [slot.part for slot in buffers.slots]
        self.give_back(buffers)
        return parts

    def give_back(self, buffers: SlotSet, event: torch.cuda.Event | None = None) -> None:
        """Let go of a batch: handed out, or wanted by nobody."""
        self._busy.discard(buffers)
        self.wake()

    def fit(self, prefetch: int) -> None:
        """Change how many there may be."""
        self.limit = prefetch

"""Slots for samples whose size is known only after reading; they take the place of buffers.

A place holds the part that the reader made, which is the user's from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class HasArrays(Protocol):
    """A part of a sample whose arrays can be moved: to a device, or to shared memory."""

    def arrays(self) -> Mapping[str, object]:
        """Return all that becomes tensors: NumPy arrays by name."""

    def with_arrays(self, arrays: Mapping[str, object]) -> Any:
        """Return the part with its arrays replaced, by tensors for example."""


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
    """The places of one batch; ``pin``: its arrays pass through page-locked memory on their way to a device."""

    __slots__ = ("_pin", "slots")
    memory = None  # the parts have their own

    def __init__(self, rows: int, *, pin: bool = False) -> None:
        self.slots, self._pin = [Slot() for _ in range(rows)], pin

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(slot.nbytes for slot in self.slots)

    def slot(self, row: int) -> Slot:
        """Return the place of one sample."""
        return self.slots[row]

    def contents(self) -> list[object]:
        """Return the samples' parts."""
        return [slot.part for slot in self.slots]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the arrays of all parts in order; none of a part that is no :class:`HasArrays`."""
        tensors = [torch.from_numpy(array) for arrays in self._arrays() for array in arrays.values()]
        return [tensor.pin_memory() for tensor in tensors] if self._pin else tensors

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        """Return the parts, with these in place of their arrays."""
        left = iter(tensors)
        return [
            slot.part.with_arrays({name: next(left) for name in arrays}) if arrays else slot.part
            for slot, arrays in zip(self.slots, self._arrays(), strict=True)
        ]

    def _arrays(self) -> list[Mapping[str, object]]:
        return [slot.part.arrays() if isinstance(slot.part, HasArrays) else {} for slot in self.slots]

"""The memory that grids are read into, and the bound on how many batches there may be at a time.

Memory comes from an :class:`~scidata.core.memory.ArrayPool`, or page-locked from torch's own allocator; both use it
again once the last tensor on it is gone, so the user may keep a batch for as long as it likes.

Finalizers call a :class:`Ring`, in the middle of a collection while this thread holds a lock. So nothing on that path
takes a lock: it uses only single operations that are atomic (``set.discard``) and ``SimpleQueue.put``, which is
reentrant by promise.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from scidata.core.checks import NO_MEMORY, too_large
from scidata.core.memory import ArrayPool, Lent
from scidata.core.types import Array, BufferSpec
from scidata.errors import ConfigError
from scidata.loader.prefetch.slots import SlotSet

#: The result for an item: tensors by field, or samples' parts, one after another.
Batch: TypeAlias = Mapping[str, torch.Tensor] | list[Any]

_LINE = 64  # bytes: each field begins at a cache line


class Places(NamedTuple):
    """Where fields of ``rows`` samples lie in a block of ``size`` bytes: first byte, dtype, and ``(rows, *shape)``."""

    rows: int
    size: int
    nbytes: int
    fields: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]]

    @classmethod
    def of(cls, specs: Mapping[str, BufferSpec], rows: int) -> Places:
        """Lay out the fields of a batch, each from a cache line on."""
        fields, size, nbytes = {}, 0, 0
        for name, spec in specs.items():
            used = rows * spec.nbytes
            fields[name] = (size, spec.dtype, (rows, *spec.shape))
            size, nbytes = size + -(-used // _LINE) * _LINE, nbytes + used
        return cls(rows, size, nbytes, fields)


class BufferSet:
    """Memory for a batch of grids: a tensor ``(rows, *shape)`` a field in one block; page-locked tensors have blocks of
    their own.
    """

    __slots__ = ("_arrays", "_tensors", "memory", "nbytes")

    def __init__(self, places: Places, memory: ArrayPool, *, pin: bool) -> None:
        self.nbytes = places.nbytes
        self.memory: Lent | None = None  # torch's
        self._arrays: dict[str, Array] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        if not pin:
            try:
                self.memory = memory.lend(places.size)
            except NO_MEMORY as e:
                raise too_large(f"a batch of {places.rows}", (places.size,), np.uint8) from e
        for name, (begin, dtype, shape) in places.fields.items():
            if self.memory is None:
                self._tensors[name] = tensor = torch.empty(shape, dtype=torch_dtype(dtype), pin_memory=True)
                self._arrays[name] = tensor.numpy()
            else:
                self._arrays[name] = array = np.ndarray(shape, dtype, self.memory, begin)
                self._tensors[name] = torch.from_numpy(array)

    def slot(self, row: int) -> dict[str, Array]:
        """Return the arrays of one sample, as views (also of a 0-d field)."""
        return {name: array[row, ...] for name, array in self._arrays.items()}

    def contents(self) -> dict[str, torch.Tensor]:
        """Return the tensors by field."""
        return self._tensors

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, field by field."""
        return list(self._tensors.values())

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors by field."""
        return dict(zip(self._tensors, tensors, strict=True))


def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """Return the torch dtype of a NumPy dtype; raises TypeError if there is none."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


SetT = TypeVar("SetT", bound=BufferSet | SlotSet)


class Ring(Generic[SetT]):
    """Bounds how many batches are being read, copied, or wait for their turn, besides the one that the user works on.

    A thread that needs places waits for them; those of grids also until the user has let go of the batch before the
    current one, or shows by asking for another that it keeps it. One thread at a time may call :meth:`acquire`;
    everything else may be called from anywhere.

    - ``memory``: of the places: keeps free what this ring needs once more; of samples of any size, two batches.
    """

    def __init__(self, make: Callable[[int], SetT], limit: int, memory: ArrayPool) -> None:
        self._make, self.limit, self._memory = make, limit, memory
        self.busy: set[SetT] = set()
        self._largest = 0  # bytes of a batch
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.fit(limit)

    def acquire(self, rows: int, closed: Callable[[], bool] | None = None) -> SetT | None:
        """Return places for ``rows`` samples, waiting for free ones; None once ``closed()``."""
        waits = False
        try:
            while closed is None or not closed():
                num_given = min(len(self._memory.given), self._num_given)
                if len(self.busy) < min(self.limit, self._max_live - num_given):
                    places = self._make(rows)
                    self.busy.add(places)
                    self._bound_memory(places)
                    return places
                if waits:
                    self._changed.get()
                waits = True  # and looks again: changes were not announced until here
                self._memory.awaited.add(self._changed)
            return None
        finally:
            if waits:
                self._memory.awaited.discard(self._changed)
                while not self._changed.empty():
                    self._changed.get()

    def wake(self) -> None:
        """Make a waiting :meth:`acquire` look again."""
        if self._changed in self._memory.awaited:
            self._changed.put(None)

    def hand_out(self, places: SetT) -> None:
        """Release a batch whose memory the user gets."""
        if places.memory is not None:
            self._num_given += 1
            self._memory.give(places.memory)
        self.give_back(places)

    def give_back(self, places: SetT) -> None:
        """Release a batch that was handed out, copied or dropped."""
        self.busy.discard(places)
        self._bound_memory(places)
        self.wake()

    def fit(self, limit: int) -> None:
        """Change how many batches there may be from the next one on, besides the one that the user has."""
        self._num_given = len(self._memory.given)  # what other iterators give meanwhile does not count
        self.limit, self._max_live = limit, limit + max(1, self._num_given)
        self.wake()

    def _bound_memory(self, places: SetT) -> None:
        memory = self._memory
        if places.memory is None:  # the batch that was let go, and the next one's
            memory.max_free = max(memory.max_free, 2 * places.nbytes)
        else:
            self._largest = max(self._largest, places.memory.nbytes)
            memory.max_free = (self.limit + 1 - len(self.busy)) * self._largest
            memory.max_total = (self._max_live - len(self.busy)) * self._largest


def buffer_ring(
    specs: Mapping[str, BufferSpec], limit: int, memory: ArrayPool, *, pin_memory: bool = False
) -> Ring[BufferSet]:
    """Return a ring of buffers for samples of equal size.

    - ``pin_memory``: page-locked memory, which torch's own allocator recycles: it knows of the copies that the user has
      started.
    """
    for name, spec in specs.items():
        try:
            torch_dtype(spec.dtype)
        except TypeError as e:
            raise ConfigError(f"field {name!r}: torch has no dtype for {spec.dtype}; leave it out") from e
    places = functools.cache(lambda rows: Places.of(specs, rows))
    return Ring(lambda rows: BufferSet(places(rows), memory, pin=pin_memory), limit, memory)

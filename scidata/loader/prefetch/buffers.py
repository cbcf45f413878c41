"""The memory that samples are read into: a bounded pool of buffer sets, reused, that the user may keep.

Memory comes back from destructors, which run anywhere: on autograd's threads, or in the middle of a collection while
this thread holds a lock. So nothing on that path takes a lock: it uses only single operations that are atomic
(``deque.append``, ``set.discard``) and ``SimpleQueue.put``, which is reentrant by promise.
"""

from __future__ import annotations

import queue
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from scidata.core.checks import allocate
from scidata.core.memory import host_memory
from scidata.core.types import BufferSpec
from scidata.errors import ConfigError

Array: TypeAlias = npt.NDArray[np.generic]
#: The result for an item: tensors by field, or samples' parts, one after another.
Batch: TypeAlias = Mapping[str, torch.Tensor] | list[Any]


class PlaceSet(Protocol):
    """Places for the samples of one batch."""

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""

    def slot(self, row: int) -> object:
        """Return the place of one sample."""

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are copied to a device."""

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> Batch:
        """Return the batch that is made of copies of these tensors."""


SetT = TypeVar("SetT", bound=PlaceSet)


class _Leased(np.ndarray[Any, np.dtype[np.generic]]):
    """An array under a tensor for the user: the tensor's storage keeps it, and so its lease, alive."""

    lease: object = None


class _Lease:
    """Brings a buffer set back to its ring when the last array that carries it is gone."""

    __slots__ = ("_buffers", "_ring")

    def __init__(self, ring: BufferRing, buffers: BufferSet) -> None:
        self._ring = weakref.ref(ring)
        self._buffers = buffers

    def __del__(self) -> None:
        ring = self._ring()
        if ring is not None:
            ring._came_back(self._buffers)


class BufferSet:
    """Memory for up to ``max_rows`` samples: one array ``(max_rows, *shape)`` a field, ``rows`` of them in use."""

    __slots__ = ("_arrays", "_pinned", "_row_nbytes", "event", "max_rows", "rows")

    def __init__(self, specs: Mapping[str, BufferSpec], rows: int, *, pin: bool) -> None:
        self.rows = self.max_rows = rows
        self.event: torch.cuda.Event | None = None  # of the copy that last read from here
        self._row_nbytes = sum(spec.nbytes for spec in specs.values())
        self._arrays: dict[str, Array] = {}
        self._pinned: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            if pin:
                memory = torch.empty(rows * spec.nbytes, dtype=torch.uint8, pin_memory=True)
                typed = memory.view(_torch_dtype(spec.dtype)).view(rows, *spec.shape)
                self._pinned[name] = typed
                self._arrays[name] = typed.numpy()
            else:
                size = (rows * spec.nbytes,)
                memory_view = allocate(
                    f"a batch of {rows}: field {name!r}", size, np.uint8, lambda n, _: host_memory(n[0])
                )
                self._arrays[name] = memory_view.view(spec.dtype).reshape(rows, *spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return self.rows * self._row_nbytes

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return bool(self._pinned)

    def slot(self, row: int) -> dict[str, Array]:
        """Return the arrays of one sample, as views (also of a 0-d field)."""
        return {name: a[row, ...] for name, a in self._arrays.items()}

    def tensors(self, lease: object = None) -> dict[str, torch.Tensor]:
        """Return the rows in use as tensors on the same memory, each of which keeps ``lease`` alive."""
        if self._pinned:
            return {name: t[: self.rows] for name, t in self._pinned.items()}
        views = {}
        for name, array in self._arrays.items():
            view = array[: self.rows].view(_Leased)
            view.lease = lease
            views[name] = torch.from_numpy(view)
        return views

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the rows in use, field by field."""
        return list(self.tensors().values())

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the rows in use, by field."""
        return dict(zip(self._arrays, tensors, strict=True))


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Ring(ABC, Generic[SetT]):
    """Bounds how many sets of places there are for batches; a thread that needs one waits.

    One thread at a time may call :meth:`acquire`; everything else may be called from anywhere.
    """

    def __init__(self) -> None:
        self._busy: set[SetT] = set()  # being filled, copied, or waiting for their turn
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a batch is being read, copied, or waits for its turn."""
        return bool(self._busy)

    def acquire(self, rows: int, closed: Callable[[], bool] = lambda: False) -> SetT | None:
        """Return a set for ``rows`` samples; wait until there is one, or return None once ``closed()``."""
        while True:
            while not self._changed.empty():
                self._changed.get()
            if closed():
                return None
            found = self._take(rows)
            if found is not None:
                return found
            self._changed.get()

    def wake(self) -> None:
        """Make a waiting :meth:`acquire` look again."""
        self._changed.put(None)

    @abstractmethod
    def _take(self, rows: int) -> SetT | None:
        """Return a set, now busy, if there may be one."""

    @abstractmethod
    def hand_out(self, buffers: SetT) -> Batch:
        """Return the contents of a set, to give away."""

    @abstractmethod
    def give_back(self, buffers: SetT, event: torch.cuda.Event | None = None) -> None:
        """Put a busy set back; it is written again only after ``event.synchronize()``."""

    @abstractmethod
    def fit(self, prefetch: int) -> None:
        """Change the capacity to so many sets besides the user's."""

    def make_room(self) -> None:  # nothing to do where batches that the user keeps are not counted
        """Fit the limit to the batches that the user keeps; called where the next one is asked for."""


class BufferRing(Ring[BufferSet]):
    """A bounded pool of buffer sets.

    A set is free, busy (being filled, copied, or waiting for its turn) or kept by the user. A fresh one is made only
    while fewer than ``capacity`` exist, not counting those that the user keeps beyond the current batch.

    Parameters
    ----------
    specs
        Shape and dtype of one sample's field, by name.
    capacity
        Sets that may exist, the user's current batch included; at least 2.
    pin_memory
        Page-locked memory. Such sets do not come back from the user: torch's own pinned allocator recycles them, for
        it knows about the copies that the user started.

    Raises
    ------
    ConfigError
        ``capacity`` below 2, or a dtype that torch does not have.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], *, capacity: int, pin_memory: bool = False) -> None:
        if capacity < 2:
            raise ConfigError(f"a ring of {capacity} buffers: needs 2, the one in use and the one being filled")
        for name, spec in specs.items():
            try:
                _torch_dtype(spec.dtype)
            except TypeError as e:
                raise ConfigError(f"field {name!r}: torch has no dtype for {spec.dtype}; leave it out") from e
        super().__init__()
        self.specs = dict(specs)
        self.capacity = capacity
        self.pin_memory = pin_memory
        self.num_allocated = 0  # ever
        self._limit = capacity
        self._rows = 1  # largest batch seen: short batches use a part of a set
        self._free: deque[BufferSet] = deque()
        self._kept: set[BufferSet] = set()

    @property
    def num_live(self) -> int:
        """Sets that exist now. While one moves it may count twice, never not at all."""
        return len(self._busy) + len(self._kept) + len(self._free)

    @property
    def num_kept(self) -> int:
        """Sets that the user holds on to."""
        return len(self._kept)

    def _take(self, rows: int) -> BufferSet | None:
        self._rows = max(self._rows, rows)
        while (buffers := self._pop_free()) is not None:
            if buffers.max_rows < rows:
                continue
            self._busy.add(buffers)
            if buffers.event is not None:
                buffers.event.synchronize()
                buffers.event = None
            buffers.rows = rows
            return buffers
        if self.num_live >= self._limit:
            return None
        buffers = BufferSet(self.specs, self._rows, pin=self.pin_memory)
        buffers.rows = rows
        self._busy.add(buffers)
        self.num_allocated += 1
        return buffers

    def _pop_free(self) -> BufferSet | None:
        try:
            return self._free.popleft()
        except IndexError:  # asked for, not looked up: two threads take some
            return None

    def hand_out(self, buffers: BufferSet) -> dict[str, torch.Tensor]:
        """Return a set's tensors to give away; it comes back when no view of them is left."""
        if buffers.pinned:
            tensors = buffers.tensors()
        else:
            self._kept.add(buffers)
            tensors = buffers.tensors(_Lease(self, buffers))
        self._busy.discard(buffers)
        self.wake()
        return tensors

    def give_back(self, buffers: BufferSet, event: torch.cuda.Event | None = None) -> None:
        """Put a busy set back; it is written again only after ``event.synchronize()``."""
        buffers.event = event
        self._put_back(buffers, self._busy)

    def _came_back(self, buffers: BufferSet) -> None:
        self._put_back(buffers, self._kept)

    def _put_back(self, buffers: BufferSet, origin: set[BufferSet]) -> None:
        num_kept = len(self._kept) - (origin is self._kept)
        num_busy = len(self._busy) - (origin is self._busy)
        if len(self._free) + num_busy + min(1, num_kept) < self.capacity:  # else the memory is freed
            self._free.append(buffers)
        origin.discard(buffers)
        self.wake()

    def fit(self, prefetch: int) -> None:
        """Change the capacity to so many sets besides the user's, and let go of free ones beyond it."""
        shrunk, self.capacity = prefetch + 1 < self.capacity, prefetch + 1
        while shrunk and self.num_live > self.capacity + max(0, len(self._kept) - 1):
            if self._pop_free() is None:
                break

    def make_room(self) -> None:
        """Fit the limit to what the user keeps.

        The one batch kept at that moment is usually the loop's variable, about to be let go.
        """
        self._limit = self.capacity + max(0, len(self._kept) - 1)
        self.wake()

"""Turning a filled set into tensors, on the host or on a device: the last step before a batch is handed over.

What comes back from a closed epoch comes from a finalizer, so nothing on the way of :meth:`abandon` takes a lock; see
:mod:`scidata.loader.prefetch.prefetcher`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from scidata.loader.prefetch.buffers import BufferRing, BufferSet, Ring, SetT
from scidata.loader.prefetch.slots import HasArrays, SlotRing, SlotSet

_ALIGN = 64  # bytes: of each array in a block, for any dtype


class Transfer(Protocol):
    """Copies to where tensors are used, beside other work; :class:`SideStream` is one."""

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin, on any thread; return the copies, and an event with ``synchronize()`` that waits for them."""

    def hand_over(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Make the copies safe to use from here on, on the thread that uses them."""


class SideStream:
    """Copies to a CUDA device on a stream of its own, made at the first copy.

    Parameters
    ----------
    device
        CUDA device with its index: reader threads have a current device of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._lock = threading.Lock()

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Issue the copies and record their event; does not wait for it."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copies = [t.to(self._device, non_blocking=True) for t in tensors]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return copies, event

    def hand_over(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Make the current stream, not the host, wait for the copies."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)  # its memory belongs to the copy stream's pool


class HostCopier:
    """Leaves a batch in the memory it was read into."""

    def __init__(self, ring: Ring[SetT]) -> None:
        self._ring: Ring[Any] = ring

    def start(self, buffers: SetT) -> SetT:
        """Nothing to begin."""
        return buffers

    def finish(self, ticket: Any) -> Any:
        """Hand out what was read itself."""
        return self._ring.hand_out(ticket)

    def abandon(self, ticket: Any) -> None:
        """Return the set to the ring."""
        self._ring.give_back(ticket)


# -- samples of one size -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copy:
    buffers: BufferSet
    tensors: dict[str, Tensor]
    event: Any


class DeviceCopier:
    """Copies batches to a CUDA device on a stream of its own.

    Parameters
    ----------
    ring
        Where the host buffers go back to.
    device
        CUDA device with its index.
    """

    def __init__(self, ring: BufferRing, device: torch.device) -> None:
        self._ring = ring
        self._transfer = SideStream(device)

    def start(self, buffers: BufferSet) -> _Copy:
        """Issue the copy; does not wait for it."""
        host = buffers.tensors()
        copies, event = self._transfer.copy(list(host.values()))
        return _Copy(buffers, dict(zip(host, copies, strict=True)), event)

    def finish(self, ticket: _Copy) -> dict[str, Tensor]:
        """Make the current stream wait for the copy; then hand over."""
        self._transfer.hand_over(list(ticket.tensors.values()), ticket.event)
        self._ring.give_back(ticket.buffers, ticket.event)
        return ticket.tensors

    def abandon(self, ticket: _Copy) -> None:
        """Return the set to the ring; it waits for the copy there."""
        self._ring.give_back(ticket.buffers, ticket.event)


# -- samples that differ in size -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    memory: Tensor
    event: Any = None  # of the copy that last read from here


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Staging:
    """Memory that batches of any size pass on their way to a device: blocks that are used again, and that grow.

    As many as there are copies under way at once, which are two for a ``Prefetcher``, and one whose copy is not over
    when the next begins.

    Parameters
    ----------
    allocate
        Makes a block of so many bytes, uint8; default page-locked.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = _pinned) -> None:
        self._allocate = allocate
        self._free: deque[_Block] = deque()

    def put(self, tensors: Sequence[Tensor]) -> tuple[_Block, list[Tensor]]:
        """Copy tensors into a block; return it, and them as they lie there. Waits for the block's last copy."""
        sizes = [-(-t.nbytes // _ALIGN) * _ALIGN for t in tensors]
        block = self._take(sum(sizes))
        staged = []
        for tensor, room in zip(tensors, torch.split(block.memory[: sum(sizes)], sizes), strict=True):
            staged.append(room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        return block, staged

    def give_back(self, block: _Block, event: Any) -> None:
        """Let a block be used again, after its event. No lock."""
        block.event = event
        self._free.append(block)

    def _take(self, nbytes: int) -> _Block:
        try:
            block = self._free.popleft()  # the one given back first: most likely to be ready
        except IndexError:
            return _Block(self._allocate(nbytes + nbytes // 4))
        if block.event is not None:
            block.event.synchronize()
            block.event = None
        if len(block.memory) < nbytes:
            block.memory = self._allocate(nbytes + nbytes // 4)  # samples differ: the next is a little larger, say
        return block


@dataclass(frozen=True, slots=True)
class _PartsCopy:
    slots: SlotSet
    names: list[tuple[str, ...]]  # of each part's arrays, which the tensors are, one part after another
    tensors: list[Tensor]
    event: Any
    block: _Block | None


class PartCopier:
    """Copies batches whose samples differ in size, ahead of their use.

    Parts that are no :class:`HasArrays` are handed out as they are.

    Parameters
    ----------
    staging
        Memory to pass on the way; None copies from where samples were read to.
    """

    def __init__(self, ring: SlotRing, transfer: Transfer, staging: Staging | None) -> None:
        self._ring, self._transfer, self._staging = ring, transfer, staging

    def start(self, buffers: SlotSet) -> _PartsCopy:
        """Begin the copy; does not wait for it."""
        arrays = [slot.part.arrays() if isinstance(slot.part, HasArrays) else {} for slot in buffers.slots]
        host = [torch.from_numpy(array) for part in arrays for array in part.values()]
        block = None
        if self._staging is not None:
            block, host = self._staging.put(host)
        return _PartsCopy(buffers, [tuple(part) for part in arrays], *self._transfer.copy(host), block)

    def finish(self, ticket: _PartsCopy) -> list[Any]:
        """Return the parts with tensors that are safe to use from here on."""
        self._transfer.hand_over(ticket.tensors, ticket.event)
        tensors = iter(ticket.tensors)
        parts = [
            slot.part.with_arrays({name: next(tensors) for name in names}) if names else slot.part
            for slot, names in zip(ticket.slots.slots, ticket.names, strict=True)
        ]
        self.abandon(ticket)
        return parts

    def abandon(self, ticket: _PartsCopy) -> None:
        """Return block and slots; the block waits for its copy where it is taken again."""
        if self._staging is not None and ticket.block is not None:
            self._staging.give_back(ticket.block, ticket.event)
        self._ring.give_back(ticket.slots)

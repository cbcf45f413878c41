"""Turning a filled set into tensors, on the host or on a device: the last step before a batch is handed over.

What comes back from a closed epoch comes from a finalizer, so nothing on the way of :meth:`abandon` takes a lock; see
:mod:`scidata.loader.prefetch.prefetcher`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor

from scidata.data.side_stream import SideStream
from scidata.loader.prefetch.buffers import Batch, Ring, SetT

_ALIGN = 64  # bytes: of each array in a block, for any dtype


class HostCopier(Generic[SetT]):
    """Leaves a batch in the memory it was read into."""

    def __init__(self, ring: Ring[SetT]) -> None:
        self._ring = ring

    def start(self, buffers: SetT) -> SetT:
        """Nothing to begin."""
        return buffers

    def finish(self, ticket: SetT) -> Batch:
        """Hand out the set's own memory."""
        return self._ring.hand_out(ticket)

    def abandon(self, ticket: SetT) -> None:
        """Return the set to the ring."""
        self._ring.give_back(ticket)


# -- to a device -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    memory: Tensor
    event: torch.cuda.Event | None = None  # of the copy that last read from here


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

    def give_back(self, block: _Block, event: torch.cuda.Event) -> None:
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
class _Copy(Generic[SetT]):
    buffers: SetT
    tensors: list[Tensor]
    event: torch.cuda.Event
    block: _Block | None


class DeviceCopier(Generic[SetT]):
    """Copies batches to a device, ahead of their use.

    Parameters
    ----------
    ring
        Where the host's memory goes back to.
    staging
        Memory to pass on the way; None copies from where samples were read to.
    """

    def __init__(self, ring: Ring[SetT], transfer: SideStream, staging: Staging | None = None) -> None:
        self._ring, self._transfer, self._staging = ring, transfer, staging

    def start(self, buffers: SetT) -> _Copy[SetT]:
        """Begin the copy; does not wait for it."""
        block, host = None, buffers.host_tensors()
        if self._staging is not None:
            block, host = self._staging.put(host)
        return _Copy(buffers, *self._transfer.copy(host), block)

    def finish(self, ticket: _Copy[SetT]) -> Batch:
        """Return a batch with tensors that are safe to use from here on."""
        self._transfer.hand_over(ticket.tensors, ticket.event)
        batch = ticket.buffers.batch_of(ticket.tensors)
        self.abandon(ticket)
        return batch

    def abandon(self, ticket: _Copy[SetT]) -> None:
        """Return block and set; they wait for the copy where they are taken again."""
        if self._staging is not None and ticket.block is not None:
            self._staging.give_back(ticket.block, ticket.event)
        self._ring.give_back(ticket.buffers, ticket.event)


Copier: TypeAlias = HostCopier[Any] | DeviceCopier[Any]

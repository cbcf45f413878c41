"""Turning filled places into tensors, on the host or on a device: the last step before a batch is handed over.

What comes back from a closed epoch comes from a finalizer, so nothing on the way of :meth:`abandon` takes a lock; see
:mod:`scidata.loader.prefetch.prefetcher`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor

from scidata.data.side_stream import SideStream
from scidata.loader.prefetch.buffers import Batch, Ring, SetT


class HostCopier(Generic[SetT]):
    """Leaves a batch in the memory it was read into."""

    def __init__(self, ring: Ring[SetT]) -> None:
        self._ring = ring

    def start(self, places: SetT) -> SetT:
        """Nothing to begin."""
        return places

    def finish(self, ticket: SetT) -> Batch:
        """Hand out the places' own memory."""
        batch = ticket.contents()
        self._ring.hand_out(ticket)
        return batch

    def abandon(self, ticket: SetT) -> None:
        """Return the places to the ring."""
        self._ring.give_back(ticket)


# -- to a device -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copy(Generic[SetT]):
    places: SetT
    tensors: list[Tensor]
    event: torch.Event


class DeviceCopier(Generic[SetT]):
    """Copies batches ahead of their use to a device; host memory is free after the copy's event, at the next batch."""

    def __init__(self, ring: Ring[SetT], transfer: SideStream) -> None:
        self._ring, self._transfer = ring, transfer
        self._latest: tuple[SetT, torch.Event] | None = None

    def start(self, places: SetT) -> _Copy[SetT]:
        """Begin the copy; does not wait for it."""
        return _Copy(places, *self._transfer.copy(places.host_tensors()))

    def finish(self, ticket: _Copy[SetT]) -> Batch:
        """Return a batch with tensors that are safe to use from here on."""
        self._transfer.hand_over(ticket.tensors, ticket.event)
        batch = ticket.places.batch_of(ticket.tensors)
        self.abandon(ticket)
        return batch

    def abandon(self, ticket: _Copy[SetT]) -> None:
        """Return the places to the ring, and let go of the earlier batch's memory."""
        earlier, self._latest = self._latest, (ticket.places, ticket.event)
        try:
            if earlier is not None:
                earlier[1].synchronize()  # raises where the device has failed
        finally:
            del earlier  # its memory is back before a reader asks for some
            self._ring.give_back(ticket.places)

    def settle(self) -> None:
        """Wait until the latest batch was copied: its memory is used again."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest[1].synchronize()


Copier: TypeAlias = HostCopier[Any] | DeviceCopier[Any]

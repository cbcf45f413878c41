"""A CUDA stream beside the one that computes: for copies, and for transforms of batches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream of a CUDA device with its index (threads have a current device of their own), made where it is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    @contextmanager
    def current(self, *, after: bool = False) -> Iterator[torch.cuda.Stream]:
        """Make it the current stream; ``after``: behind all that the current one has to do yet."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if after:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield self._stream

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Issue copies to the device, and record their event; does not wait for it."""
        with self.current():
            copies = [t.to(self._device, non_blocking=True) for t in tensors]
            return copies, self.record()

    def record(self) -> torch.cuda.Event:
        """Return the event of all that the stream has been given so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_over(self, tensors: Iterable[Tensor], event: torch.cuda.Event | None = None) -> None:
        """Make the current stream, not the host, wait for the event, or for all of this stream, and use tensors."""
        current = torch.cuda.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        elif self._stream is not None:
            current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)  # its memory belongs to the other stream's pool

"""A second stream of an accelerator, beside the computing one: for copies, and for transforms of batches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from scidata.device_mesh.devices import on_stream


class SideStream:
    """A stream of an accelerator, made on first use; its index is explicit, as threads have own current devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._lock = threading.Lock()

    @contextmanager
    def current(self, *, after: bool = False) -> Iterator[torch.Stream]:
        """Make it the current stream; ``after``: wait for the work queued on the previously current one."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.Stream(self._device)
        if after:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with on_stream(self._stream):
            yield self._stream

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Issue copies to the device and record their event, without waiting."""
        with self.current():
            copies = [t.to(self._device, non_blocking=True) for t in tensors]
            return copies, self.record()

    def record(self) -> torch.Event:
        """Return the event of all work queued on the stream so far."""
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def hand_over(self, tensors: Iterable[Tensor], event: torch.Event | None = None) -> None:
        """Make the current stream, not the host, wait for the event, or for this stream, before using tensors."""
        current = torch.accelerator.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        elif self._stream is not None:
            current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)  # its memory belongs to the other stream's pool

"""Tensors on their way to the thread that writes them: copied to the host, on CUDA without holding up the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scidata.errors import ConfigError


class Staged:
    """A tensor's values, for the thread that writes."""

    def __init__(self, host: torch.Tensor, ready: Any, check: Callable[[], None], free: Callable[[], None]) -> None:
        self._host, self._ready, self._check, self._free = host, ready, check, free

    def values(self) -> npt.NDArray[Any]:
        """Return them, when the copy is done: what NumPy has no dtype for as float32."""
        if self._ready is not None:
            self._ready.synchronize()
        host = self._host.float() if self._host.dtype is torch.bfloat16 else self._host
        found: npt.NDArray[Any] = host.numpy()
        return found

    def release(self) -> None:
        """Say that the values have been used.

        Raises
        ------
        ConfigError
            The tensor, which was not copied, was changed in place meanwhile.
        """
        self._check()
        self._free()


class Staging:
    """Copies tensors into buffers that are used again.

    Parameters
    ----------
    copy
        Whether tensors on the CPU are copied, too; else they must not be changed in place until they are written,
        which is looked at.
    """

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._lock = threading.Lock()
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}

    def take(self, tensor: torch.Tensor, what: str) -> Staged:
        """Begin to copy a tensor, and return its values to be."""
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            return self._from_cuda(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        elif not self._copy:
            return _kept(tensor, what)
        host = self._buffer(tensor, pinned=False)
        host.copy_(tensor)
        return Staged(host, None, _nothing, lambda: self._give_back(host, pinned=False))

    def _from_cuda(self, tensor: torch.Tensor) -> Staged:
        """Copy on a stream of its own to pinned memory; the tensor's memory is not used again before."""
        host, device = self._buffer(tensor, pinned=True), tensor.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        tensor.record_stream(stream)
        return Staged(host, event, _nothing, lambda: self._give_back(host, pinned=True))

    def _buffer(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        with self._lock:
            free = self._free.get((tuple(tensor.shape), tensor.dtype, pinned))
            if free:
                return free.pop()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    def _give_back(self, host: torch.Tensor, *, pinned: bool) -> None:
        with self._lock:
            self._free.setdefault((tuple(host.shape), host.dtype, pinned), []).append(host)


def _kept(tensor: torch.Tensor, what: str) -> Staged:
    version = tensor._version  # torch counts changes in place, also those of views

    def check() -> None:
        if tensor._version != version:
            raise ConfigError(
                f"{what} was changed in place before it was written; leave it as it is, or give create(copy=True)"
            )

    return Staged(tensor, None, check, _nothing)


def _nothing() -> None:
    pass


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """Return a tensor, or an array of NumPy as one.

    Raises
    ------
    ConfigError
        It is neither.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{what} is a {type(value).__name__}, and must be a tensor")
    return value

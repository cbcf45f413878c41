"""Tensors on their way to the thread that writes them: copied to the host, on CUDA without holding up the loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from scidata.core.types import Array
from scidata.data.side_stream import SideStream
from scidata.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Staged:
    """A tensor's values, for the thread that writes.

    ``release`` says that they have been used; it raises ConfigError where they were not copied, and have changed.
    """

    host: torch.Tensor
    ready: torch.cuda.Event | None
    release: Callable[[], None]

    def values(self) -> Array:
        """Return the values, when the copy is done; bfloat16, which NumPy has not, as float32."""
        if self.ready is not None:
            self.ready.synchronize()
        return (self.host.float() if self.host.dtype is torch.bfloat16 else self.host).numpy()


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
        self._free: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, SideStream] = {}

    def take(self, tensor: torch.Tensor, what: str) -> Staged:
        """Begin to copy a tensor, and return its values to be."""
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            return self._from_cuda(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        elif not self._copy:
            return _kept(tensor, what)
        host, release = self._buffer(tensor, pinned=False)
        host.copy_(tensor)
        return Staged(host, None, release)

    def _from_cuda(self, tensor: torch.Tensor) -> Staged:
        """Copy on a stream of its own to pinned memory; the tensor's memory is not used again before."""
        host, release = self._buffer(tensor, pinned=True)
        side = self._streams.setdefault(tensor.device, SideStream(tensor.device))
        with side.current(after=True) as stream:
            host.copy_(tensor, non_blocking=True)
            event = side.record()
        tensor.record_stream(stream)
        return Staged(host, event, release)

    def _buffer(self, tensor: torch.Tensor, *, pinned: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a buffer like a tensor, and a function that gives it back, which any thread may call."""
        free = self._free[tuple(tensor.shape), tensor.dtype, pinned]
        host = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return host, lambda: free.append(host)


def _kept(tensor: torch.Tensor, what: str) -> Staged:
    version = tensor._version  # torch counts changes in place, also those of views

    def check() -> None:
        if tensor._version != version:
            raise ConfigError(
                f"{what} was changed in place before it was written; leave it as it is, or give create(copy=True)"
            )

    return Staged(tensor, None, check)


def as_tensor(value: object, what: str) -> torch.Tensor:
    """Return a tensor, or an array of NumPy as one; raise ConfigError where it is neither."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{what} is a {type(value).__name__}, and must be a tensor")
    return value

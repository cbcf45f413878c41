"""Buffers that change in training, such as running statistics, kept the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scidata.shard.comm.transport import Group, as_bytes, broadcast, once
from scidata.shard.torch_internals import buffers_of, version_of


class ChangingBuffers:
    """Sends the first rank's buffers to the others, those that have changed since the last time.

    All ranks change the same ones, as they run the same program.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._places = [(module, name) for module in model.modules() for name in buffers_of(module)]
        self._seen = self._versions()

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = [buffers_of(module).get(name) for module, name in self._places]
        return [(buffer, -1 if buffer is None else version_of(buffer)) for buffer in buffers]

    @torch.no_grad()
    def send(self) -> None:
        """Make them equal. Collective where any has changed: one broadcast an axis."""
        found = self._versions()
        changed = {
            id(buffer): buffer
            for (buffer, version), (before, seen) in zip(found, self._seen, strict=True)
            if type(buffer) in (Tensor, nn.Buffer) and (buffer is not before or version != seen)
        }
        buffers = [once(buffer) for buffer in changed.values() if buffer is not None and buffer.numel()]
        if buffers:
            packed = torch.cat([as_bytes(buffer) for buffer in buffers])
            for group in self._groups:
                broadcast(packed, 0, group)
            parts = torch.split(packed, [buffer.numel() * buffer.element_size() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # cloned: bytes lie at odd offsets
        self._seen = self._versions()

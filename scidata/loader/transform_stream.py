"""A CUDA stream of their own for what is done to batches before they are handed out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from scidata.data.irregular_sample import IrregularSample
from scidata.shard import ShardTensor


class TransformStream:
    """Transforms of a batch run beside the kernels that still work on the batches before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def own(self) -> Iterator[None]:
        """Make it the current stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def hand_over(self, batch: Any) -> None:
        """Make what was made there safe to use on the current stream."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in _tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory belongs to the other stream's pool


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch.to_local() if isinstance(batch, ShardTensor | DTensor) else batch
    elif isinstance(batch, IrregularSample):
        topology = batch.topology
        cells = () if topology.cells is None else vars_of(topology.cells)
        for part in (dict(batch), batch.held, [topology.edge_index, topology.far_edge_index], cells):
            yield from _tensors(part)
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(batch):
        yield from _tensors(vars_of(batch))


def vars_of(description: Any) -> list[Any]:
    """Return the values of a dataclass's fields."""
    return [getattr(description, field.name) for field in dataclasses.fields(description)]

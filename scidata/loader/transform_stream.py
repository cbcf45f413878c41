"""The tensors of a batch, for a transform that runs on a CUDA stream of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from scidata.data.irregular_sample import IrregularSample
from scidata.shard import ShardTensor


def tensors_of(batch: object) -> Iterator[torch.Tensor]:
    """Yield all local tensors in a batch, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        yield batch.to_local() if isinstance(batch, ShardTensor | DTensor) else batch
    elif isinstance(batch, IrregularSample):
        yield from tensors_of([dict(batch), batch.held, batch.graph_values, batch.topology.tensors()])
    elif dataclasses.is_dataclass(batch):
        yield from tensors_of([getattr(batch, field.name) for field in dataclasses.fields(batch)])
    elif isinstance(batch, Mapping):
        yield from tensors_of(list(batch.values()))
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch:
            yield from tensors_of(part)

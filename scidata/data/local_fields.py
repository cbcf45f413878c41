"""This rank's part of a sample at reading: items of torch's worker processes, and the user's local function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from scidata.core import trace
from scidata.core.types import Array
from scidata.errors import ConfigError, UnknownNameError, near_matches

_INDEX = "#index"  # which torch's collate function stacks as it does the fields


class LocalFields(dict[str, torch.Tensor]):
    """This rank's part of the fields of a sample or batch, halo included, which ``ds.assemble(part)`` wraps.

    Outside of workers a field cannot be taken from it by name where the domain has several ranks: parts differ in shape
    from rank to rank, and none of them is the field. ``items()`` gives all that is there.
    """

    is_whole: bool

    @classmethod
    def of(cls, fields: Mapping[str, torch.Tensor], index: int, *, is_whole: bool) -> LocalFields:
        """Make the part of a sample; ``is_whole`` if one rank holds all of it."""
        made = cls(fields)
        made.number(index)
        made.is_whole = is_whole
        return made

    def number(self, index: int | list[int]) -> None:
        """Set the sample's number."""
        self[_INDEX] = torch.tensor(index)

    def __getitem__(self, name: str) -> torch.Tensor:
        if get_worker_info() is None and not self.is_whole:
            raise ConfigError(
                f"{name!r}: a worker process of torch's DataLoader has read this rank's part of the sample, with its "
                "halo; sample = ds.assemble(part) makes ShardTensors of it. Or use scidata.DataLoader"
            )
        return super().__getitem__(name)

    def fields(self) -> dict[str, torch.Tensor]:
        """Return the fields only."""
        return {name: tensor for name, tensor in self.items() if name != _INDEX}

    @property
    def index(self) -> int | list[int]:
        """The sample's number, or the numbers of a batch."""
        return dict.__getitem__(self, _INDEX).tolist()


def stacked(parts: Sequence[LocalFields]) -> LocalFields:
    """Stack parts of samples to the part of a batch."""
    made = LocalFields({name: torch.stack([dict(part)[name] for part in parts]) for name in parts[0]})
    made.is_whole = parts[0].is_whole
    return made


#: From a part's tensors by name, ghosts and halo included, to those that change; shapes and dtypes stay.
LocalTransform: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def apply_locally(transform: LocalTransform | None, arrays: Mapping[str, Array]) -> None:
    """Apply the user's function to the arrays."""
    if transform is None:
        return
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with trace.span("local transform", sample=trace.get_sample()):
        result = transform(dict(tensors))
    if not isinstance(result, Mapping):
        raise ConfigError(f"local_transform returned {type(result).__name__}; return the fields, by name")
    for name, changed in result.items():
        if name not in tensors:
            raise UnknownNameError(
                f"local_transform made a field {name!r}, which was not read{near_matches(name, tensors)}; make new "
                "fields in transform"
            )
        own = tensors[name]
        if (changed.shape, changed.dtype) != (own.shape, own.dtype):
            raise ConfigError(
                f"local_transform made {name!r} {tuple(changed.shape)} {changed.dtype}, but this rank's part is "
                f"{tuple(own.shape)} {own.dtype}; change shapes and dtypes in transform"
            )
        if changed.data_ptr() != own.data_ptr() or changed.stride() != own.stride():
            np.copyto(arrays[name], changed.numpy())

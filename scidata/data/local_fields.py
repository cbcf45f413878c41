"""Fields of this rank on a grid: items of a worker process of torch's ``DataLoader``, tensors of this rank's part, no
sample yet; and fields that no sample changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from scidata.core.types import Array, BufferSpec
from scidata.errors import ConfigError
from scidata.read.context import ReadStats

_INDEX = "#index"  # which torch's collate function stacks as it does the fields


class LocalFields(dict[str, torch.Tensor]):
    """This rank's part of the fields of a sample, halo included, or of a batch, which ``ds.assemble(part)`` wraps.

    Outside of workers a field cannot be taken from it by name where the domain has several ranks: parts differ in shape
    from rank to rank, and none of them is the field. ``items()`` gives all that is there.
    """

    is_whole: bool

    @classmethod
    def of(cls, fields: Mapping[str, torch.Tensor], index: int, *, is_whole: bool) -> LocalFields:
        """Make one of a sample; ``is_whole`` where one rank holds all of it."""
        made = cls(fields)
        made.number(index)
        made.is_whole = is_whole
        return made

    def number(self, index: int | list[int]) -> None:
        """Say which sample it is of."""
        self[_INDEX] = torch.tensor(index)

    def __getitem__(self, name: str) -> torch.Tensor:
        if get_worker_info() is None and not self.is_whole:
            raise ConfigError(
                f"{name!r}: a worker process of torch's DataLoader has read this rank's part of the sample, with its "
                "halo; sample = ds.assemble(part) makes ShardTensors of it. Or use scidata.DataLoader"
            )
        return super().__getitem__(name)

    def fields(self) -> dict[str, torch.Tensor]:
        """Return the fields alone."""
        return {name: tensor for name, tensor in self.items() if name != _INDEX}

    @property
    def index(self) -> int | list[int]:
        """The sample's number, or those of a batch."""
        return dict.__getitem__(self, _INDEX).tolist()


def stacked(parts: Sequence[LocalFields]) -> LocalFields:
    """Return the part of a batch."""
    made = LocalFields({name: torch.stack([dict(part)[name] for part in parts]) for name in parts[0]})
    made.is_whole = parts[0].is_whole
    return made


#: Reads fields into arrays; returns statistics of the reads.
Read: TypeAlias = Callable[[Mapping[str, Array]], ReadStats]


class StaticFields:
    """This rank's part of the fields that all samples share. Thread-safe.

    Samples hold views of one tensor. A change in place is noticed by the tensor's version: samples that are handed out
    later have the field read anew. ``read`` gives the fields decoded and normalised; ``cast`` makes dtypes that NumPy
    lacks.
    """

    def __init__(
        self, specs: Mapping[str, BufferSpec], read: Read, cast: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.specs, self._read, self._cast = dict(specs), read, cast
        self._lock = threading.Lock()
        self._host: dict[str, tuple[torch.Tensor, int]] = {}  # and its version, as it was read
        self._on: dict[tuple[str, torch.device], tuple[torch.Tensor, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, that each process keeps on each device that it uses."""
        return sum(spec.nbytes for spec in self.specs.values())

    def read(self) -> ReadStats:
        """Read fields that were not read yet, or were changed in place since; return the statistics of these reads."""
        if all(_is_as_it_was(self._host.get(name)) for name in self.specs):
            return ReadStats()
        with self._lock:
            lacking = [name for name in self.specs if not _is_as_it_was(self._host.get(name))]
            found = {name: np.empty(self.specs[name].shape, self.specs[name].dtype) for name in lacking}
            stats = self._read(found) if found else ReadStats()
            with torch.inference_mode(False):  # or training could not use tensors that validation has read
                for name, values in found.items():
                    tensor = self._cast(torch.from_numpy(values))
                    self._host[name] = tensor, tensor._version
        return stats

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return views of them on a device."""
        self.read()
        found = {}
        for name in self.specs:
            kept = self._host[name] if device.type == "cpu" else self._on.get((name, device))
            if not _is_as_it_was(kept):
                with torch.inference_mode(False):
                    copy = self._host[name][0].to(device)
                    kept = self._on[name, device] = copy, copy._version
            assert kept is not None
            found[name] = kept[0].detach()  # a tensor of its own on the same memory, and of the same version
        return found


def _is_as_it_was(kept: tuple[torch.Tensor, int] | None) -> bool:
    return kept is not None and kept[0]._version == kept[1]

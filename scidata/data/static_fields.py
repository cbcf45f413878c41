"""Fields that are equal in all samples: read once in each process, kept once on each device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from scidata.core.types import Array, BufferSpec
from scidata.read.context import ReadStats

#: Reads fields into arrays; returns statistics of the reads.
Read: TypeAlias = Callable[[Mapping[str, Array]], ReadStats]


class StaticFields:
    """This rank's part of the fields shared by all samples. Thread-safe.

    Samples hold views of one tensor. A change in place is noticed by the tensor's version: samples that are handed out
    later have the field read anew. ``read`` gives the fields decoded and normalised; ``cast`` makes dtypes that NumPy
    lacks.
    """

    def __init__(
        self, specs: Mapping[str, BufferSpec], read: Read, cast: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.specs, self._read, self._cast = dict(specs), read, cast
        self._lock = threading.Lock()
        self._host: dict[str, tuple[torch.Tensor, int]] = {}  # and its version when it was read
        self._on: dict[tuple[str, torch.device], tuple[torch.Tensor, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all fields; each process keeps them on each device that it uses."""
        return sum(spec.nbytes for spec in self.specs.values())

    def read(self) -> ReadStats:
        """Read fields that are unread, or were changed in place; return the statistics of these reads."""
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
        """Return views of the fields on a device."""
        self.read()
        found = {}
        for name in self.specs:
            kept = self._host[name] if device.type == "cpu" else self._on.get((name, device))
            if not _is_as_it_was(kept):
                with torch.inference_mode(False):
                    copy = self._host[name][0].to(device)
                    kept = self._on[name, device] = copy, copy._version
            assert kept is not None
            found[name] = kept[0].detach()  # a separate tensor that shares memory and version counter
        return found


def _is_as_it_was(kept: tuple[torch.Tensor, int] | None) -> bool:
    return kept is not None and kept[0]._version == kept[1]

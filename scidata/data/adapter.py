"""Adapter that gives loaders and combined data sets one view of any data set, scidata's or a user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from typing_extensions import TypeVar  # with defaults, before Python 3.13

from scidata.core.types import Array, BufferSpec, Empty
from scidata.data.sample import Sample

if TYPE_CHECKING:
    from scidata.grids.blocks.pool import BlockRead

_ABILITIES = (
    *("__len__", "mesh", "assemble", "buffer_specs", "read_into", "read_local"),
    *("epoch_reader", "set_epoch"),  # of data sets whose samples depend on the epoch
    *("blocks", "stretches", "shared_reads"),  # of grids, whose samples may share chunks
)


SampleT = TypeVar("SampleT", covariant=True, default=Sample)


class _Described(Protocol):
    mesh: DeviceMesh | None
    dp_axis: str | None
    transform: Callable[[Any], Any] | None

    def __len__(self) -> int: ...


class BufferedDataset(_Described, Protocol[SampleT]):
    """What the loader needs of a data set whose samples have one size; :class:`scidata.ShardedDataset` is one."""

    def buffer_specs(self) -> Mapping[str, BufferSpec]:
        """Shape and dtype of this rank's part of one sample, by field."""

    def read_into(self, index: int, out: Mapping[str, Array]) -> object:
        """Fill the buffers of one sample; thread-safe. The result may have ``bytes_fetched``."""

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool) -> SampleT:
        """Wrap tensors shaped as the buffers, with a batch dim 0 if ``batched``."""


class PartDataset(_Described, Protocol[SampleT]):
    """What the loader needs of a data set whose samples differ in size: :func:`scidata.open_dataset` of a store."""

    def read_local(self, index: int) -> object:
        """Read this rank's part of one sample; thread-safe. The part may have ``fields`` by name, ``stats``,
        ``arrays()``.
        """

    def assemble(self, local: Any, *, index: int) -> SampleT:
        """Wrap a part; called in the thread that uses the sample."""


#: What loaders and data sets made of others take.
Readable: TypeAlias = Dataset[SampleT] | BufferedDataset[SampleT] | PartDataset[SampleT]


class DatasetAdapter:
    """One view of any data set, for loaders and combinations. ``has_buffers``: samples have the same, known sizes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._abilities = frozenset(name for name in _ABILITIES if hasattr(dataset, name))
        self.has_buffers = "buffer_specs" in self._abilities

    def lacks(self, *names: str) -> list[str]:
        """Return the names among these that are no method or attribute of the data set."""
        return [name for name in names if name not in self._abilities]

    @property
    def epoch(self) -> object:
        """The epoch that the data set's samples depend on; None if they depend on none."""
        return getattr(self.dataset, "epoch", None)

    @property
    def reads_alone(self) -> bool:
        """Whether reads never wait for another machine or rank, as far as the data set tells."""
        return bool(getattr(self.dataset, "reads_alone", False))

    @property
    def static_nbytes(self) -> int:
        """Bytes of the fields that all samples share, of grids."""
        return int(getattr(self.dataset, "static_nbytes", 0))

    def set_epoch(self, epoch: int) -> None:
        """Set the data set's epoch, if it has one."""
        if "set_epoch" in self._abilities:
            self.dataset.set_epoch(epoch)

    def reader(self, epoch: object = None, *, empty: Empty = np.empty) -> Callable[[int], Any]:
        """Return a function that reads samples of ``epoch``, default the present one; ``empty`` allocates arrays of
        other sizes.
        """
        if "epoch_reader" in self._abilities:
            return self.dataset.epoch_reader(epoch, empty=empty)
        return self.dataset.read_local

    def filler(self, epoch: object = None) -> Callable[[int, Mapping[str, Array]], object]:
        """Return a function that reads a sample of a fixed ``epoch``, default the present one, into buffers."""
        if "epoch_reader" not in self._abilities:
            return self.dataset.read_into
        return partial(self.dataset.read_into, epoch=self.epoch if epoch is None else epoch)

    def shared_reads(self, index: int) -> Sequence[BlockRead]:
        """Return the blocks that a sample shares with others."""
        if "shared_reads" not in self._abilities:
            return ()
        return self.dataset.shared_reads(index)

    def assemble(self, local: Any, *, index: int) -> Sample:
        """Wrap this rank's part of one sample."""
        single = {"batched": False} if self.has_buffers else {}
        return self.dataset.assemble(local, index=index, **single)

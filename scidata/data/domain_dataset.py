"""``DomainDataset``: what data sets of all kinds share, and what they ask of the reader of their kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, get_worker_info

from scidata.core.checks import as_index
from scidata.core.html import card, sizes
from scidata.core.keywords import checked_keywords
from scidata.core.passes import FieldPass
from scidata.core.types import IntArray
from scidata.data.local_transform import LocalTransform
from scidata.data.sample import Sample
from scidata.device_mesh import domain_mesh
from scidata.errors import ConfigError
from scidata.plan.totals import ReadPlan


class Reader(Protocol):
    """Plans and reads any rank's part of any sample of some kind of data. No torch, no communication."""

    fields: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample."""

    def fingerprint(self) -> str:
        """Return a digest of what decides the samples."""

    def plan(self, index: int, rank: int = 0) -> ReadPlan:
        """Plan one sample for one rank of the domain."""

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> FieldPass:
        """Return what goes over all rows of a field that some samples have, of one rank's own part."""

    def close(self) -> None:
        """End the threads and close the files; the next read starts them again."""


ReaderT = TypeVar("ReaderT", bound=Reader)
SampleT = TypeVar("SampleT", bound=Sample[Any], covariant=True)


class DomainDataset(Dataset[SampleT], ABC, Generic[ReaderT, SampleT]):
    """Samples of which this rank reads its part; each kind of data adds how a part is read and wrapped.

    Indexing never communicates, although all ranks of a domain are meant to index alike. Pickles as paths and options
    and reopens its files lazily. In a worker process, which has no process group, a sample is what :meth:`read_local`
    returns, that :meth:`assemble` wraps in the parent.

    Attributes
    ----------
    mesh : DeviceMesh or None
        As given; None in a worker process.
    dp_axis : str or None
        Name of the data-parallel axis, None where the mesh has none.
    transform
        Called with each sample.
    local_transform
        Called with each part that is read.
    has_coords
        Whether samples show their coordinates.
    """

    def __init__(
        self,
        reader: ReaderT,
        mesh: DeviceMesh | None,
        axes: Sequence[str],
        *,
        dp_axis: str | None,
        dtype: torch.dtype | None,
        transform: Callable[[Any], Any] | None,
        local_transform: LocalTransform | None = None,
        has_coords: bool = False,
    ) -> None:
        self.reader = reader
        self.mesh = mesh
        self.dp_axis = dp_axis
        self.transform = transform
        self.local_transform = local_transform
        self.has_coords = has_coords
        self._dtype = dtype
        self._detached = False
        self._coordinate: dict[str, int] = {}
        self._rank, self._domain = 0, None
        if mesh is not None and axes:
            self._coordinate = {axis: mesh.get_local_rank(axis) for axis in axes}
            self._domain = domain_mesh(mesh, axes)
            self._rank = int(np.ravel_multi_index(tuple(self._coordinate.values()), self._domain.shape))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.reader.fields

    @property
    def rank(self) -> int:
        """Place of this rank in its domain: the ``rank`` of :meth:`plan`."""
        return self._rank

    @property
    def domain_axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes whose ranks hold parts of a sample."""
        return tuple(self._coordinate)

    @property
    def detached(self) -> bool:
        """Whether this is a copy in a worker process, without the mesh that the data set was opened with."""
        return self._detached

    @property
    def fingerprint(self) -> str:
        """Digest of what decides the samples, such as fields, shapes and steps; of stores also their values."""
        return self.reader.fingerprint()

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample."""
        return self.reader.dims(name)

    def __len__(self) -> int:
        return self.reader.num_samples

    def _repr_html_(self) -> str:
        mesh = None if self.mesh is None else sizes(self.mesh.mesh_dim_names or (), self.mesh.shape)
        facts = {"samples": len(self), "mesh": mesh, "transform": getattr(self.transform, "__name__", self.transform)}
        title, more, columns, rows = self._described()
        return card(title, more | facts, columns, rows)

    @abstractmethod
    def _described(self) -> tuple[str, dict[str, Any], Sequence[str], Sequence[Sequence[Any]]]:
        """Return what a notebook shows of this kind: a title, facts by name, columns and rows of a table of fields."""

    @checked_keywords
    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan what a rank of the domain reads of a sample; any rank, default this one."""
        return self.reader.plan(index, self.rank if rank is None else rank)

    @abstractmethod
    def plot(self, index: int = 0, field: str | None = None, *, parts: bool = True, path: str | None = None) -> Any:
        """Draw a field of a sample, and who has which part of it."""

    @abstractmethod
    def read_local(self, index: int) -> Any:
        """Read this rank's part. Thread-safe, no collectives."""

    @abstractmethod
    def assemble(self, local: Any, *, index: int | None = None) -> SampleT:
        """Wrap this rank's part of a sample. No communication."""

    def __getitem__(self, index: int) -> SampleT:
        index = as_index(index)
        local = self.read_local(index)
        if self._detached or (self.mesh is not None and get_worker_info() is not None):
            return local  # type: ignore[no-any-return]  # a worker has no process group; assemble() wraps in the parent
        sample = self.assemble(local, index=index % len(self))
        return self.transform(sample) if self.transform is not None else sample

    def _number(self, index: int) -> int:
        """Return which sample an index means, from 0 on."""
        index = as_index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} is out of range: there are {len(self)} samples")
        return index % len(self)

    def _check_attached(self) -> None:
        if self._detached:
            raise ConfigError("assemble() needs the mesh, which a worker process does not have; call it in the parent")

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what NumPy has no dtype for in that dtype."""
        narrow = self._dtype is torch.bfloat16 and tensor.is_floating_point()
        return tensor.to(torch.bfloat16) if narrow else tensor

    def close(self) -> None:
        """End the reading threads and close the files; the next read starts them again."""
        self.reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"mesh": None, "_domain": None, "_detached": self._detached or self.mesh is not None}

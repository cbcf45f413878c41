"""``ShardedDataset``: sample index in, the named fields of this rank's part of a grid out, as ShardTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.data import Dataset, get_worker_info

from scidata.core.checks import allocate, as_index
from scidata.core.types import BufferSpec
from scidata.data.local_transform import LocalTransform, apply_locally
from scidata.data.sample import Sample
from scidata.device_mesh import domain_mesh
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.grids.reader import GridReader
from scidata.plan import ReadPlan
from scidata.read import ReadStats
from scidata.shard import HaloDim, ShardSpec, ShardTensor

__all__ = ["ShardedDataset"]


class ShardedDataset(Dataset[Sample]):
    """Samples of a gridded data set, of which this rank reads its part. Made by :func:`open_dataset`.

    Indexing never communicates, although all ranks of a domain are meant to index alike. Pickles as paths and options
    and reopens its files lazily. In a worker process, which has no process group, a sample is a dict of plain local
    tensors, halo included, that :meth:`assemble` wraps in the parent.

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
    """

    def __init__(
        self,
        reader: GridReader,
        mesh: DeviceMesh | None,
        *,
        dp_axis: str | None,
        dtype: torch.dtype | None,
        transform: Callable[[Sample], Sample] | None,
        local_transform: LocalTransform | None = None,
    ) -> None:
        self.reader = reader
        self.mesh = mesh
        self.dp_axis = dp_axis
        self.transform = transform
        self.local_transform = local_transform
        self._dtype = dtype
        self._detached = False
        self._specs: dict[str, BufferSpec] | None = None  # asked for with every sample
        axes = tuple(reader.partition.axis_sizes)
        self._coordinate = {} if mesh is None else {axis: mesh.get_local_rank(axis) for axis in axes}
        self._domain: DeviceMesh | None = domain_mesh(mesh, axes) if mesh is not None and axes else None

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.reader.fields

    @property
    def rank(self) -> int:
        """Place of this rank in its domain: the ``rank`` of :meth:`plan`."""
        sizes = tuple(self.reader.partition.axis_sizes.values())
        return int(np.ravel_multi_index(tuple(self._coordinate.values()), sizes)) if self._coordinate else 0

    @property
    def fingerprint(self) -> str:
        """Digest of what decides the samples: fields, shapes, dtypes, crop and steps."""
        return self.reader.fingerprint()

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample."""
        return self.reader.dims(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample."""
        return self.reader.global_shape(name)

    def coordinate(self, dim: str) -> npt.NDArray[Any] | None:
        """Return the whole selected coordinate of a dimension, ``(size,)``, or None where it has none."""
        return self.reader.coordinate(dim)

    def __len__(self) -> int:
        return self.reader.num_samples

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {self.reader.global_shape(name)}" for name in self.fields)
        return f"ShardedDataset({self.reader.paths[0]!r}, {len(self)} samples, {shapes})"

    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan what a rank of the domain reads of a sample; any rank, default this one. Reads metadata only."""
        return self.reader.plan(index, self.rank if rank is None else rank)

    # -- reading -------------------------------------------------------------------------------------------------

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of each field, halo included; the same for every sample."""
        if self._specs is None:
            self._specs = self.reader.buffer_specs(self._coordinate)
        return dict(self._specs)

    def read_into(self, index: int, out: Mapping[str, npt.NDArray[Any]]) -> ReadStats:
        """Read this rank's part into buffers shaped as :meth:`buffer_specs`. Thread-safe, no collectives."""
        stats = self.reader.read_into(index, out, self._coordinate)
        apply_locally(self.local_transform, out)
        return stats

    def read_local(self, index: int) -> dict[str, torch.Tensor]:
        """Read this rank's part, halo included, as plain tensors."""
        buffers = {
            name: allocate(f"{self.reader.paths[0]}: field {name!r}", spec.shape, spec.dtype)
            for name, spec in self.buffer_specs().items()
        }
        self.read_into(index, buffers)
        return {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}

    def __getitem__(self, index: int) -> Sample:
        index = as_index(index)
        local = self.read_local(index)
        if self._detached or (self.mesh is not None and get_worker_info() is not None):
            return local  # type: ignore[return-value]  # a worker has no process group; assemble() wraps in the parent
        sample = self.assemble(local, index=index % len(self))
        return self.transform(sample) if self.transform is not None else sample

    def assemble(
        self,
        local: Mapping[str, torch.Tensor],
        *,
        index: int | list[int] | None = None,
        batched: bool | None = None,
    ) -> Sample:
        """Wrap local parts, halo included, as a sample of ShardTensors.

        Parameters
        ----------
        local
            A tensor for each field, shaped as :meth:`buffer_specs`; with a batch dim 0 before it if ``batched``.
        batched
            Default: found from the number of dims.

        Raises
        ------
        ConfigError
            Called in a worker process, or with tensors that do not have this rank's shapes.
        """
        if self._detached:
            raise ConfigError("assemble() needs the mesh, which a worker process does not have; call it in the parent")
        specs = self.buffer_specs()
        tensors, dims = {}, {}
        for name, tensor in local.items():
            if name not in specs:
                raise UnknownNameError(f"assemble: no field {name!r}{near_matches(name, specs)}")
            expected = specs[name].shape
            lead = tensor.ndim - len(expected)
            has_batch = lead == 1 if batched is None else batched
            if lead != int(has_batch) or tuple(tensor.shape[lead:]) != expected:
                raise ConfigError(
                    f"assemble: field {name!r} has shape {tuple(tensor.shape)}, but this rank's part is {expected}"
                    + (" after the batch dim" if has_batch else "")
                )
            narrow = self._dtype is torch.bfloat16 and tensor.is_floating_point()
            tensors[name] = self._wrap(name, tensor.to(torch.bfloat16) if narrow else tensor, has_batch)
            dims[name] = (("batch",) if has_batch else ()) + self.reader.dims(name)
        return Sample(tensors, dims=dims, index=index)

    def _wrap(self, name: str, tensor: torch.Tensor, has_batch: bool) -> torch.Tensor:
        if self._domain is None:
            return tensor
        partition, dims, lead = self.reader.partition, self.reader.dims(name), int(has_batch)
        placements: list[Placement] = []
        sizes: list[tuple[int, ...] | None] = []
        for axis in partition.axis_sizes:
            dim = next(d for d, a in partition.axis_of_dim.items() if a == axis)
            if dim in dims:
                placements.append(Shard(dims.index(dim) + lead))
                sizes.append(tuple(np.diff(partition.bounds[dim]).tolist()))
            else:
                placements.append(Replicate())
                sizes.append(None)
        global_shape = (*tensor.shape[:lead], *self.reader.global_shape(name))
        spec = ShardSpec.on(self._domain, tuple(placements), global_shape, tuple(sizes))
        halo = {
            i + lead: HaloDim(lo=partition.halo[d][0], hi=partition.halo[d][1], periodic=d in partition.periodic)
            for i, d in enumerate(dims)
            if d in partition.halo
        }
        return ShardTensor.from_padded(tensor, spec, halo)

    def close(self) -> None:
        """End the reading threads and close the files; the next read starts them again."""
        self.reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"mesh": None, "_domain": None, "_detached": self._detached or self.mesh is not None}

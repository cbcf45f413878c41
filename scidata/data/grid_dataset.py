"""``ShardedDataset``: sample index in, the named fields of this rank's part of a grid out, as ShardTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.data import get_worker_info

from scidata.core.checks import allocate
from scidata.core.html import sizes
from scidata.core.keywords import checked_keywords
from scidata.core.types import Array, BufferSpec, IntArray
from scidata.data.channels import Channels, Steps, TensorT, channels_of
from scidata.data.domain_dataset import DomainDataset
from scidata.data.local_fields import LocalFields, apply_locally
from scidata.data.sample import Coordinate, Sample
from scidata.data.static_fields import StaticFields
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.grids.blocks.pool import BlockRead
from scidata.grids.passes import plain_labels
from scidata.grids.reader import GridReader
from scidata.read.context import ReadStats
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.sources.access.mounts import is_local

#: How fields of some dims are split: placements, sizes of all parts, halo.
_Cut: TypeAlias = tuple[tuple[Placement, ...], tuple[tuple[int, ...] | None, ...], dict[int, HaloDim]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a field: shape of this rank's part, and dims and shape of the whole."""

    expected: tuple[int, ...]
    dims: tuple[str, ...]
    global_shape: tuple[int, ...]


class ShardedDataset(DomainDataset[GridReader, Sample[TensorT]]):
    """Samples of a gridded data set, of which this rank reads its part. Made by :func:`open_dataset`.

    All samples have the same sizes, and are read into buffers. In a worker process, which has no process group, a
    sample is a dict of plain local tensors, halo included, that :meth:`assemble` wraps in the parent. Attributes
    and methods of all kinds of data are those of :class:`~scidata.data.domain_dataset.DomainDataset`.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u", "t"])
    >>> type(ds).__name__, len(ds), ds.fields, ds.dims("u")
    ('ShardedDataset', 4, ('u', 't'), ('level', 'latitude', 'longitude'))
    >>> ds.plan(0).bytes_wanted  # 2 fields of 3 x 7 x 8 float32
    1344
    """

    _cached: tuple[str, ...] = ("_static",)

    # -- fields, dims and blocks ---------------------------------------------------------------------------------

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample.

        Parameters
        ----------
        name : str
            A field.

        Examples
        --------
        >>> ds.global_shape("u")
        (3, 7, 8)
        """
        return self.reader.global_shape(name)

    def coordinate(self, dim: str) -> Array | None:
        """Return the whole selected coordinate of a dimension, ``(size,)``, or None if it has none.

        Parameters
        ----------
        dim : str
            A dimension of a field.

        Examples
        --------
        >>> ds.coordinate("level").tolist()
        [1000, 550, 100]
        """
        return self.reader.coordinate(dim)

    @property
    def static_fields(self) -> tuple[str, ...]:
        """Names of the fields that are the same in all samples, such as orography: they have no sample dimension."""
        return self.reader.static_fields

    @property
    def static_nbytes(self) -> int:
        """Bytes of this rank's part of the static fields, which is read once and kept."""
        return self._static.nbytes

    def blocks(self) -> IntArray:
        """Return which samples share chunks that have to be decoded: ``(len(self),)`` int64, a number for each block.

        For ``DistributedSampler(shuffle="blocks")``. Of several fields the longest chunks count; samples are where
        their first step is. Where windows overlap, a block is of as many chunks as hold 8 steps.
        """
        return self.reader.blocks()

    def stretches(self) -> IntArray:
        """Return which blocks share chunks with their neighbours: ``(len(self),)`` int64, a number for each stretch.

        For ``DistributedSampler(shuffle="blocks")``, which goes through the blocks of a stretch one after the other: a
        window of steps that begins in one ends in the next. Stretches are so long that hardly any chunk is decoded
        twice; where no windows overlap, and all chunks are as long, each is a block.
        """
        return self.reader.stretches()

    def shared_reads(self, index: int) -> list[BlockRead]:
        """Return the blocks of decoded rows that this rank's part of a sample shares with others: ``pool_bytes``."""
        return self.reader.shared_reads(index, self._coordinate)

    @cached_property
    def reads_alone(self) -> bool:
        """Whether all files lie on disks of this machine, and no other rank decodes chunks for this one."""
        reader = self.reader
        return not reader.pool.worth.by_node and all(map(is_local, reader.paths))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {self.reader.global_shape(name)}" for name in self.fields)
        return f"ShardedDataset({self._path!r}, {len(self)} samples, {shapes})"

    def _described(self) -> tuple[str, Mapping[str, object], Sequence[str], Sequence[Sequence[object]]]:
        reader, partition, specs = self.reader, self.reader.cut, self._specs
        cut = "; ".join(
            f"{dim} over {axis}: {list(map(int, np.diff(partition.bounds[dim])))[:16]}"
            for dim, axis in partition.axis_of_dim.items()
        )
        halo = ", ".join(f"{dim} {below}:{above}" for dim, (below, above) in partition.halo.items())
        facts = {"path": self._path, "sample dim": ", ".join(reader.sample_dims), "split": cut, "halo": halo}
        rows = [
            (name, sizes(self.dims(name), self.global_shape(name)), str(specs[name].dtype), specs[name].shape)
            for name in self.fields
        ]
        return "ShardedDataset", facts, ("field", "dims", "dtype", "this rank's part, with halo"), rows

    def _draw(
        self, index: int, field: str | None, isel: Mapping[str, int] | None, parts: bool, path: str | None
    ) -> Any:
        from scidata.data.pictures.grid_field import draw_grid

        return draw_grid(self.reader, index, field, isel, parts=parts, path=path)

    @property
    def _path(self) -> str:
        return str(getattr(self.reader.sources[0], "pinned_path", self.reader.paths[0]))

    # -- channels ------------------------------------------------------------------------------------------------

    @checked_keywords
    def channels(
        self,
        fields: Sequence[str] | str | None = None,
        *,
        dims: Sequence[str] | None = None,
        steps: Steps | None = None,
    ) -> Channels:
        """Lay out the fields of a sample as channels of one tensor: see :meth:`Sample.channels`; reads no values.

        Parameters
        ----------
        fields : Sequence[str] or str or None, optional
            Fields to stack, in this order; default all.
        dims : Sequence[str] or None, optional
            Dims that all of them end with, and keep; default as of :meth:`Sample.channels`.
        steps : int or Sequence[int] or Mapping or None, optional
            Steps to take, as of :meth:`Sample.stack`; default all.

        Examples
        --------
        >>> len(ds.channels().names)  # two fields of three levels
        6
        """
        every = {name: self.dims(name) for name in self.fields}
        shapes = {name: self.global_shape(name) for name in every}
        return channels_of(every, shapes, fields, dims, self.labels_of, steps, self.steps_of)

    def labels_of(self, name: str, dim: str) -> Sequence[object] | None:
        """Return the labels of a field's rows along one of its dims: the offsets of its steps, or the coordinate."""
        reader = self.reader
        if dim == reader.sample_dim:
            return reader.field_steps.of(name) if name in self.fields else None
        return plain_labels(reader.series, reader.partition, dim) if dim in reader.partition.sizes else None

    # -- coordinates ---------------------------------------------------------------------------------------------

    def space_coords(self, device: torch.device) -> dict[str, Coordinate]:
        """Return the coordinates that all samples have, by dim: see :attr:`Sample.coords`."""
        reader, found = self.reader, dict[str, Coordinate]()
        for dim in dict.fromkeys(dim for name in self.fields for dim in reader.dims(name)):
            is_own = dim in self._own_dims
            values = None if is_own else reader.labels.local(dim, reader.cut.segments(dim, self._coordinate))
            if values is None:
                continue
            if values.dtype.kind not in "iuf":
                found[dim] = values
                continue
            tensor = torch.from_numpy(np.array(values, values.dtype.newbyteorder("="))).to(device)
            is_split = dim in reader.cut.axis_of_dim
            found[dim] = self._sharded(tensor, (dim,), (reader.cut.sizes[dim],)) if is_split else tensor
        return found

    @property
    def _own_dims(self) -> set[str | None]:
        """Dims whose labels differ between samples."""
        return {self.reader.sample_dim}

    def own_coords(self, index: int, step: int | None = None) -> dict[str, Array]:
        """Return the coordinates of one sample, or of one of its steps, by dim."""
        return self.reader.sample_labels(index, step)

    def attributes(self, name: str) -> dict[str, object]:
        """Return the source's attributes of a field or a coordinate."""
        source = self.reader.sources[0]
        return dict(source.arrays[name].attributes) if name in source.arrays else {}

    # -- reading -------------------------------------------------------------------------------------------------

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of each field, halo included; equal for all samples.

        Without :attr:`static_fields`, which :meth:`assemble` adds, unless there is a ``local_transform``, which may
        change them.
        """
        return {name: spec for name, spec in self._specs.items() if name not in self._static.specs}

    @cached_property
    def _specs(self) -> dict[str, BufferSpec]:  # asked for with every sample
        return self.reader.buffer_specs(self._coordinate)

    @cached_property
    def _static(self) -> StaticFields:
        names = self.static_fields if self.local_transform is None else ()
        return StaticFields({name: self._specs[name] for name in names}, self._read_static, self._cast)

    def _read_static(self, out: Mapping[str, Array]) -> ReadStats:
        stats = self.reader.read_into(0, out, self._coordinate, once=True)
        self._normalise_locally(out)
        return stats

    def read_into(self, index: int, out: Mapping[str, Array], *, epoch: int = 0) -> ReadStats:
        """Read this rank's part into buffers shaped as :meth:`buffer_specs`. Thread-safe, no collectives."""
        stats = self.reader.read_into(index, out, self._coordinate, epoch=epoch)
        if self._static.specs and get_worker_info() is None:  # its parent adds static fields
            stats += self._static.read()
        if self._local_scales:
            self._normalise_locally(out)
        if self.local_transform is not None:
            apply_locally(self.local_transform, out)
        return stats

    def _local_rows(self, name: str) -> dict[str, IntArray]:
        return {dim: self.reader.cut.local_rows(dim, self._coordinate) for dim in self.reader.cut.axis_of_dim}

    def read_local(self, index: int) -> dict[str, torch.Tensor]:
        """Read this rank's part, halo included, as plain tensors; samples share the tensors of static fields.

        Parameters
        ----------
        index : int
            The sample.

        Examples
        --------
        >>> {name: tuple(part.shape) for name, part in ds.read_local(0).items()}
        {'u': (3, 7, 8), 't': (3, 7, 8)}
        """
        buffers = {
            name: allocate(f"{self.reader.paths[0]}: field {name!r}", spec.shape, spec.dtype)
            for name, spec in self.buffer_specs().items()
        }
        self.read_into(index, buffers)
        found = {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}
        found |= self._static.on(torch.device("cpu"))
        return {name: found[name] for name in self.fields}

    def _of_worker(self, local: Any, index: int) -> Any:
        if get_worker_info() is None:  # a copy that was pickled for another purpose
            return local
        return LocalFields.of(local, index, is_whole=self.reader.cut.num_parts == 1)

    def assemble(
        self,
        local: Mapping[str, torch.Tensor],
        *,
        index: int | list[int] | None = None,
        batched: bool | None = None,
    ) -> Sample[TensorT]:
        """Wrap local parts, halo included, as a sample of ShardTensors; a sample is returned unchanged.

        Parameters
        ----------
        local : Mapping[str, Tensor]
            A tensor for each field, shaped as :meth:`read_local` gives it; with a batch dim 0 before it if ``batched``.
            Static fields are added where all others are there, on their device: views of
            one tensor, expanded over a batch.
        batched : bool or None, optional
            Default: found from the number of dims.
        index : int or list[int] or None, optional
            The sample, or the samples of a batch.

        Raises
        ------
        ConfigError
            Called in a worker process, or with tensors that do not have this rank's shapes.

        Examples
        --------
        >>> ds.assemble(ds.read_local(2), index=2).index
        2
        """
        if isinstance(local, Sample):
            return local
        self._check_attached()
        if isinstance(local, LocalFields):
            index = local.index if index is None else index
            self._note(*(index if isinstance(index, list) else [index]))
            local = local.fields()
        tensors: dict[str, torch.Tensor] = {}
        lead: tuple[int, ...] = ()
        for name, tensor in local.items():
            place = self._places.get(name)
            if place is None:
                raise UnknownNameError(f"assemble: no field {name!r}{near_matches(name, self._specs)}")
            num_lead = tensor.ndim - len(place.expected)
            has_batch = num_lead == 1 if batched is None else batched
            is_whole = isinstance(tensor, ShardTensor)  # stacked by torch's collate function
            expected = place.global_shape if is_whole else place.expected
            if num_lead != has_batch or tensor.shape[num_lead:] != expected:
                raise ConfigError(
                    f"assemble: field {name!r} has shape {tuple(tensor.shape)}, but this rank's part is "
                    f"{place.expected}{' after the batch dim' if has_batch else ''}"
                )
            lead = tuple(tensor.shape[:num_lead])
            tensors[name] = (
                tensor if is_whole else self._sharded(self._cast(tensor), place.dims, lead + place.global_shape)
            )
        lacking = [name for name in self._static.specs if name not in local]
        if lacking and local and all(name in local for name in self._specs if name not in lacking):  # not of a part
            found = self._static.on(next(iter(local.values())).device)
            for name in lacking:
                place = self._places[name]
                tensor = found[name].expand(*lead, *place.expected)
                tensors[name] = self._sharded(tensor, place.dims, lead + place.global_shape)
        tensors = {name: tensors[name] for name in self.fields if name in tensors}
        batch = ("batch",) * len(lead)
        dims = {name: batch + self._places[name].dims for name in tensors}
        return Sample(tensors, dims=dims, index=index, origin=self)  # type: ignore[arg-type]  # of the mesh's kind

    @cached_property
    def _places(self) -> dict[str, _Place]:  # asked for with every field of every sample
        return {
            name: _Place(spec.shape, self.reader.dims(name), self.reader.global_shape(name))
            for name, spec in self._specs.items()
        }

    def _sharded(self, tensor: torch.Tensor, dims: tuple[str, ...], global_shape: tuple[int, ...]) -> torch.Tensor:
        """Make a ShardTensor of this rank's part of values with these dims, after a batch dim if there is one."""
        if self._domain is None:
            return tensor
        lead = tensor.ndim - len(dims)
        cut = self._cuts.get((dims, lead))
        if cut is None:
            cut = self._cuts[dims, lead] = self._cut(dims, lead)
        placements, sizes, halo = cut
        return ShardTensor.from_padded(tensor, ShardSpec.on(self._domain, placements, global_shape, sizes), halo)

    @cached_property
    def _cuts(self) -> dict[tuple[tuple[str, ...], int], _Cut]:  # asked for with every field of every sample
        return {}

    def _cut(self, dims: tuple[str, ...], lead: int) -> _Cut:
        partition = self.reader.cut
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
        halo = {
            i + lead: HaloDim(lo=partition.halo[d][0], hi=partition.halo[d][1], periodic=d in partition.periodic)
            for i, d in enumerate(dims)
            if d in partition.halo
        }
        return tuple(placements), tuple(sizes), halo

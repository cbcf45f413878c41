"""``IrregularDataset``: samples of a partitioned store, or raw clouds, of which each rank reads its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, get_worker_info

from scidata.core.checks import as_index
from scidata.core.types import Empty, IntArray
from scidata.data.irregular_sample import IrregularSample
from scidata.data.local_transform import LocalTransform, apply_locally
from scidata.data.sample import Sample
from scidata.data.topology import Cells, Place, Topology, shard_rows
from scidata.device_mesh import domain_mesh
from scidata.errors import ConfigError
from scidata.plan import ReadPlan
from scidata.shard.torch_internals import version_of
from scidata.store.format.manifest import Statistics
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.part import Identity, LocalPart
from scidata.store.reading.reader import StoreReader

__all__ = ["IrregularDataset"]


class IrregularDataset(Dataset[Sample]):
    """Samples of meshes, point clouds or graphs, of which this rank reads its part. Made by ``open_dataset``.

    Indexing never communicates, although all ranks of a domain are meant to index alike. Sizes differ from sample to
    sample. Pickles as path and options and reopens its files lazily. In a worker process, which has no process group,
    a sample is a :class:`~scidata.store.reading.part.LocalPart`, that :meth:`assemble` wraps in the parent.

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
        reader: StoreReader | PointsReader,
        mesh: DeviceMesh | None,
        *,
        dp_axis: str | None,
        domain_axis: str | None,
        dtype: torch.dtype | None,
        transform: Callable[[Any], Any] | None,
        local_transform: LocalTransform | None = None,
    ) -> None:
        self.reader = reader
        self.mesh = mesh
        self.dp_axis = dp_axis
        self.transform = transform
        self.local_transform = local_transform
        self._dtype = dtype
        self._detached = False
        # shared with worker processes that live through several epochs, where epochs matter
        self._epoch = torch.zeros((), dtype=torch.int64)
        if reader.subsample is not None:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._tensors: WeakKeyDictionary[Identity, _Tensors] = WeakKeyDictionary()
        sharded = mesh is not None and domain_axis is not None
        self._rank = mesh.get_local_rank(domain_axis) if sharded else 0  # type: ignore[union-attr]
        self._domain: DeviceMesh | None = domain_mesh(mesh, (domain_axis,)) if sharded else None  # type: ignore[arg-type]

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """``"mesh"``, ``"points"`` or ``"graph"``."""
        return self.reader.kind

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.reader.fields

    @property
    def entities(self) -> tuple[str, ...]:
        """The entities that samples have."""
        return self.reader.entities

    @property
    def rank(self) -> int:
        """Place of this rank in its domain: the ``rank`` of :meth:`plan`."""
        return self._rank

    @property
    def fingerprint(self) -> str:
        """Digest of what decides the samples: their values and the choice of fields."""
        return self.reader.fingerprint()

    def counts(self, entity: str | None = None) -> npt.NDArray[np.int64]:
        """Return how many rows of an entity each sample has, ``(len(self),)``; default of the one that is cut first.

        For ``DistributedSampler(sizes=...)``. Reads metadata only. All rows, also where an epoch draws some of them.
        """
        return self.reader.counts(self.reader.entity if entity is None else entity)

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample."""
        return self.reader.dims(name)

    def place(self, name: str) -> Place:
        """Return the entity that a field lives on, and which of its dims that is."""
        return Place(self.reader.info(name).entity, self.reader.entity_dim(name))

    def global_shape(self, name: str, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample, or of what is drawn of it; samples differ in it."""
        return self.reader.global_shape(name, index, epoch=self.epoch)

    def statistics(self, name: str) -> Statistics | None:
        """Return mean, deviation and range of a field over all samples, for normalising; None where there are none.

        One figure for each component that samples have of it: of each index of the dims after the entity's.
        """
        return self.reader.statistics(name)

    @property
    def epoch(self) -> int:
        """The epoch whose rows are drawn, with ``subsample``."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw anew, with ``subsample``: call it before each epoch, with the same number on every rank.

        ``DataLoader.set_epoch`` does. It reaches what is read from then on, also in worker processes that are kept;
        an iterator of :class:`scidata.DataLoader` stays in the epoch in which it began.

        Raises
        ------
        ConfigError
            A negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, but is {epoch}")
        self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        return self.reader.num_samples

    def __repr__(self) -> str:
        fields = ", ".join(self.fields)
        return f"IrregularDataset({self.reader.path!r}, {self.kind}, {len(self)} samples, {fields})"

    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan what a rank of the domain reads of a sample; any rank, default this one. Reads the rank's edges."""
        return self.reader.plan(index, self.rank if rank is None else rank, epoch=self.epoch)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_local(self, index: int, *, epoch: int | None = None, empty: Empty = np.empty) -> LocalPart:
        """Read this rank's part, of what an epoch draws (default: the one set). Thread-safe, no collectives.

        ``empty`` makes the arrays that are read into.
        """
        part = self.reader.read(index, self._rank, epoch=self.epoch if epoch is None else epoch, empty=empty)
        apply_locally(self.local_transform, part.fields)
        return part

    def epoch_reader(self, epoch: int | None = None, *, empty: Empty = np.empty) -> Callable[[int], LocalPart]:
        """Return :meth:`read_local` of an epoch, default the present one, whatever is set later: for reading ahead."""
        return partial(self.read_local, epoch=self.epoch if epoch is None else epoch, empty=empty)

    def __getitem__(self, index: int) -> IrregularSample:
        index = as_index(index)
        local = self.read_local(index)
        if self._detached or (self.mesh is not None and get_worker_info() is not None):
            return local  # type: ignore[return-value]  # a worker has no process group; assemble() wraps in the parent
        sample = self.assemble(local, index=index % len(self))
        return self.transform(sample) if self.transform is not None else sample

    def assemble(self, local: LocalPart, *, index: int | None = None) -> IrregularSample:
        """Wrap what was read as a sample of ShardTensors. No communication.

        Raises
        ------
        ConfigError
            Called in a worker process, or with another rank's part.
        """
        if self._detached:
            raise ConfigError("assemble() needs the mesh, which a worker process does not have; call it in the parent")
        rows = local.index_maps[local.part.entity]
        if rows.part != self._rank or rows.num_parts != self.reader.num_parts:
            raise ConfigError(
                f"assemble: part {rows.part} of {rows.num_parts}, but this rank holds part {self._rank} of "
                f"{self.reader.num_parts}"
            )
        fields, places, dims, held = {}, {}, {}, {}
        for name, values in local.fields.items():
            place = places[name] = self.place(name)
            dims[name] = self.reader.dims(name)
            tensor = self._tensor(values)
            entity_rows = local.index_maps[place.entity]
            if self.reader.ghosts == "disk":
                held[name] = tensor
                tensor = tensor.narrow(place.dim, 0, entity_rows.num_owned)
            fields[name] = shard_rows(tensor, entity_rows, place.dim, self._domain)
        return IrregularSample(
            fields,
            dims=dims,
            index=local.index if index is None else index,
            places=places,
            topology=self._topology(local),
            held=held,
            ghosts=self.reader.ghosts,
        )

    def _tensor(self, values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
        tensor = _as_tensor(values)
        narrow = self._dtype is torch.bfloat16 and tensor.is_floating_point()
        return tensor.to(torch.bfloat16) if narrow else tensor

    def _topology(self, local: LocalPart) -> Topology:
        def indices(ids: npt.NDArray[Any] | None) -> torch.Tensor | None:
            return None if ids is None else _as_tensor(ids)

        tensors = self._tensors.get(local.topology) if local.topology is not None else None
        if tensors is None:
            cells = None
            if local.cells is not None:
                cells = Cells(
                    offsets=_as_tensor(local.cells.offsets),
                    connectivity=_as_tensor(local.cells.connectivity),
                    types=_as_tensor(local.cells.types),
                )
            tensors = _Tensors(edges=indices(local.edge_index), far=indices(local.far_edge_index), cells=cells)
            if local.topology is not None:
                self._tensors[local.topology] = tensors
        if local.topology is not None and tensors.written():
            raise ConfigError(
                f"{self.reader.path}: the edges or cells of a sample were written to, which all samples of its "
                "topology share (read them with cache_bytes=0 to have them alone); clone() them before writing"
            )
        return Topology(
            entity=local.part.entity,
            index_maps=local.index_maps,
            edge_index=tensors.edges,
            far_edge_index=tensors.far,
            cells=tensors.cells,
            device_mesh=self._domain,
            read_ids=partial(self._read_ids, local.index, local.rows),
            num_hops=self.reader.num_hops,
            period=self.reader.period,
        )

    def _read_ids(self, index: int, rows: Mapping[str, IntArray] | None, entity: str) -> IntArray:
        return self.reader.original_id(index, self._rank, entity, rows=None if rows is None else rows[entity])

    def close(self) -> None:
        """End the reading threads and close the files; the next read starts them again."""
        self.reader.close()

    def __getstate__(self) -> dict[str, Any]:
        gone = {"mesh": None, "_domain": None, "_detached": self._detached or self.mesh is not None, "_tensors": None}
        return self.__dict__ | gone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tensors = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tensors:
    """Edges and cells that the samples of one topology share, as they were when they were read."""

    edges: torch.Tensor | None
    far: torch.Tensor | None
    cells: Cells | None

    def written(self) -> bool:
        """Say whether somebody wrote to them."""
        cells = () if self.cells is None else (self.cells.offsets, self.cells.connectivity, self.cells.types)
        every = [x for x in (self.edges, self.far, *cells) if x is not None]
        return any(version_of(x) > 0 for x in every)


def _as_tensor(values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """Return what was read as a tensor; the loader has copied it to a device already, maybe."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))

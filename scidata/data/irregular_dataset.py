"""``IrregularDataset``: samples of a partitioned store, or raw clouds, of which each rank reads its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from scidata.core.checks import is_int, refuse
from scidata.core.types import Array, Empty, IntArray
from scidata.data.channels import TensorT
from scidata.data.domain_dataset import DomainDataset
from scidata.data.hetero_sample import HeteroSample
from scidata.data.irregular_sample import IrregularSample
from scidata.data.local_fields import apply_locally
from scidata.data.measured import check_seconds, costs_from_json, costs_to_json, gathered, name_ranks_alone, shares
from scidata.data.topology import Place, Topology, as_tensor, edges_and_cells, shard_rows
from scidata.errors import ConfigError
from scidata.meshes.hetero import JOINT, rows_named
from scidata.plan.totals import ReadPlan
from scidata.shard.torch_internals import flatten_mesh, version_of
from scidata.sources.access.mounts import is_local
from scidata.store.format.manifest import StoredMoments
from scidata.store.reading.cuts import PartCosts
from scidata.store.reading.part import Identity, LocalPart, SamplePart

if TYPE_CHECKING:
    from scidata.store.raw_points.reader import PointsReader
    from scidata.store.reading.reader import StoreReader

#: Reads samples whose rows are nodes, points or cells, of any number each; ``PartReader`` is their common base.
IrregularReader: TypeAlias = "StoreReader | PointsReader"


class IrregularDataset(DomainDataset[IrregularReader, IrregularSample[TensorT]]):
    """Samples of meshes, point clouds or graphs, of which this rank reads its part. Made by ``open_dataset``.

    Sizes differ from sample to sample. In a worker process, which has no process group, a sample is a
    :class:`~scidata.store.reading.part.LocalPart`, that :meth:`assemble` wraps in the parent. Attributes and
    methods of all kinds of data are those of :class:`~scidata.data.domain_dataset.DomainDataset`.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> ids = np.arange(6)
    >>> with h5py.File("ring.h5", "w") as file:  # six nodes in a ring, edges both ways
    ...     file["pos"] = np.stack([np.cos(ids * np.pi / 3), np.sin(ids * np.pi / 3)], axis=1)
    ...     file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
    ...     file["speed"] = ids.astype("f4")
    >>> _ = scidata.partition("ring.h5", "ring.store", order="rows")
    >>> ds = scidata.open_dataset("ring.store")
    >>> measured = scidata.open_dataset("ring.store", weights="measured")
    >>> type(ds).__name__, ds.fields, ds.entities, ds.counts("node").tolist()
    ('IrregularDataset', ('pos', 'speed'), ('edge', 'node'), [6])
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unscaled = "pos", self.reader.options.time
        if self._domain is not None and self._domain.ndim > 1:  # rows are sharded along one axis over all its ranks
            self._domain = flatten_mesh(self._domain)
        # shared with worker processes that outlive an epoch, if rows are drawn by epoch
        self._epoch = torch.zeros((), dtype=torch.int64)
        if self.reader.subsample is not None:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._tensors: WeakKeyDictionary[Identity, dict[str, Any]] = WeakKeyDictionary()
        self._num_cuts, self._seconds = 0, defaultdict[int, float](float)  # of this rank, by stored sample
        name_ranks_alone()

    # -- entities, fields and epochs -----------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """``"mesh"``, ``"points"``, ``"graph"`` or ``"hetero"``."""
        return self.reader.kind

    @property
    def entities(self) -> tuple[str, ...]:
        """The entities that samples have."""
        return self.reader.entities

    def counts(self, entity: str | None = None) -> IntArray:
        """Return how many rows of an entity each sample has, ``(len(self),)``; default: the entity cut first.

        For ``DistributedSampler(sizes=...)``. Reads metadata only. All rows, also if an epoch draws some of them.

        Parameters
        ----------
        entity : str or None, optional
            Such as ``"node"`` or ``"cell"``.

        Examples
        --------
        >>> ds.counts("edge").tolist()
        [12]
        """
        return self.reader.counts(self.reader.entity if entity is None else entity)

    def place(self, name: str) -> Place:
        """Return a field's entity and the field's dim along it.

        Parameters
        ----------
        name : str
            A field.

        Examples
        --------
        >>> ds.place("speed").entity
        'node'
        """
        return Place(self.reader.info(name).entity, self.reader.entity_dim(name))

    def attributes(self, name: str) -> dict[str, object]:
        """Return the source's attributes of a field, such as its units."""
        if name not in self.fields:
            return {}
        info = self.reader.info(name)
        return {**info.attributes, **({} if info.units is None else {"units": info.units})}

    def global_shape(self, name: str, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample, or of the rows drawn from it. It differs between samples.

        Parameters
        ----------
        name : str
            A field.
        index : int, default 0
            The sample.

        Examples
        --------
        >>> ds.global_shape("pos")
        (6, 2)
        """
        return self.reader.global_shape(name, index, epoch=self.epoch)

    def statistics(self, name: str) -> StoredMoments | None:
        """Return mean, deviation and range of a field over all samples, for normalising; None if the store has none.

        One figure for each component that samples have of it: of each index of the dims after the entity's.

        Parameters
        ----------
        name : str
            A field.

        Examples
        --------
        >>> ds.statistics("speed").mean
        2.5
        """
        return self.reader.statistics(name)

    @property
    def epoch(self) -> int:
        """The epoch that determines the drawn rows, with ``subsample``."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw new rows, with ``subsample``: call it before each epoch, with the same number on every rank.

        ``DataLoader.set_epoch`` does. It holds for later reads, also in worker processes that are kept;
        an iterator of :class:`scidata.DataLoader` stays in the epoch in which it began.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank.

        Raises
        ------
        ConfigError
            A negative epoch.

        Examples
        --------
        >>> ds.set_epoch(1)
        """
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, but is {epoch}")
        self._epoch.fill_(int(epoch))

    @property
    def costs(self) -> dict[str, Any] | None:
        """The measured costs by which samples are cut, as JSON values; None without ``weights="measured"``.

        They hold for any number of ranks. ``DataLoader.state_dict`` has them, too.
        """
        reader: Any = self.reader
        return costs_to_json(reader.costs) if getattr(reader, "is_measured", False) else None

    def load_costs(self, costs: Mapping[str, Any]) -> None:
        """Cut samples by the :attr:`costs` of an earlier run, the same on every rank.

        Parameters
        ----------
        costs : Mapping[str, Any]
            As :attr:`costs` had them.

        Raises
        ------
        ConfigError
            The data set was opened without ``weights="measured"``, or they are of another store.

        Examples
        --------
        >>> measured.load_costs(measured.costs)
        """
        reader = self._measured_reader("load_costs")
        counts = reader.store.manifest.samples.column("counts", reader.entity).tolist()
        self.reader = reader.recut(costs_from_json(costs, counts))

    def measure(self, sample: IrregularSample[Any] | int, seconds: float) -> None:
        """Record the time that this rank's part of a sample took, for :meth:`rebalance`. No communication.

        Parameters
        ----------
        sample : IrregularSample or int
            The sample, or a batch: then its samples share the seconds by their rows here.
        seconds : float
            Of this rank's own work, without waiting for other ranks: those of a whole step are the same on all.
            Those of a sample that was read before the last :meth:`rebalance` do not count.

        Examples
        --------
        >>> measured.measure(measured[0], 0.25)
        """
        reader, bounds = self._measured_reader("measure"), None
        index = sample.index if isinstance(sample, IrregularSample) else sample
        if isinstance(sample, IrregularSample):
            bounds = None if reader.subsample is not None else sample.index_map(reader.entity).bounds
        elif not is_int(sample):
            raise ConfigError(f"measure: {type(sample).__name__} is neither a sample of this data set nor its number")
        for stored, each in shares(reader, self._rank, index, check_seconds(seconds), bounds).items():
            self._seconds[stored] += each

    def rebalance(self) -> None:
        """Cut each measured sample by the times of its parts, from the next epoch on. Collective over the mesh.

        Iterations that have begun stay with their cut. Samples of which a part was not measured keep theirs. Where
        ranks of several domains measured a part, the mean of each one's sum counts.

        Raises
        ------
        ConfigError
            The data set was opened without ``weights="measured"``, or ranks come from different places.

        Examples
        --------
        >>> measured.rebalance()
        >>> measured.costs["samples"]
        {'0': {'bounds': [0, 6], 'seconds': [0.25]}}
        """
        reader = self._measured_reader("rebalance")
        self._num_cuts += 1
        when = f"rebalance() no. {self._num_cuts}, in epoch {int(self._epoch)}"
        found = gathered(self._seconds, self.mesh, self._rank, reader.num_parts, when)
        self._seconds.clear()
        made = {n: PartCosts(tuple(reader.measured_bounds(n).tolist()), tuple(each)) for n, each in found.items()}
        self.reader = reader.recut(reader.costs | made)

    def _measured_reader(self, what: str) -> StoreReader:
        reader: Any = self.reader
        if not getattr(reader, "is_measured", False):
            raise ConfigError(
                f"{what}: open the store with weights='measured'; other cuts do not follow measured costs"
            )
        return reader

    @cached_property
    def reads_alone(self) -> bool:
        """Whether the store, or the first of several files, lies on a disk of this machine."""
        return is_local(self.reader.path)

    def __repr__(self) -> str:
        fields = ", ".join(self.fields)
        return f"IrregularDataset({self.reader.path!r}, {self.kind}, {len(self)} samples, {fields})"

    def _described(self) -> tuple[str, Mapping[str, object], Sequence[str], Sequence[Sequence[object]]]:
        reader = self.reader
        counts = {entity: self.counts(entity) for entity in self.entities}
        rows_of = {rows_named(e): _range_text(n) for e, n in counts.items()}
        hops = f"{reader.num_hops} hop{'s' * (reader.num_hops != 1)}, by {reader.ghosts}" if reader.num_hops else None
        facts = {"path": reader.path, "kind": self.kind, "parts": reader.num_parts, "ghosts": hops} | rows_of
        rows = [
            (name, self.place(name).entity, ", ".join(self.dims(name)), reader.info(name).dtype) for name in self.fields
        ]
        return "IrregularDataset", facts, ("field", "entity", "dims", "stored as"), rows

    def _draw(
        self, index: int, field: str | None, isel: Mapping[str, int] | None, parts: bool, path: str | None
    ) -> Any:
        from scidata.data.pictures.mesh_field import draw_mesh

        refuse({"isel": bool(isel)}, "chooses the plane of a grid that is drawn")
        return draw_mesh(self.reader, index, field, parts=parts, path=path)

    def _plan(self, index: int, rank: int) -> ReadPlan:
        return self.reader.plan(index, rank, epoch=self.epoch)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_local(self, index: int, *, epoch: int | None = None, empty: Empty = np.empty) -> LocalPart:
        """Read this rank's part of the rows of an epoch, default the present one. Thread-safe, no collectives.

        ``empty`` makes the arrays that are read into.

        Parameters
        ----------
        index : int
            The sample.
        epoch : int or None, optional
            The epoch whose rows are drawn, with ``subsample``; default the one that was set.
        empty : Callable[[tuple, dtype], ndarray], default np.empty
            Makes the arrays that are read into, from shape and dtype.

        Examples
        --------
        >>> sample = ds.assemble(ds.read_local(0), index=0)
        """
        return self._read(self.reader, self.epoch if epoch is None else epoch, empty, index)

    def _read(self, reader: IrregularReader, epoch: int, empty: Empty, index: int) -> LocalPart:
        part = reader.read(index, self._rank, epoch=epoch, empty=empty)
        self._finish_locally(part.fields)
        return part

    def _finish_locally(self, fields: Mapping[str, Array]) -> None:
        """Normalise the fields read and apply ``local_transform``, in place."""
        self._normalise_locally(fields)
        apply_locally(self.local_transform, fields)

    def empty_local(self) -> LocalPart:
        """Return this rank's part of a cloud without points, for a missing sample: its index is -1."""
        return self.reader.empty_part(self._rank)

    def epoch_reader(self, epoch: int | None = None, *, empty: Empty = np.empty) -> Callable[[int], LocalPart]:
        """Return :meth:`read_local` bound to an epoch, default the present one, for reading ahead."""
        return partial(self._read, self.reader, self.epoch if epoch is None else epoch, empty)

    def assemble(self, local: LocalPart, *, index: int | None = None) -> IrregularSample[TensorT]:
        """Wrap a part as a sample of ShardTensors; a sample is returned unchanged. No communication.

        Parameters
        ----------
        local : LocalPart
            The part, as :meth:`read_local` gives it.
        index : int or None, optional
            The sample, or the samples of a batch.

        Raises
        ------
        ConfigError
            Called in a worker process, or with another rank's part.

        Examples
        --------
        >>> ds.assemble(ds.read_local(0), index=0)["speed"].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        """
        if isinstance(local, IrregularSample):
            return local
        if not isinstance(local, LocalPart):
            raise ConfigError(
                f"assemble: a {type(local).__name__} is no part of a sample; torch's loader leaves that as it is with "
                "collate_fn=scidata.collate"
            )
        self._check_attached()
        is_sample = local.index >= 0
        if index is None and is_sample:  # of a worker of torch's loader, say
            self._note(local.index)
        rows = local.index_maps[local.part.entity]
        if rows.part != self._rank or rows.num_parts != self.reader.num_parts:
            raise ConfigError(
                f"assemble: part {rows.part} of {rows.num_parts}, but this rank holds part {self._rank} of "
                f"{self.reader.num_parts}"
            )
        fields: dict[str, TensorT] = {}
        places, dims, held = {}, {}, {}
        for name, values in local.fields.items():
            place = places[name] = self.place(name)
            dims[name] = self.reader.dims(name)
            tensor = self._cast(as_tensor(values))
            entity_rows = local.index_maps[place.entity]
            if self.reader.ghosts == "disk":
                held[name] = tensor
                tensor = tensor.narrow(place.dim, 0, entity_rows.num_owned)
            fields[name] = shard_rows(tensor, entity_rows, place.dim, self._domain)  # type: ignore[assignment]
        device = next((x.device for x in fields.values()), torch.device("cpu"))
        made = HeteroSample if local.part.entity == JOINT else IrregularSample
        return made(
            fields,
            dims=dims,
            index=local.index if index is None else index,
            places=places,
            topology=self._topology(local),
            held=held,
            ghosts=self.reader.ghosts,
            graph_values={
                name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
                for name, value in (
                    {**self.reader.graph_values(local.index), **local.values} if is_sample else {}
                ).items()
            },
            origin=self if is_sample else None,
        )

    def _topology(self, local: LocalPart) -> Topology:
        held = self._tensors.get(local.identity) if local.identity is not None else None
        if held is None:
            held = edges_and_cells(local)
            if local.identity is not None:
                self._tensors[local.identity] = held
        made = Topology(
            entity=local.part.entity,
            index_maps=local.index_maps,
            **held,
            device_mesh=self._domain,
            read_ids=partial(self._read_ids, local.index, local.rows, local.part),
            layers=self.reader.layers or (("edge",),) * self.reader.num_hops,
            period=self.reader.period,
        )
        if local.identity is not None and max(map(version_of, made.tensors()), default=0):
            raise ConfigError(
                f"{self.reader.path}: the edges or cells of a sample were written to, which all samples of its "
                "topology share (read them with cache_bytes=0 to have them alone); clone() them before writing"
            )
        return made

    def _read_ids(self, index: int, rows: Mapping[str, IntArray] | None, cut: SamplePart, entity: str) -> IntArray:
        own = None if rows is None else rows[entity]
        if own is None and self.costs is not None:  # the data set may have been cut anew since
            own = np.arange(*cut.owned(entity, self._rank))
        return self.reader.original_id(index, self._rank, entity, rows=own)

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_tensors": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tensors = WeakKeyDictionary()


def _range_text(counts: IntArray) -> str:
    low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    return f"{low}" if low == high else f"{low} to {high} a sample"

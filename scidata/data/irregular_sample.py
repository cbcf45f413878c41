"""A sample of a mesh, a point cloud or a graph of one or more node sets: fields, owners of rows, edges and cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.data.channels import TensorT, take
from scidata.data.sample import Origin, Sample
from scidata.data.to_pyg import Columns, EdgeColumns, entity_named, pyg_of
from scidata.data.topology import Cells, EdgeType, Place, Topology, shard_rows
from scidata.errors import ConfigError, check_known
from scidata.meshes.hetero import rows_named
from scidata.shard import ShardTensor
from scidata.shard.graphs.ghosts import halo_exchange
from scidata.shard.graphs.local_graph import LocalGraph
from scidata.shard.graphs.parts import call_on_parts

if TYPE_CHECKING:
    from torch_geometric.data import Data


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, ShardTensor) else x


class IrregularSample(Sample[TensorT]):
    """Fields by name, sharded along their entity's dim, with edges and cells in local numbering.

    A graph between several node sets is a :class:`HeteroSample`; all others have one set.

    Local ids count owned rows first, then ghosts. In a batch, a disjoint union, ``sample["batch"]`` says which sample
    a row is of, and each rank's rows of the first sample come before its rows of the second.

    Parameters
    ----------
    places : Mapping[str, Place]
        Entity and dim of each field.
    held : Mapping[str, Tensor] or None, optional
        Fields whose ghosts were read from disk: local tensors, owned rows, then ghosts.
    ghosts : str, default "exchange"
        ``"disk"`` or ``"exchange"``: where :meth:`with_ghosts` has ghosts from.
    graph_values : Mapping[str, object] or None, optional
        Of the whole sample: tensors, the same on every rank, or numbers and text.
    fields : Mapping[str, Tensor]
        Tensors by name, of one layout for each entity.
    dims : Mapping[str, tuple[str, ...]]
        Names of each field's dims.
    index : int or list[int] or None
        The sample, or the samples of a batch.
    topology : Topology
        Edges, cells and index maps.
    origin : Origin or None, optional
        The data set, which knows its files.

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

    On each of two ranks, each of which owns three nodes and has two ghosts:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> sample = scidata.open_dataset("ring.store", mesh, halo=1)[0]
    >>> sample.entities, sample.num_nodes, sample.index_map("node").num_owned, sample.index_map("node").num_ghost
    (('node', 'edge'), 6, 3, 2)
    >>> tuple(sample["speed"].shape), tuple(sample.with_ghosts("speed").shape)  # global; owned rows, then ghosts
    ((6,), (5,))
    >>> source, target = sample.edge_index  # local numbers: sources owned or ghosts, targets owned
    >>> sums = torch.zeros(3).index_add(0, target, sample.with_ghosts("speed")[source])
    >>> torch.distributed.all_reduce(sums)
    >>> sums.sum()  # each node has two edges
    tensor(30.)
    """

    def __init__(
        self,
        fields: Mapping[str, TensorT],
        *,
        dims: Mapping[str, tuple[str, ...]],
        index: int | list[int] | None,
        places: Mapping[str, Place],
        topology: Topology,
        held: Mapping[str, Tensor] | None = None,
        ghosts: str = "exchange",
        graph_values: Mapping[str, object] | None = None,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(fields, dims=dims, index=index, origin=origin)
        self.ghosts = ghosts
        self._places, self._topology, self._held = dict(places), topology, dict(held or {})
        self._graph_values = dict(graph_values or {})

    # -- entities, edges and fields ------------------------------------------------------------------------------

    @property
    def entities(self) -> tuple[str, ...]:
        """The entities: ``node`` or ``point``, ``cell``, ``edge``."""
        return tuple(self._topology.index_maps)

    @property
    def entity(self) -> str:
        """The entity that ids of edges and cells refer to: ``"node"``, ``"point"`` for clouds, or ``"cell"``."""
        return self._topology.entity

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The domain's axis; None if samples are plain tensors."""
        return self._topology.device_mesh

    @property
    def topology(self) -> Topology:
        """Edges, cells and index maps together."""
        return self._topology

    @property
    def period(self) -> tuple[float, ...] | None:
        """Width of the domain along each coordinate where it wraps, 0 where it does not; None if it does in none.

        Positions are as the source has them: of two rows across the border, the difference to the nearest image counts.
        """
        return self._topology.period

    @property
    def batch_entities(self) -> dict[str, str]:
        """Map each batch-index field to the entity whose rows it indexes."""
        if self.node_types == (self.entity,):
            return {"batch": self.entity}
        return {f"{name}/batch": name for name in self.node_types}

    @property
    def num_nodes(self) -> int:
        """Nodes, or points, of the whole sample."""
        return self._topology.index_maps[self._topology.entity].num_global

    @property
    def edge_index(self) -> Tensor | None:
        """``(2, num_local_edges)`` int64, local numbering: source, owned or a ghost; destination, owned.

        By destination. None if there are no edges. Over all ranks each directed edge is there once. Samples of one
        topology share it: clone it before writing to it.
        """
        relation = self._topology.relations.get("edge")
        return None if relation is None else relation.own

    @property
    def edge_index_with_ghosts(self) -> Tensor | None:
        """Like :attr:`edge_index`, followed by the edges that end at ghosts less than ``halo`` hops away.

        With these, ``halo`` layers give the right result on owned nodes without exchange; see :meth:`call_on_parts`.
        A field of edges has them as the rows of ``with_ghosts(name)``.
        """
        relation = self._topology.relations.get("edge")
        return None if relation is None else relation.every

    @property
    def node_types(self) -> tuple[str, ...]:
        """The node sets: only :attr:`entity`, except for graphs between several sets."""
        return self._topology.node_sets

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """The relations: source set, name, target set."""
        return tuple(relation.type for relation in self._topology.relations.values())

    @property
    def edge_index_dict(self) -> dict[EdgeType, Tensor]:
        """``(2, num_local_edges)`` int64 by relation, in local numbering: source, owned or a ghost; target, owned.

        By target. Over all ranks each edge is there once. Samples of one topology share them: clone before writing.
        """
        return {relation.type: relation.own for relation in self._topology.relations.values()}

    @property
    def edge_index_dict_with_ghosts(self) -> dict[EdgeType, Tensor]:
        """Like :attr:`edge_index_dict`, each followed by the edges that end at ghosts and are used by the layers of
        ``halo``.

        The rows of ``with_ghosts(name)`` of a field of edges; see :meth:`call_on_parts`.
        """
        return {relation.type: relation.every for relation in self._topology.relations.values()}

    @property
    def cells(self) -> Cells | None:
        """The cells that this rank owns, None if there are no cells; all their nodes are owned or ghosts."""
        return self._topology.cells

    @property
    def cells_with_ghosts(self) -> Cells | None:
        """Like :attr:`cells`, followed by other ranks' cells with an owned node (``halo="cells"``).

        The rows of ``with_ghosts(name)`` of a field of cells, ``index_map("cell")`` has their numbers; each owned node
        has all of its cells here. All their nodes are owned or ghosts.
        """
        own, far = self._topology.cells, self._topology.far_cells
        return own if own is None or far is None else Cells.joined([own, far])

    def shown_dims(self) -> Mapping[str, tuple[str, ...]]:
        """Return the dim names of each field, with the entity in place of the source's dim."""
        shown = {}
        for name, dims in self.dims.items():
            place = self._places.get(name)
            shown[name] = dims if place is None else (*dims[: place.dim], place.entity, *dims[place.dim + 1 :])
        return shown

    @property
    def places(self) -> Mapping[str, Place]:
        """Entity and dim of each field that has one."""
        return self._places

    @property
    def held(self) -> Mapping[str, Tensor]:
        """Local rows with ghosts of the unchanged fields that were read with ``ghosts="disk"``."""
        return self._held

    @property
    def graph_values(self) -> Mapping[str, Any]:
        """Graph-level values of the whole sample, such as targets: plain tensors, numbers and text.

        The same on every rank. A batch has tensors and numbers joined along dim 0, and lists of other values.
        """
        return self._graph_values

    def entity_of(self, name: str) -> str:
        """Return the entity whose rows a field has.

        Parameters
        ----------
        name : str
            A field.

        Examples
        --------
        >>> sample.entity_of("speed")
        'node'
        """
        return self._place(name).entity

    def index_map(self, entity: str) -> IndexMap:
        """Return bounds, owned range and ghosts of an entity.

        Parameters
        ----------
        entity : str
            Such as ``"node"`` or ``"cell"``.

        Raises
        ------
        UnknownNameError
            The sample has no such entity.

        Examples
        --------
        >>> sample.index_map("node").num_ghost
        2
        """
        maps = self._topology.index_maps
        check_known("the sample has no entity", [entity], maps)
        return maps[entity]

    def original_id(self, entity: str) -> TensorT:
        """Read each owned row's row in the source, a ShardTensor of ``(num_global,)`` int64, from the store.

        Parameters
        ----------
        entity : str
            Such as ``"node"`` or ``"cell"``.

        Examples
        --------
        >>> sample.original_id("node").full_tensor().tolist()
        [0, 1, 2, 3, 4, 5]
        """
        rows = self.index_map(entity)
        ids = torch.from_numpy(np.ascontiguousarray(self._topology.read_ids(entity), np.int64))
        # a ShardTensor if the fields are
        return shard_rows(ids, rows, 0, self._topology.device_mesh)  # type: ignore[return-value]

    def with_ghosts(self, name: str) -> Tensor:
        """Return this rank's owned rows of a field, then its ghosts' rows, along the entity's dim: a plain tensor.

        With ``ghosts="disk"`` they are as read; else they are fetched by one exchange, differentiably. Collective,
        then.

        Parameters
        ----------
        name : str
            A field.

        Raises
        ------
        ConfigError
            ``ghosts="disk"``, and the field is not as it was read.

        Examples
        --------
        >>> tuple(sample.with_ghosts("pos").shape)
        (5, 2)
        """
        x, place = self[name], self._place(name)
        if name in self._held:
            return self._held[name]
        rows, mesh = self.index_map(place.entity), self._topology.device_mesh
        if self.ghosts == "disk":
            raise ConfigError(
                f"field {name!r} was made after reading, so that its ghosts are not known; open the data set with "
                "ghosts='exchange', or compute it from with_ghosts() of what was read"
            )
        if mesh is None:
            return x
        return halo_exchange(_local(x).movedim(place.dim, 0), rows, mesh.get_group()).movedim(0, place.dim)

    def _place(self, name: str) -> Place:
        _ = self[name]  # raises UnknownNameError with similar names
        if name not in self._places:
            raise ConfigError(f"field {name!r} lives on no entity: {self.dims[name]} {tuple(self[name].shape)}")
        return self._places[name]

    def _facts(self) -> dict[str, object]:
        """Facts for notebooks: numbers of owned rows, ghosts and rows of all ranks by entity."""
        maps = self._topology.index_maps.items()
        return {
            rows_named(entity): f"{rows.num_owned} owned and {rows.num_ghost} ghosts here, {rows.num_global} in all"
            for entity, rows in maps
        }

    # -- changed -------------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a sample whose fields were passed through ``Tensor.to``; edges and cells move to the same device."""
        device = torch.empty(0).to(*args, **kwargs).device
        given = (*args, *kwargs.values())
        if not any(isinstance(a, str | torch.device | Tensor) or type(a) is int for a in given):  # none names a device
            device = next((x.device for x in self.values()), torch.device("cpu"))
        lazily = bool(kwargs.get("non_blocking", False))

        topology = replace(
            self._topology,
            relations={name: relation.to(device, lazily) for name, relation in self._topology.relations.items()},
            cells=None if self.cells is None else self.cells.to(device, lazily),
            far_cells=None if (far := self._topology.far_cells) is None else far.to(device, lazily),
        )
        held = {name: x.to(*args, **kwargs) for name, x in self._held.items()}
        fields = {
            # the owned rows of a held tensor stay a view of it
            name: self._wrap(held[name], name) if name in held else x.to(*args, **kwargs)
            for name, x in self.items()
        }
        values = {name: x.to(*args, **kwargs) if isinstance(x, Tensor) else x for name, x in self._graph_values.items()}
        return self._with(_fields=fields, _held=held, _topology=topology, _graph_values=values)

    def _wrap(self, held: Tensor, name: str) -> Tensor:
        place = self._places[name]
        rows = self.index_map(place.entity)
        return shard_rows(held.narrow(place.dim, 0, rows.num_owned), rows, place.dim, self._topology.device_mesh)

    def replace(self, fields: Mapping[str, Tensor], *, dims: Mapping[str, Sequence[str]] | None = None) -> Self:
        """Return a sample with these fields added or replaced.

        A new field lives where an old one of the same shape does, or one whose dim of rows it has; else on the entity
        that has as many rows as its dim 0.
        """
        made = super().replace(fields, dims=dims)
        places = dict(self._places)
        by_shape = {tuple(x.shape): self._places[name] for name, x in self.items() if name in self._places}
        rows = {(self.dims[name][p.dim], self[name].shape[p.dim]): p.entity for name, p in self._places.items()}
        for name, x in fields.items():
            shape = tuple(x.shape)
            if name in self._places and self[name].shape == x.shape:
                continue
            sized = [e for e in self.entities if shape and self.index_map(e).num_global == shape[0]]
            places.pop(name, None)
            along = [i for i, row in enumerate(zip(made.dims[name], shape, strict=True)) if row in rows]
            if shape in by_shape:
                places[name] = by_shape[shape]
            elif along:
                places[name] = Place(rows[made.dims[name][along[0]], shape[along[0]]], along[0])
            elif sized:
                places[name] = Place(sized[0], 0)
        made._held = {name: x for name, x in self._held.items() if name not in fields or fields[name] is self[name]}
        made._places = places
        return made

    def _axis_of(self, name: str, dim: str | None) -> int | None:
        rows = self._places[name].dim if name in self._places else None
        return next((i for i, each in enumerate(self.dims[name]) if each == dim and i != rows), None)

    def _picked(self, k: int, picked: Mapping[str, tuple[int, int] | None]) -> Self:
        made = super()._picked(k, picked)
        made._held = {
            name: x if (at := picked[name]) is None else take(x, *at)
            for name, x in self._held.items()
            if name in picked
        }
        made._places = {
            name: place._replace(dim=place.dim - ((at := picked[name]) is not None and at[0] < place.dim))
            for name, place in self._places.items()
            if name in picked
        }
        return made

    def map_fields(self, functions: Mapping[str, Callable[[Tensor], Tensor]]) -> Self:
        """Return a sample with elementwise functions applied to some fields, ghosts included."""
        held = {name: functions[name](x) if name in functions else x for name, x in self._held.items()}
        fields = {
            name: x if name not in functions else self._wrap(held[name], name) if name in held else functions[name](x)
            for name, x in self.items()
        }
        return self._with(_fields=fields, _held=held)

    # -- other libraries -----------------------------------------------------------------------------------------

    @checked_keywords
    def to_pyg(
        self,
        *,
        x: Columns | None = None,
        y: Columns | None = None,
        edge_attr: EdgeColumns | None = None,
        khop: bool = False,
        by_hop: bool = False,
    ) -> Data:
        """Return a ``torch_geometric.data.Data`` of ShardTensors, on which stock layers run unmodified. Collective.

        It has ``edge_index``, ``num_nodes``, all fields of nodes (points) and edges by their names, entity first, and
        :attr:`graph_values`. A graph between several node sets becomes a ``HeteroData``, with such a store for each set
        and relation.

        Parameters
        ----------
        x, y, edge_attr : str or Sequence[str] or None; a mapping with several sets
            Fields that are put side by side, one column for each component, under these names instead. With several
            sets by set, ``{"grid": "u"}``, and by relation: ``("grid", "to", "mesh")`` or ``"grid__to__mesh"``.
        khop : bool, default False
            For models that run without exchange, by :meth:`call_on_parts`: plain tensors instead, of this rank's rows,
            owned ones, then ghosts, and of all edges among them. ``y`` and ``batch``, which losses and pooling take,
            are ShardTensors all the same. With ``ghosts="disk"`` nothing is sent.
        by_hop : bool, default False
            With ``khop``: ghosts in the order of how many hops away they are, edges in that of their targets, and how
            many of each there are as ``num_sampled_nodes`` and ``num_sampled_edges``. With these PyG's
            ``trim_to_layer``, and its models that take them, leave out in each layer rows that no later one needs.
            Neither is there without ``khop``, or on plain samples, where there is nothing to leave out. Only graphs of
            one node set have this order.

        Raises
        ------
        MissingDependencyError
            torch_geometric is not installed.
        UnknownNameError, ConfigError
            No such set, relation or field, or a field of another one; ``khop`` of a sample without edges.

        Examples
        --------
        >>> data = sample.to_pyg(x="speed")
        >>> tuple(data.x.shape), tuple(data.edge_index.shape)
        ((6, 1), (2, 12))
        """
        return pyg_of(self, {"x": x, "y": y, "edge_attr": edge_attr}, khop=khop, by_hop=by_hop)

    def call_on_parts(self, module: nn.Module, /, *args: Any, rows_of: str | None = None, **kwargs: Any) -> Any:
        """Run a module on tensors of ``to_pyg(khop=True)``; return the owned rows of its result as ShardTensors.

        The module needs a halo of as many hops as it has layers, and one more where a layer uses the degrees of its
        sources; of several node sets, one of the relations that its layers follow, in their order. Its first call finds
        out whether that is so, and raises on every rank where it is not; see
        :func:`scidata.shard.graphs.parts.call_on_parts`. Nothing is sent forward after that; backward is collective.

        Parameters
        ----------
        *args, **kwargs : Any
            Tensors; with several node sets by set and by relation, as ``x_dict`` and ``edge_index_dict``, or the
            ``HeteroData``.
        rows_of : str or None, optional
            The set whose rows the result has, where there are several and it is not a dict by set.
        module : Module
            Runs on this rank's rows, ghosts included.

        Raises
        ------
        UnsupportedShardOp
            The module looks further than the ghosts go, mixes rows of all nodes, or gives rows of an unknown set.
        UnknownNameError
            No such set.
        ConfigError
            The sample has no edges.

        Examples
        --------
        >>> from torch_geometric.nn import SimpleConv
        >>> data = sample.to_pyg(x="speed", khop=True)
        >>> sample.call_on_parts(SimpleConv(), data.x, data.edge_index).full_tensor().flatten().tolist()
        [6.0, 2.0, 4.0, 6.0, 8.0, 4.0]
        """
        graph = self.parts
        if graph is not None and rows_of is not None:
            graph = replace(graph, rows_of=entity_named(self._topology, rows_of, edges=False))
        return module(*args, **kwargs) if graph is None else call_on_parts(module, graph, *args, **kwargs)

    @property
    def parts(self) -> LocalGraph | None:
        """The graph that :meth:`call_on_parts` runs on; None if samples are plain tensors."""
        topology = self._topology
        if not topology.relations:
            raise ConfigError("the sample has no edges, along which ghosts would be hops away; use to_pyg() as it is")
        if topology.device_mesh is None:
            return None
        return LocalGraph(
            index_maps={name: topology.index_maps[name] for name in topology.node_sets},
            edges=self.edge_index_dict_with_ghosts,
            layers=tuple([tuple([topology.relations[name].type for name in layer]) for layer in topology.layers]),
            device_mesh=topology.device_mesh,
        )

    def rows_first(self, name: str, *, entity: str | None = None) -> tuple[Tensor, bool]:
        """Return the local rows of a field along dim 0, and whether ghosts follow the owned ones; no communication."""
        place = self._place(name)
        if entity is not None and place.entity != entity:
            raise ConfigError(f"field {name!r} lives on {place.entity}, not on {entity}")
        has_ghosts = name in self._held
        return (self._held[name] if has_ghosts else _local(self[name])).movedim(place.dim, 0), has_ghosts

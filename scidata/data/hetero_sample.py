"""A sample of a graph between several node sets: GraphCast's grid and mesh, PyTorch Geometric's ``HeteroData``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from scidata.core.checks import check_mapping
from scidata.core.keywords import checked_keywords
from scidata.data.irregular_sample import IrregularSample
from scidata.data.sample import TensorT
from scidata.errors import UnknownNameError, near_matches
from scidata.interop.pyg import FOR_LOSSES, side_by_side
from scidata.interop.pyg_hetero import hetero_to_pyg, plain_hetero
from scidata.meshes.hetero import JOINT, relation_parts
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.graphs.parts import call_on_parts
from scidata.shard.graphs.set_parts import SetParts

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

#: Source set, name and target set, as PyTorch Geometric has them.
EdgeType: TypeAlias = tuple[str, str, str]
Columns: TypeAlias = Mapping[str, str | Sequence[str]]


class HeteroSample(IrregularSample[TensorT]):
    """Fields by name, sharded along the rows of their node set, or the edges of their relation.

    A field is called ``"temperature"`` where one set alone has it, else ``"grid/temperature"``. Entities are the node
    sets (``"grid"``), the relations (``"grid__to__mesh"``), and ``"joint"``, the rows of all sets together, which are
    cut at once. Each set has its own index map: its ghosts are the sources, by any relation, of edges that end at owned
    rows of some set, so that one exchange of a set's rows serves all relations; and what the layers of ``halo`` need.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> with h5py.File("two.h5", "w") as file:  # six points in a row, and a node between each two pairs
    ...     file["nodes/grid/pos"] = np.stack([np.arange(6.0), np.zeros(6)], axis=1)
    ...     file["nodes/grid/heat"] = np.arange(6.0)
    ...     file["nodes/mesh/pos"] = np.array([[0.5, 0.0], [2.5, 0.0], [4.5, 0.0]])
    ...     file["edges/grid__to__mesh/edge_index"] = np.array([np.arange(6), np.arange(6) // 2])
    >>> _ = scidata.partition("two.h5", "two.store")

    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> sample = scidata.open_dataset("two.store", mesh)[0]
    >>> sample.node_types, sample.edge_types, tuple(sample["heat"].shape)
    (('grid', 'mesh'), (('grid', 'to', 'mesh'),), (6,))
    >>> source, target = sample.edge_index_dict["grid", "to", "mesh"]  # local numbers
    >>> sums = torch.zeros(sample.index_map("mesh").num_owned, dtype=torch.float64)
    >>> sums = sums.index_add(0, target, sample.with_ghosts("heat")[source])
    >>> total = sums.sum()
    >>> torch.distributed.all_reduce(total)
    >>> total
    tensor(15., dtype=torch.float64)
    """

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def node_types(self) -> tuple[str, ...]:
        """The node sets."""
        return tuple(e for e in self.entities if e != JOINT and relation_parts(e) is None)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """The relations: source set, name, target set."""
        return tuple(parts for name in self.topology.relations if (parts := relation_parts(name)) is not None)

    @property
    def edge_index_dict(self) -> dict[EdgeType, Tensor]:
        """``(2, num_local_edges)`` int64 by relation, in local numbering: source, owned or a ghost; target, owned.

        By target. Over all ranks each edge is there once. Samples of one topology share them: clone before writing.
        """
        return dict(zip(self.edge_types, self.topology.relations.values(), strict=True))

    @property
    def edge_index_dict_with_ghosts(self) -> dict[EdgeType, Tensor]:
        """The same, each followed by the edges that end at ghosts and that the layers of ``halo`` follow.

        The rows of ``with_ghosts(name)`` of a field of edges; see :meth:`call_on_parts`.
        """
        far = self.topology.far_relations.values()
        both = zip(self.edge_index_dict.items(), far, strict=True)
        return {of: torch.cat([own, more], 1) for (of, own), more in both}

    @property
    def batch_entities(self) -> dict[str, str]:
        """Return which fields of a batch say which sample a row is of, and of what rows."""
        return {f"{name}/batch": name for name in self.node_types}

    # -- other libraries -----------------------------------------------------------------------------------------

    @checked_keywords
    def to_pyg(  # type: ignore[override]  # of several sets
        self,
        *,
        x: Columns | None = None,
        y: Columns | None = None,
        edge_attr: Mapping[EdgeType | str, str | Sequence[str]] | None = None,
        khop: bool = False,
    ) -> HeteroData:
        """Return a ``torch_geometric.data.HeteroData`` of ShardTensors, for stock layers, unmodified. Collective.

        Each set has ``num_nodes`` and its fields by their names, each relation ``edge_index`` and its fields.

        Parameters
        ----------
        x, y
            By node set: fields that are put side by side, one column for each component, under these names instead.
        edge_attr
            The same by relation, ``("grid", "to", "mesh")`` or ``"grid__to__mesh"``.
        khop
            For models that run without exchange, by :meth:`call_on_parts`: plain tensors instead, of this rank's rows,
            owned ones, then ghosts, and of all edges among them that it has. ``y`` and ``batch``, which losses and
            pooling take, are ShardTensors all the same. With ``ghosts="disk"`` nothing is sent.

        Raises
        ------
        MissingDependencyError
            torch_geometric is not installed.
        UnknownNameError, ConfigError
            No such set, relation or field, or a field of another one.
        """
        chosen: dict[str, dict[str, tuple[str, ...]]] = {}
        for key, given in (("x", x), ("y", y), ("edge_attr", edge_attr)):
            check_mapping(key, given, "{('grid', 'to', 'mesh'): 'length'}" if key == "edge_attr" else "{'grid': 'u'}")
            for entity, names in (given or {}).items():
                known = self._entity_named(entity, edges=key == "edge_attr")
                chosen.setdefault(known, {})[key] = (names,) if isinstance(names, str) else tuple(names)
        used = {name for groups in chosen.values() for names in groups.values() for name in names}
        groups: dict[str, dict[str, tuple[str, ...]]] = {}
        for entity in (*self.node_types, *self.topology.relations):
            own = [n for n in self if n in self.places and self.entity_of(n) == entity and n not in used]
            groups[entity] = {name.removeprefix(f"{entity}/"): (name,) for name in own} | chosen.get(entity, {})
            for name in (each for names in groups[entity].values() for each in names):
                self.rows_first(name, entity=entity)  # checked before anything is sent
        if khop and self.device_mesh is not None:
            return self._with_values(self._of_parts(groups, flat=chosen))
        node: dict[str, dict[str, Tensor]] = {name: {} for name in self.node_types}
        held: dict[str, dict[str, Tensor]] = {name: {} for name in self.node_types}
        edge: dict[EdgeType, dict[str, Tensor]] = {parts: {} for parts in self.edge_types}
        for entity, fields in groups.items():
            rows = self.index_map(entity)
            for name, names in fields.items():
                parts = [self.rows_first(each, entity=entity) for each in names]
                with_ghosts = all(here for _, here in parts)
                values = [v[: rows.num_local if with_ghosts else rows.num_owned] for v, _ in parts]
                columns = side_by_side(values) if name in chosen.get(entity, {}) else values[0]
                if (ends := relation_parts(entity)) is not None:
                    edge[ends][name] = columns[: rows.num_owned]
                else:
                    (held if with_ghosts else node)[entity][name] = columns
        maps = {name: self.index_map(name) for name in self.node_types}
        if self.device_mesh is None:
            sizes = {name: rows.num_global for name, rows in maps.items()}
            every = {name: {**node[name], **held[name]} for name in node}
            return self._with_values(plain_hetero(sizes, every, self.edge_index_dict, edge))
        made = hetero_to_pyg(self.edge_index_dict, maps, self.device_mesh, node=node, node_with_ghosts=held, edge=edge)
        return self._with_values(made)

    def _with_values(self, made: HeteroData) -> HeteroData:
        """Add values of the whole graph, of sets and of relations, where no field has their name."""
        for name, value in self.graph_values.items():
            entity, _, base = name.rpartition("/")
            store = made if not entity else made[relation_parts(entity) or entity]
            if base not in store:
                store[base] = value
        return made

    def _of_parts(
        self, groups: Mapping[str, Mapping[str, Sequence[str]]], *, flat: Mapping[str, Mapping[str, Any]]
    ) -> HeteroData:
        """Return plain tensors of owned rows, then ghosts; ``flat`` are fields side by side."""
        assert self.device_mesh is not None
        node: dict[str, dict[str, Tensor]] = {}
        edge: dict[EdgeType, dict[str, Tensor]] = {}
        for entity, fields in groups.items():
            ends, rows = relation_parts(entity), self.index_map(entity)
            made = node.setdefault(entity, {}) if ends is None else edge.setdefault(ends, {})
            for name, names in fields.items():
                values = [self.with_ghosts(each).movedim(self.places[each].dim, 0) for each in names]
                made[name] = side_by_side(values) if name in flat.get(entity, {}) else values[0]
                if ends is None and name in FOR_LOSSES:
                    made[name] = node_tensor(made[name][: rows.num_owned], rows, self.device_mesh)
        sizes = {name: self.index_map(name).num_local for name in self.node_types}
        return plain_hetero(sizes, node, self.edge_index_dict_with_ghosts, edge)

    def _entity_named(self, given: Any, *, edges: bool) -> str:
        """Return the set or relation of a name, or the three of one."""
        known = list(self.topology.relations) if edges else list(self.node_types)
        name = "__".join(map(str, given)) if isinstance(given, tuple) else str(given)
        if name not in known:
            what = "relation" if edges else "node set"
            raise UnknownNameError(f"the sample has no {what} {given!r}{near_matches(name, known)}")
        return name

    def call_on_parts(self, module: nn.Module, *args: Any, rows_of: str | None = None, **kwargs: Any) -> Any:
        """Run a module on tensors of ``to_pyg(khop=True)``; return the owned rows of its result as ShardTensors.

        The data set is opened with the relations that the module's layers follow, in their order:
        ``halo={"grid__to__mesh": 1, "mesh__to__mesh": 4, "mesh__to__grid": 1}``. The first call finds out whether that
        is enough, and raises on every rank where it is not: see :func:`scidata.shard.graphs.parts.call_on_parts`.
        Nothing is sent forward after that; backward is collective.

        Parameters
        ----------
        args, kwargs
            Tensors by set and by relation, as ``x_dict`` and ``edge_index_dict``, or the ``HeteroData``.
        rows_of
            The set whose rows the result is, where it is not a dict by set.

        Raises
        ------
        UnsupportedShardOp
            The module looks further than the ghosts go, mixes rows of all nodes, or gives rows of nobody knows whom.
        UnknownNameError
            No such set.
        """
        of = None if rows_of is None else self._entity_named(rows_of, edges=False)
        parts = None if self.parts is None else replace(self.parts, rows_of=of)
        return module(*args, **kwargs) if parts is None else call_on_parts(module, parts, *args, **kwargs)

    @property
    def parts(self) -> SetParts | None:  # type: ignore[override]  # of several sets
        """What :meth:`call_on_parts` runs on; None where samples are plain."""
        if self.device_mesh is None:
            return None
        names = dict(zip(self.topology.relations, self.edge_types, strict=True))
        return SetParts(
            index_maps={name: self.index_map(name) for name in self.node_types},
            relations=self.edge_index_dict_with_ghosts,
            layers=tuple(tuple(names[each] for each in layer) for layer in self.topology.layers),
            device_mesh=self.device_mesh,
        )

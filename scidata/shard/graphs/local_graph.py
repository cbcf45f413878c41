"""The part of a graph on which a rank computes its rows without exchange: rows of each node set, ghosts included, and
the edges among them. Most graphs have one node set and one relation.

A model takes and returns several tensors, each of which belongs to a set or a relation: the one whose key it lies
under, in a dict or a ``HeteroData``, else the one that has as many rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.graphs.routed import Relation
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_leaves, tree_map_only

_T = TypeVar("_T")


class HopCounts(list[int]):
    """Rows or edges by hops, as PyTorch Geometric's ``trim_to_layer`` takes them; no other list is of this class."""


def counted(arguments: object) -> bool:
    """Whether arguments hold counts by hop."""
    return HopCounts in map(type, tree_leaves(arguments))


def check_counts(arguments: object, num_rows: int, num_edges: int) -> None:
    """Check that counts by hop belong to a graph of this size; a model is checked once."""
    for counts in tree_leaves(arguments):
        if isinstance(counts, HopCounts) and sum(counts) not in (num_rows, num_edges):
            raise ConfigError(
                f"call_on_parts: counts by hops of {sum(counts)} rows or edges, but the sample has {num_rows} rows "
                f"and {num_edges} edges; take both from one to_pyg(khop=True, by_hop=True)"
            )


def untrimmed(arguments: _T) -> _T:
    """Return arguments with counts by which nothing is left out."""
    return tree_map_only(HopCounts, lambda counts: HopCounts([0] * len(counts)), arguments)


@dataclass(frozen=True, kw_only=True, eq=False)
class HopOrder:
    """A rank's rows ordered by hop, and its edges by their targets' hops, otherwise in their former order."""

    # rows, edges: ``(num_local,)`` and ``(num_edges,)`` int64: which row, and which edge, comes where
    rows: Tensor
    edges: Tensor
    edge_index: Tensor  # the edges in this order, in the numbers of the rows in this order
    # num_rows, num_edges: rows of 0, 1, … ``num_hops`` hops; edges that end 0, 1, … ``num_hops - 1`` hops away
    num_rows: HopCounts
    num_edges: HopCounts


def hop_order(rows: IndexMap, edge_index: Tensor, num_hops: int) -> HopOrder:
    """Find the order of hops, against the edges from the owned rows; see :class:`HopOrder`."""
    hops = torch.full((rows.num_local,), num_hops, device=edge_index.device)
    hops[: rows.num_owned] = 0
    source, target = edge_index
    for hop in range(1, num_hops):
        reached = source[hops[target] < hop]
        hops[reached] = hops[reached].clamp(max=hop)
    ends = hops[target]
    by_row, by_edge = hops.argsort(stable=True), ends.argsort(stable=True)
    place = torch.empty_like(by_row)
    place[by_row] = torch.arange(len(by_row), device=place.device)
    return HopOrder(
        rows=by_row,
        edges=by_edge,
        edge_index=place[edge_index[:, by_edge]],
        num_rows=HopCounts(torch.bincount(hops, minlength=num_hops + 1).tolist()),
        num_edges=HopCounts(torch.bincount(ends, minlength=num_hops).tolist()),
    )


#: A node set's name, or a relation.
Entity: TypeAlias = str | Relation


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalGraph:
    """A rank's rows of the node sets of a graph, and its edges."""

    index_maps: Mapping[str, IndexMap]  # by set: owned rows and ghosts
    # by relation, ``(2, num_edges)`` int64 in local numbering: the edges that end at owned rows and, of the relations
    # of ``layers``, also those that end at the ghosts that a layer computes
    edges: Mapping[Relation, Tensor]
    # the ghosts are enough for a model of so many layers that follow these relations: a graph of one set with ghosts
    # two hops deep has two layers of its one relation
    layers: tuple[tuple[Relation, ...], ...]
    device_mesh: DeviceMesh  # one axis, the domain
    # the set whose rows a result has where no key of a dict says so; the one set of a graph that has no others
    rows_of: str | None = None

    def __post_init__(self) -> None:
        if len(self.index_maps) == 1:
            object.__setattr__(self, "rows_of", next(iter(self.index_maps)))

    @property
    def only(self) -> tuple[IndexMap, Tensor] | None:
        """The index map and the edges of a graph with one set and one relation; None for other graphs."""
        if len(self.index_maps) > 1 or len(self.edges) != 1:
            return None
        return next(iter(self.index_maps.values())), next(iter(self.edges.values()))

    def owned(self, result: object, *, trimmed: bool = False) -> Any:
        """Return the owned rows of a module's result as ShardTensors; a ``trimmed`` result may lack ghosts."""

        def wrap(x: Tensor, entity: Entity | None) -> Tensor:
            if entity not in self.index_maps:
                raise UnsupportedShardOp(
                    f"without exchange, results are rows of a node set: a dict by set, or say of which one, "
                    f"rows_of={next(iter(self.index_maps))!r}; there are {', '.join(self.index_maps)}"
                )
            rows = self.index_maps[str(entity)]
            if not _has_rows(x, rows, trimmed=trimmed):
                raise UnsupportedShardOp(
                    f"without exchange a module returns a row for each of the {rows.num_local} local nodes of "
                    f"{entity!r}, but it returned shape {tuple(x.shape)}; pool, or reduce, the ShardTensor that "
                    "call_on_parts makes of rows"
                )
            return node_tensor(x[: rows.num_owned], rows, self.device_mesh)

        return self._mapped(wrap, result, self.rows_of)

    # -- for the check of the halo's depth -----------------------------------------------------------------------------

    @property
    def reach(self) -> str:
        """How far the ghosts go, and how to have more."""
        if self.only is not None:
            return (
                f"more than {len(self.layers)} hops away. Open the data set with a wider halo: as many hops as layers, "
                "and one more where layers use the degrees of their sources, as GCNConv does"
            )
        shown = ", ".join(" and ".join("__".join(r) for r in layer) for layer in self.layers)
        return (
            f"further away than layers along {shown} do. Open the data set with all relations that the model follows, "
            "in their order: halo={'grid__to__mesh': 1, 'mesh__to__mesh': 4}"
        )

    @property
    def device(self) -> torch.device:
        """The device of the edges."""
        return next((edges.device for edges in self.edges.values()), torch.device("cpu"))

    def as_given(self, arguments: object) -> LocalGraph:
        """Return the graph with edges in the order that they have in arguments: as stored, or by hops."""
        if self.only is None:
            return self
        rows, edges = self.only
        by_hop = replace(self, edges=dict.fromkeys(self.edges, hop_order(rows, edges, len(self.layers)).edge_index))
        return by_hop if counted(arguments) or by_hop.takes_edges(arguments) else self

    def takes_edges(self, arguments: object) -> bool:
        """Whether edges are among arguments."""
        found: list[bool] = []

        def look(x: Tensor, entity: Entity | None) -> Tensor:
            found.append(self._relation_of(x, entity) is not None)
            return x

        self._mapped(look, arguments)
        return any(found)

    def owned_rows(self, result: object, *, extended: bool = False, trimmed: bool = False) -> list[Tensor] | None:
        """Return the owned rows of a result; None if it does not have a row for each local node.

        ``extended``: it was computed of arguments of :meth:`with_node`, so that each set has one more node.
        ``trimmed``: it may lack ghosts.
        """
        found: list[Tensor | None] = []

        def take(x: Tensor, entity: Entity | None) -> Tensor:
            if entity in self.index_maps:  # else owned() raises
                rows = self.index_maps[str(entity)]
                fits = _has_rows(x, rows, trimmed=trimmed, num_more=int(extended))
                found.append(x[: rows.num_owned] if fits else None)
            return x

        self._mapped(take, result, self.rows_of)
        kept = [x for x in found if x is not None]
        return kept if len(kept) == len(found) else None

    def with_node(self, value: _T, *, into: bool, outof: bool) -> _T:
        """Return arguments with one more node of each set, whose values are NaN.

        Raises ValueError where sizes do not tell whose rows tensors are.

        ``into``: edges from it end at every row that lacks edges, for each relation.
        ``outof``: edges to it start at every row.
        """
        new = {relation: self._new_edges(relation, into, outof) for relation in self.edges}

        def extend(x: Tensor, entity: Entity | None) -> Tensor:
            relation = self._relation_of(x, entity)
            if relation is not None:
                return torch.cat([x, new[relation].to(x.dtype)], 1)
            of = self._entity_of(x, entity)
            if of is None:
                return x
            fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
            more = 1 if isinstance(of, str) else new[of].shape[1]
            return torch.cat([x, x.new_full((more, *x.shape[1:]), fill)])

        return self._mapped(extend, value, more=1)

    def _new_edges(self, relation: Relation, into: bool, outof: bool) -> Tensor:
        source, _, target = relation
        first, last = self.index_maps[source].num_local, self.index_maps[target].num_local
        ends = self.incomplete[relation][: None if into else 0]
        starts = torch.arange(first if outof else 0, device=self.device)
        return torch.stack([torch.cat([torch.full_like(ends, first), starts]),
                            torch.cat([ends, torch.full_like(starts, last)])])  # fmt: skip

    @cached_property
    def incomplete(self) -> dict[Relation, Tensor]:
        """By relation, the local rows of its target set that lack edges.

        Walk back from the last layer, which computes the owned rows. It needs all edges that end there, so their
        sources must be computed by the layer before it, and so on. Of a chain ``3 -> 2 -> 1 -> 0`` with row 0 owned
        and two layers, the last needs the edges that end at 0, the first also those that end at 1: rows 2 and 3 lack
        theirs.
        """
        needed = {}
        for name, rows in self.index_maps.items():
            needed[name] = torch.arange(rows.num_local, device=self.device) < rows.num_owned
        complete = {relation: needed[relation[2]] for relation in self.edges}
        for layer in reversed(self.layers):
            before = {name: mask.clone() for name, mask in needed.items()}
            for relation in layer:
                complete[relation] = needed[relation[2]]
                start, end = self.edges[relation]
                before[relation[0]][start[needed[relation[2]][end]]] = True
            needed = before
        return {relation: (~mask).nonzero()[:, 0] for relation, mask in complete.items()}

    # -- whose rows tensors are ----------------------------------------------------------------------------------------

    def _mapped(
        self,
        function: Callable[[Tensor, Entity | None], Tensor],
        value: object,
        of: Entity | None = None,
        *,
        more: int = 0,
    ) -> Any:
        """Apply a function to each tensor, with the set or relation whose key it lies under.

        ``more``: nodes that the function adds to each set.
        """
        if isinstance(value, Tensor):  # y and batch of a HeteroData are sharded, and for losses
            return value if isinstance(value, ShardTensor) else function(value, of)
        if isinstance(value, Mapping):
            return {key: self._mapped(function, x, self._named(key) or of, more=more) for key, x in value.items()}
        if isinstance(value, list | tuple):
            parts = [self._mapped(function, x, of, more=more) for x in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if hasattr(value, "node_items") and hasattr(value, "edge_items"):  # a HeteroData
            made: Any = copy.copy(value)
            for name, fields in [*value.node_items(), *value.edge_items()]:
                for field, x in fields.items():
                    made[name][field] = x + more if field == "num_nodes" else self._mapped(function, x, name, more=more)
            return made
        return value

    def _named(self, key: Hashable) -> Entity | None:
        """Return the set or relation that a key is the name of."""
        named = tuple(key.split("__")) if isinstance(key, str) and key.count("__") >= 2 else key
        entities: list[Entity] = [*self.index_maps, *self.edges]
        return next((each for each in entities if each == named), None)

    def _relation_of(self, x: Tensor, entity: Entity | None) -> Relation | None:
        """Return the relation whose edges a tensor holds; None if it holds no edges."""
        some = [r for r in self.edges if entity in (None, r)]
        return _only([r for r in some if x.shape == self.edges[r].shape and torch.equal(x, self.edges[r])])

    def _entity_of(self, x: Tensor, entity: Entity | None) -> Entity | None:
        """Return the entity of a tensor's rows: the set or relation named by its key, else the one of equal size."""
        sizes: dict[Entity, int] = {name: rows.num_local for name, rows in self.index_maps.items()}
        sizes |= {relation: edges.shape[1] for relation, edges in self.edges.items()}
        return _only([of for of, size in sizes.items() if x.ndim and len(x) == size and entity in (None, of)])


def _has_rows(x: Tensor, rows: IndexMap, *, trimmed: bool, num_more: int = 0) -> bool:
    """Whether a tensor has a row for each local node, and for ``num_more`` others; a trimmed one may lack ghosts."""
    num_local = rows.num_local + num_more
    return x.ndim > 0 and (rows.num_owned if trimmed else num_local) <= len(x) <= num_local


def _only(found: Sequence[_T]) -> _T | None:
    if len(found) > 1:
        raise ValueError(f"{found} cannot be told apart")
    return found[0] if found else None

"""What a rank holds of a graph between several node sets, to compute its rows without exchange.

As :class:`scidata.shard.graphs.parts.Parts` of one set. A model takes and gives several tensors here, which belong to
sets and relations: by the keys of dicts, or of a ``HeteroData``, that they lie under, else by their numbers of rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.index_map import IndexMap
from scidata.errors import UnsupportedShardOp
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.tensor import ShardTensor

#: A node set's name, or a relation: source set, name, target set.
Entity: TypeAlias = str | tuple[str, str, str]
Relation: TypeAlias = tuple[str, str, str]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class SetParts:
    """A rank's rows of several sets, and their edges.

    Attributes
    ----------
    index_maps
        By set: owned rows and ghosts.
    relations
        ``(2, num_edges)`` int64 in local numbering: the edges that end at owned rows and, of the relations of
        ``layers``, at the ghosts that a layer computes, too.
    layers
        Of each layer of a model that the ghosts are enough for, the relations that it follows.
    device_mesh
        One axis, the domain.
    rows_of
        Whose rows a result is, where no key of a dict says so.
    """

    index_maps: Mapping[str, IndexMap]
    relations: Mapping[Relation, Tensor]
    layers: tuple[tuple[Relation, ...], ...]
    device_mesh: DeviceMesh
    rows_of: str | None = None

    def owned(self, result: Any, *, trimmed: bool = False) -> Any:
        """Return the owned rows of a module's result as ShardTensors; none are trimmed by hops.

        Raises
        ------
        UnsupportedShardOp
            It says not of which set its rows are, or has not a row for each local node of it.
        """

        def wrap(x: Tensor, entity: Entity | None) -> Tensor:
            if entity not in self.index_maps:
                raise UnsupportedShardOp(
                    f"without exchange, results are rows of a node set: a dict by set, or say of which one, "
                    f"rows_of={next(iter(self.index_maps))!r}; there are {', '.join(self.index_maps)}"
                )
            rows = self.index_maps[str(entity)]
            if x.ndim == 0 or len(x) != rows.num_local:
                raise UnsupportedShardOp(
                    f"without exchange a module returns a row for each of the {rows.num_local} local nodes of "
                    f"{entity!r}, but it returned shape {tuple(x.shape)}; pool, or reduce, the ShardTensors that "
                    "call_on_parts makes of rows"
                )
            return node_tensor(x[: rows.num_owned], rows, self.device_mesh)

        return self._mapped(wrap, result, self.rows_of)

    # -- what a check of the depth asks ------------------------------------------------------------------------------

    @property
    def key(self) -> Hashable:
        """What the result of a check is good for."""
        return self.layers, self.rows_of

    @property
    def reach(self) -> str:
        """How far the ghosts go, and how to have more."""
        shown = ", ".join(" and ".join("__".join(r) for r in layer) for layer in self.layers)
        return (
            f"further away than layers along {shown} do. Open the data set with all relations that the model follows, "
            "in their order: halo={'grid__to__mesh': 1, 'mesh__to__mesh': 4}"
        )

    @property
    def num_layers(self) -> int:
        """Of a model that the ghosts are enough for."""
        return len(self.layers)

    def as_given(self, arguments: Any) -> SetParts:
        """Return these: there is one order."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the edges are."""
        return next((edges.device for edges in self.relations.values()), torch.device("cpu"))

    @property
    def is_int(self) -> bool:
        """Whether the rank owns every row."""
        return all(rows.num_owned == rows.num_global for rows in self.index_maps.values())

    @property
    def ends(self) -> bool:
        """Whether there are rows some of whose edges are not here."""
        return any(map(len, self._incomplete.values()))

    def takes_edges(self, arguments: Any) -> bool:
        """Whether edges are among arguments."""
        found: list[bool] = []

        def look(x: Tensor, entity: Entity | None) -> Tensor:
            found.append(self._relation_of(x, entity) is not None)
            return x

        self._mapped(look, arguments)
        return any(found)

    def owned_rows(self, result: Any, *, extended: bool = False, trimmed: bool = False) -> list[Tensor] | None:
        """Return the owned rows of a result, ``extended`` as its arguments were; None where it is none of rows."""
        found: list[Tensor | None] = []

        def take(x: Tensor, entity: Entity | None) -> Tensor:
            if entity in self.index_maps:  # else owned() says what is missing
                rows = self.index_maps[str(entity)]
                fits = x.ndim > 0 and len(x) == rows.num_local + extended
                found.append(x[: rows.num_owned] if fits else None)
            return x

        self._mapped(take, result, self.rows_of)
        kept = [x for x in found if x is not None]
        return kept if len(kept) == len(found) else None

    def with_node(self, value: Any, *, into: bool, outof: bool) -> Any:
        """Return arguments with one more node of each set, of NaN.

        Parameters
        ----------
        into
            Edges from it end at every row whose edges are not all here, of each relation.
        outof
            Edges to it start at every row.

        Raises
        ------
        ValueError
            Sizes do not tell whose rows tensors are.
        """
        new = {relation: self._new_edges(relation, into, outof) for relation in self.relations}

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
        ends = self._incomplete[relation][: None if into else 0]
        starts = torch.arange(first if outof else 0, device=self.device)
        return torch.stack([torch.cat([torch.full_like(ends, first), starts]),
                            torch.cat([ends, torch.full_like(starts, last)])])  # fmt: skip

    @cached_property
    def _incomplete(self) -> dict[Relation, Tensor]:
        """Of each relation the local rows of its target's set some of whose edges are not here."""
        needed = {}
        for name, rows in self.index_maps.items():
            needed[name] = torch.arange(rows.num_local, device=self.device) < rows.num_owned
        complete = {relation: needed[relation[2]] for relation in self.relations}
        for layer in reversed(self.layers):
            before = {name: mask.clone() for name, mask in needed.items()}
            for relation in layer:
                complete[relation] = needed[relation[2]]
                start, end = self.relations[relation]
                before[relation[0]][start[needed[relation[2]][end]]] = True
            needed = before
        return {relation: (~mask).nonzero()[:, 0] for relation, mask in complete.items()}

    # -- whose rows tensors are ----------------------------------------------------------------------------------------

    def _mapped(
        self, function: Callable[[Tensor, Entity | None], Any], value: Any, of: Entity | None = None, *, more: int = 0
    ) -> Any:
        """Apply a function to each tensor, with the set or relation whose key it lies under.

        ``more``: nodes that it adds to each set.
        """
        if isinstance(value, Tensor):  # y and batch of a HeteroData are sharded, and for losses
            return value if isinstance(value, ShardTensor) else function(value, of)
        if isinstance(value, Mapping):
            return {key: self._mapped(function, x, self._named(key) or of, more=more) for key, x in value.items()}
        if isinstance(value, list | tuple):
            parts = [self._mapped(function, x, of, more=more) for x in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if hasattr(value, "node_items") and hasattr(value, "edge_items"):  # a HeteroData
            made = copy.copy(value)
            for name, fields in [*value.node_items(), *value.edge_items()]:
                for field, x in fields.items():
                    made[name][field] = x + more if field == "num_nodes" else self._mapped(function, x, name, more=more)
            return made
        return value

    def _named(self, key: Any) -> Entity | None:
        """Return the set or relation that a key is of."""
        if isinstance(key, str) and key.count("__") >= 2:
            key = tuple(key.split("__"))
        return key if key in self.index_maps or key in self.relations else None

    def _relation_of(self, x: Tensor, entity: Entity | None) -> Relation | None:
        """Return the relation whose edges a tensor holds; None where it holds none."""
        some = [r for r in self.relations if entity in (None, r)]
        same = [r for r in some if x.shape == self.relations[r].shape and torch.equal(x, self.relations[r])]
        return _only(same)

    def _entity_of(self, x: Tensor, entity: Entity | None) -> Entity | None:
        """Return whose rows a tensor has: of the set or relation that its key names, else of one with as many."""
        sizes: dict[Entity, int] = {name: rows.num_local for name, rows in self.index_maps.items()}
        sizes |= {relation: edges.shape[1] for relation, edges in self.relations.items()}
        return _only([of for of, size in sizes.items() if x.ndim and len(x) == size and entity in (None, of)])


def _only(found: Sequence[_T]) -> _T | None:
    if len(found) > 1:
        raise ValueError(f"{found} cannot be told apart")
    return found[0] if found else None

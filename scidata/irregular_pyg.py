"""An irregular sample as a ``torch_geometric`` ``Data``: which field goes where."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scidata.errors import MissingDependencyError
from scidata.interop.pyg import to_pyg

if TYPE_CHECKING:
    from scidata.irregular_sample import IrregularSample

__all__ = ["to_data"]


def to_data(
    sample: IrregularSample, *, x: Sequence[str] = (), y: Sequence[str] = (), edge_attr: Sequence[str] = ()
) -> Any:
    """Make what :meth:`IrregularSample.to_pyg` returns. Collective."""
    entity, mesh = sample.entity, sample.device_mesh
    node: dict[str, Tensor] = {}
    node_with_ghosts: dict[str, Tensor] = {}
    edge: dict[str, Tensor] = {}
    used = {*x, *y, *edge_attr}
    given = {"x": x, "y": y}
    rest = {n: sample.entity_of(n) for n in sample if n not in used and n in sample.places}
    groups: dict[str, tuple[str, ...]] = {n: (n,) for n, lives_on in rest.items() if lives_on == entity}
    groups |= {name: tuple(names) for name, names in given.items() if names}  # before a field of the same name
    for name, names in groups.items():
        columns, has_ghosts = _columns(sample, names, entity, flat=name in given and bool(given[name]))
        (node_with_ghosts if has_ghosts else node)[name] = columns
    edges: dict[str, tuple[str, ...]] = {n: (n,) for n, lives_on in rest.items() if lives_on == "edge"}
    if edge_attr:
        edges["edge_attr"] = tuple(edge_attr)
    for name, names in edges.items():
        columns, _ = _columns(sample, names, "edge", flat=name == "edge_attr" and bool(edge_attr))
        edge[name] = columns[: sample.index_map("edge").num_owned]
    graph = {"num_nodes": sample.num_nodes}
    if mesh is None:
        return _plain(sample, {**node, **node_with_ghosts, **edge}, graph)
    index = sample.edge_index
    device = next((v.device for v in (*node.values(), *node_with_ghosts.values())), torch.device("cpu"))
    data = to_pyg(
        torch.empty(2, 0, dtype=torch.int64, device=device) if index is None else index,
        sample.index_map(entity),
        mesh,
        node=node,
        node_with_ghosts=node_with_ghosts,
        edge=edge,
        graph=graph,
    )
    if index is None:
        del data.edge_index
    return data


def _columns(sample: IrregularSample, names: Sequence[str], entity: str, *, flat: bool) -> tuple[Tensor, bool]:
    """Return the rows of fields side by side; with ghosts where all of them have them."""
    parts = [sample.rows_first(name, entity=entity) for name in names]
    has_ghosts = all(held for _, held in parts)
    num_rows = sample.index_map(entity).num_local if has_ghosts else sample.index_map(entity).num_owned
    rows = [values[:num_rows] for values, _ in parts]
    if flat:
        return torch.cat([values.reshape(num_rows, math.prod(values.shape[1:])) for values in rows], dim=1), has_ghosts
    return rows[0], has_ghosts


def _plain(sample: IrregularSample, fields: dict[str, Tensor], graph: dict[str, Any]) -> Any:
    try:
        data = importlib.import_module("torch_geometric.data")
    except ImportError as e:
        raise MissingDependencyError("to_pyg() needs torch_geometric; pip install 'scidata[pyg]'") from e
    return data.Data(**({} if sample.edge_index is None else {"edge_index": sample.edge_index}), **fields, **graph)

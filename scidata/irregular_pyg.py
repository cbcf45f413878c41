"""An irregular sample as a ``torch_geometric`` ``Data``: which field goes where."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scidata.errors import MissingDependencyError
from scidata.interop.pyg import to_pyg
from scidata.shard.graph import node_tensor

if TYPE_CHECKING:
    from scidata.irregular_sample import IrregularSample

__all__ = ["to_data"]


_FOR_LOSSES = ("y", "batch")  # what no layer reads


def to_data(
    sample: IrregularSample,
    *,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    edge_attr: Sequence[str] = (),
    khop: bool = False,
) -> Any:
    """Make what :meth:`IrregularSample.to_pyg` returns. Collective."""
    node_fields = _groups(sample, sample.entity, {"x": x, "y": y}, but={*x, *y, *edge_attr})
    edge_fields = _groups(sample, "edge", {"edge_attr": edge_attr}, but={*x, *y, *edge_attr})
    if khop and sample.parts is not None:
        return _of_parts(sample, node_fields, edge_fields)
    entity, mesh = sample.entity, sample.device_mesh
    node: dict[str, Tensor] = {}
    node_with_ghosts: dict[str, Tensor] = {}
    edge: dict[str, Tensor] = {}
    for name, group in node_fields.items():
        columns, has_ghosts = _columns(sample, group, entity)
        (node_with_ghosts if has_ghosts else node)[name] = columns
    for name, group in edge_fields.items():
        edge[name] = _columns(sample, group, "edge")[0][: sample.index_map("edge").num_owned]
    graph = {"num_nodes": sample.num_nodes}
    if mesh is None:
        return _plain(sample.edge_index, {**node, **node_with_ghosts, **edge, **graph})
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


class _Group(NamedTuple):
    """Fields that become one tensor; side by side as columns where ``flat``."""

    fields: tuple[str, ...]
    flat: bool


def _groups(
    sample: IrregularSample, entity: str, given: Mapping[str, Sequence[str]], *, but: AbstractSet[str]
) -> dict[str, _Group]:
    """Say what becomes of the fields of an entity, by PyG's names; what was asked for is before a field of its name."""
    rest = [n for n in sample if n not in but and n in sample.places and sample.entity_of(n) == entity]
    asked = {name: _Group(tuple(fields), True) for name, fields in given.items() if fields}
    return {name: _Group((name,), False) for name in rest} | asked


def _of_parts(sample: IrregularSample, node: Mapping[str, _Group], edge: Mapping[str, _Group]) -> Any:
    """Return plain tensors of owned rows, then ghosts."""
    assert sample.device_mesh is not None
    rows = sample.index_map(sample.entity)
    fields: dict[str, Any] = {"num_nodes": rows.num_local}
    for entity, groups in ((sample.entity, node), ("edge", edge)):
        for name, (names, flat) in groups.items():
            for each in names:
                sample.rows_first(each, entity=entity)  # checked before anything is sent
            parts = [sample.with_ghosts(n).movedim(sample.places[n].dim, 0) for n in names]
            fields[name] = _side_by_side(parts) if flat else parts[0]
    for name in fields.keys() & set(_FOR_LOSSES):
        fields[name] = node_tensor(fields[name][: rows.num_owned], rows, sample.device_mesh)
    return _plain(sample.edge_index_with_ghosts, fields)


def _columns(sample: IrregularSample, group: _Group, entity: str) -> tuple[Tensor, bool]:
    """Return the rows of fields side by side; with ghosts where all of them have them."""
    parts = [sample.rows_first(name, entity=entity) for name in group.fields]
    has_ghosts = all(held for _, held in parts)
    num_rows = sample.index_map(entity).num_local if has_ghosts else sample.index_map(entity).num_owned
    rows = [values[:num_rows] for values, _ in parts]
    return (_side_by_side(rows) if group.flat else rows[0]), has_ghosts


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([values.reshape(len(values), math.prod(values.shape[1:])) for values in rows], dim=1)


def _plain(edge_index: Tensor | None, fields: Mapping[str, Any]) -> Any:
    try:
        data = importlib.import_module("torch_geometric.data")
    except ImportError as e:
        raise MissingDependencyError("to_pyg() needs torch_geometric; pip install 'scidata[pyg]'") from e
    return data.Data(**({} if edge_index is None else {"edge_index": edge_index}), **fields)

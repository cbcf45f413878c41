"""Rows looked up in a table by ids: embedding, bags of them, and classes as zeros and ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import (
    align,
    bind,
    finish,
    is_sharded,
    local_of,
    replicated,
    spec_of_layout,
    specs_of,
    to_layout,
    whole_along,
)
from scidata.shard.ops.arguments import argument
from scidata.shard.ops.moving import as_sharded
from scidata.shard.rows.redistribute import fetch_rows
from scidata.shard.tensor import ShardTensor


@register_op(F.embedding, any_order=True)
def embedding(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Look ids up in a table; ids, rows of the table and features may be sharded."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    given = bind(names, args, kwargs, padding_idx=None)
    ids, table = given["input"], given["weight"]
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if given.get(name):
            raise unsupported(func, f"{name}={given[name]}", *specs_of([ids, table]), remedy="look up without it")
    if len(table.shape) != 2:
        raise RuntimeError(f"'weight' must be 2-D, but has shape {tuple(table.shape)}")
    padding = given["padding_idx"]
    if padding is not None:
        if not -table.shape[0] <= padding < table.shape[0]:
            raise AssertionError(f"padding_idx {padding} must be within the {table.shape[0]} rows of the table")
        padding %= table.shape[0]
    rows: list[Hashable] = [*range(len(ids.shape))]
    axis = table.spec.axis_of_dim(0) if is_sharded(table) else None
    if axis is not None:
        return _in_sharded_rows(ids, table, axis, padding)
    (places, local), layout, _ = align(func, [ids, table], [rows, ["id", "feature"]])
    shape = (*ids.shape, table.shape[1])
    spec = spec_of_layout(layout, [*rows, "feature"], shape, specs_of([ids, table])[0])
    return finish(F.embedding(places, local, padding), spec)


def _in_sharded_rows(ids: Any, table: ShardTensor, axis: int, padding: int | None) -> Tensor:
    """Look ids up of which one rank along a mesh axis has the row: owners are asked, or all answer."""
    spec = table.spec
    if is_sharded(ids) and axis in ids.spec.sharded.values():
        if list(spec.sharded.values()) == list(ids.spec.sharded.values()):
            local = ids.local
            found = fetch_rows(table.local, local.reshape(-1), spec.sizes_of(axis), 0, spec.group(axis))
            found = _without_padding(found.view(*local.shape, found.shape[-1]), local, padding)
            shape = (*ids.spec.global_shape, spec.global_shape[1])
            return ShardTensor(found, ids.spec.derive(shape, ids.spec.dims, ids.spec.sizes))
        whole = as_sharded(_in_sharded_rows(replicated(ids, {axis}), table, axis, padding), spec)
        held = whole.spec
        dims = [d if a == axis else held.dims[a] for a, d in enumerate(ids.spec.dims)]
        sizes = [s if a == axis else held.sizes[a] for a, s in enumerate(ids.spec.sizes)]
        return to_layout(whole, held.derive(held.global_shape, dims, sizes))
    rows: list[Hashable] = [*range(len(ids.shape))]
    others = [None if a == axis else d for a, d in enumerate(spec.dims)]
    # the part that this rank's place along the axis holds is a table of its own to the other axes
    part = ShardTensor(table.local, spec.derive((spec.local_shape[0], spec.global_shape[1]), others, spec.sizes))
    (places, local), layout, _ = align(F.embedding, [ids, part], [rows, ["id", "feature"]])
    if bool(((places < 0) | (places >= spec.global_shape[0])).any()):
        raise IndexError(f"embedding: an id is out of range for a table of {spec.global_shape[0]} rows")
    own = places - spec.offsets[0]
    mine = (own >= 0) & (own < len(local))
    spare = torch.cat([local, local.new_zeros(1, local.shape[1])])
    found = all_reduce_sum(spare[torch.where(mine, own, len(local))], spec.group(axis))
    new = spec_of_layout(layout, [*rows, "feature"], (*ids.shape, spec.global_shape[1]), spec)
    return finish(_without_padding(found, places, padding), new)


def _without_padding(found: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """Give the row that only pads no gradient."""
    return found if padding is None else torch.where((ids == padding).unsqueeze(-1), found.detach(), found)


@register_op(F.embedding_bag)
def embedding_bag(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reduce the rows of each bag of ids; bags and features may be sharded."""
    names = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    given = bind(f"{names} include_last_offset padding_idx", args, kwargs, per_sample_weights=None, mode="mean")
    ids, table, factors = given["input"], given["weight"], given["per_sample_weights"]
    for name in ("offsets", "max_norm", "scale_grad_by_freq", "sparse", "include_last_offset"):
        if given.get(name) is not None and given[name] is not False:
            raise unsupported(func, f"{name}=", *specs_of([ids, table, factors]), remedy="give bags as rows of ids")
    if len(ids.shape) != 2 or len(table.shape) != 2 or (factors is not None and factors.shape != ids.shape):
        raise unsupported(func, f"ids of shape {tuple(ids.shape)}", *specs_of([ids, table, factors]))
    operands = [whole_along(ids, 1), whole_along(table, 0)]
    labels: list[list[Hashable]] = [["bag", "in bag"], ["id", "feature"]]
    if factors is not None:
        operands, labels = [*operands, whole_along(factors, 1)], [*labels, labels[0]]
    how = {name: given[name] for name in ("mode", "padding_idx") if name in given}
    plain = not any(map(is_sharded, operands))
    locals_, layout, _ = ([*map(local_of, operands)], [], {}) if plain else align(func, operands, labels)
    found = func(*locals_[:2], per_sample_weights=locals_[2] if factors is not None else None, **how)
    if plain:
        return found  # type: ignore[no-any-return]
    shape = (ids.shape[0], table.shape[1])
    return finish(found, spec_of_layout(layout, ["bag", "feature"], shape, specs_of(operands)[0]))


@register_op(F.one_hot, any_order=True)
def one_hot(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Mark each class number among all classes."""
    x, classes = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "num_classes", -1)
    if x.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to class numbers of int64, not {x.dtype}")
    low, high = int(x.min()), int(x.max())
    classes = high + 1 if classes == -1 else classes
    if low < 0 or high >= classes:
        raise RuntimeError(f"one_hot: classes from {low} to {high} among {classes}")
    marks: Any = x.unsqueeze(-1) == torch.arange(classes, device=x.device)
    return marks.long()  # type: ignore[no-any-return]

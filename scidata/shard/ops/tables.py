"""Rows looked up in a table by ids: embedding, bags of them, and classes as zeros and ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.operators import in_range
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import align, finish, is_sharded, local_of, on_parts, plain_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import whole_along
from scidata.shard.rows.redistribute import fetch_rows
from scidata.shard.tensor import ShardTensor


def _refuse(func: TensorFunction, operands: list[Tensor], options: Mapping[str, object], remedy: str) -> None:
    """Refuse options that are not off."""
    for name, value in options.items():
        if value is not None and value is not False and name != "norm_type":
            raise unsupported(func, f"{name}={value}", *specs_of(operands), remedy=remedy)


@handles(F.embedding, any_order=True)
def embedding(
    func: TensorFunction, x: Tensor, weight: Tensor, padding_idx: int | None = None, **options: object
) -> Tensor:
    """Look ids up in a table; ids, rows of the table and features may be sharded."""
    _refuse(func, [x, weight], options, "look up without it")
    if len(weight.shape) != 2:
        raise RuntimeError(f"'weight' must be 2-D, but has shape {tuple(weight.shape)}")
    if padding_idx is not None:
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise AssertionError(f"padding_idx {padding_idx} must be within the {weight.shape[0]} rows of the table")
        padding_idx %= weight.shape[0]
    if is_sharded(weight) and 0 in weight.spec.sharded:
        return _in_sharded_rows(x, weight, weight.spec.sharded[0], padding_idx)
    rows = range(len(x.shape))
    labels: list[Sequence[Hashable]] = [rows, ["id", "feature"]]
    return on_parts(func, lambda ids, table: func(ids, table, padding_idx), [x, weight], labels, [*rows, "feature"])


def _in_sharded_rows(ids: Tensor, table: ShardTensor, axis: int, padding: int | None) -> Tensor:
    """Look ids up in a table with sharded rows: ask their owners, or let all ranks answer.

    With rows 0 to 4 on rank 0 and 5 to 9 on rank 1, and ids (1, 7) on both: rank 0 finds row 1 and a spare one of
    zeros, rank 1 the spare one and row 7; their sum is both rows.
    """
    spec = table.spec
    if is_sharded(ids) and axis in ids.spec.sharded.values():
        if list(spec.sharded.values()) == list(ids.spec.sharded.values()) == [axis]:
            local = ids.local
            found = fetch_rows(table.local, local.reshape(-1), spec.sizes_of(axis), 0, spec.group(axis))
            found = _without_padding(found.view(*local.shape, found.shape[-1]), local, padding)
            shape = (*ids.spec.global_shape, spec.global_shape[1])
            return ShardTensor(found, ids.spec.derive(shape, ids.spec.dims, ids.spec.sizes))
        return F.embedding(ids, whole_along(table, 0), padding)
    if is_sharded(ids) and not set(ids.spec.sharded.values()).isdisjoint(spec.sharded.values()):
        return F.embedding(ids, whole_along(table, 1), padding)  # features, split over an axis of the ids
    rows: list[Hashable] = [*range(len(ids.shape))]
    others = [None if a == axis else d for a, d in enumerate(spec.dims)]
    # the part that this rank's place along the axis holds is a table of its own to the other axes
    part = ShardTensor(table.local, spec.derive((spec.local_shape[0], spec.global_shape[1]), others, spec.sizes))
    (places, local), layout, _ = align(F.embedding, [ids, part], [rows, ["id", "feature"]])
    rows_held = spec.global_shape[0]
    places = in_range(places, 0, rows_held, f"embedding: an id is out of range for a table of {rows_held} rows")
    own = places - spec.offsets[0]
    mine = (own >= 0) & (own < len(local))
    spare = torch.cat([local, local.new_zeros(1, local.shape[1])])
    found = all_reduce_sum(spare[torch.where(mine, own, len(local))], spec.group(axis))
    new = spec_of_layout(layout, [*rows, "feature"], (*ids.shape, spec.global_shape[1]), spec)
    return finish(_without_padding(found, places, padding), new)


def _without_padding(found: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """Give the row that only pads no gradient."""
    return found if padding is None else torch.where((ids == padding).unsqueeze(-1), found.detach(), found)


@handles(F.embedding_bag)
def embedding_bag(
    func: TensorFunction,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    **options: object,
) -> Tensor:
    """Reduce the rows of each bag of ids; bags and features may be sharded, bags by offsets are gathered."""
    factors = [] if per_sample_weights is None else [per_sample_weights]
    operands = [x, weight, *factors]
    if offsets is not None:
        ids, starts, *given = map(plain_of, (x, offsets, *factors))
        how = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset, **options}

        def of_table(table: Tensor, *factors: Tensor) -> Tensor:
            return func(ids, table, starts, per_sample_weights=factors[0] if factors else None, **how)

        if not is_sharded(weight):
            return of_table(local_of(weight), *given)
        _refuse(func, operands, {key: options.get(key) for key in ("max_norm", "sparse")}, "look up without it")
        labels = [["id", "feature"], *[["in bag"] for _ in given]]
        count = len(starts) - include_last_offset
        return on_parts(func, of_table, [whole_along(weight, 0), *given], labels, ["bag", "feature"], {"bag": count})
    _refuse(func, operands, options, "give bags as rows of ids")
    if len(x.shape) != 2 or len(weight.shape) != 2 or any(each.shape != x.shape for each in factors):
        raise unsupported(func, f"ids of shape {tuple(x.shape)}", *specs_of(operands))

    def compute(ids: Tensor, table: Tensor, *factors: Tensor) -> Tensor:
        given = factors[0] if factors else None
        return func(ids, table, mode=mode, padding_idx=padding_idx, per_sample_weights=given)

    operands = [whole_along(x, 1), whole_along(weight, 0), *[whole_along(each, 1) for each in factors]]
    labels = [["bag", "in bag"], ["id", "feature"], *[["bag", "in bag"] for _ in factors]]
    return on_parts(func, compute, operands, labels, ["bag", "feature"])


@handles(F.one_hot, any_order=True)
def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """Mark each class number among all classes."""
    if input.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to class numbers of int64, not {input.dtype}")
    if not input.numel() and num_classes < 1:
        raise RuntimeError("one_hot: no class numbers, from which to count the classes; pass num_classes=")
    low, high = (int(input.min()), int(input.max())) if input.numel() else (0, 0)
    classes = high + 1 if num_classes == -1 else num_classes
    if low < 0 or high >= classes:
        raise RuntimeError(f"one_hot: classes from {low} to {high} among {classes}")
    return (input.unsqueeze(-1) == torch.arange(classes, device=input.device)).long()

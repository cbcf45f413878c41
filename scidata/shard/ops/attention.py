"""Attention with the sequence, the heads or the batch sharded.

Each rank's queries attend to all keys. Where the sequence is sharded, keys and values are gathered, or go round in a
ring, or heads are exchanged for the sequence (``attention/algorithms``). Every rank uses them differently there, so
their gradients are summed back to their owners.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.attention.algorithms import chosen_algorithm, note_algorithm
from scidata.shard.attention.ring import RingLayout, ring_attention
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.transport import Group
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import Entry, Layout, entry_of, finish, local_of, spec_of_layout, specs_of, to_axis
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import moved_off, replicated, sharded_on, tied_to, to_layout, whole_along
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_NONE = float("-inf")  # the score of a key that is not attended to
_NAMES = ("query", "key", "value", "attn_mask")


class _Options(NamedTuple):
    """Options of attention, by torch's names."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _labels(operands: dict[str, Tensor]) -> dict[str, list[Hashable]]:
    """Label dims from the right, so that batch dims broadcast."""
    last = dict(zip(_NAMES, (("L", "E"), ("S", "E"), ("S", "Ev"), ("L", "S")), strict=True))
    labels: dict[str, list[Hashable]] = {}
    for name, x in operands.items():
        ndim = len(x.shape)
        labels[name] = [*range(-ndim, -2), *last[name]][-ndim:]
    return labels


def _sharded_label(x: Tensor, labels: list[Hashable], axis: int) -> Entry | None:
    return entry_of(x.spec, labels, axis) if isinstance(x, ShardTensor) else None


def _beside_query(x: Tensor, names: list[Hashable], query: Tensor, query_names: list[Hashable]) -> Tensor:
    """Bring an operand with another split than the queries to their layout, or gather it. Collective then."""
    if x is query or not isinstance(x, ShardTensor):
        return x
    dims, sizes = list(x.spec.dims), list(x.spec.sizes)
    for axis in range(len(dims)):
        own, goal = _sharded_label(x, names, axis), _sharded_label(query, query_names, axis)
        if own is None or goal is None or own == goal or (own[0], goal[0]) == ("S", "L"):
            continue
        place = names.index(goal[0]) if goal[0] in names else None
        fits = place is not None and x.shape[place] == sum(goal[1]) and place not in (*dims[:axis], *dims[axis + 1 :])
        dims[axis], sizes[axis] = (place, goal[1]) if fits else (None, None)
    if dims == list(x.spec.dims) and sizes == list(x.spec.sizes):
        return x
    return to_layout(x, x.spec.derive(x.spec.global_shape, dims, sizes))


@handles(F.scaled_dot_product_attention)
def attention(
    func: TensorFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend to all keys from this rank's queries."""
    given = zip(_NAMES, (query, key, value, attn_mask), strict=True)
    return _attend(
        func, {name: x for name, x in given if x is not None}, _Options(dropout_p, is_causal, scale, enable_gqa)
    )


def _attend(func: TensorFunction, operands: dict[str, Tensor], how: _Options) -> Tensor:
    """Bring the operands to one layout along each mesh axis, and run the chosen algorithm.

    Say 2 x 2 ranks where ``dp`` shards the batch and ``domain`` the sequence, 6 rows each. Along ``dp`` each rank has
    its own samples of all operands. Along ``domain`` it keeps its 6 queries, and gets all 12 keys and values.
    """
    if how.enable_gqa and (how.dropout_p or any(spec.ndim - 3 in spec.sharded for spec in specs_of(operands.values()))):
        how, heads = how._replace(enable_gqa=False), operands["query"].shape[-3]
        for name in ("key", "value"):  # so that heads are split alike, whatever their groups
            x = operands[name]
            operands[name] = x.repeat_interleave(heads // max(x.shape[-3], 1), -3)
    batches = {tuple(operands[name].shape[:-2]) for name in _NAMES[:3]}
    # one process computes two products then, whose result may be written to
    is_kept = len(batches) == 1 or how.enable_gqa
    for name in _NAMES[:3]:
        x = operands[name]
        strides = x.global_strides if isinstance(x, ShardTensor) else x.stride()
        is_kept = is_kept and (strides is None or strides[-1] == 1)
    if len(batches) > 1 and not how.enable_gqa:  # of a part without rows, torch's result may lack dims
        common = torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]
        operands |= {name: operands[name].expand(*common, -1, -1) for name in _NAMES[:3]}
    specs, labels = specs_of([*operands.values()]), _labels(operands)
    if any(spec.device_mesh != specs[0].device_mesh for spec in specs):
        raise unsupported(func, "the operands lie on different device meshes", *specs)
    for name, x in operands.items():
        if name != "attn_mask" and isinstance(x, ShardTensor) and x.spec.ndim - 1 in x.spec.sharded:
            operands[name] = moved_off(x, [x.spec.ndim - 1])
    query = operands["query"]
    operands = {name: _beside_query(x, labels[name], query, labels["query"]) for name, x in operands.items()}
    if how.is_causal and "attn_mask" in operands:
        raise unsupported(func, "is_causal beside an attn_mask", *specs, remedy="put the causal mask into attn_mask")
    device = operands["query"].device.type
    if torch.is_autocast_enabled(device):  # it does not reach the ring, nor the products of dropped weights
        cast = {name: x.to(_autocast_dtype(x)) for name, x in operands.items()}
        with torch.autocast(device, enabled=False):
            return _attend(func, cast, how)
    if how.dropout_p:
        return _with_dropout(operands, how)
    sequence = _sequence_axis(operands)
    way = "gather" if sequence is None else _way(func, operands, sequence, how)
    if sequence is not None and way == "heads":
        return _by_heads(func, operands, how, sequence)
    parts = {name: local_of(x) for name, x in operands.items()}
    layout: Layout = []
    for axis in range(len(specs[0].axes)):
        entries = {name: _sharded_label(x, labels[name], axis) for name, x in operands.items()}
        goes_round = way == "ring" and axis == sequence
        layout.append(_align_axis(func, axis, specs, parts, labels, entries, goes_round))
    used = [entry[0] for entry in layout if entry is not None]
    if len(set(used)) != len(used):
        raise unsupported(func, "two mesh axes would shard the same dim of the result", *specs)
    if sequence is not None and way == "ring":
        result = _by_ring(operands, parts, how, sequence)
    else:
        if how.is_causal and "L" in used:
            how = how._replace(is_causal=False)
            parts["attn_mask"] = _causal_mask(func, operands, parts)
        result = _compute(func, parts, how)
    if not is_kept and result.requires_grad:
        result = result.clone()  # the kernel keeps its own
    shape, names = list(result.shape), [*range(-result.ndim, -2), "L", "Ev"]
    for entry in layout:
        if entry is not None:
            shape[names.index(entry[0])] = sum(entry[1])
    return finish(result, spec_of_layout(layout, names, shape, specs[0]))


def _with_dropout(operands: dict[str, Tensor], how: _Options) -> Tensor:
    """Attend with the dropout mask that one process draws with the same seed."""
    query, key, value = (operands[name] for name in _NAMES[:3])
    key, value, mask = whole_along(key, -2), whole_along(value, -2), operands.get("attn_mask")
    wide = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if how.scale is None else how.scale)
    # contiguous: a product is made anew in one process, too, so that its order in memory is known
    scores = ((query.to(wide) * root) @ (key.to(wide) * root).transpose(-2, -1)).contiguous()
    if how.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = whole_along(mask, -1)
        scores = scores.masked_fill(mask.logical_not(), _NONE) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == _NONE).all(-1, keepdim=True)  # a row without any key has zeros, not NaN
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    result: Tensor = F.dropout(weights, how.dropout_p) @ value.to(wide)
    return result.to(query.dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    casts = x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


# -- a sharded sequence: which way -----------------------------------------------------------------------------------


def _sequence_axis(operands: dict[str, Tensor]) -> int | None:
    """Return the mesh axis that shards the sequence of queries, keys and values, these two alike."""
    query, key, value = (operands[name] for name in _NAMES[:3])
    if not (isinstance(query, ShardTensor) and isinstance(key, ShardTensor) and isinstance(value, ShardTensor)):
        return None
    axes = [x.spec.axis_of_dim(x.spec.ndim - 2) for x in (query, key, value)]
    axis = axes[0]
    if axis is None or axes != [axis] * 3 or key.spec.sizes_of(axis) != value.spec.sizes_of(axis):
        return None
    return axis


def _way(func: TensorFunction, operands: dict[str, Tensor], axis: int, how: _Options) -> str:
    """Choose the algorithm by layouts and sizes, which all ranks know."""
    specs = [operands[name].spec for name in _NAMES[:3]]  # type: ignore[attr-defined]
    query = specs[0]
    shapes = [spec.global_shape[:-2] for spec in specs]
    alike = len({spec.ndim for spec in specs}) == 1 and (len(set(shapes)) == 1 or how.enable_gqa)
    others = [dim for spec in specs for other, dim in enumerate(spec.dims) if other != axis]
    heads = shapes[1][-1] if alike and shapes[1] == shapes[2] and shapes[0] and query.ndim - 3 not in others else 0
    whole = [_longest_batch(s) * s.global_shape[-2] for s in specs]  # rows of all ranks
    itemsize, widths = operands["key"].dtype.itemsize, [s.global_shape[-1] for s in specs]
    gathered = (whole[1] * widths[1] + whole[2] * widths[2]) * itemsize
    exchanged = gathered + whole[0] * (widths[0] + widths[2]) * itemsize
    mask, beside = operands.get("attn_mask"), 0
    if isinstance(mask, ShardTensor) and mask.spec.dims[axis] == mask.spec.ndim - 2:
        beside = _longest_batch(mask.spec) * mask.shape[-2] * mask.shape[-1] * mask.dtype.itemsize
    way = chosen_algorithm(query.axes[axis].size, heads, gathered, exchanged, beside)
    if way == "heads" and not heads:
        remedy = 'choose scidata.attention("ring") or "gather"'
        raise unsupported(func, "the heads cannot be exchanged for the sequence", *specs, remedy=remedy)
    way = "gather" if way == "ring" and not alike else way
    note_algorithm(way)
    return way


def _longest_batch(spec: ShardSpec) -> int:
    """Return the largest number of samples and heads of any rank, equal on all ranks."""
    shape = enumerate(spec.global_shape[:-2])
    return math.prod(facts_of(spec.sizes_of(spec.sharded[d])).longest if d in spec.sharded else n for d, n in shape)


def _by_heads(func: TensorFunction, operands: dict[str, Tensor], how: _Options, axis: int) -> Tensor:
    """Exchange the sequence for heads, attend, and exchange back."""
    query, key, value = (operands[name] for name in _NAMES[:3])
    assert isinstance(query, ShardTensor)
    spec = query.spec
    num_heads, num_ranks = key.shape[-3], spec.axes[axis].size
    sizes = even_sizes(num_heads, num_ranks)

    def to_heads(x: Tensor) -> Tensor:
        assert isinstance(x, ShardTensor)
        return sharded_on(x, axis, x.spec.ndim - 3, [n * x.shape[-3] // num_heads for n in sizes])

    alike = len(set(specs_of([query, key, value]))) == 1  # the shapes, too
    if alike and query.dtype == key.dtype == value.dtype:
        moved = [*to_heads(torch.stack([query, key, value])).unbind(0)]  # one exchange
    else:
        moved = [to_heads(x) for x in (query, key, value)]
    mask = operands.get("attn_mask")
    if isinstance(mask, ShardTensor) and mask.spec.dims[axis] in (mask.spec.ndim - 2, mask.spec.ndim - 1):
        mask = replicated(mask, {axis})
    result = func(*moved, mask, **how._asdict())
    assert isinstance(result, ShardTensor)
    return result.redistribute(placements=spec.placements, sizes={axis: spec.sizes_of(axis)})


def _by_ring(operands: dict[str, Tensor], parts: dict[str, Tensor], how: _Options, axis: int) -> Tensor:
    """Pass the blocks of keys and values round."""
    query, key = operands["query"], operands["key"]
    assert isinstance(query, ShardTensor)
    assert isinstance(key, ShardTensor)
    layout = RingLayout(
        sizes=key.spec.sizes_of(axis),
        first_query=query.spec.offsets[-2],
        causal=how.is_causal,
        scale=1 / math.sqrt(query.shape[-1]) if how.scale is None else how.scale,
        group=key.spec.group(axis),
    )
    return ring_attention(parts["query"], parts["key"], parts["value"], parts.get("attn_mask"), layout)


# -- operands in one layout ------------------------------------------------------------------------------------------


def _align_axis(
    func: TensorFunction,
    axis: int,
    specs: list[ShardSpec],
    parts: dict[str, Tensor],
    labels: dict[str, list[Hashable]],
    entries: dict[str, Entry | None],
    goes_round: bool,
) -> Entry | None:
    """Bring all operands to one layout along one mesh axis, in ``parts``; return the label and sizes of the result."""
    spec = specs[0]
    found = {entry[0] for entry in entries.values() if entry is not None}
    if not found:
        return None
    common = entries["query"]
    if not found <= {"L", "S"}:
        common, *different = {entry for entry in entries.values() if entry is not None}
        if different or isinstance(common[0], str):
            axis_name = spec.axes[axis].name
            raise unsupported(func, f"the operands are split differently along mesh axis {axis_name!r}", *specs)
    else:
        mask = entries.get("attn_mask")
        if mask is not None and mask[0] == "S":  # as the keys are, along which each rank wants all of it
            parts["attn_mask"] = all_gather_v(parts["attn_mask"], mask[1], -1, spec.group(axis))
            entries["attn_mask"] = mask = None
        if mask is not None and mask != common:
            raise unsupported(func, "attn_mask is split differently from the queries", *specs)
        sharded = {name: own[1] for name in ("key", "value") if not goes_round and (own := entries[name]) is not None}
        if sharded:
            _gather_rows(parts, sharded, spec.group(axis), "own" if common is None else "sum")
    for name, own in entries.items():
        if own is None and common is not None:
            parts[name] = to_axis(parts[name], labels[name], common, spec, axis)
    return common


def _gather_rows(
    parts: dict[str, Tensor], sizes: dict[str, tuple[int, ...]], group: Group, grad: Literal["own", "sum"]
) -> None:
    """Gather keys, values or both, in one message if their shapes allow it."""
    names = list(sizes)
    alike = {(x.shape[:-1], x.dtype, x.requires_grad, sizes[name]) for name in names for x in [parts[name]]}
    if len(alike) == 1:
        widths = [parts[name].shape[-1] for name in names]
        whole = all_gather_v(torch.cat([parts[name] for name in names], -1), sizes[names[0]], -2, group, grad=grad)
        parts.update(zip(names, torch.split(whole, widths, -1), strict=True))
        return
    for name in names:
        parts[name] = all_gather_v(parts[name], sizes[name], -2, group, grad=grad)


def _causal_mask(func: TensorFunction, operands: dict[str, Tensor], parts: dict[str, Tensor]) -> Tensor:
    """Return this rank's rows of the lower triangle."""
    query = operands["query"]
    if not isinstance(query, ShardTensor):
        raise unsupported(func, "is_causal with plain queries", *specs_of([*operands.values()]))
    device = query.local.device
    first = query.spec.offsets[-2]
    rows = torch.arange(first, first + query.local.shape[-2], device=device)
    return rows[:, None] >= torch.arange(parts["key"].shape[-2], device=device)


def _compute(func: TensorFunction, parts: dict[str, Tensor], how: _Options) -> Tensor:
    """Call torch's attention; a rank without queries attends with one query of zeros and drops its result."""
    query, mask = parts["query"], parts.get("attn_mask")
    empty = query.shape[-2] == 0
    if empty:
        query = torch.cat([query, query.new_zeros((*query.shape[:-2], 1, query.shape[-1]))], -2)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == 0:
            mask = torch.cat([mask, mask.new_ones((*mask.shape[:-2], 1, mask.shape[-1]))], -2)
    result = func(query, parts["key"], parts["value"], mask, **how._asdict())
    return tied_to(result.narrow(-2, 0, 0) if empty else result, (query, parts["key"], parts["value"], mask))

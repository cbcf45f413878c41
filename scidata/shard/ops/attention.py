"""Attention with the sequence, the heads or the batch sharded.

Each rank's queries attend to all keys. Where the sequence is sharded, keys and values are gathered, or go round in a
ring, or heads are exchanged for the sequence (``attention_ways``). Every rank uses them differently there, so their
gradients are summed back to their owners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from scidata.bounds import even_bounds
from scidata.shard.attention_ways import chosen_way
from scidata.shard.collectives import all_gather_v
from scidata.shard.ops.align import finish, local_of, specs_of, to_axis
from scidata.shard.ops.registry import register_op, unsupported
from scidata.shard.ring import RingLayout, ring_attention
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _labels(operands: dict[str, Tensor]) -> dict[str, list[Hashable]]:
    """Label dims from the right, so that batch dims broadcast."""
    last: dict[str, tuple[str, str]] = {
        "query": ("L", "E"),
        "key": ("S", "E"),
        "value": ("S", "Ev"),
        "attn_mask": ("L", "S"),
    }
    labels: dict[str, list[Hashable]] = {}
    for name, x in operands.items():
        ndim = len(x.shape)
        labels[name] = [*range(-ndim, -2), *last[name]][-ndim:]
    return labels


def _sharded_label(x: Any, labels: list[Hashable], axis: int) -> tuple[Hashable, tuple[int, ...]] | None:
    dim = x._spec.dims[axis] if isinstance(x, ShardTensor) else None
    return None if dim is None else (labels[dim], x._spec.sizes_of(axis))


@register_op(F.scaled_dot_product_attention)
def attention(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Attend to all keys from this rank's queries."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    operands = {name: given[name] for name in _NAMES[:4] if given.get(name) is not None}
    specs, labels = specs_of([*operands.values()]), _labels(operands)
    if given.get("dropout_p"):
        raise unsupported(func, "dropout draws random numbers per rank", *specs, remedy="use dropout_p=0")
    if any(spec.device_mesh != specs[0].device_mesh for spec in specs):
        raise unsupported(func, "the operands lie on different device meshes", *specs)
    if given.get("is_causal") and "attn_mask" in operands:
        raise unsupported(func, "is_causal beside an attn_mask", *specs, remedy="put the causal mask into attn_mask")
    sequence = _sequence_axis(operands)
    way = "gather" if sequence is None else _way(func, operands, sequence, given)
    if sequence is not None and way == "heads":
        return _by_heads(func, operands, given, sequence)
    parts = {name: local_of(x) for name, x in operands.items()}
    layout: list[tuple[Hashable, tuple[int, ...]] | None] = []
    for axis in range(len(specs[0].axes)):
        entries = {name: _sharded_label(x, labels[name], axis) for name, x in operands.items()}
        if given.get("enable_gqa") and any(entry is not None and entry[0] == -3 for entry in entries.values()):
            raise unsupported(func, "the heads are sharded and enable_gqa groups them", *specs)
        goes_round = way == "ring" and axis == sequence
        layout.append(_align_axis(func, axis, specs, parts, labels, entries, goes_round))
    used = [entry[0] for entry in layout if entry is not None]
    if len(set(used)) != len(used):
        raise unsupported(func, "two mesh axes would shard the same dim of the result", *specs)
    if sequence is not None and way == "ring":
        result = _by_ring(operands, parts, given, sequence)
    else:
        if given.get("is_causal") and "L" in used:
            given["is_causal"] = False
            parts["attn_mask"] = _causal_mask(func, operands, parts)
        result = _compute(func, given, parts)
    shape = list(result.shape)
    dims = [None if entry is None else len(shape) - 2 if entry[0] == "L" else len(shape) + entry[0] for entry in layout]  # type: ignore[operator]
    for dim, entry in zip(dims, layout, strict=True):
        if dim is not None and entry is not None:
            shape[dim] = sum(entry[1])
    return finish(result, specs[0].derive(shape, dims, [None if entry is None else entry[1] for entry in layout]))


# -- a sharded sequence: which way -----------------------------------------------------------------------------------


def _sequence_axis(operands: dict[str, Tensor]) -> int | None:
    """Return the mesh axis that shards the sequence of queries, keys and values, these two alike."""
    query, key, value = (operands[name] for name in _NAMES[:3])
    if not (isinstance(query, ShardTensor) and isinstance(key, ShardTensor) and isinstance(value, ShardTensor)):
        return None
    axes = [x._spec.axis_of_dim(x._spec.ndim - 2) for x in (query, key, value)]
    axis = axes[0]
    if axis is None or axes != [axis] * 3 or key._spec.sizes_of(axis) != value._spec.sizes_of(axis):
        return None
    return axis


def _way(func: Any, operands: dict[str, Tensor], axis: int, given: dict[str, Any]) -> str:
    """Choose from what all ranks know."""
    specs = [operands[name]._spec for name in _NAMES[:3]]  # type: ignore[attr-defined]
    query, key, value = specs
    shapes = [spec.global_shape[:-2] for spec in specs]
    alike = len({spec.ndim for spec in specs}) == 1 and (len(set(shapes)) == 1 or bool(given.get("enable_gqa")))
    others = [dim for spec in specs for other, dim in enumerate(spec.dims) if other != axis]
    heads = shapes[0][-1] if alike and len(set(shapes)) == 1 and shapes[0] and query.ndim - 3 not in others else 0
    num_ranks = query.axes[axis].size
    num_bytes = sum(math.prod(s.local_shape[:-2]) * s.global_shape[-2] * s.global_shape[-1] for s in (key, value))
    way = chosen_way(num_ranks, heads, num_bytes * operands["key"].dtype.itemsize)
    if way == "heads" and not heads:
        remedy = 'choose scidata.attention("ring") or "gather"'
        raise unsupported(func, "the heads cannot be exchanged for the sequence", *specs, remedy=remedy)
    return "gather" if way == "ring" and not alike else way


def _by_heads(func: Any, operands: dict[str, Tensor], given: dict[str, Any], axis: int) -> Tensor:
    """Exchange the sequence for heads, attend, and exchange back."""
    query, key, value = (operands[name] for name in _NAMES[:3])
    assert isinstance(query, ShardTensor)
    spec = query._spec
    num_heads, num_ranks = spec.global_shape[-3], spec.axes[axis].size
    bounds = even_bounds(num_heads, num_ranks).tolist() if num_heads >= num_ranks else [*range(num_heads + 1)]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    sizes += [0] * (num_ranks - len(sizes))

    def to_heads(x: Any) -> Any:
        placements = list(x.placements)
        placements[axis] = Shard(x._spec.ndim - 3)
        return x.redistribute(placements=placements, sizes={axis: sizes})

    if query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype and _same_layout(operands):
        moved = to_heads(torch.stack([query, key, value])).unbind(0)  # one exchange
    else:
        moved = [to_heads(x) for x in (query, key, value)]
    mask = operands.get("attn_mask")
    if isinstance(mask, ShardTensor) and mask._spec.dims[axis] in (mask._spec.ndim - 2, mask._spec.ndim - 1):
        whole = [Replicate() if i == axis else p for i, p in enumerate(mask.placements)]
        mask = mask.redistribute(placements=whole)
    rest = {name: value for name, value in given.items() if name not in _NAMES[:4]}
    result: Any = func(*moved, attn_mask=mask, **rest)
    return result.redistribute(placements=spec.placements, sizes={axis: spec.sizes_of(axis)})  # type: ignore[no-any-return]


def _same_layout(operands: dict[str, Tensor]) -> bool:
    specs = specs_of([operands[name] for name in _NAMES[:3]])
    return all(spec == specs[0] for spec in specs)


def _by_ring(operands: dict[str, Tensor], parts: dict[str, Tensor], given: dict[str, Any], axis: int) -> Tensor:
    """Pass the blocks of keys and values round."""
    query, key = operands["query"], operands["key"]
    assert isinstance(query, ShardTensor)
    assert isinstance(key, ShardTensor)
    scale = given.get("scale")
    layout = RingLayout(
        sizes=key._spec.sizes_of(axis),
        first_query=query._spec.offsets[-2],
        causal=bool(given.get("is_causal")),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        group=key._spec.group(axis),
    )
    return ring_attention(parts["query"], parts["key"], parts["value"], parts.get("attn_mask"), layout)


# -- operands in one layout ------------------------------------------------------------------------------------------


def _align_axis(
    func: Any,
    axis: int,
    specs: list[ShardSpec],
    parts: dict[str, Tensor],
    labels: dict[str, list[Hashable]],
    entries: dict[str, tuple[Hashable, tuple[int, ...]] | None],
    goes_round: bool,
) -> tuple[Hashable, tuple[int, ...]] | None:
    """Bring all operands to one layout along one mesh axis, in ``parts``; return what the axis shards in the result."""
    spec = specs[0]
    found = {entry[0] for entry in entries.values() if entry is not None}
    if not found:
        return None
    if not found <= {"L", "S"}:
        different = {entry for entry in entries.values() if entry is not None}
        entry = different.pop()
        if different or isinstance(entry[0], str):
            raise unsupported(
                func, f"the operands are split differently along mesh axis {spec.axes[axis].name!r}", *specs
            )
        for name, own in entries.items():
            if own is None:
                parts[name] = to_axis(parts[name], labels[name], entry, spec, axis)
        return entry
    rows, mask = entries["query"], entries.get("attn_mask")
    if mask is not None and mask[0] == "S":  # as the keys are, along which each rank wants all of it
        parts["attn_mask"] = all_gather_v(parts["attn_mask"], mask[1], -1, spec.group(axis))
        mask = None
    if mask is not None and mask != rows:
        raise unsupported(func, "attn_mask is split differently from the queries", *specs)
    for name in () if goes_round else ("key", "value"):
        own = entries[name]
        if own is not None:
            how = "own" if rows is None else "sum"
            parts[name] = all_gather_v(parts[name], own[1], -2, spec.group(axis), grad=how)  # type: ignore[arg-type]
        elif rows is not None:
            parts[name] = to_axis(parts[name], labels[name], rows, spec, axis)
    if rows is not None and "attn_mask" in parts and mask is None:
        parts["attn_mask"] = to_axis(parts["attn_mask"], labels["attn_mask"], rows, spec, axis)
    return rows


def _causal_mask(func: Any, operands: dict[str, Tensor], parts: dict[str, Tensor]) -> Tensor:
    """Return this rank's rows of the lower triangle."""
    query = operands["query"]
    if not isinstance(query, ShardTensor):
        raise unsupported(func, "is_causal with plain queries", *specs_of([*operands.values()]))
    device = query._local.device
    first = query._spec.offsets[-2]
    rows = torch.arange(first, first + query._local.shape[-2], device=device)
    return rows[:, None] >= torch.arange(parts["key"].shape[-2], device=device)


def _compute(func: Any, given: dict[str, Any], parts: dict[str, Tensor]) -> Tensor:
    """Call torch's attention; where this rank has no queries, with one of zeros whose result is cut off."""
    query, mask = parts["query"], parts.get("attn_mask")
    empty = query.shape[-2] == 0
    if empty:
        query = torch.cat([query, query.new_zeros((*query.shape[:-2], 1, query.shape[-1]))], -2)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == 0:
            mask = torch.cat([mask, mask.new_ones((*mask.shape[:-2], 1, mask.shape[-1]))], -2)
    result: Tensor = func(**{**given, **parts, "query": query, "attn_mask": mask})
    return result.narrow(-2, 0, 0) if empty else result

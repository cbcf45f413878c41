"""Recurrent layers and their cells: rows of a batch are independent, time is not, features are mixed.

A layer whose time is sharded is brought to the batch, where that is free, and its output back to the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.sums import replicate_parameters
from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import (
    Layout,
    align,
    bind,
    finish,
    is_sharded,
    spec_of_layout,
    specs_of,
    to_layout,
    whole_along,
)
from scidata.shard.ops.moving import as_sharded
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor


def _whole(values: Sequence[Any]) -> list[Any]:
    return [x.full_tensor() if isinstance(x, ShardTensor) else x for x in values]


def _shared(parameters: Sequence[Any], layout: Layout, spec: ShardSpec) -> list[Any]:
    """Say that plain parameters meet the shards of a layout: their gradients are summed over its axes."""
    result = _whole(parameters)
    learned = [i for i, p in enumerate(result) if p is not None and p.requires_grad]
    groups = [spec.group(axis) for axis, entry in enumerate(layout) if entry is not None]
    if learned and groups:
        for i, p in zip(learned, replicate_parameters([result[i] for i in learned], groups), strict=True):
            result[i] = p
    return result


# -- cells -----------------------------------------------------------------------------------------------------------


@register_op(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do one step, row by row; features are gathered where they are sharded."""
    given = bind("input hx w_ih w_hh b_ih b_hh", args, kwargs, b_ih=None, b_hh=None)
    several = func is torch.lstm_cell
    states = given["hx"] if several else [given["hx"]]
    operands = [whole_along(x, -1) for x in (given["input"], *states)]
    parameters = [given[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
    if any(len(x.shape) != 2 for x in operands) or len({x.shape[0] for x in operands}) > 1:
        raise RuntimeError(f"{func.__name__}: rows of {[tuple(x.shape) for x in operands]} do not fit")
    if not any(map(is_sharded, operands)):
        plain = _whole(operands)
        return func(plain[0], plain[1:] if several else plain[1], *_whole(parameters))
    labels: list[list[Hashable]] = [["row", i] for i, _ in enumerate(operands)]
    locals_, layout, _ = align(func, operands, labels)
    spec = specs_of(operands)[0]
    weights = _shared(parameters, layout, spec)
    found = func(locals_[0], locals_[1:] if several else locals_[1], *weights)
    new = spec_of_layout(layout, ["row", "state"], tuple(operands[1].shape), spec)
    return tuple(finish(x, new) for x in found) if several else finish(found, new)


# -- layers ----------------------------------------------------------------------------------------------------------

_NAMES = "input hx params has_biases num_layers dropout train bidirectional batch_first"


@register_op(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def layers(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run layers over time. Collective where time or features are sharded."""
    given = bind(_NAMES, args, kwargs)
    x, params = given["input"], given["params"]
    if not isinstance(given["has_biases"], bool):
        raise unsupported(func, "packed sequences", *specs_of([*args]), remedy="pad them")
    states = [*given["hx"]] if func is torch.lstm else [given["hx"]]
    if given["batch_first"]:
        output, *last = _run(func, x.transpose(0, 1), states, params, given)
        return output.transpose(0, 1), *last
    return _run(func, x, states, params, given)


def _run(func: Any, x: Any, states: list[Any], params: Sequence[Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """Run layers on ``(time, batch, features)``; one by one where numbers are drawn between them."""
    count, drop = int(given["num_layers"]), given["dropout"] if given["train"] else 0.0
    if not drop or count == 1:
        return _together(func, x, states, params, given, count)
    each, directions = len(params) // count, 2 if given["bidirectional"] else 1
    last = []
    for i in range(count):
        own = [s[i * directions : (i + 1) * directions] for s in states]
        x = x if i == 0 else F.dropout(x, drop)
        x, *ends = _together(func, x, own, params[i * each : (i + 1) * each], given, 1)
        last.append(ends)
    return x, *(torch.cat(list(ends)) for ends in zip(*last, strict=True))


def _together(
    func: Any, x: Any, states: list[Any], params: Sequence[Any], given: dict[str, Any], count: int
) -> tuple[Any, ...]:
    if len(x.shape) != 3 or any(len(s.shape) != 3 or s.shape[1] != x.shape[1] for s in states):
        raise RuntimeError(f"{func.__name__}: {[tuple(o.shape) for o in (x, *states)]} do not fit together")
    x = whole_along(x, -1)
    states = [whole_along(whole_along(s, 0), -1) for s in states]
    time = x.spec if is_sharded(x) and 0 in x.spec.sharded else None
    operands = [_by_batch(x), *states]
    flags = given["has_biases"], count, 0.0, given["train"], given["bidirectional"], False
    if not any(map(is_sharded, operands)):
        plain = _whole(operands)
        result = func(plain[0], plain[1:] if func is torch.lstm else plain[1], _whole(params), *flags)
    else:
        labels: list[list[Hashable]] = [
            ["time", "row", "in"],
            *([f"layer {i}", "row", i] for i, _ in enumerate(states)),
        ]
        locals_, layout, _ = align(func, operands, labels)
        spec = specs_of(operands)[0]
        weights = _shared(params, layout, spec)
        found = func(locals_[0], locals_[1:] if func is torch.lstm else locals_[1], weights, *flags)
        result = tuple(_of_batch(part, layout, x.shape[1], spec) for part in found)
    return (result[0] if time is None else _by_time(result[0], time)), *result[1:]


def _of_batch(part: Tensor, layout: Layout, rows: int, spec: ShardSpec) -> Tensor:
    return finish(part, spec_of_layout(layout, ["first", "row", "last"], (part.shape[0], rows, part.shape[2]), spec))


def _by_batch(x: Any) -> Any:
    """Bring the mesh axis that shards time to the batch, or gather it where another axis shards that."""
    if not is_sharded(x) or 0 not in x.spec.sharded:
        return x
    spec, axis = x.spec, x.spec.sharded[0]
    if 1 in spec.sharded:
        return whole_along(x, 0)
    dims, sizes = list(spec.dims), list(spec.sizes)
    dims[axis], sizes[axis] = 1, even_sizes(spec.global_shape[1], spec.axes[axis].size)
    return to_layout(x, spec.derive(spec.global_shape, dims, sizes))


def _by_time(output: Any, time: ShardSpec) -> Any:
    """Split the output as the input was."""
    return to_layout(as_sharded(output, time), time.derive(tuple(output.shape), time.dims, time.sizes))

"""Recurrent layers and cells: rows of a batch are independent, time is sequential, features are mixed.

A layer whose time is sharded is brought to the batch, where that is free, and its output back to the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.op_table import unsupported
from scidata.shard.ops.align import align, finish, is_sharded, meet_shards, plain_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import as_sharded, sharded_on, to_layout, whole_along

States = Tensor | Sequence[Tensor]  # hidden ones; of an LSTM those of its cells, too
Results = Tensor | tuple[Tensor, ...]
Parameters = Sequence[Tensor | None]


def _by_rows(
    func: Callable[..., Results], operands: Sequence[Tensor], labels: Sequence[Sequence[Hashable]],
    parameters: Parameters, run: Callable[[Tensor, States, Parameters], Results], out: Sequence[Hashable],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a function of an input, states and parameters on each rank's rows; each result has the labels ``out``.

    ``out`` has the label ``"row"``, which may be sharded, and others that no operand is sharded along.
    """
    several = func in (torch.lstm, torch.lstm_cell)
    if not any(map(is_sharded, operands)):
        plain, weights = [plain_of(x) for x in operands], [plain_of(p) for p in parameters]
        found = run(plain[0], plain[1:] if several else plain[1], weights)
        return (found,) if isinstance(found, Tensor) else found
    spec = specs_of(operands)[0]
    locals_, layout, _ = align(func, operands, labels)
    groups = [spec.group(axis) for axis, entry in enumerate(layout) if entry is not None]
    found = run(locals_[0], locals_[1:] if several else locals_[1], meet_shards(parameters, groups))
    results = (found,) if isinstance(found, Tensor) else found
    rows, place = operands[0].shape[list(labels[0]).index("row")], out.index("row")
    shapes = [(*part.shape[:place], rows, *part.shape[place + 1 :]) for part in results]
    return tuple(
        finish(part, spec_of_layout(layout, out, shape, spec)) for part, shape in zip(results, shapes, strict=True)
    )


@handles(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(
    func: Callable[..., Results], x: Tensor, hx: States, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Results:  # fmt: skip
    """Compute one step row by row; sharded features are gathered."""
    states = [hx] if isinstance(hx, Tensor) else hx
    operands = [whole_along(each, -1) for each in (x, *states)]
    if any(len(each.shape) != 2 for each in operands) or len({each.shape[0] for each in operands}) > 1:
        raise RuntimeError(f"{func.__name__}: rows of {[tuple(each.shape) for each in operands]} do not fit")
    labels = [["row", i] for i, _ in enumerate(operands)]

    def run(x: Tensor, states: States, weights: Parameters) -> Results:
        return func(x, states, *weights)

    found = _by_rows(func, operands, labels, (w_ih, w_hh, b_ih, b_hh), run, ["row", "state"])
    return found[0] if isinstance(hx, Tensor) else found


# -- layers ----------------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """Options of layers, in torch's order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


@handles(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def layers(
    func: Callable[..., Results], x: Tensor, hx: States, params: Parameters, has_biases: bool, *options: bool
) -> tuple[Tensor, ...]:
    """Run layers over time. Collective if time or features are sharded."""
    if not isinstance(has_biases, bool):
        raise unsupported(func, "packed sequences", *specs_of([x, hx, params, has_biases]), remedy="pad them")
    how, states = _How(has_biases, *options), [hx] if isinstance(hx, Tensor) else [*hx]
    if how.batch_first:
        output, *last = _run(func, x.transpose(0, 1), states, params, how)
        return output.transpose(0, 1), *last
    return _run(func, x, states, params, how)


def _run(
    func: Callable[..., Results], x: Tensor, states: Sequence[Tensor], params: Parameters, how: _How
) -> tuple[Tensor, ...]:
    """Run layers on ``(time, batch, features)``; one by one where numbers are drawn between them."""
    count, drop = how.num_layers, how.dropout if how.train else 0.0
    if not drop or count == 1:
        return _together(func, x, states, params, how)
    each, directions = len(params) // count, 2 if how.bidirectional else 1
    last = []
    for i in range(count):
        own = [s[i * directions : (i + 1) * directions] for s in states]
        x = x if i == 0 else F.dropout(x, drop)
        x, *ends = _together(func, x, own, params[i * each : (i + 1) * each], how._replace(num_layers=1))
        last.append(ends)
    return x, *(torch.cat(list(ends)) for ends in zip(*last, strict=True))


def _together(
    func: Callable[..., Results], x: Tensor, states: Sequence[Tensor], params: Parameters, how: _How
) -> tuple[Tensor, ...]:
    if len(x.shape) != 3 or any(len(s.shape) != 3 or s.shape[1] != x.shape[1] for s in states):
        raise RuntimeError(f"{func.__name__}: {[tuple(o.shape) for o in (x, *states)]} do not fit together")
    x = whole_along(x, -1)
    states = [whole_along(whole_along(s, 0), -1) for s in states]
    time = x.spec if is_sharded(x) and 0 in x.spec.sharded else None
    labels: list[list[Hashable]] = [["time", "row", "in"], *([f"layer {i}", "row", i] for i, _ in enumerate(states))]

    def run(x: Tensor, states: States, weights: Parameters) -> Results:
        return func(x, states, weights, *how._replace(dropout=0.0, batch_first=False))

    output, *ends = _by_rows(func, [_by_batch(x), *states], labels, params, run, ["first", "row", "last"])
    if time is not None:  # split as the input was
        output = to_layout(as_sharded(output, time), time.derive(tuple(output.shape), time.dims, time.sizes))
    return output, *ends


def _by_batch(x: Tensor) -> Tensor:
    """Move the mesh axis that shards time to the batch, or gather time if another axis shards the batch."""
    if not is_sharded(x) or 0 not in x.spec.sharded:
        return x
    spec, axis = x.spec, x.spec.sharded[0]
    if 1 in spec.sharded:
        return whole_along(x, 0)
    return sharded_on(x, axis, 1, even_sizes(spec.global_shape[1], spec.axes[axis].size))


@handles("_pack_padded_sequence")
def pack(func: Callable[..., Results], *args: Tensor | bool) -> Results:
    """Put sequences of several lengths one behind the other, gathered: steps of a time are rows of one part there."""
    return func(*map(plain_of, args))

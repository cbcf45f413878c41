"""Neighborhood attention: each cell of a grid attends to those around it, by NATTEN's kernels.

Hassani et al., "Neighborhood Attention Transformer" (CVPR 2023), with dilation, strides and causal dims of its later
versions. A window that would leave the grid is shifted inside, so that each has as many cells.

Along a sharded dim a rank fetches the keys and values in the windows of its queries, and calls the kernel on these rows
as if they were the whole grid. It finds the same windows: rows begin at a multiple of dilation times stride, so that
cells keep their places among those of a dilation and of a stride; they end behind the last window; and a window that is
shifted at the grid's border is at the border of these rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from scidata.shard.base import when_loaded
from scidata.shard.op_table import TorchFunction
from scidata.shard.ops.align import is_sharded, meet_shards, plain_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import as_sharded, to_layout, whole_along
from scidata.shard.ops.sliding import Extents, Middle, Windows, per_dim
from scidata.shard.rows.runs import Runs
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_GENERIC = "neighborhood_attention_generic"  # which NATTEN's functions and modules call


class Kernel(NamedTuple):
    """What NATTEN is asked for along one dim."""

    size: int  # rows in a window
    stride: int  # queries in a row that share a window
    dilation: int  # how far a window's rows are from each other
    is_causal: bool  # no query attends to rows after its own


def _window(row: int, extent: int, kernel: Kernel) -> tuple[int, int]:
    """Return the first and the last row that decide what a query's row attends to.

    These are its window's, and that of its leader: the query around which the queries of one stride have their window.
    """
    row, rest = divmod(row, kernel.dilation)
    last = -(-(extent - rest) // kernel.dilation) - 1  # of the rows that are as far from each other as the dilation
    leader = min(
        row // kernel.stride * kernel.stride + (kernel.stride - 1 if kernel.is_causal else kernel.stride // 2), last
    )
    left, right = (kernel.size - 1, 0) if kernel.is_causal else (kernel.size // 2, (kernel.size - 1) // 2)
    middle = leader if kernel.is_causal else min(max(leader, left), last - right)
    return max(middle - left, 0) * kernel.dilation + rest, max(middle + right, leader) * kernel.dilation + rest


def rows_of(start: int, stop: int, extent: int, kernel: Kernel) -> tuple[int, int]:
    """Return the rows ``[begin, end)`` that the kernel is called on for the queries ``[start, stop)``, at least one.

    Windows only move up from a query to the next of its dilation, so the first and the last of each are looked at.
    """
    ends = {*range(start, min(start + kernel.dilation, stop)), *range(max(start, stop - kernel.dilation), stop)}
    found = [_window(row, extent, kernel) for row in ends]
    least, step = kernel.size * kernel.dilation, kernel.stride * kernel.dilation  # the kernel takes no fewer rows
    begin = min(start, extent - least, *(first for first, _ in found)) // step * step
    return begin, min(max(stop, begin + least, *(last + 1 for _, last in found)), extent)


@handles(f"natten.functional.{_GENERIC}", *[f"physicsnemo.nn.functional.natten.na{n}d" for n in (1, 2, 3)])
def attend(
    func: TorchFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Extents,
    stride: Extents = 1,
    dilation: Extents = 1,
    is_causal: bool | Sequence[bool] = False,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    **options: object,
) -> Tensor | tuple[Tensor, ...]:
    """Attend to what is near; collective where a dim of the grid is sharded: keys and values are exchanged along it.

    Queries, keys and values are ``(batch, *grid, heads, features)``, added keys ``(batch, rows, heads, features)``.
    Raises ValueError: a kernel, with its dilation, is larger than a sharded dim.
    """
    given, count = [whole_along(x, -1) for x in (query, key, value)], query.ndim - 3
    if query.shape[-2] != key.shape[-2]:  # heads of queries share one of keys
        given = [whole_along(x, -2) for x in given]
    spec = next((x.spec for x in given if is_sharded(x)), None)
    more = [additional_keys, additional_values]
    how = {"stride": stride, "dilation": dilation, **options}
    if is_causal is not False:
        how["is_causal"] = is_causal
    if spec is None:
        return _called(func, [*map(plain_of, given)], kernel_size, how, [*map(plain_of, more)])
    q, k, v = (to_layout(as_sharded(x, spec), spec) for x in given)
    causal = (is_causal,) * count if isinstance(is_causal, bool) else tuple(is_causal)
    each = tuple(map(Kernel, *(per_dim(x, count) for x in (kernel_size, stride, dilation)), causal))
    kv = torch.cat([k, v], -1)
    assert isinstance(kv, ShardTensor)
    windows: Windows = kv.spec.plans.get_or_make(("neighborhood", each), lambda: _planned(kv.spec, each))
    keys, values = torch.split(windows.fetch(kv), [k.shape[-1], v.shape[-1]], -1)
    pads: list[int] = []
    for d in reversed(range(q.ndim)):
        begin, rows = windows.cuts.get(d, (0, q.local.shape[d]))
        pads += [begin, keys.shape[d] - begin - rows] if d in windows.asked else [0, 0]
    queries = F.pad(q.local, pads) if any(pads) else q.local
    found = _called(func, [queries, keys, values], kernel_size, how, meet_shards(more, kv.spec.shard_groups))
    shape = (*q.shape[:-1], v.shape[-1])
    results = [
        ShardTensor(windows.own(x), kv.spec.derive(shape[: x.ndim], kv.spec.dims, kv.spec.sizes))
        for x in (found if isinstance(found, tuple) else [found])
    ]
    return tuple(results) if isinstance(found, tuple) else results[0]


def _called(
    func: TorchFunction, given: Sequence[Tensor], kernel_size: Extents, how: dict[str, object], more: Sequence[object]
) -> Tensor | tuple[Tensor, ...]:
    named = dict(zip(("additional_keys", "additional_values"), more, strict=True)) if more[0] is not None else {}
    result: Tensor | tuple[Tensor, ...] = func(*given, kernel_size, **how, **named)  # type: ignore[assignment]
    return result


def _planned(spec: ShardSpec, each: Sequence[Kernel]) -> Windows:
    windows = Windows(spec)
    windows.keep([0, spec.ndim - 2])
    for d, kernel in enumerate(each, 1):
        if d not in spec.sharded:
            continue
        extent, least = spec.global_shape[d], kernel.size * kernel.dilation
        if least > extent:
            raise ValueError(f"a kernel of {least} rows, with its dilation, is larger than dim {d} of {extent} rows")

        def rows(start: int, stop: int, extent: int = extent, kernel: Kernel = kernel) -> Runs:
            begin, end = rows_of(start, stop, extent, kernel)
            return ((begin, end - begin),)

        start, count = windows.slide(d, extent, Middle(), rows, least, ("neighborhood", kernel))
        windows.cuts[d] = (start - rows(start, start + count)[0][0], count) if count else (0, 0)
    return windows


def _ask_for_rules() -> None:
    """Have NATTEN's functions ask their arguments for a rule, as torch's and PhysicsNeMo's do."""
    original = getattr(sys.modules["natten.functional"], _GENERIC, None)
    if original is None:  # an old version
        return

    @wraps(original)
    def generic(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        given = query, key, value
        if not has_torch_function(given):
            return original(*given, *args, **named)
        return handle_torch_function(generic, given, *given, *args, **named)

    for name in ("natten.functional", "natten.modules"):
        if name in sys.modules:
            setattr(sys.modules[name], _GENERIC, generic)


when_loaded("natten.functional", _ask_for_rules)

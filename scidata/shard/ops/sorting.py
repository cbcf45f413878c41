"""Along one dim, in the order of values: sorts, the largest few, running extremes, places in a sorted sequence.

Along a dim that is not sharded this is torch's own function on the part. Along a sharded one another dim is sharded for
the time being, where one is long enough to have rows for each rank; else each line is sorted where it lies, by a sample
sort. What of a sorted dim is kept is split as the dim was, evenly where it is shorter.

Which of equal elements are taken follows from torch's algorithm on the whole line. So a line that lies on several ranks
is gathered for torch's own kernel where equal elements decide. Of lines longer than ``GATHERED`` the first are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.op_table import find, register_op
from scidata.shard.ops.align import (
    align,
    bind,
    finish,
    is_sharded,
    refuse_out,
    replicated,
    spec_of_layout,
    specs_of,
    to_layout,
    whole_along,
)
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.ops.moving import as_sharded, moved_back, moved_off
from scidata.shard.rows.ordered import order_keys, sorted_ids, sum_over
from scidata.shard.rows.redistribute import fetch_rows
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_BOTH = (torch, Tensor)
GATHERED = 1 << 24  # elements of a line; 64 MiB in float32 on each rank, for the time of a call


def is_int(spec: ShardSpec, dim: int) -> bool:
    """Whether each rank holds this dim whole."""
    axis = spec.axis_of_dim(dim)
    return axis is None or spec.axes[axis].size == 1


def by_lines(spec: ShardSpec, dim: int) -> bool:
    """Whether lines along a sharded dim stay where they are: no other dim has rows for each rank, or is sharded."""
    free = [n for d, n in enumerate(spec.global_shape) if d not in spec.sharded]
    few = max(free, default=1) < spec.axes[spec.sharded[dim]].size
    return len(spec.sharded) == 1 and few and 0 not in free  # where there is no line, there is nothing to stack


def is_short(x: ShardTensor) -> bool:
    """Whether it is gathered for torch's own choice among equal elements."""
    return x.spec.global_size.numel() <= GATHERED


def on_lines(x: ShardTensor, dim: int, function: Callable[[ShardTensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Call a function of one dim on each line along ``dim``, the only sharded one, and stack what it gives."""
    if x.spec.ndim == 1:
        return function(x)
    other = int(dim == 0)
    found = [on_lines(row, dim - (other < dim), function) for row in x.unbind(other)]  # type: ignore[arg-type]
    return tuple(torch.stack(each, other) for each in zip(*found, strict=True))


def sort_line(line: ShardTensor, *, descending: bool = False) -> tuple[ShardTensor, ShardTensor]:
    """Sort a tensor of one dim, stably; return values and where they were. Collective."""
    spec = line.spec
    sizes, _, group = spec.parts(0)
    keys = order_keys(line.local)
    ids, counts = sorted_ids(~keys if descending else keys, sizes, group)
    (axis,) = spec.sharded.values()
    places = ShardTensor(ids, spec.with_rows(0, counts)).redistribute(sizes={axis: sizes})
    return ShardTensor(fetch_rows(line.local, places.local, sizes, 0, group), spec), places


@register_op(*find("sort argsort", namespaces=_BOTH))
def sort(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sort along one dim; lines that stay split always stably."""
    given = bind("input dim descending", args, kwargs)
    x: ShardTensor = given["input"]
    refuse_out(func, kwargs, x.spec)
    dim, descending = normal_dim(given.get("dim", -1), x.spec.ndim), bool(given.get("descending", False))
    if is_int(x.spec, dim):
        return _wrapped(x, dim, func(x.local, **{name: value for name, value in given.items() if name != "input"}))
    values, places = _sorted(x, dim, descending, stable=bool(given.get("stable")))
    return torch.return_types.sort((values, places)) if func.__name__ == "sort" else places


def _sorted(x: ShardTensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, ...]:
    if by_lines(x.spec, dim):
        return on_lines(x, dim, lambda line: sort_line(line, descending=descending))
    found = torch.sort(moved_off(x, [dim]), dim=dim, descending=descending, stable=stable)
    return tuple(moved_back(each, [dim], x.spec) for each in found)


def _wrapped(x: ShardTensor, dim: int, found: Any) -> Any:
    """Wrap one result, or several, of a function along a dim that each rank holds whole."""
    if not isinstance(found, Tensor):
        return type(found)([_wrapped(x, dim, each) for each in found])
    extent = found.shape[dim]
    return ShardTensor(found, x.spec.with_rows(dim, (extent,) if dim in x.spec.sharded else extent))


@register_op(*find("msort", namespaces=_BOTH))
def msort(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sort along the first dim, without saying from where."""
    refuse_out(func, kwargs)
    x: ShardTensor = args[0] if args else kwargs["input"]
    return _wrapped(x, 0, func(x.local)) if is_int(x.spec, 0) else torch.sort(x, dim=0).values


@register_op(*find("topk", namespaces=_BOTH))
def topk(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the k largest, or smallest, along one dim; of a sharded one, they are split evenly."""
    given = bind("input k dim largest sorted", args, kwargs, dim=-1, largest=True)
    x: ShardTensor = given.pop("input")
    refuse_out(func, kwargs, x.spec)
    spec, k, dim = x.spec, int(given["k"]), normal_dim(given["dim"], x.spec.ndim)
    if not 0 <= k <= spec.global_shape[dim]:
        raise RuntimeError(f"topk: k={k} is out of range for dim {dim} of extent {spec.global_shape[dim]}")
    if is_int(spec, dim):
        return _wrapped(x, dim, func(x.local, **given))
    if by_lines(spec, dim):
        found = on_lines(x, dim, lambda line: _top_of_line(func, line, given))
    else:
        found = tuple(moved_back(each, [dim], spec) for each in func(moved_off(x, [dim]), **given))
    return torch.return_types.topk(found)  # type: ignore[arg-type]


def _top_of_line(func: Any, line: ShardTensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Take the first k of the line; where they are few and differ, only what each rank could have is gathered."""
    spec, k, largest = line.spec, int(given["k"]), bool(given["largest"])
    (axis,) = spec.sharded.values()
    sizes, rank, group = spec.parts(0)
    wanted, few = even_sizes(k, len(sizes)), k * len(sizes) ** 2 <= sum(sizes)
    if not few and not is_short(line):
        found = sort_line(line, descending=largest)
        return tuple(each[:k].redistribute(sizes={axis: wanted}) for each in found)  # type: ignore[attr-defined]
    ids = _first_of_line(line, k, largest) if few and given.get("sorted", True) else None
    if ids is None:
        ids = func(line.full_tensor().detach(), **{**given, "dim": 0}).indices
    mine = ids[sum(wanted[:rank]) :][: wanted[rank]]
    new = spec.with_rows(0, wanted)
    return ShardTensor(fetch_rows(line.local, mine, sizes, 0, group), new), ShardTensor(mine, new)


def _first_of_line(line: ShardTensor, k: int, largest: bool) -> Tensor | None:
    """Return where the first k of the sorted line are; None where equal ones of a short line decide that."""
    sizes, _, group = line.spec.parts(0)
    keys = order_keys(line.local)
    keys = ~keys if largest else keys
    own = torch.sort(keys, stable=True).indices[: k + 1]
    pairs = torch.stack([keys[own], own + line.spec.offsets[0]], 1)
    gathered = all_gather_v(pairs, tuple(min(k + 1, size) for size in sizes), 0, group)
    first = gathered[torch.sort(gathered[:, 0], stable=True).indices[: k + 1]]
    if is_short(line) and (first[1:, 0] == first[:-1, 0]).any():
        return None
    return first[:k, 1]


# -- running extremes ----------------------------------------------------------------------------------------------


@register_op(*find("cummax cummin", namespaces=_BOTH))
def cummax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the extreme of all so far; on a sharded dim each rank goes on from the extremes of the ranks before it."""
    given = bind("input dim", args, kwargs)
    x: ShardTensor = given["input"]
    refuse_out(func, kwargs, x.spec)
    spec, dim = x.spec, normal_dim(given["dim"], x.spec.ndim)
    largest = "cummax" in func.__name__
    found = (torch.cummax if largest else torch.cummin)(x.local, dim)
    if is_int(spec, dim):
        return _wrapped(x, dim, found)
    sizes, rank, group = spec.parts(dim)
    held, length = tuple(int(size > 0) for size in sizes), spec.local_shape[dim]
    start = max(0, length - 1)
    values, indices = found.values, found.indices + spec.offsets[dim]
    # the others use a rank's last row each for their own part, hence grad="sum"
    totals = all_gather_v(values.narrow(dim, start, held[rank]), held, dim, group, grad="sum")
    places = all_gather_v(indices.narrow(dim, start, held[rank]), held, dim, group)
    before = sum(held[:rank])
    if before == 0 or not length:
        values = values + totals.narrow(dim, 0, 0).sum(dim, keepdim=True).to(values.dtype)  # in the graph, as elsewhere
    else:
        last = (torch.cummax if largest else torch.cummin)(totals.detach().narrow(dim, 0, before), dim)
        which = last.indices.narrow(dim, before - 1, 1)
        carried, place = totals.gather(dim, which), places.gather(dim, which)
        wins = values >= carried if largest else values <= carried  # of equal ones the last
        if values.is_floating_point():
            wins = values.isnan() | (wins & ~carried.isnan())
        values, indices = torch.where(wins, values, carried), torch.where(wins, indices, place)
    kind = torch.return_types.cummax if largest else torch.return_types.cummin
    return kind((ShardTensor(values, spec), ShardTensor(indices, spec)))


# -- places in a sorted sequence -----------------------------------------------------------------------------------


@register_op(torch.bucketize)
def bucketize(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Say between which boundaries each value lies."""
    given = bind("input boundaries", args, kwargs)
    return torch.searchsorted(given.pop("boundaries"), given.pop("input"), **given)


@register_op(torch.searchsorted)
def searchsorted(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Say before which element of a sorted row each value belongs.

    Where the rows are cut, each rank says how many of its own come before, and these add up. Where they are shorter
    than the values, they are gathered instead.
    """
    given = bind("sorted_sequence input", args, kwargs, sorter=None)
    rows, sorter = given.pop("sorted_sequence"), given.pop("sorter")
    values = given.pop("self") if "self" in given else given.pop("input")
    refuse_out(func, given, *specs_of([rows, values]))
    if not isinstance(values, Tensor):  # one number, in a sequence of one dim
        if sorter is not None:
            rows = rows[sorter]
        return sum_over(func(rows.local, values, **given), rows.spec.group(rows.spec.sharded[0]))
    if sorter is not None or math.prod(rows.shape) < math.prod(values.shape) or _has_missing(rows):
        rows, sorter = whole_along(rows, -1), whole_along(sorter, -1)
    if not is_sharded(rows) or len(rows.shape) - 1 not in rows.spec.sharded:
        return _searched(func, rows, values, sorter, given)
    axis = rows.spec.sharded[len(rows.shape) - 1]
    if not is_sharded(values) or values.spec.dims[axis] is None:
        return _searched(func, rows, values, sorter, given)
    found = _searched(func, rows, replicated(values, {axis}), sorter, given)  # every rank counts for all of them
    return to_layout(as_sharded(found, values.spec), values.spec)


def _has_missing(rows: Tensor) -> bool:
    """Whether a row is cut and has NaN, among which torch's search goes where its halving of the whole row leads."""
    cut = is_sharded(rows) and len(rows.shape) - 1 in rows.spec.sharded
    return cut and rows.is_floating_point() and bool(rows.isnan().any())


def _searched(func: Any, rows: Tensor, values: Tensor, sorter: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    shared = range(len(rows.shape) - 1)
    if shared and tuple(rows.shape[:-1]) != tuple(values.shape[:-1]):
        raise RuntimeError(f"searchsorted: the first dims of {tuple(rows.shape)} and {tuple(values.shape)} differ")
    labels: list[Hashable] = [d if d in shared else ("value", d) for d in range(len(values.shape))]
    operands = [x.detach() for x in (rows, values, sorter) if x is not None]
    (part, wanted, *order), layout, _ = align(
        func, operands, [[*shared, "row"], labels, [*shared, "row"]][: len(operands)]
    )
    found = func(part, wanted, **options, **({"sorter": order[0]} if order else {}))
    like = specs_of(operands)[0]
    for axis, entry in enumerate(layout):
        if entry is not None and entry[0] == "row":
            found = sum_over(found, like.group(axis))
    return finish(found, spec_of_layout(layout, labels, tuple(values.shape), like))

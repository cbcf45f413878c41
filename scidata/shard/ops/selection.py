"""What stands at a place of the order of values: medians, quantiles, the k-th value; and the most frequent one.

Of all elements, or of a line that is split, the value is found by counting, on any layout, and no element moves; but
where equal elements decide which of them is taken, torch's own kernel does that on the whole (see ``sorting``). Of a
sharded dim beside one that is long enough, that one is sharded for the time being. Results have the layout of other
reductions: what shards a reduced dim replicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.op_table import find, register_op
from scidata.shard.ops.align import bind, finish, is_sharded, local_of, refuse_out, specs_of, to_layout
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.ops.moving import as_sharded, cut_to, moved_off, without_empty
from scidata.shard.ops.sorting import by_lines, is_int, is_short, on_lines
from scidata.shard.rows.ordered import LARGEST, keys_at, least_over, order_keys, sum_over
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_BOTH = (torch, Tensor)


def _count(x: ShardTensor, mine: Tensor) -> int:
    """Count what is true on all ranks. Collective."""
    total = mine.sum()
    for group in x.spec.shard_groups:
        total = sum_over(total, group)
    return int(total)


def _missing(x: ShardTensor, keys: Tensor) -> int:
    return _count(x, keys == LARGEST) if x.local.is_floating_point() else 0


def _picked(x: ShardTensor, keys: Tensor, wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the first elements that have these keys, and their numbers in C order of the whole. Collective.

    The gradient of each goes to that element.
    """
    spec, flat = x.spec, x.local.reshape(-1)
    places, numbers = [], []
    for key in wanted:
        hits = (keys == key).reshape(-1)
        place = int(hits.int().argmax()) if len(hits) else 0
        places.append(place)
        number = LARGEST
        if len(hits) and hits[place]:
            index = torch.unravel_index(torch.tensor(place), spec.local_shape)
            number = 0
            for at, start, extent in zip(index, spec.offsets, spec.global_shape, strict=True):
                number = number * extent + int(at) + start
        numbers.append(number)
    own = torch.tensor(numbers, device=flat.device)
    first = least_over(own, spec.shard_groups)
    mine = (own == first) & (own != LARGEST)
    values = flat[torch.tensor(places, device=flat.device)] if len(flat) else flat.sum().to(flat.dtype).expand(len(own))
    values = torch.where(mine, values, torch.zeros((), dtype=flat.dtype, device=flat.device))
    for group in spec.shard_groups:
        values = all_reduce_sum(values, group)
    return values, first


def _place(func: Any, count: int, missing: int, k: int | None) -> int:
    """Return which place of the order, from 0, a function asks for."""
    if k is not None:
        return k - 1
    if "nanmedian" in func.__name__:
        return max(0, count - missing - 1) // 2
    return count - 1 if missing else (count - 1) // 2


# -- one value -----------------------------------------------------------------------------------------------------


@register_op(*find("median nanmedian", namespaces=_BOTH))
def median(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the lower median of all elements, or along one dim. Collective where that is sharded."""
    given = bind("input dim keepdim", args, kwargs)
    if "dim" in given:
        return _reduced(func, given, lambda line: _at_place(func, line, None))
    x: ShardTensor = given["input"]
    if 0 in x.spec.global_shape:
        return func(x.full_tensor())
    _check_dtype(func, x)
    keys = order_keys(x.local)
    place = _place(func, x.spec.global_size.numel(), _missing(x, keys), None)
    (key,) = keys_at(keys, [place], x.spec.shard_groups)
    value = _picked(x, keys, [key])[0][0].detach()
    if not x.local.requires_grad or not torch.is_grad_enabled():
        return value
    hits = keys == key  # all that equal it get equal shares of the gradient
    count = _count(x, hits)
    return known(x.local, value, lambda grad, hits: torch.where(hits, grad / count, 0), hits)


@register_op(*find("kthvalue", namespaces=_BOTH))
def kthvalue(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the k-th smallest value along one dim, and its place there. Collective where that is sharded."""
    given = bind("input k dim keepdim", args, kwargs, dim=-1)
    spec, k = given["input"].spec, given["k"]
    extent = spec.global_shape[normal_dim(given["dim"], spec.ndim)]
    if not 1 <= k <= extent:
        raise RuntimeError(f"kthvalue: k={k} is out of range for dim {given['dim']} of extent {extent}")
    return _reduced(func, given, lambda line: _at_place(func, line, k))


@register_op(*find("mode", namespaces=_BOTH))
def mode(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the most frequent value along one dim, of several the least. Collective where that is sharded."""
    return _reduced(func, bind("input dim keepdim", args, kwargs, dim=-1), _mode_of)


def _check_dtype(func: Any, x: ShardTensor) -> None:
    func(x.local.detach().new_zeros(1), *[1] * (func.__name__ == "kthvalue"))  # torch says so where it has none


def _at_place(func: Any, line: ShardTensor, k: int | None) -> tuple[Tensor, ...]:
    _check_dtype(func, line)
    keys = order_keys(line.local)
    missing = _missing(line, keys)
    found = keys_at(keys, [_place(func, line.spec.global_shape[0], missing, k)], line.spec.shard_groups)
    first = missing and k is None and "nan" not in func.__name__  # of several NaN, median takes the first
    if not first and _are_equal(line, keys, found):
        return _by_torch(line, lambda whole: func(whole, *[0] if k is None else [k]))
    return _picked(line, keys, found)


def _are_equal(x: ShardTensor, keys: Tensor, wanted: Sequence[int]) -> bool:
    """Whether more elements than one have a wanted key, and torch is to say which is taken. Collective."""
    return is_short(x) and any(_count(x, keys == key) > 1 for key in {*wanted})


def _by_torch(line: ShardTensor, choose: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
    """Take the element whose place torch's own function finds on the whole line. Collective."""
    place = choose(line.full_tensor().detach()).indices.reshape(1)
    return line[place].full_tensor(), place  # type: ignore[attr-defined]


def _mode_of(line: ShardTensor) -> tuple[Tensor, ...]:
    if is_short(line):
        return _by_torch(line, torch.mode)
    values, counts = torch.unique(line.detach(), return_counts=True)
    place = counts.argmax(0)  # the first of equal ones; each NaN is one of its own
    value = values.index_select(0, place.reshape(1)).full_tensor()
    hits = (order_keys(line.local) == order_keys(value)).nonzero()
    last = hits[-1] + line.spec.offsets[0] if len(hits) else hits.new_full((1,), -1)
    last = -least_over(-last, line.spec.shard_groups)
    return line[last].full_tensor(), last  # type: ignore[attr-defined]


def _reduced(func: Any, given: Mapping[str, Any], of_line: Callable[[ShardTensor], tuple[Tensor, ...]]) -> Any:
    """Reduce one dim to a value and its place."""
    x: ShardTensor = given["input"]
    refuse_out(func, given, x.spec)
    spec, dim, keepdim = x.spec, normal_dim(given["dim"], x.spec.ndim), bool(given.get("keepdim", False))
    options = {name: value for name, value in given.items() if name != "input"}
    new = spec.without([dim], keepdim=keepdim)
    if is_int(spec, dim):
        found = func(x.local, **options)
        return type(found)([finish(each, new) for each in found])
    kind = getattr(torch.return_types, func.__name__)
    if 0 in spec.global_shape or not by_lines(spec, dim):
        found = func(moved_off(x, [dim]), **options)
        return kind([local_or_sharded(to_layout(as_sharded(each, spec), new)) for each in found])
    lines = on_lines(x, dim, of_line)
    return kind([each if keepdim else each.squeeze(dim) for each in lines])


def local_or_sharded(x: ShardTensor) -> Tensor:
    """Return a plain tensor where no axis shards."""
    return finish(x.local, x.spec)


# -- quantiles -----------------------------------------------------------------------------------------------------


@register_op(*find("quantile nanquantile", namespaces=_BOTH))
def quantile(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Find quantiles of all elements, or along one dim. Collective where that is sharded."""
    given = bind("input q dim keepdim", args, kwargs, dim=None, keepdim=False, interpolation="linear")
    x, q = given.pop("input"), given["q"]
    refuse_out(func, given, *specs_of([x, q]))
    q = given["q"] = q.full_tensor() if isinstance(q, ShardTensor) else q
    if not is_sharded(x):
        return func(local_of(x), **given)  # type: ignore[no-any-return]
    func(x.local.detach().new_zeros(1), q, interpolation=given["interpolation"])  # torch says what does not fit
    spec, many = x.spec, isinstance(q, Tensor) and q.ndim == 1
    if 0 in spec.global_shape:
        return func(x.full_tensor(), **given)  # type: ignore[no-any-return]
    if given["dim"] is None:
        found = _quantiles(func, x, q, given["interpolation"])
        shape = (*[len(found)] * many, *[1] * (spec.ndim if given["keepdim"] else 0))
        return found.reshape(shape)
    dim, keepdim = normal_dim(given["dim"], spec.ndim), bool(given["keepdim"])
    new = _with_quantiles(spec.without([dim], keepdim=keepdim), len(q) if many else None)
    if is_int(spec, dim):
        if isinstance(q, Tensor) and q.requires_grad:
            given["q"] = replicate_to_shards(q, new.shard_groups)
        return finish(cut_to(func(without_empty(x.local, spec), **given), new), new)
    if not by_lines(spec, dim):
        return local_or_sharded(to_layout(as_sharded(func(moved_off(x, [dim]), **given), spec), new))
    (lines,) = on_lines(x, dim, lambda line: (_quantiles(func, line, q, given["interpolation"]),))
    if not many:
        return lines if keepdim else lines.squeeze(dim)
    lines = lines.movedim(dim, 0)
    return lines.unsqueeze(dim + 1) if keepdim else lines


def _with_quantiles(spec: ShardSpec, count: int | None) -> ShardSpec:
    """Put a dim for several quantiles before the others."""
    if count is None:
        return spec
    return spec.move_dims((count, *spec.global_shape), {d: d + 1 for d in range(spec.ndim)})


def _quantiles(func: Any, x: ShardTensor, q: Any, interpolation: str) -> Tensor:
    """Return ``(num_q,)`` quantiles of all elements, as torch finds them in the sorted row. Collective."""
    keys, count = order_keys(x.local), math.prod(x.spec.global_shape)
    missing = _missing(x, keys)
    last = count - 1
    q = torch.as_tensor(q, dtype=x.dtype, device=x.device).reshape(-1)
    if "nanquantile" in func.__name__:
        at = q * max(count - missing - 1, 0)
    else:
        at = torch.full_like(q, last) if missing else q * last
    rounded = {"lower": at.floor, "higher": at.ceil, "nearest": at.round}
    at = rounded[interpolation]() if interpolation in rounded else at
    low, high = at.detach().floor().long().tolist(), at.detach().ceil().long().tolist()
    places = sorted({*low, *high})
    found = keys_at(keys, places, x.spec.shard_groups)
    if x.local.requires_grad and torch.is_grad_enabled() and _are_equal(x, keys, found):
        return func(x.full_tensor().reshape(-1), q, interpolation=interpolation)  # type: ignore[no-any-return]
    values = dict(zip(places, _picked(x, keys, found)[0].unbind(), strict=True))
    below = torch.stack([values[place] for place in low])
    if interpolation in rounded:
        return below
    above = torch.stack([values[place] for place in high])
    weight = torch.full_like(q, 0.5) if interpolation == "midpoint" else at - at.detach().floor()
    return below.lerp(above, weight)

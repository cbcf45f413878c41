"""Values by sorted position (median, quantile, k-th value), and the most frequent value.

Of all elements, or of a line that is split, the value is found by counting, on any layout, and no element moves; but
where equal elements decide which of them is taken, torch's own kernel does that on the whole (see ``sorting``). Of a
sharded dim beside one that is long enough, that one is sharded for the time being. Results have the layout of other
reductions: the mesh axes of a reduced dim replicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.op_table import TensorFunction, TorchFunction
from scidata.shard.ops.align import finish, is_sharded, local_of, plain_of
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.moving import as_sharded, cut_to, moved_off, to_layout, without_empty
from scidata.shard.ops.reductions import number_of
from scidata.shard.ops.sorting import by_lines, is_short, is_whole, on_lines
from scidata.shard.rows.ordered import LARGEST, keys_at, least_over, order_keys, total_over
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

Pair = tuple[Tensor, Tensor]  # values and their places


def _count(x: ShardTensor, mine: Tensor) -> int:
    """Count the true elements of all ranks. Collective."""
    return int(total_over(mine.sum(), x.spec.shard_groups))


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
        numbers.append(number_of(spec, hits))
    own = torch.stack(numbers)
    first = least_over(own, spec.shard_groups)
    mine = (own == first) & (own != LARGEST)
    values = flat[torch.tensor(places, device=flat.device)] if len(flat) else flat.sum().to(flat.dtype).expand(len(own))
    values = torch.where(mine, values, torch.zeros((), dtype=flat.dtype, device=flat.device))
    for group in spec.shard_groups:
        values = all_reduce_sum(values, group)
    return values, first


def _place(func: TorchFunction, count: int, missing: int, k: int | None) -> int:
    """Return which place of the order, from 0, a function asks for."""
    if k is not None:
        return k - 1
    if "nanmedian" in func.__name__:
        return max(0, count - missing - 1) // 2
    return count - 1 if missing else (count - 1) // 2


# -- one value -----------------------------------------------------------------------------------------------------


@handles("median nanmedian")
def median(
    func: Callable[..., Tensor | Pair], x: ShardTensor, dim: int | None = None, keepdim: bool = False
) -> Tensor | Pair:
    """Find the lower median of all elements, or along one dim. Collective if that is sharded."""
    if dim is not None:
        return _reduced(func, x, (dim, keepdim), dim, keepdim, lambda line: _at_place(func, line, None))
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


@handles("kthvalue")
def kthvalue(func: Callable[..., Pair], x: ShardTensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """Find the k-th smallest value along one dim, and its place there. Collective if that is sharded."""
    extent = x.spec.global_shape[normal_dim(dim, x.spec.ndim)]
    if not 1 <= k <= extent:
        raise RuntimeError(f"kthvalue: k={k} is out of range for dim {dim} of extent {extent}")
    return _reduced(func, x, (k, dim, keepdim), dim, keepdim, lambda line: _at_place(func, line, k))


@handles("mode")
def mode(func: Callable[..., Pair], x: ShardTensor, dim: int = -1, keepdim: bool = False) -> Pair:
    """Find the most frequent value along one dim, of several the least. Collective if that is sharded."""
    return _reduced(func, x, (dim, keepdim), dim, keepdim, _mode_of)


def _check_dtype(func: TorchFunction, x: ShardTensor) -> None:
    func(x.local.detach().new_zeros(1), *[1] * (func.__name__ == "kthvalue"))  # torch says so where it has none


def _at_place(func: Callable[..., Tensor | Pair], line: ShardTensor, k: int | None) -> Pair:
    _check_dtype(func, line)
    keys = order_keys(line.local)
    missing = _missing(line, keys)
    found = keys_at(keys, [_place(func, line.spec.global_shape[0], missing, k)], line.spec.shard_groups)
    first = missing and k is None and "nan" not in func.__name__  # of several NaN, median takes the first
    if not first and _are_equal(line, keys, found):
        return _by_torch(line, lambda whole: func(whole, *[0] if k is None else [k]))
    return _picked(line, keys, found)


def _are_equal(x: ShardTensor, keys: Tensor, wanted: Sequence[int]) -> bool:
    """Whether several elements have a wanted key, so that torch has to choose among them. Collective."""
    return is_short(x) and any(_count(x, keys == key) > 1 for key in {*wanted})


def _by_torch(line: ShardTensor, choose: Callable[[Tensor], Tensor | Pair]) -> Pair:
    """Take the element at the position that torch's own function finds on the gathered line. Collective."""
    place = choose(line.full_tensor().detach())[1].reshape(1)
    return plain_of(line[place]), place


def _mode_of(line: ShardTensor) -> Pair:
    if is_short(line):
        return _by_torch(line, torch.mode)
    values, counts = torch.unique(line.detach(), return_counts=True)
    place = counts.argmax(0)  # the first of equal ones; each NaN is one of its own
    value = plain_of(values.index_select(0, place.reshape(1)))
    hits = (order_keys(line.local) == order_keys(value)).nonzero()
    last = hits[-1] + line.spec.offsets[0] if len(hits) else hits.new_full((1,), -1)
    last = -least_over(-last, line.spec.shard_groups)
    return plain_of(line[last]), last


def _reduced(
    func: Callable[..., Tensor | Pair],
    x: ShardTensor,
    args: tuple[int, ...],
    dim: int,
    keepdim: bool,
    of_line: Callable[[ShardTensor], Pair],
) -> Pair:
    """Reduce one dim to a value and its place."""
    spec, dim, kind = x.spec, normal_dim(dim, x.spec.ndim), getattr(torch.return_types, func.__name__)
    new = spec.without([dim], keepdim=keepdim)
    if is_whole(spec, dim):
        found = [finish(each, new) for each in func(x.local, *args)]
    elif 0 in spec.global_shape or not by_lines(spec, dim):
        found = [_finish_as(each, spec, new) for each in func(moved_off(x, [dim]), *args)]
    else:
        found = [each if keepdim else each.squeeze(dim) for each in on_lines(x, dim, of_line)]
    return kind(found)


def _finish_as(x: Tensor, like: ShardSpec, spec: ShardSpec) -> Tensor:
    """Bring a result to its layout; return a plain tensor if no axis shards. Collective if the layout changes."""
    return finish(to_layout(as_sharded(x, like), spec).local, spec)


# -- quantiles -----------------------------------------------------------------------------------------------------


@handles("quantile nanquantile")
def quantile(
    func: TensorFunction,
    x: Tensor,
    q: Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Find quantiles of all elements, or along one dim. Collective if that is sharded."""
    q = plain_of(q)
    if not is_sharded(x):
        return func(local_of(x), q, dim, keepdim, interpolation=interpolation)
    func(x.local.detach().new_zeros(1), q, interpolation=interpolation)  # torch raises for wrong options
    spec, many = x.spec, isinstance(q, Tensor) and q.ndim == 1
    if 0 in spec.global_shape:
        return func(x.full_tensor(), q, dim, keepdim, interpolation=interpolation)
    if dim is None:
        found = _quantiles(func, x, q, interpolation)
        return found.reshape((*[len(found)] * many, *[1] * (spec.ndim if keepdim else 0))).clone()
    dim = normal_dim(dim, spec.ndim)
    new = _with_quantiles(spec.without([dim], keepdim=keepdim), len(q) if isinstance(q, Tensor) and many else None)
    if is_whole(spec, dim):
        if isinstance(q, Tensor) and q.requires_grad:
            q = replicate_to_shards(q, new.shard_groups)
        part = func(without_empty(x.local, spec), q, dim, keepdim, interpolation=interpolation)
        return finish(cut_to(part, new), new)
    if not by_lines(spec, dim):
        return _finish_as(func(moved_off(x, [dim]), q, dim, keepdim, interpolation=interpolation), spec, new)
    (lines,) = on_lines(x, dim, lambda line: (_quantiles(func, line, q, interpolation),))
    if many:
        lines = lines.movedim(dim, 0)
        return (lines.unsqueeze(dim + 1) if keepdim else lines).clone()
    return lines if keepdim else lines.squeeze(dim).clone()


def _with_quantiles(spec: ShardSpec, count: int | None) -> ShardSpec:
    """Put a dim for several quantiles before the others."""
    if count is None:
        return spec
    return spec.move_dims((count, *spec.global_shape), {d: d + 1 for d in range(spec.ndim)})


def _quantiles(func: TensorFunction, x: ShardTensor, q: Tensor | float, interpolation: str) -> Tensor:
    """Return ``(num_q,)`` quantiles of all elements, as torch finds them in the sorted row. Collective.

    Of 6 elements 0.3 is at place 0.3 * 5 = 1.5: halfway between those at places 1 and 2.
    """
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
        return func(x.full_tensor().reshape(-1), q, interpolation=interpolation)
    values = dict(zip(places, _picked(x, keys, found)[0].unbind(), strict=True))
    below = torch.stack([values[place] for place in low])
    if interpolation in rounded:
        return below
    above = torch.stack([values[place] for place in high])
    weight = torch.full_like(q, 0.5) if interpolation == "midpoint" else at - at.detach().floor()
    return below.lerp(above, weight)

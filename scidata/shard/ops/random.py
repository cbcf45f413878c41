"""Random numbers: those that one process draws for the whole tensor, of which each rank keeps its part.

So results do not depend on how many ranks share a tensor, and on the CPU they equal those of plain torch. Ranks have to
be in step, as with one seed on all ranks of a domain. The price: each rank draws for the whole tensor, for dropout one
byte an element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.memory import UNKNOWN, strides_of
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import bind, finish, refuse_out, specs_of
from scidata.shard.rows.edge_order import edge_runs
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

_ALPHA = 1.7580993408473766  # of SELU: where dropped elements go in alpha dropout


_ALPHA_DROPOUTS = (F.alpha_dropout, F.feature_alpha_dropout)


def _own_part(full: Tensor, spec: ShardSpec) -> Tensor:
    """Cut out this rank's part; a dim of extent 1 stays as it is."""
    part = full
    for dim in spec.sharded:
        if full.shape[dim] == spec.global_shape[dim]:
            part = torch.cat([part.narrow(dim, start, rows) for start, rows in _runs(spec, dim)], dim)
    return part.clone(memory_format=torch.contiguous_format)


def _runs(spec: ShardSpec, dim: int) -> list[tuple[int, int]]:
    """Return where one process has this rank's rows: edges with self-loops are joined of several parts."""
    if spec.edge_parts is None:
        return [(spec.offsets[dim], spec.local_shape[dim])]
    return edge_runs(spec.edge_parts, spec.coordinate(spec.sharded[dim]))


def _refuse_sets(func: Any, spec: ShardSpec) -> None:
    """Raise for edges of a graph whose order in one process is not known."""
    if not spec.in_order and spec.edge_parts is None:
        raise unsupported(func, "edges have no order for random numbers", spec, remedy="draw for nodes, or use p=0")


def _whole(func: Any, x: ShardTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor of the whole shape that lies in memory as the tensor would in one process.

    That is the order in which torch draws.
    """
    strides = strides_of(x)
    if strides is UNKNOWN:
        reason = "random numbers follow the order in memory, which is not known here"
        raise unsupported(func, reason, x.spec, remedy="use contiguous() first")
    if dtype is None:
        return torch.empty_strided(x.spec.global_shape, strides, dtype=x.dtype, device=x.device)
    like = torch.empty_strided(x.spec.global_shape, strides, dtype=dtype, device="meta")
    return torch.empty_like(like, device=x.device)


def _kept(func: Any, x: ShardTensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
    mask = _whole(func, x, torch.bool) if shape is None else torch.empty(shape, dtype=torch.bool, device=x.device)
    return _own_part(mask.bernoulli_(1 - p), x.spec).to(x.dtype)


def _parsed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[ShardTensor, float, bool]:
    """Return the input, the probability (0 in evaluation) and whether to work in place."""
    given = bind("input p training inplace", args, kwargs)
    p, training = given.get("p", 0.5), given.get("train", given.get("training", func is not F.alpha_dropout))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return given["input"], p if training else 0.0, bool(given.get("inplace"))


@register_op(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, any_order=True)
def dropout(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Drop elements, or whole channels: the mask is that of one process with the same seed."""
    x, p, inplace = _parsed(func, args, kwargs)
    if p == 0 or 0 in x.spec.global_shape:
        return x
    _refuse_sets(func, x.spec)
    shape = None
    if func not in (F.dropout, torch.dropout):
        shape = x.spec.global_shape
        unbatched = (func is F.dropout1d and x.ndim == 2) or (func is F.dropout3d and x.ndim == 4)
        lead = 1 if unbatched else 2
        shape = tuple([n if d < lead else 1 for d, n in enumerate(shape)])
    scale = _kept(func, x, p, shape)
    scale = scale.div_(1 - p) if p < 1 else scale
    if inplace:
        refuse_write_to_copy(func, x)
        x.local.mul_(scale)
        written(x)
        return x
    return finish(x.local * scale, x.spec)


@register_op(*_ALPHA_DROPOUTS, any_order=True)
def alpha_dropout(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Dropout, of elements or whole channels, that keeps mean and variance of what SELU gives."""
    x, p, inplace = _parsed(func, args, kwargs)
    shape = x.spec.global_shape
    if p == 0 or 0 in shape:
        return x
    _refuse_sets(func, x.spec)
    scale = shift = x.local.new_zeros(())
    if p < 1:
        if func is F.feature_alpha_dropout and len(shape) < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        channels = (*shape[:2], *[1] * (len(shape) - 2)) if func is F.feature_alpha_dropout else None
        kept = _kept(func, x, p, channels)
        a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        scale, shift = kept * a, (kept - 1) * (_ALPHA * a) + _ALPHA * a * p
    if inplace:
        refuse_write_to_copy(func, x)
        x.local.mul_(scale).add_(shift)
        written(x)
        return x
    return finish(x.local * scale + shift, x.spec)


@register_op(torch.rand_like, torch.randn_like, torch.randint_like, any_order=True)
def random_like(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw a tensor of the same layout."""
    x: ShardTensor = args[0]
    _refuse_sets(func, x.spec)
    like = _whole(func, x)
    options = dict(kwargs)
    grad = options.pop("requires_grad", False)
    return finish(_own_part(func(like, *args[1:], **options), x.spec).requires_grad_(grad), x.spec)


@register_op(*find("bernoulli", namespaces=(torch, Tensor)))
def bernoulli(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw 1 with a probability, each element's own unless one is given: then all are gathered. Collective."""
    given = bind("input p", args, kwargs)
    x, p, spec = given.pop("input"), given.pop("p", None), specs_of(args)[0]
    if isinstance(p, Tensor) or "out" in given or not isinstance(x, ShardTensor):
        raise unsupported(func, "out=, or p that is a tensor", *specs_of([*args, *kwargs.values()]))
    _refuse_sets(func, spec)
    like = torch.empty(spec.global_shape, dtype=x.dtype, device=x.device) if p is not None else x.full_tensor().detach()
    drawn = _own_part(torch.bernoulli(like.contiguous(), *[] if p is None else [p], **given), spec)
    return finish(torch.where(torch.ones_like(drawn, dtype=torch.bool), drawn, x.local), spec)  # a gradient of nought


@register_op(*find("multinomial", namespaces=(torch, Tensor)))
def multinomial(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw numbers of columns by their weights, which are gathered; each rank keeps its rows. Collective."""
    given = bind("input num_samples replacement", args, kwargs)
    x: ShardTensor = given.pop("input")
    refuse_out(func, given, x.spec)
    given.pop("out", None)
    _refuse_sets(func, x.spec)
    like = _whole(func, x)
    drawn = torch.multinomial(like.copy_(x.full_tensor().detach()), **given)
    rows = x.spec.sharded.get(0) if drawn.ndim > 1 else None
    spec = x.spec.derive(drawn.shape, [0 if a == rows else None for a in range(len(x.spec.axes))], x.spec.sizes)
    return finish(_own_part(drawn, spec), spec)


@register_op(
    *find("uniform_ normal_ exponential_ bernoulli_ random_ log_normal_ cauchy_ geometric_", namespaces=(Tensor,)),
    any_order=True,
)
def random_in_place(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Overwrite with random numbers; parameters are numbers."""
    x: ShardTensor = args[0]
    if any(isinstance(other, Tensor) for other in (*args[1:], *kwargs.values())):
        raise unsupported(func, "its parameters are tensors", *specs_of([*args, *kwargs.values()]))
    refuse_write_to_copy(func, x)
    _refuse_sets(func, x.spec)
    full = func(_whole(func, x), *args[1:], **kwargs)
    x.local.copy_(_own_part(full, x.spec))
    written(x)
    return x

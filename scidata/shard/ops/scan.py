"""Along one dim, each element from the others of its row: softmax and cumulative sums, on any dim.

On a sharded dim each rank does its part; one number for each row and rank goes around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import finish, refuse_out, write_to_plain
from scidata.shard.ops.arguments import argument, normal_dim
from scidata.shard.ops.moments import widened
from scidata.shard.tensor import ShardTensor

_BOTH = (torch, Tensor)


@register_op(*find("softmax log_softmax"), F.softmin, any_order=True)
def softmax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Softmax over one dim. Collective where it is sharded: one round of a number for each row and rank."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    dim, spec = argument(args, kwargs, 1, "dim"), x._spec
    refuse_out(func, kwargs, spec)
    if dim is None:
        raise unsupported(func, "it needs a dim", spec, remedy="give dim=")
    dim = normal_dim(dim, spec.ndim)
    dtype = kwargs.get("dtype") or next((a for a in args[2:] if isinstance(a, torch.dtype)), None)
    local = -x._local if func is F.softmin else x._local
    local = local if dtype is None else local.to(dtype)
    log = "log" in func.__name__
    axis = spec.axis_of_dim(dim)
    if axis is None:
        return finish((torch.log_softmax if log else torch.softmax)(local, dim), spec)
    held, wide = tuple(int(size > 0) for size in spec.sizes_of(axis)), widened(local)
    # of no rows too, so that all ranks have the same graph, and come to collectives in one order
    own = wide.logsumexp(dim, keepdim=True).narrow(dim, 0, held[spec.coordinate(axis)])
    # the ranks use the total each for their own part, hence grad="sum"
    total = wide
    if any(held):
        total = all_gather_v(own, held, dim, spec.group(axis), grad="sum").logsumexp(dim, keepdim=True)
    total = total + (total - total).detach()  # inf among the values gives NaN, as torch has it
    return ShardTensor((wide - total if log else (wide - total).exp()).to(local.dtype), spec)


#: What totals of several ranks come to, and how that meets a rank's own part.
_SCANS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cumsum": (torch.sum, torch.add),
    "cumprod": (torch.prod, torch.mul),
    "logcumsumexp": (torch.logsumexp, torch.logaddexp),
}


@register_op(*find("cumsum cumprod logcumsumexp", namespaces=_BOTH))
def scan(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Accumulate along one dim; on a sharded one each rank starts from what the ranks before it add up to."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    if type(kwargs.get("out")) is Tensor:  # PyG's way to put a zero before the sums
        return write_to_plain(func, args, kwargs)  # type: ignore[no-any-return]
    refuse_out(func, kwargs, x._spec)
    spec, dim = x._spec, normal_dim(argument(args, kwargs, 1, "dim"), x._spec.ndim)
    dtype = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
    local = getattr(torch, func.__name__)(x._local, dim, **dtype)
    axis = spec.axis_of_dim(dim)
    if axis is None or spec.axes[axis].size == 1:
        return finish(local, spec)
    reduce, join = _SCANS[func.__name__]
    # A rank's total is its last row. The others use it each for their own part, hence grad="sum".
    held = tuple(int(size > 0) for size in spec.sizes_of(axis))
    last = local.narrow(dim, max(0, local.shape[dim] - 1), held[spec.coordinate(axis)])
    totals = all_gather_v(last, held, dim, spec.group(axis), grad="sum")
    before = sum(held[: spec.coordinate(axis)])
    if before == 0 or not local.shape[dim]:
        return ShardTensor(local + totals.narrow(dim, 0, 0).sum(dim, keepdim=True).to(local.dtype), spec)
    return ShardTensor(join(local, reduce(totals.narrow(dim, 0, before), dim, keepdim=True).to(local.dtype)), spec)

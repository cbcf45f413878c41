"""Along one dim, each element from all others of its row: softmax."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from scidata.shard.ops.align import finish
from scidata.shard.ops.registry import find, register_op, unsupported
from scidata.shard.tensor import ShardTensor


@register_op(*find("softmax log_softmax"), F.softmin)
def softmax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Softmax over a dim that is not sharded."""
    x: ShardTensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or not -x._spec.ndim <= dim < x._spec.ndim:
        raise unsupported(func, f"dim={dim} is not a dim of the tensor", x._spec, remedy="give dim")
    if dim % x._spec.ndim in x._spec.sharded:
        raise unsupported(func, f"dim {dim} is sharded", x._spec)
    return finish(func(x._local, *args[1:], **kwargs), x._spec)

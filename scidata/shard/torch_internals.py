"""``torch.autograd.Function`` on ShardTensors: forward works, and a gradient that would get lost raises.

Autograd knows the local parts, not the wrapper, so what it records for an argument that is a ShardTensor is nothing.
``apply`` asks neither ``__torch_function__`` nor the dispatcher; the helper that looks at its arguments is the one
place to notice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import utils

from scidata.errors import UnsupportedShardOp

__all__ = ["watch_functions"]


def watch_functions(kind: type[Any]) -> None:
    """Make ``Function.apply`` raise UnsupportedShardOp for a tensor of this kind that requires grad."""
    plain: Callable[[tuple[Any, ...]], tuple[Any, ...]] = utils.unwrap_dead_wrappers

    @functools.wraps(plain)
    def checked(args: tuple[Any, ...]) -> tuple[Any, ...]:
        for x in args:
            if isinstance(x, kind) and torch.is_grad_enabled() and x.requires_grad:
                name = getattr(sys._getframe(1).f_locals.get("cls"), "__qualname__", "an autograd.Function")
                raise UnsupportedShardOp(
                    f"{name}: a custom autograd function does not pass on the gradient of a ShardTensor. "
                    f"Layout: {x.spec}. Remedy: apply it to to_local() and wrap the result, where it works row by row; "
                    "register_op() a function that does so; for a checkpoint, use_reentrant=False"
                )
        return plain(args)

    utils.unwrap_dead_wrappers = checked

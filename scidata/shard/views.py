"""ShardTensors that are copies where torch gives views: what is written to one is put back, or refused.

Tensors here are ShardTensors; ``_copied`` says what each is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from scidata.shard.op_table import unsupported
from scidata.shard.torch_internals import shares_memory, tree_map_only, version_of


def written(target: Any) -> None:
    """Say that the own part was written to: ghosts are old now; a copy of single rows goes back to the original."""
    target._padded = None
    if callable(target._copied):
        target._copied()


def refuse_write_to_copy(func: Any, x: Any) -> None:
    """Raise where ``x`` is a copy that would have been a view in torch, but for one that can be put back."""
    copied = getattr(x, "_copied", False)  # plain tensors are what they are
    if copied and not callable(copied):
        raise unsupported(
            func,
            "this tensor is a copy where torch would have made a view, so writing to it would not reach the original",
            x._spec,
            remedy="clone() it, write it as an expression, or write to the original by an index: x[i] = ...",
        )


def call_on_copies(func: Any, copies: Sequence[Any], args: Any, kwargs: Any, make: Callable[..., Any]) -> Any:
    """Call a function on the plain values of replicated copies; put back those that it writes to.

    What shares memory with a copy is one, too: ``make`` is ShardTensor.
    """
    name = func.__name__
    by_name = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
    before = [version_of(x._local) for x in copies]
    for x in copies if by_name else ():
        refuse_write_to_copy(func, x)
    result = func(*args, **kwargs)
    changed = [x for x, old in zip(copies, before, strict=True) if version_of(x._local) != old or (by_name and old < 0)]
    for x in changed:
        refuse_write_to_copy(func, x)
    for x in changed:
        written(x)
    return tree_map_only(Tensor, lambda x: _as_copy(x, copies, make), result)


def _as_copy(result: Tensor, copies: Sequence[Any], make: Callable[..., Any]) -> Any:
    for x in copies:
        if shares_memory(result, x._local):
            nothing = [None] * len(x._spec.axes)
            return make(result, x._spec.derive(result.shape, nothing, nothing), copied=x._copied)
    return result

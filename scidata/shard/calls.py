"""What a call through ``__torch_function__`` passes besides its handler: copies brought up to date, strides noted.

``kind`` is ShardTensor, which is made upon this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scidata.shard.memory import BY_MEMORY, note
from scidata.shard.op_table import KEEPS_REPLICATED, Handler, op_name, unsupported
from scidata.shard.torch_internals import tree_flatten, tree_unflatten
from scidata.shard.views import call_on_copies

_NO_TENSORS = frozenset({int, float, bool, str, slice, type(None), torch.dtype, torch.device})


def is_ordinary(values: Iterable[Any], kind: type[Any]) -> bool:
    """Whether all tensors are row-major in one process, so that results are, and none is a copy."""
    for x in values:
        if isinstance(x, kind):
            if x._memory is not None or x._copied is not None:
                return False
            continue
        found = type(x)
        if found in _NO_TENSORS:  # asking for an instance of Tensor takes longer
            continue
        if found is tuple or found is list:
            if not is_ordinary(x, kind):
                return False
        elif isinstance(x, Tensor):
            if x.layout is torch.strided and not x.is_contiguous():
                return False
        elif found is torch.memory_format and x is not torch.preserve_format:
            return False
    return True


def _refresh(values: Iterable[Any], kind: type[Any]) -> None:
    for x in values:
        if type(x) is tuple or type(x) is list:
            _refresh(x, kind)
        elif isinstance(x, kind) and x._copied is not None:
            x._copied.refresh()


def call_noted(
    run: Callable[..., Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Any]
) -> Any:
    """Handle a function, and note how its results lie in memory; bring copies up to date first."""
    _refresh(args, kind)
    if not kwargs:
        return note(func, args, kwargs, run(func, types, args, {}))
    _refresh(kwargs.values(), kind)
    return note(func, args, kwargs, run(func, types, args, dict(kwargs)))


def call_unusual(
    handler: Handler | None, kind: type[Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run any function on tensors that are replicated on all axes; refuse an unknown one on any others."""
    if handler in KEEPS_REPLICATED:
        return handler(func, types, args, kwargs)
    flat, tree = tree_flatten((args, kwargs))
    specs = [x._spec for x in flat if isinstance(x, kind)]
    if specs and all(spec.is_replicated for spec in specs):
        copies = [x for x in flat if isinstance(x, kind) and x._copied is not None]
        if copies and func in BY_MEMORY:  # rows that were moved lie as they came, not as in one process
            if handler is None:
                raise unsupported(func, "its order in memory is that of a view", *specs, remedy="clone() it first")
            return handler(func, types, args, kwargs)
        flat = [x._local if isinstance(x, kind) else x for x in flat]
        plain_args, plain_kwargs = tree_unflatten(flat, tree)
        if not copies:
            return func(*plain_args, **plain_kwargs)
        return call_on_copies(func, copies, plain_args, plain_kwargs, kind)
    if handler is None:
        raise unsupported(func, f"{op_name(func)} has no rule for sharded tensors", *specs)
    return handler(func, types, args, kwargs)

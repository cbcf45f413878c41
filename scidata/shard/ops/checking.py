"""Checks of values: made at once, or by the graph at each of its steps where one is captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.library import Library

from scidata.shard.comm.operators import is_capturing
from scidata.shard.torch_internals import has_values, unseen

_library: Any = Library("scidata", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("in_range(Tensor x, int start, int stop, str message) -> Tensor")


def in_range(x: Tensor, start: int, stop: int, message: str) -> Tensor:
    """Return numbers; raises IndexError with the message where one is not from ``start`` on and below ``stop``."""
    if not is_capturing():
        _check(x, start, stop, message)
        return x
    if has_values(x):  # a constant
        with unseen():
            _check(x, start, stop, message)
        return x
    checked: Tensor = torch.ops.scidata.in_range(x, start, stop, message)
    return checked


def _check(x: Tensor, start: int, stop: int, message: str) -> None:
    if x.numel() and not start <= int(x.min()) <= int(x.max()) < stop:
        raise IndexError(message)


def _checked(x: Tensor, start: int, stop: int, message: str) -> Tensor:
    _check(x, start, stop, message)
    return x.clone()


_library.impl("in_range", _checked, "CompositeExplicitAutograd")
has_side_effect(torch.ops.scidata.in_range.default)  # a check whose result nobody uses stays in the graph
torch.library.register_fake("scidata::in_range", lambda x, *_: torch.empty_like(x), lib=_library)

"""Collectives as operators of torch, so that a graph of a step holds them (:mod:`scidata.shard.compile`).

Eager code calls the functions themselves. While a step is captured, its tensors have no values, and an operator is
called instead, which puts itself in the graph; where the graph runs, that calls the same function. Each operator has a
second form, ``ordered``, that pretends to write to one more tensor: a compiler keeps the order of all that write to one
tensor, and does not leave out those whose results nobody needs, which other ranks wait for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from scidata.shard.torch_internals import is_in_a_mode

_P = ParamSpec("_P")

_library: Any = Library("scidata", "FRAGMENT")  # type: ignore[no-untyped-call]
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
#: Not empty while a step is captured, in whatever thread.
captures: list[list[int]] = []
_operators: set[object] = set()


def is_capturing() -> bool:
    """Whether a step is being captured, so that tensors have no values, and no rank may communicate.

    Not in functions that are called meanwhile with tensors that have values: those see no mode.
    """
    return bool(captures) and is_in_a_mode()


@contextmanager
def capturing() -> Iterator[list[int]]:
    """Have collectives put calls of operators in a graph; yields the numbers of the calls, which others may clear.

    Each call has a number of its own, so that a compiler does not make one of two that are alike.
    """
    calls: list[int] = []
    captures.append(calls)
    try:
        yield calls
    finally:
        captures.pop()


def remember(group: dist.ProcessGroup) -> None:
    """Let operators find the group by its name."""
    _groups[group.group_name] = group


def group_of(name: str) -> dist.ProcessGroup | None:
    """Return the group of a name, where an operator in a graph has it."""
    return _groups.get(name)


def operator(schema: str, like: Callable[..., Tensor]) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """Make a function an operator as well.

    Parameters
    ----------
    schema
        The parameters, of which the last is ``str group``: the function's is the group itself.
    like
        Takes the same arguments; makes a tensor as the result is, without communication.
    """

    def decorate(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        name, names = function.__name__.strip("_"), [*signature(function).parameters]

        def run(*args: Any) -> Tensor:
            plain: Any = function
            found: Tensor = plain(*args[: len(names) - 1], _groups[args[len(names) - 1]])
            return found

        for overload, more in (("", ""), (".ordered", ", Tensor(a!) order")):
            _library.define(f"{name}{overload}({schema}, int call{more}) -> Tensor")
            _library.impl(f"{name}{overload}", run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"scidata::{name}{overload}", like, lib=_library)
        packet = getattr(torch.ops.scidata, name)
        _operators.add(packet)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
            group: Any = args[-1]
            if not captures or group is None or not is_capturing():
                return function(*args, **kwargs)
            remember(group)
            x: Any = args[0]
            calls = captures[-1]
            calls.append(len(calls))
            return packet.default(x.detach(), *args[1:-1], group.group_name, calls[-1])

        return call

    return decorate


def is_operator(target: object) -> bool:
    """Whether the target of a node in a graph is one of these."""
    return getattr(target, "overloadpacket", None) in _operators

"""Collectives, and a check of values, as operators of torch, for a step's graph (:mod:`scidata.shard.compile`).

Eager code calls the functions themselves. While a step is captured, its tensors have no values, and an operator is
called instead, which puts itself in the graph; when the graph runs, the operator calls the same function. Each operator
has a second form, ``ordered``, that pretends to write to one more tensor: a compiler keeps the order of all writers of
one tensor, and does not drop those with unused results, for which other ranks wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.library import Library

from scidata.shard.torch_internals import has_values, is_in_a_mode, unseen

_P = ParamSpec("_P")
_T = TypeVar("_T")

_library: Any = Library("scidata", "FRAGMENT")  # type: ignore[no-untyped-call]
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
#: Not empty while a step is captured, in whatever thread.
captures: list[Calls] = []
#: By thread: what runs its eager collectives, given their names, first arguments and themselves.
tapes: dict[int, Callable[[str, Tensor, Callable[[], Tensor]], Tensor]] = {}
_watches: dict[int, Callable[[int, Tensor], None]] = {}  # by thread: what sees the results of a graph's collectives
_operators: set[object] = set()


def is_capturing() -> bool:
    """Whether a step is being captured, so that tensors have no values, and no rank may communicate.

    Not in functions that are called meanwhile with tensors that have values: those see no mode.
    """
    return bool(captures) and is_in_a_mode()


def constants_of_capture() -> AbstractContextManager[object]:
    """Return the context in which handlers compute in backward as they do in forward, where a step is captured."""
    return captures[-1].constants if captures and is_capturing() else nullcontext()


def uses_operators() -> bool:
    """Whether collectives are called as operators: while a step is captured, or while their results are kept."""
    return (bool(captures) and is_capturing()) or get_ident() in tapes


@dataclass
class Calls:
    """Collectives of a step that is being captured."""

    known: Sequence[tuple[str, Tensor]] = ()  # names and results of the preceding eager step's collectives of integers
    # by call number: the results of these that code has read, on which a graph relies
    expected: dict[int, Tensor] = field(default_factory=dict)
    # of all calls. Each call is numbered, so that a compiler does not merge two equal ones
    num: int = 0
    results: list[Tensor] = field(default_factory=list)  # copies of all calls' results, as code may write to these
    # within it, what is computed of constants is one, as in the forward pass
    constants: AbstractContextManager[object] = field(default_factory=nullcontext)
    _num_of_integers: int = 0

    def clear(self) -> None:
        """Begin again."""
        self.num = self._num_of_integers = 0
        self.expected.clear()
        self.results.clear()

    def result(self, name: str, x: Tensor, found: Tensor) -> Tensor:
        """Return the result of a call: a tensor without values, or for constants the earlier result."""
        number, self.num = self.num, self.num + 1
        self.results.append(found.clone(memory_format=torch.preserve_format))
        if x.is_floating_point() or x.is_complex():
            return found
        place, self._num_of_integers = self._num_of_integers, self._num_of_integers + 1
        if not has_values(x) or place >= len(self.known):
            return found
        was, known = self.known[place]
        if was != name or (known.shape, known.dtype) != (found.shape, found.dtype):
            return found
        self.expected[number] = known
        return known


@contextmanager
def capturing(known: Sequence[tuple[str, Tensor]], constants: AbstractContextManager[object]) -> Iterator[Calls]:
    """Make collectives put calls of operators into the graph."""
    calls = Calls(known, constants=constants)
    captures.append(calls)
    try:
        yield calls
    finally:
        captures.pop()


class OtherValuesError(Exception):
    """A graph takes other values for granted than there are."""


@contextmanager
def noting(known: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Keep the results of this thread's collectives of integers, as :class:`Calls` takes them."""

    def note(name: str, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        found = run()
        if not (x.is_floating_point() or x.is_complex()):
            known.append((name, found.clone()))
        return found

    with _held(tapes, note):
        yield


@contextmanager
def telling(results: Sequence[Tensor]) -> Iterator[None]:
    """Make this thread's first collectives return these results, which have been exchanged already."""
    left = iter(results)

    def tell(name: str, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        found = next(left, None)
        return run() if found is None else found

    with _held(tapes, tell):
        yield


@contextmanager
def expecting(expected: Mapping[int, Tensor], results: list[Tensor]) -> Iterator[None]:
    """Raise OtherValuesError if a collective of a graph has another result than this; keep all results."""

    def watch(number: int, found: Tensor) -> None:
        results.append(found.clone())  # a compiler may compute in its memory
        if number in expected and not torch.equal(found, expected[number]):
            raise OtherValuesError

    with _held(_watches, watch):
        yield


@contextmanager
def _held(by_thread: dict[int, _T], value: _T) -> Iterator[None]:
    by_thread[get_ident()] = value
    try:
        yield
    finally:
        del by_thread[get_ident()]


def remember(group: dist.ProcessGroup) -> None:
    """Let operators find the group by its name."""
    _groups[group.group_name] = group


def operator(schema: str, like: Callable[..., Tensor]) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """Make a function an operator as well.

    ``schema``: the parameters, of which the last is ``str group``: the function's is the group itself.
    ``like``: takes the same arguments; makes a tensor as the result is, without communication.
    """

    def decorate(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        name, num = function.__name__.strip("_"), schema.count(",")

        def run(*args: Any) -> Tensor:
            plain: Any = function
            found: Tensor = plain(*args[:num], _groups[args[num]])
            if _watches and (watch := _watches.get(get_ident())) is not None:
                watch(args[num + 1], found)
            return found

        for overload, more in (("", ""), (".ordered", ", Tensor(a!) order")):
            # a CUDA graph replays kernels: gloo has none, and comparing results of others waits for the device
            _library.define(f"{name}{overload}({schema}, int call{more}) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
            _library.impl(f"{name}{overload}", run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"scidata::{name}{overload}", like, lib=_library)
        packet = getattr(torch.ops.scidata, name)
        has_side_effect(packet.default)  # other ranks wait for it
        _operators.add(packet)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
            group: Any = args[-1]
            if group is None or not (captures or tapes) or not uses_operators():
                return function(*args, **kwargs)
            x: Any = args[0]
            run = tapes.pop(get_ident(), None)
            if run is not None:
                try:
                    return run(name, x, partial(function, *args, **kwargs))
                finally:
                    tapes[get_ident()] = run
            remember(group)
            calls = captures[-1]
            return calls.result(name, x, packet.default(x.detach(), *args[1:-1], group.group_name, calls.num))

        return call

    return decorate


def is_operator(target: object) -> bool:
    """Whether the target of a node in a graph is a collective."""
    return getattr(target, "overloadpacket", None) in _operators


def assume(x: Tensor, value: bool | int) -> None:
    """Let the graph raise OtherValuesError where a tensor of one element has another value."""
    torch.ops.scidata.assumed(x.detach(), value, captures[-1].num)


def _assumed(x: Tensor, value: bool | int, call: int, order: Tensor | None = None) -> Tensor:
    if x.item() != value:
        raise OtherValuesError
    return x.new_empty(0)


for overload, more in (("", ""), (".ordered", ", Tensor(a!) order")):
    _library.define(
        f"assumed{overload}(Tensor x, Scalar value, int call{more}) -> Tensor", tags=torch.Tag.cudagraph_unsafe
    )
    _library.impl(f"assumed{overload}", _assumed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scidata::assumed{overload}", lambda x, *_: x.new_empty(0), lib=_library)
has_side_effect(torch.ops.scidata.assumed.default)


def is_check(target: object) -> bool:
    """Whether the target of a node in a graph is what :func:`assume` puts there."""
    return getattr(target, "overloadpacket", None) is torch.ops.scidata.assumed


def in_range(x: Tensor, start: int, stop: int, message: str) -> Tensor:
    """Return numbers; raises IndexError with the message if one is outside ``[start, stop)``."""
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


def define(schema: str, function: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Define an operator that waits, and that stays in a graph even if its result is unused."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.cudagraph_unsafe)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scidata::{name}", like, lib=_library)
    has_side_effect(getattr(torch.ops.scidata, name).default)


define("in_range(Tensor x, int start, int stop, str message) -> Tensor", _checked, lambda x, *_: torch.empty_like(x))


def copied(x: Tensor) -> Tensor:
    """Return a row-major copy to be written to: ``clone()`` of a constant is a constant of the graph itself."""
    if x.is_floating_point() or not (captures and is_capturing()):
        return x.clone(memory_format=torch.contiguous_format)
    copy: Tensor = torch.ops.scidata.copied(x)
    return copy


_library.define("copied(Tensor x) -> Tensor")
_library.impl("copied", lambda x: x.clone(memory_format=torch.contiguous_format), "CompositeExplicitAutograd")
torch.library.register_fake("scidata::copied", lambda x: x.new_empty(x.shape), lib=_library)

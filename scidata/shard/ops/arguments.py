"""How a call of a torch function reaches its handler: with torch's own arguments, which Python binds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import TypeVar

import torch
from torch import Tensor

from scidata.shard.graphs import targets
from scidata.shard.op_table import BOUND, TorchFunction, enter, find

Run = TypeVar("Run", bound=Callable[..., object])

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1"}
_FIRST = ("input", "self")
_SPACES = (torch, Tensor)


def handles(
    *functions: object, keeps_replicated: bool = False, any_order: bool = False, accepts_filled: bool = False
) -> Callable[[Run], Run]:
    """Make the decorated function a handler: its parameters are those of torch's function, so that Python binds them.

    Where ``topk(func, x, k, dim=-1)`` is decorated by ``handles(torch.topk)``, ``torch.topk(t, 3, axis=0)`` becomes
    ``topk(torch.topk, t, 3, dim=0)``. A first parameter ``func`` gets the torch function that is called. Torch's
    ``input`` may have another name, ``x`` here; ``out=None`` is left out.

    ``functions``: as of :func:`~scidata.shard.op_table.register_op`, or names of torch's functions and tensors'
    methods: ``"sort argsort"``.
    ``keeps_replicated, any_order``: as of :func:`~scidata.shard.op_table.register_op`.
    ``accepts_filled``: it takes a FilledTensor as it is, and may decide whether that is sharded by nodes.
    """

    def add(run: Run) -> Run:
        code = run.__code__
        own_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        unusual, takes_function = {"out", *_NUMPY_NAMES, *_FIRST}.difference(own_names), own_names[:1] == ("func",)

        @wraps(run)
        def handler(func: TorchFunction, types: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
            if kwargs and not unusual.isdisjoint(kwargs):
                args, kwargs = _renamed(args, kwargs, unusual)
            return run(func, *args, **kwargs) if takes_function else run(*args, **kwargs)

        named: list[object] = []
        for f in functions:
            named += find(f, namespaces=_SPACES) if isinstance(f, str) and "." not in f else [f]
        enter(handler, named, keeps_replicated=keeps_replicated, any_order=any_order)
        for f in named:
            BOUND[f] = partial(run, f) if takes_function else run
        if accepts_filled:
            targets.accepts_filled(handler)
        return run

    return add


def composes(expressions: Mapping[object, Callable[..., object]], *, any_order: bool = False) -> None:
    """Register functions that are one expression of others: by name, function, or a tuple of these."""
    for key, run in expressions.items():
        handles(*(key if isinstance(key, tuple) else (key,)), any_order=any_order)(run)


def _renamed(
    args: Sequence[object], kwargs: Mapping[str, object], unusual: Collection[str]
) -> tuple[Sequence[object], dict[str, object]]:
    """Rename arguments given by an alias to the handler's parameter names."""
    first = [kwargs[name] for name in _FIRST if name in kwargs and name in unusual]
    rest = {
        _NUMPY_NAMES.get(name, name): value
        for name, value in kwargs.items()
        if name not in unusual or name in _NUMPY_NAMES
    }
    return (*first, *args), rest


def integers(*given: int | Sequence[int]) -> tuple[int, ...]:
    """Return integers, also NumPy's or tensors of one, that were given one by one or as one sequence."""
    found: list[int] = []
    for each in given:
        found += map(operator.index, each if isinstance(each, Sequence) else (each,))
    return tuple(found)


def several(tensors: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """Return tensors that were given one by one or as one sequence."""
    return list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors)


def normal_dim(dim: int, ndim: int) -> int:
    """Count a dim from the front; raises IndexError."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim

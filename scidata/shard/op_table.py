"""Table from torch functions to their handlers, and the error for functions without one.

Growing the table means adding entries: a handler gets ``(func, types, args, kwargs)`` as ``__torch_function__`` does,
and is found by one dict lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import FunctionType
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from scidata.errors import UnsupportedShardOp
from scidata.shard.torch_internals import unpatched

#: Any function of torch, as it arrives at ``__torch_function__``.
TorchFunction: TypeAlias = Callable[..., object]
#: One that returns a tensor, as most do. Handlers of others name the result: ``Callable[..., tuple[Tensor, Tensor]]``.
TensorFunction: TypeAlias = Callable[..., Tensor]
#: The types of the ShardTensors among the arguments of a call.
Types: TypeAlias = Collection[type]


class Handler(Protocol):
    """A function that computes a torch function on ShardTensors.

    Each handler annotates its own parameters: ``func`` as :data:`TensorFunction`, ``args`` and ``kwargs`` by the types
    of the function's arguments, or as ``tuple[object, ...]`` and ``dict[str, object]`` where it finds them by name.
    """

    __module__: str
    __qualname__: str

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any, /) -> object:
        """Return the result of the torch function."""


_Handler = TypeVar("_Handler", bound=Handler)

#: Every supported torch function and its handler. Filled at import, read at each call.
HANDLERS: dict[object, Handler] = {}

#: What to call with positional arguments alone, for functions whose handlers have torch's own parameters.
BOUND: dict[object, Callable[..., object]] = {}

#: Handlers that answer for replicated tensors too; for the others these are unwrapped to plain ones first.
KEEPS_REPLICATED: set[Handler] = set()

#: Handlers that raise whatever they get, in time: before a part has changed, say.
REFUSES: set[Handler] = set()

#: Handlers that ask about the tensor as a whole, and do nothing with its rows.
OF_THE_WHOLE: set[Handler] = set()

#: Handlers to which the order of edges is no matter: for others they are brought to that of one process first.
ANY_ORDER: set[Handler] = set()

#: Called in place of a refused function, the last one: see :func:`scidata.gather`.
FALLBACKS: list[Callable[[TorchFunction, tuple[object, ...], dict[str, object], UnsupportedShardOp], object]] = []

#: Transforms of functions on ShardTensors, by the names of torch's own in ``torch.func``.
TRANSFORMS: dict[str, Callable[..., object]] = {}

_NAMESPACES: tuple[object, ...] = (torch, torch.Tensor, F, torch.special, torch.linalg)
_REMEDY = (
    "redistribute() to Replicate() on that axis first, work on to_local() or full_tensor(), or run it in a block of "
    "scidata.gather()"
)


def register_op(
    *functions: object, keeps_replicated: bool = False, any_order: bool = False
) -> Callable[[_Handler], _Handler]:
    """Make the decorated handler answer for these torch functions, methods or property getters.

    Where all ShardTensors among the arguments are replicated on all axes, the function runs on plain tensors instead,
    unless ``keeps_replicated``.

    Parameters
    ----------
    *functions : object
        As they arrive at ``__torch_function__``: ``torch.sin``, ``torch.Tensor.sin``, …; what may not be there yet by
        its name: an operator that another library registers with torch, ``"pyg.knn"``, or a function of its own that
        asks ``has_torch_function``, ``"physicsnemo.nn.functional.natten.na2d"``.
        The handler gets the function, the types of its ShardTensors, its args and kwargs.
    keeps_replicated : bool, default False
        Also call the handler where no axis shards.
    any_order : bool, default False
        Each row is handled by itself, or all alike (a sum): where rows are the edges of a graph that were joined on
        each rank by itself, their order is no matter, or the handler knows of it.

    Raises
    ------
    ValueError
        A function that already has a handler.
    TypeError
        An argument that is no function.

    Examples
    --------
    A function of one's own, that works on each row by itself:

    >>> def wrapped(x):
    ...     return torch.overrides.handle_torch_function(wrapped, (x,), x) if type(x) is not torch.Tensor else x % 360
    >>> @scidata.register_op(wrapped)
    ... def on_shards(func, types, args, kwargs):
    ...     (x,) = args
    ...     return scidata.ShardTensor(func(x.to_local()), x.spec)
    >>> mesh = scidata.init_mesh()
    >>> from torch.distributed.tensor import Shard
    >>> wrapped(scidata.ShardTensor.from_local(torch.tensor([350.0, 370.0]), mesh["domain"], [Shard(0)])).full_tensor()
    tensor([350.,  10.])
    """

    def add(handler: _Handler) -> _Handler:
        enter(handler, functions, keeps_replicated=keeps_replicated, any_order=any_order)
        return handler

    return add


def enter(handler: Handler, functions: Iterable[object], *, keeps_replicated: bool, any_order: bool) -> None:
    """Register a handler as :func:`register_op` does, in one call: importing scidata makes one per handler."""
    if keeps_replicated:
        KEEPS_REPLICATED.add(handler)
    if any_order:
        ANY_ORDER.add(handler)
    for function in functions:
        is_operator = isinstance(function, str) and "." in function
        if not callable(function) and not is_operator:
            raise TypeError(f"register_op takes torch's functions, such as torch.sin, not {function!r}")
        if HANDLERS.setdefault(function, handler) is not handler:
            raise ValueError(f"{op_name(function)} already has a handler: {HANDLERS[function].__qualname__}")


def find(
    names: str | Iterable[str], *, namespaces: tuple[object, ...] = _NAMESPACES, optional: bool = False
) -> list[TorchFunction]:
    """Return the functions and methods called any of ``names`` in torch's public namespaces, each once.

    One Python call, whatever the number of names: an import of scidata makes it for all of the table.
    """
    found: dict[TorchFunction, None] = {}
    for name in names.split() if isinstance(names, str) else names:
        is_missing = not optional
        for space in (torch.Tensor,) if name.startswith("__") else namespaces:
            function = getattr(space, name, None)
            if callable(function):
                owner = getattr(function, "__module__", None) or "torch"
                is_patched = space is torch and owner.split(".")[0] != "torch"
                found[unpatched(name) if is_patched else function] = None
                is_missing = False
        if is_missing:
            raise LookupError(f"torch has no function {name!r}")
    return list(found)


def getters(names: str) -> list[TorchFunction]:
    """Return the getters of tensor properties, as they arrive at ``__torch_function__``."""
    return [getattr(torch.Tensor, name).__get__ for name in names.split()]


def handler_of_operator(func: object) -> Handler | None:
    """Return the handler that an operator or another library's function has by its name: ``"pyg.knn"``, say."""
    if isinstance(func, FunctionType):
        return HANDLERS.get(f"{func.__module__}.{func.__qualname__}")
    return HANDLERS.get(str(func).removesuffix(".default"))


def op_name(func: object) -> str:
    """Return the public name of a torch function, e.g. ``torch.Tensor.add``."""
    if isinstance(func, str):
        return func
    if isinstance(func, type):
        return f"{func.__module__}.{func.__qualname__}"
    if getattr(func, "__module__", None) == "torch.func":
        return f"torch.func.{getattr(func, '__name__', func)}"
    name = resolve_name(func) or getattr(func, "__qualname__", None) or str(func)
    return name.replace("_VariableFunctionsClass.", "torch.")


def shard_ops() -> tuple[str, ...]:
    """Return the sorted names of every torch function that ShardTensor supports.

    Examples
    --------
    >>> names = scidata.shard_ops()
    >>> "torch.nn.functional.conv2d" in names, len(names) > 500
    (True, True)
    """
    return tuple(sorted({op_name(function) for function, handler in HANDLERS.items() if handler not in REFUSES}))


def is_in_place(func: object) -> bool:
    """Whether a function writes to its first argument, by its name: ``add_`` does, ``__add__`` does not."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


_REMEDIES = {
    # by torch's pipelines
    "isend": "call scidata.parallelize(module, mesh) before PipelineStage is made; elsewhere, send to_local()",
    # by metrics that keep all values, too
    "all_gather": "give it, or the metric that gathers its state, to_local(): each rank has rows of its own",
    "torch.Tensor.as_strided": "of a row-major x, x.reshape(-1)[storage_offset:].as_strided(size, stride); of others, "
    "run it in a block of scidata.gather()",
}


def unsupported(func: object, reason: str, *specs: object, remedy: str = _REMEDY) -> UnsupportedShardOp:
    """Make the error for an op on these layouts."""
    layouts = "; ".join(dict.fromkeys(str(spec) for spec in specs))
    remedy = _REMEDIES.get(op_name(func), remedy)
    return UnsupportedShardOp(f"{op_name(func)}: {reason}. Layout: {layouts or 'none'}. Remedy: {remedy}")

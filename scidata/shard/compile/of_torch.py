"""``torch.compile`` of a model of :func:`scidata.parallelize` runs :func:`scidata.compile`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from scidata.shard.compile import compile
from scidata.shard.compile.torch_internals import Compiler, boxed, called_module, eager_call, wrapped

_parallel: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models, and their parts
_plain: list[Callable[..., Any]] = []  # torch's own function


def _run_backend(backend: Compiler, gm: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile a graph by a backend of Dynamo, which returns a function of as many tensors."""
    compiled = backend(gm, inputs)
    return boxed(lambda given: compiled(*given))


class _Compiled:
    """Makes the region of a module; part of torch's own object, it is copied and pickled with the module."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module, self._options = module, options

    def __call__(self, _: Callable[..., Any]) -> Callable[..., Any]:
        return compile(eager_call(self._module), **self._options)


def take_over(model: nn.Module) -> None:
    """Make ``torch.compile`` use :func:`scidata.compile` for this model, its parts, and modules that hold any of them.

    With other models, and with functions, it does what it did.
    """
    _parallel.update(model.modules())
    if not _plain:
        _plain.append(torch.compile)
        torch.compile = wraps(torch.compile)(_compile)


def _compile(model: Any = None, **options: Any) -> Any:
    module = model if isinstance(model, nn.Module) else called_module(model)
    if module is None or options.get("disable") or _parallel.isdisjoint(module.modules()):
        return _plain[0](model, **options)
    inspect.signature(_plain[0]).bind(model, **options)  # raises TypeError for an argument that torch does not have
    given = {"limit": options.get("recompile_limit"), "dynamic": bool(options.get("shapes_spec"))}
    given |= {name: options.get(name) for name in ("backend", "mode", "dynamic", "fullgraph", "options")}
    if callable(given["backend"]):
        given["backend"] = partial(_run_backend, given["backend"])
    make = _Compiled(module, {name: value for name, value in given.items() if value is not None})
    return wrapped(module, make) if model is module else make(model)

"""What a module's Python reads, besides its arguments: whether it is as it was when a graph was captured.

A graph is good as long as the module would run the same operations again: while its attributes, those of its parts and
of the objects that they hold, and the globals and closures that its functions name, are the same values. Tensors among
them may change in value where the graph reads them anew: parameters and buffers. Of others the versions are compared.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scidata.shard.torch_internals import buffers_of, parameters_of, version_of

#: Values that cannot change, and are compared by ``==`` and type.
SIMPLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
SIMPLE_TYPES = frozenset((*SIMPLE, torch.memory_format, type(Ellipsis)))
_DEEPEST = 4  # objects that hold objects
_SKIPPED = frozenset({"_parameters", "_buffers", "_compiled_call_impl", "forward"})
_FOREIGN = ("torch", "scidata", "builtins", "numpy", "functools", "collections", "typing", "inspect", "logging")
_MAX_ARRAY = 1 << 16


class Snapshot:
    """The state of some modules and functions, as it was when this was made.

    Attributes
    ----------
    places
        Where parameters and buffers are kept: of each tensor the dicts and names.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Callable[..., Any]]) -> None:
        self._ids: list[tuple[dict[Any, Any], list[int]]] = []  # attributes, and the ids of their values
        self._dicts: list[dict[Any, Any]] = []  # copies of the same
        self._lists: list[tuple[Any, list[int]]] = []
        self._kept: list[list[Any]] = []  # so that their ids stay theirs
        self._arrays: list[tuple[Any, bytes]] = []
        self._tensors: list[tuple[dict[Any, Any], Any, Tensor, int]] = []
        self._names: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self.modules = list(modules)
        self.places: list[list[tuple[dict[str, Any], str]]] = []
        self._held: list[tuple[dict[str, Any], list[str]]] = []
        by_id: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in self.modules:
            for held in (parameters_of(module), buffers_of(module)):
                self._held.append((held, [name for name, x in held.items() if x is not None]))
                for name, x in held.items():
                    if x is not None:
                        by_id.setdefault(id(x), []).append((held, name))
            self._take(vars(module), 0)
            for kind in type(module).__mro__:
                if not kind.__module__.startswith(_FOREIGN):
                    for function in vars(kind).values():
                        self._take_function(getattr(function, "__func__", function))
        self.places = list(by_id.values())
        for function in functions:
            self._take_function(getattr(function, "__func__", function))

    # -- taking --------------------------------------------------------------------------------------------------

    def _take(self, values: dict[Any, Any], depth: int) -> None:
        self._ids.append((values, [*map(id, values.values())]))
        self._dicts.append(dict(values))
        for name, x in values.items():
            if isinstance(x, Tensor):
                self._tensors.append((values, name, x, version_of(x)))
            elif depth or name not in _SKIPPED:
                self._reach(x, depth + 1)

    def _reach(self, x: Any, depth: int) -> None:
        if type(x) in SIMPLE_TYPES or id(x) in self._seen or depth > _DEEPEST or isinstance(x, nn.Module | enum.Enum):
            return
        self._seen.add(id(x))
        if isinstance(x, dict):
            self._take(x, depth)
        elif isinstance(x, tuple | frozenset | MutableSequence | MutableSet):
            self._lists.append((x, [*map(id, x)]))
            self._kept.append([*x])
            for each in x:
                if isinstance(each, Tensor):
                    self._tensors.append(({0: each}, 0, each, version_of(each)))
                self._reach(each, depth + 1)
        elif isinstance(x, np.ndarray):
            if x.nbytes <= _MAX_ARRAY:
                self._arrays.append((x, x.tobytes()))
        elif isinstance(x, types.FunctionType | types.MethodType):
            self._take_function(getattr(x, "__func__", x))
        elif isinstance(x, type | types.ModuleType | Tensor):
            return
        elif hasattr(x, "__dict__") and not type(x).__module__.startswith(_FOREIGN):
            self._take(vars(x), depth)

    def _take_function(self, function: object) -> None:
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        if (function.__module__ or "").startswith(_FOREIGN):
            return
        names, scope = set(_names(function.__code__)), function.__globals__
        self._take_names(scope, names)
        for name in names:
            x = scope.get(name)
            if isinstance(x, types.ModuleType) and not x.__name__.startswith(_FOREIGN):
                self._take_names(vars(x), names)
            elif type(x) not in SIMPLE_TYPES:
                self._reach(x, 1)
        for cell in function.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:  # empty as yet
                continue
            self._cells.append((cell, x))
            self._reach(x, 1)

    def _take_names(self, scope: dict[str, Any], names: set[str]) -> None:
        simple = {name: scope[name] for name in names if name in scope and type(scope[name]) in SIMPLE_TYPES}
        if simple:
            self._names.append((scope, simple))

    # -- comparing -----------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether everything is as it was. Asked before each step: a list of ids is compared at once."""
        try:
            return self._holds()
        except Exception:  # a parameter is gone, or values cannot be compared: they are others
            return False

    def _holds(self) -> bool:
        for held, names in self._held:
            if [name for name, x in held.items() if x is not None] != names:
                return False
        for first, *others in self.places:
            if any(held[name] is not first[0][first[1]] for held, name in others):
                return False
        for i, (values, ids) in enumerate(self._ids):
            if [*map(id, values.values())] != ids and not self._is_same(i):
                return False
        for values, name, x, version in self._tensors:
            if values.get(name) is not x or version_of(x) != version:
                return False
        if any([*map(id, x)] != ids for x, ids in self._lists):
            return False
        for scope, simple in self._names:
            for name, x in simple.items():
                now = scope.get(name)
                if now is not x and (type(now) is not type(x) or now != x):
                    return False
        return all(x.tobytes() == data for x, data in self._arrays) and all(
            cell.cell_contents is x or (type(x) in SIMPLE_TYPES and cell.cell_contents == x) for cell, x in self._cells
        )

    def _is_same(self, i: int) -> bool:
        """Whether attributes are equal, though not all the same objects; those are remembered then."""
        values, kept = self._ids[i][0], self._dicts[i]
        if values.keys() - _SKIPPED != kept.keys() - _SKIPPED:
            return False
        for name in kept.keys() - _SKIPPED:
            x, now = kept[name], values[name]
            if now is not x and (type(now) is not type(x) or type(x) not in SIMPLE_TYPES or now != x):
                return False
        self._ids[i] = values, [*map(id, values.values())]
        return True

    def restore(self) -> None:
        """Put attributes back: a capture has run the module once more than an eager step does."""
        for (values, _), kept in zip(self._ids, self._dicts, strict=True):
            for name in values.keys() - kept.keys():
                del values[name]
            values.update(kept)


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)

"""What Python code can reach: attributes, elements, globals, closures and default arguments, without running it.

What cannot be compared later raises: a graph of it would be used again where it must not be.
"""

from __future__ import annotations

import array
import builtins
import dis
import enum
import functools
import inspect
import itertools
import logging
import os
import pickle
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scidata.shard.base import ShardBase
from scidata.shard.torch_internals import buffers_of, parameters_of, version_of

#: Values that cannot change, and are compared by ``==`` and type.
SIMPLE_TYPES = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(Ellipsis)}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
SKIPPED = frozenset({"_compiled_call_impl"})
_HELD = frozenset({"_parameters", "_buffers", *SKIPPED})
_LIBRARIES = frozenset({"torch", "scidata", "numpy", "logging", "lightning", "pytorch_lightning", "wandb"})
_OTHERS = frozenset({"functorch", "torchgen", "sympy", "mpmath", "typing_extensions", "optree", "einops", "opt_einsum"})
#: Of objects whose attributes may not show what they hold.
_HOLD_DATA = frozenset({"pandas", "scipy", "networkx", "matplotlib", "PIL", "tqdm", "requests", "fsspec", "yaml"})
#: Of validators that classes hold, some of which raise at any question.
_VALIDATE = frozenset({"pydantic", "pydantic_core"})
_FOREIGN = _LIBRARIES | _OTHERS | _HOLD_DATA | _VALIDATE | (sys.stdlib_module_names - {"__main__"})
_LOOKS_UP = frozenset({"getattr", "globals", "vars", "eval", "exec", "__dict__", "import_module", "__import__"})
_WRAPPERS = (staticmethod, classmethod, property, functools.partialmethod, functools.cached_property)
_INNER = ("__func__", "fget", "func", "__wrapped__")
_MAX_ARRAY = 1 << 16
_MOST = 50_000


class NotCapturedError(Exception):
    """The call has to run eagerly, for the given reason."""


class ReadsError(NotCapturedError):
    """A call reads a bool or an integer that is computed from its arguments."""


class EffectError(NotCapturedError):
    """A call does more than compute its result."""


class ChangesError(EffectError):
    """A call changes a container among its arguments."""


class WritesError(EffectError):
    """A call writes to tensors that require grad, of these places."""

    def __init__(self, written: Collection[int]) -> None:
        super().__init__("it writes to an argument that requires grad")
        self.written = written


class AssignsError(EffectError):
    """A call assigns tensors to these attributes of modules."""

    def __init__(self, assigned: Sequence[tuple[dict[str, Any], str]]) -> None:
        super().__init__(f"its forward assigns {assigned[0][1]!r} to a module")
        self.assigned = assigned


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_foreign(module: object) -> bool:
    """Whether this module belongs to a package whose code computes the same each time, such as torch."""
    return _package(module) in _FOREIGN


def is_equal(now: object, before: object) -> bool:
    """Whether two values are the same object, or equal immutable ones: 0.0 and -0.0 are not equal."""
    kind = type(now)
    return now is before or (kind is type(before) and kind in SIMPLE_TYPES and repr(now) == repr(before))


def _environment() -> dict[bytes, bytes]:
    """Return the environment variables as stored, without inductor's own."""
    held: dict[bytes, bytes] = vars(os.environ)["_data"]
    return {name: x for name, x in held.items() if b"TORCHINDUCTOR" not in name}


@dataclass
class Reached:
    """Reached objects and their recorded state."""

    maps: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    lists: list[tuple[Any, list[Any]]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
    scopes: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = field(default_factory=list)
    cells: list[tuple[Any, Any]] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)  # whose class could be changed
    slots: list[tuple[object, str, object]] = field(default_factory=list)
    asked: list[tuple[Callable[[], object], object]] = field(default_factory=list)
    states: list[tuple[Callable[[], Any], Callable[[Any], object], bytes]] = field(default_factory=list)
    puts: list[Callable[[], object]] = field(default_factory=list)  # restore state that is not listed above


class Others(Mapping[str, Any]):
    """A module's attributes but those that a call assigns."""

    def __init__(self, held: dict[str, Any], names: set[str]) -> None:
        self.held, self._names = held, names

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.held if name not in self._names)

    def __len__(self) -> int:
        return len(self.held) - len(self._names & self.held.keys())

    def put(self, values: Mapping[str, Any]) -> None:
        """Make these the values."""
        for name in {*self} - values.keys():
            del self.held[name]
        self.held.update(values)


def _kind_in(held: Mapping[str, object], name: str) -> tuple[object, ...]:
    """Return what code may ask of an attribute that holds a tensor or None, besides the tensor's values."""
    x = held.get(name)
    if not isinstance(x, Tensor):
        return type(x), x is None
    return type(x), x.spec if isinstance(x, ShardBase) else x.shape, x.dtype, x.device, x.requires_grad


class Walk:
    """Walks everything reachable from some objects; of functions only those whose code has run, by code id in
    ``codes``.

    Where ``codes`` is None, all functions but those of installed packages whose code is not in ``ran``.
    """

    def __init__(
        self,
        roots: Iterable[object],
        codes: Mapping[int, Any] | None,
        ran: Container[int],
        assigned: Sequence[tuple[dict[str, Any], str]],
    ) -> None:
        self._codes, self._ran, self._reached = codes, ran, Reached()
        self._assigned: dict[int, set[str]] = {}  # names, by the id of the dict of attributes
        for held, name in assigned:
            self._assigned.setdefault(id(held), set()).add(name)
            self._ask(functools.partial(_kind_in, held, name))
        self.seen: dict[int, object] = {}
        self._todo: list[Any] = list(roots)
        self._scopes: dict[int, tuple[dict[str, Any], dict[str, Any], set[str]]] = {}
        self._tensors: list[Tensor] = []
        self._taken: set[int] = set()  # ids of codes
        self.modules: list[nn.Module] = []
        self.held: list[dict[str, Any]] = []
        for get, put in ((random.getstate, random.setstate), (np.random.get_state, np.random.set_state)):
            self._state(get, put)
        self._run()
        for code, scope in (codes or {}).values():
            if id(code) not in self._taken:  # of functions that nothing here holds
                self._code(code, scope)
        self._run()
        self._reached.scopes = [*self._scopes.values()]

    def found(self, held: Mapping[int, object]) -> Reached:
        """Return the reached objects; ``held`` are the ids of parameters and buffers, whose values may change."""
        for x in self._tensors:
            if id(x) not in held:
                self._compare_tensor(x)
        return self._reached

    def _run(self) -> None:
        while self._todo:
            x = self._todo.pop()
            if type(x) in SIMPLE_TYPES or id(x) in self.seen:
                continue
            self.seen[id(x)] = x  # held, so that its id stays its own
            if len(self.seen) > _MOST:
                raise NotCapturedError(f"it holds more than {_MOST} objects, which would be compared at each step")
            try:
                self._visit(x)
            except NotCapturedError:
                raise
            except Exception as e:  # of a method of its class
                raise NotCapturedError(f"it holds a {type(x).__name__}, which cannot be compared: {e!r}") from e

    def _visit(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self._tensors.append(x)
        elif isinstance(x, nn.Module):
            self._module(x)
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, types.MethodType):
            self._todo += (x.__func__, x.__self__)
        elif isinstance(x, functools.partial):
            self._map(x.keywords)
            self._todo += (x.func, *x.args)
        elif isinstance(x, _WRAPPERS):
            self._todo += [getattr(x, name, None) for name in _INNER]
        elif not isinstance(x, types.ModuleType | types.BuiltinFunctionType | enum.Enum):
            self._object(x)

    # -- objects -------------------------------------------------------------------------------------------------

    def _map(self, values: Mapping[Any, Any], skipped: frozenset[str] = frozenset()) -> None:
        if not values and isinstance(values, dict):
            self._reached.empty.append(values)
            return
        self._reached.maps.append((values, dict(values.items())))
        self._todo += [x for name, x in values.items() if type(x) not in SIMPLE_TYPES and name not in skipped]

    def _module(self, x: nn.Module) -> None:
        self.modules.append(x)
        self.held += (parameters_of(x), buffers_of(x))
        names = self._assigned.get(id(vars(x)))
        self._map(Others(vars(x), names) if names else vars(x), _HELD)
        self._reached.objects.append(x)
        kind = type(x)
        if not is_foreign(kind.__module__):
            self._todo.append(kind)
        elif id(kind) not in self.seen:
            self.seen[id(kind)] = kind
            self._reached.asked.append((lambda: kind.forward, kind.forward))

    def _class(self, x: type) -> None:
        for kind in (*x.__mro__, type(x)):
            if not is_foreign(kind.__module__) and (kind is x or id(kind) not in self.seen):
                self.seen[id(kind)] = kind
                before = dict(vars(kind))
                self._map(vars(kind))
                self._reached.puts.append(functools.partial(_put_attributes, kind, before))

    def _object(self, x: Any) -> None:
        kind, reached = type(x), self._reached
        if _package(kind.__module__) in _VALIDATE:
            return
        is_container = True
        if isinstance(x, dict):
            self._map(x)
            self._todo += x
        elif isinstance(x, tuple):
            self._todo += tuple.__iter__(x)  # its class may have no length (e3nn's have none)
        elif isinstance(x, frozenset):
            self._todo += x
        elif isinstance(x, list | deque | set):
            reached.lists.append((x, [*x])) if x else reached.empty.append(x)
            self._todo += x
        elif isinstance(x, bytearray | array.array):
            self._ask(lambda: bytes(x), lambda kept: memoryview(x).cast("B").__setitem__(slice(None), kept))
        elif isinstance(x, np.ndarray):
            self._array(x)
        elif isinstance(x, weakref.ref):
            self._todo.append(x())
        elif isinstance(x, logging.Logger):
            self._ask(x.getEffectiveLevel)
        elif isinstance(x, ContextVar):
            self._ask(lambda: x.get(None))
        elif isinstance(x, random.Random):
            self._state(x.getstate, x.setstate)
        elif isinstance(x, np.random.RandomState):
            self._state(x.get_state, x.set_state)
        elif isinstance(x, np.random.Generator):
            self._state(lambda: x.bit_generator.state, lambda state: setattr(x.bit_generator, "state", state))
        elif isinstance(x, torch.Generator):
            self._state(lambda: x.get_state().numpy(), lambda state: x.set_state(torch.from_numpy(state)))
        elif isinstance(x, types.GeneratorType) and inspect.getgeneratorstate(x) == inspect.GEN_CREATED:
            self._ask(lambda: inspect.getgeneratorstate(x))  # of a decorator by contextlib, which makes others of it
        elif hasattr(x, "cache_info") and hasattr(x, "cache_clear"):
            self._ask(lambda: x.cache_info()[1::2], lambda _: x.cache_clear())  # another miss may be another value
            self._map(vars(x))
        else:
            is_container = False
        if _package(kind.__module__) in _LIBRARIES:
            return
        if not is_container and isinstance(x, Iterator):
            raise NotCapturedError(f"it holds a {kind.__name__}, whose state cannot be compared")
        fields = getattr(x, "__dict__", None)
        if isinstance(fields, dict):
            self._map(fields)
        holds_data = _package(kind.__module__) in _HOLD_DATA
        if is_foreign(kind.__module__) and not holds_data:
            return
        slots = [name for each in kind.__mro__ for name in _slots_of(each)]
        has_slots = not holds_data and any("__slots__" in vars(each) for each in kind.__mro__)
        if fields is None and not is_container and not has_slots:
            raise NotCapturedError(f"it holds a {kind.__name__}, which cannot be compared")
        reached.objects.append(x)
        self._todo.append(kind)
        for name in slots:
            value = getattr(x, name, reached)
            reached.slots.append((x, name, value))
            if value is not reached:
                self._todo.append(value)
                reached.puts.append(functools.partial(_put_attribute, x, name, value))

    def _array(self, x: np.ndarray[Any, Any]) -> None:
        if not x.flags.writeable and x.base is None:
            return
        if x.nbytes > _MAX_ARRAY or x.dtype.hasobject:
            raise NotCapturedError(
                f"it holds an array of {x.nbytes} bytes, too many to compare at each step: make it a buffer, "
                "or set its flags.writeable to False"
            )
        self._ask(lambda: (x.shape, x.strides, x.dtype, x.tobytes()), lambda kept: _fill(x, kept))

    def _ask(self, get: Callable[[], Any], put: Callable[[Any], object] | None = None) -> None:
        kept = get()
        self._reached.asked.append((get, kept))
        if put is not None:
            put_back = put
            self._reached.puts.append(lambda: get() == kept or put_back(kept))

    def _state(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._reached.states.append((get, put, pickle.dumps(get())))

    def _compare_tensor(self, x: Tensor) -> None:
        if isinstance(x, ShardBase):
            shard = x
            if shard.copied is not None:
                raise NotCapturedError("it holds a sharded tensor that is a copy for which torch has a view")
            spec, local = shard.spec, shard.local
            self._reached.asked.append((lambda: shard.spec is spec and shard.local is local, True))
            x = local
        refuse_sparse(x)
        if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or not x.untyped_storage().resizable():
            raise NotCapturedError(f"it holds a {type(x).__name__} that others may write to: make it a buffer")
        self._reached.asked.append((lambda: facts_of(x), facts_of(x)))

    # -- functions -----------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if is_foreign(function.__module__):
            return
        is_user = self._codes is None and "site-packages" not in code.co_filename
        if not is_user and id(code) not in (self._ran if self._codes is None else self._codes):
            return
        self._reached.functions.append(function)
        self._todo += (function.__defaults__, function.__kwdefaults__)
        if "__wrapped__" not in vars(function) or len(vars(function)) > 1:
            self._map(vars(function))
        # torch.compile's wrapper of a function has its ``__module__``, but globals of torch's
        is_wrapper = is_foreign(function.__globals__.get("__name__"))
        names = set[str]() if is_wrapper else self._code(code, function.__globals__)
        for cell in function.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:  # empty as yet
                continue
            self._reached.cells.append((cell, x))
            self._global(x, names)

    def _code(self, code: types.CodeType, scope: dict[str, Any]) -> set[str]:
        """Take the globals that code names; returns its names of attributes."""
        self._taken.add(id(code))
        named, others = set[str](), set[str]()
        for each in _nested(code):
            self._taken.add(id(each))
            named |= {i.argval for i in dis.get_instructions(each) if i.opname in _GLOBALS}
            others |= {*each.co_names, *[x for x in each.co_consts if isinstance(x, str)]}
        if named & {"globals", "eval", "exec"}:
            named |= {name for name in scope if not name.startswith("__")}
        _, names, absent = self._scopes.setdefault(id(scope), (scope, {}, set()))
        for name in named:
            if name in scope:
                names[name] = scope[name]
                self._global(scope[name], others)
                continue
            absent.add(name)
            if not hasattr(builtins, name):
                self._imported(name, scope, others)
        return others

    def _imported(self, name: str, scope: Mapping[str, Any], names: set[str]) -> None:
        for found in (name, f"{scope.get('__package__')}.{name}", *[f"{name}.{part}" for part in names]):
            if found in sys.modules:
                self._global(sys.modules[found], names)

    def _global(self, x: object, names: set[str]) -> None:
        if not isinstance(x, types.ModuleType):
            self._todo.append(x)
            return
        scope, foreign = vars(x), is_foreign(x.__name__)
        if x is os and (_environment, _environment()) not in self._reached.asked:
            self._reached.asked.append((_environment, _environment()))
        if names & _LOOKS_UP and not foreign:
            names = names | {name for name in scope if not name.startswith("__")}
        _, values, _ = self._scopes.setdefault(id(scope), (scope, {}, set()))
        for name in names - values.keys() - (_PATCHED if foreign else set()):
            if name not in scope:
                continue
            values[name] = scope[name]
            if isinstance(scope[name], types.ModuleType) or not foreign:
                self._global(scope[name], names)


#: Functions that torch puts others in the places of while it traces.
_PATCHED = frozenset({"manual_seed", "seed", "get_rng_state", "set_rng_state"})
#: What tensors without values do not have as those that they stand for, and what a graph does not set.
_OF_TENSORS = frozenset({"grad", "grad_fn", "is_leaf", "storage_offset", "data_ptr", "_version", "_base"})
_READ = _OF_TENSORS | {
    "is_anomaly_enabled",  # which it is while a step is captured
    *("fork_rng", "get_rng_state", "set_rng_state"),
}
_SET = frozenset({"data", "grad"})
_OF_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")  # which may have the name of an attribute
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "IMPORT_FROM"})

#: Opcodes that end an expression, or the part of it that is computed whatever a condition is.
_ENDS = (
    "RAISE_VARARGS",
    "RETURN_",
    "STORE_",
    "POP_TOP",
    "POP_JUMP",
    "JUMP_",
    "YIELD_",
    "IS_OP",
    "COMPARE_OP",
    "CONTAINS_OP",
)


def touches(code: types.CodeType) -> str:
    """Return a tensor attribute that code reads or sets and a graph cannot have; "" if there is none."""
    for each in _nested(code):
        if _names_tensors(each) and _asks_for_type(each):
            return "may ask for the type of a tensor"
        if {"sys", "modules"} <= {*each.co_names}:
            return "looks into sys.modules"
        for i in dis.get_instructions(each):
            is_called = i.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and (i.arg or 0) & 1)
            is_other = i.argval in _OF_TENSORS and i.opname.startswith(_OF_VARIABLES)
            is_other |= i.argval == "grad" and is_called
            if i.argval in _READ and i.opname.startswith("LOAD_") and not is_other:
                return f"reads .{i.argval}"
            if i.argval in _SET and i.opname == "STORE_ATTR":
                return f"sets .{i.argval}"
            writes = i.opname == "STORE_SUBSCR" or (i.opname == "LOAD_METHOD" and i.argval[-1] == "_")
            if writes and "data" in each.co_names:
                return "writes to .data"
    return ""


def _names_tensors(code: types.CodeType) -> bool:
    """Whether code names a class of tensors; ``inspect.Parameter`` is none."""
    found = [*dis.get_instructions(code)]
    return any(
        i.argval in ("Tensor", "Parameter") and not (i.argval == "Parameter" and before.argval == "inspect")
        for before, i in itertools.pairwise([found[0], *found])
    )


def _asks_for_type(code: types.CodeType) -> bool:
    """Whether code calls ``type`` for more than the message of an error that it raises, or ``type(x)(*values)``."""
    found = [*dis.get_instructions(code)]
    for k, load in enumerate(found):
        if load.argval == "type" and load.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"):
            if _is_called_with_all(found, k) or _is_conversion(found, k):
                continue
            end = next(i.opname for i in found[k:] if i.opname.startswith(_ENDS))
            if load.opname != "LOAD_GLOBAL" or end != "RAISE_VARARGS":
                return True
    return False


def _is_called_with_all(found: Sequence[dis.Instruction], k: int) -> bool:
    """Whether the type loaded at ``k`` is called with unpacked values, as named tuples are made: no tensor is."""
    call = next((i for i in range(k, len(found)) if found[i].opname == "CALL"), len(found) - 1)
    nulls = found[max(0, k - 1)], found[min(call + 1, len(found) - 1)]  # Python 3.13 has it behind what is called
    rest = itertools.takewhile(lambda i: not i.opname.startswith(("RETURN_", "STORE_")), found[call:])
    return any(i.opname == "PUSH_NULL" for i in nulls) and any(i.opname == "CALL_FUNCTION_EX" for i in rest)


def _is_conversion(found: Sequence[dis.Instruction], k: int) -> bool:
    """Whether what is loaded at ``k`` is a method that is called with arguments, as ``x.type(dtype)``."""
    load, after = found[k], found[k + 1]
    is_method = load.opname == "LOAD_METHOD" or (
        load.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and (load.arg or 0) & 1 == 1
    )
    return is_method and after.opname not in ("PRECALL", "CALL") and found[k - 1].argval != "builtins"


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _nested(inner)


def refuse_sparse(x: Tensor) -> None:
    """Raise for a tensor without strides and a storage, of which nothing tells whether it was written to."""
    if x.layout is not torch.strided:
        raise NotCapturedError("it uses a sparse tensor")


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    names = [name for name in names if name not in ("__dict__", "__weakref__")]
    return [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]


def facts_of(x: Tensor) -> tuple[object, ...]:
    """Return what is compared of a tensor whose values a graph takes for granted."""
    return version_of(x), x.untyped_storage().data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad


def _fill(x: np.ndarray[Any, Any], kept: tuple[Any, ...]) -> None:
    x.shape = kept[0]
    x[...] = np.frombuffer(kept[3], dtype=kept[2]).reshape(kept[0])


def _put_attribute(x: object, name: str, value: object) -> None:
    if getattr(x, name, None) is not value:
        setattr(x, name, value)


def _put_attributes(kind: type, before: Mapping[str, object]) -> None:
    for name in [*vars(kind)]:
        if name not in before:
            delattr(kind, name)
        elif vars(kind)[name] is not before[name]:
            setattr(kind, name, before[name])
    for name in before.keys() - vars(kind).keys():
        setattr(kind, name, before[name])

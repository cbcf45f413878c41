"""Every private name of torch that capture uses; each says why no public one serves. Tried with torch 2.13.

``tests/unit/shard/test_torch_internals.py`` tests each. Those of sharded tensors are in
:mod:`scidata.shard.torch_internals`.
"""

from __future__ import annotations

import inspect
import struct
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from scidata.core.checks import check_choice
from scidata.errors import ConfigError, near_matches
from scidata.shard.comm.operators import assume
from scidata.shard.torch_internals import has_values, storage_of, unseen, version_of
from scidata.shard.views import overlaps

#: A graph of a step in, and its example tensors; out comes a function of the same tensors.
Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def has_function_mode() -> bool:
    """Whether a mode of the user's looks at functions; only the stack of modes knows."""
    return torch._C._len_torch_function_stack() > 0


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls a module with its hooks, bypassing its compiled call."""
    return module._call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make ``module(...)`` call this; the public ``module.compile()`` takes no callable."""
    module._compiled_call_impl = call


def compiled_call(model: object) -> object:
    """Return the callable of :func:`set_compiled_call`, or None."""
    return getattr(model, "_compiled_call_impl", None)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bools and integers that code reads of tensors, in order, by the line that reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Hashable, list[bool | int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Compute."""
        found = func(*args, **(kwargs or {}))
        if func in _READS and isinstance(found, int):
            self.found.setdefault(_line(), []).append(found)
        return found


_COMPARES = frozenset({torch.ops.aten.equal.default})
_READS = _COMPARES | {torch.ops.aten._local_scalar_dense.default}


def _line() -> Hashable:
    """Return the line of Python, outside torch, that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        (name := frame.f_globals.get("__name__", "")) == __name__ or name.split(".")[0] == "torch"
    ):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for tensors with values among the operands during capture: constants of the graph.

    One that is written to raises TypeError, before it is: each trace would write. With ``folds``, what is computed of
    constants alone is computed at once, and a constant too, so that handlers can read it. ``read`` has the constants
    that were computed with so, and their versions. Numbers for a tensor that is not row-major are drawn in the order of
    its memory, as eagerly: torch's operators without a write, of ``bernoulli_`` for one, draw others.
    """

    def __init__(self, *, folds: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folds = folds
        self.has_checkpoints = False
        self._drawn: list[Iterator[object] | list[object]] = []  # of checkpoints inside: numbers to draw again, or kept
        self.read: dict[int, tuple[Tensor, int]] = {}
        self.errors: list[str] = []  # of values that code asked for, whether or not it catches them
        self.is_read = False  # whether one of these was a bool or an integer
        self._assumed: dict[Hashable, Iterator[bool | int]] = {}  # by line: what is read there
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}  # traced tensors, by id: versions and values
        self._made: dict[int, Tensor] = {}  # tensors computed here, by storage
        self._lossy: set[object] = set()  # places of views that torch puts back wrongly, and of views of these

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Compute, or hand on to the tracer."""
        result = self._computed(func, types, args, kwargs)
        if getattr(func, "is_view", False) and isinstance(args[0], Tensor):
            is_part = func is torch.ops.aten.unfold.default or _place(args[0]) in self._lossy
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and (is_part or overlaps(x.shape, x.stride())):
                    self._lossy.add(_place(x))
        return result

    def _computed(self, func: Any, types: object, args: tuple[object, ...], kwargs: dict[str, object] | None) -> object:
        if self._drawn and draws(func):
            return self._draw_in_checkpoint(func, args, kwargs or {})
        if "c10d" in func.namespace:  # its order among scidata's collectives is left to compilers
            self.errors.append(f"{func} communicates past scidata")
            raise TypeError(self.errors[-1])
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        held = [x for x in tensors if has_values(x)]
        folds = self._folds and func.namespace == "aten" and not draws(func)
        if folds and func.overloadpacket in _FILLS and (kwargs or {}).get("dtype", tensors[0].dtype) is torch.int64:
            with unseen():  # no value of the other tensor's is read
                given = torch.empty_strided(tensors[0].shape, tensors[0].stride(), device=tensors[0].device)
            args, kwargs, held, tensors = (given, *args[1:]), {**(kwargs or {}), "dtype": torch.int64}, [], []
        folds = folds and len(held) == len(tensors) and bool(tensors or func.overloadpacket in (_FACTORIES | _FILLS))
        if held and func is torch.ops.scidata.copied.default:
            return torch.empty(held[0].shape, dtype=held[0].dtype, device=held[0].device).copy_(held[0])
        if held and func is torch.ops.aten.lift_fresh.default:  # a literal
            self._made |= {storage_of(x): x for x in held}
        for x in _written(func, args, kwargs or {}) if func._schema.is_mutable else ():
            if has_values(x) and not (folds and storage_of(x) in self._made):
                raise TypeError(f"{func} writes to a tensor that is neither an argument nor a buffer")
            if _place(x) in self._lossy:
                self.errors.append(f"{func} writes to a view by expand() or unfold(), which torch's graphs lose")
                raise TypeError(self.errors[-1])
        if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
            raise TypeError(f"{func} draws by a generator, which a graph would go on with, were it made anew")
        if func._schema.is_mutable and draws(func) and not (x := tensors[0]).is_contiguous():
            drawn = torch.ops.scidata.draw(x.shape, x.stride(), func._opname, args[1:], x.dtype, x.device)
            return x.copy_(drawn)
        if self._folds and not folds and func is torch.ops.aten.index.Tensor:
            args = args[0], self._rows_of(args[1])
        if not folds:
            value = self._value_of(func, args, kwargs or {}, tensors)
            if value is not None and not value.is_floating_point():  # what code may branch on
                self._made[storage_of(value)] = value
                return value
            if func in _READS and (func in _COMPARES or not tensors[0].dtype.is_floating_point):
                read = next(self._assumed.get(_line(), iter(())), None)
                if read is not None:
                    assume(torch.eq(*tensors).all() if func in _COMPARES else tensors[0], read)
                    return read
                self.is_read = True
            try:
                result = func(*args, **(kwargs or {}))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                raise
            return self._know(result, value)
        with unseen():
            found = func(*args, **(kwargs or {}))
        new = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        known = {*map(storage_of, held)}
        if func.overloadpacket is not torch.ops.aten.arange and self._is_fill(held, new):
            if held and found is new[0] and storage_of(found) not in known:
                # of constants alone, torch makes one that cannot be written to
                new_like = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)
                return new_like.copy_(found)
            return self._know(func(*args, **(kwargs or {})), found)
        if sum(x.nbytes for x in new if storage_of(x) not in known) > _MOST_FOLDED:
            return func(*args, **(kwargs or {}))
        for x in held:
            if storage_of(x) not in self._made:
                self.read[id(x)] = x, version_of(x)
        self._made |= {storage_of(x): x for x in new if storage_of(x) not in known}
        return found

    @contextmanager
    def assuming(self, reads: Mapping[Hashable, Sequence[bool | int]]) -> Iterator[None]:
        """Answer code that reads bools and integers by these, and have the graph check them; raises if there are no
        more.
        """
        self._assumed = {line: iter(each) for line, each in reads.items()}
        with self:
            yield
        self._assumed = {}

    @contextmanager
    def checkpoint(self, frame: Any, *, again: bool) -> Iterator[None]:
        """Keep the random numbers that a checkpoint's forward draws; when it is run ``again``, draw those."""
        self.has_checkpoints, kept = True, vars(frame).setdefault("drawn", [])
        self._drawn.append(iter(kept) if again else kept)
        try:
            yield
        finally:
            self._drawn.pop()

    def _draw_in_checkpoint(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Draw, or return what was drawn, where a checkpoint may be run in another that is run again."""
        x, again = args[0], [i for i, kept in enumerate(self._drawn) if not isinstance(kept, list)]
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise TypeError(f"{func} draws by a generator inside torch.utils.checkpoint")
        if again:
            drawn = next(self._drawn[again[-1]])  # type: ignore[arg-type]
        elif func._schema.is_mutable:
            drawn = torch.ops.scidata.draw(x.shape, x.stride(), func._opname, args[1:], x.dtype, x.device)
        else:
            drawn = func(*args, **kwargs)
        for kept in self._drawn[again[-1] + 1 if again else 0 :]:
            kept.append(drawn)  # type: ignore[union-attr]
        return x.copy_(drawn) if func._schema.is_mutable else drawn

    def _is_fill(self, held: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
        """Whether a single number is repeated: computed values are likely to be written there."""
        is_larger = sum(x.nbytes for x in new) > sum(x.nbytes for x in held)
        are_made = all(storage_of(x) in self._made for x in held)
        return is_larger and are_made and all(x.is_floating_point() for x in (*held, *new))

    def _know(self, x: object, value: object) -> object:
        """Keep the values of a tensor that is traced, as it may be written to: they are good until it is."""
        if isinstance(x, Tensor) and isinstance(value, Tensor) and value.nbytes <= _MOST_KNOWN:
            self._known[id(x)] = x, version_of(x), value
        return x

    def _value_of(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return what an operator makes of tensors whose values are known; None if one is not."""
        if not self._known or func.namespace != "aten" or draws(func) or func._schema.is_mutable:
            return None
        held = [self._known.get(id(x)) for x in tensors]
        if not held or any(found is None or found[1] != version_of(x) for x, found in zip(tensors, held, strict=True)):
            return None
        given = tree_map(lambda x: self._known[id(x)][2] if isinstance(x, Tensor) else x, (args, kwargs))
        with unseen():
            found = func(*given[0], **given[1])
        return found if isinstance(found, Tensor) and found.nbytes <= _MOST_KNOWN else None

    def _rows_of(self, index: Any) -> list[Tensor | None]:
        """Replace masks with known values in an index by the positions of their true elements."""
        found: list[Tensor | None] = []
        for x in index:
            if x is None or x.dtype not in (torch.bool, torch.uint8) or not has_values(x):
                found.append(x)
                continue
            with unseen():
                rows = x.nonzero().unbind(1)
            if storage_of(x) not in self._made:
                self.read[id(x)] = x, version_of(x)
            self._made |= {storage_of(each): each for each in rows}
            found += rows
        return found

    def has_made(self, x: Tensor) -> bool:
        """Whether a tensor with values was computed here."""
        return storage_of(x) in self._made


def _place(x: Tensor) -> object:
    """Return which elements of which memory a tensor has."""
    return storage_of(x), x.shape, x.stride(), x.storage_offset()


def _written(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    names = [arg.name for arg in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [given.get(arg.name) for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
    return (x for x in tree_leaves(written) if isinstance(x, Tensor))


_FACTORIES = frozenset(
    getattr(torch.ops.aten, name) for name in ("arange", "zeros", "ones", "full", "empty", "scalar_tensor")
)
#: Of another tensor's shape, or dtype.
_FILLS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)
_MOST_FOLDED = 1 << 24  # bytes of a constant
_MOST_KNOWN = 1 << 20  # and of a traced tensor whose values are kept


def _like_drawn(shape: Any, strides: Any, _0: str, _1: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _draw(shape: Any, strides: Any, name: str, given: Sequence[float], *kind: Any) -> Tensor:
    return getattr(_like_drawn(shape, strides, name, given, *kind), name)(*given)


_library: Any = Library("scidata", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "draw(int[] shape, int[] strides, str name, Scalar[] given, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides),
)
_library.impl("draw", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("scidata::draw", _like_drawn, lib=_library)


@cache
def drawing_in_order(operator: Any) -> Any:
    """Return an operator that draws as another does, and pretends to write to a tensor, its first argument: compilers
    keep the order of all that write to one.
    """
    name, _, rest = str(operator._schema).partition("(")
    name = name.rpartition("::")[2].replace(".", "_") + "_in_order"

    def run(_: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    _library.define(f"{name}(Tensor(a!) order, {rest}", tags=operator.tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scidata::{name}", run, lib=_library)
    return getattr(torch.ops.scidata, name).default


def be_parameter(x: Tensor, like: Tensor) -> None:
    """Make ``isinstance(x, nn.Parameter)`` answer for a tensor without values as for another tensor."""
    if isinstance(like, nn.Parameter) and not isinstance(x, nn.Parameter):
        x._is_param = True


def unreadable(x: Tensor) -> Tensor:
    """Return a tensor of the same memory format and kind with which nothing can be computed during capture."""
    with FakeTensorMode():  # torch mixes no two such modes
        found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return found.requires_grad_(x.requires_grad)


def has_hooks(module: nn.Module, *, refused: bool = False) -> bool:
    """Whether a call of the module runs more than its ``forward``; torch has no public list of hooks.

    With ``refused``, only hooks that a graph of a larger module cannot have: of the backward pass, and those by which
    libraries spread a module over ranks.
    """
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if refused:
        hooks = [x for x in hooks if _origin(x).startswith(("torch.distributed", "torch._", "scidata"))]
    return bool(hooks or module._backward_hooks or module._backward_pre_hooks)


def _origin(hook: Any) -> str:
    """Return the name of the module that defines a hook."""
    hook = inspect.unwrap(hook.func if isinstance(hook, partial) else hook)
    return getattr(hook, "__module__", None) or type(hook).__module__


def has_global_hooks() -> bool:
    """Whether hooks for all modules are registered."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


@dataclass
class Run:
    """A call of a region in the forward of a checkpoint, and its graph; None for an eager one."""

    region: object
    graph: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """What ran in the forward of a checkpoint that is not reentrant, which has to be run again alike.

    ``again``: the calls that are left of a run in the backward pass; None in the forward.
    """

    ran: list[Run]
    again: Iterator[Run] | None

    def next_of(self, region: object) -> Run | None:
        """Return how a call ran in the forward; note it, and return None, where this is the forward."""
        if self.again is None:
            self.ran.append(Run(region))
            return None
        found = next(self.again, None)
        return found if found is not None and found.region is region else None

    def note(self, region: object, graph: object) -> None:
        """Note the graph by which the last call of a region runs."""
        if self.again is None:
            next(run for run in reversed(self.ran) if run.region is region).graph = graph


def checkpoint() -> Checkpoint | None:
    """Return the innermost checkpoint, found by its hook of saved tensors; None outside, or inside other hooks.

    It is kept with torch's record of the checkpoint, and with the hook of a run, which are in these functions' cells.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return None
    hook = inspect.unwrap(hooks[0])
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    if "frame" in cells:
        ran = vars(cells["frame"].cell_contents).setdefault("scidata_ran", [])
        return Checkpoint(ran, None)
    if "target_frame_ref" not in cells or (frame := cells["target_frame_ref"].cell_contents()) is None:
        return None
    ran = vars(frame).setdefault("scidata_ran", [])
    found: Checkpoint = vars(hook).setdefault("scidata_again", Checkpoint(ran, iter(ran)))
    return found


def captured_function(
    function: Callable[..., Any],
    forward: Compiler,
    backward: Compiler,
    joined: Callable[[GraphModule], bool],
    parted: Callable[..., None],
    *,
    fuses: bool,
) -> Any:
    """Return a function that captures ``function`` at its first call, forward and backward, and runs the graphs.

    ``functorch.compile`` is public, and says that it may change. With ``fuses``, operators are those of inductor, and
    values that are cheap to compute are computed again in backward, unless ``joined`` says that the function chose
    itself, which is called with the graph of both ways. ``parted`` is called with the two that are made of it.
    """
    from functorch import compile as compilers  # type: ignore[import-untyped]

    table, cut = None, compilers.default_partition
    if fuses:
        from torch._inductor.decomposition import select_decomp_table

        # operators that draw are left, but for those that call others: their numbers would differ from an eager step's
        calls = torch._C.DispatchKey.CompositeImplicitAutograd
        table = {
            operator: rule
            for operator, rule in select_decomp_table().items()
            if not draws(operator) or operator.has_kernel_for_dispatch_key(calls)
        }
        cut = compilers.min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        both = (compilers.default_partition if joined(args[0]) else cut)(*args, **kwargs)
        parted(*both)
        return both

    return compilers.aot_function(
        function,
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        partition_fn=partition,
        decompositions=table,
    )


@contextmanager
def tracing() -> Iterator[None]:
    """Let tensors with values be constants of the graph: plans of exchanges, and tensors that closures hold.

    And have the backward pass that is captured run as an eager one does: without the forward pass's autocast. What
    torch does to write operators down is hidden from :class:`.watch.Watch`, which would take as long again for it.
    """
    from torch._dynamo import config as compiler
    from torch._functorch import config
    from torch._guards import TracingContext
    from torch._guards import tracing as inside
    from torch._inductor import config as of_inductor
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx import _symbolic_trace

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else casts of traced weights would be kept
    # globals of modules, which torch puts others in the places of
    wrapped = dict(_symbolic_trace._wrapped_fns_to_patch)
    _symbolic_trace._wrapped_fns_to_patch.clear()
    try:
        context = TracingContext(FakeTensorMode(allow_non_fake_inputs=True))
        with (
            config.patch(backward_pass_autocast="off", unlift_effect_tokens=True),
            of_inductor.patch(fallback_random=True),  # else numbers that nothing uses would not be drawn
            inside(context),
            _wrapped(FunctionalTensorMode, "__torch_dispatch__", _hidden),
            _wrapped(torch.fx.Graph, "python_code", _hidden),
            _wrapped(nn.Module, "register_parameter", _taking_traced),
            # functions that the model has compiled run as they were written, and are traced with it
            torch.compiler.set_stance("force_eager"),
            compiler.patch(error_on_nested_fx_trace=False),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
        _symbolic_trace._wrapped_fns_to_patch.update(wrapped)


@contextmanager
def recomputing(constants: Constants, inside: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Have checkpoints inside a captured function leave out and compute again, so that its graphs do.

    Hooks on saved tensors see nothing of what is traced, but for these. Each function that is run again in the backward
    pass is run in ``inside()``. Reentrant checkpoints, which call ``backward()``, are refused by torch.
    """
    from torch.utils import checkpoint as its

    see: Callable[[bool], bool] = torch._C._autograd._saved_tensors_hooks_set_tracing

    def seen(kind: type, frame_of: Callable[[Any], Any], *, again: bool) -> type:
        class Seen(kind):  # type: ignore[misc]
            def __init__(self, frame: Any, *args: Any) -> None:
                super().__init__(frame, *args)
                self._frame, self._stack = frame_of(frame), ExitStack()

            def __enter__(self) -> object:
                if again:
                    self._stack.enter_context(inside())
                self._stack.enter_context(constants.checkpoint(self._frame, again=again))
                self._stack.callback(see, see(False))
                return super().__enter__()

            def __exit__(self, *error: object) -> None:
                super().__exit__(*error)
                self._stack.close()

        return Seen

    with (
        _wrapped(its, "_checkpoint_hook", lambda kind: seen(kind, lambda frame: frame, again=False)),
        _wrapped(its, "_recomputation_hook", lambda kind: seen(kind, lambda reference: reference(), again=True)),
        _wrapped(its, "_is_compiling", lambda _: lambda *_: False),  # what is chosen is saved, not marked for compilers
    ):
        yield


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that hides what it does from a profiler written in Python."""

    def hidden(*args: Any, **kwargs: Any) -> Any:
        profile = sys.getprofile()
        if not callable(profile):
            return method(*args, **kwargs)
        sys.setprofile(None)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return hidden


def _taking_traced(register: Callable[..., None]) -> Callable[..., None]:
    """Return ``register_parameter`` for modules that a forward makes of parameters: traced ones are no leaves."""

    def register_traced(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        is_traced = getattr(param, "_is_param", False) and getattr(param, "grad_fn", None) is not None
        register(module, name, None if is_traced else param)
        if is_traced:
            module._parameters[name] = param

    return register_traced


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    method = getattr(owner, name)
    setattr(owner, name, wrap(method))
    try:
        yield
    finally:
        setattr(owner, name, method)


def is_of_backward(node: Node) -> bool:
    """Whether a node of the joint graph was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def keep_in_forward(node: Node, *, is_forward: bool) -> None:
    """Force a node of the joint graph into the forward, or the backward, graph."""
    node.meta["partitioner_tag"] = f"must_be_in_{'forward' if is_forward else 'backward'}"


def lists_of_weights(module: nn.Module) -> dict[str, object]:
    """Return the objects that modules such as a GRU rebuild if their parameters are replaced."""
    names = ("_flat_weights", "_flat_weight_refs") if isinstance(module, nn.RNNBase) else ()
    return {name: vars(module)[name] for name in names}


def inductor(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Compiler, Compiler]:
    """Return inductor's compilers of forward and backward graphs; ``torch.compile`` itself compiles Dynamo's traces."""
    from torch._inductor import compile_fx, config, list_mode_options

    if mode is not None:
        check_choice("mode", mode, list_mode_options())
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    for name in given.keys() - (known := config.get_config_copy()).keys():
        raise ConfigError(f"options: inductor has no {name!r}{near_matches(name, known, listed=False)}")
    chosen = {**(list_mode_options(mode) if mode else {}), **given, "fallback_random": True}
    check_libraries()

    def run(gm: GraphModule, inputs: list[Any], *, is_backward: bool) -> Callable[..., Any]:
        # computation that overlaps an exchange would move to the point of least memory
        keeps_order = any(node.target is torch.ops.scidata.start.ordered for node in gm.graph.nodes)
        with config.patch({**({"reorder_for_peak_memory": False} if keeps_order else {}), **chosen}):
            compiled: Any = compile_fx.compile_fx_inner(gm, inputs, is_backward=is_backward)
        return compiled

    return partial(run, is_backward=False), partial(run, is_backward=True)


def check_libraries() -> None:
    """Make inductor raise if a library in its cache is truncated: loading it would end the process by SIGBUS.

    The table of sections is the last of such a file, and its header says where that is.
    """
    from torch._inductor.codecache import CppCodeCache as Cache

    if hasattr(Cache, "unchecked"):
        return
    load = Cache.unchecked = Cache._load_library.__func__

    def checked(cls: type, path: str, key: str) -> object:
        with Path(path).open("rb") as file:
            head = file.read(64)
        if len(head) == 64 and head.startswith(b"\x7fELF\2\1"):  # of 64 bits, little-endian
            (start,), (size, num) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
            if Path(path).stat().st_size < start + size * num:
                raise OSError(f"{path}: file too short")
        return load(cls, path, key)

    Cache._load_library = classmethod(checked)


def called_module(function: Any) -> nn.Module | None:
    """Return the module of a call that ``module.compile()`` hands to ``torch.compile``."""
    return function.__self__ if getattr(function, "__func__", None) is nn.Module._call_impl else None


def wrapped(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> nn.Module:
    """Return a module as ``torch.compile`` returns it, wrapped around this one, with ``forward`` from ``make(...)``."""
    from torch._dynamo.eval_frame import OptimizedModule

    return OptimizedModule(module, make)


def forward_of_wrapped(model: object) -> object:
    """Return the forward of a module made by :func:`wrapped`; None for other modules."""
    return vars(model).get("forward") if isinstance(getattr(model, "_orig_mod", None), nn.Module) else None


def graph_of(result: Tensor) -> Any:
    """Return the autograd node that runs the backward graph behind one result of a captured function."""
    node = result.grad_fn
    return node if hasattr(getattr(node, "_forward_cls", None), "_aot_id") else None


def results_of_graph(node: Any) -> dict[int, int] | None:
    """Return which of the node's gradients is that of each result that requires grad.

    None if results share memory with others.
    """
    facts = node._forward_cls.metadata
    results = {i: each for i, each in enumerate(facts.output_info) if each.requires_grad_for_backward}
    if facts.num_intermediate_bases or any("alias_of" in each.output_type.name for each in results.values()):
        return None
    return {i: facts.num_mutated_inp_runtime_indices + i for i in results}


def watch_backward(node: Any, handle: Callable[[Any, Sequence[Tensor | None]], tuple[Any, ...] | None]) -> None:
    """Ask ``handle(node, gradients)`` for input gradients before the backward graph runs; None runs the graph.

    torch fills in zeros for results that got no gradient, and lets nobody see that they are none.
    """
    graph = node._forward_cls
    node.set_materialize_grads(False)
    if hasattr(graph, "unwatched"):
        return
    graph.unwatched = staticmethod(graph.backward)
    is_boxed = getattr(graph, "boxed_grads_call", False)  # since torch 2.13

    def backward(ctx: Any, *grads: Any) -> Any:
        found = handle(ctx, grads[0] if is_boxed else grads)
        return graph.unwatched(ctx, *grads) if found is None else found

    graph.backward = staticmethod(backward)


def draws(target: object) -> bool:
    """Whether the target of a node in a graph draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def computes(target: object) -> bool:
    """Whether the target of a node is an operator, and no view."""
    is_view = target is torch.ops.aten._unsafe_view.default or getattr(target, "is_view", False)
    return isinstance(target, torch._ops.OpOverload) and not is_view


def make_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as graphs call it: with one list of tensors, which it may empty."""
    from functorch import compile as compilers

    return function if hasattr(function, "_boxed_call") else compilers.make_boxed_func(function)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as taking a boxed list of arguments."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def memory_facts(x: Tensor) -> tuple[object, ...]:
    """Return the guarded facts of a tensor's memory."""
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference(), x.is_conj(), x.is_neg()

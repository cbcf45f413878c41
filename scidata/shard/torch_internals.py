"""Every private name of torch that sharded tensors use; each says why no public one serves.

Tried with torch 2.13 and 2.15. ``tests/unit/shard/test_torch_internals.py`` tests each of them, and that no
other module uses a private name; those of process groups and loaders are in
:mod:`scidata.device_mesh.torch_internals`.

Seven things are patched for the whole process, none at import. :func:`watch_functions`: the first ShardTensor replaces
``autograd.Function.apply`` by one that looks at the arguments first, and ``forward`` of those functions whose ``apply``
may have been taken before. :func:`keep_out_of_graphs`: the first tensor made, or model parallelized, in a process that
has Dynamo adds this package to the modules that Dynamo does not trace. The first ShardTensor also has
:func:`watch_transforms` put functions that look at the arguments first in the places of four that ``torch.func`` calls,
and :func:`watch_scripts`, :func:`watch_data` and :func:`watch_checkpoints` one in those of scripted functions'
``__call__``, of parameters' ``data`` and of what saves a checkpoint's arguments.
The first model parallelized has ``torch.compile`` look whether it is given one
(:mod:`scidata.shard.compile.of_torch`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import unwrap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._functorch import apis, eager_transforms, vmap
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, Variable, forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._api import _FromTorchTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec as TreeSpec

# The only way through nested arguments; torch's own tensor subclasses and the guide to writing one use it.
from torch.utils._pytree import _broadcast_to_and_flatten
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from scidata.device_mesh.torch_internals import set_timeout, timeout_of
from scidata.errors import UnsupportedShardOp

_Handle: TypeAlias = Callable[[type[Function], tuple[object, ...], dict[str, object]], object]

# -- tensors that wrap others ------------------------------------------------------------------------------------------

#: Makes a tensor of a given shape that has no memory, as all wrapper subclasses do; there is no public function.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass

#: Has whatever takes the tensor's address (DLPack, say) raise, where it would read memory that is not there.
forbid_address: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


# torch.func switches hooks off, and then to set one raises.
_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


#: How a view that was written to gets its new place in the graph: by its function, or by ``as_strided()``, whose
#: backward gives zeros without a graph where the view has no elements, so that a rank would miss collectives.
replay_views: Callable[[bool], None] = torch._C._set_view_replay_enabled
views_are_replayed: Callable[[], bool] = torch._C._is_view_replay_enabled


#: A block in which writes to the given tensors do not count: autograd does not raise for them.
keeping_version = _unsafe_preserve_version_counter


def version_of(x: Tensor) -> int:
    """Return a plain tensor's version counter; -1 if torch does not count its writes.

    Autograd checks the same number when it uses saved tensors; public is only that it then raises.
    """
    return -1 if x.is_inference() else x._version


def storage_of(x: Tensor) -> int:
    """Return a number of a plain tensor's storage: of empty ones, addresses do not tell."""
    return x.untyped_storage()._cdata


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two plain tensors share a storage; sparse ones have none."""
    return x.layout is y.layout is torch.strided and storage_of(x) == storage_of(y)


def base_of(x: Tensor) -> Tensor:
    """Return the plain tensor that a plain view was made of; the tensor itself if it is none."""
    return x if x._base is None else x._base


def is_of_leaf(x: Tensor) -> bool:
    """Whether a plain tensor is a leaf that requires grad, or a view of one, which torch does not let be written to."""
    base = base_of(x)
    return base.is_leaf and base.requires_grad


@contextmanager
def inferring(*, fake: bool) -> Iterator[None]:
    """Run functions to infer shapes and strides of their results, hidden from the user's modes.

    On tensors of the device ``"meta"``; or with ``fake``, on any device, where tensors made here have no values either.
    Compilers' inference of shapes is not public. Hooks on saved tensors do not see it either: a checkpoint counts
    saved tensors. Nor do forward-mode derivatives: where something fails inside, torch would look for the tangents of
    what it puts into its message, and take no more derivatives from then on.
    """
    hooks = saved_tensors_hooks(_unchanged, _unchanged) if _hooks_allowed() else nullcontext()
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        with hooks, _disable_current_modes(), DisableTorchFunction(), FakeTensorMode() if fake else nullcontext():
            yield
    finally:
        forward_ad._current_level = level


def _unchanged(saved: Tensor) -> Tensor:
    return saved


# -- functions ---------------------------------------------------------------------------------------------------------

#: ``nn.TransformerEncoder`` asks it whether to use nested tensors; calls arrive under this name.
nested_from_mask: Callable[..., object] = torch._nested_tensor_from_mask_left_aligned

# Attention that also returns the log-sum-exp, and takes it in backward: F.scaled_dot_product_attention does neither.
flash = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def has_flash_attention(kind: str) -> bool:
    """Whether a kind of accelerator has kernels for both; torch tells it by an error alone."""
    key = torch._C._dispatch_key_for_device(kind)
    names = [f"aten::{op.__name__}" for op in (flash, flash_backward)]
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names)


def kernels(name: str, *overloads: str) -> list[Callable[..., object]]:
    """Return an operator below torch's functions, and overloads of it: calls arrive under any of them.

    Some have no public name, but code that others write, or compilers do, calls them.
    """
    found = getattr(torch.ops.aten, name)
    return [found, *[getattr(found, overload) for overload in overloads or ("default",)]]


#: PyTorch Geometric finds groups of sorted rows by it; sparse tensors have it, but cannot be sharded.
coo_to_csr: Callable[..., Tensor] = torch._convert_indices_from_coo_to_csr

#: ``forward_ad.make_dual`` and ``unpack_dual`` call these: only they arrive at ``__torch_function__``.
make_dual, unpack_dual = torch._VF._make_dual, torch._VF._unpack_dual
#: What ``nn.utils.rnn.pad_sequence`` calls, and no public function is.
pad_sequence_of_c: Callable[..., Tensor] = torch._C._nn.pad_sequence


def of_lists(name: str) -> Callable[..., object]:
    """Return the function that a function of ``torch.functional`` calls with one list of tensors.

    Only that function arrives at ``__torch_function__`` then.
    """
    return getattr(torch._VF, name)


@cache
def body_of(function: Callable[..., object]) -> Callable[..., Tensor]:
    """Return a Python function of torch without its check for overrides, so that its operations are dispatched one by
    one.

    ``F.lp_pool2d`` hands a ShardTensor to ``__torch_function__`` and does no more; its body is powers and an average
    pooling. torch has no way past the first lines.
    """
    assert isinstance(function, FunctionType)
    look = dict.fromkeys(["has_torch_function_unary", "has_torch_function_variadic"], lambda *_: False)
    return _with_globals(function, look)


def _with_globals(function: FunctionType, names: Mapping[str, Callable[..., object]]) -> FunctionType:
    """Return a copy of a function with some global names replaced."""
    scope = {**function.__globals__, **names}
    new = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


@cache
def definition_of(function: Callable[..., object]) -> Callable[..., Tensor]:
    """Return torch's Python definition of a function: the reference that compilation uses, else its body.

    A reference calls others of its module, of which many are of operators that only compilers know: torch's functions
    of the same names are called instead.
    """
    name = function.__name__.removeprefix("linalg_")
    spaces = [(torch._refs.nn.functional, F), (torch._refs, torch)]
    if name != function.__name__:
        spaces = [(torch._refs.linalg, torch.linalg)]
    for references, public in spaces:
        if hasattr(references, name):
            own = unwrap(getattr(references, name))
            theirs = [n for n in own.__code__.co_names if isinstance(own.__globals__.get(n), FunctionType)]
            return _with_globals(own, {n: getattr(public, n) for n in theirs if hasattr(public, n)})
    return body_of(function)


def unpatched(name: str) -> Callable[..., Tensor]:
    """Return torch's own function, the one that dispatch sees, if another package replaced it.

    PyTorch Geometric does so with ``torch.select`` and ``torch.index_select``. It keeps torch's nowhere public.
    """
    return getattr(torch._C._VariableFunctions, name)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors in a few kernels, as torch's optimizers do; ``copy_`` would be one kernel each."""
    torch._foreach_copy_(targets, sources)


# -- modules -----------------------------------------------------------------------------------------------------------

#: Extents after ``F.max_unpool2d`` and its like: by default, or as asked for where these fit.
unpooled_extents: Callable[..., Sequence[int]] = F._unpool_output_size  # type: ignore[attr-defined]

#: The base of all batch normalisations, SyncBatchNorm and those of users too; the public classes have no common one.
BatchNorm: type[nn.Module] = nn.modules.batchnorm._BatchNorm

#: ``register_full_backward_hook`` sends a module's inputs and outputs through it, to find their nodes of the graph.
BackwardHookFunction: type[Function] = nn.modules._functions.BackwardHookFunction


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's own dict of parameters, to be changed in place: ``setattr`` takes nothing but a Parameter.

    ``torch.func.functional_call`` does it too, but leaves its tensors behind in a module that is registered under two
    names, as the aggregations of PyG are.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers by name, including None, which ``named_buffers`` leaves out."""
    return module._buffers


def compiled_from(model: object) -> object:
    """Return the model that ``torch.compile`` was given, if this is its result, whose class is not public."""
    return getattr(model, "_orig_mod", model)


def has_values(x: Tensor) -> bool:
    """Whether a tensor is not one of a tracer's, which have none; torch's own check of one kind alone is public."""
    return not (isinstance(x, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(x))


@contextmanager
def unseen() -> Iterator[None]:
    """Compute with real values while a step is captured; leaving all modes has no public way."""
    with _disable_current_modes():
        yield


def is_plain(x: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of torch's own class, or stands for one while a step is captured."""
    return type(x) is Tensor or type(x) is FunctionalTensor


def is_in_a_mode() -> bool:
    """Whether a tracer, or a mode of the user's, looks at operators; only the stack of modes knows."""
    return torch._C._len_torch_dispatch_stack() > 0


# -- autograd's passes -------------------------------------------------------------------------------------------------


def backward_pass() -> int:
    """Return the number of the backward pass in this thread, -1 outside one; torch has no public call for it."""
    return torch._C._current_graph_task_id()


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs; ``autograd.graph.queue_callback`` came with 2.15."""
    Variable._execution_engine.queue_callback(function)


def is_accumulated(node: Node) -> bool:
    """Whether the pass that runs adds to the ``.grad`` of the first leaf behind this node.

    False if ``torch.autograd.grad`` captures it. Public hooks are called in both cases.
    """
    node = _first_leaf(node)
    try:
        return node in _accumulated or bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf that is captured
        return False


def _first_leaf(node: Node) -> Node:
    while node.next_functions and (behind := node.next_functions[0][0]) is not None:
        node = behind  # a leaf that is a DTensor is seen through its local part
    return node


_accumulated: set[Node] = set()


@contextmanager
def accumulating(nodes: Iterable[Node]) -> Iterator[None]:
    """Make :func:`is_accumulated` true in a nested pass that adds to the leaves behind these nodes."""
    new = {*map(_first_leaf, nodes)} - _accumulated
    _accumulated.update(new)
    try:
        yield
    finally:
        _accumulated.difference_update(new)


def is_needed(node: Node) -> bool:
    """Whether the pass that runs computes the gradient that goes to this node, to add it to a leaf or to return it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def keeps_graph() -> bool:
    """Whether the present backward pass has ``retain_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_looked_at(x: Tensor) -> bool:
    """Whether the gradient of a non-leaf tensor is retained, or passed to its hooks."""
    return x.retains_grad or bool(x._backward_hooks)


# What ``Function.apply`` asks: whether a transform is at work, and for the tensor in a wrapper that one left behind.
_are_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
_alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def watch_functions(kind: type[Tensor], handle: _Handle) -> None:
    """Hand calls of custom functions with a tensor of this kind to ``handle(cls, args, kwargs)``; once is enough.

    Autograd knows the local parts, not the wrapper: it records nothing for an argument that is a ShardTensor, and
    gradients would get lost. ``apply`` asks neither ``__torch_function__`` nor the dispatcher, and is looked up in
    ``Function`` alone. Code that took it before (``swish = Swish.apply``) still calls torch's own: of classes that
    exist by then, ``forward`` is replaced.
    """
    plain = Function.__dict__["apply"]  # a class method in Python, from 2.15 on in C
    is_python = isinstance(plain, classmethod)

    def apply(cls: type[Function], /, *args: object, **kwargs: object) -> object:
        given = []
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, kind):
                return handle(cls, args, kwargs)
            given.append(_alive(x) if isinstance(x, Tensor) else x)
        if is_python and not kwargs and cls.setup_context is Function.setup_context and not _are_transforming():
            single: Any = super(Function, cls)
            return single.apply(*given)  # all that torch's own does then, which takes it five calls more
        return plain.__get__(None, cls)(*args, **kwargs)

    for function in set(_defined_before(Function)):
        _watch_forward(function, kind, handle)
    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment, unused-ignore]


def _defined_before(kind: type[Function]) -> Iterator[type[Function]]:
    """Return functions whose ``apply`` a caller may have stored; torch's own are reached through the dispatcher.

    The garbage collector is not asked for holders: while it lists all objects, ``tuple(...)`` in another thread fails
    with a SystemError (python/cpython#59313).
    """
    for each in kind.__subclasses__():
        if each.__module__.split(".")[0] not in ("torch", "scidata"):
            yield each
        yield from _defined_before(each)


def _watch_forward(function: type[Function], kind: type[Tensor], handle: _Handle) -> None:
    plain = getattr(function.forward, "unwatched", function.forward)  # a base class's may be watched by now

    @wraps(plain)
    def forward(*args: object, **kwargs: object) -> object:
        if not any(isinstance(x, kind) for x in args):
            return plain(*args, **kwargs)
        given = args[1:] if function.setup_context is Function.setup_context else args
        with torch.enable_grad():  # torch switches it off around forward
            result = handle(function, given, kwargs)
        if any(isinstance(x, Tensor) and not isinstance(x, kind) and x.requires_grad for x in tree_leaves(result)):
            raise UnsupportedShardOp(
                f"{function.__qualname__}: its apply was taken before there was a ShardTensor, and gives a plain "
                f"tensor. Remedy: call {function.__qualname__}.apply(...) instead"
            )
        return result

    forward.unwatched = plain  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)  # type: ignore[method-assign]


def forward_of(function: type[Function]) -> Callable[..., object]:
    """Return a custom function's own ``forward``."""
    return getattr(function.forward, "unwatched", function.forward)


# -- transforms of functions -------------------------------------------------------------------------------------------

#: Picks the arguments that ``argnums`` says, with torch's own errors.
slice_argnums: Callable[..., tuple[object, ...]] = eager_transforms._slice_argnums

#: Returns how many rows are mapped, the flat in_dims and arguments, and their tree, with torch's own errors.
mapped_inputs: Callable[..., tuple[int, list[int | None], list[object], TreeSpec]] = vmap._process_batched_inputs

# What ``torch.func``'s functions look up when they are called; users hold those themselves, imported by name.
_TRANSFORMS: dict[str, ModuleType] = {
    "grad_and_value_impl": eager_transforms,
    "_vjp_with_argnums": eager_transforms,
    "_jvp_with_argnums": eager_transforms,
    "vmap_impl": apis,
}


def watch_transforms(kind: type[Tensor], handlers: dict[str, Callable[..., object]]) -> None:
    """Hand transforms of functions that see a tensor of this kind to ``handlers[name](plain, ...)``; once is enough.

    As arguments, or closed over by the function: see :func:`sees`. torch wraps tensors then in others, in C++, asking
    neither ``__torch_function__`` nor the subclass.
    """
    for name, handler in handlers.items():
        setattr(_TRANSFORMS[name], name, _watched(getattr(_TRANSFORMS[name], name), kind, handler))


def _watched(plain: Callable[..., object], kind: type[Tensor], handler: Callable[..., object]) -> Callable[..., object]:
    @wraps(plain)
    def watched(function: object, *args: object, **kwargs: object) -> object:
        if sees((function, args, kwargs), kind):
            return handler(plain, function, *args, **kwargs)
        return plain(function, *args, **kwargs)

    watched._torchdynamo_inline = plain  # type: ignore[attr-defined]  # compiled code meets no ShardTensor
    return watched


def watch_scripts(kind: type[Tensor]) -> None:
    """Run TorchScript functions that get such a tensor as the Python functions that they were compiled from.

    Its interpreter asks the dispatcher alone, which is below autograd.
    """
    plain: Callable[..., object] = torch.jit.ScriptFunction.__call__

    def call(self: Any, *args: object, **kwargs: object) -> object:
        called = self._torchdynamo_inline if any(isinstance(x, kind) for x in tree_leaves((args, kwargs))) else None
        return called(*args, **kwargs) if called is not None else plain(self, *args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign, assignment, unused-ignore]


def watch_data(kind: type[Any]) -> None:
    """Make ``parameter.data = x`` take all values of such a tensor if the parameter is plain.

    torch asks the parameter alone, which would point at memory that is not there.
    """
    plain: Any = Tensor.data

    def set_data(x: Tensor, value: Any) -> None:
        plain.__set__(x, value.full_tensor() if isinstance(value, kind) and type(x) is torch.nn.Parameter else value)

    torch.nn.Parameter.data = property(plain.__get__, set_data)  # type: ignore[assignment, unused-ignore]


def watch_checkpoints(save: Callable[[Any, Callable[[Tensor], Any]], Any]) -> None:
    """Save a checkpoint's arguments by ``save(x, save_tensor)``; what it returns has a method ``unpack``.

    A tensor whose part alone has a graph would be saved as one without: an outer checkpoint detaches what it keeps.
    """
    from torch.utils import checkpoint as its

    plain = getattr(its, "_make_saved_tensor", None)  # before torch 2.13 a Function saves them
    if plain is not None:
        names = vars(its)
        names["_make_saved_tensor"] = lambda x, **how: save(x, partial(plain, **how))
        names["SavedTensor"] = (names["SavedTensor"], Saved)  # as ``isinstance`` takes them


@dataclass(frozen=True)
class Saved:
    """A saved tensor, and what is made of it again."""

    tensor: Any
    make: Callable[[Tensor], Tensor]

    def unpack(self) -> Tensor:
        """Return what was saved."""
        return self.make(self.tensor.unpack())


def sees(given: object, kind: type[Tensor]) -> bool:
    """Whether nested values, or functions among them, hold such a tensor."""
    return any(isinstance(x, kind) or getattr(x, "of_shards", False) for x in reached(given))


def reached(given: object) -> Iterator[object]:
    """Return nested values, and the values that functions among them hold.

    Functions hold the values that they close over, their defaults and bound arguments, and the globals that they name;
    of functions among those, nothing more.
    """
    seen: set[int] = set()
    left = tree_leaves(given)
    while left:
        x = left.pop()
        yield x
        if isinstance(x, partial | FunctionType | MethodType) and id(x) not in seen:
            seen.add(id(x))
            left.extend(tree_leaves(list(_held(x))))
            if isinstance(x, FunctionType):
                yield from tree_leaves([x.__globals__.get(name) for name in _names(x.__code__)])


def _held(function: partial[object] | MethodType | FunctionType) -> Iterator[object]:
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, MethodType):
        yield from (function.__self__, function.__func__)
    else:
        yield from (function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # empty as yet
                yield cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def is_transforming() -> bool:
    """Whether a transform of torch's own is at work, so that plain tensors may be wrapped ones."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_dual_level() -> bool:
    """Whether forward-mode derivatives are being taken: torch allows one level of them."""
    return forward_ad._current_level >= 0


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls everything as it is.

    Under any mode torch's C++ (``logsumexp_jvp``) leaves a softmax's exponentials as they are, over which it otherwise
    writes the tangents, so that these could not be differentiated again.
    """

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Iterable[object] = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


def flat_out_dims(out_dims: object, results: object) -> list[int | None]:
    """Return ``vmap``'s ``out_dims`` for each tensor of one call's results."""
    if isinstance(results, Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        (out_dims,) = out_dims
    found = _broadcast_to_and_flatten(out_dims, tree_flatten(results)[1])
    if found is None:
        raise ValueError(f"vmap: out_dims={out_dims} does not have the structure of the results")
    return found


# -- the compiler ------------------------------------------------------------------------------------------------------

DYNAMO = "torch._dynamo"  # which is loaded by the first function that is compiled
#: Dynamo, once it has been told.
kept_out: list[ModuleType] = []


def keep_out_of_graphs(*, load: bool = False) -> None:
    """Tell Dynamo not to trace this package's functions; load Dynamo only if ``load``.

    A function of a compiled model that meets a ShardTensor then runs as if not compiled, with the reason in
    ``TORCH_LOGS=graph_breaks``; functions on plain tensors are compiled as ever. ``torch.compiler.disable`` would have
    to wrap every function of the package, and loads Dynamo.
    """
    if kept_out or not (load or DYNAMO in sys.modules):
        return
    from torch._dynamo import trace_rules

    trace_rules.add("scidata")
    kept_out.append(trace_rules)


# -- meshes ------------------------------------------------------------------------------------------------------------


#: ``DTensor.from_local`` applies it, and asks nobody before: so a call with a ShardTensor is noticed.
FromTorchTensor: type[Function] = _FromTorchTensor


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, if any; two slices do not know each other otherwise."""
    return mesh._get_root_mesh()


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the cached one-axis mesh over the same ranks. Collective when it is made.

    ``dist.new_group`` would have every rank of the job make every group.
    """
    flat: DeviceMesh = mesh._flatten()
    if dist.get_backend() not in ("fake", "mpi"):
        set_timeout(flat.get_group(), timeout_of(dist.group.WORLD))  # torch gives it 30 minutes
    return flat

"""Custom autograd functions: forward and backward are run on ShardTensors, autograd sees the local parts.

So a function of torch operations computes as these do on shards, and its gradients are those of one process. One that
is not made of torch operations (a kernel that takes addresses) raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.hooks import RemovableHandle

from scidata.shard.comm.operators import constants_of_capture
from scidata.shard.ops.align import local_of, plain_of
from scidata.shard.ops.arguments import handles
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.tensor_parallel import ShardedDTensor, from_local
from scidata.shard.torch_internals import BackwardHookFunction, FromTorchTensor, forward_of

Wrap = Callable[[Tensor], Tensor]  # a part to a ShardTensor
Tensors = tuple[Tensor | None, ...]


class _TorchContext(Protocol):
    """The ``ctx`` that torch hands a function."""

    saved_tensors: Tensors
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_dirty(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Context(FunctionCtx):
    """The ``ctx`` of a custom function: torch's own, but for ShardTensors that go in and come out."""

    def __init__(self, positions: Sequence[int], num_args: int) -> None:
        self._positions, self._num_args = positions, num_args
        self._held: _TorchContext | None = None  # while forward or backward runs: for longer, it would be a circle
        self._saved: list[Wrap | None] = []

    @property
    def _real(self) -> _TorchContext:
        assert self._held is not None, "ctx is used after its function has run"
        return self._held

    def run(self, real: _TorchContext, function: Callable[..., object], *args: object) -> object:
        self._held = real
        try:
            return function(self, *args)
        finally:
            self._held = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._saved = [_wrapper(x) for x in tensors]
        self._real.save_for_backward(*map(local_of, tensors))

    @property
    def saved_tensors(self) -> Tensors:
        found = zip(self._real.saved_tensors, self._saved, strict=True)
        return tuple(x if x is None or wrap is None else wrap(x) for x, wrap in found)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        needed = [False] * self._num_args
        for i, need in zip(self._positions, self._real.needs_input_grad[1:], strict=True):
            needed[i] = need
        return tuple(needed)

    def mark_dirty(self, *tensors: Tensor) -> None:
        self._real.mark_dirty(*map(local_of, tensors))

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._real.mark_non_differentiable(*map(local_of, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        self._real.set_materialize_grads(value)


def _wrapper(x: object) -> Wrap | None:
    """Return a function from a part to a ShardTensor like this one; None for anything else."""
    if not isinstance(x, ShardTensor):
        return None
    spec, memory = x.spec, x.global_strides

    def wrap(local: Tensor) -> Tensor:
        return ShardTensor(local, spec, global_strides=memory)

    return wrap


class _Call:
    """One use of a custom function."""

    def __init__(self, function: type[Function], args: tuple[object, ...]) -> None:
        self.function, self.args = function, args
        self.given = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        self.specs = {i: x.spec if isinstance(x, ShardTensor) else None for i, x in self.given.items()}
        self.context = _Context([*self.given], len(args))
        self.wrappers: list[Wrap | None] = []
        self.single = True

    def forward(self, real: _TorchContext) -> tuple[object, ...]:
        args, self.args, self.given = self.args, (), {}
        if self.function.setup_context is Function.setup_context:
            result = self.context.run(real, forward_of(self.function), *args)
        else:
            result = forward_of(self.function)(*args)
            self.context.run(real, self.function.setup_context, args, result)
        results = result if isinstance(result, tuple) else (result,)
        self.single = results is not result
        self.wrappers = [_wrapper(x) for x in results]
        return tuple(map(local_of, results))

    def backward(self, real: _TorchContext, grads: Sequence[Tensor | None]) -> Tensors:
        given = [g if g is None or wrap is None else wrap(g) for g, wrap in zip(grads, self.wrappers, strict=True)]
        with constants_of_capture():
            result = self.context.run(real, self.function.backward, *given)
        found = result if isinstance(result, tuple) else (result,)
        return tuple(_as_gradient(found[i], spec) for i, spec in self.specs.items())


def _as_gradient(gradient: Tensor | None, spec: ShardSpec | None) -> Tensor | None:
    """Bring a gradient to its argument's layout. Collective if that differs.

    Plain tensors have whole gradients; a plain gradient of a sharded tensor is whole too, or this rank's part, where
    the function worked on ``to_local()``.
    """
    if spec is None:
        return plain_of(gradient)
    if isinstance(gradient, ShardTensor):
        sizes: dict[int | str, Sequence[int]] = {axis: spec.sizes_of(axis) for axis in spec.sharded.values()}
        return gradient.redistribute(placements=spec.placements, sizes=sizes).local
    if gradient is not None and gradient.shape != spec.local_shape:
        for dim in spec.sharded:
            gradient = gradient.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return gradient


class _OnPartsContext(_TorchContext, Protocol):
    call: _Call


class _OnParts(Function):
    @staticmethod
    def forward(ctx: _OnPartsContext, call: _Call, *parts: Tensor) -> tuple[object, ...]:
        ctx.call = call
        return call.forward(ctx)

    @staticmethod
    def backward(ctx: _OnPartsContext, *grads: Tensor | None) -> Tensors:
        return None, *ctx.call.backward(ctx, grads)


@handles(Function, any_order=True)
def apply_function(func: type[Function], *args: object, **kwargs: object) -> object:
    """Apply a custom autograd function to tensors, some of them sharded. Collective if its operations are."""
    if func is BackwardHookFunction:
        return _hooked([x for x in args if isinstance(x, Tensor)])
    if func is FromTorchTensor:
        convert: Callable[..., object] = from_local
        return convert(func, *args, **kwargs)
    if any(isinstance(x, ShardedDTensor) for x in args):
        return ShardedDTensor.__torch_function__(func.apply, (), args, kwargs)
    if func is CheckpointFunction:  # it would call backward() within backward()
        run, preserve, *rest = args
        recomputed: Callable[..., object] = checkpoint
        return recomputed(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
    if func.setup_context is not Function.setup_context:  # it gets the defaults too
        bound = inspect.signature(forward_of(func)).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    for x in args:
        if isinstance(x, ShardTensor):
            x.refresh()
    call = _Call(func, args)
    given = [*call.given.values()]
    results: Sequence[Tensor] = _OnParts.apply(call, *map(local_of, given))  # type: ignore[no-untyped-call, unused-ignore]
    known = {id(x.local): x for x in given if isinstance(x, ShardTensor)}  # those that were written to are returned
    wrapped = [
        x if wrap is None else known[id(x)] if id(x) in known else wrap(x)
        for x, wrap in zip(results, call.wrappers, strict=True)
    ]
    return wrapped[0] if call.single else tuple(wrapped)


def _hooked(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Pass a module's inputs or results through a node whose hook gets gradients as ShardTensors."""
    specs = [x.spec if isinstance(x, ShardTensor) else None for x in args]
    parts: tuple[Tensor, ...] = BackwardHookFunction.apply(*map(local_of, args))  # type: ignore[no-untyped-call, unused-ignore]
    node = next(part.grad_fn for part in parts if part.grad_fn is not None)

    def wrap(grads: Sequence[Tensor | None]) -> Tensors:
        return tuple(
            g if g is None or spec is None else ShardTensor(g, spec) for g, spec in zip(grads, specs, strict=True)
        )

    def register_hook(hook: Callable[..., Sequence[Tensor | None] | None]) -> RemovableHandle:
        def on_parts(*grads: Sequence[Tensor | None]) -> Tensors | None:
            found = hook(*map(wrap, grads))
            return tuple(_as_gradient(g, spec) for g, spec in zip(found, specs, strict=True)) if found else None

        del node.register_hook  # torch asks for it once; for longer, it would be a circle
        return node.register_hook(on_parts)

    node.register_hook = register_hook  # type: ignore[assignment, method-assign]
    return tuple(
        ShardTensor(part, x.spec, halo=x.halo, copied=x.copied) if isinstance(x, ShardTensor) else part
        for x, part in zip(args, parts, strict=True)
    )

"""Custom autograd functions: forward and backward are run on ShardTensors, autograd sees the local parts.

What a function computes then is what torch operations compute on shards, so its gradients are those of one process; one
that is not made of torch operations (a kernel that takes addresses) raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from scidata.shard.op_table import register_op
from scidata.shard.ops.align import local_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.tensor_parallel import ShardedDTensor, from_local
from scidata.shard.torch_internals import BackwardHookFunction, FromTorchTensor, forward_of


class _Context(FunctionCtx):
    """What a custom function gets as ``ctx``: torch's own, but for ShardTensors that go in and come out."""

    def __init__(self, positions: Sequence[int], num_args: int) -> None:
        self._positions, self._num_args = positions, num_args
        self._real: Any = None  # torch's, while forward or backward runs: for longer, it would be a circle
        self._saved: list[Callable[[Tensor], Tensor] | None] = []

    def run(self, real: Any, function: Callable[..., Any], *args: Any) -> Any:
        self._real = real
        try:
            return function(self, *args)
        finally:
            self._real = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._saved = [_wrapper(x) for x in tensors]
        self._real.save_for_backward(*map(local_of, tensors))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
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


def _wrapper(x: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what makes a ShardTensor like this one of its part."""
    if not isinstance(x, ShardTensor):
        return None
    spec, memory = x.spec, x.global_strides

    def wrap(local: Tensor) -> Tensor:
        return ShardTensor(local, spec, global_strides=memory)

    return wrap


class _Call:
    """One use of a custom function."""

    def __init__(self, function: type[Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.positions = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        self.specs = [x.spec if isinstance(x, ShardTensor) else None for x in (args[i] for i in self.positions)]
        self.context = _Context(self.positions, len(args))
        self.wrappers: list[Callable[[Tensor], Tensor] | None] = []
        self.single = True

    def forward(self, real: Any) -> tuple[Any, ...]:
        args, self.args = self.args, ()
        if self.function.setup_context is Function.setup_context:
            result = self.context.run(real, forward_of(self.function), *args)
        else:
            result = forward_of(self.function)(*args)
            self.context.run(real, self.function.setup_context, args, result)
        self.single = not isinstance(result, tuple)
        results = (result,) if self.single else result
        self.wrappers = [_wrapper(x) for x in results]
        return tuple(map(local_of, results))

    def backward(self, real: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        given = [g if g is None or wrap is None else wrap(g) for g, wrap in zip(grads, self.wrappers, strict=True)]
        found = self.context.run(real, self.function.backward, *given)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(_as_gradient(found[i], spec) for i, spec in zip(self.positions, self.specs, strict=True))


def _as_gradient(gradient: Any, spec: ShardSpec | None) -> Tensor | None:
    """Bring a gradient to the layout of what it belongs to. Collective where it is moved.

    Plain tensors have whole gradients; a plain gradient of a sharded tensor is whole too, or this rank's part, where
    the function worked on ``to_local()``.
    """
    if spec is None:
        return gradient.full_tensor() if isinstance(gradient, ShardTensor) else gradient
    if isinstance(gradient, ShardTensor):
        sizes: dict[int | str, Sequence[int]] = {axis: spec.sizes_of(axis) for axis in spec.sharded.values()}
        return gradient.redistribute(placements=spec.placements, sizes=sizes).local
    if gradient is not None and gradient.shape != spec.local_shape:
        for dim in spec.sharded:
            gradient = gradient.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return gradient  # type: ignore[no-any-return]


class _OnParts(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *parts: Tensor) -> tuple[Any, ...]:
        ctx.call = call
        return call.forward(ctx)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, *ctx.call.backward(ctx, grads)


@register_op(Function, any_order=True)
def apply_function(func: type[Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a custom function to tensors of which some are sharded. Collective where its operations are."""
    if func is BackwardHookFunction:
        return _hooked(args)
    if func is FromTorchTensor:
        return from_local(func, *args, **kwargs)
    if any(isinstance(x, ShardedDTensor) for x in args):
        return ShardedDTensor.__torch_function__(func.apply, types, args, kwargs)
    if func is CheckpointFunction:  # it would call backward() within backward()
        run, preserve, *rest = args
        return checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
    if func.setup_context is not Function.setup_context:  # it gets the defaults too
        bound = inspect.signature(forward_of(func)).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    for x in args:
        if isinstance(x, ShardTensor):
            x.refresh()
    call = _Call(func, args)
    given = [args[i] for i in call.positions]
    results: Any = _OnParts.apply(call, *map(local_of, given))  # type: ignore[no-untyped-call, unused-ignore]
    known = {id(x.local): x for x in given if isinstance(x, ShardTensor)}  # those that were written to are returned
    wrapped = [
        x if wrap is None else known[id(x)] if id(x) in known else wrap(x)
        for x, wrap in zip(results, call.wrappers, strict=True)
    ]
    return wrapped[0] if call.single else tuple(wrapped)


def _hooked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass what goes into a module, or comes out, through a node whose hook gets the gradients as ShardTensors."""
    specs = [x.spec if isinstance(x, ShardTensor) else None for x in args]
    parts: Any = BackwardHookFunction.apply(*map(local_of, args))  # type: ignore[no-untyped-call, unused-ignore]
    node = next(part.grad_fn for part in parts if part.grad_fn is not None)

    def wrap(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(
            g if g is None or spec is None else ShardTensor(g, spec) for g, spec in zip(grads, specs, strict=True)
        )

    def register_hook(hook: Callable[..., Any]) -> Any:
        def on_parts(*grads: Any) -> Any:
            found = hook(*map(wrap, grads))
            return found and tuple(_as_gradient(g, spec) for g, spec in zip(found, specs, strict=True))

        del node.register_hook  # torch asks for it once; for longer, it would be a circle
        return node.register_hook(on_parts)

    node.register_hook = register_hook
    return tuple(
        ShardTensor(part, x.spec, halo=x.halo, copied=x.copied) if isinstance(x, ShardTensor) else part
        for x, part in zip(args, parts, strict=True)
    )

"""Autograd functions that others build on: linear functions given by their transposes, and precomputed values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.shard.torch_internals import has_dual_level


def call(function: type[Function], *args: object) -> Tensor:
    """Apply an autograd function of one result (torch does not type ``apply``)."""
    return function.apply(*args)  # type: ignore[no-untyped-call, unused-ignore]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *tensors: Tensor) -> Any:
        compute, transposed, again, layout = how  # in one, as torch looks at each argument
        ctx.gradient = transposed, again, transposed, layout
        return compute(*tensors, *layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: Any = _linear(ctx.gradient, *grads)
        return None, *(found if isinstance(found, tuple) else (found,))

    @staticmethod
    def jvp(ctx: Any, how: None, *tangents: Tensor) -> object:
        transposed, again, _, layout = ctx.gradient
        return call(_Linear, (again, transposed, again, layout), *tangents)  # tangents may have graphs, too


def _linear(how: tuple[Any, ...], *tensors: Tensor) -> Any:
    """Compute; skip torch's bookkeeping if no derivative can be taken, as in most backward passes."""
    return call(_Linear, how, *tensors) if torch.is_grad_enabled() or has_dual_level() else how[0](*tensors, *how[3])


def linear(
    compute: Callable[..., Tensor], transposed: Callable[..., Tensor], x: Tensor, *layout: object,
    linear_part: Callable[..., Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return ``compute(x, *layout)``, differentiable any number of times.

    ``compute``: a linear function of ``x``.
    ``transposed``: takes the gradient of the result, and the same ``layout``, to that of ``x``, in backward. Its own
    gradient is ``compute`` again.
    ``linear_part``: that instead, where ``compute`` also puts in constants.
    """
    return _linear((compute, transposed, linear_part or compute, layout), x)


def linear_together(
    compute: Callable[..., tuple[Tensor, ...]], transposed: Callable[..., tuple[Tensor, ...]], xs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Like :func:`linear` for several tensors; ``transposed`` is called once, with all gradients."""
    return _linear((compute, transposed, compute, ()), *xs)


class _How(NamedTuple):
    gradient: Callable[..., Tensor]
    tangent: Callable[..., Tensor]
    keeps_result: bool


class _Known(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor | Callable[[Tensor], Tensor], how: _How, *saved: Tensor) -> Tensor:
        result = value.clone() if isinstance(value, Tensor) else value(x)
        kept = (result, *saved) if how.keeps_result else saved  # must not be written to before backward
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.how.gradient(grad, *ctx.saved_tensors), *[None] * (len(ctx.needs_input_grad) - 1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> object:
        return ctx.how.tangent(tangent, *ctx.saved_tensors)


def known(
    x: Tensor,
    value: Tensor | Callable[[Tensor], Tensor],
    gradient: Callable[..., Tensor],
    *saved: Tensor,
    tangent: Callable[..., Tensor] = Function.jvp,  # raises, as for any function that has none
    keeps_result: bool = False,
) -> Tensor:
    """Return a value computed from ``x`` outside of autograd, already or by a function of ``x``.

    Its gradient is ``gradient(grad, *saved)``, its tangent ``tangent(change, *saved)``; where the result is kept for
    them, as torch's softmax does, so that ``x`` may be written to, it comes before ``saved``.
    """
    return call(_Known, x, value, _How(gradient, tangent, keeps_result), *saved)

"""Functions that torch defines by sums, slices and products of tensors, as compositions of these.

A composition sends no more between ranks than its parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import TensorFunction, find, getters, unsupported
from scidata.shard.ops.align import finish, plain_of, specs_of
from scidata.shard.ops.arguments import composes, handles, integers, normal_dim, several
from scidata.shard.ops.moving import moved_off
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import definition_of, kernels, of_lists

Item = TypeVar("Item")
Step = float | Tensor
Results = Tensor | tuple[Tensor, ...]


def along(x: Tensor, dim: int, item: Item) -> tuple[slice | Item, ...]:
    """Return the index of one item along a dim, which takes all dims before it whole."""
    return (slice(None),) * normal_dim(dim, len(x.shape)) + (item,)


@handles("tril_ triu_ renorm_ cumsum_ cumprod_ addmm_ addmv_ addr_ addbmm_ baddbmm_", keeps_replicated=True)
def in_place(func: TensorFunction, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Write the result to the tensor itself."""
    result: Tensor = getattr(x.clone(), func.__name__.rstrip("_"))(*args, **kwargs)
    if result.shape != x.shape:  # torch resizes some
        raise unsupported(func, "the shape of the tensor that is written to would change", *specs_of([x, *args]))
    return x.copy_(result)


@handles("frexp")
def frexp(func: Callable[..., tuple[Tensor, Tensor]], x: ShardTensor) -> tuple[Tensor, Tensor]:
    """Take each number apart."""
    mantissa, exponent = func(x.local)
    return torch.return_types.frexp((ShardTensor(mantissa, x.spec), ShardTensor(exponent, x.spec)))


_COPIES = "expand diagonal permute select split split_with_sizes squeeze t transpose unbind unsqueeze view detach"


@handles(*[getattr(torch, f"{name}_copy") for name in _COPIES.split()])
def copied(func: TensorFunction, x: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """Copy the view that the function without ``_copy`` returns."""
    result: Tensor | Sequence[Tensor] = getattr(Tensor, func.__name__.removesuffix("_copy"))(x, *args, **kwargs)
    return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)


@handles(
    *("rot90 unravel_index diag diag_embed trace hsplit vsplit dsplit take_along_dim", torch.functional.unravel_index),
    *(torch.hstack, torch.vstack, torch.dstack, torch.column_stack),
    *(torch.linalg.vecdot, torch.linalg.cross, torch.linalg.norm),
    *(F.normalize, F.local_response_norm, F.gumbel_softmax, F.pairwise_distance, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d),
    any_order=True,
)
def defined(func: Callable[..., Results], *args: object, **kwargs: object) -> Results:
    """Run torch's own Python definition."""
    return definition_of(func)(*args, **kwargs)


@handles("segment_reduce")
def segment_reduce(func: TensorFunction, data: Tensor, reduce: str, *, axis: int = 0, **how: object) -> Tensor:
    """Reduce rows of given lengths along a dim, which is whole on each rank meanwhile. Collective."""
    how = {name: plain_of(value) for name, value in how.items()}
    (found,) = _segments(lambda x: func(x, reduce, axis=axis, **how), data, normal_dim(axis, len(data.shape)))
    return found


_SEGMENTS = [f"torch_scatter.segment_{kind}" for kind in ("sum", "mean", "min", "max")]


@handles(*[f"{name}_{form}" for name in _SEGMENTS for form in ("csr", "coo")])
def of_pointers(func: Callable[..., Results], data: Tensor, where: Tensor, out: object, *size: object) -> Results:
    """Reduce rows between pointers, or of ids in order. Collective."""
    if out is not None:
        raise unsupported(func, "it writes to a tensor that is given", *specs_of([data, where]))
    found = _segments(lambda x: func(x, plain_of(where), None, *size), data, where.ndim - 1)
    return found if len(found) > 1 else found[0]


def _segments(func: Callable[[Tensor], Results], data: Tensor, dim: int) -> tuple[Tensor, ...]:
    whole = moved_off(data, range(dim + 1)) if isinstance(data, ShardTensor) else None
    found = several((func(data if whole is None else whole.local),))
    return tuple(x if whole is None else finish(x, whole.spec.with_rows(dim, x.shape[dim])) for x in found)


# -- joining and dividing ------------------------------------------------------------------------------------------


def _at_least(x: Tensor, ndim: int) -> Tensor:
    """Add leading dims of extent 1 up to ``ndim`` dims; the third is added last."""
    if len(x.shape) >= ndim:
        return x
    flat = x.reshape((1,) * (min(ndim, 2) - len(x.shape)) + tuple(x.shape)) if len(x.shape) < 2 else x
    return flat.unsqueeze(-1) if ndim == 3 else flat


@handles(*[f for n in (1, 2, 3) for f in (getattr(torch, f"atleast_{n}d"), of_lists(f"atleast_{n}d"))])
def at_least(func: TensorFunction, *tensors: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Add dims of extent 1 up to the number in the function's name."""
    ndim = int(func.__name__[-2])
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return _at_least(tensors[0], ndim)
    return tuple(_at_least(x, ndim) for x in several(tensors))


@handles(torch.meshgrid, of_lists("meshgrid"))
def meshgrid(*tensors: Tensor | Sequence[Tensor], indexing: str | None = None) -> tuple[Tensor, ...]:
    """Coordinates of a grid from those of its dims."""
    rows = [x.reshape(-1) for x in several(tensors)]
    if indexing == "xy" and len(rows) > 1:
        y, x, *rest = torch.meshgrid(rows[1], rows[0], *rows[2:], indexing="ij")
        return (x, y, *rest)
    shape = [len(x) for x in rows]
    return tuple(x.reshape([-1 if d == i else 1 for d in range(len(rows))]).expand(shape) for i, x in enumerate(rows))


@handles(torch.broadcast_tensors, of_lists("broadcast_tensors"), any_order=True)
def broadcast_tensors(*tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Expand all to the shape that they broadcast to."""
    given = several(tensors)
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in given))  # type: ignore[no-untyped-call]
    return tuple(x.expand(shape) for x in given)


@handles(Tensor.sum_to_size)
def sum_to_size(input: Tensor, *size: int | Sequence[int]) -> Tensor:
    """Sum over the dims that broadcasting this shape to the tensor's would repeat."""
    shape = integers(*size)
    added = len(input.shape) - len(shape)
    if added < 0 or any(n not in (1, m) for n, m in zip(shape, input.shape[added:], strict=True)):
        raise RuntimeError(f"size {shape} does not expand to that of the tensor, {tuple(input.shape)}")
    dims = [d + added for d, n in enumerate(shape) if n != input.shape[d + added]]
    x = input.sum(dims, keepdim=True) if dims else input
    return x.sum(tuple(range(added))) if added else x


@handles(torch.cartesian_prod, of_lists("cartesian_prod"))
def cartesian_prod(*tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """All combinations of one element of each row."""
    given = several(tensors)
    if len(given) == 1:
        return given[0].reshape(-1)
    return torch.stack([x.reshape(-1) for x in torch.meshgrid(*given, indexing="ij")], -1)


# -- operators below torch's functions, that code calls by themselves ------------------------------------------------


@handles("_softmax_backward_data", *kernels("_softmax_backward_data"))
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Backward of a softmax."""
    products = grad_output * output
    return (products - output * products.sum(dim, keepdim=True)).to(input_dtype)


@handles(*kernels("_safe_softmax"))
def safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over one dim; a fully masked row gives zeros."""
    nothing = (input == float("-inf")).all(dim, keepdim=True)
    return input.masked_fill(nothing, 0).softmax(dim, dtype=dtype).masked_fill(nothing, 0)


@handles(torch.native_layer_norm, *kernels("native_layer_norm"))
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm, with the means and the inverse deviations that it takes, which have no gradient."""
    dims = range(-len(normalized_shape), 0)
    return F.layer_norm(input, normalized_shape, weight, bias, eps), *_statistics(
        input.detach(), dims, eps, keepdim=True
    )


@handles(torch.native_batch_norm, *kernels("native_batch_norm"))
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm that also returns its statistics; empty ones if it uses running ones."""
    result = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        return result, input.new_empty(0), input.new_empty(0)
    return result, *_statistics(input.detach(), [0, *range(2, len(input.shape))], eps)


@handles(torch.native_group_norm, *kernels("native_group_norm"))
def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # noqa: N803
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A group norm with its statistics, which have a gradient here alone."""
    grouped = input.unflatten(1, (group, -1))  # type: ignore[no-untyped-call]
    return F.group_norm(input, group, weight, bias, eps), *_statistics(grouped, range(2, len(grouped.shape)), eps)


def _statistics(x: Tensor, dims: Sequence[int], eps: float, *, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the means and the inverse deviations that a norm takes."""
    if x.dtype.itemsize < 4:
        raise unsupported(F.layer_norm, "statistics of 16-bit floats", *specs_of([x]))
    var, mean = torch.var_mean(x, [*dims], correction=0, keepdim=keepdim)
    return mean, (var + eps).rsqrt()


@handles(*kernels("max_pool2d_with_indices_backward"))
def max_pool_backward(grad_output: Tensor, self: Tensor, *others: object) -> Tensor:
    """Add gradients of windows at the positions of their maxima, given as flat numbers in the last two dims."""
    places = others[-1]
    assert isinstance(places, Tensor)
    flat = torch.zeros_like(self, dtype=grad_output.dtype).flatten(-2)
    flat = flat.scatter_add(-1, places.flatten(-2), grad_output.flatten(-2))
    # torch has a gradient of nought for the values that were pooled
    return torch.where(torch.ones_like(self, dtype=torch.bool), flat.reshape(tuple(self.shape)), self)


# -- derivatives: torch's own formulas, in the same order of operations ----------------------------------------------

# Others that are equal on paper differ where integers wrap, and where NaN, infinite or large values meet a factor of 0.


def _between(x: Tensor, dim: int, first: int, last: int) -> Tensor:
    """Return the rows from ``first`` on, without the last ``last``."""
    return x.narrow(dim, first, x.shape[dim] - first - last)


@handles(*find("diff"))
def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along a dim, ``n`` times."""
    dim = normal_dim(dim, len(input.shape))
    given = [x for x in (prepend, input, append) if x is not None and n]
    x = torch.cat(given, dim) if len(given) > 1 else input
    if n == 0:
        return x.clone()
    for _ in range(min(n, x.shape[dim])):
        upper, lower = _between(x, dim, 1, 0), _between(x, dim, 0, 1)
        x = upper ^ lower if x.dtype == torch.bool else upper - lower
    return x


@handles(torch.gradient)
def gradient(
    input: Tensor,
    *,
    spacing: Step | Sequence[Step] | None = None,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> list[Tensor]:
    """Central differences along each dim, one-sided ones of first or second order at its ends."""
    ndim = len(input.shape)
    asked = range(ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [normal_dim(d, ndim) for d in asked]
    if spacing is None or isinstance(spacing, int | float | Tensor):
        steps: list[Step] = [1 if spacing is None else spacing] * len(dims)
    else:
        steps = [*spacing]
    if len(steps) != len(dims) or edge_order not in (1, 2):
        raise RuntimeError(f"gradient: {len(steps)} spacings for {len(dims)} dims, edges of order {edge_order}")
    if input.dtype in (torch.uint8, torch.bool):
        raise RuntimeError(f"gradient: it takes no {input.dtype}, whose differences wrap")
    short = [d for d in dims if input.shape[d] <= edge_order]
    if short:
        raise RuntimeError(f"gradient: dim {short[0]} has {input.shape[short[0]]} rows, too few for {edge_order}")
    return [_gradient(input, d, step, edge_order) for d, step in zip(dims, steps, strict=True)]


def _gradient(x: Tensor, dim: int, step: Step, edge_order: int) -> Tensor:
    """Differentiate along a dim, between rows that are ``step`` apart, or lie at the places in it."""
    count = x.shape[dim]
    if not isinstance(step, Tensor) or not step.ndim:
        inside = (_between(x, dim, 2, 0) - _between(x, dim, 0, 2)) / step / 2
        ends = _ends(x, dim, step, step) if edge_order == 1 else _even_ends(x, dim, step)
        return torch.cat([ends[0], inside, ends[1]], dim)
    h = torch.diff(step.to(x.device))
    if len(h) != count - 1:
        raise RuntimeError(f"gradient: {len(h) + 1} coordinates for {count} rows of dim {dim}")
    shape = [-1 if d == dim else 1 for d in range(len(x.shape))]
    low, high = h[:-1].view(shape), h[1:].view(shape)
    inside = (
        -high / (low * (low + high)) * _between(x, dim, 0, 2)
        + (high - low) / (low * high) * _between(x, dim, 1, 1)
        + low / (high * (low + high)) * _between(x, dim, 2, 0)
    )
    ends = _ends(x, dim, h[0], h[-1]) if edge_order == 1 else _curved_ends(x, dim, h)
    return torch.cat([ends[0], inside, ends[1]], dim)


def _row(x: Tensor, dim: int, place: int) -> Tensor:
    return x.narrow(dim, place % x.shape[dim], 1)


def _ends(x: Tensor, dim: int, first: Step, last: Step) -> tuple[Tensor, Tensor]:
    """Return the slopes between the first two rows and between the last two."""
    return (_row(x, dim, 1) - _row(x, dim, 0)) / first, (_row(x, dim, -1) - _row(x, dim, -2)) / last


def _even_ends(x: Tensor, dim: int, step: Step) -> tuple[Tensor, Tensor]:
    """Return the slopes at the ends of the parabolas through three rows."""
    first = (-1.5 * _row(x, dim, 0) + 2 * _row(x, dim, 1) - 0.5 * _row(x, dim, 2)) / step
    return first, (0.5 * _row(x, dim, -3) - 2 * _row(x, dim, -2) + 1.5 * _row(x, dim, -1)) / step


def _curved_ends(x: Tensor, dim: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slopes at the ends of the parabolas through three rows that are ``h`` apart."""
    a = -(2.0 * h[0] + h[1]) / (h[0] * (h[0] + h[1]))
    b, c = (h[0] + h[1]) / (h[0] * h[1]), -h[0] / (h[1] * (h[0] + h[1]))
    first = a * _row(x, dim, 0) + b * _row(x, dim, 1) + c * _row(x, dim, 2)
    a, b = h[-1] / (h[-2] * (h[-1] + h[-2])), -(h[-1] + h[-2]) / (h[-1] * h[-2])
    c = (2.0 * h[-1] + h[-2]) / (h[-1] * (h[-1] + h[-2]))
    return first, a * _row(x, dim, -3) + b * _row(x, dim, -2) + c * _row(x, dim, -1)


# -- integrals -----------------------------------------------------------------------------------------------------


def _steps(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return the distances between rows, which broadcast with ``y``."""
    if len(x.shape) == 1:
        x = x.reshape([-1 if d == dim else 1 for d in range(len(y.shape))])
    else:
        x = x.reshape((1,) * (len(y.shape) - len(x.shape)) + tuple(x.shape))
    return torch.diff(x, dim=dim)


def _heights(y: Tensor, dim: int) -> Tensor:
    """Return the sums of neighbours."""
    return _between(y, dim, 0, 1) + _between(y, dim, 1, 0)


def _dim_of(y: Tensor, x: Tensor | None, dim: int) -> int:
    if torch.bool in (y.dtype, None if x is None else x.dtype):
        raise RuntimeError("trapezoid: it takes no bools")
    return normal_dim(dim, len(y.shape))


@handles(torch.trapezoid, torch.trapz)
def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Integral along a dim by the trapezoidal rule."""
    dim = _dim_of(y, x, dim)
    if not y.shape[dim]:
        return y.detach().sum(dim, dtype=y.dtype)  # zeros without a graph, as torch has them
    if x is not None:
        return (_heights(y, dim) * _steps(y, x, dim)).sum(dim) / 2.0
    return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * float(dx)


@handles(torch.cumulative_trapezoid)
def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Integrals from the first row to each other one."""
    dim = _dim_of(y, x, dim)
    if not y.shape[dim]:
        return y.clone()
    if x is not None:
        return (_heights(y, dim) * _steps(y, x, dim)).cumsum(dim) / 2.0
    return (float(dx) / 2.0 * _heights(y, dim)).cumsum(dim)


# -- one expression each ---------------------------------------------------------------------------------------------


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[along(x, dim, slice(start, end, step))]


def _with(x: Tensor, index: tuple[slice | int, ...], src: Tensor) -> Tensor:
    """Return a copy with other values at an index."""
    result = x.clone()
    result[index] = src
    return result


composes(
    {
        torch.fill: lambda input, value: input.clone().fill_(value),
        torch.alias_copy: lambda input: input.clone(),
        torch.slice_copy: lambda input, *where, **named: _slice(input, *where, **named).clone(),
        tuple(kernels("slice", "Tensor")): _slice,
        (torch.block_diag, of_lists("block_diag")): lambda *tensors: definition_of(torch.block_diag)(*several(tensors)),
        torch.row_stack: lambda tensors: torch.cat([_at_least(x, 2) for x in tensors], 0),
        torch.constant_pad_nd: lambda input, pad, value=0: F.pad(input, pad, value=value),
        torch.combinations: lambda input, r=2, with_replacement=False: input[
            torch.combinations(torch.arange(len(input), device=input.device), r, with_replacement)
        ],
        Tensor.__reversed__: lambda input: input.flip(0) if len(input.shape) else input,
        Tensor.__iter__: lambda input: iter(input.unbind(0)),
        Tensor.__contains__: lambda input, element: bool((input == element).any()),
        tuple(getters("H mH")): lambda input: (input.conj() if input.is_complex() else input).transpose(-2, -1),
        "slice_scatter": lambda input, src, dim=0, start=None, end=None, step=1: _with(
            input, along(input, dim, slice(start, end, step)), src
        ),
        "select_scatter": lambda input, src, dim, index: _with(input, along(input, dim, index), src),
        torch.batch_norm: lambda input, weight, bias, mean, var, training, momentum, eps, cudnn_enabled: F.batch_norm(
            input, mean, var, weight, bias, training, momentum, eps
        ),
        torch.instance_norm: lambda input, weight, bias, mean, var, use_stats, momentum, eps, cudnn_enabled: (
            F.instance_norm(input, mean, var, weight, bias, use_stats, momentum, eps)
        ),
        "_log_softmax_backward_data": lambda grad_output, output, dim, input_dtype: (
            grad_output - output.exp() * grad_output.sum(dim, keepdim=True)
        ).to(input_dtype),
        "_is_all_true": lambda input: input.all(),
        "_is_any_true": lambda input: input.any(),
        "is_same_size": lambda input, other: input.shape == other.shape,
        tuple(kernels("native_dropout_backward")): lambda grad_output, mask, scale: grad_output * mask * scale,
    }
)

"""Functions that torch defines by sums, slices and products of tensors, as compositions of those.

A composition moves between ranks only what its parts move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import TensorFunction, getters, unsupported
from scidata.shard.ops.align import specs_of
from scidata.shard.ops.arguments import composes, handles, integers, normal_dim, several
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import definition_of, kernels, of_lists

Item = TypeVar("Item")
Results = Tensor | tuple[Tensor, ...]


def along(x: Tensor, dim: int, item: Item) -> tuple[slice | Item, ...]:
    """Return the index of one item along a dim, which takes all dims before it whole."""
    return (slice(None),) * normal_dim(dim, len(x.shape)) + (item,)


@handles(
    "tril_ triu_ renorm_ cumsum_ cumprod_ addmm_ addmv_ addr_ addbmm_ baddbmm_",
    keeps_replicated=True,
)
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
    """Return a copy where the function without ``_copy`` returns a view."""
    result: Tensor | Sequence[Tensor] = getattr(Tensor, func.__name__.removesuffix("_copy"))(x, *args, **kwargs)
    return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)


@handles(
    *("rot90 unravel_index diag trace hsplit vsplit dsplit take_along_dim", torch.functional.unravel_index),
    *(torch.hstack, torch.vstack, torch.dstack, torch.row_stack, torch.column_stack),
    *(torch.linalg.vecdot, torch.linalg.cross, torch.linalg.norm),
    *(F.normalize, F.local_response_norm, F.gumbel_softmax, F.pairwise_distance, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d),
    any_order=True,
)
def defined(func: Callable[..., Results], *args: object, **kwargs: object) -> Results:
    """Follow torch's own definition in Python, in the operations that it is made of."""
    return definition_of(func)(*args, **kwargs)


# -- joining and dividing ------------------------------------------------------------------------------------------


def _at_least(x: Tensor, ndim: int) -> Tensor:
    """Give a tensor leading dims of extent 1 where it has fewer than ``ndim``; the third comes last."""
    if len(x.shape) >= ndim:
        return x
    flat = x.reshape((1,) * (min(ndim, 2) - len(x.shape)) + tuple(x.shape)) if len(x.shape) < 2 else x
    return flat.unsqueeze(-1) if ndim == 3 else flat


@handles(*[f for n in (1, 2, 3) for f in (getattr(torch, f"atleast_{n}d"), of_lists(f"atleast_{n}d"))])
def at_least(func: TensorFunction, *tensors: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Give tensors with fewer dims than the function's name says others of extent 1."""
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


@handles(torch.broadcast_tensors, of_lists("broadcast_tensors"))
def broadcast_tensors(*tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Expand all to the shape that they broadcast to."""
    given = several(tensors)
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in given))  # type: ignore[no-untyped-call]
    return tuple(x.expand(shape) for x in given)


@handles(torch.block_diag, of_lists("block_diag"))
def block_diag(*tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Matrices along the diagonal of a larger one."""
    blocks = [_at_least(x, 2) for x in several(tensors)]
    width, rows, left = sum(x.shape[1] for x in blocks), [], 0
    for x in blocks:
        rows.append(torch.nn.functional.pad(x, (left, width - left - x.shape[1])))
        left += x.shape[1]
    return torch.cat(rows, 0)


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


@handles(*kernels("_softmax_backward_data"))
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Backward of a softmax."""
    products = grad_output * output
    return (products - output * products.sum(dim, keepdim=True)).to(input_dtype)


@handles(*kernels("_safe_softmax"))
def safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over one dim; of a row of which all is masked, zeros."""
    nothing = (input == float("-inf")).all(dim, keepdim=True)
    return input.masked_fill(nothing, 0).softmax(dim, dtype=dtype).masked_fill(nothing, 0)


@handles(torch.native_layer_norm, *kernels("native_layer_norm"))
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm, with the means and the inverse deviations that it takes, which have no gradient."""
    if input.dtype.itemsize < 4:
        raise unsupported(torch.native_layer_norm, "statistics of 16-bit floats", *specs_of([input, weight, bias]))
    dims = list(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(input.detach(), dims, correction=0, keepdim=True)
    result = F.layer_norm(input, normalized_shape, weight, bias, eps)
    return result, mean, (var + eps).rsqrt()


@handles(*kernels("max_pool2d_with_indices_backward"))
def max_pool_backward(grad_output: Tensor, self: Tensor, *others: object) -> Tensor:
    """Add up the gradients of windows at the places of their maxima, by flat numbers of the last two dims."""
    places = others[-1]
    assert isinstance(places, Tensor)
    flat = torch.zeros_like(self, dtype=grad_output.dtype).flatten(-2)
    flat = flat.scatter_add(-1, places.flatten(-2), grad_output.flatten(-2))
    # torch has a gradient of nought for the values that were pooled
    return torch.where(torch.ones_like(self, dtype=torch.bool), flat.reshape(tuple(self.shape)), self)


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
        tuple(kernels("native_dropout_backward")): lambda grad_output, mask, scale: grad_output * mask * scale,
    }
)

"""Operators below torch's functions, ``torch.ops.aten.*``, that code calls by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import unsupported
from scidata.shard.ops.align import specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.derived import along
from scidata.shard.torch_internals import kernels


@handles(*kernels("slice", "Tensor"))
def slice_rows(input: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """Some rows of a dim."""
    return input[along(input, dim, slice(start, end, step))]


@handles(*kernels("_safe_softmax"))
def safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over one dim; of a row of which all is masked, zeros."""
    nothing = (input == float("-inf")).all(dim, keepdim=True)
    return input.masked_fill(nothing, 0).softmax(dim, dtype=dtype).masked_fill(nothing, 0)


@handles(*kernels("_softmax_backward_data"))
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Backward of a softmax."""
    products = grad_output * output
    return (products - output * products.sum(dim, keepdim=True)).to(input_dtype)


@handles(*kernels("native_dropout_backward"))
def dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Backward of dropout."""
    return grad_output * mask * scale


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

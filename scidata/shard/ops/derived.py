"""Functions that others make up: what torch defines by sums, slices and products of tensors is done by these here.

What is moved between ranks is what the parts of a composition move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from scidata.shard.op_table import Handler, find, getters, register_op, unsupported
from scidata.shard.ops.align import operands_of, refuse_out, specs_of
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import of_lists

_BOTH = (torch, Tensor)


def composed(*functions: Any, any_order: bool = False) -> Callable[[Callable[..., Any]], Handler]:
    """Make the decorated function, which has the arguments of torch's, answer for these."""

    def add(run: Callable[..., Any]) -> Handler:
        @register_op(*functions, any_order=any_order)
        @wraps(run)
        def handler(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "out" in kwargs:
                refuse_out(func, kwargs, *specs_of(operands_of(args, kwargs)[0]))
                kwargs.pop("out")
            return run(*args, **kwargs)

        return handler

    return add


@register_op(
    *find("tril_ triu_ renorm_ cumsum_ cumprod_ addmm_ addmv_ addr_ addbmm_ baddbmm_", namespaces=(Tensor,)),
    keeps_replicated=True,
)
def in_place(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write the result to the tensor itself."""
    x: Tensor = args[0]
    result = getattr(x.clone(), func.__name__.rstrip("_"))(*args[1:], **kwargs)
    if result.shape != x.shape:  # torch resizes some
        raise unsupported(func, "the shape of what is written to would change", *specs_of(args))
    return x.copy_(result)


@composed(torch.fill)
def fill(input: Tensor, value: Any) -> Tensor:
    """Return a tensor like this one, of one value."""
    return input.clone().fill_(value)


@register_op(*find("frexp", namespaces=_BOTH))
def frexp(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take each number apart."""
    (x,) = args
    refuse_out(func, kwargs, x.spec)
    mantissa, exponent = func(x.local)
    return torch.return_types.frexp((ShardTensor(mantissa, x.spec), ShardTensor(exponent, x.spec)))


_COPIES = "expand diagonal permute select split split_with_sizes squeeze t transpose unbind unsqueeze view detach"


@register_op(*[getattr(torch, f"{name}_copy") for name in _COPIES.split()])
def copied(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what is a view otherwise, as a copy."""
    refuse_out(func, kwargs, *specs_of(args))
    result = getattr(Tensor, func.__name__.removesuffix("_copy"))(*args, **kwargs)
    return tuple(x.clone() for x in result) if isinstance(result, list | tuple) else result.clone()


@composed(torch.alias_copy)
def alias_copy(input: Tensor) -> Tensor:
    """A copy of all."""
    return input.clone()


@composed(torch.slice_copy)
def slice_copy(input: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """A copy of some rows of a dim."""
    return input[(slice(None),) * normal_dim(dim, len(input.shape)) + (slice(start, end, step),)].clone()


@composed(torch.constant_pad_nd)
def constant_pad(input: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Put a number around any dims."""
    return torch.nn.functional.pad(input, pad, value=value)


def several(tensors: Sequence[Any]) -> list[Tensor]:
    """Return tensors that were given one by one or as one sequence."""
    return list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors)


# -- joining and dividing ------------------------------------------------------------------------------------------


@composed(torch.atleast_1d, of_lists("atleast_1d"))
def atleast_1d(*tensors: Any) -> Any:
    """Give single numbers a dim."""
    return _at_least(tensors, lambda x: x.reshape(1) if len(x.shape) < 1 else x)


@composed(torch.atleast_2d, of_lists("atleast_2d"))
def atleast_2d(*tensors: Any) -> Any:
    """Give what has fewer than two dims leading ones."""
    return _at_least(tensors, _as_2d)


@composed(torch.atleast_3d, of_lists("atleast_3d"))
def atleast_3d(*tensors: Any) -> Any:
    """Give what has fewer than three dims others around them."""
    return _at_least(tensors, _as_3d)


def _as_2d(x: Tensor) -> Tensor:
    return x if len(x.shape) > 1 else x.reshape(1, 1) if not len(x.shape) else x.unsqueeze(0)


def _as_3d(x: Tensor) -> Tensor:
    return x if len(x.shape) > 2 else _as_2d(x).unsqueeze(-1)


def _at_least(tensors: Sequence[Any], view: Callable[[Tensor], Tensor]) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return view(tensors[0])
    return tuple(view(x) for x in several(tensors))


@composed(torch.hstack)
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join along the second dim, rows along the first."""
    return torch.cat([x.reshape(1) if not len(x.shape) else x for x in tensors], 1 if len(tensors[0].shape) > 1 else 0)


@composed(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join along the first dim, rows as matrices of one."""
    return torch.cat([_as_2d(x) for x in tensors], 0)


@composed(torch.dstack)
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join along the third dim."""
    return torch.cat([_as_3d(x) for x in tensors], 2)


@composed(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Join columns."""
    return torch.cat([x.reshape(-1, 1) if len(x.shape) < 2 else x for x in tensors], 1)


def _split(x: Tensor, where: Any, dim: int) -> tuple[Tensor, ...]:
    if isinstance(where, int) and x.shape[dim] % where:
        raise RuntimeError(f"dim {dim} of extent {x.shape[dim]} does not divide into {where} parts of equal size")
    return torch.tensor_split(x, where, dim)


@composed(*find("hsplit", namespaces=_BOTH))
def hsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Divide the second dim, of rows the first."""
    return _split(input, indices_or_sections, 1 if len(input.shape) > 1 else 0)


@composed(*find("vsplit", namespaces=_BOTH))
def vsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Divide the first dim of at least two."""
    normal_dim(1, len(input.shape))
    return _split(input, indices_or_sections, 0)


@composed(*find("dsplit", namespaces=_BOTH))
def dsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Divide the third dim."""
    return _split(input, indices_or_sections, normal_dim(2, len(input.shape)))


@composed(torch.meshgrid, of_lists("meshgrid"))
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Coordinates of a grid from those of its dims."""
    rows = [x.reshape(-1) for x in several(tensors)]
    if indexing == "xy" and len(rows) > 1:
        y, x, *rest = torch.meshgrid(rows[1], rows[0], *rows[2:], indexing="ij")
        return (x, y, *rest)
    shape = [len(x) for x in rows]
    return tuple(x.reshape([-1 if d == i else 1 for d in range(len(rows))]).expand(shape) for i, x in enumerate(rows))


@composed(torch.broadcast_tensors, of_lists("broadcast_tensors"))
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Expand all to the shape that they broadcast to."""
    given = several(tensors)
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in given))  # type: ignore[no-untyped-call]
    return tuple(x.expand(shape) for x in given)


@composed(torch.block_diag, of_lists("block_diag"))
def block_diag(*tensors: Any) -> Tensor:
    """Matrices along the diagonal of a larger one."""
    blocks = [_as_2d(x) for x in several(tensors)]
    width, rows, left = sum(x.shape[1] for x in blocks), [], 0
    for x in blocks:
        rows.append(torch.nn.functional.pad(x, (left, width - left - x.shape[1])))
        left += x.shape[1]
    return torch.cat(rows, 0)


@composed(torch.cartesian_prod, of_lists("cartesian_prod"))
def cartesian_prod(*tensors: Any) -> Tensor:
    """All combinations of one element of each row."""
    given = several(tensors)
    if len(given) == 1:
        return given[0].reshape(-1)
    return torch.stack([x.reshape(-1) for x in torch.meshgrid(*given, indexing="ij")], -1)


@composed(torch.combinations)
def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """All combinations of ``r`` elements of a row."""
    return input[torch.combinations(torch.arange(len(input), device=input.device), r, with_replacement)]


@composed(*find("rot90", namespaces=_BOTH))
def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turn the plane of two dims by quarters."""
    first, second = (normal_dim(d, len(input.shape)) for d in dims)
    match k % 4:
        case 1:
            return input.flip(second).transpose(first, second)
        case 2:
            return input.flip(first, second)
        case 3:
            return input.flip(first).transpose(first, second)
    return input.clone()


@composed(Tensor.__reversed__)
def turned(input: Tensor) -> Tensor:
    """Rows from the last to the first."""
    return input.flip(0) if len(input.shape) else input


@composed(Tensor.__iter__)
def iterate(input: Tensor) -> Any:
    """One row after another."""
    return iter(input.unbind(0))


@composed(Tensor.__contains__)
def contains(input: Tensor, element: Any) -> bool:
    """Whether any element equals this."""
    return bool((input == element).any())


@composed(*getters("H mH"))
def conjugate_transpose(input: Tensor) -> Tensor:
    """The conjugate of the matrix with rows and columns exchanged."""
    result = input.transpose(-2, -1)
    return result.conj() if input.is_complex() else result


@composed(*find("slice_scatter", namespaces=_BOTH))
def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A copy with other rows in a slice of a dim."""
    result = input.clone()
    result[(slice(None),) * normal_dim(dim, len(input.shape)) + (slice(start, end, step),)] = src
    return result


@composed(*find("select_scatter", namespaces=_BOTH))
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """A copy with another row of a dim."""
    result = input.clone()
    result[(slice(None),) * normal_dim(dim, len(input.shape)) + (index,)] = src
    return result


@composed(torch.unravel_index, torch.functional.unravel_index)
def unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    """Coordinates of flat numbers in a tensor of this shape."""
    extents = [shape] if isinstance(shape, int) else list(shape)
    steps = [math.prod(extents[d + 1 :]) for d in range(len(extents))]
    return tuple(indices // step % extent for step, extent in zip(steps, extents, strict=True))


@composed(Tensor.sum_to_size)
def sum_to_size(input: Tensor, *size: Any) -> Tensor:
    """Sum over the dims that broadcasting this shape to the tensor's would repeat."""
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    added = len(input.shape) - len(shape)
    if added < 0 or any(n not in (1, m) for n, m in zip(shape, input.shape[added:], strict=True)):
        raise RuntimeError(f"size {shape} does not expand to that of the tensor, {tuple(input.shape)}")
    dims = [d + added for d, n in enumerate(shape) if n != input.shape[d + added]]
    x = input.sum(dims, keepdim=True) if dims else input
    return x.sum(tuple(range(added))) if added else x

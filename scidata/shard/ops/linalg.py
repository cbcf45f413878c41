"""Products: each dim of each operand has a label, and a sharded label that is summed over is summed over ranks too.

Operands that are split differently are redistributed first.
"""

from __future__ import annotations

import re
import string
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import align, align_parameters, extents_of, finish, spec_of_layout, specs_of
from scidata.shard.ops.arguments import handles, several
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.tensor import ShardTensor


def _labels_of_matmul(left: int, right: int) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    """Return the labels of both operands and of the result, by their numbers of dims."""
    batch: list[Hashable] = list(range(max(left, right) - 2))  # counted from the left of the longer one
    lhs: list[Hashable] = [*batch[len(batch) - left + 2 :], "n", "k"] if left > 1 else ["k"]
    rhs: list[Hashable] = [*batch[len(batch) - right + 2 :], "k", "m"] if right > 1 else ["k"]
    out = [*batch, *(["n"] if left > 1 else []), *(["m"] if right > 1 else [])]
    return lhs, rhs, out


def contract(
    func: TensorFunction,
    operands: Sequence[Tensor],
    labels: Sequence[Sequence[Hashable]],
    out: Sequence[Hashable],
    compute: TensorFunction,
    *,
    apart: bool = False,
) -> Tensor:
    """Apply ``compute`` to the aligned local parts, and add up over the ranks that share a summed label.

    Of ``matmul`` labels are (n, k), (k, m) and out (n, m). If a mesh axis shards n, each rank has its rows of the
    result; if it shards k, each multiplies its columns by its rows, and these products are added up.

    Collective where operands are split differently. With ``apart``, parts are copied on all ranks where
    one has less than two rows: backward may keep a view of an operand there, and on others a copy, which may be written
    to.
    """
    locals_, layout, extents = align(func, operands, labels, out)
    if apart and any(entry is not None and min(entry[1]) < 2 <= extents[entry[0]] for entry in layout):
        locals_ = [part.clone() for part in locals_]
    spec = specs_of(operands)[0]
    summed = [axis for axis, entry in enumerate(layout) if entry is not None and entry[0] not in out]
    local = compute(*(map(widened, locals_) if summed else locals_))
    for axis in summed:
        local = all_reduce_sum(local, spec.group(axis))
    if summed and locals_[0].dtype in HALF:  # sums of ranks, too, are rounded once
        local = local.to(locals_[0].dtype)
    return finish(local, spec_of_layout(layout, out, [extents[name] for name in out], spec))


def _plus(func: TensorFunction, x: Tensor, y: Tensor) -> Tensor:
    """Add two tensors that may be split differently."""
    ndim = max(len(x.shape), len(y.shape))
    out = list(range(ndim))
    if not specs_of([x, y]):
        return x + y
    return contract(func, [x, y], [out[ndim - len(t.shape) :] for t in (x, y)], out, torch.add)


@handles("matmul mm bmm mv dot", Tensor.__matmul__, any_order=True)
def matmul(func: TensorFunction, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Matrix product: rows, columns, batch and the summed dim may be sharded."""
    operands = [*args, *kwargs.values()]
    lhs, rhs, out = _labels_of_matmul(*(len(x.shape) for x in operands))
    return contract(func, operands, [lhs, rhs], out, func)


@handles(Tensor.__rmatmul__, any_order=True)
def rmatmul(right: Tensor, left: Tensor) -> Tensor:
    """``plain @ sharded``."""
    return matmul(torch.matmul, left, right)


@handles(F.linear, any_order=True)
def linear(func: TensorFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; a sharded last dim of ``x`` meets the columns of the weight."""
    if isinstance(x, ShardTensor) and not isinstance(weight, ShardTensor) and not isinstance(bias, ShardTensor):
        spec = x.spec
        if 0 <= spec.last_sharded < spec.ndim - 1 and weight.ndim == 2:  # rows, by far the most common
            local = func(x.local, *align_parameters(x, weight, bias))
            new = spec.derive((*spec.global_shape[:-1], weight.shape[0]), spec.dims, spec.sizes)
            return ShardTensor(local, new)
    if len(weight.shape) != 2:
        raise unsupported(func, "the weight must have two dims", *specs_of([x, weight]))
    rows: list[Hashable] = list(range(len(x.shape) - 1))
    operands = [x, weight]
    labels: list[Sequence[Hashable]] = [[*rows, "in"], ["out", "in"]]
    summed = any(s.dims[axis] == s.ndim - 1 for s in specs_of(operands) for axis in range(len(s.axes)))
    if bias is not None and not summed:
        return contract(func, [*operands, bias], [*labels, ["out"]], [*rows, "out"], func)
    result = contract(func, operands, labels, [*rows, "out"], func)
    return result if bias is None else _plus(func, result, bias.to(result.dtype))  # autocast casts both


@handles(torch.einsum, torch.functional.einsum, any_order=True)
def einsum(func: TensorFunction, given: str, *args: Tensor | Sequence[Tensor]) -> Tensor:
    """Einstein sums without a letter twice in one operand."""
    operands = several(args)
    specs = specs_of(operands)
    equation = _spelled_out(given, operands) if isinstance(given, str) else ""
    match = re.fullmatch(r"([a-zA-Z]*(?:,[a-zA-Z]*)*)(?:->([a-zA-Z]*))?", equation)
    inputs = match[1].split(",") if match else []
    if match is None or len(inputs) != len(operands) or any(len(set(i)) != len(i) for i in inputs):
        raise unsupported(func, f"the equation {given!r} is not supported", *specs, remedy="name each dim once")
    letters = "".join(inputs)
    out = match[2] if match[2] is not None else "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    for names, x in zip(inputs, operands, strict=True):
        if len(names) != len(x.shape):
            raise RuntimeError(f"einsum: {names!r} names {len(names)} dims, but the operand has {len(x.shape)}")
    lone = [{c for c in names if c not in out and letters.count(c) == 1} for names in inputs]
    if any(lone):  # as torch does; then backward never keeps a view of an operand on ranks with one row
        operands = [
            x.sum([names.index(c) for c in sorted(alone)]) if alone else x
            for x, names, alone in zip(operands, inputs, lone, strict=True)
        ]
        terms = ("".join(c for c in names if c not in alone) for names, alone in zip(inputs, lone, strict=True))
        return torch.einsum(f"{','.join(terms)}->{out}", *operands)
    extents = extents_of(func, operands, inputs)
    is_product = any(letters.count(c) > 1 and extents[c] > 1 for c in set(letters) - set(out))

    def compute(*parts: Tensor) -> Tensor:
        device = parts[0].device.type
        if not is_product or not torch.is_autocast_enabled(device):
            return func(equation, *parts)
        # where a rank has one row to sum over, torch multiplies, which autocast leaves in float32
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return func(equation, *[x if x.dtype == torch.float64 else x.to(dtype) for x in parts])

    return contract(func, operands, [*map(list, inputs)], list(out), compute, apart=is_product)


def _spelled_out(equation: str, operands: Sequence[Tensor]) -> str:
    """Give the dims that an ellipsis stands for letters of their own."""
    text = equation.replace(" ", "")
    if "..." not in text:
        return text
    inputs, arrow, out = text.partition("->")
    free = [c for c in string.ascii_letters if c not in text]
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return ""
    widths = [len(x.shape) - len(t) + 3 if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    longest = max(widths)
    if min(widths) < 0 or longest > len(free):
        return ""
    terms = [t.replace("...", "".join(free[longest - w : longest])) for t, w in zip(terms, widths, strict=True)]
    if not arrow:  # ellipsis first, then the letters that appear once, in alphabetical order
        letters = inputs.replace("...", "").replace(",", "")
        out = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return ",".join(terms) + "->" + out.replace("...", "".join(free[:longest]))


@handles("addmm addmv addbmm baddbmm addr", any_order=True)
def add_product(
    func: TensorFunction, x: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **named: Tensor
) -> Tensor:
    """``beta * x + alpha * (a @ b)``, with the sum over a batch for ``addbmm``."""
    left, right = (*factors, *named.values())
    product = torch.outer(left, right) if func.__name__ == "addr" else torch.matmul(left, right)
    product = product.sum(0) if func.__name__ == "addbmm" else product
    product = product if alpha == 1 else product * alpha
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(product.shape))  # type: ignore[no-untyped-call]
    if shape != tuple(product.shape):
        raise RuntimeError(f"{func.__name__}: {tuple(x.shape)} cannot be expanded to {tuple(product.shape)}")
    x = x.to(product.dtype)  # autocast casts both
    return product if beta == 0 else _plus(func, product, x if beta == 1 else x * beta)


@handles(F.bilinear, torch.bilinear, any_order=True)
def bilinear(
    func: TensorFunction, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``input1 @ weight @ input2 + bias`` for each row; rows or features may be sharded."""
    rows: list[Hashable] = list(range(len(input1.shape) - 1))
    labels: list[Sequence[Hashable]] = [[*rows, "i"], [*rows, "j"], ["out", "i", "j"]]

    def compute(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), w.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("...i,...j,oij->...o", x.to(dtype), y.to(dtype), w.to(dtype))

    result = contract(func, [input1, input2, weight], labels, [*rows, "out"], compute)
    return result if bias is None else _plus(func, result, bias)


@handles("outer ger", any_order=True)
def outer(func: TensorFunction, x: Tensor, vec2: Tensor) -> Tensor:
    """Outer product of two vectors."""
    return contract(func, [x, vec2], [["n"], ["m"]], ["n", "m"], func)

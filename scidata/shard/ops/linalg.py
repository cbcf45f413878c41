"""Products: each dim has a label, and a sharded contracted label is summed over ranks, too.

Operands that are split differently are redistributed first.
"""

from __future__ import annotations

import re
import string
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.memory import memory_of
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import align, align_parameters, extents_of, finish, spec_of_layout, specs_of
from scidata.shard.ops.arguments import composes, handles, normal_dim, several
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.spec import UNKNOWN
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import kernels


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

    Collective if operands are split differently. With ``apart``, parts are copied on all ranks where
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


@handles("matmul mm bmm mv dot", Tensor.__matmul__, torch.sparse.mm, *kernels("_sparse_mm"), any_order=True)
def matmul(func: TensorFunction, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Matrix product: rows, columns, batch and the summed dim may be sharded."""
    operands = [*args, *kwargs.values()]
    lhs, rhs, out = _labels_of_matmul(*(len(x.shape) for x in operands))
    apart = max(len(lhs), len(rhs)) > 2 and any(map(_is_copied, operands))
    return contract(func, operands, [lhs, rhs], out, func, apart=apart)


def _is_copied(x: Tensor) -> bool:
    """Whether one process may copy an operand to multiply it as one matrix, or a row of them, and keep that copy.

    On ranks of few rows it would be kept as it is, and backward raise there alone once it was written to.
    """
    if isinstance(x, ShardTensor) and x.global_strides is None:  # fast path: most tensors are row-major
        return False
    if len(x.shape) < 3 or not torch.is_grad_enabled():
        return False
    strides = memory_of(x)
    return strides is not None and (strides is UNKNOWN or _is_flattened_by_copy(x.shape, strides))


@lru_cache(maxsize=1024)
def _is_flattened_by_copy(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether joining all dims before the last, or before the last two, takes a copy."""
    whole = torch.empty_strided(shape, strides, device="meta")
    return any(whole.flatten(0, last)._base is None for last in (-3, -2) if last + len(shape))


@handles(Tensor.__rmatmul__, any_order=True)
def rmatmul(right: Tensor, left: Tensor) -> Tensor:
    """``plain @ sharded``."""
    return matmul(torch.matmul, left, right)


@handles(F.linear, any_order=True)
def linear(func: TensorFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; a sharded last dim of ``x`` meets the columns of the weight."""
    if isinstance(x, ShardTensor) and not isinstance(weight, ShardTensor) and not isinstance(bias, ShardTensor):
        spec = x.spec
        is_plain = x.global_strides is None or not _is_copied(x)
        if 0 <= spec.last_sharded < spec.ndim - 1 and weight.ndim == 2 and is_plain:  # rows, by far the most common
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
        return contract(func, [*operands, bias], [*labels, ["out"]], [*rows, "out"], func, apart=_is_copied(x))
    result = contract(func, operands, labels, [*rows, "out"], func, apart=_is_copied(x))
    return result if bias is None else result + bias.to(result.dtype)  # autocast casts both


@handles(torch.einsum, torch.functional.einsum, any_order=True)
def einsum(func: TensorFunction, given: str, *args: Tensor | Sequence[Tensor]) -> Tensor:
    """Einstein sums; of a letter that an operand has twice, the diagonal is taken first."""
    operands = several(args)
    specs = specs_of(operands)
    equation = _spelled_out(given, operands) if isinstance(given, str) else ""
    match = re.fullmatch(r"([a-zA-Z]*(?:,[a-zA-Z]*)*)(?:->([a-zA-Z]*))?", equation)
    inputs = match[1].split(",") if match else []
    if match is None or len(inputs) != len(operands):
        raise unsupported(
            func, f"the equation {given!r} is not supported", *specs, remedy="name the dims of each operand by letters"
        )
    letters = "".join(inputs)
    out = match[2] if match[2] is not None else "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    for names, x in zip(inputs, operands, strict=True):
        if len(names) != len(x.shape):
            raise RuntimeError(f"einsum: {names!r} names {len(names)} dims, but the operand has {len(x.shape)}")
    for i, names in enumerate(inputs):
        twice = next((c for c in names if names.count(c) > 1), None)
        if twice is not None:
            operands[i] = operands[i].diagonal(0, names.index(twice), names.rindex(twice))
            first, _, last = names.rpartition(twice)
            inputs[i] = first.replace(twice, "", 1) + last + twice
            return torch.einsum(f"{','.join(inputs)}->{out}", *operands)
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
    """Replace an ellipsis by letters for its dims."""
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


_NUM_DIMS = {"addmv": (2, 1), "addr": (1, 1), "addbmm": (3, 3), "baddbmm": (3, 3)}


@handles("addmm addmv addbmm baddbmm addr", torch.sparse.addmm, any_order=True)
def add_product(
    func: TensorFunction, x: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **named: Tensor
) -> Tensor:
    """``beta * x + alpha * (a @ b)``, with the sum over a batch for ``addbmm``."""
    left, right = (*factors, *named.values())
    dims, due = (len(left.shape), len(right.shape)), _NUM_DIMS.get(func.__name__, (2, 2))
    if dims != due:
        raise RuntimeError(f"{func.__name__}: its factors have {dims} dims, not {due}")
    product = torch.outer(left, right) if func.__name__ == "addr" else torch.matmul(left, right)
    product = product.sum(0) if func.__name__ == "addbmm" else product
    product = product if alpha == 1 else product * alpha
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(product.shape))  # type: ignore[no-untyped-call]
    if shape != tuple(product.shape):
        raise RuntimeError(f"{func.__name__}: {tuple(x.shape)} cannot be expanded to {tuple(product.shape)}")
    x = x.to(product.dtype)  # autocast casts both
    return product if beta == 0 else product + (x if beta == 1 else x * beta)


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
    return result if bias is None else result + bias


@handles("outer ger", any_order=True)
def outer(func: TensorFunction, x: Tensor, vec2: Tensor) -> Tensor:
    """Outer product of two vectors."""
    return contract(func, [x, vec2], [["n"], ["m"]], ["n", "m"], func)


@handles(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: int | Tensor | Sequence[int | Sequence[int]] = 2) -> Tensor:
    """Sum products over dims of both."""
    if isinstance(dims, int):
        left, right = list(range(len(a.shape) - dims, len(a.shape))), list(range(dims))
    else:
        given: Sequence[int | Sequence[int]] = dims.tolist() if isinstance(dims, Tensor) else dims
        left, right = ([d] if isinstance(d, int) else [*d] for d in given)
    left, right = [normal_dim(d, len(a.shape)) for d in left], [normal_dim(d, len(b.shape)) for d in right]
    pairs = [(d, e) for d, e in zip(left, right, strict=True) if a.shape[d] != b.shape[e]]
    for d, e in pairs:  # one of them has one row, which goes with all of the other
        a = a.sum(d, keepdim=True) if b.shape[e] == 1 else a
        b = b.sum(e, keepdim=True) if a.shape[d] == 1 else b
    if [a.shape[d] for d in left] != [b.shape[d] for d in right]:
        raise RuntimeError(f"tensordot: dims {left} of {tuple(a.shape)} do not match dims {right} of {tuple(b.shape)}")
    ours, theirs = string.ascii_letters[: len(a.shape)], [*string.ascii_letters[len(a.shape) :][: len(b.shape)]]
    for d, e in zip(left, right, strict=True):
        theirs[e] = ours[d]
    summed = {ours[d] for d in left}
    out = [c for c in (*ours, *theirs) if c not in summed]
    return torch.einsum(f"{ours},{''.join(theirs)}->{''.join(out)}", a, b)


@handles("kron")
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker product."""
    ndim = max(len(input.shape), len(other.shape))
    first = input.reshape((1,) * (ndim - len(input.shape)) + tuple(input.shape))
    second = other.reshape((1,) * (ndim - len(other.shape)) + tuple(other.shape))
    shape = [n * m for n, m in zip(first.shape, second.shape, strict=True)]
    left = first.reshape([n for extent in first.shape for n in (extent, 1)])
    return (left * second.reshape([n for extent in second.shape for n in (1, extent)])).reshape(shape)


@handles("cross", any_order=True)
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Cross product along a dim of three, by default the first such."""
    if dim is None:
        dim = next((d for d, n in enumerate(input.shape) if n == 3), None)
        if dim is None:
            raise RuntimeError(f"cross: no dim of {tuple(input.shape)} has three elements")
    return cast("Tensor", torch.linalg.cross(input, other, dim=dim))


@handles("renorm")
def renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Scale slices along a dim whose norm exceeds ``maxnorm`` down to it."""
    rest = [d for d in range(len(input.shape)) if d != normal_dim(dim, len(input.shape))]
    if not rest:
        raise RuntimeError("renorm: it takes a tensor of two dims at least")
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    large = torch.linalg.vector_norm(input.detach(), p, rest, keepdim=True, dtype=wide) > maxnorm
    norm = torch.linalg.vector_norm(input.where(large, 0), p, rest, keepdim=True, dtype=wide)  # others have no gradient
    return (input.to(wide) * torch.where(large, maxnorm / (norm + 1e-7), 1.0)).to(input.dtype)


@handles(torch.vander)
def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: N803
    """Powers of each element, the highest first."""
    count = len(x) if N is None else N
    powers = [x**i for i in (range(count) if increasing else reversed(range(count)))]
    return torch.stack(powers, 1) if powers else x.unsqueeze(1)[:, :0]


@handles("cov")
def cov(
    input: Tensor, *, correction: float | Tensor = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Covariances of variables, the rows, over observations, the columns."""
    if input.dtype == torch.bool:
        raise RuntimeError("cov: it takes no bools")
    if input.ndim > 2:
        raise RuntimeError(f"cov: it takes up to two dims, not the {input.ndim} of {tuple(input.shape)}")
    if aweights is not None and not aweights.is_floating_point():
        raise RuntimeError(f"cov: aweights must be floating point, not {aweights.dtype}")
    x = input if len(input.shape) > 1 else input.unsqueeze(0)
    given = [w for w in (fweights, aweights) if w is not None]
    count: int | Tensor = x.shape[1]
    if given:
        weights = given[0] * given[1] if len(given) > 1 else given[0]
        total = weights.sum()
        mean = (x * weights).sum(1, keepdim=True) / total
        count = total
        if aweights is not None:
            correction = correction * (weights * aweights).sum() / total
    else:
        mean = x.sum(1, keepdim=True) / count
    centred = x - mean
    right = centred * weights if given else centred
    product = centred @ (right.conj() if x.is_complex() else right).transpose(0, 1)
    freedom = count - correction
    freedom = freedom.clamp(min=0) if isinstance(freedom, Tensor) else max(freedom, 0)
    result = product / freedom
    return result.squeeze()


@handles("corrcoef")
def corrcoef(input: Tensor) -> Tensor:
    """Correlations of variables, the rows."""
    covariance = torch.cov(input)
    if not len(covariance.shape):
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt() if covariance.is_complex() else covariance.diagonal().sqrt()
    result = covariance / deviation.unsqueeze(1) / deviation
    return result if result.is_complex() else result.clamp(-1, 1)


@handles("aminmax")
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Smallest and largest elements."""
    dims = () if dim is None else dim
    low, high = input.amin(dims, keepdim=keepdim), input.amax(dims, keepdim=keepdim)
    return torch.return_types.aminmax((low, high))


def _multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Product of matrices, the first and the last of which may be vectors."""
    dims = [len(x.shape) for x in tensors]
    if len(dims) < 2 or any(n != 2 for n in dims[1:-1]) or any(n not in (1, 2) for n in dims):
        raise RuntimeError(f"multi_dot: it takes two or more matrices, not tensors of {dims} dims")
    return reduce(torch.matmul, tensors)


composes(
    {
        "inner": lambda input, other: (
            torch.tensordot(input, other, dims=([-1], [-1])) if len(input.shape) and len(other.shape) else input * other
        ),
        "vdot": lambda input, other: torch.dot(input.conj() if input.is_complex() else input, other),
        "dist": lambda input, other, p=2: torch.linalg.vector_norm(input - other, p),
        torch.linalg.multi_dot: _multi_dot,
        torch.chain_matmul: lambda *matrices: torch.linalg.multi_dot(several(matrices)),
        torch.linalg.vander: lambda x, N=None: torch.stack([x**i for i in range(x.shape[-1] if N is None else N)], -1),  # noqa: N803
    }
)

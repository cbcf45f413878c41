"""Matrices in the last dims: triangles and diagonals by global row and column, decompositions of whole matrices.

A decomposition takes a matrix as a whole: where rows or columns are sharded, another dim is instead, and where there
is none, every rank gets the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from scidata.core.bounds import bounds_of
from scidata.shard.op_table import TensorFunction, find, unsupported
from scidata.shard.ops.align import Dtype, align, finish, is_sharded, local_of, operands_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import composes, handles, normal_dim
from scidata.shard.ops.moving import moved_off, to_layout
from scidata.shard.ops.shapes import derived
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import Copy

Results = Tensor | tuple[Tensor, ...]


def _freed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a tensor with these dims unsharded. Collective if one is sharded."""
    return moved_off(x, dims) if isinstance(x, ShardTensor) and any(d in x.spec.sharded for d in dims) else x


# -- triangles and diagonals ---------------------------------------------------------------------------------------


@handles("tril triu")
def triangle(func: TensorFunction, x: ShardTensor, diagonal: int = 0) -> Tensor:
    """Keep the elements below, or above, a diagonal of the whole matrix."""
    normal_dim(-2, x.spec.ndim)
    row, column = x.spec.offsets[-2:]
    return ShardTensor(getattr(torch, func.__name__)(x.local, diagonal + row - column), x.spec)


@handles("diagonal")
def diagonal(input: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """See a diagonal of two dims as the last dim; no communication unless both are sharded."""
    x, ndim = input, input.spec.ndim
    first, second = normal_dim(dim1, ndim), normal_dim(dim2, ndim)
    if first == second:
        raise RuntimeError(f"diagonal: dims {first} and {second} are the same")
    if not (first in x.spec.sharded and second in x.spec.sharded):
        return derived(x, *_diagonal(x, offset, first, second))

    def take() -> Tensor:
        return _diagonal(moved_off(x, [second]), offset, first, second)[0]

    def put() -> None:
        moved = moved_off(x, [second])
        _diagonal(moved, offset, first, second)[0].copy_(local)
        x.copy_(to_layout(moved, x.spec))

    local, new = _diagonal(moved_off(x, [second]), offset, first, second)
    return ShardTensor(local, new, copied=Copy(x, local, take, put))


def _diagonal(x: ShardTensor, offset: int, first: int, second: int) -> tuple[Tensor, ShardSpec]:
    """Return this rank's part of a diagonal of two dims, one of them sharded at most, and its layout.

    Of a 6 x 6 matrix with offset 1 whose rows are split 4 and 2, elements (0, 1) to (3, 4) are on rank 0, (4, 5) on
    rank 1. Rank 1 counts rows from 4, so there the diagonal has offset 1 + 4 = 5.
    """
    spec, ndim = x.spec, x.spec.ndim
    rest = [d for d in range(ndim) if d not in (first, second)]
    rows, columns = spec.global_shape[first], spec.global_shape[second]
    start = max(0, -offset)  # the row of its first element
    count = max(0, min(rows - start, columns - max(0, offset)))
    dims: list[int | None] = [rest.index(d) if d in rest else None for d in spec.dims]
    sizes = list(spec.sizes)
    split = next((d for d in (first, second) if d in spec.sharded), None)
    if split is not None:
        axis = spec.sharded[split]
        low = start if split == first else start + offset  # in rows of the dim that is sharded
        bounds = bounds_of(spec.sizes_of(axis))
        sizes[axis] = tuple(max(0, min(b, low + count) - max(a, low)) for a, b in pairwise(bounds))
        dims[axis] = len(rest)
    local = x.local.diagonal(offset + spec.offsets[first] - spec.offsets[second], first, second)
    new = spec.derive([*(spec.global_shape[d] for d in rest), count], dims, sizes)
    return local, new


composes(
    {
        torch.linalg.diagonal: lambda A, *, offset=0, dim1=-2, dim2=-1: A.diagonal(offset, dim1, dim2),  # noqa: N803
        "diagflat": lambda input, offset=0: torch.diag_embed(input.reshape(-1), offset),
    }
)


@handles("diagonal_scatter")
def diagonal_scatter(input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A copy with another diagonal."""
    result = input.clone()
    result.diagonal(offset, dim1, dim2).copy_(src)
    return result


@handles(Tensor.fill_diagonal_, keeps_replicated=True)
def fill_diagonal(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Write one value to the diagonal of a matrix; ``wrap``: of a tall one again from the row after the next on."""
    shape = x.shape
    if len(shape) < 2 or (len(shape) > 2 and len(set(shape)) != 1):
        raise RuntimeError(f"fill_diagonal_: {tuple(shape)} is no matrix, nor do all dims have the same extent")
    if len(shape) == 2 and not wrap:
        x.diagonal().fill_(fill_value)
        return x
    rows = torch.arange(shape[0], device=x.device)
    rows = rows[rows % (shape[1] + 1) < shape[1]]
    x[(rows, *[rows % (shape[1] + 1)] * (len(shape) - 1))] = fill_value
    return x


@handles(torch.linalg.matrix_norm)
def matrix_norm(
    A: Tensor,  # noqa: N803
    ord: float | str = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
) -> Tensor:
    """Norms of matrices in any two dims."""
    x = A if dtype is None else A.to(dtype)
    first, second = (normal_dim(d, len(x.shape)) for d in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(x, 2, (first, second), keepdim)
    if ord in ("nuc", 2, -2):
        values: Tensor = torch.linalg.svdvals(x.movedim((first, second), (-2, -1)))
        found = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord == 2 else values.amin(-1)
    elif not isinstance(ord, str) and ord in (1, -1, float("inf"), -float("inf")):
        summed, other = (first, second) if abs(ord) == 1 else (second, first)
        sums = x.abs().sum(summed, keepdim=True)
        found = (sums.amax if ord > 0 else sums.amin)((other, summed))
    else:
        raise RuntimeError(f"matrix_norm: there is no norm {ord!r} of matrices")
    return found.unsqueeze(min(first, second)).unsqueeze(max(first, second)) if keepdim else found


# -- whole matrices ------------------------------------------------------------------------------------------------

_ONE = """
    det slogdet logdet cholesky cholesky_ex cholesky_inverse inv inv_ex inverse pinv pinverse matrix_exp matrix_power
    matrix_rank svd svdvals qr eig eigvals eigh eigvalsh cond lu lu_factor lu_factor_ex ldl_factor ldl_factor_ex geqrf
"""
_TWO = "cholesky_solve solve solve_ex solve_triangular triangular_solve"
#: Of each tensor, in order, the number of last dims that belong to one matrix (or row); all before are a batch.
_CORE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_ONE.split(), (2,)),
    **dict.fromkeys(_TWO.split(), (2, 2)),
    "lu_solve": (2, 2, 1),
    "linalg_lu_solve": (2, 1, 2),
    "ldl_solve": (2, 1, 2),
    "lstsq": (2, 2),
    "householder_product": (2, 1),
    "lu_unpack": (2, 1),
    "stft": (1, 1),
    "istft": (2, 1),
}


@handles(*find(name for name in _CORE if not name.startswith("linalg_")))
def of_matrices(func: Callable[..., Results], *args: object, **kwargs: object) -> Results:
    """Apply a function to each matrix of a batch. Collective if rows or columns are sharded."""
    operands, rebuild = operands_of(args, kwargs)
    name = func.__name__
    own = _CORE.get(name) or _CORE[name.removeprefix("linalg_")]
    core = [*own, *[0] * len(operands)][: len(operands)]
    driver = kwargs.get("driver", args[3] if len(args) > 3 else None)
    if name == "linalg_lstsq" and driver in ("gelss", "gelsd") and operands[0].shape[-2] > operands[0].shape[-1]:
        reason = f"driver={driver!r} gives residuals only where all matrices have full rank"
        raise unsupported(func, reason, *specs_of([operands[0]]), remedy="use gelsy or gels")
    solves = name in ("linalg_solve", "linalg_solve_ex", "linalg_lstsq")
    if solves and len(operands[1].shape) in (1, len(operands[0].shape) - 1):
        vectors = tuple(operands[1].shape) == tuple(operands[0].shape[:-1]) or len(operands[1].shape) == 1
        core[1] = 1 if vectors else 2
    new = [_freed(x, range(len(x.shape) - n, len(x.shape))) for x, n in zip(operands, core, strict=True)]
    batch = max(len(x.shape) - n for x, n in zip(new, core, strict=True))
    labels: list[list[Hashable]] = [
        [*range(batch - (len(x.shape) - n), batch), *[("core", i, d) for d in range(n)]]
        for i, (x, n) in enumerate(zip(new, core, strict=True))
    ]
    if not any(map(is_sharded, new)):
        new_args, new_kwargs = rebuild(list(map(local_of, new)))
        return func(*new_args, **new_kwargs)
    locals_, layout, extents = align(func, new, labels)
    empty = any(0 in x.shape[: x.ndim - n] for x, n in zip(locals_, core, strict=True)) and 0 not in extents.values()
    if empty:
        locals_ = [_with_one(x, n) for x, n in zip(locals_, core, strict=True)]
    new_args, new_kwargs = rebuild(locals_)
    result = func(*new_args, **new_kwargs)
    like = specs_of(new)[0]

    def wrap(part: Tensor) -> Tensor:
        if not isinstance(part, Tensor) or (part.shape == (0,) and name == "linalg_lstsq"):  # not of each driver
            return part
        names: list[Hashable] = [*range(batch), *[("result", d) for d in range(part.ndim - batch)]]
        spec = spec_of_layout(layout, names, [extents[d] for d in range(batch)] + list(part.shape[batch:]), like)
        for d in spec.sharded if empty else ():
            part = part.narrow(d, 0, spec.local_shape[d])
        return finish(part, spec)

    if isinstance(result, Tensor):
        return wrap(result)
    return type(result)([wrap(part) for part in result])


def _with_one(x: Tensor, core: int) -> Tensor:
    """Put one matrix, the unit, into a batch without any: some functions take no empty batch."""
    for d in range(x.ndim - core):
        if not x.shape[d]:
            shape = [1 if e == d else n for e, n in enumerate(x.shape)]
            ones = torch.eye(*shape[-2:], dtype=x.dtype, device=x.device) if core == 2 else x.new_ones(())
            x = torch.cat([x, ones.expand(shape)], d)
    return x

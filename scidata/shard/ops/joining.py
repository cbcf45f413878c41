"""Functions that join, repeat, pad and turn around, on any dim.

Along a sharded dim rows change ranks, in one exchange. Rolled and turned tensors keep their layout; of joined, repeated
or padded ones each rank has as many rows as it put in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import bounds_of, even_sizes
from scidata.core.types import IntArray
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import align, finish, on_parts, plain_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import handles, integers, normal_dim
from scidata.shard.ops.edges import as_numbers, join_edges, joins_on_each_rank
from scidata.shard.ops.moving import as_sharded, joined, to_layout
from scidata.shard.rows.redistribute import RowPlan, kept_rows, move_rows, plan_listed, plan_rows
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import pad_sequence_of_c


def _rows(
    x: ShardTensor,
    dim: int,
    build: Callable[..., IntArray],
    args: tuple[object, ...],
    sizes: Callable[[], tuple[int, ...]] | None = None,
) -> ShardTensor:
    """Take the rows ``build(extent, *args)`` of a dim; a sharded one is split into ``sizes()``, or as before."""
    spec = x.spec
    axis = spec.axis_of_dim(dim)
    if axis is None:
        index = torch.from_numpy(build(spec.global_shape[dim], *args))
        return ShardTensor(x.local.index_select(dim, index.to(x.device)), spec.with_rows(dim, len(index)))
    plan, new = plan_rows(spec, dim, build, args, sizes)
    return ShardTensor(move_rows(x.local, plan, dim, spec.group(axis)), new)


# -- joining -------------------------------------------------------------------------------------------------------


@handles(torch.cat, torch.concat, torch.concatenate, any_order=True, accepts_filled=True)
def cat(func: TensorFunction, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join along a dim; plain tensors are sliced to the shards. Collective along a sharded dim, but for edges."""
    edges = next((spec for spec in specs_of(tensors) if spec.exchange is not None and not spec.is_replicated), None)
    if edges is not None and normal_dim(dim, edges.ndim) in edges.sharded:
        dim = normal_dim(dim, edges.ndim)
        if joins_on_each_rank(tensors, dim, edges):
            return join_edges(func, tensors, dim, edges)
        tensors = [as_numbers(func, x) for x in tensors]
    tensors = [x for x in tensors if isinstance(x, ShardTensor) or tuple(x.shape) != (0,)]
    spec = next(iter(specs_of(tensors)))
    dim = normal_dim(dim, spec.ndim)
    if any(len(x.shape) != spec.ndim for x in tensors):
        raise unsupported(func, "the tensors have different numbers of dims", *specs_of(tensors))
    if any(dim in each.sharded for each in specs_of(tensors)):
        return _cat_rows(func, tensors, dim)
    alike = [x for x in tensors if isinstance(x, ShardTensor) and x.spec.lies_as(spec)]
    if len(alike) == len(tensors):  # torch checks the other dims
        new = spec.with_rows(dim, sum(x.spec.global_shape[dim] for x in alike))
        return ShardTensor(joined([x.local for x in alike], dim), new)
    labels = [[("joined", i) if d == dim else d for d in range(spec.ndim)] for i in range(len(tensors))]
    locals_, layout, extents = align(func, tensors, labels)
    shape = [extents.get(d, 0) for d in range(spec.ndim)]
    for x in tensors:
        if any(x.shape[d] != shape[d] for d in range(spec.ndim) if d != dim):
            raise RuntimeError(f"cat: shapes {[tuple(x.shape) for x in tensors]} differ along other dims than {dim}")
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return finish(joined(locals_, dim), spec_of_layout(layout, range(spec.ndim), shape, spec))


def _cat_rows(func: TorchFunction, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along a sharded dim: on each rank first, then one exchange restores the global order.

    Parts (a0 | a1) and (b0 | b1) are joined to (a0 b0 | a1 b1). The whole is a0 a1 b0 b1, so a1 and b0 change places.
    """
    first = next(spec for spec in specs_of(tensors) if dim in spec.sharded)
    axis = first.sharded[dim]
    parts: list[ShardTensor] = []
    for x in tensors:
        if any(n != m for d, (n, m) in enumerate(zip(x.shape, first.global_shape, strict=True)) if d != dim):
            raise RuntimeError(f"cat: shapes {[tuple(x.shape) for x in tensors]} differ along other dims than {dim}")
        own = as_sharded(x, first)
        rows = (
            own.spec.sizes_of(axis) if own.spec.dims[axis] == dim else even_sizes(x.shape[dim], first.axes[axis].size)
        )
        parts.append(to_layout(own, first.with_rows(dim, rows)))
    specs = [part.spec for part in parts]
    plan, new = kept_rows([first, *specs], ("cat", dim), partial(_cat_plan, first, specs, dim))
    return ShardTensor(move_rows(joined([part.local for part in parts], dim), plan, dim, first.group(axis)), new)


def _cat_plan(first: ShardSpec, specs: Sequence[ShardSpec], dim: int) -> tuple[RowPlan, ShardSpec]:
    """Plan from parts that are joined on each rank to the whole joined; also return its layout."""
    sizes = [spec.parts(dim)[0] for spec in specs]
    together = [sum(each) for each in zip(*sizes, strict=True)]
    start = bounds_of(together)
    index: list[IntArray] = []
    for i, each in enumerate(sizes):
        for part, size in enumerate(each):
            begin = start[part] + sum(other[part] for other in sizes[:i])
            index.append(np.arange(begin, begin + size))
    plan = plan_listed(np.concatenate(index), together, together, first.parts(dim)[1])
    return plan, first.with_rows(dim, together)


@handles(torch.stack, any_order=True)
def stack(func: TensorFunction, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join along a new dim."""
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) != 1:
        raise RuntimeError(f"stack: the tensors' shapes differ: {sorted(shapes)}")
    ndim = len(tensors[0].shape)
    dim = normal_dim(dim, ndim + 1)
    names = [*range(dim), "stacked", *range(dim, ndim)]
    labels = [range(ndim)] * len(tensors)
    return on_parts(func, lambda *parts: torch.stack(parts, dim), tensors, labels, names, {"stacked": len(tensors)})


# -- padding and repeating -----------------------------------------------------------------------------------------


@handles(F.pad)
def pad(x: ShardTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad any dims; the first and the last rank of a sharded dim get the rows."""
    widths = list(pad)
    ndim = x.spec.ndim
    if len(widths) % 2 or len(widths) > 2 * ndim:
        raise RuntimeError(f"pad: {widths} are no pairs for at most {ndim} dims")
    for place in range(0, len(widths), 2):
        dim, (lo, hi) = ndim - 1 - place // 2, widths[place : place + 2]
        if not lo and not hi:
            continue
        if (lo < 0 or hi < 0) and mode != "replicate":  # crops; which torch does last for that mode
            x = as_sharded(x.narrow(dim, max(0, -lo), x.shape[dim] + min(lo, 0) + min(hi, 0)), x.spec)
            lo, hi = max(0, lo), max(0, hi)
        if mode == "constant":
            x = _pad_constant(x, dim, lo, hi, 0 if value is None else value)
        else:
            x = _rows(x, dim, _padded_rows, (lo, hi, mode), partial(_padded_sizes, x.spec, dim, lo, hi))
    return x if any(widths) else x.clone()


def _padded_sizes(spec: ShardSpec, dim: int, lo: int, hi: int) -> tuple[int, ...]:
    sizes = list(spec.parts(dim)[0])
    if lo < 0 or hi < 0:
        return even_sizes(sum(sizes) + lo + hi, len(sizes))
    sizes[0] += lo
    sizes[-1] += hi
    return tuple(sizes)


def _pad_constant(x: ShardTensor, dim: int, lo: int, hi: int, value: float) -> ShardTensor:
    spec = x.spec
    axis = spec.axis_of_dim(dim)

    def make() -> ShardSpec:
        return spec.with_rows(
            dim, spec.global_shape[dim] + lo + hi if axis is None else _padded_sizes(spec, dim, lo, hi)
        )

    new: ShardSpec = spec.plans.get_or_make(("padded", dim, lo, hi), make)
    if axis is not None:
        rank = spec.coordinate(axis)
        lo, hi = lo if rank == 0 else 0, hi if rank == spec.axes[axis].size - 1 else 0
    return ShardTensor(F.pad(x.local, [*[0, 0] * (spec.ndim - 1 - dim), lo, hi], value=value), new)


def _padded_rows(extent: int, lo: int, hi: int, mode: str) -> IntArray:
    rows = np.arange(-lo, extent + hi)
    if mode == "replicate" and extent:
        return np.clip(rows, 0, extent - 1)
    if mode == "circular" and max(lo, hi) <= extent:
        return rows % extent
    if mode == "reflect" and max(lo, hi) < extent:
        rows = np.abs(rows)
        return np.where(rows >= extent, 2 * (extent - 1) - rows, rows)
    raise RuntimeError(f"pad: {(lo, hi)} rows of mode {mode!r} do not fit a dim of extent {extent}")


@handles(pad_sequence_of_c)
def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Stack sequences after as many rows of padding as they lack."""
    longest, ndim = max(x.shape[0] for x in sequences), len(sequences[0].shape)
    lacks = [(0, longest - x.shape[0])[:: -1 if padding_side == "left" else 1] for x in sequences]
    around = [F.pad(x, [0, 0] * (ndim - 1) + [*n], value=padding_value) for x, n in zip(sequences, lacks, strict=True)]
    return torch.stack(around, 0 if batch_first else 1)


@handles("repeat tile")
def repeat(
    func: TensorFunction,
    x: ShardTensor,
    *given: int | Sequence[int],
    repeats: Sequence[int] = (),
    dims: Sequence[int] = (),
) -> Tensor:
    """Tile along any dims."""
    times = integers(*given, *repeats, *dims)
    added = len(times) - x.spec.ndim
    if added < 0 and func.__name__ == "tile":
        times, added = (*[1] * -added, *times), 0
    if added < 0 or min(times, default=0) < 0:
        raise RuntimeError(f"repeat: {times} does not fit a tensor of {x.spec.ndim} dims")
    sharded = dict(x.spec.sharded)
    for dim, axis in sharded.items():
        if times[dim + added] != 1:
            x = _rows(
                x, dim, _tiled_rows, (times[dim + added],), partial(_tiled_sizes, x.spec, axis, times[dim + added])
            )
    spec = x.spec
    local = x.local.repeat([1 if d - added in sharded else t for d, t in enumerate(times)])
    shape = [
        n if d - added in sharded else t * n
        for d, (t, n) in enumerate(zip(times, (*[1] * added, *spec.global_shape), strict=True))
    ]
    return finish(local, spec.move_dims(shape, {d: d + added for d in range(spec.ndim)}))


def _tiled_sizes(spec: ShardSpec, axis: int, times: int) -> tuple[int, ...]:
    return tuple(size * times for size in spec.sizes_of(axis))


def _tiled_rows(extent: int, times: int) -> IntArray:
    return np.tile(np.arange(extent), times)


@handles("repeat_interleave")
def repeat_interleave(
    x: Tensor, repeats: int | Tensor | None = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Repeat each row of a dim a number of times, the same for all or one for each."""
    if not isinstance(repeats, int | Tensor):  # the only tensor says how often each of its own numbers is repeated
        return torch.repeat_interleave(plain_of(x), output_size=output_size)
    if dim is None:  # plain where there are no elements
        x, dim = as_sharded(x.reshape(-1), specs_of([x, repeats])[0]), 0
    dim = normal_dim(dim, len(x.shape))
    if isinstance(repeats, Tensor):
        counts = plain_of(repeats)
        rows = torch.arange(x.shape[dim], device=counts.device)
        return x.index_select(dim, rows.repeat_interleave(counts))
    assert isinstance(x, ShardTensor)
    spec = x.spec
    axis = spec.axis_of_dim(dim)
    new = spec.global_shape[dim] * repeats if axis is None else [n * repeats for n in spec.sizes_of(axis)]
    return finish(x.local.repeat_interleave(repeats, dim), spec.with_rows(dim, new))


# -- turning around ------------------------------------------------------------------------------------------------


def _rolled_rows(extent: int, shift: int) -> IntArray:
    return (np.arange(extent) - shift) % max(extent, 1)


def _flipped_rows(extent: int) -> IntArray:
    return np.arange(extent)[::-1].copy()


@handles("roll")
def roll(x: ShardTensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Shift rows of any dims around; the layout stays."""
    spec, shifts, dims = x.spec, integers(shifts), integers(dims)
    if not dims and len(shifts) == 1 and spec.ndim > 1:
        flat = torch.roll(x.reshape(-1), shifts, 0).reshape(spec.global_shape)  # plain where there are no elements
        return to_layout(as_sharded(flat, spec), spec)
    if len(shifts) != len(dims or (0,)):
        raise RuntimeError(f"roll: shifts {shifts} and dims {dims} must be as many")
    for shift, d in zip(shifts, dims or (0,), strict=True):
        dim = normal_dim(d, spec.ndim)
        sharded = dim in spec.sharded
        x = _rows(x, dim, _rolled_rows, (shift,)) if sharded else ShardTensor(x.local.roll(shift, dim), spec)
    return x


@handles("flip fliplr flipud")
def flip(func: TensorFunction, x: ShardTensor, *given: int | Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Turn the order of rows of any dims around; the layout stays."""
    name, spec = func.__name__, x.spec
    dims = integers(*given, *dims) if name == "flip" else (int(name == "fliplr"),)
    chosen = [normal_dim(d, spec.ndim) for d in dims]
    if len(set(chosen)) < len(chosen):
        raise RuntimeError(f"flip: a dim appears twice in {dims}")
    for dim in chosen:
        x = _rows(x, dim, _flipped_rows, ()) if dim in spec.sharded else x
    return finish(x.local.flip([d for d in chosen if d not in spec.sharded]), spec)

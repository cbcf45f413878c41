"""Functions that take parts: slices, single rows and splits, on any dim. See ``advanced`` for index tensors and masks.

A slice of a sharded dim is cut on each rank, without communication: its layout says how many rows each rank keeps.
Parts may become uneven or empty. A single row of a sharded dim is on one rank; all of them get a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, SupportsIndex, TypeVar

import numpy as np
import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.rooted import from_owner
from scidata.shard.graphs.routed import RoutedIndex
from scidata.shard.graphs.targets import FilledTensor
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.advanced import as_mask, take_advanced
from scidata.shard.ops.align import is_sharded, local_of, plain_of, specs_of, write_to_plain
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.edges import lies_beside, only_index, set_rows, set_where, take_rows, take_where
from scidata.shard.ops.moving import as_sharded
from scidata.shard.ops.shapes import derived, keep_dims
from scidata.shard.ops.spectra import Blank, Later, Spectrum
from scidata.shard.ops.writing import fill_where, overwrite, without_ones, write_through
from scidata.shard.rows.edge_order import cut_edges, refuse_disorder
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import replay_views, views_are_replayed
from scidata.shard.views import Copy, find_place, refuse_repeated, written

_WHOLE = slice(None)
_MASKS = (torch.bool, torch.uint8)
_INDEX_DTYPES = (*_MASKS, torch.int64, torch.int32)
_INTEGERS = frozenset({int, type(None)})
_NO_NUMBERS = (Tensor, Sequence, np.ndarray, slice)

T = TypeVar("T")
#: One item of an index that is no tensor: a slice, the number of a row, or None for a new dim.
Basic = slice | SupportsIndex | None


def _cut(sizes: Sequence[int], rank: int, start: int, count: int, step: int) -> tuple[slice, tuple[int, ...]]:
    """Return the slice of this rank's rows, and how many rows each rank keeps.

    Of sizes (4, 4) the slice 1, 4, 7 (start 1, count 3, step 3) is rows 1 of rank 0, and 0 and 3 of rank 1.
    """
    counts, low, mine = [], 0, _WHOLE
    for part, size in enumerate(sizes):
        first, last = (min(count, max(0, -((start - bound) // step))) for bound in (low, low + size))
        counts.append(last - first)
        if part == rank:
            begin = start + first * step - low
            mine = slice(begin, begin + (last - first) * step, step) if last > first else slice(0, 0)
        low += size
    return mine, tuple(counts)


def _row(extent: int, item: SupportsIndex, dim: int) -> int:
    row = operator.index(item)
    if not -extent <= row < extent:
        raise IndexError(f"index {row} is out of bounds for dimension {dim} with size {extent}")
    return row % extent


class _Take(NamedTuple):
    """The meaning of a basic index for one layout."""

    local: tuple[slice | int | None, ...]  # the index of this rank's part
    spec: ShardSpec
    rows: list[tuple[int, int, int]]  # dim of the local result, mesh axis and owner of single rows of sharded dims


def take_basic(x: ShardTensor, items: Sequence[Basic]) -> Tensor:
    """Index by slices, numbers and None, one item a dim. Collective if a number selects from a sharded dim."""
    if isinstance(x, Spectrum) and (columns := x.sliced(items)) is not None:
        return columns
    plan = _planned(x.spec, items)
    part = x.local[plan.local]
    if not part.numel() and not views_are_replayed():
        replay_views(True)
        try:
            return take_basic(x, items)
        finally:
            replay_views(False)
    if not plan.rows:
        return derived(x, part, plan.spec)
    part = _with_rows(part, plan)
    # wrapped even where it is replicated: a view in torch, so writes to this copy have to reach the original
    if all(plan.spec.axes[axis].size == 1 for _, axis, _ in plan.rows):
        return ShardTensor(part, plan.spec, copied=x.copied)
    copied = Copy(
        x,
        part,
        take=lambda: _with_rows(x.local[plan.local], plan),
        put=lambda: _put_basic(x, items, ShardTensor(part, plan.spec)),
    )
    return ShardTensor(part, plan.spec, copied=copied)


def _with_rows(part: Tensor, plan: _Take) -> Tensor:
    """Get the rows of sharded dims from their owners. Collective."""
    for dim, axis, owner in reversed(plan.rows):
        part = from_owner(part, dim, owner, plan.spec.group(axis)).squeeze(dim)
    return part


def _planned(spec: ShardSpec, items: Sequence[Basic]) -> _Take:
    key: list[object] = ["take"]
    for item in items:
        ends = (item.start, item.stop, item.step) if type(item) is slice else (item,)
        if not _INTEGERS.issuperset(map(type, ends)):
            return _plan(spec, items)
        key.append(ends if isinstance(item, slice) else item)
    found: _Take | None = spec.plans.get(tuple(key))
    return spec.plans.put(tuple(key), _plan(spec, items)) if found is None else found


def _plan(spec: ShardSpec, items: Sequence[Basic]) -> _Take:
    local: list[slice | int | None] = []
    shape: list[int] = []
    dims, sizes = list(spec.dims), list(spec.sizes)
    rows: list[tuple[int, int, int]] = []
    edge_parts: list[tuple[int, ...]] | None = None
    old = 0
    for item in items:
        if item is None:
            local.append(None)
            shape.append(1)
            continue
        extent, axis = spec.global_shape[old], spec.sharded.get(old)
        if isinstance(item, slice):
            start, stop, step = item.indices(extent)
            if step <= 0:
                raise ValueError("step must be greater than zero")
            count = max(0, -((start - stop) // step))
            if axis is not None:
                dims[axis] = len(shape)
                mine = _WHOLE
                if count != extent and step == 1 and spec.edge_parts is not None and not spec.in_order:
                    mine, edge_parts = cut_edges(spec.edge_parts, spec.coordinate(axis), start, start + count)
                    sizes[axis] = tuple(map(sum, zip(*edge_parts, strict=True)))
                elif count != extent:
                    refuse_disorder(Tensor.__getitem__, spec)
                    mine, sizes[axis] = _cut(spec.sizes_of(axis), spec.coordinate(axis), start, count, step)
            local.append(item if axis is None else mine)
            shape.append(count)
        elif axis is None:
            local.append(_row(extent, item, old))
        else:
            refuse_disorder(Tensor.__getitem__, spec)
            mine, counts = _cut(spec.sizes_of(axis), spec.coordinate(axis), _row(extent, item, old), 1, 1)
            rows.append((len(shape) + len(rows), axis, counts.index(1)))
            local.append(mine)
            dims[axis] = sizes[axis] = None
        old += 1
    new = spec.derive(shape, dims, sizes)
    return _Take(tuple(local), new if edge_parts is None else new.with_true_parts(edge_parts), rows)


class _Index(NamedTuple):
    """An index, one item for each dim and None; index tensors apply after the other items."""

    basic: list[Basic]
    tensors: dict[int, Tensor]  # by dim of the result of the basic index; a mask stands at its first dim


def _items_of(index: object) -> tuple[object, ...]:
    """Return the items of an index; of a short sequence too that has more than numbers (``treatSequenceAsTuple``)."""
    items = tuple(index) if isinstance(index, Sequence) and (isinstance(index, tuple) or len(index) < 32) else ()
    if any(item is None or item is Ellipsis or isinstance(item, _NO_NUMBERS) for item in items):
        return items
    return index if isinstance(index, tuple) else (index,)


def _as_tensor(item: object, device: torch.device) -> Tensor | None:
    """Return an index tensor or a mask; None for simpler items."""
    if isinstance(item, Sequence | np.ndarray):  # numbers of any kind are rows there
        made = torch.as_tensor(item, device=device)
        item = made if made.dtype in _MASKS else made.to(torch.int64)
    if not isinstance(item, Tensor) or not (item.ndim or item.dtype == torch.bool):
        return None
    if item.dtype not in _INDEX_DTYPES:
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    return as_mask(item)


def _parsed(func: TorchFunction, x: ShardTensor, items: tuple[object, ...]) -> _Index:
    spec = x.spec
    basic: list[Basic] = []
    tensors: dict[int, Tensor] = {}
    tensor_of = [None if isinstance(i, int | slice) else _as_tensor(i, x.device) for i in items]
    width = [t.ndim if t is not None and t.dtype == torch.bool else 1 for t in tensor_of]
    consumed = sum([w for w, item in zip(width, items, strict=True) if item is not None and item is not Ellipsis])
    if consumed > spec.ndim:
        raise IndexError(f"too many indices: {consumed} for a tensor of {spec.ndim} dims")
    if len([item for item in items if item is Ellipsis]) > 1:
        raise IndexError("an index can only have a single Ellipsis ('...')")
    left = 0  # dims of the result so far
    for item, tensor, dims in zip(items, tensor_of, width, strict=True):
        if item is Ellipsis:
            basic.extend([_WHOLE] * (spec.ndim - consumed))
            left += spec.ndim - consumed
        elif tensor is not None:
            if dims == 0:
                raise unsupported(func, "a mask without dims", spec, remedy="use torch.where")
            tensors[left] = tensor
            basic.extend([_WHOLE] * dims)
            left += dims
        elif isinstance(item, bool | np.bool_):
            raise unsupported(func, f"the index {item}", spec, remedy="use torch.where")
        elif item is None or isinstance(item, slice | int) or isinstance(item, SupportsIndex):  # noqa: SIM101, a protocol asks longer
            basic.append(item)
            left += item is None or isinstance(item, slice)
        else:
            raise TypeError(f"an index holds numbers, slices, None, Ellipsis and tensors, not {type(item).__name__}")
    old = sum([item is not None for item in basic])
    basic.extend([_WHOLE] * (spec.ndim - old))
    return _Index(basic, tensors)


@handles(Tensor.__getitem__, any_order=True, accepts_filled=True)
def getitem(func: TensorFunction, x: Tensor, index: object) -> Tensor:
    """Index with integers, slices, None, Ellipsis, index tensors and masks, on any dims."""
    items = index if type(index) is tuple else _items_of(index)
    if isinstance(x, ShardTensor):
        left = x.spec.ndim - len(items)
        plain: list[Basic] = [item for item in items if type(item) is int or type(item) is slice]
        if left >= 0 and len(plain) == len(items):
            return take_basic(x, plain + [_WHOLE] * left)
    found = only_index(items)
    if found is not None:
        dim, rows = found[0], as_mask(found[1])
        if rows.dtype != torch.bool:
            return take_rows(func, x, dim, rows)
        if lies_beside(x, dim, rows):
            return take_where(func, x, dim, rows)
    if not isinstance(x, ShardTensor):
        parsed = _parsed(func, as_sharded(x, specs_of(items)[0]), items)
        return take_advanced(func, x[tuple(parsed.basic)], parsed.tensors)
    parsed = _parsed(func, x, items)
    if not parsed.tensors:
        return take_basic(x, parsed.basic)
    whole = all(isinstance(item, slice) and item == _WHOLE for item in parsed.basic)
    return take_advanced(func, x if whole else take_basic(x, parsed.basic), parsed.tensors)


def _as_view(spec: ShardSpec, items: Sequence[Basic], value: T) -> tuple[list[Basic], T | Tensor]:
    """Take single rows of sharded dims as slices of one, so that the target of a write is a view."""
    basic: list[Basic] = []
    old, behind = 0, sum([item is None or isinstance(item, slice) for item in items])
    new: T | Tensor = without_ones(value, behind)
    for item in items:
        if item is None or isinstance(item, slice):
            basic.append(item)
            behind -= 1
        elif old in spec.sharded:
            row = _row(spec.global_shape[old], item, old)
            basic.append(slice(row, row + 1))
            if isinstance(new, Tensor) and new.ndim >= behind:
                new = new.unsqueeze(new.ndim - behind)
        else:
            basic.append(item)
        old += item is not None
    return basic, new


@handles(Tensor.__setitem__, any_order=True, accepts_filled=True)
def setitem(func: Callable[..., None], x: Tensor, index: object, value: float | Tensor) -> None:
    """Write to slices and rows of any dims, where a mask is true, or through index tensors or routed ids."""
    if not isinstance(x, ShardTensor):
        write_to_plain(func, (x, index, value), {})
        return
    if is_sharded(index) and index.dtype == torch.bool:
        if set_where(func, x, index, value):
            return
    elif isinstance(index, RoutedIndex):
        set_rows(func, x, index, value)
        return
    if isinstance(x, FilledTensor) and x.spec.is_replicated:
        write_to_plain(func, (x.settled(), index, value), {})
        return
    parsed = _parsed(func, x, _items_of(index))
    if not parsed.tensors:
        _put_basic(x, parsed.basic, value)
        if isinstance(x, Later):
            return
    else:
        target = _target(x, parsed.basic)
        if not fill_where(func, target, parsed.tensors, value):
            write_through(func, target, parsed.tensors, value)
    find_place(x.local)


def _target(x: ShardTensor, items: Sequence[Basic]) -> ShardTensor:
    """Return the view that is written to, wrapped even if it is replicated."""
    if isinstance(x, Later):
        x.settle()
    return as_sharded(take_basic(x, items), x.spec)


def _put_basic(x: ShardTensor, items: Sequence[Basic], value: float | Tensor) -> None:
    if isinstance(x, Blank) and x.write(items, value):
        return
    refuse_repeated(Tensor.__setitem__, x, tuple(items))
    basic, value = _as_view(x.spec, items, value)
    target = _target(x, basic)
    if not isinstance(value, Tensor):
        target.fill_(value)
    else:
        overwrite(target, value)


def _take_along(x: ShardTensor, dim: int, item: Basic) -> Tensor:
    """Take a slice or one row of a dim, the others whole."""
    return take_basic(x, [item if d == dim else _WHOLE for d in range(x.spec.ndim)])


@handles("select", any_order=True)
def select(x: ShardTensor, dim: int, index: int) -> Tensor:
    """Take one row of a dim."""
    return _take_along(x, normal_dim(dim, x.spec.ndim), index)


@handles("unbind", any_order=True)
def unbind(x: ShardTensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Split a dim into its rows. Collective if it is sharded: each rank gets all rows."""
    spec, dim = x.spec, normal_dim(dim, x.spec.ndim)
    axis = spec.axis_of_dim(dim)
    new = spec.without([dim])
    if axis is None:
        return tuple(derived(x, part, new) for part in x.local.unbind(dim))
    copied = _whole_rows(x, dim, axis)
    return tuple(ShardTensor(part, new, copied=copied) for part in copied.local.unbind(dim))


def _whole_rows(x: ShardTensor, dim: int, axis: int) -> Copy:
    """Gather a dim, as one copy; rows are to be views of it. Collective."""
    spec = x.spec
    sizes, start = spec.sizes_of(axis), spec.offsets[dim]

    def take() -> Tensor:
        return all_gather_v(x.local, sizes, dim, spec.group(axis))

    def put() -> None:
        x.local.copy_(local.narrow(dim, start, spec.local_shape[dim]))
        written(x)

    local = take()
    return Copy(x, local, take, put)


@handles("narrow narrow_copy", any_order=True)
def narrow(func: TensorFunction, x: ShardTensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """Keep some rows of a dim."""
    dim, start, length = normal_dim(dim, x.spec.ndim), int(start), int(length)
    extent = x.spec.global_shape[dim]
    start += extent if start < 0 else 0
    if length < 0 or not 0 <= start <= extent - length:
        raise RuntimeError(f"narrow: start {start} and length {length} exceed dim {dim} of size {extent}")
    part = _take_along(x, dim, slice(start, start + length))
    return part.clone() if "copy" in func.__name__ else part


@handles("chunk split tensor_split unsafe_chunk unsafe_split split_with_sizes")
def split(
    func: Callable[..., Sequence[Tensor]], x: ShardTensor, *where: SupportsIndex, dim: int = 0, **named: SupportsIndex
) -> tuple[Tensor, ...]:
    """Cut along a dim; no communication, so a piece of a sharded dim may lie on few ranks."""
    (cuts, *rest), spec = (*where, *named.values()), x.spec
    if isinstance(cuts, ShardTensor):
        raise unsupported(func, "where to cut is sharded", spec, cuts.spec)
    dim = normal_dim(operator.index(rest[0]) if rest else dim, spec.ndim)
    if dim not in spec.sharded:
        return tuple(keep_dims(x, part) for part in func(x.local, cuts, dim))
    rows = torch.empty(spec.global_shape[dim], device="meta")  # torch says how long the pieces are
    pieces, start = [], 0
    for piece in func(rows, cuts):
        pieces.append(_take_along(x, dim, slice(start, start + len(piece))))
        start += len(piece)
    return tuple(pieces)


@handles("index_select", any_order=True, accepts_filled=True)
def index_select(func: TensorFunction, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Take the rows of a dim that an index names."""
    if not len(x.shape):  # torch takes a single number for a row; the function that PyG puts in its place does not
        return local_of(x).index_select(dim, plain_of(index))
    if index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"index_select: the index must be of int32 or int64, not {index.dtype}")
    if len(index.shape) > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if x.layout is not torch.strided:
        return func(x, dim, plain_of(index))
    if is_sharded(index):
        return take_rows(func, x, dim, index)
    return take_advanced(func, x, {normal_dim(dim, len(x.shape)): index.reshape(-1)})

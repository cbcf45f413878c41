"""Bring operands to one layout by labels of their dims; shared by most handlers.

Each operand's dims carry labels, as in an einsum: dims with the same label are the same index. A mesh axis shards one
label. An operand that is not sharded on that axis is replicated along it, so it is sliced where it has the label's
full extent, and taken as it is where it broadcasts; either way its gradient is assembled from all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard, TypeVar, overload

import torch
from torch import Tensor

from scidata.shard.base import ViewState
from scidata.shard.comm.collectives import slice_to_shard
from scidata.shard.comm.sums import replicate_parameters, replicate_to_shards
from scidata.shard.comm.transport import Group
from scidata.shard.op_table import TensorFunction, TorchFunction, is_in_place, unsupported
from scidata.shard.ops.moving import to_layout
from scidata.shard.rows.edge_order import as_joined, in_one_order, refuse_disorder
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory
from scidata.shard.views import find_place, refuse_write_to_copy, written

Dims = int | tuple[int, ...] | list[int] | None
Dtype = torch.dtype | None

Labels = Sequence[Hashable]
Entry = tuple[Hashable, tuple[int, ...]]
#: The label and sizes that each mesh axis shards, None where it replicates.
Layout = list[Entry | None]

T = TypeVar("T")


def operands_of(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], tuple[list[object], dict[str, object]]]]:
    """Return the tensors among the arguments and in lists of them, and a function that replaces them."""
    values = [*args, *kwargs.values()]
    operands: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            operands.append(value)
        elif isinstance(value, list | tuple):
            operands.extend(x for x in value if isinstance(x, Tensor))

    def rebuild(new: Sequence[Tensor]) -> tuple[list[object], dict[str, object]]:
        others = iter(new)
        result = [_replace(value, others) for value in values]
        return result[: len(args)], dict(zip(kwargs, result[len(args) :], strict=True))

    return operands, rebuild


def _replace(value: object, others: Iterator[Tensor]) -> object:
    if isinstance(value, Tensor):
        return next(others)
    if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value):
        return [next(others) if isinstance(x, Tensor) else x for x in value]
    return value


def specs_of(operands: Iterable[object]) -> list[ShardSpec]:
    """Return the specs of the ShardTensors among ``operands``."""
    return [x.spec for x in operands if isinstance(x, ShardTensor)]


@overload
def local_of(x: Tensor) -> Tensor: ...
@overload
def local_of(x: T) -> T: ...
def local_of(x: object) -> object:
    """Return the local part of a ShardTensor, anything else unchanged."""
    return x.local if isinstance(x, ShardTensor) else x


@overload
def plain_of(x: Tensor) -> Tensor: ...
@overload
def plain_of(x: T) -> T: ...
def plain_of(x: object) -> object:
    """Return a ShardTensor as a plain tensor on each rank, anything else unchanged. Collective if it is sharded."""
    return x.full_tensor() if isinstance(x, ShardTensor) else x


def is_sharded(x: object) -> TypeGuard[ShardTensor]:
    """Whether this is a ShardTensor that any axis shards."""
    return isinstance(x, ShardTensor) and not x.spec.is_replicated


def refuse_plain(func: TorchFunction, x: Tensor, *others: object) -> None:
    """Raise UnsupportedShardOp if the input is not sharded, since another argument must be."""
    if not isinstance(x, ShardTensor) or x.spec.is_replicated:
        specs = specs_of([x, *others])
        raise unsupported(func, "a plain input meets sharded parameters", *specs, remedy="use full_tensor()")


def refuse_without_dims(func: TorchFunction, x: Tensor, *others: object) -> None:
    """Raise for a scalar in place of rows: torch takes it for a row, here it has no layout."""
    if not len(x.shape):
        specs = specs_of([x, *others])
        raise unsupported(func, "a tensor without dims beside sharded ones", *specs, remedy="use reshape(1)")


def dims_of(dim: int | Sequence[int] | None, spec: ShardSpec) -> tuple[int, ...]:
    """Normalise a dim argument: None and () mean all dims."""
    if dim is None:
        return tuple(range(spec.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -max(spec.ndim, 1) <= d < max(spec.ndim, 1):
            raise IndexError(f"dim {d} is out of range for a tensor of {spec.ndim} dims")
    return tuple(d % spec.ndim for d in dims) or tuple(range(spec.ndim))


def layout_of(func: TorchFunction, operands: Sequence[Tensor], labels: Sequence[Labels]) -> Layout:
    """Return the label that each mesh axis shards; raise if two ShardTensors disagree."""
    specs = specs_of(operands)
    layout: Layout = [None] * len(specs[0].axes)
    for x, names in zip(operands, labels, strict=True):
        if not isinstance(x, ShardTensor):
            continue
        spec = x.spec
        if spec.device_mesh != specs[0].device_mesh:
            raise unsupported(func, "the operands lie on different device meshes", *specs)
        for dim, axis in spec.sharded.items():
            entry = (names[dim], spec.sizes_of(axis))
            if layout[axis] is None:
                layout[axis] = entry
            elif layout[axis] != entry:
                raise unsupported(
                    func,
                    f"the operands are split differently along mesh axis {spec.axes[axis].name!r}",
                    *specs,
                    remedy="redistribute() one of them to the other's placements and sizes first",
                )
    used = [entry[0] for entry in layout if entry is not None]
    if len(set(used)) != len(used):
        raise unsupported(func, "two mesh axes would shard the same dim of the result", *specs)
    return layout


def spec_of_layout(layout: Layout, names: Labels, shape: Sequence[int], like: ShardSpec) -> ShardSpec:
    """Return the spec of a result with these labels; an axis that shards none of them replicates."""
    held = [entry if entry is not None and entry[0] in names else None for entry in layout]
    dims = [None if entry is None else names.index(entry[0]) for entry in held]
    return like.derive(shape, dims, [None if entry is None else entry[1] for entry in held])


def align(
    func: TorchFunction, operands: Sequence[Tensor], labels: Sequence[Labels], out: Labels | None = None
) -> tuple[list[Tensor], Layout, dict[Hashable, int]]:
    """Return each operand's local part in the common layout, the layout, and the global extent of each label.

    A sharded dim of extent 1 that broadcasts is gathered, and a ShardTensor that is split otherwise than a larger one
    is brought to its layout; where labels of the result are given, a split along one of these goes before others.
    Collective then.

    Raises UnsupportedShardOp: ShardTensors on different meshes, or edges of a graph beside tensors that are split
    otherwise.
    """
    specs = specs_of(operands)
    names = tuple([each if type(each) is range else tuple(each) for each in labels])
    # by identity: two equal specs may differ in their graphs and past sizes
    key = (
        names,
        None if out is None else tuple(out),
        *[id(x.spec) if isinstance(x, ShardTensor) else x.shape for x in operands],
    )
    plans = specs[0].plans
    plan = plans.get(key)
    if plan is None:
        plan = _planned(func, operands, names, specs, out)
        if all(spec.exchange is None for spec in specs):  # a graph's exchange goes when its last tensor does
            plans.put(key, plan)
    if plan.mixed:
        return align(func, [_in_one_order(func, x) for x in operands], labels, out)
    if plan.gathered:
        new = [
            to_layout(x, plan.gathered[i]) if isinstance(x, ShardTensor) and i in plan.gathered else x
            for i, x in enumerate(operands)
        ]
        return align(func, new, labels, out)
    locals_ = []
    for x, moved in zip(operands, plan.moved, strict=True):
        local = local_of(x)
        for entry, axis, dim in moved:
            if plan.edges is not None and dim is not None and local.shape[dim] == sum(entry[1]):
                local = as_joined(func, local, dim, plan.edges)
            local = _cut(local, dim, entry[1], specs[0], axis)
        locals_.append(local)
    return locals_, plan.layout, plan.extents


#: An entry, its mesh axis, and the dim that is sliced there, None where the operand has no such dim.
Cut = tuple[Entry, int, int | None]


class _Plan(NamedTuple):
    gathered: dict[int, ShardSpec]  # operands that are to be brought to other layouts first
    layout: Layout
    extents: dict[Hashable, int]
    moved: list[list[Cut]]  # of each operand
    specs: list[ShardSpec]  # held, so that their ids stay theirs
    edges: ShardSpec | None = None  # of edges that are not in the order of one process
    mixed: bool = False  # edges beside others in another order


def _planned(
    func: TorchFunction,
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    specs: list[ShardSpec],
    out: Labels | None,
) -> _Plan:
    extents = extents_of(func, operands, labels)
    if _is_mixed(operands, labels):
        return _Plan({}, [], extents, [], specs, mixed=True)
    single = [_without_single(x, names, extents) for x, names in zip(operands, labels, strict=True)]
    if any(single):
        return _Plan({i: spec for i, spec in enumerate(single) if spec is not None}, [], extents, [], specs)
    brought = _brought(operands, labels, specs, out)
    if brought:
        return _Plan(brought, [], extents, [], specs)
    layout = layout_of(func, operands, labels)
    moved = [_moves(x, list(names), layout) for x, names in zip(operands, labels, strict=True)]
    return _Plan({}, layout, extents, moved, specs, next((spec for spec in specs if not spec.in_order), None))


def _is_mixed(operands: Sequence[Tensor], labels: Sequence[Labels]) -> bool:
    """Whether edge tensors that are split alike have different orders."""
    orders: dict[Hashable, set[Hashable]] = {}
    for x, names in zip(operands, labels, strict=True):
        if isinstance(x, ShardTensor):
            for dim in x.spec.sharded:
                orders.setdefault(names[dim], set()).add(x.spec.order)
    return any(len(found) > 1 for found in orders.values())


def _in_one_order(func: TorchFunction, x: T) -> T | ShardTensor:
    """Bring edges to the order of one process. Collective if they have another."""
    if not isinstance(x, ShardTensor) or x.spec.in_order:
        return x
    if func.__name__.endswith("_") and not func.__name__.endswith("__"):
        refuse_disorder(func, x.spec)
    return ShardTensor(*in_one_order(func, x.local, x.spec))


def numbered_alike(func: TorchFunction, x: ShardTensor, dims: Collection[int]) -> ShardTensor:
    """Bring edges to the order of one process if one of ``dims`` numbers them. Collective then."""
    return x if x.spec.sharded.keys().isdisjoint(dims) else _in_one_order(func, x)


def _brought(
    operands: Sequence[Tensor], labels: Sequence[Labels], specs: list[ShardSpec], out: Labels | None
) -> dict[int, ShardSpec]:
    """Return new layouts for ShardTensors that are split otherwise than a larger one; of equals, than the first."""
    if any(not spec.in_order or spec.device_mesh != specs[0].device_mesh for spec in specs):
        return {}
    sharded = [(i, x.spec) for i, x in enumerate(operands) if isinstance(x, ShardTensor)]
    by_size = sorted(sharded, key=lambda each: -math.prod(each[1].global_shape))
    layout: Layout = []
    for axis in range(len(specs[0].axes)):
        used = {entry[0] for entry in layout if entry is not None}
        entries = [entry_of(spec, labels[i], axis) for i, spec in by_size]
        free = [entry for entry in entries if entry is not None and entry[0] not in used]
        layout.append(min(free, key=lambda entry: out is not None and entry[0] not in out, default=None))
    found = {}
    for i, spec in sharded:
        dims, sizes = list(spec.dims), list(spec.sizes)
        for axis, entry in enumerate(layout):
            own = entry_of(spec, labels[i], axis)
            if own is None or own == entry:
                continue
            names = list(labels[i])
            fits = entry is not None and entry[0] in names
            dims[axis] = sizes[axis] = None
            if entry is not None and fits and spec.global_shape[names.index(entry[0])] == sum(entry[1]):
                dims[axis], sizes[axis] = names.index(entry[0]), entry[1]
        if dims != list(spec.dims) or sizes != list(spec.sizes):
            found[i] = spec.derive(spec.global_shape, dims, sizes)
    return found


def entry_of(spec: ShardSpec, names: Labels, axis: int) -> Entry | None:
    """Return the label and sizes that a mesh axis shards; None if it replicates."""
    dim = spec.dims[axis]
    return None if dim is None else (names[dim], spec.sizes_of(axis))


def extents_of(func: TorchFunction, operands: Sequence[Tensor], labels: Sequence[Labels]) -> dict[Hashable, int]:
    """Return the global extent of each label; dims of extent 1 broadcast; raise if extents do not fit."""
    extents: dict[Hashable, int] = {}
    for x, names in zip(operands, labels, strict=True):
        for name, extent in zip(names, x.shape, strict=True):
            if extents.setdefault(name, extent) == 1:
                extents[name] = extent
            elif extent not in (1, extents[name]):
                raise RuntimeError(
                    f"{func.__name__}: the operands' shapes do not fit together: extents {extents[name]} and {extent}"
                )
    return extents


def _without_single(x: Tensor, names: Labels, extents: Mapping[Hashable, int]) -> ShardSpec | None:
    """Return the layout without axes that shard a broadcast dim of extent 1."""
    if not isinstance(x, ShardTensor):
        return None
    spec = x.spec
    single = {a for d, a in spec.sharded.items() if spec.global_shape[d] == 1 and extents[names[d]] != 1}
    if not single:
        return None
    return spec.derive(spec.global_shape, [None if a in single else d for a, d in enumerate(spec.dims)], spec.sizes)


def _moves(x: Tensor, names: list[Hashable], layout: Layout) -> list[Cut]:
    """Return along which mesh axes an operand is replicated that the result is not."""
    return [
        (entry, axis, names.index(entry[0]) if entry[0] in names else None)
        for axis, entry in enumerate(layout)
        if entry is not None and (not isinstance(x, ShardTensor) or x.spec.dims[axis] is None)
    ]


def to_axis(local: Tensor, names: Labels, entry: Entry, spec: ShardSpec, axis: int) -> Tensor:
    """Bring a part that is replicated along a mesh axis to the label and sizes that the axis shards."""
    return _cut(local, names.index(entry[0]) if entry[0] in names else None, entry[1], spec, axis)


def _cut(local: Tensor, dim: int | None, sizes: tuple[int, ...], spec: ShardSpec, axis: int) -> Tensor:
    if dim is not None and local.shape[dim] == sum(sizes):
        if local.layout is not torch.strided:
            return _cut_sparse(local, dim, sizes, spec, axis)
        if local.requires_grad:
            return slice_to_shard(local, sizes, dim, spec.group(axis))
        rank = spec.coordinate(axis)
        return local.narrow(dim, sum(sizes[:rank]), sizes[rank])
    if local.layout is not torch.strided and local.requires_grad:
        local = local.to_sparse().coalesce()
        values = replicate_to_shards(local.values(), [spec.group(axis)])
        return torch.sparse_coo_tensor(local.indices(), values, local.shape, is_coalesced=True)
    return replicate_to_shards(local, [spec.group(axis)]) if local.requires_grad else local


def _cut_sparse(x: Tensor, dim: int, sizes: tuple[int, ...], spec: ShardSpec, axis: int) -> Tensor:
    """Return this rank's rows of a sparse tensor along a dim; the gradients of values are summed over the ranks."""
    rank, x = spec.coordinate(axis), x.to_sparse().coalesce()
    indices, values, start = x.indices(), x.values(), sum(sizes[:rank])
    if dim >= len(indices):  # dense values
        values = _cut(values, dim - len(indices) + 1, sizes, spec, axis)
    else:
        if values.requires_grad:
            values = replicate_to_shards(values, [spec.group(axis)])
        (mine,) = ((indices[dim] >= start) & (indices[dim] < start + sizes[rank])).nonzero(as_tuple=True)
        indices, values = indices[:, mine], values[mine]
        indices = torch.cat([indices[:dim], indices[dim : dim + 1] - start, indices[dim + 1 :]])
    shape = [sizes[rank] if d == dim else n for d, n in enumerate(x.shape)]
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def align_parameters(x: ShardTensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Let plain parameters meet the shards of ``x``: their gradients are summed over its axes.

    Replicated ShardTensors count as plain, sharded ones are gathered (Collective then), None stays None.
    """
    weight, bias = meet_shards([weight, bias], x.spec.shard_groups)
    return weight, bias


def meet_shards(parameters: Sequence[Tensor | None], groups: Sequence[Group]) -> list[Tensor | None]:
    """Like :func:`align_parameters`, for shards along several groups."""
    result: list[Tensor | None] = []
    learned: dict[int, Tensor] = {}
    for i, given in enumerate(parameters):
        each = given
        if isinstance(given, ShardTensor):
            each = given.local if given.spec.is_replicated else given.full_tensor()
        result.append(each)
        if each is not None and each.requires_grad:
            learned[i] = each
    if learned and groups:
        for i, value in zip(learned, replicate_parameters([*learned.values()], groups), strict=True):
            result[i] = value
    return result


def write_to_plain(func: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object]) -> T | ShardTensor:
    """Run a function that writes to its first argument, which every rank holds whole; sharded operands are gathered.

    Collective. Gathered operands have the gradient of that tensor, the same on all ranks.
    """
    target, *others = args
    named = {name: whole(func, x) for name, x in kwargs.items()}
    if type(target) is Tensor:
        find_place(target)
    if not isinstance(target, ShardTensor) or not is_in_place(func):
        return func(*[whole(func, x) for x in args], **named)
    refuse_write_to_copy(func, target)
    func(target.local, *[whole(func, x) for x in others], **named)
    written(target)
    return target


@overload
def whole(func: TorchFunction, value: Tensor) -> Tensor: ...
@overload
def whole(func: TorchFunction, value: object) -> object: ...
def whole(func: TorchFunction, value: object) -> object:
    """Gather a sharded tensor, or those in a sequence; refuse edges whose order is not known. Collective."""
    if isinstance(value, ShardTensor):
        if value.spec.edge_parts is None:
            refuse_disorder(func, value.spec)
        return value.full_tensor()
    if isinstance(value, tuple | list) and any(isinstance(x, ShardTensor) for x in value):
        return type(value)(whole(func, x) for x in value)
    return value


def finish(
    local: Tensor, spec: ShardSpec, *, halo: Mapping[int, HaloDim] | None = None, copied: ViewState | None = None
) -> Tensor:
    """Wrap a result; if it is replicated on all axes, return a plain tensor."""
    return local if spec.is_replicated else ShardTensor(local, spec, halo=halo, copied=copied)


def apart(x: Tensor, source: Tensor) -> Tensor:
    """Rewrap a result that is new in torch: no view or copy of what it was reshaped from, nor in its memory."""
    local = local_of(x)
    local = local.clone() if shares_memory(local, local_of(source)) else local
    return finish(local, x.spec) if isinstance(x, ShardTensor) else local


def on_parts(
    func: TorchFunction,
    compute: TensorFunction,
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    out: Labels,
    extents: Mapping[Hashable, int] | None = None,
) -> Tensor:
    """Apply a function to aligned parts if each rank can compute its own part of the result alone.

    Ids of labels ``["row"]`` and a table of ``["id", "feature"]``, say, give a result of ``["row", "feature"]``: where
    rows are sharded, each rank looks its own ids up. No operand may be sharded along a label that is in no result.

    ``extents`` are of labels of the result that no operand has, or in which it has another extent.
    """
    specs = specs_of(operands)
    if not specs:
        return compute(*operands)
    locals_, layout, known = align(func, operands, labels)
    known = {**known, **(extents or {})}
    return finish(compute(*locals_), spec_of_layout(layout, out, [known[name] for name in out], specs[0]))


def map_local(x: ShardTensor, function: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Apply an elementwise function, also to the halo if the tensor holds one."""
    held = x.held_halo()
    if held is not None:
        padded = function(held)
        return x if padded is held else ShardTensor.from_padded(padded, x.spec, x.halo)
    local = function(x.local)
    if local is x.local:
        return x
    shared = x.copied is not None and shares_memory(local, x.local)
    return ShardTensor(local, x.spec, halo=x.halo, copied=x.copied if shared else None)

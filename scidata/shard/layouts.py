"""Layouts from users' arguments: placements, shapes, parts, DTensors, gradients. Knows no ShardTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scidata.core.bounds import chunk_sizes
from scidata.errors import ShardLayoutError
from scidata.shard.axes import as_sizes, by_axis, kept_spec, mesh_axes
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import DTYPES, MAX_DIMS, Group, group_size, with_dim
from scidata.shard.sizes import ones
from scidata.shard.spec import ShardSpec, Sizes, dim_of

_Sizes: TypeAlias = Sequence[Sequence[int]]
Laid: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]  # shape and strides of parts, none where row-major
Shapes: TypeAlias = Mapping[int, _Sizes] | Mapping[str, _Sizes] | Mapping[int | str, _Sizes]  # of parts, by mesh axis


class Offsets(tuple[int, ...]):
    """Global index of a part's first element along each tensor dim; when called, along each mesh axis, or one."""

    _along: tuple[int, ...]

    def __new__(cls, spec: ShardSpec) -> Offsets:
        """Read them from a layout."""
        self = super().__new__(cls, spec.offsets)
        self._along = tuple(0 if dim is None else spec.offsets[dim] for dim in spec.dims)
        return self

    @overload
    def __call__(self, mesh_dim: None = None) -> tuple[int, ...]: ...

    @overload
    def __call__(self, mesh_dim: int) -> int: ...

    def __call__(self, mesh_dim: int | None = None) -> int | tuple[int, ...]:
        """Return the offsets along all axes of the mesh (0 along replicating ones), or along one axis."""
        return self._along if mesh_dim is None else self._along[mesh_dim]

    def __reduce__(self) -> tuple[type, tuple[object]]:
        return torch.Size, (tuple(self),)  # a tuple that torch.load() takes; plain ones it knows under no name


def with_gradient(x: Tensor, spec: ShardSpec, given: Sequence[Placement] | None, *, whole: bool = False) -> Tensor:
    """Set the layout in which the gradient of a part, or of the whole, arrives: the tensor's, or shares of a sum if
    replicated.

    Collective in backward where there are such shares.
    """
    if given is None:
        return x
    check_layout(x, given)
    if len(given) != len(spec.axes):
        raise ShardLayoutError(
            f"grad_placements={given}: expected one for each of the {len(spec.axes)} axes of the mesh"
        )
    shares = []
    for axis, dim, wanted in zip(spec.axes, spec.dims, given, strict=True):
        own = Replicate() if dim is None or whole else Shard(dim)
        if isinstance(own, Replicate) and type(wanted) is Partial and wanted.reduce_op == "sum":
            shares.append(axis.group)
        elif wanted != own and (dim is None or whole or dim_of(wanted, spec.ndim) != dim):
            raise ShardLayoutError(
                f"axis {axis.name!r}: a gradient of what lies as {own!r} cannot come as {wanted!r}; it comes as "
                "that lies, or where that is Replicate() as Partial()"
            )
    return replicate_to_shards(x, shares)


def add_up(x: Tensor, placement: Partial, group: Group) -> Tensor:
    """Reduce a partial part at once; the gradient of the result is replicated. Collective."""
    if placement.reduce_op not in ("sum", "avg"):
        raise ShardLayoutError(f"{placement!r} is neither a sum nor a mean; reduce it first, by all_reduce")
    total = all_reduce_sum(x, group)
    return total if placement.reduce_op == "sum" else total / group_size(group)


def part_and_spec(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sharding_shapes: str | Shapes,
    global_shape: Sequence[int] | None,
    strides: Sequence[int],
) -> tuple[Tensor, ShardSpec, Laid]:
    """Return a part, partial ones added up, with its spec and the known strides of parts.

    Collective for partial parts, and for ``"infer"``.
    """
    laid: Laid = [(tuple(local.shape), tuple(strides))]
    settled = [Replicate() if type(p) is Partial else p for p in placements]
    if not isinstance(sharding_shapes, str):
        spec = spec_of_shapes(local, mesh, settled, sharding_shapes)
    elif sharding_shapes == "infer":
        spec, laid = infer_spec(local, mesh, settled, strides)
    elif sharding_shapes == "chunk" and global_shape is not None:
        spec = chunked_spec(mesh, settled, global_shape)
    else:
        raise ShardLayoutError(
            f'sharding_shapes must be "infer" or a dict of shapes, or "chunk" with a global_shape, not '
            f"{sharding_shapes!r}"
        )
    for axis, placement in zip(spec.axes, placements, strict=True):
        if type(placement) is Partial:
            local = add_up(local, placement, axis.group)
    return local, spec, laid


def chunked_spec(mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int]) -> ShardSpec:
    """Split as ``torch.chunk`` and DTensors do."""
    shape = tuple(global_shape)

    def make() -> ShardSpec:
        sizes: dict[int | str, Sequence[int]] = {
            i: chunk_sizes(shape[dim], axis.size)
            for i, (axis, placement) in enumerate(zip(mesh_axes(mesh), placements, strict=False))
            if (dim := dim_of(placement, len(shape))) is not None
        }
        return ShardSpec.even(mesh, placements, shape, sizes)

    return kept_spec(mesh, ("chunks", shape, tuple(placements)), make)


def spec_of_dtensor(tensor: DTensor) -> ShardSpec:
    """Return the layout of a DTensor, whose parts are those of ``torch.chunk``."""
    if not isinstance(tensor, DTensor):
        raise ShardLayoutError(f"from_dtensor takes a DTensor, not {type(tensor).__name__}")
    for axis, placement in zip(mesh_axes(tensor.device_mesh), tensor.placements, strict=True):
        if type(placement) not in (Shard, Replicate):
            raise ShardLayoutError(
                f"axis {axis.name!r}: placement {placement!r} has no counterpart; redistribute it to Shard(dim) or "
                "Replicate() first"
            )
    return chunked_spec(tensor.device_mesh, tensor.placements, tensor.shape)


def target_spec(spec: ShardSpec, placements: Sequence[Placement], sizes: Sizes | None) -> ShardSpec:
    """Return the spec for ``placements`` and ``sizes``; sizes are kept if the same dim stays sharded."""
    kept = {
        axis: spec.sizes_of(axis)
        for axis, (dim, new) in enumerate(zip(spec.dims, placements, strict=False))
        if dim is not None and dim_of(new, spec.ndim) == dim
    }
    given: Any = kept | by_axis(sizes or {}, spec.axes, as_sizes)
    return ShardSpec.even(spec.device_mesh, placements, spec.global_shape, given)


def spec_of_shapes(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shapes: Shapes) -> ShardSpec:
    """Make a spec from the explicit local shapes along each mesh axis, checked against the own part."""
    parts = by_axis(shapes, mesh_axes(mesh), lambda given: tuple([tuple(map(index, shape)) for shape in given]))
    key = local.shape, tuple(placements), *parts.items()
    return kept_spec(mesh, key, lambda: _spec_of_shapes(local, mesh, placements, parts))


def _spec_of_shapes(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], parts: Mapping[int, tuple[tuple[int, ...], ...]]
) -> ShardSpec:
    axes = mesh_axes(mesh)
    own, global_shape = tuple(local.shape), list(local.shape)
    sizes: dict[int | str, Sequence[int]] = {}
    for i, (axis, placement) in enumerate(zip(axes, placements, strict=False)):
        dim = dim_of(placement, local.ndim)
        if dim is None:  # it replicates, or is refused below
            continue
        if i not in parts:
            raise ShardLayoutError(f'sharding_shapes has nothing for axis {axis.name!r}; give it, or use "infer"')
        for rank, shape in enumerate(parts[i]):
            if len(shape) != local.ndim or with_dim(shape, dim, 0) != with_dim(own, dim, 0):
                raise ShardLayoutError(
                    f"axis {axis.name!r}: rank {rank} is said to hold {shape}, which differs from the own part {own} "
                    f"in more than the sharded dim {dim}"
                )
        if len(parts[i]) != axis.size or parts[i][axis.rank] != own:
            raise ShardLayoutError(
                f"axis {axis.name!r} has {axis.size} ranks and rank {axis.rank} holds {own}, but sharding_shapes says "
                f"{parts[i]}"
            )
        sizes[i] = [shape[dim] for shape in parts[i]]
        global_shape[dim] = sum(sizes[i])
    return ShardSpec.even(mesh, placements, global_shape, sizes)


def describe(x: Tensor, strides: Sequence[int] = ()) -> Tensor:
    """Encode number of dims, dtype, shape and strides as ``(1, 2 + 14 + 14)`` int64, the rest zeros.

    ``(5, 3)`` of float32, row-major: ``[2, dtype, 5, 3, 0, ..., 0]``. Strides are zeros where it is row-major."""
    if x.ndim > MAX_DIMS:
        raise ShardLayoutError(f"at most {MAX_DIMS} dims can be sharded, not {x.ndim}")
    if x.dtype not in DTYPES:
        raise ShardLayoutError(f"{x.dtype} cannot be told to other ranks; give sharding_shapes, or convert it first")
    row = [x.ndim, DTYPES.index(x.dtype), *x.shape] + [0] * (MAX_DIMS - x.ndim)
    row += [*strides] + [0] * (MAX_DIMS - len(strides))
    return torch.tensor([row], dtype=torch.int64, device=x.device)


def check_layout(tensor: object, placements: object) -> None:
    """Raise if this is no tensor, or placements no sequence; placements are checked together with the sizes."""
    if tensor is not None and not isinstance(tensor, Tensor):
        raise ShardLayoutError(f"expected a tensor, not {type(tensor).__name__}; torch.as_tensor makes one of an array")
    if isinstance(placements, str | Placement) or not isinstance(placements, Sequence):
        raise ShardLayoutError(
            f"placements={placements!r}: expected one for each axis of the mesh, such as [Replicate(), Shard(0)]"
        )


def infer_spec(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], strides: Sequence[int]
) -> tuple[ShardSpec, Laid]:
    """Make a spec from the parts of all ranks; contradictions raise on every rank. Collective.

    On a 2 x 2 mesh, ``[Shard(0), Replicate()]``: parts (3, 7), (3, 7) and (2, 7), (2, 7) make (5, 7). The sizes are
    read along each axis at place 0 of the others, and all parts are compared with those that these sizes imply.
    """
    axes = mesh_axes(mesh)
    table = describe(local, strides)[0]
    for axis in reversed(axes):
        table = all_gather_v(table[None], ones(axis.size), 0, axis.group)
    told = table.cpu().numpy()  # (axis 0 ranks, axis 1 ranks, ..., 30)
    held, steps = told[..., : 2 + MAX_DIMS], told[..., 2 + MAX_DIMS :]
    first = held[(0,) * len(axes)]
    ndim = int(first[0])
    shape = first[2 : 2 + ndim].copy()
    sizes: dict[int | str, Sequence[int]] = {}
    expected = np.broadcast_to(first, held.shape).copy()
    for i, placement in enumerate(placements[: len(axes)]):
        dim = dim_of(placement, ndim)
        if dim is not None:
            along = held[tuple(slice(None) if j == i else 0 for j in range(len(axes)))][:, 2 + dim]
            expected[..., 2 + dim] = along.reshape([-1 if j == i else 1 for j in range(len(axes))])
            sizes[i], shape[dim] = along.tolist(), along.sum()
    if not np.array_equal(held, expected):
        parts = {index: tuple(held[index][2 : 2 + held[index][0]].tolist()) for index in np.ndindex(held.shape[:-1])}
        kinds = sorted({str(DTYPES[i]) for i in held[..., 1].ravel()})
        raise ShardLayoutError(
            f"the local parts do not form one tensor under {tuple(placements)}: shapes by mesh coordinate {parts}, "
            f"dtypes {kinds}; they may differ along the sharded dims only"
        )
    laid: Laid = []
    for at in np.ndindex(held.shape[:-1]) if steps.any() else ():
        own = tuple(steps[at][:ndim].tolist()) if steps[at].any() else ()
        laid.append((tuple(held[at][2 : 2 + ndim].tolist()), own))
    return ShardSpec.even(mesh, placements, shape.tolist(), sizes), laid

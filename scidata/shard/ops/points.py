"""What points read or are measured by: samples of an image at a grid of places, and distances between rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.op_table import register_op
from scidata.shard.ops.align import (
    align,
    bind,
    finish,
    is_sharded,
    local_of,
    replicated,
    spec_of_layout,
    specs_of,
    to_layout,
    whole_along,
)
from scidata.shard.ops.moving import as_sharded
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

# -- grids -----------------------------------------------------------------------------------------------------------


@register_op(F.grid_sample)
def grid_sample(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sample an image at places that may lie anywhere in it: it is gathered, the places stay or become sharded."""
    given = bind("input grid mode padding_mode align_corners", args, kwargs)
    x, grid = given.pop("input"), given.pop("grid")
    shapes, ndim = [tuple(x.shape), tuple(grid.shape)], len(x.shape)
    if ndim not in (4, 5) or len(grid.shape) != ndim or shapes[0][0] != shapes[1][0] or shapes[1][-1] != ndim - 2:
        raise RuntimeError(f"grid_sample: an image {shapes[0]} and a grid {shapes[1]} do not fit")
    if 0 in shapes[0][2:]:
        raise RuntimeError(f"grid_sample: expected an image with pixels, but got {shapes[0]}")
    grid = _split_as_image(x, whole_along(grid, -1))
    for d in range(2, ndim):
        x = whole_along(x, d)
    operands = [x, grid]
    if not any(map(is_sharded, operands)):
        return func(*map(local_of, operands), **given)  # type: ignore[no-any-return]
    places: list[Hashable] = [("out", d) for d in range(2, ndim)]
    labels: list[list[Hashable]] = [["n", "c", *range(2, ndim)], ["n", *places, "xy"]]
    locals_, layout, extents = align(func, operands, labels)
    out = ["n", "c", *places]
    spec = spec_of_layout(layout, out, [extents[name] for name in out], specs_of(operands)[0])
    return finish(func(*locals_, **given), spec)


@register_op(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
def grid_sampler(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Do the same, of modes that are numbers."""
    given = bind("input grid interpolation_mode padding_mode align_corners", args, kwargs)
    mode = ("bilinear", "nearest", "bicubic")[given["interpolation_mode"]]
    padding = ("zeros", "border", "reflection")[given["padding_mode"]]
    return F.grid_sample(given["input"], given["grid"], mode, padding, given["align_corners"])


def _split_as_image(x: Tensor, grid: Tensor) -> Tensor:
    """Split a grid's places along the mesh axes that shard the image's pixels, where nothing else splits it."""
    if not isinstance(x, ShardTensor):
        return grid
    spec = x.spec
    grid = as_sharded(grid, spec)
    old, new = grid.spec, {}
    for d, axis in spec.sharded.items():
        if d > 1 and old.dims[axis] is None and d - 1 not in old.sharded:
            extent = old.global_shape[d - 1]
            alike = spec.sizes_of(axis) if extent == spec.global_shape[d] else None
            new[axis] = d - 1, alike or even_sizes(extent, spec.axes[axis].size)
    dims = [new[a][0] if a in new else d for a, d in enumerate(old.dims)]
    sizes = [new[a][1] if a in new else s for a, s in enumerate(old.sizes)]
    return to_layout(grid, old.derive(old.global_shape, dims, sizes)) if new else grid


@register_op(F.affine_grid)
def affine_grid(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make the grid of each sample's affine map; samples may be sharded."""
    given = bind("theta size align_corners", args, kwargs, align_corners=False)
    theta, size, align_corners = given["theta"], [int(n) for n in given["size"]], bool(given["align_corners"])
    for d in (1, 2):
        theta = whole_along(theta, d)
    matrix = (size[0], len(size) - 2, len(size) - 1)
    if not is_sharded(theta) or tuple(theta.shape) != matrix or len(size) not in (4, 5) or min(size) < 1:
        return func(torch.empty(tuple(theta.shape)) if is_sharded(theta) else local_of(theta), size, align_corners)  # type: ignore[no-any-return]
    local = theta.local
    result = torch.affine_grid_generator(local, [len(local), *size[1:]], align_corners)
    shape = (size[0], *size[2:], len(size) - 2)
    return finish(result, theta.spec.derive(shape, theta.spec.dims, theta.spec.sizes))


# -- distances -------------------------------------------------------------------------------------------------------

_MANY = 25  # rows from which on torch takes Euclidean distances by a product of matrices
_MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@register_op(torch.cdist)
def cdist(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Distances between rows: sharded by the first's rows, or by the second's where only those are."""
    given = bind("x1 x2 p compute_mode", args, kwargs, p=2.0, compute_mode=_MODES[0])
    mode = given["compute_mode"]
    operands = [whole_along(given["x1"], -1), whole_along(given["x2"], -1)]
    if mode is None or mode == _MODES[0]:  # the parts must not decide that by themselves
        mode = _MODES[1] if max(x.shape[-2] for x in operands) > _MANY else _MODES[2]
    ndim = max(len(x.shape) for x in operands)
    if min(len(x.shape) for x in operands) < 2 or operands[0].shape[-1] != operands[1].shape[-1]:
        raise RuntimeError(f"cdist: rows of {tuple(operands[0].shape)} and {tuple(operands[1].shape)} do not fit")
    labels = [_row_labels(x, ndim, name) for x, name in zip(operands, ("p", "r"), strict=True)]
    operands = [operands[0], _beside(operands, labels)]
    if not any(map(is_sharded, operands)):
        return func(*map(local_of, operands), given["p"], mode)  # type: ignore[no-any-return]
    locals_, layout, extents = align(func, operands, labels)
    out = [*range(ndim - 2), "p", "r"]
    spec = spec_of_layout(layout, out, [extents[name] for name in out], specs_of(operands)[0])
    return finish(func(*locals_, given["p"], mode), spec)


def _row_labels(x: Tensor, ndim: int, rows: str) -> list[Hashable]:
    return [*range(ndim - len(x.shape), ndim - 2), rows, "k"]


def _beside(operands: Sequence[Tensor], labels: Sequence[Sequence[Hashable]]) -> Tensor:
    """Gather the second operand along the mesh axes along which the first is sharded otherwise."""
    first, second = operands
    if not isinstance(first, ShardTensor) or not isinstance(second, ShardTensor):
        return second
    mine, theirs = first.spec, second.spec
    held = {labels[0][d] for d in mine.sharded}
    axes = {
        axis
        for d, axis in theirs.sharded.items()
        if (mine.dims[axis] is not None and _entry(mine, axis, labels[0]) != _entry(theirs, axis, labels[1]))
        or (mine.dims[axis] is None and labels[1][d] in held)
    }
    return replicated(second, axes) if axes and mine.device_mesh == theirs.device_mesh else second


def _entry(spec: ShardSpec, axis: int, names: Sequence[Hashable]) -> Any:
    dim = spec.dims[axis]
    return None if dim is None else (names[dim], spec.sizes[axis])


@register_op(F.pdist)
def pdist(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Distances of all pairs of rows, on every rank: the rows are gathered."""
    given = bind("input p", args, kwargs, p=2.0)
    return func(given["input"].full_tensor(), given["p"])  # type: ignore[no-any-return]


@register_op(F.pairwise_distance, any_order=True)
def pairwise_distance(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Distance of each row of one tensor from the row beside it."""
    given = bind("x1 x2 p eps keepdim", args, kwargs, p=2.0, eps=1e-6, keepdim=False)
    difference: Any = given["x1"] - given["x2"] + given["eps"]
    if not len(difference.shape):
        raise RuntimeError("pairwise_distance: expected rows, but got single numbers")
    length: Tensor = torch.linalg.vector_norm(difference, given["p"], -1, given["keepdim"])
    return length

"""Functions of points: samples of an image at a grid of places, and distances between rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.op_table import TensorFunction
from scidata.shard.ops.align import entry_of, is_sharded, local_of, on_parts, plain_of
from scidata.shard.ops.arguments import composes, handles
from scidata.shard.ops.moving import as_sharded, replicated, to_layout, whole_along
from scidata.shard.tensor import ShardTensor

# -- grids -----------------------------------------------------------------------------------------------------------


@handles(F.grid_sample)
def grid_sample(func: TensorFunction, x: Tensor, grid: Tensor, *how: object, **named: object) -> Tensor:
    """Sample an image at arbitrary positions: the image is gathered, positions stay or become sharded."""
    shapes, ndim = [tuple(x.shape), tuple(grid.shape)], len(x.shape)
    if ndim not in (4, 5) or len(grid.shape) != ndim or shapes[0][0] != shapes[1][0] or shapes[1][-1] != ndim - 2:
        raise RuntimeError(f"grid_sample: an image {shapes[0]} and a grid {shapes[1]} do not fit")
    if 0 in shapes[0][2:]:
        raise RuntimeError(f"grid_sample: expected an image with pixels, but got {shapes[0]}")
    grid = _split_as_image(x, whole_along(grid, -1))
    for d in range(2, ndim):
        x = whole_along(x, d)
    places: list[Hashable] = [("out", d) for d in range(2, ndim)]
    labels = [["n", "c", *range(2, ndim)], ["n", *places, "xy"]]

    def compute(image: Tensor, grid: Tensor) -> Tensor:
        return func(image, grid, *how, **named)

    return on_parts(func, compute, [x, grid], labels, ["n", "c", *places])


def _split_as_image(x: Tensor, grid: Tensor) -> Tensor:
    """Split a grid of positions along the mesh axes that shard the image's pixels, unless it is split already."""
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


@handles(F.affine_grid)
def affine_grid(func: TensorFunction, theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Make the grid of each sample's affine map; samples may be sharded."""
    size, corners = [int(n) for n in size], bool(align_corners)
    for d in (1, 2):
        theta = whole_along(theta, d)
    matrix = (size[0], len(size) - 2, len(size) - 1)
    if not is_sharded(theta) or tuple(theta.shape) != matrix or len(size) not in (4, 5) or min(size) < 1:
        return func(torch.empty(tuple(theta.shape)) if is_sharded(theta) else local_of(theta), size, corners)
    local, spec = theta.local, theta.spec
    result = torch.affine_grid_generator(local, [len(local), *size[1:]], corners)
    return ShardTensor(result, spec.derive((size[0], *size[2:], len(size) - 2), spec.dims, spec.sizes))


# -- distances -------------------------------------------------------------------------------------------------------

_MANY = 25  # rows from which on torch takes Euclidean distances by a product of matrices
_MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@handles(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Distances between rows: sharded by the first operand's rows, or by the second's if only these are sharded."""
    operands = [whole_along(x1, -1), whole_along(x2, -1)]
    if compute_mode is None or compute_mode == _MODES[0]:  # the parts must not decide that by themselves
        compute_mode = _MODES[1] if max(x.shape[-2] for x in operands) > _MANY else _MODES[2]
    ndim = max(len(x.shape) for x in operands)
    if min(len(x.shape) for x in operands) < 2 or operands[0].shape[-1] != operands[1].shape[-1]:
        raise RuntimeError(f"cdist: rows of {tuple(operands[0].shape)} and {tuple(operands[1].shape)} do not fit")
    row = local_of(operands[0])
    if row.itemsize < 4 and all(x.numel() for x in operands):  # torch refuses such, but not of no rows
        torch.cdist(row.new_zeros(1, 1), row.new_zeros(1, 1))
    labels: list[list[Hashable]] = [
        [*range(ndim - len(x.shape), ndim - 2), rows, "k"] for x, rows in zip(operands, ("p", "r"), strict=True)
    ]
    operands = [operands[0], _beside(operands, labels)]
    out = [*range(ndim - 2), "p", "r"]
    return on_parts(torch.cdist, lambda x, y: torch.cdist(x, y, p, compute_mode), operands, labels, out)


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
        if (mine.dims[axis] is not None and entry_of(mine, labels[0], axis) != entry_of(theirs, labels[1], axis))
        or (mine.dims[axis] is None and labels[1][d] in held)
    }
    return replicated(second, axes) if axes and mine.device_mesh == theirs.device_mesh else second


_SAMPLING, _PADDING = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")

composes(
    {
        F.pdist: lambda input, p=2.0: F.pdist(plain_of(input), p),  # of all pairs, on every rank
        (
            torch.grid_sampler,
            torch.grid_sampler_2d,
            torch.grid_sampler_3d,
        ): lambda input, grid, sampling, padding, corners: F.grid_sample(
            input, grid, _SAMPLING[sampling], _PADDING[padding], corners
        ),
    }
)

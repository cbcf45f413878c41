"""A tensor that one rank has, split over a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from scidata.errors import ShardLayoutError
from scidata.shard import layouts
from scidata.shard.spec import Sizes
from scidata.shard.tensor import ShardTensor


def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sizes: Sizes | None = None,
) -> ShardTensor:
    """Split the tensor of one rank over a mesh. Collective; no gradient flows back to the source.

    Parameters
    ----------
    mesh, placements
        The domain axes, and ``Shard(dim)`` or ``Replicate()`` for each.
    tensor
        The whole tensor on ``global_src``; ignored elsewhere.
    global_src
        Global rank of the source, part of ``mesh``.
    global_shape, dtype
        Checked against what the source sends, where given.
    requires_grad
        Whether the result is a leaf that requires grad.
    sizes
        ``{mesh axis: sizes}``; even by default.

    Raises
    ------
    ShardLayoutError
        The source is not in the mesh, or shape, dtype or sizes do not fit.
    """
    local, spec = layouts.scatter(tensor, global_src, mesh, placements, sizes)
    if global_shape is not None and tuple(global_shape) != spec.global_shape:
        raise ShardLayoutError(f"rank {global_src} sent shape {spec.global_shape}, not {tuple(global_shape)}")
    if dtype is not None and dtype != local.dtype:
        raise ShardLayoutError(f"rank {global_src} sent dtype {local.dtype}, not {dtype}")
    return ShardTensor(local.requires_grad_(requires_grad), spec)

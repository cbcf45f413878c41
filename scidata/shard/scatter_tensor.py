"""A tensor that one rank has, split over a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from scidata.core.keywords import checked_keywords
from scidata.device_mesh.devices import current_device
from scidata.errors import ShardLayoutError
from scidata.shard.axes import mesh_axes
from scidata.shard.comm.rooted import scattered
from scidata.shard.comm.transport import DTYPES, MAX_DIMS, broadcast, with_dim
from scidata.shard.layouts import check_layout, describe
from scidata.shard.memory import laid_out, own_strides
from scidata.shard.spec import ShardSpec, Sizes, Strides
from scidata.shard.tensor import ShardTensor


@checked_keywords
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
    mesh, placements : DeviceMesh or Sequence[Placement]
        The domain axes, and ``Shard(dim)`` or ``Replicate()`` for each.
    tensor : Tensor or None
        The whole tensor on ``global_src``; ignored elsewhere.
    global_src : int
        Global rank of the source, part of ``mesh``.
    global_shape, dtype : Sequence[int] or torch.dtype or None
        Compared with the source's, where given.
    requires_grad : bool, default False
        Whether the result is a leaf that requires grad.
    sizes : Mapping[int, Sequence[int]] or None, optional
        ``{mesh axis: sizes}``; even by default.

    Raises
    ------
    ShardLayoutError
        The source is not in the mesh, or shape, dtype or sizes do not fit.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> whole = torch.arange(5.0) if mesh.get_rank() == 0 else None
    >>> x = scidata.scatter_tensor(whole, 0, mesh["domain"], [Shard(0)])
    >>> x.sharding_shapes(), x.sum()
    ({0: (torch.Size([3]), torch.Size([2]))}, tensor(10.))
    """
    local, spec, strides = _scattered(tensor, global_src, mesh, placements, sizes)
    if global_shape is not None and tuple(global_shape) != spec.global_shape:
        raise ShardLayoutError(f"rank {global_src} sent shape {spec.global_shape}, not {tuple(global_shape)}")
    if dtype is not None and dtype != local.dtype:
        raise ShardLayoutError(f"rank {global_src} sent dtype {local.dtype}, not {dtype}")
    return ShardTensor(local, spec, global_strides=strides or None).requires_grad_(requires_grad)


def _scattered(
    tensor: Tensor | None, global_src: int, mesh: DeviceMesh, placements: Sequence[Placement], sizes: Sizes | None
) -> tuple[Tensor, ShardSpec, Strides]:
    """Split one rank's tensor: along axis 0 in the source's slice of the mesh, then axis 1 and so on. Collective.

    On a 2 x 2 mesh with the source at (0, 1): along axis 0, (0, 1) sends to (1, 1); then along axis 1, (0, 1) to
    (0, 0) and (1, 1) to (1, 0). Its strides come along, none where it is row-major.
    """
    axes = mesh_axes(mesh)
    check_layout(tensor, placements)
    found = [] if isinstance(global_src, str) else (mesh.mesh == global_src).nonzero().tolist()
    if not found:
        raise ShardLayoutError(f"global_src={global_src!r} is not in the device mesh {mesh.mesh.tolist()}")
    source = found[0]
    takes_part = [[axis.rank for axis in axes[i + 1 :]] == source[i + 1 :] for i in range(len(axes))]
    device = current_device(mesh.device_type)
    whole, header = None, torch.zeros(2 + 2 * MAX_DIMS, dtype=torch.int64, device=device)
    if dist.get_rank() == global_src:
        if tensor is None:
            raise ShardLayoutError("this rank is the source of scatter_tensor and must pass a tensor, not None")
        whole = tensor.detach().to(device)
        header = describe(whole, own_strides(whole))[0]
    for i, axis in enumerate(axes):
        if takes_part[i]:
            broadcast(header, source[i], axis.group)
    ndim, dtype, *extents = header.tolist()
    strides = tuple(extents[MAX_DIMS : MAX_DIMS + ndim])
    spec = ShardSpec.even(mesh, placements, extents[:ndim], sizes)
    part = torch.empty(0, dtype=DTYPES[dtype], device=device) if whole is None else whole
    shape = list(spec.global_shape)
    for i, axis in enumerate(axes):
        dim, holds = spec.dims[i], axis.rank == source[i]
        if takes_part[i] and dim is None:
            part = part.contiguous() if holds else part.new_empty(shape)
            broadcast(part, source[i], axis.group)
        elif takes_part[i] and dim is not None:
            rows = part if holds else part.new_empty(with_dim(shape, dim, 0))
            part = scattered(rows, spec.sizes_of(i), dim, source[i], axis.group)
        if dim is not None:
            shape[dim] = spec.sizes_of(i)[axis.rank]
    part = part.detach().clone()
    if not any(strides):
        return part, spec, ()
    return laid_out(part, strides) if spec.is_replicated else part, spec, strides

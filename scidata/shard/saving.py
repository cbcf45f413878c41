"""Save and copy ShardTensors: each rank saves its part and the layout, and loads it in a run with the same mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Parameter

from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard.base import ShardBase
from scidata.shard.rows.runs import owned_of
from scidata.shard.spec import UNKNOWN, HaloDim, ShardSpec, Strides

T = TypeVar("T", bound=ShardBase)


def saved(x: ShardBase, kind: type[ShardBase]) -> tuple[object, ...]:
    """Describe a part as ``__reduce_ex__`` does, in values that ``torch.load(weights_only=True)`` takes."""
    x.refresh()
    spec = x.spec
    if type(x) is not kind or spec.exchange is not None:
        raise UnsupportedShardOp(f"tensors of a graph's edges are not saved; save the sample's own ({spec})")
    held = x.held_halo()
    part = x.local if held is None else held
    halo = None if held is None else {dim: vars(each) for dim, each in x.halo.items()}
    layout = spec.device_mesh, spec.global_shape, spec.dims, spec.sizes
    memory = "unknown" if x.global_strides is UNKNOWN else x.global_strides
    flags = bool(x.requires_grad), isinstance(x, Parameter)
    return load_part, (kind, part.detach(), *layout, dist.get_rank(), halo, memory, *flags)


def load_part(
    kind: type[T],
    part: Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    dims: Sequence[int | None],
    sizes: Sequence[Sequence[int] | None],
    rank: int,
    halo: Mapping[int, Mapping[str, Any]] | None,
    memory: str | Strides | None,
    requires_grad: bool,
    is_parameter: bool = False,
) -> T:
    """Wrap a part again; no communication.

    Raises ShardLayoutError: another rank's part, or a run without such a mesh.
    """
    _check_mesh(mesh, rank)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    spec = ShardSpec.even(mesh, placements, shape, {a: own for a, own in enumerate(sizes) if own is not None})
    widths = {} if halo is None else {dim: HaloDim(**each) for dim, each in halo.items()}
    local = part if halo is None else owned_of(part, spec, widths)
    strides = UNKNOWN if isinstance(memory, str) else memory
    result = kind(local, spec, padded=None if halo is None else part, halo=widths, global_strides=strides)
    result.local.requires_grad_(requires_grad)
    if is_parameter:
        result._is_param = True  # as torch.nn.Parameter marks it
    return result


def _check_mesh(mesh: DeviceMesh, rank: int) -> None:
    if not dist.is_initialized():
        raise ShardLayoutError("a part of a ShardTensor is loaded before init_mesh(); call that first")
    if dist.get_rank() != rank:
        raise ShardLayoutError(f"rank {dist.get_rank()} loads the part of rank {rank}; each rank loads what it saved")
    (own,) = (mesh.mesh == rank).nonzero().tolist()
    for i in range(mesh.ndim):
        along = mesh.mesh[tuple(slice(None) if j == i else place for j, place in enumerate(own))].tolist()
        try:
            found = dist.get_process_group_ranks(mesh.get_group(i))
        except (RuntimeError, KeyError, ValueError):
            found = []
        if found != along:
            raise ShardLayoutError(
                f"a part saved on the mesh {mesh} is loaded in a run without its axis {i} over ranks {along}; make the "
                "same mesh first, or save full_tensor() and scatter it"
            )

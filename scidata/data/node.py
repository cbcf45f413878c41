"""The ranks that share this node, and this rank's share of its memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.memory import available_memory
from scidata.device_mesh import domain_mesh, further_axes
from scidata.device_mesh.board import common_postings
from scidata.device_mesh.launch import ranks_per_node
from scidata.grids.blocks.node_shares import NodeRanks

_SHARE = 8  # decoded rows get 1/8 of the available memory


def memory_share(num_ranks: int | None = None) -> int:
    """Return the default bytes of decoded rows for one of ``num_ranks`` ranks: its part of 1/8 of free memory."""
    if num_ranks is None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return available_memory() // _SHARE // ranks_per_node(os.environ, num_ranks)


def node_ranks(mesh: DeviceMesh | None, axes: Sequence[str], dp: str | None = None) -> NodeRanks | None:
    """Return the ranks of this rank's domain on its node; None if there is no other.

    Includes ranks that read the same part, along an axis of ensemble members for example, but no other parallelism.
    """
    same = () if mesh is None or dp is None else further_axes(mesh, (dp, *axes))
    if mesh is None or not (*axes, *same):
        return None
    shared = domain_mesh(mesh, (*axes, *same))
    domain, names = shared.mesh, shared.mesh_dim_names or ()
    count, rank = ranks_per_node(os.environ, dist.get_world_size()), dist.get_rank()
    here = [
        (other, {axis: row for axis, row in zip(names, place, strict=True) if axis in axes})
        for other, place in zip(domain.flatten().tolist(), (domain >= 0).nonzero().tolist(), strict=True)
        if other // count == rank // count
    ]
    if len(here) < 2:
        return None
    # the first caller names the job, since the user may have other jobs on this node
    job = common_postings().claim("job", uuid.uuid4().hex)
    ranks = [other for other, _ in here]
    return NodeRanks(
        name=repr((job, ranks)),
        coordinates=tuple(place for _, place in here),
        me=ranks.index(rank),
        max_bytes=memory_share() * count,
    )

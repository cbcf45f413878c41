"""Weights made equal along one axis of a mesh, by the name that PhysicsNeMo has for it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError
from scidata.shard.comm.agreement import check_agreement
from scidata.shard.comm.transport import as_bytes, broadcast
from scidata.shard.tensor import ShardTensor


@checked_keywords
def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Overwrite a module's parameters and buffers by those of one rank of a mesh axis. Collective.

    :func:`scidata.parallelize` does so over all axes by itself. DTensors and ShardTensors are left as they are.

    Parameters
    ----------
    module : Module
        Changed in place.
    mesh : DeviceMesh
        One axis: ``mesh["domain"]``.
    src_mesh_rank : int, default 0
        Place along the axis of the rank that sends its values to all.
    verify : bool, default False
        Also compare the values afterwards.

    Raises
    ------
    ConfigError
        A mesh of several axes, a place that it does not have, no plain parameters among others; tensors that differ
        between ranks in name, shape or dtype, on every rank.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> model = torch.nn.Linear(2, 2)
    >>> _ = torch.nn.init.constant_(model.weight, mesh.get_rank())
    >>> scidata.sync_module_over_mesh(model, mesh["domain"], verify=True)
    >>> model.weight.sum().item()
    0.0
    """
    if mesh.ndim != 1:
        raise ConfigError(f"sync_module_over_mesh takes one axis of a mesh, such as mesh['domain'], not {mesh}")
    if not 0 <= src_mesh_rank < mesh.size():
        raise ConfigError(f"src_mesh_rank={src_mesh_rank} is not among the {mesh.size()} ranks of the axis")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = {name: x for name, x in tensors.items() if not isinstance(x, DTensor | ShardTensor)}
    if tensors and not plain:
        raise ConfigError("all parameters are distributed tensors; call sync_module_over_mesh before they are")
    check_agreement("the module", {n: (x.dtype, tuple(x.shape)) for n, x in plain.items()}, mesh, (0,))
    with torch.no_grad():
        for x in plain.values():
            broadcast(x, src_mesh_rank, mesh.get_group())
    if verify:
        check_agreement("the module's values", {n: _digest(x) for n, x in plain.items()}, mesh, (0,))


def _digest(x: Tensor) -> str:
    return hashlib.sha256(as_bytes(x).cpu().numpy().tobytes()).hexdigest()

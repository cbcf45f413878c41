"""Buffers that change in training, such as running statistics, kept the same on all ranks; weights made equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError
from scidata.shard.comm.agreement import check_agreement
from scidata.shard.comm.transport import Group, as_bytes, broadcast, once
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import buffers_of, version_of


class ChangingBuffers:
    """Sends the first rank's buffers to the others, those that have changed since the last time.

    All ranks change the same ones, as they run the same program.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._places = [(module, name) for module in model.modules() for name in buffers_of(module)]
        self._seen = self._versions()

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = [buffers_of(module).get(name) for module, name in self._places]
        return [(buffer, -1 if buffer is None else version_of(buffer)) for buffer in buffers]

    @torch.no_grad()
    def send(self) -> None:
        """Make them equal. Collective if any has changed: one broadcast an axis."""
        found = self._versions()
        changed = {
            id(buffer): buffer
            for (buffer, version), (before, seen) in zip(found, self._seen, strict=True)
            if type(buffer) in (Tensor, nn.Buffer) and (buffer is not before or version != seen)
        }
        buffers = [once(buffer) for buffer in changed.values() if buffer is not None and buffer.numel()]
        if buffers:
            packed = torch.cat([as_bytes(buffer) for buffer in buffers])
            for group in self._groups:
                broadcast(packed, 0, group)
            parts = torch.split(packed, [buffer.numel() * buffer.element_size() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # cloned: bytes lie at odd offsets
        self._seen = self._versions()


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

"""``parallelize``: one model on a dp × domain mesh, its weights equal on all ranks and its gradients exact.

Over the domain nothing has to be done in backward: parameters that meet a shard have their gradient summed over the
domain by ``replicate_to_shards``, so each domain rank holds the full gradient of its sample. What remains is the mean
over the dp axis, which is DistributedDataParallel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from scidata.device_mesh import axes_of, axis_size
from scidata.errors import ConfigError, near_matches
from scidata.shard._transport import broadcast
from scidata.shard.agreement import check_agreement

__all__ = ["parallelize"]

_STRATEGIES = ("ddp",)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    strategy: str = "ddp",
    dp: str | None = "dp",
    domain: str | Sequence[str] | None = None,
) -> nn.Module:
    """Make the weights equal on all ranks, and keep them so. Collective.

    Parameters and buffers are taken from the first rank of the mesh. Gradients are those of one process on whole
    samples, averaged over the dp axis.

    Parameters
    ----------
    model
        On the mesh's device, its parameters plain tensors; changed in place.
    mesh
        None returns the model as it is.
    strategy
        ``"ddp"``: every rank holds all parameters.
    dp, domain
        Axis names, as in :func:`~scidata.device_mesh.axes_of`.

    Returns
    -------
    nn.Module
        A ``DistributedDataParallel`` of the model (which is its ``.module``), or the model itself where the dp axis
        has one rank.

    Raises
    ------
    ConfigError
        Unknown strategy, parameters on another device or not initialised, or that differ between ranks in name,
        shape or dtype; the latter on every rank.
    """
    if strategy not in _STRATEGIES:
        hint = " (planned, not built yet)" if strategy == "fsdp" else ""
        raise ConfigError(f"strategy must be 'ddp', not {strategy!r}{hint}{near_matches(strategy, _STRATEGIES)}")
    if mesh is None:
        return model
    dp_axis, domain_axes = axes_of(mesh, dp=dp, domain=domain)
    dp_axes = (dp_axis,) if dp_axis is not None else ()
    tensors = dict(_named_tensors(model))
    check_agreement("the model", {n: _describe(t) for n, t in tensors.items()}, mesh, (*dp_axes, *domain_axes))
    for name, tensor in tensors.items():
        _check(name, tensor, mesh.device_type)
    # Axis after axis: each rank ends with the weights of the mesh's first rank.
    for axis in (*dp_axes, *domain_axes):
        group = mesh.get_group(axis)
        for tensor in tensors.values():
            broadcast(tensor, 0, group)
    if axis_size(mesh, dp_axis) == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    assert dp_axis is not None
    # No device_ids: inputs are on their device already, and DDP would scatter them otherwise.
    return DistributedDataParallel(model, process_group=mesh.get_group(dp_axis), init_sync=False)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    grad = "" if tensor.requires_grad else ", no gradient"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}{grad}"


def _check(name: str, tensor: Tensor, device_type: str) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"parameter {name!r} is not initialised; run the lazy module once before parallelize")
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise ConfigError(f"parameter {name!r} is a {type(tensor).__name__}; parallelize takes plain parameters")
    if tensor.device.type != device_type:
        raise ConfigError(
            f"parameter {name!r} is on {tensor.device}, but the mesh communicates on {device_type}; move the model "
            f"with .to({device_type!r}) first"
        )
    if device_type == "cuda" and tensor.device.index != torch.cuda.current_device():
        raise ConfigError(
            f"parameter {name!r} is on {tensor.device}, but this rank's GPU is {torch.cuda.current_device()}; move the "
            "model with .to('cuda') after init_mesh"
        )

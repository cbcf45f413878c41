"""``parallelize``: one model on a dp × domain mesh, its weights equal on all ranks and its gradients exact.

The gradient of one process is a sum over the shards of the domain, averaged over dp. Both are done at once, by one mean
over all ranks of both: see ``scidata/shard/comm/sums.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from scidata.core.checks import check_int
from scidata.core.keywords import checked_keywords
from scidata.device_mesh import axes_of, axis_size
from scidata.device_mesh.devices import current_device
from scidata.errors import ConfigError, near_matches
from scidata.shard.comm.agreement import check_agreement
from scidata.shard.comm.sums import defer
from scidata.shard.comm.transport import broadcast
from scidata.shard.compile.of_torch import take_over
from scidata.shard.parallel.buckets import BUCKETS, GradientBuckets, part_of
from scidata.shard.parallel.buffers import ChangingBuffers
from scidata.shard.parallel.spectral import cut_zeros
from scidata.shard.torch_internals import compiled_from, flatten_mesh, keep_out_of_graphs

_Model = TypeVar("_Model", bound=nn.Module)

_STRATEGIES = ("ddp", "fsdp")


@checked_keywords
def parallelize(
    model: _Model,
    mesh: DeviceMesh | None,
    *,
    strategy: str = "ddp",
    dp: str | None = "dp",
    domain: str | Sequence[str] | None = None,
    bucket_bytes: int = 25 * 2**20,
    units: Sequence[type[nn.Module]] | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
) -> _Model:
    """Make the weights equal on all ranks, and keep them so. Collective.

    Parameters and buffers are taken from the first rank of the mesh. After ``backward()`` the gradients are those of
    one process on whole samples, averaged over the dp axis: clipping, scaling for mixed precision and optimizers are
    written as for one process. Wrap the backward passes of all but the last of several micro-batches in
    :func:`no_sync`. Buffers that a training step changes are afterwards those of the first rank.

    Gradients taken by ``torch.autograd.grad`` are those of this dp rank's own samples.

    Layers of the name ``SpectralConv…``, as PhysicsNeMo and neuraloperator have them, cut the zeros that they put their
    modes among like the spectrum, so that each rank computes its own rows.

    For tensor parallelism on another axis of the mesh, call torch's ``parallelize_module`` first: its DTensors stay
    split along that axis, as do their gradients, and plain parameters are made the same along it.

    A model may be the module of torch's ``PipelineStage``, which is made afterwards: docs/howto/pipeline_stages.md.

    Parameters
    ----------
    model : Module
        On the mesh's device, its parameters plain tensors, or DTensors of ``parallelize_module``; changed in place. All
        parameters to be trained require grad; some may be frozen later.
    mesh : DeviceMesh or None
        None returns the model as it is.
    strategy : str, default "ddp"
        ``"ddp"``: every rank holds all parameters, which stay plain tensors. Gradients are averaged in buckets while
        backward goes on. Parameters that no rank used keep ``grad=None``. Every backward pass has to reach one
        parameter or more on every rank.

        ``"fsdp"``: FSDP2's ``fully_shard`` over the dp axis: parameters, their gradients and an optimizer's moments are
        DTensors, of which each dp rank holds a part. Make the optimizer afterwards. Ranks use the same parameters.
    dp, domain : str or Sequence[str] or None
        Axis names, as in :func:`~scidata.device_mesh.axes_of`.
    bucket_bytes : int, default 25 * 2 ** 20
        Size of a bucket of ``"ddp"``, bytes.
    units : Sequence[type[Module]] or None, optional
        For ``"fsdp"``, classes of modules that are gathered and freed as one. Default: the entries of ``ModuleList``
        and ``Sequential`` that hold a MiB of parameters or more.
    fsdp_options : Mapping[str, Any] or None, optional
        More arguments for ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, ``offload_policy``.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    ConfigError
        Unknown strategy, a model that was parallelized before, parameters on another device or not initialised, or
        that differ between ranks in name, shape or dtype; the latter on every rank. ``"fsdp"`` without a dp axis, with
        a parameter that has no dims, or units that share parameters with others.

    Examples
    --------
    On each of two ranks:

    >>> from torch.distributed.tensor import Shard
    >>> mesh = scidata.init_mesh(domain=2)
    >>> _ = torch.manual_seed(mesh.get_rank())
    >>> model = scidata.parallelize(torch.nn.Linear(4, 1, bias=False), mesh)  # weights are those of rank 0
    >>> x = scidata.scatter_tensor(torch.ones(5, 4), 0, mesh["domain"], [Shard(0)])
    >>> model(x).sum().backward()
    >>> model.weight.grad  # of all five rows, on each rank
    tensor([[5., 5., 5., 5.]])
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}: parallelize(model, mesh)")
    if strategy not in _STRATEGIES:
        raise ConfigError(f"strategy must be 'ddp' or 'fsdp', not {strategy!r}{near_matches(strategy, _STRATEGIES)}")
    if strategy != "fsdp" and (units is not None or fsdp_options):
        raise ConfigError("units and fsdp_options are for strategy='fsdp'")
    bucket_bytes = check_int("bucket_bytes", bucket_bytes, least=1)
    if mesh is None:
        return model
    keep_out_of_graphs(load=True)
    take_over(model)
    dp_axis, domain_axes = axes_of(mesh, dp=dp, domain=domain)
    axes = (*(() if dp_axis is None else (dp_axis,)), *domain_axes)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_agreement("the model", {n: _describe(t) for n, t in tensors.items()}, mesh, axes)
    if model in BUCKETS:
        raise ConfigError("the model was parallelized before; call parallelize once, on a model of plain parameters")
    for name, tensor in tensors.items():
        _check(name, tensor, mesh.device_type)
    # Axis after axis: each rank ends with the weights of the mesh's first rank.
    groups = [mesh.get_group(axis) for axis in axes]
    beside = _axes_beside(tensors, mesh, axes, strategy)
    for tensor in tensors.values():
        is_split = isinstance(tensor, DTensor)
        for group in (*groups, *(() if is_split else map(mesh.get_group, beside))):
            broadcast(part_of(tensor), 0, group)
    if any(axis_size(mesh, axis) > 1 for axis in domain_axes):
        cut_zeros(model)
    if math.prod(axis_size(mesh, axis) for axis in (*axes, *beside)) < dist.get_world_size():
        from scidata.shard.parallel.pipeline import serve_stages  # torch's pipelining takes its time to import

        serve_stages(model, mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    if strategy == "fsdp":
        _fsdp(model, mesh, dp_axis, domain_axes, units, fsdp_options or {}, ChangingBuffers(model, groups))
    elif trained and any(axis_size(mesh, axis) > 1 for axis in axes):
        buffers = ChangingBuffers(model, groups)
        group = _joint_group(mesh, axes)
        BUCKETS[model] = GradientBuckets(dict(model.named_parameters()), group, bucket_bytes, buffers.send)
        for parameter in trained:
            defer(parameter, [mesh.get_group(axis) for axis in domain_axes])
    return model


def _fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    dp_axis: str | None,
    domain_axes: Sequence[str],
    units: Sequence[type[nn.Module]] | None,
    options: Mapping[str, Any],
    buffers: ChangingBuffers,
) -> None:
    from scidata.shard.parallel.fsdp import shard_fully  # FSDP takes its time to import

    if dp_axis is None:
        raise ConfigError("strategy='fsdp' shards over the dp axis, and the mesh has none; use strategy='ddp'")
    if not any(True for _ in model.parameters()):
        return
    dp_group, replicas = mesh.get_group(dp_axis), [a for a in domain_axes if axis_size(mesh, a) > 1]
    if not replicas:
        shard_fully(model, mesh[dp_axis] if mesh.ndim > 1 else mesh, (), units, options, buffers)
        return
    part = mesh[(dp_axis, *replicas)] if set(mesh.mesh_dim_names or ()) != {dp_axis, *replicas} else mesh
    names = part.mesh_dim_names or ()
    ranks = part.mesh.movedim(names.index(dp_axis), -1).flatten(0, -2)
    both = DeviceMesh.from_group(
        [_joint_group(mesh, replicas), dp_group], mesh.device_type, ranks, mesh_dim_names=("domain", dp_axis)
    )
    shard_fully(model, both, [mesh.get_group(axis) for axis in replicas], units, options, buffers)


def _joint_group(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """Return the group of all ranks along several axes; it is made if there is none yet. Collective."""
    long = [axis for axis in axes if axis_size(mesh, axis) > 1] or list(axes[:1])
    if len(long) == 1:
        return mesh.get_group(long[0])
    if math.prod(axis_size(mesh, axis) for axis in long) == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    return flatten_mesh(mesh[tuple(long)]).get_group()


@checked_keywords
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Let the gradients of backward passes inside add up on each rank, for the next one outside to average.

    For gradient accumulation: all micro-batches but the last. Inside, ``.grad`` means nothing yet. Does nothing for a
    model without other ranks.

    Parameters
    ----------
    model : Module
        The result of :func:`parallelize`, compiled or not.

    Raises
    ------
    ConfigError
        The argument is no module.

    Examples
    --------
    On each of two ranks, with two micro-batches:

    >>> from torch.distributed.tensor import Shard
    >>> mesh = scidata.init_mesh(domain=2)
    >>> model = scidata.parallelize(torch.nn.Linear(4, 1, bias=False), mesh)
    >>> x = scidata.scatter_tensor(torch.ones(5, 4), 0, mesh["domain"], [Shard(0)])
    >>> with scidata.no_sync(model):
    ...     model(x).sum().backward()
    >>> model(x).sum().backward()  # averages the sums
    >>> model.weight.grad
    tensor([[10., 10., 10., 10.]])
    """
    own = compiled_from(model)
    if not isinstance(own, nn.Module):
        raise ConfigError(f"no_sync takes the model that parallelize returned, not {type(own).__name__}")
    buckets = BUCKETS.get(own)
    if buckets is not None:
        return buckets.put_off()
    switch = getattr(own, "set_requires_gradient_sync", None)
    return nullcontext() if switch is None else _switched_off(switch)


@contextmanager
def _switched_off(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _axes_beside(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh, axes: Sequence[str], strategy: str
) -> tuple[str, ...]:
    """Return the axes of tensor parallelism: plain parameters are the same along them, DTensors are split."""
    found: dict[str, None] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        own = tensor.device_mesh.mesh_dim_names or ()
        if strategy != "ddp" or not own or not {*own} <= {*(mesh.mesh_dim_names or ())} - {*axes}:
            raise ConfigError(
                f"parameter {name!r} is a DTensor on {tensor.device_mesh}; parallelize takes plain parameters, and for "
                "strategy='ddp' those of parallelize_module, on axes of this mesh that are neither dp nor domain"
            )
        found.update(dict.fromkeys(own))
    return tuple(found)


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    grad = "" if tensor.requires_grad else ", no gradient"
    grad += f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}{grad}"


def _check(name: str, tensor: Tensor, device_type: str) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"parameter {name!r} is not initialised; run the lazy module once before parallelize")
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, DTensor):
        raise ConfigError(f"parameter {name!r} is a {type(tensor).__name__}; parallelize takes plain parameters")
    if tensor.device.type != device_type:
        raise ConfigError(
            f"parameter {name!r} is on {tensor.device}, but the mesh communicates on {device_type}; move the model "
            f"with .to({device_type!r}) first"
        )
    if tensor.device.index is not None and tensor.device != (own := current_device(device_type)):
        raise ConfigError(
            f"parameter {name!r} is on {tensor.device}, but this rank's device is {own}; move the model with "
            f".to({device_type!r}) after init_mesh"
        )

"""FSDP2 on models whose modules hand ShardTensors to each other.

``fully_shard`` hooks into the tensors that enter and leave a module, by autograd functions that would compute on a
ShardTensor itself. So between FSDP's hooks and the module's, a ShardTensor travels as its local part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from scidata.errors import ConfigError
from scidata.shard.comm.sums import defer
from scidata.shard.parallel.buffers import ChangingBuffers
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import backward_pass

_UNIT_BYTES = 2**20  # smaller blocks are gathered together with the modules around them


class _Carrier(NamedTuple):
    """A ShardTensor on its way through FSDP's hooks, which look into named tuples."""

    local: Tensor
    rebuild: Callable[[Tensor], ShardTensor]


def shard_fully(
    model: nn.Module,
    mesh: DeviceMesh,
    domain_groups: Sequence[dist.ProcessGroup],
    units: Sequence[type[nn.Module]] | None,
    options: Mapping[str, Any],
    buffers: ChangingBuffers,
) -> None:
    """Shard the parameters over the last axis of ``mesh``; gradients are averaged over all of it, the domain's too."""
    scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
    if scalars:
        raise ConfigError(f"fsdp cannot shard parameter {scalars[0]!r}, which has no dims; give it the shape (1,)")
    for module in _units(model, units):
        _shard(module, mesh, domain_groups, options)
    _shard(model, mesh, domain_groups, options)
    # in a backward pass it is a second forward pass, of activation checkpointing
    model.register_forward_pre_hook(lambda *_: backward_pass() != -1 or buffers.send())


def _units(model: nn.Module, kinds: Sequence[type[nn.Module]] | None) -> Iterator[nn.Module]:
    """Yield modules that are gathered and freed as one, inner ones first."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found = []
    for name, module in model.named_modules():
        if module is model or not _is_unit(model, name, module, kinds):
            continue
        inside = {id(m) for m in module.modules()}
        shared = [n for n, p in module.named_parameters() if not owners[id(p)] <= inside]
        if not shared:
            found.append(module)
        elif kinds is not None:
            raise ConfigError(
                f"{name!r} cannot be a unit: it shares parameter {shared[0]!r} with modules outside it; choose units "
                "that hold both"
            )
    if kinds is not None and not found:
        raise ConfigError(f"units: no module inside the model is one of {[kind.__name__ for kind in kinds]}")
    yield from reversed(found)


def _is_unit(model: nn.Module, name: str, module: nn.Module, kinds: Sequence[type[nn.Module]] | None) -> bool:
    if kinds is not None:
        return isinstance(module, tuple(kinds))
    parent = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(parent, nn.ModuleList | nn.Sequential) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return sum(p.numel() * p.element_size() for p in module.parameters()) >= _UNIT_BYTES


def _shard(
    module: nn.Module, mesh: DeviceMesh, domain_groups: Sequence[dist.ProcessGroup], options: Mapping[str, Any]
) -> None:
    own = [
        (m, name)
        for m in module.modules()
        for name, p in m.named_parameters(recurse=False)
        if p.requires_grad and not isinstance(p, DTensor)
    ]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if domain_groups:  # FSDP's mean is over the domain too, so it can be left to add up the shards' gradients
            for m, name in own:
                parameter = getattr(m, name)
                if not isinstance(parameter, DTensor):
                    defer(parameter, domain_groups)
        return _map(_Carrier, _unpack, args), _map(_Carrier, _unpack, kwargs)

    # Around the hooks of fully_shard, but inside those of the user.
    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: _map(ShardTensor, _pack, output))
    fully_shard(module, mesh=mesh, **options)
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (_map(ShardTensor, _pack, args), _map(ShardTensor, _pack, kwargs)),
        prepend=True,
        with_kwargs=True,
    )
    module.register_forward_hook(lambda _, args, output: _map(_Carrier, _unpack, output))
    assert isinstance(module, FSDPModule)


def _pack(x: ShardTensor) -> Any:
    if not x.requires_grad:
        return x
    spec, halo, memory = x.spec, x.halo, x.global_strides
    return _Carrier(x.local, lambda local: ShardTensor(local, spec, halo=halo, global_strides=memory))


def _unpack(carrier: _Carrier) -> ShardTensor:
    return carrier.rebuild(carrier.local)


def _map(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Change values of a kind inside nested containers, those that FSDP looks into; keep the other containers."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        items = {k: _map(kind, change, v) for k, v in value.items()}
        return value if all(items[k] is v for k, v in value.items()) else type(value)(items)
    if isinstance(value, tuple | list):
        entries = [_map(kind, change, v) for v in value]
        if all(a is b for a, b in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: _map(kind, change, v) for name, v in fields.items()}
        changed = {name: v for name, v in changed.items() if v is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value

"""Models on a rank's plain rows, ghosts included: message passing without exchange.

With ghosts as many hops deep as a model has layers, and the edges that end at all but the last of them, a rank
computes the same for its owned rows as one process. The ghosts are computed again by each rank that holds them;
in return nothing is sent in forward, and backward sends the parameters' gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.axes import mesh_axes
from scidata.shard.comm.sums import replicate_all
from scidata.shard.graphs.halo_depth import check_halo_depth
from scidata.shard.graphs.local_graph import LocalGraph, check_counts, counted
from scidata.shard.torch_internals import BatchNorm, parameters_of, tree_map_only


def call_on_parts(module: nn.Module, graph: LocalGraph, /, *args: object, **kwargs: object) -> Any:
    """Run a module on this rank's plain rows; return the owned rows of its result as a ShardTensor.

    Its parameters get the gradient of all ranks: backward is collective. Forward communicates nothing, but for the
    first call of a module, which finds out whether it looks further than the ghosts go: two more passes, of a copy,
    and one reduction of a number. That takes the edges of ``graph`` among the arguments.

    ``args, kwargs``: plain tensors: of nodes ``(num_local, ...)``, of edges in the order of those of ``graph``, and
    values that are the same on every rank. With counts of :class:`~scidata.shard.graphs.local_graph.HopCounts` among
    them, all in that order, and the result may have left out ghosts.
    Raises UnsupportedShardOp: on every rank: owned rows that depend on rows or edges elsewhere, since the halo is too
    narrow, or rows are mixed (pooling, normalisation over nodes), edges followed the other way or random numbers drawn
    (dropout); batch normalisation in training. A result that is not rows of nodes. A module of ``strategy="fsdp"``.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"call_on_parts takes a torch.nn.Module first, not {type(module).__name__}")
    for name, child in module.named_modules():
        if isinstance(child, BatchNorm) and (child.training or child.running_mean is None):
            raise UnsupportedShardOp(
                f"{name or type(child).__name__}: batch statistics of a part would count its ghosts. "
                "Use ShardTensors with an exchange, or eval()"
            )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UnsupportedShardOp(
            f"{type(module).__name__}: without exchange, a module needs whole parameters, not DTensors. "
            "Use parallelize(..., strategy='ddp'), or ShardTensors with an exchange"
        )
    groups = [axis.group for axis in mesh_axes(graph.device_mesh) if axis.size > 1]
    for group in groups:
        check_halo_depth(module, graph, group, args, kwargs)
    trims = counted((args, kwargs))
    if trims and graph.only is not None:
        rows, edges = graph.only
        check_counts((args, kwargs), rows.num_local, edges.shape[1])
    return graph.owned(_with_summed_gradients(module, groups, args, kwargs), trimmed=trims)


def _with_summed_gradients(
    module: nn.Module, groups: list[dist.ProcessGroup], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Any:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not groups or not parameters or not torch.is_grad_enabled():
        return module(*args, **kwargs)
    token, *replicated = replicate_all([parameters[0].new_zeros(()).requires_grad_(), *parameters], groups)
    new = {id(parameter): tensor for parameter, tensor in zip(parameters, replicated, strict=True)}
    with _swapped(module, new):
        result = module(*args, **kwargs)
    # so that backward gets here on each rank, whatever its part made the module leave out
    return tree_map_only(Tensor, lambda x: x + token.to(x.dtype) if x.is_floating_point() else x, result)


@contextlib.contextmanager
def _swapped(module: nn.Module, new: Mapping[int, Tensor]) -> Iterator[None]:
    """Put tensors in the place of a module's parameters, by their ids."""
    held: list[tuple[nn.Module, dict[str, Tensor]]] = []
    try:
        for child in module.modules():
            own = parameters_of(child)
            held.append((child, dict(own)))
            for name, parameter in held[-1][1].items():
                own[name] = new.get(id(parameter), parameter)
        yield
    finally:
        for child, parameters in held:
            parameters_of(child).update(parameters)

"""Models on a rank's plain rows, ghosts included: message passing without exchange.

With ghosts as many hops deep as a model has layers, and the edges that end at all but the last of them, a rank
computes the same for its owned rows as one process. The ghosts are computed again by each rank that holds them;
in return nothing is sent in forward, and backward sends the parameters' gradients only.

A module may look at rows that the rank lacks: further hops, or all rows. To find that out, a node is added whose values
are NaN, with an edge from it to every row whose incoming edges are not all here, and one to it from every row. A module
that stays within the halo gives the same owned rows with it and without it, whatever its layers are; one that does not
gives NaN, or other numbers (a degree that has changed).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scidata.device_mesh.devices import is_accelerator
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.axes import mesh_axes
from scidata.shard.comm.sums import replicate_all
from scidata.shard.comm.transport import device_of, reduce
from scidata.shard.graphs.local_graph import LocalGraph, check_counts, counted, untrimmed
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
    """Replace a module's parameters by tensors, found by parameter id."""
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


_MAX_CHECKS = 4  # of a module whose samples have no ghost so far away that it could show
_NOTHING_SEEN, _FINE = 0, 1
_FAULTS = {
    2: "{module} looks at nodes {reach}; or use an exchange (to_pyg() without khop)",
    3: "{module} looks at the edges that start at a node, and a rank holds only those that end nearby. Use an "
    "exchange (to_pyg() without khop)",
    4: "{module} mixes the rows of all nodes (pooling, or a normalisation over nodes), where ghosts would count too. "
    "Do that with the ShardTensor that call_on_parts returns, or use an exchange (to_pyg() without khop)",
    5: "{module} draws random numbers, and a row would get others where it is a ghost. Use p=0 for dropout, or eval()",
    6: "{module} returns other things than a row for each local node. Pool, or reduce, the ShardTensor that "
    "call_on_parts makes of rows",
    7: "{module} leaves out rows or edges that it needs later on, or its counts by hops are another edge_index's. "
    "Take both from one to_pyg(khop=True, by_hop=True), and call trim_to_layer(layer, ...) before layers 0, 1, …, of "
    "which there may be {layers}",
}

#: Checks that are left to do, by module, and by hops, mode and whether it leaves out far rows.
_LEFT: WeakKeyDictionary[nn.Module, dict[tuple[Hashable, bool, bool], int]] = WeakKeyDictionary()


def check_halo_depth(
    module: nn.Module,
    graph: LocalGraph,
    group: dist.ProcessGroup,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> None:
    """Raise on every rank if owned rows of a result depend on rows that a rank lacks. Collective.

    Does nothing once a module has passed; before that it costs two passes of a copy without gradients.
    """
    given = args, dict(kwargs)
    left, key = _LEFT.setdefault(module, {}), ((graph.layers, graph.rows_of), module.training, counted(given))
    if left.get(key, _MAX_CHECKS) == 0:
        return
    code = torch.tensor([_code_of(module, graph.as_given(given), given)], device=device_of(group))
    found = int(reduce(code, dist.ReduceOp.MAX, group).item())
    if found in _FAULTS:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        raise UnsupportedShardOp(
            _FAULTS[found].format(module=type(inner).__name__, reach=graph.reach, layers=len(graph.layers))
        )
    left[key] = 0 if found == _FINE else left.get(key, _MAX_CHECKS) - 1


def _code_of(module: nn.Module, graph: LocalGraph, given: tuple[tuple[object, ...], dict[str, object]]) -> int:
    """Try the module on this rank; the largest code of all ranks counts."""
    whole, trims = untrimmed(given), counted(given)

    def run(*, into: bool, outof: bool) -> list[Tensor] | None:
        more = graph.with_node(whole, into=into, outof=outof)
        return graph.owned_rows(twin(*more[0], **more[1]), extended=True)

    def same(found: list[Tensor] | None) -> bool:
        assert expected is not None
        return found is not None and all(_close(a, b) for a, b in zip(found, expected, strict=True))

    try:
        if not graph.takes_edges(given):
            return 7 if trims else _NOTHING_SEEN
        with _aside(module, graph.device) as twin:
            expected = graph.owned_rows(twin(*whole[0], **whole[1]))
            if expected is None:
                return 6
            if all(rows.num_owned == rows.num_global for rows in graph.index_maps.values()):
                return _NOTHING_SEEN
            if same(run(into=True, outof=True)):
                if trims and not same(graph.owned_rows(twin(*given[0], **given[1]), trimmed=True)):
                    return 7
                return _FINE if any(map(len, graph.incomplete.values())) else _NOTHING_SEEN
            if not same(graph.owned_rows(twin(*whole[0], **whole[1]))):
                return 5
            if not same(run(into=False, outof=False)):
                return 4
            return 3 if same(run(into=True, outof=False)) else 2
    except Exception:  # the module refuses its arguments, so that nothing can be found out; its own call raises
        return _NOTHING_SEEN


@contextmanager
def _aside(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give a copy, so that buffers and caches stay as they are; no gradients, no autocast, no random state used up."""
    twin = copy.deepcopy(module.module if isinstance(module, DistributedDataParallel) else module)
    forked = torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type)
    with forked, torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield twin


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether rows are equal up to rounding: an added row may change the blocking of a matrix product."""
    if a.shape != b.shape or not b.is_floating_point() or b.numel() == 0:
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num(posinf=0.0).max())
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

"""Check that a module on a rank's plain rows looks at no rows that the rank lacks: further hops, or all rows.

A node is added whose values are NaN, with an edge from it to every row whose incoming edges are not all here, and one
to it from every row. A module that stays within the halo gives the same owned rows with it and without it, whatever
its layers are; one that does not gives NaN, or other numbers (a degree that has changed).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scidata.device_mesh.devices import is_accelerator
from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.transport import device_of, reduce
from scidata.shard.graphs.local_graph import LocalGraph, counted, untrimmed

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
    """Raise on every rank where owned rows of a result depend on rows that a rank lacks. Collective.

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
    """Whether rows are the same but for rounding: an added row may change how a matrix product is blocked."""
    if a.shape != b.shape or not b.is_floating_point() or b.numel() == 0:
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num(posinf=0.0).max())
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

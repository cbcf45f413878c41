"""Finding out whether a module on a rank's plain rows looks at what is not there: further hops, or all the rows.

A node is added whose values are NaN, with an edge from it to every row whose incoming edges are not all here, and one
to it from every row. A module that stays within the halo gives the same owned rows with it and without it, whatever
its layers are; one that does not gives NaN, or other numbers (a degree that has changed).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scidata.core.index_map import IndexMap
from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.transport import reduce
from scidata.shard.graphs.ghosts import _device_of
from scidata.shard.graphs.hops import HopCounts, counted, hop_order, hops_of
from scidata.shard.torch_internals import tree_leaves, tree_map_only

_MAX_CHECKS = 4  # of a module whose samples have no ghost so far away that it could show
_NOTHING_SEEN, _FINE = 0, 1
_FAULTS = {
    2: "{module} looks at nodes more than {hops} hops away. Open the data set with a wider halo: as many hops as "
    "layers, and one more where layers use the degrees of their sources, as GCNConv does; or use an exchange "
    "(to_pyg() without khop)",
    3: "{module} looks at the edges that start at a node, and a rank holds only those that end nearby. Use an "
    "exchange (to_pyg() without khop)",
    4: "{module} mixes the rows of all nodes (pooling, or a normalisation over nodes), where ghosts would count too. "
    "Do that with the ShardTensor that call_on_parts returns, or use an exchange (to_pyg() without khop)",
    5: "{module} draws random numbers, and a row would get others where it is a ghost. Use p=0 for dropout, or eval()",
    6: "{module} returns other things than a row for each local node. Pool, or reduce, the ShardTensor that "
    "call_on_parts makes of rows",
    7: "{module} leaves out rows or edges that it needs later on, or its counts by hops are another edge_index's. "
    "Take both from one to_pyg(khop=True, by_hop=True), and call trim_to_layer(layer, ...) before layers 0, 1, …, of "
    "which there may be {hops}",
}

#: Checks that are left to do, by module, and by hops, mode and whether it leaves out what is far.
_LEFT: WeakKeyDictionary[nn.Module, dict[tuple[int, bool, bool], int]] = WeakKeyDictionary()


def check_halo_depth(
    module: nn.Module,
    rows: IndexMap,
    edge_index: Tensor,
    num_hops: int,
    group: dist.ProcessGroup,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise on every rank where owned rows of the result depend on what a rank does not hold. Collective.

    Does nothing once a module has passed; before that it costs two passes of a copy without gradients.

    Raises
    ------
    UnsupportedShardOp
        Says what the module looks at.
    """
    given = args, dict(kwargs)
    left, key = _LEFT.setdefault(module, {}), (num_hops, module.training, trims := counted(given))
    if left.get(key, _MAX_CHECKS) == 0:
        return
    by_hop = hop_order(rows, edge_index, num_hops).edge_index
    if trims or any(_is_same(x, by_hop) for x in tree_leaves(given)):
        edge_index = by_hop
    outermost = (hops_of(rows, edge_index, num_hops) == num_hops).nonzero()[:, 0]
    known = _Known(rows=rows, edge_index=edge_index, outermost=outermost)
    code = torch.tensor([_code_of(module, known, args, kwargs)], device=_device_of(group))
    found = int(reduce(code, dist.ReduceOp.MAX, group).item())
    if found in _FAULTS:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        raise UnsupportedShardOp(_FAULTS[found].format(module=type(inner).__name__, hops=num_hops))
    left[key] = 0 if found == _FINE else left.get(key, _MAX_CHECKS) - 1


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A rank's rows and edges, and the rows of which it does not hold all incoming edges."""

    rows: IndexMap
    edge_index: Tensor
    outermost: Tensor  # ids

    def with_node(self, value: Any, into: Tensor, outof: Tensor) -> Any:
        """Return arguments with a row for one more node: edges from it end at ``into``, those to it start at ``outof``.

        Raises
        ------
        ValueError
            Sizes do not tell tensors of nodes from those of edges.
        """
        num_nodes, num_edges = self.rows.num_local, self.edge_index.shape[1]
        if num_nodes == num_edges:
            raise ValueError("as many nodes as edges")
        far = torch.stack([torch.cat([torch.full_like(into, num_nodes), outof]),
                           torch.cat([into, torch.full_like(outof, num_nodes)])])  # fmt: skip

        def extended(x: Tensor) -> Tensor:
            if self.is_edge_index(x):
                return torch.cat([x, far.to(x.dtype)], 1)
            if x.ndim == 0 or len(x) not in (num_nodes, num_edges):
                return x
            fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
            return torch.cat([x, x.new_full((1 if len(x) == num_nodes else far.shape[1], *x.shape[1:]), fill)])

        return tree_map_only(Tensor, extended, value)

    def is_edge_index(self, x: Any) -> bool:
        """Whether an argument is the edges."""
        return _is_same(x, self.edge_index)


def _is_same(x: Any, edge_index: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == edge_index.shape and torch.equal(x, edge_index)


def _code_of(module: nn.Module, known: _Known, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Try the module on this rank; the largest code of all ranks counts."""
    trims = counted((args, dict(kwargs)))
    if not any(map(known.is_edge_index, tree_leaves((args, dict(kwargs))))):
        return 7 if trims else _NOTHING_SEEN
    none, every = known.outermost[:0], torch.arange(known.rows.num_local, device=known.outermost.device)

    def run(into: Tensor | None = None, outof: Tensor = every, *, trim: bool = False) -> list[Tensor]:
        given = (args, dict(kwargs)) if into is None else known.with_node((args, dict(kwargs)), into, outof)
        given = given if trim else tree_map_only(HopCounts, HopCounts.untrimmed, given)
        return [x for x in tree_leaves(twin(*given[0], **given[1])) if isinstance(x, Tensor)]

    def same(found: list[Tensor]) -> bool:
        num_owned = known.rows.num_owned
        return all(_close(a[:num_owned], b[:num_owned]) for a, b in zip(found, expected, strict=True))

    try:
        with _aside(module, known.edge_index.device) as twin:
            expected = run()
            if any(x.ndim == 0 or len(x) != known.rows.num_local for x in expected):
                return 6
            if known.rows.num_owned == known.rows.num_global:
                return _NOTHING_SEEN
            if same(run(known.outermost)):
                if trims and not same(run(trim=True)):
                    return 7
                return _FINE if len(known.outermost) else _NOTHING_SEEN
            if not same(run()):
                return 5
            if not same(run(none, none)):
                return 4
            return 3 if same(run(known.outermost, none)) else 2
    except Exception:  # what the module cannot take, or how it is called, hides what it looks at; its own call raises
        return _NOTHING_SEEN


@contextmanager
def _aside(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give a copy, so that buffers and caches stay as they are; no gradients, no autocast, no random state used up."""
    twin = copy.deepcopy(module.module if isinstance(module, DistributedDataParallel) else module)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield twin


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether rows are the same but for rounding: an added row may change how a matrix product is blocked."""
    if a.shape != b.shape or not b.is_floating_point() or b.numel() == 0:
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num(posinf=0.0).max())
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

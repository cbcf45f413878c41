"""Models on a rank's plain rows, ghosts included: message passing without exchange.

With ghosts as many hops deep as a model has layers, and the edges that end at all but the last of them, what a rank
computes for its owned rows is what one process computes. The ghosts are computed again by each rank that holds them;
in return nothing is sent in forward, and backward sends the parameters' gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.axes import mesh_axes
from scidata.shard.comm.sums import replicate_all
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.graphs.halo_depth import check_halo_depth
from scidata.shard.graphs.hops import check_counts, counted, hop_order, hops_of
from scidata.shard.graphs.set_parts import SetParts
from scidata.shard.torch_internals import BatchNorm, parameters_of, tree_leaves, tree_map_only


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a rank holds of a graph to compute its rows without exchange.

    Attributes
    ----------
    index_map
        Owned rows and ghosts, ``num_hops`` hops deep.
    edge_index
        ``(2, num_edges)`` int64 in local numbering: every edge that ends at an owned row, or at a ghost less than
        ``num_hops`` hops away.
    num_hops
        At least 1.
    device_mesh
        One axis, the domain.
    """

    index_map: IndexMap
    edge_index: Tensor
    num_hops: int
    device_mesh: DeviceMesh

    def owned(self, result: Any, *, trimmed: bool) -> Any:
        """Return the owned rows of a module's result as ShardTensors; a ``trimmed`` one may have left out ghosts.

        Raises
        ------
        UnsupportedShardOp
            It has not a row for each local node.
        """
        return tree_map_only(Tensor, lambda x: self._owned(x, trimmed), result)

    def _owned(self, x: Tensor, trimmed: bool) -> Tensor:
        rows = self.index_map
        if not self._has_rows(x, trimmed):
            raise UnsupportedShardOp(
                f"without exchange a module returns a row for each of the {rows.num_local} local nodes, but it "
                f"returned shape {tuple(x.shape)}; pool, or reduce, the ShardTensor that call_on_parts makes of rows"
            )
        return node_tensor(x[: rows.num_owned], rows, self.device_mesh)

    def _has_rows(self, x: Tensor, trimmed: bool, num_more: int = 0) -> bool:
        num_local = self.index_map.num_local + num_more
        fewest = self.index_map.num_owned if trimmed else num_local
        return x.ndim > 0 and fewest <= len(x) <= num_local

    # -- what a check of the depth asks: see Held ----------------------------------------------------------------------

    @property
    def key(self) -> int:
        """What the result of a check is good for."""
        return self.num_hops

    @property
    def reach(self) -> str:
        """How far the ghosts go, and how to have more."""
        return (
            f"more than {self.num_hops} hops away. Open the data set with a wider halo: as many hops as layers, and "
            "one more where layers use the degrees of their sources, as GCNConv does"
        )

    @property
    def num_layers(self) -> int:
        """Of a model that the ghosts are enough for."""
        return self.num_hops

    @property
    def device(self) -> torch.device:
        """Where the edges are."""
        return self.edge_index.device

    def as_given(self, arguments: Any) -> Parts:
        """Return these with rows and edges in the order that arguments have them in: as stored, or by hops."""
        by_hop = replace(self, edge_index=hop_order(self.index_map, self.edge_index, self.num_hops).edge_index)
        return by_hop if counted(arguments) or by_hop.takes_edges(arguments) else self

    @property
    def is_int(self) -> bool:
        """Whether the rank owns every row."""
        return self.index_map.num_owned == self.index_map.num_global

    @property
    def ends(self) -> bool:
        """Whether there are rows some of whose edges are not here."""
        return len(self._outermost) > 0

    def takes_edges(self, arguments: Any) -> bool:
        """Whether the edges are among arguments."""
        return any(map(self._is_edge_index, tree_leaves(arguments)))

    def owned_rows(self, result: Any, *, extended: bool = False, trimmed: bool = False) -> list[Tensor] | None:
        """Return the owned rows of a result, ``extended`` as its arguments were; None where it is none of rows."""
        found = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not all(self._has_rows(x, trimmed, int(extended)) for x in found):
            return None
        return [x[: self.index_map.num_owned] for x in found]

    def with_node(self, value: Any, *, into: bool, outof: bool) -> Any:
        """Return arguments with a row for one more node, of NaN, and its edges.

        Raises
        ------
        ValueError
            Sizes do not tell tensors of nodes from those of edges.
        """
        num_nodes, num_edges = self.index_map.num_local, self.edge_index.shape[1]
        if num_nodes == num_edges:
            raise ValueError("as many nodes as edges")
        ends = self._outermost[: None if into else 0]
        starts = torch.arange(num_nodes if outof else 0, device=self.device)
        far = torch.stack([torch.cat([torch.full_like(ends, num_nodes), starts]),
                           torch.cat([ends, torch.full_like(starts, num_nodes)])])  # fmt: skip

        def extended(x: Tensor) -> Tensor:
            if self._is_edge_index(x):
                return torch.cat([x, far.to(x.dtype)], 1)
            if x.ndim == 0 or len(x) not in (num_nodes, num_edges):
                return x
            fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
            return torch.cat([x, x.new_full((1 if len(x) == num_nodes else far.shape[1], *x.shape[1:]), fill)])

        return tree_map_only(Tensor, extended, value)

    def _is_edge_index(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.shape == self.edge_index.shape and torch.equal(x, self.edge_index)

    @cached_property
    def _outermost(self) -> Tensor:
        """The ghosts that are ``num_hops`` hops away, or further."""
        return (hops_of(self.index_map, self.edge_index, self.num_hops) == self.num_hops).nonzero()[:, 0]


def call_on_parts(module: nn.Module, parts: Parts | SetParts, *args: Any, **kwargs: Any) -> Any:
    """Run a module on this rank's plain rows; return the owned rows of its result as a ShardTensor.

    Its parameters get the gradient of all ranks: backward is collective. Forward communicates nothing, but for the
    first call of a module, which finds out whether it looks further than the ghosts go: two more passes, of a copy,
    and one reduction of a number. That takes the edges of ``parts`` among the arguments.

    Parameters
    ----------
    args, kwargs
        Plain tensors: of nodes ``(num_local, ...)``, of edges in the order of those of ``parts``, and what is the
        same on every rank. With counts of :class:`~scidata.shard.graphs.hops.HopCounts` among them, all in that order,
        and the result may have left out ghosts.

    Raises
    ------
    UnsupportedShardOp
        On every rank: owned rows that depend on what is not here, since the halo is too narrow, or rows are mixed
        (pooling, normalisation over nodes), edges followed the other way or random numbers drawn (dropout); batch
        normalisation in training. A result that is not rows of nodes. A module of ``strategy="fsdp"``.
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
    groups = [axis.group for axis in mesh_axes(parts.device_mesh) if axis.size > 1]
    for group in groups:
        check_halo_depth(module, parts, group, args, kwargs)
    trims = counted((args, kwargs))
    if trims and isinstance(parts, Parts):
        check_counts((args, kwargs), parts.index_map.num_local, parts.edge_index.shape[1])
    return parts.owned(_with_summed_gradients(module, groups, args, kwargs), trimmed=trims)


def _with_summed_gradients(
    module: nn.Module, groups: list[dist.ProcessGroup], args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
    held: list[tuple[nn.Module, dict[str, Any]]] = []
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

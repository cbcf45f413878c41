"""Neighbours of points: the operators of pyg-lib that PyTorch Geometric searches and samples with.

pyg-lib registers them with torch when it is imported, which may be never: they are in the table by name. Coordinates
are gathered, a few numbers a point beside its features, so that each rank builds the search tree of one process; then
it searches for its own rows only. So edges come in the order of one process, and those between points that are split
alike know their routes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.core.index_map import IndexMap
from scidata.shard.comm.transport import broadcast
from scidata.shard.graphs.routed import route_edges
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import align, finish, is_sharded, plain_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import whole_along
from scidata.shard.rows.ordered import counts_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

Starts = Tensor | None  # where each cloud of points begins
Search = Callable[[Tensor, Tensor, Starts, Starts], Tensor]


@handles("pyg.knn")
def knn(
    func: TensorFunction,
    x: Tensor,
    y: Tensor,
    ptr_x: Starts = None,
    ptr_y: Starts = None,
    *options: float,
    **named: float,
) -> Tensor:
    """Find the nearest ``k`` of ``x`` for each row of ``y``: ``(2, num_edges)``, ids of ``y`` over those of ``x``.

    Sharded by edges where the rows of ``y`` are sharded: each rank holds those of its own. Collective: the coordinates
    of ``x`` are gathered, and the numbers of edges; where ``x`` and ``y`` are split alike, also the rows that each rank
    lacks.
    """
    return _edges(x, y, ptr_x, ptr_y, lambda *operands: func(*operands, *options, **named))


@handles("pyg.radius")
def radius(
    func: TensorFunction,
    x: Tensor,
    y: Tensor,
    ptr_x: Starts = None,
    ptr_y: Starts = None,
    r: float = 1.0,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    ignore_same_index: bool = False,
) -> Tensor:
    """Find up to ``max_num_neighbors`` of ``x`` within ``r`` of each row of ``y``, as ``knn`` does. Collective."""
    most, y = max_num_neighbors, _rows(y)
    if not ignore_same_index or not is_sharded(y):
        return _edges(x, y, ptr_x, ptr_y, lambda *operands: func(*operands, r, most, num_workers, ignore_same_index))
    # the part's rows have other numbers than in one process: one more is searched for, and the same one dropped here
    limit = most if most < 0 else min(most, x.shape[0]) + 1
    search: Search = lambda *operands: func(*operands, r, limit, num_workers)  # noqa: E731
    return _edges(x, y, ptr_x, ptr_y, search, lambda edges: _without_same(edges, most))


@handles("pyg.nearest")
def nearest(func: TensorFunction, x: Tensor, y: Tensor, ptr_x: Starts = None, ptr_y: Starts = None) -> Tensor:
    """Find the nearest of ``y`` for each row of ``x``: ``(num_x,)``, split as ``x``. Collective: ``y`` is gathered."""
    x, y, ptr_x, ptr_y = _rows(x), _plain(y), _plain_starts(ptr_x), _plain_starts(ptr_y)
    if not is_sharded(x):
        return func(_plain(x), y, ptr_x, ptr_y)
    spec = x.spec
    found = func(_held(x.local), y, _own_part(ptr_x, spec), ptr_y)
    return ShardTensor(found, spec.derive(spec.global_shape[:1], spec.dims, spec.sizes))


@handles("pyg.fps", keeps_replicated=True)  # ranks draw otherwise where it is replicated, too
def fps(func: TensorFunction, src: Tensor, ptr: Starts, ratio: float = 0.5, random_start: bool = True) -> Tensor:
    """Sample each cloud by farthest points: ``(num_picked,)`` ids, sharded evenly.

    Each pick depends on all before it: coordinates are gathered, and each rank picks as one process would. pyg-lib
    draws where to start from the C library's random numbers, which no seed of torch sets and which differ between
    ranks: the first rank's picks are taken. Collective.
    """
    picked = func(_plain(src), _plain_starts(ptr), ratio, random_start)
    if not isinstance(src, ShardTensor):
        return picked
    spec = src.spec
    if random_start:
        for axis in range(len(spec.axes)):
            broadcast(picked, 0, spec.group(axis))
    if 0 not in spec.sharded:
        return picked
    axis = spec.sharded[0]
    sizes = even_sizes(len(picked), spec.axes[axis].size)
    start = sum(sizes[: spec.coordinate(axis)])
    local = picked[start : start + sizes[spec.coordinate(axis)]].clone()
    return ShardTensor(local, spec.along(axis, 0, picked.shape, sizes))


def _plain(x: Tensor) -> Tensor:
    """Return a tensor whole and without its graph: ids have no gradient."""
    return _held(plain_of(x))


def _plain_starts(ptr: Starts) -> Starts:
    return None if ptr is None else _plain(ptr)


def _held(x: Tensor) -> Tensor:
    """Return a tensor as the kernels take it: they ignore strides, and read rows one after the other."""
    return x.detach().contiguous()


def _rows(x: Tensor) -> Tensor:
    """Gather all dims but the rows."""
    for dim in range(1, len(x.shape)):
        x = whole_along(x, dim)
    return x


def _own_part(ptr: Starts, spec: ShardSpec) -> Starts:
    """Return the begin of each cloud in this rank's rows; some clouds may have none there."""
    if ptr is None:
        return None
    start = spec.offsets[0]
    return ptr.clamp(start, start + spec.local_shape[0]) - start


def _without_same(edges: Tensor, most: int) -> Tensor:
    """Drop edges from a row to itself, and of each row's all but the first ``most``; a negative number is no limit."""
    edges = edges[:, edges[0] != edges[1]]
    if most < 0:
        return edges
    query = edges[0].contiguous()
    place = torch.arange(len(query), device=query.device) - torch.searchsorted(query, query)
    return edges[:, place < most]


def _edges(
    x: Tensor, y: Tensor, ptr_x: Starts, ptr_y: Starts, search: Search, then: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Search for this rank's rows of ``y`` in all of ``x``; ``then`` gets edges in global numbering."""
    y, ptr_x, ptr_y = _rows(y), _plain_starts(ptr_x), _plain_starts(ptr_y)
    if not is_sharded(y):
        return search(_plain(x), _plain(y), ptr_x, ptr_y)
    spec = y.spec
    found = search(_plain(x), _held(y.local), ptr_x, _own_part(ptr_y, spec))
    edges = found + torch.tensor([[spec.offsets[0]], [0]], device=found.device)
    edges = edges if then is None else then(edges)
    if is_sharded(x) and len(spec.axes) == 1 and (x.spec.dims, x.spec.sizes) == (spec.dims, spec.sizes):
        return _routed(edges, spec)
    axis = spec.sharded[0]
    counts = counts_of(edges.shape[1], spec.group(axis), edges.device)
    dims = [1 if d == 0 else None for d in spec.dims]
    shape = (2, sum(counts))
    return ShardTensor(edges, spec.derive(shape, dims, [counts if d == 1 else None for d in dims]))


def _routed(edges: Tensor, spec: ShardSpec) -> Tensor:
    """Return edges between rows that are split alike as an index that knows its routes. Collective."""
    bounds = np.array([0, *accumulate(spec.sizes_of(0))])
    first, last = bounds[spec.coordinate(0)], bounds[spec.coordinate(0) + 1]
    ids = edges.cpu().numpy()
    ghosts = np.unique(ids[1][(ids[1] < first) | (ids[1] >= last)])
    rows = IndexMap(bounds=bounds, part=spec.coordinate(0), ghosts=ghosts)
    local = torch.from_numpy(np.stack([rows.to_local(ids[1]), rows.to_local(ids[0])])).to(edges.device)
    return route_edges(local, rows, spec.device_mesh).flip(0)


@handles("physicsnemo.radius_search_warp")
def radius_search(
    func: Callable[..., tuple[Tensor, ...]],
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> tuple[Tensor, ...]:
    """Find up to ``max_points`` within a radius of each query, split as these. Collective: points are gathered."""
    how = (radius, max_points, return_dists, return_points)
    operands = [whole_along(whole_along(points, -1), -2), whole_along(queries, -1)]
    if not (specs := specs_of(operands)):
        return func(*operands, *how)
    if max_points is None:
        raise unsupported(func, "how many are found is not bounded", *specs, remedy="give it max_points")
    batch = ["batch"] * (points.ndim - 2)
    (p, q), layout, known = align(func, operands, [[*batch, "point", "of point"], [*batch, "query", "of query"]])
    known |= {"near": max_points, "xyz": 3}
    some = q if q.shape[-2] else q.new_zeros(*q.shape[:-2], 1, 3)  # warp takes no empty arrays

    def part(x: Tensor, *more: str) -> Tensor:
        out = [*batch, "query", *more]
        found = x.narrow(len(batch), 0, q.shape[-2])
        return finish(found, spec_of_layout(layout, out, [known[name] for name in out], specs[0]))

    ids, near, distances, counts = func(p, some, *how)
    return (
        part(ids, "near"),
        part(near, "near", "xyz") if return_points else near,
        part(distances, "near") if return_dists else distances,
        part(counts),
    )


@handles("torchmdnet.warp_neighbor_brute_fwd", "torchmdnet.warp_neighbor_cell_fwd")
def neighbour_pairs(func: Callable[..., tuple[Tensor, ...]], *args: object) -> tuple[Tensor, ...]:
    """Find all pairs of points near each other, on each rank alike. Collective: points are gathered."""
    return func(*map(plain_of, args))

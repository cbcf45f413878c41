"""Grid fields at points: the cells around each point are fetched from their owners, once for all fields.

Each rank interpolates at its own points. Cells are numbered rank by rank, so that those which lie elsewhere are ghosts
of an index map (:mod:`scidata.shard.graphs.ghosts`). Nothing is sent where all ranks have their cells, in their part or
in the halo that was read. Each point's arithmetic is that of one process, and so are its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, even_sizes, rows_of, window
from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.comm.collectives import all_gather_v, slice_to_shard
from scidata.shard.comm.operators import is_capturing
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.comm.transport import SUM_IN, Group, device_of, gather_rows, group_rank, group_size
from scidata.shard.graphs.ghosts import GhostExchange, ghost_exchange
from scidata.shard.ops.moving import whole_along
from scidata.shard.ops.rectilinear import Found, Grid, grid_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import flatten_mesh

# -- which ranks hold what --------------------------------------------------------------------------------------------


class _Shares(NamedTuple):
    """Groups of ranks: those that split the field, those with the same points, those with the same field."""

    split: Group = None
    alike: Group = None
    sums: Sequence[Group] = ()


def _spec_of(x: Tensor) -> ShardSpec | None:
    return x.spec if isinstance(x, ShardTensor) else None


def _shares(field: ShardSpec | None, points: ShardSpec | None) -> _Shares:
    num_split = 0 if field is None else len(field.sharded)
    if field is None or not num_split:
        return _Shares(sums=() if points is None else points.shard_groups)
    split, own = set(field.sharded.values()), set[int]()
    if points is not None and not points.is_replicated:
        if points.device_mesh == field.device_mesh:
            own = set(points.sharded.values())
        elif len(points.axes) == 1 and _ranks(points) == _ranks(field):
            own = set(range(len(field.axes)))
        else:
            raise UnsupportedShardOp(
                f"interpolate: the field ({field}) and the points ({points}) lie on other ranks; split the points over "
                "the mesh of the field, or over one axis of all its ranks"
            )
    return _Shares(_group(field, split), _group(field, split - own), [field.group(axis) for axis in own - split])


def _ranks(spec: ShardSpec) -> list[int]:
    ranks: list[int] = spec.device_mesh.mesh.flatten().tolist()
    return ranks


def _group(spec: ShardSpec, axes: set[int]) -> Group:
    """Return the ranks along some axes, in order. Collective when a group of several axes is made."""
    long = [axis for axis in sorted(axes) if spec.axes[axis].size > 1]
    if len(long) < 2:
        return spec.group(long[0]) if long else None
    mesh = spec.device_mesh
    return flatten_mesh(mesh if len(long) == mesh.ndim else mesh[tuple(spec.axes[a].name for a in long)]).get_group()


def _numbers(rows: Sequence[Tensor], spec: ShardSpec, first: Tensor) -> Tensor:
    """Number cells rank by rank, ``first`` being each rank's first, and row by row in its part."""
    lead = spec.ndim - len(rows)
    owner, within = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    parts: dict[int, Tensor] = {}
    for dim, row in enumerate(rows, lead):
        bounds = torch.from_numpy(spec.dim_bounds(dim)[0]).to(row.device)
        parts[dim] = torch.searchsorted(bounds, row, right=True) - 1
        within = within * bounds.diff()[parts[dim]] + row - bounds[parts[dim]]
    for dim, axis in sorted(spec.sharded.items(), key=lambda each: each[1]):
        owner = owner * spec.axes[axis].size + parts[dim]
    return first[owner] + within


def _cell_bounds(spec: ShardSpec, num_dims: int) -> npt.NDArray[np.int64]:
    """Return the first cell of each rank, and the end."""
    counts = np.ones(1, np.int64)
    for dim in range(spec.ndim - num_dims, spec.ndim):
        if dim not in spec.sharded:
            counts *= spec.global_shape[dim]
    for axis in sorted(spec.sharded.values()):
        counts = np.multiply.outer(counts, np.array(spec.sizes_of(axis), np.int64)).ravel()
    return bounds_of(counts)


# -- plans ------------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Cells under each rank's points: for each corner its position among held cells, then among fetched ones."""

    ids: list[Tensor]
    exchange: GhostExchange | None


def _places(x: Tensor, spec: ShardSpec | None, field: Tensor, num_dims: int) -> list[Tensor]:
    """Return the position of each row of each grid dim in this rank's part of the field; -1 if absent."""
    found = []
    for dim in range(field.ndim - num_dims, field.ndim):
        place = torch.full((field.shape[dim],), -1, device=x.device)
        rows = torch.arange(field.shape[dim])
        if spec is not None:
            widths = field.halo.get(dim) if isinstance(field, ShardTensor) and x is field.padded else None
            rows = torch.from_numpy(rows_of(window(*spec.dim_bounds(dim), **(vars(widths) if widths else {}))))
        place[rows.to(x.device)] = torch.arange(len(rows), device=x.device)
        found.append(place)
    return found


def _plan(grid: Grid, found: Found, points: Tensor, x: Tensor, field: Tensor, shares: _Shares) -> _Plan:
    """Find the cells under this rank's points. Collective if the ranks have to agree."""
    spec, num_dims, num_corners = _spec_of(field), len(grid.axes), len(found.corners)
    rows = [torch.cat([corner.rows[d] for corner in found.corners]) for d in range(num_dims)]
    held = [place[row] for place, row in zip(_places(x, spec, field, num_dims), rows, strict=True)]
    shape, ids = x.shape[x.ndim - num_dims :], torch.zeros_like(rows[0])
    for at, extent in zip(held, shape, strict=True):
        ids = ids * extent + at
    outside = ~found.inside.repeat(num_corners)  # of these, whatever is held
    ids[outside] = 0
    lacks = (torch.stack(held).amin(0) < 0) & ~outside
    missing, bounds = ids[:0], np.zeros(0, np.int64)
    if shares.split is not None and spec is not None:
        bounds = _cell_bounds(spec, num_dims)
        numbers = _numbers([row[lacks] for row in rows], spec, torch.from_numpy(bounds).to(ids.device))
        missing, inverse = torch.unique(numbers, return_inverse=True)
        ids[lacks] = max(shape.numel(), 1) + inverse
    exchange = None
    if _any_missing(grid, found, points, len(missing), shares):
        cells = IndexMap(bounds=bounds, part=group_rank(shares.split), ghosts=missing.cpu().numpy())
        exchange = ghost_exchange(cells, shares.split)
    return _Plan(list(ids.view(num_corners, len(points)).unbind()), exchange)


def _any_missing(grid: Grid, found: Found, points: Tensor, num_missing: int, shares: _Shares) -> bool:
    """Whether any rank lacks a cell; raise on all ranks if a point lies outside and that is an error. Collective."""
    fault, where, group = 0, [0.0] * len(grid.axes), shares.split
    if grid.refuses:
        group = group if group is not None or not shares.sums else shares.sums[0]
        fault = int(found.refused.nonzero()[0]) + 1 if found.refused.any() else 0
        where = points[fault - 1].tolist() if fault else where
    row = torch.tensor([num_missing, fault, *where], dtype=torch.float64, device=device_of(group))
    table = gather_rows(row, group).tolist()
    for rank, (_, number, *place) in enumerate(table):
        if number:
            raise ConfigError(
                f"interpolate: point {int(number) - 1} of rank {rank}, at {place}, is NaN or lies outside of the grid; "
                "leave it out, or say outside='nan' or 'clip'"
            )
    return any(missing for missing, *_ in table)


def _kept(positions: Tensor, key: tuple[object, ...], make: Callable[[], _Plan]) -> _Plan:
    """Return the plan cached with a ShardTensor of positions, or make it."""
    if not isinstance(positions, ShardTensor):
        return make()
    now = positions.version(), *key
    kept: tuple[object, _Plan] | None = positions.__dict__.get("_interpolated")
    if kept is None or kept[0] != now:
        kept = positions.__dict__["_interpolated"] = now, make()
    return kept[1]


# -- values -----------------------------------------------------------------------------------------------------------


def _summed(values: Tensor, ids: Sequence[Tensor], found: Found) -> Tensor:
    """Add the weighted cells of each point up, ``(lead, points)``, in a wide dtype."""
    wide = SUM_IN.get(values.dtype, values.dtype)
    total: Tensor | None = None
    for at, (_, weight) in zip(ids, found.corners, strict=True):
        term = values.index_select(1, at)
        if weight is not None:
            term = term.to(wide) * weight.to(wide.to_real())
        total = term if total is None else total + term
    assert total is not None
    if total.is_floating_point() or total.is_complex():
        total = total.masked_fill(~found.inside, float("nan"))
    return total.to(values.dtype)


@checked_keywords
def interpolate(
    field: Tensor,
    positions: Tensor | Sequence[Tensor],
    coords: Sequence[object] | None = None,
    *,
    method: str = "bilinear",
    period: Sequence[float] | None = None,
    outside: str | Sequence[str] = "nan",
) -> Tensor:
    """Return a field of a grid at points, ``(..., num_points)``: an observation operator, and in backward its adjoint.

    The values are those of ``scipy.interpolate.RegularGridInterpolator``, NaN included: a cell that has one gives NaN,
    also if its weight is 0. Gradients go to the field and, of ``"bilinear"``, to the positions.

    Parameters
    ----------
    field : Tensor
        ``(..., rows of each dim of the grid)``: its last dims, as many as positions have coordinates, are the grid. A
        ShardTensor that is split along any of these, or a plain tensor.
    positions : Tensor or Sequence[Tensor]
        ``(num_points, num_dims)``, in the order of the dims; or a tensor ``(num_points,)`` for each dim. On a grid of
        latitudes and longitudes, those of a cloud are ``sample["pos"].flip(1)``: its longitude comes first. A
        ShardTensor that is split by points: each rank's points may lie anywhere. Plain: the same on every rank, as is
        the result.
    coords : Sequence[array_like] or None, optional
        Of each dim of the grid, the coordinates of all its rows, ascending or descending: ``ds.coordinate("lat")``.
        None: positions count rows.
    method : {"bilinear", "nearest"}, default "bilinear"
        Linear between the rows of each dim, or the value of the nearest row.
    period : Sequence[float] or None, optional
        Width of each dim where it wraps, 0 where it does not: ``(0, 360)`` of latitudes and longitudes.
    outside : {"nan", "error", "clip"} or one for each dim, default "nan"
        Of points beyond the outermost rows, such as those between the last latitude and the pole: NaN, an error on
        every rank, or the value at the outermost row. A position that is NaN gives NaN, or the error.

    Returns
    -------
    Tensor
        Of the field's dtype; split as the points are.

    Raises
    ------
    ConfigError
        Coordinates that do not fit or are not sorted; a point outside with ``"error"``; integers, but with
        ``method="nearest"`` and no point outside.
    UnsupportedShardOp
        Points that lie on other ranks than the field. A captured step, which then runs eagerly.

    Notes
    -----
    Collective if the field is split: in one small gather, the ranks agree whether each holds the cells of its
    points, owned or in the halo that was read; then nothing else is sent. Otherwise cells are fetched from the ranks
    that own them. Both are found out once for a ShardTensor of positions, and kept for other fields that are split
    alike. A field that requires grad does not use its halo, so that no gradient is lost.

    Examples
    --------
    >>> field = torch.tensor([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
    >>> positions = torch.tensor([[45.0, 0.0], [0.0, 300.0]])
    >>> scidata.interpolate(field, positions, [(90, 0), (0, 120, 240)], period=(0, 360))
    tensor([ 5., 11.])

    On each of two ranks, which have a row of the grid and a point each:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> x = scidata.scatter_tensor(field, 0, mesh["domain"], [Shard(0)])
    >>> points = scidata.scatter_tensor(positions, 0, mesh["domain"], [Shard(0)])
    >>> scidata.interpolate(x, points, [(90, 0), (0, 120, 240)], period=(0, 360)).full_tensor()
    tensor([ 5., 11.])
    """
    columns = [positions] if isinstance(positions, Tensor) else positions
    if not isinstance(columns, Sequence) or not all(isinstance(each, Tensor) for each in (field, *columns)):
        raise ConfigError("interpolate: the field and positions are tensors (or one for each dim); see torch.as_tensor")
    if len({column.shape for column in columns}) != 1:
        raise ConfigError(f"interpolate: positions of shapes {[tuple(x.shape) for x in columns]}; expected one length")
    positions = positions if isinstance(positions, Tensor) else torch.stack(tuple(columns), -1)
    if positions.ndim != 2 or not 1 <= positions.shape[1] <= field.ndim or not positions.is_floating_point():
        raise ConfigError(
            f"interpolate: positions of shape {tuple(positions.shape)} and {positions.dtype} for a field of shape "
            f"{tuple(field.shape)}; expected floating numbers, (points, dims of the grid)"
        )
    num_dims = positions.shape[1]
    lead, extents = tuple(field.shape)[: field.ndim - num_dims], tuple(field.shape)[field.ndim - num_dims :]
    is_inexact = field.is_floating_point() or field.is_complex()
    if method == "bilinear" and not is_inexact:
        raise ConfigError(f"interpolate: a field of {field.dtype}; convert it to a floating dtype, or say 'nearest'")
    grid = grid_of(extents, coords, method, period, outside, has_nan=is_inexact)
    positions = whole_along(positions, 1)
    for dim in range(len(lead)):
        field = whole_along(field, dim)
    spec, points = _spec_of(field), _spec_of(positions)
    shares = _shares(spec, points)
    local = positions.to_local() if isinstance(positions, ShardTensor) else positions
    parts = even_sizes(len(local), group_size(shares.alike))
    local = slice_to_shard(local, parts, 0, shares.alike)
    found = grid.find(local)
    owned, held = (field.to_local(), field.held_halo()) if isinstance(field, ShardTensor) else (field, None)
    owned = replicate_to_shards(owned, shares.sums)  # once, whatever other ranks that hold the same field exchange
    x = owned if held is None else held
    if is_capturing():
        raise UnsupportedShardOp("interpolate: the cells under points are found by the points' values, in each step")
    halo = tuple(field.halo.items()) if isinstance(field, ShardTensor) and held is not None else None
    key = grid.key, spec or tuple(field.shape), halo
    plan = _kept(positions, key, lambda: _plan(grid, found, local.detach(), x, field, shares))

    def cells(part: Tensor) -> Tensor:
        return part.reshape(math.prod(lead), part.shape[len(lead) :].numel())

    values = [cells(x)]
    if not values[0].shape[1]:
        values.append(values[0].new_zeros(len(values[0]), 1))  # the cell of points outside
    if plan.exchange is not None:
        values.append(plan.exchange.ghosts_of(cells(owned).T).T)
    result = _summed(torch.cat(values, 1) if len(values) > 1 else values[0], plan.ids, found).view(*lead, len(local))
    result = all_gather_v(result, parts, len(lead), shares.alike)
    if points is None or points.is_replicated:
        return result
    dims = [len(lead) if dim == 0 else None for dim in points.dims]
    return ShardTensor(result, points.derive((*lead, points.global_shape[0]), dims, points.sizes))

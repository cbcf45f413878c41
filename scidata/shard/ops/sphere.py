"""torch-harmonics' own kernels: convolutions and attention on the sphere, by lists of neighbours on whole latitudes.

A list has for each row, of the result or of a transposed convolution's input, its neighbours on the other grid. A rank
uses those of its own rows. A convolution's input, and keys and values, are gathered; what a transposed convolution adds
up on each rank is summed by their owners. Longitudes are whole on each rank meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.collectives import all_gather_v, reduce_scatter_v
from scidata.shard.op_table import TensorFunction
from scidata.shard.ops.align import finish, on_parts
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import as_sharded, tied_to, to_layout, whole_along
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_CONTRACTION = "_disco_s2_contraction_optimized"


def _of_rows(
    spec: ShardSpec, dim: int, starts: Tensor, kernels: Tensor, rows: Tensor, neighbours: Tensor, weights: Tensor
) -> list[Tensor]:
    """Cut lists of neighbours to this rank's rows."""
    first, count = spec.offsets[dim], spec.local_shape[dim]
    if count == spec.global_shape[dim]:
        return [starts, kernels, rows, neighbours, weights]
    mine = (rows >= first) & (rows < first + count)
    ends = torch.cat([mine.new_zeros(1, dtype=torch.int64), mine.cumsum(0)])[starts]
    held = ends[1:] > ends[:-1]  # a list is of one row
    return [torch.cat([ends[:1], ends[1:][held]]), kernels[mine], rows[mine] - first, neighbours[mine], weights[mine]]


def _layout(spec: ShardSpec, places: Mapping[int, int], shape: Sequence[int]) -> ShardSpec:
    """Return a result's layout: a dim that stays or moves keeps its split; on another grid it is cut evenly."""
    dims = [None if d is None else places.get(d, d) for d in spec.dims]
    sizes = [
        own
        if old is None or new is None or spec.global_shape[old] == shape[new]
        else even_sizes(shape[new], len(own or ()))
        for old, new, own in zip(spec.dims, dims, spec.sizes, strict=True)
    ]
    return spec.derive(shape, dims, sizes)


def _placed(local: Tensor, computed: ShardSpec, wanted: ShardSpec) -> Tensor:
    """Split the longitudes again."""
    result = to_layout(ShardTensor(local, computed), wanted)
    return finish(result.local, result.spec)


@handles(f"disco_kernels.{_CONTRACTION}", "disco_kernels.forward")  # custom functions call the latter
def convolve(
    func: TensorFunction,
    x: ShardTensor,
    starts: Tensor,
    kernels: Tensor,
    rows: Tensor,
    neighbours: Tensor,
    weights: Tensor,
    *sizes: int,
) -> Tensor:
    """Weigh the neighbours of each row: (batch, channel, lat, lon) to (batch, channel, basis, lat, lon)."""
    basis, num_lat, num_lon = sizes
    shape, places = (*x.shape[:2], basis, num_lat, num_lon), {2: 3, 3: 4}
    whole = whole_along(x, 3)
    spec, axis, local = _layout(whole.spec, places, shape), whole.spec.axis_of_dim(2), whole.local
    if axis is not None:
        local = all_gather_v(local, whole.spec.sizes_of(axis), 2, spec.group(axis), grad="sum")
    lists = _of_rows(spec, 3, starts, kernels, rows, neighbours, weights)
    result = func(local, *lists, basis, spec.local_shape[3], num_lon)
    return _placed(tied_to(result, [local]), spec, _layout(x.spec, places, shape))


@handles("disco_kernels._disco_s2_transpose_contraction_optimized", "disco_kernels.backward")
def convolve_back(
    func: TensorFunction,
    x: ShardTensor,
    starts: Tensor,
    kernels: Tensor,
    rows: Tensor,
    neighbours: Tensor,
    weights: Tensor,
    *sizes: int,
) -> Tensor:
    """Sum for each neighbour of a row: (batch, channel, basis, lat, lon) to (batch, channel, lat, lon)."""
    basis, num_lat, num_lon = sizes
    x = whole_along(x, 2)
    shape, places = (*x.shape[:2], num_lat, num_lon), {3: 2, 4: 3}
    whole = whole_along(x, 4)
    spec, axis = _layout(whole.spec, places, shape), whole.spec.axis_of_dim(3)
    lists = _of_rows(whole.spec, 3, starts, kernels, rows, neighbours, weights)
    result = func(whole.local, *lists, basis, num_lat, num_lon)
    if axis is not None:
        result = reduce_scatter_v(result, spec.sizes_of(axis), 2, spec.group(axis))
    return _placed(result, spec, _layout(x.spec, places, shape))


@handles("disco_kernels._disco_s2_fused_conv_optimized", "disco_kernels._disco_s2_conv_save_x_optimized")
def convolve_fused(x: Tensor, weight: Tensor, *given: Tensor | int) -> Tensor:
    """Convolve, and multiply by weights, one after the other."""
    lists = given[:5]
    basis, num_lat, num_lon, groups, channels = (int(n) for n in given[11:16])
    found = getattr(torch.ops.disco_kernels, _CONTRACTION)(x, *lists, basis, num_lat, num_lon)
    found = found.reshape(len(x), groups, channels, basis, num_lat, num_lon)
    result = torch.einsum("bgckxy,gock->bgoxy", found, weight.to(x.dtype))
    return result.reshape(len(x), -1, num_lat, num_lon)


@handles("attention_kernels.permute_to_nhwc")
def channels_last(x: Tensor) -> Tensor:
    """Move channels behind latitude and longitude."""
    return x.permute(0, 2, 3, 1).contiguous()


@handles("attention_kernels.permute_to_nchw")
def channels_first(x: Tensor) -> Tensor:
    """Move channels back."""
    return x.permute(0, 3, 1, 2).contiguous()


@handles("attention_kernels._neighborhood_s2_attention_optimized")
def attend(
    func: TensorFunction,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    weights: Tensor,
    neighbours: Tensor,
    starts: Tensor,
    arcs: Tensor,
    arc_starts: Tensor,
    *sizes: int,
) -> Tensor:
    """Attention of each point to its neighbours: all are (batch, lat, lon, channel). Keys and values are gathered."""
    heads, lon_in, lat_out, lon_out = sizes
    given = [whole_along(whole_along(whole_along(x, 1), 2), 3) for x in (keys, values)]
    asked = whole_along(whole_along(queries, 2), 3)
    if lon_out > lon_in or lat_out > keys.shape[1]:  # lists are of the rows of keys
        asked = whole_along(asked, 1)
    first = asked.spec.offsets[1] if isinstance(asked, ShardTensor) else 0

    def compute(key: Tensor, value: Tensor, query: Tensor) -> Tensor:
        count, lists = query.shape[1], [neighbours, starts, arcs, arc_starts]
        if count < lat_out:
            rows = slice(first, first + count + 1)
            lists = [each for pair in ((neighbours, starts[rows]), (arcs, arc_starts[rows])) for each in _part(*pair)]
        result = func(key, value, query, weights, *lists, heads, lon_in, count, lon_out)
        return tied_to(result, [key, value, query])

    labels = [
        ["batch", "of keys", "around", "key"],
        ["batch", "of keys", "around", "value"],
        ["batch", "lat", "lon", "key"],
    ]
    extents: dict[Hashable, int] = {"lat": lat_out, "lon": lon_out}
    result = on_parts(func, compute, [*given, asked], labels, ["batch", "lat", "lon", "value"], extents)
    wanted = queries.spec if isinstance(queries, ShardTensor) else None
    if wanted is None or (not isinstance(result, ShardTensor) and wanted.is_replicated):
        return result
    result = as_sharded(result, wanted)
    return _placed(result.local, result.spec, _layout(wanted, {}, result.shape))


def _part(lists: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lists between the first start and the last, and where each begins among them."""
    return lists[int(starts[0]) : int(starts[-1])], starts - starts[0]

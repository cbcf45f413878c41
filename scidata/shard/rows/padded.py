"""Parts with their halo in memory: where the owned rows lie in one, and one made by exchanging rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scidata.core.bounds import halo_widths
from scidata.errors import ShardLayoutError
from scidata.shard.rows.halo import halo_exchange_dim
from scidata.shard.spec import HaloDim, ShardSpec


def halo_dims(
    halo: Mapping[int, int | tuple[int, int]], periodic: Sequence[int], spec: ShardSpec
) -> dict[int, HaloDim]:
    """Return widths as users type them, ``{dim: width or (lo, hi)}`` and the dims that wrap, by dims from 0 on."""
    wraps, wanted = {dim % spec.ndim for dim in periodic}, {}
    for dim, width in halo.items():
        lo, hi = (width, width) if isinstance(width, int) else width
        wanted[dim % spec.ndim] = HaloDim(lo=lo, hi=hi, periodic=dim % spec.ndim in wraps)
    return wanted


def owned_of(padded: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> Tensor:
    """Return the owned rows of a part that holds its halo, as a view.

    Raises
    ------
    ShardLayoutError
        ``padded`` does not have the owned shape plus its halo.
    """
    shape, below = list(spec.local_shape), {}
    for dim, widths in halo.items():
        below[dim], above = halo_widths(*spec.dim_bounds(dim), **vars(widths))
        shape[dim] += below[dim] + above
    if tuple(padded.shape) != tuple(shape):
        raise ShardLayoutError(
            f"the padded part has shape {tuple(padded.shape)}, but owned {spec.local_shape} and halo {dict(halo)} make "
            f"{tuple(shape)} ({spec})"
        )
    owned = padded
    for dim, start in below.items():
        owned = owned.narrow(dim, start, spec.local_shape[dim])
    return owned


def exchange_halo(local: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> Tensor:
    """Return the owned rows with their halo along each dim. Collective, differentiable."""
    for dim, widths in halo.items():
        axis = spec.axis_of_dim(dim)
        sizes = (spec.global_shape[dim],) if axis is None else spec.sizes_of(axis)
        group = None if axis is None else spec.group(axis)
        local = halo_exchange_dim(local, sizes, dim, widths.lo, widths.hi, widths.periodic, group)
    return local

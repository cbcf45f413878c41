"""The order that a sampler's arguments ask for, and the checks that they fit together."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.checks import check_int
from scidata.core.types import FloatArray, IntArray
from scidata.data.order import MAX_DRAWN, Mixture, Order
from scidata.errors import ConfigError


def order_of(
    dataset: Sized,
    shuffle: bool,
    seed: int,
    weights: npt.ArrayLike | None,
    draws: int | None,
    sizes: npt.ArrayLike | None,
    group: int | None,
    window: int | None,
) -> Order:
    """Return the order that ``DistributedSampler``'s arguments ask for; ``window`` is None unless it is by blocks."""
    count = len(dataset)
    mixture: Mixture | None = getattr(dataset, "mixture", None)
    chosen = {"weights": weights is not None, "sizes": sizes is not None}
    for name, given in chosen.items():
        if given and not shuffle:
            raise ConfigError(f"{name} decides the order, which shuffle=False fixes; leave out one of them")
    if weights is not None and mixture is not None:
        raise ConfigError("weights: the data set is a mix, whose ratios decide how often samples come; leave it out")
    draws = None if draws is None else check_int("num_samples", draws)
    blocks = None if window is None else _blocks_of(dataset, max(count, draws or 0), has_sizes=sizes is not None)
    group = None if group is None else check_int("group", group)
    if max(count, draws or 0) > MAX_DRAWN and (weights is not None or sizes is not None):
        raise ConfigError(
            f"weights, sizes: {count} samples and num_samples={draws}: such an order is listed whole, of at most "
            f"{MAX_DRAWN} samples; leave weights and sizes out, or take part of the data set with scidata.subset"
        )
    if draws is not None and (weights is None or draws < 1):
        raise ConfigError(f"num_samples={draws}: the number of draws by weights, from 1; leave it out without weights")
    if (sizes is None) != (group is None) or (group is not None and group < 1):
        raise ConfigError(
            f"sizes and group={group} belong together: group is the global batch, or a multiple of it, from 1"
        )
    return Order(
        num_samples=count,
        shuffle=shuffle,
        seed=seed,
        weights=_of_samples("weights", weights, count),
        draws=draws,
        mixture=mixture,
        sizes=_of_samples("sizes", sizes, count),
        group=group,
        blocks=blocks,
        stretches=dataset.stretches() if window is not None and hasattr(dataset, "stretches") else None,
        lanes=window or 1,
    )


def _blocks_of(dataset: Any, count: int, *, has_sizes: bool) -> IntArray:
    if count > MAX_DRAWN:
        raise ConfigError(f'shuffle="blocks": {count} samples are too many to list; take part of them (scidata.subset)')
    if has_sizes:
        raise ConfigError('sizes decide the order, and so does shuffle="blocks"; leave out one of them')
    if not hasattr(dataset, "blocks"):
        raise ConfigError(
            f'shuffle="blocks": {type(dataset).__name__} does not say which samples share chunks, as grids of '
            "open_dataset do, and what scidata.subset, concat and mix make of them; use shuffle=True"
        )
    return dataset.blocks()


def _of_samples(name: str, values: npt.ArrayLike | None, count: int) -> FloatArray | None:
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {count} numbers are needed, one a sample, not {values!r}") from None
    if array.shape != (count,) or not np.isfinite(array).all() or array.min() < 0 or array.sum() <= 0:
        raise ConfigError(
            f"{name}: {count} finite numbers from 0, one a sample and not all 0, are needed, not an array of shape "
            f"{array.shape}" + (f" from {array.min()} to {array.max()}" if array.size else "")
        )
    return array

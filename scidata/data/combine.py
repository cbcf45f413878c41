"""``subset``, ``concat`` and ``mix``: make one data set of several, or of part of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from scidata.core.keywords import checked_keywords
from scidata.data.adapter import DatasetAdapter, Readable
from scidata.data.combined_dataset import CombinedDataset, SampleT, combined_dataset
from scidata.data.order import MAX_DRAWN, Mixture
from scidata.errors import ConfigError, UnknownNameError, near_matches


@checked_keywords
def subset(dataset: Readable[SampleT], indices: Sequence[int] | npt.ArrayLike) -> CombinedDataset[SampleT]:
    """Return the samples ``indices`` of a data set, in this order.

    As ``torch.utils.data.Subset``, which :class:`scidata.DataLoader` takes too.

    Parameters
    ----------
    dataset : data set
        Of :func:`scidata.open_dataset`, or made of such.
    indices : Sequence[int] or array_like
        ``(num,)`` integers; negative ones count from the end, repeats are legal.

    Raises
    ------
    ConfigError
        Indices that are not in the data set.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> held_out = scidata.subset(ds, range(0, len(ds), 2))  # every second for validation
    >>> len(held_out), bool((held_out[1]["u"] == ds[2]["u"]).all())
    (2, True)
    """
    (count,) = _lengths("subset", [dataset])
    if isinstance(indices, Sized) and len(indices) > MAX_DRAWN:
        raise ConfigError(
            f"subset: {len(indices)} indices, which are listed whole, of at most {MAX_DRAWN}; crop or stride the data "
            "set where it is opened, with isel="
        )
    chosen = np.asarray(indices)
    if chosen.size == 0:
        chosen = chosen.astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise ConfigError(f"subset: indices are integers in one dimension, not {chosen.dtype} of shape {chosen.shape}")
    if chosen.size and not -count <= chosen.min() <= chosen.max() < count:
        raise ConfigError(f"subset: indices from {chosen.min()} to {chosen.max()}, but there are {count} samples")
    chosen = chosen.astype(np.int64) % max(1, count)
    return combined_dataset([dataset], chosen)


def concat(*datasets: Readable[SampleT]) -> CombinedDataset[SampleT]:
    """Return the samples of several data sets, one after another.

    Grids of the same shapes stack into batches; of others, and of several kinds, take samples one by one with
    ``DataLoader(batch_size=None)``.

    Parameters
    ----------
    *datasets : data set
        Of :func:`scidata.open_dataset`, or made of such, one by one.

    Raises
    ------
    ConfigError
        None, or opened with other meshes.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> twice = scidata.concat(ds, ds)
    >>> len(twice), bool((twice[5]["u"] == ds[1]["u"]).all())
    (8, True)
    """
    if not datasets:
        raise ConfigError("concat: there is no data set")
    _lengths("concat", datasets)
    return combined_dataset(datasets)


@checked_keywords
def mix(
    datasets: Sequence[Readable[SampleT]] | Mapping[str, Readable[SampleT]],
    ratios: Sequence[float] | Mapping[str, float],
    *,
    num_samples: int | None = None,
) -> CombinedDataset[SampleT]:
    """Return the samples of several data sets, drawn in the given ratios.

    The numbering is that of :func:`concat`. The ratios are for :class:`scidata.DistributedSampler`, which
    :class:`scidata.DataLoader` makes by itself: every stretch of its order has the ratios, as nearly as whole samples
    can, and each data set goes through all of its samples before it repeats one, over as many epochs as that takes.

    Parameters
    ----------
    datasets, ratios : Sequence or Mapping
        By name, or in the same order.
    num_samples : int or None, optional
        Samples of an epoch; default as many as there are until a data set has to repeat one.

    Raises
    ------
    ConfigError
        A ratio that is not positive, an empty data set.
    UnknownNameError
        Ratios of other names.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> era5 = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> cmip = scidata.subset(era5, [0, 1])
    >>> both = scidata.mix({"era5": era5, "cmip": cmip}, {"era5": 3, "cmip": 1}, num_samples=8)
    >>> loader = scidata.DataLoader(both, batch_size=4, sampler=scidata.DistributedSampler(both))
    >>> [sum(index >= len(era5) for index in batch.index) for batch in loader]  # of cmip
    [1, 1]
    """
    if isinstance(datasets, Mapping) != isinstance(ratios, Mapping):
        raise ConfigError("mix: give both data sets and ratios by name, or both in order")
    if isinstance(datasets, Mapping) and isinstance(ratios, Mapping):
        for name in [*(name for name in ratios if name not in datasets), *(n for n in datasets if n not in ratios)]:
            lacks, near = ("data set", datasets) if name in ratios else ("ratio", ratios)
            raise UnknownNameError(f"mix: {name!r} has no {lacks}{near_matches(name, near)}")
        ratios = [ratios[name] for name in datasets]
    given = list(datasets.values()) if isinstance(datasets, Mapping) else datasets
    lengths = _lengths("mix", given)
    try:
        numbers = tuple(float(ratio) for ratio in ratios)
    except (TypeError, ValueError):
        raise ConfigError(f"mix: ratios must be positive numbers, not {list(ratios)}") from None
    mixture = Mixture.of(tuple(lengths), numbers, num_samples)
    return combined_dataset(list(given), mixture=mixture)


def _lengths(where: str, datasets: Iterable[object]) -> list[int]:
    lengths = []
    for dataset in datasets:
        if isinstance(dataset, list | tuple):
            raise ConfigError(f"{where}: give the data sets one by one, {where}(a, b) or {where}(*datasets)")
        if not isinstance(dataset, Sized):
            raise ConfigError(f"{where}: expected data sets of scidata.open_dataset, not {type(dataset).__name__}")
        lengths.append(len(dataset))
    return lengths


def as_combined(dataset: Any) -> Any:
    """Convert torch's ``Subset`` or ``ConcatDataset`` of such data sets; return other data sets unchanged."""
    if type(dataset) is Subset and _is_readable(inner := as_combined(dataset.dataset)):
        return subset(inner, dataset.indices)
    if type(dataset) is ConcatDataset:
        inners = [as_combined(each) for each in dataset.datasets]
        if all(map(_is_readable, inners)):
            return concat(*inners)
    return dataset


def _is_readable(dataset: object) -> bool:
    return not DatasetAdapter(dataset).lacks("read_local")

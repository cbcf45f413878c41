"""``join``: match the samples of several data sets, and make one data set of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.checks import Duration, check_function, check_mapping
from scidata.core.keywords import checked_keywords
from scidata.data.adapter import Readable
from scidata.data.combine import as_combined
from scidata.data.combined_dataset import combined_dataset, leaf_of
from scidata.data.joined_dataset import BufferedJoined, JoinedDataset
from scidata.data.joined_sample import JoinedSample
from scidata.data.keys import Keys, as_keys, match_keys
from scidata.errors import ConfigError, UnknownNameError, check_known, near_matches
from scidata.grids.labels import label_text

#: What gives the keys of a data set's samples: a name, a function of the data set, or the keys.
KeysOf: TypeAlias = str | Callable[[Any], npt.ArrayLike] | npt.ArrayLike


@checked_keywords
def join(
    datasets: Mapping[str, Readable[Any]],
    on: KeysOf | Mapping[str, KeysOf],
    *,
    how: str = "inner",
    tolerance: Duration | None = None,
    at: Mapping[str, Duration] | None = None,
    transform: Callable[[JoinedSample], object] | None = None,
) -> JoinedDataset:
    """Join samples of several data sets with the same key, such as a time: each result holds one sample of each.

    Keys are read from metadata, the same on every rank. The order is that of the first data set. Data sets may differ
    in kind, steps, resolution and the axes that they are split over; not in the mesh.

    Parameters
    ----------
    datasets : Mapping[str, data set]
        Of :func:`scidata.open_dataset`, or made of such, by the names that parts of samples have.
    on : str or Callable or array_like, or a Mapping of them
        Source of each sample's key: a coordinate along the dimension of samples, another array on it, a value of
        stored samples, ``"name"`` (see ``sample_keys`` of a data set); a function of the data set that returns keys,
        ``(len(ds),)``; or the keys. By data set if they differ: ``{"forecast": "valid_time", "truth": "time"}``.
        A sample of several steps has the key of its step 0.
    how : {"inner", "left"}
        Which keys of the first data set are kept: the ones present in all others, or all. If another lacks a key, its
        part is an empty cloud of points; for other kinds of data this is an error.
    tolerance : str or timedelta or number or None, optional
        Largest difference of matching keys, ``"30min"``; the nearest key counts, the earlier one of two equally near.
        Default: keys must be equal.
    at : Mapping[str, str or timedelta or number] or None, optional
        Offsets by data set: ``{"obs": "-6h"}`` takes the observations of six hours before.
    transform : Callable[[JoinedSample], object] or None, optional
        Called with each sample, after the parts' own transforms.

    Raises
    ------
    ConfigError
        Keys that are not there, or do not compare (days of a calendar that others lack); a key that several samples
        of another data set than the first have; no key in common; with ``how="left"`` a part that cannot be empty; data
        sets of other meshes, or a :func:`mix` (mix joins instead).
    UnknownNameError
        ``at`` or ``on`` names a data set that is not there.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=6, num_lat=7, num_lon=8)
    >>> _ = make_grid("coarse.zarr", num_times=4, num_lat=4, num_lon=4)
    >>> fine, coarse = (scidata.open_dataset(f"{name}.zarr", fields=["u"]) for name in ("era5", "coarse"))
    >>> ds = scidata.join({"fine": fine, "coarse": coarse}, on="time")
    >>> for batch in scidata.DataLoader(ds, batch_size=2):
    ...     print(batch.key.astype("M8[h]"), tuple(batch["fine"]["u"].shape), tuple(batch["coarse"]["u"].shape))
    ['2020-01-01T00' '2020-01-01T06'] (2, 3, 7, 8) (2, 3, 4, 4)
    ['2020-01-01T12' '2020-01-01T18'] (2, 3, 7, 8) (2, 3, 4, 4)
    """
    given = _checked(datasets)
    check_function("transform", transform)
    if how not in ("inner", "left"):
        raise ConfigError(
            f"how={how!r}: expected 'inner' or 'left'{near_matches(how, ('inner', 'left'), listed=False)}"
        )
    check_mapping("at", at, "{'obs': '-6h'}")
    offsets = {} if at is None else dict(at)
    check_known("join: at names no data set", list(offsets), given)
    if isinstance(on, Mapping):
        check_known("join: on names no data set", list(on), given)
        if lacking := [name for name in given if name not in on]:
            raise ConfigError(
                f"join: on has no entry for {lacking[0]!r}; it names one for each data set, or is one for all"
            )
    by_name = on if isinstance(on, Mapping) else dict.fromkeys(given, on)
    keys = {name: _keys_of(name, dataset, by_name[name]) for name, dataset in given.items()}
    match = match_keys(keys, keep_all=how == "left", at=offsets, tolerance=tolerance)
    if not len(match.keys):
        shown = "; ".join(f"{name!r} has {_shown(own)}" for name, own in keys.items())
        raise ConfigError(f"join: no key is in all data sets: {shown}. Give tolerance=, or offsets with at=")
    parts = {}
    for name, rows in match.rows.items():
        parts[name] = combined_dataset([given[name]], np.maximum(rows, 0))
        if (rows < 0).any() and getattr(leaf_of(given[name]), "kind", None) != "points":
            said = next(text for text in match.texts if text.startswith(f"no sample of {name!r}"))
            raise ConfigError(
                f"join: how='left': {said}; only clouds of points can be empty. how='inner' leaves these keys out"
            )
    joined = BufferedJoined if all(hasattr(part, "buffer_specs") for part in parts.values()) else JoinedDataset
    by_names = all(isinstance(each, str) for each in by_name.values())
    options = {"how": how, "tolerance": tolerance, "at": offsets or None}
    said = f"joined on {(dict(on) if isinstance(on, Mapping) else on)!r}" if by_names else "joined on keys"
    said += "".join(f", {name}={given!r}" for name, given in options.items() if given is not None)
    return joined(parts, match, said=said, transform=transform)


def _checked(datasets: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError("join: give data sets by name, join({'analysis': a, 'obs': o}, on='time')")
    for name, dataset in datasets.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"join: {name!r} is no name of a data set: a text without '/' was expected")
        if getattr(dataset, "mixture", None) is not None:
            raise ConfigError(f"join: {name!r} is a mix, whose ratios a join cannot keep; mix the joins instead")
    return {name: as_combined(dataset) for name, dataset in datasets.items()}


def _keys_of(name: str, dataset: Any, on: KeysOf) -> Keys:
    if isinstance(on, str):
        if not hasattr(dataset, "sample_keys"):
            raise ConfigError(
                f"join: {name!r} is a {type(dataset).__name__}, which has no sample_keys; give its keys, or a function "
                f"that returns them: on={{{name!r}: lambda ds: …}}"
            )
        try:
            return as_keys(dataset.sample_keys(on))
        except (ConfigError, UnknownNameError) as e:
            raise ConfigError(f"join: {e}; where names differ, give one for each: on={{{name!r}: …}}") from None
    keys = as_keys(on(dataset) if callable(on) else on)
    if keys.shape != (len(dataset),):
        raise ConfigError(f"join: keys of {name!r} have the shape {keys.shape}, for {len(dataset)} samples")
    return keys


def _shown(keys: Keys) -> str:
    return f"{label_text(keys[0])} to {label_text(keys[-1])}" if len(keys) else "no samples"

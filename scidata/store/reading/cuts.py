"""Where the parts of a stored sample begin: evenly, by a cost of each row, or as the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import explicit_bounds
from scidata.core.options import Weights
from scidata.core.types import IntArray
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.order.cuts import cut_bounds, equal_bounds, prefix_of
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.store import Store
from scidata.store.format.write import BLOCK_ROWS
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.sets import checked_costs


def checked_weights(store: Store, weights: Weights) -> str | npt.NDArray[np.float64] | dict[str, float] | None:
    """Check what the manifest alone can tell of weights.

    Raises
    ------
    UnknownNameError, ConfigError
        No such field, not one number per row, or edges that the store does not have.
    """
    manifest = store.manifest
    if weights is None:
        return None
    if manifest.kind == "hetero":
        return checked_costs(store, weights)
    if isinstance(weights, Mapping):
        raise ConfigError(
            f"{store.path}: weights by set are for graphs between several node sets, not a {manifest.kind}"
        )
    if not isinstance(weights, str):
        return np.asarray(weights, np.float64)
    if weights == "edges":
        if "edge" not in manifest.entities:
            raise ConfigError(f"{store.path}: weights='edges', but the store has no edges")
        return weights
    name = weights.removeprefix(f"{manifest.entity}/")
    info = manifest.fields.get(f"{manifest.entity}/{name}")
    if info is None:
        known = [f.name for f in manifest.fields.values() if f.entity == manifest.entity]
        raise UnknownNameError(
            f"{store.path}: weights: no field {weights!r} of each {manifest.entity}"
            f"{near_matches(name, [*known, 'edges'])}"
        )
    if len(info.dims) != 1:
        raise ConfigError(f"{store.path}: weights are one number per {manifest.entity}; {weights!r} has {info.dims}")
    return name


def check_cut(bounds: object, weights: object, *, what: str, known: Sequence[str] = ("even",)) -> None:
    """Check that bounds are named as they can be, and not given beside weights.

    Raises
    ------
    ConfigError
    """
    if weights is not None and not (isinstance(bounds, str) and bounds == "even"):
        raise ConfigError("weights and explicit bounds exclude each other: both say where to cut")
    if isinstance(bounds, str) and bounds not in known:
        names = ", ".join(map(repr, known))
        raise ConfigError(f"bounds={bounds!r}: {what} cut {names}, by weights, or by explicit bounds")


def bounds_of_sample(bounds: object, index: int) -> Any:
    """Return what bounds, of all samples or by sample, say of one.

    Raises
    ------
    ConfigError
        They say nothing of it.
    """
    if not isinstance(bounds, Mapping) or all(isinstance(key, str) for key in bounds):  # those by node set
        return bounds
    if index not in bounds:
        raise ConfigError(f"bounds has no entry for sample {index}; it has {sorted(bounds)}")
    return bounds[index]


def bounds_of_rows(
    access: RowAccess,
    info: SampleInfo,
    num_parts: int,
    *,
    explicit: Any = None,
    weights: str | npt.NDArray[np.float64] | None = None,
) -> IntArray:
    """Return the bounds of the nodes or points of one sample.

    Weights that the store was written with are read from its prefix sums, one per block of rows; ``"edges"`` and
    fields otherwise from the whole array.

    Raises
    ------
    ConfigError
        Bounds that do not fit the sample, or weights that are no costs of its rows.
    """
    num_rows = info.counts[info.entity]
    if explicit is not None:
        return explicit_bounds(explicit, num_rows, num_parts)
    if weights is None:
        return equal_bounds(num_rows, num_parts)
    if isinstance(weights, str) and weights == info.settings.get("weights"):
        marks = np.append(np.arange(0, num_rows, BLOCK_ROWS), num_rows)
        return cut_bounds(access.rows("blocks/weight_prefix", 0, len(marks)), num_parts, rows=marks)
    if isinstance(weights, str):
        if weights == "edges":
            return cut_bounds(access.rows("csr/indptr", 0, num_rows + 1), num_parts)
        return cut_bounds(prefix_of(access.rows(f"{info.entity}/{weights}", 0, num_rows)), num_parts)
    num_source = info.source_counts[info.entity]
    if weights.shape != (num_source,):
        raise ConfigError(
            f"sample {info.index} ({info.name}): weights of shape {weights.shape} for {num_source} {info.entity}s"
        )
    return cut_bounds(prefix_of(weights[access.rows(f"{info.entity}/original_id", 0, num_rows)]), num_parts)

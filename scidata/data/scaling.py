"""Normalising: ``(x - shift) / scale`` in place on arrays read from files, and its inverse on any tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from scidata.core.checks import check_choice, names_of
from scidata.core.passes import FieldPass
from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray
from scidata.data.statistics_table import FieldStatistics, Statistics
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, check_known, near_matches

#: From statistics to the shift and the scale.
_Method: TypeAlias = Callable[[FieldStatistics], tuple[FloatArray, FloatArray]]

METHODS: Mapping[str, _Method] = {
    "mean_std": lambda found: (found.mean, found.std),
    "min_max": lambda found: (found.min, found.max - found.min),
    "std": lambda found: (np.zeros_like(found.mean), found.std),
}
_ZERO = {"mean_std": "deviation", "min_max": "range", "std": "deviation"}
_PIECE = 1 << 15  # block size: both operations run while a block is in a core's L2 cache
_FEW = 1 << 10  # of fewer that share shift and scale, all are done by broadcasting


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale:
    """Normalisation of one field; ``shift`` and ``scale`` are float64 with all of ``dims``, each of size 1 or full."""

    dims: tuple[str, ...]
    shift: FloatArray
    scale: FloatArray

    def local(self, rows: Mapping[str, IntArray]) -> Scale:
        """Return the scale for a part of the field with these rows along some dims."""
        shift, scale = self.shift, self.scale
        for axis, dim in enumerate(self.dims):
            if dim in rows and shift.shape[axis] > 1:
                shift, scale = (np.take(x, rows[dim], axis=axis) for x in (shift, scale))
        return Scale(dims=self.dims, shift=shift, scale=scale)

    def apply(self, values: AnyArray) -> None:
        """Normalise floating values of the field's dims in place, in their dtype (float16 in float32)."""
        if not values.size:
            return
        if math.prod(self.shift.shape) == 1 and values.flags.c_contiguous:
            _scale_run(values.reshape(-1), float(self.shift.flat[0]), float(self.scale.flat[0]))
            return
        # Each run of values behind the last dim that matters has one shift and one scale: of (level: 3, lat: 721,
        # lon: 1440) by level there are 3 runs of 721 * 1440 values.
        lead = max((axis for axis, size in enumerate(self.shift.shape) if size > 1), default=-1) + 1
        run = math.prod(values.shape[lead:])
        if run < _FEW or not values.flags.c_contiguous:
            self._broadcast(values)
            return
        shape = values.shape[:lead]
        shifts, scales = (np.broadcast_to(x.reshape(x.shape[:lead]), shape) for x in (self.shift, self.scale))
        runs = values.reshape(*shape, run)
        for place in np.ndindex(shape):
            _scale_run(runs[place], float(shifts[place]), float(scales[place]))

    def _broadcast(self, values: AnyArray) -> None:
        work = np.float32 if values.dtype.itemsize < 4 else values.dtype
        shift, factor = self.shift.astype(work), (1 / self.scale).astype(work)
        rows = max(1, _PIECE * len(values) // values.size)
        for first in range(0, len(values), rows):
            piece = values[first : first + rows]
            own = [x if len(x) == 1 else x[first : first + rows] for x in (shift, factor)]
            result = np.subtract(piece, own[0], dtype=work)
            np.multiply(result, own[1], out=piece, casting="same_kind")

    def inverse(
        self, x: torch.Tensor, dims: Sequence[str] | None = None, *, step_dim: str | None = None
    ) -> torch.Tensor:
        """Return ``x * scale + shift``, differentiable; ``x`` has the field's dims, perhaps without ``step_dim``."""
        if dims is None:
            own = [dim for dim in self.dims if dim != step_dim] if x.ndim < len(self.dims) else self.dims
            if x.ndim < len(own):
                raise ConfigError(f"denormalise: a tensor of {x.ndim} dims, but the field has {self.dims}")
            dims = (*("",) * (x.ndim - len(own)), *own)
        if self.shift.size == 1:
            return x * float(self.scale.flat[0]) + float(self.shift.flat[0])
        if lacking := [dim for dim, n in zip(self.dims, self.shift.shape, strict=True) if n > 1 and dim not in dims]:
            raise ConfigError(
                f"denormalise: a field by {lacking[0]!r} has dims {tuple(dims)}; replace(…, dims=) names them"
            )
        shape = [self.shift.shape[self.dims.index(dim)] if dim in self.dims else 1 for dim in dims]
        work = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        scale, shift = (torch.from_numpy(y.reshape(shape)).to(x.device, work) for y in (self.scale, self.shift))
        return (x * scale + shift).to(x.dtype)


def numbers_of(scales: Mapping[str, Scale]) -> dict[str, object]:
    """Return shift and scale of each field as lists; equal normalisations give equal lists."""
    return {name: (scale.dims, scale.shift.tolist(), scale.scale.tolist()) for name, scale in scales.items()}


def _scale_run(values: AnyArray, shift: float, scale: float) -> None:
    kind = values.dtype.type
    if values.dtype.itemsize < 4:
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE]
            np.multiply(np.subtract(piece, np.float32(shift), dtype=np.float32), np.float32(1 / scale), out=piece)
        return
    less, factor = kind(shift), kind(1 / scale)
    for first in range(0, len(values), _PIECE):
        piece = values[first : first + _PIECE]
        np.subtract(piece, less, out=piece)  # before the division: cancelling digits are exact
        np.multiply(piece, factor, out=piece)


def scales_of(
    fields: Mapping[str, tuple[str, ...]],
    passes: Mapping[str, FieldPass],
    stats: Statistics,
    chosen: str | Sequence[str],
    method: str,
) -> dict[str, Scale]:
    """Return shift and scale of each chosen field; ``passes`` provide the labels of its rows."""
    check_choice("method", method, METHODS)
    if not isinstance(stats, Statistics):
        raise ConfigError(
            f"normalise: expected scidata.statistics(…), or Statistics.load(path), not {type(stats).__name__}"
        )
    names = names_of("fields", chosen)
    check_known("normalise: no field", names, fields)
    for name in names:
        if name not in stats.fields:
            raise UnknownNameError(
                f"normalise: no statistics of field {name!r}{near_matches(name, stats.fields)}; gather them, or name "
                "the fields to be normalised with fields="
            )
    return {name: _scale_of(name, fields[name], passes[name], stats, method) for name in names}


def _scale_of(name: str, dims: tuple[str, ...], rows: FieldPass, stats: Statistics, method: str) -> Scale:
    found = stats[name]
    if rows.dtype.kind != "f":
        raise ConfigError(f"normalise: field {name!r} is {rows.dtype}, and only floating ones can be; leave it out")
    if found.units is not None and rows.units is not None and found.units != rows.units:
        raise FieldMismatchError(f"normalise: field {name!r} is in {rows.units!r}, its statistics in {found.units!r}")
    shift, scale = (np.asarray(x, np.float64) for x in METHODS[method](found))
    for axis, dim in enumerate(found.dims):
        places = _places(name, dim, rows, stats, shift.shape[axis])
        shift, scale = (np.take(x, places, axis=axis) for x in (shift, scale))
    wrong = ~(np.isfinite(shift) & np.isfinite(scale) & (scale > 0))
    if wrong.any():
        raise ConfigError(f"normalise: {_fault(name, found, rows, wrong, scale, method)}")
    # a dim that the samples lack has one row
    here = {dim: size for dim, size in zip(found.dims, shift.shape, strict=True) if dim in dims}
    order = [list(here).index(dim) for dim in dims if dim in here]
    shape = [here.get(dim, 1) for dim in dims]
    shift, scale = (x.reshape(tuple(here.values())).transpose(order).reshape(shape) for x in (shift, scale))
    return Scale(dims=dims, shift=shift, scale=scale)


def _places(name: str, dim: str, rows: FieldPass, stats: Statistics, size: int) -> IntArray:
    """Return the statistics' row for each row of the data set along a dim."""
    if dim not in rows.kept:
        raise FieldMismatchError(
            f"normalise: statistics of {name!r} are by {dim!r}, which the field does not have"
            f"{near_matches(dim, rows.kept)}"
        )
    own, known = rows.labels(dim), stats.labels.get(dim)
    if own is not None and known is not None and len(set(known)) == len(known):
        place = {label: number for number, label in enumerate(known)}
        missing = [label for label in own if label not in place]
        if missing:
            raise FieldMismatchError(
                f"normalise: field {name!r} has {dim} {', '.join(map(str, missing[:6]))}, of which there are no "
                f"statistics: they are of {', '.join(map(str, known[:12]))}"
            )
        return np.array([place[label] for label in own], np.int64)
    if rows.size(dim) != size:
        raise FieldMismatchError(
            f"normalise: field {name!r} has {rows.size(dim)} rows along {dim!r}, and its statistics are of {size}"
        )
    return np.arange(size, dtype=np.int64)


def _fault(name: str, found: FieldStatistics, rows: FieldPass, wrong: BoolArray, scale: FloatArray, method: str) -> str:
    first = tuple(int(at[0]) for at in np.nonzero(wrong)) if wrong.ndim else ()
    where = []
    for dim, at in zip(found.dims, first, strict=True):
        labels = rows.labels(dim)
        where.append(f"{dim} {at if labels is None else labels[at]}")
    place = f"field {name!r}" + (f" at {', '.join(where)}" if where else "")
    if scale[first] == 0:
        return f"{place} has a {_ZERO[method]} of 0, one value everywhere; leave the field out with fields="
    return f"{place} has no finite {_ZERO[method]}: no value, or too large ones; leave the field out with fields="

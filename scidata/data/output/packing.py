"""CF packing, the other way round: values to what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout
from scidata.errors import ConfigError
from scidata.sources.cf import decoding_of

_NUMBERS = ("scale_factor", "add_offset", "_FillValue")
_BLOCK = 1 << 20  # values that are packed at a time: their float64 stay in the cache


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How values are stored: ``stored = round((value - offset) / scale)``, NaN as the fill value.

    Attributes
    ----------
    dtype
        As stored, native byte order.
    scale, offset
        None for 1 and 0.
    fill
        What stands for NaN; None where floats are stored as they are, or nothing does.
    said
        ``scale_factor`` and ``add_offset`` as a source has them: their dtypes decide that of decoded values.
    """

    dtype: np.dtype[Any]
    scale: float | None = None
    offset: float | None = None
    fill: Any = None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether values are stored as they are, at most cast to another floating dtype."""
        return self.scale is None and self.offset is None and self.fill is None

    @property
    def missing(self) -> npt.NDArray[Any]:
        """What is stored where there is no value, ``()``."""
        default = np.nan if self.dtype.kind == "f" else 0
        return np.array(default if self.fill is None else self.fill, self.dtype)

    def attributes(self) -> dict[str, Any]:
        """Return what tells readers of it, in the dtypes that the conventions ask for."""
        found: dict[str, Any] = {}
        if self.scale is not None:
            found["scale_factor"] = self.scale
        if self.offset is not None:
            found["add_offset"] = self.offset
        if self.fill is not None:
            found["_FillValue"] = self.fill
        return found | dict(self.said)

    def pack(self, values: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
        """Return values as they are stored, contiguous; they themselves where nothing changes.

        Computes in float64, value by value, so that it does not matter who packs what.

        Raises
        ------
        ConfigError
            A value that cannot be stored: out of the packed range, or missing where nothing stands for that.
        """
        if self.is_plain and (values.dtype == self.dtype or (self.dtype.kind == "f" and values.dtype.kind in "fiu")):
            return np.ascontiguousarray(values, self.dtype).reshape(values.shape)  # of a scalar it makes a vector
        out = np.empty(values.shape, self.dtype)
        flat, into = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            self._pack_block(flat[start : start + _BLOCK], into[start : start + _BLOCK], what)
        return out

    def _pack_block(self, values: npt.NDArray[Any], out: npt.NDArray[Any], what: str) -> None:
        numbers = values.astype(np.float64)
        missing = np.isnan(numbers)
        if self.offset is not None:
            numbers -= self.offset
        if self.scale is not None:
            numbers /= self.scale
        if self.dtype.kind in "iu":
            np.rint(numbers, out=numbers)
            limits = np.iinfo(self.dtype)
            bad = ~missing & ~((numbers >= limits.min) & (numbers <= limits.max))
            if bad.any():
                raise ConfigError(
                    f"{what}: {values[bad][0]} cannot be stored as {self.dtype} with scale_factor {self.scale} and "
                    f"add_offset {self.offset}; give encoding='plain', or another packing with fields="
                )
        if missing.any():
            if self.fill is None and self.dtype.kind in "iu":
                raise ConfigError(
                    f"{what}: NaN cannot be stored as {self.dtype} without a _FillValue; give one with fields="
                )
            numbers[missing] = 0 if self.fill is None or self.dtype.kind == "f" else int(self.fill)
        out[...] = numbers.astype(self.dtype)
        if missing.any() and self.dtype.kind == "f":
            out[missing] = np.nan if self.fill is None else self.fill


def packing_of(layout: ArrayLayout) -> Packing:
    """Return how a source stores a field's values, for writing them in the same way."""
    stored = layout.dtype.newbyteorder("=")
    decoding = decoding_of(layout)
    if decoding is None:
        return Packing(dtype=stored)
    dtype = decoding.view_as.newbyteorder("=") if decoding.view_as is not None else stored
    fills = decoding.fill_values
    return Packing(
        dtype=dtype,
        scale=decoding.scale,
        offset=decoding.offset,
        fill=fills[0] if fills else None,
        said={name: layout.attributes[name] for name in _NUMBERS[:2] if layout.attributes.get(name) is not None},
    )


def packing_given(what: str, given: Mapping[str, Any], default: Packing) -> Packing:
    """Return a packing of which some entries are given: ``dtype``, ``scale_factor``, ``add_offset``, ``_FillValue``.

    Another ``dtype`` alone is stored without the scale, offset and fill value of the source.

    Raises
    ------
    ConfigError
        An entry that is no dtype or number, or a scale of 0.
    """
    numbers = [name for name in _NUMBERS if given.get(name) is not None]
    if not numbers and "dtype" not in given:
        return default
    try:
        dtype = np.dtype(given.get("dtype", default.dtype))
        scale, offset, fill = (float(given[name]) if name in numbers else None for name in _NUMBERS)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{what}: {e}") from None
    if dtype.kind not in "fiu":
        raise ConfigError(f"{what}: dtype {dtype} is no number that is written")
    if scale == 0:
        raise ConfigError(f"{what}: scale_factor is 0, and would lose every value")
    if fill is not None and dtype.kind in "iu" and not np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max:
        raise ConfigError(f"{what}: _FillValue {given['_FillValue']} is no {dtype}")
    return Packing(dtype=dtype, scale=scale, offset=offset, fill=None if fill is None else dtype.type(fill))

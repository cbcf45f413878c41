"""CF packing in reverse: from values to stored numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scidata.core.types import AnyArray, Array, ArrayLayout, BoolArray
from scidata.errors import ConfigError
from scidata.sources.cf import decoding_of

_NUMBERS = ("scale_factor", "add_offset", "_FillValue")
OF_PACKING = (*_NUMBERS, "missing_value", "_Unsigned", "valid_range")
_BLOCK = 1 << 20  # values packed at a time, so that their float64 stay in the cache


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Encoding of values: ``stored = round((value - offset) / scale)``, NaN as the fill value.

    - ``dtype``: as stored, native byte order.
    - ``scale``, ``offset``: None for 1 and 0.
    - ``fill``: the stored number that stands for NaN; None if floats are stored as they are, or there is none.
    - ``said``: ``scale_factor`` and ``add_offset`` as a source has them: their dtypes decide that of decoded values.
    - ``is_packed``: whether values are given as they are stored, which ``decode=False`` reads; the rest then only
      describes them.
    """

    dtype: np.dtype[np.generic]
    scale: float | None = None
    offset: float | None = None
    fill: np.generic | float | None = None
    said: Mapping[str, object] = field(default_factory=dict)
    is_packed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether values are stored unchanged, or at most cast to another floating dtype."""
        return self.scale is None and self.offset is None and self.fill is None

    @property
    def missing(self) -> Array:
        """The stored number of a missing value, ``()``."""
        default = np.nan if self.dtype.kind == "f" else 0
        return np.array(default if self.fill is None else self.fill, self.dtype)

    def attributes(self) -> dict[str, object]:
        """Return the packing's attributes, in the dtypes that the conventions require."""
        numbers = zip(_NUMBERS, (self.scale, self.offset, self.fill), strict=True)
        return {name: number for name, number in numbers if number is not None} | dict(self.said)

    def pack(self, values: AnyArray, what: str) -> AnyArray:
        """Return values as stored, contiguous; the same array if nothing changes.

        Scaled values are computed in float64, one by one, so that they do not depend on the rank that packs them;
        integers that are not scaled stay integers. Raises ConfigError: a value that would be read as another one: out
        of the stored dtype's range, complex, missing where there is no fill value, or equal to the fill value once it
        is stored.
        """
        if self.is_packed:
            return Packing(dtype=self.dtype).pack(values, what)
        if values.dtype.kind == "c":
            raise ConfigError(
                f"{what} is {values.dtype}, and {self.dtype} is written; give its .real and .imag as fields"
            )
        if self.is_plain and np.can_cast(values.dtype, self.dtype):
            return np.ascontiguousarray(values, self.dtype).reshape(values.shape)  # of a scalar it makes a vector
        out = np.empty(values.shape, self.dtype)
        flat, into = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            block = slice(start, start + _BLOCK)
            if (bad := self._pack_block(flat[block], into[block])) is not None:
                first, why = bad
                index = tuple(int(i) for i in np.unravel_index(start + first, values.shape))
                raise ConfigError(f"{what}: {flat[start + first]}, at {list(index)} of this rank's part, {why}")
        return out

    def _pack_block(self, values: AnyArray, out: AnyArray) -> tuple[int, str] | None:
        """Pack values; return the first that would be read as a different one, and the reason, if any."""
        missing = np.isnan(values)
        numbers, to_integers = values, self.dtype.kind in "iu"
        if self.scale is not None or self.offset is not None:
            numbers = values.astype(np.float64)
            numbers -= 0.0 if self.offset is None else self.offset
            numbers /= 1.0 if self.scale is None else self.scale
        if to_integers:
            numbers = np.rint(numbers) if numbers.dtype.kind == "f" else numbers
            lost = ~missing & ~_fits(numbers, self.dtype)
            out[...] = np.where(missing | lost, 0, numbers)
        else:
            with np.errstate(over="ignore"):
                out[...] = numbers
            lost = np.isinf(out) & np.isfinite(values)
        is_scaled = self.scale is not None or self.offset is not None
        scaled = "" if not is_scaled else f" with scale_factor {self.scale} and add_offset {self.offset}"
        if lost.any():
            remedy = "give encoding='plain', or another dtype or packing with fields="
            return int(np.argmax(lost)), f"cannot be stored as {self.dtype}{scaled}; {remedy}"
        if self.fill is not None:
            lost = (out == self.fill) & ~missing
            out[missing] = self.fill
            remedy = "give another _FillValue with fields=, or encoding='plain'"
            why = f"would be stored as the _FillValue {self.fill} of {self.dtype}{scaled}, and read as NaN; {remedy}"
        else:
            lost = missing & to_integers
            why = f"cannot be stored as {self.dtype} without a _FillValue; give one with fields="
        return (int(np.argmax(lost)), why) if lost.any() else None


def _fits(numbers: AnyArray, dtype: np.dtype[Any]) -> BoolArray:
    """Return which numbers an integer dtype can hold; ``max`` may not be a float, but ``max + 1`` is one."""
    limits = np.iinfo(dtype)
    if numbers.dtype.kind != "f":
        return (numbers >= limits.min) & (numbers <= limits.max)
    wide = numbers.astype(np.float64)
    return (wide >= float(limits.min)) & (wide < float(int(limits.max) + 1))


def packing_of(layout: ArrayLayout, *, is_packed: bool) -> Packing:
    """Return the packing of a field in its source; ``is_packed``: values are passed as stored."""
    stored = layout.dtype.newbyteorder("=")
    if is_packed:
        said = {name: layout.attributes[name] for name in OF_PACKING if layout.attributes.get(name) is not None}
        fill = fill_said(said, stored)
        said.pop("_FillValue", None)
        return Packing(dtype=stored, fill=fill, said=said, is_packed=True)
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
    """Return a packing with some given entries: ``dtype``, ``scale_factor``, ``add_offset``, ``_FillValue``.

    Another ``dtype`` alone is stored without the scale, offset and fill value of the source. Raises ConfigError: an
    entry that is no dtype or number, or a scale of 0.
    """
    numbers = [name for name in _NUMBERS if given.get(name) is not None]
    if not numbers and "dtype" not in given:
        return default
    try:
        dtype = np.dtype(given.get("dtype", default.dtype))
        scale, offset = (float(given[name]) if name in numbers else None for name in _NUMBERS[:2])
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{what}: {e}") from None
    if dtype.kind not in "fiu":
        raise ConfigError(f"{what}: dtype {dtype} is no number that is written")
    if scale == 0:
        raise ConfigError(f"{what}: scale_factor is 0, and would lose every value")
    fill = None if _NUMBERS[2] not in numbers else _fill_given(given[_NUMBERS[2]], dtype)
    if fill is None and _NUMBERS[2] in numbers:
        raise ConfigError(f"{what}: _FillValue {given['_FillValue']} is no {dtype}")
    return Packing(dtype=dtype, scale=scale, offset=offset, fill=fill)


def fill_said(attributes: Mapping[str, object], dtype: np.dtype[np.generic]) -> Any:
    """Return the ``_FillValue`` among attributes as stored; None if it is missing or the dtype cannot hold it."""
    given = np.ravel(attributes.get("_FillValue", ()))[:1].tolist()  # type: ignore[call-overload]
    return _fill_given(given[0], dtype) if given and dtype.kind in "iuf" else None


def _fill_given(given: Any, dtype: np.dtype[np.generic]) -> Any:
    """Return a fill value as stored; None if the dtype cannot hold it."""
    try:
        number = np.asarray(given if isinstance(given, int | np.integer) else float(given))
    except (TypeError, ValueError):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            stored = number.astype(dtype)
        return None if np.isinf(stored) and np.isfinite(number) else stored[()]
    exact = np.isfinite(number) and number == np.rint(number) and number.dtype != object and _fits(number, dtype)
    return number.astype(dtype)[()] if exact else None

"""Convert stored values to the destination's: byte order, CF unpacking, one cast. Bit for bit as xarray."""

from __future__ import annotations

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Array, BoolArray, Decoding
from scidata.read.codecs import Scratch

_made: Cache[tuple[Converter, Decoding | None]] = Cache(256)


def converter(stored: np.dtype[np.generic], decoding: Decoding | None, dtype: np.dtype[np.generic]) -> Converter:
    """Return the converter for these arguments, cached by their identity."""
    key = stored, dtype, id(decoding)  # by identity, not by value: 0.0 and -0.0 are equal
    found = _made.get(key)
    if found is None:
        found = _made.put(key, (Converter(stored, decoding, dtype), decoding))  # held, so that its id stays its own
    return found[0]


class Converter:
    """Converts pieces of stored values to the destination's; used by all threads.

    ``stored``: dtype of the raw values, byte order included.
    ``in_place``: True if raw bytes may be read straight into the destination and :meth:`finish` does the rest.
    ``trivial``: True if nothing is left to do after that.
    """

    def __init__(self, stored: np.dtype[np.generic], decoding: Decoding | None, dtype: np.dtype[np.generic]) -> None:
        self.stored = stored
        if decoding is not None and decoding.view_as is not None:
            self.stored = decoding.view_as.newbyteorder(stored.byteorder)
        native = self.stored.newbyteorder("=")
        self.dtype = dtype
        self._swapped = native != self.stored
        self._scale = decoding.scale if decoding is not None else None
        self._offset = decoding.offset if decoding is not None else None
        fills = () if decoding is None else decoding.fill_values
        self._fills = [fill for fill in fills if fill == fill]  # NaN stays NaN
        arithmetic = self._scale is not None or self._offset is not None or bool(self._fills)
        # Arithmetic uses the decoding's dtype; other destination dtypes get one cast of the result.
        self._work = decoding.dtype if decoding is not None and arithmetic else dtype
        self.in_place = native == dtype and self._work == dtype
        self.trivial = self.in_place and not self._swapped and not arithmetic
        self._plain = not arithmetic

    def finish(self, piece: Array, scratch: Scratch) -> None:
        """Convert raw values that were read directly into the 1-D ``piece`` of the destination."""
        if self._swapped:
            piece.byteswap(inplace=True)
        if not self._plain:
            self._compute(piece, self._mask(piece, scratch))

    def copy(self, piece: Array, raw: Array, scratch: Scratch) -> None:
        """Convert ``raw`` values into ``piece`` of the destination, which has the same shape."""
        if self._plain:
            np.copyto(piece, raw, casting="unsafe")
            return
        mask = self._mask(raw, scratch)
        if self._work == self.dtype:
            np.copyto(piece, raw, casting="unsafe")
            self._compute(piece, mask)
            return
        work = scratch.get("work", raw.size * self._work.itemsize).view(self._work).reshape(raw.shape)
        np.copyto(work, raw, casting="unsafe")
        self._compute(work, mask)
        np.copyto(piece, work, casting="unsafe")

    def _mask(self, raw: Array, scratch: Scratch) -> BoolArray | None:
        mask: BoolArray | None = None
        for fill in self._fills:
            if mask is None:
                mask = scratch.get("mask", raw.size).view(np.bool_).reshape(raw.shape)
                np.equal(raw, fill, out=mask)
            else:
                mask |= raw == fill
        return mask if mask is not None and mask.any() else None

    def _compute(self, piece: Array, mask: BoolArray | None) -> None:
        if self._scale is not None:
            np.multiply(piece, self._scale, out=piece)
        if self._offset is not None:
            np.add(piece, self._offset, out=piece)
        if mask is not None:
            np.copyto(piece, complex(np.nan, np.nan) if piece.dtype.kind == "c" else np.nan, where=mask)

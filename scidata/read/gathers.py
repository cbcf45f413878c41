"""Many small copies that are alike but for their places, by one call of NumPy: rows gathered from all over a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """Copies of one shape and stride.

    Attributes
    ----------
    shape, source_strides, dest_strides
        Of each copy; strides in bytes.
    source, dest
        ``(num,)`` int64: first byte of each in the buffer, and in the destination.
    """

    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    dest_strides: tuple[int, ...]
    source: IntArray
    dest: IntArray

    def run(self, buffer: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], dtype: np.dtype[np.generic]) -> None:
        """Copy values of ``dtype`` as they are."""
        ndim, nbytes = len(self.shape), dtype.itemsize
        while ndim and self._runs_on(ndim - 1, nbytes):  # values that are contiguous in both are one
            ndim, nbytes = ndim - 1, nbytes * self.shape[ndim - 1]
        kind, shape = np.dtype(f"V{nbytes}"), self.shape[:ndim]
        from_, source = at_any_byte(buffer, kind, shape, self.source_strides[:ndim], self.source)
        to, dest = at_any_byte(out, kind, shape, self.dest_strides[:ndim], self.dest)
        to[dest] = from_[source]

    def _runs_on(self, dim: int, nbytes: int) -> bool:
        return self.shape[dim] == 1 or self.source_strides[dim] == nbytes == self.dest_strides[dim]


def at_any_byte(
    data: npt.NDArray[np.uint8],
    dtype: np.dtype[np.generic],
    shape: Sequence[int],
    strides: Sequence[int],
    places: IntArray,
) -> tuple[npt.NDArray[np.generic], IntArray]:
    """Return a view of bytes with an item of ``shape`` for every byte that one may begin at, and ``places`` in it.

    Strides may be negative; items overlap.
    """
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    below, above = -sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    num = data.size - below - above - dtype.itemsize + 1
    view: npt.NDArray[np.generic] = np.ndarray((num, *shape), dtype, data.data, below, (1, *strides))
    return view, places - below if below else places

"""Passes over all rows of a field of raw points, as :mod:`scidata.core.passes` describes them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray

if TYPE_CHECKING:
    from scidata.store.raw_points.reader import PointsReader


class PointsPass:
    """One part of one field of some files, each of which is a row; see :class:`~scidata.core.passes.FieldPass`."""

    num_skipped = 0
    num_tiles = 1
    has_steps = False

    def __init__(self, reader: PointsReader, name: str, samples: IntArray, part: int) -> None:
        self._reader = copy.copy(reader)
        self._reader.fields, self._reader.subsample = (name,), None
        self.name, self._part = name, part
        self.dims = reader.dims(name)
        self.kept = tuple(d for k, d in enumerate(self.dims) if k != reader.entity_dim(name))
        self.dtype, self.units = reader.dtype(name), reader.info(name).units
        self._files = np.unique(samples)
        self.bounds = np.arange(len(self._files) + 1, dtype=np.int64)
        self.is_step = np.zeros(len(self._files), np.bool_)

    def read(self, tile: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Read a file's own rows, ``(1, *row)``."""
        return self._reader.read(int(self._files[start]), self._part).fields[self.name][None]

    def places(self, tile: int, dim: str) -> IntArray:
        """Return which of the whole field's rows along ``dim`` a tile has: all of them."""
        return np.arange(self.size(dim), dtype=np.int64)

    def size(self, dim: str) -> int:
        """Return how many rows the field has along a dim other than the points'."""
        return self._reader.global_shape(self.name, 0)[self.dims.index(dim)]

    def labels(self, dim: str) -> None:
        """Return None: points label nothing."""

    def span(self) -> None:
        """Return None: nothing labels files."""

"""A field as readers of grids see it, and one rank's part of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Decoding, Segments
from scidata.plan.array import PlanFamily
from scidata.read import Job

#: A job, with the chunk and the row inside it where it begins, along each dimension.
First: TypeAlias = tuple[Job, tuple[int, ...], tuple[int, ...]]

#: The reads of a sample by field, one for each file that holds a part of it.
Jobs: TypeAlias = dict[str, list[Job]]


@dataclass(frozen=True, kw_only=True)
class Field:
    """Facts that a read of a field needs beyond its layout."""

    dims: tuple[str, ...]  # of one sample, as the user sees them
    source_dims: tuple[str, ...]
    dtype: np.dtype[np.generic]
    decodings: tuple[Decoding | None, ...]  # one per file: packing differs from file to file


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One rank's part of a sample: rows with halo of every dimension, and how many they are. Equal to itself alone."""

    position: tuple[int, ...]  # along the sharding axes
    segments: Mapping[str, Segments]
    shapes: Mapping[str, tuple[int, ...]]  # of each field's buffer
    families: Mapping[str, PlanFamily]  # of each field
    firsts: Cache[list[First]]  # jobs that others are like, of fields that are planned together

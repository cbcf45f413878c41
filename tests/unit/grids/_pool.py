"""Shared by tests: BIG, OPTIONS, ROWS, STEPS, read."""

from __future__ import annotations

from typing import Any

import numpy as np

from scidata.grids.reader import GridReader

ROWS, STEPS = 11, 37


BIG = 1 << 30


def read(reader: GridReader, index: int, rank: int) -> tuple[dict[str, np.ndarray], Any]:
    coordinate = reader.partition.coordinate(rank)
    out = {n: np.full(s.shape, 1e30, s.dtype) for n, s in reader.buffer_specs(coordinate).items()}
    return out, reader.read_into(index, out, coordinate)


OPTIONS = [
    {},
    {"steps": (0, 1, 9)},
    {"steps": (-2, 0, 3), "isel": {"time": slice(30, 2, -1)}},
    {"isel": {"time": slice(1, None, 3), "level": 1}},
    {"fields": ["v"], "halo": {"y": 2}, "periodic": ["y"]},
]

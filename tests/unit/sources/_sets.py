"""Reads of grids by parts, held against the whole: for sources whose chunks lie elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.options import ReadOptions
from scidata.grids.reader import GridReader

HALO = 2


def read_part(reader: GridReader, index: int, place: dict[str, int]) -> dict[str, npt.NDArray[Any]]:
    out = {name: np.empty(spec.shape, spec.dtype) for name, spec in reader.buffer_specs(place).items()}
    reader.read_into(index, out, place)
    return out


def check_parts(path: Any, whole: dict[str, npt.NDArray[Any]], dim: str, **options: Any) -> None:
    """Compare every rank's part of every sample, with halo, one step and windows, with ``(time, …)`` arrays."""
    for num_parts, steps in itertools.product((1, 2, 3), ((0,), (0, 1))):
        read = ReadOptions(shard={dim: "domain"}, halo={dim: HALO}, steps=steps, **options)
        reader = GridReader(path, read, axis_sizes={"domain": num_parts})
        assert set(reader.fields) == set(whole)
        bounds = reader.partition.bounds[dim]
        for index, part in itertools.product(range(reader.num_samples), range(num_parts)):
            found = read_part(reader, index, {"domain": part})
            for name, values in whole.items():
                window = values[index : index + len(steps)] if len(steps) > 1 else values[index]
                axis = reader.dims(name).index(dim)
                rows = slice(
                    max(0, bounds[part] - HALO), min(values.shape[axis + (len(steps) == 1)], bounds[part + 1] + HALO)
                )
                wanted = np.ascontiguousarray(window[(slice(None),) * axis + (rows,)])
                assert found[name].dtype == wanted.dtype
                assert found[name].tobytes() == wanted.tobytes(), (num_parts, steps, index, part, name)
        reader.close()

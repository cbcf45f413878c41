"""Shared by tests: RELATIONS, write_graph."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

RELATIONS = {"grid__to__mesh": 120, "mesh__near__mesh": 60, "mesh__to__grid": 100}


def write_graph(path: Path, sizes: dict[str, int], *, seed: int = 0, num_times: int = 4) -> None:
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for name, num in sizes.items():
            file[f"nodes/{name}/pos"] = random.uniform(size=(num, 2))
        file["nodes/grid/u"] = random.normal(size=(num_times, sizes["grid"]))
        file["nodes/grid/u"].dims[0].label = "time"
        file["nodes/mesh/area"] = random.normal(size=(sizes["mesh"], 3))
        for name, most in RELATIONS.items():
            source, _, target = name.split("__")
            pairs = random.integers(0, [[sizes[source]], [sizes[target]]], (2, most))
            pairs = np.unique(pairs[:, (pairs[0] != pairs[1]) | (source != target)], axis=1)
            pairs = pairs[:, random.permutation(pairs.shape[1])]
            file[f"edges/{name}/edge_index"] = pairs
            file[f"edges/{name}/length"] = random.normal(size=pairs.shape[1])

"""Shared by tests: assert_same_tree, mesh_arrays, mesh_files, tree, write."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.writers import triangulation, write_hdf5


def write(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Path:
    return Path(write_hdf5(path, arrays))


def mesh_arrays(num_nodes: int = 300, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    mesh = triangulation(rng.random((num_nodes, 2)))
    return mesh | {
        "node/u": rng.standard_normal(num_nodes).astype(np.float32),
        "node/wind": rng.standard_normal((num_nodes, 2)),
        "cell/area": rng.random(len(mesh["cells"])),
    }


def mesh_files(folder: Path, num: int, num_nodes: int = 300) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write(folder / f"case{i}.h5", mesh_arrays(num_nodes + 7 * i, seed=i)) for i in range(num)]


def tree(top: str | Path) -> dict[str, Path]:
    return {str(p.relative_to(top)): p for p in sorted(Path(top).rglob("*")) if p.is_file()}


def assert_same_tree(left: str | Path, right: str | Path) -> None:
    a, b = tree(left), tree(right)
    assert a.keys() == b.keys()
    for name in a:
        assert filecmp.cmp(a[name], b[name], shallow=False), name

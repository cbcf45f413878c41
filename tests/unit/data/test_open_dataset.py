"""What opening loads, and that the three records take the keywords that ``open_dataset`` has."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.data.open_dataset import Options
from scidata.errors import UnsupportedFormatError
from scidata.testing import make_grid


@pytest.mark.slow_for("netcdf4")
@pytest.mark.parametrize("fmt", ["zarr3", "netcdf4"])
def test_a_grid_loads_no_mesh_format_and_no_store_writer(tmp_path: Path, fmt: str) -> None:
    make_grid(tmp_path / "grid", format=fmt, num_times=2)
    code = (
        "import sys, scidata\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "ds = scidata.open_dataset(sys.argv[1])\n"
        "assert ds[1]['u'].numel()\n"
        "kinds = 'scidata.meshes', 'scidata.store.partitioning', 'scidata.store.format.write'\n"
        "kinds = *kinds, 'scidata.store.reading.rows'\n"
        "print([name for name in sys.modules if name.startswith(kinds)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "grid")], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_options_the_overloads_and_the_function_have_the_same_arguments_and_defaults() -> None:
    arguments = inspect.signature(scidata.open_dataset).parameters
    own = {
        "path",
        "mesh",
        "transform",
        "local_transform",
        "dp",
        "storage_options",
    }  # of data sets and paths, not readers
    given = {field.name: field.default for field in dataclasses.fields(ReadOptions)}
    assert given == {name: each.default for name, each in arguments.items() if name not in own}
    assert {*Options.__annotations__} == {*arguments} - {"path", "mesh", "kind", "shard", "transform"}


def test_the_first_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a URL that is some round trips."""
    from scidata.sources.zarr.source import ZarrSource

    make_grid(tmp_path / "grid", format="zarr3", num_times=2)
    opened, begin = [], ZarrSource.__init__
    monkeypatch.setattr(ZarrSource, "__init__", lambda self, *a, **k: opened.append(a) or begin(self, *a, **k))
    scidata.open_dataset(str(tmp_path / "grid"))
    assert len(opened) == 1


def test_a_file_of_which_all_is_left_out_says_why(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "text.h5", "w") as file:
        file["name"] = np.array(["a", "b"], dtype=h5py.string_dtype())
    with pytest.raises(UnsupportedFormatError, match=r"holds no data fields .*; left out: 'name' \("):
        scidata.open_dataset(tmp_path / "text.h5", kind="grid")

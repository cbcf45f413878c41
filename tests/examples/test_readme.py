"""Every python and bash block of the READMEs, run as it stands there, on small data with the names it uses."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import scidata
from pipelines import era5_grid, flow_graph, surface_points, ugrid_mesh
from scidata.cli.app import app
from scidata.testing import make_grid

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

#: Commands that are not run here: they install, or start several ranks, for which other tests are there.
NOT_RUN = {
    "pip": "installs",
    "scidata demo": "test_demo.py",
    "pytest": "this",
    "torchrun": "test_train_vit.py, test_train_gnn.py",
    "python examples/": "test_train_vit.py, test_train_gnn.py",
    "tensorboard": "a server",
}


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(python|bash)\n(.*?)^```", text, re.M | re.S)


def commands(block: str) -> list[list[str]]:
    return [
        shlex.split(part, comments=True)
        for line in block.splitlines()
        for part in re.sub(r"\s#.*", "", line).split(" && ")
        if part.strip()
    ]


def run_command(words: list[str]) -> bool:
    """Run a command in this process, which has torch already; say whether it is one that can be."""
    if any(" ".join(words).startswith(name) for name in NOT_RUN):
        check_command(words)
        return False
    if words[0] == "scidata":
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
    elif words[:2] == ["python", "-c"]:
        exec(words[2].replace("num_lat=721, num_lon=1440", "num_lat=91, num_lon=144"), {})  # 1 of 100 MB
    else:
        assert words[:2] == ["python", "-m"], words
        assert importlib.import_module(words[2]).main(words[3:]) == 0
    return True


def check_command(words: list[str]) -> None:
    """Check what can be known of a command without running it: extras, scripts and their options."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(project["optional-dependencies"])
    for script in (word for word in words if word.endswith(".py")):
        source = (ROOT / script).read_text()
        if "from trainer import" in source:
            source += (ROOT / script).with_name("trainer.py").read_text()
        options = [word for word in words[words.index(script) :] if word.startswith("--")]
        assert all(f'"{option}"' in source for option in options), words


def write_mesh(path: str) -> None:
    """A UGRID file with the fields of README's examples, on its nodes."""
    ugrid_mesh.make(path, num_nodes=120, num_times=2)
    with netCDF4.Dataset(path, "a") as file:
        (dim,) = file.variables["lon"].dimensions
        for number, name in enumerate(("u", "v", "p")):
            variable = file.createVariable(name, "f8", (dim,))  # as simulations write them
            variable.setncatts({"mesh": "mesh", "location": "node"})
            variable[:] = np.random.default_rng(number).random(file.dimensions[dim].size)


class Model(torch.nn.Module):
    """A graph network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.layers = torch.nn.ModuleList([SAGEConv(2, 8), SAGEConv(8, 1)])

    def forward(self, x: Any, edge_index: Any) -> Any:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def make_readme(folder: Path) -> dict[str, Any]:
    make_grid(folder / "era5.zarr", num_lat=33, num_lon=48, chunks=(1, 3, 9, 48))
    for year in (2015, 2016):
        write_mesh(str(folder / f"mesh_{year}.nc"))
    surface_points.make(str(folder / "cars"), num_samples=2, num_points=300)
    surface_points.convert(str(folder / "cars"), str(folder / "cars.store"))
    with h5py.File(folder / "car_1.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((20, 3))
    mesh = scidata.init_mesh()
    grids = scidata.open_dataset(folder / "era5.zarr", mesh, fields=["u"])
    from torch_geometric.nn import SAGEConv

    names = {"mesh": mesh, "dcp": dcp, "path": str(folder / "checkpoint"), "num_epochs": 1}
    return names | {"SAGEConv": SAGEConv, "model": Model(), "loader": scidata.DataLoader(grids)}


def make_pipelines(folder: Path) -> dict[str, Any]:
    for year, first in ((2015, 0), (2016, 4)):
        make_grid(folder / f"{year}.nc", format="netcdf4", num_times=4, first_time=first)
    for name in ("DATA.nc", "GRID.nc"):
        ugrid_mesh.make(str(folder / name), num_nodes=120, num_times=2)
    chosen = {name: getattr(module, name) for module in (era5_grid, flow_graph) for name in module.__all__}
    return chosen | {name: getattr(flow_graph, name) for name in ("INPUTS", "TARGETS")}


@pytest.mark.parametrize(
    ("document", "make", "num_run"),
    [("README.md", make_readme, 12), ("pipelines/README.md", make_pipelines, 5), ("examples/README.md", None, 3)],
)
def test_blocks_run(document, make, num_run, tmp_path, monkeypatch):
    pytest.importorskip("torch_geometric", reason="the graph blocks need the extra 'pyg'")
    monkeypatch.chdir(tmp_path)
    namespace = {"scidata": scidata, "torch": torch} | (make(tmp_path) if make else {})
    done = 0
    for language, block in blocks((ROOT / document).read_text()):
        if language == "bash":
            done += sum(run_command(words) for words in commands(block))
        elif "# read.py" not in block:  # below, on three ranks
            exec(compile(block, document, "exec"), namespace)
            if "rotate" in namespace:
                rotated = namespace.pop("rotate")(namespace["ds"][0])
                torch.testing.assert_close(rotated["pos"].norm(dim=1), namespace["ds"][0]["pos"].norm(dim=1))
            done += 1
    assert done >= num_run


def test_the_first_script_prints_what_the_readme_shows(tmp_path):
    text = README.read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "# read.py" in block)
    (tmp_path / "read.py").write_text(script)
    make_grid(tmp_path / "era5.zarr", num_lat=241, num_lon=480, chunks=(1, 3, 31, 480))
    # each rank into a file of its own: on one pipe their lines may mix
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--redirects",
        "3",
        "--log-dir",
        "logs",
    ]
    run = subprocess.run(
        [sys.executable, "-m", *torchrun, "read.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    shown = re.findall(r"^\d \(2, 3, 241, 480\).*$", text, re.M)
    assert len(shown) == 3
    logs = (log.read_text().splitlines() for log in (tmp_path / "logs").rglob("stdout.log"))
    printed = [line for lines in logs for line in lines if not line.startswith("[Gloo]")]  # of torch 2.10
    assert sorted(printed) == sorted(shown)

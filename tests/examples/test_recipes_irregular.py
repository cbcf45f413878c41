"""The recipes for meshes, clouds and graphs: as commands, and the same figures on any number of ranks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from pipelines import flow_graph, surface_points, ugrid_mesh
from scidata.testing import run_ranks
from tests.examples._scripts import alone

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("recipes")
    flow_graph.make(str(folder / "flows"), num_samples=3, num_nodes=250)
    flow_graph.convert(str(folder / "flows"), str(folder / "flow.store"))
    surface_points.make(str(folder / "clouds"), num_samples=2, num_points=300)
    surface_points.convert(str(folder / "clouds"), str(folder / "surface.store"))
    ugrid_mesh.make(str(folder / "waves.nc"), num_nodes=200, num_times=2)
    ugrid_mesh.convert([str(folder / "waves.nc")], str(folder / "waves.store"))
    return {name: str(folder / f"{name}.store") for name in ("flow", "surface", "waves")} | {"raw": str(folder)}


def _rank(rank: int, num_ranks: int, work: Callable[..., Any], path: str) -> Any:
    return work(path, scidata.init_mesh(domain=num_ranks))


def on_ranks(num_ranks: int, work: Callable[..., Any], path: str) -> list[Any]:
    return run_ranks(_rank, num_ranks, work, path)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


# -- flows ---------------------------------------------------------------------------------------------------------


def test_flows_are_made_alike_and_each_has_its_own_mesh() -> None:
    def make(index: int) -> dict[str, Any]:
        return flow_graph.flow(np.random.default_rng([0, index]), 250)

    again = make(1)
    assert all(np.array_equal(values, again[name]) for name, values in make(1).items())
    assert make(0)["pos"].shape != again["pos"].shape


@pytest.mark.parametrize("index", range(4))
def test_a_flow_is_a_flow(index: int) -> None:
    """On the shape the velocity is tangential; far away it is the inflow; Bernoulli's sum is constant."""
    made = flow_graph.flow(np.random.default_rng([7, index]), 900)
    pos, edges, node = made["pos"], made["edge_index"], {k[5:]: v for k, v in made.items() if k.startswith("node/")}
    assert np.array_equal(np.unique(edges, axis=1), edges)
    assert not (edges[0] == edges[1]).any()
    assert np.array_equal(np.unique(edges[::-1], axis=1), edges)  # both directions of each
    assert np.array_equal(np.unique(edges), np.arange(len(pos)))  # no node without edges
    assert (node["boundary"].sum(axis=1) == 1).all()
    wall = node["boundary"][:, 1] == 1
    assert (node["distance"][wall] == 0).all()
    assert (node["distance"][~wall] > 0.01).all()
    around = pos[wall]
    order = np.argsort(np.arctan2(around[:, 1], around[:, 0]))
    along = np.roll(around[order], -1, axis=0) - np.roll(around[order], 1, axis=0)
    u = node["velocity"][wall][order]
    across = np.abs(along[:, 0] * u[:, 1] - along[:, 1] * u[:, 0])
    assert (across <= 0.02 * np.linalg.norm(along, axis=1) * np.abs(u).max()).all()
    far = np.linalg.norm(pos, axis=1) > 5
    assert np.abs(node["velocity"] - node["inflow"])[far].max() < 0.06
    energy = node["pressure"] + 0.5 * (node["velocity"] ** 2).sum(axis=1)
    np.testing.assert_allclose(energy, 0.5 * (node["inflow"] ** 2).sum(axis=1), rtol=1e-4)


def _flow_figures(path: str, mesh: Any) -> Any:
    names = ["velocity", "pressure"]
    ds = flow_graph.open_graph(path, mesh, fields=names, dtype=torch.float64)
    data = ds[1].to_pyg(x=names)
    offsets = flow_graph.relative_positions(ds, data)
    sums = offsets.sum(dim=0), offsets.square().sum(dim=0), data.x.sum(dim=0)
    assert offsets.shape[1] == flow_graph.num_edge_channels(ds) == 3
    assert data.x.shape[1] == flow_graph.num_channels(ds, names) == 3
    return [len(ds), *sums, *flow_graph.edge_statistics(ds), *flow_graph.statistics(ds, names)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_flows_have_the_figures_of_one_process_on_any_number_of_ranks(stores: dict[str, str], num_ranks: int) -> None:
    expected = _flow_figures(stores["flow"], None)
    for found in on_ranks(num_ranks, _flow_figures, stores["flow"]):
        assert found[0] == expected[0] == 3
        for a, b in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_statistics_are_those_of_the_raw_files(stores: dict[str, str]) -> None:
    raw, edges = [], []
    for path in sorted(Path(stores["raw"], "flows").glob("*.h5")):
        with h5py.File(path) as file:
            raw.append(np.c_[file["node/velocity"][:], file["node/pressure"][:]].astype("f8"))
            source, target = file["edge_index"][:]
            offsets = file["pos"][:][source] - file["pos"][:][target]
            edges.append(np.c_[offsets, np.linalg.norm(offsets, axis=1)])
    ds = flow_graph.open_graph(stores["flow"], None, fields=["velocity", "pressure"], dtype=torch.float64)
    for values, found in (
        (np.concatenate(raw), flow_graph.statistics(ds, ["velocity", "pressure"])),
        (np.concatenate(edges), flow_graph.edge_statistics(ds)),
    ):
        np.testing.assert_allclose(found[0].numpy(), values.mean(axis=0), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found[1].numpy(), values.std(axis=0), rtol=1e-10)


def test_positions_across_a_periodic_border_are_those_of_the_nearest_image() -> None:
    """A ring of 8 nodes on [0, 1): each edge is one eighth long, also that from the last node to the first."""
    ring = torch.arange(8)
    edges = torch.stack([torch.cat([ring, (ring + 1) % 8]), torch.cat([(ring + 1) % 8, ring])])
    data = SimpleNamespace(pos=torch.stack([ring / 8, torch.zeros(8)], dim=1).double(), edge_index=edges)
    manifest = SimpleNamespace(on_sphere=False, period=(1.0, 0.0))
    ds: Any = SimpleNamespace(reader=SimpleNamespace(store=SimpleNamespace(manifest=manifest)))
    expected = torch.tensor([[-0.125, 0, 0.125]] * 8 + [[0.125, 0, 0.125]] * 8, dtype=torch.float64)
    torch.testing.assert_close(flow_graph.relative_positions(ds, data), expected)


# -- surfaces ------------------------------------------------------------------------------------------------------


def test_a_surface_is_an_ellipsoid_in_a_flow() -> None:
    made = surface_points.ellipsoid(np.random.default_rng(0), 2000)
    area, normal, pressure = (made[name].astype("f8") for name in ("area", "normal", "pressure"))
    np.testing.assert_allclose((area[:, None] * normal).sum(axis=0), 0, atol=1e-2)  # closed
    volume = (area[:, None] * normal * made["points"]).sum() / 3
    axes = np.abs(made["points"]).max(axis=0)
    np.testing.assert_allclose(volume, 4 / 3 * math.pi * axes.prod(), rtol=0.01)
    assert 0.99 < pressure.max() <= 1  # where the flow stops
    assert pressure.min() < 0
    np.testing.assert_allclose((pressure * area) @ normal, 0, atol=1e-2)  # d'Alembert: no force


def _surface_figures(path: str, mesh: Any) -> Any:
    ds = surface_points.open_surface(path, mesh, radius=0.3, dtype=torch.float64)
    sample = ds[0]
    source, target = surface_points.neighbours(sample, 0.3)
    pressure = sample.with_ghosts("pressure")
    count = torch.zeros(sample.index_map("point").num_owned, dtype=torch.float64)
    count.index_add_(0, target, pressure[source])
    owned = sample.original_id("point")
    local = owned.to_local() if isinstance(owned, scidata.ShardTensor) else owned
    return surface_points.force(sample), local, count


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_surfaces_have_the_figures_of_one_process_on_any_number_of_ranks(
    stores: dict[str, str], num_ranks: int
) -> None:
    force, ids, sums = _surface_figures(stores["surface"], None)
    parts = on_ranks(num_ranks, _surface_figures, stores["surface"])
    for found, _, _ in parts:
        torch.testing.assert_close(found, force, rtol=0, atol=1e-13)
    expected = torch.empty_like(sums)
    expected[ids] = sums  # in the user's order
    together = torch.full_like(sums, torch.nan)
    together[torch.cat([i for _, i, _ in parts])] = torch.cat([s for _, _, s in parts])
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)


def _pairs_where_space_wraps(path: str, mesh: Any) -> Any:
    ds = surface_points.open_surface(path, mesh, radius=0.2, fields=(), dtype=None)
    sample = ds[0]
    rows = sample.index_map("point")
    return sample.period, rows.to_global(surface_points.neighbours(sample, 0.2).numpy()), rows.owned


def test_neighbours_across_a_border_that_wraps(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((300, 3))
        file["points"].attrs["period"] = [1.0, 0.0, 1.0]
    scidata.partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    pos = scidata.open_dataset(tmp_path / "store")[0]["pos"].numpy()
    apart = pos[:, None] - pos
    apart[..., [0, 2]] -= np.round(apart[..., [0, 2]])
    near = (np.linalg.norm(apart, axis=2) <= 0.2) & ~np.eye(300, dtype=bool)
    found = on_ranks(3, _pairs_where_space_wraps, str(tmp_path / "store"))
    pairs = np.concatenate([p for _, p, _ in found], axis=1)
    assert found[0][0] == (1.0, 0.0, 1.0)
    assert pairs.shape[1] == near.sum()
    assert near[tuple(pairs)].all()
    assert len(np.unique(pairs, axis=1)[0]) == pairs.shape[1]


# -- meshes --------------------------------------------------------------------------------------------------------


def _mesh_figures(path: str, mesh: Any) -> Any:
    ds = ugrid_mesh.open_ugrid(path, mesh, dtype=torch.float64, steps=(0, 1))
    sample = ds[0]
    area, height = ugrid_mesh.cell_areas(sample, ds), ugrid_mesh.mean_on_cells(sample, "height")
    assert isinstance(area, scidata.ShardTensor) == (mesh is not None)
    second = ugrid_mesh.mean_on_cells(ugrid_mesh.open_ugrid(path, mesh, dtype=torch.float64)[1], "height")
    torch.testing.assert_close(full(second), full(height)[:, 1], rtol=0, atol=0)
    return area.sum(), (area.unsqueeze(1) * height).sum(dim=0), (area * sample["depth"]).sum(), full(height)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_meshes_have_the_figures_of_one_process_on_any_number_of_ranks(stores: dict[str, str], num_ranks: int) -> None:
    expected = _mesh_figures(stores["waves"], None)
    torch.testing.assert_close(expected[0].item(), 4 * math.pi, rtol=1e-12, atol=0)
    assert expected[1].shape == (2,)  # times
    for found in on_ranks(num_ranks, _mesh_figures, stores["waves"]):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not (DATA / "outCSne30.ug").exists(), reason="the real UGRID files are not beside the repository")
def test_a_real_mesh_with_its_topology_in_another_file(tmp_path: Path) -> None:
    out, grid = tmp_path / "vortex.store", DATA / "outCSne30.ug"
    code, output = alone("pipelines.ugrid_mesh", "convert", DATA / "outCSne30_vortex.nc", out, "--mesh", grid)
    assert code == 0, output
    ds = ugrid_mesh.open_ugrid(str(out), None, dtype=torch.float64)
    area = ugrid_mesh.cell_areas(ds[0], ds)
    assert ds[0]["psi"].shape == area.shape == (5400,)
    torch.testing.assert_close(area.sum().item(), 4 * math.pi, rtol=1e-10, atol=0)


# -- commands ------------------------------------------------------------------------------------------------------


def test_commands(tmp_path: Path) -> None:
    for module, kind in (("flow_graph", "graph"), ("surface_points", "points"), ("ugrid_mesh", "mesh")):
        main = importlib.import_module(f"pipelines.{module}").main
        raw, out = str(tmp_path / f"{module}.nc"), str(tmp_path / f"{module}.store")
        size = {"graph": ["--samples", "1", "--nodes", "220"], "points": ["--samples", "1", "--points", "60"]}
        assert main(["make", raw, *size.get(kind, ["--nodes", "40"])]) == 0
        assert main(["convert", raw, out, "--order", "rcb"]) == 0
        assert scidata.open_dataset(out).kind == kind
        assert main(["make", raw]) == 1  # it is there
        assert main(["convert", raw, out]) == 1
        assert main(["convert", str(tmp_path / "absent"), str(tmp_path / "other")]) == 1


def test_fields_that_do_not_fit_are_named(stores: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'depth' lives on cell"):
        flow_graph.open_graph(stores["waves"], None, fields=["depth"])
    with pytest.raises(scidata.errors.UnknownNameError, match="'pressure'"):
        flow_graph.open_graph(stores["flow"], None, fields=["presure"])
    with pytest.raises(ValueError, match="200 do"):
        flow_graph.make(str(tmp_path / "few"), num_nodes=20)

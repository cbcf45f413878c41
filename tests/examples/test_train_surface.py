"""The example of surfaces: steps and forces of one process, draws anew, predictions of all cells."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import scidata
from pipelines import surface_points
from tests.examples._scripts import assert_equal_to_one_process, in_turn_on_ranks_of, lines_of

TINY = ("--dim", "8", "--depth", "1", "--slices", "5", "--points", "90", "--device", "cpu")
MODELS = (("--model", "transolver"), ("--model", "pointnet"))


@pytest.fixture(scope="module")
def cars(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six cars of 100 to 160 nodes, as VTP, and their cells as points."""
    folder = tmp_path_factory.mktemp("cars")
    surface_points.make(str(folder / "raw"), num_samples=6, num_points=130, form="vtp")
    about = {"pattern": "*.vtp", "entity": "cell", "order": "shuffle:64"}
    surface_points.convert(str(folder / "raw"), str(folder / "cars.store"), **about)
    return str(folder / "cars.store")


def test_a_closed_surface_has_its_area_and_no_net_normal(cars: str) -> None:
    sample = scidata.open_dataset(cars)[0]
    assert set(sample) == {"pos", "area", "normal", "pressure"}
    area, normal = sample["area"].numpy(), sample["normal"].numpy()
    np.testing.assert_allclose(area @ normal, 0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1, atol=1e-12)
    assert (normal * sample["pos"].numpy()).sum(axis=1).min() > 0  # outwards
    assert abs(surface_points.force(sample)[0]) < 0.1  # d'Alembert


@pytest.mark.parametrize(("num_ranks", "domain"), [(1, 1), (2, 2), (3, 3), (4, 2)], ids=["1", "2", "3", "2x2"])
def test_loss_gradients_and_forces_are_those_of_one_process(cars: str, num_ranks: int, domain: int) -> None:
    every = (*TINY, "--data", cars, "--domain", domain, "--dtype", "float64", "--check", "--batch-size", 2)
    runs = [(*every, *model) for model in MODELS]
    for args, (code, output) in zip(runs, in_turn_on_ranks_of("train_surface", num_ranks, *runs), strict=True):
        assert_equal_to_one_process(code, f"{args}: {output}", f"{num_ranks // domain} dp x {domain} domain")
        found = re.search(r"check of forces: max relative difference to one process (\S+)", output)
        assert found
        assert float(found[1]) <= 1e-12


def test_a_domain_trains_and_predicts_as_dp_ranks_do(cars: str, tmp_path: Path) -> None:
    every = (*TINY, "--data", cars, "--dtype", "float64", "--epochs", 2, "--val-fraction", 0.34, "--log-every", 1)
    runs = [
        (*every, "--out", tmp_path / "dp"),
        (*every, "--domain", 2, "--batch-size", 2, "--out", tmp_path / "domain"),
    ]
    (first, said), (second, also) = in_turn_on_ranks_of("train_surface", 2, *runs)
    assert first == second == 0, said + also
    scores = [lines_of(tmp_path / name, "validation")[-1]["pressure"] for name in ("dp", "domain")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-8)
    forces = [re.findall(r"car (\d): drag by the model (\S+), by the data (\S+)", text) for text in (said, also)]
    assert [car for car, _, _ in forces[0]] == ["4", "5"]
    for one, other in zip(*forces, strict=True):
        assert [float(x) for x in one] == pytest.approx([float(x) for x in other], rel=1e-5)

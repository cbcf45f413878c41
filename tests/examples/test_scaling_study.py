"""The scaling study: trainings at several batches, kept, drawn, and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines import era5_grid
from tests.examples._scripts import lines_of, on_ranks_of

TINY = ("--dim", "8", "--depth", "1", "--heads", "2", "--patch", "8", "--device", "cpu")
OPTIONS = (*TINY, "--epochs", 2, "--lr", 0.01, "--val-fraction", 0.2)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three batches on two dp ranks, of 8 samples: 12 times make 11, 2 of which are held out."""
    folder = tmp_path_factory.mktemp("study")
    assert (
        era5_grid.main(["make", str(folder / "era5.zarr"), "--times", "12", "--shape", "17", "16", "--levels", "1"])
        == 0
    )
    code, output = run(folder, 2, "--batches", 2, 4, 8)
    assert code == 0, output
    assert [line.split()[0] for line in output.splitlines()[-4:]] == ["batch", "2", "4", "8"]
    return folder


def run(folder: Path, num_ranks: int, *args: Any, options: tuple[Any, ...] = ()) -> tuple[int, str]:
    given = ("--study", folder / "runs", "--micro-batch", 2, *args, "--", *OPTIONS)
    options = ("--data", folder / "era5.zarr", *options)
    return on_ranks_of("scaling_study", num_ranks, *given, *options)


def known(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / "study.json").read_text())["runs"]
    return found


def test_learning_rates_and_losses_over_the_same_samples(study: Path) -> None:
    runs = known(study)
    assert [(run["batch size"], run["accumulate"]) for run in runs.values()] == [(1, 1), (2, 1), (2, 2)]
    for batch, found in runs.items():
        assert found["peak lr"] == pytest.approx(0.01 * (int(batch) / 16) ** 0.5)
        assert found["train"]["samples"] == [8, 16]  # a mean over each epoch, for any batch
        assert found["validation"]["samples"] == [8, 16]
        assert found["samples/s per rank"] > 0
        lines = lines_of(study / "runs" / f"batch_{int(batch):05d}", "train")
        assert [line["step"] for line in lines] == [8 // int(batch), 16 // int(batch)]
    assert (study / "runs" / "study.png").stat().st_size > 1000


def test_a_study_goes_on(study: Path, tmp_path: Path) -> None:
    """On one rank: what is done is left alone, what was under way goes on from its last checkpoint."""
    shutil.copytree(study, tmp_path / "copy")
    folder = tmp_path / "copy"
    file, second = folder / "runs" / "study.json", folder / "runs" / "batch_00004"
    before = json.loads(file.read_text())
    expected = before["runs"].pop("4")
    file.write_text(json.dumps(before))
    shutil.rmtree(second / "step_00000004")
    code, output = run(folder, 1, "--batches", 2, 4, 8, options=("--data", study / "era5.zarr"))
    assert code == 0, output
    assert "global batch 4: 2 x 2 on each of 1 dp ranks" in output
    assert "global batch 2:" not in output
    assert "step 2 " not in output
    found = known(folder)
    assert list(found) == ["2", "4", "8"]
    assert (found["4"]["ranks"], found["2"]["ranks"]) == (1, 2)
    assert found["4"]["train"]["samples"] == [8, 16]
    assert found["4"]["train"]["loss"] == pytest.approx(expected["train"]["loss"], rel=1e-4)  # in float32


def test_another_study_is_not_mixed_in(study: Path) -> None:
    code, output = run(study, 1, "--batches", 2, 4, 8, options=("--seed", 1))
    assert code == 2
    assert "another study is there: seed 0, and here 1" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--batches", 3), "a global batch of 3 samples cannot be shared evenly by 2 dp ranks"),
        (("--batches", 16, "--study", "elsewhere"), "--batches 16: there are 8 samples to train on"),
        (("--batches", 0), "are numbers of samples, from 1"),
    ],
)
def test_batches_that_do_not_fit(study: Path, args: tuple[Any, ...], message: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(study)
    code, output = run(study, 2, *args)
    assert code == 2
    assert message in output

"""The GraphCast example, run as a user runs it: by torchrun, and on ranks that start faster."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr

from pipelines import graphcast
from scidata.testing import run_ranks
from tests.examples._scripts import (
    LAUNCHER,
    assert_equal_to_one_process,
    in_turn_on_ranks_of,
    lines_of,
    module_of,
    on_ranks_of,
    weights,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_graphcast.py"
DATA = ROOT.parent / "shared" / "data" / "eraint_uvz.nc"
TINY = ("--dim", "8", "--depth", "2", "--device", "cpu")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)


def main(*args: object) -> int:
    """Run the script in this process."""
    return module_of("train_graphcast").main([*TINY, *map(str, args)])


def on_ranks(num_ranks: int, *args: object) -> tuple[int, str]:
    """Run the script on ranks of the fork server; return what rank 0 did."""
    return on_ranks_of("train_graphcast", num_ranks, *TINY, *args)


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight times on a grid of 10 degrees, and a mesh of 42 nodes."""
    folder = str(tmp_path_factory.mktemp("graphcast") / "waves")
    graphcast.make(folder, num_times=8, num_levels=2, shape=(19, 36))
    return folder


# -- gradients of one process --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_on_three_ranks_by_torchrun(waves: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, str(SCRIPT), *TINY, "--data", waves, "--domain", "3", "--dtype", "float64", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert_equal_to_one_process(done.returncode, done.stdout + done.stderr, "1 dp x 3 domain")


@pytest.mark.slow_for("four")
@pytest.mark.parametrize(
    ("num_ranks", "domain", "runs"),
    [
        (
            4,
            2,
            [
                ("--batch-size", 2, "--rollout", 2, "--recompute"),
                ("--strategy", "fsdp", "--rollout", 2, "--history", 1),
            ],
        ),
        (3, 3, [("--compile", "aot_eager")]),
    ],
    ids=["four", "three"],
)
def test_loss_and_gradients_are_those_of_one_process(
    waves: str, num_ranks: int, domain: int, runs: list[tuple[object, ...]]
) -> None:
    every = (*TINY, "--data", waves, "--domain", domain, "--dtype", "float64", "--check")
    found = in_turn_on_ranks_of("train_graphcast", num_ranks, *((*every, *more) for more in runs))
    for more, (code, output) in zip(runs, found, strict=True):
        assert_equal_to_one_process(code, f"{more}: {output}", f"{num_ranks // domain} dp x {domain} domain")


def _unlike_weights(rank: int, num_ranks: int, args: tuple[object, ...]) -> int:
    script = module_of("train_graphcast")
    right = script.area_weights
    script.area_weights = lambda *args: right(*args) * (1 + 1e-6 * rank)  # of one process all alike
    return main(*args)


def test_check_fails_where_the_ranks_of_a_domain_weigh_otherwise(waves: str) -> None:
    args = ("--data", waves, "--domain", 2, "--dtype", "float64", "--check")
    assert run_ranks(_unlike_weights, 2, args) == [1, 1]


@pytest.mark.skipif(not DATA.exists(), reason="the real file of ERA-Interim is not beside the repository")
def test_check_on_real_data(tmp_path: Path) -> None:
    """Two months of ERA-Interim, every fourth row and column."""
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(DATA, decode_cf=False) as file:
        for variable in file.variables.values():
            variable.attrs.pop("_FillValue", None)  # NaN, which as int16 is any number, some value of the field perhaps
        file.isel(latitude=slice(None, None, 4), longitude=slice(None, None, 4)).to_netcdf(tmp_path / "era.nc")
    graphcast.convert([str(tmp_path / "era.nc")], str(tmp_path / "era"))
    args = ("--data", tmp_path / "era", "--history", 1, "--domain", 2, "--dtype", "float64", "--check")
    assert_equal_to_one_process(*on_ranks(2, *args), "1 dp x 2 domain")


# -- the loss, and what a layer costs ------------------------------------------------------------------------------


def training(rank: int, num_ranks: int, waves: str, *more: object) -> Any:
    """Return a training that is set up, and its first batch."""
    script = module_of("train_graphcast")
    _, args = script.arguments([*TINY, "--data", waves, "--domain", str(num_ranks), *map(str, more)])
    made = script.Training(args)
    made.prepare()
    return made, next(iter(made.loader))


class NoChange(torch.nn.Module):
    """Predicts that all stays as it is."""

    def __init__(self, change: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("change", change)

    def forward(self, states: list[Any], forcings: list[Any], graph: Any) -> list[Any]:
        return [states[-1]] * (len(forcings) - len(states))


def _loss_of_no_change(rank: int, num_ranks: int, waves: str) -> tuple[int, float]:
    made, batch = training(rank, num_ranks, waves, "--rollout", 2, "--dtype", "float64")
    return batch.index[0], made.loss(NoChange(made.model.change), batch).item()


def test_the_loss_is_weighted_by_area_and_pressure(waves: str) -> None:
    """Against NumPy, on the grid as it is."""
    (index, loss), same = run_ranks(_loss_of_no_change, 2, waves)
    assert same == (index, loss)
    raw = zarr.open_group(f"{waves}/raw.zarr", mode="r")
    edges = np.sin(np.radians(np.r_[-90, np.arange(-85, 90, 10), 90]))
    areas = np.diff(edges)[::-1, None] / 2
    total = weight_of_all = 0.0
    for name, share in {"surface_pressure": [0.1], "temperature": [200, 850], "u": [200, 850], "v": [200, 850]}.items():
        values = np.asarray(raw[name], np.float64).reshape(8, -1, 19, 36)
        changes = np.diff(values, axis=0).std(axis=(0, 2, 3))
        weights = np.array(share) / (1 if len(share) == 1 else np.sum(share))
        errors = (values[index + 2 : index + 4] - values[index + 1]) / changes[:, None, None]
        total += (errors**2 * areas).sum(axis=2).mean(axis=2).sum(axis=0) @ weights
        weight_of_all += weights.sum()
    assert loss == pytest.approx(total / 2 / weight_of_all, rel=1e-10)


def _exchanges(rank: int, num_ranks: int, waves: str) -> int:
    made, batch = training(rank, num_ranks, waves, "--rollout", 2)
    made.loss(made.model, batch)  # who sends what is found once
    calls, function = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)
    made.loss(made.model, batch)
    return len(calls)


def test_a_step_has_an_exchange_for_each_round(waves: str) -> None:
    assert run_ranks(_exchanges, 2, waves) == [2 * (1 + 2 + 1)] * 2  # 2 steps: into the mesh, 2 rounds, back


# -- training and resuming -----------------------------------------------------------------------------------------

SMALL = ("--depth", 1)
SIX_STEPS = (*SMALL, "--epochs", 2, "--dtype", "float64", "--log-every", 1)  # 2 epochs x 3 global batches of 2


@pytest.fixture(scope="module")
def uninterrupted(waves: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs on 2 dp x 2 domain ranks."""
    out = tmp_path_factory.mktemp("run")
    code, output = on_ranks(4, "--data", waves, *SIX_STEPS, "--domain", 2, "--save-every", 4, "--out", out)
    assert code == 0, output
    return out


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines_of(out, "train")]


def test_losses_of_two_domains_are_those_of_one_process(waves: str, uninterrupted: Path, tmp_path: Path) -> None:
    code, output = on_ranks(1, "--data", waves, *SIX_STEPS, "--batch-size", 2, "--out", tmp_path)
    assert code == 0, output
    assert len(losses(tmp_path)) == 6
    assert losses(uninterrupted) == pytest.approx(losses(tmp_path), rel=1e-9)


def test_resuming_on_a_domain_of_three_goes_on_as_if_never_interrupted(
    waves: str, uninterrupted: Path, tmp_path: Path
) -> None:
    start = uninterrupted / "step_00000004"  # in the middle of the second epoch
    args = ("--domain", 3, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    code, output = on_ranks(3, "--data", waves, *SIX_STEPS, *args)
    assert code == 0, output
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted)[4:], rel=1e-9)
    expected, found, before = (
        weights(each) for each in (uninterrupted / "step_00000006", tmp_path / "step_00000006", start)
    )
    assert found.keys() == expected.keys()
    for name in expected:
        moved = float((expected[name] - before[name]).abs().max())  # Adam enlarges rounding: see test_train_gnn.py
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7 * moved, msg=name)


@pytest.mark.slow
def test_more_steps_in_16_bits_begin_with_the_weights_of_one(waves: str, uninterrupted: Path, tmp_path: Path) -> None:
    held_out = ("--val-sel", "2000-01-02T00:2000-01-02T18")
    more = ("--rollout", 2, "--weights", uninterrupted / "step_00000006", "--recompute", "--max-steps", 1, *held_out)
    short = (*TINY, *SMALL, "--data", waves, "--domain", 2, *more, "--log-every", 1)
    found = {}
    kinds = ("none", "bf16", "fp16")
    runs = [(*short, "--amp", amp, "--out", tmp_path / amp) for amp in kinds]
    for amp, (code, output) in zip(kinds, in_turn_on_ranks_of("train_graphcast", 2, *runs), strict=True):
        assert code == 0, f"{amp}: {output}"
        found[amp] = losses(tmp_path / amp)[0]
        (scores,) = lines_of(tmp_path / amp, "validation")
        assert {"loss", "temperature", "surface_pressure"} <= scores.keys()
        saved = weights(tmp_path / amp / "step_00000001")
        assert all(w.dtype == torch.float32 for name, w in saved.items() if name != "progress")
    assert found["bf16"] != found["none"]
    assert found["bf16"] == pytest.approx(found["none"], rel=0.02)
    assert found["fp16"] == pytest.approx(found["none"], rel=0.01)


def test_training_learns(waves: str, tmp_path: Path) -> None:
    args = ("--domain", 2, "--dim", 16, *SMALL, "--epochs", 4, "--lr", 0.06, "--log-every", 6, "--out", tmp_path)
    code, output = on_ranks(2, "--data", waves, *args)
    assert code == 0, output
    assert losses(tmp_path)[-1] < 0.6 * losses(tmp_path)[0]  # the first epoch against the last


# -- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rollout", "0"], "--rollout must be at least 1, not 0"),
        (["--rollout", "9"], "--history 2 --rollout 9: a sample takes 11 times"),
        (["--histroy", "3"], "did you mean --history"),
        (["--surface-weight", "0"], "--surface-weight must be above 0"),
        (["--fields", "temprature"], "did you mean 'temperature'?"),
        (["--fields", "land"], "'land' does not change with time"),
        (["--fields", "u", "--forcings", "u"], "'u' is among --forcings, too"),
        (["--forcings", "lnad"], "did you mean 'land'?"),
        (["--resume", "nowhere"], "--resume nowhere: no complete checkpoint there"),
        (["--weights", "nowhere"], "--weights nowhere: no complete checkpoint there"),
        (["--amp", "bf61"], "invalid choice"),
        (["--data", "absent"], "absent: does not exist"),
    ],
)
def test_bad_arguments_exit_with_2(
    waves: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    try:
        with pytest.raises(SystemExit) as stop:
            main("--data", waves, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_weights_of_another_model_are_refused(
    waves: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(uninterrupted / "step_00000006")
    for word, message in (("--weights", "are of --dim 8, and this has 9"), ("--resume", "was trained with --dim 8")):
        with pytest.raises(SystemExit):
            main("--data", waves, *SMALL, word, checkpoint, "--dim", 9)
        assert message in capsys.readouterr().err

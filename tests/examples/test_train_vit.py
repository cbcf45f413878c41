"""The ViT example, run as a user runs it: by torchrun, and alone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_vit.py"
ERA_INTERIM = ROOT.parent / "shared" / "data" / "eraint_uvz.nc"
TINY = ("--dim", "8", "--depth", "2", "--heads", "2", "--device", "cpu")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=150, check=False)


def train(num_ranks: int, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the script on ``num_ranks`` ranks of torchrun; 0 runs it without."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    return _run([*launcher, str(SCRIPT), *TINY, *map(str, args)])


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven times on 25 x 16 points: six samples, and with patch 4 six token rows once the last row is cropped."""
    path = str(tmp_path_factory.mktemp("era5") / "era5.zarr")
    made = _run(["-m", "pipelines.era5_grid", "make", path, "--times", "7", "--shape", "25", "16", "--levels", "2"])
    assert made.returncode == 0, made.stderr
    return path


def differences(output: str) -> tuple[float, float]:
    """Relative differences of loss and gradients that ``--check`` prints."""
    found = re.search(r"loss (\S+), gradients (\S+): ", output)
    assert found, output
    return float(found[1]), float(found[2])


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint's model and progress, in one process."""
    whole = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(str(checkpoint), str(whole))
    state = torch.load(whole, weights_only=False)
    return state["model"] | {"progress": state["progress"]}


# -- gradients of one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "domain", "patch"),
    # six token rows; over 3 ranks with patch 8 there are three, over 4 = 2 x 2 they are shared by two; 5 rows (patch 5)
    # over 3 are 2, 2, 1
    [(0, 1, 4), (2, 1, 4), (2, 2, 8), (3, 3, 5), (4, 2, 8)],
    ids=["alone", "2x1", "1x2-uneven", "1x3-uneven", "2x2-uneven"],
)
def test_loss_and_gradients_are_those_of_one_process(era5: str, num_ranks: int, domain: int, patch: int) -> None:
    done = train(
        num_ranks,
        "--data",
        era5,
        "--domain",
        domain,
        "--patch",
        patch,
        "--batch-size",
        2,
        "--dtype",
        "float64",
        "--check",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(differences(done.stdout)) <= 1e-12
    assert f"check {max(num_ranks, 1) // domain} dp x {domain} domain" in done.stdout


@pytest.mark.skipif(not ERA_INTERIM.exists(), reason="the real ERA-Interim file is not beside the repository")
def test_check_on_packed_netcdf(era5: str) -> None:
    """241 latitudes, crop to 240; months as samples, so two of them are one pair of steps."""
    done = train(2, "--data", ERA_INTERIM, "--domain", 2, "--patch", 24, "--dtype", "float64", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(differences(done.stdout)) <= 1e-12


# -- training and resuming -----------------------------------------------------------------------------------------

SIX_STEPS = ("--patch", 4, "--epochs", 2, "--dtype", "float64", "--log-every", 1)  # 2 epochs x 3 global batches of 2


@pytest.fixture(scope="module")
def uninterrupted(era5: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs on two dp ranks."""
    out = tmp_path_factory.mktemp("run")
    done = train(2, "--data", era5, *SIX_STEPS, "--save-every", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d) loss", done.stderr, re.MULTILINE) == list("123456")
    return out


def test_training_writes_checkpoints_and_scalars_once(uninterrupted: Path) -> None:
    assert sorted(p.name for p in uninterrupted.glob("step_*")) == [f"step_0000000{n}" for n in (3, 4, 6)]
    assert len(list(uninterrupted.glob("events.out.tfevents.*"))) == 1
    assert weights(uninterrupted / "step_00000004")["progress"].tolist() == [4, 1, 2]
    assert weights(uninterrupted / "step_00000006")["progress"].tolist() == [6, 2, 0]


@pytest.mark.parametrize(("num_ranks", "domain"), [(0, 1), (3, 3)])
def test_resuming_on_other_ranks_goes_on_as_if_never_interrupted(
    era5: str, uninterrupted: Path, tmp_path: Path, num_ranks: int, domain: int
) -> None:
    start = uninterrupted / "step_00000004"  # in the middle of the second epoch
    layout = ("--domain", domain, "--batch-size", 2)  # one dp rank: as many samples a step as two with one each
    done = train(num_ranks, "--data", era5, *SIX_STEPS, *layout, "--out", tmp_path, "--resume", start)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d) loss", done.stderr, re.MULTILINE) == list("56")
    expected, found = weights(uninterrupted / "step_00000006"), weights(tmp_path / "step_00000006")
    before = weights(start)
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam divides by the root of tiny second moments, which enlarges rounding: 1e-7 of the largest update is far
        # below what one sample more or less, or lost moments, would change
        moved = float((expected[name] - before[name]).abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7 * moved, msg=name)


def test_mixed_precision_with_clipping_on_a_domain(era5: str, tmp_path: Path) -> None:
    args = ("--patch", 8, "--domain", 2, "--amp", "--clip", 1, "--max-steps", 2, "--log-every", 1, "--out", tmp_path)
    done = train(2, "--data", era5, *args)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^step \d loss (\S+)", done.stderr, re.MULTILINE)]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)  # of fields in standard deviations
    assert all(
        w.dtype == torch.float32 for name, w in weights(tmp_path / "step_00000002").items() if name != "progress"
    )


# -- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dim", "10", "--heads", "4"], "--dim 10 must be a multiple of --heads 4"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--warmup", "1.5"], "--warmup is a part of the training"),
        (["--resume", "nowhere"], "no complete checkpoint there"),
        (["--dtype", "float16"], "invalid choice"),
    ],
)
def test_bad_arguments_exit_with_2(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("train_vit", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    sys.modules["train_vit"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as stop:
        script.main(["--data", "era5.zarr", *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fields", "tempratur"], "'temperature'"),
        (["--patch", "64"], "patch 64 does not fit on a grid of 25 x 16"),
        (["--domain", "2"], "domain"),
    ],
)
def test_arguments_that_do_not_fit_the_data_exit_with_2(era5: str, args: list[str], message: str) -> None:
    done = train(0, "--data", era5, *args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_absent_data_is_named(tmp_path: Path) -> None:
    done = train(0, "--data", tmp_path / "no.zarr")
    assert done.returncode == 2, done.stderr
    assert str(tmp_path / "no.zarr") in done.stderr

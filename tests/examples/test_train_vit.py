"""The ViT example, run as a user runs it: by torchrun, and alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import scidata
from pipelines import era5_grid
from scidata.testing import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_vit.py"
ERA_INTERIM = ROOT.parent / "shared" / "data" / "eraint_uvz.nc"
TINY = ("--dim", "8", "--depth", "2", "--heads", "2", "--device", "cpu")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_")


def launch(num_ranks: int, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would, outside any other launcher, under torchrun; 0 ranks run it without."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    command = [sys.executable, *launcher, str(SCRIPT), *TINY, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)


def main(*args: object) -> int:
    """Run the script in this process."""
    if "train_vit" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_vit", SCRIPT)
        assert spec
        assert spec.loader
        sys.modules["train_vit"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_vit"])
    return sys.modules["train_vit"].main([*TINY, *map(str, args)])


def _rank(rank: int, num_ranks: int, args: tuple[object, ...]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(*args)
    return code, output.getvalue()


def on_ranks(num_ranks: int, *args: object) -> tuple[int, str]:
    """Run the script on ranks of the fork server, which start faster than torchrun's; return what rank 0 did."""
    return run_ranks(_rank, num_ranks, args)[0]


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven times on 25 x 16 points: six samples, and with patch 4 six token rows once the last row is cropped."""
    path = str(tmp_path_factory.mktemp("era5") / "era5.zarr")
    assert era5_grid.main(["make", path, "--times", "7", "--shape", "25", "16", "--levels", "2"]) == 0
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


def assert_equal_to_one_process(code: int, output: str, layout: str) -> None:
    assert code == 0, output
    found = re.search(rf"check {layout},.* loss (\S+), gradients (\S+): ok", output)
    assert found, output
    assert max(float(found[1]), float(found[2])) <= 1e-12


@pytest.mark.parametrize(
    ("num_ranks", "domain", "patch"),
    # patch 8 makes three token rows, which two ranks share as 2 + 1; patch 5 makes five, over three ranks 2 + 2 + 1
    [(1, 1, 4), (2, 1, 4), (2, 2, 8), (3, 3, 5), (4, 2, 8)],
    ids=["1x1", "2x1", "1x2-uneven", "1x3-uneven", "2x2-uneven"],
)
def test_loss_and_gradients_are_those_of_one_process(era5: str, num_ranks: int, domain: int, patch: int) -> None:
    args = ("--domain", domain, "--patch", patch, "--batch-size", 2, "--dtype", "float64", "--check")
    code, output = on_ranks(num_ranks, "--data", era5, *args)
    assert_equal_to_one_process(code, output, f"{num_ranks // domain} dp x {domain} domain")


def test_check_of_fsdp_on_two_domains_of_two(era5: str) -> None:
    args = ("--domain", 2, "--patch", 8, "--strategy", "fsdp", "--dtype", "float64", "--check")
    code, output = on_ranks(4, "--data", era5, *args)
    assert_equal_to_one_process(code, output, "2 dp x 2 domain")


def test_check_on_domain_x_tp(era5: str) -> None:
    args = ("--domain", 2, "--tp", 2, "--patch", 8, "--dtype", "float64", "--check")
    code, output = on_ranks(4, "--data", era5, *args)
    assert_equal_to_one_process(code, output, "1 dp x 2 domain x 2 tp")


@pytest.mark.skipif(not ERA_INTERIM.exists(), reason="the real ERA-Interim file is not beside the repository")
def test_check_on_packed_netcdf() -> None:
    """241 latitudes are cropped to 240; two months are one pair of steps."""
    args = ("--domain", 2, "--patch", 24, "--dtype", "float64", "--check")
    code, output = on_ranks(2, "--data", ERA_INTERIM, *args)
    assert_equal_to_one_process(code, output, "1 dp x 2 domain")


def _without_gradient_average(rank: int, num_ranks: int, args: tuple[object, ...]) -> int:
    scidata.parallelize = lambda model, mesh, **_: model
    return main(*args)


def test_check_fails_where_gradients_are_not_averaged(era5: str) -> None:
    args = ("--data", era5, "--patch", 8, "--dtype", "float64", "--check")
    assert run_ranks(_without_gradient_average, 2, args) == [1, 1]


def test_check_fails_on_missing_values(tmp_path: Path) -> None:
    """NaN compares as neither larger nor smaller, and must not pass for equal."""
    values = np.random.default_rng(0).normal(size=(2, 8, 8))
    values[1, 3, 3] = np.nan
    xr.Dataset({"u": (("time", "latitude", "longitude"), values)}).to_netcdf(tmp_path / "gap.nc")
    code, output = on_ranks(1, "--data", tmp_path / "gap.nc", "--patch", 4, "--dtype", "float64", "--check")
    assert code == 1, output
    assert "FAILED" in output


# -- training and resuming -----------------------------------------------------------------------------------------

SIX_STEPS = ("--patch", 4, "--epochs", 2, "--dtype", "float64", "--log-every", 1)  # 2 epochs x 3 global batches of 2


@pytest.fixture(scope="module")
def uninterrupted(era5: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs on two dp ranks."""
    out = tmp_path_factory.mktemp("run")
    done = launch(2, "--data", era5, *SIX_STEPS, "--save-every", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d) loss", done.stderr, re.MULTILINE) == list("123456")
    return out


def test_training_writes_checkpoints_and_scalars_once(uninterrupted: Path) -> None:
    assert sorted(p.name for p in uninterrupted.glob("step_*")) == [f"step_0000000{n}" for n in (3, 4, 6)]
    assert len(list(uninterrupted.glob("events.out.tfevents.*"))) == 1
    assert weights(uninterrupted / "step_00000004")["progress"].tolist() == [4, 1, 2]
    assert weights(uninterrupted / "step_00000006")["progress"].tolist() == [6, 2, 0]


def test_resuming_alone_goes_on_as_if_never_interrupted(era5: str, uninterrupted: Path, tmp_path: Path) -> None:
    start = uninterrupted / "step_00000004"  # in the middle of the second epoch
    # one dp rank: as many samples a step as two with one each
    done = launch(0, "--data", era5, *SIX_STEPS, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    assert done.returncode == 0, done.stderr
    assert_last_two_steps(uninterrupted, tmp_path, done.stderr)


def test_resuming_on_a_domain_of_three_goes_on_as_if_never_interrupted(
    era5: str, uninterrupted: Path, tmp_path: Path
) -> None:
    start = uninterrupted / "step_00000004"
    args = ("--domain", 3, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    code, output = on_ranks(3, "--data", era5, *SIX_STEPS, *args)
    assert code == 0, output
    assert_last_two_steps(uninterrupted, tmp_path, output)


def assert_last_two_steps(uninterrupted: Path, resumed: Path, output: str) -> None:
    assert re.findall(r"^step (\d) loss", output, re.MULTILINE) == list("56")
    expected, found = weights(uninterrupted / "step_00000006"), weights(resumed / "step_00000006")
    before = weights(uninterrupted / "step_00000004")
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam divides by the root of tiny second moments, which enlarges rounding: 1e-7 of the largest update is far
        # below what one sample more or less, or lost moments, would change
        moved = float((expected[name] - before[name]).abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7 * moved, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_mixed_precision_with_clipping_on_a_domain(era5: str, tmp_path: Path, strategy: str) -> None:
    args = ("--patch", 8, "--domain", 2, "--amp", "--clip", 1, "--max-steps", 2, "--log-every", 1, "--out", tmp_path)
    args += ("--strategy", strategy)
    code, output = on_ranks(2, "--data", era5, *args)
    assert code == 0, output
    losses = [float(x) for x in re.findall(r"^step \d loss (\S+)", output, re.MULTILINE)]
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
        (["--heads", "2", "--tp", "3"], "--heads 2 must be a multiple of --tp 3"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--warmup", "1.5"], "--warmup is a part of the training"),
        (["--resume", "nowhere"], "no complete checkpoint there"),
        (["--dtype", "float16"], "invalid choice"),
    ],
)
def test_bad_arguments_exit_with_2(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main("--data", "era5.zarr", *args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fields", "tempratur"], "'temperature'"),
        (["--patch", "64"], "patch 64 does not fit on a grid of 25 x 16"),
        (["--domain", "2"], "domain"),
        (["--data", "absent.zarr"], "absent.zarr"),
    ],
)
def test_arguments_that_do_not_fit_exit_with_2(
    era5: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    try:
        with pytest.raises(SystemExit) as stop:
            main("--data", era5, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err

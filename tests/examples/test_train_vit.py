"""The ViT example, run as a user runs it: by torchrun once, else on ranks that start faster, and alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import scidata
from pipelines import era5_grid
from pipelines.forcings import NAMES
from scidata.testing import run_ranks
from tests.examples._scripts import (
    LAUNCHER,
    alone,
    assert_equal_to_one_process,
    in_turn_on_ranks_of,
    lines_of,
    module_of,
    on_ranks_of,
    weights,
    whole_of,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_vit.py"
ERA_INTERIM = ROOT.parent / "shared" / "data" / "eraint_uvz.nc"
TINY = ("--dim", "8", "--depth", "2", "--heads", "2", "--device", "cpu")


def example() -> Any:
    """Load the script as a module."""
    return module_of("train_vit")


def main(*args: object) -> int:
    """Run the script in this process."""
    return example().main([*TINY, *map(str, args)])


def on_ranks(num_ranks: int, *args: object) -> tuple[int, str]:
    """Run the script on ranks of the fork server, which start faster than torchrun's; return what rank 0 did."""
    return on_ranks_of("train_vit", num_ranks, *TINY, *args)


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven times on 25 x 16 points: six samples, and with patch 4 six token rows once the last row is cropped."""
    path = str(tmp_path_factory.mktemp("era5") / "era5.zarr")
    assert era5_grid.main(["make", path, "--times", "7", "--shape", "25", "16", "--levels", "2"]) == 0
    return path


# -- gradients of one process --------------------------------------------------------------------------------------


REAL = ("--data", ERA_INTERIM, "--domain", 2, "--patch", 24)  # 241 latitudes; two months are one pair of steps


@pytest.mark.slow_for("more on 4")
@pytest.mark.parametrize(
    ("num_ranks", "runs"),
    # patch 8 makes three token rows, which two ranks share as 2 + 1; patch 5 makes five, over three ranks 2 + 2 + 1
    [
        (1, [("1 dp x 1 domain", ("--patch", 4, "--batch-size", 2))]),
        (
            2,
            [
                ("2 dp x 1 domain", ("--patch", 4, "--batch-size", 2)),
                ("1 dp x 2 domain", ("--domain", 2, "--patch", 8, "--batch-size", 2)),
                ("1 dp x 2 domain", ("--domain", 2, "--patch", 8, "--compile", "aot_eager")),
                *([("1 dp x 2 domain", REAL)] if ERA_INTERIM.exists() else []),
            ],
        ),
        (3, [("1 dp x 3 domain", ("--domain", 3, "--patch", 5, "--batch-size", 2))]),
        (
            4,
            [
                ("2 dp x 2 domain", ("--domain", 2, "--patch", 8, "--strategy", "fsdp")),
                ("1 dp x 2 domain x 2 pp", ("--domain", 2, "--pp", 2, "--patch", 8, "--batch-size", 3)),
            ],
        ),
        (
            4,
            [
                ("2 dp x 2 domain", ("--domain", 2, "--patch", 8, "--batch-size", 2)),
                ("2 dp x 2 domain", ("--domain", 2, "--patch", 8, "--strategy", "fsdp", "--compile", "aot_eager")),
                ("1 dp x 2 domain x 2 tp", ("--domain", 2, "--tp", 2, "--patch", 8, "--derived", *NAMES)),
            ],
        ),
    ],
    ids=["1", "2", "3", "4", "more on 4"],
)
def test_loss_and_gradients_are_those_of_one_process(
    era5: str, num_ranks: int, runs: list[tuple[str, tuple[object, ...]]]
) -> None:
    every = (*TINY, "--data", era5, "--dtype", "float64", "--check")
    found = in_turn_on_ranks_of("train_vit", num_ranks, *((*every, *args) for _, args in runs))
    for (layout, args), (code, output) in zip(runs, found, strict=True):
        assert_equal_to_one_process(code, f"{args}: {output}", layout)


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
    """Train two epochs on two dp ranks, as a user does: by torchrun, outside any other launcher."""
    out = tmp_path_factory.mktemp("run")
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = map(str, ("--data", era5, *SIX_STEPS, "--save-every", 4, "--out", out))
    command = [*torchrun, str(SCRIPT), *TINY, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
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
    args = ("--data", era5, *SIX_STEPS, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    code, output = alone(SCRIPT, *TINY, *args)
    assert code == 0, output
    assert_last_two_steps(uninterrupted, tmp_path, output)


def test_resuming_on_a_domain_of_three_goes_on_as_if_never_interrupted(
    era5: str, uninterrupted: Path, tmp_path: Path
) -> None:
    start = uninterrupted / "step_00000004"
    args = ("--domain", 3, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    code, output = on_ranks(3, "--data", era5, *SIX_STEPS, *args)
    assert code == 0, output
    assert_last_two_steps(uninterrupted, tmp_path, output)


def assert_last_two_steps(uninterrupted: Path, resumed: Path, output: str) -> None:
    steps = "6" if resumed.name in ("pp again", "whole") else "56"
    assert re.findall(r"^step (\d) loss", output, re.MULTILINE) == list(steps)
    expected, found = weights(uninterrupted / "step_00000006"), weights(resumed / "step_00000006")
    before = weights(uninterrupted / "step_00000004")
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam divides by the root of tiny second moments, which enlarges rounding: 1e-7 of the largest update is far
        # below what one sample more or less, or lost moments, would change
        moved = float((expected[name] - before[name]).abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7 * moved, msg=f"{resumed}: {name}")


def test_a_signal_before_the_time_is_up(era5: str, uninterrupted: Path, tmp_path: Path) -> None:
    """SLURM's, to one rank: all save after the same step; a job that goes on from there ends as if there was none."""
    args = ("--data", era5, *SIX_STEPS, "--out", tmp_path)
    codes = run_ranks(_signalled, 2, (*args, "--val-fraction", 0))
    assert codes == [0, 0]
    assert (tmp_path / "stopped").exists()  # the job's script asks for that
    (last,) = sorted(tmp_path.glob("step_*"))[-1:]
    step = int(last.name.removeprefix("step_"))
    assert 2 <= step < 6
    code, output = on_ranks(2, *args, "--resume", last)
    assert code == 0, output
    assert not (tmp_path / "stopped").exists()
    assert re.findall(r"^step (\d) loss", output, re.MULTILINE) == list("123456"[step:])
    found, expected = (weights(folder / "step_00000006")["head.weight"] for folder in (tmp_path, uninterrupted))
    torch.testing.assert_close(found, expected)


def _signalled(rank: int, num_ranks: int, args: tuple[object, ...]) -> int:
    """Train with a signal to rank 1 in its second step; others take a moment to hear of it."""
    module = example()
    step = module.Training.step

    def slow(self: Any, *args: Any) -> None:
        step(self, *args)
        if rank == 1 and self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(PAUSE)

    module.Training.step = slow
    return main(*args)


@pytest.mark.parametrize(("strategy", "amp"), [("ddp", "bf16"), ("fsdp", "fp16")])
def test_mixed_precision_with_clipping_on_a_domain(era5: str, tmp_path: Path, strategy: str, amp: str) -> None:
    args = ("--patch", 8, "--domain", 2, "--clip", 1, "--max-steps", 2, "--log-every", 1, "--out", tmp_path)
    args += ("--strategy", strategy, "--amp", amp)
    code, output = on_ranks(2, "--data", era5, *args)
    assert code == 0, output
    losses = [float(x) for x in re.findall(r"^step \d loss (\S+)", output, re.MULTILINE)]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)  # of fields in standard deviations
    scales = [line.get("loss scale") for line in lines_of(tmp_path, "train")]
    assert scales == ([65536] * 2 if amp == "fp16" else [None] * 2)
    assert all(
        w.dtype == torch.float32 for name, w in weights(tmp_path / "step_00000002").items() if name != "progress"
    )


# -- mixed precision, accumulation and other ranks ------------------------------------------------------------------


@pytest.mark.slow
def test_resuming_with_other_kernels_goes_on_as_if_never_interrupted(
    era5: str, uninterrupted: Path, tmp_path: Path
) -> None:
    """A checkpoint of a fused optimizer: FSDP's DTensors have it too; under --tp they are mixed with plain tensors.

    Of the whole model stages of a pipeline go on, and of their checkpoint stages and the whole model.
    """
    start, stages = uninterrupted / "step_00000004", tmp_path / "pp" / "step_00000005"
    ways: dict[str, tuple[object, ...]] = {
        "fsdp": (start, "--strategy", "fsdp"),
        "tp": (start, "--tp", 2, "--batch-size", 2),
        "pp": (start, "--pp", 2, "--batch-size", 2, "--save-every", 5),
        "pp again": (stages, "--pp", 2, "--batch-size", 2),
        "whole": (stages,),
    }
    every = (*TINY, "--data", era5, *SIX_STEPS)
    runs = [(*every, "--out", tmp_path / name, "--resume", *more) for name, more in ways.items()]
    for name, (code, output) in zip(ways, in_turn_on_ranks_of("train_vit", 2, *runs), strict=True):
        assert code == 0, f"{name}: {output}"
        assert_last_two_steps(uninterrupted, tmp_path / name, output)


def test_accumulated_batches_are_one(era5: str, uninterrupted: Path, tmp_path: Path) -> None:
    """One rank that takes two samples one after another, and an epoch whose last step has fewer."""
    every = (*TINY, "--data", era5, *SIX_STEPS)
    still = (*every, "--lr", 1e-30, "--epochs", 1)
    on_one = {
        "two": (*every, "--accumulate", 2),
        "pairs": (*still, "--batch-size", 2),
        "four": (*still, "--batch-size", 4),
    }
    on_two = {"ones": (*still, "--accumulate", 2)}
    for num_ranks, args in ((1, on_one), (2, on_two)):
        runs = [(*each, "--out", tmp_path / name) for name, each in args.items()]
        for name, (code, output) in zip(args, in_turn_on_ranks_of("train_vit", num_ranks, *runs), strict=True):
            assert code == 0, f"{name}: {output}"
    whole, twice = (weights(path / "step_00000006") for path in (uninterrupted, tmp_path / "two"))
    for name, expected in whole.items():
        torch.testing.assert_close(twice[name], expected, rtol=0, atol=1e-9, msg=name)
    found = {
        name: [(line["loss"], line["gradient norm"]) for line in lines_of(tmp_path / name, "train")]
        for name in ("pairs", "four", "ones")
    }
    assert [len(lines) for lines in found.values()] == [3, 2, 2]
    for ones, four in zip(found["ones"], found["four"], strict=True):
        assert ones == pytest.approx(four, rel=1e-12)
    # the two samples that are left weigh as two do: Adam would not notice a gradient half as long, clipping does
    assert found["four"][-1] == pytest.approx(found["pairs"][-1], rel=1e-12)


def test_resuming_another_model_says_what_differs(
    era5: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main("--data", era5, "--patch", 8, "--resume", uninterrupted / "step_00000004")
    assert stop.value.code == 2
    assert "was trained with --patch 4, and this has 8" in capsys.readouterr().err


def _overflow(rank: int, num_ranks: int) -> list[Any]:
    """Step a model of DTensors and plain tensors whose gradient overflows on rank 1 alone, then on none."""
    module_of("trainer")
    from trainer_parts import Precision, adamw, part_of

    mesh = scidata.init_mesh(dp=1, domain=1, extra={"tp": num_ranks}, device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
    torch.nn.init.constant_(model[0].weight, 1.0)
    torch.nn.init.constant_(model[1].weight, 1.0)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    precision, optimizer = Precision("fp16", torch.device("cpu")), adamw(model.parameters(), 0.1, 0.0)
    found: list[Any] = []
    for worst in (torch.inf, 3.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, 4.0)
        precision.scaler.scale(torch.ones(()))  # as for the loss
        scale = precision.scale
        for p in model.parameters():
            part_of(p.grad).mul_(scale)
        if rank == 1:
            part_of(model[0].weight.grad)[0, 0] = worst * scale
        norm = precision.step(optimizer, 1.0).item()
        weights = [part_of(p.detach()).flatten()[0].item() for p in model.parameters()]
        found.append([scale, precision.scale, norm, weights])
    return found


def test_an_overflow_on_one_rank_makes_all_skip_the_step() -> None:
    for (before, after, _, kept), (scale, same, norm, moved) in run_ranks(_overflow, 2):
        assert (before, after) == (65536, 32768)
        assert kept == [1.0, 1.0]
        assert scale == same == 32768
        assert norm == pytest.approx((47 * 16 + 9) ** 0.5)  # of the whole model's gradient, unscaled
        assert moved == pytest.approx([0.9, 0.9], abs=1e-6)


def _overflow_in_domain(rank: int, num_ranks: int, args: tuple[object, ...]) -> tuple[int, float]:
    """Train with a gradient that overflows in the first step, on domain rank 1 alone; return the first weight."""
    module = example()
    make = module.Training.make_model
    kept = []

    def make_model(self: Any) -> torch.nn.Module:
        model = make(self)
        kept.append(model.head.weight)
        if rank == 1:
            times = iter([torch.inf, 1.0, 1.0])
            model.head.weight.register_hook(lambda grad: grad * next(times))
        return model

    module.Training.make_model = make_model
    code = main(*args)
    return code, kept[0][0, 0].item()


def test_an_overflow_on_one_domain_rank_makes_all_skip_the_step(era5: str, tmp_path: Path) -> None:
    args = ("--data", era5, "--patch", 8, "--domain", 2, "--amp", "fp16", "--max-steps", 3, "--log-every", 1)
    (code, weight), (_, other) = run_ranks(_overflow_in_domain, 2, (*args, "--save-every", 1, "--out", tmp_path))
    assert code == 0
    assert weight == other
    assert np.isfinite(weight)
    assert [line["loss scale"] for line in lines_of(tmp_path, "train")] == [32768] * 3
    first, second = (weights(tmp_path / f"step_0000000{n}")["head.weight"] for n in (1, 2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    grid = (24, 16)
    untouched = example().ViT(7, 7, grid, 8, dim=8, depth=2, heads=2).head.weight
    assert torch.equal(first, untouched)


# -- speed ---------------------------------------------------------------------------------------------------------


def test_all_of_an_epoch_is_timed(era5: str, tmp_path: Path) -> None:
    """Six steps: the figure is for all of them, and not for the last."""
    args = ("--patch", 8, "--epochs", 2, "--save-every", 2, "--out", tmp_path)
    began = time.monotonic()
    run_ranks(_slowly, 1, ("--data", era5, *args))
    for line in lines_of(tmp_path, "speed"):
        assert 6 * PAUSE <= line["seconds"] < time.monotonic() - began
        assert line["samples/s"] == pytest.approx(6 / line["seconds"])


PAUSE = 0.05


def _slowly(rank: int, num_ranks: int, args: tuple[object, ...]) -> None:
    """Train with a loss that takes its time."""
    module = example()
    loss = module.Training.loss

    def slow(*args: Any) -> Any:
        time.sleep(PAUSE)
        return loss(*args)

    module.Training.loss = slow
    assert main(*args) == 0


# -- validation ----------------------------------------------------------------------------------------------------


def _validate(rank: int, num_ranks: int, layouts: list[tuple[object, ...]]) -> list[tuple[dict[str, float], ...]]:
    """Score a model that predicts no change, and one as it is drawn, in several layouts of the ranks."""
    module = example()
    found = []
    for args in layouts:
        training = module.Training(module.arguments([*TINY, *map(str, args)])[1])
        training.prepare()
        drawn = training.validate()
        for weight in (training.model.head.weight, training.model.head.bias):
            torch.nn.init.zeros_(part_of(weight.detach()))
        found.append((training.validate(), drawn))
    return found


def part_of(weight: Any) -> torch.Tensor:
    """What this rank holds of what FSDP has spread."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def test_validation_is_that_of_one_process(era5: str) -> None:
    """Two samples: over three dp ranks one has none. Bit for bit where the model's own rounding does not enter."""
    args = ("--data", era5, "--patch", 4, "--dtype", "float64", "--val-fraction", 0.34)
    still, drawn = run_ranks(_validate, 1, [args])[0][0]
    assert set(still) == {"loss", "temperature", "u", "v", "surface_pressure"}
    assert still != drawn
    for num_ranks, layouts in (
        (2, [("--strategy", "fsdp")]),
        (3, [("--domain", 1), ("--domain", 3)]),
        (4, [("--domain", 2)]),
    ):
        for found in run_ranks(_validate, num_ranks, [(*args, *layout) for layout in layouts]):
            for layout, (unmoved, other) in zip(layouts, found, strict=True):
                assert unmoved == still, (num_ranks, layout)
                is_split = layout in (("--domain", 2), ("--domain", 3))
                assert other == (pytest.approx(drawn, rel=1e-12) if is_split else drawn), (num_ranks, layout)


def test_validation_scores_are_what_numpy_says(era5: str) -> None:
    args = ("--data", era5, "--patch", 4, "--dtype", "float64", "--val-sel", "2000-01-02T06:", "--fields", "v", "u")
    found = run_ranks(_validate, 1, [args])[0][0][0]
    data = xr.open_dataset(era5, consolidated=False).isel(latitude=slice(24)).astype("f8")
    area = scidata.metrics.latitude_weights(data.latitude.values).numpy()[:, None]
    trained = data.isel(time=slice(0, 5))  # what held-out samples see is not in the normalisation
    parts = []
    for name in ("u", "v"):
        error = data[name][6].values - data[name][5].values
        assert found[name] == pytest.approx(np.sqrt((error**2 * area).mean()), rel=1e-12)
        parts.append((error / trained[name].std(("time", "latitude", "longitude")).values[:, None, None]) ** 2)
    assert found["loss"] == pytest.approx(np.mean(parts), rel=1e-12)


def test_the_best_is_kept(era5: str, tmp_path: Path) -> None:
    args = ("--patch", 8, "--epochs", 4, "--lr", 1, "--val-fraction", 0.34, "--validate-every", 2, "--out", tmp_path)
    code, output = on_ranks(1, "--data", era5, *args)
    assert code == 0, output
    losses = {line["step"]: line["loss"] for line in lines_of(tmp_path, "validation")}
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    state = torch.load(whole_of(tmp_path / "best"), weights_only=False)
    assert state["progress"][0] == min(losses, key=lambda step: losses[step])
    assert state["progress"][3] == min(losses.values())
    run = json.loads((tmp_path / "best" / "run.json").read_text())
    assert run["script"] == "train_vit"
    assert run["options"]["patch"] == 8


def _split(rank: int, num_ranks: int, args: list[str]) -> tuple[list[int], list[int]]:
    module = example()
    training = module.Training(module.arguments(args)[1])
    return training.train_samples, training.val_samples


@pytest.mark.parametrize(
    ("given", "train", "held"),
    [
        (("--val-fraction", "0.2"), [0, 1, 2, 3], [5]),  # 4 would be trained to predict where 5 begins
        (("--val-sel", "2000-01-01T12:2000-01-01T18"), [0, 4, 5], [2]),
        (("--val-sel", ":2000-01-01"), [4, 5], [0, 1, 2]),  # 00 to 18 h, the day's end included
        (("--val-sel", "2000-01-02:"), [0, 1, 2], [4, 5]),
    ],
)
def test_no_time_is_both_trained_on_and_held_out(
    era5: str, given: tuple[str, ...], train: list[int], held: list[int]
) -> None:
    assert run_ranks(_split, 1, [*TINY, "--data", era5, "--patch", "4", *given])[0] == (train, held)


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
        (["--amp", "fp61"], "(choose from"),
        (["--domian", "2"], "unrecognized arguments: --domian 2; did you mean --domain"),
        (["--val-fraction", "1"], "--val-fraction is a part of the samples"),
        (["--val-sel", "2016"], "give FIRST:LAST"),
        (["--validate-every", "3"], "needs samples that are held out"),
        (["--derived", "sun"], "(choose from"),
        (["--pp", "3"], "the model has 2 blocks"),
        (["--pp", "2", "--val-fraction", "0.2"], "stages are trained without --amp fp16, --compile and validation"),
        (["--forcings", "u"], "say which other fields are predicted"),
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
        (["--stats", "absent.json"], "absent.json"),
        (["--val-sel", "1999:1999"], "no sample is inside; they are from 2000-01-01T00"),
        (["--val-sel", "2000:"], "nothing is left to train on"),
        (["--val-sel", "2000:yesterday"], "'yesterday' is no"),
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

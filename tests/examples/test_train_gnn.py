"""The graph network example; test_train_vit.py runs what both share as a user does, by torchrun and alone."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import scidata
from pipelines import flow_graph, ugrid_mesh
from scidata.testing import run_ranks
from tests.examples._scripts import (
    LAUNCHER,
    assert_equal_to_one_process,
    in_turn_on_ranks_of,
    module_of,
    on_ranks_of,
    weights,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
TINY = ("--dim", "8", "--depth", "2", "--device", "cpu")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)


def main(*args: object) -> int:
    """Run the script in this process."""
    return module_of("train_gnn").main([*TINY, *map(str, args)])


def on_ranks(num_ranks: int, *args: object) -> tuple[int, str]:
    """Run the script on ranks of the fork server, which start faster than torchrun's; return what rank 0 did."""
    return on_ranks_of("train_gnn", num_ranks, *TINY, *args)


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six flows of about 220 nodes, each with its own mesh."""
    folder = tmp_path_factory.mktemp("flows")
    flow_graph.make(str(folder / "raw"), num_samples=6, num_nodes=200)
    flow_graph.convert(str(folder / "raw"), str(folder / "flow.store"))
    return str(folder / "flow.store")


# -- gradients of one process --------------------------------------------------------------------------------------


def assert_checks_pass(num_ranks: int, domain: int, *runs: tuple[object, ...]) -> None:
    """Check the gradients of several trainings on the same ranks."""
    runs = tuple((*TINY, "--domain", domain, "--dtype", "float64", "--check", *args) for args in runs)
    for args, (code, output) in zip(runs, in_turn_on_ranks_of("train_gnn", num_ranks, *runs), strict=True):
        assert_equal_to_one_process(code, f"{args}: {output}", f"{num_ranks // domain} dp x {domain} domain")


WAYS = ((), ("--khop",))  # exchanges, or wide halos


@pytest.mark.slow_for("2-2-1")
@pytest.mark.parametrize(("num_ranks", "domain", "batch_size"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 2, 2)])
def test_loss_and_gradients_are_those_of_one_process(flows: str, num_ranks: int, domain: int, batch_size: int) -> None:
    runs = [("--data", flows, "--batch-size", batch_size, *way) for way in WAYS]
    fsdp = [("--data", flows, "--strategy", "fsdp")] if num_ranks == 4 else []
    graphs = [("--data", flows, "--compile", "aot_eager", *way) for way in WAYS] if num_ranks == 2 else []
    assert_checks_pass(num_ranks, domain, *runs, *fsdp, *graphs)


@pytest.mark.skipif(not DATA.exists(), reason="the real UGRID and MPAS files are not beside the repository")
@pytest.mark.parametrize(
    ("source", "grid", "fields"),
    [
        # layers of a field become channels; nodes that repeat make a graph of many pieces
        ("geoflow_v1.nc", "geoflow_grid.nc", ("--inputs", "mesh_depth", "--targets", "v1")),
        ("mesh.QU.1920km.151026.nc", None, ("--inputs", "kiteAreasOnVertex", "--targets", "areaTriangle")),
    ],
    ids=["ugrid", "mpas"],
)
def test_check_on_real_meshes(tmp_path: Path, source: str, grid: str | None, fields: tuple[str, ...]) -> None:
    store = str(tmp_path / "store")
    ugrid_mesh.convert([str(DATA / source)], store, mesh=None if grid is None else str(DATA / grid))
    assert_checks_pass(2, 2, *(("--data", store, *fields, *way) for way in WAYS))


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven times on one mesh."""
    folder = tmp_path_factory.mktemp("waves")
    ugrid_mesh.make(str(folder / "waves.nc"), num_nodes=150, num_times=7)
    ugrid_mesh.convert([str(folder / "waves.nc")], str(folder / "waves.store"))
    return str(folder / "waves.store")


NEXT = ("--next", "--inputs", "height", "--targets", "height")


def test_loss_and_gradients_of_the_time_after_are_those_of_one_process(waves: str) -> None:
    assert_checks_pass(4, 2, *(("--data", waves, *NEXT, "--batch-size", 2, *way) for way in WAYS))


def _without_gradient_average(rank: int, num_ranks: int, args: tuple[object, ...]) -> int:
    scidata.parallelize = lambda model, mesh, **_: model
    return main(*args)


def test_check_fails_where_gradients_are_not_averaged(flows: str) -> None:
    assert run_ranks(_without_gradient_average, 2, ("--data", flows, "--dtype", "float64", "--check")) == [1, 1]


# -- training and resuming -----------------------------------------------------------------------------------------

SIX_STEPS = ("--epochs", 2, "--dtype", "float64", "--log-every", 1)  # 2 epochs x 3 global batches of 2


@pytest.fixture(scope="module")
def uninterrupted(flows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs on two dp ranks."""
    out = tmp_path_factory.mktemp("run")
    code, output = on_ranks(2, "--data", flows, *SIX_STEPS, "--save-every", 4, "--out", out)
    assert code == 0, output
    assert re.findall(r"^step (\d) loss", output, re.MULTILINE) == list("123456")
    return out


def test_training_writes_checkpoints_and_scalars_once(uninterrupted: Path) -> None:
    assert sorted(p.name for p in uninterrupted.glob("step_*[0-9]")) == [f"step_0000000{n}" for n in (3, 4, 6)]
    assert len(list(uninterrupted.glob("events.out.tfevents.*"))) == 1
    assert weights(uninterrupted / "step_00000006")["progress"].tolist() == [6, 2, 0]


def test_resuming_on_a_domain_of_three_goes_on_as_if_never_interrupted(
    flows: str, uninterrupted: Path, tmp_path: Path
) -> None:
    start = uninterrupted / "step_00000004"  # in the middle of the second epoch
    # one dp rank: as many samples a step as two with one each
    args = ("--domain", 3, "--batch-size", 2, "--out", tmp_path, "--resume", start)
    code, output = on_ranks(3, "--data", flows, *SIX_STEPS, *args)
    assert code == 0, output
    assert re.findall(r"^step (\d) loss", output, re.MULTILINE) == list("56")
    expected, found = weights(uninterrupted / "step_00000006"), weights(tmp_path / "step_00000006")
    before = weights(start)
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam divides by the root of tiny second moments, which enlarges rounding: 1e-7 of the largest update is far
        # below what one sample more or less, or lost moments, would change
        moved = float((expected[name] - before[name]).abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7 * moved, msg=name)


def test_training_on_a_domain_learns(flows: str, tmp_path: Path) -> None:
    size = ("--dim", 16, "--depth", 3)
    args = ("--domain", 2, "--epochs", 3, *size, "--lr", 0.03, "--clip", 1, "--log-every", 1, "--out", tmp_path)
    code, output = on_ranks(2, "--data", flows, *args)
    assert code == 0, output
    losses = [float(x) for x in re.findall(r"^step \d+ loss (\S+)", output, re.MULTILINE)]
    assert len(losses) == 18
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])  # the last epoch against the first: the same samples


def _validate(rank: int, num_ranks: int, args: tuple[object, ...], domains: list[int]) -> list[list[float]]:
    module = module_of("train_gnn")
    found = []
    for domain in domains:
        training = module.Training(module.arguments([*TINY, *map(str, args), "--domain", str(domain)])[1])
        training.prepare()
        found.append([training.validate()[name] for name in ("loss", "velocity", "pressure")])
    return found


def test_validation_is_that_of_one_process(flows: str) -> None:
    """Two of six meshes are held out: one of three dp ranks has none."""
    args = ("--data", flows, "--dtype", "float64", "--val-fraction", 0.34)
    expected = run_ranks(_validate, 1, args, [1])[0][0]
    for over_dp, over_domain in run_ranks(_validate, 3, args, [1, 3]):
        assert over_dp == expected
        assert over_domain == pytest.approx(expected, rel=1e-12)


def test_mixed_precision_on_a_domain(flows: str, tmp_path: Path) -> None:
    args = ("--domain", 2, "--amp", "fp16", "--max-steps", 1, "--log-every", 1, "--out", tmp_path)
    code, output = on_ranks(2, "--data", flows, *args)
    assert code == 0, output
    assert re.search(r"^step 1 loss \d", output, re.MULTILINE)
    saved = weights(tmp_path / "step_00000001")
    assert all(w.dtype == torch.float32 for name, w in saved.items() if name != "progress")


# -- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--depth", "0"], "--depth must be at least 1, not 0"),
        (["--warmup", "1.5"], "--warmup is a part of the training"),
        (["--resume", "nowhere"], "no complete checkpoint there"),
        (["--dtype", "float16"], "invalid choice"),
        (["--inputs", "presure"], "'pressure'"),
        (["--next", "--targets", "pressure"], "name all --targets among --inputs"),
        (["--next", "--inputs", "pressure", "--targets", "pressure"], "no field that is read has a time"),
        (["--domain", "2"], "domain"),
        (["--data", "absent.store"], "absent.store"),
    ],
)
def test_bad_arguments_exit_with_2(
    flows: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    try:
        with pytest.raises(SystemExit) as stop:
            main("--data", flows, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err

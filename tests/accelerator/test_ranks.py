"""Ranks with a device each: the mesh, operations on shards, exchanges of graphs, training, checkpoints, examples.

On the stand-in its collectives carry the rows, as NCCL or XCCL does: none of it goes gloo's way for small messages.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import scidata
from pipelines import era5_grid, flow_graph, graphcast
from scidata.device_mesh import axis_rank
from scidata.device_mesh.devices import current_device, default_backend, kind_of
from scidata.shard import ShardSpec
from scidata.testing import make_grid
from scidata.testing.oracle import assert_like_one_process, specs_of
from tests.accelerator._device import IS_SIM, KIND
from tests.accelerator._ranks import on_devices
from tests.dist import _conformance
from tests.dist._conformance import cases
from tests.dist._training import Block, Model, adam, loss_of, part_of, sample, train_alone
from tests.dist.test_compile_training import num_captured
from tests.dist.test_pipeline_stages import Pipeline
from tests.examples._scripts import assert_equal_to_one_process, run_here

needs_pyg = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)


# -- the mesh ----------------------------------------------------------------------------------------------------------


def begins(rank: int, num_ranks: int) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    assert mesh.device_type == KIND
    assert current_device(KIND) == torch.device(KIND, rank)  # by its local rank
    assert default_backend(KIND) in dist.get_backend_config()
    assert [kind_of(group) for group in (dist.group.WORLD, mesh.get_group("domain"))] == [KIND, KIND]
    whole = torch.arange(7.0, device=KIND)
    part = scidata.scatter_tensor(whole if rank == 0 else None, 0, mesh["domain"], (Shard(0),))
    assert part.device == current_device(KIND)
    assert torch.equal(part.full_tensor(), whole)
    with pytest.raises(scidata.errors.ConfigError, match=f"use {KIND!r} or 'cpu'"):
        scidata.init_mesh(domain=num_ranks, device="xpu" if KIND == "cuda" else "cuda")


def test_a_rank_has_its_device() -> None:
    on_devices(begins, 2)


# -- operations --------------------------------------------------------------------------------------------------------


#: Cases whose functions make plain tensors on the CPU.
WITH_OTHERS = (
    *("index_add", "bce_weight", "bce_pos_weight", "probabilities", "bilinear"),
    *("cross_entropy_mean", "cross_entropy_sum", "cross_entropy_none"),
    *("sparse", "sparse_too", "sparse values"),
)


def compares(rank: int, num_ranks: int, every: int) -> int:
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    for name, value in list(vars(_conformance).items()):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            setattr(_conformance, name, value.to(KIND))
    found = 0
    for turn, case in enumerate([case for case in cases() if case.name not in WITH_OTHERS][::every]):
        torch.default_generator.manual_seed(1)
        inputs = []
        for shape in case.shapes:
            values = torch.randn(shape, dtype=torch.float64)
            values = values if case.low is None else values.sigmoid() * 0.8 + case.low
            inputs.append(values.to(KIND).requires_grad_())
        specs = specs_of(mesh, case.shapes, case.dims[turn % len(case.dims)], turn)
        try:
            assert_like_one_process(case.function, inputs, specs, rtol=case.rtol)
        except BaseException as error:
            raise AssertionError(f"{case.name}: {[str(spec) for spec in specs]}") from error
        found += 1
    return found


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_operations_on_shards(every: int) -> None:
    """One in four of the cases that the op table has to pass: values and gradients of one process."""
    assert on_devices(compares, 2, every)[0] >= 200 // every


# -- reading and writing -----------------------------------------------------------------------------------------------


def interpolates(rank: int, num_ranks: int) -> None:
    """Points of which some lie in the other rank's part, with gradients of field and positions."""
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    generator = torch.Generator().manual_seed(0)
    field, places = (torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 8, 6), (20, 2)))
    inputs = [field.to(KIND).requires_grad_(), (places * torch.tensor([7.0, 6.0])).to(KIND).requires_grad_()]
    specs = [ShardSpec.even(mesh, (Shard(dim),), x.shape) for dim, x in zip((1, 0), inputs, strict=True)]
    assert_like_one_process(lambda x, at: scidata.interpolate(x, at, period=(0, 6)), inputs, specs)


def test_fields_at_points() -> None:
    on_devices(interpolates, 2)


def reads_and_writes(rank: int, num_ranks: int, folder: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(f"{folder}/in.zarr", mesh)
    whole = scidata.open_dataset(f"{folder}/in.zarr")
    loader = scidata.DataLoader(ds, None, device=KIND, pin_memory=True, transform_stream=True)
    with scidata.create(f"{folder}/out.zarr", like=ds) as writer:
        for i, part in enumerate(loader):
            assert part["u"].device == current_device(KIND)
            assert torch.equal(part["u"].full_tensor().cpu(), whole[i]["u"])
            writer[i] = part


def test_a_domain_reads_and_writes(tmp_path: Path) -> None:
    make_grid(tmp_path / "in.zarr", num_times=5)
    on_devices(reads_and_writes, 2, str(tmp_path))
    found, expected = (scidata.open_dataset(tmp_path / f"{name}.zarr") for name in ("out", "in"))
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in expected.fields)


# -- training ----------------------------------------------------------------------------------------------------------


def on_device(model: Model) -> Model:
    """Move a model; to a registered device torch makes other parameters, of which none are tied any longer."""
    model = model.to(KIND)
    model.tied.weight = model.head.weight
    return model


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def train(model: Any, optimizer: Any, mesh: Any, steps: range, scaler: Any = None, dtype: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = sample(step * mesh["dp"].size() + axis_rank(mesh, "dp")).to(KIND)
        with torch.autocast(KIND, dtype) if dtype else contextlib.nullcontext():
            loss = loss_of(model, part_of(x if dtype is None else x.float(), mesh))
        (loss if scaler is None else scaler.scale(loss)).backward()
        (optimizer.step if scaler is None else lambda: scaler.step(optimizer))()
        if scaler is not None:
            scaler.update()


def trains(rank: int, num_ranks: int, folder: str) -> None:
    """Buckets of DDP and FSDP, a checkpoint from one into the other, and mixed precision."""
    mesh = scidata.init_mesh(domain=2)
    expected, _ = train_alone(Model(), 4, 2)
    for strategy, options in (("ddp", {"bucket_bytes": 700}), ("fsdp", {"units": (Block,)})):
        model = scidata.parallelize(on_device(Model()), mesh, strategy=strategy, **options)
        optimizer = adam(model)
        if strategy == "ddp":
            train(model, optimizer, mesh, range(2))
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        else:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
        train(model, optimizer, mesh, range(2, 4))
        for (name, found), want in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(on_host(found), want.detach(), rtol=1e-11, atol=1e-11, msg=f"{strategy} {name}")
    for strategy, dtype in (("ddp", torch.bfloat16), ("fsdp", torch.float16)):
        model = scidata.parallelize(on_device(Model().float()), mesh, strategy=strategy)
        before = [on_host(p).clone() for p in model.parameters()]
        scaler = torch.amp.GradScaler(KIND, init_scale=1024.0)
        train(model, adam(model), mesh, range(2), scaler, dtype)
        assert scaler.get_scale() == 1024.0
        assert any(not torch.equal(on_host(p), old) for p, old in zip(model.parameters(), before, strict=True))


def test_training_and_checkpoints(tmp_path: Path) -> None:
    on_devices(trains, 4, str(tmp_path / "checkpoint"))


def compiles(rank: int, num_ranks: int) -> None:
    expected, _ = train_alone(Model(), 3, 1)
    mesh = scidata.init_mesh(domain=num_ranks)
    model = scidata.parallelize(on_device(Model()), mesh)
    scidata.compile(model, backend="aot_eager")
    train(model, adam(model), mesh, range(3))
    assert num_captured(model) > 0
    for (name, found), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(on_host(found), want.detach(), rtol=1e-11, atol=1e-11, msg=name)


def test_compiled_steps() -> None:
    on_devices(compiles, 2)


def stages(rank: int, num_ranks: int) -> None:
    mesh = scidata.init_mesh(domain=2, extra={"pp": 2})
    pipeline = Pipeline(mesh, "ScheduleGPipe")
    for _ in range(2):
        pipeline.step()


def test_stages_of_a_pipeline() -> None:
    on_devices(stages, 4)


# -- the examples ------------------------------------------------------------------------------------------------------


def runs(rank: int, num_ranks: int, script: str, every: list[tuple[object, ...]]) -> list[tuple[Any, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)  # at the end of each run
        return [run_here(rank, num_ranks, script, args) for args in every]


def test_the_vit_and_its_forecast(tmp_path: Path) -> None:
    data, tiny = str(tmp_path / "era5.zarr"), ("--dim", 8, "--depth", 2, "--heads", 2, "--patch", 4)
    assert era5_grid.main(["make", data, "--times", "7", "--shape", "25", "16", "--levels", "2"]) == 0
    common = ("--data", data, *tiny, "--domain", 2)
    out = tmp_path / "run"
    every = [
        (*common, "--dtype", "float64", "--check"),
        (*common, "--amp", "bf16", "--max-steps", 2, "--save-every", 1, "--out", out),
        (*common, "--strategy", "fsdp", "--amp", "fp16", "--max-steps", 2, "--out", tmp_path / "fsdp"),
    ]
    found = on_devices(runs, 2, "train_vit", every)[0]
    assert_equal_to_one_process(*found[0], "1 dp x 2 domain")
    assert [code for code, _ in found] == [0, 0, 0], found
    checkpoint = max(out.glob("step_*"))
    args = ("--data", data, "--checkpoint", checkpoint, "--leads", 2, "--domain", 2)
    ((code, output),) = on_devices(runs, 2, "forecast", [(*args, "--forecast", tmp_path / "out.zarr")])[0]
    assert code == 0, output


@pytest.mark.slow
@needs_pyg
def test_the_graph_network(tmp_path: Path) -> None:
    flow_graph.make(str(tmp_path / "raw"), num_samples=3, num_nodes=200)
    flow_graph.convert(str(tmp_path / "raw"), str(tmp_path / "flow.store"))
    common = ("--data", tmp_path / "flow.store", "--dim", 8, "--depth", 2, "--domain", 2, "--dtype", "float64")
    for code, output in on_devices(runs, 2, "train_gnn", [(*common, "--check")])[0]:
        assert_equal_to_one_process(code, output, "1 dp x 2 domain")


@pytest.mark.slow
@needs_pyg
def test_the_graphcast_example(tmp_path: Path) -> None:
    graphcast.make(str(tmp_path / "waves"), num_times=3, num_levels=1, shape=(10, 18))
    common = ("--data", tmp_path / "waves", "--dim", 8, "--domain", 2, "--dtype", "float64")
    for code, output in on_devices(runs, 2, "train_graphcast", [(*common, "--check")])[0]:
        assert_equal_to_one_process(code, output, "1 dp x 2 domain")


def test_the_stand_in_s_collectives_are_its_own() -> None:
    if IS_SIM:
        assert default_backend(KIND) == "simccl"

"""What scripts for PhysicsNeMo's ShardTensor call, on ours: each line of the page runs, and gives what it says."""

import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import scidata
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.op_table import HANDLERS
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

PAGE = Path(__file__).parents[2] / "docs" / "compatibility" / "from_physicsnemo.md"
HAS_PHYSICSNEMO = importlib.util.find_spec("physicsnemo") is not None


def lines_of_page():
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [code for row in rows[1:] for code in re.findall(r"^`(.*)`$", row[1].strip())]


def check_page(rank, num_ranks):
    mesh = scidata.init_mesh(domain=2, device="cpu")
    full = torch.arange(28.0, dtype=torch.float64).reshape(7, 4)
    x = shard_of(full, ShardSpec.even(mesh["domain"], [Shard(0)], full.shape, {0: (5, 2)})).requires_grad_()
    part = x.to_local().detach()
    names = {
        "scidata": scidata,
        "torch": torch,
        "ShardTensor": ShardTensor,
        "mesh": mesh,
        "full": full,
        "x": x,
        "Shard": Shard,
        "Partial": Partial,
        "part": part,
        "chunk": full.chunk(2)[rank],
        "whole": x.redistribute(placements=[Replicate()]),
        "d": distribute_tensor(full, mesh["domain"], [Shard(0)]),
        "model": nn.Linear(4, 4),
        "other": nn.Linear(4, 4),
        "func": len,
        "handler": lambda *_: None,
    }
    if HAS_PHYSICSNEMO:
        names["t"] = scidata.to_physicsnemo(x)
    found = {code: eval(code, names) for code in lines_of_page() if "(t)" not in code or HAS_PHYSICSNEMO}
    del HANDLERS[len]
    for code, value in found.items():
        if code.startswith(("ShardTensor.from", "scidata.scatter")) and "Partial" not in code:
            assert torch.equal(value.full_tensor(), full), code
    assert type(found["x.mean()"]) is torch.Tensor
    assert (found["x.offsets"], found["x.offsets()"], found["x.offsets(0)"]) == ((5 * rank, 0), (5 * rank,), 5 * rank)
    return len(found)


def test_each_line_of_the_page_runs():
    assert run_ranks(check_page, 2) == [len(set(lines_of_page())) - (not HAS_PHYSICSNEMO)] * 2


def check_partial(rank, num_ranks, shape):
    """A gradient for each way in and out."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    share = torch.full((3, 2), rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = sum(range(1, num_ranks + 1))
    for op, expected in (("sum", total), ("avg", total / num_ranks)):
        x = ShardTensor.from_local(share, mesh, [Partial(op)] * len(shape))
        assert x.placements == (Replicate(),) * len(shape)
        assert torch.equal(x.to_local(), torch.full((3, 2), float(expected), dtype=torch.float64))
        share.grad = None
        (2 * x).sum().backward()
        assert torch.equal(share.grad, torch.full_like(share, 2.0 / (num_ranks if op == "avg" else 1)))
    with pytest.raises(ShardLayoutError, match="neither a sum nor a mean"):
        ShardTensor.from_local(share, mesh, [Partial("max")] * len(shape))
    x = ShardTensor.from_local(share.detach() * 0 + 1, mesh, [Replicate()] * len(shape)).requires_grad_()
    for out in (x.to_local, x.full_tensor):
        x.grad = None
        (out(grad_placements=[Partial()] * len(shape)) * (rank + 1)).sum().backward()
        assert torch.equal(x.grad.to_local(), torch.full((3, 2), float(total), dtype=torch.float64))
        theirs = DTensor.from_local(x.to_local().detach(), mesh, x.placements).requires_grad_()
        (getattr(theirs, out.__name__)(grad_placements=[Partial()] * len(shape)) * (rank + 1)).sum().backward()
        assert torch.equal(theirs.grad.full_tensor(), x.grad.to_local())
    cut = x.redistribute(placements=[Shard(-2), Shard(1)][: len(shape)])
    assert cut.to_local(grad_placements=[Shard(-2), Shard(-1)][: len(shape)]).shape == cut.spec.local_shape
    with pytest.raises(ShardLayoutError, match=r"cannot come as Partial"):
        cut.to_local(grad_placements=[Partial()] * len(shape))
    with pytest.raises(ShardLayoutError, match="one for each"):
        x.to_local(grad_placements=[])


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)], ids=str)
def test_partial(shape):
    run_ranks(check_partial, torch.Size(shape).numel(), shape)


def check_view_and_offsets(rank, num_ranks):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("domain",))
    full = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sizes in ((4, 0, 3), (3, 3, 1)):
        spec = ShardSpec.even(mesh, [Shard(0)], full.shape, {0: sizes})
        assert_like_one_process(lambda x: x.view(torch.int64).bitwise_and(255), [full], [spec])
        x = shard_of(full, spec)
        x.view(torch.int64).zero_()  # a view: the same memory
        assert torch.equal(x.full_tensor(), torch.zeros_like(full))
        x.view(torch.int16)[:, 4:] = 7  # of another width, too
        assert (x.full_tensor().view(torch.int16) == torch.tensor([0] * 4 + [7] * 12, dtype=torch.int16)).all()
    stream = io.BytesIO()
    torch.save(x.offsets, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=True) == x.offsets == x.spec.offsets


def test_view_of_another_dtype_and_saved_offsets():
    run_ranks(check_view_and_offsets, 3)


def check_sync(rank, num_ranks):
    mesh = scidata.init_mesh(domain=2, dp=2, device="cpu")
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)
    weight = model[0].weight.detach().clone()
    scidata.sync_module_over_mesh(model, mesh["domain"], src_mesh_rank=1, verify=True)
    found = scidata.all_gather_v(model[0].weight.detach(), (3, 3), 0, mesh["domain"].get_group())
    assert torch.equal(found[:3], found[3:])
    assert torch.equal(model[0].weight, weight) == (rank % 2 == 1)
    assert model[1].running_mean.tolist() == [rank // 2 * 2 + 1.0] * 3  # each domain has its own
    with pytest.raises(ConfigError, match="one axis"):
        scidata.sync_module_over_mesh(model, mesh)
    with pytest.raises(ConfigError, match="not among the 2 ranks"):
        scidata.sync_module_over_mesh(model, mesh["domain"], 2)
    with pytest.raises(ConfigError, match="ranks disagree"):
        scidata.sync_module_over_mesh(nn.Linear(3, 3 + rank), mesh["domain"])
    spread = nn.Linear(4, 4, bias=False)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight.detach(), mesh["domain"], [Shard(0)]))
    with pytest.raises(ConfigError, match="before they are"):
        scidata.sync_module_over_mesh(spread, mesh["domain"])


def test_sync_module_over_mesh():
    run_ranks(check_sync, 4)

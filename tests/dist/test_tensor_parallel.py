"""Tensor parallelism by torch's ``parallelize_module`` beside the domain: loss and gradients of one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import scidata
from scidata.errors import ConfigError, ShardLayoutError, UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of

SIZES = {1: [(7,)], 2: [(5, 2), (0, 7)], 3: [(4, 0, 3)]}  # rows of each domain rank
LAYOUTS = [(1, 2), (2, 2), (3, 2), (2, 3)]  # domain x tp


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 18), nn.Linear(18, 12)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Heads are counted by what is there: all of them, or this tp rank's."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        B, N, _ = x.shape
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).reshape(B, N, -1, 6).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, -1))


class Block(nn.Module):
    """Parameters that meet shards of the domain alone, of both axes, plain values, and none."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(12), Attention()
        self.norm2, self.mlp = nn.LayerNorm(12), MLP()
        self.position = nn.Parameter(torch.randn(7, 12))
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.readout = MLP()

    def forward(self, x):
        x = x + self.position[: x.shape[1]]
        x = x + self.attention(self.norm1(x))
        x = x + checkpoint(self.mlp, self.norm2(self.frozen(x)), use_reentrant=False)
        return x, self.readout(x.mean(dim=1))  # what is pooled is plain, so torch's own DTensors compute with it


def made(kind, seed):
    torch.manual_seed(seed)
    return kind().double()


PAIR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
    "frozen": ColwiseParallel(output_layouts=Replicate()),
    "readout.up": ColwiseParallel(),
    "readout.down": RowwiseParallel(),
}


def mesh_of(domain, tp, dp=1):
    return scidata.init_mesh(dp=dp, domain=domain, extra={"tp": tp}, device="cpu")


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor | ShardTensor) else x


def loss_of(model, x):
    outputs = model(x)
    return sum((y * y.detach().cos()).sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))


def compare(model, single, x, spec, tol=1e-12):
    """Compare loss, gradients of parameters and the input's with one process."""
    leaf = x.clone().requires_grad_()
    expected = loss_of(single, leaf)
    expected.backward()
    part = shard_of(x, spec).requires_grad_()
    loss = loss_of(model, part)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=tol, atol=tol)
    torch.testing.assert_close(part.grad.full_tensor(), leaf.grad, rtol=tol, atol=tol)
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(whole_of(p.grad), q.grad, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


def check_one_step(rank, num_ranks, domain, tp, averaged):
    mesh = mesh_of(domain, tp)
    for kind, plan in ((MLP, PAIR), (Block, PLAN)):
        for sizes in SIZES[domain]:
            single = made(kind, 0)
            model = made(kind, 0 if not averaged else rank)  # parallelize makes them equal to the first rank's
            parallelize_module(model, mesh["tp"], plan)
            if averaged:
                scidata.parallelize(model, mesh)
            x = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            compare(model, single, x, ShardSpec.even(mesh["domain"], [Shard(1)], x.shape, {0: sizes}))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(("domain", "tp"), LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_of_one_process(domain, tp, averaged):
    run_ranks(check_one_step, domain * tp, domain, tp, averaged)


class Heads(nn.Module):
    """A model that knows nothing of parts: with ``use_local_output=False`` it sees the whole of each tensor."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.randn(6, 1, 2))  # plain, and split over the heads of all tp ranks

    def forward(self, x):
        y = self.qkv(self.norm(x)).unflatten(-1, (6, 3, 2))
        q, k, v = (t.squeeze(-2).transpose(1, 2) * self.scale for t in y.split(1, dim=-2))
        y = F.scaled_dot_product_attention(q, k, v) + 1
        y.mul_(2.0)
        return x + self.out(y.transpose(1, 2).flatten(2))


GLOBAL = {"qkv": ColwiseParallel(use_local_output=False), "out": RowwiseParallel()}
PREPARED = {
    "norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(2), use_local_output=False),
    "qkv": ColwiseParallel(input_layouts=Shard(2), use_local_output=False),
    "out": PrepareModuleInput(input_layouts=Shard(2), desired_input_layouts=Replicate(), use_local_output=True),
}


def check_without_local_output(rank, num_ranks, domain, tp, averaged):
    mesh = mesh_of(domain, tp)
    for sizes, plan in zip(SIZES[domain], (GLOBAL, PREPARED), strict=False):
        single = made(Heads, 0)
        model = parallelize_module(made(Heads, 0), mesh["tp"], plan)
        if averaged:
            scidata.parallelize(model, mesh)
        x = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        compare(model, single, x, ShardSpec.even(mesh["domain"], [Shard(1)], x.shape, {0: sizes}))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(("domain", "tp"), [(2, 2), (1, 3)], ids=str)
def test_a_model_that_sees_wholes(domain, tp, averaged):
    run_ranks(check_without_local_output, domain * tp, domain, tp, averaged)


def check_steps(rank, num_ranks):
    """Two optimizer steps of two micro-batches each, on dp x domain x tp; each dp row has extents and parts of its own."""
    mesh = mesh_of(2, 2, dp=2)
    single = made(Block, 0)
    model = parallelize_module(made(Block, rank), mesh["tp"], PLAN)
    assert scidata.parallelize(model, mesh) is model
    steps = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01, momentum=0.9) for m in (model, single)
    ]
    x = torch.randn(2, 2, 2, 3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dp = mesh["dp"].get_local_rank()
    for turn, batches in enumerate(x):
        parts = [((5, 2), (0, 4)), ((0, 7), (3, 1))][turn]  # by dp row
        specs = [ShardSpec.even(mesh["domain"], [Shard(1)], (3, sum(each), 12), {0: each}) for each in parts]
        first, last = [[rows[:, : sum(each)] for rows, each in zip(batch, parts, strict=True)] for batch in batches]
        with scidata.no_sync(model):
            loss_of(model, shard_of(first[dp], specs[dp])).backward()
        loss_of(model, shard_of(last[dp], specs[dp])).backward()
        sum(loss_of(single, part) / 2 for part in (*first, *last)).backward()
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                scale = float(q.grad.abs().max())
                torch.testing.assert_close(whole_of(p.grad) / scale, q.grad / scale, rtol=1e-12, atol=1e-12, msg=name)
        for step in steps:
            step.step()
            step.zero_grad()
    for (name, p), q in zip(model.named_parameters(), single.named_parameters(), strict=True):
        torch.testing.assert_close(whole_of(p), q[1], rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_steps_on_dp_x_domain_x_tp():
    run_ranks(check_steps, 8)


def check_part(rank, num_ranks):
    """What a ShardTensor becomes between ``from_local`` and ``to_local``, without a module."""
    mesh = mesh_of(2, 2)
    tp = mesh["tp"].get_local_rank()
    full = torch.arange(56.0, dtype=torch.float64).reshape(7, 8)
    spec = ShardSpec.even(mesh["domain"], [Shard(0)], (7, 4), {0: (6, 1)})
    x = shard_of(full[:, 4 * tp : 4 * tp + 4], spec)
    y = DTensor.from_local(x, mesh["tp"], [Shard(-1)])
    assert y.shape == full.shape
    assert (y.placements, y.device_mesh) == ((Shard(1),), mesh["tp"])
    assert torch.equal(y.full_tensor().full_tensor(), full)
    assert torch.equal((y @ full.mT).full_tensor().full_tensor(), full @ full.mT)
    back = y.to_local()
    assert (type(back), back.spec, back.to_local().data_ptr()) == (ShardTensor, spec, x.to_local().data_ptr())
    total = DTensor.from_local(x, mesh["tp"], [Partial()])
    assert torch.equal(total.to_local().full_tensor(), full[:, :4] + full[:, 4:])
    y[:, 3] = 0
    assert torch.equal(x.full_tensor()[:, 3], torch.full((7,), 0.0 if tp == 0 else 7.0) + 8 * tp * torch.arange(7))
    assert y.sum().to_local() == full.sum() - full[:, 3].sum()
    assert type(DTensor.from_local(x.redistribute(placements=[Replicate()]), mesh["tp"], [Replicate()])) is DTensor
    with pytest.raises(UnsupportedShardOp, match=r"which the domain splits.*SequenceParallel"):
        parallelize_module(nn.LayerNorm(4).double(), mesh["tp"], SequenceParallel(sequence_dim=0))(x)
    with pytest.raises(RuntimeError, match="got mixed torch"):  # torch's own
        F.linear(x, distribute_tensor(full[:, :4], mesh["tp"], [Replicate()]))
    with pytest.raises(UnsupportedShardOp, match="a ShardTensor meets a DTensor"):
        y + y.to_local()
    with pytest.raises(ShardLayoutError, match="axes of one mesh"):
        DTensor.from_local(x, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), [Replicate()])
    with pytest.raises(UnsupportedShardOp, match="the gradient of a DTensor"):
        torch.autograd.grad(y.sum(), distribute_tensor(full, mesh["tp"], [Replicate()]).requires_grad_())
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)).double()  # features that tp does not divide
    broadcast = [torch.distributed.broadcast(p.detach(), 0) for p in plain.parameters()]
    assert len(broadcast) == 4
    split = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    parallelize_module(split, mesh["tp"], {"2": RowwiseParallel()})
    torch.testing.assert_close(split(total.to_local()).full_tensor(), plain(full[:, :4] + full[:, 4:]))
    with pytest.raises(UnsupportedShardOp, match=r"the parts differ along dim 1.*use_local_output"):
        parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})(x)
    model = parallelize_module(MLP(), mesh["tp"], PAIR)
    with pytest.raises(ConfigError, match="strategy='ddp'"):
        scidata.parallelize(model, mesh, strategy="fsdp")
    with pytest.raises(ConfigError, match="neither dp nor domain"):
        scidata.parallelize(parallelize_module(MLP(), mesh["domain"], PAIR), mesh)


def test_from_local_and_to_local():
    run_ranks(check_part, 4)

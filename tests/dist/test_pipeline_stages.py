"""torch's pipeline stages on a pp axis beside dp and the domain: loss and gradients of one process."""

import copy
import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import scidata
from scidata.device_mesh.board import Postings
from scidata.device_mesh.devices import current_device
from scidata.shard import ShardSpec
from scidata.shard.parallel.buckets import BUCKETS
from scidata.testing import fake_group, run_ranks
from scidata.testing.oracle import shard_of
from scidata.testing.ranks import RankError

BATCH, CHUNKS = 8, 4
KINDS = ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"]
SIZES = [(7, 2), (0, 9)]  # rows of each domain rank
BY_ROW = [((7, 2), (0, 9)), ((0, 9), (4, 5))]  # the same for each of two dp rows


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        """(B, C, H, W) → (B, C, H, W), the memory permuted."""
        q, k, v = self.qkv(self.norm(x.permute(0, 2, 3, 1).flatten(1, 2))).chunk(3, dim=-1)
        y = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + y.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)


class Down(nn.Module):
    """Returns several tensors: sharded ones of two extents, and a plain one."""

    def __init__(self):
        super().__init__()
        self.conv, self.down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1)

    def forward(self, x):
        x = F.gelu(self.conv(x))
        return self.down(x), x, x.mean(dim=(2, 3))


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, low, x, pooled):
        return self.attention(low), x, pooled


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(6, 6, 3, stride=2, padding=1)

    def forward(self, low, x, pooled):
        return self.up(low) + x * torch.tanh(pooled)[:, :, None, None]


def parts():
    """Return the parts of a model, to be dealt to stages."""
    torch.manual_seed(0)
    return [part.double() for part in (Down(), Middle(), Middle(), Stage([Up(), Attention(), nn.Conv2d(6, 2, 1)]))]


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *x):
        for layer in self.layers:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x


def loss_of(y, target):
    return (y - target).square().mean()


def data(index):
    generator = torch.Generator().manual_seed(100 + index)
    return [torch.randn(BATCH, 2, 9, 3, generator=generator, dtype=torch.float64) for _ in range(2)]


def train_alone(num_dp):
    """Return the parts after one process's backward passes, and the outputs and losses by dp rank."""
    whole, found = Stage(parts()), []
    for index in range(num_dp):
        x, target = data(index)
        y = whole(x)
        loss = loss_of(y, target)
        (loss / num_dp).backward()
        found.append((y.detach(), loss.item()))
    return whole, found


class Pipeline:
    """A rank's stages of a schedule, and what is right."""

    def __init__(self, mesh, kind, strategy="ddp", sizes=SIZES[0], loss=loss_of):
        schedule = getattr(pipelining, kind)
        is_multi = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
        self.mesh, self.count = mesh, 4 if is_multi else 2
        pp, me, device = mesh["pp"].size(), mesh["pp"].get_local_rank(), current_device(mesh.device_type)
        own = [me, self.count - 1 - me] if "ZBV" in kind else range(me, self.count, pp)
        each = 4 // self.count
        self.modules = {i: Stage(parts()[each * i : each * (i + 1)]).to(device) for i in own}
        for module in self.modules.values():
            scidata.parallelize(module, mesh, strategy=strategy)
        group = mesh.get_group("pp")
        stages = [pipelining.PipelineStage(m, i, self.count, device, group=group) for i, m in self.modules.items()]
        self.schedule = schedule(stages if is_multi else stages[0], CHUNKS, loss_fn=loss)
        dp = mesh["dp"].get_local_rank()
        self.whole, outputs = train_alone(mesh["dp"].size())
        self.expected = outputs[dp]
        own = sizes[dp] if isinstance(sizes[0], tuple) else sizes
        spec = ShardSpec.even(mesh["domain"], [Shard(2)], (BATCH, 2, 9, 3), {"domain": own})
        x, target = [shard_of(each.to(device), spec) for each in data(dp)]
        self.args = (x,) if 0 in self.modules else ()
        self.kwargs = {"target": target} if self.count - 1 in self.modules else {}

    def step(self):
        """Take a step and compare its output, losses and gradients."""
        losses = []
        result = self.schedule.step(*self.args, **self.kwargs, losses=losses)
        if self.kwargs:
            y, loss = self.expected
            torch.testing.assert_close(result.full_tensor().detach().cpu(), y, rtol=1e-12, atol=1e-12)
            assert torch.stack(losses).mean().item() == pytest.approx(loss, rel=1e-12)
        each = len(self.whole.layers) // self.count
        for number, module in self.modules.items():
            names = dict(Stage(self.whole.layers[each * number : each * (number + 1)]).named_parameters())
            for name, p in module.named_parameters():
                got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(got.cpu(), names[name].grad, rtol=1e-12, atol=1e-12, msg=f"{number}: {name}")
        for module in self.modules.values():
            module.zero_grad()


def _train(rank, size, dp, runs, layouts=SIZES):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = scidata.init_mesh(dp=dp, domain=2, extra={"pp": 2})
    for (kind, strategy), sizes in itertools.product(runs, layouts):
        pipeline = Pipeline(mesh, kind, strategy, sizes)
        pipeline.step()
        if kind == "ScheduleGPipe":
            _count(pipeline)
            pipeline.schedule.eval(*pipeline.args, **pipeline.kwargs)
        pipeline.step()  # after an evaluation, torch makes its buffers anew


def _count(pipeline):
    """Layouts are not sent again, and gradients are summed once a step, not once a microbatch."""
    sums, posted, all_reduce, claim = [], [], dist.all_reduce, Postings.claim
    buckets = {id(each._group) for each in map(BUCKETS.get, pipeline.modules.values()) if each is not None}
    try:
        dist.all_reduce = lambda x, *a, group=None, **k: (
            sums.append(group) if id(group) in buckets and k.get("async_op") else None,
            all_reduce(x, *a, group=group, **k),
        )[1]
        Postings.claim = lambda self, key, value: (posted.append(key), claim(self, key, value))[1]
        pipeline.step()
    finally:
        dist.all_reduce, Postings.claim = all_reduce, claim
    assert len(sums) == len(buckets)
    assert not posted


def test_gradients_of_one_process():
    run_ranks(_train, 4, 1, [*((kind, "ddp") for kind in KINDS), ("Schedule1F1B", "fsdp")])


@pytest.mark.parametrize(("kind", "strategy"), [("Schedule1F1B", "ddp"), ("ScheduleGPipe", "fsdp")])
@pytest.mark.slow_for("ScheduleGPipe-fsdp")
def test_other_sizes_in_each_dp_row(kind, strategy):
    run_ranks(_train, 8, 2, [(kind, strategy)], BY_ROW)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_dp_pp_domain(kind, strategy):
    run_ranks(_train, 8, 2, [(kind, strategy)])


def _split_backward(rank, size, kind):
    mesh = scidata.init_mesh(dp=2, domain=1, extra={"pp": 2})  # sums of gradients without a hook that tells of them
    pipeline = Pipeline(mesh, kind, sizes=(9,), loss=lambda y, t: 1 * loss_of(y, t))  # torch detaches no view
    pipeline.step()
    pipeline.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_weights_gradients_that_torch_sets_itself(kind):
    run_ranks(_split_backward, 4, kind)


def _running_statistics(rank, size):
    """Torch's first pass, on memory without values, leaves none; two steps' gradients are summed once."""
    mesh = scidata.init_mesh(dp=1, domain=2, extra={"pp": 2})
    me, mse = mesh["pp"].get_local_rank(), nn.functional.mse_loss
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)).double() for _ in range(2)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    scidata.parallelize(layers[me], mesh)
    stage = pipelining.PipelineStage(layers[me], me, 2, "cpu", group=mesh.get_group("pp"))
    schedule = pipelining.Schedule1F1B(stage, CHUNKS, loss_fn=mse, scale_grads=False)
    spec = ShardSpec.even(mesh["domain"], [Shard(2)], (BATCH, 2, 9, 3), {"domain": SIZES[0]})
    x, target = data(0)
    for is_last in (False, True):
        with nullcontext() if is_last else scidata.no_sync(layers[me]):
            given = {} if me == 0 else {"target": shard_of(target, spec)}
            schedule.step(*((shard_of(x, spec),) if me == 0 else ()), **given)
        for part, wanted in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            mse(whole(part), wanted).backward()
    for found, expected in zip(layers[me].state_dict().values(), whole[me].state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(layers[me].parameters(), whole[me].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def test_running_statistics_and_accumulation():
    run_ranks(_running_statistics, 4)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _holds(pipeline):
    """Return stages as part of one model, by the names that they have there."""
    model = Stage([nn.Identity() for _ in range(4)])
    for number, module in pipeline.modules.items():
        for i, layer in enumerate(module.layers):
            model.layers[number * 4 // pipeline.count + i] = layer
    return model


def _checkpoint(rank, size, folder):
    mesh = scidata.init_mesh(dp=1, domain=2, extra={"pp": 2})
    pipeline = Pipeline(mesh, "Schedule1F1B")
    model = _holds(pipeline)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pipeline.schedule.step(*pipeline.args, **pipeline.kwargs)
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    other = Pipeline(mesh, "ScheduleInterleaved1F1B")  # other stages
    loaded = _holds(other)
    again = torch.optim.Adam(loaded.parameters(), lr=0.1)
    weights, moments = get_state_dict(loaded, again)
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(loaded, again, model_state_dict=weights, optim_state_dict=moments)
    for schedule, step in ((pipeline, optimizer), (other, again)):
        step.zero_grad()
        schedule.schedule.step(*schedule.args, **schedule.kwargs)
        step.step()
    return {name: p.detach() for held in (model, loaded) for name, p in held.named_parameters()}, rank


def test_checkpoints_of_other_stages(tmp_path):
    """What stages have written, one process and a pipeline of other stages read: all train on alike."""
    found = [held for held, _ in run_ranks(_checkpoint, 4, str(tmp_path))]
    whole = train_alone(1)[0]
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
    optimizer.step()
    read = Stage(parts())
    state = {"model": read.state_dict()}
    load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for name, p in whole.named_parameters():
        torch.testing.assert_close(state["model"][name], p.detach(), rtol=1e-9, atol=1e-9)
    optimizer.zero_grad()
    x, target = data(0)
    loss_of(whole(x), target).backward()
    optimizer.step()
    for name, p in whole.named_parameters():
        for held in found:
            if name in held:
                torch.testing.assert_close(held[name], p.detach(), rtol=1e-9, atol=1e-9)


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Resplits(nn.Module):
    """Splits rows otherwise from the third microbatch on; it is called once before the first, for torch's buffers."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls < 4 else x.redistribute(sizes={"domain": (1, 3)})


class Named(nn.Module):
    def forward(self, x):
        return {"x": x}


class Spectra(nn.Module):
    def forward(self, x):
        return torch.fft.rfft2(x)


def _refuses(rank, size, make, parallelized):
    mesh = scidata.init_mesh(dp=1, domain=size // 2, extra={"pp": 2})
    me, module = mesh["pp"].get_local_rank(), make()
    if me in parallelized:
        scidata.parallelize(module, mesh)
    elif "another" in parallelized:
        scidata.parallelize(nn.Linear(2, 2), mesh)
    stage = pipelining.PipelineStage(module, me, 2, "cpu", group=mesh.get_group("pp"))
    if "late" in parallelized:
        scidata.parallelize(module, mesh)
    schedule = pipelining.ScheduleGPipe(stage, 4)
    spec = ShardSpec.even(mesh["domain"], [Shard(1)], (4, 4, 5))
    schedule.step(*((shard_of(torch.ones(4, 4, 5), spec),) if me == 0 else ()))


@pytest.mark.parametrize(
    ("size", "make", "parallelized", "match"),
    [
        (2, nn.Identity, (0,), "stage 1 would take parts for whole tensors"),
        (2, nn.Identity, (0, "another"), "stage 1 receives a ShardTensor, but its module was not given"),
        (2, nn.Identity, ("late",), "isend: .* Remedy: call .*parallelize.* before PipelineStage is made"),
        (2, Spectra, (0, 1), "stage 0 hands on a Spectrum"),
        (2, Named, (0, 1), "a tensor, tuple, or list of tensors, got dict"),
        (4, Resplits, (0, 1), r"stage 0 hands on .*sizes \(1, 3\).* first .* was .*sizes \(2, 2\).* Remedy: "),
    ],
)
def test_mistakes_are_named(size, make, parallelized, match):
    with pytest.raises(RankError, match=match):
        run_ranks(_refuses, size, make, parallelized)


def test_no_store_is_asked_of_pretended_ranks():
    with fake_group(8):
        mesh = scidata.init_mesh(domain=2, extra={"pp": 2}, device="cpu")
        module = scidata.parallelize(nn.Linear(2, 2), mesh)
        assert pipelining.PipelineStage(module, 0, 2, "cpu", group=mesh.get_group("pp")).submod is module

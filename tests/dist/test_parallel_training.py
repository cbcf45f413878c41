"""What a training loop does around ``parallelize``: mixed precision, compiling, checkpoints, odd parameters."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import scidata
from scidata.device_mesh import axis_rank, domain_mesh, init_mesh
from scidata.errors import ConfigError
from scidata.shard.tensor import ShardTensor
from scidata.testing import run_ranks
from tests.dist._training import Block, Model, adam, assert_equal_models, loss_of, part_of, sample, train_alone, whole

STRATEGIES = {"ddp": {"bucket_bytes": 700}, "fsdp": {"units": (Block,)}}
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def parallel(mesh, strategy, model=None):
    return scidata.parallelize(model or Model(), mesh, strategy=strategy, **STRATEGIES[strategy])


def step_of(model, mesh, index, forward=loss_of):
    """Run forward and backward on this dp rank's sample."""
    loss = forward(model, part_of(sample(index * mesh["dp"].size() + axis_rank(mesh, "dp")), mesh))
    loss.backward()
    return loss.detach()


# -- collectives ---------------------------------------------------------------------------------------------------


class Spy:
    """Counts collectives by name and number of ranks, as the process groups see them."""

    def __enter__(self):
        self.counts, self._kept = {}, []
        for name in ("all_reduce", "broadcast", "all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
            function = getattr(dist, name, None)
            if function is not None:
                self._kept.append((name, function))
                setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name, function):
        def counted(*args, group=None, **kwargs):
            key = name, dist.get_world_size(group)
            self.counts[key] = self.counts.get(key, 0) + 1
            return function(*args, group=group, **kwargs)

        return counted

    def __exit__(self, *_):
        for name, function in self._kept:
            setattr(dist, name, function)


def counts_collectives(rank, num_ranks):
    mesh = init_mesh(domain=2)
    model = parallel(mesh, "ddp")
    x = part_of(sample(rank // 2), mesh)
    with Spy() as first:
        loss_of(model, x).backward()
    assert first.counts.pop(("broadcast", 4)) == 1  # once, the order of the gradients
    with Spy() as forward:
        loss = loss_of(model, x)
    with Spy() as backward:
        loss.backward()
    # the mean of the rows, and of the pooled values: the only sums over the domain that the model itself has
    assert forward.counts == {("all_reduce", 2): 2}
    num_buckets = len(model_buckets(model))
    assert 3 < num_buckets < 10
    assert backward.counts == {("all_reduce", 4): num_buckets}, "a bucket is one collective, and there are no others"
    loss = loss_of(model, x)
    with Spy() as put_off, scidata.no_sync(model):
        loss.backward()
    assert put_off.counts == {}


def model_buckets(model):
    from scidata.shard.parallel.buckets import BUCKETS

    return BUCKETS[model]._buckets


def test_a_step_of_ddp_communicates_once_a_bucket():
    run_ranks(counts_collectives, 4)


def overlaps(rank, num_ranks):
    """Buckets are under way before backward has reached the first layer."""
    mesh = init_mesh(domain=2)
    model = parallel(mesh, "ddp")
    seen = []
    step_of(model, mesh, 0)  # finds the order of the gradients
    with Spy() as spy:
        loss = loss_of(model, part_of(sample(rank // 2), mesh))
        model.embed.weight.register_hook(lambda grad: seen.append(spy.counts.get(("all_reduce", 4), 0)))
        loss.backward()
    assert seen == [len(model_buckets(model)) - 1], "all but the bucket of the first layer"


def test_buckets_overlap_with_backward():
    run_ranks(overlaps, 4)


# -- mixed precision -----------------------------------------------------------------------------------------------


def mixes(rank, num_ranks, strategy, dtype):
    mesh = init_mesh(domain=2)
    alone, model = Model().float(), parallel(mesh, strategy, Model().float())
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def forward(model, x, factor=1.0):
        with torch.autocast("cpu", dtype):
            return loss_of(model, x * factor)

    xs = [sample(index).float() for index in range(2)]
    for x in xs:
        (forward(alone, x) / 2).backward()
    mine = part_of(xs[axis_rank(mesh, "dp")], mesh)
    scaler.scale(forward(model, mine)).backward()
    scaler.unscale_(optimizer)
    for (name, p), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        if want.grad is not None:
            error = (whole(p.grad) - want.grad).norm() / (1e-3 + want.grad.norm())
            assert error < (0.05 if dtype == torch.bfloat16 else 0.01), (name, error)
            assert whole(p.grad).dtype == torch.float32
    scaler.step(optimizer)
    scaler.update()
    assert any((whole(p.detach()) != before[name]).any() for name, p in model.named_parameters())
    # infinite on one dp rank only: no rank makes the step, and the scale goes down on all
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    scaler.scale(forward(model, mine, float("inf") if axis_rank(mesh, "dp") == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for name, p in model.named_parameters():
        assert torch.equal(whole(p.detach()), before[name]), name


@pytest.mark.parametrize(("strategy", "dtype"), [("ddp", torch.bfloat16), ("fsdp", torch.float16)])
def test_autocast_with_a_scaler(strategy, dtype):
    run_ranks(mixes, 4, strategy, dtype)


# -- compiling -----------------------------------------------------------------------------------------------------


class Half(nn.Module):
    """Half of its work is on shards, half on plain values, in functions of their own."""

    def __init__(self):
        super().__init__()
        self.model, self.last = Model(), nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()

    def forward(self, x):
        rows, pooled = self.model(x)
        return rows, self.last(pooled)


def compiles(rank, num_ranks, strategy):
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = init_mesh(domain=2)
    torch.manual_seed(0)
    alone = Half()
    eager = parallel(mesh, strategy, copy.deepcopy(alone))
    model = parallel(mesh, strategy, copy.deepcopy(alone))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    optimizers = [adam(eager), adam(model)]
    for step in range(2):
        step_of(eager, mesh, step)
        with scidata.no_sync(compiled):
            step_of(compiled, mesh, step)
        step_of(compiled, mesh, step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for (name, found), want in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(whole(found.detach()), whole(want.detach()), rtol=1e-12, atol=1e-12, msg=name)
    return counter.frame_count


@pytest.mark.slow  # test_compile_training has what users do with one
@by_strategy
def test_a_compiled_model_gives_the_same(strategy):
    frames = run_ranks(compiles, 2 if strategy == "ddp" else 4, strategy)
    if strategy == "ddp":  # of FSDP, modules with hooks are not
        assert min(frames) >= 1


# -- checkpoints ---------------------------------------------------------------------------------------------------


def trains_and_saves(rank, num_ranks, strategy, folder):
    mesh = init_mesh(domain=2)
    model = parallel(mesh, strategy)
    optimizer = adam(model)
    for step in range(3):
        optimizer.zero_grad()
        step_of(model, mesh, step)
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def loads_and_trains(rank, num_ranks, strategy, folder):
    mesh = init_mesh(domain=num_ranks)
    model = parallel(mesh, strategy, Model(seed=5))
    optimizer = adam(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # an unused parameter has no moments
    dcp.load(state, checkpoint_id=folder, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
    for step in (3, 4):
        optimizer.zero_grad()
        for index in (2 * step, 2 * step + 1):  # one dp rank takes the samples of two
            with scidata.no_sync(model) if index % 2 == 0 else contextlib.nullcontext():
                (loss_of(model, part_of(sample(index), mesh)) / 2).backward()
        optimizer.step()
    assert_equal_models(model, train_alone(Model(), 5, 2)[0], 1e-11)


@pytest.mark.slow_for("fsdp-ddp")
@pytest.mark.parametrize(("saved", "loaded"), [("fsdp", "ddp"), ("ddp", "fsdp")])  # of either, into either
def test_checkpoints_resume_on_other_numbers_of_ranks(saved, loaded, tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(trains_and_saves, 4, saved, folder)
    run_ranks(loads_and_trains, 3, loaded, folder)
    run_ranks(loads_and_trains, 1, loaded, folder)


# -- odd models ----------------------------------------------------------------------------------------------------


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count = self.count + 1  # replaced, not written to
        return self.linear(self.norm(x))


def changes_buffers(rank, num_ranks, strategy):
    mesh = init_mesh(domain=2)
    model = scidata.parallelize(Running(), mesh, strategy=strategy)
    for step in range(2):
        step_of(model, mesh, step, lambda model, x: (model(x) ** 2).mean())
        if strategy == "fsdp":  # sent before the next forward pass
            with torch.no_grad():
                model.eval()
                model(part_of(sample(0), mesh))
                model.train()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@by_strategy
def test_running_statistics_are_those_of_the_first_samples(strategy):
    alone = Running()
    for index in (0, 2):  # those of dp rank 0
        alone(sample(index))
    found = run_ranks(changes_buffers, 4, strategy)
    for buffers in found:
        for name, expected in alone.named_buffers():
            if name != "count":
                torch.testing.assert_close(buffers[name], expected, rtol=1e-12, atol=1e-12, msg=name)
        assert buffers["count"] == (2 if strategy == "ddp" else 4)


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(4))

    def forward(self, x, used):
        return sum(self.branches[i](x) for i in used)


def uses_some(rank, num_ranks):
    """Branch 0 always, 1 and 2 on one dp rank each, 3 nowhere; gradients of a step before are kept or not."""
    mesh = init_mesh(domain=2)
    torch.manual_seed(0)
    alone = Choice()
    model = scidata.parallelize(copy.deepcopy(alone), mesh, bucket_bytes=60)
    for step, put_off in enumerate((False, False, True, False)):
        for d in range(2):
            (alone(sample(2 * step + d), (0, 1 + d)).square().mean() / 2).backward()
        x = part_of(sample(2 * step + axis_rank(mesh, "dp")), mesh)
        with scidata.no_sync(model) if put_off else contextlib.nullcontext():
            model(x, (0, 1 + axis_rank(mesh, "dp"))).square().mean().backward()
        if not put_off:
            assert_equal_models(model, alone)
        if step == 0:
            model.zero_grad()
            alone.zero_grad()
    assert model.branches[3].weight.grad is None


def test_parameters_that_only_some_ranks_use():
    run_ranks(uses_some, 4)


def uses_less(rank, num_ranks):
    """Branches that were used before and are not now, on some ranks or on all: a step knows nothing of the last one."""
    mesh = init_mesh(domain=2)
    torch.manual_seed(0)
    alone = Choice()
    model = scidata.parallelize(copy.deepcopy(alone), mesh, bucket_bytes=60)
    steps = [((0, 1), (0, 2)), ((0,), (0,)), ((3,), (0, 3)), ((0,), (1,)), ((0, 1, 2), (1,)), ((2,), (2,))]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1) for m in (model, alone)]
    for step, used in enumerate(steps):
        for d in range(2):
            (alone(sample(2 * step + d), used[d]).square().mean() / 2).backward()
        dp = axis_rank(mesh, "dp")
        model(part_of(sample(2 * step + dp), mesh), used[dp]).square().mean().backward()
        assert [b.weight.grad is not None for b in model.branches] == [i in (*used[0], *used[1]) for i in range(4)]
        assert_equal_models(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_parameters_that_are_used_in_some_steps():
    run_ranks(uses_less, 4)


def takes_gradients_apart(rank, num_ranks):
    """``autograd.grad``, second derivatives, copies: gradients of this dp rank's own sample."""
    mesh = init_mesh(domain=2)
    model, alone = parallel(mesh, "ddp"), Model()
    own = sample(axis_rank(mesh, "dp"))
    names = ["embed.weight", "position", "head.weight", "readout.bias", "scale", "waves", "gates"]

    def gradients(model, x, **how):
        parameters = [model.get_parameter(name) for name in names]
        return torch.autograd.grad(loss_of(model, x), parameters, **how)

    def close(found, expected):
        for name, got, want in zip(names, found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)

    close(gradients(model, part_of(own, mesh)), gradients(alone, own))
    twice = []
    for net, x in ((model, part_of(own, mesh)), (alone, own)):
        penalty = sum(g.square().sum() for g in gradients(net, x, create_graph=True))
        twice.append(torch.autograd.grad(penalty, [net.get_parameter(name) for name in names]))
    close(*twice)
    duplicate = copy.deepcopy(model)  # as an average of weights keeps one: it is not parallelized
    with Spy() as spy:
        loss_of(duplicate, own).backward()
    assert spy.counts == {}
    loss_of(duplicate, part_of(own, mesh)).backward()
    loss_of(alone, own).backward()
    for p in alone.parameters():
        p.grad = None if p.grad is None else 2 * p.grad
    assert_equal_models(duplicate, alone)


def test_gradients_taken_apart():
    run_ranks(takes_gradients_apart, 4)


def looks_at_made_values(rank, num_ranks):
    """The gradient of a value made of parameters is the full one where it is asked for, or kept."""
    mesh = init_mesh(domain=2, dp=1)
    own = sample(0)
    found = []
    for x, weight in ((part_of(own, mesh), nn.Parameter(torch.ones(2, 3).double())), (own, torch.ones(2, 3).double())):
        if not found:
            holder = nn.ParameterList([weight])
            scidata.parallelize(holder, mesh)
        made = torch.tanh(weight.requires_grad_()[0])
        gradients = [torch.autograd.grad((x * made).square().mean(), y, retain_graph=True)[0] for y in (made, weight)]
        made.retain_grad()
        seen = []
        made.register_hook(seen.append)
        (x * made).square().mean().backward()
        found.append([*gradients, made.grad, weight.grad, *seen])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradients_of_what_is_made_of_parameters():
    run_ranks(looks_at_made_values, 2)


def penalises_slopes(rank, num_ranks):
    """A loss on derivatives by the inputs, as in physics-informed training."""
    mesh = init_mesh(domain=2)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = scidata.parallelize(copy.deepcopy(alone), mesh)
    for d in range(2):
        x = sample(d).requires_grad_()
        (slope,) = torch.autograd.grad(alone(x).sum(), x, create_graph=True)
        (slope.square().mean() / 2).backward()
    x = part_of(sample(axis_rank(mesh, "dp")), mesh)
    x.requires_grad_()
    (local,) = torch.autograd.grad(model(x).sum(), x.to_local(), create_graph=True)
    shapes = x.sharding_shapes()
    ShardTensor.from_local(local, x.device_mesh, x.placements, sharding_shapes=shapes).square().mean().backward()
    assert_equal_models(model, alone)


def test_a_loss_on_derivatives():
    run_ranks(penalises_slopes, 4)


def trains_on_two_axes(rank, num_ranks, strategy):
    mesh = init_mesh(domain=(2, 2))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    model = scidata.parallelize(copy.deepcopy(alone), mesh, strategy=strategy)
    grid = torch.randn(5, 3, 3, dtype=torch.float64)
    (alone(grid).square().mean() + alone(grid.mean(dim=1)).sum()).backward()
    h, w = axis_rank(mesh, "h"), axis_rank(mesh, "w")
    domain = domain_mesh(mesh, ("h", "w"))
    for rows, columns in (((4, 1), (2, 1)), ((0, 5), (2, 1)), ((5, 0), (0, 3))):  # three of four ranks without a cell
        shapes = {"h": [(n, columns[w], 3) for n in rows], "w": [(rows[h], n, 3) for n in columns]}
        x = grid.split(rows)[h].split(columns, 1)[w]
        x = ShardTensor.from_local(x, domain, (Shard(0), Shard(1)), sharding_shapes=shapes)
        # once on both axes, once on rows that are sharded along one only
        (model(x).square().mean() + model(x.mean(dim=1)).sum()).backward()
        assert_equal_models(model, alone)
        model.zero_grad()


@by_strategy
def test_a_domain_of_two_axes(strategy):
    run_ranks(trains_on_two_axes, 4, strategy)


def has_other_axes(rank, num_ranks, strategy):
    """Ranks along an axis of another kind are none of its business."""
    mesh = init_mesh(domain=2, dp=1, extra={"tp": 2})
    model = nn.Linear(3, 1).double()
    nn.init.constant_(model.weight, axis_rank(mesh, "tp"))
    scidata.parallelize(model, mesh, strategy=strategy)
    part = mesh[("dp", "domain")]
    assert isinstance(part, DeviceMesh)
    model(part_of(sample(0), part)).mean().backward()
    assert whole(model.weight.detach()).unique().tolist() == [axis_rank(mesh, "tp")]
    torch.testing.assert_close(whole(model.weight.grad), sample(0).mean(0)[None], rtol=1e-12, atol=1e-12)


@by_strategy
def test_axes_of_other_parallelism(strategy):
    run_ranks(has_other_axes, 4, strategy)


def refuses(rank, num_ranks):
    mesh = init_mesh()
    for strategy in STRATEGIES:
        empty = nn.BatchNorm1d(2, affine=False)
        nn.init.constant_(empty.running_mean, rank)
        assert scidata.parallelize(empty, mesh, strategy=strategy) is empty
        assert empty.running_mean.tolist() == [0, 0]

    def model(*layers):
        return scidata.parallelize(nn.Sequential(*layers), mesh)

    late = model(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    late(torch.ones(1, 2)).sum().backward()
    late.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0\.weight' required no gradient when parallelize was called"):
        late(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"'0\.weight' is sparse"):
        model(nn.Embedding(3, 2, sparse=True))(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="has a graph of its own"):
        model(nn.Linear(2, 2))(torch.ones(1, 2)).square().sum().backward(create_graph=True)
    again = model(nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):  # passes inside a pass end by themselves
        again.zero_grad()
        checkpoint(again, x * (rank + 1), use_reentrant=True).sum().backward()
        assert again[0].weight.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]

    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    cut = scidata.parallelize(nn.Sequential(first, last), mesh)
    with pytest.raises(RuntimeError, match="on purpose"):
        last(Broken.apply(first(torch.ones(1, 2)))).sum().backward()
    cut.zero_grad()
    with pytest.raises(ConfigError, match="came twice before a backward pass was over: the pass before failed"):
        cut(torch.ones(1, 2)).sum().backward()
    cut.zero_grad()  # as the message says
    cut(torch.ones(1, 2) * (rank + 1)).sum().backward()
    assert last.bias.grad.tolist() == [1, 1]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


def test_what_cannot_be_averaged_is_refused():
    run_ranks(refuses, 2)

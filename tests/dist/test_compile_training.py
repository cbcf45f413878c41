"""Training steps by compiled graphs beside eager ones: what a training loop does around them."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import scidata
from scidata.device_mesh import axis_rank, init_mesh
from scidata.shard.compile import regions_of
from scidata.testing import RankError, run_ranks
from tests.dist._checks import asked_for, failures
from tests.dist._training import Block, Model, adam, loss_of, part_of, sample, whole

TOLERANCE = 1e-12


def step(model, mesh, index, forward=loss_of):
    """Run forward and backward on this dp rank's sample; return the loss."""
    num = mesh["dp"].size() if "dp" in mesh.mesh_dim_names else 1
    loss = forward(model, part_of(sample(index * num + (axis_rank(mesh, "dp") if num > 1 else 0)), mesh))
    loss.backward()
    return loss.detach()


class Small(nn.Module):
    """Two results, of which one is the same on each rank; a parameter that nothing uses, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.readout, self.unused = nn.Linear(4, 2), nn.Linear(2, 2)
        self.position = nn.Parameter(torch.randn(7, 4))
        self.register_buffer("shift", torch.randn(4))
        self.double()

    def forward(self, x):
        x = torch.tanh(self.norm(self.embed(x) + self.position)) + self.shift
        return self.head(x), self.readout(x.mean(dim=0))


def pair(mesh, make=Small, compiled=lambda m: scidata.compile(m, backend="aot_eager"), **options):
    """Return two models of the same weights, the second compiled."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    first, second = made
    return scidata.parallelize(first, mesh, **options), compiled(scidata.parallelize(second, mesh, **options))


def assert_alike(eager, compiled, tolerance=TOLERANCE):
    named = {name.replace("_orig_mod.", ""): x for name, x in (*compiled.named_parameters(), *compiled.named_buffers())}
    for name, want in (*eager.named_parameters(), *eager.named_buffers()):
        found = named[name]
        assert (found.grad is None) == (want.grad is None), name
        for a, b in ((found.detach(), want.detach()), (found.grad, want.grad)):
            if a is not None:
                torch.testing.assert_close(whole(a), whole(b), rtol=tolerance, atol=tolerance, msg=name)


def num_captured(model):
    return sum(len(group) for region in regions_of(model) for group in region.captured.values())


def trains(mesh, models, run=step, steps=3, optimizer=adam, expected=1, tolerance=TOLERANCE):
    """Train both, and compare; ``run`` is called for each step and model."""
    optimizers = [optimizer(model) for model in models]
    for index in range(steps):
        losses = []
        for model, each in zip(models, optimizers, strict=True):
            torch.manual_seed(index)
            each.zero_grad()
            losses.append(run(model, mesh, index))
            if each.param_groups[0]["lr"]:
                each.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
        assert_alike(*models, tolerance)
    assert num_captured(models[1]) >= expected, [str(region) for region in regions_of(models[1])]


# -- each is called with a mesh ----------------------------------------------------------------------------------------


def overlap(mesh):
    models = pair(mesh, Model, bucket_bytes=700)
    trains(mesh, models)


def accumulation(mesh):
    def run(model, mesh, index):
        with scidata.no_sync(model):
            step(model, mesh, 3 * index)
            step(model, mesh, 3 * index + 1)
        return step(model, mesh, 3 * index + 2)

    trains(mesh, pair(mesh), run)


def clipping(mesh):
    def run(model, mesh, index):
        step(model, mesh, index)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    trains(mesh, pair(mesh), run)


def torch_compile(mesh):
    eager, compiled = pair(mesh, compiled=lambda m: torch.compile(m, backend="aot_eager"))
    assert compiled._orig_mod is not compiled
    trains(mesh, (eager, compiled))
    assert num_captured(compiled) == 1
    assert num_captured(compiled._orig_mod) == 0, "the model itself is as it was"
    again = copy.deepcopy(compiled)
    assert [*again.state_dict()] == [f"_orig_mod.{name}" for name in eager.state_dict()]
    x = part_of(sample(0), mesh)
    for _ in range(3):
        torch.testing.assert_close(loss_of(again, x), loss_of(eager, x))
    assert num_captured(again) == 1


def module_compile(mesh):
    eager, compiled = pair(mesh, compiled=lambda m: m.compile(backend="aot_eager") or m)
    trains(mesh, (eager, compiled))
    assert num_captured(compiled) == 1
    assert not regions_of(copy.deepcopy(compiled)), "torch, too, copies modules without what was compiled"


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.norm = Small(), nn.BatchNorm1d(3).double()

    def forward(self, x):
        x = self.norm(F.dropout(x, 0.3, self.training))
        return self.model(x)


def dropout_and_batch_norm(mesh):
    models = pair(mesh, Dropping)
    trains(mesh, models)

    def evaluate(model):
        model.eval()
        try:
            with torch.no_grad():
                return loss_of(model, part_of(sample(9), mesh))
        finally:
            model.train()

    for inferring in (torch.no_grad, torch.inference_mode):
        for _ in range(3):
            with inferring():
                torch.testing.assert_close(evaluate(models[1]), evaluate(models[0]), rtol=1e-12, atol=1e-12)
            trains(mesh, models, steps=1)


class Checkpointed(nn.Module):
    """A checkpoint in a checkpoint, collectives, numbers drawn in two ways, and a counter that both passes add to."""

    def __init__(self, counts=1, **options):
        super().__init__()
        self.counts = counts
        self.block = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 3), nn.GELU(), nn.Dropout(0.3)).double()
        self.model, self.options = Small(), options
        self.register_buffer("num_runs", torch.zeros((), dtype=torch.int64))

    def _block(self, x):
        self.num_runs += self.counts
        return self.block(x - x.mean(0)) * torch.rand_like(x).round()

    def _both(self, x):
        return torch.tanh(checkpoint(self._block, x, use_reentrant=False, **self.options) + x.amax(0))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self._both, x, use_reentrant=False)
        return self.model(x)


def extents_saved(model, x):
    """Return the last extents of what is saved for the backward pass, but weights."""
    held, weights = set(), {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(saved):
        if (local := getattr(saved, "local", saved)).untyped_storage().data_ptr() not in weights:
            held.update(local.shape[-1:])
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(x)
    return held


def checkpoints_inside(mesh):
    for options in ({"context_fn": contexts}, {}):
        models = pair(mesh, lambda options=options: Checkpointed(**options))
        trains(mesh, models, expected=1, steps=4)
        assert regions_of(models[1])[0].captured, "as a whole"
    for model in models:
        assert 64 not in extents_saved(model, part_of(sample(0), mesh)), "what a checkpoint leaves out is not saved"


class Outside(nn.Module):
    def __init__(self, make=Small, **options):
        super().__init__()
        self.model, self.options = make(), options

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False, **self.options)


def checkpoints_outside(mesh):
    def compiled(m):
        scidata.compile(m.model, backend="aot_eager")
        return m

    for make in (Small, partial(Checkpointed, counts=0)):  # a graph in it does not stop early
        eager, model = pair(mesh, partial(Outside, make), compiled)
        trains(mesh, (eager, model), expected=0)
        assert regions_of(model.model)[0].captured


def save_products(ctx, op, *args, **kwargs):
    chosen = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE


def contexts():
    return create_selective_checkpoint_contexts(save_products)


def selective_checkpoints(mesh):
    trains(mesh, pair(mesh, lambda: Outside(context_fn=contexts)), expected=0)

    def compiled(m):
        scidata.compile(m.model, backend="aot_eager")
        return m

    trains(mesh, pair(mesh, lambda: Outside(context_fn=contexts), compiled), expected=0)


def autocast(mesh):
    def run(model, mesh, index):
        scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, part_of(sample(index), mesh).float())
        scaler.scale(loss).backward()
        return loss.detach()

    trains(mesh, pair(mesh, lambda: Small().float()), run)


def averaged_models(mesh):
    eager, compiled = pair(mesh)
    copies = [torch.optim.swa_utils.AveragedModel(m) for m in (eager, compiled)]
    trains(mesh, (eager, compiled), steps=3)
    for each, model in zip(copies, (eager, compiled), strict=True):
        each.update_parameters(model)
    trains(mesh, (eager, compiled), steps=3)
    for each, model in zip(copies, (eager, compiled), strict=True):
        each.update_parameters(model)
    x = part_of(sample(3), mesh)
    for _ in range(3):
        torch.testing.assert_close(loss_of(copies[1], x), loss_of(copies[0], x), rtol=1e-12, atol=1e-12)
    ema = copy.deepcopy(compiled)
    with torch.no_grad():
        for a, b in zip(ema.parameters(), compiled.parameters(), strict=True):
            a.lerp_(b, 0.5)
    torch.testing.assert_close(loss_of(ema, x), loss_of(eager, x), rtol=1e-12, atol=1e-12)


def gradient_penalty(mesh):
    def run(model, mesh, index):
        x = part_of(sample(index), mesh).requires_grad_()
        loss = loss_of(model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (slope**2).sum()
        loss.backward()
        return loss.detach()

    trains(mesh, pair(mesh), run, expected=0)


def penalised(loss, x, model):
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def with_one_rank_eager(mesh, take, spread, steps=5):
    """Rank 1 alone has a hook inside, so that it runs the whole eagerly; from the third step on ``take`` is called."""

    def run(model, mesh, index):
        x = part_of(sample(index), mesh).requires_grad_()
        rows, pooled = model(x)
        loss = (rows**2).mean() + (pooled**2).sum() * (index % 2)
        loss.backward() if index < 2 else take(loss, x, model)
        return loss.detach() if x.grad is None else loss.detach() + x.grad.full_tensor().sum()

    torch.manual_seed(0)
    eager = Small()
    compiled = scidata.compile(spread(copy.deepcopy(eager), mesh), backend="aot_eager")
    if mesh.get_rank() == 1:
        compiled.head.register_full_backward_pre_hook(lambda *_: None)
    trains(mesh, (spread(eager, mesh), compiled), run, steps=steps, expected=mesh.get_rank() != 1)
    return partial(run, compiled, mesh, steps)


def ranks_meet(mesh):
    """A rank with a graph sends what an eager one does, whatever a backward pass asks for."""

    def of_argument(loss, x, model):
        torch.autograd.grad(loss, x)[0].square().sum()

    def of_parameters(loss, x, model):
        for p, grad in zip(used := [*model.head.parameters()], torch.autograd.grad(loss, used), strict=True):
            p.grad = grad

    def some(loss, x, model):
        loss.backward(inputs=[x, model.embed.weight])

    with_one_rank_eager(mesh, penalised, scidata.parallelize)
    for take in (lambda loss, *_: loss.backward(), of_argument, of_parameters, some):
        with_one_rank_eager(mesh, take, scidata.parallelize)
        with_one_rank_eager(mesh, take, lambda model, mesh: model)


class Remembers(Small):
    """Keeps results in attributes, and has torch's hooks that do, a user's hook, and an output that is kept as it is."""

    def __init__(self):
        super().__init__()
        self.last, self.kept = None, None
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.normed = nn.utils.spectral_norm(nn.Linear(3, 3)).double()
        nn.utils.weight_norm(self.head)
        self.embed.register_forward_hook(lambda module, args, y: y * 2)

    def forward(self, x):
        rows, pooled = super().forward(torch.tanh(self.normed(x)))
        self.last, self.kept = rows.sin(), pooled
        self.average = 0.9 * self.average + 0.1 * pooled.detach().mean()  # of this step and those before it
        return rows, pooled


def attributes_are_assigned(mesh):
    def run(model, mesh, index):
        loss = loss_of(model, part_of(sample(index), mesh))
        kept.append(tuple(whole(x.detach()) for x in (model.last, model.kept, model.normed.weight, model.average)))
        if index % 4 > 1:
            loss = loss + model.last.square().mean()
        loss.backward()
        return loss.detach()

    kept = []
    models = pair(mesh, Remembers)
    trains(mesh, models, run, steps=2, expected=1)
    assert regions_of(models[1])[0].captured, "as a whole"
    trains(mesh, models, run, steps=8, expected=0)
    for a, b in zip(kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    models[1].eval()
    models[0].eval()
    trains(mesh, models, run, steps=2, expected=0)


def in_single_precision(mesh):
    def run(model, mesh, index):
        loss = loss_of(model, part_of(sample(index), mesh).float())
        loss.backward()
        return loss.detach()

    for make in (Checkpointed, Remembers):
        models = pair(mesh, lambda make=make: make().float())
        trains(mesh, models, run, tolerance=1e-5)
        assert regions_of(models[1])[0].captured


def by_inductor(mesh):
    for make in (Checkpointed, Remembers):
        models = pair(mesh, make, compiled=scidata.compile)
        trains(mesh, models)
        assert regions_of(models[1])[0].captured
        if make is Checkpointed:
            assert 64 not in extents_saved(models[1], part_of(sample(0), mesh))


def reads_what_it_assigned(mesh):
    class Recurrent(Small):
        def forward(self, x):
            rows, pooled = super().forward(x)
            rows = rows + self.before.detach() if hasattr(self, "before") else rows
            self.before = rows
            return rows, pooled

    trains(mesh, pair(mesh, Recurrent), steps=4, expected=0)


def autograd_grad(mesh):
    def run(model, mesh, index):
        loss = loss_of(model, part_of(sample(index), mesh))
        used = [p for n, p in model.named_parameters() if p.requires_grad and "unused" not in n]
        grads = torch.autograd.grad(loss, used)
        for p, grad in zip(used, grads, strict=True):
            p.grad = grad
        return loss.detach()

    trains(mesh, pair(mesh), run)


def backward_twice(mesh):
    def run(model, mesh, index):
        loss = loss_of(model, part_of(sample(index), mesh))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    trains(mesh, pair(mesh), run)


def compiled_optimizer(mesh):
    eager, compiled = pair(mesh)
    optimizers = [adam(eager), adam(compiled)]
    stepping = [torch.compile(each.step, backend="aot_eager") for each in optimizers]  # rounds differently
    for index in range(3):
        for model, optimizer, advance in zip((eager, compiled), optimizers, stepping, strict=True):
            optimizer.zero_grad()
            step(model, mesh, index)
            advance()
        assert_alike(eager, compiled)


def functional_call(mesh):
    def run(model, mesh, index):
        own = {name: 1.5 * p for name, p in model.named_parameters()}
        loss = loss_of(lambda x: torch.func.functional_call(model, own, (x,)), part_of(sample(index), mesh))
        loss.backward()
        return loss.detach()

    trains(mesh, pair(mesh), run, expected=0)


def two_forwards(mesh):
    def run(model, mesh, index):
        first, second = (loss_of(model, part_of(sample(2 * index + i), mesh)) for i in range(2))
        (first + 2 * second).backward()
        return first.detach()

    trains(mesh, pair(mesh), run)


def one_output(mesh):
    def run(model, mesh, index):
        rows, pooled = model(part_of(sample(index), mesh))
        loss = (rows**2).mean() if index % 2 else pooled.sum()
        loss.backward()
        return loss.detach()

    trains(mesh, pair(mesh), run)


class MakesModules(Small):
    """Its forward puts a parameter into a new module, as tensorly's factorized weights do."""

    def forward(self, x):
        held = nn.Module()
        held.position = self.position
        return super().forward(x + held.get_parameter("position").mean())


def parameters_of_new_modules(mesh):
    trains(mesh, pair(mesh, MakesModules))


class ReadsIds(Small):
    """One of its results is never used, and integers among its arguments decide what it computes."""

    def forward(self, x, ids):
        rows, pooled = super().forward(x * int(ids.max()))
        return rows, pooled, rows + 1


class ChecksIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = ReadsIds()

    def forward(self, x):
        return checkpoint(self.model, x, torch.tensor([1, 2]), use_reentrant=False)[:2]


def an_output_of_a_checkpoint_is_left_out(mesh):
    def compiled(m):
        scidata.compile(m.model, backend="aot_eager")
        return m

    eager, model = pair(mesh, ChecksIds, compiled)
    trains(mesh, (eager, model), steps=8, expected=0)
    assert num_captured(model.model) == 1


def forwards_run_ahead_of_backwards(mesh):
    """Checkpoints are run again by what ran in their forward, though graphs are captured and dropped meanwhile."""

    def compiled(m):
        scidata.compile(m.model, backend="aot_eager")
        return m

    models, grads = pair(mesh, Outside, compiled), ([], [])
    for model, found in zip(models, grads, strict=True):
        ahead = []
        for index in range(12):
            ahead.append(model(part_of(sample(index), mesh)))
            if len(ahead) < 3:
                continue
            rows, pooled = ahead.pop(0)
            (rows.square().mean() + (pooled.sum() if index not in (6, 7, 8) else 0)).backward()
            found.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    assert num_captured(models[1].model) >= 1


def frozen(mesh):
    eager, compiled = pair(mesh)
    trains(mesh, (eager, compiled), steps=3)
    for model in (eager, compiled):
        model.embed.requires_grad_(False)
        model.head.bias.requires_grad_(False)
    trains(mesh, (eager, compiled), steps=3, expected=2)


def saved_and_loaded(mesh):
    eager, compiled = pair(mesh)
    trains(mesh, (eager, compiled), steps=3)
    state = copy.deepcopy(compiled.state_dict())
    assert [*state] == [*eager.state_dict()]
    trains(mesh, (eager, compiled), steps=1)
    for model in (eager, compiled):
        model.load_state_dict(state)
    trains(mesh, (eager, compiled), steps=2)


def hooks_fire(mesh):
    eager, compiled = pair(mesh)
    seen = [], []
    for model, each in zip((eager, compiled), seen, strict=True):
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_hook(lambda g, each=each, name=name: each.append((name, g.sum().item())))
                p.register_post_accumulate_grad_hook(lambda p, each=each, name=name: each.append((name, None)))
    trains(mesh, (eager, compiled))
    order = [sorted({n for n, _ in each}) for each in seen]
    assert order[0] == order[1]
    assert len(seen[0]) == len(seen[1])


def fsdp(mesh):
    models = pair(mesh, Model, strategy="fsdp", units=(Block,))
    trains(mesh, models)

    def run(model, mesh, index):
        with scidata.no_sync(model):
            step(model, mesh, 3 * index)
        return step(model, mesh, 3 * index + 2)

    trains(mesh, models, run)


class Sloping(nn.Module):
    """Takes gradients of a parameter inside, by each of torch's ways."""

    def __init__(self):
        super().__init__()
        self.linear, self.by_func = nn.Linear(3, 3).double(), True

    def forward(self, x):
        weight = self.linear.weight
        if self.by_func:
            slope = torch.func.grad(lambda w: torch.tanh(F.linear(x, w)).sum())(weight)
        else:
            (slope,) = torch.autograd.grad(torch.tanh(F.linear(x, weight)).sum(), weight, create_graph=True)
        return self.linear(x) * slope.sum(), x.mean(dim=0)


def gradients_of_parameters_inside(mesh):
    for by_func in (True, False):
        models = pair(mesh, Sloping)
        for model in models:
            model.by_func = by_func
        trains(mesh, models, expected=0)


class TwoStreams(nn.Module):
    """Of the last layer's two results, each made of both arguments, a loss uses one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), Mixing()

    def forward(self, x):
        y = self.first(x)
        return self.last(y, torch.tanh(y))[0]


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x, y):
        return self.one(x) * y, self.other(y) + x


def arguments_of_one_another(mesh):
    def compiled(model):
        scidata.compile(model.last, backend="aot_eager")
        return model

    models = pair(mesh, TwoStreams, compiled)
    grads = []
    for model in models:
        for _ in range(3):
            model.zero_grad()
            model(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)).square().sum().backward()
        grads.append([p.grad for p in (*model.first.parameters(), *model.last.one.parameters())])
    for want, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert num_captured(models[1].last) == 1


ON_TWO = [
    overlap, accumulation, torch_compile, module_compile, dropout_and_batch_norm, checkpoints_inside,
    checkpoints_outside, selective_checkpoints, autocast, averaged_models, gradient_penalty, ranks_meet,
    autograd_grad, attributes_are_assigned, in_single_precision, reads_what_it_assigned,
    backward_twice, functional_call, two_forwards, one_output, an_output_of_a_checkpoint_is_left_out, forwards_run_ahead_of_backwards,
    parameters_of_new_modules, arguments_of_one_another, frozen, saved_and_loaded,
    hooks_fire, gradients_of_parameters_inside,
]  # fmt: skip
ON_FOUR = [accumulation]
SLOW_ON_TWO = [compiled_optimizer, by_inductor]
SLOW_ON_FOUR = [overlap, dropout_and_batch_norm, fsdp, two_forwards, clipping, autograd_grad, hooks_fire]


MESH = partial(init_mesh, domain=2)


@pytest.fixture(scope="module")
def failed_on_two(request):
    return run_ranks(failures, 2, MESH, asked_for(request), timeout=240)


@pytest.mark.parametrize("each", ON_TWO)
def test_on_two_ranks(failed_on_two, each):
    for failed in failed_on_two:
        assert not failed.get(each.__name__), failed[each.__name__]


@pytest.mark.parametrize(
    ("num_ranks", "chosen"),
    [
        (4, ON_FOUR),
        pytest.param(2, SLOW_ON_TWO, marks=pytest.mark.slow),
        pytest.param(4, SLOW_ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_on_dp_by_domain(num_ranks, chosen):
    for failed in run_ranks(failures, num_ranks, MESH, chosen, timeout=240):
        assert not failed, "\n".join(failed.values())


def test_on_three_ranks():
    chosen = [checkpoints_inside, attributes_are_assigned, forwards_run_ahead_of_backwards]
    for failed in run_ranks(failures, 3, partial(init_mesh, domain=3), chosen, timeout=240):
        assert not failed, "\n".join(failed.values())


def ranks_that_do_not_meet(rank, num_ranks):
    with_one_rank_eager(MESH(), penalised, lambda model, mesh: model, steps=2)()


def test_differentiated_sums_of_a_rank_that_is_eager_alone_are_refused_at_once():
    with pytest.raises(RankError, match="of Small, which some of ranks 0, 1 run by a compiled graph"):
        run_ranks(ranks_that_do_not_meet, 2, timeout=60)

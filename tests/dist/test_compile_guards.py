"""Something changes between steps: a graph that was captured before is not used again where it would be wrong."""

import copy
import threading
import traceback
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import scidata
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.compile import regions_of
from scidata.testing import run_ranks
from tests.dist._checks import asked_for, failures

SCALE = 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.dropout = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 4), nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("more", None)
        self.scale, self.kept, self.fails = 1.0, {"scale": [1.0]}, False

    def forward(self, x, k=1.0):
        y = self.linear(self.conv(x.transpose(1, 2)).transpose(1, 2)) - self.mean
        if self.fails:
            raise ValueError("as asked")
        y = self.dropout(y) * self.scale * self.kept["scale"][0] * SCALE * k
        return y if self.more is None else y + self.more


class Twins:
    """A model and a compiled copy of it, which have to agree at each step."""

    def __init__(self, mesh, model=None):
        torch.manual_seed(0)
        self.mesh, self.eager = mesh, model or Model().double()
        self.compiled = copy.deepcopy(self.eager)
        scidata.compile(self.compiled, backend="aot_eager")

    def input(self, sizes=(4, 3), *, is_replicated=False, requires_grad=False, order=(0, 1, 2)):
        x = torch.rand(2, sum(sizes), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        spec = ShardSpec.even(self.mesh, [Replicate()], x.shape)
        if not is_replicated:
            spec = ShardSpec.even(self.mesh, [Shard(1)], x.shape, {0: sizes})
            x = x.split(list(sizes), 1)[self.mesh.get_local_rank()]
        return ShardTensor(x.permute(order).contiguous().permute(order).requires_grad_(requires_grad), spec)

    def both(self, change):
        for model in (self.eager, self.compiled):
            change(model)

    def steps(self, *args, num=3, **options):
        for _ in range(num):
            found = [self.step(model, self.input(**options), *args) for model in (self.eager, self.compiled)]
            for e, c in zip(*found, strict=True):
                assert (e is None) == (c is None), (e, c)
                if isinstance(e, torch.Tensor):
                    torch.testing.assert_close(c, e, rtol=1e-12, atol=1e-12)
                else:
                    assert e == c

    def step(self, model, x, *args):
        model.zero_grad()
        try:
            y = model(x, *args)
        except ValueError as e:
            return [str(e)]
        if y.requires_grad:
            (y * y).mean().backward()
        grads = [p.grad for p in model.parameters()]
        return [
            _copy(y),
            _copy(x.grad),
            *map(_copy, grads),
            *map(_copy, model.buffers()),
        ]

    @property
    def num_graphs(self):
        return sum(len(each) for region in regions_of(self.compiled) for each in region.captured.values())

    @property
    def reason(self):
        return regions_of(self.compiled)[0].reason


def _copy(x):
    return x.full_tensor().detach() if isinstance(x, ShardTensor) else None if x is None else x.detach().clone()


def layouts(mesh):
    twins = Twins(mesh)
    for num, options in enumerate(
        [
            {},
            {"sizes": (3, 4)},
            {"sizes": (5, 2)},
            {"requires_grad": True},
            {"order": (0, 2, 1)},
            {"is_replicated": True},
        ],
        1,
    ):
        twins.steps(**options)
        assert twins.num_graphs == num, options
    twins.steps(num=1)
    assert twins.num_graphs == 6


CHANGES = {
    "eval": lambda m: m.eval(),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "data": lambda m: setattr(m.linear.weight, "data", torch.ones(4, 4, dtype=torch.float64)),
    "transposed": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    "tied": lambda m: setattr(m, "mean", m.linear.bias.detach()),
    "buffer": lambda m: setattr(m, "more", torch.ones(1, dtype=torch.float64)),
    "deep attribute": lambda m: m.kept["scale"].__setitem__(0, 3.0),
    "forward": lambda m: setattr(m.dropout, "forward", torch.tanh),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
    "hook": lambda m: m.linear.register_forward_hook(lambda module, args, y: y * 2),
}


def changes(mesh):
    for name, change in CHANGES.items():
        twins = Twins(mesh)
        twins.steps(num=2)
        assert twins.num_graphs == 1
        twins.both(change)
        try:
            twins.steps(num=2)
        except AssertionError as e:
            raise AssertionError(name) from e


def globals_and_arguments(mesh):
    global SCALE
    twins = Twins(mesh)
    twins.steps(num=2)
    SCALE = 2.0
    twins.steps(num=2)
    assert twins.num_graphs == 2
    SCALE = 1.0
    twins.steps(num=1)
    for k in (1, True, 2.0, -0.0, 0.0):
        twins.steps(k)
    assert twins.num_graphs == 7
    k = torch.ones(4, dtype=torch.float64)
    twins.steps(k)
    twins.steps(k.requires_grad_())  # the ninth
    assert twins.num_graphs == 8


def modes(mesh):
    twins = Twins(mesh)
    twins.steps()
    for mode in (torch.no_grad, torch.inference_mode, lambda: scidata.attention("ring")):
        with mode():
            twins.steps()
    twins.steps()
    assert twins.num_graphs == 4


def side_effects(mesh):
    class Counts(Model):
        def forward(self, x):
            self.num = getattr(self, "num", 0) + 1
            self.kept.setdefault("seen", []).append(self.num)
            return super().forward(x) * self.num

    twins = Twins(mesh, Counts().double())
    twins.steps(num=5)
    assert "changes" in twins.reason
    assert twins.compiled.num == twins.eager.num == 5
    assert twins.compiled.kept["seen"] == [1, 2, 3, 4, 5]

    class Freezes(Model):
        def forward(self, x):
            self.linear.bias.requires_grad = False
            x = x * 1
            x.requires_grad = True
            return super().forward(x)

    twins = Twins(mesh, Freezes().double())
    twins.steps(num=2)
    assert twins.num_graphs == 1, "of what is frozen already"
    twins.both(lambda m: m.linear.bias.requires_grad_())
    twins.steps(num=4)
    assert not twins.compiled.linear.bias.requires_grad


def hooks_inside(mesh):
    class Hooked(Model):
        def __init__(self):
            super().__init__()
            self.linear.register_forward_hook(lambda module, args, y: y * 2)
            self.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    twins = Twins(mesh, Hooked().double())
    twins.steps(num=3)
    assert twins.num_graphs == 1
    twins.both(lambda m: m.linear.register_forward_hook(lambda module, args, y: y.sin()))
    twins.steps(num=3)
    assert twins.num_graphs == 2
    seen = []
    twins.both(lambda m: m.linear.register_forward_hook(lambda module, args, y: seen.append(y.to_local().detach())))
    twins.steps(num=4)
    assert len(seen) == 8, "what a hook keeps is kept at each call"
    twins = Twins(mesh, Hooked().double())
    twins.both(lambda m: m.linear.register_full_backward_hook(lambda *_: None))
    twins.steps(num=3)
    assert "hooks" in twins.reason


def errors(mesh):
    twins = Twins(mesh)
    twins.steps()
    twins.both(lambda m: setattr(m, "fails", True))
    twins.steps()
    twins.both(lambda m: setattr(m, "fails", False))
    twins.steps()
    assert not twins.reason
    assert twins.num_graphs == 1


def sizes_that_vary(mesh):
    twins = Twins(mesh)
    for n in range(2, 12):
        twins.steps(num=1, sizes=(n, 3))
    assert twins.num_graphs == 0
    assert not regions_of(twins.compiled)[0].captured


def copies(mesh):
    twins = Twins(mesh)
    twins.steps()
    other = copy.deepcopy(twins.compiled)
    with torch.no_grad():
        other.linear.weight.zero_()
    twins.steps()
    assert not regions_of(other)
    x = twins.input()
    assert not torch.equal(other(x).to_local(), twins.compiled(x).to_local())


def another_thread(mesh):
    failed, twins = [], Twins(mesh)

    def run():
        try:
            twins.steps()
        except BaseException:
            failed.append(traceback.format_exc())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed
    assert twins.num_graphs == 1
    twins.steps()


def several_threads(mesh):
    """Threads at once, of which each has a group of its own: one model, whose gradients add up."""
    twins, failed, start = Twins(mesh), [], threading.Barrier(3)
    found = twins.step(twins.eager, twins.input(requires_grad=True))
    groups = [dist.new_group() for _ in range(3)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("domain",)) for group in groups]
    inputs = [Twins.input(SimpleNamespace(mesh=each), requires_grad=True) for each in meshes]

    def run(x):
        try:
            start.wait()
            for _ in range(5):
                x.grad = None
                y = twins.compiled(x)
                (y * y).mean().backward()
                for ours, theirs in zip((y, x.grad), found, strict=False):
                    torch.testing.assert_close(_copy(ours), theirs, rtol=1e-12, atol=1e-12)
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    for p, theirs in zip(twins.compiled.parameters(), found[2:], strict=False):
        torch.testing.assert_close(p.grad, 15 * theirs, rtol=1e-12, atol=1e-12)
    twins.steps()
    assert not twins.reason


def one_rank_alone(mesh):
    """One captures later than the other, or not at all: their collectives meet all the same."""
    for change in (
        lambda region: setattr(region, "reason", "by a test"),
        lambda region: region.captured.clear(),
        lambda region: (region.captured.clear(), region._seen.clear()),
    ):
        twins = Twins(mesh)
        twins.steps(num=2)
        if mesh.get_local_rank() == 1:
            change(regions_of(twins.compiled)[0])
        twins.steps(num=4)


EACH = [
    layouts, changes, globals_and_arguments, modes, side_effects, hooks_inside, errors, sizes_that_vary, copies, another_thread,
    several_threads, one_rank_alone,
]  # fmt: skip


@pytest.fixture(scope="module")
def failed(request):
    return run_ranks(failures, 2, partial(init_device_mesh, "cpu", (2,)), asked_for(request), timeout=240)


@pytest.mark.parametrize("each", EACH)
def test_on_two_ranks(failed, each):
    for of_rank in failed:
        assert each.__name__ not in of_rank, of_rank[each.__name__]

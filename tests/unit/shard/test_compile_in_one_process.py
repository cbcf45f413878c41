"""Functions that were captured once where they must not be: each call gives what an eager one gives."""

import copy
import functools
import itertools
import random
import secrets
import sys
import threading
import uuid
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn

import scidata
from scidata.errors import ConfigError
from scidata.shard.compile import regions_of


def seeded(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(3))


def forked(x):
    with torch.random.fork_rng():
        return x + torch.rand(3)


def catches_item(x):
    try:
        return x * x.sum().item()
    except Exception:
        return x * 5


def catches_branch(x):
    try:
        return x * (2 if x.sum() > 0 else 3)
    except Exception:
        return x * 5


def catches_array(x):
    try:
        return x * float(x.detach().numpy()[0])
    except Exception:
        return x * 5


def asks_for_its_type(x):
    return x * 2 if x.type() == "torch.FloatTensor" and isinstance(x, torch.Tensor) else x


def asks_for_type(x):
    return x * (2 if type(x) is torch.Tensor else 1)


def returns_size(x):
    return x.shape, x * 2


def resamples(x):
    return F.interpolate(x[None, None], scale_factor=1.2)


def margins(x):
    return F.multilabel_margin_loss(x, torch.tensor([1, -1, 0])) + x


def writes_to_expanded(x):
    x = x * 1
    x.expand(2, 3).fill_(0.5)
    return x * 2


def writes_to_one_of_expanded(x):
    x = x * 1
    x.expand(2, 3)[0].mul_(2)
    return x * 2


def writes_to_windows(x):
    x = x * 1
    x.unfold(0, 2, 2).add_(-0.3)
    return x * 2


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.bias if isinstance(self.bias, nn.Parameter) else x


ALIKE = [
    *(
        seeded,
        forked,
        catches_item,
        catches_branch,
        catches_array,
        asks_for_type,
        asks_for_its_type,
        returns_size,
        resamples,
        margins,
        writes_to_expanded,
        writes_to_one_of_expanded,
        writes_to_windows,
    ),
    Asking(),
]


@pytest.mark.filterwarnings("ignore:scidata.compile")
@pytest.mark.parametrize("function", ALIKE, ids=lambda f: getattr(f, "__name__", type(f).__name__))
def test_each_call_computes_the_same_as_an_eager_one(function):
    eager = function.forward if isinstance(function, nn.Module) else function
    compiled, found = scidata.compile(function, backend="aot_eager"), []
    for call in (eager, compiled):
        torch.manual_seed(0)
        given = [torch.full((3,), float(step), requires_grad=True) for step in range(-2, 3)]
        found.append([[call(x) for x in given], torch.rand(1)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert type(found[0][0][2]) is type(found[1][0][2])
    if function is returns_size:
        assert type(found[1][0][2][0]) is torch.Size
    if function in (returns_size, ALIKE[-1]):
        assert any(regions_of(compiled)[0].captured.values())


def are_one(x, y):
    return 2 * x + y + (x is y)


FACTOR = 2.0


def looks_into_modules(x, y):
    return x * sys.modules[__name__].FACTOR + y


@pytest.mark.parametrize("both", [True, False])
def test_results_that_are_views_of_arguments_have_their_gradients(both):
    def function(x, y):
        (part,) = y.chunk(1)  # such a view is a result of the graph, the other is made anew beside it
        return (x[1:].expand(2, -1), part) if both else (x[1:].expand(2, -1), part * 2)

    compiled, found = scidata.compile(function, backend="aot_eager", fullgraph=True), []
    for call in (function, *[compiled] * 3):
        x, y = torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 2).requires_grad_()
        sum(each.square().sum() for each in call(x, y)).backward()
        found.append((x.grad, y.grad))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_an_argument_that_is_written_to_and_results_that_no_loss_uses():
    def function(x, y):
        y.mul_(2)
        return x * y, x + y

    found = []
    for i, call in enumerate([function, *[scidata.compile(function, backend="aot_eager", fullgraph=True)] * 5]):
        x, y = torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 3)
        loss = call(x, y)[0].square().sum()
        loss.backward(create_graph=i > 3)
        found.append((y, x.grad.detach()))
        torch.testing.assert_close(found[-1], found[0])


def writes_to_what_requires_grad(x, y):
    z = x + 1
    x.mul_(2).add_(y * y)
    x[0] = y[1]
    return z + x


def returns_what_it_writes_to(x, y):
    return x.mul_(2), x + y


def writes_to_a_view(x, y):
    x[1:].copy_(y[:2])
    return x.t() + y


def writes_without_a_derivative(x, y):
    z = x + 1
    with torch.no_grad():
        x.mul_(y)
    return z + x * 2


WRITERS = [writes_to_what_requires_grad, returns_what_it_writes_to, writes_to_a_view, writes_without_a_derivative]


@pytest.mark.parametrize("function", WRITERS)
def test_arguments_that_require_grad_and_are_written_to(function):
    compiled, found = scidata.compile(function, backend="aot_eager"), []
    for step in range(8):
        for call in (function, compiled):
            x, y = torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 3).requires_grad_()
            given = (x * 2)[:]
            results = call(given, y)
            results = results if isinstance(results, tuple) else (results,)
            if step == 7:
                results[0].add_(1)
            (sum(each.square().sum() for each in results) + (given**3).sum() * (step % 3)).backward(
                create_graph=step == 6
            )
            found.append((x.grad, y.grad, given.detach()))
        torch.testing.assert_close(found[-1], found[-2])
    assert bool(regions_of(compiled)[0].captured) == (function is not returns_what_it_writes_to)


def test_parameters_that_a_forward_writes_to():
    eager, x = nn.Embedding(4, 3, max_norm=1.0), torch.tensor([1, 3])
    compiled, found = scidata.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True), []
    for model in (eager, compiled):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().sum().mul(-1).backward()
            optimizer.step()
        found.append(model.weight)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert regions_of(compiled)[0].captured


DRAWS = {
    "rand": lambda x: torch.rand(3),
    "exponential_": lambda x: torch.empty(3).exponential_(),
    "geometric_": lambda x: torch.empty(3).geometric_(0.5),
    "random_": lambda x: torch.empty(3).random_(9),
    "randint": lambda x: torch.randint(0, 9, (3,)),
    "randperm": lambda x: torch.randperm(3),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "weights": lambda x: nn.Linear(1, 3).weight.detach().flatten(),
    "transposed": lambda x: torch.empty(2, 3).t().uniform_()[:, 0],
    "dropout": F.dropout,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multinomial": lambda x: torch.multinomial(torch.ones(3), 3),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_drawn_whether_or_not_they_are_used(backend, name):
    def function(x, is_used):
        drawn = DRAWS[name](x)
        return x + torch.rand(3) + (drawn if is_used else 0)

    compiled = scidata.compile(function, backend=backend)
    for is_used in (True, False):
        for _ in range(3):
            found = []
            for call in (function, compiled):
                torch.manual_seed(0)
                x = torch.linspace(-1, 1, 3).requires_grad_()
                y = call(x, is_used)
                y.sum().backward()
                found.append((y, x.grad, torch.rand(1)))
            torch.testing.assert_close(*found)
    assert sum(map(len, regions_of(compiled)[0].captured.values())) == 2


@pytest.mark.slow
def test_operations_that_check_their_result_by_inductor():
    def function(x):
        return torch.linalg.cholesky(x @ x.T + torch.eye(4)) + torch.linalg.inv(x @ x.T + torch.eye(4))

    compiled, found = scidata.compile(function, backend="inductor", fullgraph=True), []
    for call in (function, *[compiled] * 3):
        x = torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        found.append((y, x.grad))
        torch.testing.assert_close(found[-1], found[0])
    assert regions_of(compiled)[0].captured


@pytest.mark.parametrize(
    "view", [lambda x: x.unfold(0, 3, 1), lambda x: x.as_strided((3, 3), (1, 1)), lambda x: x.expand(3, 5)]
)
def test_results_whose_elements_overlap_in_memory(view):
    def function(x):
        return view(x * 2)

    compiled, found = scidata.compile(function, backend="aot_eager"), []
    for call in (function, *[compiled] * 3):
        x = torch.linspace(0, 1, 5).requires_grad_()
        y = call(x)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        found.append((y, x.grad))
        torch.testing.assert_close(found[-1], found[0])


class Warming(nn.Module):
    """Reads a count that it keeps, a largest row and what is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count.add_(1)
        if torch.isnan(x).any():
            raise ValueError("NaN")
        y = x.roll(int(x.argmax())) if torch.equal(x > 0, x.abs() > 0) else x
        return y * torch.rand(3) if self.count > 4 else y


def test_values_that_are_taken_for_granted():
    eager, compiled = Warming(), scidata.compile(Warming(), backend="aot_eager", fullgraph=True)
    for step in range(16):
        found = []
        for module in (eager, compiled):
            torch.manual_seed(step)
            x = torch.linspace(1, 2, 3).mul(-1 if step == 9 else 1).requires_grad_()
            module(x).square().sum().backward()
            found.append((x.grad, module.count.clone(), torch.rand(1)))
        torch.testing.assert_close(*found, rtol=0, atol=0)
    (graph,) = itertools.chain(*regions_of(compiled)[0].captured.values())
    assert graph.num_assumed == 4
    assert "4 values checked" in str(graph)
    with pytest.raises(ValueError, match="NaN"):
        compiled(torch.full((3,), torch.nan))


class ByIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.tensor([2, 0, 1]))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count.add_(1)
        return x[self.ids[: int(self.ids.max())]] * self.ids.sum() + self.count


def test_values_of_buffers_of_integers():
    eager, compiled = ByIds(), scidata.compile(ByIds(), backend="aot_eager", fullgraph=True)
    changes = {
        4: lambda m: m.ids.copy_(m.ids.clone()),
        6: lambda m: m.ids.copy_(torch.tensor([3, 1, 2])),
        8: lambda m: setattr(m, "ids", torch.tensor([1, 1, 4])),
    }
    for step in range(12):
        found = []
        for module in (eager, compiled):
            changes.get(step, lambda m: None)(module)
            x = torch.arange(5.0, requires_grad=True)
            module(x).square().sum().backward()
            found.append((x.grad, module.count.clone()))
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert sum(map(len, regions_of(compiled)[0].captured.values())) == 3


class AtQuantiles(nn.Module):
    """Rows at fractions that a buffer has, beside statistics and a long buffer that change in value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.tensor([0.25, 0.5]))
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(40))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        self.running_mean.mul_(0.9).add_(x.detach().mean(0))
        self.mask.mul_(0.5)
        rows = [int(k) for k in (self.q * (len(x) - 1)).floor().long()]
        return self.norm(x)[rows] * self.mask.sum() + self.running_mean


def test_values_of_short_buffers():
    eager, compiled = AtQuantiles(), scidata.compile(AtQuantiles(), backend="aot_eager", fullgraph=True)
    changes = {4: lambda m: m.q.copy_(torch.tensor([0.75, 0.0])), 8: lambda m: m.q.mul_(1.0)}
    for step in range(12):
        found = []
        for module in (eager, compiled):
            changes.get(step, lambda m: None)(module)
            x = torch.linspace(-1, 2, 15).square().reshape(5, 3).requires_grad_()
            module(x).square().sum().backward()
            found.append((x.grad, *module.buffers()))
        torch.testing.assert_close(*found)
    assert sum(map(len, regions_of(compiled)[0].captured.values())) == 2


@pytest.mark.filterwarnings("ignore:scidata.compile")
def test_arguments_that_are_one_tensor_and_globals_of_modules_by_name(monkeypatch):
    for function in (are_one, looks_into_modules):
        compiled = scidata.compile(function, backend="aot_eager")
        for index, is_one in enumerate([False] * 3 + [True] * 4 + [False]):
            monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0 + index // 4)
            found = []
            for call in (function, compiled):
                x = torch.linspace(0, 1, 3).requires_grad_(index % 2 == 0)
                y = x if is_one else x.detach().clone()
                result = call(x, y)
                found.append((result.detach(), torch.autograd.grad(result.sum(), x)[0] if x.requires_grad else x))
            torch.testing.assert_close(*found, rtol=0, atol=0)
        assert sum(map(len, regions_of(compiled)[0].captured.values())) >= (3 if function is are_one else 0)


@pytest.mark.filterwarnings("ignore:scidata.compile")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.default_rng().random(),
        lambda: random.Random().random(),
        lambda: random.SystemRandom().random(),
        lambda: secrets.randbelow(1 << 30),
        lambda: uuid.uuid4().int % 1000003,
    ],
)
def test_numbers_without_a_seed_are_drawn_anew(draw):
    compiled = scidata.compile(lambda x: x + float(draw()), backend="aot_eager")
    found = [compiled(torch.zeros(1, dtype=torch.float64)).item() for _ in range(5)]
    assert len({*found}) == 5


def test_arguments_with_typos_are_named():
    for given, said in (
        ({"backend": "inductr"}, "did you mean 'inductor'"),
        ({"backend": 3}, "backend must be one of"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        ({"options": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"options": ["max_autotune"]}, "expected a mapping"),
        ({"dynamic": "no"}, "dynamic"),
        ({"fullgraph": "no"}, "fullgraph"),
    ):
        with pytest.raises(ConfigError, match=said):
            scidata.compile(nn.Linear(2, 2), **given)
    with pytest.raises(ConfigError, match="expected a module or a function, not list"):
        scidata.compile([nn.Linear(2, 2)])
    model = scidata.parallelize(nn.Linear(2, 2), scidata.init_mesh(domain=1))
    for compile in (functools.partial(torch.compile, model), model.compile):
        with pytest.raises(TypeError, match="'dynamik'"):
            compile(dynamik=True)(torch.ones(1, 2))


def test_default_dtypes_have_graphs_of_their_own():
    compiled = scidata.compile(lambda x: x + torch.ones(3), backend="aot_eager")
    try:
        for dtype in [torch.float32] * 3 + [torch.float64] * 3 + [torch.float32]:
            torch.set_default_dtype(dtype)
            assert compiled(torch.zeros(3, dtype=torch.float32)).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert sum(map(len, regions_of(compiled)[0].captured.values())) == 2


def test_a_backward_graph_that_cannot_be_compiled_runs_as_it_is():
    """A killed compiler leaves a short file, for one: inductor's error of that has these words."""
    num = []

    def compiler(gm, inputs):
        num.append(1)
        if len(num) > 1:
            raise ImportError(f"/{'a' * 500}.so: file too short")
        return make_boxed_func(gm.forward)

    compiled = scidata.compile(torch.tanh, backend=compiler)
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    with pytest.warns(UserWarning, match="uncompiled.*remove it, and the run's"):
        compiled(x).sum().backward()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * (1 - torch.tanh(torch.ones(3)) ** 2))
    assert len(num) == 2


class OfMask(nn.Module):
    """Branches on a mask that is all ones unless ``write`` changes it, as attention masks that are made for a call."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("is_initialized", torch.tensor(False))

    def forward(self, x):
        if not self.is_initialized:
            self.is_initialized.fill_(True)
        mask = torch.ones(x.shape)
        self.write(mask, x)
        return x * 2 if bool(mask[None].to(torch.bool).all()) and self.is_initialized else x * 3


@pytest.mark.parametrize(
    ("write", "is_checked"),
    [
        (lambda mask, x: None, False),
        (lambda mask, x: mask[0].zero_(), True),
        (lambda mask, x: mask.mul_(x.detach() > 0), True),
        (lambda mask, x: mask.view(3, 1)[1:].mul_(x.detach()[1:, None] > 0), True),
    ],
)
def test_branches_on_a_mask_of_ones_are_captured_and_checked_if_it_is_written_to(write, is_checked):
    compiled = scidata.compile(model := OfMask(write), backend="aot_eager")
    for sign in (1, 1, 1, 1, -1, 1):
        x = torch.full((3,), float(sign), requires_grad=True)
        torch.testing.assert_close(compiled(x), model.forward(x))
    (graph,) = itertools.chain(*regions_of(compiled)[0].captured.values())
    assert bool(graph.num_assumed) == is_checked


@pytest.mark.parametrize("how", ["buffer", "attribute", "argument"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_used_eagerly(how, layout):
    class Multiplies(nn.Module):
        def forward(self, x, matrix=None):
            return (self.matrix if matrix is None else matrix) @ self.linear(x)

    model, matrix = Multiplies(), torch.eye(3).mul(2).to_sparse(layout=layout)
    model.linear = nn.Linear(3, 3)
    if how == "attribute":
        model.matrix = matrix
    elif how == "buffer":
        model.register_buffer("matrix", matrix)
    compiled, given = scidata.compile(model, backend="aot_eager"), (matrix,) if how == "argument" else ()
    for _ in range(3):
        x = torch.randn(3, 3)
        torch.testing.assert_close(compiled(x, *given), model.forward(x, *given))
    assert "sparse" in regions_of(compiled)[0].reason


HELD = {}


def held_up(x):
    if threading.current_thread().name in HELD:
        inside, go_on = HELD[threading.current_thread().name]
        inside.set()
        assert go_on.wait(60)
    return x * 2


def test_a_call_that_may_not_capture_keeps_no_other_waiting():
    compiled = scidata.compile(held_up, backend="aot_eager")
    compiled(torch.ones(3))
    HELD.update({name: (threading.Event(), threading.Event()) for name in ("first", "second")})
    # the second's call may be captured, but for the first, which is inside
    calls = {"first": torch.ones(2), "second": torch.ones(3), "third": torch.ones(4)}
    threads = [threading.Thread(target=compiled, args=(x,), name=name) for name, x in calls.items()]
    for thread in threads:
        thread.start()
        if thread.name in HELD:
            assert HELD[thread.name][0].wait(60)
    threads[2].join(20)
    waits = threads[2].is_alive()
    for _, go_on in HELD.values():
        go_on.set()
    for thread in threads:
        thread.join()
    HELD.clear()
    assert not waits


class HasNoLength(tuple):
    def __len__(self):
        raise NotImplementedError


class CannotBeLookedAt(list):
    def __iter__(self):
        raise NotImplementedError


class Validates:
    """As a class of pydantic's holds, of which nothing may be asked before it is used."""

    __module__ = "pydantic._internal"

    def __getattr__(self, name):
        raise RuntimeError


class Holds(nn.Linear):
    def __init__(self, held):
        super().__init__(3, 3)
        self.held = held


@pytest.mark.parametrize("held", [HasNoLength((1.0, [2.0])), Validates(), CannotBeLookedAt([1])], ids=type)
def test_classes_whose_methods_raise(held):
    compiled = scidata.compile(Holds(held), backend="aot_eager")
    x = torch.ones(2, 3)
    with warnings.catch_warnings(record=True) as said:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), F.linear(x, compiled.weight, compiled.bias))
    if type(held) is not CannotBeLookedAt:
        assert any(regions_of(compiled)[0].captured.values())
    else:
        assert "holds a CannotBeLookedAt" in str(said[0].message)


def heads_by_norms(x, weight):
    """Attention of means: backward of the norm gets a gradient in another order, and gives it on in its own."""
    heads = F.layer_norm(x.reshape(2, 6, 2, 8).transpose(1, 2), (8,), weight)
    return (heads.transpose(-1, -2) @ heads.detach().exp()).cos()


def test_a_kernel_that_lays_its_result_out_otherwise_than_torch_infers():
    compiled, found = scidata.compile(heads_by_norms, backend="aot_eager", fullgraph=True), []
    for call in (heads_by_norms, compiled, compiled, compiled):
        x = torch.linspace(0, 1, 192).reshape(2, 6, 16).sin().requires_grad_()
        call(x * 2, torch.ones(8)).sum().backward()
        found.append(x.grad)
    for grad in found[1:]:
        torch.testing.assert_close(grad, found[0], rtol=0, atol=0)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, state):
        state = self.linear(x + state).tanh()
        return state * 2, state.square()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_weights_of_several_calls_of_which_a_loss_uses_some_results(retain_graph):
    torch.manual_seed(0)
    eager, x = Cell(), torch.ones(2, 3)
    compiled = scidata.compile(copy.deepcopy(eager), backend="aot_eager")
    for uses_all in (True, True, True, False, False, False, False):
        for cell in (eager, compiled):
            cell.zero_grad()
            state = torch.zeros(2, 3)
            for _ in range(3):
                y, state = cell(x, state)
            (y + state if uses_all else y).sum().backward(retain_graph=retain_graph)
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert any(regions_of(compiled)[0].captured.values())


def test_modules_of_a_list_are_compiled_by_themselves():
    layers, x = scidata.compile(nn.ModuleList(Cell() for _ in range(2)), backend="aot_eager"), torch.ones(2, 3)
    for _ in range(3):
        y = x
        for layer in layers:
            y, _ = layer(x, y)
    whole, *parts = regions_of(layers)
    assert not whole.captured
    assert [part.name for part in parts] == ["ModuleList.0", "ModuleList.1"]
    assert all(any(part.captured.values()) for part in parts)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def names_a_type(x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{type(x)}, a {type(x).__name__}")
    return x.sin() * 2


def makes_another(x):
    pair = Pair(x, x.sin())
    if isinstance(pair, torch.Tensor):
        return pair
    return type(pair)(*(each * 2 for each in pair)).second


@contextmanager
def guarded():
    yield


@guarded()
def is_guarded(x):
    return x.sin() * 2


def converts(x):
    return (x < 0.5).type(torch.DoubleTensor) * x.type(torch.float64)


@pytest.mark.parametrize("function", [names_a_type, makes_another, converts, is_guarded])
def test_what_is_captured_whole(function):
    compiled = scidata.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.linspace(0, 1, 3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), function(x))
    assert any(regions_of(compiled)[0].captured.values())


@torch.compile(backend="eager")
def compiled_by_its_author(x):
    return x.sin() * 2


class CallsCompiled(nn.Linear):
    def forward(self, x):
        return compiled_by_its_author(super().forward(x))


def test_functions_that_a_model_has_compiled():
    model, x = CallsCompiled(3, 3), torch.ones(2, 3)
    expected = F.linear(x, model.weight, model.bias).sin() * 2
    scidata.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    assert any(regions_of(model)[0].captured.values())

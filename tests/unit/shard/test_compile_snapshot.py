"""A snapshot holds while what Python code can reach is the same, and puts it back."""

import collections
import cProfile
import datetime
import functools
import itertools
import math
import os
import random
import sys
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

import scidata
from scidata.shard.compile import regions_of
from scidata.shard.compile.reach import EffectError, NotCapturedError, is_equal
from scidata.shard.compile.state import Snapshot
from scidata.shard.compile.watch import Watch

FLAG = 1.0
config = types.ModuleType("a_config_of_a_user")
config.flag, config.table, config.inner = 1.0, [1.0], types.SimpleNamespace(deep=types.SimpleNamespace(a=1.0))
sys.modules[config.__name__] = config


class Slotted:
    __slots__ = ("_Slotted__own", "x")

    def __init__(self):
        self.x = self._Slotted__own = 1.0


class Config:
    scale = 1.0

    def __init__(self):
        self.x, self.inner = 1.0, {"a": [types.SimpleNamespace(x=[1.0])]}

    def method(self, x):
        return x * FLAG


class Module(nn.Module):
    scale = 1.0

    def __init__(self, **attributes):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("nothing", None)
        vars(self).update(attributes)

    def forward(self, x):
        return self.linear(x) * FLAG * config.flag * helper(x) * config.table[0]


def helper(x, k=[1.0], *, scale=1.0):  # noqa: B006
    return x * k[0] * scale


CHANGES = {
    "float": ({"a": 1.0}, lambda m: setattr(m, "a", 2.0)),
    "type": ({"a": 1}, lambda m: setattr(m, "a", True)),
    "sign of zero": ({"a": 0.0}, lambda m: setattr(m, "a", -0.0)),
    "renamed": ({"a": 1}, lambda m: (setattr(m, "b", m.a), delattr(m, "a"))),
    "list": ({"a": [1.0]}, lambda m: m.a.append(1.0)),
    "element": ({"a": [0.0]}, lambda m: m.a.__setitem__(0, -0.0)),
    "empty list": ({"a": []}, lambda m: m.a.append(1)),
    "set": ({"a": {1}}, lambda m: m.a.add(2)),
    "deque": ({"a": collections.deque([1])}, lambda m: m.a.rotate() or m.a.append(2)),
    "key": ({"a": {"a": 1}}, lambda m: m.a.update(b=m.a.pop("a"))),
    "order of keys": ({"a": {"a": 1, "b": 1}}, lambda m: m.a.update(a=m.a.pop("a"))),
    "type of a key": ({"a": {1: 1}}, lambda m: (m.a.clear(), m.a.update({True: 1}))),
    "deep": ({"a": Config()}, lambda m: m.a.inner["a"][0].x.__setitem__(0, 2.0)),
    "in a tuple": ({"a": ([1],)}, lambda m: m.a[0].append(1)),
    "slot": ({"a": Slotted()}, lambda m: setattr(m.a, "x", 2.0)),
    "private slot": ({"a": Slotted()}, lambda m: setattr(m.a, "_Slotted__own", 2.0)),
    "class": ({"a": Config()}, lambda m: setattr(m.a, "__class__", type("Other", (Config,), {}))),
    "bound method": ({"a": Config().method}, lambda m: setattr(m.a.__self__, "x", 2.0)),
    "partial": ({"a": functools.partial(helper, scale=2.0)}, lambda m: m.a.keywords.update(scale=3.0)),
    "array": ({"a": np.ones(3)}, lambda m: m.a.__setitem__(0, 2.0)),
    "bytes": ({"a": bytearray(b"a")}, lambda m: m.a.__setitem__(0, 1)),
    "tensor": ({"a": torch.ones(2)}, lambda m: m.a.add_(1)),
    "data of a tensor": ({"a": [torch.ones(2)]}, lambda m: setattr(m.a[0], "data", torch.zeros(2))),
    "module in a list": ({"a": [nn.Dropout()]}, lambda m: m.a[0].eval()),
    "training": ({}, lambda m: m.eval()),
    "hook": ({}, lambda m: m.linear.register_forward_hook(print)),
    "forward": ({}, lambda m: setattr(m.linear, "forward", print)),
    "class of a module": ({}, lambda m: setattr(m.linear, "__class__", type("L", (nn.Linear,), {}))),
    "tied": ({}, lambda m: setattr(m, "weight", m.linear.weight)),
    "no bias": ({}, lambda m: setattr(m.linear, "bias", None)),
    "buffer": ({}, lambda m: setattr(m, "nothing", torch.ones(1))),
    "child": ({}, lambda m: m.add_module("other", nn.ReLU())),
}
GLOBALS = {
    "global": lambda patch: patch.setitem(globals(), "FLAG", 2.0),
    "function": lambda patch: patch.setitem(globals(), "helper", print),
    "code": lambda patch: patch.setattr(helper, "__code__", (lambda x: x).__code__),
    "default": lambda patch: patch.setattr(helper, "__defaults__", ([2.0],)),
    "in a default": lambda patch: patch.setitem(vars(config), "table", [2.0]),
    "keyword": lambda patch: patch.setitem(helper.__kwdefaults__, "scale", 2.0),
    "module": lambda patch: patch.setattr(config, "flag", 2.0),
    "class attribute": lambda patch: patch.setattr(Module, "scale", 2.0),
    "method": lambda patch: patch.setattr(Module, "forward", print),
    "method of torch's": lambda patch: patch.setattr(nn.Linear, "forward", print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attribute(name):
    attributes, change = CHANGES[name]
    module = Module(**attributes)
    snapshot = Snapshot([module])
    assert snapshot.holds()
    assert snapshot.holds()
    change(module)
    assert not snapshot.holds()


@pytest.mark.parametrize("name", GLOBALS)
def test_a_changed_global(name, monkeypatch):
    snapshot = Snapshot([Module()])
    assert snapshot.holds()
    GLOBALS[name](monkeypatch)
    assert not snapshot.holds()
    monkeypatch.undo()
    assert snapshot.holds()


def test_equal_values_are_others_once():
    module = Module(a=1e9, b=[10**9], c={"a": "b" * 40})
    snapshot = Snapshot([module])
    module.a, module.b[0], module.c["a"] = float("1e9"), int("1000000000"), "b" * len("b" * 40)
    assert snapshot.holds()
    assert snapshot.holds()
    assert not is_equal(1, True)
    assert not is_equal(0.0, -0.0)
    assert is_equal(math.nan, float("nan"))
    assert not is_equal([1], [1])


def test_parameters_and_buffers_may_change_in_value():
    module = Module()
    module.register_buffer("b", torch.ones(1))
    snapshot = Snapshot([module])
    with torch.no_grad():
        module.linear.weight.add_(1)
        module.b.add_(1)
    assert snapshot.holds()
    module.b = torch.ones(3)  # its facts are compared elsewhere
    assert snapshot.holds()
    assert [held[0][1] for held in snapshot.places] == ["b", "weight", "bias"]


def test_a_closure():
    k, others = 1.0, [1.0]

    def function(x):
        return x * k * others[0]

    snapshot = Snapshot([function])
    assert snapshot.holds()
    others[0] = 2.0
    assert not snapshot.holds()
    others[0] = 1.0
    k = 2.0
    assert not snapshot.holds()


def test_functions_that_have_not_run_are_left_out(monkeypatch):
    with Watch() as watch:
        helper(1)
    snapshot = Snapshot([Module(), helper]).narrowed(watch.codes)
    monkeypatch.setattr(config, "flag", 2.0)  # of forward
    assert snapshot.holds()
    monkeypatch.setitem(helper.__kwdefaults__, "scale", 2.0)
    assert not snapshot.holds()


class Maker(collections.OrderedDict):
    """Makes what is asked for of the classes that it holds."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


def test_a_dict_that_makes_what_it_is_asked_for():
    held = Maker(a=Slotted, b=nn.ReLU)
    snapshot = Snapshot([Module(held=held)])
    assert snapshot.holds()
    held["c"] = nn.GELU
    assert not snapshot.holds()
    snapshot.restore()
    assert snapshot.holds()
    assert [*held.values()] == [Slotted, nn.ReLU]


def test_all_is_put_back(monkeypatch):
    monkeypatch.setattr(config, "table", [1.0])
    held = [1]
    module = Module(a=[1], b={"a": [2]}, c=np.ones(2), d=Slotted(), e=[], f={1}, g=random.Random(0), h=lambda: held)
    snapshot = Snapshot([module])
    drawn = np.random.get_state()[1].tolist()  # noqa: NPY002
    module.a += [2]
    module.b["a"].append(3)
    module.b["b"] = 1
    module.c[0] = 5
    module.d.x = 7
    module.e.append(1)
    module.f.clear()
    module.g.random()
    module.new = 1
    module.eval()
    Module.new = 2
    config.flag = 3.0
    config.table.append(1)
    held.append(2)
    np.random.rand()  # noqa: NPY002
    assert snapshot.has_drawn()
    snapshot.restore()
    assert snapshot.holds()
    assert not snapshot.has_drawn()
    assert (module.a, module.b, module.c.tolist(), module.d.x) == ([1], {"a": [2]}, [1, 1], 1.0)
    assert (module.e, module.f, module.training, held) == ([], {1}, True, [1])
    assert not hasattr(module, "new")
    assert (config.flag, config.table) == (1.0, [1.0])
    assert np.random.get_state()[1].tolist() == drawn  # noqa: NPY002


def begun():
    """Return a generator that has begun."""
    found = (x for x in range(3))
    next(found)
    return found


@pytest.mark.parametrize(
    "x",
    [
        itertools.count(),
        np.ones(1 << 16),
        np.array([[]], dtype=object),
        torch.from_numpy(np.ones(2)),
        iter([]),
        begun(),
    ],
    ids=["count", "large", "objects", "memory of NumPy", "iterator", "generator"],
)
def test_what_cannot_be_compared_raises(x):
    with pytest.raises(NotCapturedError):
        Snapshot([Module(a=x)])


def test_an_array_that_cannot_change_may_be_large():
    x = np.ones(1 << 16)
    x.flags.writeable = False
    assert Snapshot([Module(a=x)]).holds()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: print(end=""), "calls print"),
        (lambda: time.time() + 1, "calls time"),
        (lambda: str(datetime.datetime.now()), "calls datetime.now"),
        (lambda: torch.manual_seed(0), "calls torch.manual_seed"),
        (lambda: torch.ones(1).grad, "reads .grad"),
        (lambda: torch.ones(1).data.add_(1), "writes to .data"),
    ],
)
def test_effects_are_refused_before_they_happen(function, reason):
    state = torch.get_rng_state()
    with Watch() as watch, pytest.raises(EffectError, match=reason):
        function()
    assert watch.effects
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.getprofile() is None


def test_gradients_may_be_computed():
    x = torch.ones(1, requires_grad=True)
    with Watch() as watch:
        (lambda: torch.autograd.grad(x * 2, x))()
        (lambda grad: grad * 2)(x)  # a variable of a function's backward
    assert not watch.effects


def test_comparing_calls_few_functions():
    """Counts: Python calls do not grow with modules."""
    module = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(50)])
    snapshot, called = Snapshot([module]), []
    assert snapshot.holds()
    sys.setprofile(lambda frame, event, arg: called.append(event) if event == "call" else None)
    snapshot.holds()
    sys.setprofile(None)
    assert len(called) < 20


def test_a_step_of_a_graph_calls_few_functions():
    module = scidata.compile(nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)]), backend="aot_eager")
    x, called = torch.ones(1, 2), []
    for _ in range(3):
        module(x)
    (captured,) = next(iter(regions_of(module)[0].captured.values()))
    captured.run = lambda leaves: None
    sys.setprofile(lambda frame, event, arg: called.append(event) if event == "call" else None)
    module(x)
    sys.setprofile(None)
    assert len(called) < 160


def by_environment(x):
    return x * float(os.environ.get("SCALE_OF_A_USER", "1"))


def test_the_environment_counts_but_for_what_inductor_writes_there(monkeypatch):
    snapshot = Snapshot([by_environment])
    monkeypatch.setenv("_TORCHINDUCTOR_OF_A_TEST", "1")
    assert snapshot.holds()
    monkeypatch.setenv("SCALE_OF_A_USER", "2")
    assert not snapshot.holds()


@pytest.mark.parametrize("kind", ["cProfile", "stacks"])
def test_steps_are_compiled_under_a_profiler(kind):
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    scidata.compile(model, backend="aot_eager")
    stacks = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True)
    with cProfile.Profile() if kind == "cProfile" else stacks:
        before = sys.getprofile()
        for _ in range(4):
            model(x).sum().backward()
        assert sys.getprofile() is before
    for _ in range(2):
        model(x).sum().backward()
    assert regions_of(model)[0].captured

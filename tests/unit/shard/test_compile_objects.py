"""Objects among a captured call's arguments, by their attributes: data classes, namespaces, PyG's batches, dicts."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch_geometric.data import Batch, Data, HeteroData

import scidata
from scidata.shard.compile import regions_of

pytestmark = pytest.mark.filterwarnings("ignore:scidata.compile")


@dataclass
class Part:
    x: torch.Tensor
    scale: float = 2.0
    inner: object = None

    def scaled(self):
        return self.x * self.scale


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def part(x):
    return Part(x, inner=SimpleNamespace(y=x + 1, all=[x * 3, "name"]))


def batch(x):
    graphs = [Data(x=row.view(1, -1), edge_index=torch.zeros(2, 1, dtype=torch.long), name="a") for row in x]
    return Batch.from_data_list(graphs)


def hetero(x):
    data = HeteroData()
    data["cell"].x, data["cell", "to", "cell"].weight = x, x * 2
    return data


def reads(model, given):
    return model(given.scaled()) + given.inner.y + given.inner.all[0]


def assigns(model, given):
    given.x = model(given.x)
    given.new = given.x * 2
    del given.scale
    given.inner.y, given.inner.label = given.x + 1, "set"
    return given


def puts_in(model, given):
    given.inner = Part(model(given.x), scale=3.0)
    return given.inner.scaled()


def returns_new(model, given):
    return Part(model(given.x), given.scale, SimpleNamespace(y=given.inner.y * 2))


def returns_held(model, given):
    return Part(model(given.x), given.scale, given.inner)


def assigns_rows(model, given):
    given.x = model(given.x)
    given.graph_x = torch.zeros(given.num_graphs, given.x.shape[1]).index_add(0, given.batch, given.x)
    return given, given.graph_x.sum()


def puts_in_a_dict(model, given):
    given["x"] = model(given["x"])
    given["again"], given["all"] = given["x"], [given["x"] * 2, "name"]
    del given["old"]
    return given


def as_dict(x):
    return {"x": x, "old": x + 1, "same": {"y": x}}


def assigns_kinds(model, given):
    given["cell"].x = model(given["cell"].x)
    return {name: x * given["cell", "to", "cell"].weight for name, x in given.x_dict.items()}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net, self.function = nn.Linear(4, 4), function
        self.held = part(torch.ones(3, 4))

    def forward(self, given):
        return self.function(self.net, given)


def values_of(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (tuple, list)):
        return [values_of(each) for each in x]
    if isinstance(x, dict):
        return {name: values_of(each) for name, each in x.items()}
    if isinstance(x, Data | HeteroData):
        return [type(x).__name__, values_of(x.to_dict())]
    return [type(x).__name__, values_of(vars(x))] if hasattr(x, "__dict__") else x


def step(model, given):
    result = model(given)
    results = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
    tensors = [getattr(x, "x", x) for x in results]
    sum(x.square().sum() for x in tensors if isinstance(x, torch.Tensor)).backward()
    found = values_of(result), values_of(given), [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found, result is given or (isinstance(result, tuple) and result[0] is given)


def check(found, expected):
    (found, tree), (expected, expected_tree) = tree_flatten(found), tree_flatten(expected)
    assert tree == expected_tree
    for now, was in zip(found, expected, strict=True):
        torch.testing.assert_close(now, was) if isinstance(was, torch.Tensor) else check_equal(now, was)


def check_equal(now, was):
    assert now == was


CASES = {
    "reads": (reads, part),
    "assigns": (assigns, part),
    "puts in": (puts_in, part),
    "returns new": (returns_new, part),
    "batch": (assigns_rows, batch),
    "hetero": (assigns_kinds, hetero),
    "dict": (puts_in_a_dict, as_dict),
}


@pytest.mark.parametrize(
    ("name", "backend"), [*[(name, "aot_eager") for name in CASES], ("assigns", "inductor"), ("batch", "inductor")]
)
def test_attributes_are_read_and_assigned_as_in_an_eager_call(name, backend):
    function, make = CASES[name]
    model = Calls(function)
    eager = copy.deepcopy(model)
    scidata.compile(model, backend=backend, fullgraph=True)
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        given = make(x)
        found, is_given = step(model, given)
        expected, was_given = step(eager, make(x))
        check(found, expected)
        assert is_given == was_given
    captured = [each for group in regions_of(model)[0].captured.values() for each in group]
    assert len(captured) == 1
    if make is part:  # another value that is no tensor is another kind of call
        given, again = make(torch.ones(3, 4)), make(torch.ones(3, 4))
        given.scale = again.scale = 3.0
        check(step(model, given)[0], step(eager, again)[0])


def asks_for_held(model, given):
    return model(given.x) * (3 if given is getattr(asks_for_held, "held", None) else 1)


def returns_twice(model, given):
    return model(given[0].x) * (2 if given[0] is given[1] else 5)


def test_which_object_it_is():
    model = Calls(asks_for_held)
    asks_for_held.held = model.held
    net = copy.deepcopy(model.net)
    scidata.compile(model, backend="aot_eager")
    other = part(torch.ones(3, 4))
    for given in (other, other, other, model.held, other, model.held, model.held, other):
        torch.testing.assert_close(model(given), net(given.x) * (3 if given is model.held else 1))
    assert regions_of(model)[0].reason.endswith("hold an object twice, or one that the module holds")
    model = Calls(returns_twice)
    net = copy.deepcopy(model.net)
    scidata.compile(model, backend="aot_eager", fullgraph=True)
    a, b = part(torch.ones(3, 4)), part(torch.ones(3, 4))
    for pair in ([a, a], [a, b], [a, a], [b, b], [b, a], [a, b], [a, a]):
        torch.testing.assert_close(model(pair), net(pair[0].x) * (2 if pair[0] is pair[1] else 5))
    assert sum(map(len, regions_of(model)[0].captured.values())) == 2


def test_an_object_of_the_arguments_in_a_new_one_is_eager():
    model = Calls(returns_held)
    scidata.compile(model, backend="aot_eager")
    given = part(torch.ones(3, 4))
    for _ in range(3):
        assert model(given).inner is given.inner
    assert regions_of(model)[0].reason == "a result holds an object that is among the arguments"


def test_an_object_with_more_state_than_attributes_is_eager():
    model = Calls(lambda net, given: net(given.x))
    scidata.compile(model, backend="aot_eager")
    given = Slotted(torch.ones(3, 4))
    for _ in range(3):
        torch.testing.assert_close(model(given), model.net(given.x))
    assert regions_of(model)[0].reason == "an argument is a Slotted"


def test_an_object_that_holds_itself_is_eager():
    model = Calls(lambda net, given: net(given.x))
    scidata.compile(model, backend="aot_eager")
    given = part(torch.ones(3, 4))
    given.inner = given
    for _ in range(3):
        torch.testing.assert_close(model(given), model.net(given.x))
    assert regions_of(model)[0].reason == "an argument holds itself"

"""Every entry of the op table against one process: values, gradients, on any layout and any number of ranks."""

from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata.shard.dispatch
from scidata.shard import ShardSpec
from scidata.shard.op_table import HANDLERS, op_name
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, specs_of
from tests.dist._conformance import EXTENT, cases
from tests.dist._pointwise import INTEGER, NO_DERIVATIVE, one_and_two_operands

#: Modules of the table whose entries have tests of their own.
ELSEWHERE = (
    "graph",
    "scatter",
    "attention",
    "layers",
    "norm",
    "conv",
    "pool",
    "interpolate",
    "embedding",
    "metadata",
    "fft",
    "functions",
    "multihead",
    "neighbours",
    "neighbourhoods",
    "derived",
    "matrices",
    "sorting",
    "counting",
    "writing",
    "selection",
    "points",
    "recurrent",
    "tables",
    "windows",
    "sphere",
    "sparse",
)
BY_CHANCE = ("bernoulli",)  # test_memory_order
#: Losses that compare with margins: test_ops_points.
MARGIN_LOSSES = (
    *("cosine_embedding_loss", "gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "triplet_margin_loss"),
    "triplet_margin_with_distance_loss",
)
#: Made of sums of products, and activations that are not elementwise: test_ops_composed and test_ops_windows.
COMPOSED = (
    *("tensordot", "kron", "cross", "renorm", "vander", "cov", "corrcoef", "aminmax", "inner", "vdot", "dist"),
    *("multi_dot", "linalg_multi_dot", "chain_matmul", "linalg_vander", "prelu", "glu", "rrelu"),
    "pad_sequence",
)
POINTWISE_ELSEWHERE = ("addcdiv", "addcmul", "lerp", "masked_fill", "where", "sigmoid", "tanh")


class Recorder(dict):
    """The op table, remembering what was looked up."""

    used: ClassVar[set] = set()

    def get(self, key, default=None):
        self.used.add(key)
        return super().get(key, default)


def tensors(case):
    torch.default_generator.manual_seed(1)
    for shape in case.shapes:
        values = torch.randn(shape, dtype=torch.float64)
        if case.low is not None:
            values = torch.rand(shape, dtype=torch.float64) * 0.8 + case.low
        yield values.requires_grad_()


def check_cases(rank, num_ranks, grid):
    scidata.shard.dispatch.HANDLERS = Recorder(HANDLERS)
    shape, names = ((2, 2), ("h", "w")) if grid else ((num_ranks,), ("domain",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    turn = 0
    for case in cases():
        inputs = list(tensors(case))
        turn += 1
        chosen = case.dims if num_ranks == 3 else [case.dims[(turn + num_ranks + grid) % len(case.dims)]]
        for dims in chosen:
            turn += 1
            specs = specs_of(mesh, case.shapes, dims, turn)
            try:
                assert_like_one_process(case.function, inputs, specs, rtol=case.rtol)
            except BaseException as error:
                raise AssertionError(f"{case.name}: {[str(spec) for spec in specs]}") from error
    return {op_name(function) for function in Recorder.used}


@pytest.fixture(scope="module")
def used():
    """What was looked up, by the ranks and whether they are a grid."""
    return {}


@pytest.mark.slow_for("4-False", "2-False", "4-True")
@pytest.mark.parametrize(("num_ranks", "grid"), [(1, False), (2, False), (3, False), (4, False), (4, True)])
def test_every_case(num_ranks, grid, used):
    used[num_ranks, grid] = run_ranks(check_cases, num_ranks, grid, timeout=300)[0]


def check_pointwise(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    scidata.shard.dispatch.HANDLERS = Recorder(HANDLERS)
    for turn, (name, function, count) in enumerate(one_and_two_operands()):
        (spec,) = specs_of(mesh, [(2, 7)], [1], turn)
        low = 1.1 if name in ("acosh", "arccosh") else 0.1
        inputs = [(torch.rand(2, 7, dtype=torch.float64) * 0.8 + low) for _ in range(count)]
        if name in INTEGER:
            inputs = [torch.randint(0, 5, (2, 7)) for _ in range(count)]
        elif name not in NO_DERIVATIVE:
            inputs = [x.requires_grad_() for x in inputs]
        try:
            assert_like_one_process(function, inputs, [spec] * count)
        except BaseException as error:
            raise AssertionError(f"{name}: {spec}") from error
    return {op_name(function) for function in Recorder.used}


def test_every_entry_has_a_case(used):
    if (3, False) not in used:  # which has all dims of all cases, and is not in each share
        used[3, False] = run_ranks(check_cases, 3, False, timeout=300)[0]
    called = set().union(*used.values(), run_ranks(check_pointwise, 4, timeout=200)[0])
    mine = {op_name(f) for f, handler in HANDLERS.items() if not any(m in handler.__module__ for m in ELSEWHERE)}
    in_place = {
        name for name in mine if (name.endswith("_") and "__" not in name) or "__i" in name
    }  # test_ops_pointwise
    # three operands and reflected operators: test_ops_pointwise too
    ternary = {name for name in mine if name.rsplit(".", 1)[-1] in POINTWISE_ELSEWHERE or name.endswith("__")}
    by_chance = {name for name in mine if name.rsplit(".", 1)[-1] in BY_CHANCE}
    margins = {name for name in mine if name.rsplit(".", 1)[-1] in MARGIN_LOSSES + COMPOSED}
    lists = {name for name in mine if "_foreach_" in name}  # test_ops_composed
    missing = mine - lists - called - in_place - ternary - by_chance - margins
    assert not missing, sorted(missing)


def check_drawn(rank, num_ranks, drawn):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    functions = {case.name: case for case in cases() if case.shapes == ((7, 7, 7),)}
    for name, dim, sizes in drawn:
        spec = ShardSpec.even(mesh, [Shard(dim)], (7, 7, 7), {0: sizes})
        assert_like_one_process(functions[name].function, list(tensors(functions[name])), [spec])


@st.composite
def layouts(draw, num_ranks):
    cuts = sorted(draw(st.lists(st.integers(0, EXTENT), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, EXTENT], strict=True))


NAMES = [case.name for case in cases() if case.shapes == ((7, 7, 7),)]
DRAWN = st.integers(2, 4).flatmap(
    lambda p: st.tuples(
        st.just(p),
        st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2), layouts(p)), min_size=10, max_size=20),
    )
)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(DRAWN)
def test_drawn_layouts(drawn):
    run_ranks(check_drawn, *drawn)

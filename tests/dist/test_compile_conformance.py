"""The conformance tables under capture: equal to one process, or run eagerly, never wrong.

Which cases are run eagerly is listed here, so that none is lost unseen.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of, specs_of
from tests.dist._captured import reason_of, thrice
from tests.dist._conformance import cases
from tests.dist._pointwise import INTEGER, NO_DERIVATIVE, one_and_two_operands
from tests.dist._stable_arithmetic import FORMULAS, rows
from tests.dist._stable_arithmetic import LAYOUTS as OF_ROWS
from tests.dist._stable_reductions import REDUCTIONS
from tests.dist.test_conformance import tensors
from tests.dist.test_stable_arithmetic import outcome

#: Copies of parts of an argument, where torch has views.
OF_VIEWS = {"getitem", "select", "unbind", "reshape", "flatten"}
#: Values decide which way is taken, or how many rows there are.
OF_VALUES = {"mask", "put_sharded_mask", "put_where", "put_sharded_index", "prod", "prod_keepdim", "prod_all"}
OF_VALUES |= {"distribution"}  # whose arguments torch checks
#: torch has no rule for its shapes.
OF_SHAPES = {"ctc_loss_mean", "ctc_loss_sum", "ctc_loss_none", "packed", "sparse values"}
#: Closures that hold sparse tensors.
OF_SPARSE = {"sparse", "sparse_too"}
#: Results that require grad, and have none.
OF_COUNTS = {"norm_0"}


def spec_of(mesh, x, dim, sizes):
    return None if dim is None else ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})


def mesh_of(num_ranks):
    warnings.filterwarnings("ignore", "scidata.compile")
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def check_cases(rank, num_ranks, backend, stride):
    mesh, eager = mesh_of(num_ranks), {}
    for turn, case in enumerate(cases()):
        if turn % stride:
            continue
        inputs, dims, regions = [*tensors(case)], case.dims[turn % len(case.dims)], []
        specs, others = (specs_of(mesh, case.shapes, dims, turn + more) for more in (0, 1))
        try:
            function = thrice(case.function, regions, backend)
            assert_like_one_process(function, inputs, specs, rtol=max(case.rtol, 1e-9), atol=1e-9)
            # no plan or layout that is kept has anything of the capture
            for given in (specs, others):
                assert_like_one_process(case.function, inputs, given, rtol=case.rtol)
        except BaseException as error:
            raise AssertionError(f"{case.name}: {[str(spec) for spec in specs]}") from error
        eager[case.name] = reason_of(regions)
    return eager


@pytest.mark.timeout(1800)
@pytest.mark.slow_for("2-aot_eager-1", "3-aot_eager-1", "2-inductor-10")
@pytest.mark.parametrize(
    ("num_ranks", "backend", "stride"),
    [(2, "aot_eager", 40), (2, "aot_eager", 1), (3, "aot_eager", 1), (2, "inductor", 10)],
)
def test_every_case(num_ranks, backend, stride):
    for found in run_ranks(check_cases, num_ranks, backend, stride, timeout=1800):
        eager = {name: reason for name, reason in found.items() if reason}
        unlisted = eager.keys() - OF_VIEWS - OF_VALUES - OF_SHAPES - OF_SPARSE - OF_COUNTS
        assert not unlisted, {name: eager[name] for name in unlisted}
        assert stride > 1 or len(eager) <= len(found) * 0.1


def check_pointwise(rank, num_ranks, stride):
    mesh = mesh_of(num_ranks)
    for turn, (name, function, count) in enumerate(one_and_two_operands()):
        if turn % stride:
            continue
        low, regions = 1.1 if name in ("acosh", "arccosh") else 0.1, []
        inputs = [torch.rand(2, 7, dtype=torch.float64) * 0.8 + low for _ in range(count)]
        if name in INTEGER:
            inputs = [torch.randint(0, 5, (2, 7)) for _ in range(count)]
        elif name not in NO_DERIVATIVE:
            inputs = [x.requires_grad_() for x in inputs]
        (spec,) = specs_of(mesh, [(2, 7)], [1], turn // stride)
        try:
            assert_like_one_process(thrice(function, regions), inputs, [spec] * count)
            assert not reason_of(regions), reason_of(regions)
        except BaseException as error:
            raise AssertionError(f"{name}: {spec}") from error


@pytest.mark.slow_for("3-1")
@pytest.mark.parametrize(("num_ranks", "stride"), [(2, 47), (3, 1)])
def test_pointwise(num_ranks, stride):
    run_ranks(check_pointwise, num_ranks, stride, timeout=300)


def check_precision(rank, num_ranks, stride):
    """Infinities, NaN, ties and masked rows, in float32 and 16 bits: the graph gives the numbers of an eager run."""
    mesh, turn, eager = mesh_of(num_ranks), 0, {}
    for formula in (*FORMULAS, *REDUCTIONS):
        for dtype in (torch.float32, torch.bfloat16):
            for kinds in formula.kinds(dtype):
                turn += 1
                if turn % stride:
                    continue
                regions, sizes = [], OF_ROWS[num_ranks][turn % 3]
                whole = [rows(kinds, dtype, seed) for seed in range(formula.operands)]
                parts = [shard_of(x, spec_of(mesh, x, 1, sizes)).requires_grad_(formula.grad) for x in whole]
                said = f"{formula.name} {dtype} {sizes} {kinds}"
                try:
                    given = parts, dtype, formula.grad
                    for ours, theirs in zip(
                        outcome(thrice(formula.function, regions), *given),
                        outcome(formula.function, *given),
                        strict=True,
                    ):
                        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
                except BaseException as error:
                    raise AssertionError(said) from error
                eager[said] = reason_of(regions)
    return eager


@pytest.mark.slow_for("3-1")
@pytest.mark.parametrize(("num_ranks", "stride"), [(2, 197), (3, 1)])
def test_precision(num_ranks, stride):
    (found, *_) = run_ranks(check_precision, num_ranks, stride, timeout=600)
    eager = {name: reason for name, reason in found.items() if reason}
    assert len(eager) <= len(found) * 0.3, eager  # quantiles, counts and lists of what is there


def drawing(x):
    y, turned = F.dropout(x, 0.3), x.t()  # of other strides, which say in which order torch draws
    return [
        F.dropout(turned),
        torch.zeros_like(turned).bernoulli_(),
        (x * 1)[:, ::2].normal_(),
        y,
        torch.zeros_like(x).normal_() * y,
        torch.rand_like(x),
        F.dropout2d(x[None], 0.5),
        torch.randn(3),
    ]


def check_numbers(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x = torch.ones(7, 4, dtype=torch.float64)
    compiled, shard = scidata.compile(drawing, backend="aot_eager"), shard_of(x, spec_of(mesh, x, 0, (5, 2)))
    steps = {}
    for name, function, given in (("compiled", compiled, shard), ("eager", drawing, shard), ("one", drawing, x)):
        torch.manual_seed(7)
        steps[name] = [[getattr(y, "full_tensor", lambda y=y: y)() for y in function(given)] for _ in range(4)]
        steps[name].append([torch.random.get_rng_state()])
    assert scidata.explain(compiled, shard).compiled
    for name in ("eager", "one"):
        torch.testing.assert_close(steps["compiled"], steps[name], rtol=0, atol=0)
    assert not any(torch.equal(a, b) for a, b in zip(steps["one"][2], steps["one"][3], strict=True))


def test_each_step_draws_new_numbers_as_one_process_does():
    run_ranks(check_numbers, 2)


def check_constants(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x, ids, kept = torch.arange(21.0).view(7, 3), torch.tensor([6, 0, 2]), torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    shard, total = shard_of(x, spec_of(mesh, x, 0, (4, 3))), torch.zeros(())

    def function(x):
        return x[kept] * 2, x[ids[1:]], x[kept.flip(0)]

    def writing(x):
        total.add_(1)
        return x * total

    compiled, written = (scidata.compile(each, backend="aot_eager") for each in (function, writing))
    for step in range(9):
        if step == 3:
            kept[1] = True
        if step == 6:
            ids[1] = 5
        for ours, theirs in zip(compiled(shard), function(x), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        torch.testing.assert_close(written(shard).full_tensor(), x * (step + 1))
    assert len(scidata.explain(compiled, shard).compiled) == 1


def test_constants_that_are_read_are_guarded_and_those_written_to_refused():
    run_ranks(check_constants, 2)


def check_otherwise(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x, regions = torch.arange(36.0).view(12, 3).sin().double(), []
    ids = torch.tensor([[0, 1, -1], [-1, 2, 0], [1, -1, 2], [2, 0, 1]]).repeat(3, 1)
    for function in (
        lambda x: F.multilabel_margin_loss(x, ids, reduction="sum"),
        lambda x: F.interpolate(x[None, None], scale_factor=(1.04, 2)),
        lambda x: F.multi_margin_loss(torch.where(x > 0.9, float("nan"), x), ids[:, 0].abs()),
    ):
        assert_like_one_process(thrice(function, regions), [x], [spec_of(mesh, x, 0, (5, 7))])
        assert "torch's compiler" in reason_of(regions)


def test_what_torch_compiles_to_other_values_is_run_eagerly():
    run_ranks(check_otherwise, 2)


def check_range(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x, generator = torch.arange(21.0).view(7, 3), torch.Generator().manual_seed(0)
    shard = shard_of(x, spec_of(mesh, x, 0, (4, 3)))

    def function(x, ids):
        return [torch.scatter_add(x, 0, ids, x), F.cross_entropy(x, ids[:, 0] % 3), x.index_add(0, ids[:, 1], x)]

    compiled = scidata.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        ids = torch.randint(0, 7, (7, 3), generator=generator)
        for ours, theirs in zip(compiled(shard, ids), function(x, ids), strict=True):
            torch.testing.assert_close(getattr(ours, "full_tensor", lambda y=ours: y)(), theirs)
    ids[3, 1] = 7
    with pytest.raises(IndexError, match="scatter_add: an index is out of bounds for dim 0 with size 7"):
        compiled(shard, ids)


def test_indices_are_checked_at_each_step_of_a_graph():
    run_ranks(check_range, 2)

"""Pointwise functions on shards against one process: every name of the table, broadcasting, in-place."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._pointwise import INTEGER, NO_DERIVATIVE, one_and_two_operands

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0), (1, 6)], 3: [(3, 2, 2), (0, 5, 2), (7, 0, 0)]}


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def grid_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))


def uniform(*shape, low=0.1, high=0.9, grad=True):
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).requires_grad_(grad)


def check_table(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], (2, 7, 3), {0: sizes})
        for name, function, count in one_and_two_operands():
            torch.default_generator.manual_seed(1)
            low = 1.1 if name in ("acosh", "arccosh") else 0.1
            inputs = [uniform(2, 7, 3, low=low, high=low + 0.8, grad=name not in NO_DERIVATIVE) for _ in range(count)]
            if name in INTEGER:
                inputs = [torch.randint(0, 5, (2, 7, 3)) for _ in range(count)]
            try:
                out = assert_like_one_process(function, inputs, [spec] * count)
                assert isinstance(out, ShardTensor)
                assert out.spec == spec
                if count == 2 and not name.startswith("__") and sizes == LAYOUTS[num_ranks][0]:
                    assert_like_one_process(function, inputs, [spec, None])
                    assert_like_one_process(function, inputs, [None, spec])
            except Exception as error:
                raise AssertionError(f"{name} ({function}) at {sizes}") from error


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_unary_and_binary_name(num_ranks):
    run_ranks(check_table, num_ranks)


def check_broadcasting(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    torch.manual_seed(2)
    shapes = [(2, 7, 3), (7, 3), (3,), (7, 1), (1, 3), (1, 1), (2, 1, 1), (2, 7, 1), (), (5, 1, 7, 3)]
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], (2, 7, 3), {0: sizes})
        lower = ShardSpec.even(mesh, [Shard(0)], (7, 3), {0: sizes})
        whole = ShardSpec.even(mesh, [Replicate()], (2, 7, 3))
        x = uniform(2, 7, 3)
        for shape in shapes:
            for function in (torch.add, torch.mul, torch.sub, torch.div, lambda a, b: torch.where(a > b, a, b * 2)):
                assert_like_one_process(function, [x, uniform(*shape)], [spec, None])
                assert_like_one_process(function, [uniform(*shape), x], [None, spec])
        assert_like_one_process(torch.mul, [x, uniform(7, 3)], [spec, lower])
        assert_like_one_process(torch.mul, [uniform(7, 3), x], [lower, spec])
        assert_like_one_process(torch.mul, [uniform(7, 3), uniform(4, 1, 3)], [lower, None])
        assert_like_one_process(torch.mul, [x, uniform(2, 7, 3)], [spec, whole])
        assert type(assert_like_one_process(torch.mul, [x, uniform(2, 7, 3)], [whole, whole])) is torch.Tensor
        assert type(assert_like_one_process(torch.exp, [x], [whole])) is torch.Tensor
        scalars = [lambda a: 2 - a, lambda a: 2 / a, lambda a: 2**a, lambda a: a**2, lambda a: 1 + a * 3, lambda a: -a]
        scalars += [
            lambda a: a.detach() // 0.3,
            lambda a: 3 // a.detach(),
            lambda a: a % 0.3,
            lambda a: 3 % a.detach(),
            abs,
            lambda a: a > 0.5,
        ]
        for function in scalars:
            assert_like_one_process(function, [x], [spec])
        three = [uniform(2, 7, 3), uniform(7, 1), uniform(3)]
        for function in (torch.lerp, torch.addcmul, torch.addcdiv):
            assert_like_one_process(function, [x, *three[:2]], [spec, spec, None])
            assert_like_one_process(function, [x, *three[1:]], [spec, None, None])
        assert_like_one_process(lambda a, b, c: torch.where(a > 0.5, b, c), [x, *three[1:]], [spec, None, None])
        assert_like_one_process(lambda a, b: torch.clamp(a, min=b), [x, uniform(3)], [spec, None])
        assert_like_one_process(lambda a, b: torch.lerp(a, b, 0.25), [x, uniform(7, 3)], [spec, lower])
        single = ShardSpec.even(mesh, [Shard(1)], (2, 1, 3), {0: [0] * (num_ranks - 1) + [1]})
        for other, shape in [
            (spec, (2, 7, 3)),
            (None, (7, 3)),
            (lower, (7, 3)),
            (None, (4, 2, 1, 1)),
            (single, (2, 1, 3)),
        ]:
            assert_like_one_process(torch.mul, [uniform(2, 1, 3), uniform(*shape)], [single, other])
            assert_like_one_process(torch.where, [uniform(*shape) > 0.5, uniform(2, 1, 3), x], [other, single, spec])
        mask = torch.rand(2, 7, 3) > 0.5
        assert_like_one_process(lambda a, m: a.masked_fill(m, 3.0), [x, mask], [spec, spec])
        assert_like_one_process(lambda a, m: a.masked_fill(m, 3.0), [x, mask[0]], [spec, None])
        with torch.no_grad():
            assert_like_one_process(torch.mul, [x.detach(), uniform(7, 3, grad=False)], [spec, None])
        with pytest.raises(RuntimeError, match="do not fit"):
            shard_of(x, spec) + torch.zeros(4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_broadcasting_gives_values_and_gradients_of_one_process(num_ranks):
    run_ranks(check_broadcasting, num_ranks)


def in_place_cases(x, y, z):
    x = x * 1.0  # a leaf that requires grad cannot be written to
    x += y
    x.mul_(z).add_(y, alpha=2)
    x -= 0.5
    x /= y
    x.clamp_(-3, 3).abs_()
    x[:, :, 1] *= 2
    x[..., 0] = 7
    x.masked_fill_(y > 0.5, 0.25)
    torch.sigmoid_(x)
    y = x * 2
    F.relu(y, inplace=True)
    return x, y


def check_in_place(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    torch.manual_seed(3)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], (2, 7, 3), {0: sizes})
        for grad in (False, True):
            inputs = [uniform(2, 7, 3, grad=grad), uniform(2, 7, 3, grad=grad), uniform(7, 1, grad=grad)]
            assert_like_one_process(in_place_cases, inputs, [spec, spec, None])
        x = shard_of(inputs[0], spec)
        same = x
        x += 1
        assert same is x
        x.copy_(torch.zeros(3, dtype=torch.float64)).fill_(2).zero_()
        assert not x.full_tensor().any()
        plain = torch.zeros(2, 7, 3, dtype=torch.float64)
        plain += x + 1
        assert torch.equal(plain, torch.ones(2, 7, 3, dtype=torch.float64))
        with pytest.raises(UnsupportedShardOp, match="another layout"):
            x.add_(torch.zeros(5, 2, 7, 3))
        with pytest.raises(RuntimeError, match="derivative"):
            torch.exp(shard_of(inputs[0], spec).requires_grad_(), out=plain)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.exp(x, out=x.long())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_in_place(num_ranks):
    run_ranks(check_in_place, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = grid_mesh()
    torch.manual_seed(4)
    x = uniform(2, 7, 5)
    for rows, columns in [((4, 3), (2, 3)), ((7, 0), (1, 4)), ((6, 1), (0, 5))]:
        sizes = {"h": rows, "w": columns}
        spec = ShardSpec.even(mesh, [Shard(1), Shard(2)], (2, 7, 5), sizes)
        only_rows = ShardSpec.even(mesh, [Shard(1), Replicate()], (2, 7, 5), {"h": rows})
        only_columns = ShardSpec.even(mesh, [Replicate(), Shard(2)], (2, 7, 5), {"w": columns})
        for shape in [(2, 7, 5), (7, 5), (7, 1), (5,), (1, 5), (), (2, 1, 1)]:
            assert_like_one_process(torch.mul, [x, uniform(*shape)], [spec, None])
            assert_like_one_process(torch.div, [uniform(*shape), x], [None, only_rows])
        for a in (spec, only_rows, only_columns):
            for b in (spec, only_rows, only_columns):
                assert_like_one_process(torch.mul, [x, uniform(2, 7, 5)], [a, b])
        turned = ShardSpec.even(mesh, [Shard(2), Shard(1)], (2, 7, 5), {"w": rows, "h": columns})
        half = ShardSpec.even(mesh, [Replicate(), Shard(1)], (2, 7, 5), {"w": rows})
        for a, b in ((spec, turned), (turned, only_rows), (only_rows, half), (half, spec), (half, only_columns)):
            found = assert_like_one_process(torch.mul, [x, uniform(2, 7, 5)], [a, b])
            assert found.placements[0] == a.placements[0] or isinstance(a.placements[0], Replicate), (
                "of equals, the first"
            )


def test_two_axes_shard_two_dims():
    run_ranks(check_two_axes, 4)


def check_refused(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x = torch.rand(6, 6)
    one, other = (ShardSpec.even(mesh, [Shard(0)], (6, 6), {0: sizes}) for sizes in ((4, 2), (3, 3)))
    columns = ShardSpec.even(mesh, [Shard(1)], (6, 6))
    a = shard_of(x, one)
    for layout in (other, columns):
        assert_like_one_process(torch.add, [x, x], [one, layout])
        small = ShardSpec.even(
            mesh, [Shard(layout.dims[0])], (1, 6) if layout is columns else (6, 1), {0: layout.sizes_of(0)}
        )
        found = assert_like_one_process(torch.add, [torch.rand(small.global_shape), x], [small, one])
        assert found.spec == one, "the larger stays as it is"
        b = shard_of(x, layout)
        b.add_(a)
        assert b.spec == layout
        assert torch.equal(b.full_tensor(), x + x)
    for function in (
        lambda x: torch.linalg.tensorsolve(x, x),
        lambda x: torch.nonzero_static(x, size=2),
        lambda a: a * x.to_sparse(),
        lambda a: a * x[0].to_sparse(),
    ):
        with pytest.raises(UnsupportedShardOp) as error:
            function(a)
        assert "Remedy" in str(error.value)
        assert "sizes (4, 2)" in str(error.value)


def test_unequal_layouts_and_unknown_functions_raise():
    run_ranks(check_refused, 2)

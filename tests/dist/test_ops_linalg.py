"""Products on shards against one process: rows, columns, batch and the summed dim sharded."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0)], 3: [(3, 2, 2), (0, 5, 2)]}
#: function, shapes, and for each variant the sharded dim (always of extent 7) of each operand, None for a plain one.
CASES = [
    (F.linear, [(2, 7, 3), (5, 3), (5,)], [(1, None, None)]),
    (F.linear, [(2, 7, 3), (5, 3)], [(1, None)]),
    (F.linear, [(2, 7), (5, 7), (5,)], [(1, None, None), (1, 1, None), (None, 1, None)]),
    (F.linear, [(2, 3), (7, 3), (7,)], [(None, 0, None), (None, 0, 0), (None, None, 0)]),
    (F.linear, [(7,), (5, 7), (5,)], [(0, None, None)]),
    (torch.matmul, [(2, 7, 3), (3, 4)], [(1, None)]),
    (torch.matmul, [(7, 3), (3,)], [(0, None)]),
    (torch.matmul, [(7, 3), (2, 3, 4)], [(0, None)]),
    (torch.matmul, [(2, 3, 7), (7, 4)], [(2, None), (2, 0), (None, 0)]),
    (torch.matmul, [(2, 3, 4), (4, 7)], [(None, 1)]),
    (torch.matmul, [(7, 3, 4), (7, 4, 2)], [(0, 0), (0, None), (None, 0)]),
    (torch.matmul, [(7, 3, 4), (4, 2)], [(0, None)]),
    (torch.matmul, [(7, 3, 4), (1, 4, 2)], [(0, None)]),
    (torch.matmul, [(5, 7, 3, 4), (7, 4, 2)], [(1, 0), (1, None)]),
    (torch.matmul, [(7,), (7,)], [(0, 0), (0, None)]),
    (torch.matmul, [(7,), (7, 3)], [(0, 0), (None, 0)]),
    (lambda a, b: a @ b, [(7, 3), (3, 4)], [(0, None)]),
    (lambda a, b: a @ b, [(4, 3), (3, 7)], [(None, 1)]),
    (lambda a, b: a.T @ b, [(7, 3), (7, 4)], [(0, 0), (0, None)]),
    (torch.bmm, [(2, 7, 3), (2, 3, 4)], [(1, None)]),
    (torch.mm, [(7, 3), (3, 4)], [(0, None)]),
    (torch.mv, [(7, 3), (3,)], [(0, None)]),
    (torch.outer, [(7,), (4,)], [(0, None)]),
    (lambda a, b: torch.einsum("bnc,dc->bnd", a, b), [(2, 7, 3), (4, 3)], [(1, None)]),
    (lambda a, b: torch.einsum("bnc,bnd->bcd", a, b), [(2, 7, 3), (2, 7, 4)], [(1, 1), (1, None)]),
    (lambda a, b: torch.einsum("nc, d -> cd", a, b), [(7, 3), (4,)], [(0, None)]),
    (lambda a, b, c: torch.einsum("nc,n,c", a, b, c), [(7, 3), (7,), (3,)], [(0, None, None), (0, 0, None)]),
    (lambda a, b: (a @ b.mT).softmax(-1) @ b, [(7, 2, 3), (7, 5, 3)], [(0, 0)]),
]


def check_products(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for sizes in LAYOUTS[num_ranks]:
        for i, (function, shapes, variants) in enumerate(CASES):
            torch.default_generator.manual_seed(11)
            inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
            for dims in variants:
                specs = [
                    None if d is None else ShardSpec.even(mesh, [Shard(d)], s, {0: sizes})
                    for d, s in zip(dims, shapes, strict=True)
                ]
                try:
                    assert_like_one_process(function, inputs, specs)
                except Exception as error:
                    raise AssertionError(f"case {i}, sharded dims {dims}, sizes {sizes}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_products(num_ranks):
    run_ranks(check_products, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(12)
    x, weight, bias = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in [(7, 2, 5), (4, 5), (4,)])
    for rows, last in [((4, 3), (2, 3)), ((7, 0), (0, 5))]:
        both = ShardSpec.even(mesh, [Shard(0), Shard(2)], x.shape, {"h": rows, "w": last})
        assert_like_one_process(F.linear, [x, weight, bias], [both, None, None])
        columns = ShardSpec.even(mesh, [Replicate(), Shard(1)], weight.shape, {"w": last})
        assert_like_one_process(F.linear, [x, weight, bias], [both, columns, None])
        tensor_parallel = ShardSpec.even(mesh, [Replicate(), Shard(0)], weight.shape, {"w": (1, 3)})
        only = ShardSpec.even(mesh, [Shard(0), Replicate()], x.shape, {"h": rows})
        assert_like_one_process(F.linear, [x, weight, bias], [only, tensor_parallel, None])
        assert_like_one_process(lambda a, b: torch.einsum("nsk,mk->sm", a, b), [x, weight], [both, None])


def test_two_axes():
    run_ranks(check_two_axes, 4)


#: function and shapes, extents 6 and 1, of products of which any dims of any operands may be sharded.
ANY = [
    (torch.matmul, [(6, 6), (6, 6)]),
    (torch.bmm, [(6, 6, 6), (6, 6, 6)]),
    (torch.matmul, [(6, 6, 6), (1, 6, 6)]),
    (torch.mv, [(6, 6), (6,)]),
    (torch.outer, [(6,), (6,)]),
    (F.linear, [(6, 6, 6), (6, 6), (6,)]),
    (F.bilinear, [(6, 6), (6, 6), (6, 6, 6), (6,)]),
    (torch.addmm, [(1, 6), (6, 6), (6, 6)]),
    (torch.baddbmm, [(6, 6, 1), (6, 6, 6), (6, 6, 6)]),
    (lambda a, b: torch.einsum("bic,bjc->bij", a, b), [(6, 6, 6), (6, 6, 6)]),
    (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), [(6, 6), (6, 6), (6, 6)]),
]


def check_any_dims(rank, num_ranks, grid):
    shape, names = ((2, 2), ("h", "w")) if grid else ((num_ranks,), ("domain",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    layouts = [(4, 2), (1, 5), (6, 0)] if shape[0] == 2 else [(3, 1, 2), (0, 5, 1), (6, 0, 0)]
    draw = random.Random(num_ranks)

    def spec_of(shape):
        dims = [d for d, n in enumerate(shape) if n > 1 or draw.random() < 0.5]
        draw.shuffle(dims)
        chosen = [d if draw.random() < 0.8 else None for d in [*dims, None][: len(names)]]
        chosen += [None] * (len(names) - len(chosen))
        sizes = {}
        for axis, d in enumerate(chosen):
            if d is not None:
                whole = draw.choice(layouts)
                sizes[axis] = whole if shape[d] == 6 else tuple(int(i == 1) for i in range(len(whole)))
        if not sizes:
            return None
        return ShardSpec.even(mesh, [Replicate() if d is None else Shard(d) for d in chosen], shape, sizes)

    for function, shapes in ANY:
        inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        for _ in range(12):
            specs = [spec_of(s) for s in shapes]
            if any(specs):
                try:
                    assert_like_one_process(function, inputs, specs)
                except Exception as error:
                    raise AssertionError(f"{function} at {[str(s) for s in specs]}") from error


@pytest.mark.slow_for("4-True")
@pytest.mark.parametrize(("num_ranks", "grid"), [(2, False), (3, False), (4, True)])
def test_any_dims_of_any_operand(num_ranks, grid):
    run_ranks(check_any_dims, num_ranks, grid)


def check_what_is_kept(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    a, b = torch.randn(6, 5), torch.randn(5, 2)
    rows = ShardSpec.even(mesh, [Shard(0)], (6, 5), {0: (4, 2)})
    summed = ShardSpec.even(mesh, [Shard(0)], (5, 2), {0: (1, 4)})
    result = shard_of(a, rows) @ shard_of(b, summed)
    assert result.placements == (Shard(0),)
    assert result.spec.sizes == ((4, 2),)


def test_the_result_keeps_its_rows():
    run_ranks(check_what_is_kept, 2)


def check_refused(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    rows = ShardSpec.even(mesh, [Shard(0)], (6, 6), {0: (4, 2)})
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        torch.linalg.tensorsolve(shard_of(x, rows), y)
    with pytest.raises(RuntimeError, match="do not fit"):
        shard_of(x, rows) @ torch.zeros(5, 6)


def test_what_has_no_rule_raises():
    run_ranks(check_refused, 2)

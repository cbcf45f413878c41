"""Neighborhood attention on shards: windows, values and gradients as of one process; NATTEN itself where installed."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.shard.ops.neighbourhoods import Kernel, rows_of
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.models.neighbourhoods import attended, neighbourhood


def test_a_part_has_the_windows_of_the_whole():
    for kernel, stride, dilation, extra, is_causal in itertools.product(
        (1, 2, 3, 4, 7), (1, 2, 3), (1, 2, 3), (0, 1, 5), (False, True)
    ):
        if stride > kernel:
            continue
        extent, how = kernel * dilation + extra, (kernel, stride, dilation, is_causal)
        for start, stop in itertools.combinations(range(extent + 1), 2):
            begin, end = rows_of(start, stop, extent, Kernel(*how))
            assert 0 <= begin <= start < stop <= end <= extent
            for row in range(start, stop):
                whole = [j for j in range(extent) if attended(row, j, extent, *how)]
                part = [begin + j for j in range(end - begin) if attended(row - begin, j, end - begin, *how)]
                assert part == whole, (start, stop, row, how)


ROW, IMAGE, BOX = (2, 13, 4, 3), (1, 13, 6, 2, 3), (1, 4, 13, 3, 1, 2)
LAYOUTS = {1: [(13,)], 2: [(7, 6), (13, 0)], 3: [(5, 3, 5), (0, 12, 1), (1, 1, 11)]}
#: shape of queries, sharded dims of queries, keys and values, options
CASES = [
    (ROW, (1, 1, 1), {"kernel_size": 3}),
    (ROW, (1, 1, 1), {"kernel_size": 4, "dilation": 3}),
    (ROW, (1, None, 1), {"kernel_size": 5, "stride": 3, "is_causal": True, "scale": 0.3}),
    (ROW, (None, 1, 1), {"kernel_size": 13}),
    (ROW, (1, 1, 1), {"kernel_size": 6, "stride": 2, "dilation": 2, "return_lse": True}),
    (IMAGE, (1, 1, 1), {"kernel_size": 3, "dilation": 2}),
    (IMAGE, (1, 1, 1), {"kernel_size": (7, 2), "stride": (1, 2), "is_causal": (True, False), "return_lse": True}),
    ((13, 5, 4, 2, 3), (0, 0, 0), {"kernel_size": 3}),
    ((1, 5, 4, 13, 3), (3, 3, 3), {"kernel_size": 3}),
    ((1, 5, 4, 2, 13), (4, 4, None), {"kernel_size": 3}),
    (BOX, (2, 2, 1), {"kernel_size": (3, 5, 2), "dilation": (1, 2, 1)}),
]


def check_cases(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for i, (shape, dims, how) in enumerate(CASES):
        torch.default_generator.manual_seed(13)
        inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(3)]
        inputs[2] = torch.randn(*shape[:-1], shape[-1] + (dims[2] == 1), dtype=torch.float64).requires_grad_()
        for layout in LAYOUTS[num_ranks]:
            sizes = [layout if d is None or shape[d] == 13 else None for d in dims]
            specs = [
                None if d is None else ShardSpec.even(mesh, [Shard(d)], x.shape, None if s is None else {0: s})
                for d, x, s in zip(dims, inputs, sizes, strict=True)
            ]
            try:
                assert_like_one_process(lambda q, k, v, how=how: neighbourhood(q, k, v, **how), inputs, specs)
            except Exception as error:
                raise AssertionError(f"case {i} at {layout}") from error

    def with_more(q, k, v, keys, values):  # keys that all attend to, and two heads of queries for each of keys
        return neighbourhood(q, k[..., :2, :], v[..., :2, :], 3, additional_keys=keys, additional_values=values)

    inputs = [torch.randn(n, dtype=torch.float64).requires_grad_() for n in (ROW, ROW, ROW, (2, 5, 2, 3), (2, 5, 2, 3))]
    for layout in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], ROW, {0: layout})
        assert_like_one_process(with_more, inputs, [spec, spec, spec, None, None])
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):  # of gradients of large keys
        rows = [torch.randn(ROW).add(8).to(dtype).requires_grad_() for _ in range(3)]
        for layout in LAYOUTS[num_ranks]:
            specs = [ShardSpec.even(mesh, [Shard(1)], ROW, {0: layout})] * 3
            assert_like_one_process(lambda *x: neighbourhood(*x, 5), rows, specs, rtol=near, atol=near)
    x = shard_of(torch.randn(ROW), ShardSpec.even(mesh, [Shard(1)], ROW, {0: LAYOUTS[num_ranks][0]}))
    with pytest.raises(ValueError, match="larger than dim 1 of 13 rows"):
        neighbourhood(x, x, x, 7, dilation=2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check_cases, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.default_generator.manual_seed(14)
    q, k, v = (torch.randn(1, 9, 7, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(3))
    both = ShardSpec.even(mesh, [Shard(1), Shard(2)], q.shape, {0: (7, 2), 1: (1, 6)})
    empty = ShardSpec.even(mesh, [Shard(2), Shard(1)], q.shape, {0: (7, 0), 1: (3, 6)})
    one = ShardSpec.even(mesh, [Replicate(), Shard(1)], q.shape)
    for specs in ((both,) * 3, (empty,) * 3, (both, one, empty), (one, one, None)):
        for how in ({"kernel_size": 3}, {"kernel_size": (4, 3), "dilation": (2, 1), "stride": (1, 2)}):
            assert_like_one_process(lambda q, k, v, how=how: neighbourhood(q, k, v, **how), [q, k, v], specs)


def test_on_a_grid_of_ranks():
    run_ranks(check_two_axes, 4)


def check_natten(rank, num_ranks):
    import natten

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.default_generator.manual_seed(15)
    for layout in LAYOUTS[num_ranks][1:2]:  # of each shape a kernel is compiled
        for shape, how in (
            ((1, 13, 2, 16), {"stride": 2}),
            ((1, 13, 6, 2, 16), {"dilation": 2}),
            ((1, 13, 4, 3, 2, 16), {}),
        ):
            q, k, v = (torch.randn(shape) for _ in range(3))
            spec, na = ShardSpec.even(mesh, [Shard(1)], shape, {0: layout}), getattr(natten, f"na{len(shape) - 3}d")
            assert_like_one_process(
                lambda *x, na=na, how=how: na(*x, 3, **how), [q, k, v], [spec] * 3, rtol=1e-5, atol=1e-6
            )
        model, x = natten.NeighborhoodAttention2D(32, 2, kernel_size=3), torch.randn(1, 13, 6, 32)
        with torch.no_grad():
            spec = ShardSpec.even(mesh, [Shard(1)], x.shape, {0: layout})
            assert_like_one_process(model, [x], [spec], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_natten_itself(num_ranks):
    pytest.importorskip("natten")
    run_ranks(check_natten, num_ranks, timeout=150)

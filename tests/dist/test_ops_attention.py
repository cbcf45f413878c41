"""Attention on shards against one process: sequence, heads and batch sharded, masks, causal."""

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
ATTENTION = F.scaled_dot_product_attention


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def check_attention(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))

    def split(dim, shape, sizes):
        return ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})

    for sizes in LAYOUTS[num_ranks]:
        torch.manual_seed(15)
        query, key, value = normal(2, 3, 7, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 5)
        rows = [split(2, x.shape, sizes) for x in (query, key, value)]
        assert_like_one_process(ATTENTION, [query, key, value], rows)
        assert_like_one_process(ATTENTION, [query, key, value], [rows[0], None, None])
        assert_like_one_process(ATTENTION, [query, key, value], [rows[0], rows[1], None])
        assert_like_one_process(ATTENTION, [query, key, value], [None, rows[1], rows[2]])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), [query, key, value], rows)
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, scale=0.3), [query, key, value], rows)
        bias = normal(7, 7)
        with_mask = lambda q, k, v, m: ATTENTION(q, k, v, attn_mask=m)  # noqa: E731
        assert_like_one_process(with_mask, [query, key, value, bias], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, normal(2, 1, 7, 7)], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, normal(1, 7)], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, bias], [*rows, split(0, (7, 7), sizes)])
        band = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 3
        assert_like_one_process(with_mask, [query, key, value, band], [*rows, None])
        # another sequence, split differently
        long = [normal(2, 3, 14, 4), normal(2, 3, 14, 5)]
        twice = [split(2, x.shape, [2 * n for n in reversed(sizes)]) for x in long]
        assert_like_one_process(ATTENTION, [query, *long], [rows[0], *twice])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), [query, *long], [rows[0], *twice])
        # heads, then batch
        for shape, dim in [((2, 7, 3, 4), 1), ((7, 2, 3, 4), 0)]:
            three = [normal(*shape) for _ in range(3)]
            assert_like_one_process(ATTENTION, three, [split(dim, shape, sizes)] * 3)
            assert_like_one_process(ATTENTION, three, [split(dim, shape, sizes), None, None])
            assert_like_one_process(
                lambda q, k, v: ATTENTION(q, k, v, is_causal=True), three, [split(dim, shape, sizes)] * 3
            )
        grouped = [normal(2, 4, 7, 4), normal(2, 2, 7, 4), normal(2, 2, 7, 4)]
        specs = [split(2, x.shape, sizes) for x in grouped]
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, enable_gqa=True), grouped, specs)
        flat = [normal(7, 4) for _ in range(3)]
        assert_like_one_process(
            lambda q, k, v: ATTENTION(q[None], k[None], v[None]), flat, [split(0, (7, 4), sizes)] * 3
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_attention(num_ranks):
    run_ranks(check_attention, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(16)
    three = [normal(2, 4, 7, 3) for _ in range(3)]
    for heads, rows in [((3, 1), (4, 3)), ((2, 2), (0, 7))]:
        spec = ShardSpec.even(mesh, [Shard(1), Shard(2)], (2, 4, 7, 3), {"h": heads, "w": rows})
        only = ShardSpec.even(mesh, [Replicate(), Shard(2)], (2, 4, 7, 3), {"w": rows})
        assert_like_one_process(ATTENTION, three, [spec] * 3)
        assert_like_one_process(ATTENTION, three, [spec, only, None])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), three, [spec] * 3)


def test_heads_and_sequence():
    run_ranks(check_two_axes, 4)


def check_refused(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(2, 4, 4, 4)
    batch, heads, rows, width = (ShardSpec.even(mesh, [Shard(d)], x.shape) for d in range(4))
    other = ShardSpec.even(mesh, [Shard(1)], x.shape, {0: (3, 1)})
    for specs in ([batch, heads, heads], [heads, rows, rows], [width] * 3, [heads, other, other], [rows, heads, heads]):
        with pytest.raises(UnsupportedShardOp, match="Remedy"):
            ATTENTION(*(shard_of(x, spec) for spec in specs))
    three = [shard_of(x, rows) for _ in range(3)]
    for options in ({"dropout_p": 0.1}, {"is_causal": True, "attn_mask": torch.ones(4, 4, dtype=torch.bool)}):
        with pytest.raises(UnsupportedShardOp, match="Remedy"):
            ATTENTION(*three, **options)
    with pytest.raises(UnsupportedShardOp, match="heads"):
        ATTENTION(*(shard_of(x, heads) for _ in range(3)), enable_gqa=True)


def test_layouts_that_do_not_meet_raise():
    run_ranks(check_refused, 2)

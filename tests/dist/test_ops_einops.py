"""What einops makes of ShardTensors: reshapes, permutations, reductions, tiles and sums of products."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process

einops = pytest.importorskip("einops")

#: Functions of a (2, 3, 6, 4) image.
CASES = [
    lambda x: einops.rearrange(x, "b c h w -> b (h w) c"),
    lambda x: einops.rearrange(x, "b c h w -> (b h) (c w)"),
    lambda x: einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2),
    lambda x: einops.rearrange(einops.rearrange(x, "b c h w -> b (h w) c"), "b (h w) c -> w h b c", h=6),
    lambda x: einops.rearrange(x, "b c (h p) w -> b c p h w", h=2),
    lambda x: einops.rearrange(x, "b c h w -> b c h w 1"),
    lambda x: einops.rearrange([x, x * 2], "n b c h w -> b (n c) h w"),
    lambda x: einops.reduce(x, "b c h w -> b c", "mean"),
    lambda x: einops.reduce(x, "b c (h p) (w q) -> b c h w", "max", p=3, q=2),
    lambda x: einops.reduce(x, "b c h w -> b 1 h 1", "sum"),
    lambda x: einops.reduce(x, "b c h w -> ", "min"),
    lambda x: einops.repeat(x, "b c h w -> b c (h p) (w q)", p=2, q=3),
    lambda x: einops.repeat(x, "b c h w -> b n c h w", n=2),
    lambda x: einops.einsum(x, x, "b c h w, b d h w -> b c d"),
    lambda x: einops.einsum(x, x, "b c h w, b c i w -> b h i"),
    lambda x: einops.pack([x.flatten(2), x[..., 0]], "b c *")[0],
]


def check_patterns(rank, num_ranks, grid):
    shape, names = ((2, 2), ("h", "w")) if grid else ((num_ranks,), ("domain",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    rows = {1: [(6,)], 2: [(4, 2), (1, 5), (0, 6)], 3: [(3, 1, 2), (0, 6, 0)]}[shape[0]]
    torch.manual_seed(32)
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64).requires_grad_()
    for sizes in rows:
        placements = [Shard(2), Shard(3) if sizes != (1, 5) else Replicate()] if grid else [Shard(2)]
        given = {0: sizes} | ({1: (1, 3)} if Shard(3) in placements else {})
        for i, function in enumerate(CASES):
            try:
                assert_like_one_process(function, [x], [ShardSpec.even(mesh, placements, x.shape, given)])
            except Exception as error:
                raise AssertionError(f"case {i} at {given}") from error


@pytest.mark.parametrize(("num_ranks", "grid"), [(1, False), (3, False), (4, True)])
def test_patterns(num_ranks, grid):
    run_ranks(check_patterns, num_ranks, grid)

"""Autocast on shards: the dtypes of one process, and values as near as bfloat16 has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process

SIZES = {1: (7,), 2: (1, 6), 3: (3, 0, 4)}
WAYS = ("gather", "ring", "heads")
#: function, shapes, sharded dim (of extent 7) of each operand.
CASES = {
    "linear": (F.linear, [(2, 7, 4), (5, 4), (5,)], (1, None, None)),
    "linear, features": (F.linear, [(3, 7), (5, 7), (5,)], (1, None, None)),
    "matmul": (torch.matmul, [(7, 4), (4, 3)], (0, None)),
    "matmul, summed": (torch.matmul, [(4, 7), (7, 3)], (1, 0)),
    "matmul, both": (torch.matmul, [(7, 4), (4, 7)], (0, 1)),
    "einsum": (lambda a, b: torch.einsum("bnc,bnd->bcd", a, b), [(2, 7, 3), (2, 7, 4)], (1, 1)),
    "baddbmm": (torch.baddbmm, [(2, 7, 3), (2, 7, 4), (2, 4, 3)], (1, 1, None)),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), [(1, 2, 7, 5), (3, 2, 3, 3)], (2, None)),
    "conv transposed": (lambda x, w: F.conv_transpose1d(x, w, stride=2), [(1, 2, 7), (2, 3, 2)], (2, None)),
    "softmax": (lambda x: [(x @ x.mT).softmax(-1), x.softmax(1), F.log_softmax(x.bfloat16(), 1)], [(2, 7, 4)], (1,)),
    "norms": (lambda x: [F.layer_norm(x, (4,)), F.rms_norm(x, (4,)), x.bfloat16().norm(dim=1)], [(2, 7, 4)], (1,)),
    "reductions": (lambda x: [x.bfloat16().sum(1), x.bfloat16().mean(), x.cumsum(1), x.prod(1)], [(2, 7, 4)], (1,)),
    "loss": (lambda x, y: F.mse_loss(x @ x.mT, y), [(7, 4), (7, 7)], (0, 0)),
    "cross entropy": (lambda x: F.cross_entropy(x @ x.mT, torch.arange(7)), [(7, 4)], (0,)),
    "mixed": (lambda x, y: (x @ y) + x[:, :3], [(7, 4), (4, 3)], (0, None)),
    "cat": (lambda x, y: torch.cat([x @ y, x], 1), [(7, 4), (4, 3)], (0, None)),
    "attention, dropped nothing": (
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1e-9),
        [(1, 2, 7, 4)],
        (2,),
    ),
}


def near(function, inputs, specs):
    def run(*operands):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*operands)

    assert_like_one_process(run, inputs, specs, rtol=0.05, atol=0.05)


def check_autocast(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))

    def spec_of(shape, dim):
        return None if dim is None else ShardSpec.even(mesh, [Shard(dim)], shape, {0: SIZES[num_ranks]})

    for name, (function, shapes, dims) in CASES.items():
        torch.default_generator.manual_seed(31)
        inputs = [(torch.rand(s) * 0.5).requires_grad_() for s in shapes]
        try:
            near(function, inputs, [spec_of(s, d) for s, d in zip(shapes, dims, strict=True)])
        except Exception as error:
            raise AssertionError(name) from error
    query = (torch.rand(1, 3, 7, 8) * 0.5).requires_grad_()
    for way in WAYS:
        with scidata.attention(way):
            near(lambda q: F.scaled_dot_product_attention(q, q, q), [query], [spec_of(query.shape, 2)])
            near(lambda q: F.scaled_dot_product_attention(q, q.float(), q.float()), [query], [spec_of(query.shape, 2)])
            layer = nn.MultiheadAttention(6, 3, batch_first=True)
            x = (torch.rand(2, 7, 6) * 0.5).requires_grad_()
            for weights in (True, False):
                run = lambda x, layer=layer, w=weights: layer(x, x, x, need_weights=w)  # noqa: E731
                near(run, [x], [spec_of(x.shape, 1)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_autocast(num_ranks):
    run_ranks(check_autocast, num_ranks)

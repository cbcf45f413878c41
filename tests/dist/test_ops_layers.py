"""Layers on shards against one process: normalisation, softmax, patch convolution, dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0)], 3: [(3, 2, 2), (0, 5, 2)]}
#: function, shapes, sharded dim of the first operand, its sizes in units of the layout
CASES = [
    (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(2, 7, 3), (3,), (3,)], 1, 1),
    (lambda x, w, b: F.layer_norm(x, [2, 3], w, bias=b, eps=1e-3), [(7, 2, 3), (2, 3), (2, 3)], 0, 1),
    (lambda x: F.layer_norm(x, normalized_shape=(3,)), [(2, 7, 3)], 1, 1),
    (lambda x, w: F.rms_norm(x, (3,), w), [(2, 7, 3), (3,)], 1, 1),
    (lambda x: F.softmax(x, -1), [(2, 7, 3)], 1, 1),
    (lambda x: x.softmax(dim=0), [(2, 7, 3)], 1, 1),
    (lambda x: torch.log_softmax(x, 2), [(2, 7, 3)], 1, 1),
    (lambda x: F.softmin(x, dim=2), [(2, 7, 3)], 1, 1),
    (lambda x, w, b: F.conv2d(x, w, b, stride=2), [(2, 3, 14, 6), (4, 3, 2, 2), (4,)], 2, 2),
    (lambda x, w, b: F.conv2d(x, w, b, stride=2), [(2, 3, 6, 14), (4, 3, 2, 2), (4,)], 3, 2),
    (lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 1)), [(2, 3, 14, 5), (4, 3, 2, 3)], 2, 2),
    (lambda x, w: F.conv2d(x, w, stride=2), [(3, 14, 6), (4, 3, 2, 2)], 1, 2),
    (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(7, 3, 5, 4), (4, 3, 3, 3), (4,)], 0, 1),
    (lambda x, w, b: F.conv2d(x, w, b, groups=2), [(2, 4, 7, 6), (6, 2, 1, 1), (6,)], 2, 1),
    (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 7, 6), (4, 3, 1, 3)], 2, 1),
    (lambda x, w: F.conv1d(x, w, stride=3), [(2, 3, 21), (4, 3, 3)], 2, 3),
    (lambda x, w: F.conv3d(x, w, stride=(2, 1, 1), padding=(0, 1, 0)), [(1, 2, 14, 3, 4), (3, 2, 2, 3, 2)], 2, 2),
    (lambda x: F.dropout(x, 0.5, training=False), [(2, 7, 3)], 1, 1),
    (lambda x: F.dropout(x, 0.0), [(2, 7, 3)], 1, 1),
    (lambda x: torch.dropout(x, 0.5, False), [(2, 7, 3)], 1, 1),
]


def check_layers(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for layout in LAYOUTS[num_ranks]:
        for i, (function, shapes, dim, unit) in enumerate(CASES):
            torch.default_generator.manual_seed(13)
            inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
            spec = ShardSpec.even(mesh, [Shard(dim)], shapes[0], {0: [unit * n for n in layout]})
            try:
                assert_like_one_process(function, inputs, [spec, *[None] * (len(shapes) - 1)])
            except Exception as error:
                raise AssertionError(f"case {i} at {layout}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers(num_ranks):
    run_ranks(check_layers, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(14)
    inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in [(2, 3, 14, 6), (4, 3, 2, 2), (4,)]]
    for rows, columns in [((8, 6), (4, 2)), ((14, 0), (0, 6))]:
        both = ShardSpec.even(mesh, [Shard(2), Shard(3)], (2, 3, 14, 6), {"h": rows, "w": columns})
        mixed = ShardSpec.even(mesh, [Replicate(), Shard(2)], (2, 3, 14, 6), {"w": rows})
        for spec in (both, mixed):
            assert_like_one_process(lambda x, w, b: F.conv2d(x, w, b, stride=2), inputs, [spec, None, None])
            assert_like_one_process(lambda x, w, b: F.softmax(x, 1) * b[0], inputs, [spec, None, None])


def test_two_axes():
    run_ranks(check_two_axes, 4)

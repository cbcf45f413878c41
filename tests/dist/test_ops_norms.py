"""Normalisation and embedding on shards against one process, with running statistics."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._layers import COLUMNS, LAYOUTS, ROWS, Spy, check_cases, grid_mesh, mesh_of, random

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
IMAGE = (2, 4, ROWS, COLUMNS)

VOLUME = (1, 4, 3, ROWS, COLUMNS)


def named(function, *names, **options):
    return lambda x, *p: function(x, **dict(zip(names, p, strict=True)), **options)


CASES = {
    "batch": (
        named(F.batch_norm, "weight", "bias", running_mean=None, running_var=None, training=True),
        [IMAGE, (4,), (4,)],
        2,
    ),
    "batch of rows": (lambda x: F.batch_norm(x, None, None, training=True), [(ROWS, 4)], 0),
    "batch, 3d": (lambda x: F.batch_norm(x, None, None, training=True), [VOLUME], 3),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), [IMAGE, (4,), (4,)], 2),
    "group, batch": (lambda x, w, b: F.group_norm(x, 2, w, b), [(ROWS, 4, 3), (4,), (4,)], 0),
    "group of all": (lambda x: F.group_norm(x, 1), [VOLUME], 3),
    "instance": (named(F.instance_norm, "weight", "bias"), [IMAGE, (4,), (4,)], 2),
    "instance, batch": (named(F.instance_norm, "weight", "bias"), [(ROWS, 4, 3), (4,), (4,)], 0),
    "layer": (
        named(F.layer_norm, "weight", "bias", normalized_shape=(COLUMNS,)),
        [(2, ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)],
        1,
    ),
    "layer, sharded": (
        named(F.layer_norm, "weight", "bias", normalized_shape=IMAGE[1:]),
        [IMAGE, IMAGE[1:], IMAGE[1:]],
        2,
    ),
    "layer, last dim": (
        named(F.layer_norm, "weight", "bias", normalized_shape=(ROWS,)),
        [(2, 3, ROWS), (ROWS,), (ROWS,)],
        2,
    ),
    "layer, eps": (lambda x: F.layer_norm(x, IMAGE[2:], eps=0.1), [IMAGE], 2),
    "rms": (lambda x, w: F.rms_norm(x, (COLUMNS,), w), [(2, ROWS, COLUMNS), (COLUMNS,)], 1),
    "rms, sharded": (lambda x, w: F.rms_norm(x, IMAGE[2:], w, 1e-3), [IMAGE, IMAGE[2:]], 2),
    "rms, no eps": (lambda x: F.rms_norm(x, IMAGE[2:]), [IMAGE], 2),
    "unit vectors": (F.normalize, [IMAGE], 2),
    "unit columns": (lambda x: F.normalize(x, dim=2), [IMAGE], 2),
    "far from zero": (lambda x: F.group_norm(x + 1e4, 2) * 1e-4, [IMAGE], 2),
}


def check_norms(rank, num_ranks):
    check_cases(CASES, num_ranks)


@RANKS
def test_norms(num_ranks):
    run_ranks(check_norms, num_ranks)


def check_default_eps(rank, num_ranks):
    """Values as small as the default ``eps``, which is of the dtype that torch computes in."""
    x = (random(*IMAGE) * 1e-2).detach().bfloat16()
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE, {0: sizes})
        assert_like_one_process(lambda x: F.rms_norm(x, IMAGE[2:]), [x], [spec], rtol=1e-2, atol=0)


@RANKS
def test_the_default_eps_of_half_precision(num_ranks):
    run_ranks(check_default_eps, num_ranks)


def layers():
    yield nn.BatchNorm2d(4), IMAGE
    yield nn.BatchNorm2d(4, momentum=None, affine=False), IMAGE
    yield nn.BatchNorm3d(4), VOLUME
    yield nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE
    yield nn.InstanceNorm3d(4, track_running_stats=True), VOLUME
    yield nn.GroupNorm(2, 4), IMAGE
    yield nn.RMSNorm(COLUMNS), IMAGE
    yield nn.LayerNorm([ROWS, COLUMNS]), IMAGE


def check_running(rank, num_ranks):
    """Two steps of training, then eval: outputs, gradients and buffers."""
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        for (layer, shape), (oracle, _) in zip(layers(), layers(), strict=True):
            layer.double(), oracle.double()
            for step in range(3):
                layer.train(step < 2), oracle.train(step < 2)
                x = random(*shape, seed=step)
                part = shard_of(x, ShardSpec.even(mesh, [Shard(len(shape) - 2)], shape, {0: sizes})).requires_grad_()
                expected, found = oracle(x), layer(part)
                torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
                expected.pow(3).sum().backward()
                found.pow(3).sum().backward()
                torch.testing.assert_close(part.grad.full_tensor(), x.grad, rtol=1e-11, atol=1e-11)
                for ours, theirs in zip(layer.parameters(), oracle.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)
                for ours, theirs in zip(layer.buffers(), oracle.buffers(), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@RANKS
def test_layers_and_their_running_statistics(num_ranks):
    run_ranks(check_running, num_ranks)


def check_batch_statistics(rank, num_ranks):
    """Running statistics of an instance norm are means over a batch that may be sharded, too."""
    mesh = grid_mesh()
    spec = ShardSpec.even(mesh, [Shard(0), Shard(2)], (5, 2, 7, 3), {"h": (5, 0), "w": (1, 6)})
    for training in (True, False):
        ours, theirs = (nn.InstanceNorm2d(2, track_running_stats=True).double().train(training) for _ in range(2))
        x = random(5, 2, 7, 3)
        torch.testing.assert_close(ours(shard_of(x, spec)).full_tensor(), theirs(x.detach()), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=1e-12)


def test_statistics_over_a_sharded_batch():
    run_ranks(check_batch_statistics, 4)


def check_rounds(rank, num_ranks):
    x = shard_of(random(*IMAGE), ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE, {0: (20, 3)})).requires_grad_()
    for layer in (nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4, affine=False), nn.InstanceNorm2d(4)):
        layer.double()
        with Spy() as spy:
            y = layer(x)
            assert spy.counts == {"all_gather": 1}
            y.backward(y.detach())
            assert spy.counts == {"all_gather": 1, "all_reduce": 1}
            layer.eval()(x.detach()) if isinstance(layer, nn.BatchNorm2d) else F.layer_norm(x.detach(), (COLUMNS,))
            assert spy.counts == {"all_gather": 1, "all_reduce": 1}


def test_one_round_each_way():
    run_ranks(check_rounds, 2)


def check_half(rank, num_ranks):
    """Statistics of 16-bit tensors are taken in float32, in and out of autocast."""
    full = random(*IMAGE, grad=False).to(torch.bfloat16) + 8
    x = shard_of(full, ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE, {0: (20, 3)}))
    for layer in (
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.GroupNorm(2, 4).bfloat16(),
        nn.LayerNorm([ROWS, COLUMNS]).bfloat16(),
    ):
        expected, found = layer(full), layer(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found.full_tensor().float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_half():
    run_ranks(check_half, 2)


def check_embedding(rank, num_ranks):
    ids = torch.randint(0, 5, (2, ROWS), generator=torch.Generator().manual_seed(1))
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh_of(num_ranks), [Shard(1)], ids.shape, {0: sizes})
        for padding in (None, 3, -1):
            run = lambda i, w, p=padding: F.embedding(i, w, padding_idx=p)  # noqa: E731
            assert_like_one_process(run, [ids, random(5, 3)], [spec, None])
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        F.embedding(shard_of(ids, spec), random(5, 3), max_norm=1.0)
    rows = ShardSpec.even(mesh_of(num_ranks), [Shard(0)], (ROWS, 3))
    assert_like_one_process(F.embedding, [ids, random(ROWS, 3)], [None, rows])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_embedding(num_ranks):
    run_ranks(check_embedding, num_ranks)


def check_channels(rank, num_ranks):
    channels = ShardSpec.even(mesh_of(num_ranks), [Shard(1)], IMAGE, {0: (4, 0)})
    for layer in (nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)):
        assert_like_one_process(layer.double(), [random(*IMAGE)], [channels])
    with pytest.raises(ValueError, match="more than 1"):
        F.instance_norm(shard_of(random(2, 4, 1), ShardSpec.even(mesh_of(num_ranks), [Shard(0)], (2, 4, 1))))


def test_sharded_channels():
    run_ranks(check_channels, 2)

"""Pooling on shards against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of
from tests.dist._layers import COLUMNS, ROWS, Spy, check_cases, mesh_of, random

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
IMAGE = (2, 4, ROWS, COLUMNS)

VOLUME = (1, 2, 4, ROWS, COLUMNS)


def ties(x):
    """Values of which many are equal: of these the first has the gradient."""
    return x.mul(2).round()


def there_and_back(pool, unpool, *how, **options):
    """Pool, and put the maxima back, as the way up of a SegNet does."""

    def run(x):
        pooled, indices = pool(x, *how, return_indices=True)
        return pooled, indices, unpool(pooled.sin(), indices, *how, **options)

    return run


CASES = {
    "max": (lambda x: F.max_pool2d(x, 2), [IMAGE], 2),
    "max, ceil, padding": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), [IMAGE], 2),
    "max, dilation": (lambda x: F.max_pool2d(x, 3, stride=1, dilation=(4, 2)), [IMAGE], 2),
    "max, overlapping": (lambda x: F.max_pool2d(x, (9, 3), (1, 2), (4, 1)), [IMAGE], 2),
    "max, ties": (lambda x: F.max_pool2d(ties(x), 3, 2), [IMAGE], 2),
    "max, indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [IMAGE], 2),
    "max, unbatched": (lambda x: F.max_pool2d(x, 2), [(4, ROWS, COLUMNS)], 1),
    "max, channels": (lambda x: F.max_pool2d(x, 2), [(2, ROWS, 4, 5)], 1),
    "max, batch": (lambda x: F.max_pool2d(x, 2), [(ROWS, 2, 4, 5)], 0),
    "norms": (lambda x: F.lp_pool2d(x, 3.0, (3, 2)), [IMAGE], 2),
    "norms, ceil, stride": (lambda x: F.lp_pool2d(x.abs(), 2.5, 3, 2, ceil_mode=True), [IMAGE], 2),
    "norms 1d": (lambda x: F.lp_pool1d(x, 2, 4, stride=3), [(2, 3, ROWS)], 2),
    "norms 3d, batch": (lambda x: F.lp_pool3d(x, 2.0, 2), [(ROWS, 2, 4, 4, 3)], 0),
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1), [(2, 3, ROWS)], 2),
    "max 1d, indices": (lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), [(2, 3, ROWS)], 2),
    "max 3d": (lambda x: F.max_pool3d(x, 3, 2, 1), [VOLUME], 3),
    "average": (lambda x: F.avg_pool2d(x, 2), [IMAGE], 2),
    "average, padding": (lambda x: F.avg_pool2d(x, 3, 2, 1), [IMAGE], 2),
    "average, ceil, padding": (lambda x: F.avg_pool2d(x, 4, 3, 2, ceil_mode=True), [IMAGE], 2),
    "average, real rows": (lambda x: F.avg_pool2d(x, 4, 3, 2, True, count_include_pad=False), [IMAGE], 2),
    "average, divisor": (lambda x: F.avg_pool2d(x, 3, divisor_override=5), [IMAGE], 2),
    "average, batch": (lambda x: F.avg_pool2d(x, 2), [(ROWS, 2, 4, 5)], 0),
    "average 1d": (lambda x: F.avg_pool1d(x, 4, 2, 1, True, False), [(2, 3, ROWS)], 2),
    "average 3d": (lambda x: F.avg_pool3d(x, 3, 2, 1), [VOLUME], 3),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, (5, 4)), [IMAGE], 2),
    "adaptive average, more rows": (lambda x: F.adaptive_avg_pool2d(x, (30, 9)), [IMAGE], 2),
    "adaptive average to one": (lambda x: F.adaptive_avg_pool2d(x, 1), [IMAGE], 2),
    "adaptive average, one dim": (lambda x: F.adaptive_avg_pool2d(x, (None, 2)), [IMAGE], 2),
    "adaptive average 1d": (lambda x: F.adaptive_avg_pool1d(x, 7), [(2, 3, ROWS)], 2),
    "adaptive average 3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 5, 4)), [VOLUME], 3),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, (5, 4)), [IMAGE], 2),
    "adaptive max, ties": (lambda x: F.adaptive_max_pool2d(ties(x), (5, 4)), [IMAGE], 2),
    "adaptive max to one": (lambda x: F.adaptive_max_pool2d(ties(x), 1), [IMAGE], 2),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 7), [(2, 3, ROWS)], 2),
    "adaptive max, indices": (lambda x: F.adaptive_max_pool2d(ties(x), (5, 4), return_indices=True), [IMAGE], 2),
    "adaptive max, one dim, indices": (lambda x: F.adaptive_max_pool2d(ties(x), (None, 2), True), [IMAGE], 2),
    "adaptive max to one, indices": (lambda x: F.adaptive_max_pool2d(ties(x), 1, return_indices=True), [IMAGE], 2),
    "adaptive max 1d, indices": (lambda x: torch.adaptive_max_pool1d(x, 7), [(2, 3, ROWS)], 2),
    "adaptive max 3d, indices": (lambda x: F.adaptive_max_pool3d(ties(x), (3, 1, 4), True), [VOLUME], 3),
    "unpool, padding": (there_and_back(F.max_pool2d, F.max_unpool2d, 3, 2, 1), [IMAGE], 2),
    "unpool, size": (there_and_back(F.max_pool2d, F.max_unpool2d, 2, output_size=(ROWS, COLUMNS)), [IMAGE], 2),
    "unpool, batch": (there_and_back(F.max_pool2d, F.max_unpool2d, 2, output_size=(4, 5)), [(ROWS, 2, 4, 5)], 0),
    "unpool 1d": (there_and_back(F.max_pool1d, F.max_unpool1d, 2, output_size=(ROWS,)), [(2, 3, ROWS)], 2),
    "unpool 3d": (
        there_and_back(F.max_pool3d, F.max_unpool3d, 2, output_size=(4, ROWS, COLUMNS)),
        [VOLUME],
        3,
    ),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, (3, 5, 4)), [VOLUME], 3),
}


def check_pools(rank, num_ranks):
    check_cases(CASES, num_ranks)


@pytest.mark.slow_for("4")
@RANKS
def test_pools(num_ranks):
    run_ranks(check_pools, num_ranks)


def check_rounds(rank, num_ranks):
    x = shard_of(random(1, 1, 24, 4), ShardSpec.even(mesh_of(num_ranks), [Shard(2)], (1, 1, 24, 4), {0: (18, 6)}))
    with Spy() as spy:
        assert F.max_pool2d(x, 2).spec.sizes == ((9, 3),)
        assert F.avg_pool2d(x, 3).spec.sizes == ((6, 2),)
        F.adaptive_avg_pool2d(x, (4, 2))
        assert spy.counts == {}
        F.max_pool2d(x, 3, 1, 1)
        assert spy.counts == {"all_to_all_single": 1}
        F.adaptive_avg_pool2d(x, 1)
        assert spy.counts == {"all_to_all_single": 1, "all_reduce": 1}


def test_no_round_where_windows_stay_inside():
    run_ranks(check_rounds, 2)


def check_refused(rank, num_ranks):
    x = shard_of(random(*IMAGE), ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE))
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        F.max_unpool2d(pooled, indices.full_tensor(), 2)
    with pytest.raises(UnsupportedShardOp, match="split differently"):
        F.max_unpool2d(pooled, indices.redistribute(placements=[Shard(3)]), 2)
    with pytest.raises(RuntimeError, match="out of range"):
        F.max_unpool2d(pooled, indices + 10**6, 2)
    with pytest.raises(RuntimeError, match="gives"):
        F.max_pool2d(x, (24, 1))


def test_what_is_refused():
    run_ranks(check_refused, 2)

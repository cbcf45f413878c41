"""Interpolation on shards against one process."""

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

MODES = [("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True), ("bicubic", False)]
MODES += [("bicubic", True), ("area", None)]
SIZES = {
    "twice": {"size": (46, 18)},
    "fewer": {"size": (10, 7)},
    "more rows": {"size": (31, COLUMNS)},
    "one row": {"size": (1, 5)},
    "scale 2": {"scale_factor": 2},
    "scales": {"scale_factor": (1.7, 0.6)},
    "ratio": {"scale_factor": 1.7, "recompute_scale_factor": True},
}


def resampled(mode, align, **how):
    return lambda x: F.interpolate(x, mode=mode, align_corners=align, **how)


CASES = {
    f"{mode} {align} {name}": (resampled(mode, align, **how), [IMAGE], 2)
    for mode, align in MODES
    for name, how in SIZES.items()
}
CASES |= {
    # a scale that leaves the extents as they are; torch has a wrong gradient there for bicubic and 1-D nearest
    "nearest, same": (resampled("nearest", None, scale_factor=1.04), [IMAGE], 2),
    "nearest-exact, same": (resampled("nearest-exact", None, scale_factor=1.04), [IMAGE], 2),
    "bilinear, same": (resampled("bilinear", False, scale_factor=1.04), [IMAGE], 2),
    "columns": (resampled("bilinear", False, scale_factor=2), [(2, 4, COLUMNS, ROWS)], 3),
    "batch": (resampled("bilinear", False, scale_factor=2), [(ROWS, 2, 3, 3)], 0),
    "channels": (resampled("nearest", None, scale_factor=2), [(2, ROWS, 3, 3)], 1),
    "linear": (resampled("linear", False, size=31), [(2, 3, ROWS)], 2),
    "trilinear": (resampled("trilinear", True, size=(3, 31, 5)), [(1, 2, 4, ROWS, COLUMNS)], 3),
    "nearest 3d": (resampled("nearest", None, scale_factor=1.7), [(1, 2, 4, ROWS, COLUMNS)], 3),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), [IMAGE], 2),
    "unshuffle, channels": (lambda x: F.pixel_unshuffle(x, 2), [(1, ROWS, 6, 4)], 1),
    "unshuffle": (lambda x: F.pixel_unshuffle(F.interpolate(x, (24, 9)), 3), [IMAGE], 2),
    "there and back": (lambda x: F.pixel_shuffle(F.pixel_unshuffle(F.interpolate(x, (24, 9)), 3), 3), [IMAGE], 2),
    "down and up": (lambda x: F.interpolate(F.avg_pool2d(x, 2), (ROWS, COLUMNS)) + x, [IMAGE], 2),
}


def check_interpolation(rank, num_ranks):
    check_cases(CASES, num_ranks)


@pytest.mark.slow_for("4")
@RANKS
def test_interpolation(num_ranks):
    run_ranks(check_interpolation, num_ranks)


def check_float32(rank, num_ranks):
    """In float32 the places of rows are torch's too, far into a long dim."""
    full = torch.randn(1, 1, 4000, 1, generator=torch.Generator().manual_seed(0))
    x = shard_of(full, ShardSpec.even(mesh_of(num_ranks), [Shard(2)], full.shape, {0: (3900, 100)}))
    for mode, align in MODES[:-1]:
        how = {"mode": mode, "align_corners": align, "size": (7001, 1)}
        found = F.interpolate(x, **how).full_tensor()
        torch.testing.assert_close(found, F.interpolate(full, **how), rtol=0, atol=1e-3 if align is not None else 0)


def test_float32():
    run_ranks(check_float32, 2)


def check_rounds(rank, num_ranks):
    x = shard_of(random(*IMAGE), ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE, {0: (20, 3)}))
    with Spy() as spy:
        y = F.interpolate(x, scale_factor=2)
        assert spy.counts == {}
        assert y.spec.sizes == ((40, 6),)
        F.interpolate(x, scale_factor=2, mode="bicubic")
        assert spy.counts == {"all_to_all_single": 1}


def test_one_round_and_none_for_copies():
    run_ranks(check_rounds, 2)


def check_refused(rank, num_ranks):
    x = shard_of(random(*IMAGE), ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE))
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        F.interpolate(x.byte(), size=(5, 5), mode="bilinear")
    with pytest.raises(ValueError, match="should be defined"):
        F.interpolate(x)


def test_what_is_refused():
    run_ranks(check_refused, 2)

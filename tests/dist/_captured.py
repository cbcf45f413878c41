"""Shared by tests of compiled steps: functions that are run eagerly, captured, and run as graphs."""

import torch

from scidata.shard import ShardTensor
from scidata.shard.compile import Options, Region
from scidata.shard.torch_internals import tree_leaves


def thrice(function, regions, backend="aot_eager"):
    """Return a function that runs on shards eagerly, is captured, and is run as a graph, whose result it returns.

    Each time with the same random numbers: the generator has to stand where an eager run leaves it. ``regions`` gets
    the region.
    """
    options = Options(backend=backend, mode=None, options=None, fullgraph=False, limit=8)

    def run(*args):
        if not any(isinstance(x, ShardTensor) for x in tree_leaves(args)):
            return function(*args)
        region = Region(function, None, "function", options)
        regions.append(region)
        start, ends = torch.random.get_rng_state(), []
        for _ in range(3):
            torch.random.set_rng_state(start)
            result = region(*args)
            ends.append(torch.random.get_rng_state())
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2]), "it has drawn other numbers than an eager run"
        return result

    return run


def reason_of(regions):
    """Return why the latest region is run eagerly, "" where it is not."""
    return "" if any(regions[-1].captured.values()) else regions[-1].reason or "not captured"

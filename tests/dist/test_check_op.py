"""``scidata.testing.check_op``: right rules pass, wrong ones are told with their layout, refused layouts are listed."""

import pytest
import torch
from torch.distributed.tensor import Shard

import scidata
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.op_table import HANDLERS
from scidata.testing import RankError, check_op, run_ranks
from scidata.testing.oracle import layouts_of


def own(x):
    if own not in HANDLERS:  # in ranks alone: the table of this process is looked at by other tests
        scidata.register_op(own)(own_on_shards)
    return torch.overrides.handle_torch_function(own, (x,), x) if type(x) is not torch.Tensor else x - x.amax(0)


def own_on_shards(func, types, args, kwargs):  # wrong along dim 0: the maximum is of the part
    return scidata.ShardTensor(func(args[0].to_local()), args[0].spec)


def refusing(x):
    if isinstance(x, scidata.ShardTensor) and Shard(1) in x.placements:
        raise UnsupportedShardOp("refusing: not along dim 1")
    return x.cumsum(0)


def weighted(x, weight, power):
    return x @ weight**power


def test_layouts_are_uneven_and_leave_each_place_empty():
    assert layouts_of(7, 3) == [(3, 2, 2), (5, 1, 1), (1, 5, 1), (0, 4, 3), (4, 0, 3), (4, 3, 0)]
    assert layouts_of(7, 1) == [(7,)]
    assert layouts_of(1, 3) == [(1, 0, 0), (0, 1, 0)]
    assert all(sum(sizes) == n for n in range(5) for p in (1, 2, 3, 4) for sizes in layouts_of(n, p))


def test_a_wrong_rule_is_told_with_its_layout():
    with pytest.raises(RankError, match=r"own on 2 ranks, torch.float64: Shard\(0\) on 'domain' sizes \(4, 3\)"):
        check_op(own, torch.randn(7, 3), num_ranks=[2])
    assert check_op(own, torch.randn(7, 3), num_ranks=[2], dims=[[1]]) == []


def total(z):
    return z.sum(0), z.is_complex()


def forgets(x):
    x.sum()


def test_complex_inputs_have_the_dtype_that_goes_with_the_tolerance():
    assert check_op(total, torch.randn(5, 3, dtype=torch.complex64), num_ranks=[2]) == []


def test_a_function_that_returns_nothing_is_an_error():
    with pytest.raises(RankError, match="nothing that could be compared"):
        check_op(forgets, torch.ones(2), num_ranks=[1])
    with pytest.raises(ConfigError, match="num_ranks=2: expected several"):
        check_op(forgets, torch.ones(2), num_ranks=2)


def test_refused_layouts_are_listed():
    refused = check_op(refusing, torch.randn(7, 3), num_ranks=[2], dtypes=[torch.float32])
    assert len(refused) == len(layouts_of(3, 2))
    assert all("2 ranks, torch.float32: Shard(1)" in text and "not along dim 1" in text for text in refused)


def check_on_these(rank, num_ranks):
    """With ranks there already: no others are started. Two tensors and a number."""
    return check_op(weighted, torch.rand(5, 4), torch.rand(4, 3), 2, dims=[(0, None), (1, 0)])


def test_ranks_that_are_there_run():
    assert run_ranks(check_on_these, 2) == [[], []]


@pytest.mark.parametrize(
    ("inputs", "dims", "message"),
    [
        ((3,), None, "at least one"),
        ((torch.ones(2, 3),), [[2]], r"names no dim \(or None\) of each of the 1 tensors: \(2, 3\)"),
        ((torch.ones(2), torch.ones(2)), [[0]], "of each of the 2 tensors"),
        ((torch.ones(2),), [[None]], "names no dim"),
        ((torch.ones(2),), [0], "0 is no sequence"),
    ],
)
def test_what_cannot_be_cut_is_an_error(inputs, dims, message):
    with pytest.raises(ConfigError, match=message):
        check_op(weighted, *inputs, dims=dims)
    with pytest.raises(TypeError, match="top of a module"):
        check_op(lambda x: x, torch.ones(2))

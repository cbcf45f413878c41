"""Two operands of one function on a 2 x 2 mesh, split over other dims and axes, unevenly and with empty ranks."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process
from tests.dist._conformance import PLACES, ROWS

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
#: Layouts of the first and the second operand; the first is written to.
PAIRS = (
    *(((R, R), (S0, S1)), ((S0, R), (S0, S1)), ((R, S1), (S0, R)), ((S1, R), (S1, S0))),
    *(((S0, S1), (S1, S0)), ((S2, S1), (S0, R)), ((S0, R), (R, R)), ((S2, R), (S1, S2))),
)
INDEX, THIRDS = torch.tensor([1, 1, 3]), PLACES // 3


def writes(write):
    def function(x, y):
        x = x * 1.0
        write(x, y)
        return x

    return function


def numbers(y):
    return (y.detach() * 3).long().clamp(0, 8)


def plain(*shape):
    return torch.ones(shape, dtype=torch.float64)


FUNCTIONS = {
    "add_": writes(lambda x, y: x.add_(y).mul_(y)),
    "iadd": writes(lambda x, y: x.__iadd__(y)),
    "copy_": writes(lambda x, y: x.copy_(y)),
    "masked_fill_": writes(lambda x, y: x.masked_fill_(y.detach() > 0, 2.0)),
    "addcmul_": writes(lambda x, y: x.addcmul_(y, y.sin()).lerp_(y, 0.3)),
    "add_row": writes(lambda x, y: x.add_(y[:1]).sub_(y[:, :1])),
    "add_to_slice": writes(lambda x, y: x[:, 2].add_(y[:, 1])),
    "cat": lambda x, y: [torch.cat([x, y], d) for d in range(3)],
    "setitem": writes(lambda x, y: x.__setitem__((slice(None), ROWS), y[:, :4])),
    "index_add_": writes(lambda x, y: x.index_add_(0, INDEX, y[:3])),
    "scatter_add_": writes(lambda x, y: x.scatter_add_(1, PLACES, y)),
    "scatter_reduce_": writes(lambda x, y: x.scatter_reduce_(1, THIRDS, y, "mean", include_self=False)),
    "index_copy_": writes(lambda x, y: x.index_copy_(1, torch.tensor([1, 0, 3]), y[:, :3])),
    "index_put_": writes(lambda x, y: x.index_put_((INDEX,), y[:3], accumulate=True)),
    "put_": writes(lambda x, y: x.put_(torch.arange(49), y[0])),
    "masked_scatter_": writes(lambda x, y: x.masked_scatter_(y.detach() > 0, y)),
    "add_to_plain": lambda x, y: [plain(9, 7, 7).index_add(0, torch.arange(7) // 2, x, alpha=2), y * 2],
    "add_columns": lambda x, y: [
        plain(7, 9, 7).index_add(1, torch.arange(7) // 2, x),
        plain(7, 7, 9).index_add_(-1, PLACES[0, 0], x),
        y * 2,
    ],
    "add_in_plain": lambda x, y: [plain(7, 9, 7).scatter_add_(1, PLACES, x), y * 2],
    "sharded_index": lambda x, y: plain(7, 9, 7).scatter_add(1, numbers(x), y),
    "sharded_index_in_place": lambda x, y: plain(9, 7, 7).index_add_(0, numbers(x[:, 0, 0]), y),
    "extreme_in_plain": lambda x, y: plain(7, 9, 7).scatter_reduce(1, numbers(x), y, "amax"),
    "small": lambda x, y: plain(9, 9, 9).scatter_add(1, numbers(x), y),
}


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    for turn, (name, function) in enumerate(FUNCTIONS.items()):
        for i, pair in enumerate(PAIRS):
            if (turn + i) % 3 and name not in ("add_", "cat", "add_to_plain", "add_columns"):
                continue  # a third of the pairs, another one for each function
            torch.default_generator.manual_seed(1)
            inputs = [torch.randn(7, 7, 7, dtype=torch.float64).requires_grad_() for _ in pair]
            sizes = ((4, 3), (0, 7)), ((4, 3), (6, 1))
            specs = [
                ShardSpec.even(mesh, layout, (7, 7, 7), {a: own[a] for a, p in enumerate(layout) if p != R})
                for layout, own in zip(pair, sizes, strict=True)
            ]
            try:
                assert_like_one_process(function, inputs, specs)
            except BaseException as error:
                raise AssertionError(f"{name}: {pair}") from error


def test_operands_of_other_layouts():
    run_ranks(check, 4, timeout=300)

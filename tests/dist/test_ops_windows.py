"""Windows, columns, channels in turns and gates on shards against one process: values, gradients, writes."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(12,)], 2: [(7, 5), (12, 0)], 3: [(5, 3, 4), (0, 11, 1), (1, 1, 10)]}
IMAGE = (2, 4, 12, 5)
#: function, shapes, sharded dim of each tensor (extent 12), None: plain
CASES = [
    (lambda x: [x.unfold(1, 3, 1), x.unfold(1, 5, 4), x.unfold(1, 12, 7), x.unfold(1, 2, 3)], [(2, 12, 3)], [1]),
    (lambda x: [x.unfold(-1, 2, 1), x.unfold(0, 2, 1), torch.unfold_copy(x, 1, 3, 2)], [(2, 12, 3)], [1]),
    (lambda x: [x.unfold(-1, 1, 2), x.unfold(1, 12, 1).unfold(1, 1, 1)], [(3, 12)], [1]),
    (lambda x: x.unfold(0, 4, 2).square().sum(-1), [(12,)], [0]),
    (lambda x: [F.unfold(x, 3), F.unfold(x, (3, 2), padding=(1, 0), stride=(2, 1))], [IMAGE], [2]),
    (lambda x: F.unfold(x, (2, 3), dilation=2, padding=(2, 2), stride=(3, 1)), [IMAGE], [2]),
    (lambda x: F.unfold(x, 3, padding=1), [(2, 4, 5, 12)], [3]),
    (lambda x: F.unfold(x, (4, 4), stride=4), [(3, 8, 12)], [2]),
    (lambda x: F.unfold(x, 2), [(12, 2, 3, 4)], [0]),
    (lambda x: F.unfold(x, 2), [(2, 12, 3, 4)], [1]),
    (lambda x: F.fold(x, (4, 4), (2, 2)), [(2, 12, 9)], [1]),
    (lambda x: F.fold(F.unfold(x, 3, padding=1), (12, 5), 3, padding=1), [IMAGE], [2]),
    (lambda x: F.fold(F.unfold(x, (2, 3), stride=(2, 1)) * 2, (12, 5), (2, 3), stride=(2, 1)), [IMAGE], [2]),
    (lambda x: F.fold(F.unfold(x, 3, dilation=2, padding=2), (5, 12), 3, dilation=2, padding=2), [(2, 4, 5, 12)], [3]),
    (lambda x: F.fold(x, (4, 5), 2), [(2, 8, 12)], [2]),
    (lambda x: F.fold(x, (6, 8), (2, 2), stride=2), [(8, 12)], [1]),
    (lambda x: F.fold(x, (6, 8), (2, 2), stride=2), [(2, 12, 12)], [1]),
    (lambda x: F.fold(x, (4, 3), (2, 2)), [(12, 8, 6)], [0]),
    (lambda x: F.local_response_norm(x, 3), [(2, 12, 4)], [1]),
    (lambda x: F.local_response_norm(x, 2, 1e-2, 0.5, 2.0), [(2, 4, 12)], [2]),
    (lambda x: F.local_response_norm(x, 2), [(12, 4, 3)], [0]),
    (lambda x: [F.channel_shuffle(x, 3), F.native_channel_shuffle(x.detach(), 4)], [(2, 12, 4)], [1]),
    (lambda x: torch.channel_shuffle(x, 2), [IMAGE], [2]),
    (lambda x, w: [F.prelu(x, w), x.prelu(w)], [(2, 12, 3), (12,)], [1, None]),
    (lambda x, w: torch.prelu(x, w), [(2, 12, 3), (12,)], [1, 0]),
    (lambda x, w: F.prelu(x, w), [(12, 4, 3), (4,)], [0, None]),
    (lambda x, w: F.prelu(x, w), [(12, 4, 3), (1,)], [0, None]),
    (lambda x, w: F.prelu(x, w), [(12,), (1,)], [0, None]),
    (lambda x: [F.glu(x, 1), F.glu(x, -1)], [(2, 12, 4)], [1]),
    (lambda x: [F.rrelu(x), torch.rrelu(x, 0.2, 0.4), F.rrelu(x * 2, inplace=True)], [(2, 12)], [1]),
    (lambda x: [F.rrelu(x.T, 0.1, 0.4, True), F.rrelu_(x * 2, 0.1, 0.4, True)], [(2, 12)], [1]),
    (lambda x: [x.as_strided((2, 5, 4), (12, 2, 1)), torch.as_strided(x, (12, 2), (1, 12))], [(2, 12)], [1]),
    (lambda x: x.as_strided((3, 12), (0, 2)), [(12, 2)], [0]),
    (lambda x: [F.gumbel_softmax(x, 0.5), F.gumbel_softmax(x, hard=True, dim=0)], [(3, 12)], [1]),
]


def check_cases(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for i, (function, shapes, dims) in enumerate(CASES):
        torch.default_generator.manual_seed(13)
        inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        for layout in LAYOUTS[num_ranks]:
            specs = [
                None if d is None else ShardSpec.even(mesh, [Shard(d)], s, {0: layout})
                for d, s in zip(dims, shapes, strict=True)
            ]
            try:
                assert_like_one_process(function, inputs, specs)
            except Exception as error:
                raise AssertionError(f"case {i} at {layout}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check_cases, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.default_generator.manual_seed(14)
    x = torch.randn(2, 4, 12, 6, dtype=torch.float64).requires_grad_()
    functions = [
        lambda x: x.unfold(2, 3, 2).unfold(3, 2, 1),
        lambda x: F.fold(F.unfold(x, 3, padding=1), (12, 6), 3, padding=1),
        lambda x: F.local_response_norm(x, 3),
    ]
    for rows, columns in [((7, 5), (4, 2)), ((12, 0), (0, 6))]:
        both = ShardSpec.even(mesh, [Shard(2), Shard(3)], x.shape, {"h": rows, "w": columns})
        mixed = ShardSpec.even(mesh, [Replicate(), Shard(2)], x.shape, {"w": rows})
        for spec in (both, mixed):
            for function in functions:
                assert_like_one_process(function, [x], [spec])


def test_two_axes():
    run_ranks(check_two_axes, 4)


def check_windows_are_views(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for sizes in ((7, 5), (12, 0)):
        whole = torch.arange(24.0).view(2, 12)
        x = shard_of(whole, ShardSpec.even(mesh, [Shard(1)], (2, 12), {0: sizes}))
        windows, expected = x.unfold(1, 4, 2), whole.unfold(1, 4, 2)
        x.add_(1)
        whole.add_(1)
        assert torch.equal(windows.full_tensor(), expected)
        with pytest.raises(UnsupportedShardOp, match="copy where torch would have made a view"):
            windows.mul_(2)
        x.unfold(0, 1, 1).mul_(2)
        whole.unfold(0, 1, 1).mul_(2)
        assert torch.equal(x.full_tensor(), whole)
        assert F.unfold(x[None, None], 2).mul_(2) is not None  # no view in torch


def test_writes_to_what_windows_are_of_show():
    run_ranks(check_windows_are_views, 2)


def check_written_by_places(rank, num_ranks):
    """What is taken by places is a view where it is no window of a sharded dim."""

    def zeroed(x):
        y = x * 1
        y.as_strided((2, 2), (2, 1)).zero_()
        y.mT.as_strided((2, 3), (48, 12)).zero_()
        y.as_strided((2, 4, 4, 6), (192, 48, 12, 1)).mul_(3)
        return y

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for sizes in ((5, 3), (0, 8)):
        assert_like_one_process(zeroed, [x], [ShardSpec.even(mesh, [Shard(2)], x.shape, {0: sizes})])


def test_writes_by_places():
    run_ranks(check_written_by_places, 2)


def check_errors(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(torch.randn(2, 4, 8, 6), ShardSpec.even(mesh, [Shard(2)], (2, 4, 8, 6), {0: (5, 3)}))
    for call in (
        lambda: x.unfold(2, 9, 1),
        lambda: x.unfold(2, 2, 0),
        lambda: F.unfold(x, 9),
        lambda: F.unfold(x[0, 0], 2),
        lambda: F.fold(x[0], (3, 3), 2),
        lambda: F.glu(x[:, :3], 1),
        lambda: F.prelu(x, torch.ones(3)),
        lambda: torch.channel_shuffle(x, 3),
    ):
        with pytest.raises(RuntimeError):
            call()
    for call in (
        lambda: x.unfold(2, 0, 1),
        lambda: x.as_strided((2, 2), (2, 1), 1),
        lambda: x.as_strided((2, 4, 7, 2, 6), (192, 48, 6, 6, 1)).zero_(),  # windows across the bound
    ):
        with pytest.raises(UnsupportedShardOp, match="Remedy"):
            call()


def test_errors():
    run_ranks(check_errors, 2)

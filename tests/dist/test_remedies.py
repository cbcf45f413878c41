"""What the errors of refused operations advise, done: it gives what one process has."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of


def widened(x):
    """Transform a tensor that is not row-major: where the result lies in memory is torch's to choose."""
    return torch.fft.irfft(x.mT[None, None] + 0j, n=9)


def dropped(x):
    torch.manual_seed(0)
    return F.dropout(x, 0.5)


def check(rank, num_ranks, sizes):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    spec = ShardSpec.even(mesh, [Shard(0)], (7, 3), {0: sizes})
    part = shard_of(x, spec)
    row = ShardSpec.even(mesh, [Shard(0)], (1, 3), {0: (*[0] * (num_ranks - 1), 1)})
    for refused, remedy in {
        lambda: part.as_strided((3, 4), (1, 2), 4): r"x.reshape\(-1\)\[storage_offset:\].as_strided",
        lambda: dropped(widened(part)): r"use contiguous\(\) first",
        lambda: widened(part).stride(): r"use contiguous\(\) first",
        lambda: dist.all_gather([part] * num_ranks, part): r"the metric that gathers its state, to_local\(\)",
    }.items():
        with pytest.raises(UnsupportedShardOp, match=f"Remedy: .*{remedy}"):
            refused()
    if num_ranks > 1:
        with pytest.raises(UnsupportedShardOp, match="Remedy: assign the result"):
            shard_of(x[:1].detach(), row).squeeze_(0)
    assert_like_one_process(lambda y: y.squeeze(0) * 2, [x[:1].detach().requires_grad_()], [row])
    assert_like_one_process(lambda y: (y * 2).reshape(-1)[4:].as_strided((3, 4), (1, 2)) ** 2, [x], [spec])
    assert_like_one_process(lambda y: dropped(widened(y).contiguous()), [x], [spec])
    assert widened(part).contiguous().stride() == (27, 27, 9, 1)


@pytest.mark.parametrize("sizes", [(7,), (5, 2), (4, 3, 0)], ids=str)
def test_as_one_process(sizes):
    run_ranks(check, len(sizes), sizes)

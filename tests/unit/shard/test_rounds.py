"""How often an operation communicates, forward and backward: never where it need not, once where once is enough."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.testing import fake_group
from tests._collectives import Collectives


def learned(*shape):
    return torch.ones(*shape, requires_grad=True)


ROW, TABLE, PLACES = torch.ones(4), torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.long)
INDEX, MASK = torch.tensor([3, 0, 1]), torch.tensor([1, 0, 1, 1]) > 0

#: name: (rounds forward, rounds backward, function of a (4, 4) tensor sharded on dim 0)
ROUNDS = {
    "pointwise": (0, 0, lambda x: x * 2 + x.sin() - ROW / TABLE),
    "in place": (0, 0, lambda x: x.clone().mul_(2).add_(ROW)),
    "slices": (0, 0, lambda x: [x[1:3, ::2], *x.split(3), *x.chunk(2, 1), x.narrow(0, 1, 2), x[:, 1], x[:, [0, 2]]]),
    "masked rows": (0, 0, lambda x: x[MASK]),
    "views": (0, 0, lambda x: x.reshape(8, 2).unsqueeze(1).transpose(0, 2).permute(1, 2, 0).flatten(1, 2)),
    "over features": (0, 0, lambda x: [x.sum(1), x.mean(-1), x.var(1), x.std(1), x.amax(1), x.softmax(1), x.cumsum(1)]),
    "joins": (0, 0, lambda x: [torch.cat([x, x], 1), torch.stack([x, TABLE]), x.roll(1, 1), x.flip(1), x.repeat(1, 2)]),
    "padding": (0, 0, lambda x: [F.pad(x, (1, 1, 2, 2)), x.repeat_interleave(2, 0), x.expand(3, 4, 4)]),
    "products": (0, 0, lambda x: [x @ TABLE, F.linear(x, TABLE), torch.einsum("ni,ji", x, TABLE)]),
    "scatter of plain values": (0, 0, lambda x: [x.scatter_add(0, PLACES, TABLE), x.index_add(0, INDEX, TABLE[:3])]),
    "gather of features": (0, 0, lambda x: x.gather(1, PLACES)),
    "random": (0, 0, lambda x: [F.dropout(x, 0.5), torch.rand_like(x) * x, x.double(), torch.zeros_like(x) + x]),
    "loss of rows": (0, 0, lambda x: F.mse_loss(x, TABLE, reduction="none")),
    "norms of features": (0, 0, lambda x: [F.layer_norm(x, (4,)), F.rms_norm(x, (4,)), F.normalize(x, dim=1)]),
    "pooling that fits": (0, 0, lambda x: F.avg_pool2d(x[None], 2)),
    "parameters of a layer": (0, 1, lambda x: F.linear(x, learned(3, 4), learned(3))),
    "parameters of a norm": (0, 1, lambda x: F.layer_norm(x, (4,), learned(4), learned(4))),
    "a parameter": (0, 1, lambda x: x * learned(4)),
    "sum": (1, 0, lambda x: x.sum()),
    "mean": (1, 0, lambda x: x.mean(0)),
    "var": (1, 0, lambda x: x.var(0)),
    "std_mean": (1, 0, torch.std_mean),
    "norm": (1, 0, torch.linalg.vector_norm),
    "logsumexp": (1, 0, lambda x: x.logsumexp(0)),
    "loss": (1, 0, lambda x: F.mse_loss(x, TABLE)),
    "product over rows": (1, 0, lambda x: x.T @ x),
    "softmax": (1, 1, lambda x: x.softmax(0)),
    "log_softmax": (1, 1, lambda x: x.log_softmax(0)),
    "cumsum": (1, 1, lambda x: x.cumsum(0)),
    "flip": (1, 1, lambda x: x.flip(0)),
    "roll": (1, 1, lambda x: x.roll(1, 0)),
    "cat": (1, 1, lambda x: torch.cat([x, x])),
    "index": (1, 1, lambda x: x[INDEX]),
    "convolution": (1, 1, lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3), padding=1)),
    "pooling that overlaps": (1, 1, lambda x: F.max_pool2d(x[None], 3, 1, 1)),
    "group_norm": (1, 1, lambda x: F.group_norm(x.T[None], 2)),
    "batch_norm": (1, 2, lambda x: F.batch_norm(x, None, None, learned(4), learned(4), training=True)),
    "attention": (1, 1, lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    "redistribute": (1, 1, lambda x: x.redistribute(placements=[Shard(1)])),
    "full_tensor": (1, 0, lambda x: x.full_tensor()),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds(name):
    forward, backward, function = ROUNDS[name]
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        x = ShardTensor(torch.rand(2, 4), ShardSpec.even(mesh, [Shard(0)], (4, 4))).requires_grad_()
        with Collectives() as seen:
            results = function(x)
        assert len(seen.names) == forward, seen.names
        parts = [y.to_local() if isinstance(y, ShardTensor) else y for y in tree_leaves(results)]
        with Collectives() as seen:
            sum(part.sum() for part in parts).backward()
        assert len(seen.names) == backward, seen.names
        assert x.grad is not None


def test_a_halo_that_is_held_is_not_exchanged():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        spec = ShardSpec.even(mesh, [Shard(2)], (1, 1, 8, 3))
        x = ShardTensor.from_padded(torch.rand(1, 1, 5, 3), spec, {2: HaloDim(lo=1, hi=1)})
        with Collectives() as seen:
            F.conv2d(x / 2, torch.ones(1, 1, 3, 3), padding=1)
            x.local_with_halo()
        assert seen.names == []


def test_making_a_tensor_of_known_sizes_does_not_communicate():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        with Collectives() as seen:
            x = ShardTensor.from_local(torch.ones(3), mesh, [Shard(0)], sharding_shapes={0: [(3,), (1,)]})
            again = ShardTensor.from_local(torch.ones(3), mesh, [Shard(0)], sharding_shapes={"domain": [[3], [1]]})
        assert seen.names == []
        assert x.spec == again.spec
        with Collectives() as seen:
            ShardTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        assert len(seen.names) == 1

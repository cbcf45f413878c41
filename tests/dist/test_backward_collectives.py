"""Backward passes call the same collectives on all ranks, also where some have no rows for a kernel to act on.

On ranks of groups whose collectives do nothing, one after the other: what differs would be a hang.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata.shard.comm.transport as transport
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import fake_group
from scidata.testing.oracle import shard_of

ROWS = torch.tensor([0, 2])
X, IMAGE, HEADS = (4, 6, 5), (3, 4, 6, 6), (3, 2, 6, 4)


def attention(q, *others):
    k, v, mask = (q, q, *others) if len(others) == 1 else others
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def heads(q, wi, bi, wo, bo, mask):
    options = {"need_weights": False, "attn_mask": mask}
    return F.multi_head_attention_forward(q, q, q, 4, 2, wi, bi, None, None, False, 0.0, wo, bo, **options)[0]


def put(index):
    def function(x, y):
        z = x * 1
        z[index] = y
        return z

    return function


def recurrent(x, *weights):
    start = torch.zeros(1, x.shape[1], 3, dtype=x.dtype)
    return torch.lstm(x, (start, start), list(weights), True, 1, 0.0, False, False, False)[0]


#: Functions, and the shapes of their operands: the first is sharded along each dim in turn, the others are plain.
CASES = [
    (F.linear, X, (3, 5), (3,)),
    (F.bilinear, (4, 5), (4, 3), (2, 5, 3), (2,)),
    (lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGE, (2, 4, 3, 3), (2,)),
    (lambda x, w, b: F.conv2d(x, w, b, stride=2), IMAGE, (2, 4, 2, 2), (2,)),
    (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), IMAGE, (4, 1, 3, 3), (4,)),
    (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), IMAGE, (4, 3, 2, 2), (3,)),
    (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), IMAGE, (4,), (4,)),
    (lambda x, w, b: F.layer_norm(x, (6, 5), w, b), X, (6, 5), (6, 5)),
    (lambda x, w: F.rms_norm(x, (5,), w), X, (5,)),
    (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, (4,), (4,)),
    (lambda x, w, b: F.instance_norm(x, None, None, w, b), IMAGE, (4,), (4,)),
    (F.prelu, X, (6,)),
    (lambda x, w: F.embedding(x.detach().long(), w), X, (3, 2)),
    (lambda x, w: F.embedding_bag(x.detach().long(), w), (4, 6), (3, 2)),
    *[(attention, HEADS, mask) for mask in [(3, 2, 6, 6), (1, 2, 6, 6), (2, 6, 6), (6, 6), (6, 1)]],
    *[(attention, HEADS, kv, kv, mask) for kv in [HEADS, (1, 2, 6, 4)] for mask in [(3, 1, 6, 6), (1, 6)]],
    (heads, (6, 3, 4), (12, 4), (12,), (4, 4), (4,), (6, 6)),
    (F.grid_sample, IMAGE, (3, 4, 5, 2)),
    (lambda grid, x: F.grid_sample(x, grid), (3, 4, 5, 2), IMAGE),
    (lambda x, y: torch.where(x.detach() > 0.5, x, y), X, (5,)),
    (torch.lerp, X, (6, 5), (1,)),
    (torch.clamp, X, (5,), ()),
    (lambda x, y: x.index_add(0, ROWS, y), X, (2, 6, 5)),
    (lambda x, y: x.index_copy(1, ROWS, y), X, (4, 2, 5)),
    (lambda x, y: x.scatter(1, torch.zeros(4, 2, 5).long(), y), X, (4, 2, 5)),
    (lambda x, y: x.scatter_reduce(0, torch.zeros(4, 2, 5).long(), y, "amax"), X, (4, 2, 5)),
    (lambda x, y: x.masked_fill(x.detach() > 0.5, y), X, ()),
    (lambda x, y: torch.index_put(x, (ROWS,), y, accumulate=True), X, (2, 6, 5)),
    (put(0), X, (6, 5)),
    (put((slice(None), slice(1, 3))), X, (4, 2, 5)),
    (put(ROWS), X, (2, 6, 5)),
    (lambda x, y: torch.cat([x, y]), X, X),
    (lambda x, y: torch.stack([y, x], 1), X, X),
    (torch.matmul, X, (5, 3)),
    (lambda x, y: y @ x, X, (3, 6)),
    (lambda x, y: torch.einsum("abc,ade->cde", x, y), X, (4, 2, 3)),
    (torch.cdist, X, (3, 5)),
    (F.cosine_similarity, X, X),
    (F.triplet_margin_loss, (4, 5), (4, 5), (4, 5)),
    (F.mse_loss, X, X),
    (F.cross_entropy, X, X),
    (lambda x, table: table[x.detach().long()], (4, 6), (3, 5)),
    (lambda x, table: table.gather(1, x.detach().long()), (4, 6), (4, 3)),
    (recurrent, (6, 4, 5), (12, 5), (12, 3), (12,), (12,)),
    (lambda x, w: (x * w).softmax(0), X, (5,)),
    (lambda x, w: [(x * w).sort(0)[0], (x * w).max(0)[0], (x * w).prod(0), (x * w).var(0)], X, (5,)),
    (lambda x, w: [(x * w).cumsum(0), (x * w).roll(1, 0), (x * w)[0], (x * w).reshape(-1)], X, (5,)),
]


@pytest.fixture
def calls(monkeypatch):
    """What collectives are called, by name."""
    called = []

    def call(name, x):
        called.append(name)
        x.zero_()

    for module, name in [(dist, "all_to_all_single"), (dist, "all_reduce"), (transport, "_all_gather")]:
        monkeypatch.setattr(module, name, lambda x, *args, name=name, **kwargs: call(name, x))
    return called


def _backward(function, shapes, dim, sizes, calls):
    """Return the collectives of a backward pass, and of which operands the gradient is None."""
    mesh = init_device_mesh("cpu", (len(sizes),), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    first, *others = (torch.rand(shape, dtype=torch.float64) for shape in shapes)
    x = shard_of(first, ShardSpec.even(mesh, [Shard(dim)], first.shape, {0: sizes}))
    operands = [x, *others]
    found = [y for y in tree_leaves(function(*[y.requires_grad_() for y in operands])) if y.requires_grad]
    results = [y.local if isinstance(y, ShardTensor) else y for y in found]
    calls.clear()
    leaves = [x.local, *others]
    grads = torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results], allow_unused=True)
    return list(calls), [grad is None for grad in grads]


def test_the_same_on_ranks_without_rows(calls):
    for number, (function, *shapes) in enumerate(CASES):
        for dim, extent in enumerate(shapes[0]):
            for sizes in [(extent - 1, 0, 1), (0, extent, 0)][number % 2 :][:1]:
                found = []
                for rank in range(3):
                    with fake_group(3, rank):
                        try:
                            found.append(_backward(function, shapes, dim, sizes, calls))
                        except UnsupportedShardOp:
                            found.append(None)
                assert found[1:] == found[:-1], (number, shapes, dim, sizes, found)

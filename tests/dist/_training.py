"""A model, samples and one-process training, for the tests of ``parallelize``."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from scidata.device_mesh import axis_rank, domain_mesh
from scidata.shard.tensor import ShardTensor

SIZES = {1: (7,), 2: (5, 2), 3: (4, 0, 3)}  # rows of each domain rank
DP_X_DOMAIN = [(2, 2), (1, 3), (3, 1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 9)
        self.outer = nn.Linear(9, 6, bias=False)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x)))) + self.frozen


class Model(nn.Module):
    """Parameters that meet shards as a whole and in slices, plain values, each twice, never, and under two names.

    What is made of parameters alone meets shards, as a whole and in slices, and plain values, too.
    """

    def __init__(self, seed=0, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Linear(3, 6)
        self.position = nn.Parameter(torch.empty(7, 6))
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.head.weight
        self.readout = nn.Linear(6, 2)  # on the pooled value, which is the same on each domain rank
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(1))
        self.waves, self.gates = nn.Parameter(torch.empty(7, 6, 2)), nn.Parameter(torch.empty(2, 6))
        self.register_buffer("shift", torch.empty(6))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))

    def forward(self, x):
        x = self.embed(x) + self.position + torch.view_as_complex(self.waves).real
        gate = torch.tanh(self.gates[0]) + self.gates[1] * self.scale
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.tied(torch.tanh(self.head(x) + self.shift)) * self.scale
        return x * gate, self.readout(x.mean(dim=0)) * self.scale * gate[:2]


def loss_of(model, x):
    rows, pooled = model(x)
    return (rows**2).mean() + (pooled - 1).square().sum()


def sample(index):
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(100 + index), dtype=torch.float64)


def part_of(whole, mesh):
    """Return this rank's rows of a sample."""
    sizes = SIZES[mesh["domain"].size()]
    rank = axis_rank(mesh, "domain")
    local = whole[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    shapes = {0: [(n, *whole.shape[1:]) for n in sizes]}
    return ShardTensor.from_local(local, domain_mesh(mesh, ("domain",)), (Shard(0),), sharding_shapes=shapes)


def adam(model):
    # a large eps: Adam divides by the size of a gradient, which enlarges the rounding of tiny ones
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def train_alone(model, steps, num_dp, micro=1, clip=None, first=0):
    """Train in one process; return parameters after the steps, and the norms of the gradients."""
    model, norms = copy.deepcopy(model), []
    optimizer = adam(model)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for index in range(step * micro * num_dp, (step + 1) * micro * num_dp):
            (loss_of(model, sample(index)) / (num_dp * micro)).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    return model, norms


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_models(found, expected, tolerance=1e-12):
    got = dict(found.named_parameters())
    for name, want in expected.named_parameters():
        torch.testing.assert_close(whole(got[name].detach()), want.detach(), rtol=tolerance, atol=tolerance, msg=name)
        assert (got[name].grad is None) == (want.grad is None), name
        if want.grad is not None:
            close = {"rtol": tolerance, "atol": tolerance, "msg": f"gradient of {name}"}
            torch.testing.assert_close(whole(got[name].grad), want.grad, **close)

"""Custom autograd functions on shards: values and gradients of one process, whichever argument requires them."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import assert_like_one_process, run_ranks, shard_of


class Scale(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return grad * w if wanted[0] else None, (grad * x).sum((0, 1)) if wanted[1] else None


class Softmax(Function):
    """Its context is set up apart; two results, a number with a default."""

    @staticmethod
    def forward(x, k=2.0):
        return torch.softmax(x * k, -1), x.mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k = inputs
        ctx.save_for_backward(output[0])
        ctx.like = x.shape

    @staticmethod
    def backward(ctx, grad, grad_mean):
        (y,) = ctx.saved_tensors
        grad = ctx.k * y * (grad - (grad * y).sum(-1, keepdim=True))
        return grad + grad_mean.expand(ctx.like) / ctx.like.numel(), None


class Tripled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class ExpAndLargest(Function):
    @staticmethod
    def forward(ctx, x):
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.exp(), largest

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, none):
        assert none is None
        return grad * ctx.saved_tensors[0].exp()


class Loss(Function):
    """A plain result of sharded arguments."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).pow(2).mean()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 2 * x * w * w / x.numel(), grad * 2 * (x * x * w).sum((0, 1)) / x.numel()


class Moved(Function):
    """Backward gives a gradient that is split otherwise than its tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0).transpose(0, 1).contiguous().view(49, 3).view(7, 7, 3).transpose(0, 1)


class Numpy(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def twice_differentiated(x, w):
    y = x * 1
    (found,) = torch.autograd.grad(Scale.apply(y, w).pow(3).sum(), y, create_graph=True)
    return found * w


def largest(x, w):
    values, index = ExpAndLargest.apply(x * 1)
    return (values * w).sum(-1) * index


CASES = {
    "both": lambda x, w: Scale.apply(x, w),
    "plain alone": lambda x, w: Scale.apply(x.detach(), w),
    "sharded alone": lambda x, w: Scale.apply(x, w.detach()),
    "apart": lambda x, w: [*Softmax.apply(x * w), *Softmax.apply(x, 3.0)],
    "in place": lambda x, w: [(lambda y: Tripled.apply(y) * y * w)(x * 1)],
    "not differentiable": largest,
    "plain result": Loss.apply,
    "another layout": lambda x, w: Moved.apply(x) * w,
    "twice": twice_differentiated,
    "reentrant checkpoint": lambda x, w: checkpoint(lambda a, b: Scale.apply(a, b).sin(), x, w, use_reentrant=True),
    "within": lambda x, w: F.linear(Scale.apply(x, w).relu(), w.diag()),
}


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 7, 3, dtype=torch.float64, generator=generator)
    w = torch.randn(3, dtype=torch.float64, generator=generator)
    for sizes in {1: [(7,)], 2: [(4, 3)], 3: [(5, 1, 1), (4, 0, 3)]}[num_ranks]:
        for dim in (0, 1):
            spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})
            for name, function in CASES.items():
                try:
                    assert_like_one_process(function, [x.requires_grad_(), w.requires_grad_()], [spec, None])
                    with torch.no_grad():
                        if name != "twice":
                            assert_like_one_process(function, [x.detach(), w.detach()], [spec, None])
                except Exception as error:
                    raise AssertionError(f"{name} at {spec}") from error
            with pytest.raises(UnsupportedShardOp, match="numpy"):
                Numpy.apply(shard_of(x, spec).requires_grad_())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)

"""Custom autograd functions on shards: values and gradients of one process, whichever argument requires them."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, base
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of


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


class Multiplied(Function):
    @staticmethod
    def forward(x, k=2.0):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.k, None


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


scale = Scale.apply  # taken before there is a ShardTensor, as models do
multiplied = Multiplied.apply
loss = Loss.apply


def hooked(x, w):
    """A module's full backward hooks, which change what goes through."""
    module, seen = torch.nn.Tanh(), []
    module.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * outputs[0].mean(),))
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]) or (inputs[0] * 2,))
    y = module(x * w)
    if not w.requires_grad:
        return y
    (grad,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    assert type(seen[0]) is type(y)
    return [y * 3, grad, seen[0]]


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
    "plain result": lambda x, w: Loss.apply(x, w),
    "taken": lambda x, w: [scale(x, w), scale(x.detach(), w), scale(x, w.detach()), scale(x.detach(), w.detach())],
    "taken, apart": lambda x, w: [multiplied(x * w), multiplied(x, 3.0), multiplied(x.detach())],
    "made of NumPy": lambda x, w: Numpy.apply(x * w) * x,
    "another layout": lambda x, w: Moved.apply(x) * w,
    "twice": twice_differentiated,
    "hooked": hooked,
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
            with pytest.raises(UnsupportedShardOp, match="Loss: its apply was taken before"):
                loss(shard_of(x, spec).requires_grad_(), w)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)


def check_reentrant(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    full = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 2, 3)
    x, w = full.clone().requires_grad_(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    part = shard_of(full, ShardSpec.even(mesh, [Shard(0)], full.shape)).requires_grad_()
    v = w.detach().clone().requires_grad_()
    for a, b in ((x, w), (part, v)):
        checkpoint(lambda a, b: scale(a, b).sin(), a * 2, b, use_reentrant=True).sum().backward()
    torch.testing.assert_close(part.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(v.grad, w.grad, rtol=1e-12, atol=1e-12)


def test_reentrant_checkpoints():
    run_ranks(check_reentrant, 3)


def check_threads(rank, num_ranks):
    """Other threads go on while the first ShardTensor looks for functions: listing all objects broke their tuples."""
    errors, is_over = [], threading.Event()

    def build():
        try:
            while not is_over.is_set():
                tuple(i for i in range(500))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for _ in range(3):
        shard_of(torch.ones(3), ShardSpec.even(mesh, [Shard(0)], (3,)))
        base._watched.clear()
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_threads_go_on_beside_the_first_shard_tensor():
    run_ranks(check_threads, 1)

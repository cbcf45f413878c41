"""All the ways in which Python and torch reach a tensor: on a ShardTensor each is right, or raises with a remedy."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.dlpack
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves, tree_map

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def changed(write):
    def function(x):
        y = x.clone()
        write(y)
        return y

    return function


checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def with_gradient(function):
    """The values and the gradient of a scalar of them."""

    def both(x):
        leaf = x.detach().clone().requires_grad_()
        result = function(leaf)
        (result * result).sum().backward()
        return [result, leaf.grad]

    return both


def stepped(optimizer, **how):
    def function(x):
        leaf = x.detach().clone().requires_grad_()
        steps = optimizer([leaf], foreach=False, **how)
        (leaf * leaf).sum().backward()
        steps.step()
        return leaf.detach()

    return function


RIGHT = {
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "len": len,
    "iteration": lambda x: [row * 1 for row in x],
    "unpacking": lambda x: sum([*x]),
    "zip": lambda x: [a + b for a, b in zip(x, x, strict=True)],
    "sum()": sum,
    "operators": lambda x: [-x, +x, abs(x), 2 - x, 1 / (x + 9), 2**x, x % 3, x // 2, (x > 3) & (x < 6), ~(x > 3)],
    "comparisons": lambda x: [x == None, x != None, x == 3, x >= x.mean()],  # noqa: E711
    "shifts": lambda x: [x.long() << 1, 1 << x.long(), x.long() >> 1, x.long() ^ 3, 5 | x.long()],
    "in place": changed(lambda y: [y.__iadd__(2), y.__imul__(y), y.clamp_(2, 30), y.sqrt_(), F.relu_(y), y.nan_to_num_()]),
    "shape": lambda x: [x.shape, x.size(), x.size(0), x.ndim, x.dim(), x.numel(), x.nelement(), x.nbytes, x.itemsize],
    "kind": lambda x: [x.dtype, x.device.type, x.layout, x.is_cuda, x.is_sparse, x.is_floating_point(), x.is_leaf],
    "type": lambda x: [torch.is_tensor(x), isinstance(x, torch.Tensor), torch.is_complex(x), torch.result_type(x, 1)],
    "transposes": lambda x: [x.T, x.mT, x.t()],
    "copies": lambda x: [x.data, copy.deepcopy(x), x.detach(), torch.as_tensor(x), torch.asarray(x), x.as_subclass(torch.Tensor) * 2],
    "pytree": lambda x: tree_map(lambda t: t + 1, {"a": [x]})["a"],
    "collate": lambda x: torch.utils.data.default_collate([x, x]),
    "module": lambda x: torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())(x),
    "functional_call": lambda x: torch.func.functional_call(torch.nn.Linear(4, 2), {"weight": torch.ones(2, 4).double(), "bias": torch.ones(2).double()}, x),
    "fx": lambda x: torch.fx.symbolic_trace(lambda t: t.sin() + t)(x),
    "compile": lambda x: torch.compile(lambda t: t.sin() + 1, backend="eager")(x),
    "checkpoint in a checkpoint": with_gradient(
        lambda x: checkpointed(lambda y: checkpointed(torch.sin, y * 2).cos(), x * 3)
    ),
    "checkpoint": with_gradient(lambda x: torch.utils.checkpoint.checkpoint(lambda t: t.sin(), x, use_reentrant=False)),
    "function, no gradient": lambda x: Double.apply(x),
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda t: (t * t).sum(), x),
    "norms": lambda x: [torch.nn.utils.get_total_norm([x]), torch.nn.utils.parameters_to_vector([x, x])],
    "sgd": stepped(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": stepped(torch.optim.AdamW, lr=0.1),
    "initialise": changed(lambda y: [torch.nn.init.ones_(y), torch.nn.init.zeros_(y[:2])]),
    "hook": with_gradient(lambda x: [x.register_hook(lambda g: g * 2), x.sin()][1]),
    "plain beside": lambda x: [torch.ones(6, 4) + x, torch.ones(4) * x, torch.where(torch.ones(6, 4) > 0, torch.ones(6, 4), x)],
    "scalar": lambda x: [float(x.sum()), int(x.sum()), bool(x.sum() > 0), x.sum().item(), x.sum().tolist(), f"{x.sum():.1f}"],
    "whole values": lambda x: [x.tolist(), x.long().tolist(), x.numpy(), x.T.numpy(), x.numpy(force=True), np.asarray(x), np.asarray(x, np.float32), np.isin(x > 3, [True])],
    "scalar to numpy": lambda x: [np.asarray(x.sum()), x.mean(0).numpy()],
    "float in range": lambda x: [list(range(int(x.max()))), [0] * len(x)],
    "special": lambda x: [torch.special.erf(x), torch.special.expit(x), torch.special.log_softmax(x, 0)],
    "linalg": lambda x: torch.linalg.vector_norm(x, dim=0),
    "a function's gradient": lambda x: Double.apply(x.detach().requires_grad_()),
    "reentrant checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        torch.sin, x.detach().requires_grad_(), use_reentrant=True
    ),
    "bessel": torch.special.bessel_j0,
    "fft over shards": lambda x: [torch.fft.fft(x, dim=0).abs(), torch.fft.irfft2(torch.fft.rfft2(x), s=(6, 4))],
    "forward derivatives": lambda x: forward_derivatives(x),
    "func.jvp": lambda x: [*torch.func.jvp(lambda t: t.sin() * t, (x,), (x + 1,))],
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "vmap, closed over": lambda x: torch.vmap(lambda w: x * w)(torch.ones(3, 4)),
    "func.grad": lambda x: torch.func.grad(lambda t: t.sum())(x),
    "func.vjp": lambda x: torch.func.vjp(torch.sin, x)[0],
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x),
    "view as dtype": lambda x: x.view(torch.int64),
    "types": lambda x: [x.type(torch.float32), x.sin().type_as(x), torch.tensor(len(x.type()))],
    "detach_": with_gradient(lambda x: x * torch.detach_(x.sin()) + x.cos().detach_()),
    "reversed": lambda x: [reversed(x), *x],
    "plain += sharded": lambda x: torch.ones(6, 4).double().__iadd__(x),
    "plain.copy_": lambda x: torch.ones(6, 4).double().copy_(x),
    "a full backward hook": lambda x: hooked()(x.detach().requires_grad_()),
    "svd": torch.linalg.svdvals,
    "stride": lambda x: [x.stride(), x.T.stride(0), x.is_contiguous(), x.T.is_contiguous()],
    "memory, freed and set": lambda x: freed(x),
}  # fmt: skip

REFUSED = {
    "out= of another shape": lambda x: torch.sum(torch.ones(6, 4), 0, out=x),
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "index": lambda x: [1, 2][x],
    "np.sin": np.sin,
    "x + array": lambda x: x + np.ones((6, 4)),
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage().data_ptr(),
    "one storage": lambda x: x.untyped_storage() == x.untyped_storage(),
    "a part of the memory": lambda x: x.untyped_storage().resize_(8),
    "storage": lambda x: x.storage(),
    "__dlpack__": lambda x: x.__dlpack__(),
    "np.from_dlpack": np.from_dlpack,
    "set data": lambda x: setattr(x, "data", torch.ones(6, 4)),
    "set_": lambda x: x.set_(torch.ones(3).double()),
    "resize_": lambda x: x.resize_(2),
    "as_strided at an offset": lambda x: x.as_strided((2, 2), (1, 1), 1),
    "as_subclass": lambda x: x.as_subclass(torch.nn.Buffer),
    "torch.Tensor": torch.Tensor,
    "torch.tensor": torch.tensor,
    "share_memory_": lambda x: x.share_memory_(),
    "apply_": lambda x: x.apply_(lambda v: v + 1),
    "aten overload": lambda x: torch.ops.aten.add.Tensor(x, x),
    "aten packet": lambda x: torch.ops.aten.relu(x),
    "prims": lambda x: torch.ops.prims.sin(x),
    "export": lambda x: torch.export.export(torch.nn.Linear(4, 2), (x,)),
    "dist.all_reduce": lambda x: torch.distributed.all_reduce(x),
    "dist.broadcast": lambda x: torch.distributed.broadcast(x, 0),
    "dist.all_gather": lambda x: torch.distributed.all_gather([torch.empty(3, 4)] * 2, x),
    "backward without gradient": lambda x: x.detach().requires_grad_().sin().backward(),
}


def hooked():
    module = torch.nn.Tanh()
    module.register_full_backward_hook(lambda module, grads, outputs: None)
    return module


def freed(x):
    """The memory of a tensor is freed, made again, and then that of another; views of it were copies."""
    values, row = x.clone(), x.clone()[4]
    part = x.to_local() if isinstance(x, ShardTensor) else x
    x.untyped_storage().resize_(0)
    assert part.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(x.nbytes)
    y = x.copy_(values).clone()
    with torch.no_grad():
        leaf = x.detach().requires_grad_()
        leaf.set_(values.T.contiguous().T)
    before = values[4].clone()
    row.data = before + 1
    leaf.sum().backward()
    return [y, leaf, leaf.grad, torch.tensor(leaf.stride()), row, values]


def forward_derivatives(x):
    """Of functions that move and add rows of other ranks."""
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, x.cos() + 1)
        found = [
            y.sin(),
            y.sum(0),
            y.flip(0) * y,
            y.softmax(0),
            y @ torch.ones(4, 2).double(),
            torch.cat([y, y]).mean(),
        ]
        return [part for each in found for part in forward_ad.unpack_dual(each)]


def plain(result):
    return [x.full_tensor() if isinstance(x, ShardTensor) else x for x in tree_leaves(result)]


def check(rank, num_ranks, sizes):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    full = torch.arange(24.0, dtype=torch.float64).reshape(6, 4)
    spec = ShardSpec.even(mesh, [Shard(0)], full.shape, {0: sizes})
    for name, function in RIGHT.items():
        try:
            found, expected = plain(function(shard_of(full, spec))), plain(function(full.clone()))
            for mine, theirs in zip(found, expected, strict=True):
                if isinstance(theirs, torch.Tensor | np.ndarray):
                    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), rtol=1e-12, atol=1e-12)
                else:
                    assert mine == theirs
        except Exception as error:
            raise AssertionError(f"{name} at {sizes}") from error
    for name, function in REFUSED.items():
        x = shard_of(full, spec)
        with pytest.raises(UnsupportedShardOp) as raised:
            pytest.fail(f"{name} gave {function(x)!r}")
        text = str(raised.value)
        assert "Remedy: " in text or "Save full_tensor()" in text, name
        assert torch.equal(x.full_tensor(), full), f"{name} changed it"
    with pytest.raises(ValueError, match="read-only"):  # what is written would be lost
        shard_of(full, spec).numpy()[0] = 1
    with pytest.raises(RuntimeError, match="data pointer"):  # not a capsule of memory that is not there
        torch.utils.dlpack.to_dlpack(shard_of(full, spec))
    with pytest.raises(RuntimeError):
        torch.jit.trace(torch.sin, shard_of(full, spec))
    assert "full_tensor" in dir(x)


@pytest.mark.slow_for("sizes=(6, 0)")
@pytest.mark.parametrize("sizes", [(4, 2), (6, 0)])
@pytest.mark.filterwarnings("ignore")
def test_every_way_in_is_right_or_raises(sizes):
    run_ranks(check, 2, sizes)

"""The way out for what has no rule, and the account of what a model does: values and gradients of one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(6, 1), (0, 7)], 3: [(5, 1, 1), (4, 0, 3)]}
PLAIN = torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3)


def applied(x):
    y = x.detach() * 1
    y.apply_(lambda v: v + 1)
    return x * y


class Doubled(torch.autograd.Function):
    """Made of Python, so that no rule can serve it."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().clone().apply_(lambda v: 2 * v)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone().apply_(lambda v: 2 * v)


CASES = {
    "as_strided": lambda x: (x * 2).as_strided((3, 7), (1, 3), 0),
    "of a transpose": lambda x: (x * 2).t().as_strided((7, 3), (3, 1), 0),
    "with a plain one": lambda x: torch.ormqr(PLAIN, PLAIN[0], x),
    "several": lambda x: torch._aminmax(x.detach(), 0),
    "in place": applied,
    "kernel": lambda x: Doubled.apply(x * 2),
    "drawn": lambda x: torch._C._nn.rrelu_with_noise(x * 2, PLAIN[:, :3] * 1, 0.1, 0.4, True),
}


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for sizes in LAYOUTS[num_ranks]:
        for dim in (0, 1):
            layout = {0: sizes} if dim == 0 else {}
            spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, layout)
            for name, function in CASES.items():
                if num_ranks > 1:
                    with pytest.raises(UnsupportedShardOp, match=r"scidata.gather|full_tensor|strides"):
                        function(shard_of(x, spec))
                try:
                    with warnings.catch_warnings(), scidata.gather():
                        warnings.simplefilter("ignore")
                        assert_like_one_process(function, [x], [spec], rtol=1e-10, atol=1e-10)
                except Exception as error:
                    raise AssertionError(f"{name} at {spec}") from error
    part = shard_of(x, ShardSpec.even(mesh, [Shard(0)], x.shape))
    with scidata.gather():
        assert part.detach().as_strided((7, 2), (3, 1), 0).placements == (Shard(0),)
        for refused in (part.data_ptr, part.storage, lambda: part.detach().resize_(3), lambda: part.sin().backward()):
            with pytest.raises(UnsupportedShardOp):
                refused()
    with pytest.raises(UnsupportedShardOp):  # the block is over
        part.detach().as_strided((7, 2), (3, 1), 0)


def check_words(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = scidata.scatter_tensor(torch.ones(6, 4), 0, mesh, [Shard(0)])
    with warnings.catch_warnings(record=True) as said, scidata.gather():
        warnings.simplefilter("always")
        for _ in range(3):
            x.as_strided((2, 2), (1, 1), 0)
    assert len(said) == (rank == 0)
    for each in said:
        assert each.filename == __file__
        assert "torch.Tensor.as_strided runs on gathered tensors, 96 bytes on each rank" in str(each.message)

    def model(x):
        y = torch.fft.fft(x, dim=0).abs() @ torch.ones(4, 3)
        return y.as_strided((6, 3), (3, 1), 0).relu().mean(), y.redistribute(placements=[Replicate()]) + 1

    explained = scidata.explain(model, x)
    names = [op.name.rsplit(".", 1)[-1] for op in explained.ops]
    assert names == ["fft", "abs", "matmul", "as_strided", "relu", "mean", "add"]
    assert [op.rule for op in explained.ops] == [
        "fft",
        "pointwise",
        "linalg",
        "gather",
        "pointwise",
        "reductions",
        "replicated",
    ]
    sent = {op.name.rsplit(".", 1)[-1]: op.bytes_sent for op in explained.ops}
    assert sent["abs"] == sent["relu"] == 0
    assert sent["as_strided"] == 3 * 3 * 4
    assert sent["mean"] == 4
    assert explained.bytes_sent == sum(sent.values())
    assert explained.gathered == ("torch.Tensor.as_strided",)
    text = str(explained)
    assert "on gathered tensors: torch.Tensor.as_strided" in text
    assert "Shard(0) on 'domain' sizes (3, 3), global shape (6, 4)" in text
    torch.testing.assert_close(explained.result[0], torch.tensor(6 * 4.0 / 6))
    with pytest.raises(UnsupportedShardOp):  # as it was
        x.as_strided((2, 2), (1, 1), 0)


def check_model(rank, num_ranks):
    """A model with a step that has no rule trains as in one process."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x = torch.randn(7, 3, dtype=torch.float64)

    def loss(x):
        y = layer(x).unsqueeze(1)
        scores = F.log_softmax(y.expand(-1, 2, -1), -1)
        return F.ctc_loss(scores, torch.ones(2, 2, dtype=torch.long), [7, 7], [2, 2])

    loss(x).backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with warnings.catch_warnings(), scidata.gather():
        warnings.simplefilter("ignore")
        loss(shard_of(x, ShardSpec.even(mesh, [Shard(0)], x.shape))).backward()
    for p, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)


def test_each_place_is_named_once_and_a_model_is_explained():
    run_ranks(check_words, 2)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_training(num_ranks):
    run_ranks(check_model, num_ranks)

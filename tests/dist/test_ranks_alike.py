"""What ranks with one row, or none, have to decide as the others do; and what torch's samples do not reach."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(6, 1), (0, 7)], 3: [(5, 1, 1), (4, 0, 3)]}


def left(y):
    y[:, :-1] = y[:, 1:].clone() if type(y) is torch.Tensor else y[:, 1:]  # torch copies in an order of its own
    return y


def right(y):
    y[:, 1:] = y[:, :-1].clone() if type(y) is torch.Tensor else y[:, :-1]
    return y


def added(y):
    y[:-1].add_(y[1:].clone() if type(y) is torch.Tensor else y[1:])
    return y


def plain(x, write):
    """A tensor that is made plain, as many models do, and written to."""
    result = torch.zeros(x.shape, dtype=x.dtype)
    write(result)
    return result


def looked_up(x, table):
    """Rows of a plain table by sharded numbers."""
    ids = x.long() % 4
    return [table[:, ids], table[0][ids], table[..., ids % 3], table[:, ids[0]], x[..., None] * table[1][ids].sin()]


def written_between(x, rows):
    """The gradient of rows that were written to, seen through a view that was made before."""
    y = x.detach().requires_grad_()[rows]
    seen = y.transpose(1, 2)
    y.mul_(3)
    (grad,) = torch.autograd.grad(seen.exp().sum(), y)
    return [grad, y * x[:1]]


def after_einsum(x):
    """What is summed alone is not kept for backward, so it may be written to, on ranks with one row too."""
    y = x.detach() * 1
    result = torch.einsum("abc,c->ac", y, (x * x).sum((0, 1)))
    y.zero_()
    return [
        result,
        torch.einsum("abc,d->d", x, x[0, 0]),
        torch.einsum("abc->", x),
        torch.einsum("abc,->ab", x, x.sum()),
    ]


def detached_row(y):
    row = y.unbind(0)[1].detach()
    y.mul_(2)
    return [row * 1, row]


ROWS = torch.tensor([4, 0, 6])
PLACES = torch.tensor([[[9, -1, 3]]])
CASES = {
    "left": lambda x: left(x * 1),
    "right": lambda x: right(x * 1),
    "turned": lambda x: right((x * 1).transpose(0, 1)),
    "added": lambda x: added((x * 1).transpose(0, 1)),
    "itself": lambda x: (lambda y: (y.__setitem__(2, y[2].mul_(2)), y)[1])(x * 1),
    "cosine": lambda x: [F.cosine_similarity(x, x[:1] + 1, d) for d in (0, 1, -1)],
    "cosine of a row": lambda x: [F.cosine_similarity(x, x[:, :, :1] + 1, 2), F.cosine_similarity(x, PLAIN, -1)],
    "wrapped": lambda x: torch.take_along_dim(x, PLACES, 2),
    "cropped": lambda x: F.pad(x[None], (0, 0, -6, 2, 1, -3), mode="replicate"),
    "attention": lambda x: F.scaled_dot_product_attention(x, KEYS, KEYS),
    "written to after an einsum": lambda x: after_einsum(x),
    "one of several rows, detached": lambda x: detached_row(x * 1),
    "nothing dropped": lambda x: F.dropout(x[:, :0], 0.5, inplace=True),
    "nothing rolled": lambda x: x[:0].roll(1, 0),
    "a plain tensor takes rows": lambda x: plain(x, lambda p: p.__setitem__((slice(1, 4), ..., 0), x[2:5, :, 1])),
    "a plain tensor takes rows by index": lambda x: plain(x, lambda p: p.__setitem__(ROWS, x[:3] * 2)),
    "a plain tensor is added to": lambda x: plain(x, lambda p: p.add_(x).mul_(x[:1])) * x,
    "a plain tensor is scattered to": lambda x: plain(x, lambda p: p.scatter_(0, (x.detach() * 0).long(), x.detach())),
}
PLAIN = torch.linspace(1, 2, 3, dtype=torch.float64)
KEYS = torch.linspace(-1, 1, 4 * 7 * 5 * 3, dtype=torch.float64).view(4, 7, 5, 3)


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(7, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for sizes in LAYOUTS[num_ranks]:
        for dim in (0, 1):
            spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})
            for name, function in CASES.items():
                try:
                    assert_like_one_process(function, [x], [spec])
                except Exception as error:
                    raise AssertionError(f"{name} at {spec}") from error
            table = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 4, 3).requires_grad_()
            assert_like_one_process(looked_up, [x.detach() * 2, table], [spec, None])
            for rows in (ROWS, torch.tensor([1, 1])):
                assert_like_one_process(lambda x, rows=rows: written_between(x, rows), [x], [spec])
            wide = shard_of(x.detach(), spec).unsqueeze(2).expand(-1, -1, 2, -1)
            for write in (lambda y: F.dropout(y, 0.5, inplace=True), lambda y: y.add_(1), lambda y: y.uniform_()):
                with pytest.raises(UnsupportedShardOp, match="one in memory"):
                    write(wide)
            with pytest.raises(IndexError, match="out of bounds"):  # also where there is no row to index
                shard_of(x, spec)[:, :, torch.tensor([0, 5])]
            with pytest.raises(RuntimeError, match="in memory"):  # also where no rows are
                shard_of(x, spec)[None].expand(2, -1, -1, -1).detach().add_(1)
            leaf = shard_of(x, spec)
            assert leaf.flatten(1, 1) is leaf


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)

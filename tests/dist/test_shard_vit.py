"""The acceptance test of ShardTensor: a vision transformer in plain PyTorch, sharded, against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks

PATCH, ROWS, COLUMNS, WIDTH, HEADS, BATCH, CHANNELS = 2, 10, 3, 8, 2, 2, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        out = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.position = nn.Parameter(torch.randn(1, ROWS * COLUMNS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)
        self.recompute = recompute

    def forward(self, x):
        batch, channels, height, width = x.shape
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.recompute else block(tokens)
        patches = self.head(self.norm(tokens))
        patches = patches.view(batch, height // PATCH, width // PATCH, PATCH, PATCH, channels)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, height, width)


def vit_case(recompute=False, dtype=torch.float64):
    torch.manual_seed(0)
    model = ViT(recompute).to(dtype)
    shape = (BATCH, CHANNELS, ROWS * PATCH, COLUMNS * PATCH)
    return model, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def sharded(x, mesh, sizes, dim=2):
    spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})
    rank = spec.coordinate(0)
    return ShardTensor(x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(), spec)


def check_vit(rank, num_ranks, layouts):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    model, image, target = vit_case()
    image.requires_grad_()
    reference = F.mse_loss(model(image), target)
    expected = torch.autograd.grad(reference, [*model.parameters(), image])
    worst = 0.0
    for sizes in layouts:
        for recompute in (False, True):
            model.recompute = recompute
            model.zero_grad()
            x = sharded(image.detach(), mesh, [PATCH * n for n in sizes]).requires_grad_()
            y = sharded(target, mesh, [PATCH * n for n in sizes])
            loss = F.mse_loss(model(x), y)
            assert type(loss) is torch.Tensor
            loss.backward()
            found = [*(p.grad for p in model.parameters()), x.grad.full_tensor()]
            assert abs(loss - reference) <= 1e-12 * abs(reference)
            for ours, theirs in zip(found, expected, strict=True):
                assert type(ours) is torch.Tensor
                worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return worst


LAYOUTS = {1: [[10]], 2: [[5, 5], [7, 3], [10, 0], [0, 10]], 3: [[4, 3, 3], [1, 8, 1], [6, 0, 4], [0, 10, 0]]}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_and_all_gradients_equal_one_process(num_ranks):
    worst = run_ranks(check_vit, num_ranks, LAYOUTS[num_ranks])
    assert max(worst) <= 1e-12, worst


def check_autocast(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    model, image, target = vit_case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        reference = F.mse_loss(model(image).float(), target)
    reference.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for sizes in ([12, 8], [20, 0]):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(sharded(image, mesh, sizes))
            assert out.dtype == out.to_local().dtype == torch.bfloat16
            loss = F.mse_loss(out.float(), sharded(target, mesh, sizes))
        loss.backward()
        torch.testing.assert_close(loss, reference, rtol=2e-2, atol=0)
        for p, theirs in zip(model.parameters(), expected, strict=True):
            assert (p.grad - theirs).norm() <= 5e-2 * theirs.norm() + 1e-3


def test_autocast_runs_and_stays_near_one_process():
    run_ranks(check_autocast, 2)

"""The program of one rank of ``scidata demo``: a plain ViT, trained on shards, then compared with one process.

Started by ``scidata demo`` through torchrun. The model and the loss know nothing of scidata.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scidata
from scidata.cli.commands.demo import FIELDS, PATCH, READ, SPLIT
from scidata.data.sample import Sample

_LEARNING_RATE = 0.05


class ViT(nn.Module):
    """A small vision transformer that predicts the next state, ``(batch, channels, height, width)`` to the same."""

    def __init__(self, channels: int, height: int, width: int, *, dim: int = 64, depth: int = 2, num_heads: int = 4):
        super().__init__()
        self.grid = (height // PATCH, width // PATCH)
        self.embed = nn.Conv2d(channels, dim, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.grid[0] * self.grid[1], dim))
        layers = [
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, channels * PATCH * PATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the change and add it."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        patches = self.head(self.norm(self.blocks(tokens)))
        patches = patches.unflatten(1, self.grid).unflatten(-1, (-1, PATCH, PATCH))  # (batch, h, w, channel, p, p)
        change: Tensor = patches.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
        return x + change


def _state(batch: Sample, step: int) -> Tensor:
    """Stack the normalised fields of one step as channels, ``(batch, channels, latitude, longitude)``."""
    return torch.cat([(batch[name][:, step] - mean) / spread for name, (mean, spread) in FIELDS.items()], dim=1)


def _train(model: nn.Module, batches: Iterator[Sample], num_steps: int) -> Iterator[tuple[Sample, float]]:
    """Take gradient steps; the gradient of the last is left in the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(num_steps):
        batch = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(_state(batch, 0)), _state(batch, 1))
        torch.autograd.backward(loss)
        optimizer.step()
        yield batch, loss.item()


def _model(ds: scidata.ShardedDataset) -> ViT:
    torch.manual_seed(0)
    levels, height, width = ds.reader.global_shape("u")[-3:]
    return ViT(len(FIELDS) * levels, height, width).double()


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _run(path: str, out: str, num_ranks: int, num_steps: int) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu", timeout=60)
    rank = mesh.get_rank()
    # bytes read are those of the samples, and of none read ahead
    ds = scidata.open_dataset(path, mesh, **READ, **SPLIT, dtype=torch.float64, pool_bytes=0)
    assert isinstance(ds, scidata.ShardedDataset)  # a grid, no store
    loader = scidata.DataLoader(ds, batch_size=1, shuffle=True)
    model = scidata.parallelize(_model(ds), mesh)
    losses, order = [], []
    for batch, loss in _train(model, _forever(loader), num_steps):
        losses.append(loss)
        order.append(batch.index[0] if isinstance(batch.index, list) else int(batch.index or 0))
        if rank == 0:
            print(f"step {len(losses)}: sample {order[-1]}, loss {loss:.6f}", flush=True)
    start, stop = ds.reader.partition.owned_rows("latitude", {"domain": mesh.get_local_rank("domain")})
    report: dict[str, Any] = {"rank": rank, "rows": [start, stop]}
    report["bytes_read"] = int(loader.stats()["bytes_fetched"])
    report["samples_read"] = int(loader.stats()["samples"])
    gradient = _gradient(model)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        report |= {"losses": losses, "order": order, **_compare(path, order, losses, gradient)}
    with open(os.path.join(out, f"rank{rank}.json"), "w") as f:
        json.dump(report, f)


def _forever(loader: scidata.DataLoader) -> Iterator[Sample]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def _compare(path: str, order: list[int], losses: list[float], gradient: Tensor) -> dict[str, Any]:
    """Train again in this process alone on whole samples, in the same order; return relative differences."""
    # as the ranks read: a step that two samples share is read for each
    ds = scidata.open_dataset(path, None, **READ, dtype=torch.float64, pool_bytes=0)
    assert isinstance(ds, scidata.ShardedDataset)
    whole = scidata.DataLoader(ds, batch_size=1, sampler=order, num_workers=0)
    model = _model(ds)
    expected = [loss for _, loss in _train(model, iter(whole), len(order))]
    reference = _gradient(model)
    return {
        "bytes_whole": int(whole.stats()["bytes_fetched"]),
        "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "gradient_difference": float((gradient - reference).norm() / reference.norm()),
    }


def main() -> None:
    """Run one rank; a failure is also left in a file, because torchrun's own report is long."""
    path, out, num_ranks, num_steps = sys.argv[1:]
    try:
        _run(path, out, int(num_ranks), int(num_steps))
    except BaseException:
        with open(os.path.join(out, f"error{os.getpid()}.txt"), "w") as f:
            f.write(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()

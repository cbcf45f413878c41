"""Ranges with stable names in torch's profiler, and nothing of them where none is on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import scidata
from scidata.device_mesh import torch_internals
from scidata.testing import make_grid, run_ranks


def steps(rank: int, num_ranks: int, folder: str) -> tuple[int, dict[str, int]]:
    mesh = scidata.init_mesh(dp=1, domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(f"{folder}/in.zarr", mesh, fields=["u"], pool_bytes=0)
    model = scidata.parallelize(nn.Conv2d(ds[0]["u"].shape[0], 2, 3, padding=1), mesh, bucket_bytes=10)
    made = []
    record = torch_internals.profiler.record_function
    torch_internals.profiler.record_function = lambda name: made.append(name) or record(name)

    def epoch(out: str) -> None:
        loader = scidata.DataLoader(ds, None, num_workers=0)
        with scidata.create(f"{folder}/{out}.zarr", like=ds) as writer:
            for i, sample in enumerate(loader):
                model(sample["u"]).square().mean().backward()
                writer[i] = sample

    epoch("first")
    before = len(made)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        epoch("second")
        torch.ones(3) + 1
    counts = {e.key: e.count for e in found.key_averages() if e.key.startswith("scidata::")}
    return before, counts | dict.fromkeys(made, 1)


def test_names(tmp_path: Path) -> None:
    make_grid(tmp_path / "in.zarr", num_times=3)
    for before, counts in run_ranks(steps, 2, str(tmp_path)):
        assert before == 0
        wanted = {"read", "decode", "wait", "transform", "halo", "bucket", "write"}
        assert {f"scidata::{name}" for name in wanted} <= counts.keys(), counts

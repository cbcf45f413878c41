"""Shared by tests: Numbers, numbers, place, run_all, through_json."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from scidata.core.types import BufferSpec
from scidata.data.sample import Sample
from scidata.device_mesh import init_mesh
from scidata.loader.data_loader import DataLoader
from scidata.testing import fake_group


class Numbers(torch.utils.data.Dataset):
    """Sample i is the number i."""

    def __init__(self, count: int, mesh: Any = None, fingerprint: str = "numbers") -> None:
        self.count, self.mesh, self.fingerprint = count, mesh, fingerprint
        self.dp_axis = None if mesh is None else "dp"
        self.transform: Callable[[Sample], Sample] | None = None
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def buffer_specs(self) -> dict[str, BufferSpec]:
        return {"x": BufferSpec(shape=(1,), dtype=np.dtype(np.int64))}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> None:
        self.reads.append(index)
        out["x"][0] = index

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool = False) -> Sample:
        return Sample(local, dims={"x": ("batch",) * batched + ("i",)}, index=index)


def numbers(batch: Sample) -> list[int]:
    return batch["x"].reshape(-1).tolist()


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    assert json.loads(json.dumps(state)) == state
    return json.loads(json.dumps(state))


@functools.cache
def place(rank: int, dp: int, domain: int) -> Any:
    """Return the mesh of a rank that is only pretended: it knows its coordinate."""
    with fake_group(dp * domain, rank=rank):
        return init_mesh(dp=dp, domain=domain)


def run_all(
    loader_of: Callable[[Any], DataLoader],
    state: dict[str, Any] | None,
    batches: int | None,
    *,
    dp: int,
    domain: int,
    epoch: int,
    rows_of: Callable[[DataLoader, Any], list[int]],
) -> tuple[dict[str, Any], list[int]]:
    """Let all ranks iterate for some batches (None: to the end); return their state, and what they had in its order."""
    states, had, lengths = [], {}, set()
    for rank in range(dp * domain):
        mesh = place(rank, dp, domain)
        loader = loader_of(mesh)
        loader.set_epoch(epoch)
        lengths.add(len(loader))
        if state is not None:
            loader.load_state_dict(state)
        rows = []
        for number, sample in enumerate(loader, 1):
            rows.append(rows_of(loader, sample))
            if number == batches:
                break
        if state is None and batches is None:
            assert len(rows) == len(loader)
        states.append(through_json(loader.state_dict()))
        had[tuple(mesh.get_coordinate())] = rows
    assert len(lengths) == 1
    assert all(s == states[0] for s in states)
    for dp_rank, domain_rank in had:
        assert had[dp_rank, domain_rank] == had[dp_rank, 0]
    steps = zip(*(had[r, 0] for r in range(dp)), strict=True)
    return states[0], [x for step in steps for row in zip(*step, strict=True) for x in row]

"""Batches of samples that differ in size on their way to a device, through the CUDA stream's twin on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.core.options import ReadOptions
from scidata.loader.data_loader import DataLoader
from scidata.loader.prefetch.copiers import DeviceCopier, Staging
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.slots import SlotRing
from scidata.store.reading.reader import StoreReader

NUM_ROWS = [5, 0, 70, 71, 3, 200, 200, 1, 90, 12]


class LateTransfer:
    """Copies no earlier than it must: when an event is waited for, or the copies are handed over."""

    def __init__(self) -> None:
        self.begun = self.waits = 0
        self._lock = threading.Lock()

    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self.begun += 1
        copies = [torch.empty_like(t) for t in tensors]
        return copies, LateEvent(self, list(tensors), copies)

    def hand_over(self, tensors: Sequence[torch.Tensor], event: Any) -> None:
        event.due = True  # on a device the stream waits, the host does not


@dataclasses.dataclass
class LateEvent:
    transfer: LateTransfer
    source: list[torch.Tensor]
    copies: list[torch.Tensor]
    due: bool = False
    done: bool = False

    def synchronize(self) -> None:
        with self.transfer._lock:
            self.transfer.waits += 1
            if not self.done:
                for a, b in zip(self.copies, self.source, strict=True):
                    a.copy_(b)
            self.done = True


@dataclasses.dataclass(frozen=True)
class Part:
    values: Mapping[str, Any]

    def arrays(self) -> dict[str, Any]:
        return dict(self.values)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Part:
        return Part(arrays)


def part(index: int) -> Part:
    rows = NUM_ROWS[index]
    return Part({
        "u": np.full((rows, 3), index, np.float32),
        "mask": np.arange(rows) % 2 == index % 2,
        "edges": np.full((2, 2 * rows), index, np.int64),
        "scalar": np.array(index, np.int16),
    })  # fmt: skip


def read(index: int, out: Any) -> None:
    out.part = part(index)
    out.nbytes = sum(a.nbytes for a in out.part.arrays().values())


def equal(found: Part, index: int) -> bool:
    wanted = part(index).arrays()
    return found.values.keys() == wanted.keys() and all(
        isinstance(t, torch.Tensor) and np.array_equal(t.numpy(), wanted[n]) and t.numpy().dtype == wanted[n].dtype
        for n, t in found.values.items()
    )


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_a_block_is_written_again_only_after_its_copy(num_workers: int, size: int) -> None:
    blocks: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        blocks.append(nbytes)
        return torch.full((nbytes,), 77, dtype=torch.uint8)

    transfer, ring, staging = LateTransfer(), SlotRing(2), Staging(allocate)
    items = [list(range(i, min(i + size, len(NUM_ROWS)))) for i in range(0, len(NUM_ROWS), size)] * 4
    kept = []
    for item, parts in Prefetcher(
        items, read, ring, num_workers=num_workers, copier=DeviceCopier(ring, transfer, staging)
    ):
        kept.append((item, parts))
    while staging._free:  # what the device would have done by itself
        event = staging._free.popleft().event
        if event is not None:
            event.synchronize()
    assert all(equal(p, i) for item, parts in kept for i, p in zip(item, parts, strict=True))
    assert not ring.busy
    largest = max(sum(part(i).arrays()[n].nbytes + 64 for i in item for n in part(0).arrays()) for item in items)
    assert max(blocks) <= 1.25 * largest
    assert len(blocks) <= 3 * 4, "blocks are not used again"  # two under way and one late, each grown a few times
    assert transfer.waits >= len(items) - 3


def test_without_staging_parts_are_copied_from_where_they_lie() -> None:
    transfer, ring = LateTransfer(), SlotRing(2)
    prefetcher = Prefetcher([[5], [1], [2]], read, ring, copier=DeviceCopier(ring, transfer, None))
    kept = []
    for (index,), (found,) in prefetcher:
        assert found.values["u"].shape == (NUM_ROWS[index], 3)
        kept.append(found)
    assert len(kept) == transfer.begun == 3


def test_parts_of_another_make_are_handed_out_as_they_are() -> None:
    def plain(index: int, out: Any) -> None:
        out.part = index

    ring = SlotRing(2)
    copier = DeviceCopier(ring, LateTransfer(), Staging(lambda n: torch.empty(n, dtype=torch.uint8)))
    assert [parts for _, parts in Prefetcher([[3, 4], [5]], plain, ring, copier=copier)] == [[3, 4], [5]]


def test_leaving_early_returns_the_blocks() -> None:
    transfer, ring = LateTransfer(), SlotRing(3)
    staging = Staging(lambda n: torch.empty(n, dtype=torch.uint8))
    prefetcher = Prefetcher([[i] for i in range(10)], read, ring, copier=DeviceCopier(ring, transfer, staging))
    next(prefetcher)
    prefetcher.close()
    assert len(staging._free) == transfer.begun
    assert not ring.busy
    del prefetcher
    gc.collect()


def test_parts_of_a_store_come_back_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = rng.random((60, 2))
        file["cells"] = np.stack([np.arange(58), np.arange(1, 59), np.arange(2, 60)], 1).astype("i4")
        file["node/u"] = rng.standard_normal((60, 3))
    scidata.partition(tmp_path / "raw.h5", tmp_path / "store")
    local = StoreReader(tmp_path / "store", ReadOptions(halo=2, ghosts="disk"), num_parts=2).read(0, 1)
    names = set(local.arrays())
    assert names == {f"fields/{n}" for n in local.fields} | {
        *("relations/edge", "far_relations/edge"),
        *("cells/offsets", "cells/connectivity", "cells/types"),
    }
    ds = scidata.open_dataset(str(tmp_path / "store"))
    whole = ds.read_local(0)
    tensors = whole.with_arrays({name: torch.from_numpy(a.copy()) for name, a in whole.arrays().items()})
    sample, other = ds.assemble(tensors), ds.assemble(whole)
    assert all(torch.equal(sample[name], other[name]) for name in other)
    assert torch.equal(sample.edge_index, other.edge_index)
    assert torch.equal(sample.cells.connectivity, other.cells.connectivity)
    assert sample["u"].data_ptr() == tensors.fields["u"].data_ptr()
    ring, transfer = SlotRing(1), LateTransfer()
    copier = DeviceCopier(ring, transfer, Staging(lambda n: torch.empty(n, dtype=torch.uint8)))
    for _ in range(2):  # edges and cells are shared by what is read, and by nothing that was copied
        slots = ring.acquire(1)
        slots.slot(0).part = ds.read_local(0)
        ticket = copier.start(slots)
        ticket.event.synchronize()
        (found,) = copier.finish(ticket)
        copied = ds.assemble(found)
        assert torch.equal(copied.edge_index, other.edge_index)
        assert torch.equal(copied["u"], other["u"])
        assert copied.edge_index.data_ptr() != ds[0].edge_index.data_ptr()


def test_a_loader_pickles_without_its_blocks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((9, 3))
    scidata.partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    loader = DataLoader(scidata.open_dataset(str(tmp_path / "store")), pin_memory=True, device="cuda")
    loader._read_paths.staging = Staging()
    assert pickle.loads(pickle.dumps(loader))._read_paths.staging is None

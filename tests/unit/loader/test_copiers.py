"""Batches of samples that differ in size on their way to a device, through the CUDA stream's twin on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.core.memory import ArrayPool
from scidata.core.options import ReadOptions
from scidata.core.types import BufferSpec
from scidata.loader.prefetch.buffers import Ring, buffer_ring
from scidata.loader.prefetch.copiers import DeviceCopier
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.slots import SlotSet
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


def ring_of(limit: int = 2) -> Ring[SlotSet]:
    return Ring(SlotSet, limit, ArrayPool())


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_memory_is_written_again_only_after_its_copy(num_workers: int, size: int) -> None:
    transfer, memory = LateTransfer(), ArrayPool()
    specs = {"u": BufferSpec(shape=(1 << 17,), dtype=np.dtype(np.float32))}
    ring = buffer_ring(specs, 2, memory)
    items = [list(range(i, min(i + size, 10))) for i in range(0, 10, size)] * 4

    def fill(index: int, out: dict[str, np.ndarray]) -> None:
        out["u"][...] = index

    kept = []
    copier = DeviceCopier(ring, transfer)
    for item, tensors in Prefetcher(items, fill, ring, num_workers=num_workers, copier=copier):
        kept.append((item, tensors["u"]))
    assert all(u[:, [0, -1]].tolist() == [[i, i] for i in item] for item, u in kept)
    assert transfer.begun == transfer.waits == len(items)
    assert not ring.busy
    assert memory.num_allocated <= 3 + 2 * 4  # two under way and one late; and the short ones at the end


@pytest.mark.parametrize("num_workers", [0, 3])
def test_parts_are_copied_from_where_they_lie(num_workers: int) -> None:
    transfer, ring = LateTransfer(), ring_of()
    items = [[5, 1], [2], [0, 8, 9]]
    kept = list(Prefetcher(items, read, ring, num_workers=num_workers, copier=DeviceCopier(ring, transfer)))
    assert all(equal(p, i) for item, parts in kept for i, p in zip(item, parts, strict=True))
    assert [item for item, _ in kept] == items
    assert transfer.begun == 3


def test_parts_pass_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    ring = Ring(partial(SlotSet, pin=True), 2, ArrayPool())
    ((_, (found,)),) = Prefetcher([[5]], read, ring, copier=DeviceCopier(ring, LateTransfer()))
    assert equal(found, 5)
    assert pinned == [array.nbytes for array in part(5).arrays().values()]


def test_parts_of_another_make_are_handed_out_as_they_are() -> None:
    def plain(index: int, out: Any) -> None:
        out.part = index

    ring = ring_of()
    copier = DeviceCopier(ring, LateTransfer())
    assert [parts for _, parts in Prefetcher([[3, 4], [5]], plain, ring, copier=copier)] == [[3, 4], [5]]


def test_leaving_early_returns_the_places() -> None:
    transfer, ring = LateTransfer(), ring_of(3)
    prefetcher = Prefetcher([[i] for i in range(10)], read, ring, copier=DeviceCopier(ring, transfer))
    next(prefetcher)
    prefetcher.close()
    assert transfer.waits == transfer.begun
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
    ring, transfer = ring_of(1), LateTransfer()
    copier = DeviceCopier(ring, transfer)
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

"""Pinned buffers, the copy stream and its events."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.utils.data
import xarray as xr

import scidata
from scidata.core.memory import ArrayPool
from scidata.core.types import BufferSpec
from scidata.data.sample import Sample
from scidata.data.side_stream import SideStream
from scidata.loader.data_loader import DataLoader
from scidata.loader.prefetch.buffers import BufferSet, Ring, buffer_ring
from scidata.loader.prefetch.copiers import DeviceCopier
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.testing import GRID_FORMATS, make_grid
from tests.accelerator._device import DEVICE, IS_SIM, KIND, busy, current_stream

SHAPE = (512, 1024)  # 2 MiB: its copy takes long enough to be overtaken
SPECS = {
    "u": BufferSpec(shape=SHAPE, dtype=np.dtype(np.float32)),
    "scalar": BufferSpec(shape=(), dtype=np.dtype(np.int64)),
    "mask": BufferSpec(shape=(3,), dtype=np.dtype(bool)),
}


def ring_of(limit: int = 2, *, pin: bool = True) -> Ring[BufferSet]:
    return buffer_ring(SPECS, limit, ArrayPool(), pin_memory=pin)


def fill(index: int, out: dict[str, np.ndarray]) -> None:
    out["u"][...] = index
    out["scalar"][...] = index
    out["mask"][...] = [index % 2, 1, 0]


def memory_allocated() -> int:
    return int(torch.get_device_module().memory_allocated(DEVICE))


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """Have asynchronous copies of the stand-in take as long as a GPU's of some MB."""
    if IS_SIM:
        torch.ops.sim.late(1000)
    yield
    torch.accelerator.synchronize()
    if IS_SIM:
        torch.ops.sim.late(0)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_arrive_on_the_device(pin: bool, num_workers: int) -> None:
    ring = ring_of(pin=pin)
    items = [[2 * i, 2 * i + 1] for i in range(40)]
    seen = []
    for item, tensors in Prefetcher(
        items, fill, ring, num_workers=num_workers, copier=DeviceCopier(ring, SideStream(DEVICE))
    ):
        assert all(t.device == DEVICE for t in tensors.values())
        seen.append((item, tensors["u"].amin((1, 2)), tensors["u"].amax((1, 2)), tensors["scalar"], tensors["mask"]))
    for item, low, high, scalar, mask in seen:
        assert low.tolist() == high.tolist() == item
        assert scalar.tolist() == item
        assert mask.tolist() == [[bool(i % 2), True, False] for i in item]
    assert not ring.busy


@pytest.mark.parametrize("pin", [True, False])
def test_a_slow_consumer_stream_reads_each_batch_before_it_is_reused(pin: bool) -> None:
    """The compute stream lags: device memory must not be given to a later copy before it has read it."""
    ring = ring_of(pin=pin)
    sums, items = [], [[i] for i in range(1, 60)]
    for _, tensors in Prefetcher(items, fill, ring, copier=DeviceCopier(ring, SideStream(DEVICE))):
        busy(0.001)
        sums.append(tensors["u"].clone())  # after the lag, while later batches are copied
        del tensors
    assert [s.double().mean().item() for s in sums] == [float(i) for (i,) in items]


def test_a_slow_copy_stream_is_waited_for_by_the_reader() -> None:
    """The copy lags: host memory must not be written before the copy has read it, nor used on the device before."""
    ring = ring_of(1)
    copier = DeviceCopier(ring, SideStream(DEVICE))
    first = ring.acquire(1)
    fill(1, first.slot(0))
    copier._transfer._stream = torch.Stream(DEVICE)
    with copier._transfer._stream:
        busy(0.5)
    ticket = copier.start(first)
    assert not ticket.event.query()
    tensors = copier.finish(ticket)
    mean = tensors["u"].mean()
    del first
    again = ring.acquire(1)  # other memory: torch's allocator knows of the copy
    fill(9, again.slot(0))
    copier.settle()
    assert ticket.event.query()
    assert mean.item() == 1
    assert (tensors["u"] == 1).all()


def test_hand_over_on_another_stream() -> None:
    ring = ring_of()
    stream, means = torch.Stream(DEVICE), []
    with stream:
        for _, tensors in Prefetcher(
            [[i] for i in range(40)], fill, ring, copier=DeviceCopier(ring, SideStream(DEVICE))
        ):
            busy(0.0005)
            means.append(tensors["u"].clone())
    stream.synchronize()
    assert [m.mean().item() for m in means] == list(range(40))


def test_the_host_does_not_wait_for_the_computation() -> None:
    ring = ring_of()
    prefetcher = Prefetcher([[i] for i in range(3)], fill, ring, copier=DeviceCopier(ring, SideStream(DEVICE)))
    _, first = next(prefetcher)
    busy(0.5)
    computed = torch.Event(DEVICE)
    computed.record()
    _, second = next(prefetcher)
    assert not computed.query()
    prefetcher.close()
    assert (first["u"].max().item(), second["u"].max().item()) == (0, 1)


def test_at_most_one_batch_is_copied_ahead() -> None:
    ring = ring_of(8)
    torch.accelerator.synchronize()
    before = memory_allocated()
    most = 0
    for _, _tensors in Prefetcher(
        [[i] for i in range(30)], fill, ring, prefetch=8, copier=DeviceCopier(ring, SideStream(DEVICE))
    ):
        most = max(most, memory_allocated() - before)
    assert most <= 3 * (2 << 20) + (64 << 10)  # the loop's variable, the one in hand, the next


def test_pinned_batches_on_the_host_may_be_copied_by_the_user_and_dropped() -> None:
    """The user's own asynchronous copy from a pinned batch must be over before its memory is written again."""
    ring = ring_of()
    stream, on_device = torch.Stream(DEVICE), []
    for _, tensors in Prefetcher([[i, i] for i in range(60)], fill, ring):
        assert tensors["u"].is_pinned()
        with stream:
            busy(0.001)
            on_device.append(tensors["u"][1:].to(DEVICE, non_blocking=True).mean())
        del tensors
    torch.accelerator.synchronize()
    assert [m.item() for m in on_device] == list(range(60))


class Numbers(torch.utils.data.Dataset):
    """A data set of the loader's interface, whose samples are their numbers."""

    mesh = dp_axis = transform = None

    def __len__(self) -> int:
        return 25

    def buffer_specs(self) -> dict[str, BufferSpec]:
        return SPECS

    def read_into(self, index: int, out: dict[str, np.ndarray]) -> None:
        fill(index, out)

    def assemble(self, local: dict[str, torch.Tensor], *, index: int | list[int], batched: bool) -> Sample:
        return Sample(local, dims={n: tuple(f"d{i}" for i in range(t.ndim)) for n, t in local.items()}, index=index)


@pytest.mark.parametrize("device", [None, "cpu", KIND, f"{KIND}:0", 0])
@pytest.mark.parametrize("pin", [True, False])
def test_loader(device: str | int | None, pin: bool) -> None:
    loader = DataLoader(Numbers(), 4, pin_memory=pin, device=device)
    for _ in range(2):
        kept = list(loader)
        for batch in kept:
            on_gpu = device not in (None, "cpu")
            assert batch["u"].device == (DEVICE if on_gpu else torch.device("cpu"))
            assert on_gpu or batch["u"].is_pinned() == pin
            assert batch["u"].mean((1, 2)).tolist() == batch["scalar"].tolist() == batch.index
    for sample in DataLoader(Numbers(), None, pin_memory=pin, device=device):
        assert sample["scalar"].shape == ()
        assert sample["scalar"].item() == sample.index


def test_making_things_does_not_start_the_device() -> None:
    import subprocess
    import sys

    code = f"""
import numpy as np, torch
import tests.accelerator._device
from scidata.core.memory import ArrayPool
import scidata
from scidata.loader.data_loader import DataLoader
from scidata.loader.prefetch.buffers import buffer_ring
from scidata.data.side_stream import SideStream
from scidata.loader.prefetch.copiers import DeviceCopier
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.data.sample import Sample
from scidata.core.types import BufferSpec
ring = buffer_ring({{"u": BufferSpec(shape=(4,), dtype=np.dtype("f4"))}}, 2, ArrayPool(), pin_memory=True)
p = Prefetcher([[0]], lambda i, out: None, ring, copier=DeviceCopier(ring, SideStream(torch.device("{KIND}", 0))))
assert not torch.get_device_module().is_initialized()
next(p)
assert torch.get_device_module().is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- samples that differ in size -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve clouds of very different sizes, whose values are their numbers."""
    folder = tmp_path_factory.mktemp("clouds")
    rng = np.random.default_rng(0)
    for i in range(12):
        with h5py.File(folder / f"{i:02}.h5", "w") as file:
            file["points"] = rng.random((10 + 40_000 * (i % 4), 3))
            file["u"] = np.full((10 + 40_000 * (i % 4), 8), i, np.float32)
    scidata.partition(sorted(map(str, folder.glob("*.h5"))), folder / "store", kind="points")
    return str(folder / "store")


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_irregular_samples_are_copied_ahead_and_whole(cloud: str, pin: bool, num_workers: int) -> None:
    loader = DataLoader(scidata.open_dataset(cloud), None, device=KIND, pin_memory=pin, num_workers=num_workers)
    extremes = []
    for _ in range(3):
        for sample in loader:
            busy(0.001)  # the computation lags behind the copies
            assert sample["u"].device == DEVICE
            extremes.append((sample.index, sample["u"].amin(), sample["u"].amax()))
            del sample
    assert [(int(low), int(high)) for _, low, high in extremes] == [(i, i) for i, _, _ in extremes]


def _mesh(path: Path, num: int) -> None:
    """Write a strip of ``num`` squares as HDF5, whose nodes have values."""
    with h5py.File(path, "w") as file:
        file["points"] = [(x, y) for y in (0.0, 1.0) for x in range(num + 1)]
        file["cells"] = [(i, i + 1, num + 2 + i, num + 1 + i) for i in range(num)]
        file["u"] = np.random.default_rng(num).random((2 * num + 2, 4), dtype=np.float32)


def _table(path: Path) -> dict[str, Any]:
    """Write observations of two days as NetCDF; return the options that open windows of them."""
    num = 5000
    dates = np.datetime64("2020-01-01") + np.sort(np.random.default_rng(0).integers(0, 2 * 86400, num)).astype("m8[s]")
    columns = {name: ("obs", np.random.default_rng(1).random(num)) for name in ("lat", "lon", "t")}
    xr.Dataset({**columns, "dates": ("obs", dates)}).to_netcdf(path)
    return {"kind": "points", "time": "dates", "window": "6h", "positions": ("lat", "lon")}


@pytest.mark.parametrize("what", [*GRID_FORMATS, "store", "raw points", "table"])
def test_every_reader_fills_what_is_copied(tmp_path: Path, what: str) -> None:
    options: dict[str, Any] = {}
    if what in GRID_FORMATS:
        path = tmp_path / ("in.zarr" if what.startswith("zarr") else "in.nc" if "netcdf" in what else "in.h5")
        make_grid(path, format=what, num_times=6)
    elif what == "table":
        path = tmp_path / "obs.nc"
        options = _table(path)
    else:
        for number, size in enumerate((3, 2000, 7, 900)):
            _mesh(tmp_path / f"{number}.h5", size)
        path, options = tmp_path / "*.h5", {"kind": "points"}
        if what == "store":
            scidata.partition(path, tmp_path / "store", edges="cells")
            path, options = tmp_path / "store", {}
    ds = scidata.open_dataset(path, **options)
    whole = [ds[i] for i in range(len(ds))]
    loader = DataLoader(scidata.open_dataset(path, **options), None, device=KIND, pin_memory=True, num_workers=2)
    for _ in range(2):
        for sample in loader:
            busy(0.002)
            want = whole[sample.index]
            assert {*sample} == {*want}
            for name, found in sample.items():
                assert found.device == DEVICE
                assert torch.equal(found.cpu().nan_to_num(), want[name].nan_to_num()), name


@pytest.mark.parametrize("names", [("fine", "cloud"), ("fine", "coarse")])
@pytest.mark.parametrize("pin", [True, False])
def test_parts_of_joins_are_copied_ahead_and_whole(
    cloud: str, tmp_path: Path, names: tuple[str, ...], pin: bool
) -> None:
    opened = {"cloud": scidata.open_dataset(cloud, kind="points")}
    for name, size in (("fine", 1 << 18), ("coarse", 1 << 10)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["u"] = np.repeat(np.arange(len(opened["cloud"]), dtype=np.float32)[:, None], size, axis=1)
        opened[name] = scidata.open_dataset(tmp_path / f"{name}.h5")
    keys = range(len(opened["cloud"]))
    ds = scidata.join({name: opened[name] for name in names}, on=dict.fromkeys(names, keys))
    extremes = []
    for sample in scidata.DataLoader(ds, None, device=KIND, pin_memory=pin):
        busy(0.001)  # the computation lags behind the copies
        assert {part["u"].device for part in sample.values()} == {DEVICE}
        extremes.append((sample.index, [(part["u"].amin(), part["u"].amax()) for part in sample.values()]))
        del sample
    assert [i for i, _ in extremes] == list(keys)
    for i, ends in extremes:
        assert {int(end) for pair in ends for end in pair} == {i}


def test_page_locked_parts_are_not_overwritten_amid_their_copy() -> None:
    side = SideStream(DEVICE)
    side._stream = torch.Stream(DEVICE)
    with side._stream:
        busy(0.5)
    copies, event = side.copy([torch.full((1 << 20,), 1.0).pin_memory()])
    side.hand_over(copies, event)
    used = copies[0].clone()
    assert not event.query()
    other = torch.full((1 << 20,), 9.0).pin_memory()  # not in the memory that is still copied from
    event.synchronize()
    assert used.mean().item() == 1
    assert (other == 9).all()


# -- transforms on a stream of their own -----------------------------------------------------------------------------


class Transformed(Numbers):
    """Doubles its samples, slowly, on whatever stream is the current one."""

    def __init__(self) -> None:
        self.streams: set[int] = set()

    def transform(self, sample: Sample) -> Sample:
        self.streams.add(current_stream().stream_id)
        busy(0.001)
        return sample.replace({"u": sample["u"] * 2})


@pytest.mark.parametrize("own", [True, False])
def test_transforms_on_a_stream_of_their_own(own: bool) -> None:
    """Waited for where a batch is used, and its memory not given to a later batch before that."""
    ds = Transformed()
    loader = DataLoader(ds, 2, device=KIND, pin_memory=True, transform_stream=own)
    mine, found = current_stream().stream_id, []
    for _ in range(3):
        for batch in loader:
            assert current_stream().stream_id == mine
            busy(0.0005)
            found.append((batch.index, batch["u"].mean((1, 2))))
            del batch
    assert (mine in ds.streams) != own
    for index, mean in found:
        assert mean.tolist() == [2 * i for i in index]

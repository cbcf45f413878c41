"""Each wait, each ``record_stream`` and each event is left out, one at a time, and found; and nothing is found else.

====================================  ==================  ==========================================================
left out                              found by            as
====================================  ==================  ==========================================================
``current``: ``wait_stream``          writer              values of before the computation
``current``: ``on_stream``            writer              an event that says nothing of the copy
``record``: ``event.record``          copies, writer      an event that is over at once
``hand_over``: ``wait_event``         copies              a batch that has not come
``hand_over``: ``wait_stream``        transforms          a batch that is not transformed yet
``hand_over``: ``record_stream``      copies, transforms  memory of a batch that a later one was copied into
``_from_accelerator``: the same       writer              memory that was freed and overwritten before its copy
``values``: ``ready.synchronize``     writer              a host buffer that the copy has not reached
``abandon``: ``synchronize``          memory              page-locked memory for all batches of an epoch
``settle``: ``synchronize``           end                 a copy under way when the epoch is over
``on_stream``: ``set_stream`` back    place               another current stream afterwards
``on_stream``: ``device_index``       place               another current device afterwards
====================================  ==================  ==========================================================

On the stand-in alone: a GPU may be quick enough to be right by luck.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from scidata.core.memory import ArrayPool
from scidata.core.types import BufferSpec
from scidata.data.output.part_writer import Staged, Staging
from scidata.data.sample import Sample
from scidata.data.side_stream import SideStream
from scidata.device_mesh import devices
from scidata.loader.data_loader import DataLoader
from scidata.loader.prefetch.buffers import buffer_ring
from scidata.loader.prefetch.copiers import DeviceCopier
from scidata.loader.prefetch.prefetcher import Prefetcher
from tests.accelerator._device import DEVICE, IS_SIM, busy, current_stream
from tests.accelerator.test_copies import Numbers

if not IS_SIM:
    pytest.skip("a GPU may be quick enough to be right by luck", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:scidata.DataLoader. data is what the loop waits for")
SPECS = {"u": BufferSpec(shape=(64, 64), dtype=np.dtype(np.float32))}
LAG = 0.003  # seconds of a copy, and of a step on the device, times the pace
PACES = (1, 10, 50)  # a busy machine may be slower than the device is late: then that is later


class Pace:
    now = 1


def set_pace(pace: int) -> None:
    Pace.now = pace
    torch.ops.sim.late(int(pace * LAG * 1e6))


def lag(steps: int = 1) -> None:
    busy(steps * Pace.now * LAG)


def fill(index: int, out: dict[str, np.ndarray]) -> None:
    out["u"][...] = index


def is_wrong(tensor: torch.Tensor, value: float) -> bool:
    values = tensor.cpu()
    return not bool((values == value).all())


# -- what may go wrong: each returns how often it did ------------------------------------------------------------------


def read(num: int = 12) -> Any:
    ring = buffer_ring(SPECS, 3, ArrayPool(), pin_memory=True)
    return Prefetcher([[i] for i in range(1, num + 1)], fill, ring, copier=DeviceCopier(ring, SideStream(DEVICE)))


def copies() -> int:
    """Batches that are used at once, and those that a slow device uses when the host has let go of them."""
    found = []
    for lags in (0, 1):
        for item, tensors in read():
            lag(lags)
            found.append((item[0], tensors["u"].clone()))
            del tensors
        torch.accelerator.synchronize()
    return sum(is_wrong(tensor, index) for index, tensor in found)


def memory() -> int:
    """Page-locked blocks beyond those of the batches ahead, of a host that is faster than the copies."""
    before, most = torch.ops.sim.pinned(), 0
    for _ in read(20):
        most = max(most, torch.ops.sim.pinned() - before)
    return max(0, most - 8)


def end() -> int:
    """Copies that are under way when an epoch is over."""
    prefetcher, events = read(), []
    copy = SideStream.copy

    def noted(self: SideStream, tensors: Any) -> Any:
        events.append(copy(self, tensors))
        return events[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "copy", noted)
        list(prefetcher)
    return sum(not event.query() for _, event in events)


class Slow(Numbers):
    def transform(self, sample: Sample) -> Sample:
        lag()
        return sample.replace({"u": sample["u"].clone()})


def transforms() -> int:
    """Batches of transforms on a stream of their own."""
    found = []
    for lags in (0, 1):
        loader = DataLoader(Slow(), None, device=DEVICE, pin_memory=True, transform_stream=True)
        for sample in loader:
            lag(lags)
            found.append((sample.index, sample["u"].clone()))
            del sample
        torch.accelerator.synchronize()
    return sum(is_wrong(tensor, index) for index, tensor in found)


def writer() -> int:
    """Values of a computation that lags, whose memory is let go of as soon as it is given to the writer."""
    staging, wrong = Staging(copy=True), 0
    sources = [torch.full((64, 64), float(i), device=DEVICE) for i in range(8)]
    for i, source in enumerate(sources):
        lag(4)  # longer than a copy takes
        computed = source.clone()
        staged = staging.take(computed, "u")
        del computed
        wrong += not bool((staged.values() == i).all())
        staged.release()
        staged.host.fill_(-1)
        torch.accelerator.synchronize()
    return wrong


def place() -> int:
    """Whether a copy to another device leaves another current stream, or device."""
    before = current_stream(torch.device(DEVICE.type, 1))
    SideStream(torch.device(DEVICE.type, 1)).copy([torch.ones(3)])
    changed = [torch.accelerator.current_device_index() != 0, current_stream(before.device) != before]
    torch.accelerator.set_stream(before)
    torch.accelerator.set_device_index(0)
    return sum(changed)


SCENARIOS = (copies, memory, end, transforms, writer, place)

MUTANTS: list[tuple[Any, str, str, str, set[str]]] = [
    (SideStream, "current", "self._stream.wait_stream(", "str(", {"writer"}),
    (SideStream, "current", "on_stream(self._stream)", "nullcontext()", {"writer"}),
    (SideStream, "record", "event.record(self._stream)", "pass", {"copies", "writer"}),
    (SideStream, "hand_over", "current.wait_event(event)", "pass", {"copies"}),
    (SideStream, "hand_over", "current.wait_stream(self._stream)", "pass", {"transforms"}),
    (SideStream, "hand_over", "tensor.record_stream(current)", "pass", {"copies", "transforms"}),
    (Staging, "_from_accelerator", "tensor.record_stream(stream)", "pass", {"writer"}),
    (Staged, "values", "self.ready.synchronize()", "pass", {"writer"}),
    (DeviceCopier, "abandon", "earlier[1].synchronize()", "pass", {"memory"}),
    (DeviceCopier, "settle", "latest[1].synchronize()", "pass", {"end"}),
    (devices, "on_stream", "torch.accelerator.set_stream(before)", "pass", {"place"}),
    (devices, "on_stream", "torch.accelerator.device_index(stream.device.index)", "nullcontext()", {"place"}),
]


@pytest.fixture(autouse=True)
def _late() -> Any:
    set_pace(1)
    yield
    torch.accelerator.synchronize()
    torch.ops.sim.late(0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_found_in_the_code_as_it_is(scenario: Callable[[], int]) -> None:
    assert scenario() == 0


@pytest.mark.parametrize(("owner", "name", "line", "instead", "found_by"), MUTANTS)
def test_a_mutant_is_found(
    owner: Any, name: str, line: str, instead: str, found_by: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(line) == 1
    module = sys.modules[getattr(owner, "__module__", devices.__name__)]
    made: dict[str, Any] = {}
    exec(source.replace(line, instead), vars(module) | {"nullcontext": nullcontext}, made)
    for place in (owner, sys.modules[SideStream.__module__]):  # which imports the function of a module
        if hasattr(place, name):
            monkeypatch.setattr(place, name, made[name])
    for scenario in SCENARIOS:
        if scenario.__name__ in found_by:
            assert any(set_pace(pace) or scenario() for pace in PACES), scenario.__name__

"""Two devices in one process; copies that fail; memory that is full; Ctrl-C amid a copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import scidata
from scidata.loader.data_loader import DataLoader
from scidata.testing import make_grid
from tests.accelerator._device import DEVICE, IS_SIM, KIND, busy
from tests.accelerator.test_copies import Numbers

several = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
stand_in = pytest.mark.skipif(not IS_SIM, reason="a GPU cannot be told to fail")


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    if IS_SIM:
        torch.ops.sim.late(1000)
    yield
    if IS_SIM:
        torch.ops.sim.late(0)
        torch.ops.sim.limit(1 << 62)
        torch.ops.sim.fail_copy(-1)
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


def assert_whole(loader: DataLoader) -> None:
    used = []
    for batch in loader:
        busy(0.001)
        used.append((batch.index, batch["u"].clone()))
        del batch
    assert len(used) == 7
    for index, values in used:
        assert values.amin((1, 2)).tolist() == values.amax((1, 2)).tolist() == index


# -- two devices -------------------------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("current", [0, 1])
def test_a_loader_copies_to_its_own_device(current: int) -> None:
    """Also where another is the current one, and in turns with a loader to that one."""
    torch.accelerator.set_device_index(current)
    loaders = [DataLoader(Numbers(), 4, device=torch.device(KIND, i), pin_memory=True) for i in range(2)]
    for first, second in zip(*loaders, strict=True):
        assert [batch["u"].device.index for batch in (first, second)] == [0, 1]
        assert first["u"].mean((1, 2)).tolist() == second["u"].mean((1, 2)).tolist() == first.index
    torch.accelerator.set_device_index(1 - current)  # where a loader without an index copies to, from now on
    assert next(iter(DataLoader(Numbers(), 4, device=KIND)))["u"].device.index == 1 - current
    assert torch.accelerator.current_device_index() == 1 - current


@several
def test_a_writer_takes_tensors_of_both(tmp_path: Path) -> None:
    make_grid(tmp_path / "in.zarr", num_times=4)
    ds = scidata.open_dataset(tmp_path / "in.zarr")
    with scidata.create(tmp_path / "out.zarr", like=ds) as writer:
        for i in range(len(ds)):
            writer[i] = ds[i].to(torch.device(KIND, i % 2))
    for i, sample in enumerate(scidata.open_dataset(tmp_path / "out.zarr")):
        assert all(torch.equal(sample[name], ds[i][name]) for name in ds.fields)


# -- what fails --------------------------------------------------------------------------------------------------------


@stand_in
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_copy_that_fails(num_workers: int) -> None:
    """The loop hears of it, no thread is left, and an epoch that the device is well in is whole."""
    loader = DataLoader(Numbers(), 4, device=DEVICE, pin_memory=True, num_workers=num_workers)
    torch.ops.sim.fail_copy(10)
    found = []
    with pytest.raises(RuntimeError, match="a copy has failed"):
        for batch in loader:
            torch.accelerator.synchronize()
            found.append((batch.index, batch["u"].clone()))
    torch.ops.sim.fail_copy(-1)
    assert found
    assert_whole(loader)


@stand_in
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_of_the_device_that_is_full(num_workers: int) -> None:
    """torch's own error, in the loop; with room again, the same loader goes on."""
    loader = DataLoader(Numbers(), 4, device=DEVICE, pin_memory=True, num_workers=num_workers)
    torch.ops.sim.limit(torch.ops.sim.allocated(0) + (12 << 20))  # one batch of 8 MiB
    kept = []
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        for batch in loader:
            kept.append(batch["u"])
    assert len(kept) <= 1  # none where the second is copied before the first is asked for
    kept.clear()
    torch.ops.sim.limit(1 << 62)
    assert_whole(loader)


@stand_in
def test_a_writer_whose_copy_fails(tmp_path: Path) -> None:
    """The error comes out at the latest when the output is closed, and the step is not among those that are there."""
    make_grid(tmp_path / "in.zarr", num_times=3)
    ds = scidata.open_dataset(tmp_path / "in.zarr", fields=["u"])
    samples = [ds[i].to(DEVICE) for i in range(len(ds))]
    torch.accelerator.synchronize()
    with pytest.raises(Exception, match="a copy has failed"), scidata.create(tmp_path / "out.zarr", like=ds) as writer:
        writer[0] = samples[0]
        torch.accelerator.synchronize()
        torch.ops.sim.fail_copy(0)
        writer[1] = samples[1]


CTRL_C = """
import sys
from tests.accelerator import _device
from tests.accelerator.test_copies import Numbers
from scidata.loader.data_loader import DataLoader
import torch
torch.ops.sim.late(50_000) if _device.IS_SIM else None
for epoch in range(1000):
    for batch in DataLoader(Numbers(), 4, device=_device.DEVICE, pin_memory=True):
        print(batch.index, flush=True)
"""


def test_ctrl_c_amid_a_copy() -> None:
    """The process ends soon, by the interrupt, without a crash."""
    command = [sys.executable, "-c", CTRL_C]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as run:
        assert run.stdout
        for _ in range(3):
            assert run.stdout.readline().startswith("[")
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert run.returncode in (1, -signal.SIGINT)

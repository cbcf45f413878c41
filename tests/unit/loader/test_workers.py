"""``workers="process"``: real processes that read and transform, and how they end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import scidata
from scidata.errors import ConfigError, UnknownNameError, WorkerDiedError
from scidata.testing.ranks import fork_server
from tests.unit._children import interrupted
from tests.writers import write_grid

STEPS, LAT, LON = 6, 5, 4


def values() -> torch.Tensor:
    return torch.arange(STEPS * LAT * LON, dtype=torch.float32).reshape(STEPS, LAT, LON)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_grid(tmp_path_factory.mktemp("workers") / "u.zarr", values(), chunk=(2, 4))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_") and not _of_others(name)} <= before


def _of_others(name: str) -> bool:
    """Say whether shared memory is of a process of other tests, which run beside these."""
    pid = int(name.split("_")[1])
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")


def where(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves who has run it, and what torch tells workers, in the values."""
    info = torch.utils.data.get_worker_info()
    u = torch.zeros_like(fields["u"])
    numbers = [os.getpid(), -1, -1, 0] if info is None else [os.getpid(), info.id, info.num_workers, MARK]
    u.view(-1)[:4] = torch.tensor(numbers, dtype=u.dtype)
    u.view(-1)[4] = torch.initial_seed() % 1000
    return {"u": u}


MARK = 0


def mark(worker_id: int) -> None:
    global MARK
    MARK = 10 + worker_id


def doubled_unless_broken(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = float(fields["u"].view(-1)[0])
    if first == 3 * LAT * LON:
        raise ZeroDivisionError("sample 3 is broken")
    if first == 4 * LAT * LON:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"u": fields["u"] * 2}


def test_workers_have_torchs_meaning(store: str) -> None:
    ds = scidata.open_dataset(store, local_transform=where)
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "worker_init_fn": mark}
    options |= {"persistent_workers": True, "multiprocessing_context": fork_server(), "prefetch_factor": 1}
    loader = scidata.DataLoader(ds, 2, generator=torch.Generator().manual_seed(5), **options)
    epochs = [torch.cat([batch["u"].flatten(1)[:, :5] for batch in loader]) for _ in range(2)]
    found = torch.cat(epochs).long()
    assert len(found) == 2 * STEPS
    children = {child.pid for child in multiprocessing.active_children()}
    assert len(children) == 2
    assert set(found[:, 0].tolist()) <= children  # the same in both epochs
    assert set(found[:, 2].tolist()) == {2}
    assert (found[:, 3] == found[:, 1] + 10).all()  # worker_init_fn
    seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(5)).item()
    assert all(row[4] == (seed + row[1]) % 1000 for row in found.tolist())
    assert loader.stats()["bytes_fetched"] > 0
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def forked() -> dict[str, Any]:
    """Options of a loader whose process has torch loaded when it begins, which takes seconds else."""
    return {"workers": "process", "num_workers": 1, "multiprocessing_context": fork_server()}


def test_errors_and_deaths(store: str) -> None:
    ds = scidata.open_dataset(store, local_transform=doubled_unless_broken)
    loader = scidata.DataLoader(ds, 1, sampler=[0, 3, 1], **forked())
    iterator = iter(loader)
    assert torch.equal(next(iterator)["u"], values()[:1] * 2)
    with pytest.raises(ZeroDivisionError, match="sample 3 is broken") as caught:
        next(iterator)
    assert any("doubled_unless_broken" in note for note in caught.value.__notes__)
    assert multiprocessing.active_children() == []
    with pytest.raises(WorkerDiedError, match="ended with code -9 while it read sample 4"):
        list(scidata.DataLoader(ds, 1, sampler=[4], **forked()))


def test_signals_to_all_processes(store: str) -> None:
    """SLURM sends its signals to all processes of a job: readers go on, as the loop does (scidata.StopSignal)."""
    loader = scidata.DataLoader(scidata.open_dataset(store), 1, **forked())
    iterator = iter(loader)
    first = next(iterator)
    for process in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid or 0, number)
    read = torch.cat([batch["u"] for batch in (first, *iterator)])
    assert torch.equal(read, values())


TRACKER = """
import re
from multiprocessing import resource_tracker
from scidata.core.interrupts import interrupts_held
with interrupts_held():
    pass
print(re.search("SigBlk:(.*)", open(f"/proc/{resource_tracker._resource_tracker._pid}/status").read())[1])
"""


def test_signals_to_pythons_resource_tracker() -> None:
    found = subprocess.run([sys.executable, "-c", TRACKER], capture_output=True, text=True, timeout=60, check=True)
    assert int(found.stdout, 16) >> (signal.SIGUSR1 - 1) & 1


def slow(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if float(fields["u"].view(-1)[0]) > 0:
        time.sleep(100)
    return fields


@pytest.mark.parametrize("leave", ["break", "drop"])
def test_leaving_an_epoch_does_not_wait_for_the_workers(store: str, leave: str) -> None:
    ds = scidata.open_dataset(store, local_transform=slow)
    loader = scidata.DataLoader(ds, 1, persistent_workers=leave == "drop", **forked())
    iterator = iter(loader)
    next(iterator)
    if leave == "break":
        iterator.close()
    else:
        del loader
    del iterator
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_fork_server_is_begun_with_no_signal_held(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes that it forks later, a script's own as well, have its mask."""
    held: list[set[Any]] = []
    begin = forkserver.ensure_running

    def ensure_running() -> None:
        held.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        begin()

    monkeypatch.setattr(forkserver, "ensure_running", ensure_running)
    loader = scidata.DataLoader(scidata.open_dataset(store), 1, **forked())
    next(iter(loader))
    assert held == [set()]


SCRIPT = """
import signal, sys, time
import scidata

def slow(fields):
    time.sleep(0.05)
    return fields

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
    ds = scidata.open_dataset(sys.argv[1], local_transform=slow)
    num_processes = int(sys.argv[2])
    options = {"workers": "process", "persistent_workers": True} if num_processes else {}
    loader = scidata.DataLoader(ds, 1, num_workers=num_processes or 2, **options)
    while True:
        for batch in loader:
            if "first" not in vars():
                first = batch
                print("running", flush=True)
"""


@pytest.mark.slow_for("1-running", "2-begun", "2-importing")
@pytest.mark.parametrize(("num_processes", "when"), [(0, "running"), (1, "running"), (2, "importing"), (2, "begun")])
def test_ctrl_c(store: str, tmp_path: Path, num_processes: int, when: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    before = set(os.listdir("/dev/shm"))
    code, errors, children = interrupted(
        [script, store, num_processes],
        num_processes,
        importing="numpy" if when == "importing" else "",
        line="running" if when == "running" else "",
    )
    assert code == -signal.SIGINT, errors
    assert errors.count("Traceback") == 1, errors  # the loop's, and nobody else's
    assert "KeyboardInterrupt" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} <= before


def test_what_is_refused(store: str) -> None:
    ds = scidata.open_dataset(store)
    with pytest.raises(ConfigError, match="a fork copies locks"):
        scidata.DataLoader(ds, workers="process", multiprocessing_context="fork")
    with pytest.raises(ConfigError, match="workers must be"):
        scidata.DataLoader(ds, workers="processes")
    with pytest.raises(ValueError, match="num_workers"):
        scidata.DataLoader(ds, workers="process", num_workers=0, persistent_workers=True)
    with pytest.raises(ConfigError, match="max_prefetch_bytes=0"):
        scidata.DataLoader(ds, max_prefetch_bytes=0)
    with pytest.raises(ConfigError, match="transform_stream"):
        scidata.DataLoader(ds, transform_stream=True)


def in_place(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    fields["u"] += 1
    return fields


@pytest.mark.parametrize(
    ("transform", "error", "match"),
    [
        (lambda fields: {"v": fields["u"]}, UnknownNameError, "a field 'v', which was not read"),
        (lambda fields: {"u": fields["u"][1:]}, ConfigError, r"made 'u' \(4, 4\)"),
        (lambda fields: {"u": fields["u"].double()}, ConfigError, "float64"),
        (lambda fields: fields["u"], ConfigError, "returned Tensor"),
    ],
)
def test_local_transforms_keep_shapes(
    store: str, transform: Callable[..., Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        scidata.open_dataset(store, local_transform=transform)[0]
    assert torch.equal(scidata.open_dataset(store, local_transform=in_place)[1]["u"], values()[1] + 1)
    flipped = scidata.open_dataset(store, local_transform=lambda fields: {"u": fields["u"].flip(0)})
    for batch in scidata.DataLoader(flipped, 2):
        assert np.array_equal(batch["u"], values()[batch.index].flip(1))

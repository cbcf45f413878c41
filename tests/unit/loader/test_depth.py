"""How far a loader reads ahead, and the memory that it takes: of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from scidata.loader.prefetch.depth import Depth

MIB = 2**20


def test_a_depth_without_bytes_is_fixed() -> None:
    depth = Depth(3)
    for _ in range(100):
        depth.step(waiting=True, spare=False)
        depth.observe_size(10**12)
    assert depth.now == 3
    assert Depth(0, 100).now == 0


def test_a_depth_follows_the_need_within_its_bytes() -> None:
    depth = Depth(2, max_bytes=5 * MIB)
    assert depth.now == 2
    depth.observe_size(MIB)
    for expected in (3, 4, 5, 5):
        depth.step(waiting=True, spare=False)
        assert depth.now == expected
    for _ in range(15):
        depth.step(waiting=False, spare=True)
    assert depth.now == 5
    depth.step(waiting=False, spare=True)
    assert depth.now == 4
    for _ in range(15):
        depth.step(waiting=False, spare=True)
    depth.step(waiting=False, spare=False)  # the calm has to last
    depth.step(waiting=False, spare=True)
    assert depth.now == 4
    depth.observe_size(2 * MIB)
    assert depth.now == 2
    depth.observe_size(100 * MIB)
    assert depth.now == 1  # one may always be read ahead
    for _ in range(200):
        depth.step(waiting=False, spare=True)
    assert depth.now == 1
    assert Depth(4, max_bytes=MIB, nbytes=MIB).now == 1


def test_a_loader_reads_as_far_ahead_as_it_needs(tmp_path: Any) -> None:
    """A burst of slow reads, of which the loop waits: the depth grows to the bytes, and the memory with it."""
    import numpy as np
    import torch

    from scidata.core.types import BufferSpec
    from scidata.data.sample import Sample
    from scidata.loader.data_loader import DataLoader

    ahead: list[int] = []
    taken = threading.Event()

    class Bytes(torch.utils.data.Dataset):
        mesh = dp_axis = transform = None

        def __len__(self) -> int:
            return 200

        def buffer_specs(self) -> dict[str, BufferSpec]:
            return {"u": BufferSpec(shape=(1000,), dtype=np.dtype(np.uint8))}

        def read_into(self, index: int, out: Any) -> None:
            ahead.append(index)
            if index < 20:
                taken.wait(0.01)
            out["u"][:] = index % 256

        def assemble(self, local: Any, *, index: Any, batched: bool) -> Sample:
            return Sample(local, dims={"u": ("batch",) * batched + ("x",)}, index=index)

    loader = DataLoader(Bytes(), 2, num_workers=2, prefetch_factor=1, max_prefetch_bytes=8 * 2000)
    iterator = iter(loader)
    for batch in iterator:
        assert batch["u"][:, 0].tolist() == [i % 256 for i in batch.index]
        assert max(ahead) <= batch.index[-1] + 2 * 8
        if batch.index[0] == 30:
            grown = iterator.prefetcher._depth.now
    assert 1 < grown <= 8


SCRIPT = """
import json, resource, sys
import h5py, numpy as np
import scidata

path, prefetch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

ds = scidata.open_dataset(path)
loader = scidata.DataLoader(ds, 1, num_workers=workers, prefetch_factor=prefetch)
ds[0]["u"].sum()
before, seen = resident(), []
while len(seen) < 500:
    for batch in loader:
        assert batch["u"][0, 0, 0] == batch.index[0]
        seen.append(resident())
print(json.dumps({"before": before, "peak": peak(), "shard": batch["u"].nbytes, "seen": seen}))
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    import h5py
    import numpy as np

    path = str(tmp_path_factory.mktemp("memory") / "u.h5")
    with h5py.File(path, "w") as file:
        u = file.create_dataset("u", (20, 1024, 2048), np.float32)  # 8 MiB a sample
        for step in range(20):
            u[step] = step
    return path


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("prefetch", [2, 4])
def test_peak_memory_and_no_growth(stored: str, prefetch: int) -> None:
    """(prefetch + 1) shards, and what a few readers need; the same after 500 steps as after 50."""
    command = [sys.executable, "-c", SCRIPT, stored, str(prefetch), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shard"] == 8 * MIB
    slack = 12 * MIB  # threads' stacks and arenas, file handles
    assert found["peak"] - found["before"] < (prefetch + 1) * found["shard"] + slack
    assert max(found["seen"]) - max(found["seen"][:50]) < 2 * MIB

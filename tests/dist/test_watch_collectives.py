"""One rank fails while the others wait for it inside a collective of the model: they come back, and say why."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import scidata
from scidata.core.types import BufferSpec
from scidata.data.sample import Sample
from scidata.device_mesh import groups
from scidata.errors import CorruptDataError, RankFailedError, ReadTimeoutError, WorkerDiedError
from scidata.testing import RankError, run_ranks

N, BAD = 12, 5  # which is the last dp rank's, of 1, 2 or 3


class Rows:
    """Sample i is a row of i; on the last rank reading the bad one takes its time, and then ``how`` decides."""

    transform = None
    fingerprint = "rows"

    def __init__(self, mesh: Any, how: str, folder: str) -> None:
        self.mesh, self.dp_axis, self.how, self.folder = mesh, "dp", how, Path(folder)
        self.num_others = dist.get_world_size() - 1
        self.is_last = dist.get_rank() == dist.get_world_size() - 1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"mesh": None}

    def __len__(self) -> int:
        return N

    def buffer_specs(self) -> dict[str, BufferSpec]:
        return {"x": BufferSpec(shape=(3,), dtype=np.dtype(np.float32))}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> None:
        out["x"][:] = index
        if self.is_last and index == BAD:
            while len(list(self.folder.iterdir())) < self.num_others:  # until they are in the step
                time.sleep(0.05)
            time.sleep(0.3)
            if self.how == "error":
                raise CorruptDataError(f"chunk {index} of x is damaged")
            if self.how == "hang":
                time.sleep(15.0)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool) -> Sample:
        return Sample(local, dims={"x": ("batch",) * batched + ("i",)}, index=index)


# -- what a model does in a step -------------------------------------------------------------------------------------


def all_reduce(mesh: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: dist.all_reduce(x.sum())


def ddp(mesh: Any) -> Callable[[torch.Tensor], Any]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    return lambda x: model(x).sum().backward()


def scidata_model(mesh: Any) -> Callable[[torch.Tensor], Any]:
    model = scidata.parallelize(torch.nn.Linear(3, 1), mesh)

    def step(x: torch.Tensor) -> None:
        rows = scidata.ShardTensor.from_local(x, mesh["domain"], [Shard(0)], sharding_shapes="infer")
        model(rows).mean().backward()

    return step


def handle(mesh: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: dist.all_reduce(x.sum(), async_op=True).wait()


# -- what becomes of it ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "error": {"num_workers": 0},
    "hang": {"num_workers": 1, "timeout": 1.0},
    "kill": {"num_workers": 1, "workers": "process"},
}
ERRORS = {"error": CorruptDataError, "hang": ReadTimeoutError, "kill": WorkerDiedError}


@contextlib.contextmanager
def logged() -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scidata").addHandler(handler)
    yield lines
    logging.getLogger("scidata").removeHandler(handler)


def one_fails(rank: int, num_ranks: int, dp: int, how: str, model: Any, folder: str) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    step = model(mesh)
    options = OPTIONS[how] if rank == num_ranks - 1 else {"num_workers": 0}
    loader = scidata.DataLoader(Rows(mesh, how, folder), 1, **options)
    store, bad_step = dist.distributed_c10d._get_default_store(), BAD // dp
    had: list[int] = []
    with pytest.raises((RuntimeError, CorruptDataError)) as caught, logged() as lines:
        for batch in loader:
            had.append(batch.index[0])
            if len(had) == bad_step + 1:
                Path(folder, str(rank)).touch()
            step(batch["x"])
    said = f"rank {num_ranks - 1} failed in step {bad_step}: scidata.errors.{ERRORS[how].__name__}: "
    if rank == num_ranks - 1:
        assert caught.type is ERRORS[how]
        assert len(had) == bad_step
        for other in range(num_ranks - 1):  # this process lives on, and the others come back nevertheless
            store.wait([f"back/{other}"])
    else:
        assert len(had) == bad_step + 1
        assert any(said in line and f"rank {rank} waited for it in a collective" in line for line in lines)
        if model is not handle:
            assert caught.type is RankFailedError
            assert said in str(caught.value)
            assert caught.value.rank == num_ranks - 1
        store.set(f"back/{rank}", "")
    # nothing of the watch is left, and a new group does what the old one did
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=num_ranks)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == num_ranks


@pytest.mark.parametrize("model", [all_reduce, ddp, scidata_model, handle])
def test_a_read_that_fails(tmp_path: Path, model: Any) -> None:
    run_ranks(one_fails, 2, 1, "error", model, str(tmp_path))


@pytest.mark.parametrize(("num_ranks", "dp", "how"), [(3, 1, "kill"), (3, 3, "hang"), (4, 2, "error")])
def test_reads_timeouts_and_workers(tmp_path: Path, num_ranks: int, dp: int, how: str) -> None:
    run_ranks(one_fails, num_ranks, dp, how, ddp if num_ranks == 4 else all_reduce, str(tmp_path))


def waits_for_one_of_two(rank: int, num_ranks: int, folder: str) -> None:
    Path(folder, f"connected{rank}").touch()
    if rank == 0:
        while not all(Path(folder, f"connected{other}").exists() for other in (1, 2)):  # else these end as they connect
            time.sleep(0.01)
        os._exit(0)
    if rank == 1:
        time.sleep(20)  # and is ended by the parent
    time.sleep(0.5)
    threading.Timer(0.2, groups.break_groups).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(1), src=1)
    Path(folder, "back").write_text(str(time.monotonic() - began))


def test_groups_are_broken_though_one_rank_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive from that rank fails at once, and gloo leaves the connections to the others as they are."""
    monkeypatch.setattr("scidata.testing.ranks._GRACE", 12.0)  # s until the parent ends rank 1, which ends the receive
    with pytest.raises(RankError, match="rank 0 of 3: ended with exit code 0"):
        run_ranks(waits_for_one_of_two, 3, str(tmp_path), timeout=40)
    assert float((tmp_path / "back").read_text()) < 8

"""Ends of writers on several ranks: one that is slow, stopped, out of disk at the end, or whose script forgets it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import scidata
from scidata.errors import RankFailedError
from scidata.testing import make_grid, run_ranks
from tests.dist._scripts import run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("ends")
    make_grid(path / "source.nc", format="netcdf4", num_times=3, num_lat=19, num_lon=24)
    return path


def begun(folder: str, out: str, num_ranks: int, **options: Any) -> tuple[Any, scidata.Writer]:
    """Return a data set, and a writer whose chunks lie across bounds: rows are exchanged."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu", **options)
    ds: Any = scidata.open_dataset(f"{folder}/source.nc", mesh, fields=["u"], shard={"latitude": "domain"})
    return ds, scidata.create(f"{folder}/{out}", like=ds, chunks={"latitude": 4}, overwrite=True)


def be_slow_then_stop(rank: int, num_ranks: int, folder: str) -> str:
    ds, writer = begun(folder, "slow.zarr", num_ranks, timeout=1.0)
    with writer:
        for step in range(3):
            if rank == 1 and step:
                time.sleep(0.8)  # in all more than the timeout
            writer[step] = ds[step]
    assert os.path.exists(f"{folder}/slow.zarr")
    ds, writer = begun(folder, "stopped.zarr", num_ranks, timeout=1.0)
    for step in range(3):
        writer[step] = ds[step]
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        writer.close()
    except RankFailedError as e:
        return f"{time.monotonic() - began < 4.5} {e}"
    return "closed"


def test_a_slow_rank_is_waited_for_and_a_stopped_one_is_named(folder: Path) -> None:
    first, _, last = run_ranks(be_slow_then_stop, 3, str(folder), timeout=60)
    for text in (first, last):
        assert text.startswith("True rank 1 (")
        assert "its process is stopped" in text
    assert not (folder / "stopped.zarr").exists()


def run_out_of_disk(rank: int, num_ranks: int, folder: str) -> list[str]:
    said = []
    for last in range(num_ranks):
        ds, writer = begun(folder, f"full{last}.zarr", num_ranks)
        for step in range(3):
            writer[step] = ds[step]
        if rank == last:
            writer._place.sync = full  # type: ignore[method-assign]
        try:
            writer.close()
        except (OSError, RankFailedError) as e:
            said.append(f"{type(e).__name__}: {e}")
    return said


def full() -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_at_the_end_is_named_on_all_ranks(folder: Path) -> None:
    for rank, said in enumerate(run_ranks(run_out_of_disk, 3, str(folder))):
        for last, text in enumerate(said):
            expected = f"OSError: [Errno 28] No space left on device: '{folder}/full{last}.zarr'"
            others = f"RankFailedError: rank {last} failed while writing: {expected}"
            assert text == (expected if rank == last else others)
        assert len(said) == 3


SCRIPT = """
import os, sys
import torch
import scidata
mesh = scidata.init_mesh(domain=-1, dp=1, device="cpu")
ds = scidata.open_dataset("source.nc", mesh, fields=["u"], shard={"latitude": "domain"})
writer = scidata.create("open.zarr", like=ds, chunks={"latitude": 4}, overwrite=True)
for step in range(3):
    if step == 2 and mesh.size() > 1:
        torch.distributed.barrier()  # nobody ends before the others are here
    if step == 2 and int(os.environ.get("RANK", "0")) == 2:
        sys.exit(0)
    writer[step] = ds[step]
"""


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_writer_that_the_script_leaves_open(folder: Path, num_ranks: int) -> None:
    ranks = run_script(folder, SCRIPT, num_ranks)
    assert [code for code, _, _ in ranks] == [1] * num_ranks
    said = ranks[-1].said
    assert "scidata: " in said
    assert "open.zarr: the writer was not closed; use `with scidata.create(" in said
    for _, text, _ in ranks:
        for word in ("terminate called", "SIGABRT", "Signal 6", "pair closure"):
            assert word not in text
    if num_ranks == 1:
        assert said.count("\n") == 1
    assert not (folder / "open.zarr").exists()

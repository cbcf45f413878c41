"""Samples and statistics by the workers of a Dask cluster: a real scheduler, and workers in processes of their own."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.tasks import dask_jobs
from scidata.core.tasks.work import Work
from scidata.errors import (
    ClusterError,
    ConfigError,
    CorruptDataError,
    MissingDependencyError,
    OutputError,
)
from scidata.store.partitioning.output import claim_output, marked_run
from scidata.store.partitioning.partition import partition
from scidata.store.partitioning.remote import check_folders
from scidata.testing import run_ranks
from tests.unit.store._partition import assert_same_tree, mesh_arrays, mesh_files
from tests.writers import write_hdf5

distributed = pytest.importorskip("distributed", reason="needs the extra 'dask'")
dask = pytest.importorskip("dask", reason="needs the extra 'dask'")
NUM_SAMPLES = 5


def nothing(rank: int, num_ranks: int) -> None:
    """Have the fork server begin."""


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Workers come from the fork server of run_ranks, which has scidata loaded: a spawned one takes two seconds."""
    run_ranks(nothing, 1, backend=None)  # or Dask begins one that has not
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two workers of a thread each, which are started again where they die."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None, local_directory=None
        ) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with distributed.Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and the store that this process makes of them."""
    folder = tmp_path_factory.mktemp("meshes")
    mesh_files(folder, NUM_SAMPLES)
    partition(str(folder / "*.h5"), folder / "whole.store")
    return folder


def temporaries(out: Path) -> list[str]:
    return [name for name in os.listdir(out) if name.startswith(".tmp")]


class TestPartition:
    def test_the_same_store(self, whole: Path, client: Any) -> None:
        shares: list[float] = []
        report = partition(str(whole / "*.h5"), whole / "by_workers", client=client, tick=shares.append)
        assert (report.finished, len(report.written)) == (True, NUM_SAMPLES)
        assert_same_tree(whole / "by_workers", whole / "whole.store")
        assert sum(shares) == pytest.approx(NUM_SAMPLES)

    def test_paths_of_this_folder(
        self, whole: Path, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Workers have other working folders."""
        (tmp_path / "raw").symlink_to(whole)
        monkeypatch.chdir(tmp_path)
        partition(sorted(f"raw/{name}" for name in os.listdir("raw") if name.endswith(".h5")), "s", client=client)
        assert scidata.open_dataset("s")[3]["u"].shape == scidata.open_dataset(whole / "whole.store")[3]["u"].shape

    def test_a_faulty_sample(self, tmp_path: Path, client: Any) -> None:
        """Its error is what it is without a cluster, the others are kept, and a run goes on from them."""
        paths = mesh_files(tmp_path / "raw", 6)
        arrays = mesh_arrays()
        write_hdf5(paths[5], arrays | {"cells": arrays["cells"] + 10**6})
        with pytest.raises(CorruptDataError) as here:
            partition(paths, tmp_path / "here")
        with pytest.raises(CorruptDataError) as there:
            partition(paths, tmp_path / "s", client=client)
        assert str(there.value) == str(here.value)
        assert any("sample 5 (" in note and "on a worker" in note for note in there.value.__notes__)
        assert not temporaries(tmp_path / "s")
        paths[5].unlink()  # readers here and on the workers have it open
        write_hdf5(paths[5], arrays)
        report = partition(paths, tmp_path / "s", client=client, resume=True)
        assert (report.finished, len(report.written) + len(report.kept)) == (True, 6)
        assert report.kept
        partition(paths, tmp_path / "right")
        assert_same_tree(tmp_path / "s", tmp_path / "right")

    def test_workers_that_die(self, tmp_path: Path, client: Any) -> None:
        """Both are killed while they write; their nannies start others, and the store is the same."""
        paths = mesh_files(tmp_path / "raw", 8, num_nodes=12_000)
        partition(paths, tmp_path / "right")
        pids = list(client.run(os.getpid).values())

        def kill_both() -> None:
            while not temporaries(tmp_path / "s"):
                time.sleep(0.005)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.2)

        (tmp_path / "s").mkdir()
        thread = threading.Thread(target=kill_both)
        thread.start()
        report = partition(paths, tmp_path / "s", client=client)
        thread.join()
        client.wait_for_workers(2)
        assert report.finished
        assert not temporaries(tmp_path / "s")
        assert_same_tree(tmp_path / "s", tmp_path / "right")

    def test_a_disk_that_workers_do_not_see(self, whole: Path, tmp_path: Path) -> None:
        """What they check before their first sample."""
        with claim_output(str(tmp_path / "s"), None):
            with marked_run(str(tmp_path / "s")) as run:
                check_folders(str(tmp_path / "s"), run, [str(whole / "case0.h5")])
                with pytest.raises(OutputError, match=r"does not see .*other as the client does.*same path"):
                    check_folders(str(tmp_path / "other"), run, [])
                with pytest.raises(FileNotFoundError, match=r"does not see .*case9\.h5; inputs must be"):
                    check_folders(str(tmp_path / "s"), run, [str(whole / "case9.h5")])
            with pytest.raises(OutputError, match="does not see"):  # the run is over
                check_folders(str(tmp_path / "s"), run, [])

    def test_what_excludes_a_cluster(self, whole: Path, tmp_path: Path, client: Any) -> None:
        source = whole / "case0.h5"
        with pytest.raises(ConfigError, match=r"jobs=2: excludes client="):
            partition(source, tmp_path / "s", client=client, jobs=2)
        with pytest.raises(ConfigError, match=r"part=: is for job arrays"):
            partition(source, tmp_path / "s", client=client, part="0/2")
        with pytest.raises(ConfigError, match=r"client: expected a distributed\.Client, not str"):
            partition(source, tmp_path / "s", client="tcp://localhost:8786")
        assert not (tmp_path / "s").exists()


class TestStatistics:
    def test_the_same_figures(self, tmp_path: Path, client: Any) -> None:
        rng = np.random.default_rng(0)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            for name in ("u", "v"):
                file[name] = rng.standard_normal((40, 12, 16)).astype(np.float32)
                for dim, axis in enumerate(("time", "lat", "lon")):
                    file[name].dims[dim].label = axis
        ds = scidata.open_dataset(tmp_path / "a.h5", sample_dim="time")
        shares: list[float] = []
        ours = scidata.statistics(ds, by="lat", client=client, tick=lambda share, total: shares.append(share / total))
        scidata.statistics(ds, by="lat").save(tmp_path / "right.json")
        ours.save(tmp_path / "ours.json")
        assert (tmp_path / "ours.json").read_bytes() == (tmp_path / "right.json").read_bytes()
        assert sum(shares) == pytest.approx(1)

    def test_of_a_store(self, whole: Path, tmp_path: Path, client: Any) -> None:
        ds = scidata.open_dataset(whole / "whole.store")
        scidata.statistics(ds, stored=False).save(tmp_path / "right.json")
        scidata.statistics(ds, stored=False, client=client).save(tmp_path / "ours.json")
        assert (tmp_path / "ours.json").read_bytes() == (tmp_path / "right.json").read_bytes()


class TestCommands:
    def test_partition(self, whole: Path, cluster: Any) -> None:
        out = whole / "of_command"
        done = CliRunner().invoke(app, ["partition", f"{whole}/*.h5", str(out), "--dask", cluster.scheduler_address])
        assert done.exit_code == 0, done.output
        assert_same_tree(out, whole / "whole.store")

    def test_scheduler_file(self, whole: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of statistics, of a path of this folder: what is printed is what it is without a cluster."""
        (tmp_path / "scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
        monkeypatch.chdir(whole)
        right = CliRunner().invoke(app, ["stats", "whole.store", "--json"])
        ours = CliRunner().invoke(app, ["stats", "whole.store", "--json", "--dask", f"{tmp_path}/scheduler.json"])
        assert right.exit_code == ours.exit_code == 0, ours.output
        assert right.stdout == ours.stdout

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--dask", "node17"], "neither the address of a scheduler nor a scheduler file"),
            (["--dask", "tcp://127.0.0.1:9"], "no scheduler answers there"),
            (["--dask", "tcp://127.0.0.1:9", "--jobs", "2"], "excludes --jobs"),
            (["--dask", "tcp://127.0.0.1:9", "--part", "0/2"], "excludes --part"),
        ],
    )
    def test_typos(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
    ) -> None:
        monkeypatch.setattr(dask_jobs, "CONNECT_S", 1.0)
        run = CliRunner().invoke(app, ["partition", f"{whole}/case0.h5", str(tmp_path / "s"), *words])
        said = run.output if run.exception is None or isinstance(run.exception, SystemExit) else str(run.exception)
        assert run.exit_code != 0
        assert message in " ".join(said.replace("│", " ").split())
        assert not (tmp_path / "s").exists()

    def test_without_distributed(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "distributed", None)
        with pytest.raises(MissingDependencyError, match=r"distributed is not installed.*pip install"):
            partition(whole / "case0.h5", tmp_path / "s", client=object())
        with pytest.raises(MissingDependencyError, match="pip install"), dask_jobs.connected("tcp://127.0.0.1:9"):
            pass


# -- pieces of work of any kind ----------------------------------------------------------------------------------------


def squared(index: int, tick: Callable[[float], None]) -> int:
    time.sleep(0.001)
    tick(1.0)
    return index**2


def deadly(index: int, tick: Callable[[float], None]) -> int:
    if index == 7:
        time.sleep(0.5)  # its nanny does not start one again that dies while it starts
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def unfit() -> None:
    raise OSError("/scratch is not mounted")


def flaky(folder: str, index: int, tick: Callable[[float], None]) -> None:
    """A file system that hangs up twice."""
    tries = Path(folder) / str(index)
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if len(tries.read_text()) < 3:
        raise OSError(5, "Input/output error")


def failing(index: int, tick: Callable[[float], None]) -> None:
    if index:
        raise ValueError(f"of piece {index}")


def endless(index: int, tick: Callable[[float], None]) -> None:
    while True:
        time.sleep(0.05)
        tick(1e-6)


class Flaky:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, index: int, tick: Callable[[float], None]) -> None:
        flaky(self.folder, index, tick)


class TestWork:
    def test_many_short_pieces(self, client: Any) -> None:
        """Few tasks, however many pieces; each piece once."""
        found: dict[int, int] = {}
        shares: list[float] = []
        before = sum(1 for _ in client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.task_prefixes))
        dask_jobs.Cluster(client).run(
            Work(job=squared, name="piece"), range(1000), tick=shares.append, take=found.__setitem__
        )
        assert before >= 0
        assert found == {i: i**2 for i in range(1000)}
        assert sum(shares) == pytest.approx(1000)

    @pytest.mark.slow
    def test_a_piece_that_kills_workers(self) -> None:
        """The message names the piece and no other of its batch, nor one that was in line behind it."""
        found: dict[int, int] = {}
        with (
            dask.config.set(
                {"distributed.scheduler.allowed-failures": 1, "distributed.scheduler.worker-saturation": 4}
            ),
            distributed.LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None) as own,
            distributed.Client(own, set_as_default=False) as client,
            pytest.raises(ClusterError, match=r"2 workers died while they worked on piece 7; if .*killed for memory"),
        ):
            dask_jobs.Cluster(client).run(
                Work(job=deadly, name="piece"), range(16), tick=lambda share: None, take=found.__setitem__
            )
        assert 7 not in found

    def test_an_unfit_worker(self, client: Any) -> None:
        with pytest.raises(ClusterError, match=r"worker tcp://.* on .* cannot do this: /scratch is not mounted"):
            dask_jobs.Cluster(client).run(Work(job=squared, name="piece", check=unfit), [0], tick=lambda share: None)

    def test_another_version(self, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scidata, "__version__", "99.0")
        with pytest.raises(ClusterError, match=r"it has scidata .*, and the client 99\.0; install the same version"):
            dask_jobs.Cluster(client).run(Work(job=squared, name="piece"), [0], tick=lambda share: None)

    def test_trouble_of_a_moment(self, client: Any, tmp_path: Path) -> None:
        dask_jobs.Cluster(client).run(Work(job=Flaky(tmp_path), name="piece"), range(2), tick=lambda share: None)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"xxx"}

    def test_what_is_given_up_ends_on_the_workers(self, client: Any) -> None:
        """An interrupt here ends pieces that are under way there."""

        def stop(share: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            dask_jobs.Cluster(client).run(
                Work(job=endless, name="piece"), [0], tick=stop, take=lambda index, value: stop(0)
            )
        deadline = time.monotonic() + 60
        while any((found := client.run(lambda dask_worker: [str(t) for t in dask_worker.state.executing])).values()):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def test_nothing_of_a_run_that_failed_is_left(self, client: Any) -> None:
        """Who keeps the error keeps no task, which would be done again once its worker dies."""
        with pytest.raises(ValueError, match="of piece 1") as caught:
            dask_jobs.Cluster(client).run(Work(job=failing, name="piece"), range(2), tick=lambda share: None)
        deadline = time.monotonic() + 30
        while found := client.run_on_scheduler(lambda dask_scheduler: [str(key) for key in dask_scheduler.tasks]):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert caught.value.__traceback__ is not None

    def test_workers_that_come_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dask_jobs, "_LONELY_S", 0.2)
        with (
            distributed.LocalCluster(n_workers=0, processes=True, dashboard_address=None) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            thread = threading.Timer(0.5, lambda: cluster.scale(1))
            thread.start()
            found: dict[int, int] = {}
            work = Work(job=squared, name="piece")
            with pytest.warns(UserWarning, match="the cluster has no worker, and nothing was done for 0 s; waiting"):
                dask_jobs.Cluster(client).run(work, range(4), tick=lambda share: None, take=found.__setitem__)
            thread.join()
            assert found == {0: 0, 1: 1, 2: 4, 3: 9}

    def test_a_scheduler_that_ends(self) -> None:
        """Its worker begins as those of users do."""
        with (
            dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
            distributed.LocalCluster(n_workers=1, dashboard_address=None) as cluster,
        ):
            client = distributed.Client(cluster, set_as_default=False, timeout=5)
            thread = threading.Timer(1.5, cluster.close)
            thread.start()
            with pytest.raises(ClusterError, match=r"has lost the run.*; begin again"):
                dask_jobs.Cluster(client).run(
                    Work(job=endless, name="piece", after="; begin again"), [0], tick=lambda share: None
                )
            thread.join()
            client.close()

    def test_a_scheduler_that_is_another_one_meanwhile(self, cluster: Any) -> None:
        """A client connects by itself with one that was restarted, which knows nothing of the tasks."""
        with distributed.Client(cluster, set_as_default=False) as client:
            known = client.scheduler_comm
            threading.Timer(0.5, lambda: setattr(client, "scheduler_comm", copy.copy(known))).start()
            with pytest.raises(ClusterError, match=r"has lost the run: it was restarted.*; begin again"):
                dask_jobs.Cluster(client).run(
                    Work(job=endless, name="piece", after="; begin again"), [0], tick=lambda share: None
                )
            before = dask_jobs.Cluster(client)  # with the other one
            client.scheduler_comm = known
            with pytest.raises(ClusterError, match=r"has lost the run"):
                before.run(Work(job=squared, name="piece"), [0], tick=lambda share: None)

    def test_clients_that_do_not_work(self, cluster: Any) -> None:
        client = distributed.Client(cluster, set_as_default=False)
        client.close()
        with pytest.raises(ConfigError, match=r"client: it is closed, not connected"):
            dask_jobs.Cluster(client)

    def test_what_is_sent(self) -> None:
        """The job and its check pickle, as spawned processes need as well."""
        work = Work(job=squared, name="piece")
        assert pickle.loads(pickle.dumps(work.job)) is squared
        pickle.loads(pickle.dumps(work.check))()

"""SLURM of Debian's packages on such hosts: munge, a controller and a daemon a node, without systemd."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.hosts import Host

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "scontrol", "squeue")
GPUS = 4  # a node's, made of terminals
_CONF = """
ClusterName=tiny
SlurmctldHost=ctl({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A running cluster."""

    controller: Host
    nodes: list[Host]
    environ: Mapping[str, str]

    def run(self, command: str, *, cwd: Path, timeout: float = 180) -> str:
        """Run a shell's command on the controller's host, as a user does on a login node; return what it prints."""
        return self.controller.run(["bash", "-c", command], environ=self.environ, cwd=cwd, timeout=timeout)[1]

    def submit(self, command: str, *, cwd: Path) -> int:
        """Run ``sbatch`` with these words and return the job's number."""
        shown = self.run(f"sbatch {command}", cwd=cwd)
        found = re.search(r"Submitted batch job (\d+)", shown)
        assert found is not None, shown
        return int(found[1])

    def state(self, job: int) -> str:
        """Return a job's state, such as ``RUNNING``; of an array, of all of its tasks that differ."""
        shown = self.run(f"scontrol --oneliner show job {job}", cwd=Path("/"))
        return " ".join(sorted(set(re.findall(r"JobState=(\w+)", shown))))

    def wait(self, job: int, states: str, *, timeout: float = 120) -> str:
        """Wait until a job is in one of these states, a pattern; return it."""
        limit = time.monotonic() + timeout
        while not re.fullmatch(states, state := self.state(job)):
            assert time.monotonic() < limit, f"job {job} is {state}, not {states}, after {timeout} s"
            time.sleep(0.2)
        return state

    def start_node(self, node: Host) -> None:
        """Start the daemon of a node."""
        node.run(["slurmd", "-N", node.name], cwd=Path("/"), environ=self.environ)


@contextlib.contextmanager
def slurm(folder: Path, controller: Host, nodes: list[Host]) -> Iterator[Slurm]:
    """Start SLURM on these hosts, whose processes it leaves to their end."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o755)
    environ = {"SLURM_CONF": str(folder / "slurm.conf"), "SBATCH_OUTPUT": "slurm.out"}
    lines = [
        f"NodeName={n.name} NodeAddr={n.address} CPUs=8 RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN" for n in nodes
    ]
    conf = _CONF.format(address=controller.address, folder=folder, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
    _start_munge(folder, controller)
    cluster = Slurm(controller=controller, nodes=nodes, environ=environ)
    controller.run(["slurmctld"], cwd=Path("/"), environ=environ)
    for node in nodes:
        cluster.start_node(node)
    limit = time.monotonic() + 60
    while (idle := cluster.run("sinfo --noheader --Node --states=idle", cwd=folder)).count("idle") < len(nodes):
        assert time.monotonic() < limit, f"nodes are not idle:\n{idle}{(folder / 'slurmctld.log').read_text()}"
        time.sleep(0.2)
    yield cluster


def _start_munge(folder: Path, host: Host) -> None:
    """Start the daemon that signs messages; its socket is a file, so one serves all hosts."""
    munge = folder / "munge"
    key = munge / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": munge / "socket", "pid-file": munge / "pid", "log-file": munge / "log"}
    options = [f"--{name}={path}" for name, path in (files | {"seed-file": munge / "seed"}).items()]
    host.run(["munged", "--force", *options], cwd=Path("/"))

"""Rank and address of this process from its launcher; the only place that reads the launcher's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scidata.errors import LauncherError

_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below the ports that Linux hands out by itself (from 32768)
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM's batch, interactive and extern steps are numbered from the top
_MPI = {  # launchers whose ranks meet at MASTER_ADDR: their variables of rank, number of ranks and local rank
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PALS": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
_VISIBLE = (  # that show a process some of its node's GPUs: CUDA's, ROCm's, oneAPI's, and what SLURM chose
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "SLURM_STEP_GPUS",
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among the ranks."""

    launcher: str  # ``"torchrun"``, ``"Open MPI"``, ``"PALS"``, ``"MPICH"``, ``"SLURM"`` or ``"none"``
    # rank, num_ranks: this process among all
    rank: int = 0
    num_ranks: int = 1
    local_rank: int | None = 0  # among the processes of this node; None where the launcher does not say
    # address, port: where rank 0 listens; None for a single process
    address: str | None = None
    port: int | None = None
    # the variables that show this process some of its node's GPUs, with their values; other ranks may see others
    visible: str = ""
    num_gpus: int | None = None  # GPUs of this node; None where the launcher does not say

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks or (self.local_rank or 0) < 0:
            raise LauncherError(
                f"{self.launcher}: rank {self.rank} (local {self.local_rank}) of {self.num_ranks} is not possible"
            )


def read_launcher(environ: Mapping[str, str]) -> Launch:
    """Find this process's launcher, and its place among the ranks, in environment variables.

    torchrun's variables come first, then those of MPI, then SLURM's: inside a SLURM job, ``mpirun`` leaves the
    variables of its own daemons visible to the ranks.

    A launcher that is half set up raises; nothing falls back to a single process.
    """
    shown = " ".join(f"{name}={environ[name]}" for name in _VISIBLE if environ.get(name))
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    return replace(_place(environ), visible=shown, num_gpus=int(on_node) if on_node.isdigit() else None)


def _place(environ: Mapping[str, str]) -> Launch:
    if any(name in environ for name in _MPI["torchrun"]):
        return _launch_at_master(environ, "torchrun")
    if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return _launch_at_master(environ, "Open MPI")
    for launcher in ("PALS", "MPICH"):
        if _MPI[launcher][2] in environ:
            return _launch_at_master(environ, launcher)
    if any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID")):
        return _slurm(environ)
    return _launch_at_master(environ, "MPICH") if "PMI_RANK" in environ else Launch(launcher="none")


def keeps_store(environ: Mapping[str, str]) -> int | None:
    """Return the rank whose process keeps the common store; None if torchrun's agent does."""
    return None if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def ranks_per_node(environ: Mapping[str, str], num_ranks: int) -> int:
    """Return how many ranks a node has, as far as the launcher says; else as if all were on one.

    For work that the ranks of a node share: no result depends on it.
    """
    mpi = ("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS")
    for name in ("LOCAL_WORLD_SIZE", *mpi, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        found = re.match(r"\d+", environ.get(name, ""))  # SLURM says "4(x2),3"
        if found is not None and int(found[0]) > 0:
            return min(int(found[0]), num_ranks)
    return num_ranks


def _integer(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None:
        raise LauncherError(
            f"{launcher} is half set up: {name} is missing; start the script with the launcher, or unset its variables "
            "to run a single process"
        )
    try:
        return int(text)
    except ValueError:
        raise LauncherError(f"{launcher}: {name}={text!r} is not an integer") from None


def _launch_at_master(environ: Mapping[str, str], launcher: str) -> Launch:
    """Return a launch whose rank 0 listens at ``MASTER_ADDR`` and ``MASTER_PORT``."""
    address = port = local_rank = None
    rank_name, size_name, local_name = _MPI[launcher]
    num_ranks, rank = _integer(environ, size_name, launcher), _integer(environ, rank_name, launcher)
    if local_name in environ or launcher != "torchrun":
        local_rank = _integer(environ, local_name, launcher)
    if num_ranks > 1 and "MASTER_ADDR" not in environ:
        hints = {"torchrun": "", "Open MPI": " (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"}
        raise LauncherError(
            f"{launcher} started {num_ranks} ranks, but MASTER_ADDR is missing: set it to the host of rank 0, and "
            f"MASTER_PORT to a free port there{hints.get(launcher, ' (export both before mpiexec)')}"
        )
    if num_ranks > 1:
        address, port = environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT", launcher)
    return Launch(launcher=launcher, rank=rank, num_ranks=num_ranks, local_rank=local_rank, address=address, port=port)


def _slurm(environ: Mapping[str, str]) -> Launch:
    if not _started_by_srun(environ):
        # A shell of salloc or the script of sbatch: fine for one task, a forgotten srun for several.
        num_tasks = _integer(environ, "SLURM_NTASKS", "SLURM") if "SLURM_NTASKS" in environ else 1
        if num_tasks == 1:
            return Launch(launcher="none")
        raise LauncherError(
            f"the SLURM job has {num_tasks} tasks, but this process was not started by srun, and would be alone; "
            "start it with srun python ..., or with torchrun; for a single process use srun -n 1"
        )
    sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    rank = _integer(environ, "SLURM_PROCID", "SLURM")
    num_ranks = _integer(environ, sizes[0] if sizes else "SLURM_NTASKS", "SLURM")
    local_rank = _integer(environ, "SLURM_LOCALID", "SLURM")
    address, port = _slurm_rendezvous(environ) if num_ranks > 1 else (None, None)
    return Launch(launcher="SLURM", rank=rank, num_ranks=num_ranks, local_rank=local_rank, address=address, port=port)


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None:
        return environ.get("ENVIRONMENT") != "BATCH"  # a batch script is "task 0" too, but of no step
    return int(step) < _FIRST_RESERVED_STEP if step.isdigit() else True


def _slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR")
    if address is None:
        lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        nodes = next((environ[name] for name in lists if environ.get(name)), None)
        if nodes is None:
            raise LauncherError("SLURM is half set up: SLURM_STEP_NODELIST is missing; set MASTER_ADDR, or use srun")
        address = _first_host(nodes)
    if "MASTER_PORT" in environ:
        return address, _integer(environ, "MASTER_PORT", "SLURM")
    job_name = "SLURM_JOBID" if "SLURM_JOBID" in environ else "SLURM_JOB_ID"
    job = _integer(environ, job_name, "SLURM")
    step = environ.get("SLURM_STEP_ID", "")
    # steps of one job may run side by side, and so may jobs with neighbouring numbers
    return address, _FIRST_PORT + (job + 7919 * (int(step) if step.isdigit() else 0)) % _NUM_PORTS


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's compressed host list: ``node[01-04,7],gpu1`` gives ``node01``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes.strip())
    if first is None:
        raise LauncherError(f"SLURM: {nodes!r} is not a list of hosts; set MASTER_ADDR")
    return re.sub(r"\[([^\[\]]*)\]", lambda ranges: re.split("[-,]", ranges[1])[0], first[0])

"""``init_mesh``: from launcher to ``DeviceMesh``. The only reader of launcher variables in the package.

Axes of a mesh are of three kinds: the dp axis (ranks hold different samples), domain axes (ranks hold parts of one)
and all others (tensor parallelism, say), along which ranks hold the same part. ``axes_of`` tells them apart by name.
"""

from __future__ import annotations

import datetime
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scidata import _stuck
from scidata._checks import is_whole
from scidata.errors import ConfigError, LauncherError, UnknownNameError, near_matches

__all__ = ["Launch", "axes_of", "axis_rank", "axis_size", "domain_mesh", "init_mesh", "read_launcher"]

# Axes of these names never hold parts of a sample, so they need not be told apart from domain axes by hand.
_OTHER_PARALLELISM = ("tp", "pp", "ep", "cp", "sp")
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below the ports that Linux hands out by itself (from 32768)
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM's batch, interactive and extern steps are numbered from the top


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher says about this process.

    Attributes
    ----------
    launcher
        ``"torchrun"``, ``"SLURM"``, ``"Open MPI"`` or ``"none"``.
    rank, num_ranks
        This process among all.
    local_rank
        Among the processes of this node, hence the index of its GPU; None where the launcher does not say.
    address, port
        Where rank 0 listens; None for a single process.
    """

    launcher: str
    rank: int = 0
    num_ranks: int = 1
    local_rank: int | None = 0
    address: str | None = None
    port: int | None = None


# -- the launcher's variables ------------------------------------------------------------------------------------


def read_launcher(environ: Mapping[str, str]) -> Launch:
    """Find out from environment variables who started this process.

    torchrun's variables come first, then Open MPI's, then SLURM's: inside a SLURM job, ``mpirun`` leaves the variables
    of its own daemons visible to the ranks.

    Raises
    ------
    LauncherError
        A launcher's variables are there in part, or make no sense. Nothing falls back to a single process.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _torchrun(environ)
    if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return _open_mpi(environ)
    if any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID")):
        return _slurm(environ)
    return Launch(launcher="none")


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


def _checked(launch: Launch) -> Launch:
    if launch.num_ranks < 1 or not 0 <= launch.rank < launch.num_ranks or (launch.local_rank or 0) < 0:
        raise LauncherError(
            f"{launch.launcher}: rank {launch.rank} (local {launch.local_rank}) of {launch.num_ranks} is not possible"
        )
    return launch


def _rendezvous(environ: Mapping[str, str], launcher: str, num_ranks: int) -> tuple[str | None, int | None]:
    if num_ranks == 1:
        return None, None
    if "MASTER_ADDR" not in environ:
        raise LauncherError(
            f"{launcher} started {num_ranks} ranks, but MASTER_ADDR is missing: set it to the host of rank 0, and "
            "MASTER_PORT to a free port there"
            + (" (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)" if launcher == "Open MPI" else "")
        )
    return environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT", launcher)


def _torchrun(environ: Mapping[str, str]) -> Launch:
    num_ranks, rank = _integer(environ, "WORLD_SIZE", "torchrun"), _integer(environ, "RANK", "torchrun")
    local_rank = _integer(environ, "LOCAL_RANK", "torchrun") if "LOCAL_RANK" in environ else None
    address, port = _rendezvous(environ, "torchrun", num_ranks)
    return _checked(
        Launch(launcher="torchrun", rank=rank, num_ranks=num_ranks, local_rank=local_rank, address=address, port=port)
    )


def _open_mpi(environ: Mapping[str, str]) -> Launch:
    rank, num_ranks, local_rank = (
        _integer(environ, f"OMPI_COMM_WORLD_{name}", "Open MPI") for name in ("RANK", "SIZE", "LOCAL_RANK")
    )
    address, port = _rendezvous(environ, "Open MPI", num_ranks)
    return _checked(
        Launch(launcher="Open MPI", rank=rank, num_ranks=num_ranks, local_rank=local_rank, address=address, port=port)
    )


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
    own_gpus = "SLURM_GPUS_PER_TASK" in environ  # each task then sees its own only, numbered from 0
    local_rank = 0 if own_gpus else _integer(environ, "SLURM_LOCALID", "SLURM")
    address, port = _slurm_rendezvous(environ) if num_ranks > 1 else (None, None)
    return _checked(
        Launch(launcher="SLURM", rank=rank, num_ranks=num_ranks, local_rank=local_rank, address=address, port=port)
    )


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


# -- the mesh ----------------------------------------------------------------------------------------------------


def init_mesh(
    *,
    domain: int | Sequence[int] = 1,
    dp: int = -1,
    names: Sequence[str] | None = None,
    extra: Mapping[str, int] | None = None,
    device: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    backend: str | None = None,
) -> DeviceMesh:
    """Start the process group, if there is none yet, and return a mesh of all ranks. Collective.

    Ranks come from torchrun, Open MPI or SLURM; without a launcher this is a mesh of one rank, so one script runs
    both ways. Ranks of one domain are neighbours: consecutive numbers, hence usually on one node.

    Parameters
    ----------
    domain
        Ranks that share one sample; a tuple for a domain of several axes. One of all sizes may be -1: inferred.
    dp
        Number of domains, each working on other samples.
    names
        Names of the dp axis and the domain axes; default ``("dp", "domain")``, for a 2-D domain ``("dp", "h", "w")``.
    extra
        Further axes by name, such as ``{"tp": 2}``; ranks along them hold the same part of a sample.
    device
        ``"cuda"`` or ``"cpu"``; default CUDA where there is a GPU.
    timeout
        Seconds until a collective gives up.
    backend
        Default nccl on CUDA, gloo on CPU.

    Raises
    ------
    ConfigError
        Sizes or names that make no sense.
    LauncherError
        The launcher's variables are incomplete, or the number of ranks does not fit the sizes.
    """
    sizes = _axis_sizes(domain, dp, names, extra or {})
    if dist.is_initialized():
        kind = _device_of_group() if device is None else _checked_device(device)
        num_ranks, launcher = dist.get_world_size(), "the process group"
        shape = _resolve(sizes, num_ranks, launcher)
        _stuck.end_well()
    else:
        kind = _checked_device(device)
        launch = read_launcher(os.environ)
        shape = _resolve(sizes, launch.num_ranks, launch.launcher)
        _start(launch, kind, backend, timeout)
    return init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))


def _axis_sizes(
    domain: int | Sequence[int], dp: int, names: Sequence[str] | None, extra: Mapping[str, int]
) -> dict[str, int]:
    """Name the axes in mesh order; -1 is still in there."""
    parts = tuple(domain) if isinstance(domain, Sequence) else (domain,)
    if names is None:
        if len(parts) not in (1, 2):
            raise ConfigError(f"a domain of {len(parts)} axes needs names, e.g. names=('dp', 'd', 'h', 'w')")
        names = ("dp", "domain") if len(parts) == 1 else ("dp", "h", "w")
    if isinstance(names, str) or len(names) != 1 + len(parts):
        raise ConfigError(
            f"names={names!r}: dp and a domain of {len(parts)} axes need {1 + len(parts)} names, the dp axis first"
        )
    axes = [*zip(names, (dp, *parts), strict=True), *extra.items()]
    if len({name for name, _ in axes}) < len(axes):
        raise ConfigError(f"two axes have the same name: {', '.join(name for name, _ in axes)}")
    for name, size in axes:
        if not is_whole(size) or size == 0 or size < -1:
            raise ConfigError(f"axis {name!r} has size {size!r}; sizes are integers from 1, or -1 for one inferred")
    inferred = [name for name, size in axes if size == -1]
    if len(inferred) > 1:
        raise ConfigError(
            f"only one axis can be inferred, not {' and '.join(inferred)}; give the size of {inferred[0]!r}, which is "
            "-1 by default for dp"
        )
    return {name: int(size) for name, size in axes}


def _resolve(sizes: Mapping[str, int], num_ranks: int, launcher: str) -> tuple[int, ...]:
    known = math.prod(size for size in sizes.values() if size != -1)
    shown = ", ".join(f"{name}={'?' if size == -1 else size}" for name, size in sizes.items())
    source = "there is no launcher, so this is one rank" if launcher == "none" else f"{launcher} has {num_ranks} ranks"
    if -1 in sizes.values():
        if num_ranks % known:
            raise LauncherError(
                f"{source}, which is no multiple of {known} (mesh {shown}); start a multiple of {known} ranks "
                f"(torchrun --nproc-per-node {known} ...), or choose sizes that divide {num_ranks}"
            )
        return tuple(num_ranks // known if size == -1 else size for size in sizes.values())
    if num_ranks != known:
        raise LauncherError(
            f"{source}, but the mesh {shown} has {known}; start {known} ranks (torchrun --nproc-per-node {known} ...), "
            "or leave one size to be inferred with -1"
        )
    return tuple(sizes.values())


def _checked_device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device must be 'cuda' or 'cpu', not {device!r}; the launcher decides which GPU a rank has")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch finds no GPU here; use device='cpu'")
    return device


def _device_of_group() -> str:
    """Return where the group that is already there can communicate."""
    return "cuda" if "nccl" in dist.get_backend_config() and torch.cuda.is_available() else "cpu"


def _start(launch: Launch, kind: str, backend: str | None, timeout: float | datetime.timedelta | None) -> None:
    limit = datetime.timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if kind == "cuda":
        torch.cuda.set_device(_cuda_index(launch, torch.cuda.device_count()))
    name = backend or ("nccl" if kind == "cuda" else "gloo")
    if launch.num_ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=limit)  # no ports
        _stuck.own_groups()
        return
    # torchrun's agent may keep the store itself, which env:// knows about
    method = "env://" if launch.launcher == "torchrun" else f"tcp://{launch.address}:{launch.port}"
    dist.init_process_group(name, method, rank=launch.rank, world_size=launch.num_ranks, timeout=limit)
    _stuck.own_groups()


def _cuda_index(launch: Launch, num_devices: int) -> int:
    if launch.local_rank is None and num_devices > 1:
        raise LauncherError(
            f"{launch.launcher} is half set up: LOCAL_RANK is missing, so which of the {num_devices} GPUs is this "
            "rank's cannot be known; set it, or show each rank one GPU with CUDA_VISIBLE_DEVICES"
        )
    index = launch.local_rank or 0
    if index >= num_devices:
        raise LauncherError(
            f"rank {launch.rank} is process {index} of its node, but sees {num_devices} GPUs; start at most "
            f"{num_devices} processes a node, or use device='cpu'"
        )
    return index


# -- axes of any mesh --------------------------------------------------------------------------------------------


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a DeviceMesh, made by scidata.init_mesh(), not {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise ConfigError(
            "the mesh has no axis names, so its dp and domain axes cannot be told apart; make it with "
            "scidata.init_mesh or init_device_mesh(..., mesh_dim_names=...)"
        )
    return tuple(mesh.mesh_dim_names)


def axes_of(
    mesh: DeviceMesh, dp: str | None = "dp", domain: str | Sequence[str] | None = None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of the dp axis, None where there is none, and the names of the domain axes in mesh order.

    The domain axes, unless named, are ``domain``; else ``h`` and ``w``; else all others but those of other kinds of
    parallelism (``tp``, ``pp``, ``ep``, ``cp``, ``sp``). Ranks along the axes that remain hold the same part.

    Raises
    ------
    ConfigError
        The mesh has no names, or an axis could be a dp axis under another name: taken for one of replicas, it would
        silently train on the same samples. ``dp=None`` says that there is none.
    UnknownNameError
        A domain axis that the mesh does not have.
    """
    names = _names(mesh)
    dp_axis = dp if dp in names else None
    if domain is not None:
        wanted = (domain,) if isinstance(domain, str) else tuple(domain)
        for name in wanted:
            if name not in names:
                raise UnknownNameError(f"the mesh has no axis {name!r}{near_matches(name, names)}")
        if dp_axis in wanted:
            raise ConfigError(f"axis {dp_axis!r} cannot be both the dp axis and a domain axis")
    elif "domain" in names:
        wanted = ("domain",)
    elif "h" in names or "w" in names:
        wanted = ("h", "w")
    elif dp_axis is not None or dp is None:
        wanted = tuple(name for name in names if name != dp_axis and name not in _OTHER_PARALLELISM)
    else:
        wanted = ()
    axes = tuple(name for name in names if name in wanted)
    unclear = [name for name in names if name not in axes and name not in _OTHER_PARALLELISM]
    if dp is not None and dp_axis is None and unclear:
        raise ConfigError(
            f"the mesh has no axis {dp!r}, and axis {unclear[0]!r} could be the dp axis under another name; "
            f"say dp={unclear[0]!r}, or dp=None where no axis is"
        )
    return dp_axis, axes


def domain_mesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the part of the mesh that holds this rank's domain, its axes in mesh order."""
    known = _names(mesh)
    for name in names:
        if name not in known:
            raise UnknownNameError(f"the mesh has no axis {name!r}{near_matches(name, known)}")
    axes = tuple(name for name in known if name in names)
    if not axes:
        raise ConfigError("a domain needs at least one axis of the mesh")
    return mesh if axes == known else mesh[axes]


def axis_size(mesh: DeviceMesh | None, name: str | None) -> int:
    """Return the number of ranks along an axis; 1 for no mesh or no axis."""
    return 1 if mesh is None or name is None else mesh.size(_index(mesh, name))


def axis_rank(mesh: DeviceMesh | None, name: str | None) -> int:
    """Return this rank's place along an axis; 0 for no mesh or no axis."""
    if mesh is None or name is None:
        return 0
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"rank {dist.get_rank()} is not part of the mesh {mesh}; use a mesh that holds it")
    return int(coordinate[_index(mesh, name)])


def _index(mesh: DeviceMesh, name: str) -> int:
    names = _names(mesh)
    if name not in names:
        raise UnknownNameError(f"the mesh has no axis {name!r}{near_matches(name, names)}")
    return names.index(name)

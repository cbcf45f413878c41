"""``init_mesh``: from the launcher's variables to a ``DeviceMesh`` with named axes.

They are of three kinds: the dp axis (ranks hold different samples), domain axes (ranks hold parts of one) and all
others (tensor parallelism, say), along which ranks hold the same part.

gloo listens at the address that the host's name resolves to. Where that is no address of the host, or 127.0.1.1 as
Debian writes into ``/etc/hosts``, it takes the loopback interface, which ranks on other hosts cannot reach.
"""

from __future__ import annotations

import array
import contextlib
import datetime
import ipaddress
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scidata.core.checks import check_mapping, is_int
from scidata.core.keywords import checked_keywords
from scidata.device_mesh import board, devices, groups
from scidata.device_mesh.launch import Launch, keeps_store, ranks_per_node, read_launcher
from scidata.device_mesh.torch_internals import bind, set_timeout, timeout_of
from scidata.errors import ConfigError, LauncherError, UnknownNameError, near_matches

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@checked_keywords
def init_mesh(
    *,
    domain: int | Sequence[int] = 1,
    dp: int = -1,
    names: Sequence[str] | None = None,
    extra: Mapping[str, int] | None = None,
    order: Sequence[str] | None = None,
    device: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    backend: str | None = None,
) -> DeviceMesh:
    """Start the process group, if there is none yet, and return a mesh of all ranks. Collective.

    Ranks come from torchrun, SLURM, Open MPI, MPICH or PALS; without a launcher this is a mesh of one rank, so one
    script runs both ways. Ranks of one domain are neighbours: consecutive numbers, hence usually on one node.

    Parameters
    ----------
    domain : int or Sequence[int], default 1
        Ranks that share one sample; a tuple for a domain of several axes. One of all sizes may be -1: inferred.
    dp : int, default -1
        Number of domains, each working on other samples.
    names : Sequence[str] or None, optional
        Names of the dp axis and the domain axes; default ``("dp", "domain")``, for a 2-D domain ``("dp", "h", "w")``.
    extra : Mapping[str, int] or None, optional
        Further axes by name, such as ``{"tp": 2}``; ranks along them hold the same part of a sample.
    order : Sequence[str] or None, optional
        All axes, the outermost first, such as ``("dp", "pp", "domain")``; default dp, the domain, then ``extra``.
    device : str or None, optional
        ``"cpu"`` or an accelerator, such as ``"cuda"`` (NVIDIA, AMD) or ``"xpu"`` (Intel); default the accelerator
        that torch finds.
    timeout : float or datetime.timedelta or None, optional
        Seconds until a collective of the mesh's groups gives up, and until a rank whose process is stopped is named.
    backend : str or None, optional
        Default gloo on CPU, nccl on CUDA, xccl on XPU; elsewhere as the device's package has registered.

    Raises
    ------
    ConfigError
        Sizes or names that make no sense.
    LauncherError
        The launcher's variables are incomplete, or the number of ranks does not fit the sizes.

    Examples
    --------
    >>> mesh = scidata.init_mesh()  # without a launcher: one rank
    >>> mesh.mesh_dim_names, mesh["dp"].size(), mesh["domain"].size()
    (('dp', 'domain'), 1, 1)

    What 8 ranks would get, without starting any:

    >>> torch.distributed.destroy_process_group()
    >>> from scidata.testing import fake_group
    >>> with fake_group(8):
    ...     mesh = scidata.init_mesh(domain=4)
    ...     print(mesh["dp"].size(), mesh["domain"].size())
    2 4
    """
    check_mapping("extra", extra or {}, "{'tp': 2}")
    sizes = _axis_sizes(domain, dp, names, extra or {})
    if isinstance(order, str) or sorted(map(str, order or sizes)) != sorted(sizes):
        raise ConfigError(f"order={order!r}: expected each of the axes {', '.join(sizes)} once, the outermost first")
    sizes = {name: sizes[name] for name in order or sizes}
    limit = datetime.timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if limit is not None and (not isinstance(limit, datetime.timedelta) or limit < datetime.timedelta()):
        raise ConfigError(f"timeout={timeout!r}: expected seconds, or a datetime.timedelta")
    if dist.is_initialized():
        kind = devices.kind_of(dist.group.WORLD) if device is None else _checked_device(device)
        num_ranks, launcher = dist.get_world_size(), "the process group"
        shape = _resolve(sizes, num_ranks, launcher)
    else:
        kind = _checked_device(device)
        launch = read_launcher(os.environ)
        shape = _resolve(sizes, launch.num_ranks, launch.launcher)
        _start(launch, kind, backend, limit)
        groups.own_groups()
        if kind != "cpu":
            device_id = devices.current_device(kind)
            _claim_gpu(launch, device_id)
            if launch.num_ranks > 1 and devices.is_bound(dist.group.WORLD):
                bind(dist.group.WORLD, device_id)
    watch = board.begin(0.0 if limit is None else limit.total_seconds(), host=keeps_store(os.environ))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
    if watch is not None:  # torch gives the groups of a mesh 30 minutes, whatever the first group was given
        for group in mesh.get_all_groups():
            set_timeout(group, limit or timeout_of(dist.group.WORLD))
    return mesh


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
        if not isinstance(name, str):
            raise ConfigError(f"an axis is named {name!r}; names are strings")
        if not is_int(size) or size == 0 or size < -1:
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
    found = devices.accelerator()
    if device is None:
        return found or "cpu"
    if device not in ("cpu", found):
        here = f"{found!r} or 'cpu'" if found else "'cpu', as torch finds no GPU here"
        raise ConfigError(f"device={device!r}: use {here}; the launcher decides which GPU a rank has")
    return device


def _start(launch: Launch, kind: str, backend: str | None, limit: datetime.timedelta | None) -> None:
    if kind != "cpu":
        torch.accelerator.set_device_index(_device_index(launch, torch.accelerator.device_count()))
    name = backend or devices.default_backend(kind)
    if name is None:
        raise ConfigError(f"device={kind!r}: no backend of process groups is registered for it; pass backend=")
    board.forget()
    if launch.num_ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=limit)  # no ports
        return
    # torchrun's agent may keep the store itself, which env:// knows about
    method = "env://" if launch.launcher == "torchrun" else f"tcp://{launch.address}:{launch.port}"
    _choose_interface(launch)
    try:
        dist.init_process_group(name, method, rank=launch.rank, world_size=launch.num_ranks, timeout=limit)
    except RuntimeError as error:
        if "connectFullMesh" in str(error):
            error.add_note(
                "gloo could not connect this rank with the others; if an address above is 127.0.0.1 or of a network "
                "that they cannot reach, set GLOO_SOCKET_IFNAME to the interface which they share (see: ip route)"
            )
            if keeps_store(os.environ) is None:  # torchrun's agent does, for all of its restarts
                error.add_note(
                    "after a restart by torchrun it may be an address of before, as its store keeps them (torch 2.13): "
                    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on several nodes"
                )
        raise


def _choose_interface(launch: Launch) -> None:
    """Set gloo's interface, for this and later groups, if it would choose loopback and the user chose none."""
    if _GLOO_INTERFACE not in os.environ and launch.address is not None:
        several_hosts = ranks_per_node(os.environ, launch.num_ranks) < launch.num_ranks
        name = interface_for(launch.address, several_hosts=several_hosts)
        if name is not None:
            os.environ[_GLOO_INTERFACE] = name


def _device_index(launch: Launch, num_devices: int) -> int:
    if launch.local_rank is None and num_devices > 1:
        raise LauncherError(
            f"{launch.launcher} is half set up: LOCAL_RANK is missing, so which of the {num_devices} GPUs is this "
            "rank's cannot be known; set it, or show each rank one GPU with CUDA_VISIBLE_DEVICES or its like"
        )
    index = launch.local_rank or 0
    if index >= num_devices > 0 and launch.visible and (launch.num_gpus or math.inf) > num_devices:
        return index % num_devices  # the node has more: each rank sees its own, or those of its socket
    if index >= num_devices:
        raise LauncherError(
            f"rank {launch.rank} is process {index} of its node, but sees {num_devices} GPUs; start at most "
            f"{num_devices} processes a node, or use device='cpu'"
        )
    return index


def _claim_gpu(launch: Launch, device: torch.device) -> None:
    """Raise if another rank of this node has the same GPU."""
    if launch.visible and board.has_peers():
        # variables may number each rank's GPUs from 0, and parts of one GPU (MIG) may have one uuid: both must be alike
        gpu = f"{launch.visible}/{device.index}/{devices.uuid_of(device)}"
        first = board.common_postings().claim(f"gpus/{board.ProcessId.own().machine}/{gpu}", str(launch.rank))
        if first != str(launch.rank):
            raise LauncherError(
                f"ranks {first} and {launch.rank} of one node both have GPU {device.index} of {launch.visible}: "
                "show each its own (srun --gpus-per-task=1), show all of them all (--gpu-bind=none), or start fewer"
            )


_ANYWHERE = "192.0.2.1"  # of no host (RFC 5737): where the default route leads
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def interface_for(address: str, *, several_hosts: bool) -> str | None:
    """Return the interface towards ``address`` if gloo would choose loopback; else None.

    ``address``: of rank 0's host; nothing is sent there.
    ``several_hosts``: whether ranks are on other hosts, so that the loopback interface will not do even on rank 0's
    own.
    """
    if not _is_loopback(_address_of_name()):
        return None
    local = _source_towards(address)
    if several_hosts and _is_loopback(local):
        local = _source_towards(_ANYWHERE)
    return None if _is_loopback(local) else _interface_of(local)


def _is_loopback(address: str | None) -> bool:
    return address is None or ipaddress.ip_address(address).is_loopback


def _address_of_name() -> str | None:
    """Return the address that gloo takes: the first one of the host's name at which this host can listen."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(place)
                return str(place[0])
    return None


def _source_towards(address: str) -> str | None:
    """Return the local address from which packets would leave."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sender:
                sender.connect(place)
                return str(sender.getsockname()[0]).partition("%")[0]
    return None


def _interface_of(local: str | None) -> str | None:
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # not on Windows

        wanted = None if local is None else ipaddress.ip_address(local)
        if wanted is not None and wanted.version == 6:
            with open("/proc/net/if_inet6", encoding="ascii") as file:
                lines = [line.split() for line in file]
            return next((words[5] for words in lines if bytes.fromhex(words[0]) == wanted.packed), None)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = array.array("B", struct.pack("256s", name.encode()[:15]))
                with contextlib.suppress(OSError):  # an interface without an address
                    fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(request[20:24].tobytes()) == local:
                        return name
    return None


# Axes of these names never hold parts of a sample, so they need not be told apart from domain axes by hand.
_OTHER_PARALLELISM = ("tp", "pp", "ep", "cp", "sp")


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
    """Return the name of the dp axis (None without one) and the names of the domain axes in mesh order.

    The domain axes, unless named, are ``domain``; else ``h`` and ``w``; else all others but those of other kinds of
    parallelism (``tp``, ``pp``, ``ep``, ``cp``, ``sp``). Ranks along the axes that remain hold the same part.

    Raises ConfigError: the mesh has no names, or an axis could be a dp axis under another name: taken for one of
    replicas, it would silently train on the same samples. ``dp=None`` says that there is none.
    Raises UnknownNameError: a domain axis that the mesh does not have.
    """
    names = _names(mesh)
    dp_axis = dp if dp in names else None
    if domain is not None:
        wanted = (domain,) if isinstance(domain, str) else tuple(domain)
        for name in wanted:
            _index(mesh, name)
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


def further_axes(mesh: DeviceMesh, known: Sequence[str | None]) -> tuple[str, ...]:
    """Return the axes besides known ones and those of other kinds of parallelism: ensemble members, for example."""
    return tuple(name for name in _names(mesh) if name not in (*known, *_OTHER_PARALLELISM))


def domain_mesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the part of the mesh that holds this rank's domain, its axes in mesh order."""
    known = _names(mesh)
    for name in names:
        _index(mesh, name)
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

"""The axes of a mesh, told apart by name.

They are of three kinds: the dp axis (ranks hold different samples), domain axes (ranks hold parts of one) and all
others (tensor parallelism, say), along which ranks hold the same part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.errors import ConfigError, UnknownNameError, near_matches

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
    """Return the name of the dp axis, None where there is none, and the names of the domain axes in mesh order.

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
    """Return the axes beside those that are known, but for those of other kinds of parallelism: of members, say."""
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

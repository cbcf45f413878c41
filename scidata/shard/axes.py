"""The axes of a domain mesh as this rank sees them, and the caches that a mesh carries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.cache import Cache
from scidata.errors import ShardLayoutError

_T = TypeVar("_T")

KEPT = 512  # specs, some hundred bytes each; a model has fewer layouts, and fewer plans for one of them


_KEPT_ROWS = 64  # with two numbers for each row of a part


class MeshAxis(NamedTuple):
    """One axis of the domain mesh as this rank sees it."""

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(slots=True, eq=False)
class OfMesh:
    """Axes and specs of a mesh. Stored in the mesh, so that specs, which hold their mesh, are freed with it."""

    axes: tuple[MeshAxis, ...]
    specs: Cache[Any] = field(default_factory=lambda: Cache(KEPT))  # whatever kept_spec() is asked to make
    rows: Cache[Any] = field(default_factory=lambda: Cache(_KEPT_ROWS))  # plans that list the rows of parts

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # a pickled mesh carries nothing of it, and nothing that torch.load() would refuse


def of_mesh(mesh: DeviceMesh) -> OfMesh:
    """Return the axes and specs of a mesh; raises ShardLayoutError as :func:`mesh_axes` does."""
    if not isinstance(mesh, DeviceMesh):
        raise ShardLayoutError(f"device_mesh must be a DeviceMesh, not {type(mesh).__name__}")
    found = mesh.__dict__.get("_scidata")
    if type(found) is not OfMesh:
        found = mesh.__dict__["_scidata"] = OfMesh(_found_axes(mesh))
    return found


def _found_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardLayoutError(
            f"rank {dist.get_rank()} is not part of the device mesh {mesh}; use a mesh that holds it"
        )
    names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    return tuple(MeshAxis(names[i], mesh.get_group(i), int(coordinate[i]), int(mesh.size(i))) for i in range(mesh.ndim))


def mesh_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh; raises ShardLayoutError if this rank is not part of it."""
    return of_mesh(mesh).axes


def kept_spec(mesh: DeviceMesh, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return the value that was made for this key and mesh before, else make it: specs, and meshes joined with it."""
    return of_mesh(mesh).specs.get_or_make(key, make)


def by_axis(given: Mapping[Any, Any], axes: tuple[MeshAxis, ...], entry: Callable[[Any], _T]) -> dict[int, _T]:
    """Index values that are given by an axis's name or number by its number, as ``entry`` converts them.

    Raises ShardLayoutError: no mapping, an unknown axis, or a value that ``entry`` does not take.
    """
    names = {axis.name: i for i, axis in enumerate(axes)}
    if not isinstance(given, Mapping):
        raise ShardLayoutError(f"expected a dict by mesh axis, such as {{{axes[0].name!r}: ...}}, not {given!r}")
    result = {}
    for key, value in given.items():
        i = names.get(key, -1) if isinstance(key, str) else key
        if i not in range(len(axes)):
            raise ShardLayoutError(f"sizes for mesh axis {key!r}, but the mesh has {list(names)}")
        try:
            result[i] = entry(value)
        except TypeError:
            num = axes[i].size
            raise ShardLayoutError(
                f"axis {key!r}: expected integers for each of its {num} ranks, not {value!r}"
            ) from None
    return result


def as_sizes(given: Iterable[int] | None) -> list[int] | None:
    """Return sizes as integers, None unchanged; raises TypeError for anything else."""
    return None if given is None else [*map(index, given)]

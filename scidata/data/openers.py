"""Open data of each kind known to :func:`scidata.open_dataset`: make a reader and the data set around it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import check_function
from scidata.core.grid_cut import COLUMNS, GridCut
from scidata.core.options import ReadOptions
from scidata.core.types import Source
from scidata.data.local_fields import LocalTransform
from scidata.device_mesh import axes_of, axis_size
from scidata.errors import ConfigError, FieldMismatchError, check_known
from scidata.sources.cf import role_of_name

if TYPE_CHECKING:
    from scidata.data.grid_dataset import ShardedDataset
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.grids.reader import GridReader

# NumPy has no bfloat16: such fields are read as float32 and cast once, when they become tensors
_READ_AS = {torch.float16: np.float16, torch.bfloat16: np.float32, torch.float32: np.float32, torch.float64: np.float64}


class Wrapping(TypedDict):
    """Conversions that a data set applies to the values of its reader."""

    dtype: torch.dtype | None
    transform: Callable[[Any], Any] | None
    local_transform: LocalTransform | None


def check_wrapping(wrapping: Wrapping) -> None:
    """Check that functions are callable and dtypes floating."""
    check_function("transform", wrapping["transform"])
    check_function("local_transform", wrapping["local_transform"])
    dtype = wrapping["dtype"]
    if dtype is not None and dtype not in _READ_AS:
        raise ConfigError(
            f"dtype must be a floating torch dtype, such as torch.float32, not {dtype!r}; integer fields keep their own"
        )


def numpy_dtype(dtype: torch.dtype | None) -> npt.DTypeLike | None:
    """Return the NumPy dtype for floating fields; None keeps the stored one."""
    return None if dtype is None else _READ_AS[dtype]


def cut_of(like: Any) -> GridCut | None:
    """Return the grid cut for points: that of a data set, or one given by bounds along coordinates."""
    if like is None:
        return None
    if isinstance(like, Mapping):
        unknown = [name for name in like if role_of_name(name) not in COLUMNS]
        check_known("cut_like: no coordinate", unknown, ["latitude", "longitude", "x", "y"])
        named = {COLUMNS[role_of_name(name)]: ends for name, ends in like.items()}
        return GridCut.of([(column, ends, np.arange(len(ends)), False) for column, ends in named.items()])
    make: Callable[[], GridCut] | None = getattr(getattr(like, "reader", None), "grid_cut", None)
    if make is None:
        raise ConfigError(
            f"cut_like is a {type(like).__name__}: expected a data set of a grid, or the ends of parts by coordinate, "
            "{'latitude': [90, 0, -90]}"
        )
    return make()


# Each kind is imported where it is met: a script that opens a grid loads no mesh.


def open_store(
    path: str, mesh: DeviceMesh | None, options: ReadOptions, *, dp: str, **wrapping: Unpack[Wrapping]
) -> IrregularDataset[Any]:
    """Open a partitioned store."""
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.store.reading.reader import StoreReader

    dp_axis, axes, num_parts = _one_axis(mesh, dp, path)
    reader = StoreReader(path, options, num_parts=num_parts)
    return IrregularDataset(reader, mesh, axes, dp_axis=dp_axis, **wrapping)


def open_points(
    path: str | tuple[str, ...],
    mesh: DeviceMesh | None,
    options: ReadOptions,
    *,
    dp: str,
    **wrapping: Unpack[Wrapping],
) -> IrregularDataset[Any]:
    """Open raw point clouds, each file a sample."""
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.store.raw_points.windows_reader import points_reader

    shown = path if isinstance(path, str) else "SOURCE..."
    dp_axis, axes, num_parts = _one_axis(mesh, dp, shown, several=options.cut_like is not None)
    try:
        reader = points_reader(path, options, num_parts=num_parts)
    except FieldMismatchError as e:
        before, marked, _ = str(e).partition("; name them with points=")
        if not marked:
            raise
        raise FieldMismatchError(
            f"{before}; name them with positions=('lon', 'lat'), or leave kind out where it is a grid"
        ) from None
    return IrregularDataset(reader, mesh, axes, dp_axis=dp_axis, **wrapping)


def open_grid(
    path: str | tuple[str, ...],
    first: Source | None,
    mesh: DeviceMesh | None,
    options: ReadOptions,
    *,
    dp: str,
    **wrapping: Unpack[Wrapping],
) -> ShardedDataset[Any]:
    """Open a grid; ``first`` is its first file, if already open."""
    from scidata.data.grid_dataset import ShardedDataset
    from scidata.data.node import memory_share, node_ranks
    from scidata.grids.reader import GridReader

    dp_axis, axes = _axes(mesh, dp, options.shard)
    make, dataset = GridReader, ShardedDataset
    if options.patch is not None:
        from scidata.data.patch_dataset import PatchDataset
        from scidata.grids.patch_reader import PatchReader

        make, dataset = PatchReader, PatchDataset
    reader = make(
        path,
        options if mesh is not None else replace(options, shard={}),
        axis_sizes={axis: axis_size(mesh, axis) for axis in axes},
        memory_bytes=memory_share() if options.pool_bytes is None else 0,
        node=node_ranks(mesh, axes, dp_axis) if options.by_node else None,
        first=first,
    )
    for text in _remarks(reader, has_mesh=mesh is not None):
        warnings.warn(text, stacklevel=4)
    return dataset(reader, mesh, axes, dp_axis=dp_axis, has_coords=options.coords, **wrapping)


def _remarks(reader: GridReader, *, has_mesh: bool) -> Iterator[str]:
    """Warn about surprises: fields left out, periodic dims without halo, gaps in time."""
    from scidata.grids.choices import left_out_text

    choice, partition, where = reader.choice, reader.cut, reader.paths[0]
    if several := [name for name in choice.left_out if len(reader.sources[0].arrays[name].shape) > 1]:
        yield f"{where}: {left_out_text(several, choice.reference.name)}"
    if choice.taken_text:
        yield f"{where}: {choice.taken_text}"
    if has_mesh and (idle := sorted(partition.periodic - partition.halo.keys())):
        yield (
            f"{where}: periodic: {idle[0]} has no halo that could wrap; give it one, halo={{{idle[0]!r}: 1}}, or leave "
            "it out"
        )
    yield from reader.gap_texts


def _one_axis(
    mesh: DeviceMesh | None, dp: str, shown: str, *, several: bool = False
) -> tuple[str | None, tuple[str, ...], int]:
    dp_axis, domain = _axes(mesh, dp, None)
    if len(domain) > 1 and not several:
        raise ConfigError(
            f"{shown}: meshes, points and graphs are cut along one domain axis, and the mesh has {', '.join(domain)}; "
            "make it with init_mesh(domain=N)"
        )
    return dp_axis, domain, math.prod(axis_size(mesh, axis) for axis in domain)


def _axes(
    mesh: DeviceMesh | None, dp: str, shard: Mapping[str | int, str] | None
) -> tuple[str | None, tuple[str, ...]]:
    if mesh is None:
        return None, ()
    if shard is None:
        return axes_of(mesh, dp=dp)
    names = tuple(mesh.mesh_dim_names or ())
    check_known("shard: the mesh has no axis", shard.values(), names)
    if dp in shard.values():
        raise ConfigError(f"shard splits a dimension over {dp!r}, the data-parallel axis; use a domain axis")
    return axes_of(mesh, dp=dp, domain=tuple(axis for axis in names if axis in shard.values()))

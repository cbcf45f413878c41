"""Opens data of each kind, once :func:`scidata.open_dataset` knows which it is: what fits together, which reader."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from scidata.core.types import Source
from scidata.data.options import HowToCut, HowToReach, WhatToRead
from scidata.device_mesh import axes_of, axis_size
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, near_matches

if TYPE_CHECKING:
    from scidata.data.grid_dataset import ShardedDataset
    from scidata.data.irregular_dataset import IrregularDataset

# Each kind is imported where it is met: who opens a grid loads no mesh, and who opens a store no grid.


def open_store(
    path: str, mesh: DeviceMesh | None, what: WhatToRead, cut: HowToCut, reach: HowToReach
) -> IrregularDataset[Any]:
    """Open a partitioned store."""
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.store.reading.reader import CACHE_BYTES, StoreReader

    raw = {"decode": what.decode is not True} | reach.trust
    refuse(cut.given_for_grids | what.labelled | raw, f"means nothing for {path}, a partitioned store")
    if not isinstance(what.sample_dim, str | int | None):
        raise ConfigError(
            f"sample_dim={what.sample_dim!r}: {path} is a store, whose stored samples are the trajectories; name the "
            "dimension of steps alone"
        )
    dp_axis, axes, num_parts = _one_axis(mesh, cut.dp, path)
    reader = StoreReader(
        path, num_parts=num_parts, **_common(what, cut, reach), **what.samples, subsample=what.draw(),
        halo=cut.halo, ghosts=cut.ghosts or ("disk" if cut.halo else "exchange"),
        cache_bytes=CACHE_BYTES if reach.cache_bytes is None else reach.cache_bytes, disk=reach.disk(),
    )  # fmt: skip
    if what.kind not in (None, reader.kind):
        raise ConfigError(f"kind={what.kind!r}: {path} is a store of kind {reader.kind!r}")
    return IrregularDataset(reader, mesh, axes, dp_axis=dp_axis, **what.wrapping)


def open_points(
    path: str | tuple[str, ...], mesh: DeviceMesh | None, what: WhatToRead, cut: HowToCut, reach: HowToReach
) -> IrregularDataset[Any]:
    """Open raw point clouds, each file a sample."""
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.store.raw_points.reader import PointsReader

    shown = path if isinstance(path, str) else "SOURCE..."
    refuse(
        cut.given_for_grids | what.chosen_samples | what.labelled,
        "means nothing for points, of which each file is a sample",
    )
    if cut.halo or cut.ghosts is not None:
        given = f"halo={cut.halo}" if cut.halo else f"ghosts={cut.ghosts!r}"
        raise ConfigError(
            f"{given}: raw points are read in the order of their file, in which neighbours lie anywhere; put them "
            f"in order once: scidata partition {shown} OUT --kind points, then open OUT"
        )
    dp_axis, axes, num_parts = _one_axis(mesh, cut.dp, shown)
    try:
        reader = PointsReader(
            path,
            num_parts=num_parts,
            **_common(what, cut, reach),
            **reach.trust,
            decode=what.decodes,
            subsample=what.draw(),
        )
    except FieldMismatchError as e:
        before, marked, _ = str(e).partition("; name them with points=")
        if not marked:
            raise
        raise FieldMismatchError(
            f"{before}; leave kind out where it is a grid, or name them when a store is written once: scidata "
            f"partition {shown} OUT --kind points --points x,y, then open OUT"
        ) from None
    return IrregularDataset(reader, mesh, axes, dp_axis=dp_axis, **what.wrapping)


def open_grid(
    path: str | tuple[str, ...],
    first: Source | None,
    mesh: DeviceMesh | None,
    what: WhatToRead,
    cut: HowToCut,
    reach: HowToReach,
) -> ShardedDataset[Any]:
    """Open a grid; ``first`` is its first file, where that is open already."""
    from scidata.data.grid_dataset import ShardedDataset
    from scidata.data.node import memory_share, node_ranks
    from scidata.grids.choices import left_out_text
    from scidata.grids.reader import GridReader

    if what.by_node and reach.pool_bytes == 0:
        raise ConfigError("decode='node' keeps what was decoded in the pool, of which pool_bytes=0 leaves none")
    if cut.ghosts is not None:
        raise ConfigError(f"ghosts={cut.ghosts!r}: the halo of a grid is always read from disk; leave ghosts out")
    if what.subsample is not None:
        raise ConfigError(f"subsample={what.subsample}: grids are not drawn from; crop or stride them with isel")
    dp_axis, axes = _axes(mesh, cut.dp, cut.shard)
    reader = GridReader(
        path, first=first, **_common(what, cut, reach), **what.samples, **reach.trust, sel=what.sel, gaps=what.gaps,
        destagger=what.destagger,
        align=cut.align, halo=cut.halo, periodic=cut.periodic, decode=what.decodes,
        shard=cut.shard if mesh is not None else {}, node=node_ranks(mesh, axes) if what.by_node else None,
        pool_bytes=memory_share() if reach.pool_bytes is None else reach.pool_bytes, pool_fits=reach.pool_bytes is None,
        disk=reach.disk(),
        axis_sizes={axis: axis_size(mesh, axis) for axis in axes},
    )  # fmt: skip
    if several := [name for name in reader.left_out if len(reader.sources[0].arrays[name].shape) > 1]:
        warnings.warn(f"{reader.paths[0]}: {left_out_text(several, reader.reference)}", stacklevel=4)
    if reader.taken_text:
        warnings.warn(f"{reader.paths[0]}: {reader.taken_text}", stacklevel=4)
    if mesh is not None and (idle := sorted(reader.partition.periodic - reader.partition.halo.keys())):
        text = f"periodic: {idle[0]} has no halo that could wrap; give it one, halo={{{idle[0]!r}: 1}}, or leave it out"
        warnings.warn(f"{reader.paths[0]}: {text}", stacklevel=4)
    for text in reader.gap_texts:
        warnings.warn(text, stacklevel=4)
    return ShardedDataset(reader, mesh, axes, dp_axis=dp_axis, has_coords=what.coords, **what.wrapping)


def _common(what: WhatToRead, cut: HowToCut, reach: HowToReach) -> dict[str, Any]:
    """Return what all readers take."""
    return {
        "fields": what.fields, "dtype": what.numpy_dtype, "bounds": cut.bounds, "weights": cut.weights,
        "num_threads": reach.num_threads,
    }  # fmt: skip


def refuse(given: Mapping[str, bool], why: str) -> None:
    """Refuse arguments that were given and mean nothing here."""
    for name, present in given.items():
        if present:
            raise ConfigError(f"{name}: {why}; leave it out")


def _one_axis(mesh: DeviceMesh | None, dp: str, shown: str) -> tuple[str | None, tuple[str, ...], int]:
    """Return the dp axis, the domain's axes, which are one at most, and its ranks."""
    dp_axis, domain = _axes(mesh, dp, None)
    if len(domain) > 1:
        raise ConfigError(
            f"{shown}: meshes, points and graphs are cut along one domain axis, and the mesh has {', '.join(domain)}; "
            "make it with init_mesh(domain=N)"
        )
    return dp_axis, domain, axis_size(mesh, domain[0] if domain else None)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def _axes(
    mesh: DeviceMesh | None, dp: str, shard: Mapping[str | int, str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the dp axis, if the mesh has it, and the domain axes in mesh order."""
    if mesh is None:
        return None, ()
    if shard is None:
        return axes_of(mesh, dp=dp)
    for axis in shard.values():
        if axis not in _names(mesh):
            raise UnknownNameError(f"shard: the mesh has no axis {axis!r}{near_matches(axis, _names(mesh))}")
        if axis == dp:
            raise ConfigError(f"shard splits a dimension over {dp!r}, the data-parallel axis; use a domain axis")
    return axes_of(mesh, dp=dp, domain=tuple(a for a in _names(mesh) if a in shard.values()))

"""UGRID meshes: raw NetCDF → store → fields on nodes and cells, and integrals over the mesh.

    python -m pipelines.ugrid_mesh make waves.nc                           # made-up data on a triangulated sphere
    python -m pipelines.ugrid_mesh convert waves.nc waves.store            # → a store that any number of ranks reads
    python -m pipelines.ugrid_mesh convert DATA.nc OUT --mesh GRID.nc      # where the topology is in another file

    ds = open_ugrid("waves.store", mesh)
    sample = ds[0]
    height = mean_on_cells(sample, "height")  # node field → its mean over each cell's corners
    area = cell_areas(sample, ds)             # (C,), on the unit sphere or in the plane
    (area * height).sum()                     # over the whole mesh, the same on every rank

Results are ShardTensors along the cells, like the fields; ghosts of nodes come from disk. Shape letters: N nodes, C
cells.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import netcdf_file
from scipy.spatial import ConvexHull
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import scidata
from pipelines.telling import telling

__all__ = ["cell_areas", "convert", "make", "mean_on_cells", "open_ugrid"]

# -- reading -------------------------------------------------------------------------------------------------------


def open_ugrid(
    path: str,
    mesh: DeviceMesh | None,
    *,
    fields: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> scidata.IrregularDataset:
    """Open a store of meshes: this rank's cells, its nodes, and the nodes of its cells that are others'.

    Parameters
    ----------
    path, mesh, dtype, options
        As in :func:`scidata.open_dataset`.
    fields
        Names, on nodes or cells, besides the positions; default all.
    """
    halo = {} if mesh is None else {"halo": 1, "ghosts": "disk"}
    names = None if fields is None else ["pos", *fields]
    return scidata.open_dataset(path, mesh, fields=names, dtype=dtype, **(halo | options))


def mean_on_cells(sample: scidata.IrregularSample, name: str) -> Tensor:
    """Return the mean of a node field over the corners of each cell, ``(C, ...)``; other dims follow in their order."""
    values = sample.with_ghosts(name).movedim(sample.places[name].dim, 0)
    corners, cell, sizes = _corners(sample)
    total = values.new_zeros((len(sizes), *values.shape[1:])).index_add_(0, cell, values[corners])
    return _on_cells(sample, total / sizes.view(-1, *[1] * (values.ndim - 1)))


def cell_areas(sample: scidata.IrregularSample, ds: scidata.IrregularDataset) -> Tensor:
    """Return the area of each cell of a 2-D mesh, ``(C,)``: on the unit sphere for longitude and latitude.

    Cells are fans of triangles round their centre.
    """
    pos = sample.with_ghosts("pos").double()
    on_sphere = ds.reader.store.manifest.on_sphere
    if on_sphere:
        lon, lat = torch.deg2rad(pos[:, 0]), torch.deg2rad(pos[:, 1])
        pos = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)
    elif pos.shape[1] == 2:
        pos = torch.cat([pos, torch.zeros_like(pos[:, :1])], dim=1)
    corners, cell, sizes = _corners(sample)
    here = pos[corners]
    centre = here.new_zeros(len(sizes), 3).index_add_(0, cell, here) / sizes[:, None]
    last = sizes.cumsum(0) - 1  # each corner's next one: the first of its cell after the last
    following = torch.arange(1, len(corners) + 1)
    following[last] = last + 1 - sizes
    a, b, c = centre[cell], here, here[following]
    if on_sphere:  # the solid angle of a triangle (Van Oosterom and Strackee 1983)
        a = a / a.norm(dim=1, keepdim=True)
        volume = (a * torch.linalg.cross(b, c)).sum(1)
        triangles = 2 * torch.atan2(volume.abs(), 1 + (a * b).sum(1) + (b * c).sum(1) + (c * a).sum(1))
    else:
        triangles = torch.linalg.cross(b - a, c - a).norm(dim=1) / 2
    return _on_cells(sample, triangles.new_zeros(len(sizes)).index_add_(0, cell, triangles))


def _corners(sample: scidata.IrregularSample) -> tuple[Tensor, Tensor, Tensor]:
    """Return the node of each corner, the cell of each corner, in local numbering, and the corners of each cell."""
    cells = sample.cells
    if cells is None:
        raise ValueError("the sample has no cells")
    sizes = torch.diff(cells.offsets)
    return cells.connectivity, torch.repeat_interleave(torch.arange(len(sizes)), sizes), sizes


def _on_cells(sample: scidata.IrregularSample, local: Tensor) -> Tensor:
    """Wrap this rank's values of its cells as a ShardTensor; leave them where the sample is whole."""
    like = sample["pos"]
    if not isinstance(like, scidata.ShardTensor):
        return local
    shapes = [(size, *local.shape[1:]) for size in np.diff(sample.index_map("cell").bounds).tolist()]
    return scidata.ShardTensor.from_local(local, like.device_mesh, [Shard(0)], sharding_shapes={0: shapes})


# -- making --------------------------------------------------------------------------------------------------------


def make(out: str, *, num_nodes: int = 2000, num_times: int = 4) -> None:
    """Write a UGRID file of triangles on a sphere: ``height`` (time, node), ``depth`` (face).

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        Fewer than 12 nodes.
    """
    if num_nodes < 12:
        raise ValueError(f"{num_nodes} nodes make no sphere; 12 do")
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")
    z = 1 - (2 * np.arange(num_nodes) + 1) / num_nodes  # Fibonacci's lattice
    lon = np.mod(np.arange(num_nodes) * 180 * (1 + np.sqrt(5)), 360)
    lat = np.degrees(np.arcsin(z))
    ring = np.sqrt(1 - z**2)
    points = np.stack([ring * np.cos(np.radians(lon)), ring * np.sin(np.radians(lon)), z], axis=1)
    triangles = ConvexHull(points).simplices
    a, b, c = (points[triangles[:, i]] for i in range(3))
    inward = (np.cross(b - a, c - a) * a).sum(axis=1) < 0
    triangles[inward] = triangles[inward][:, ::-1]  # all counter-clockwise, seen from outside
    with netcdf_file(out, "w", version=2) as file:
        for name, size in (("time", num_times), ("node", num_nodes), ("face", len(triangles)), ("corner", 3)):
            file.createDimension(name, size)
        _write(file, "mesh", np.int32(0), (), cf_role="mesh_topology", topology_dimension=2,
               node_coordinates="lon lat", face_node_connectivity="face_nodes")  # fmt: skip
        _write(file, "lon", lon, ("node",), units="degrees_east", standard_name="longitude")
        _write(file, "lat", lat, ("node",), units="degrees_north", standard_name="latitude")
        _write(file, "face_nodes", triangles.astype("i4") + 1, ("face", "corner"), start_index=1)
        phase = np.radians(3 * lon) - 0.4 * np.arange(num_times)[:, None]
        where = {"mesh": "mesh", "units": "m"}
        _write(file, "height", 10 + ring**3 * np.cos(phase), ("time", "node"), location="node", **where)
        _write(file, "depth", 100 + 20 * points[triangles].mean(axis=1)[:, 2], ("face",), location="face", **where)


def _write(file: Any, name: str, values: Any, dims: tuple[str, ...], **attributes: Any) -> None:
    array = np.asarray(values)
    variable = file.createVariable(name, array.dtype, dims)
    variable[...] = array
    for key, value in attributes.items():
        setattr(variable, key, np.int32(value) if isinstance(value, int) else value)


def convert(sources: Sequence[str], out: str, *, mesh: str | None = None, **options: Any) -> None:
    """Write the store. ``mesh`` is the topology's file, where it is not in each of the sources.

    Raises
    ------
    SciDataError
        As ``scidata.partition``, which takes the ``options`` too.
    """
    scidata.partition(
        list(sources), out, kind="mesh", mesh=mesh, **{"tick": telling("samples", len(sources))} | options
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.ugrid_mesh", description="Make or convert UGRID meshes.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write a small made-up file")
    made.add_argument("out")
    made.add_argument("--nodes", type=int, default=2000)
    made.add_argument("--times", type=int, default=4)
    converted = commands.add_parser("convert", help="write files as one store")
    converted.add_argument("sources", nargs="+")
    converted.add_argument("out")
    converted.add_argument("--mesh", help="the topology's file, where the fields are in others")
    converted.add_argument("--fields", nargs="+")
    converted.add_argument("--order", default="hilbert")
    converted.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            make(args.out, num_nodes=args.nodes, num_times=args.times)
        else:
            options = {"fields": args.fields, "order": args.order, "jobs": args.jobs}
            convert(args.sources, args.out, mesh=args.mesh, **options)
    except (OSError, ValueError, scidata.errors.SciDataError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

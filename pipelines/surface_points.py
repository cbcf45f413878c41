"""Fields on surfaces as point clouds: raw clouds → store → neighbours and surface integrals.

    python -m pipelines.surface_points make raw/                      # made-up data: one Zarr group a sample
    python -m pipelines.surface_points convert raw/ surface.store     # → a store that any number of ranks reads

    python -m pipelines.surface_points make cars/ --format vtp        # triangles, with the pressure of each
    python -m pipelines.surface_points convert cars/ cars.store --pattern '*.vtp' --entity cell --order shuffle

    ds = open_surface("surface.store", mesh, radius=0.1)
    force(ds[0])                                    # (3,), the same on every rank
    source, target = neighbours(ds[0], radius=0.1)  # pairs of local ids; sources may be ghosts, read from disk

``convert`` takes any clouds that have ``points`` (N, 3) and fields by point, in Zarr, HDF5 or NetCDF. Made-up samples
are ellipsoids in a uniform flow, whose pressure is known exactly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import torch
import zarr
from scipy.spatial import ConvexHull, cKDTree
from scipy.special import elliprd
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import scidata
from pipelines.telling import telling

__all__ = ["convert", "force", "make", "neighbours", "open_surface"]

# -- reading -------------------------------------------------------------------------------------------------------


def open_surface(
    path: str,
    mesh: DeviceMesh | None,
    *,
    radius: float = 0.0,
    fields: Sequence[str] = ("normal", "area", "pressure"),
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> scidata.IrregularDataset:
    """Open a store of clouds: this rank's points and fields, and with a ``radius`` the points that near to them.

    Parameters
    ----------
    path, mesh, dtype, options
        As in :func:`scidata.open_dataset`.
    radius
        How far :func:`neighbours` will look, in the unit of the positions.
    fields
        Names, besides the positions.
    """
    halo = {"halo": radius, "ghosts": "disk"} if radius and mesh is not None else {}
    return scidata.open_dataset(path, mesh, fields=["pos", *fields], dtype=dtype, **(halo | options))


def neighbours(sample: scidata.IrregularSample, radius: float) -> Tensor:
    """Find the pairs of points no further apart than ``radius``; each directed pair on one rank. No communication.

    Returns
    -------
    pairs
        ``(2, num_pairs)`` int64 local ids, by target: sources are owned points or ghosts, targets owned ones.
    """
    points = sample.with_ghosts("pos").cpu().double().numpy()
    num_owned = sample.index_map("point").num_owned
    if num_owned == 0:
        return torch.empty(2, 0, dtype=torch.int64)
    width = np.zeros(points.shape[1])
    if sample.period is not None:  # where the domain wraps, the nearest images count
        width[: len(sample.period)] = sample.period
        wraps = width > 0
        points = points.copy()
        points[:, wraps] %= width[wraps]
        points[:, wraps] *= points[:, wraps] < width[wraps]  # a remainder that was rounded to the width
    tree = cKDTree(points, boxsize=width if width.any() else None)
    found = tree.query_ball_point(points[:num_owned], radius, return_sorted=True)
    source = np.concatenate(found).astype(np.int64)
    target = np.repeat(np.arange(num_owned), [len(near) for near in found])
    return torch.from_numpy(np.stack([source, target])[:, source != target])


def force(sample: scidata.IrregularSample, pressure: Tensor | str = "pressure") -> Tensor:
    """Add up pressure × normal × area over the surface, ``(3,)``: a plain tensor, the same on every rank.

    Collective over the domain axis. ``pressure`` is a field, or a tensor of the sample's points.
    """
    values = sample[pressure] if isinstance(pressure, str) else pressure
    return -((values.double() * sample["area"].double()).unsqueeze(1) * sample["normal"].double()).sum(dim=0)


# -- making --------------------------------------------------------------------------------------------------------


def lattice(num_points: int) -> npt.NDArray[np.float64]:
    """Return points of the unit sphere with equal areas around them: Fibonacci's lattice."""
    height = 1 - (2 * np.arange(num_points) + 1) / num_points
    angle = np.pi * (1 + np.sqrt(5)) * np.arange(num_points)
    ring = np.sqrt(1 - height**2)
    return np.stack([ring * np.cos(angle), ring * np.sin(angle), height], axis=1)


def axes_of(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw the half axes of an ellipsoid."""
    return np.array([rng.uniform(0.8, 1.6), rng.uniform(0.4, 0.8), rng.uniform(0.3, 0.6)])


def pressure_on(axes: npt.NDArray[np.float64], normal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the pressure, as a coefficient, where an ellipsoid in a flow along x has these normals.

    Exact potential flow, as in Lamb's Hydrodynamics, §114.
    """
    a, b, c = axes**2
    alpha = 2 / 3 * axes.prod() * elliprd(b, c, a)
    velocity = 2 / (2 - alpha) * (np.array([1.0, 0.0, 0.0]) - normal[:, :1] * normal)
    return 1 - (velocity**2).sum(axis=1)


def ellipsoid(rng: np.random.Generator, num_points: int) -> dict[str, npt.NDArray[Any]]:
    """Make one cloud: arrays by name."""
    axes, unit = axes_of(rng), lattice(num_points)
    slope = unit / axes
    stretch = np.linalg.norm(slope, axis=1)
    normal = slope / stretch[:, None]
    arrays = {
        "points": unit * axes,
        "normal": normal,
        "area": axes.prod() * stretch * 4 * np.pi / num_points,
        "pressure": pressure_on(axes, normal),
    }
    order = rng.permutation(num_points)
    return {name: values[order].astype("f8" if name == "points" else "f4") for name, values in arrays.items()}


def write_car(path: Path, rng: np.random.Generator, num_points: int) -> None:
    """Write a closed surface of triangles as VTP, with the pressure on each, and at its nodes."""
    axes, unit = axes_of(rng), rng.permutation(lattice(num_points))
    triangles = rng.permutation(ConvexHull(unit).simplices).astype(np.int64)
    corners = unit[triangles]
    inwards = np.linalg.det(corners) < 0
    triangles[inwards] = triangles[inwards][:, ::-1]  # counter-clockwise, seen from outside

    def pressure(at: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        slope = at / np.linalg.norm(at, axis=1, keepdims=True) / axes
        return pressure_on(axes, slope / np.linalg.norm(slope, axis=1, keepdims=True)).astype("f4")

    blocks = b""
    element: Any = ElementTree.Element("VTKFile", type="PolyData", version="1.0", byte_order="LittleEndian",
                                       header_type="UInt64")  # fmt: skip
    size = {"NumberOfPoints": str(num_points), "NumberOfPolys": str(len(triangles))}
    piece = ElementTree.SubElement(ElementTree.SubElement(element, "PolyData"), "Piece", size)
    for group, name, values in (
        ("PointData", "pressure", pressure(unit)),
        ("CellData", "pressure", pressure(corners.mean(axis=1))),
        ("Points", "Points", (unit * axes).astype("f4")),
        ("Polys", "connectivity", triangles.reshape(-1)),
        ("Polys", "offsets", 3 * np.arange(1, len(triangles) + 1)),
    ):
        parent = piece.find(group)
        parent = ElementTree.SubElement(piece, group) if parent is None else parent
        about = {"type": "Float32" if values.dtype.kind == "f" else "Int64", "Name": name, "format": "appended"}
        about |= {"NumberOfComponents": str(values.shape[1])} if values.ndim > 1 else {}
        ElementTree.SubElement(parent, "DataArray", about | {"offset": str(len(blocks))})
        blocks += np.uint64(values.nbytes).tobytes() + values.tobytes()
    head, tail = ElementTree.tostring(element).split(b"</VTKFile>")
    path.write_bytes(head + b'<AppendedData encoding="raw">_' + blocks + b"</AppendedData></VTKFile>" + tail)


def make(out: str, *, num_samples: int = 4, num_points: int = 5000, seed: int = 0, form: str = "zarr") -> None:
    """Write one Zarr group a sample, or with ``form="vtp"`` one file of triangles, near ``num_points`` points each.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    """
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")
    Path(out).mkdir(parents=True)
    tick = telling("samples", num_samples)
    for index in range(num_samples):
        rng = np.random.default_rng([seed, index])
        num = round(num_points * rng.uniform(0.8, 1.2))
        if form == "vtp":
            write_car(Path(out) / f"car_{index:05d}.vtp", rng, num)
            tick(1)
            continue
        arrays = ellipsoid(rng, num)
        group = zarr.open_group(str(Path(out) / f"surface_{index:05d}.zarr"), mode="w-", zarr_format=3)
        for name, values in arrays.items():
            dims = ("point", "xyz")[: values.ndim]
            chunks = (4096, *values.shape[1:])
            config: Any = {"write_empty_chunks": True}  # a chunk that is absent is then a lost one
            group.create_array(name, data=values, chunks=chunks, dimension_names=dims, config=config)
        tick(1)


def convert(raw: str, out: str, *, pattern: str = "*.zarr", jobs: int = 1, **options: Any) -> None:
    """Write the store: everything in a folder that fits ``pattern`` is a sample. ``options`` as in ``partition``.

    Raises
    ------
    FileNotFoundError
        Nothing in ``raw`` fits.
    SciDataError
        As ``scidata.partition``.
    """
    files = sorted(map(str, Path(raw).glob(pattern)))
    if not files:
        raise FileNotFoundError(f"{raw}: nothing in it is named {pattern}")
    scidata.partition(files, out, kind="points", jobs=jobs, **{"tick": telling("samples", len(files))} | options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.surface_points", description="Make clouds on surfaces, a store.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write small made-up data, one Zarr group a sample")
    made.add_argument("out", help="a new folder")
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--points", type=int, default=5000, help="about so many a sample")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--format", choices=["zarr", "vtp"], default="zarr", help="vtp: triangles, as a mesher writes them"
    )
    converted = commands.add_parser("convert", help="write the clouds of a folder as one store")
    converted.add_argument("raw")
    converted.add_argument("out")
    converted.add_argument("--pattern", default="*.zarr")
    converted.add_argument("--entity", choices=["cell"], help="the centres of cells, with their areas and normals")
    converted.add_argument("--order", default="hilbert")
    converted.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            make(args.out, num_samples=args.samples, num_points=args.points, seed=args.seed, form=args.format)
        else:
            about = {"order": args.order, "entity": args.entity}
            convert(args.raw, args.out, pattern=args.pattern, jobs=args.jobs, **about)
    except (OSError, ValueError, scidata.errors.SciDataError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Weather on a latitude × longitude grid, with GraphCast's mesh around it: raw files → store → a model's channels.

    python -m pipelines.graphcast make OUT                         # small made-up data, OUT/raw.zarr, and its store
    python -m pipelines.graphcast convert 2015.nc 2016.nc ERA      # NetCDF, HDF5 or Zarr such as ERA5

    ds = open_graphcast("OUT", mesh, steps=(0, 1, 2))              # two times that go in, and the one after
    graph = batch.to_pyg()                                         # torch_geometric HeteroData of ShardTensors
    now = stack_channels(graph["grid"], ["u", "v"], 1)             # (N, C)

OUT is a folder: ``graph.store``, the points of the grid, a refined icosahedron and the edges between them, ordered in
space for any number of ranks, and ``coordinates.json``, what times, levels and latitudes are called. Shape letters: N
grid points, T times, L levels, C = fields × levels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import scidata
from pipelines import era5_grid
from pipelines.telling import telling
from scidata import metrics

__all__ = [
    "RELATIONS",
    "Coordinates",
    "area_weights",
    "clock_features",
    "convert",
    "make",
    "mesh_level_for",
    "num_channels",
    "open_graphcast",
    "place_features",
    "stack_channels",
]

#: How the edges of each relation are found (Lam et al. 2023): grid points within 0.6 of the mesh's longest side, the
#: sides of the icosahedra of all levels, and the corners of the triangle that a grid point lies in.
RELATIONS: Mapping[str, str] = {
    "grid__to__mesh": "spacing:{reach}",
    "mesh__to__mesh": "levels",
    "mesh__to__grid": "containing",
}
STORE, COORDINATES = "graph.store", "coordinates.json"


# -- coordinates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """What rows along the dimensions of the raw files are called.

    Attributes
    ----------
    time
        The dimension of times.
    times
        Of each raw file, as text.
    has_dates
        Whether these are dates; else they are numbers, or rows where nothing labels them.
    levels
        Values of each other dimension besides those of space, where it has some: ``{"level": [200, 500, 850]}``.
    latitudes
        Degrees, of the rows of the grid; None where each point has a latitude of its own.
    """

    time: str
    times: list[list[str]]
    has_dates: bool
    levels: dict[str, list[float]]
    latitudes: list[float] | None

    @classmethod
    def load(cls, folder: str | Path) -> Coordinates:
        """Read what :func:`convert` has written.

        Raises
        ------
        ConfigError
            The folder is not there, or none of :func:`convert`.
        """
        path = Path(folder) / COORDINATES
        if not path.exists():
            if Path(folder).exists():
                what = f"has no {COORDINATES}"
            else:
                there = Path(folder).resolve().parent
                others = [each.name for each in there.iterdir()] if there.is_dir() else []
                what = f"does not exist{scidata.errors.near_matches(Path(folder).name, others)}"
            raise scidata.errors.ConfigError(
                f"{folder}: {what}; give a folder that python -m pipelines.graphcast make, or convert, has written"
            )
        return cls(**json.loads(path.read_text()))

    @classmethod
    def of(cls, sources: Sequence[str], fields: Sequence[str] | None = None) -> Coordinates:
        """Read those of raw files, which follow each other in time.

        Raises
        ------
        SciDataError
            A file without times, or whose levels or latitudes are not those of the first.
        """
        found = [cls._of_file(path, fields) for path in sources]
        first = found[0]
        for path, each in zip(sources, found, strict=True):
            for name in ("time", "has_dates", "levels", "latitudes"):
                if getattr(each, name) != getattr(first, name):
                    raise scidata.errors.FieldMismatchError(
                        f"{path}: differs in its {name} from {sources[0]}; convert such files to folders of their own"
                    )
        return replace(first, times=[times for each in found for times in each.times])

    @classmethod
    def _of_file(cls, path: str, fields: Sequence[str] | None) -> Coordinates:
        ds = scidata.open_dataset(path, fields=fields)
        time = ds.reader.sample_dim
        if time is None:
            raise scidata.errors.ConfigError(f"{path}: no field has a dimension of times")
        times = [np.asarray(ds.own_coords(i).get(time, i)) for i in range(len(ds))]
        levels, latitudes = {}, None
        for dims in {ds.dims(name) for name in ds.fields}:
            *others, lat, _ = dims
            rows = ds.coordinate(lat)
            latitudes = latitudes if rows is None else np.asarray(rows, np.float64).tolist()
            for dim in others:
                values = ds.coordinate(dim)
                if values is not None and np.asarray(values).dtype.kind in "iuf":
                    levels[dim] = np.asarray(values, np.float64).tolist()
        texts = [str(each).removesuffix(".000000000") for each in times]
        dated = all(each.dtype.kind == "M" for each in times)
        return cls(time=time, times=[texts], has_dates=dated, levels=levels, latitudes=latitudes)

    def dates(self) -> np.ndarray[Any, np.dtype[np.datetime64]] | None:
        """Return all times, ``datetime64[s]``; None where they are no dates."""
        texts = [text for times in self.times for text in times]
        return np.array(texts, "datetime64[s]") if self.has_dates else None

    def first_times(self, steps: Sequence[int]) -> list[int]:
        """Return which of all times each sample counts its ``steps`` from; no sample goes over the end of a file."""
        found, before = [], 0
        for times in self.times:
            found += range(before - min(0, *steps), before + len(times) - max(0, *steps))
            before += len(times)
        return found

    def level_weights(self, dims: Sequence[str]) -> Tensor:
        """Return a weight for each index of these dims, in their order, flat, of mean 1: in proportion to pressure.

        Where a dimension has no values above 0, its rows count alike; ``dims`` have sizes of ``levels`` else 1.
        """
        found = torch.ones(1, dtype=torch.float64)
        for dim in dims:
            values = self.levels.get(dim, [1.0])
            weights = metrics.level_weights(values) if min(values) > 0 else torch.ones(len(values))
            found = (found[:, None] * weights).reshape(-1)
        return found


# -- reading -------------------------------------------------------------------------------------------------------


def open_graphcast(
    folder: str,
    mesh: DeviceMesh | None,
    *,
    fields: Sequence[str] | None = None,
    steps: Sequence[int] = (0, 1),
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> scidata.IrregularDataset:
    """Open what :func:`convert` has written: fields and places of grid points, places of the mesh, edges.

    Each rank has a part of the grid and the part of the mesh that lies there, and reads nothing of the others': what a
    layer gathers from them is exchanged.

    Parameters
    ----------
    folder
        Of ``graph.store`` and ``coordinates.json``.
    mesh
        None reads whole samples in one process.
    fields
        Of grid points; default all.
    steps, dtype, options
        As in :func:`scidata.open_dataset`.

    Raises
    ------
    SciDataError
        As :func:`scidata.open_dataset`; no such folder, a field that is not one of grid points, too few times.
    """
    about = Coordinates.load(folder)
    store = str(Path(folder) / STORE)
    known = [name for name, info in _stored(store) if info.entity == "grid" and name != "grid/pos"]
    for name in fields or ():
        if name not in known:
            near = scidata.errors.near_matches(name, known)
            raise scidata.errors.UnknownNameError(f"{folder}: no field {name!r} of grid points{near}")
    names = ["grid/pos", "mesh/pos", *(known if fields is None else dict.fromkeys(fields))]
    names += [f"{relation}/edge_attr" for relation in RELATIONS]
    span, longest = max(0, *steps) - min(0, *steps) + 1, max(map(len, about.times))
    if span > longest:
        raise scidata.errors.ConfigError(f"{folder}: a sample takes {span} times, but there are {longest} in a row")
    options = {"sample_dim": about.time} | options
    return scidata.open_dataset(store, mesh, fields=names, steps=tuple(steps), dtype=dtype, **options)


def _stored(store: str) -> list[tuple[str, Any]]:
    ds = scidata.open_dataset(store, sample_dim=False)  # metadata only
    return [(name, ds.reader.info(name)) for name in ds.fields]


def num_channels(ds: scidata.IrregularDataset, names: Sequence[str]) -> int:
    """Return how many columns :func:`stack_channels` makes of these fields at one time; ``ds`` has one step."""
    shapes = [(ds.global_shape(name), ds.place(name).dim) for name in names]
    return int(sum(np.prod(shape[:dim] + shape[dim + 1 :], dtype=np.int64) for shape, dim in shapes))


def stack_channels(grid: Any, names: Sequence[str], step: int | None = None) -> Tensor:
    """Put the levels of some fields side by side: ``(N, C)``, laid out as the fields are.

    Parameters
    ----------
    grid
        ``graph["grid"]`` of what ``to_pyg()`` returns: fields ``(N, [T,] [L])``.
    step
        Which of the times; None where the fields have one.
    """
    parts = [grid[name] if step is None else grid[name][:, step] for name in names]
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)


def place_features(pos: Tensor) -> Tensor:
    """Return sine of latitude, sine and cosine of longitude, ``(N, 3)``, of ``(N, 2)`` longitude and latitude."""
    lon, lat = torch.deg2rad(pos[:, 0]), torch.deg2rad(pos[:, 1])
    return torch.stack([lat.sin(), lon.sin(), lon.cos()], dim=1)


def clock_features(dates: np.ndarray[Any, Any], sample: Tensor, pos: Tensor) -> Tensor:
    """Return sine and cosine of the time of year, and of the day by the local sun, ``(N, 4)``.

    Parameters
    ----------
    dates
        ``datetime64``, of each sample of a batch.
    sample
        ``(N,)``, the sample that each grid point is of.
    pos
        ``(N, 2)`` longitude and latitude.
    """
    days = (dates - dates.astype("datetime64[Y]")) / np.timedelta64(1, "D")
    clock = torch.from_numpy(np.stack([days / 365.2425, days % 1], axis=1)).to(pos.device, pos.dtype)
    year, day = F.embedding(sample, clock).unbind(1)
    year, day = 2 * torch.pi * year, 2 * torch.pi * (day + pos[:, 0] / 360)
    return torch.stack([year.sin(), year.cos(), day.sin(), day.cos()], dim=1)


def area_weights(about: Coordinates, pos: Tensor) -> Tensor:
    """Return the weight of each grid point by the area it stands for, ``(N, 1)``; of a regular grid of mean 1.

    Points of a curvilinear grid have the cosine of their latitude.
    """
    lat = pos[:, 1]
    if about.latitudes is None:
        return torch.deg2rad(lat).cos()[:, None]
    rows = torch.tensor(sorted(about.latitudes), dtype=pos.dtype)
    weights = metrics.latitude_weights(rows.double()).to(pos.device, pos.dtype)
    middles = ((rows[1:] + rows[:-1]) / 2).to(pos.device)
    return F.embedding(torch.bucketize(lat.contiguous(), middles), weights[:, None])


# -- writing -------------------------------------------------------------------------------------------------------


def mesh_level_for(step: float) -> int:
    """Return the level of an icosahedron whose sides are about four steps of a grid: 6 for 0.25 degrees, 4 for 1."""
    return int(np.clip(np.round(np.log2(16 / step)), 0, 7))


def convert(
    sources: Sequence[str],
    out: str,
    *,
    fields: Sequence[str] | None = None,
    mesh_level: int | None = None,
    reach: float = 0.6,
    **options: Any,
) -> None:
    """Write the store of raw files on one grid, which follow each other in time, and what its rows are called.

    Samples do not go over the end of a file; join files of few times first, ``python -m pipelines.era5_grid convert``.

    Parameters
    ----------
    sources
        Anything gridded that scidata reads.
    fields
        Default all on the grid.
    mesh_level
        How often the icosahedron is refined; default by the step of the grid, :func:`mesh_level_for`.
    reach
        To a mesh node go the grid points so near, in longest sides of the mesh.
    options
        As in ``scidata.partition``.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        A level of the mesh that is none of 0 to 12.
    SciDataError
        As ``scidata.partition``; files of different grids or levels.
    """
    _check_new(out, mesh_level)
    _write_store(sources, Path(out), fields, mesh_level, reach, options)


def _check_new(out: str, mesh_level: int | None) -> None:
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")
    if mesh_level is not None and not 0 <= mesh_level <= 12:
        raise ValueError(f"an icosahedron is refined 0 to 12 times, not {mesh_level}: its level is 6 for 0.25 degrees")


def _write_store(
    sources: Sequence[str],
    out: Path,
    fields: Sequence[str] | None,
    mesh_level: int | None,
    reach: float,
    options: Mapping[str, Any],
) -> None:
    about = Coordinates.of(sources, fields)
    if mesh_level is None:
        mesh_level = 4 if about.latitudes is None else mesh_level_for(float(np.abs(np.diff(about.latitudes)).mean()))
    nodes = {"grid": "file", "mesh": f"icosahedral:{mesh_level}"}
    edges = {relation: rule.format(reach=reach) for relation, rule in RELATIONS.items()}
    tick = {"tick": telling("files", len(sources))}
    scidata.partition(list(sources), str(out / STORE), nodes=nodes, edges=edges, fields=fields, **(tick | options))
    (out / COORDINATES).write_text(json.dumps(asdict(about)))


def make(
    out: str,
    *,
    num_times: int = 16,
    num_levels: int = 3,
    shape: tuple[int, int] = (37, 72),
    mesh_level: int | None = None,
    seed: int = 0,
) -> None:
    """Write small made-up data, travelling waves and a map of land, as ``out/raw.zarr``, and their store.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        A level of the mesh that is none of 0 to 12.
    """
    _check_new(out, mesh_level)
    raw = str(Path(out) / "raw.zarr")
    era5_grid.make(raw, num_times=num_times, num_levels=num_levels, shape=shape, seed=seed)
    group = zarr.open_group(raw, mode="r+")
    lat, lon = (np.radians(np.asarray(group[name])) for name in ("latitude", "longitude"))
    land = np.cos(lat)[:, None] * np.sin(2 * lon) + 0.5 * np.sin(3 * lat)[:, None] > 0.2
    dims = ("latitude", "longitude")
    group.create_array("land", data=land.astype("f4"), dimension_names=dims, attributes={"units": "1"})
    _write_store([raw], Path(out), None, mesh_level, 0.6, {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.graphcast", description="A grid with GraphCast's mesh around it.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write small made-up data, and their store")
    made.add_argument("out", help="a new folder")
    made.add_argument("--times", type=int, default=16)
    made.add_argument("--levels", type=int, default=3)
    made.add_argument("--shape", type=int, nargs=2, default=(37, 72), metavar=("LAT", "LON"))
    made.add_argument("--seed", type=int, default=0)
    converted = commands.add_parser("convert", help="write the store of files on one grid")
    converted.add_argument("sources", nargs="+", help="NetCDF, HDF5 or Zarr, one after the other in time")
    converted.add_argument("out", help="a new folder")
    converted.add_argument("--fields", nargs="+", help="default: all on the grid")
    converted.add_argument("--reach", type=float, default=0.6, help="of grid points, in longest sides of the mesh")
    converted.add_argument("--jobs", type=int, default=1, help="processes that files are shared by")
    for command in (made, converted):
        command.add_argument("--mesh-level", type=int, help="of the icosahedron; default: sides of four grid steps")
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            size = (args.shape[0], args.shape[1])
            make(
                args.out, num_times=args.times, num_levels=args.levels, shape=size, mesh_level=args.mesh_level,
                seed=args.seed,
            )  # fmt: skip
        else:
            convert(
                args.sources, args.out, fields=args.fields, mesh_level=args.mesh_level, reach=args.reach, jobs=args.jobs
            )
    except (OSError, ValueError, scidata.errors.SciDataError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

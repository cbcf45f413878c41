"""Flow past shapes on unstructured meshes: raw graphs → store → a graph network's channels.

    python -m pipelines.flow_graph make raw/                   # made-up data: one HDF5 file a sample
    python -m pipelines.flow_graph convert raw/ flow.store     # → a store that any number of ranks reads

    ds = open_graph("flow.store", mesh, fields=[*INPUTS, *TARGETS])
    mean, std = statistics(ds, TARGETS)                        # (C,) each
    data = batch.to_pyg(x=INPUTS, y=TARGETS)                   # torch_geometric Data of ShardTensors
    edge_attr = relative_positions(ds, data)                   # (E, 3)

Each sample has a mesh of its own, round an ellipse of its own, and the exact potential flow past it. What reads works
for any store with edges, of meshes and graphs. Shape letters: N nodes, E edges, C channels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial import Delaunay, cKDTree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import scidata
from pipelines.telling import telling

__all__ = [
    "INPUTS",
    "TARGETS",
    "convert",
    "edge_statistics",
    "make",
    "num_channels",
    "num_edge_channels",
    "open_graph",
    "relative_positions",
    "statistics",
]

INPUTS = ("boundary", "distance", "inflow")
TARGETS = ("velocity", "pressure")

Array = npt.NDArray[Any]

# -- reading -------------------------------------------------------------------------------------------------------


def open_graph(
    path: str,
    mesh: DeviceMesh | None,
    *,
    fields: Sequence[str],
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> scidata.IrregularDataset:
    """Open a store of meshes or graphs: positions and fields of nodes, with the edges that end at this rank's nodes.

    Parameters
    ----------
    path, mesh, dtype, options
        As in :func:`scidata.open_dataset`.
    fields
        Names of fields that live on nodes.

    Raises
    ------
    ValueError
        A field that does not live on nodes, or a store without edges or positions.
    SciDataError
        As :func:`scidata.open_dataset`.
    """
    # one hop from disk: the sources of a rank's edges, so that their positions need no exchange
    halo = {} if mesh is None else {"halo": 1, "ghosts": "disk"}
    ds = scidata.open_dataset(path, mesh, fields=["pos", *fields], dtype=dtype, **(halo | options))
    for name in fields:
        entity = ds.place(name).entity
        if entity != "node":
            raise ValueError(f"{path}: field {name!r} lives on {entity}; this recipe takes fields of nodes")
    if "edge" not in ds.entities:
        raise ValueError(f"{path}: the store has no edges; write it with scidata partition --edges knn:8, say")
    return ds


def num_channels(ds: scidata.IrregularDataset, names: Sequence[str]) -> int:
    """Return how many columns ``to_pyg(x=names)`` makes of these fields."""
    return sum(_num_columns(ds, name) for name in names)


def _num_columns(ds: scidata.IrregularDataset, name: str) -> int:
    shape, dim = ds.global_shape(name, 0), ds.place(name).dim
    return int(np.prod(shape[:dim] + shape[dim + 1 :], dtype=np.int64))


def statistics(ds: scidata.IrregularDataset, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, ``(C,)`` float64, from the store's manifest: all samples.

    Figures of a field with a dimension before that of the nodes (times, layers) are over all of it.
    """
    means: list[Tensor] = []
    deviations: list[Tensor] = []
    for name in names:
        figures = ds.statistics(name)
        if figures is None:
            raise ValueError(f"field {name!r} has no statistics: it holds no numbers")
        for found, parts in ((figures.mean, means), (figures.std, deviations)):
            values = torch.tensor(found, dtype=torch.float64).reshape(-1)
            parts.append(values.repeat(_num_columns(ds, name) // len(values)))
    mean, std = torch.cat(means), torch.cat(deviations)
    return mean, torch.where(std > 0, std, 1.0)


def num_edge_channels(ds: scidata.IrregularDataset) -> int:
    """Return how many channels :func:`relative_positions` has."""
    return 4 if ds.reader.store.manifest.on_sphere else ds.global_shape("pos", 0)[1] + 1


def relative_positions(ds: scidata.IrregularDataset, data: Any) -> Tensor:
    """Return from where, seen from its target, each edge comes, and how long it is: ``(E, 3)``, on shards too.

    Three coordinates make it ``(E, 4)``. Longitude and latitude become points of the unit sphere; where the domain
    wraps, the nearest image counts.
    """
    manifest, pos = ds.reader.store.manifest, data.pos
    if manifest.on_sphere:
        lon, lat = torch.deg2rad(pos[:, 0]), torch.deg2rad(pos[:, 1])
        pos = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)
    source, target = data.edge_index[0], data.edge_index[1]
    offset = pos[source] - pos[target]
    if manifest.period is not None and not manifest.on_sphere:
        period = torch.tensor(manifest.period, dtype=pos.dtype, device=pos.device)
        turns = (offset / torch.where(period > 0, period, torch.inf)).round()
        offset = offset - turns * period
    return torch.cat([offset, offset.square().sum(dim=1, keepdim=True).sqrt()], dim=1)


def edge_statistics(
    ds: scidata.IrregularDataset, num_samples: int = 8, *, among: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of :func:`relative_positions` over a few samples. Collective.

    The samples are spread over all, or over those ``among`` which they are to be: the ones that are trained on. All dp
    ranks read the same samples; the sums run over all edges, so every rank gets the same figures.

    Returns
    -------
    mean, std
        Plain tensors, float64, on the CPU.
    """
    known = range(len(ds)) if among is None else among
    places = np.linspace(0, len(known) - 1, min(num_samples, len(known))).round().astype(int)
    chosen = [known[place] for place in np.unique(places)]
    device = "cpu" if ds.mesh is None else ds.mesh.device_type  # where the mesh can add up
    moments = []
    for index in chosen:
        x = relative_positions(ds, ds[index].to(device).to_pyg()).double()
        mean = x.mean(dim=0)
        moments.append((x.shape[0], mean.cpu(), (x - mean).square().mean(dim=0).cpu()))
    share = torch.tensor([count for count, _, _ in moments], dtype=torch.float64)[:, None]
    share = share / share.sum()
    means, variances = torch.stack([m for _, m, _ in moments]), torch.stack([v for _, _, v in moments])
    mean = (share * means).sum(dim=0)
    std = (share * (variances + (means - mean).square())).sum(dim=0).sqrt()  # law of total variance
    return mean, torch.where(std > 0, std, 1.0)


# -- making --------------------------------------------------------------------------------------------------------

LOW, HIGH = np.array([-4.0, -3.0]), np.array([6.0, 3.0])  # the window, with the shape near the origin


def _lattice(rng: np.random.Generator, spacing: float) -> tuple[Array, Array]:
    """Return points of a jittered triangular lattice inside the window, and evenly spaced ones on its border."""
    counts = np.round((HIGH - LOW) / spacing).astype(int)
    x, y = (np.linspace(low, high, n + 1) for low, high, n in zip(LOW, HIGH, counts, strict=True))
    border = [np.stack([x, np.full_like(x, side)], axis=1) for side in (LOW[1], HIGH[1])]
    border += [np.stack([np.full_like(y[1:-1], side), y[1:-1]], axis=1) for side in (LOW[0], HIGH[0])]
    rows = np.arange(LOW[1] + 0.8 * spacing, HIGH[1] - 0.6 * spacing, spacing * np.sqrt(0.75))
    columns = np.arange(LOW[0] + 0.8 * spacing, HIGH[0] - 1.1 * spacing, spacing)
    inner = np.stack(np.meshgrid(columns, rows), axis=-1)
    inner[1::2, :, 0] += spacing / 2
    return inner.reshape(-1, 2) + rng.uniform(-0.2, 0.2, inner.reshape(-1, 2).shape) * spacing, np.concatenate(border)


class _Ellipse:
    """An ellipse, and the potential flow past it, by the map z = ζ + c²/ζ of the outside of a circle (Joukowski)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.half_axes = np.array([rng.uniform(0.6, 0.9), rng.uniform(0.35, 0.55)])
        self.turn = np.exp(1j * rng.uniform(-0.4, 0.4))
        self.radius = self.half_axes.sum() / 2
        self.c = np.sqrt(self.half_axes[0] ** 2 - self.half_axes[1] ** 2) / 2
        self.inflow = rng.uniform(0.8, 1.2) * np.exp(1j * rng.uniform(-0.1, 0.1))

    def from_circle(self, zeta: Array) -> Array:
        """Map the plane of the circle to the plane of the flow, ``(N, 2)``."""
        z = (zeta + self.c**2 / zeta) * self.turn
        return np.stack([z.real, z.imag], axis=-1)

    def to_circle(self, points: Array) -> Array:
        """Undo :meth:`from_circle`, outside of the shape."""
        z = (points[:, 0] + 1j * points[:, 1]) / self.turn
        return (z + np.sqrt(z - 2 * self.c) * np.sqrt(z + 2 * self.c)) / 2

    def rings(self, rng: np.random.Generator, spacing: float) -> list[Array]:
        """Return points on the shape, then on rings round it that widen to ``spacing``."""
        count = max(12, round(2 * np.pi * self.radius / (0.6 * spacing)))
        angles = 2 * np.pi * np.arange(count) / count
        rings, radius = [], self.radius
        for k in range(4):
            jitter = rng.uniform(-0.15, 0.15, count) if k else np.zeros(count)
            rings.append(self.from_circle(radius * np.exp(1j * (angles + np.pi * (k + jitter) / count))))
            radius *= 1 + 2 * np.pi / count
        return rings

    def velocity(self, points: Array) -> Array:
        """Velocity at points outside, ``(N, 2)``."""
        zeta, stream = self.to_circle(points), self.inflow / self.turn
        derivative = np.conj(stream) - stream * self.radius**2 / zeta**2
        w = derivative / (1 - self.c**2 / zeta**2) / self.turn  # u - i v
        return np.stack([w.real, -w.imag], axis=-1)


def flow(rng: np.random.Generator, num_nodes: int) -> dict[str, Array]:
    """Make one sample of about ``num_nodes`` nodes: arrays by their names in the raw file."""
    shape = _Ellipse(rng)
    spacing = float(np.sqrt(np.prod(HIGH - LOW) / num_nodes / 0.95))
    rings = shape.rings(rng, spacing)
    inner, border = _lattice(rng, spacing)
    distance, _ = cKDTree(rings[-1]).query(inner)
    outside = np.abs(shape.to_circle(inner)) > np.abs(shape.to_circle(rings[-1])).max()
    inner = inner[outside & (distance > 0.5 * spacing)]
    points = np.concatenate([rings[0], border, *rings[1:], inner])
    on_wall, on_border = np.arange(len(points)) < len(rings[0]), np.zeros(len(points), bool)
    on_border[len(rings[0]) : len(rings[0]) + len(border)] = True

    triangles = Delaunay(points).simplices
    triangles = triangles[~on_wall[triangles].all(axis=1)]  # those whose corners are all on the shape fill it
    pairs = np.concatenate([triangles[:, [a, b]] for a in range(3) for b in range(3) if a != b])
    order = rng.permutation(len(points))  # as a mesher leaves it: in no order that helps
    place = np.argsort(order)
    edges = np.unique(place[pairs], axis=0).T

    velocity = shape.velocity(points)
    inflow = np.array([shape.inflow.real, shape.inflow.imag])
    at_inlet = on_border & (points[:, 0] == LOW[0])
    boundary = np.stack([~(on_wall | on_border), on_wall, at_inlet, on_border & ~at_inlet], axis=1)
    node = {
        "boundary": boundary,
        "distance": cKDTree(rings[0]).query(points)[0],
        "inflow": np.broadcast_to(inflow, points.shape),
        "velocity": velocity,
        "pressure": 0.5 * ((inflow**2).sum() - (velocity**2).sum(axis=1)),  # Bernoulli
    }
    arrays = {f"node/{name}": values[order].astype(np.float32) for name, values in node.items()}
    return {"pos": points[order], "edge_index": edges.astype(np.int64), **arrays}


def make(out: str, *, num_samples: int = 8, num_nodes: int = 2000, seed: int = 0) -> None:
    """Write one HDF5 file a sample, in the layout of :mod:`scidata.meshes.formats.graph`, each with its own mesh.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        Fewer than 200 nodes, which do not resolve the shape.
    """
    if num_nodes < 200:
        raise ValueError(f"{num_nodes} nodes do not resolve the shape; 200 do")
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")
    Path(out).mkdir(parents=True)
    tick = telling("samples", num_samples)
    for index in range(num_samples):
        arrays = flow(np.random.default_rng([seed, index]), num_nodes)
        with h5py.File(Path(out) / f"flow_{index:05d}.h5", "w") as file:
            for name, values in arrays.items():
                file[name] = values
        tick(1)


def convert(raw: str, out: str, *, jobs: int = 1, **options: Any) -> None:
    """Write the store: every file of a folder is a sample. ``options`` as in ``scidata.partition``.

    Raises
    ------
    FileNotFoundError
        There is no ``.h5`` file in ``raw``.
    SciDataError
        As ``scidata.partition``.
    """
    files = sorted(map(str, Path(raw).glob("*.h5")))
    if not files:
        raise FileNotFoundError(f"{raw}: there is no .h5 file in it")
    scidata.partition(files, out, kind="graph", jobs=jobs, **{"tick": telling("samples", len(files))} | options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.flow_graph", description="Make flows past shapes, and a store.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write small made-up data, one file a sample")
    made.add_argument("out", help="a new folder")
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--nodes", type=int, default=2000, help="about so many a sample")
    made.add_argument("--seed", type=int, default=0)
    converted = commands.add_parser("convert", help="write the files of a folder as one store")
    converted.add_argument("raw")
    converted.add_argument("out")
    converted.add_argument("--order", default="hilbert")
    converted.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            make(args.out, num_samples=args.samples, num_nodes=args.nodes, seed=args.seed)
        else:
            convert(args.raw, args.out, order=args.order, jobs=args.jobs)
    except (OSError, ValueError, scidata.errors.SciDataError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a model that makes an analysis of what was observed in the hours before it, on a dp × domain mesh.

    python -m pipelines.observations make weather                  # small made-up data: a grid and three instruments
    python examples/train_obs.py --data weather                                            # one process
    torchrun --nproc-per-node 4 examples/train_obs.py --data weather --domain 2            # 2 dp × 2 domain
    torchrun --nproc-per-node 3 examples/train_obs.py --data weather --domain 3 --dtype float64 --check
    python examples/train_obs.py --data weather --val-fraction 0.2 --write analyses.zarr   # of what is held out

The model encodes rows of each instrument to cells of a latent grid, of ``--patch`` × ``--patch`` grid points, mixes the
cells by convolutions, and decodes them to the fields of the analysis. It is plain PyTorch, but for ``sum_by_cell``.
What is different from a script for one process is marked ``# scidata``: data that are cut alike here, and
``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Trainer, run
from trainer_options import Parser, check_arguments, parser_of

import scidata
from pipelines.observations import INSTRUMENTS, open_observations, value_columns
from scidata import metrics

PLACE, ABOUT = 3, 3  # features of a grid point's place; of a row's age, and of its place in its cell


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What one instrument has observed, in all samples of a batch."""

    values: Tensor  # (N, V), in the units of the data; NaN where one is missing
    about: Tensor  # (N, ABOUT)
    cell: Tensor  # (N, 3) int64: sample, latitude, longitude of the latent grid


def mlp(inputs: int, dim: int, outputs: int) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inputs, dim), nn.GELU(), nn.Linear(dim, outputs))


def sum_by_cell(x: Tensor, cell: Tensor, grid: Tensor) -> Tensor:
    """Add up rows ``(N, D)`` by their cell ``(N, 3)``: ``(B, D, h, w)``, laid out as ``grid``, which is such a one."""
    if isinstance(grid, scidata.ShardTensor):  # scidata: a rank's rows lie in its own cells, so nothing is exchanged
        first = torch.tensor([0, grid.offsets[2], 0], device=x.device)
        local = sum_by_cell(x.to_local(), cell.to_local() - first, grid.to_local())
        shapes = {
            axis: [(len(grid), x.shape[1], *s[2:]) for s in each] for axis, each in grid.sharding_shapes().items()
        }
        return scidata.ShardTensor.from_local(local, grid.device_mesh, grid.placements, sharding_shapes=shapes)
    B, _, h, w = grid.shape
    sample, row, column = cell.unbind(1)
    number = torch.where((row >= 0) & (row < h), (sample * h + row) * w + column, -1)  # which raises, below
    sums = x.new_zeros(B * h * w, x.shape[1]).index_add(0, number, x)
    return sums.reshape(B, h, w, -1).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """What one instrument tells each cell: the mean of what its rows there tell, by how far each is to be trusted."""

    mean: Tensor
    std: Tensor

    def __init__(self, columns: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("std", torch.ones(columns))
        self.tell, self.trust = mlp(2 * columns + ABOUT, dim, dim), nn.Linear(dim, 1)

    def forward(self, rows: Rows, grid: Tensor) -> Tensor:
        """Rows, and something of the latent grid → (B, D, h, w); near 0 where there are no rows."""
        is_there = ~rows.values.isnan()
        values = ((rows.values - self.mean) / self.std).masked_fill(~is_there, 0)
        told = self.tell(torch.cat([values, is_there.to(values), rows.about], dim=1))
        trust = self.trust(told).sigmoid()
        sums = sum_by_cell(torch.cat([trust * told, trust], dim=1), rows.cell, grid)
        return sums[:, :-1] / (1 + sums[:, -1:])


class Block(nn.Module):
    """Cells learn from their neighbours, then by themselves (after Liu et al. 2022, "A ConvNet for the 2020s")."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.neighbours = nn.Conv2d(dim, dim, kernel_size=5, padding=(2, 0), groups=dim)
        self.norm, self.alone = nn.LayerNorm(dim), mlp(dim, 2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D, h, w) → (B, D, h, w)."""
        y = self.neighbours(F.pad(x, (2, 2, 0, 0), mode="circular"))  # around the earth
        return x + self.alone(self.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Assimilation(nn.Module):
    """Encode, process, decode: rows of several instruments → fields on a grid.

    B samples, O fields, H × W grid points, h × w cells of ``patch`` × ``patch`` points and dim D.
    """

    def __init__(self, columns: Mapping[str, int], outputs: int, *, patch: int, dim: int, depth: int) -> None:
        super().__init__()
        self.place = nn.Conv2d(PLACE, dim, kernel_size=patch, stride=patch)
        self.encoders = nn.ModuleDict({name: Encoder(num, dim) for name, num in columns.items()})
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(depth)))
        self.decode = nn.Sequential(nn.Conv2d(dim, outputs * patch**2, kernel_size=1), nn.PixelShuffle(patch))

    def forward(self, observed: Mapping[str, Rows], place: Tensor) -> Tensor:
        """Rows of each instrument, and where the grid points are (B, PLACE, H, W) → (B, O, H, W)."""
        x = self.place(place)
        x = x + sum(encoder(observed[name], x) for name, encoder in self.encoders.items())
        return self.decode(self.blocks(x))


# -- where things are ----------------------------------------------------------------------------------------------


class Grid:
    """The grid of the analysis, whole: where its points are, and which cell a place is in."""

    def __init__(self, lat: Any, lon: Any, patch: int, device: torch.device) -> None:
        self.patch, self.columns = patch, len(lon)
        self.north, self.west, self.step = float(lat[0]), float(lon[0]), float(lon[1] - lon[0])
        self.sign = -1 if lat[0] > lat[-1] else 1
        self.rows = self.sign * torch.as_tensor(np.asarray(lat, np.float64) - self.north, device=device)  # ascending

    def place_features(self, lat: Tensor, lon: Tensor) -> Tensor:
        """Latitudes (H,) and longitudes (W,) in degrees, as they are laid out → points on the sphere (PLACE, H, W)."""
        lat, lon = torch.deg2rad(lat).unsqueeze(1), torch.deg2rad(lon)
        return torch.stack([lat.sin() + 0 * lon, lat.cos() * lon.sin(), lat.cos() * lon.cos()])

    def cells(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Longitudes and latitudes (N, 2) → (N, 2) int64: their cells; (N, 2): where in them they are, from 0 to 1.

        A place belongs to the row before it, as ``cut_like`` has it; one in front of the first row, to that.
        """
        y = self.sign * (pos[:, 1].double() - self.north)
        row = (torch.bucketize(y, self.rows, right=self.sign > 0) - 1).clamp(0, len(self.rows) - 2)
        above, below = self.rows[:-1], self.rows[1:]
        y = row + (y - above[row]) / (below - above)[row]
        x = (pos[:, 0].double() - self.west) % 360 / self.step
        column = x.floor().long().clamp(max=self.columns - 1)
        cell = torch.stack([row, column], dim=1) // self.patch
        return cell, torch.stack([y, x], dim=1) / self.patch - cell


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    model_options = ("patch", "dim", "depth", "hours", "fields", "instruments")

    # -- data

    def open(self, mesh: DeviceMesh | None, steps: Sequence[int] | None = None) -> scidata.JoinedDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        more = {"patch": args.patch, "hours": args.hours, "fields": args.fields, "dtype": self.dtype}
        ds = open_observations(args.data, mesh, instruments=args.instruments, **more)  # scidata
        self.times = ds.keys
        self.predicted = ds.parts["analysis"].fields
        return ds

    def at_one_time(self) -> scidata.ShardedDataset:
        """Return the analyses alone, also those before which nothing was observed."""
        return self.data.parts["analysis"].datasets[0]

    def span(self, index: int) -> tuple[Any, Any]:
        """Return when the first row of a sample may be from, and the time of its analysis."""
        return self.times[index] - np.timedelta64(self.args.hours, "h"), self.times[index]

    def statistics(self, ds: Any) -> scidata.Statistics:
        """Mean and deviation of each field of the analysis; of rows the model keeps its own: see ``measure``."""
        return scidata.statistics(scidata.subset(self.data.parts["analysis"], self.train_samples), differences=False)

    def normalised(self, ds: Any) -> Any:
        """Return the data with the analysis normalised."""
        if isinstance(ds, scidata.JoinedDataset):
            return ds.normalise({"analysis": self.stats})
        return super().normalised(ds)

    # -- model

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args, lat = self.args, self.truth.coordinate("lat")
        self.grid = Grid(lat, self.truth.coordinate("lon"), args.patch, self.device)
        columns = {name: len(value_columns(self.data.parts[name])) for name in args.instruments}
        return Assimilation(columns, len(self.predicted), patch=args.patch, dim=args.dim, depth=args.depth)

    def measure(self, model: nn.Module) -> None:
        """Mean and deviation of what each instrument has seen."""
        for name, encoder in model.encoders.items():
            table = self.data.parts[name]
            stats = scidata.statistics(scidata.subset(table, self.train_samples), differences=False)
            columns = value_columns(table)
            encoder.mean.copy_(torch.tensor([float(stats[column].mean) for column in columns]))
            std = torch.tensor([float(stats[column].std) for column in columns])
            encoder.std.copy_(torch.where(std > 0, std, 1.0))

    def rows_of(self, batch: Any, name: str) -> Rows:
        """Return what an instrument has seen."""
        sample = batch[name]
        cell, inside = self.grid.cells(sample["pos"])
        number = sample["batch"] if "batch" in sample else torch.zeros_like(cell[:, 0])
        age = 1 - sample["dates"].double() / (3600 * self.args.hours)  # dates are seconds since the window began
        columns = value_columns(self.data.parts[name])
        return Rows(
            values=torch.stack([sample[column].to(self.dtype) for column in columns], dim=1),
            about=torch.cat([age.unsqueeze(1), inside], dim=1).to(self.dtype),
            cell=torch.cat([number.unsqueeze(1), cell], dim=1),
        )

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the analysis by the model, and by the data, ``(B, O, H, W)``, in standard deviations."""
        analysis = batch["analysis"]
        expected = torch.stack([analysis[name] for name in self.predicted], dim=1)
        place = self.grid.place_features(*(analysis.coords[dim].to(self.dtype) for dim in ("lat", "lon")))
        observed = {name: self.rows_of(batch, name) for name in self.args.instruments}
        return model(observed, place.expand(len(expected), -1, -1, -1)), expected

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean squared error over fields and the sphere, in standard deviations: plain, the same on every rank."""
        found, expected = self.predict(model, batch)
        area = torch.deg2rad(batch["analysis"].coords["lat"]).cos().unsqueeze(1)
        return ((found - expected).square() * area).mean() / area.mean()

    # -- scores

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Take channels apart: ``(B, O, H, W)`` to ``(B, H, W)`` by field."""
        return dict(zip(self.predicted, x.unbind(1), strict=True))

    def error_of(self, field: str) -> metrics.Metric:
        """Root mean square over the sphere, by area."""
        weights = {"lat": metrics.latitude_weights(self.truth, dim="lat")}
        return metrics.RMSE(weights=weights, dims=self.truth.dims(field), mesh=self.mesh)

    # -- predictions

    @torch.no_grad()
    def finish(self) -> None:
        """Write the analyses of what is held out, or of all samples where nothing is; dp ranks share them."""
        if self.args.write is None:
            return
        chosen = self.val_samples or list(range(len(self.data)))
        samples = scidata.subset(self.data, chosen)
        order = scidata.DistributedSampler(samples, self.mesh, shuffle=False, pad=False)
        about = {"fields": list(self.predicted), "times": {"time": self.times[chosen]}}
        self.model.eval()
        with scidata.create(self.args.write, like=self.truth, **about) as writer:
            for batch in self.load_from(samples, order, 1):
                with self.precision.autocast():
                    prediction, _ = self.predict(self.model, batch)
                writer[batch.index[0]] = {name: x[0] for name, x in self.physical(prediction).items()}
        self.say(f"wrote {len(chosen)} analyses to {self.args.write}")


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and what it has made of the command line."""
    parser = parser_of(__doc__, out="runs/obs", lr=2e-3, lr_batch=8, decay=0.05)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a folder of python -m pipelines.observations make")
    parser.add_argument("--fields", nargs="+", help="of the analysis; default: all")
    parser.add_argument("--instruments", nargs="+", default=list(INSTRUMENTS), help="tables of the folder")
    parser.add_argument("--hours", default=12, help="how long before an analysis observations are taken", **number)
    parser.add_argument("--patch", default=4, help="grid points along each side of a cell", **number)
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=4, help="blocks", **number)
    parser.add_argument("--write", metavar="FILE", help="analyses of what is held out, at the end: .zarr, .nc or .h5")
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("hours", "patch", "dim", "depth"))
    if args.write and Path(args.write).exists():
        parser.error(f"--write {args.write}: exists; remove it or choose another name")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    return run(Training, *arguments(argv))


if __name__ == "__main__":
    sys.exit(main())

"""Train a Transolver or a PointNet to predict the pressure on surfaces, on a dp × domain mesh of ranks.

    python -m pipelines.surface_points make cars/ --format vtp --samples 20                 # made-up cars, as VTP
    python -m pipelines.surface_points convert cars/ cars.store --pattern '*.vtp' --entity cell --order shuffle:1024
    python examples/train_surface.py --data cars.store                                      # one process
    torchrun --nproc-per-node 4 examples/train_surface.py --data cars.store --domain 2      # 2 dp × 2 domain
    torchrun --nproc-per-node 3 examples/train_surface.py --data cars.store --domain 3 --check --dtype float64
    torchrun --nproc-per-node 4 examples/train_surface.py --data cars.store --domain 2 --model pointnet \\
        --points 1024 --epochs 20 --val-fraction 0.2 --write predictions/

Each epoch draws ``--points`` of each car anew; of a store in ``shuffle`` order a rank reads its share of these and no
more. Both models are plain torch and know nothing of ranks. At the end the cars that are held out are predicted on all
of their cells, forces are integrated over the surface, and with ``--write`` each car's file is written again with the
prediction beside what it had. What is different from a script for one process is marked ``# scidata``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch: up to 10 s the first time …", file=sys.stderr, flush=True)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import TOLERANCE, Trainer, run
from trainer_options import Parser, check_arguments, parser_of

import scidata
from pipelines.surface_points import force, open_surface
from scidata import metrics

INPUTS = ("pos", "normal")

# -- the models: plain torch -----------------------------------------------------------------------------------------


def mlp(inputs: int, dim: int, outputs: int) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inputs, dim), nn.SiLU(), nn.Linear(dim, outputs))


class PhysicsAttention(nn.Module):
    """Points meet in a few slices: each is a mean over all points of a car, by learned weights (Wu et al. 2024)."""

    def __init__(self, dim: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads = heads
        self.value, self.slice = nn.Linear(dim, dim), nn.Linear(dim // heads, slices)
        self.qkv, self.out = nn.Linear(dim // heads, 3 * (dim // heads), bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor, car: Tensor) -> Tensor:
        """(N, D), (N, B) with a 1 for each point's car → (N, D)."""
        value = self.value(x).unflatten(1, (self.heads, -1))
        weights = torch.einsum("nb,nhs->nbhs", car, self.slice(value).softmax(dim=-1))
        total = weights.sum(dim=0).unsqueeze(-1)
        tokens = torch.einsum("nbhs,nhc->bhsc", weights, value) / (total + 1e-5)
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        mixed = scaled_dot_product_attention(q, k, v)
        return self.out(torch.einsum("nbhs,bhsc->nhc", weights, mixed).flatten(1))


class Transolver(nn.Module):
    """Blocks of physics attention and networks of each point."""

    def __init__(self, inputs: int, *, dim: int, depth: int, slices: int, heads: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = mlp(inputs, dim, dim), nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1))
        self.attention = nn.ModuleList(PhysicsAttention(dim, heads, slices) for _ in range(depth))
        self.networks = nn.ModuleList(mlp(dim, 2 * dim, dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))

    def forward(self, x: Tensor, car: Tensor) -> Tensor:
        """(N, inputs), (N, B) → (N, 1)."""
        x = self.encode(x)
        for i, (attention, network) in enumerate(zip(self.attention, self.networks, strict=True)):
            x = x + attention(self.norms[2 * i](x), car)
            x = x + network(self.norms[2 * i + 1](x))
        return self.decode(x)


class PointNet(nn.Module):
    """What each point is, and the maximum over all points of its car (Qi et al. 2017)."""

    def __init__(self, inputs: int, *, dim: int, depth: int) -> None:
        super().__init__()
        self.encode = mlp(inputs, dim, dim)
        self.rounds = nn.ModuleList(mlp(2 * dim, dim, dim) for _ in range(depth))
        self.decode = mlp(dim, dim, 1)

    def forward(self, x: Tensor, car: Tensor) -> Tensor:
        """(N, inputs), (N, B) → (N, 1)."""
        x = self.encode(x)
        for network in self.rounds:
            most = [torch.where(one.unsqueeze(1) > 0, x, -torch.inf).amax(dim=0) for one in car.unbind(1)]
            x = x + network(torch.cat([x, car @ torch.stack(most)], dim=1))
        return self.decode(x)


# -- one run ---------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    model_options = ("model", "dim", "depth", "slices")

    # -- data

    def open(self, mesh: DeviceMesh | None) -> scidata.IrregularDataset:
        """Open the draws: this rank's part of each sample, or whole samples without a mesh."""
        return self.open_cars(mesh, subsample={"point": self.args.points}, subsample_seed=self.args.seed)

    def open_cars(self, mesh: DeviceMesh | None, **options: object) -> scidata.IrregularDataset:
        """Open the cars: areas, normals and the target of each cell."""
        self.predicted = (self.args.target,)
        fields = ("normal", "area", self.args.target)
        return open_surface(self.args.data, mesh, fields=fields, dtype=self.dtype, **options)  # scidata

    def span(self, index: int) -> tuple[int, int]:
        """Return the number of a sample, twice: it has no times."""
        return index, index

    def statistics(self, ds: scidata.CombinedDataset) -> scidata.Statistics:
        """Mean and deviation of the target alone: positions and normals stay as they are."""
        return scidata.statistics(ds, fields=list(self.predicted), differences=False)

    # -- model

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args = self.args
        if args.model == "pointnet":
            return PointNet(6, dim=args.dim, depth=args.depth)
        return Transolver(6, dim=args.dim, depth=args.depth, slices=args.slices)

    def cars_of(self, batch: scidata.IrregularSample) -> Tensor:
        """Return a column for each car of a batch, 1 where a point is of it, ``(N, B)``."""
        numbers = torch.arange(len(batch.index), device=self.device)
        return (batch["batch"].unsqueeze(1) == numbers).to(self.dtype)

    def predict(self, model: nn.Module, batch: scidata.IrregularSample) -> tuple[Tensor, Tensor]:
        """Return the target by the model, and by the data, ``(N, 1)``, in standard deviations."""
        x = torch.cat([batch[name].to(self.dtype) for name in INPUTS], dim=1)
        return model(x, self.cars_of(batch)), batch[self.args.target].unsqueeze(1)

    def loss(self, model: nn.Module, batch: scidata.IrregularSample) -> Tensor:
        """Mean over cars of the mean squared error over their points: plain, the same on every rank."""
        found, expected = self.predict(model, batch)
        car = self.cars_of(batch)
        return (((found - expected).square() * car).sum(dim=0) / car.sum(dim=0)).mean()

    # -- scores

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Take the column off: ``(N, 1)`` to ``(N,)``."""
        return {self.args.target: x.squeeze(1)}

    def error_of(self, field: str) -> metrics.Metric:
        """Root mean square over points."""
        return metrics.RMSE(mesh=self.mesh)

    def number_of(self, batch: scidata.IrregularSample) -> int:
        """Return the sample's number: batches that are scored have one."""
        return batch.index[0]

    # -- forces, and predictions

    def check(self) -> bool:
        """Compare a step, and the forces on the first car, with one process."""
        passed = super().check()
        shared, alone = (self.open_cars(mesh)[0] for mesh in (self.mesh, None))
        found, expected = (force(car, self.args.target) for car in (shared, alone))
        every = (alone[self.args.target].abs() * alone["area"]).sum()  # on a closed surface nearly all of it cancels
        error = float((found - expected).abs().max() / every)
        self.say(f"check of forces: max relative difference to one process {error:.2e}")
        return passed and error <= TOLERANCE[self.args.dtype]

    @torch.no_grad()
    def finish(self) -> None:
        """Predict all cells of the cars that are held out, or of all: forces, and with ``--write`` files."""
        chosen = self.val_samples or list(range(len(self.data)))
        cars = self.open_cars(self.mesh)
        whole = self.normalised(cars)
        order = scidata.DistributedSampler(scidata.subset(whole, chosen), self.mesh, shuffle=False, pad=False)
        writer = None
        if self.args.write is not None:
            about = {f"{self.args.target}_model": {"like": self.args.target}}
            writer = scidata.create(self.args.write, like=cars, fields=about, sample=chosen)  # scidata
        self.model.eval()
        forces: dict[int, list[float]] = {}
        for batch in self.load_from(scidata.subset(whole, chosen), order, 1):
            with self.precision.autocast():
                prediction, target = self.predict(self.model, batch)
            found, expected = (self.physical(x)[self.args.target] for x in (prediction, target))
            number = chosen[batch.index[0]]
            forces[number] = [float(force(batch, x)[0]) for x in (found, expected)]
            if writer is not None:
                writer[number] = {f"{self.args.target}_model": found}
        if writer is not None:
            writer.close()
            self.say(f"wrote {len(chosen)} cars to {self.args.write}")
        every: list[dict[int, list[float]]] = [{} for _ in range(self.num_dp)]
        dist.all_gather_object(every, forces, group=self.mesh.get_group("dp"))
        for number, (found, expected) in sorted({k: v for each in every for k, v in each.items()}.items()):
            self.say(f"car {number}: drag by the model {found:.6g}, by the data {expected:.6g}")


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and what it has made of the command line."""
    parser = parser_of(__doc__, out="runs/surface", lr=2e-3, lr_batch=4, decay=0.01)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a store of points that have areas and normals")
    parser.add_argument("--target", default="pressure", metavar="FIELD", help="a number of each point")
    parser.add_argument("--points", default=2048, help="of each car that an epoch draws", **number)
    parser.add_argument("--model", choices=["transolver", "pointnet"], default="transolver")
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=4, help="blocks, or rounds of maxima", **number)
    parser.add_argument("--slices", default=32, help="of the Transolver", **number)
    parser.add_argument("--write", metavar="FOLDER", help="files of the cars that are held out, with predictions")
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("points", "dim", "depth", "slices"))
    if args.write and Path(args.write).exists():
        parser.error(f"--write {args.write}: exists; remove it or choose another name")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    return run(Training, *arguments(argv))


if __name__ == "__main__":
    sys.exit(main())

"""Run a checkpoint of a training script forward, write what it says while it goes on, and score it by lead time.

    python -m pipelines.era5_grid make era5.zarr
    python examples/train_vit.py --data era5.zarr --val-fraction 0.3 --out runs/vit
    python examples/forecast.py --data era5.zarr --checkpoint runs/vit/best --leads 4 --forecast forecast.zarr

    python -m pipelines.ugrid_mesh make waves.nc && python -m pipelines.ugrid_mesh convert waves.nc waves.store
    python examples/train_gnn.py --data waves.store --inputs height --targets height --next --out runs/waves
    python examples/forecast.py --data waves.store --checkpoint runs/waves/step_00000003 --leads 2 \\
        --forecast waves_forecast.nc --topology waves.nc

    python -m pipelines.graphcast make globe
    python examples/train_graphcast.py --data globe --out runs/globe
    python examples/forecast.py --data globe --checkpoint runs/globe/step_00000014 --forecast globe_forecast.zarr

Under torchrun, with ``--domain`` and ``--tp``, on any number of ranks. The checkpoint says which script made it, with
which model, fields and forcings.

From each initial time the model makes ``--leads`` steps, each from the one before and the forcings of that time. dp
ranks share the initial times, the ranks of a domain each state. Scores are RMSE, of grids weighted by the area of
latitudes, beside those of persistence (nothing changes) and of climatology (the mean over the data's times; with
``--sel`` over those outside it).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Trainer
from trainer_options import Parser
from trainer_parts import described, is_complete, within

import scidata

KINDS = ("model", "persistence", "climatology")


class Forecast:
    """A trained model, and the times that it starts from."""

    def __init__(self, args: argparse.Namespace, trained: Trainer) -> None:
        self.args, self.trained, self.truth = args, trained, trained.truth
        self.fields = trained.predicted
        if len(trained.data) == len(self.truth):
            raise scidata.errors.ConfigError(
                f"{args.checkpoint}: its targets are of the same time as its inputs, so that there is nothing to run "
                "forward; train with --next"
            )
        if len(trained.data) != len(self.truth) + 1 - trained.num_times:
            raise scidata.errors.ConfigError(f"{args.data}: holds several trajectories; forecast one at a time")
        most, before = len(self.truth) - trained.history, trained.history - 1
        if not 1 <= args.leads <= most:
            into = f", of which {trained.history} go into a step" if before else ""
            raise scidata.errors.ConfigError(
                f"--leads {args.leads}: the data have {len(self.truth)} times{into}, so give 1 to {most}"
            )
        starts = range(before, len(self.truth) - args.leads)
        self.outside = range(len(self.truth))
        self.dim, self.moments = trained.moments()
        if args.sel is not None:
            when = self.moments or self.outside
            starts = [t for t in starts if within((when[t], when[t + args.leads]), args.sel)]
            if not starts:
                raise scidata.errors.ConfigError(
                    f"--sel {args.sel}: no {args.leads} steps are inside; there are {when[before]} to {when[-1]}"
                )
            scored = range(min(starts), max(starts) + args.leads + 1)
            self.outside = [t for t in self.outside if t not in scored] or self.outside
        self.starts = starts

    def restore(self) -> None:
        """Read the model from a checkpoint, written on any number of ranks."""
        self.trained.build(measure=False)
        state = {"model": get_model_state_dict(self.trained.model)}
        dcp.load(state, checkpoint_id=self.args.checkpoint)
        set_model_state_dict(self.trained.model, state["model"])
        self.trained.model.eval()

    def roll_out(self, start: int) -> Iterator[dict[str, Tensor]]:
        """Yield the state at each lead time, by field: ShardTensors of one time, in the units of the data."""
        state = self.trained.first_state(start)
        for time in range(start, start + self.args.leads):
            state = self.trained.advance(state, time)
            fields = self.trained.physical(state)  # of grids as a batch of one
            yield {name: x[0] if x.ndim > len(self.truth.dims(name)) else x for name, x in fields.items()}

    def at(self, time: int) -> dict[str, Tensor]:
        """Return what the data have, by field."""
        sample = self.truth[time].to(self.trained.device)
        return {name: sample[name] for name in self.fields}

    def climatology(self) -> dict[str, Tensor]:
        """Return the mean over times, of this rank's part; dp ranks share the times."""
        dp = self.trained.mesh["dp"]
        fields = self.at(self.outside[0])
        total = {name: torch.zeros_like(field, dtype=torch.float64) for name, field in fields.items()}
        for time in self.outside[dp.get_local_rank() :: dp.size()]:
            for name, field in self.at(time).items():
                total[name] += field
        for field in total.values():
            dist.all_reduce(field.to_local(), group=dp.get_group())
        return {name: (field / len(self.outside)).to(self.trained.dtype) for name, field in total.items()}

    def create(self) -> scidata.Writer:
        """Begin the output, or go on with one."""
        args = self.args
        more = {} if args.topology is None else {"topology": args.topology}
        return scidata.create(
            args.forecast, like=self.truth, fields=list(self.fields), times=self.labels(), overwrite=args.overwrite,
            resume=args.again, **more,
        )  # fmt: skip

    def labels(self) -> dict[str, Any]:
        """Return what the steps are labelled with: initial times, and how much later each step is."""
        leads = np.arange(1, self.args.leads + 1)
        if self.moments is None:
            return {self.dim: len(self.starts), "lead": leads}
        first, second = self.moments[:2]
        return {self.dim: np.array([self.moments[time] for time in self.starts]), "lead": leads * (second - first)}

    @torch.no_grad()
    def run(self) -> dict[str, list[dict[str, float]]]:
        """Make all forecasts; return the scores of each kind, by lead time and field."""
        args, trained = self.args, self.trained
        usual = self.climatology()
        errors = {
            kind: [{name: trained.error_of(name) for name in self.fields} for _ in range(args.leads)] for kind in KINDS
        }
        with self.create() as writer:
            missing = set(writer.missing)
            for number in range(trained.mesh.get_local_rank("dp"), len(self.starts), trained.num_dp):
                trained.say(f"forecast {number + 1} of {len(self.starts)}", after=8)
                start = self.starts[number]
                first = self.at(start)
                for lead, state in enumerate(self.roll_out(start)):
                    step = number * args.leads + lead
                    if step in missing:
                        writer[step] = state
                    later = self.at(start + lead + 1)
                    for kind, fields in zip(KINDS, (state, first, usual), strict=True):
                        for name, error in errors[kind][lead].items():
                            error.update(fields[name], later[name], index=start)
        return {
            kind: [{name: error.compute().item() for name, error in each.items()} for each in found]
            for kind, found in errors.items()
        }


def table(scores: dict[str, list[dict[str, float]]]) -> str:
    """Return the scores as text: fields down, lead times across."""
    leads = len(scores["model"])
    lines = [f"{'RMSE':32}" + "".join(f"{f'+{k + 1}':>12}" for k in range(leads))]
    for name in scores["model"][0]:
        for kind in KINDS:
            row = "".join(f"{scores[kind][k][name]:12.6g}" for k in range(leads))
            lines.append(f"{name if kind == KINDS[0] else '':18}{kind:14}{row}")
    return "\n".join(lines)


def draw(scores: dict[str, list[dict[str, float]]], units: dict[str, str], path: str) -> None:
    """Draw RMSE over lead time, a panel for each field, four in a row."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    names, leads = list(scores["model"][0]), range(1, len(scores["model"]) + 1)
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    size = (max(3.2 * columns, 4), 2.8 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel, name in zip(grid.flat, names, strict=False):
        for kind, style in zip(KINDS, ("-o", "--", ":"), strict=True):
            panel.plot(leads, [found[name] for found in scores[kind]], style, label=kind, markersize=3)
        panel.set(title=name, ylabel=f"RMSE{units[name]}", ylim=(0, None))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in grid.flat[len(names) :]:
        panel.set_axis_off()
    for panel in grid[-1]:
        panel.set_xlabel("steps ahead")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def trained_by(parser: Parser, args: argparse.Namespace) -> Trainer:
    """Return what the script of the checkpoint makes of its own options, on these ranks and data."""
    if not is_complete(args.checkpoint):
        parser.error(f"--checkpoint {args.checkpoint}: no complete checkpoint there; give best, or a step_… folder")
    run = described(args.checkpoint)
    script = Path(__file__).with_name(f"{run['script']}.py")
    if not str(run["script"]).isidentifier() or not script.exists():
        parser.error(f"--checkpoint {args.checkpoint}: was made by {script.name}, which is not beside forecast.py")
    kind: type[Trainer] = importlib.import_module(run["script"]).Training
    if kind.first_state is Trainer.first_state:
        parser.error(
            f"--checkpoint {args.checkpoint}: was made by {script.name}, whose models this does not run forward"
        )
    if args.tp > 1 and not kind.plan:
        parser.error(f"--tp {args.tp}: {script.name} has no plan of tensor parallelism")
    own = {key: vars(args)[key] for key in ("data", "dp", "domain", "tp", "device")}
    here = {"resume": args.checkpoint, "strategy": "ddp", "check": False, "compile": None, "pp": 1}
    here |= {"val_fraction": 0.0, "val_sel": None}
    dtype = {} if args.dtype is None else {"dtype": args.dtype}
    return kind(argparse.Namespace(**run["options"] | own | here | dtype))


def units_of(truth: Any) -> dict[str, str]:
    """Return the units of each field, as a picture shows them."""
    ask = getattr(truth, "attributes", lambda name: {"units": truth.reader.info(name).units})
    found = {name: ask(name).get("units") for name in truth.fields}
    return {name: f" ({units})" if units else "" for name, units in found.items()}


def main(argv: list[str] | None = None) -> int:
    """Make the forecasts; return the exit code."""
    parser = Parser(__doc__)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="what it starts from, and is compared with")
    parser.add_argument("--checkpoint", required=True, help="folder of one checkpoint: runs/vit/best, …/step_…")
    parser.add_argument("--leads", default=4, help="steps from each initial time", **number)
    parser.add_argument("--sel", metavar="FIRST:LAST", help="times that forecasts lie in, such as those held out")
    parser.add_argument("--forecast", required=True, help="what is written: .zarr, .nc or .h5")
    parser.add_argument("--topology", help="of meshes: the file that has the mesh, which is written too")
    parser.add_argument("--plot", help="a picture of the scores")
    parser.add_argument("--scores", metavar="FILE", help="the scores as JSON: by kind, a list by lead time")
    parser.add_argument("--overwrite", action="store_true", help="replace a forecast that is there")
    parser.add_argument("--again", action="store_true", help="go on with a forecast that was begun")
    parser.add_argument("--dp", default=-1, help="ranks with different initial times; -1: what is left", **number)
    parser.add_argument("--domain", default=1, help="ranks that share a state", **number)
    parser.add_argument("--tp", default=1, help="ranks that share the features of each layer", **number)
    parser.add_argument("--device", help="cpu, cuda, xpu, ...; default: the accelerator, else cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], help="default: as it was trained")
    args = parser.parse_args(argv)
    if args.sel is not None and ":" not in args.sel:
        parser.error(f"--sel {args.sel}: give FIRST:LAST")
    if args.again and args.overwrite:
        parser.error("--again goes on with what --overwrite begins again; give one of them")
    try:
        trained = trained_by(parser, args)
        forecast = Forecast(args, trained)
        forecast.restore()
        scores = forecast.run()
    except (scidata.errors.SciDataError, ValueError, OSError) as e:
        parser.error(str(e))
    if trained.is_main:
        print(table(scores))
        if args.scores:
            Path(args.scores).write_text(json.dumps(scores, indent=1))
        if args.plot:
            draw(scores, units_of(trained.truth), args.plot)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

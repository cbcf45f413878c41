"""Run a checkpoint of ``train_vit.py`` forward, write what it says while it goes on, and score it by lead time.

    python -m pipelines.era5_grid make era5.zarr
    python examples/train_vit.py --data era5.zarr --out runs/vit
    python examples/forecast.py --data era5.zarr --checkpoint runs/vit/step_00000015 --leads 4 --forecast forecast.zarr

Under torchrun, with ``--domain``, on any number of ranks; with the options of the model that it was trained with.

From each initial time the model makes ``--leads`` steps, each from the one before. dp ranks share the initial times,
the ranks of a domain each state; any number of ranks reads the checkpoint. Scores are RMSE, weighted by the area of
latitudes, beside those of persistence (nothing changes) and of climatology (the mean over the data's times).
"""

from __future__ import annotations

import sys
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

from train_vit import Training, check_options, options
from trainer import parser_of

import scidata
from pipelines.era5_grid import open_era5, split_channels, stack_channels
from scidata import metrics

KINDS = ("model", "persistence", "climatology")


class Forecast(Training):
    """A trained model, and the times that it starts from."""

    def restore(self) -> None:
        """Read the model and its normalisation from a checkpoint, written on any number of ranks."""
        self.stats = self.blank_stats()
        state = {"model": get_model_state_dict(self.model), "stats": self.stats}
        dcp.load(state, checkpoint_id=self.args.checkpoint)
        set_model_state_dict(self.model, state["model"])
        self.model.eval()

    def open_truth(self) -> scidata.ShardedDataset:
        """Open the data one time a sample."""
        args = self.args
        return open_era5(args.data, self.mesh, patch=args.patch, fields=args.fields, dtype=self.dtype, steps=(0,))

    def roll_out(self, start: int) -> Any:
        """Yield the state at each lead time, by field: ShardTensors of one time."""
        mean, std = self.stats["mean"], self.stats["std"]
        now = stack_channels(self.ds[start].to(self.device))[0]
        state = (now - mean) / std
        for _ in range(self.args.leads):
            state = state + self.model(state)
            yield split_channels(self.ds, (state * std + mean)[0])

    def climatology(self, truth: scidata.ShardedDataset) -> dict[str, Tensor]:
        """Return the mean over all times, of this rank's part."""
        total: dict[str, Tensor] = {}
        for time in range(len(truth)):
            for name, field in truth[time].to(self.device).items():
                total[name] = field.double() if name not in total else total[name] + field
        return {name: (field / len(truth)).to(self.dtype) for name, field in total.items()}

    @torch.no_grad()
    def run(self) -> dict[str, list[Any]]:
        """Make all forecasts; return the scores of each kind, by lead time."""
        args, truth = self.args, self.open_truth()
        num_starts = len(truth) - args.leads
        labels = [truth.own_coords(start) for start in range(num_starts + 1)]
        usual = self.climatology(truth)
        weights = {truth.dims(truth.fields[0])[-2]: metrics.latitude_weights(truth)}
        scores = {kind: [metrics.RMSE(weights=weights, mesh=self.mesh) for _ in range(args.leads)] for kind in KINDS}
        with scidata.create(
            args.forecast, like=truth, times=steps_of(labels, args.leads), overwrite=args.overwrite, resume=args.again
        ) as writer:
            missing = set(writer.missing)
            for start in range(self.mesh.get_local_rank("dp"), num_starts, self.num_dp):
                self.say(f"forecast {start + 1} of {num_starts}", after=8)
                first = truth[start].to(self.device)
                for lead, state in enumerate(self.roll_out(start)):
                    step = start * args.leads + lead
                    if step in missing:
                        writer[step] = state
                    later = truth[start + lead + 1].to(self.device)
                    for kind, fields in zip(KINDS, (state, dict(first), usual), strict=True):
                        scores[kind][lead].update(fields, later)
        return {kind: [score.compute() for score in found] for kind, found in scores.items()}


def steps_of(labels: list[dict[str, Any]], leads: int) -> dict[str, Any]:
    """Return what the steps are labelled with: initial times, and how much later each step is."""
    if not labels[0]:
        return {"time": len(labels) - 1, "lead": np.arange(1, leads + 1)}
    ((dim, first), *_) = labels[0].items()
    times = np.array([each[dim] for each in labels])
    return {dim: times[:-1], "lead": np.arange(1, leads + 1) * (times[1] - first)}


def table(scores: dict[str, list[Any]]) -> str:
    """Return the scores as text: fields down, lead times across."""
    leads = len(scores["model"])
    lines = [f"{'RMSE':32}" + "".join(f"{f'+{k + 1}':>12}" for k in range(leads))]
    for name in scores["model"][0]:
        for kind in KINDS:
            row = "".join(f"{scores[kind][k][name].item():12.6g}" for k in range(leads))
            lines.append(f"{name if kind == KINDS[0] else '':18}{kind:14}{row}")
    return "\n".join(lines)


def draw(scores: dict[str, list[Any]], path: str) -> None:
    """Draw RMSE over lead time, a panel for each field."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names, leads = list(scores["model"][0]), range(1, len(scores["model"]) + 1)
    figure, panels = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3), squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], names, strict=True):
        for kind, style in zip(KINDS, ("-o", "--", ":"), strict=True):
            panel.plot(leads, [found[name].item() for found in scores[kind]], style, label=kind, markersize=3)
        panel.set(title=name, xlabel="steps ahead", ylim=(0, None), xticks=leads)
    panels[0][0].set_ylabel("RMSE")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Make the forecasts; return the exit code."""
    parser = parser_of(__doc__, out="runs/vit", lr=5e-4, lr_batch=16, decay=0.05)
    options(parser)
    parser.add_argument("--checkpoint", required=True, help="folder of one checkpoint: runs/vit/step_…")
    parser.add_argument("--leads", type=int, default=4, metavar="N", help="steps from each initial time")
    parser.add_argument("--forecast", required=True, help="what is written: .zarr, .nc or .h5")
    parser.add_argument("--plot", help="a picture of the scores")
    parser.add_argument("--overwrite", action="store_true", help="replace a forecast that is there")
    parser.add_argument("--again", action="store_true", help="go on with a forecast that was begun")
    args = parser.parse_args(argv)
    check_options(parser, args)
    if not (Path(args.checkpoint) / ".metadata").exists():
        parser.error(f"--checkpoint {args.checkpoint}: no complete checkpoint there; give one of the step_… folders")
    try:
        forecast = Forecast(args)
        if not 1 <= args.leads <= len(forecast.ds):
            parser.error(
                f"--leads {args.leads}: the data have {len(forecast.ds) + 1} times, so give 1 to {len(forecast.ds)}"
            )
        forecast.restore()
        scores = forecast.run()
    except (scidata.errors.ConfigError, FileNotFoundError) as e:
        parser.error(str(e))
    if forecast.is_main:
        print(table(scores))
        if args.plot:
            draw(scores, args.plot)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

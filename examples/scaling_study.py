"""How a training goes with the global batch: loss over samples, and samples/s, at learning rates scaled by its root.

    python -m pipelines.era5_grid make many.zarr --times 1200 --shape 33 64 --levels 1
    torchrun --nproc-per-node 4 examples/scaling_study.py --study runs/study --batches 16 32 64 128 256 512 1024 \\
        --micro-batch 8 -- --data many.zarr --domain 2 --epochs 4 --val-fraction 0.1 --amp bf16

What follows ``--`` are options of the training script; what they say of ranks, model and data is the same for all
batches. One training after another on the ranks at hand: a global batch is ``--micro-batch`` samples on each dp rank
at most, and as many of those as it takes. Peak learning rates are ``--lr`` times the square root of global batch over
``--lr-batch``. Losses are means over as many samples for each batch, those of one step of the largest.

The folder has ``study.json``, ``study.png``, and each training's own folder. A study that was ended goes on: trainings
that are done are not repeated, one that was under way goes on from its last checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer_options import Parser, options_of
from trainer_parts import is_complete

import scidata

BATCHES = (16, 32, 64, 128, 256, 512, 1024)
#: Options of the training that a study sets, or that do not change what is found.
OWN = (
    "batch_size",
    "accumulate",
    "log_every",
    "out",
    "resume",
    "check",
    "device",
    "dp",
    "domain",
    "tp",
    "pp",
    "save_every",
)


def micro_batches(batch: int, num_dp: int, largest: int) -> tuple[int, int]:
    """Return samples per dp rank at a time, and how many of such make one step.

    Raises
    ------
    ConfigError
        The dp ranks cannot share the batch.
    """
    if batch % num_dp:
        raise scidata.errors.ConfigError(
            f"a global batch of {batch} samples cannot be shared evenly by {num_dp} dp ranks"
        )
    each = batch // num_dp
    size = max(n for n in range(1, min(each, largest) + 1) if each % n == 0)
    return size, each // size


def last_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a training goes on from."""
    return max((path for path in folder.glob("step_*") if is_complete(path)), default=None)


def found_in(log: Path) -> dict[str, Any]:
    """Return what a training's log says: losses over samples, and its median speed."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_step = {kind: {x["step"]: x for x in lines if x["kind"] == kind} for kind in ("train", "validation")}
    # a step that was repeated after a resume counts once; the first epoch also warms up
    speeds = [x["samples/s per rank"] for x in lines if x["kind"] == "speed"]
    curves = {
        kind: {key: [x[key] for _, x in sorted(found.items())] for key in ("samples", "loss")}
        for kind, found in by_step.items()
    }
    return curves | {"samples/s per rank": statistics.median(speeds[1:] or speeds)}


def draw(runs: dict[str, dict[str, Any]], path: str) -> None:
    """Draw loss over samples, a line for each batch, and samples/s per rank over the batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = plt.get_cmap("viridis")
    for number, (batch, found) in enumerate(runs.items()):
        colour = colours(number / max(1, len(runs) - 1) * 0.9)
        left.plot(found["train"]["samples"], found["train"]["loss"], ".-", color=colour, label=batch, linewidth=1)
        held = found["validation"]
        left.plot(held["samples"], held["loss"], "x", color=colour)
        right.plot(int(batch), found["samples/s per rank"], "o", color=colour)
    batches = [int(batch) for batch in runs]
    right.plot(batches, [found["samples/s per rank"] for found in runs.values()], "-", color="grey", zorder=0)
    crosses = ", crosses: of validation" if any(found["validation"]["loss"] for found in runs.values()) else ""
    left.set(xlabel="samples", ylabel=f"loss{crosses}", yscale="log")
    figure.legend(title="global batch", frameon=False, fontsize="small", loc="outside right center")
    right.set(xlabel="global batch", ylabel="samples/s per rank", xscale="log", ylim=(0, None))
    right.xaxis.set_major_locator(FixedLocator(batches))
    right.xaxis.set_minor_locator(NullLocator())
    right.set_xticks(batches, [str(batch) for batch in batches])
    figure.savefig(path, dpi=150)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return what was found as text."""
    lines = [f"{'batch':>8}{'ranks':>7}{'peak lr':>11}{'loss':>12}{'validation':>12}{'samples/s per rank':>20}"]
    for batch, found in runs.items():
        losses = [found[kind]["loss"][-1:] for kind in ("train", "validation")]
        shown = "".join(f"{loss[0]:12.6g}" if loss else f"{'':12}" for loss in losses)
        speed = found["samples/s per rank"]
        lines.append(f"{batch:>8}{found['ranks']:>7}{found['peak lr']:>11.3g}{shown}{speed:>20.4g}")
    return "\n".join(lines)


def check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a study that is there is the one that is asked for.

    Raises
    ------
    ConfigError
        It is another one; what differs is named.
    """
    before, now = ({**each["options"], **each} for each in (before, now))
    for key in sorted({*before, *now} - {"options"}):
        if before.get(key) != now.get(key):
            raise scidata.errors.ConfigError(
                f"{path}: another study is there: {key.replace('_', ' ')} {before.get(key)}, and here {now.get(key)}; "
                "give the same, another --study, or --overwrite"
            )


class Study:
    """Trainings of one script at several batches, and what is known of them."""

    def __init__(self, args: argparse.Namespace, given: list[str]) -> None:
        self.args, self.given, self.folder = args, given, Path(args.study)
        self.script = importlib.import_module(args.script)
        _, options = self.script.arguments(given)
        extra = {axis: size for axis, size in (("tp", options.tp), ("pp", options.pp)) if size > 1}
        self.mesh = scidata.init_mesh(dp=options.dp, domain=options.domain, extra=extra, device=options.device)
        self.num_dp, self.is_main = self.mesh["dp"].size(), dist.get_rank() == 0
        self.micro = {batch: micro_batches(batch, self.num_dp, args.micro_batch) for batch in args.batches}
        kept = {key: value for key, value in options_of(options).items() if key not in OWN}
        self.settings: dict[str, Any] = {"script": args.script, "largest batch": max(args.batches), "options": kept}
        self.runs: dict[str, dict[str, Any]] = {}
        self.stats: Path | None = None
        if self.path.exists() and not args.overwrite:
            before = json.loads(self.path.read_text())
            self.runs = before["runs"]
            check_same(self.path, before["settings"], json.loads(json.dumps(self.settings)))
        dist.barrier()  # all have read it before rank 0 writes

    @property
    def path(self) -> Path:
        """What is known."""
        return self.folder / "study.json"

    def train(self, batch: int) -> None:
        """Train at one batch, or go on, and keep what was found."""
        size, several = self.micro[batch]
        out = self.folder / f"batch_{batch:05d}"
        begun = last_checkpoint(out) if not self.args.overwrite else None
        own = ["--batch-size", size, "--accumulate", several, "--out", out]
        own += ["--log-every", max(1, max(self.args.batches) // batch)]
        own += [] if self.stats is None else ["--stats", self.stats]
        _, options = self.script.arguments([*self.given, *map(str, own), *(["--resume", str(begun)] if begun else [])])
        training = self.script.Training(options)
        largest, count = max(self.args.batches), len(training.train_samples)
        if count < largest:
            raise scidata.errors.ConfigError(f"--batches {largest}: there are {count} samples to train on")
        training.train_samples = training.train_samples[
            : count // largest * largest
        ]  # no epoch ends with a small batch
        if self.is_main and begun is None:
            (out / "log.jsonl").unlink(missing_ok=True)  # of a training that was begun and left no checkpoint
        training.say(f"global batch {batch}: {size} x {several} on each of {self.num_dp} dp ranks")
        training.prepare()
        training.train()
        self.stats = last_checkpoint(out) / "stats.json"  # all train on the same samples
        if self.is_main:
            about = {"ranks": dist.get_world_size(), "dp": self.num_dp, "batch size": size, "accumulate": several}
            self.runs[str(batch)] = about | {"peak lr": training.peak_lr} | found_in(out / "log.jsonl")
            self.runs = {key: self.runs[key] for key in sorted(self.runs, key=int)}
            self.folder.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps({"settings": self.settings, "runs": self.runs}, indent=1))
            new.replace(self.path)
            draw(self.runs, str(self.folder / "study.png"))

    def run(self) -> None:
        """Train at each batch that is not done."""
        done = set(self.runs)
        for batch in self.args.batches:
            if str(batch) not in done:
                self.train(batch)
        if self.is_main:
            print(table(self.runs))


def main(argv: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = Parser(__doc__)
    parser.add_argument("--study", default="runs/study", help="folder of what is found; one that was begun goes on")
    parser.add_argument("--script", choices=["train_vit", "train_gnn"], default="train_vit")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="global batches")
    parser.add_argument(
        "--micro-batch", type=int, default=4, metavar="N", help="samples at a time on a dp rank, at most"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin again")
    args = parser.parse_args(words[:at])
    if min(*args.batches, args.micro_batch) < 1:
        parser.error("--batches and --micro-batch are numbers of samples, from 1")
    try:
        study = Study(args, words[at + 1 :])
        study.run()
    except (scidata.errors.ConfigError, FileNotFoundError) as e:
        parser.error(str(e))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The options that the training scripts share, and what is checked of them before any data are opened."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer_parts import described, is_complete


class Parser(argparse.ArgumentParser):
    """A parser that names near options for one that does not exist."""

    def __init__(self, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else ():
            near = difflib.get_close_matches(word, known, n=2)
            message += f"; did you mean {' or '.join(near)}?" if near else ""
        super().error(message)


def parser_of(description: str | None, *, out: str, lr: float, lr_batch: int, decay: float) -> Parser:
    """Return a parser of the options that all scripts have; a folder of results and figures are a script's own."""
    parser = Parser(description)
    number = {"type": int, "metavar": "N"}
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--dp", default=-1, help="ranks with different samples; -1: what is left", **number)
    ranks.add_argument("--domain", default=1, help="ranks that share a sample", **number)
    ranks.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="fsdp shards weights over dp ranks")
    ranks.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        choices=["inductor", "aot_eager"],
        help="run steps as graphs, by torch.compile's inductor unless another backend is named",
    )
    ranks.add_argument("--device", help="cpu, cuda, xpu, ...; default: the accelerator that torch finds, else cpu")
    parser.set_defaults(tp=1, pp=1)
    length = parser.add_argument_group("length")
    length.add_argument("--batch-size", default=1, help="samples per dp rank", **number)
    length.add_argument("--accumulate", default=1, help="batches of each dp rank that make one step", **number)
    length.add_argument("--epochs", default=1, **number)
    length.add_argument("--max-steps", help="stop early; the schedule still spans --epochs", **number)
    length.add_argument("--log-every", default=10, help="steps, whose mean loss is shown", **number)
    length.add_argument("--save-every", help="steps; a checkpoint is also written at the end of an epoch", **number)
    held = parser.add_argument_group("validation")
    held.add_argument("--val-fraction", type=float, default=0.0, help="part of the samples, the last ones, held out")
    held.add_argument("--val-sel", metavar="FIRST:LAST", help="times that are held out (2016:2017), or sample numbers")
    held.add_argument("--validate-every", help="steps; default at the end of each epoch", **number)
    rate = parser.add_argument_group("optimizer")
    rate.add_argument("--lr", type=float, default=lr, help="peak learning rate at a global batch of --lr-batch")
    rate.add_argument("--lr-batch", default=lr_batch, help="scaled by the square root of global batch / this", **number)
    rate.add_argument("--warmup", type=float, default=0.05, help="part of the training, in [0, 1)")
    rate.add_argument("--weight-decay", type=float, default=decay)
    rate.add_argument("--clip", type=float, help="largest norm of the gradient")
    kind = parser.add_argument_group("numbers")
    kind.add_argument(
        "--amp", choices=["none", "bf16", "fp16"], default="none", help="autocast; weights stay in --dtype"
    )
    kind.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    kind.add_argument("--seed", type=int, default=0)
    kind.add_argument("--stats", metavar="FILE", help="of scidata stats; default: computed over what is trained on")
    files = parser.add_argument_group("files")
    files.add_argument("--out", default=out, help="folder of checkpoints, log.jsonl and TensorBoard scalars")
    files.add_argument("--resume", metavar="CHECKPOINT", help=f"folder of one checkpoint: {out}/step_…")
    files.add_argument(
        "--check", action="store_true", help="compare the first step with one process, without AMP, and end"
    )
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, counts: Sequence[str]) -> None:
    """Check what can be checked without the data; ``counts`` are the names of the script's own numbers."""
    shared = ("batch_size", "accumulate", "epochs", "lr_batch", "log_every", "save_every", "max_steps")
    for name in (*counts, *shared, "validate_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not 0 <= args.warmup < 1:
        parser.error(f"--warmup is a part of the training, in [0, 1), not {args.warmup}")
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val-fraction is a part of the samples, in [0, 1), not {args.val_fraction}")
    if args.val_sel is not None and (args.val_fraction or ":" not in args.val_sel):
        parser.error(f"--val-sel {args.val_sel}: give FIRST:LAST, without --val-fraction")
    if args.validate_every and not (args.val_fraction or args.val_sel):
        parser.error("--validate-every needs samples that are held out: --val-fraction or --val-sel")
    if args.resume and not is_complete(args.resume):
        parser.error(f"--resume {args.resume}: no complete checkpoint there; give one of the step_… folders")


def check_resumed(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> None:
    """Check that a checkpoint is of the same model: ``names`` are the options that decide it."""
    before = described(args.resume)["options"]
    for name in names:
        own = vars(args)[name]
        if before.get(name) != (list(own) if isinstance(own, tuple) else own):
            parser.error(
                f"--resume {args.resume}: was trained with --{name.replace('_', '-')} {shown(before.get(name))}, and "
                f"this has {shown(own)}"
            )


def shown(value: Any) -> str:
    """Return an option's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as they are kept in ``run.json``."""
    return {
        key: value for key, value in vars(args).items() if isinstance(value, str | int | float | list | tuple | None)
    }

"""The command: ``python -m tests.fuzz --cases 20000 --seed 0 --jobs 2``."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from collections.abc import Sequence

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before NumPy starts threads, which do not live through a fork

from tests.fuzz.mutations import MUTATIONS  # noqa: E402
from tests.fuzz.planted import run_planted  # noqa: E402
from tests.fuzz.run import Case, Limits, Outcome, prepare, run_cases, scratch  # noqa: E402
from tests.fuzz.seeds import FORMATS  # noqa: E402

_OUTCOMES = ("right", "error", "different", "failure")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Reads damaged files of every format.")
    parser.add_argument("--cases", type=int, default=1000, help="of all formats together")
    parser.add_argument("--first", type=int, default=0, help="number of each format's first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--case", nargs="+", metavar="FORMAT:N", help="only these, with their tracebacks")
    parser.add_argument("--keep", metavar="DIR", help="copy the damaged files of each case to this folder")
    parser.add_argument("--seconds", type=float, default=Limits().seconds, help="that a case may take")
    parser.add_argument("--planted", action="store_true", help="put faults into scidata, and see that they are noticed")
    return parser


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.case:
        return [Case(name.partition(":")[0], int(name.partition(":")[2])) for name in args.case]
    each, more = divmod(args.cases, len(args.format))
    return [Case(name, args.first + n) for k, name in enumerate(args.format) for n in range(each + (k < more))]


def report(outcomes: Sequence[Outcome], seed: int) -> str:
    """Return the table, and a line for each failure that reproduces it."""
    counts = collections.Counter((o.case.format, o.mutation, o.verdict.outcome) for o in outcomes)
    lines = [f"{'format':10} {'mutation':12} {'cases':>7} {'right':>7} {'error':>7} {'different':>9} {'failure':>7}"]
    rows = [(f, m) for f in FORMATS for m in MUTATIONS] + [(f, None) for f in FORMATS] + [(None, m) for m in MUTATIONS]
    for format, mutation in [*rows, (None, None)]:
        cells = [
            sum(n for (f, m, o), n in counts.items() if f in (format or f,) and m in (mutation or m,) and o == outcome)
            for outcome in _OUTCOMES
        ]
        if sum(cells):
            numbers = " ".join(f"{n:>{w}}" for n, w in zip([sum(cells), *cells], (7, 7, 7, 9, 7), strict=True))
            lines.append(f"{format or 'all':10} {mutation or 'all':12} {numbers}")
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in (o for o in outcomes if o.verdict.outcome == "failure"):
        verdict = outcome.verdict
        kind = verdict.message.partition(":")[0] if verdict.fault in ("bare exception", "blow-up") else ""
        groups.setdefault((verdict.fault, kind, verdict.frame), []).append(outcome)
    for (fault, _, frame), found in sorted(groups.items()):
        cases = sorted({o.case: o for o in found}.values(), key=lambda o: o.case)
        steps = ", ".join(sorted({o.verdict.step for o in found} - {""}))
        lines += ["", f"FAILURE {fault} in {frame or '?'} ({steps}), {len(found)} cases:"]
        lines += [f"  {o.case}: {o.text}: {ascii(o.verdict.message)[:300]}" for o in cases[:4]]
        lines.append(f"  python -m tests.fuzz --seed {seed} --case {' '.join(str(o.case) for o in cases)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return 1 if any failed."""
    args = _parser().parse_args(arguments)
    if args.planted:
        run_planted()
        return 0
    cases = _cases(args)
    formats = tuple(f for f in FORMATS if f in {case.format for case in cases})
    outcomes: list[Outcome] = []
    begun = shown = time.monotonic()
    with scratch() as folder:
        runner = prepare(folder, formats, args.seed, Limits(seconds=args.seconds), args.jobs, args.keep)
        for outcome in run_cases(runner, cases, args.jobs):
            outcomes.append(outcome)
            if outcome.verdict.outcome == "failure":
                verdict = outcome.verdict
                print(f"{outcome.case}: {verdict.fault} in {verdict.frame or '?'}: {outcome.text}", file=sys.stderr)
            if args.case:
                print(f"{outcome.case}: {outcome.text}: {outcome.verdict.outcome}\n{outcome.verdict.trace}")
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                failed = sum(o.verdict.outcome == "failure" for o in outcomes)
                rate = len(outcomes) / (shown - begun)
                print(f"{len(outcomes)} of {len(cases)} cases, {failed} failures, {rate:.1f} a second", file=sys.stderr)
    print(report(outcomes, args.seed))
    return int(any(o.verdict.outcome == "failure" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())

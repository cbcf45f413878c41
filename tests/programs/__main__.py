"""Run random programs on shards and in one process: ``python -m tests.programs --seed 0 --count 5000``.

Prints each program that is neither right nor refused, made as small as it still fails, and totals.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scidata.testing import RankError, run_ranks
from tests.programs import compiled
from tests.programs.make import make
from tests.programs.program import Program
from tests.programs.run import Outcome, on_ranks
from tests.programs.shrink import shrink

STRETCH = 40  # programs on the same ranks; new ones follow where some are out of step
BAD = ("wrong", "hang", "divergent", "other error", "accepted")
GIVES_UP = 200.0  # seconds for a stretch; a collective waits half as long


def outcomes(
    programs: Sequence[Program], run: Callable[..., Any] = on_ranks, timeout: float = GIVES_UP
) -> Iterator[tuple[Program, Outcome]]:
    """Run programs of the same mesh on the same ranks, and on new ones after one that breaks them."""
    left = list(programs)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done, broken = Path(folder) / "done", None
            stretch = left[:STRETCH]
            try:
                run_ranks(run, math.prod(left[0].mesh), stretch, done, timeout=timeout)
            except RankError as error:
                broken = str(error)
            found = _loaded(done)
        if broken is not None and (not found or found[-1].kind not in ("hang", "divergent")):
            found.append(Outcome("hang", broken[-1500:]))
        yield from zip(left, found, strict=False)
        left = left[len(found) :]


def _loaded(done: Path) -> list[Outcome]:
    found = []
    with done.open("rb") if done.exists() else io.BytesIO() as file:
        while True:
            try:
                found.append(pickle.load(file))
            except EOFError:
                return found


def outcome_of(program: Program, run: Callable[..., Any] = on_ranks) -> Outcome:
    """Run one program on ranks of its own."""
    return next(outcomes([program], run, timeout=20))[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), help="4 is a mesh of 2 x 2; all by default")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--case", type=int, help="print and run the program of this seed alone")
    parser.add_argument("--whole", action="store_true", help="do not make failing programs smaller")
    ways = {"aot_eager": compiled.on_ranks, "inductor": compiled.by_inductor}
    parser.add_argument("--compile", nargs="?", const="aot_eager", choices=ways, help="run each as a compiled function")
    options = parser.parse_args()
    run = ways.get(options.compile, on_ranks)
    mesh = None if options.ranks is None else (2, 2) if options.ranks == 4 else (options.ranks,)
    torch.set_default_dtype(getattr(torch, options.dtype))
    if options.case is not None:
        options.seed, options.count = options.case, 1
        print(make(options.case, mesh), flush=True)
    by_mesh: defaultdict[tuple[int, ...], list[Program]] = defaultdict(list)
    for seed in range(options.seed, options.seed + options.count):
        program = make(seed, mesh)
        by_mesh[program.mesh].append(program)
    kinds: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    lines, start = 0, time.monotonic()
    for programs in by_mesh.values():
        for program, outcome in outcomes(programs, run, GIVES_UP * (10 if options.compile else 1)):
            kinds[outcome.kind] += 1
            refused += outcome.refused
            lines += outcome.lines
            if outcome.kind == "unstable":
                print(f"unstable: seed {program.seed}: {outcome.note}", flush=True)
            if outcome.kind in BAD:
                small, now = (
                    (program, outcome) if options.whole else shrink(program, outcome, partial(outcome_of, run=run))
                )
                print(f"\n==== {now.kind}: {now.note}\n{small}", flush=True)
    print(f"\n{dict(kinds)}; {lines} lines in {time.monotonic() - start:.0f} s; refused {sum(refused.values())}:")
    print(", ".join(f"{name} {count}" for name, count in refused.most_common()))


if __name__ == "__main__":
    main()

"""Run PyTorch Geometric's convolutions between two sets of nodes on stored, cut graphs: ``python -m tests.bipartite``.

Prints what is neither right nor refused, and totals; with ``--write FILE`` a table of all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

from scidata.testing import run_ranks
from tests.bipartite.cases import Found, cases, on_ranks, write_store


def table(results: Mapping[int, list[Found]], words: str) -> str:
    """Return a page: totals, and a row for each layer."""
    ranks = sorted(results)
    rows = []
    kinds: dict[str, int] = {}
    for at, first in enumerate(results[ranks[0]]):
        each = [results[num][at] for num in ranks]
        outcome = worst(each)
        kinds[outcome] = kinds.get(outcome, 0) + 1
        note = next((f.notes[outcome] for f in each if outcome in f.notes), "").replace("|", "/").splitlines()
        rows.append(f"| {first.name} | {outcome} | {note[0].partition(' Layout: ')[0][:160] if note else ''} |")
    run = sum(kinds.values()) - kinds.get("not run", 0)
    first = (
        f"**{kinds.get('right', 0)} of the {run} calls that run are right**; {kinds.get('refused', 0)} are refused by "
        f"name, {kinds.get('wrong', 0)} are wrong; {kinds.get('not run', 0)} were not run."
    )
    lines = ["# PyTorch Geometric's convolutions between two node sets", "", first, ""]
    lines += ["| layer | outcome | why |", "|---|---|---|", *rows, "", "## How this was run", "", words]
    return "\n".join(lines) + "\n"


def worst(found: list[Found]) -> str:
    """Return what is to be said of a layer: the worst outcome of all calls."""
    every = set().union(*(each.counts for each in found))
    return next(kind for kind in ("wrong", "refused", "not run", "right") if kind in every)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bipartite", description=__doc__)
    parser.add_argument("names", nargs="*", help="layers; all of them by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--amp", action="store_true", help="in single precision, under autocast to bfloat16")
    parser.add_argument("--write", type=Path, help="write a table of all, in Markdown")
    options = parser.parse_args()
    names = options.names or list(cases())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder))
        for num_ranks in options.ranks:
            results[num_ranks] = run_ranks(on_ranks, num_ranks, store, names, options.amp, timeout=900)[0]
            for found in results[num_ranks]:
                for kind in sorted(set(found.counts) - {"right"}):
                    print(
                        f"{num_ranks} ranks: {found.name}: {kind} ({found.counts[kind]}): {found.notes[kind]}",
                        flush=True,
                    )
    outcomes = [worst([results[num][at] for num in results]) for at in range(len(names))]
    print({kind: outcomes.count(kind) for kind in sorted(set(outcomes))})
    if options.write:
        import torch_geometric

        shown = ", ".join(map(str, options.ranks))
        words = (
            f"`python -m tests.bipartite`, torch {torch.__version__}, torch-geometric {torch_geometric.__version__}, "
            f"{date.today()}: on two stored graphs, along two relations, on {shown} ranks, with empty parts and a set "
            "of fewer nodes than ranks; outputs, gradients of parameters and inputs against one process at "
            f"{'0.05 (autocast to bfloat16)' if options.amp else '1e-10 (float64)'}."
        )
        options.write.write_text(table(results, words))


if __name__ == "__main__":
    main()

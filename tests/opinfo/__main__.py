"""Run torch's samples of all its operations on shards: ``python -m tests.opinfo --ranks 3 --most 20``.

Prints each operation that is neither right nor refused, and totals; writes the counts of all with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

from scidata.testing import RankError, run_ranks
from tests.opinfo.cases import DTYPES, Found, on_ranks, operations
from tests.opinfo.report import table, with_columns

#: Operations on the same ranks, which take some seconds to import the samples, and what these may take, in seconds; of
#: DTensors, of which many hang, in short stretches. A collective waits half as long.
STRETCH, RIVALS = (100, 600), (20, 40)
BAD = ("wrong", "divergent", "broken", "other error", "accepted")


def all_of(
    names: list[str], most: int, ranks: int, *, rival: bool = False, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Found]:
    """Run operations on the same ranks, and on new ones after one that breaks them, or finds their time used up."""
    left = list(names)
    stretch, limit = RIVALS if rival else STRETCH
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = Path(folder) / "done"
            broken, start = None, time.monotonic()
            try:
                run_ranks(on_ranks, ranks, left[:stretch], most, done, rival, dtypes, timeout=limit)
            except RankError as error:
                broken = str(error).strip().splitlines()[-1][:300]
            count = 0
            with done.open("rb") if done.exists() else io.BytesIO() as file:
                while True:
                    try:
                        yield pickle.load(file)
                    except EOFError:
                        break
                    count += 1
        if broken is not None and (
            count == 0 or time.monotonic() - start < limit
        ):  # else it may be no fault of its own
            found = Found(left[count])
            found.add("broken", broken)
            yield found
            count += 1
        left = left[count:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.add_argument("names", nargs="*", help="operations; all of them by default")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--most", type=int, default=10, help="samples of an operation")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of all samples, where an operation has it")
    parser.add_argument("--refused", action="store_true", help="also print what is refused, and why")
    parser.add_argument("--dtensor", action="store_true", help="run torch's DTensor instead, on even parts")
    parser.add_argument("--write", type=Path, help="write a table of all operations, in Markdown")
    parser.add_argument("--beside", type=Path, help="what --dtensor --json wrote, for the table")
    parser.add_argument("--json", type=Path, help="write counts and notes of each operation")
    parser.add_argument(
        "--columns", nargs="*", help="DTYPE=FILE of --json: add these to the page of --write; run nothing"
    )
    options = parser.parse_args()
    if options.columns:
        runs = {dtype: json.loads(Path(file).read_text()) for dtype, file in (c.split("=", 1) for c in options.columns)}
        options.write.write_text(with_columns(options.write.read_text(), runs))
        return
    names = options.names or list(operations())
    total: Counter[str] = Counter()
    results = []
    dtypes = (getattr(torch, options.dtype),) if options.dtype else DTYPES
    for found in all_of(names, options.most, options.ranks, rival=options.dtensor, dtypes=dtypes):
        total += found.counts
        counts = {"counts": dict(found.counts), "alone": dict(+found.alone)}
        results.append({"name": found.name, **counts, "notes": found.notes})
        for kind in (*BAD, *(["refused"] if options.refused else [])):
            for note in found.notes.get(kind, ())[: 1 if kind == "refused" else 3]:
                print(f"{found.name}: {kind} ({found.counts[kind]}): {note}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print(dict(total))
    used = [r["counts"] for r in results if set(r["counts"]) - {"error"}]
    print(f"{len(used)} operations; all right: {sum(set(c) <= {'right', 'error'} for c in used)}")
    if options.write:
        rivals = json.loads(options.beside.read_text()) if options.beside else []
        command = f"python -m tests.opinfo --ranks {options.ranks} --most {options.most}"
        words = f"`{command}`, torch {torch.__version__}, {date.today()}."
        options.write.write_text(table(results, rivals, words))


if __name__ == "__main__":
    main()

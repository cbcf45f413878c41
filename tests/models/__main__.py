"""Run public models on shards: ``python -m tests.models --ranks 3 --library timm``.

Prints each model that is neither right nor refused, and totals; ``--write FILE`` writes a table of all.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from scidata.testing import RankError, run_ranks
from tests.models.cases import LAYOUTS, Found, on_ranks
from tests.models.registry import LIBRARIES, cases_of, is_installed
from tests.models.report import table

STRETCH = 12  # models on the same ranks, which take some seconds to import a library
PATIENCE = 60  # seconds that a collective waits for the other ranks


def all_of(library: str, names: Sequence[str], layouts: Sequence[str], backend: str = "") -> Iterator[Found]:
    """Run models on the same ranks, and on new ones after one that breaks them."""
    left = list(names)
    (num_ranks,) = {LAYOUTS[layout] for layout in layouts}
    while left:
        now = left[:STRETCH]
        with tempfile.TemporaryDirectory() as folder:
            broken = None
            try:
                args = (library, now, layouts, folder, PATIENCE * (4 if backend else 1), backend)
                run_ranks(on_ranks, num_ranks, *args, timeout=1200, backend=None)
            except RankError as error:
                broken = next(iter(error.failures.values())).strip().splitlines()[-1][:300]
            done = list(_read(Path(folder) / "done"))
        yield from done
        count = len(done) // len(layouts)
        if broken is not None:
            yield from (Found(now[count], layout, "broken", broken) for layout in layouts)
            count += 1
        left = left[count:]


def _read(path: Path) -> Iterator[Found]:
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of them by default")
    parser.add_argument("--library", nargs="*", choices=LIBRARIES, help="default: all that are installed")
    parser.add_argument("--ranks", type=int, nargs="*", default=[3], choices=sorted(set(LAYOUTS.values())))
    parser.add_argument("--refused", action="store_true", help="also print what is refused, and why")
    parser.add_argument("--write", type=Path, help="write the table, in Markdown")
    parser.add_argument("--json", type=Path, help="write what became of each model")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, help="in place of --ranks")
    parser.add_argument("--compile", nargs="?", const="aot_eager", default="", help="run each by scidata.compile, too")
    options = parser.parse_args()
    libraries = options.library or [name for name in LIBRARIES if is_installed(name)]
    results = []
    for library in libraries:
        start, total = time.monotonic(), Counter()
        names = [name for name in cases_of(library) if not options.names or name in options.names]
        chosen = [x for x in LAYOUTS if (x in options.layouts if options.layouts else LAYOUTS[x] in options.ranks)]
        for ranks in sorted({LAYOUTS[x] for x in chosen}):
            layouts = [x for x in chosen if LAYOUTS[x] == ranks]
            for found in all_of(library, names, layouts, options.compile):
                total[found.kind] += 1
                if found.captured:
                    total[f"captured {found.captured.partition(':')[0]}"] += 1
                    if found.captured != "whole":
                        print(f"{library} {found.name}, {found.layout}: {found.captured}", flush=True)
                results.append({"library": library, **asdict(found)})
                if found.kind not in ("right", *([] if options.refused else ["refused"])):
                    print(f"{library} {found.name}, {found.layout}: {found.kind}: {found.note}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
        print(f"{library}: {dict(total)}, {time.monotonic() - start:.0f} s", flush=True)
    if options.write:
        command = f"python -m tests.models {' '.join(sys.argv[1:])}"
        options.write.write_text(table(results, command, f"{date.today()}"))


if __name__ == "__main__":
    main()

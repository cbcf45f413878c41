"""Random patches of random grids against NumPy, on some numbers of ranks: ``python -m tests.patches --trials 9``."""

from __future__ import annotations

import argparse
import tempfile

from scidata.testing import run_ranks
from tests.patches import trials

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4])
    given = parser.parse_args()
    for first in range(given.first, given.first + given.trials, 20):
        seeds = list(range(first, min(first + 20, given.first + given.trials)))
        with tempfile.TemporaryDirectory() as folder:
            for seed in seeds:
                trials.make_file(folder, seed)
            for num in given.ranks:
                found = run_ranks(trials.run, num, folder, seeds, timeout=600)
                print(f"seeds {seeds[0]} to {seeds[-1]}: {num} ranks, {found[0]} patches right", flush=True)

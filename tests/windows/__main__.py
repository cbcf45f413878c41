"""Hold windows of random tables, as they are and sorted by scidata, against pandas.

``python -m tests.windows [--trials 2000] [--seed 0]``
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from tests.windows.oracle import check_case
from tests.windows.tables import make_case, sort_case


def main() -> None:
    """Run trials, each of its own seed, and say how many windows were held against pandas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num = 0
    for seed in range(args.seed, args.seed + args.trials):
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng(seed)
            try:
                case = make_case(rng, Path(folder))
                num += check_case(rng, case)
                if case.paths:
                    num += check_case(rng, sort_case(rng, case, Path(folder)))
            except BaseException as e:
                e.add_note(f"seed {seed}")
                raise
    print(f"{args.trials} tables, {num} windows: each row as pandas has it")


if __name__ == "__main__":
    main()

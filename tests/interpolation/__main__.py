"""Hold random interpolations against SciPy: ``python -m tests.interpolation [--trials 1000] [--seed 0]``."""

import argparse

from scidata.testing import run_ranks
from tests.interpolation.trials import run_trials


def main() -> None:
    """Run trials on each number of ranks, each of its own seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 3, 4, 6))
    args = parser.parse_args()
    for num_ranks in args.ranks:
        run_ranks(run_trials, num_ranks, args.seed, args.trials, timeout=60 + args.trials)
        print(
            f"{num_ranks} ranks: {args.trials} trials as SciPy has them, with the gradients of one process", flush=True
        )


if __name__ == "__main__":
    main()

"""The command: ``python -m tests.joins --keys 5000 --files 400 --seed 0``."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from tests.joins import random_files, random_keys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.joins", description="Holds joins against pandas.")
    parser.add_argument("--keys", type=int, default=5000, help="trials of keys alone")
    parser.add_argument("--files", type=int, default=400, help="trials of data sets that are read")
    parser.add_argument("--seed", type=int, default=0, help="the first trial's")
    args = parser.parse_args()
    num = sum(random_keys.check(args.seed + n) for n in range(args.keys))
    print(f"{args.keys} trials of keys, {num} samples: as pandas merges them", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        random_files.write(Path(folder))
        pairs = list(itertools.product(random_files.MESHES, repeat=2))
        for number, (first, then) in enumerate(pairs):
            seeds = list(range(args.seed + number, args.seed + args.files, len(pairs)))
            random_files.run(Path(folder), seeds, first, then)
            print(f"{len(seeds)} trials begun on dp x domain {first}, resumed on {then}", flush=True)


if __name__ == "__main__":
    main()

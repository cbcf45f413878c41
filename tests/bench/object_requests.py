"""Requests for objects of S3, by kind: opening, the first epoch and later ones, on one rank and on four.

    PYTHONPATH=. python tests/bench/object_requests.py

Two fields of four steps of 64 x 96, float32, in chunks of 32 x 96, or in shards of two steps; NetCDF without chunks; a
cloud of 5,000 points. Every rank reads its rows of each step. moto serves them on loopback; numbers, not times.
tests/unit/sources/test_requests.py asserts them.
"""

import argparse
import logging
import tempfile
from pathlib import Path

from tests.unit._s3 import serve
from tests.unit.sources._requests import CASES, count, put


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    ranks = parser.parse_args().ranks
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    print(
        "| | ranks | open | open together | first epoch | later epochs | kB of these |\n|---|---|---|---|---|---|---|"
    )
    with serve() as server, tempfile.TemporaryDirectory() as folder:
        urls = [put(server, Path(folder), case) for case in CASES]
        found = {num: count(server, urls, num) for num in ranks}
    for i, case in enumerate(CASES):
        for num in ranks:
            counts = found[num][i]
            nbytes = " / ".join(f"{round(each.nbytes / 1000)}" for each in counts)
            cells = [*map(str, counts)] if num > 1 else [str(counts[0]), "", *map(str, counts[1:])]
            print(f"| {case} | {num} | {' | '.join(cells)} | {nbytes} |")


if __name__ == "__main__":
    main()

"""Tests whose cases take 1.5 s or more together: a run of CI takes a share of their cases, the next run another.

``heavy.txt`` lists them. To make it anew, from the times of a whole run::

    pytest --durations=0 --durations-min=0.01 -vv | python -m tests.heavy > heavy.txt && mv heavy.txt tests/
"""

import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 1.5
#: What README promises, and what mypy finds: in every run.
ALWAYS = ("tests/typing/", "tests/examples/test_demo.py")


def function_of(item: pytest.Item) -> str:
    """Return a test's name without its case."""
    return item.nodeid.partition("[")[0]


def left_to_others(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return those cases that other runs take, where ``SCIDATA_SHARE`` is this run's, such as ``2/4``."""
    share, _, num_shares = os.environ.get("SCIDATA_SHARE", "").partition("/")
    if not num_shares:
        return []
    heavy = set(LIST.read_text().split())
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (name := function_of(item)) in heavy and not item.get_closest_marker("slow"):
            cases[name].append(item)
    # each function begins at a share of its own, so that those of one case spread over all
    return [
        case
        for name, of_one in cases.items()
        for place, case in enumerate(of_one, zlib.crc32(name.encode()))
        if place % int(num_shares) != int(share) % int(num_shares)
    ]


def main() -> None:
    """List the heavy tests of the times that pytest has printed."""
    seconds: Counter[str] = Counter()
    for line in sys.stdin:
        if found := re.match(r"(\d+\.\d+)s (?:setup|call|teardown) +(\S+?::[^\[\s]+)", line):
            seconds[found[2]] += float(found[1])
    print(*sorted(name for name, took in seconds.items() if took >= SECONDS and not name.startswith(ALWAYS)), sep="\n")


if __name__ == "__main__":
    main()

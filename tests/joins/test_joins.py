"""A share of ``python -m tests.joins``."""

from __future__ import annotations

from pathlib import Path

from tests.joins import random_files, random_keys


def test_keys_match_as_pandas_merges_them() -> None:
    assert sum(map(random_keys.check, range(120))) > 500


def test_what_is_read_in_all_orders_and_on_other_ranks(tmp_path: Path) -> None:
    random_files.write(tmp_path)
    random_files.run(tmp_path, list(range(12)), (1, 3), (2, 1))

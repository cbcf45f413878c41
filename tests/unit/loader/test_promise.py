"""The memory that a plan promises for a loader is that which a fresh process takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.memory_promise import CASES, make_stores, measured


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("promise")
    make_stores(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_loader_takes_what_is_promised(stores: Path, case: str) -> None:
    found = []
    for _ in range(3):  # how far threads come before others differs, and with it the blocks that lie free at once
        promised, taken = measured(stores, CASES[case])
        found.append(taken / promised)
        # on a busy machine threads come less far ahead: 0.80 of the promise, where it is 0.95 on a quiet one
        if 0.75 <= found[-1] <= 1.15:
            return
    raise AssertionError(f"taken / promised: {found}")

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


@pytest.mark.parametrize(
    "case",
    [
        "lz4, blocks, all kept",
        "zstd, pairs of steps, blocks, all kept",
        "raw, full, batches of 32",
        "raw, pairs of steps, stored, batches of 16",
    ],
)
def test_a_loader_takes_what_is_promised(stores: Path, case: str) -> None:
    promised, taken = measured(stores, CASES[case])
    assert taken == pytest.approx(promised, rel=0.15)

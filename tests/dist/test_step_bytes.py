"""Bytes that a training step sends, beside the least that its algorithm needs: tests/bench/step_bytes.py."""

from __future__ import annotations

import pytest

from scidata.testing import run_ranks
from tests.bench.step_bytes import rank_main

#: How many times the least is sent at most, with 2 and with 4 ranks.
AT_MOST = {
    "UNet": (1.01, 1.01),
    "ViT block": (1.01, 1.01),
    "FNO": (1.01, 1.01),
    "FNO, stock layers": (1.01, 1.01),
    "Swin": (1.01, 1.01),
    "Transolver": (1.01, 1.15),  # small sums of 3 and more ranks are one exchange
}


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_little_more_than_the_least(num_ranks: int) -> None:
    ranks = run_ranks(rank_main, num_ranks, list(AT_MOST), "")
    for name, most in AT_MOST.items():
        sent, least = (sum(r[name][i] for r in ranks) for i in (0, 2))
        assert sent <= most[num_ranks // 4] * least, (name, sent, least)

"""A small share of ``python -m tests.interpolation``."""

import pytest

from scidata.testing import run_ranks
from tests.interpolation.trials import run_trials


@pytest.mark.slow_for("3")
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_random_interpolations_are_scipys(num_ranks):
    run_ranks(run_trials, num_ranks, 0, 25)

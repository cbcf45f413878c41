"""How ranks end when one of them meets a fault; a share of ``tests/faults/rank_faults.py``, in fresh interpreters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import rank_faults, torch_alone


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("data") / "grid.zarr"
    rank_faults.write_data(folder)
    return folder


@pytest.mark.slow_for(
    "kill-collective-2-1",
    "exit 0-collective-3-1",
    "exit 3-next-2-0",
    "stop-compute-2-0",
    "stop-next-3-1",
    "transform-shard op-2-1",
    "kill-handle-2-1",
    "kill-shard op-2-0",
    "raise-collective-3-0",
)
@pytest.mark.parametrize(
    ("fault", "place", "num_ranks", "victim"),
    [
        ("kill", "collective", 2, 1),  # torch says "Connection closed by peer"; the error is RankFailedError
        ("kill", "shard op", 2, 0),  # with the store
        ("kill", "handle", 2, 1),  # no Python of torch's: what is printed is RankFailedError
        ("exit 0", "collective", 3, 1),
        ("exit 3", "next", 2, 0),
        ("stop", "compute", 2, 0),  # which keeps the store: it does not answer
        ("stop", "before", 2, 1),  # the first batch: by the timeout of init_mesh
        ("stop", "next", 3, 1),  # the others, whose own data is late, come to the end of their timeout first
        ("raise", "collective", 3, 0),
        ("transform", "shard op", 2, 1),
    ],
)
def test_ranks_end_together(data: Path, fault: str, place: str, num_ranks: int, victim: int) -> None:
    case = rank_faults.Case(fault=fault, place=place, num_ranks=num_ranks, victim=victim, fresh=True)
    assert rank_faults.run(case, data, limit=30.0).misses == []  # 2 s on a machine that has nothing else to do


def test_nothing_is_under_way_when_the_interpreter_ends() -> None:
    """With torch alone, rank 0 ends by SIGABRT."""
    for rank, (code, error) in enumerate(torch_alone.two_ranks(wide=True, scidata=True)):
        assert code == 1, error
        assert error.count("Traceback") == 1
        assert f"[rank{rank}]: ValueError: the model is wrong" in error

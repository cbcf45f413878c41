"""One rank meets bad values outside of a loader's loop and ends: the others raise its error, not gloo's."""

import os
import subprocess
import sys
import time

import pytest

from tests.ports import free_port

SCRIPT = """
import sys, time, torch, torch.nn.functional as F, scidata
from torch.distributed.tensor import Shard
from scidata.errors import RankFailedError

mesh = scidata.init_mesh(domain=3)["domain"]
rank = torch.distributed.get_rank()
x = scidata.ShardTensor.from_local(torch.randn(4, 5), mesh, [Shard(0)])
classes = torch.zeros(4, dtype=torch.int64)
if rank == {bad}:
    classes[1] = 7
targets = scidata.ShardTensor.from_local(classes, mesh, [Shard(0)])
try:
    loss = F.cross_entropy(x, targets)
    loss.item()
except RankFailedError as error:
    print(f"rank {{rank}}: {{error.rank}}: {{error}}", flush=True)
except IndexError:
    {then}
"""


def run(bad: int, then: str) -> tuple[list[int], list[str], float]:
    """Run the script on three ranks; return their exit codes, what they print, and how long the last took to end."""
    script = SCRIPT.format(bad=bad, then=then)
    start = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | start | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    ranks[bad].wait(120)
    ended = time.monotonic()
    said = [process.communicate(timeout=120)[0] for process in ranks]
    return [process.returncode for process in ranks], said, time.monotonic() - ended


@pytest.mark.parametrize(("bad", "then"), [(0, "raise"), (2, "raise"), (2, "sys.exit(1)")])
def test_the_others_say_why(bad, then):
    codes, said, seconds = run(bad, then)
    assert codes == [int(rank == bad) for rank in range(3)], said
    word = "failed" if then == "raise" else "has ended; the last error that it met was"
    for rank in {0, 1, 2} - {bad}:
        assert f"rank {rank}: {bad}: rank {bad} {word}" in said[rank], said[rank]
        assert "IndexError: cross_entropy: a target is out of bounds for 5 classes" in said[rank], said[rank]
    assert seconds < 20

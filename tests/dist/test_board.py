"""One rank meets bad values, or its end, where no loader watches: the others raise its error, not gloo's."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import scidata
from scidata.device_mesh import board
from scidata.device_mesh.board import deadlock, processes
from scidata.errors import RankFailedError, ShardLayoutError
from scidata.testing import RankError, run_ranks
from tests.dist._scripts import run_script
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


SENDING = """
import time, torch, torch.distributed as dist, scidata

scidata.init_mesh(domain=3)
rank = dist.get_rank()
for turn in range(3 if rank < 2 else 0):  # the last rank's work is done
    if rank == turn % 2:
        time.sleep(1)
        dist.send(torch.ones(1), 1 - rank)
    else:
        dist.recv(torch.ones(1), 1 - rank)
"""


def test_two_ranks_go_on_sending_when_another_has_ended(tmp_path) -> None:
    assert [(code, said) for code, said, _ in run_script(tmp_path, SENDING, 3)] == [(0, "")] * 3


@pytest.mark.slow_for("2-raise", "2-sys.exit(1)")
@pytest.mark.parametrize(("bad", "then"), [(0, "raise"), (2, "raise"), (2, "sys.exit(1)")])
def test_the_others_say_why(tmp_path, bad, then):
    codes, said, seconds = zip(*run_script(tmp_path, SCRIPT.format(bad=bad, then=then), 3), strict=True)
    assert list(codes) == [int(rank == bad) for rank in range(3)], said
    word = "failed" if then == "raise" else "has ended; the last error that it met was"
    for rank in {0, 1, 2} - {bad}:
        assert f"rank {rank}: {bad}: rank {bad} {word}" in said[rank], said[rank]
        assert "IndexError: cross_entropy: a target is out of bounds for 5 classes" in said[rank], said[rank]
    assert max(seconds) - seconds[bad] < 20


# -- errors of operations, on ranks that live on --------------------------------------------------------------------


def bad_class(x):
    return F.cross_entropy(x, torch.tensor([0, 1, 2, 9, 0, 0]))  # row 3 is rank 1's


def rows_like(x, value, at_rank_1):
    rows = torch.full((x.to_local().shape[0], 1), at_rank_1 if dist.get_rank() == 1 else value)
    return scidata.ShardTensor.from_local(rows, x.device_mesh, [Shard(0)])


def bad_index(x):
    return x.gather(1, rows_like(x, 0, 7)).mean()  # the others are in the mean


def by_zero(x):
    return (x.long() // rows_like(x, 1, 0)).sum()


def meets(rank, num_ranks, run):
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    local = torch.arange(24.0).reshape(6, 4).split([3, 1, 2])[rank].clone()
    x = scidata.ShardTensor.from_local(local, mesh, [Shard(0)])
    dist.barrier()
    began = time.monotonic()
    with pytest.raises((IndexError, RuntimeError)) as caught:
        run(x)
    posts = board.common_postings()
    if rank == 1:
        assert not isinstance(caught.value, RankFailedError)
        posts.wait(["told/0", "told/2"])  # no sign of it but on the board
        with pytest.raises(RankFailedError, match=f"rank 1 has met an error .*: {type(caught.value).__name__}: "):
            dist.barrier()
        return 0.0
    assert caught.type is RankFailedError, caught.value
    assert caught.value.rank == 1
    assert "rank 1 has met an error in an operation" in str(caught.value)
    posts.post(f"told/{rank}")
    return time.monotonic() - began


@pytest.mark.parametrize("run", [bad_class, bad_index, by_zero])
def test_an_error_of_one_ranks_data_reaches_those_who_wait_for_it(run):
    assert max(run_ranks(meets, 3, run)) < 10  # 1 s on a machine that has nothing else to do


def meet_alike(rank, num_ranks):
    """Errors that all ranks meet, and one that a rank alone goes on after: groups stay as they are."""
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    x = scidata.ShardTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    for _ in range(2):
        with pytest.raises((ShardLayoutError, RuntimeError)):
            x + torch.ones(7, 5)
        time.sleep(1.2 if rank == 1 else 0.0)  # the others are in the next collective meanwhile
        assert x.sum().item() == 6 * num_ranks
    if rank == 1:
        with pytest.raises(IndexError):
            x.select(1, 7)
    assert x.mean().item() == 1
    time.sleep(1.2 if rank == 1 else 0.0)
    assert x.mean().item() == 1


def test_errors_that_all_ranks_meet_end_nothing():
    run_ranks(meet_alike, 3)


def call_other_operations(rank, num_ranks, odd):
    """The last rank leaves a sum out, or takes another: the next collectives do not match, and nobody fails."""
    deadlock._STOOD = 0.6
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    x = scidata.ShardTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    with pytest.raises(RankFailedError, match="ranks wait for each other in different operations: ") as caught:
        if rank < num_ranks - 1:
            x.sum()
        odd(x, mesh.get_group())
    assert "rank 0 is in all_to_all_single of `x.sum()` (test_board.py:" in str(caught.value)
    assert f"rank {num_ranks - 1} is in barrier of `" in str(caught.value)
    assert caught.value.rank == -1


def other_group(x, group):
    dist.barrier()


def same_group(x, group):
    dist.barrier(group)


@pytest.mark.parametrize("odd", [other_group, same_group])
def test_ranks_that_call_different_operations_are_told_where(odd):
    run_ranks(call_other_operations, 3, odd)


def mix_values(rank, num_ranks):
    """Rank 1 calls another operation, whose exchange fits that of the others: nobody waits, and no value is right."""
    board.board._BEATS_A_COMPARISON = 1
    mesh = scidata.init_mesh(domain=num_ranks)["domain"]
    x = scidata.ShardTensor.from_local(torch.full((2, 3), rank + 1.0), mesh, [Shard(0)])
    for _ in range(3):
        assert x.mean().item() == (num_ranks + 1) / 2
    if rank == 0:
        x.sin().to_local().sum()  # what sends nothing is each rank's own affair
    time.sleep(1.2)  # a comparison finds nothing
    assert x.mean().item() == (num_ranks + 1) / 2
    mixed = x.amax() if rank == 1 else x.sum()
    with pytest.raises(RankFailedError, match="ranks have called different operations, and mixed their") as caught:
        for _ in range(600):
            time.sleep(0.05)
            x.mean()
    said = str(caught.value)
    for each in ("rank 1 in amax (gather of 4 bytes)", "in sum (gather of 4 bytes)", "after mean"):
        assert each in said, said
    assert caught.value.rank == -1
    return mixed.item()


def test_ranks_that_mix_the_values_of_different_operations_are_told():
    assert len(set(run_ranks(mix_values, 3))) == 2


MISMATCH = """
import torch, scidata
from torch.distributed.tensor import Shard
mesh = scidata.init_mesh(domain=3)["domain"]
x = scidata.ShardTensor.from_local(torch.ones(4, 5), mesh, [Shard(0)])
if mesh.get_rank() == 0:
    x.sum(0)
else:
    x.sum()
"""


def test_where_gloo_ends_a_process_its_line_is_told(tmp_path):
    codes, said, _ = zip(*run_script(tmp_path, MISMATCH, 3), strict=True)
    ended = [text for code, text in zip(codes, said, strict=True) if code == -signal.SIGABRT]
    assert ended, said
    for text in ended:
        assert "collective mismatch" in text
        assert ", line 9 in <module>" in text, text


# -- processes that end, where no loop is ----------------------------------------------------------------------------


def ends(rank, num_ranks, how):
    mesh = scidata.init_mesh(domain=num_ranks)
    if rank == 1:
        board.common_postings().wait(["in/0", "in/2"])
        if how == "returns":
            return
        os.kill(os.getpid(), signal.SIGKILL)
    board.common_postings().post(f"in/{rank}")
    word = (
        r"rank 1 \(process \d+ on \S+\) has died, without a word;"
        if how == "is killed"
        else "rank 1 has (left|destroyed)"
    )
    with pytest.raises(RankFailedError, match=word) as caught:
        dist.barrier(mesh["domain"].get_group())
    assert caught.value.rank == 1


def test_a_rank_that_ends_before_the_first_batch_is_named():
    run_ranks(ends, 3, "returns")
    with pytest.raises(RankError) as caught:
        run_ranks(ends, 3, "is killed")
    assert list(caught.value.failures) == [1]  # the others have passed their checks


def joins_a_group_with_nobody(rank, num_ranks, port):
    """Rank 1 is killed; in torch the others wait for its address for half an hour."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(dict(zip(names, map(str, (rank, rank, num_ranks, "127.0.0.1", port)), strict=True)))
    scidata.init_mesh(domain=num_ranks, device="cpu", timeout=60)
    if rank == 1:
        board.common_postings().wait(["in/0", "in/2"])
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    board.common_postings().post(f"in/{rank}")
    with pytest.raises(RankFailedError, match=r"rank 1 .* has died, without a word"):  # as soon as Python runs
        with contextlib.suppress(dist.DistError, RuntimeError):
            dist.new_group([0, 1, 2])
        time.sleep(1.0)
    time.sleep(1.0 if rank == 0 else 0.0)  # it keeps the store


def test_a_rank_that_never_joins_a_new_group():
    with pytest.raises(RankError) as caught:
        run_ranks(joins_a_group_with_nobody, 3, free_port(), backend=None)
    assert list(caught.value.failures) == [1]


def _on_another_machine(rank: int, num_ranks: int) -> None:
    processes._machine = lambda: f"machine {rank}"
    scidata.init_mesh(domain=num_ranks, timeout=4)
    if rank == 1:
        board.begin().stop()  # as where its network is down
        time.sleep(7)
        return
    with pytest.raises(
        RankFailedError, match=r"rank 1 .* no sign of life for . s: its host, or the network, may be down"
    ):
        dist.all_reduce(torch.ones(1))


def test_a_rank_of_another_machine_that_is_silent_when_a_collective_fails() -> None:
    run_ranks(_on_another_machine, 2)

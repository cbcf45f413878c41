"""Check that ranks take the same samples if they index a data set without a loader of scidata.

Indexing never communicates, and one rank may look at a sample alone. But torch's own loader, or a loop over indices
that are drawn on each rank, may give ranks of a domain parts of different samples, which an operation on shards would
mix without a word. So a data set notes here each sample that it hands out, and the first collective after that, on the
ranks that share samples, compares the notes through the common store. A rank that has nothing new in a collective does
not take part, and the others do not wait long for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist

from scidata.device_mesh.board import calls, common_postings
from scidata.errors import ConfigError
from scidata.shard.comm.comparing import Comparison

_KEPT = 64  # of the latest notes
_SHOWN = 4
_SECONDS = 2.0  # that a rank waits for others in one comparison
_PAUSES = 0.0002, 0.01  # s between two questions: at first, and in the end

_noted: dict[str, deque[str]] = {}  # by name of the group


def note(sample: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Note a sample whose parts are shared by the ranks of some groups."""
    for group in groups:
        if group.size() > 1 and dist.get_backend(group) not in ("fake", "mpi"):
            _noted.setdefault(group.group_name, deque(maxlen=_KEPT)).append(sample)


def compare(group: dist.ProcessGroup | None, way: str, num_bytes: int = 0) -> None:
    """Compare the notes since the last time; every collective of scidata calls this before it begins.

    Raises ConfigError on all ranks alike, where they have taken different samples; RankFailedError, where another
    thread has found that they called different operations.

    ``way, num_bytes``: what the collective does, and bytes of each rank, where all have as many.
    """
    if calls.found:
        raise calls.found[0].error()
    name = group.group_name if group is not None else ""
    calls.numbers[name] += 1
    calls.noted.append((name, calls.numbers[name], calls.called.operation[0], way, num_bytes))
    notes = _noted.pop(name, None) if _noted else None
    if notes is None:
        return
    ranks = dist.get_process_group_ranks(group)
    posts = common_postings()
    comparison = Comparison(posts, f"samples/{name}/{calls.numbers[name]}", dist.get_rank(), ranks, _differ)

    def wait(key: str, whose: Sequence[int]) -> None:
        if not posts.wait([key], seconds=_SECONDS, pauses=_PAUSES):
            raise TimeoutError  # others have nothing to compare, or are slow

    try:
        reports = comparison.run({"notes": {"": list(notes)}}, {"notes": ranks[0]}, wait)
    except TimeoutError:
        return
    if reports:
        found = reports[0]["notes"]
        (first, second), (one, other) = found["ranks"], found["values"][""]
        raise ConfigError(
            f"ranks {first} and {second}, which share their samples, have taken different ones: rank {first} {one}, "
            f"rank {second} {other}; use scidata.DataLoader, or give torch's the same order on both ranks, such as "
            "sampler=scidata.DistributedSampler(ds, mesh)"
        )


def _differ(theirs: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the latest that both have, unless one has only looked at more: its notes hold the other's, in order."""
    a, b = theirs[""], own[""]
    same = _holds(a, iter(b)) or _holds(b, iter(a))
    if max(len(a), len(b)) == _KEPT:  # the earliest are lost
        same = a[-1] in b or b[-1] in a
    return {} if same else {"": [", ".join(notes[-_SHOWN:]) for notes in (a, b)]}


def _holds(some: Sequence[str], every: Iterator[str]) -> bool:
    return all(each in every for each in some)

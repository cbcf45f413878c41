"""The ranks that write one output: row exchanges, and messages about failures and ends.

Rows go through a process group of their own, over gloo and from a thread, so that the loop's collectives do not wait
for them. All else goes through the key-value store of the process group: words there outlast a group that was broken
off, and a rank that waits for them hears meanwhile of one that has failed, died or stopped
(:mod:`scidata.device_mesh.board`). No clock runs for a rank that lives: it may have more to do than another, and take
its time.
"""

from __future__ import annotations

import datetime
import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.types import Array, IntArray
from scidata.device_mesh import domain_mesh
from scidata.device_mesh.board import Postings, begin, call_with_timeout
from scidata.device_mesh.groups import break_group, explained
from scidata.device_mesh.torch_internals import ROWS, timeout_of
from scidata.errors import OutputError, RankFailedError, SciDataError

_TAGS = 1 << 16
#: Of rows: a rank that has died breaks its connections; one that has more to do than another may take its time.
_PATIENCE = datetime.timedelta(days=1)
_ASK_S = 0.5  # s to wait for the store
_LOOK_S = 0.2  # s between two checks that all ranks live
_PAUSES = 0.001, 0.05  # s between two polls for other ranks' posts: at first, and finally
_SILENCE_S = 30.0  # of a store that does not answer
_GOODBYE_S, _GOODBYE_LOOK_S = 5.0, 0.01  # for the others to have read the last word, and between two looks


T = TypeVar("T")


#: The gloo groups of this process for output, by world and ranks. A group is kept: torch gives one that is made of the
#: same ranks the name of one that was destroyed, and with it addresses that nobody listens at. One that was broken off
#: is not destroyed, so that the next gets another name.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    known, key = _groups.setdefault(world, {}), tuple(ranks)
    if key not in known:
        made: Any = dist.new_group(  # this rank is one of them
            list(ranks), timeout=timeout_of(world), backend="gloo", use_local_synchronization=True, group_desc=ROWS
        )
        known[key] = made
    return known[key]


def _forget_group(group: dist.ProcessGroup) -> None:
    for known in _groups.values():
        for key in [key for key, kept in known.items() if kept is group]:
            del known[key]


def _domains_of(mesh: DeviceMesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    dims = [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name in axes]
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    domains = mesh.mesh.permute(*others, *dims).reshape(-1, math.prod(mesh.size(dim) for dim in dims))
    return sorted(map(tuple, domains.tolist()))


class Ranks:
    """The ranks of a mesh that write one output; one process without a mesh.

    - ``run``: a name of this run, the same on all ranks.
    - ``group``, ``num_groups``: which domain this rank is of, and of how many: those along the dp axis, and others.
    - ``part``, ``parts``: place of this rank in its domain, and the number of ranks along each axis of that.
    - ``is_first``: whether this is the first of all ranks, which does the work that is done once.
    - ``is_idle``: whether another rank holds the same part: along axes that are neither dp nor domain, the first one
      writes.
    """

    def __init__(self, mesh: DeviceMesh | None, axes: Sequence[str], dp_axis: str | None) -> None:
        self.part, self.parts = 0, tuple[int, ...]()
        self.group, self.num_groups = 0, 1
        self.is_first, self.run = True, uuid.uuid4().hex[:8]
        self._group: dist.ProcessGroup | None = None
        self._failed, self._tag, self.is_idle = False, 0, False
        self._name, self._num_shared, self._board = "", 0, begin()
        self._members, self._all, self._rank = [0], [0], 0
        if mesh is None or mesh.size() == 1:
            self.parts = tuple(1 for _ in axes)
            return
        if self._board is None:
            raise OutputError(f"ranks of backend {dist.get_backend()!r} have no store to agree through; use gloo")
        self._rank = dist.get_rank()
        others = [name for name in mesh.mesh_dim_names or () if name != dp_axis and name not in axes]
        self.is_idle = any(mesh.get_local_rank(name) for name in others)
        self._all = sorted(mesh.mesh.flatten().tolist())
        if axes:
            domain = domain_mesh(mesh, axes)
            self._members, self.parts = domain.mesh.flatten().tolist(), tuple(domain.shape)
        else:
            self._members = [self._rank]
        self.part = self._members.index(self._rank)
        self.is_first = self._rank == self._all[0]
        self._name = self._board.name_for("writer", self._all)
        self.run = self.share(self.run, itemgetter(0))
        self._group = _group_of(self._all)
        self._tag = int(self.run, 16) % _TAGS  # the rows of two outputs that are written at once
        domains = _domains_of(mesh, axes)
        self.group, self.num_groups = domains.index(tuple(self._members)), len(domains)

    @property
    def name(self) -> str:
        """Name of this run, domain and rank, for separate files."""
        return f"{self.run}-{self.group}-{self.part}"

    @property
    def _posts(self) -> Postings | None:
        """The ranks' messages; not kept in an attribute, since a reference keeps the store's server alive."""
        return None if self._board is None or not self._name else self._board.base.below(self._name)

    def share(self, value: object, combine: Callable[[list[Any]], T]) -> T:
        """Return the first rank's result from all ranks' values, which should be small JSON. Collective."""
        if self._posts is None:
            return combine([value])
        self._num_shared += 1
        posts, whole = self._posts, f"said/{self._num_shared}"
        own = f"{whole}/{self._rank}"
        posts.post(own, value)
        if not self.is_first:
            self._await(posts, [whole])
            found: T = posts.read(whole)
            posts.count(f"{whole}/read")
        else:
            keys = [f"{whole}/{rank}" for rank in self._all]
            self._await(posts, keys)
            found = combine(posts.read_all(keys))
            self._forget(posts, self._num_shared - 1)  # all have read it, since they have posted again
            posts.post(whole, found)
        posts.remove(own)
        return found

    def _await(self, posts: Postings, keys: Iterable[str]) -> None:
        """Wait until other ranks have posted, as long as they live. Raises as :meth:`check`."""
        heard, num_ranks = time.monotonic(), len(self._all)

        def ask() -> bool:
            return posts.wait(keys, seconds=_LOOK_S, pauses=_PAUSES, num_ranks=num_ranks)

        while (found := call_with_timeout(10 * _LOOK_S, ask)) is not True:
            heard = heard if found is None else time.monotonic()
            self.check()
            if time.monotonic() - heard > _SILENCE_S:
                raise RankFailedError("the rank that keeps the ranks' common store does not answer", 0)

    def _forget(self, posts: Postings, number: int) -> None:
        if number > 0:
            posts.remove(f"said/{number}", f"said/{number}/read")

    def check(self) -> None:
        """Raise if another rank that writes here has failed, died, left or stopped."""
        if (failure := self.failure()) is not None:
            raise failure

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if one has an error: the error itself there, RankFailedError elsewhere. Collective."""
        if error is not None:
            self.tell(error)
            raise error
        self.share(None, itemgetter(0))

    def run_on_first(self, run: Callable[[], T]) -> T | None:
        """Call a function on the first rank; return its result there. Collective; raises as :meth:`agree`."""
        error, found = None, None
        if self.is_first:
            try:
                found = run()
            except BaseException as e:
                error = e
        self.agree(error)
        return found

    # -- rows ----------------------------------------------------------------------------------------------------

    def send(self, values: Array, part: int) -> tuple[dist.Work | None, torch.Tensor]:
        """Start to send values to a part of the domain; return the work, and a tensor to keep until it ends."""
        tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return dist.isend(tensor, self._members[part], group=self._group, tag=self._tag), tensor

    def receive(self, out: Array, part: int) -> dist.Work | None:
        """Start to receive values from a part of the domain into a contiguous array; return the work."""
        tensor = torch.from_numpy(out.reshape(-1).view(np.uint8))
        return dist.irecv(tensor, self._members[part], group=self._group, tag=self._tag)

    def exchange_rows(self, rows: Sequence[IntArray]) -> list[IntArray]:
        """Send an array to each part of the domain, and return the arrays received. Collective over the domain."""
        self.agree(None)  # all ranks reach the exchange or learn of a failure
        sent, held = torch.zeros(2, len(self._all), dtype=torch.int64)
        places = torch.from_numpy(np.searchsorted(self._all, self._members))
        sent[places] = torch.tensor([len(each) for each in rows])
        self.wait(dist.all_to_all_single(held, sent, group=self._group, async_op=True) if self._group else None)
        coming = [np.empty(num, np.int64) for num in (held if self._group else sent)[places].tolist()]
        works = [self.receive(each, part) for part, each in enumerate(coming) if part != self.part and len(each)]
        sends = [self.send(each, part) for part, each in enumerate(rows) if part != self.part and len(each)]
        coming[self.part] = np.asarray(rows[self.part], np.int64)
        for work in [*works, *(work for work, _ in sends)]:
            self.wait(work)
        return coming

    def wait(self, work: dist.Work | None) -> None:
        """Wait for rows, however late the other rank sends them."""
        if work is not None:  # torch returns None outside a group
            work.wait(_PATIENCE)

    # -- words ---------------------------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Post that this rank has failed; do not post another rank's failure, which all hear from that rank."""
        self._failed = True
        posts = self._posts
        if posts is not None and not isinstance(error, RankFailedError):
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            call_with_timeout(_ASK_S, lambda: posts.append("failed", [self._rank, text]))

    def fail(self, error: BaseException) -> None:
        """Post that this rank has failed, and end the other ranks' waits for its rows."""
        if self._group is None:
            return
        self.tell(explained(error) or error)
        _forget_group(self._group)
        break_group(self._group)

    def failure(self) -> SciDataError | None:
        """Return the failure of another rank; None if there is none."""
        if not self._name or (posts := self._posts) is None:
            return None
        said = call_with_timeout(_ASK_S, lambda: posts.find("failed/0"))
        rank, text = said or (self._rank, "")
        found: SciDataError | None = None
        if rank != self._rank:
            found = RankFailedError(f"rank {rank} failed while writing: {text}", rank)
        elif self._board is not None:
            ends = (event for event in list(self._board.events) if event.is_last and event.rank in self._all)
            found = next((RankFailedError(event.text, event.rank) for event in ends), None)
        self._failed |= found is not None
        return found

    def claim(self, what: str, said: str) -> str:
        """Claim a key, and return its first claim: this group's, or another's."""
        return said if self._posts is None else self._posts.claim(what, said)

    def close(self) -> None:
        """Release the process group, which stays for other outputs unless a rank has failed."""
        posts = self._posts
        if self._group is not None and self._failed:
            _forget_group(self._group)
        elif self._group is not None and self.is_first and posts is not None:
            call_with_timeout(_GOODBYE_S, lambda: self._say_goodbye(posts))
        self._group, self._name = None, ""

    def _say_goodbye(self, posts: Postings) -> None:
        """Wait until the others have read the last message: the store may end with this process."""
        read, deadline = f"said/{self._num_shared}/read", time.monotonic() + _GOODBYE_S
        while posts.count(read, 0) < len(self._all) - 1 and time.monotonic() < deadline:
            time.sleep(_GOODBYE_LOOK_S)
        self._forget(posts, self._num_shared)

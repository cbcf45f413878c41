"""What the ranks that write say to each other: rows of chunks, that one has failed, that all have ended.

Rows go through a process group of their own, over gloo and from a thread, so that the loop's collectives do not wait
for them. All else goes through the key-value store of the process group: words there outlast a group that was broken
off, and who waits for them hears meanwhile of a rank that has failed, died or stopped
(:mod:`scidata.device_mesh.board`). No clock runs for a rank that lives: it may have more to do than another, and take
its time.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.device_mesh import domain_mesh
from scidata.device_mesh.board import begin, call_with_timeout, common_store
from scidata.device_mesh.groups import break_group, explained
from scidata.device_mesh.torch_internals import ROWS, timeout_of
from scidata.errors import OutputError, RankFailedError, SciDataError

_TAGS = 1 << 16
#: Of rows: a rank that has died breaks its connections; one that has more to do than another may take its time.
_PATIENCE = datetime.timedelta(days=1)
_ASK_S = 0.5  # for a word in the store, between two looks at whether all ranks live
_LOOK_S = 0.05
_SILENCE_S = 30.0  # of a store that does not answer
_GOODBYE_S = 5.0  # for the others to have read the last word


class _Groups:
    """The gloo groups of this process for what is written, one for each set of ranks that writes together.

    A group is kept: torch gives one that is made of the same ranks the name of one that was destroyed, and with it
    addresses that nobody listens at. One that was broken off is not destroyed, so that the next gets another name.
    """

    def __init__(self) -> None:
        self._of: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._num_outputs: dict[tuple[int, ...], int] = {}

    def _look(self) -> None:
        world = dist.group.WORLD
        if self._of is None or self._of() is not world:
            self._of, self._groups = weakref.ref(world), {}

    def new_output(self, ranks: Sequence[int]) -> str:
        """Return a name for one more output of some ranks, the same on all of them.

        Also where a process group has followed another: the store may be the same, with words of before.
        """
        number = self._num_outputs[tuple(ranks)] = self._num_outputs.get(tuple(ranks), 0) + 1
        digest = hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]
        return f"writer/{digest}/{number}"

    def get(self, ranks: Sequence[int]) -> Any:
        """Return the group of some ranks. Collective among them, where there is none yet."""
        self._look()
        found = self._groups.get(tuple(ranks))
        if found is None:
            found = self._groups[tuple(ranks)] = dist.new_group(
                list(ranks),
                timeout=timeout_of(dist.group.WORLD),
                backend="gloo",
                use_local_synchronization=True,
                group_desc=ROWS,
            )
        return found

    def forget(self, group: Any) -> None:
        """Have the next one of these ranks be another."""
        self._groups = {ranks: kept for ranks, kept in self._groups.items() if kept is not group}


_groups = _Groups()


class Ranks:
    """The ranks of a mesh that write one output; one process where there is no mesh.

    Attributes
    ----------
    run
        A name of this run, the same on all ranks.
    group, num_groups
        Which domain this rank is of, and of how many: those along the dp axis, and others.
    part, parts
        Place of this rank in its domain, and the number of ranks along each axis of that.
    is_first
        Of all ranks: what is done once, it does.
    is_idle
        Whether another rank holds the same part: along axes that are neither dp nor domain, the first one writes.
    """

    def __init__(self, mesh: DeviceMesh | None, axes: Sequence[str], dp_axis: str | None) -> None:
        self.part, self.parts = 0, tuple[int, ...]()
        self.group, self.num_groups = 0, 1
        self.is_first, self.run = True, uuid.uuid4().hex[:8]
        self._group: Any = None
        self._failed, self._tag, self.is_idle = False, 0, False
        self._name, self._num_shared, self._board = "", 0, begin()
        self._members, self._all, self._rank = [0], [0], 0
        if mesh is None or mesh.size() == 1:
            self.parts = tuple(1 for _ in axes)
            return
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
        self._name = _groups.new_output(self._all)
        said = self.share({"run": self.run, "members": self._members})
        self._group = _groups.get(self._all)
        self.run = said[0]["run"]
        self._tag = int(self.run, 16) % _TAGS  # the rows of two outputs that are written at once
        domains = sorted({tuple(each["members"]) for each in said})
        self.group, self.num_groups = domains.index(tuple(self._members)), len(domains)

    @property
    def name(self) -> str:
        """This run, domain and rank, for files of its own."""
        return f"{self.run}-{self.group}-{self.part}"

    def share(self, value: Any) -> list[Any]:
        """Return what each rank gives, in the order of the ranks. Collective; JSON."""
        if not self._name:
            return [value]
        self._num_shared += 1
        keys = [self._key(f"said/{self._num_shared}/{rank}") for rank in self._all]
        store, whole = common_store(), self._key(f"said/{self._num_shared}")
        store.set(self._key(f"said/{self._num_shared}/{self._rank}"), json.dumps(value))
        if not self.is_first:
            self._await([whole])
            found = json.loads(store.get(whole))
            store.add(f"{whole}/read", 1)
        else:
            self._await(keys)
            found = [json.loads(store.get(key)) for key in keys]
            self._forget(self._num_shared - 1)  # what all have read, since they have said more
            store.set(whole, json.dumps(found))
        return list(found)

    def _await(self, keys: Sequence[str]) -> None:
        """Wait until words are there. Raises as :meth:`check`."""
        asked = [*keys]
        heard = time.monotonic()
        while (found := call_with_timeout(4 * _ASK_S, lambda: self._come(asked))) is not True:
            heard = heard if found is None else time.monotonic()
            self.check()
            if time.monotonic() - heard > _SILENCE_S:
                raise RankFailedError("the rank that keeps the ranks' common store does not answer", 0)

    def _come(self, keys: Sequence[str]) -> bool:
        """Return whether words are there, in a moment at most; at once where a rank has failed."""
        store, pause, deadline = common_store(), 0.001, time.monotonic() + _ASK_S
        while not (there := bool(store.check(list(keys)))) and time.monotonic() < deadline:
            if store.check([self._key("failed")]):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
        return there

    def _forget(self, number: int) -> None:
        if number > 0:
            store, name = common_store(), self._key(f"said/{number}")
            for key in (*(f"{name}/{rank}" for rank in self._all), name, f"{name}/read"):
                store.delete_key(key)

    def check(self) -> None:
        """Raise where another rank that writes here has failed, died, left or stopped.

        Raises
        ------
        RankFailedError
        """
        if (failure := self.failure()) is not None:
            raise failure

    def agree(self, error: BaseException | None) -> None:
        """Raise, on all ranks, where one has met an error. Collective.

        Raises
        ------
        RankFailedError
            With that rank's error; there, the error itself.
        """
        if error is not None:
            self.tell(error)
            raise error
        self.share(None)

    # -- rows ----------------------------------------------------------------------------------------------------

    def send(self, values: npt.NDArray[Any], part: int) -> tuple[Any, Any]:
        """Begin to send values to a part of the domain; returns the work, and what must live until that is done."""
        tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return dist.isend(tensor, self._members[part], group=self._group, tag=self._tag), tensor

    def receive(self, out: npt.NDArray[Any], part: int) -> Any:
        """Begin to receive values from a part of the domain into a contiguous array; returns the work."""
        tensor = torch.from_numpy(out.reshape(-1).view(np.uint8))
        return dist.irecv(tensor, self._members[part], group=self._group, tag=self._tag)

    def exchange_rows(self, rows: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
        """Send an array to each part of the domain, and return what comes from each. Collective over the domain."""
        said = self.share([len(each) for each in rows])
        by_rank = dict(zip(self._all, said, strict=True))
        coming = [np.empty(by_rank[rank][self.part], np.int64) for rank in self._members]
        works = [self.receive(each, part) for part, each in enumerate(coming) if part != self.part and len(each)]
        sent = [self.send(each, part) for part, each in enumerate(rows) if part != self.part and len(each)]
        coming[self.part] = np.asarray(rows[self.part], np.int64)
        for work in [*works, *(work for work, _ in sent)]:
            work.wait()
        return coming

    def wait(self, work: Any) -> None:
        """Wait for rows, however long another rank takes until it comes to them."""
        work.wait(_PATIENCE)

    # -- words ---------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def tell(self, error: BaseException) -> None:
        """Tell the others that this rank writes no more; of what another has failed with, they hear as it has."""
        self._failed = True
        if not self._name or isinstance(error, RankFailedError):
            return
        text = str(error).splitlines()[0] if str(error) else ""
        said = json.dumps({"rank": self._rank, "text": f"{type(error).__name__}: {text}"})
        call_with_timeout(_ASK_S, lambda: common_store().compare_set(self._key("failed"), "", said))

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank writes no more, and break off what they wait for from it."""
        if self._group is None:
            return
        self.tell(explained(error) or error)
        _groups.forget(self._group)
        break_group(self._group)

    def failure(self) -> SciDataError | None:
        """Return the failure of another rank, where there is one."""
        found = None if not self._name else self._asked()
        self._failed |= found is not None
        return found

    def _asked(self) -> SciDataError | None:
        key = self._key("failed")
        text = call_with_timeout(_ASK_S, lambda: common_store().get(key) if common_store().check([key]) else b"")
        said = json.loads(text) if text else {"rank": self._rank}
        if said["rank"] != self._rank:
            return RankFailedError(f"rank {said['rank']} failed while writing: {said['text']}", said["rank"])
        for event in () if self._board is None else list(self._board.events):
            if event.is_last and event.rank in self._all:
                return RankFailedError(event.text, event.rank)
        return None

    def claim(self, what: str, said: str) -> str:
        """Return who was the first to claim something: this group's own word, or another's."""
        if not self._name:
            return said
        first: bytes = common_store().compare_set(self._key(what), "", said)
        return first.decode()

    def close(self) -> None:
        """Let go of the process group, which stays for other outputs unless a rank has failed."""
        if self._group is not None and self._failed:
            _groups.forget(self._group)
        if self._group is not None and self.is_first and not self._failed:
            call_with_timeout(_GOODBYE_S, self._say_goodbye)
        self._group, self._name = None, ""

    def _say_goodbye(self) -> None:
        """Wait until the others have read the last word: the store may end with this process."""
        store, read = common_store(), self._key(f"said/{self._num_shared}/read")
        deadline = time.monotonic() + _GOODBYE_S
        while store.add(read, 0) < len(self._all) - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 5)
        self._forget(self._num_shared)

    def check_alike(self, what: str, value: str) -> None:
        """Raise where the ranks were given different outputs. Collective."""
        if len(set(self.share(value))) > 1:
            raise OutputError(f"{what}: ranks were asked to write different things there; give all of them the same")

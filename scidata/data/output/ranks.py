"""What the ranks that write say to each other: rows of chunks, that one has failed, that all have ended.

Rows go through a process group of their own, over gloo and from a thread, so that the loop's collectives do not wait
for them. Failures and claims go through the key-value store of the process group.
"""

from __future__ import annotations

import contextlib
import datetime
import json
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
from scidata.device_mesh.board import common_store
from scidata.device_mesh.groups import break_group
from scidata.errors import OutputError, RankFailedError, SciDataError

_TAGS = 1 << 16
#: A rank that has died breaks its connections; one that has more to do than another may take its time.
_PATIENCE = datetime.timedelta(days=1)


class _Groups:
    """The gloo groups of this process for what is written, one for each set of ranks that writes together.

    A group is kept: torch gives one that is made of the same ranks the name of one that was destroyed, and with it
    addresses that nobody listens at. One that was broken off is not destroyed, so that the next gets another name.
    """

    def __init__(self) -> None:
        self._of: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}

    def get(self, ranks: Sequence[int]) -> Any:
        """Return the group of some ranks. Collective among them, where there is none yet."""
        world = dist.group.WORLD
        if self._of is None or self._of() is not world:
            self._of, self._groups = weakref.ref(world), {}
        found = self._groups.get(tuple(ranks))
        if found is None:
            found = self._groups[tuple(ranks)] = dist.new_group(
                list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=True
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
        self._group = _groups.get(self._all)
        self.is_first = self._rank == self._all[0]
        said = self.share({"run": self.run, "members": self._members})
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
        if self._group is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self._all]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        found = [torch.empty_like(padded) for _ in self._all]
        dist.all_gather(found, padded, group=self._group)
        return [json.loads(bytes(x[: int(n)].numpy())) for x, n in zip(found, sizes, strict=True)]

    def agree(self, error: BaseException | None) -> None:
        """Raise, on all ranks, where one has met an error. Collective.

        Raises
        ------
        RankFailedError
            With that rank's error; there, the error itself.
        """
        said = self.share(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in zip(self._all, said, strict=True):
            if text is not None:
                raise RankFailedError(f"rank {rank} failed while writing: {text}", rank)

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

    # -- words ---------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"writer/{self.run}/{name}"

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank writes no more, and break off what they wait for from it."""
        if self._group is None:
            return
        text = str(error).splitlines()[0] if str(error) else ""
        said = json.dumps({"rank": self._rank, "text": f"{type(error).__name__}: {text}"})
        with contextlib.suppress(RuntimeError):
            common_store().compare_set(self._key("failed"), "", said)
        _groups.forget(self._group)
        break_group(self._group)

    def failure(self) -> SciDataError | None:
        """Return the failure of another rank, where there is one."""
        found = None if self._group is None else self._asked()
        self._failed |= found is not None
        return found

    def _asked(self) -> SciDataError | None:
        store = common_store()
        try:
            if not store.check([self._key("failed")]):
                return None
            said = json.loads(store.get(self._key("failed")))
        except RuntimeError:  # its host has ended
            return RankFailedError("the rank that keeps the ranks' common store has ended", 0)
        if said["rank"] == self._rank:
            return None
        return RankFailedError(f"rank {said['rank']} failed while writing: {said['text']}", said["rank"])

    def claim(self, what: str, said: str) -> str:
        """Return who was the first to claim something: this group's own word, or another's."""
        if self._group is None:
            return said
        first: bytes = common_store().compare_set(self._key(what), "", said)
        return first.decode()

    def close(self) -> None:
        """Let go of the process group, which stays for other outputs unless a rank has failed."""
        if self._group is not None and self._failed:
            _groups.forget(self._group)
        self._group = None

    def check_alike(self, what: str, value: str) -> None:
        """Raise where the ranks were given different outputs. Collective."""
        if len(set(self.share(value))) > 1:
            raise OutputError(f"{what}: ranks were asked to write different things there; give all of them the same")

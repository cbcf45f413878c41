"""Compare the collectives that ranks have begun: a sum that meets a maximum gives wrong values and no error.

Each collective of scidata is noted, with the operation of the script that it is part of: ``noted.append()``, one call.
A thread of the board takes the notes in with each sign of life, which tells the next rank of each group how many there
are and their checksum. Where these differ, both find the first note that does, and all ranks raise.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, deque
from typing import NamedTuple

import torch.distributed as dist

from scidata.device_mesh.board.events import Event
from scidata.device_mesh.board.store import Postings
from scidata.device_mesh.torch_internals import process_groups

_KEPT = 4096  # of a group; as many as ranks may be apart


class Called(threading.local):
    """The operation that a thread of the script is in: the outermost, or None."""

    def __init__(self) -> None:
        self.operation: list[object] = [None]  # one look-up finds it, and changes it


class Note(NamedTuple):
    """A collective: its number in its group, the operation's name, and the facts that are equal on all ranks."""

    number: int
    operation: str
    how: str
    checksum: int


called = Called()
numbers: Counter[str] = Counter()  # of the latest, by group
#: Group, number, operation, way, and bytes of each rank, or 0 where these may differ. Old ones go where nobody reads.
noted: deque[tuple[str, int, object, str, int]] = deque(maxlen=4 * _KEPT)
found: list[Event] = []  # that ends all collectives


class Calls:
    """The part of a board that compares them."""

    def __init__(self, rank: int) -> None:
        for each in (numbers, noted, found):  # of other process groups, or of all ranks alike
            each.clear()
        self._rank = rank
        self._notes: dict[str, deque[Note]] = {}  # by group
        self._next: dict[str, int] = {}  # the rank to compare with
        self._left_out: set[str] = set()  # groups that were looked into, or whose notes were lost

    def latest(self) -> dict[str, tuple[int, int]]:
        """Take the notes in; return the number and the checksum of the latest of each group."""
        while noted:
            name, number, operation, way, num_bytes = noted.popleft()
            notes = self._notes.setdefault(name, deque([Note(0, "", "", 0)], _KEPT))
            if number != notes[-1].number + 1:
                self._left_out.add(name)
            operation, how = getattr(operation, "__name__", "").strip("_"), f"{way} of {num_bytes or 'some'} bytes"
            notes.append(Note(number, operation, how, zlib.crc32(f"{operation} {how}".encode(), notes[-1].checksum)))
        return {name: (notes[-1].number, notes[-1].checksum) for name, notes in self._notes.items()}

    def look(self, posts: Postings) -> Event | None:
        """Return the event that asks the next rank of a group to compare notes, if checksums differ; else None."""
        if self._notes.keys() - self._next:
            for group in process_groups():
                ranks = dist.get_process_group_ranks(group)
                self._next[group.group_name] = ranks[(group.rank() + 1) % len(ranks)]
        names = [name for name in self._notes if name in self._next and name not in self._left_out]
        theirs = {rank: posts.find(f"beat/{rank}") or {} for rank in {self._next[name] for name in names}}
        for name in names:
            number, checksum = theirs[self._next[name]].get("calls", {}).get(name, (-1, 0))
            notes = self._notes[name]
            if notes[0].number <= number <= notes[-1].number and notes[number - notes[0].number].checksum != checksum:
                self._left_out.add(name)
                posts.post(f"calls/{self._rank}", [*notes])
                return Event(kind="differ", rank=self._rank, text=name, started={name: self._next[name]})
        return None

    def difference(self, posts: Postings, event: Event) -> Event | None:
        """Look into the notes of the rank that asks this one to; return the event of the first that differ."""
        (name, rank), *_ = event.started.items()
        if rank != self._rank or name not in self._notes:
            return None
        self.latest()
        theirs = {number: Note(number, *values) for number, *values in posts.read(f"calls/{event.rank}")}
        before = ""
        for own in self._notes[name]:
            other = theirs.get(own.number)
            # compiled code does not tell the operation
            if other and (own.how != other.how or "" != own.operation != other.operation != ""):
                places = {event.rank: other, rank: own}
                said = ", ".join(f"rank {r} in {n.operation or 'no operation'} ({n.how})" for r, n in places.items())
                text = f"ranks have called different operations, and mixed their values: {said}; it was exchange "
                text += f"{own.number} of their group, after {before or 'no operation'}"
                return Event(kind="stuck", rank=self._rank, text=text)
            before = own.operation
        return None

"""Bounded cache of values by key, the only one of the package."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, Literal, TypeVar

_T = TypeVar("_T")

#: One lock for all caches, and for counts in their values: held for a few operations, never while a value is made. A
#: fork waits for it: no child finds it held, or a cache half changed, by a thread that the child does not have. A
#: finalizer may come in between.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Cache(Generic[_T]):
    """Bounded, thread-safe and fork-safe map from keys to values other than None; pickles empty.

    ``max_size``: how much is kept: bytes, where values are put with their bytes; else so many values.
    ``evict``: the value to drop when there is no more room: the ``"oldest"``; the one whose last use is longest ago
    (``"lru"``); or ``"none"``: the first values stay, and no more is kept. An epoch asks for each sample once: of more
    than there is room for, the least recently used would always be the one asked for next.
    """

    def __init__(self, max_size: int, evict: Literal["oldest", "lru", "none"] = "oldest") -> None:
        self.max_size, self.evict = max_size, evict
        self.size = 0
        self._entries: OrderedDict[Hashable, _T] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}  # only sizes other than 1
        self._demoted: dict[Hashable, None] = {}
        self._making: dict[tuple[int, Hashable], Future[_T]] = {}
        if evict != "lru":  # every operation on a ShardTensor does a lookup, which must cost no more than a dict's
            self.get = self._entries.get  # type: ignore[method-assign, assignment]

    def get(self, key: Hashable) -> _T | None:
        """Return a key's value, or None."""
        with lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self._demoted.pop(key, None)
            return self._entries.get(key)

    def put(self, key: Hashable, value: _T, size: int = 1) -> _T:
        """Store a value, replacing the key's earlier one, if there is room; return the value."""
        with lock:
            gone = [self._pop(key)] if key in self._entries else []  # freed after the lock is released
            room = self.max_size - size
            while self.evict != "none" and self.size > room >= 0:
                gone.append(self._pop(next(iter(self._demoted or self._entries))))
            if self.size <= room:
                self._entries[key] = value
                self.size += size
                if size != 1:
                    self._sizes[key] = size
        return value

    def drop(self, key: Hashable) -> None:
        """Remove a key's value, if any."""
        with lock:
            gone = self._pop(key)
        del gone

    def demote(self, key: Hashable) -> None:
        """Evict this entry before others, but after entries demoted earlier: no further use is expected."""
        with lock:
            if key in self._entries:
                self._demoted.setdefault(key)

    def _pop(self, key: Hashable) -> _T | None:
        self._demoted.pop(key, None)
        value = self._entries.pop(key, None)
        if value is not None:
            self.size -= self._sizes.pop(key, 1)
        return value

    def get_or_make(
        self, key: Hashable, make: Callable[[], _T], size: Callable[[_T], int] | None = None, *, once: bool = False
    ) -> _T:
        """Return a key's value; make it if missing.

        ``size``: returns the size of a new value, if it is not 1.
        ``once``: of threads that want the value at the same time, one makes it; the others wait for it, or for its
        error. Without, each makes it, and all get the first one kept.
        """
        value = self.get(key)
        if value is not None:
            return value
        if once:
            return self._make_once(key, make, size)
        return self._keep_first(key, make(), size)

    def _keep_first(self, key: Hashable, value: _T, size: Callable[[_T], int] | None) -> _T:
        nbytes = 1 if size is None else size(value)
        with lock:
            found = self._entries.get(key)
            return self.put(key, value, nbytes) if found is None else found

    def _make_once(self, key: Hashable, make: Callable[[], _T], size: Callable[[_T], int] | None) -> _T:
        slot = os.getpid(), key  # a forked child lacks the parent's threads
        with lock:
            found = self._entries.get(key)
            if found is not None:
                return found
            making = self._making.get(slot)
            if making is None:
                mine: Future[_T] = Future()
                self._making[slot] = mine
        if making is not None:
            return making.result()
        try:
            value = self._keep_first(key, make(), size)
        except BaseException as e:
            del self._making[slot]
            mine.set_exception(e)
            raise
        del self._making[slot]
        mine.set_result(value)
        return value

    def clear(self) -> None:
        """Release all values."""
        with lock:
            gone = list(self._entries.values())
            self._entries.clear()
            self._sizes.clear()
            self._demoted.clear()
            self.size = 0
        del gone

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[object, ...]:
        return Cache, (self.max_size, self.evict)

"""What is kept between reads: up to so many bytes, the least recently used let go first. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by key, of ``max_bytes`` together at most; it pickles empty.

    A value that is wanted by several threads at once is made by one of them; one that is larger than ``max_bytes`` is
    not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._making: dict[Hashable, Future[T]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value of a key; where it is not there, make it. ``size`` says its bytes."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
            making = self._making.get(key)
            if making is None:
                mine = self._making[key] = Future()
        if making is not None:
            return making.result()
        try:
            value = make()
        except BaseException as e:
            with self._lock:
                del self._making[key]
            mine.set_exception(e)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, value, size(value))
        mine.set_result(value)
        return value

    def _keep(self, key: Hashable, value: T, nbytes: int) -> None:
        if nbytes > self.max_bytes:
            return
        while self.nbytes + nbytes > self.max_bytes:
            self.nbytes -= self._entries.popitem(last=False)[1][1]
        self._entries[key] = value, nbytes
        self.nbytes += nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Kept.__init__(self, state["max_bytes"])

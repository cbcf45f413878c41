"""Wakes processes of one node that wait for another: words in shared memory, one for many keys, and Linux's futex.

A word is counted up when something of its keys has changed; who waits sleeps until it has another value, or for a time.
A ring that goes unheard (two at once, or no futex on this system) costs a waiter no more than that time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import time

from scidata.core.own_files import open_own

_WORDS = 1024
_SIZE = 4 * _WORDS
_WAIT, _WAKE = 0, 1
_NUMBERS = {"x86_64": 202, "aarch64": 98}  # of the system call
_PAUSE = 0.0005  # s between two looks where there is none


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Words in a file that all processes map. Thread-safe; not to be pickled."""

    def __init__(self, path: str) -> None:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, _SIZE)
            self._memory = mmap.mmap(fd, _SIZE, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self._words = (ctypes.c_uint32 * _WORDS).from_buffer(self._memory)
        number = _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
        self._call = ctypes.CDLL(None, use_errno=True).syscall if number is not None else None
        self._number = ctypes.c_long(number or 0)

    def heard(self, key: bytes) -> int:
        """Return a key's word; to be asked before one looks whether there is something to wait for."""
        return int(self._words[self._index(key)])

    def ring(self, key: bytes) -> None:
        """Wake all processes that wait for a key."""
        at = self._index(key)
        self._words[at] = (self._words[at] + 1) & 0xFFFFFFFF
        if self._call is not None:
            self._call(self._number, self._address(at), _WAKE, 1 << 30, None, None, 0)

    def wait(self, key: bytes, heard: int, seconds: float) -> None:
        """Sleep until a key's word is another than the one heard, ``seconds`` at the most; at times less."""
        at = self._index(key)
        if self._call is None:
            if self._words[at] == heard:
                time.sleep(min(_PAUSE, seconds))
            return
        whole, part = divmod(max(0.0, seconds), 1.0)
        timeout = _Timespec(int(whole), int(part * 1e9))
        with contextlib.suppress(OSError):
            self._call(self._number, self._address(at), _WAIT, ctypes.c_uint32(heard), ctypes.byref(timeout), None, 0)

    def _index(self, key: bytes) -> int:
        return int(struct.unpack_from("<I", key)[0]) % _WORDS

    def _address(self, at: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self._words) + 4 * at)

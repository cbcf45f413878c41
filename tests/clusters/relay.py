"""A cable between two hosts that is slow, or loses packets: ``python relay.py SPACE SPACE SECONDS SHARE``.

It makes an interface ``slow0`` in both network namespaces, and hands frames on after so many seconds, but for a share
that is lost. ``tc netem`` does as much, but kernels of small machines leave it out.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_CLONE_NEWNET, _TUNSETIFF, _TAP, _NO_HEADER = 0x40000000, 0x400454CA, 0x2, 0x1000


def interface(space: str) -> int:
    """Make ``slow0`` in a namespace; it is there as long as the returned file is open."""
    with open(f"/run/netns/{space}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, _TUNSETIFF, struct.pack("16sH22x", b"slow0", _TAP | _NO_HEADER))
    return opened


def main() -> None:
    """Hand frames on until this process is ended."""
    first, second = (interface(space) for space in sys.argv[1:3])
    delay, share, other = float(sys.argv[3]), float(sys.argv[4]), {first: second, second: first}
    chance, waiting, count = random.Random(0), [], 0
    print("ready", flush=True)
    while True:
        wait = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for file in select.select([first, second], [], [], wait)[0]:
            frame = os.read(file, 65536)
            if chance.random() >= share:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, other[file], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, file, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the interface is not up yet
                os.write(file, frame)


if __name__ == "__main__":
    main()

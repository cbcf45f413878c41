"""Which local paths lead over a network all the same."""

from __future__ import annotations

import contextlib
import functools
import os
import re

from scidata.core.urls import is_url

#: Types of file systems that other machines serve; ``fuse`` of any kind mostly does.
_ON_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|lustre|gpfs|beegfs|ceph|9p|afs|orangefs|pvfs2|panfs|wekafs|glusterfs|fuse(\..*|blk)?"
)


def is_on_network(path: str) -> bool:
    """Return True if a file or folder lies on a network file system, as far as the kernel tells."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    return _ON_NETWORK.fullmatch(_type_of(f"{os.major(device)}:{os.minor(device)}")) is not None


def is_local(path: str) -> bool:
    """Return True if a path is of this machine: no URL, and on no network file system, as far as the kernel tells."""
    return not is_url(path) and not is_on_network(path)


@functools.lru_cache(256)
def _type_of(device: str) -> str:
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        return type_in(mounts.read(), device)
    return ""


def type_in(mounts: str, device: str) -> str:
    """Return the type of a device's file system as ``mountinfo`` has it: see proc(5)."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [device]:
            return after.split()[0]
    return ""

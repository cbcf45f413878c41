"""Files that outlive a crash: whole or not there, and on disk before anything relies on them."""

from __future__ import annotations

import errno
import os
import shutil
import time

_TRIES = 100  # of removing a folder that threads still write to, 20 ms apart


def write_text(path: str, text: str) -> None:
    """Write a small file whole or not at all, and durably."""
    temporary = os.path.join(os.path.dirname(path), f".tmp-{os.path.basename(path)}")
    try:
        remove(temporary)  # of a run that was killed
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Force everything below a folder to disk, files before the folders that name them."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(os.path.join(root, name))
        sync(root)


def sync(path: str) -> None:
    """Force one file or folder to disk."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(*paths: str) -> None:
    """Remove files and folders that are there."""
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            _remove_folder(path)
        elif os.path.lexists(path):
            os.unlink(path)


def _remove_folder(path: str) -> None:
    """Remove a folder, to which the threads of a write that has failed may add, or take from it, for a moment yet."""
    for _ in range(_TRIES):
        try:
            shutil.rmtree(path)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not os.path.lexists(path):
            return
        time.sleep(0.02)
    shutil.rmtree(path)

"""Folders that outlive a crash, and folders that are removed while threads still write to them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time

from scidata.core.own_files import sync

_TRIES = 100  # of removing a folder that threads still write to, 20 ms apart


def sync_folder(folder: str) -> None:
    """Force everything below a folder to disk, files before the folders that name them."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(os.path.join(root, name))
        sync(root)


def remove(*paths: str) -> None:
    """Remove files and folders that are there."""
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            _remove_folder(path)
        elif os.path.lexists(path):
            os.unlink(path)


def rename_over(path: str, place: str) -> None:
    """Give a file or folder the place of another one, if there is one, which is removed."""
    old = place + ".replaced"
    remove(old)
    if os.path.isdir(path) or os.path.isdir(place):  # a rename replaces files alone
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, old)
    os.rename(path, place)
    remove(old)


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

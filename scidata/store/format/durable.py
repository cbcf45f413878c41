"""Files that outlive a crash: whole or not there, and on disk before anything relies on them."""

from __future__ import annotations

import os
import shutil


def write_text(path: str, text: str) -> None:
    """Write a small file whole or not at all, and durably."""
    temporary = os.path.join(os.path.dirname(path), f".tmp-{os.path.basename(path)}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
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
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

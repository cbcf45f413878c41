"""Open scidata's own files, for output or internal state.

Whoever may write to a folder may put a link there, or a FIFO, under a name that scidata is about to open. Nothing here
follows the one, so that no other file of the user is written to, or waits for the other end of the second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid

from scidata.errors import ConfigError, RefusedError


def open_own(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor.

    ``flags``: as for ``os.open``. ``O_TRUNC`` empties the file once it is known to be one.
    Raises RefusedError: it is a link, has other names, so that a file somewhere else would be written to, too, or is no
    file.
    Raises OSError: as ``os.open``.
    """
    safe = (flags & ~os.O_TRUNC) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, safe, mode)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise
        raise _refused(path, "a link" if os.path.islink(path) else "no file") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "no file")
        if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
            raise _refused(path, "a file that has other names, too")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_still(descriptor: int, path: str) -> bool:
    """Say whether a path names an open file, not another one that took its name since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _refused(path: str, what: str) -> RefusedError:
    return RefusedError(f"{path}: is {what}, where scidata has a file of its own; remove it, or choose another folder")


def make_folder(path: str) -> None:
    """Create a folder, and those above it, if missing; raises ConfigError if one of them is a file."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        above = path
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        raise ConfigError(f"{path}: {above!r} is a file, and must be a folder; choose another path") from None


def make_own_folder(path: str) -> None:
    """Create one of scidata's folders if missing."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        kind = "a link" if os.path.islink(path) else "no folder"
        raise RefusedError(f"{path}: is {kind}, where scidata has a folder of its own; remove it, or choose another")


def write_whole(path: str, data: bytes, *, durable: bool = False) -> None:
    """Write a file atomically through a temporary file beside it; a link is replaced, not followed.

    ``durable``: have the content on disk before it gets its name, and the name before this returns.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise RefusedError(f"{path}: is no file, and would be replaced by one; name another")
    beside = os.path.join(os.path.dirname(path), f".tmp-{os.path.basename(path)}.{uuid.uuid4().hex}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
        if durable:
            sync(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def sync(path: str) -> None:
    """Flush one file or folder to disk."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

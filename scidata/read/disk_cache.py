"""Bounded cache of byte rows by key on local disk, for later epochs, runs and processes.

An entry is a file that is written under another name and renamed, so that nobody ever sees a part of one, and never
changes afterwards. Readers hold no lock: an entry that is evicted meanwhile stays whole for those that have it open.
Errors here only mean that an entry is not there. Entries are not synced to disk: after a loss of power
some may hold garbage, which their checksums tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from crc32c import crc32c

from scidata.core.checks import check_optional_int
from scidata.core.own_files import make_own_folder, open_own
from scidata.core.types import ByteArray
from scidata.core.urls import is_url, public_text
from scidata.errors import ConfigError, RefusedError

_log = logging.getLogger("scidata")

KEY_NBYTES = 32
_FOLDER = "scidata-parts"  # a folder below the user's, which may hold other files
_MAGIC, _FORMAT = b"sciparts", 1
_HEAD = struct.Struct("<8sIIQQ32s")  # magic, format, header bytes, rows, bytes of a row, key
_CRC = struct.Struct("<I")
_ALIGNED = 64
_BLOCK = 4096  # files take whole ones
_FAN = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}\.rows")
_NEW = re.compile(r"\.new-\w{8}\.rows")
_TOTAL = struct.Struct("<QI")  # bytes of all entries, and a checksum of that
_ABANDONED = 600.0  # seconds: a write takes milliseconds, so that an older one's process was killed
_TOUCHED = 60.0  # seconds during which another use is not recorded
_QUIET = 60.0  # seconds without write attempts after a failure
_PATIENCE = 5.0  # seconds to wait for other processes that count or evict
_AFTER_EVICTION = 0.95  # share of the bytes: evicting lists all entries, and is not done for each new one


class _DamagedError(Exception):
    """A damaged entry; the message describes the damage."""


class DiskCache:
    """Entries of equal-sized rows in a folder, shared by threads, processes and jobs. Pickles.

    Each entry has a checksum of its header and one of each row: every read is checked (crc32c takes 0.06 ms a MiB,
    measured, half as long as a copy from the page cache). An entry that is damaged is deleted and counts as not
    there. Where the disk is full, or the folder cannot be written, that is said once and nothing is kept for a while.

    ``directory``: made at the first entry. Other files in it are never touched.
    ``max_bytes``: of all entries, of any writer; the ones whose last use is longest ago go first. Default half of the
    free space on the disk, entries included.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self.directory = os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self._root = os.path.join(self.directory, _FOLDER)
        self._max_bytes = max_bytes
        self._limit = max_bytes  # of this process, once known
        self._quiet_until = 0.0
        self._warned: set[str] = set()
        self.failure = ""  # the reason why the last write failed

    def __reduce__(self) -> tuple[object, ...]:
        return DiskCache, (self.directory, self._max_bytes)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return os.path.join(self._root, name[:2], f"{name[2:]}.rows")

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, key: bytes, shape: tuple[int, int], wanted: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill buffers with an entry's rows; return True if the entry is there, whole, and all rows are right.

        ``key``: ``KEY_NBYTES`` bytes that stand for the content, and nothing else ever.
        ``shape``: rows of the entry, and bytes of a row.
        ``wanted``: a row each, and the writable bytes which that row goes to, and those after it if there are more.
        """
        path = self._path(key)
        try:
            descriptor = open_own(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except RefusedError as e:
            self._damaged(path, e)
            return False
        except OSError as e:
            self._warn("cannot be read", f"{path}: cannot be read ({e.strerror}); its data come from the source")
            return False
        try:
            _read_rows(descriptor, key, shape, wanted)
        except (_DamagedError, OSError) as e:
            self._damaged(path, f"{path}: {e}")
            return False
        finally:
            os.close(descriptor)
        return True

    def _damaged(self, path: str, why: object) -> None:
        self._warn("damaged", f"{why}; it is dropped, and its data come from the source again")
        with contextlib.suppress(OSError):
            os.unlink(path)

    def drop(self, key: bytes) -> None:
        """Delete an entry, if any: its content is wrong."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: bytes, rows: ByteArray) -> bool:
        """Store rows, ``(num_rows, bytes of a row)`` uint8, C-contiguous; return True if they are in the cache now."""
        path, nbytes = self._path(key), self.entry_nbytes(*rows.shape)
        if os.path.lexists(path):
            return True
        if time.monotonic() < self._quiet_until:
            return False
        try:
            return self._write(path, nbytes, [_header(key, rows), rows.reshape(-1).data])
        except OSError as e:
            self._quiet_until = time.monotonic() + _QUIET
            self.failure = f"{self.directory}: cannot be written ({e})"
            self._warn("cannot be written", f"{self.failure}; nothing more is kept there for now")
            return False

    def _write(self, path: str, nbytes: int, parts: Sequence[bytes | memoryview]) -> bool:
        folder = os.path.dirname(path)
        for own in (self._root, folder):
            make_own_folder(own)
        descriptor, new = tempfile.mkstemp(prefix=".new-", suffix=".rows", dir=folder)
        reserved = written = False
        try:
            reserved = self._reserve(descriptor, nbytes)
            if reserved:
                for part in parts:
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[os.write(descriptor, view) :]
                os.rename(new, path)
                written = True
            return written
        finally:
            os.close(descriptor)
            if not written:
                with contextlib.suppress(OSError):
                    os.unlink(new)
            if reserved and not written:
                with contextlib.suppress(OSError), self._counted() as (total, keep):
                    keep(max(0, total - nbytes))

    def _reserve(self, descriptor: int, nbytes: int) -> bool:
        """Count a new file and make room for it; False if it is too large."""
        with self._counted() as (total, keep):
            limit, held = self._find_limit(total), total
            if nbytes > limit:
                return False
            if held + nbytes > limit:
                held = self._evict(int(_AFTER_EVICTION * limit) - nbytes)
            if held + nbytes > limit:
                raise OSError(errno.ENOSPC, "older entries cannot be deleted")
            os.truncate(descriptor, nbytes)  # from now on, counts of the files include this one
            keep(held + nbytes)
        return True

    def _find_limit(self, total: int) -> int:
        if self._limit is None:
            space = os.statvfs(self._root)
            self._limit = (space.f_bavail * space.f_frsize + total) // 2
        return self._limit

    @contextlib.contextmanager
    def _counted(self) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Lock the total; yield the bytes of all entries and a function that stores a new total."""
        descriptor = open_own(os.path.join(self._root, "total"), os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor)
            content = os.pread(descriptor, _TOTAL.size, 0)
            total, checksum = _TOTAL.unpack(content) if len(content) == _TOTAL.size else (0, None)
            if checksum != crc32c(content[:8]):  # a new folder, or a damaged file
                total = sum(nbytes for _, nbytes, _ in self._entries())

            def keep(found: int) -> None:
                number = found.to_bytes(8, "little")
                os.pwrite(descriptor, number + _CRC.pack(crc32c(number)), 0)

            yield total, keep
        finally:
            os.close(descriptor)

    def _evict(self, target: int) -> int:
        """Delete least recently used entries until the rest fits into ``target`` bytes; return its bytes."""
        entries = sorted(self._entries())
        total = sum(nbytes for _, nbytes, _ in entries)
        for _, nbytes, path in entries:
            if total <= target:
                break
            if _NEW.fullmatch(os.path.basename(path)):  # is being written
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= nbytes
        return total

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield last use, size and path of each entry, also of those being written; delete abandoned ones."""
        for folder in _listed(self._root):
            if not (_FAN.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for entry in _listed(folder.path):
                is_new = _NEW.fullmatch(entry.name)
                if not (is_new or _ENTRY.fullmatch(entry.name)):
                    continue
                with contextlib.suppress(OSError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if is_new and time.time() - status.st_mtime > _ABANDONED:
                        os.unlink(entry.path)
                        continue
                    yield status.st_mtime, _on_disk(status.st_size), entry.path

    @property
    def max_bytes(self) -> int:
        """Limit for the bytes of all entries; determined on first use if none was given."""
        if self._limit is None:
            make_own_folder(self._root)
            return self._find_limit(self.num_bytes())
        return self._limit

    def num_bytes(self) -> int:
        """Return the bytes of all entries; stats each one."""
        return sum(nbytes for _, nbytes, _ in self._entries())

    @staticmethod
    def entry_nbytes(num_rows: int, row_nbytes: int) -> int:
        """Return an entry's bytes on disk."""
        return _on_disk(_header_nbytes(num_rows) + num_rows * row_nbytes)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)


def make_cache(cache_dir: object, cache_disk_bytes: object) -> DiskCache:
    """Return the cache of decoded parts in a folder, which may be missing."""
    if not isinstance(cache_dir, str | os.PathLike) or not os.fspath(cache_dir):
        raise ConfigError(f"cache_dir={cache_dir!r}: expected a path of a folder, not {type(cache_dir).__name__}")
    path = os.path.expanduser(os.fspath(cache_dir))
    if is_url(path):
        raise ConfigError(f"cache_dir={public_text(path)}: expected a folder on a local disk, not a URL")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"cache_dir={path}: is a file, not a folder; name another")
    return DiskCache(path, check_optional_int("cache_disk_bytes", cache_disk_bytes, least=1))


def _lock(descriptor: int) -> None:
    """Lock a file; give up if another process, perhaps a stopped one, holds the lock for long."""
    begin = time.monotonic()
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            if time.monotonic() - begin > _PATIENCE:
                raise OSError(errno.ETIMEDOUT, "another process has locked it for long") from e
        time.sleep(0.002)


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _header_nbytes(num_rows: int) -> int:
    return -(-(_HEAD.size + _CRC.size * (num_rows + 1)) // _ALIGNED) * _ALIGNED


def _header(key: bytes, rows: ByteArray) -> bytes:
    """Return the header: key, sizes, a checksum per row, and a checksum of the header itself."""
    nbytes = _header_nbytes(len(rows))
    checksums = b"".join([_CRC.pack(crc32c(row.data)) for row in rows])
    head = _HEAD.pack(_MAGIC, _FORMAT, nbytes, *rows.shape, key) + checksums
    head = head.ljust(nbytes - _CRC.size, b"\0")
    return head + _CRC.pack(crc32c(head))


def _read_rows(descriptor: int, key: bytes, shape: tuple[int, int], wanted: Sequence[tuple[int, memoryview]]) -> None:
    num_rows, row_nbytes = shape
    status, begin = os.fstat(descriptor), _header_nbytes(num_rows)
    if status.st_size != (nbytes := DiskCache.entry_nbytes(num_rows, row_nbytes)):
        raise _DamagedError(f"has {status.st_size} bytes, not {nbytes}")
    header = bytearray(begin)
    _fill(descriptor, memoryview(header), 0)
    if crc32c(memoryview(header)[: -_CRC.size]) != _CRC.unpack_from(header, begin - _CRC.size)[0]:
        raise _DamagedError("the checksum of its header is wrong")
    if _HEAD.unpack_from(header) != (_MAGIC, _FORMAT, begin, num_rows, row_nbytes, key):
        raise _DamagedError("it is another entry")
    if time.time() - status.st_mtime > _TOUCHED:
        with contextlib.suppress(OSError):
            os.utime(descriptor)
    for first, view in wanted:
        _fill(descriptor, view, begin + first * row_nbytes)
        for k in range(len(view) // row_nbytes):
            found = crc32c(view[k * row_nbytes : (k + 1) * row_nbytes])  # lets other threads run meanwhile
            if found != _CRC.unpack_from(header, _HEAD.size + _CRC.size * (first + k))[0]:
                raise _DamagedError(f"the checksum of its row {first + k} is wrong")


def _fill(descriptor: int, view: memoryview, offset: int) -> None:
    """Read until a buffer is full: one call returns at most 2 GiB."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _DamagedError(f"it ends at byte {offset}")
        view, offset = view[count:], offset + count

"""Blocks of a store's files that came over a network, kept on local disk: for other epochs, runs, ranks and jobs.

Blocks begin at multiples of their size, whatever was asked for: so any number of ranks, any halo and any draw of rows
finds those that another one has left. A block's key is a digest of the store's address, of its manifest, which has
digests of all that is in the store, and of file and place: a store that is written again has other keys. Only the
checksums of chunks tell whether a file is the one in the manifest: where these are wrong, :meth:`KeptFiles.doubt` has
the store itself asked again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ByteArray
from scidata.core.urls import Url, absolute, local_path
from scidata.read.disk_cache import DiskCache
from scidata.sources.access.answers import Info
from scidata.sources.access.files import files
from scidata.sources.access.filesystems import current
from scidata.sources.access.kept_urls import Came, KeptUrl, RequestOptions
from scidata.sources.access.mounts import is_on_network
from scidata.sources.access.remote import start
from scidata.sources.zarr.tree import LocalTree
from scidata.store.format.blocks import ROW, File, Use, blocks_in, folder_of

_INLINE = 1 << 20  # ranges up to this are looked for by the thread that asks: waking another one takes longer
_MAX_SIZES = 1 << 17  # of files, some 0.2 kB each
_VALUES = b"scidata store, blocks of files, 1"  # to be raised when keys or blocks change their meaning


class KeptFiles:
    """Answers requests for a store's files from disk, and keeps all that it fetches. Thread-safe; pickles.

    - ``path``: of the store: a URL, or a folder of a network file system.
    - ``use``: counts entries that are needed from now on; None, as at first, counts nothing.
    """

    def __init__(self, path: str, manifest: bytes, disk: DiskCache) -> None:
        self.disk = disk
        self._path, self._manifest = path, manifest
        self._folder: _Folder | None
        local = local_path(path)
        if local is None:
            assert isinstance(path, Url)
            self._plain, self._folder = path, None
            name = str(path)  # without user and signature, which differ between jobs
        else:
            name = absolute(local)
            self._plain, self._folder = Url(f"file://{name}", {}), _Folder(name)
        self._digest = hashlib.sha256(b"\n".join([_VALUES, os.fsencode(name), manifest])).digest()
        self._sizes: Cache[int] = Cache(_MAX_SIZES, "lru")
        self._doubted: set[str] = set()
        self.use: Use | None = None
        self._claims: dict[tuple[int, bytes], Future[None]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return KeptFiles, (self._path, self._manifest, self.disk)

    def url(self) -> KeptUrl:
        """Return the store's URL, by which its files are read through here."""
        return KeptUrl(self._plain, self)

    # -- doubts ------------------------------------------------------------------------------------------------------

    def doubt(self, folder: str) -> None:
        """Ask the store itself for all below a folder, and drop its blocks, which may be damaged, until trusted."""
        self._doubted.add(folder)
        self._sizes.clear()

    def trust(self, folder: str) -> None:
        """Keep and read blocks of files below a folder again."""
        self._doubted.discard(folder)

    def _is_doubted(self, key: str) -> bool:
        return bool(self._doubted) and folder_of(key) in self._doubted

    # -- requests ----------------------------------------------------------------------------------------------------

    def start(self, url: KeptUrl, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        """Begin a request: answered at once where all of it is kept, else by a thread that asks the store."""
        if self._folder is None:
            ask = functools.partial(start, url.plain, wanted=wanted)
        else:
            ask = functools.partial(self._folder.start, url.key, wanted=wanted)
        own = {"info": _Info, "document": _Document, "range": _Range}.get(method)
        if own is None:
            return ask(method, options)
        job = own(self, url.key, options, ask)
        return current().pool("kept").submit(job.run) if (found := job.held()) is None else _done(found)

    def entries(self, key: str, offset: int, nbytes: int) -> dict[bytes, tuple[int, int]]:
        """Return the entries of a range of a file, digests and shapes, there or not; none where its size is new."""
        file = self.file(key)
        if file is None:
            return {}
        return {self._key(file.name, i): file.shape(i) for i in blocks_in(offset, min(offset + nbytes, file.size))}

    def count(self, nbytes: int) -> None:
        """Count bytes that were fetched."""
        if self.use is not None:
            self.use.fetched(nbytes)

    @contextlib.contextmanager
    def claimed(self, file: File, blocks: Sequence[int]) -> Iterator[tuple[list[int], dict[int, Future[None]]]]:
        """Claim blocks to fetch; give these, and futures of those that other threads fetch, to wait for afterwards."""
        done: Future[None] = Future()
        slots = {i: (os.getpid(), self._key(file.name, i)) for i in blocks}  # a forked child's threads are others
        found = {i: self._claims.setdefault(slot, done) for i, slot in slots.items()}
        mine = [i for i in blocks if found[i] is done]
        try:
            yield mine, {i: each for i, each in found.items() if each is not done}
        finally:
            for i in mine:
                del self._claims[slots[i]]
            done.set_result(None)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _key(self, name: bytes, place: int | str) -> bytes:
        return hashlib.sha256(b"%b\n%b\n%a" % (self._digest, name, place)).digest()

    def file(self, key: str) -> File | None:
        """Return a file whose size is kept; None if it has to be asked for."""
        name = b"file " + os.fsencode(key)
        size = self._sizes.get(name)
        if size is None:
            row = np.empty(8, np.uint8)
            if self._is_doubted(key) or not self._read(key, self._key(name, "small"), (1, 8), [(0, row.data)]):
                return None
            size = self._sizes.put(name, int(row.view("<i8")[0]))
        return File(name, size)

    def note(self, key: str, size: int) -> File:
        """Keep the size of a file."""
        name = b"file " + os.fsencode(key)
        self._sizes.put(name, size)
        self._put(key, self._key(name, "small"), np.array([[size]], "<i8").view(np.uint8))
        return File(name, size)

    def _put(self, key: str, digest: bytes, rows: ByteArray) -> None:
        if self._is_doubted(key):
            self.disk.drop(digest)
        elif self.disk.put(digest, rows) and self.use is not None:
            self.use.add(key, {digest: self.disk.entry_nbytes(*rows.shape)}, is_new=True)

    def _read(self, key: str, digest: bytes, shape: tuple[int, int], wanted: Sequence[tuple[int, memoryview]]) -> bool:
        found = self.disk.read(digest, shape, wanted)
        if found and self.use is not None:
            self.use.add(key, {digest: self.disk.entry_nbytes(*shape)})
        return found

    def put(self, key: str, file: File, i: int, data: ByteArray) -> None:
        """Keep a block."""
        self._put(key, self._key(file.name, i), data.reshape(file.shape(i)))

    def fill(self, key: str, file: File, i: int, buffer: ByteArray, begin: int) -> bool:
        """Fill a block's part, whole rows, of a buffer that begins at a byte of a file; return True if it is kept."""
        if self._is_doubted(key):
            return False
        first, end = file.extent(i)
        start = max(first, begin)
        view = buffer[start - begin : min(end, begin + buffer.size) - begin].data
        return self._read(key, self._key(file.name, i), file.shape(i), [((start - first) // ROW, view)])


_Ask: TypeAlias = Callable[[str, RequestOptions], "Future[Any]"]


@dataclass(frozen=True, slots=True)
class _Request:
    kept: KeptFiles
    key: str
    options: RequestOptions
    ask: _Ask

    def held(self) -> Any:
        """Return the answer, if it is kept, and looking for it takes no longer than another thread would."""

    def run(self) -> Any:
        """Return the answer, and keep it."""


class _Info(_Request):
    __slots__ = ()

    def held(self) -> Any:
        file = self.kept.file(self.key)
        return None if file is None else {"name": self.key, "size": file.size, "type": "file"}

    def run(self) -> Any:
        found = self.ask("info", self.options).result()
        if found.get("type") != "directory" and found.get("size") is not None:
            self.kept.note(self.key, int(found["size"]))
        return found


class _Document(_Request):
    __slots__ = ()

    def held(self) -> Any:
        file = self.kept.file(self.key)
        if file is None or file.size > self.options["most"]:
            return None
        buffer = np.empty(file.size, np.uint8)
        whole = all(self.kept.fill(self.key, file, i, buffer, 0) for i in blocks_in(0, file.size))
        return buffer.tobytes() if whole else None

    def run(self) -> Any:
        data = self.ask("document", self.options).result()
        self.kept.count(len(data))
        file, values = self.kept.note(self.key, len(data)), np.frombuffer(data, np.uint8)
        for i in blocks_in(0, file.size):
            self.kept.put(self.key, file, i, values[slice(*file.extent(i))])
        return data


class _Range(_Request):
    __slots__ = ()

    @property
    def place(self) -> tuple[int, int]:
        return self.options["offset"], self.options["offset"] + self.options["nbytes"]

    def held(self) -> Any:
        offset, end = self.place
        file = self.kept.file(self.key)
        if file is None or not offset < end <= file.size or end - offset > _INLINE:
            return None
        begin, stop = file.widened(offset, end)
        buffer = np.empty(stop - begin, np.uint8)
        if not all(self.kept.fill(self.key, file, i, buffer, begin) for i in blocks_in(offset, end)):
            return None
        return Came(buffer[offset - begin : end - begin].data, 0, 0)

    def run(self) -> Any:
        offset, end = self.place
        file = self.kept.file(self.key)
        if file is None and (size := self.ask("info", {}).result().get("size")) is not None:
            file = self.kept.note(self.key, int(size))
        if file is None or not offset < end <= file.size:  # the server says why
            data = self.ask("range", self.options).result()
            return Came(memoryview(data), len(data), 1)
        begin, stop = file.widened(offset, end)
        buffer = np.empty(stop - begin, np.uint8)
        missing = [i for i in blocks_in(offset, end) if not self.kept.fill(self.key, file, i, buffer, begin)]
        num_fetched = num_requests = 0
        while missing:
            with self.kept.claimed(file, missing) as (mine, others):
                for first, data in self._fetch(file, list(_runs(mine))):
                    num_fetched, num_requests = num_fetched + data.size, num_requests + 1
                    low, high = max(first, begin), min(first + data.size, stop)
                    buffer[low - begin : high - begin] = data[low - first : high - first]
            for each in others.values():  # which another thread fetches
                each.result()
            missing = [i for i in others if not self.kept.fill(self.key, file, i, buffer, begin)]
        return Came(buffer[offset - begin : end - begin].data, num_fetched, num_requests)

    def _fetch(self, file: File, runs: Sequence[range]) -> Iterator[tuple[int, ByteArray]]:
        places = [(file.extent(run[0])[0], file.extent(run[-1])[1]) for run in runs]
        asked = [self.ask("range", {"offset": begin, "nbytes": end - begin}) for begin, end in places]
        try:
            for run, (begin, _), future in zip(runs, places, asked, strict=True):
                data = np.frombuffer(future.result(), np.uint8)
                self.kept.count(data.size)
                for i in run:
                    first, last = file.extent(i)
                    self.kept.put(self.key, file, i, data[first - begin : last - begin])
                yield begin, data
        finally:
            for future in asked:
                future.cancel()


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    first = 0
    for k in range(1, len(blocks) + 1):
        if k == len(blocks) or blocks[k] != blocks[k - 1] + 1:
            yield range(blocks[first], blocks[k - 1] + 1)
            first = k


def _done(found: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(found)
    return future


class _Folder:
    """A folder of a network file system. Links that lead out of it are refused; whoever calls waits."""

    def __init__(self, root: str) -> None:
        self._tree = LocalTree(root, allow_external=False)

    def start(self, key: str, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(method, key, options))
        except Exception as e:
            future.set_exception(e)
        return future

    def _answer(self, method: str, key: str, options: RequestOptions) -> Info | bytes | bytearray:
        path = self._tree.location(key)
        document = self._tree.get([key]).get(key) if method == "document" else None
        size = -1 if method == "document" else int(self._tree.sizes([key])[0])
        if document is None and size == -1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if document is not None:
            return document
        if method == "info":
            return Info(size=size, type="file")
        return files().read(path, options["offset"], options["nbytes"])


def is_worth_it(path: str) -> bool:
    """Return True if reading a store takes a network: those on a local disk are read where they are."""
    local = local_path(path)
    return local is None or is_on_network(local)

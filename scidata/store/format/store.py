"""The partitioned store: open it, and verify every byte and invariant of it. Writing is ``write.py``'s.

A folder with ``manifest.json``, which is written last, and one Zarr v3 group per sample; see ``write.py`` for
the arrays. Rows are in curve order, so that one store serves any number of ranks.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from scidata.core.apart import check_apart
from scidata.core.cache import Cache
from scidata.core.own_files import write_whole
from scidata.core.types import AnyArray, ArrayLayout
from scidata.core.urls import Url, is_url, local_path, url_of
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    RefusedError,
    SciDataError,
    SourceChangedError,
    UnsupportedFormatError,
)
from scidata.plan.array import ArrayPlan
from scidata.read import Job
from scidata.read.disk_cache import DiskCache
from scidata.sources.access.files import Version, files, version_at
from scidata.sources.access.first_reads import forget_head, read_head
from scidata.sources.zarr.source import ZarrSource
from scidata.store.format.checksums import KEPT_BYTES, CheckedSource, Checksums
from scidata.store.format.documents import ATTRIBUTE, check_files, check_layouts
from scidata.store.format.durable import remove
from scidata.store.format.kept import KeptFiles, is_worth_it
from scidata.store.format.loading import gather, load_manifest, load_sample
from scidata.store.format.manifest import SampleInfo, plain, sealed
from scidata.store.format.places import FOLDER, MANIFEST, TABLE, check_inside, folder_of, is_store, join
from scidata.store.format.samples import ReadTable, Samples
from scidata.store.format.sums import MANIFEST_VERSION, Manifest, document, make_manifest, old_document
from scidata.store.format.verify import Fault, FaultFound, check_sample, read_rows

#: Of the manifest; of versions before 4 a sample takes some KB in it, so that this is room for a hundred thousand.
MAX_MANIFEST_BYTES = 512 << 20
#: Of the table of samples that lies beside it; a sample takes some hundred bytes.
MAX_TABLE_BYTES = 32 << 30
_INLINE_BYTES = 256 << 10  # of a table that the manifest itself holds
_MANY = 1024  # samples, from which on metadata servers are not asked for each
_MADE_SAMPLES = 8192  # whose descriptions and sources are kept, some 17 kB each


class Store:
    """A finished store. Its samples open at first use; it pickles as its path.

    - ``disk``: cache of blocks that come over a network; None keeps none. Stores on a local disk are read where they
      are.
    - ``kept``: cached blocks of the store's files; None if nothing is kept.
    """

    def __init__(self, path: str | os.PathLike[str], disk: DiskCache | None = None) -> None:
        self.path = url_of(os.path.expanduser(os.fspath(path)))
        if disk is not None:
            check_apart(disk.directory, [self.path], "the cache", may_hold=True)
        files().forget(self.path)  # of a store that was here before
        self._version = _manifest_version(self.path)
        self.manifest, self._digest = _read_manifest(self.path)
        self._disk = disk
        self.kept = None if disk is None or not is_worth_it(self.path) else KeptFiles(self.path, self._digest, disk)
        self._samples: Cache[SampleInfo] = Cache(_MADE_SAMPLES)
        self._sources: Cache[CheckedSource] = Cache(_MADE_SAMPLES)
        self._checksums: Cache[Checksums] = Cache(KEPT_BYTES, "lru")

    def __reduce__(self) -> tuple[object, ...]:
        return _opened_again, (self.path, self._disk, self._digest)

    def __len__(self) -> int:
        return len(self.manifest.samples)

    def __repr__(self) -> str:
        return f"Store({self.path!r}, {self.manifest.kind}, {len(self)} samples)"

    def sample(self, index: int) -> SampleInfo:
        """Return the description of a sample. Raises ConfigError: the store has no such sample."""
        found = self._samples.get(index)
        if found is not None:
            return found
        if not 0 <= index < len(self):
            raise ConfigError(f"{self.path}: there is no sample {index}; there are {len(self)}, from 0 on")
        return self._samples.put(index, self.manifest.samples[index])

    def source(self, index: int) -> ZarrSource:
        """Return the Zarr source of a sample, kept until many others are asked for; RefusedError: an outward link."""
        info = self.sample(index)
        source = self._sources.get(index)
        if source is None:
            if self._version != _manifest_version(self.path):
                self.check_unchanged()
            names = list(info.arrays)  # listing folders takes time, and round trips
            root = self.path if self.kept is None else self.kept.url()
            make = partial(_sample_source, self.path, info, self._checksums, names, root=root)
            source = self._sources.get_or_make(index, make)
        return source

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if the manifest is another one, or gone: a store may have been replaced."""
        try:
            found = hashlib.sha256(_manifest_bytes(self.path)).digest()
        except FileNotFoundError:
            found = b""
        except OSError:
            return  # the error that had us look says more
        if found != self._digest:
            raise _replaced(self.path, "replaced by another one" if found else "removed")

    @property
    def is_remote(self) -> bool:
        """Whether reading it takes requests, which are best made side by side."""
        return self.kept is not None or isinstance(self.path, Url)

    def doubt(self, index: int) -> bool:
        """Read a sample from the store itself from now on, after something was wrong with it; false if that was so."""
        if self.kept is None:
            return False
        self.kept.doubt(self.sample(index).folder)
        self._sources.drop(index)
        self._checksums.drop(index)
        return True

    def trust(self, index: int) -> None:
        """Keep the blocks of a sample again."""
        if self.kept is not None:
            self.kept.trust(self.sample(index).folder)

    def array(self, index: int, path: str) -> ArrayLayout:
        """Return the layout of a sample's array, ``"node/pos"`` for one, for planning and reading.

        Raises UnknownNameError: the sample has no such array; the message names the near matches; CorruptDataError: the
        array's metadata are not those in the manifest.
        """
        layout = self.source(index).arrays[path]
        info = self.sample(index).arrays.get(path)
        if info is None or info.shape != layout.shape or np.dtype(info.dtype) != layout.dtype:
            expected = "none" if info is None else f"{info.dtype} {info.shape}"
            raise CorruptDataError(
                f"{self.path}: sample {index}: array {path!r} is {layout.dtype.str} {layout.shape}, but the manifest "
                f"has {expected}; the store is damaged or two were mixed: write it again"
            )
        return layout

    def job(self, index: int, plan: ArrayPlan) -> Job:
        """Return a plan of a sample's array as work that can be done any number of times."""
        return Job(plan, self.source(index))

    def read(self, index: int, path: str, start: int | None = None, stop: int | None = None) -> AnyArray:
        """Read rows ``[start, stop)`` of an array's first dimension; all of them by default."""
        return read_rows(self.source(index), self.array(index, path), start, stop)

    def close(self) -> None:
        """Close the samples' sources; the next use opens them again."""
        self._sources.clear()
        self._checksums = Cache(KEPT_BYTES, "lru")


def _opened_again(path: str, disk: DiskCache | None, digest: bytes) -> Store:
    store = Store(path, disk)
    if store._digest != digest:
        raise _replaced(path, "replaced by another one")
    return store


def _replaced(path: str, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{path}: the store was {how} while it was in use; open it again, in all processes, once writing has ended"
    )


def _manifest_version(path: str) -> Version | None:
    local = local_path(path)
    try:
        return None if local is None else version_at(os.path.join(local, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _sample_source(
    store: str,
    info: SampleInfo,
    kept: Cache[Checksums],
    names: list[str] | None,
    *,
    root: str | None = None,
    is_parsed: bool = False,
) -> CheckedSource:
    """Return the source of a sample; ``root`` is the path or URL that files are read by, if it is not the store's."""
    check_inside(store, join(store, info.folder))
    where = join(root or store, info.folder)
    return CheckedSource(where, store=store, info=info, kept=kept, names=names, is_parsed=is_parsed)


def open_store(path: str | os.PathLike[str], disk: DiskCache | None = None) -> Store:
    """Open a store that ``scidata partition`` finished.


    Raises UnsupportedFormatError: the folder has no manifest: it is no store, or its writing was interrupted;
    CorruptDataError: the manifest does not match its own digest, or a sample's folder is not there; RefusedError: the
    manifest is larger than ``MAX_MANIFEST_BYTES``, or it or a link leads out of the store.
    """
    store = Store(path, disk)
    if not is_url(store.path):
        _check_samples(store)
    return store


def _check_samples(store: Store) -> None:
    """Raise if a sample is not there, or a link out of the store; of many, one listing shows the folders."""
    folders: set[str] = set()
    if len(store) > _MANY:
        with contextlib.suppress(OSError), os.scandir(store.path) as entries:  # it may be searched and not listed
            folders.update([each.name for each in entries if each.is_dir(follow_symlinks=False)])
    for i, folder in enumerate(map(FOLDER.format, store.manifest.samples.column("index").tolist())):
        if folder in folders:
            continue
        check_inside(store.path, os.path.join(store.path, folder))
        if not os.path.isfile(os.path.join(store.path, folder, "zarr.json")):
            info = store.sample(i)
            raise CorruptDataError(
                f"{store.path}: sample {info.index} ({info.name}) is in the manifest, but {info.folder} is not there; "
                "copy the whole store, or write it again"
            )


def _read_manifest(path: str) -> tuple[Manifest, bytes]:
    """Return the manifest of a store, and a digest of it."""
    where = join(path, MANIFEST)
    if not is_store(path):
        names = os.listdir(path) if not is_url(path) and os.path.isdir(path) else []
        if any(name.startswith((".tmp-sample-", "sample-")) for name in names):
            raise UnsupportedFormatError(
                f"{path}: an unfinished scidata store: it has samples but no {MANIFEST}; run the same `scidata "
                "partition` again with --resume, or --finalize after the last part"
            )
        if not is_url(path) and not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "there is no such store", path)
        raise UnsupportedFormatError(f"{path}: is no scidata store: it has no {MANIFEST}; make one: scidata partition")
    content = _manifest_bytes(path)
    return load_manifest(content, where, lambda nbytes: _table(path, nbytes)), hashlib.sha256(content).digest()


def _table(path: str, nbytes: int) -> ReadTable:
    """Return what reads the table of samples that lies beside a manifest, and has so many bytes."""
    where = join(path, TABLE)
    check_inside(path, where)
    _check_size(where, nbytes, "MAX_TABLE_BYTES", MAX_TABLE_BYTES)

    def read(start: int, stop: int) -> bytes:
        try:
            if not is_url(path) and (size := files().size(where)) != nbytes:
                raise CorruptDataError(f"{where}: has {size} bytes, the manifest has {nbytes}; copy the store again")
            return bytes(files().read(where, start, stop - start))
        except FileNotFoundError as e:
            raise CorruptDataError(f"{where}: is not there, but the manifest has it; copy the whole store") from e

    return read


def _check_size(where: str, size: int, name: str, most: int) -> None:
    if size > most:
        raise RefusedError(
            f"{where}: takes {size} bytes, and no more than {most} are read (scidata.store.format.store.{name}); it is "
            "damaged, or made to fill the memory: copy the store again, or split it"
        )


def _manifest_bytes(path: str) -> bytes:
    where = join(path, MANIFEST)
    check_inside(path, where)
    head, size = read_head(where, 0)
    forget_head(where)  # whoever asks again wants to see whether it has changed
    _check_size(where, size, "MAX_MANIFEST_BYTES", MAX_MANIFEST_BYTES)
    if is_url(path):
        return head + bytes(files().read(where, len(head), size - len(head)))
    with open(where, "rb") as file:  # not through the cache of open files: it may hold that of a store before
        return file.read(min(os.fstat(file.fileno()).st_size, MAX_MANIFEST_BYTES))


def read_sample_info(store: str, index: int) -> SampleInfo:
    """Read the description in a finished sample, also before there is a manifest."""
    folder = join(store, folder_of(index))
    check_inside(store, folder)
    try:
        attributes = ZarrSource(folder, names=() if isinstance(folder, Url) else None).attributes  # lists no folder
    except SciDataError as e:
        raise CorruptDataError(f"{folder}: is no readable sample ({e}); delete it and run again with --resume") from e
    info = load_sample(attributes.get(ATTRIBUTE), folder)
    if info.index != index:
        raise CorruptDataError(f"{folder}: says that it is sample {info.index}; samples were renamed or mixed")
    return info


def write_manifest(store: str, infos: Iterable[SampleInfo]) -> Samples:
    """Sum up finished samples and write the manifest, which makes the folder a store; return the samples."""
    samples = gather(infos, store)
    text, table = _described(make_manifest(samples, store))
    beside = os.path.join(store, TABLE)
    if table is not None:
        write_whole(beside, bytes(table), durable=True)
    write_whole(os.path.join(store, MANIFEST), text.encode(), durable=True)
    if table is None:
        remove(beside)  # of a store that was here before
    files().close()  # those of a store that was here before
    return samples


def _described(manifest: Manifest) -> tuple[str, bytes | memoryview | None]:
    """Return the JSON of a manifest, and the table that lies beside it, unless it is small."""
    table = manifest.samples.table.read(0, manifest.samples.table.nbytes)
    is_small = len(table) <= _INLINE_BYTES
    samples = {**manifest.samples.said, "table": base64.b64encode(table).decode() if is_small else None}
    return document(manifest, samples=samples), None if is_small else table


def verify_sample(store: str, index: int) -> SampleInfo:
    """Reread everything of a finished sample, also before there is a manifest, and return its description."""
    files().close()  # read the content of now
    info = read_sample_info(store, index)
    try:
        _check_sample(store, info)
    except FaultFound as e:
        raise CorruptDataError(str(e.fault)) from e
    return info


def _check_sample(store: str, info: SampleInfo) -> None:
    """Check a sample's values, and all else in its files. Raises FaultFound, SciDataError, OSError: the first fault."""
    names = list(info.arrays) if is_url(store) else None  # else all that there are
    source = _sample_source(store, info, Cache(KEPT_BYTES, "lru"), names, is_parsed=True)
    check_sample(source, info, store)
    if info.version > 2:
        check_layouts(source, info, store)
    if info.version > 1 and not is_url(store):
        check_files(source, info, os.path.join(store, info.folder))


def verify(path: str | os.PathLike[str], *, tick: Callable[[], None] | None = None) -> Fault | None:
    """Reread all digests of a store and check every invariant; return the first fault, or None.

    Checked: checksums and digests of all arrays; ``original_id`` is a permutation; edges are grouped by destination,
    sorted, in range; cells have their nodes, in range, and lie with their owners; blocks hold their points; prefix
    sums do not decrease; samples agree with the manifest. Of local stores (of schema version 2 on) also that no
    byte of any file is another than was written, and that there is no other file.


    Raises UnsupportedFormatError, FileNotFoundError: there is no finished store at ``path``.
    """
    name = url_of(os.path.expanduser(os.fspath(path)))
    files().close()  # read the content of now, not of files that were replaced while open
    try:
        store = open_store(name)
        _check_sums(store)
    except (CorruptDataError, FieldMismatchError, RefusedError) as e:
        return Fault(store=name, sample=None, array=MANIFEST, row=None, message=str(e))
    for info in store.manifest.samples:
        try:
            if sealed(read_sample_info(name, info.index)) != sealed(info):
                raise CorruptDataError("the sample's own description is not the manifest's; two stores were mixed")
            _check_sample(name, info)
        except FaultFound as e:
            return e.fault
        except (SciDataError, OSError) as e:
            return Fault(store=name, sample=info.index, array=None, row=None, message=str(e))
        if tick is not None:
            tick()
    return None


def _check_sums(store: Store) -> None:
    """Check that a manifest has the bytes that scidata writes of its samples."""
    content = _manifest_bytes(store.path)
    made = make_manifest(gather(store.manifest.samples, store.path), store.path)
    for name in ("counts", "bbox", "statistics", "settings"):
        if plain(getattr(made, name)) != plain(getattr(store.manifest, name)):
            raise CorruptDataError(
                f"{store.path}: the manifest's {name} are not those of its samples; write the store again"
            )
    text, table = _described(made) if store.manifest.version == MANIFEST_VERSION else (old_document(made), None)
    if text.encode() == content:
        _check_top(store, {MANIFEST} if table is None else {MANIFEST, TABLE})
    elif store.manifest.version > 1:
        raise CorruptDataError(
            f"{join(store.path, MANIFEST)}: says what it should, but not in the bytes that scidata wrote; it was edited"
        )


def _check_top(store: Store, known: set[str]) -> None:
    """Check that a local store's folder holds its samples and some files alone; empty locks are no bytes of it."""
    if is_url(store.path):
        return
    known = known.union(map(folder_of, store.manifest.samples.column("index").tolist()))
    for name in sorted(os.listdir(store.path)):
        path = os.path.join(store.path, name)
        if name not in known and not (name.startswith(".lock") and os.path.isfile(path) and not os.path.getsize(path)):
            raise CorruptDataError(f"{path}: is no part of the store: remove it")

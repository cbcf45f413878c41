"""Sources that live in an HDF5 file: opening, walking, locating. A ``Naming`` gives the names of datasets.

HDF5 is not thread-safe and h5py has one global lock; every call into it here is made under the source's own lock,
and none of them reads values except ``read_box``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout, ChunkRefs, Files, FindChunk, IntArray
from scidata.core.urls import is_url
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    MissingChunkError,
    RefusedError,
    SciDataError,
    ShortReadError,
)
from scidata.sources.access.files import files, retried, version_at
from scidata.sources.access.retry import is_transient
from scidata.sources.file_source import FileSource
from scidata.sources.hdf5.layout import (
    ChunkIndex,
    Contents,
    Storage,
    Unreadable,
    check_filters,
    chunk_index,
    describe,
    leaf_nbytes,
    leaf_of_chunks,
)
from scidata.sources.hdf5.lookup import AskedFile
from scidata.sources.hdf5.metadata import metadata_of
from scidata.sources.hdf5.parts import VirtualMapping, check_extent, lies_within, missing_part
from scidata.sources.hdf5.sessions import Session, open_sessions
from scidata.sources.hdf5.walk import (
    DAMAGE,
    Attributes,
    Naming,
    clean_attributes,
    damage_as_corrupt_data,
    open_h5,
    walk,
)
from scidata.sources.index import FileFacts, KeptFile, OnDemand
from scidata.sources.twins import Metadata, reader

_MOST_CHUNKS = 256  # of an array, whose places an index keeps
_MANY_CHUNKS = 4096  # of an array, of which the first that are asked for are looked up
_OPENED, _FOUND = 512, 128  # chunks that are listed in the time of an opening, and of a look-up after it
_T = TypeVar("_T")


class HDF5Source(FileSource[Contents]):
    """One HDF5 file.

    ``arrays`` holds every dataset of numbers: contiguous, chunked with filters that numcodecs decodes (deflate,
    shuffle, fletcher32, bzip2, blosc, zstd), or marked ``fallback`` where only HDF5 reads it (compact, lzf, nbit,
    scale-offset, szip and other plugins, types that NumPy has no exact match for). Dimensions are named by their
    scales, else their labels, else ``dim_i``. Text, compounds and references are left out and named in ``skipped``,
    as are virtual datasets, external storage and external links unless ``allow_external``.
    """

    format = "hdf5"
    naming: type[Naming] = Naming

    def __init__(self, path: str | os.PathLike[str], *, allow_external: bool = False) -> None:
        super().__init__(path)
        self.allow_external = allow_external
        self._reset()

    def _reset(self) -> None:
        # keyed by process: after a fork the child finds no session of its own, so neither a lock that some thread
        # of the parent held nor the parent's file is used; parsed metadata are plain data and stay
        self._sessions: dict[int, Session] = {}
        self._contents = None
        self._indices: dict[str, ChunkIndex] = {}
        self._looked_up: dict[str, dict[int, tuple[int, int, int]]] = {}  # places of chunks by their numbers
        self._spent: dict[str, int] = {}  # what that took, in chunks listed
        self._asked: AskedFile | None = None  # through which they are looked up
        self._mappings: dict[str, list[VirtualMapping]] = {}  # of virtual data sets
        self._contiguous: dict[str, ChunkRefs] = {}  # of arrays in one piece: asked for at each sample

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "allow_external", "_versions", "kept")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file."""
        return self._read().attributes

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every numeric array by its path in the file, in the file's order."""
        return self._read().arrays

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why some datasets are not among the arrays, by name."""
        return self._read().skipped

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the file; None if HDF5 may follow links out of it."""
        return None if layout.fallback and self.allow_external else super().files_of(layout, chunks)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        session = self._session()
        with session.lock:
            session.close()
            self._asked = None

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates.

        A chunk that was never written has path index -1. Data in no chunk of its own (compact, external, virtual:
        ``layout.fallback``) has 0 bytes. Thread-safe. Raises ShortReadError: the file ends before a chunk does.
        """
        if layout.name in self._contiguous and len(chunks) == 1 and not chunks.any():
            return self._contiguous[layout.name]
        contents = self._read()
        storage = self._storage(layout)
        chunks = np.asarray(chunks, np.int64).reshape(len(chunks), len(layout.shape))
        check_inside(layout, chunks)
        if storage.chunked:
            numbers: IntArray = np.asarray(np.ravel_multi_index(tuple(chunks.T), layout.num_chunks))
            few = self._look_up(layout, storage, numbers)
            places = self._index(layout, storage).find(numbers) if few is None else few
        else:
            begin, size = (-1, 0) if storage.offset is None else (storage.offset, layout.nbytes)
            if layout.fallback:  # compact, external or virtual: somewhere inside, in no chunk of its own
                begin, size = 0, 0
            places = np.array([[begin], [size], [0]], np.int64).repeat(len(chunks), axis=1)
        offset, nbytes, mask = places
        check_ends(layout, chunks, offset + nbytes, contents.file_size)
        refs = ChunkRefs(
            paths=(str(self.path),),
            path_index=(offset >= 0).astype(np.int64) - 1,
            offset=np.maximum(offset, 0),
            nbytes=nbytes,
            skipped_codecs=mask.astype(np.uint32) if mask.any() else None,
        )
        if not storage.chunked and len(chunks) == 1:
            self._contiguous[layout.name] = refs
        return refs

    def finder(self, layout: ArrayLayout) -> FindChunk | None:
        """Return the function that finds one chunk: see :obj:`~scidata.core.types.FindChunk`."""
        contents = self._read()
        storage, path, file_size = contents.storage.get(layout.name), self.path, contents.file_size
        if storage is None or layout.fallback:
            return None
        if storage.chunked:
            find_one = self._find_one(layout, storage)
        else:
            whole = None if storage.offset is None else (storage.offset, layout.nbytes, 0)

            def find_one(number: int) -> tuple[int, int, int] | None:
                return whole

        def find(number: int) -> tuple[str, int, int] | None:
            offset, nbytes, mask = find_one(number) or (0, 0, 1)
            return None if mask or offset + nbytes > file_size else (path, offset, nbytes)

        return find

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[np.generic]) -> None:
        """Read a box (positive steps) into ``out`` with h5py, whatever the filters. Thread-safe, one at a time.

        Raises MissingDependencyError: a filter is not installed; MissingChunkError: a part that lies elsewhere is not
        there; ``out`` has the rest, and the fill value in its place; CorruptDataError: HDF5 cannot decode it, or a part
        contradicts the data set.
        """
        storage = self._storage(layout)
        label = f"{self.path}: field {layout.name!r}"
        session = self._session()

        def call(h5: h5py.File) -> None:
            dset = h5[storage.path]
            check_filters(dset, label)
            rows = [range(*each.indices(n)) for each, n in zip(box, layout.shape, strict=True)]
            lost = missing_part(dset, rows, self._mappings) if layout.fallback and not storage.chunked else None
            try:
                _read_selection(dset, layout, box, out)
            except (OSError, RuntimeError) as e:
                if is_transient(e):
                    raise
                if lost is None:
                    raise CorruptDataError(f"{label}: HDF5 cannot read {box}: {e}") from e
            if lost is not None:
                raise MissingChunkError(
                    f"{label}: {lost}; copy it, too, or give allow_missing=True if missing values stand for the fill "
                    "value"
                )

        with session.lock:
            self._retried(session, call, label)

    def _session(self) -> Session:
        return self._sessions.setdefault(os.getpid(), Session(str(self.path)))  # atomic, so threads agree on one

    def _open(self, session: Session) -> h5py.File:
        if session.h5 is None:
            if not is_url(self.path):
                session.version = version = version_at(self.path)
                self._versions.note(self.path, version)
            session.h5 = open_h5(self.path)
        open_sessions.use(session)
        return session.h5

    def _read(self) -> Contents:
        if self._contents is None and self.kept is not None:
            self._contents = self._restored(self.kept)
        if self._contents is None:
            session = self._session()
            with session.lock:
                if self._contents is None:
                    label = f"{self.path}: metadata"
                    if self.allow_external or is_url(self.path):
                        self._contents = self._retried(session, self._describe, label)
                    else:
                        self._contents = retried(self.path, lambda: self._describe_guarded(label))
        return self._contents

    def facts(self, *, look: bool = True) -> FileFacts:
        """Return the description for an index, with places of few chunks; ``look``: of all, not only coordinates."""
        contents = self._read()
        arrays: list[tuple[ArrayLayout, dict[str, object], list[int]]] = []
        for name, layout in contents.arrays.items():
            storage = contents.storage[name]
            more: dict[str, object] = {"path": storage.path, "shape": storage.shape, "chunked": storage.chunked}
            numbers = [-1 if storage.offset is None else storage.offset]
            if storage.chunked:
                index, is_coordinate = None, layout.dims == (name,)
                if not layout.fallback and math.prod(layout.num_chunks) <= _MOST_CHUNKS:
                    index = self._index(layout, storage) if look else self._indices.get(name if is_coordinate else "")
                numbers = [] if index is None else index.as_numbers()
                more["placed"] = index is not None
            arrays.append((layout, more, numbers))
        return FileFacts(
            format=self.format, skipped=contents.skipped, attributes=contents.attributes, arrays=arrays,
            numbers=[contents.file_size],
        )  # fmt: skip

    def metadata(self) -> Metadata | None:
        """Return the bytes that it was described by; None if there are none that others could have, too."""
        try:
            return metadata_of(str(self.path), functools.partial(self._describe, index=False))
        except (SciDataError, *DAMAGE):
            return None

    def _restored(self, kept: KeptFile) -> Contents:
        skipped, names = kept.head.skipped, kept.head.places

        def storage(name: str) -> Storage:
            more = kept.layout(name)[1]
            offset = -1 if more["chunked"] else int(kept.numbers_of(name)[0])
            shape = tuple(more["shape"])
            return Storage(
                path=more["path"], shape=shape, chunked=more["chunked"], offset=None if offset < 0 else offset
            )

        return Contents(
            attributes=kept.attributes,
            arrays=OnDemand(names, lambda name: kept.layout(name)[0].in_store(self.path)),
            storage=OnDemand(names, storage),
            skipped=skipped,
            file_size=kept.numbers[0],
        )

    def _retried(self, session: Session, call: Callable[[h5py.File], _T], label: str) -> _T:
        """Call with the open file; where that fails for a passing reason, again with the file opened anew."""

        def attempt() -> _T:
            try:
                h5 = self._open(session)
                with damage_as_corrupt_data(label):
                    return call(h5)
            except OSError as e:
                if is_transient(e):
                    session.close()
                raise

        return attempt() if is_url(self.path) else retried(self.path, attempt)

    def _storage(self, layout: ArrayLayout) -> Storage:
        contents = self._read()
        if layout.name in contents.skipped:
            raise RefusedError(f"{self.path}: {layout.name!r} is not read: {contents.skipped[layout.name]}")
        return self._item(layout, contents.storage)

    def _describe_guarded(self, label: str) -> Contents:
        """Describe the file through the descriptor that reads use, which checks heaps; HDF5 itself does not open it."""
        self._versions.note_opened(self.path)
        with open_h5(self.path, guarded=True) as h5, damage_as_corrupt_data(label):
            return self._describe(h5)

    def _describe(self, h5: h5py.File, *, index: bool = True) -> Contents:
        naming = self.naming(h5)
        arrays: dict[str, ArrayLayout] = {}
        storage: dict[str, Storage] = {}
        skipped: dict[str, str] = {}
        # all of the walk before anything else: it refuses files that HDF5 would take minutes for
        for path, dset, foreign in list(walk(h5, allow_external=self.allow_external, skipped=skipped)):
            if not isinstance(dset, h5py.Dataset) or naming.is_hidden(attributes := Attributes(dset)):
                continue
            name, plist = naming.array_name(path), dset.id.get_create_plist()
            is_virtual, is_external = plist.get_layout() == h5py.h5d.VIRTUAL, bool(plist.get_external_count())
            outside = foreign or is_virtual or is_external
            try:
                if outside and not self.allow_external and (is_external or not lies_within(dset)):
                    raise Unreadable("its values lie in other files; allow_external=True reads it, if you trust them")
                if outside and is_virtual and (lost := check_extent(dset)) is not None:
                    raise MissingChunkError(f"{self.path}: field {name!r}: {lost}; copy it, too")
                arrays[name], storage[name] = describe(
                    dset,
                    plist,
                    store=str(self.path),
                    path=path,
                    name=name,
                    dims=naming.dims(attributes, path),
                    attributes=clean_attributes(attributes, naming.hidden_attributes, f"{self.path}: {name!r}"),
                    foreign=outside,
                )
            except Unreadable as e:
                skipped[name] = str(e)
        arrays = naming.finish(arrays)
        if index:
            self._index_coordinates(h5, arrays, storage)
        return Contents(
            attributes=clean_attributes(Attributes(h5), naming.hidden_attributes, self.path),
            arrays=arrays,
            storage=storage,
            skipped=skipped,
            file_size=files().size(self.path),
        )

    def _index_coordinates(
        self, h5: h5py.File, arrays: Mapping[str, ArrayLayout], storage: Mapping[str, Storage]
    ) -> None:
        """Find the chunks of coordinates while the file is open: a series reads those of all its files."""
        for name, layout in arrays.items():
            stored = storage[name]
            if layout.dims == (name,) and stored.chunked and not layout.fallback:
                with contextlib.suppress(*DAMAGE):  # who reads it is told
                    self._indices.setdefault(name, chunk_index(h5, stored.path, layout))

    def _find_one(self, layout: ArrayLayout, storage: Storage) -> Callable[[int], tuple[int, int, int] | None]:
        """Return the function that finds the place of one chunk; None if it is not stored."""
        if math.prod(layout.num_chunks) < _MANY_CHUNKS:
            return self._index(layout, storage).find_one
        known, indices = self._looked_up.setdefault(layout.name, {}), self._indices

        def find_one(number: int) -> tuple[int, int, int] | None:
            if number not in known and layout.name not in indices:
                self._look_up(layout, storage, np.array([number]))
            if number in known:
                return known[number]
            return self._index(layout, storage).find_one(number)

        return find_one

    def _look_up(self, layout: ArrayLayout, storage: Storage, numbers: IntArray) -> IntArray | None:
        """Return places of chunks that HDF5 looks up; None if one is not stored, or there is a list, or had better be.

        A rank whose part is two of 100,000 chunks does not wait for all nodes of their index. All look-ups of an array
        take about half of the time of the list at most.
        """
        if (num_chunks := math.prod(layout.num_chunks)) < _MANY_CHUNKS or layout.name in self._indices:
            return None
        known = self._looked_up.setdefault(layout.name, {})
        new = [number for number in dict.fromkeys(numbers.tolist()) if number not in known]
        spent = self._spent.get(layout.name, 0) + (_OPENED + _FOUND * len(new)) * bool(new)
        if spent > num_chunks // 2:
            return None
        if new:
            self._spent[layout.name] = spent
            starts = np.stack(np.unravel_index(new, layout.num_chunks), 1) * np.array(layout.chunks, np.int64)

            def call() -> list[tuple[int, int, int]]:
                if not is_url(self.path):
                    self._versions.note(self.path, version_at(self.path))
                asked = self._asked = self._asked or AskedFile(self.path)
                with open_h5(self.path, stream=asked) as h5, damage_as_corrupt_data(label):
                    return asked.places_of(h5py.h5d.open(h5.id, storage.path.encode()), starts.tolist())

            label = f"{self.path}: field {layout.name!r}: the index of its chunks"
            with self._session().lock:
                found = call() if is_url(self.path) else retried(self.path, call)
            known.update(zip(new, found, strict=False))
            if len(found) < len(new):
                return None
        return np.array([known[number] for number in numbers.tolist()], np.int64).reshape(-1, 3).T

    def _index(self, layout: ArrayLayout, storage: Storage) -> ChunkIndex:
        index = self._indices.get(layout.name)
        if index is None and self.kept is not None and (index := self._kept_index(self.kept, layout)) is not None:
            self._indices[layout.name] = index
        if index is None:
            session, label = self._session(), f"{self.path}: field {layout.name!r}: the index of its chunks"
            with session.lock:
                index = self._indices.get(layout.name)
                if index is None:
                    index = self._retried(session, lambda h5: chunk_index(h5, storage.path, layout), label)
                    self._indices[layout.name] = index
        return index

    def _kept_index(self, kept: KeptFile, layout: ArrayLayout) -> ChunkIndex | None:
        """Return places that an index of files has, or those at the address that it has."""
        numbers = kept.numbers_of(layout.name)
        if kept.layout(layout.name)[1]["placed"]:
            return ChunkIndex.from_numbers(numbers)
        begin = int(numbers[0]) if len(numbers) else -1
        at = None if begin < 0 else reader(self.path, leaf_nbytes(layout), kept.numbers[0], begin)
        found = None if at is None else leaf_of_chunks(at, begin, layout)
        self._versions.check((self.path,))
        return found


def check_inside(layout: ArrayLayout, chunks: IntArray) -> None:
    """Raise ConfigError if ``(num, ndim)`` chunk coordinates are not all in the grid."""
    if chunks.size and (chunks.min() < 0 or (chunks >= np.array(layout.num_chunks, np.int64)).any()):
        raise ConfigError(f"{layout.store}: field {layout.name!r}: chunk outside of the grid {layout.num_chunks}")


def check_ends(layout: ArrayLayout, chunks: IntArray, ends: IntArray, file_size: int) -> None:
    """Raise ShortReadError if the file has not the last byte of a chunk."""
    if len(ends) and int(ends.max()) > file_size:
        worst = int(ends.argmax())
        raise ShortReadError(
            f"{layout.store}: field {layout.name!r}: chunk {tuple(chunks[worst].tolist())} ends at byte "
            f"{int(ends[worst])}, but the file has {file_size}; it is truncated: copy or write it again"
        )


def _read_selection(
    dset: h5py.Dataset, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[np.generic]
) -> None:
    if layout.shape != dset.shape:  # a NetCDF-4 variable that is shorter than its unlimited dimension
        rows = [range(*s.indices(n)) for s, n in zip(box, layout.shape, strict=True)]
        counts = [len(r[: max(0, -(-(n - r.start) // r.step))]) for r, n in zip(rows, dset.shape, strict=True)]
        assert layout.fill_value is not None
        out[...] = layout.fill_value
        out = out[tuple(slice(0, count) for count in counts)]
        box = tuple(slice(r.start, min(r.stop, n), r.step) for r, n in zip(rows, dset.shape, strict=True))
    if 0 in out.shape:
        return
    if out.ndim == 0:
        out[()] = dset[()]
    elif out.flags.c_contiguous:
        dset.read_direct(out, box)
    else:
        out[...] = dset[box]

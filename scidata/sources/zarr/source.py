"""Zarr v2 and v3, sharded or not, local or by URL: the arrays of a store, and the places of their chunks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, ChunkRefs, Files, FindChunk, IntArray
from scidata.core.urls import Url, url_of
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    RefusedError,
    TooLargeError,
    UnknownNameError,
    UnsupportedFormatError,
    near_matches,
)
from scidata.sources.access.files import Versions, retried, version_at
from scidata.sources.zarr.chunks import ChunkLocator, Locator
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.tree import Tree, open_tree
from scidata.sources.zarr.walk import Contents, find_arrays

_T = TypeVar("_T")
_MOST_TEXTS = 1 << 22


class _Arrays(dict[str, ArrayLayout]):
    """Layouts by name; asking for one that was left out says why."""

    def __init__(self, contents: Contents, store: str) -> None:
        super().__init__({name: record.layout for name, record in contents.records.items()})
        self._errors = contents.errors
        self._store = store

    def __missing__(self, name: str) -> NoReturn:
        _raise_unknown(name, self._store, self, self._errors)


class _ArraysOnDemand(Mapping[str, ArrayLayout]):
    """Layouts by name, of a store whose arrays are read when they are asked for: one alone, or all to go through."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, name: str) -> ArrayLayout:
        record = self._state.record(name)
        return self._state.complete()[name] if record is None else record.layout

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    @overload
    def get(self, name: str, /) -> ArrayLayout | None: ...
    @overload
    def get(self, name: str, default: ArrayLayout | _T, /) -> ArrayLayout | _T: ...
    def get(self, name: str, default: object = None, /) -> object:
        record = self._state.record(name)
        if record is None and "/" in name:  # in a group, which is looked for with all others
            return self._state.complete().get(name, default)
        return default if record is None else record.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.complete())

    def __len__(self) -> int:
        return len(self._state.complete())


def _raise_unknown(
    name: str, store: str, known: Mapping[str, Any], errors: Mapping[str, UnsupportedFormatError | RefusedError]
) -> NoReturn:
    if name in errors:
        raise type(errors[name])(*errors[name].args)  # a fresh one: a shared one would gather tracebacks
    raise UnknownNameError(f"{store}: no array {name!r}" + near_matches(name, known))


class State:
    """State of a store in one process; dropped by ``close()`` and after a fork."""

    def __init__(
        self,
        tree: Tree,
        path: str,
        contents: Contents,
        chunks: Locator,
        note: Callable[[State, ArrayRecord], None] = lambda state, record: None,
    ) -> None:
        self.tree, self.contents, self.chunks, self.pid = tree, contents, chunks, os.getpid()
        self.handles: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}  # of arrays, once asked for
        self._path, self._note, self._lock, self._tried = path, note, threading.RLock(), dict[str, Exception | None]()
        self.arrays: Mapping[str, ArrayLayout] = _ArraysOnDemand(self)
        if contents.pending is None:
            self._take(contents.records)
            self.arrays = _Arrays(contents, path)

    def record(self, name: str) -> ArrayRecord | None:
        """Return an array's record, None if there is none, or none that can be read."""
        record = self.contents.records.get(name)
        if record is None and self.contents.pending is not None:
            with self._lock:
                self.contents.find(name, self._path)
                self._take([name] if name in self.contents.records else [])
                record = self.contents.records.get(name)
        return record

    def complete(self) -> Mapping[str, ArrayLayout]:
        """Look for all arrays, if that has not been done."""
        if self.contents.pending is not None:
            with self._lock:
                known = set(self.contents.records)
                self.contents.complete(self._path)
                self._take([name for name in self.contents.records if name not in known])
                self.arrays = _Arrays(self.contents, self._path)
        return self.arrays

    def _take(self, names: Iterable[str]) -> None:
        """Leave out arrays that neither scidata nor zarr-python decodes; one try for each kind of array."""
        tried = self._tried
        for name in list(names):
            record = self.contents.records[name]
            layout = record.layout
            self._note(self, record)
            if not layout.fallback:
                continue
            codecs = [(c.name, dict(c.config)) for c in layout.codecs]
            key = json.dumps([codecs, layout.dtype.str, len(layout.shape)], sort_keys=True, default=str)
            if key not in tried:
                tried[key] = self._try_zarr(record)
            if (problem := tried[key]) is not None:
                names = ", ".join(repr(c.name) for c in layout.codecs) or "(none that gives bytes)"
                del self.contents.records[name]
                self.contents.errors[name] = UnsupportedFormatError(
                    f"{layout.store}: array {name!r} has codecs {names}; scidata does not read them all and "
                    f"zarr-python does not open the array ({problem}); install the package that brings the codec"
                )

    def _try_zarr(self, record: ArrayRecord) -> Exception | None:
        try:
            self.open_zarr(record)
        except Exception as e:  # codecs of any package raise anything
            where = self.tree.location(record.prefix)
            return OSError(where.public(str(e))) if isinstance(where, Url) else e
        return None

    def open_zarr(self, record: ArrayRecord) -> Any:
        """Return zarr-python's array; it is imported here because most stores never need it."""
        import zarr

        array = self.handles.get(record.prefix)
        if array is None:
            version = 3 if self.contents.format == "zarr3" else 2
            array = zarr.open_array(**self.chunks.access(record), mode="r", zarr_format=version)  # type: ignore[arg-type]
            self.handles[record.prefix] = array
        return array


class ZarrSource:
    """A Zarr v2 or v3 store, or a group or array inside one.

    Opening is lazy and reads metadata only; zarr-python itself is imported only for arrays that need it. Safe to use
    from several threads, after a fork, and pickled (as path and options). Sizes and shard indexes are remembered in
    bounded caches until :meth:`close`. Of local files, an array whose metadata are written again while it is open and a
    chunk's file that is another one when it is read again are noticed (:meth:`check_unchanged`).

    - ``path``: folder or fsspec URL. Where it is an array, that array has the folder's name.
    - ``allow_external``: follow symbolic links that lead out of ``path``. Refused otherwise: at opening for groups and
      arrays, at first use for folders and files of chunks. Not checked behind URLs other than ``file://``.
    - ``names``: paths of the arrays, where ``path`` is a v3 group of which they are known: no folder is listed then. So
      it is in scidata's own stores, whose checksums say more than the times of files, which then are not looked at.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow_external: bool = False, names: Sequence[str] | None = None
    ) -> None:
        self.path = url_of(os.fspath(path))
        self.allow_external = allow_external
        self._names = names
        self._metadata, self._chunks = Versions(), Versions()  # of files
        self._states: Cache[State] = Cache(1)  # by process: a fork makes its own
        self._state: State | None = None

    def __repr__(self) -> str:
        return f"ZarrSource({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path, "allow_external": self.allow_external, "names": self._names, "metadata": self._metadata,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        ZarrSource.__init__(self, state["path"], allow_external=state["allow_external"], names=state["names"])
        self._metadata = state["metadata"]

    def _open(self) -> State:
        state = self._state  # without a call: asked for with each array
        if state is None or state.pid != os.getpid():
            state = self._state = self._states.get_or_make(os.getpid(), self._make_state, once=True)
        return state

    def _make_state(self) -> State:
        looks = self._names is None and not isinstance(self.path, Url)
        tree = open_tree(self.path, allow_external=self.allow_external, versions=self._chunks if looks else None)
        contents, chunks = self._find_arrays(tree), ChunkLocator(tree)
        if looks:
            return State(tree, self.path, contents, chunks, self._note_metadata)
        return State(tree, self.path, contents, chunks)

    def _find_arrays(self, tree: Tree) -> Contents:
        return find_arrays(tree, str(self.path), self._names, lazily=not isinstance(self.path, Url))

    def _note_metadata(self, state: State, record: ArrayRecord) -> None:
        where = self._metadata_of(state, record)
        with contextlib.suppress(FileNotFoundError):  # where all metadata are consolidated
            self._metadata.note(where, version_at(where))

    def _metadata_of(self, state: State, record: ArrayRecord) -> str:
        name = "zarr.json" if state.contents.format == "zarr3" else ".zarray"
        return state.tree.location(f"{record.prefix}/{name}" if record.prefix else name)

    @property
    def format(self) -> str:
        """``"zarr2"`` or ``"zarr3"``."""
        return self._open().contents.format

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the group at ``path``; empty if that is an array."""
        return MappingProxyType(self._open().contents.attributes)

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every array of numbers by its path inside the store, sorted by path.

        Asking for one of :attr:`skipped` raises why; for one that is not there, UnknownNameError. Of a local store
        without consolidated metadata, those of an array are read when it is asked for.
        """
        return self._open().arrays

    @property
    def skipped(self) -> Mapping[str, str]:
        """Arrays that were left out (strings, objects, records, unknown codecs), and why."""
        state = self._open()
        state.complete()
        return {name: str(error) for name, error in state.contents.errors.items()}

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if an array was written again since opening, or a chunk since its first read."""
        if self._names is not None or isinstance(self.path, Url):
            return

        # chunks that were read before show by themselves that the store is the same
        self._chunks.check(paths, self._check_metadata, layout.name)

    def _check_metadata(self, name: str) -> None:
        state = self._state or self._open()
        where = state.metadata.get(name)
        if where is None:
            where = state.metadata[name] = self._metadata_of(state, self._record(state, name))
        try:
            found = version_at(where)
        except FileNotFoundError:  # where all metadata are consolidated
            return
        self._metadata.note(where, found)

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files:
        """Name the files of chunks, or of the shards that they lie in; where zarr-python reads them, its metadata."""
        state = self._open()
        record = self._record(state, layout.name)
        keys = record.keys(chunk_files(layout, chunks))
        if layout.fallback:
            prefix = f"{record.prefix}/" if record.prefix else ""
            keys += [prefix + name for name in (("zarr.json",) if self.format == "zarr3" else (".zarray",))]
        return Files(tuple(map(state.tree.location, keys)))

    def close(self) -> None:
        """Drop metadata and caches; the next use opens the store again."""
        self._states.clear()
        self._state = None

    def _record(self, state: State, name: str) -> ArrayRecord:
        record = state.record(name)
        if record is None:
            state.complete()
            record = state.contents.records.get(name)
        if record is None:
            _raise_unknown(name, self.path, state.contents.records, state.contents.errors)
        return record

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates.

        For a ``fallback`` array the refs are whole files, good for telling which are absent. Raises ShortReadError: a
        file that is shorter than its chunk or shard index must be; CorruptDataError: an encoded size that its codecs
        cannot have given; ChecksumError: a shard index that does not match its crc32c; RefusedError: a link out of the
        store, or a pipe or device in place of a chunk; ConfigError: coordinates outside the chunk grid.
        """
        state = self._open()
        return state.chunks.locate(self._record(state, layout.name), chunks)

    def finder(self, layout: ArrayLayout) -> FindChunk | None:
        """Return the function that finds one chunk, until :meth:`close`: see :obj:`~scidata.core.types.FindChunk`."""
        state = self._open()
        record = state.record(layout.name)
        return None if record is None else state.chunks.finder(record)

    def expect(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks that are read next, as :meth:`locate` without requests: some may be ``unseen``."""
        state = self._open()
        return state.chunks.expect(self._record(state, layout.name), chunks)

    def note_absent(self, layout: ArrayLayout, chunk: IntArray) -> None:
        """Take in that a read has found no chunk at a coordinate."""
        state = self._open()
        if isinstance(state.chunks, ChunkLocator):
            state.chunks.note_absent(self._record(state, layout.name), chunk)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[np.generic]) -> None:
        """Read a box (positive steps) with zarr-python into ``out``, converting to its dtype.

        zarr-python gives the fill value for chunks that are absent: callers that must know ask :meth:`locate` first.
        Raises CorruptDataError: zarr-python failed to decode a chunk; RefusedError: a chunk that is a link out of the
        store.
        """
        from zarr.core.buffer import default_buffer_prototype

        state = self._open()
        record = self._record(state, layout.name)
        rows = [range(*s.indices(n)) for s, n in zip(box, record.layout.shape, strict=True)]
        if out.shape != tuple(map(len, rows)) or any(r.step < 1 for r in rows):
            raise ConfigError(f"{self.path}: {layout.name!r}: box {box} does not fit a buffer of shape {out.shape}")
        if 0 in out.shape:
            return
        touched = [np.unique(np.asarray(r) // c) for r, c in zip(rows, record.file_shape, strict=True)]
        state.tree.sizes(record.keys(_grid_of(touched)))  # refuses links out of the store, which zarr follows

        def call() -> None:
            array = state.open_zarr(record)
            target = default_buffer_prototype().nd_buffer.from_ndarray_like(out)  # type: ignore[arg-type]
            array.get_basic_selection(box, out=target)

        self._by_zarr(call, layout.name, box)

    def read_text(self, name: str) -> tuple[tuple[str, ...], npt.NDArray[Any]] | None:
        """Read an array of text (variable or fixed length) with zarr-python: its dims, and its values as they come.

        None if there is none. Raises TooLargeError: of more than 4 million texts; errors as :meth:`read_box`.
        """
        state = self._open()
        state.record(name) if "/" not in name else state.complete()  # looks for it
        record = state.contents.texts.get(name)
        if record is None:
            return None
        if math.prod(record.layout.shape) > _MOST_TEXTS:
            raise TooLargeError(
                f"{self.path}: array {name!r} of shape {record.layout.shape} is too much text for labels"
            )
        state.tree.sizes(record.keys(_grid_of(list(map(np.arange, record.num_files)))))  # as read_box does
        values = self._by_zarr(lambda: np.asarray(state.open_zarr(record)[...]), name, "it")
        return record.layout.dims, values

    def _by_zarr(self, call: Callable[[], _T], name: str, box: object) -> _T:
        remote, cause = isinstance(self.path, Url), None
        try:
            return retried(self.path, call)
        except Exception as e:  # codecs of any package raise anything
            said = f"{type(e).__name__}: {self.path.public(str(e)) if isinstance(self.path, Url) else e}"
            cause = None if remote else e  # which could say more of a URL than may be said
        raise CorruptDataError(
            f"{self.path}: array {name!r}: zarr-python could not read {box} ({said}); "
            "a chunk of it is damaged: copy or write the array again"
        ) from cause


def _grid_of(axes: list[IntArray]) -> IntArray:
    mesh = np.meshgrid(*axes, indexing="ij") if axes else []
    return np.stack([m.ravel() for m in mesh], axis=1) if mesh else np.zeros((1, 0), np.int64)


def chunk_files(layout: ArrayLayout, chunks: IntArray) -> IntArray:
    """Return which chunk files, or shards, hold chunks, ``(num, ndim)`` int64."""
    places: IntArray = np.asarray(chunks, np.int64)
    if layout.shards is not None:
        places = np.unique(places // (np.array(layout.shards) // layout.chunks), axis=0)
    return places

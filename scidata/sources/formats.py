"""Formats from outside: a class for a lab's own files, registered in a script or by an installed package.

A class is asked for a path by the name of the file alone, and runs because its package is installed, or a script names
it: never because of what a file holds.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import math
import os
import posixpath
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, Codec, Files, FindChunk, IntArray, Source
from scidata.core.urls import is_url
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    RefusedError,
    SciDataError,
    ShortReadError,
    UnsupportedFormatError,
)
from scidata.sources.access.files import files
from scidata.sources.file_source import FileSource

GROUP = "scidata.sources"  # of entry points
#: Suffixes of files that scidata reads itself: no other format takes them.
_TAKEN = (
    ".zarr", ".nc", ".nc4", ".cdf", ".h5", ".hdf5", ".hdf", ".he5", ".npy", ".npz", ".json", ".vtu", ".vtp",
    ".parquet", ".arrow", ".feather",
)  # fmt: skip
_MAX_BYTES = 1 << 62

#: Where the bytes of a chunk lie: file or URL, first byte, number of bytes.
Place: TypeAlias = tuple[str, int, int]


#: A class, or function, that makes a source of ``(path, allow_external=…)``.
Format: TypeAlias = Callable[..., Source]
_FormatT = TypeVar("_FormatT", bound=Format)
_registered: list[tuple[Format, Sequence[str]]] = []


class FileFormat(FileSource[Mapping[str, ArrayLayout]]):
    """Base class of a format of your own: one file, folder or URL with arrays.

    A subclass has :meth:`describe`, and either :meth:`place`, which says where the bytes of a chunk lie, or
    :meth:`read`, which reads a region by any means. By :meth:`place`, ranks read the bytes of their part, several
    chunks at once, behind URLs too; by :meth:`read`, as much as that function reads. Open files lazily and hold no
    handles in attributes: an object pickles as its path, and many threads use it.

    Attributes
    ----------
    format
        Its name, for ``scidata inspect``.
    patterns
        Names of its files: ``"*.lab"``, or ``"lab"`` for that.
    attributes
        Of the file itself, by name.

    Examples
    --------
    >>> import numpy as np
    >>> import scidata.sources
    >>> @scidata.sources.register_format
    ... class Flat(scidata.sources.FileFormat):  # 7 rows of 8 float32 for each time
    ...     format, patterns = "flat", ("*.flat",)
    ...
    ...     def describe(self):
    ...         num_times = self.size() // (7 * 8 * 4)
    ...         yield self.array("t", (num_times, 7, 8), "<f4", dims=("time", "lat", "lon"), chunks=(1, 7, 8))
    ...
    ...     def place(self, layout, chunk):
    ...         return self.path, chunk[0] * layout.chunk_nbytes, layout.chunk_nbytes
    >>> np.arange(2 * 56, dtype="<f4").tofile("two.flat")
    >>> ds = scidata.open_dataset("two.flat")
    >>> len(ds), ds[1]["t"][0, 0].item(), ds.plan(1).bytes_fetched
    (2, 56.0, 224)
    """

    format: ClassVar[str] = "own"
    patterns: ClassVar[Sequence[str]] = ()
    attributes: Mapping[str, Any] = {}

    def __init__(self, path: str | os.PathLike[str], *, allow_external: bool = False) -> None:
        super().__init__(path)
        self.allow_external = allow_external

    @classmethod
    def takes(cls, path: str) -> bool:
        """Return True if a file whose name matches is of this format; looks at what it begins with, for instance.

        Parameters
        ----------
        path : str
            File, folder or URL.
        """
        return True

    @abstractmethod
    def describe(self) -> Iterable[ArrayLayout]:
        """Return the arrays, each made by :meth:`array`. Called at the first use; reads metadata only."""

    def place(self, layout: ArrayLayout, chunk: tuple[int, ...]) -> Place | None:
        """Return the file, first byte and bytes of a chunk; None if there is none.

        Another file than the format's own lies in its folder.

        Parameters
        ----------
        layout : ArrayLayout
            The array.
        chunk : tuple[int, ...]
            Coordinates of the chunk, in chunks.
        """
        raise NotImplementedError

    def read(self, layout: ArrayLayout, box: tuple[slice, ...]) -> AnyArray:
        """Return the values of a box. Many threads call it.

        Parameters
        ----------
        layout : ArrayLayout
            The array.
        box : tuple[slice, ...]
            With start, stop and a positive step, one for each dim.
        """
        raise NotImplementedError

    # -- for describe ------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the bytes of the file."""
        return files().size(self.path)

    def read_bytes(self, offset: int, nbytes: int) -> bytearray:
        """Return bytes of the file, or of the object behind a URL; ShortReadError where it ends before.

        Parameters
        ----------
        offset, nbytes : int
            The first byte, and how many.
        """
        return files().read(self.path, offset, nbytes)

    def array(
        self,
        name: str,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        dims: Sequence[str] | None = None,
        chunks: Sequence[int] | None = None,
        codecs: Sequence[Codec] = (),
        axis_order: Sequence[int] | None = None,
        fill_value: object = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> ArrayLayout:
        """Describe an array: see :class:`~scidata.sources.ArrayLayout`. Default: one chunk, not encoded, in C order.

        Parameters
        ----------
        name : str
            Of the field.
        shape : Sequence[int]
            Of the whole array.
        dtype : dtype
            With its byte order.
        dims : Sequence[str] or None, optional
            Names of the dims; default ``dim_0``, ``dim_1``, ….
        chunks : Sequence[int] or None, optional
            Shape of a chunk; default one chunk.
        codecs : Sequence[Codec], default ()
            By which chunks are encoded, in the order of encoding.
        axis_order : Sequence[int] or None, optional
            The array's dims in the order in which they lie in a chunk.
        fill_value : object, optional
            Of chunks that are not there.
        attributes : Mapping[str, Any] or None, optional
            Of the field, such as CF's.

        Raises
        ------
        CorruptDataError
            Sizes or names that make no sense.
        UnsupportedFormatError
            A dtype of Python objects.
        """
        kind, lengths = np.dtype(dtype), tuple(map(int, shape))
        pieces = lengths if chunks is None else tuple(map(int, chunks))
        names = tuple(f"dim_{i}" for i in range(len(lengths))) if dims is None else tuple(map(str, dims))
        where = f"{self.path}: array {name!r}"
        if stray := [codec for codec in codecs if not isinstance(codec, Codec)]:
            raise ConfigError(f"{where}: codecs are Codec(name='zstd') and the like, not {stray[0]!r}")
        if kind.hasobject:
            raise UnsupportedFormatError(f"{where}: holds Python objects, which are never unpickled")
        alike = len(lengths) == len(pieces) == len(names) == len(set(names))
        if not alike or min((*lengths, 0)) < 0 or min((*pieces, 1)) < bool(chunks):
            raise CorruptDataError(f"{where}: shape {lengths}, chunks {pieces} and dims {names} do not fit")
        if max(math.prod(max(n, 1) for n in each) for each in (lengths, pieces)) * kind.itemsize > _MAX_BYTES:
            raise CorruptDataError(f"{where}: shape {lengths} claims more bytes than any file has")
        return ArrayLayout(
            store=str(self.path), name=str(name), shape=lengths, dims=names, dtype=kind, chunks=pieces,
            axis_order=tuple(range(len(lengths))) if axis_order is None else tuple(axis_order), codecs=tuple(codecs),
            fill_value=None if fill_value is None else np.array(fill_value, kind), attributes=dict(attributes or {}),
            fallback=type(self).place is FileFormat.place,
        )  # fmt: skip

    # -- as a Source -------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every array by name."""
        return self._read()

    def _parse(self) -> Mapping[str, ArrayLayout]:
        if not is_url(self.path) and os.path.isfile(self.path):
            self._versions.note_opened(self.path)
        with self._named("cannot be described"):
            return {layout.name: layout for layout in self.describe()}

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Name the file in errors of code that is not ours; those of scidata and of the system say more."""
        try:
            yield
        except (SciDataError, OSError):
            raise
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            raise CorruptDataError(f"{self.path}: {what} as {self.format} ({why}); copy or write it again") from e

    def _placed(self, layout: ArrayLayout, chunk: tuple[int, ...]) -> Place | None:
        with self._named(f"field {layout.name!r}, chunk {chunk} cannot be found"):
            if (found := self.place(layout, chunk)) is None:
                return None
            path, offset, nbytes = str(found[0]), int(found[1]), int(found[2])
            if max(offset, nbytes) > _MAX_BYTES or (offset, nbytes) != (found[1], found[2]):
                raise ValueError(f"{found[2]} bytes from {found[1]} on")
        if path == self.path:
            return self.path, offset, nbytes
        if not self.allow_external:
            self._check_inside(path)
        return path, offset, nbytes

    def _check_inside(self, path: str) -> None:
        """Refuse a file outside of the folder that this one is, or lies in."""
        real = os.path.realpath(self.path)
        folder = real if os.path.isdir(real) else os.path.dirname(real)
        if is_url(path) or is_url(self.path) or os.path.commonpath([folder, os.path.realpath(path)]) != folder:
            raise RefusedError(f"{self.path}: refers to {path}, outside of its folder; pass allow_external=True")

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates."""
        if layout.fallback:  # nobody knows
            nowhere = np.zeros(len(chunks), np.int64)
            return ChunkRefs(paths=(str(self.path),), path_index=nowhere, offset=nowhere, nbytes=nowhere)
        paths: dict[str, int] = {}
        rows = np.full((len(chunks), 3), -1, np.int64)
        for row, chunk in zip(rows, chunks.tolist(), strict=True):
            if (found := self._placed(layout, tuple(chunk))) is not None:
                row[:] = paths.setdefault(str(found[0]), len(paths)), found[1], found[2]
        return ChunkRefs(paths=tuple(paths), path_index=rows[:, 0], offset=rows[:, 1], nbytes=rows[:, 2])

    def finder(self, layout: ArrayLayout) -> FindChunk | None:
        """Return the function that finds one chunk: see :obj:`~scidata.core.types.FindChunk`."""
        if layout.fallback or type(self).locate is not FileFormat.locate:
            return None
        grid = layout.num_chunks
        return lambda number: self._placed(layout, tuple(map(int, np.unravel_index(number, grid))))

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read a box by :meth:`read`."""
        with self._named(f"field {layout.name!r} cannot be read"):
            found = np.asarray(self.read(layout, box))
            if found.shape != out.shape:  # and no broadcasting
                raise ValueError(f"shape {found.shape}, not {out.shape}")
            np.copyto(out, found, casting="same_kind")

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if a file that was just read is not the one that was read first."""
        own = [self.path] if os.path.isfile(self.path) else []
        self._versions.check(path for path in dict.fromkeys([*own, *paths]) if not is_url(path))

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the files that decide the values of chunks; of a format with :meth:`read`, its own, None of a folder."""
        own = (str(self.path),) if is_url(self.path) or os.path.isfile(self.path) else ()
        if layout.fallback:
            return Files(own) if own else None
        return Files(tuple(dict.fromkeys([*own, *self.locate(layout, chunks).paths])))


# -- finding the format of a path ------------------------------------------------------------------------------------


def register_format(format: _FormatT) -> _FormatT:
    """Have files of a format read by this class, in this process: also as a decorator.

    Worker processes import the module that calls it, where that stands at its top. A package does without: its entry
    point in the group ``scidata.sources`` is found by all processes, and by the command line.

    Parameters
    ----------
    format : type or Callable
        A subclass of :class:`FileFormat`; or another class or function, with an attribute ``patterns``, that makes a
        :class:`Source` of ``(path, allow_external=False)``. A method ``takes(path)`` may say that a file is another's.

    Raises
    ------
    ConfigError
        It names no files, or those that scidata reads itself.

    Examples
    --------
    See :class:`FileFormat`.
    """
    patterns = getattr(format, "patterns", ())
    if not callable(format) or isinstance(patterns, str) or not patterns:
        raise ConfigError(f"register_format: {format!r:.80} has no patterns of file names, such as ('*.lab',)")
    for pattern in patterns:
        if is_taken(pattern := _full(pattern)):
            raise ConfigError(f"register_format: {pattern!r} are files that scidata reads itself; name others")
    _registered[:] = [each for each in _registered if each[0] is not format] + [(format, tuple(patterns))]
    return format


def is_taken(name: str) -> bool:
    """Return True if files of a name, by its suffix, are of a format of scidata's own."""
    return name.lower().endswith(_TAKEN)


def open_own(path: str, *, allow_external: bool) -> Source | None:
    """Open a file of a format that was registered, or that an installed package brings; None if it is of neither."""
    base = posixpath.basename(str(path).partition("?")[0].rstrip("/"))
    if not base or is_taken(base):
        return None
    named = [each for each, patterns in _registered if any(_matches(base, pattern) for pattern in patterns)]
    for found in (*reversed(named), *map(_load, (each for each in _entry_points() if _matches(base, each.name)))):
        if found is not None and _takes(found, path):
            return found(path, allow_external=allow_external)
    return None


def _takes(found: Format, path: str) -> bool:
    try:
        return bool(getattr(found, "takes", lambda path: True)(path))
    except ShortReadError:
        return False
    except Exception as e:  # any, of code that is not ours: other formats may read the file
        name = getattr(found, "__qualname__", repr(found))
        warnings.warn(f"{path}: {name}.takes failed ({type(e).__name__}: {e}); it is read without", stacklevel=2)
        return False


def _full(pattern: str) -> str:
    return pattern if any(mark in pattern for mark in "*?[") else f"*.{pattern.removeprefix('.')}"


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), _full(pattern).lower())


@functools.cache
def _entry_points() -> Sequence[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=GROUP), key=lambda each: (each.name, each.value))


@functools.cache
def _load(entry: metadata.EntryPoint) -> Format | None:
    """Return the format of an entry point; None if it cannot be imported, which is said once."""
    try:
        found: Format = entry.load()
        if callable(found):
            return found
        fault = f"{type(found).__name__} is no class"
    except Exception as e:  # any, of a package that is not ours
        fault = f"{type(e).__name__}: {e}"
    package = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    warnings.warn(
        f"entry point {entry.name!r} of {GROUP}{package} cannot be loaded ({fault}): files named "
        f"{_full(entry.name)} are read without {entry.value}; install that package again, or remove it",
        RuntimeWarning,
        stacklevel=2,
    )
    return None

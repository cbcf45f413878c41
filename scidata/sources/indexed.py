"""Finds the index of some files, beside them or in ``cache_dir``, opens files by it, and writes it.

A file is opened by its row as long as it has the size and the time of its last change that the row has; in
``cache_dir``, which does not move with the data, also the time at which its inode was changed. Any other file is
described anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from scidata.core.own_files import make_own_folder, open_own, write_whole
from scidata.core.types import AnyArray, ArrayLayout, Source
from scidata.errors import CorruptDataError, RefusedError, SciDataError
from scidata.sources.access.files import Version, files, version_at
from scidata.sources.access.validators import Validator
from scidata.sources.file_source import FileSource
from scidata.sources.index import FileIndex, FileRow, KeptFile, Values
from scidata.sources.twins import Examples, values_kept
from scidata.sources.unfinished import check_finished

if TYPE_CHECKING:
    from scidata.sources.hdf5.source import HDF5Source
    from scidata.sources.netcdf import NetCDF3Source

#: Reads an array as it is stored, in native byte order.
Read: TypeAlias = Callable[[Source, ArrayLayout], AnyArray]

NAME = ".scidata-index"  # beside the data
FOLDER = "scidata-index"  # below cache_dir
_LEVELS = 3  # folders above the files that are looked at
_LONGEST_WAIT = 3.0  # where clocks differ
_FEWEST = 8  # files that an index is written for without being asked


class IndexedFiles(Sequence[Source]):
    """Some files, each opened when it is asked for, by an index where one has it as it is. Pickles.

    - ``paths``: the files; no index is looked for where one is a URL.
    - ``cache_dir``: where an index is looked for first, and written; None: beside the data alone.
    - ``look``: False: use no index.
    - ``to_write``: use the index alone that is written anew.
    - ``place``: where an index is written.
    - ``unknown``: the numbers of files that no index has as they are.
    """

    def __init__(
        self,
        paths: Sequence[str],
        cache_dir: str | os.PathLike[str] | None,
        opened: Callable[[str], Source],
        *,
        look: bool = True,
        to_write: bool = False,
    ) -> None:
        self._paths, self._open, self._cache_dir = paths, opened, cache_dir
        self._sources: list[Source | None] = [None] * len(paths)
        common = paths[0] if len(paths) == 1 else os.path.commonprefix(paths)  # noqa: RUF071 - of the text, cut at a slash below
        self._prefix = common[: common.rfind("/") + 1]
        folder = os.path.abspath(self._prefix or ".")
        self.place = os.path.join(folder, NAME) if cache_dir is None else _place(cache_dir, folder)
        self._indices: list[FileIndex] = []
        self._rows = np.full((2, len(paths)), -1, np.int64)  # which index, and the row there
        self._versions = np.full((len(paths), 3), -1, np.int64)
        self._has_index = look and not any("://" in path for path in paths)
        if self._has_index:
            self._look(folder, levels=0 if to_write else _LEVELS)
        self.unknown: list[int] = np.flatnonzero(self._rows[0] < 0).tolist()

    def _look(self, folder: str, levels: int) -> None:
        places = [(self.place, "", 3 if self._cache_dir is not None else 2)]
        above, sub = folder, ""
        for _ in range(levels):
            places.append((os.path.join(above, NAME), sub, 2))
            above, name = os.path.split(above)
            sub = f"{name}/{sub}"
        for place, sub, num_agree in dict.fromkeys(places):
            index = load(place)
            if index is None:
                continue
            self._indices.append(index)
            begin = len(self._prefix)
            rows = np.array([index.rows.get(sub + path[begin:], -1) for path in self._paths], np.int64)
            for i in np.flatnonzero((rows >= 0) & (self._versions[:, 0] < 0)).tolist():
                with contextlib.suppress(OSError):  # which opening it raises
                    self._versions[i] = version_at(self._paths[i])
            known = (
                index.tables["versions"][rows, :num_agree] if len(index.names) else self._versions[:, :num_agree] - 1
            )
            same = (rows >= 0) & (self._rows[0] < 0) & (known == self._versions[:, :num_agree]).all(axis=1)
            self._rows[:, same] = np.array([[len(self._indices) - 1], [0]]) + [[0], [1]] * rows[same]
        if self._indices:
            files().forget_each(self._paths)  # a file written again has another one behind its name

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, i: int) -> Source: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Source]: ...
    def __getitem__(self, i: int | slice) -> Source | Sequence[Source]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        found = self._sources[i]
        if found is None:  # of two threads both open it
            found = self._sources[i] = self._restored(i) or self._open(self._paths[i])
        return found

    def _restored(self, i: int) -> Source | None:
        which, row = self._rows[:, i].tolist()
        if which < 0:
            return None
        kept, version = KeptFile(self._indices[which], row), self._versions[i].tolist()
        source = _formats()[kept.head.format](self._paths[i])
        source.restore(kept, (version[0], version[1], version[2]))
        return source

    @property
    def opened(self) -> list[Source]:
        """The files that have been asked for."""
        return [source for source in self._sources if source is not None]

    def path(self, i: int) -> str:
        """Return the path of a file, which is not opened for that."""
        return self._paths[i]

    def kinds(self, names: Sequence[str], valued: Sequence[str]) -> list[int]:
        """Return for each file the first one that is like it, as far as an index shows.

        In the layouts of some arrays, but for the store, the values of others, the names of all arrays, and those of
        the file's attributes.
        """
        self._describe([*names, *valued])
        kinds = np.arange(len(self))
        for which, index in enumerate(self._indices):
            mine = np.flatnonzero(self._rows[0] == which)
            if len(mine):
                found = index.kinds_of(self._rows[1, mine], names, valued)
                _, first, inverse = np.unique(found, return_index=True, return_inverse=True)
                kinds[mine] = mine[first][inverse]
        return kinds.tolist()

    def _describe(self, names: Sequence[str]) -> None:
        new = [i for i in self.unknown if self._rows[0, i] < 0] if self._has_index else []
        if len(new) < _FEWEST:
            return
        files().forget_each([self._paths[i] for i in new if self._sources[i] is None])
        examples, found = Examples(names), dict[int, FileRow]()
        for i in new:
            row = None if self._sources[i] is not None else examples.row_of(self._paths[i])
            if row is None and examples.takes_more:
                row = _taken(examples, self[i])
            if row is not None:
                found[i] = row
        rows = np.array(list(found), np.int64)
        self._rows[:, rows] = np.array([np.full(len(rows), len(self._indices)), np.arange(len(rows))])
        self._versions[rows] = np.array([row.version for row in found.values()], np.int64).reshape(-1, 3)
        self._indices.append(FileIndex.of(found.values()))

    def joined(self, name: str) -> AnyArray | None:
        """Return a coordinate of all files as stored, one after the other; None if one index has not all of it."""
        (which, *others) = np.unique(self._rows[0]).tolist()
        return None if others or which < 0 else self._indices[which].joined(self._rows[1], name)

    # -- writing -----------------------------------------------------------------------------------------------------

    def keep(self, read: Read) -> None:
        """Write the rows of new files to ``cache_dir``, if there are several; say where that fails."""
        if self._cache_dir is None or not self._has_index or len(self.unknown) < _FEWEST:
            return
        try:
            make_own_folder(os.path.dirname(self.place))
            self.write(read)
        except (OSError, RefusedError) as e:
            warnings.warn(f"{self.place}: the index of files cannot be written ({e})", stacklevel=2)

    def write(self, read: Read, *, each: Callable[[], object] = lambda: None) -> tuple[int, int]:
        """Write the index with new files, ``each`` called after one; return its rows, and how many files have none."""
        rows: dict[str, FileRow] = {}
        for index in self._indices:
            if index.where == self.place:  # which is the first, and has names from here on
                rows = {row.name: row for row in index.each() if os.path.exists(self._prefix + row.name)}
        left_out = 0
        for i in self.unknown:
            name = self._paths[i][len(self._prefix) :]
            rows.pop(name, None)
            row = _row_of(self[i], name, read)
            if row is not None:
                rows[name] = row
            left_out += row is None
            each()
        write_whole(self.place, FileIndex.of(rows.values()).to_bytes())
        return len(rows), left_out


def has_rows(source: Source) -> bool:
    """Return True if an index can have a file of this format."""
    return isinstance(source, FileSource) and source.format in _formats()


def _taken(examples: Examples, source: Source) -> FileRow | None:
    if not isinstance(source, FileSource) or not has_rows(source):
        return None
    row = examples.take(source.path, source.metadata(), source.facts(look=False))
    return row if row is not None and row.version == source.version() else None


def load(place: str) -> FileIndex | None:
    """Read an index; None if there is none, or it is damaged, which is said."""
    try:
        descriptor = open_own(place, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RefusedError) as e:
        warnings.warn(f"{place}: the index of files is not used: {e}", stacklevel=2)
        return None
    with open(descriptor, "rb") as file:
        data = file.read()
    try:
        return FileIndex.from_bytes(data, place)
    except CorruptDataError as e:
        warnings.warn(f"{e}; files are opened without it: remove it, or run scidata index again", stacklevel=2)
        return None


def _place(cache_dir: str | os.PathLike[str], folder: str) -> str:
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    return os.path.join(os.path.abspath(os.path.expanduser(os.fspath(cache_dir))), FOLDER, f"{name}.index")


@functools.cache
def _formats() -> dict[str, type[HDF5Source] | type[NetCDF3Source]]:
    from scidata.sources.hdf5.source import HDF5Source
    from scidata.sources.netcdf import NetCDF3Source, NetCDF4Source

    return {each.format: each for each in (HDF5Source, NetCDF4Source, NetCDF3Source)}


def settles_in(paths: Iterable[str]) -> float:
    """Return the seconds until a change of any file would be sure to give it another time; a few at most."""
    return min(_LONGEST_WAIT, max(map(_settles_in, map(version_at, paths)), default=0.0))


def _row_of(source: Source, name: str, read: Read) -> FileRow | None:
    """Describe a file; None if it cannot be kept: another format, unfinished, changing, or changed just now."""
    values: dict[str, Values] = {}
    if not isinstance(source, FileSource) or not has_rows(source):
        return None
    try:
        check_finished(source)
        facts, version = source.facts(), source.version()
        for layout, _, _ in facts.arrays:
            if layout.dims == (layout.name,) and layout.name not in facts.skipped:
                values[layout.name] = values_kept(layout, read(source, layout))
        same = version is not None and version_at(source.path) == version
    except (SciDataError, OSError):  # which is told whoever reads it
        return None
    if version is None or not same or _settles_in(version):
        return None
    return FileRow(name, version, facts.parts(values))


def _settles_in(version: Version) -> float:
    return Validator(b"", version[2] / 1e9).settles_in  # when its inode was changed, which no program sets ahead

"""Groups of files that are opened by themselves, as ``file.h5/group``; a pattern names several.

Of HDF5 and NetCDF-4, and samples of ``torch.save``.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from scidata.core.cache import Cache
from scidata.core.types import Array, ArrayLayout, ChunkRefs, Files, IntArray, Source
from scidata.core.urls import absolute
from scidata.errors import UnsupportedFormatError, near_matches
from scidata.sources.access.files import files, version_at
from scidata.sources.single_files import open_file

_NO_SAMPLES = ("pre_transform.pt", "pre_filter.pt")  # of PyTorch Geometric, beside those that have some
_names: WeakKeyDictionary[Source, dict[int, list[tuple[str, int]]]] = WeakKeyDictionary()
_whole: Cache[Source] = Cache(8, "lru")  # of a file with a thousand groups, metadata are read once


def split_group(path: str) -> tuple[str, str] | None:
    """Return the local file, and the group in it, that a path names; None if it is no such path."""
    head, group = path.rstrip("/"), ""
    while head and not os.path.lexists(head):
        head, _, last = head.rpartition("/")
        group = f"{last}/{group}" if group else last
    return (head, group) if group and os.path.isfile(head) else None


def expand_groups(pattern: str) -> tuple[str, ...]:
    """Return the groups that a pattern such as ``train.h5/*`` names, numbers in the order of numbers."""
    parts = pattern.rstrip("/").split("/")
    for i in range(len(parts) - 1, 0, -1):
        if found := [path for path in sorted(glob.glob("/".join(parts[:i]))) if os.path.isfile(path)]:
            return tuple(group for path in found for group in _groups_of(path, parts[i:]))
    return ()


def _groups_of(path: str, patterns: Sequence[str]) -> list[str]:
    depth, source = len(patterns), _open_whole(path, allow_external=False)
    names = [tuple(name.split("/")) for name in source.arrays]
    if source.format == "torch" and not all(name[0].isdecimal() for name in names):
        return [path]  # one sample
    groups = {name[:depth] for name in names if len(name) > depth}
    fitting = [group for group in groups if all(map(fnmatch.fnmatchcase, group, patterns))]
    return [f"{path}/{group}" for group in sorted(map("/".join, fitting), key=_by_number)]


def samples_of_folder(folder: str) -> tuple[str, ...]:
    """Return the samples of a data set of PyTorch Geometric or OGB, in ``folder/processed``; none of other folders.

    Raises
    ------
    UnsupportedFormatError
        It has several files that are not numbered, such as splits.
    """
    own = folder.rstrip("/")
    inner = own if own.rpartition("/")[2] == "processed" else f"{own}/processed"
    try:
        found = [name for name in os.listdir(inner) if name.endswith(".pt") and not name.startswith(".")]
    except OSError:  # no such folder: the only call for each of many files
        return ()
    files_ = sorted((f"{inner}/{name}" for name in found if name not in _NO_SAMPLES), key=_by_number)
    if len({re.sub(r"\d+", "", path) for path in files_}) > 1:
        shown = ", ".join(map(os.path.basename, files_[:6]))
        raise UnsupportedFormatError(f"{inner}: has several files, {shown}: name one, {files_[0]}, or a glob of some")
    return tuple(sample for path in files_ for sample in _groups_of(path, ["*"]))


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _open_whole(path: str, *, allow_external: bool) -> Source:
    key = absolute(path), version_at(path), allow_external
    found = _whole.get(key)
    if found is not None:
        return found
    files().forget(path)  # of a file that was there before
    return _whole.put(key, open_file(path, allow_external=allow_external))


def _sorted_names(file: Source, found: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the names of a file's arrays, each with its place in the file: kept, for the groups of a file are many."""
    kept = _names.setdefault(file, {})
    if (names := kept.get(id(found))) is None or len(names) != len(found):
        names = kept[id(found)] = sorted(zip(found, itertools.count(), strict=False))
    return names


class GroupSource:
    """One group of a file, as if it were a file of its own.

    Its attributes are those of its arrays; a group's own are not read. Raises FileNotFoundError: there is no such
    group, or no array below it; UnsupportedFormatError: files of this format have no groups.
    """

    attributes: Mapping[str, Any] = {}

    def __init__(self, path: str, group: str, *, allow_external: bool = False) -> None:
        self.path, self.group = f"{path}/{group}", group
        self.file = _open_whole(path, allow_external=allow_external)
        if self.file.format not in ("hdf5", "netcdf4", "torch"):
            raise UnsupportedFormatError(f"{self.path}: {path} has no groups, it is {self.file.format}")
        if group in self.file.arrays:
            raise UnsupportedFormatError(f"{self.path}: is one array of {path}; open that, with fields=[{group!r}]")
        if not self.arrays:
            there = {name.rpartition("/")[0] for name in self.file.arrays} - {""}
            raise FileNotFoundError(
                f"{self.path}: {path} has no arrays in a group {group!r}{near_matches(group, there)}"
            )

    @property
    def format(self) -> str:
        """That of the file."""
        return self.file.format

    @cached_property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every array by its path inside the group."""
        return {
            name: replace(layout, store=self.path, name=name) for name, layout in self._below(self.file.arrays).items()
        }

    @cached_property
    def skipped(self) -> Mapping[str, str]:
        """Why some arrays of the group are not among those, by name."""
        return self._below(getattr(self.file, "skipped", {}))

    def _below(self, found: Mapping[str, Any]) -> dict[str, Any]:
        start = f"{self.group}/"
        names = _sorted_names(self.file, found)
        first, stop = (bisect.bisect_left(names, (each,)) for each in (start, f"{self.group}0"))  # 0 comes after /
        own = [name for name, _ in sorted(names[first:stop], key=lambda pair: pair[1])]
        return {name.removeprefix(start): found[name] for name in own}

    def _whole(self, layout: ArrayLayout) -> ArrayLayout:
        return self.file.arrays[f"{self.group}/{layout.name}"]

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks given by ``(num, ndim)`` int64 chunk coordinates."""
        return self.file.locate(self._whole(layout), chunks)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: Array) -> None:
        """Read a box (positive steps) with the format's own library into ``out``."""
        self.file.read_box(self._whole(layout), box, out)

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if the file that was just read is not the one whose metadata was."""
        self.file.check_unchanged(self._whole(layout), paths)

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the file; None if HDF5 may follow links out of it."""
        return self.file.files_of(self._whole(layout), chunks)

    def close(self) -> None:
        """Close the file, of which other groups are read, too; the next use opens it again."""
        self.file.close()

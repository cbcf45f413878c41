"""Sources that are one file, or one URL: their description is read at the first use, and kept."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, Files, IntArray
from scidata.core.urls import Url, is_url, url_of
from scidata.errors import UnknownNameError, near_matches
from scidata.sources.access.files import Version, Versions
from scidata.sources.index import FileFacts, KeptFile
from scidata.sources.twins import Metadata

_Contents = TypeVar("_Contents")
_Item = TypeVar("_Item")


class FileSource(Generic[_Contents]):
    """The common part of such sources; a subclass reads the description of the file in ``_parse``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = url_of(os.fspath(path))
        self._versions = Versions()
        self._contents: _Contents | None = None
        self.kept: KeptFile | None = None

    def restore(self, kept: KeptFile, version: Version) -> None:
        """Take the description from an index, as long as the file has this version."""
        self.kept = kept
        self._versions.note(self.path, version)

    def facts(self, *, look: bool = True) -> FileFacts:
        """Return the description as an index keeps it; ``look`` for what has not been looked at."""
        raise NotImplementedError

    def metadata(self) -> Metadata | None:
        """Return the bytes that it was described by; None if there are none that others could have, too."""
        return None

    def version(self) -> Version | None:
        """Return the version of the file that was described; None if it is not described yet, or has a URL."""
        return self._versions.of(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_contents": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def _parse(self) -> _Contents:
        raise NotImplementedError

    def _restored(self, kept: KeptFile) -> _Contents:
        raise NotImplementedError

    def _read(self) -> _Contents:
        contents = self._contents
        if contents is None and self.kept is not None:
            contents = self._contents = self._restored(self.kept)
        if contents is None:  # two threads may both read it: they get the same
            contents = self._parse()
            if not is_url(self.path):
                self._versions.check((self.path,))
            self._contents = contents
        return contents

    def _item(self, layout: ArrayLayout, items: Mapping[str, _Item]) -> _Item:
        if layout.name not in items:
            raise UnknownNameError(f"{self.path}: no field {layout.name!r}{near_matches(layout.name, items)}")
        return items[layout.name]

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if the file that was just read is not the one that was described."""
        if not isinstance(self.path, Url):
            self._versions.check((self.path,))

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the file."""
        return Files((self.path,))

    def close(self) -> None:
        """Forget the description; the next use reads it again."""
        self._contents = None


class WholeFileSource(FileSource[_Contents]):
    """A local file that another library reads whole, at the first use, once per process: its arrays lie in memory."""

    attributes: Mapping[str, Any] = {}

    @abstractmethod
    def _values(self) -> Mapping[str, AnyArray]:
        """Return the arrays by name."""

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Say that every chunk is there; which bytes of the file it came from is not known."""
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(self.path,), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Copy a box into ``out``."""
        out[...] = self._item(layout, self._values())[box]

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Nothing to check: the file is read whole, once."""


def layout_in_memory(
    path: str, name: str, values: AnyArray, dims: tuple[str, ...], attributes: Mapping[str, Any] | None = None
) -> ArrayLayout:
    """Return the layout of an array that was read whole."""
    return ArrayLayout(
        store=path, name=name, shape=values.shape, dims=dims, dtype=values.dtype, chunks=values.shape,
        axis_order=tuple(range(values.ndim)), attributes=attributes or {}, fallback=True,
    )  # fmt: skip

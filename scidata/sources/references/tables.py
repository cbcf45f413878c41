"""Where the chunk files of an array lie, as tables: ranges of other files, and bytes that are in the set itself.

Its metadata is a tree of documents, as the files of a Zarr store.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scidata.core.types import IntArray
from scidata.core.urls import Url, url_of
from scidata.errors import CorruptDataError
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.walk import checked_node

WHOLE = -1  # in place of a number of bytes: all of the file
_BASE64 = b"base64:"
_MAX = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """Places of some chunk files of one array.

    - ``linear``: ``(num,)`` int64, ascending: which file of the array, flattened in C order.
    - ``target``: ``(num,)`` int64: into ``names``; ``-1 - i`` for ``inline[i]``.
    - ``offset``, ``nbytes``: ``(num,)`` int64: the range in the target; ``nbytes`` is :data:`WHOLE` where that is all
      of it.
    - ``names``: the targets, as the set writes them.
    """

    linear: IntArray
    target: IntArray
    offset: IntArray
    nbytes: IntArray
    names: Sequence[str]
    inline: Sequence[bytes]

    def rows(self, linear: IntArray) -> IntArray:
        """Return in which row each file is, -1 where none has it."""
        if not len(self.linear):
            return np.full(len(linear), -1, np.int64)
        at = np.minimum(np.searchsorted(self.linear, linear), len(self.linear) - 1)
        return np.where(self.linear[at] == linear, at, -1)

    @property
    def size(self) -> int:
        """About how many bytes it takes in memory."""
        texts = sum(map(len, self.names)) + sum(map(len, self.inline))
        return 4 * self.linear.nbytes + texts + 60 * (len(self.names) + len(self.inline))


class Tables(Protocol):
    """The tables of a set; ``lasting``: what URLs of objects begin with that are never written again, if any."""

    lasting: str

    def find(self, record: ArrayRecord, linear: IntArray) -> Iterable[tuple[Table, IntArray]]:
        """Return tables that together know of the files, and the positions in ``linear`` that each knows of."""


def make_table(
    linear: IntArray,
    target: IntArray,
    offset: IntArray,
    nbytes: IntArray,
    names: Sequence[str],
    inline: Sequence[bytes],
) -> Table:
    """Return a table of rows in any order."""
    order = np.argsort(linear, kind="stable")
    rows = (np.ascontiguousarray(column[order]) for column in (linear, target, offset, nbytes))
    return Table(**dict(zip(("linear", "target", "offset", "nbytes"), rows, strict=True)), names=names, inline=inline)


def decoded_inline(value: bytes, where: str) -> bytes:
    """Return the bytes that a set has in place of a reference."""
    if not value.startswith(_BASE64):
        return value
    try:
        return base64.b64decode(value[len(_BASE64) :], validate=True)
    except binascii.Error as e:
        raise CorruptDataError(f"{where}: is no base64 ({e}); the set is damaged: write it again") from None


def checked_range(offset: object, nbytes: object, where: str) -> tuple[int, int]:
    """Return a range, or raise CorruptDataError if it is none."""
    for value in (offset, nbytes):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CorruptDataError(
                f"{where}: refers to {nbytes!r} bytes from {offset!r} on, but two numbers that are not negative were "
                "expected; the set is damaged: write it again"
            )
    assert isinstance(offset, int)
    assert isinstance(nbytes, int)
    if offset + nbytes > _MAX:
        raise CorruptDataError(f"{where}: refers to bytes beyond the end of any file; the set is damaged")
    return offset, nbytes


DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class DocumentTree:
    """A tree of metadata documents alone, as :class:`scidata.sources.zarr.tree.Tree`; RefusedError of outward keys."""

    def __init__(self, store: str, documents: Mapping[str, bytes]) -> None:
        self._store = url_of(store)
        self._documents = documents
        self._folders: dict[str, set[str]] = {}
        for key in documents:
            folder = key.rpartition("/")[0]
            if folder:
                checked_node(folder, store)
            while folder:
                parent = folder.rpartition("/")[0]
                self._folders.setdefault(parent, set()).add(folder)
                folder = parent

    def exists(self) -> bool:
        """Return True: the set was read."""
        return True

    def location(self, key: str) -> str:
        """Return the set's path with a key, for messages."""
        if not key:
            return self._store
        return self._store.at(key) if isinstance(self._store, Url) else f"{self._store}/{key}"

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return those documents that there are."""
        return {key: self._documents[key] for key in keys if key in self._documents}

    def folders(self, key: str) -> list[str]:
        """Return the folders in a folder, sorted."""
        return sorted(self._folders.get(key, ()))

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return -1 for each: chunks are found by the tables of the set."""
        return np.full(len(keys), -1, np.int64)

    @property
    def reads_tell(self) -> bool:
        """False: the tables know."""
        return False

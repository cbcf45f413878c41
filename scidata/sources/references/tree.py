"""Metadata of a set as the files of a Zarr store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scidata.core.types import IntArray
from scidata.core.urls import Url, url_of
from scidata.sources.zarr.walk import checked_node

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class DocumentTree:
    """A tree of metadata documents alone, as :class:`scidata.sources.zarr.tree.Tree` has them.

    Parameters
    ----------
    store
        What the set is called in messages.
    documents
        Contents by key.

    Raises
    ------
    RefusedError
        A key is no path inside a store.
    """

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

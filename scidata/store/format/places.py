"""Where the parts of a store lie, and that they lie inside it: nothing that a manifest or a link names is followed out.

Behind a URL there are no links to follow.
"""

from __future__ import annotations

import errno
import os

from scidata.core.urls import Url, is_url, url_of
from scidata.errors import RefusedError
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import read_head
from scidata.sources.single_files import is_as_named

MANIFEST = "manifest.json"
TABLE = "samples.bin"  # if the manifest does not hold it
FOLDER = "sample-{:06d}.zarr"


def folder_of(index: int) -> str:
    """Return the folder of a sample inside its store."""
    return FOLDER.format(index)


def join(store: str, name: str) -> str:
    """Return the path or URL of a file or folder in a store."""
    path = url_of(store)
    return path.at(name) if isinstance(path, Url) else os.path.join(os.path.expanduser(path), name)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return True if ``path`` is a finished scidata store: a folder or URL with a manifest."""
    url = url_of(os.fspath(path))
    where = join(url, MANIFEST)
    try:
        if isinstance(url, Url):
            return not is_as_named(url) and read_head(where, 1).size > 0
        return files().size(where) > 0
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError as e:
        if e.errno == errno.ELOOP:  # links that lead to each other; the reader says so of the path itself
            return False
        raise


def check_inside(store: str, path: str) -> None:
    """Raise RefusedError for a file or folder of a store that is a symbolic link out of it; the store may be a link."""
    if is_url(store) or not os.path.islink(path):
        return
    target, top = os.path.realpath(path), os.path.realpath(store)
    if not target.startswith(top.rstrip("/") + "/"):
        raise RefusedError(
            f"{path}: this link leads to {target}, out of the store {store}; copy its target into the store"
        )

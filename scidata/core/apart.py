"""Check that outputs are apart from inputs: an output is no input, lies in none, and holds none.

Compared by device and inode of whatever is there, from the path up: links, ``..``, other spellings, hard links, bind
mounts and file systems that ignore case do not hide that two paths are one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TypeAlias

from scidata.core.urls import Url, local_path
from scidata.errors import OutputError

_Place: TypeAlias = tuple[int, int]  # device and inode
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}


def check_apart(
    out: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]], what: str, *, may_hold: bool = False
) -> None:
    """Raise if writing an output would change an input.

    ``out``: a path or URL that is written, or a folder that is written into.
    ``inputs``: paths and URLs that are read; groups in files, too. Not globs.
    ``what``: the output, as the message names it: ``"the cache"``.
    ``may_hold``: whether it may be a folder with inputs in it: one that is added to, and not replaced.
    """
    path = os.fspath(out)
    here = local_path(path)
    is_there = here is not None and os.path.exists(_real(here))  # first: other parts of a job create it concurrently
    own = [] if here is None else _places(here)
    folders: dict[str, list[_Place]] = {}  # many inputs share few folders
    for given in inputs:
        each = os.fspath(given)
        other = local_path(each)
        if (here is None) != (other is None):
            continue
        if here is None or other is None:
            servers = {url.server for url in (path, each) if isinstance(url, Url)} - {"[]"}
            found = _relation_of_urls(_key(path), _key(each)) if len(servers) < 2 else None
        else:
            found = _relation(own, is_there, _real(other), folders)
        if found is not None and not (found == "holds" and may_hold):
            raise OutputError(f"{path}: {what} {found} {each}, which is read; write it somewhere else")


def _relation(own: list[_Place], is_there: bool, path: str, folders: dict[str, list[_Place]]) -> str | None:
    whole = path
    while not os.path.lexists(path):  # a group in a file
        path = os.path.dirname(path)
    if path != whole and os.path.isdir(path):
        return None  # the input is missing
    place, folder = _place(path), os.path.dirname(path)
    if place in own:
        return "is" if is_there and own[0] == place else "lies in"
    if folder not in folders:
        folders[folder] = _places(folder)
    return "holds" if is_there and own[0] in folders[folder] else None


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _places(path: str) -> list[_Place]:
    """Return device and inode of the path and of each folder above it, as far as they exist."""
    found, real = [], _real(path)
    while True:
        if (place := _place(real)) is not None:
            found.append(place)
        if real == os.path.dirname(real):
            return found
        real = os.path.dirname(real)


def _place(path: str) -> _Place | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _key(url: str) -> str:
    """Return the address that identifies an object; of a chained URL, that of its last part."""
    address = url.identity if isinstance(url, Url) else url
    scheme, _, rest = address.rpartition("::")[2].partition("://")
    return f"{_ALIASES.get(scheme, scheme)}://{re.sub('/+', '/', rest).rstrip('/')}"


def _relation_of_urls(out: str, path: str) -> str | None:
    if out == path:
        return "is"
    if out.startswith(path + "/"):
        return "lies in"
    return "holds" if path.startswith(out + "/") else None

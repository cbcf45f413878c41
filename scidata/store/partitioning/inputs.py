"""Files that a sample was made of: their sizes and digests, by which a resumed run finds that one has changed.

Times are not recorded: copying a file gives it another, and a store would differ from the one made from the copy. The
folder is, as seen from that of the store: outputs go back to the files (:mod:`scidata.data.output.sample_files`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace

from scidata.core.urls import is_url
from scidata.errors import RefusedError
from scidata.meshes.formats.foam import files_of, is_case
from scidata.sources.access.files import version_at
from scidata.sources.groups import split_group
from scidata.store.format.manifest import InputInfo


def describe_input(path: str, store: str) -> InputInfo:
    """Read a file, or all files below a folder, and describe the content, and the place as seen from a store's.

    It costs one read in sequence, and 2 s of CPU for each GB. Of a URL only the name is described.
    """
    if is_url(path):
        return InputInfo(name=_name(path), size=None, digest=None)
    folder = os.path.relpath(os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.abspath(store)))
    found = split_group(path)
    content = _describe(path) if found is None else _describe_file(found[0], version_at(found[0]))
    return replace(content, name=_name(path), relative_folder=folder)


@functools.lru_cache(maxsize=4)
def _describe_file(path: str, version: object) -> InputInfo:
    """Describe a file whose groups are samples, once as long as it does not change."""
    return _describe(path)


def _describe(path: str) -> InputInfo:
    digest = hashlib.blake2b(digest_size=16)
    for relative, file in _files_of(path):
        digest.update(f"{relative}\0{os.path.getsize(file)}\0".encode())
        with open(file, "rb", buffering=0) as content:
            hashlib.file_digest(content, lambda: digest)
    return InputInfo(name=_name(path), size=_size(path), digest=digest.hexdigest())


def difference(path: str, recorded: InputInfo) -> str | None:
    """Return how a file differs from its record; None if it does not. Its content decides, after its size."""
    if is_url(path) or recorded.digest is None:
        return None
    file, _ = split_group(path) or (path, "")
    if (size := _size(file)) != recorded.size:
        return f"it has {size} bytes, and had {recorded.size}"
    found = describe_input(path, path)
    return None if found.digest == recorded.digest else f"its content differs, in as many bytes ({size})"


def _name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _size(path: str) -> int:
    return sum(os.path.getsize(file) for _, file in _files_of(path))


def _files_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield the path below the folder, and the whole one, of each file, in one and the same order everywhere."""
    if is_case(path):  # not its logs, and all else that lies there
        top = path if os.path.isdir(path) else os.path.dirname(path)
        yield from ((os.path.relpath(file, top), file) for file in sorted(files_of(path)))
        return
    if not os.path.isdir(path):
        yield "", _regular(path)
        return
    found: Iterable[str] = (os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
    for file in sorted(found):
        yield os.path.relpath(file, path), _regular(file)


def _regular(path: str) -> str:
    """Refuse files that may have no end, or block their reader."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise RefusedError(f"{path}: not a regular file (a pipe, socket or device); remove it from the inputs")
    return path

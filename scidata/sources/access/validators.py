"""Validators tell the content of a file or object from another one under the same name, in other processes too."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scidata.core.cache import Cache
from scidata.core.urls import Url, Version, local_path
from scidata.sources.access.fetches import each
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import NOT_THERE
from scidata.sources.access.remote import checks_versions, page

_MAX_PAGES = 128  # of listings, some 0.2 MB each
_MAX_TEXTS = 1 << 16
_ABSENT = "absent"
_SETTLED = 2.0  # seconds: some file systems keep times by the second, and a clock may run behind


@dataclass(frozen=True, slots=True)
class Validator:
    """The content of several files, as a digest of their validators.

    - ``digest``: another one for another content; files that are not there count, too. Empty where a server says
      nothing.
    - ``changed``: when the youngest of local files was changed, seconds since the epoch.
    """

    digest: bytes
    changed: float = 0.0

    @property
    def settles_in(self) -> float:
        """Seconds until a file that is changed is sure to get another time, no less than 0."""
        return max(0.0, self.changed + _SETTLED - time.time())


class Validators:
    """Asks for the versions of a source's files as they are now: by ``stat``; of objects by listings, or one by one.

    The version found here binds later reads: reading another version of the object raises.

    - ``root``: the source's path; the files lie there or below.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._pages: list[tuple[str, str | None, dict[str, Version]]] = []  # all objects between two keys
        self._lists = isinstance(root, Url)
        self._listing: Cache[bool] = Cache(0)  # by one thread, while others wait for its pages
        self._texts: Cache[str] = Cache(_MAX_TEXTS)  # of objects that were asked for

    def of(self, paths: Sequence[str], places: bytes = b"") -> Validator:
        """Return the validator of files; ``places``: a digest of the places in them that are read.

        Raises SourceChangedError: an object was replaced since it was first seen; OSError: it cannot be found out.
        """
        texts, changed = self._texts_of(paths)
        return Validator(_digest(texts, places), changed)

    def are_still(self, paths: Sequence[str], known: Validator, places: bytes = b"") -> bool:
        """Return True if files read meanwhile are as before; objects whose reading did not say are asked for."""
        texts, _ = self._texts_of(paths)
        if _digest(texts, places) != known.digest:
            return False
        silent = [
            (path, text)
            for path, text in zip(paths, texts, strict=True)
            if isinstance(path, Url) and not local_path(path) and (text == _ABSENT or not checks_versions(path))
        ]
        return _asked([url for url, _ in silent]) == [text for _, text in silent]

    def _texts_of(self, paths: Sequence[str]) -> tuple[list[str], float]:
        """Return the validator of each file, and the time at which the youngest local one was changed."""
        found = [_of_file(local) if (local := local_path(path)) else self._known(path) for path in paths]
        unknown = [path for path, each in zip(paths, found, strict=True) if each is None and isinstance(path, Url)]
        asked = iter(_asked(unknown))
        texts = [next(asked) if each is None else each[0] for each in found]
        for path, text in zip(paths, texts, strict=True):
            if not local_path(path):
                self._texts.put(path, text)
        return texts, max((each[1] for each in found if each is not None), default=0.0)

    def _known(self, path: str) -> tuple[str, float] | None:
        """Return the validator of an object from listings or an earlier request; None: it must be asked for."""
        assert isinstance(path, Url)
        if "::" in path.target:  # a cache on the way, perhaps, which does not look whether it is up to date
            return "", 0.0
        text = (self._listed(path) if self._lists else "") or self._texts.get(path)
        return None if text is None else (text, 0.0)

    def _listed(self, url: Url) -> str:
        key = str(url).removeprefix(f"{self._root}/")
        if key == str(url):  # the source is one object
            return ""
        found = self._page_of(key)
        if found is None:
            return ""
        version = found.get(key)
        if version is None:
            return _ABSENT
        known = url.seen.get(str(url))
        if known is not None and known.differs(version):
            return ""  # asking for it raises the difference
        url.seen.changed(str(url), version)
        return _text(url, version)

    def _page_of(self, key: str) -> dict[str, Version] | None:
        """Return the versions of objects between two keys around this one, or None if there is no listing."""
        while self._lists:
            for after, last, found in reversed(self._pages):
                if after < key and (last is None or key <= last):
                    return found
            self._listing.get_or_make("page", lambda: self._list(key[:-1]), once=True)
        return None

    def _list(self, after: str) -> bool:
        assert isinstance(self._root, Url)
        answer = page(self._root, after)
        if answer is None or not (answer[0] or answer[1]):
            self._lists = False
            return False
        found, is_last = answer
        self._pages = [*self._pages[1 - _MAX_PAGES :], (after, None if is_last else max(found), found)]
        return True


def _digest(texts: Sequence[str], places: bytes) -> bytes:
    known = all(texts) if texts else bool(places)
    return hashlib.sha256(places + "\n".join(texts).encode()).digest() if known else b""


def _of_file(path: str) -> tuple[str, float]:
    try:
        status = files().status(path)
    except NOT_THERE:
        return _ABSENT, 0.0
    # ctime, too: no program that copies files sets it back
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}", status.st_mtime


def _asked(urls: Sequence[Url]) -> list[str]:
    texts = []
    for url, info in zip(urls, each(urls, "info"), strict=True):
        if isinstance(info, Exception) and not isinstance(info, NOT_THERE):
            raise info
        absent = isinstance(info, Exception) or info.get("type") == "directory"
        texts.append(_ABSENT if absent else _text(url, url.seen.get(str(url))))
    return texts


def _text(url: Url, version: Version | None) -> str:
    if version is None:
        return ""
    name = version.etag or version.version
    if name is not None:
        return f"{version.size} {name}"
    return "" if version.modified is None else f"{version.size} {version.modified} {url.server}"

"""First reads of objects: one GET brings the first or last bytes, the size and the version; no HEAD goes before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scidata.core.cache import Cache
from scidata.core.urls import Url, is_url, url_of
from scidata.errors import SciDataError
from scidata.sources.access.fetches import each
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import KeptUrl
from scidata.sources.access.remote import gives_tails, request

#: Bytes that the first read of an object brings: opening a file takes some of these several times.
FIRST_BYTES = 256 << 10
#: Of one document; as objects of Python it takes up to twenty times as much.
MAX_METADATA_BYTES = 1 << 26
_MAX_KEPT = 8 << 20
#: Answers for an object that is not there.
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
NOT_THERE = (*GONE, KeyError)


class FirstRead(NamedTuple):
    """Some bytes of a file or object, and the size of all of it."""

    data: bytes
    size: int


_heads: Cache[FirstRead] = Cache(_MAX_KEPT, "lru")
_documents: Cache[bytes | Exception] = Cache(_MAX_KEPT, "lru")


def _url(path: str) -> Url:
    url = url_of(path)
    assert isinstance(url, Url)
    return url


def _key(url: Url) -> tuple[object, str]:
    return url.seen, str(url)  # an object is known by its version for as long as a source is open


def read_head(path: str, nbytes: int) -> FirstRead:
    """Read the first ``nbytes`` bytes of a file, fewer of a short one; those of an object are kept until forgotten."""
    url = url_of(path)
    if not isinstance(url, Url) or isinstance(url, KeptUrl):
        size = files().open_size(path)
        return FirstRead(bytes(files().read(path, 0, min(nbytes, size))), size)
    return _heads.get_or_make(_key(url), lambda: read_begin(url, FIRST_BYTES), lambda found: len(found.data) + 1)


def read_begin(path: str, nbytes: int) -> FirstRead:
    """Read the first bytes of an object, ``nbytes`` if it has as many; nothing is kept."""
    data, size = request(_url(path), "first", nbytes=nbytes)
    return FirstRead(bytes(data), size)


def read_tail(path: str, nbytes: int) -> FirstRead:
    """Read the last bytes of an object, ``nbytes`` if it has as many; nothing is kept."""
    url = _url(path)
    if gives_tails(url):
        data, size = request(url, "tail", nbytes=nbytes)
        return FirstRead(bytes(data), size)
    size = files().size(url)
    return FirstRead(bytes(files().read(url, max(0, size - nbytes), min(nbytes, size))), size)


def has_document(url: Url, most: int) -> bool:
    """Return True if an object is there, and not forbidden; unless too large, it is kept for :func:`read_documents`."""
    try:
        (found,) = read_documents([url], most)
    except SciDataError:  # which reading it raises again
        return True
    keep_document(url, found)
    if isinstance(found, Exception) and not isinstance(found, (*NOT_THERE, PermissionError)):
        raise found
    return isinstance(found, bytes)


def keep_document(url: Url, found: bytes | Exception) -> None:
    """Keep an answer for the next :func:`read_documents`."""
    if isinstance(found, (bytes, *NOT_THERE)):
        _documents.put(_key(url), found, 1 + len(found) if isinstance(found, bytes) else 1)


def read_documents(urls: Sequence[Url], most: int) -> list[bytes | Exception]:
    """Read objects of at most ``most`` bytes side by side; return errors in place of those that cannot be read."""
    kept = [_documents.get(_key(url)) for url in urls]
    asked = iter(each([url for url, found in zip(urls, kept, strict=True) if found is None], "document", most=most))
    answers = [next(asked) if found is None else found for found in kept]
    forget_documents(urls)  # once: whoever asks again wants to see whether it has changed
    for found in answers:
        if isinstance(found, SciDataError):
            raise found
    return [found if isinstance(found, Exception) else bytes(found) for found in answers]


def forget_documents(urls: Sequence[Url]) -> None:
    """Forget what :func:`has_document` has kept."""
    for url in urls:
        _documents.drop(_key(url))


def forget_head(path: str) -> None:
    """Forget the first bytes of an object: the next use reads them again."""
    if is_url(path):
        _heads.drop(_key(_url(path)))

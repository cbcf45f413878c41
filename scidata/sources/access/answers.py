"""What answers of servers say of an object, checked: as many bytes as were asked for, of the version first seen."""

from __future__ import annotations

import errno
import re
from typing import Any

from scidata.core.urls import Url, Version
from scidata.errors import CorruptDataError, ShortReadError, SourceChangedError, UnsupportedFormatError
from scidata.sources.access.retry import causes, status_of


def is_beyond_end(error: BaseException) -> bool:
    """Say whether a server refused a range since the object ends before it."""
    invalid = any(isinstance(e, OSError) and e.errno == errno.EINVAL for e in causes(error))
    return status_of(error) == 416 or (invalid and "range" in str(error).lower())


class _CutShortError(ConnectionResetError):
    """A body that has fewer bytes than the object has there."""


def checked(data: Any, url: Url, offset: int, nbytes: int, size: int | None) -> Any:
    """Check how many bytes came; ``size`` is the object's, asked for where they are not as many as wanted."""
    if len(data) == nbytes:
        return data
    if len(data) > nbytes:
        raise CorruptDataError(f"{url}: {nbytes} bytes were asked for, and {len(data)} came; {_BLAME}")
    if size is not None and size >= offset + nbytes:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {nbytes} bytes")
    raise ShortReadError(
        f"{url}: gave {len(data)} bytes from {offset} on, but {nbytes} were expected; "
        "the object is truncated: upload it again"
    )


def noted(url: Url, method: str, found: Any) -> Any:
    """Compare what ``info`` says with what was seen before."""
    if method != "info" or found.get("type") == "directory":
        return found
    version = version_of(found)
    known = url.seen.get(str(url))
    if known is not None and is_pinned(url, known, version):
        return found | {"size": known.size}  # of the version that is read
    check_version(url, version)
    return found


def version_of(info: Any, size: int | None = None) -> Version:
    """Return what an answer of fsspec's file systems tells objects' contents apart by."""

    def first(*names: str) -> str | None:
        return next((str(info[name]) for name in names if info.get(name) not in (None, "")), None)

    return Version(
        size=info.get("size") if size is None else size,
        etag=_without_weakness(first("ETag", "etag")),
        version=first("VersionId", "generation", "version_id"),
        modified=first("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
    )


def _without_weakness(etag: str | None) -> str | None:
    return None if etag is None else etag.removeprefix("W/")


def check_version(url: Url, version: Version) -> None:
    """Take in the version of an object that an answer tells of.

    Raises
    ------
    SourceChangedError
        Another one was seen first.
    """
    difference = url.seen.changed(str(url), version)
    if difference:
        raise SourceChangedError(
            f"{url}: was replaced while it was read ({difference}); open the data set again, once writing has ended"
        )


def is_pinned(url: Url, known: Version, found: Version) -> bool:
    """Whether an object was replaced in a bucket that keeps the version that was seen first: go on with that."""
    if known.version is None or found.version is None or not known.differs(found):
        return False
    url.seen.pinned.add(str(url))
    return True


def lost_version(url: Url, version: str | None, said: str) -> SourceChangedError:
    """Return the error of an object whose version that was first seen cannot be read any more."""
    return SourceChangedError(
        f"{url}: was replaced while it was read, and version {version}, which was seen first, "
        f"cannot be read ({url.public(said)}); open the data set again"
    )


def check_document(where: str, nbytes: int | None, most: int) -> None:
    """Refuse a document that is larger than ``most`` bytes, before it is read.

    Raises
    ------
    UnsupportedFormatError
    """
    if nbytes is not None and nbytes > most:
        raise UnsupportedFormatError(
            f"{where}: has {nbytes} bytes, but at most {most} of one metadata document are read; open the groups below "
            "it one by one, or write smaller attributes"
        )


def check_status(url: Url, status: int, encoding: str, *, asked_part: bool) -> None:
    """Refuse answers of web servers that are no success, no whole object, or a part of something that is compressed.

    Raises
    ------
    CorruptDataError, UnsupportedFormatError
    """
    if status not in (200, 203) and not (status == 206 and asked_part):
        asked = "a part of it" if asked_part else "all of it"
        raise CorruptDataError(f"{url}: the server answered {status}, when {asked} was asked for; {_BLAME}")
    if status == 206 and encoding != "identity":
        raise UnsupportedFormatError(
            f"{url}: the server sends parts of it compressed (Content-Encoding: {encoding}), which cannot be read one "
            "by one; have it serve the object as it is, or copy the object first"
        )


_BLAME = "the server, or a proxy before it, is at fault: read it by another way, or copy it first"


def size_of_range(url: Url, span: tuple[int, int], content_range: str | None) -> int | None:
    """Return the size of an object in ``bytes 0-9/1234``, which an answer of a part has to say of the part.

    Raises
    ------
    CorruptDataError
        It says nothing, or names other bytes than those that were asked for.
    """
    first, last = span[0], sum(span) - 1
    found = re.fullmatch(r"\s*bytes\s+(\d+)-(\d+)/(\d+|\*)\s*", content_range or "")
    size = int(found[3]) if found is not None and found[3] != "*" else None
    wanted = first, last if size is None else min(last, size - 1)
    if found is None or (int(found[1]), int(found[2])) != wanted:
        said = f"names others: {content_range!r:.80}" if content_range else "does not name them (Content-Range)"
        raise CorruptDataError(f"{url}: bytes {first} to {last} were asked for, and the answer {said}; {_BLAME}")
    return size


def size_in(info: Any, where: str) -> int:
    """Return the size that ``info`` tells.

    Raises
    ------
    OSError
        The server does not say it.
    """
    if info.get("size") is None:
        raise OSError(errno.EIO, f"{where}: the server does not say how large it is; copy it first")
    return int(info["size"])


def whole(data: Any, size: int | None, url: Url) -> bytes:
    """Check that all of an object came, as far as its size is known."""
    known = url.seen.get(str(url))
    size = known.size if size is None and known is not None else size
    if size is not None and len(data) < size:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {size} bytes")
    return data if isinstance(data, bytes) else bytes(data)

"""Answers of servers, checked: as many bytes as were asked for, of the version first seen."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TypedDict, TypeVar

from scidata.core.urls import Url, Version
from scidata.errors import CorruptDataError, ShortReadError, SourceChangedError, UnsupportedFormatError
from scidata.sources.access.retry import causes, status_of

_Data = TypeVar("_Data", bound="bytes | memoryview")


def is_beyond_end(error: BaseException) -> bool:
    """Return True if a server refused a range since the object ends before it."""
    invalid = any(isinstance(e, OSError) and e.errno == errno.EINVAL for e in causes(error))
    return status_of(error) == 416 or (invalid and "range" in str(error).lower())


BLAME = "the server, or a proxy before it, is at fault: read it by another way, or copy it first"


class Info(TypedDict, total=False):
    """Description of an object by fsspec's file systems; their own names for its version stand beside these."""

    name: str
    type: str
    size: int | None


class _CutShortError(ConnectionResetError):
    """A body that has fewer bytes than the object has there."""


def checked(data: _Data, url: Url, offset: int, nbytes: int, size: int | None) -> _Data:
    """Check how many bytes came; ``size`` is the object's, asked for if they are not as many as wanted."""
    if len(data) == nbytes:
        return data
    if len(data) > nbytes:
        raise CorruptDataError(f"{url}: {nbytes} bytes were asked for, and {len(data)} came; {BLAME}")
    if size is not None and size >= offset + nbytes:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {nbytes} bytes")
    raise ShortReadError(
        f"{url}: gave {len(data)} bytes from {offset} on, but {nbytes} were expected; "
        "the object is truncated: upload it again"
    )


def at_most(data: _Data, url: Url, nbytes: int, size: int | None) -> tuple[_Data, int]:
    """Check an answer of the first or last ``nbytes`` bytes, fewer of a short object; return it with the size."""
    size = size_in({"size": size}, url)
    return checked(data, url, 0, min(nbytes, size), size), size


def noted(url: Url, found: Info) -> Info:
    """Compare a server's description of an object with the one seen before."""
    if found.get("type") == "directory":
        return found
    version = version_of(found)
    known = url.seen.get(str(url))
    if known is not None and is_pinned(url, known, version):
        return {**found, "size": known.size}  # of the version that is read
    check_version(url, version)
    return found


def version_of(info: Mapping[str, object], size: int | None = None) -> Version:
    """Return the part of an answer of fsspec's file systems that identifies the object's content."""

    def first(*names: str) -> str | None:
        return next((str(info[name]) for name in names if info.get(name) not in (None, "")), None)

    said, etag = info.get("size"), first("ETag", "etag")
    return Version(
        size=said if size is None and isinstance(said, int) else size,
        etag=etag and etag.removeprefix("W/"),
        version=first("VersionId", "generation", "version_id"),
        modified=first("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
    )


def check_version(url: Url, version: Version) -> None:
    """Take in the version of an object that an answer tells of."""
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
    """Refuse a document that is larger than ``most`` bytes, before it is read. Raises UnsupportedFormatError."""
    if nbytes is not None and nbytes > most:
        raise UnsupportedFormatError(
            f"{where}: has {nbytes} bytes, but at most {most} of one metadata document are read; open the groups below "
            "it one by one, or write smaller attributes"
        )


def size_in(info: Info, where: str) -> int:
    """Return the size that ``info`` tells. Raises OSError: the server does not say it."""
    size = info.get("size")
    if size is None:
        raise OSError(errno.EIO, f"{where}: the server does not say how large it is; copy it first")
    return int(size)


def whole(data: bytes | memoryview, size: int | None, url: Url) -> bytes:
    """Check that all of an object came, as far as its size is known."""
    known = url.seen.get(str(url))
    size = known.size if size is None and known is not None else size
    if size is not None and len(data) < size:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {size} bytes")
    return data if isinstance(data, bytes) else bytes(data)

"""Requests to web servers by fsspec's session of aiohttp: answers are checked, and redirects tell no secrets.

obstore reads no web servers here: it tells another host, to which a server redirects, the user's headers and the query
of the URL; and it understands no answer without Content-Length, and none of a server that ignores ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from scidata.core.urls import Url
from scidata.errors import CorruptDataError, RefusedError, SciDataError, UnsupportedFormatError
from scidata.sources.access.answers import BLAME, Info, at_most, check_document, check_version, size_in, version_of
from scidata.sources.access.retry import status_of

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
    from fsspec.implementations.http import HTTPFileSystem
    from yarl import URL

_PIECE = 256 << 10
_REFUSALS = (400, 416, 500, 501)  # of a range of the last bytes, which a server need not know
#: Headers of a request that any host may know. All others are the user's.
_PUBLIC = {"range", "accept", "accept-encoding", "user-agent", "host", "connection"}

#: Scheme, host and port that a call of fsspec asks first; each runs as a task of its own.
_first: ContextVar[URL] = ContextVar("first")


async def keep_secrets(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Send the user's headers, cookies and passwords to no other host that a server redirects to.

    A middleware of aiohttp, which calls it for each redirect, too.
    """
    origin = request.url.origin()
    if _first.get(origin) != origin:
        for name in [name for name in request.headers if name.lower() not in _PUBLIC]:
            request.headers.popall(name, None)
    elif _first.get(None) is None:
        _first.set(origin)
    return await handler(request)


def redirect_error(url: Url, errors: Iterable[BaseException]) -> SciDataError | None:
    """Return the error of a redirect that aiohttp does not follow; None for other errors."""
    for e in errors:
        match type(e).__name__:
            case "NonHttpUrlRedirectClientError":
                scheme = str(e).partition(":")[0]
                return RefusedError(f"{url}: the server redirects to {scheme}://, which is not followed")
            case "InvalidUrlRedirectClientError":
                return UnsupportedFormatError(f"{url}: the server redirects to something that is no URL")
            case "TooManyRedirects":
                return UnsupportedFormatError(f"{url}: the server redirects again and again")
    return None


async def read(
    url: Url, fs: HTTPFileSystem, path: str, span: tuple[int, int] | None, most: int | None = None
) -> tuple[bytes, int | None]:
    """Read an object of a web server, or ``span``, a first byte and a number of bytes; of the last bytes, it is -1.

    Returns
    -------
    bytes, int or None
        Those of the span that the object has, and the object's size, as far as the server says it.
    """
    session = await fs.set_session()
    options = dict(fs.kwargs)
    # as fsspec asks for the size: a compressed answer would be another representation, with another ETag
    headers = dict(options.pop("headers", None) or {}) | {"Accept-Encoding": "identity"}
    if span is not None:
        headers["Range"] = f"bytes=-{span[1]}" if span[0] < 0 else f"bytes={span[0]}-{sum(span) - 1}"
    async with session.get(fs.encode_url(path), headers=headers, **options) as answer:
        if answer.status >= 400:
            fs._raise_not_found_for_status(answer, path)
        encoding = answer.headers.get("Content-Encoding", "") or "identity"
        _check_status(url, answer.status, encoding, asked_part=span is not None)
        if span is not None and answer.status == 206:
            size = _size_of_range(url, span, answer.headers.get("Content-Range"))
            check_version(url, version_of(answer.headers, size))
            return await answer.read(), size
        length = answer.headers.get("Content-Length") if encoding == "identity" else None
        size = int(length) if length else None
        check_version(url, version_of(answer.headers, size))
        if most is not None:
            check_document(url, size, most)
        if span is not None and span[0] < 0:
            if size is None:
                raise CorruptDataError(f"{url}: all of it comes, and the answer does not say how much that is; {BLAME}")
            span = max(0, size - span[1]), span[1]
        return await _part_of_body(answer, span, url, most), size


async def read_tail(url: Url, fs: HTTPFileSystem, path: str, nbytes: int) -> tuple[bytes, int]:
    """Read the last bytes of an object, and its size; where a server refuses or misreads such a range, ask for that."""
    try:
        data, known = await read(url, fs, path, (-1, nbytes))
        return at_most(data, url, nbytes, known)
    except Exception as e:
        gave_up = status_of(e) in _REFUSALS or type(e).__name__ == "ServerDisconnectedError"
        if not gave_up and not isinstance(e, CorruptDataError):
            raise
    size = size_in(await info(url, fs, path), url)
    data, _ = await read(url, fs, path, (max(0, size - nbytes), nbytes)) if size else (b"", size)
    return at_most(data, url, nbytes, size)


async def _part_of_body(answer: ClientResponse, span: tuple[int, int] | None, url: Url, most: int | None) -> bytes:
    """Read no more of an answer than is wanted: not every server says how much comes, or cuts ranges."""
    begin, end = (0, None) if span is None else (span[0], sum(span))
    data, at = bytearray(), 0
    async for piece in answer.content.iter_chunked(_PIECE):
        data += piece[max(0, begin - at) : None if end is None else max(0, end - at)]
        at += len(piece)
        if most is not None:
            check_document(url, at, most)
        if end is not None and at >= end:
            break
    return bytes(data)


async def info(url: Url, fs: HTTPFileSystem, path: str) -> Info:
    """Ask for the size by HEAD; of a server that does not say it then, by a range of one byte."""
    found: Info = (await fs._info(path)).copy()
    if found.get("size") is None:
        found["size"] = (await read(url, fs, path, (0, 1)))[1]
    return found


def _check_status(url: Url, status: int, encoding: str, *, asked_part: bool) -> None:
    """Refuse answers of web servers that are no success, no whole object, or a part of something that is compressed."""
    if status not in (200, 203) and not (status == 206 and asked_part):
        asked = "a part of it" if asked_part else "all of it"
        raise CorruptDataError(f"{url}: the server answered {status}, when {asked} was asked for; {BLAME}")
    if status == 206 and encoding != "identity":
        raise UnsupportedFormatError(
            f"{url}: the server sends parts of it compressed (Content-Encoding: {encoding}), which cannot be read one "
            "by one; have it serve the object as it is, or copy the object first"
        )


def _size_of_range(url: Url, span: tuple[int, int], content_range: str | None) -> int | None:
    """Return the size of an object in ``bytes 0-9/1234``, which an answer of a part has to say of the part."""
    found = re.fullmatch(r"\s*bytes\s+(\d+)-(\d+)/(\d+|\*)\s*", content_range or "")
    size = int(found[3]) if found is not None and found[3] != "*" else None
    first = span[0] if span[0] >= 0 else max(0, (size or 0) - span[1])
    last = first + span[1] - 1
    wanted = first, last if size is None else min(last, size - 1)
    if found is None or (int(found[1]), int(found[2])) != wanted:
        said = f"names others: {content_range!r:.80}" if content_range else "does not name them (Content-Range)"
        raise CorruptDataError(f"{url}: bytes {first} to {last} were asked for, and the answer {said}; {BLAME}")
    return size

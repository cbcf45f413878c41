"""Requests to web servers by fsspec's session of aiohttp: answers are checked, redirects followed as curl does.

obstore reads no web servers here: it tells another host, to which a server redirects, the user's headers and the query
of the URL; and it understands no answer without Content-Length, and none of a server that ignores ranges.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from scidata.core.urls import Url
from scidata.errors import CorruptDataError, RefusedError, UnsupportedFormatError
from scidata.sources.access.answers import BLAME, Info, check_document, check_version, version_of

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from fsspec.implementations.http import HTTPFileSystem
    from yarl import URL

_MAX_REDIRECTS = 10  # as aiohttp
_PIECE = 256 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
#: What each server may know of a request. All other headers are the user's, and so are these options.
_OURS = ("range", "accept", "accept-encoding", "user-agent")
_PRIVATE = ("headers", "auth", "cookies", "params", "proxy_headers", "middlewares", "trace_request_ctx")
#: Options of a session that are for any host.
_COMMON = ("loop", "timeout", "trust_env", "proxy", "proxy_auth", "max_line_size", "max_field_size")


class WebSession:
    """A session of aiohttp as fsspec uses one, to read.

    Parameters
    ----------
    session
        With all that the user gave.
    bare
        Makes one without headers, cookies and passwords: for other hosts.
    """

    def __init__(self, session: ClientSession, bare: Callable[[], ClientSession]) -> None:
        self._session, self._make_bare = session, bare
        self._bare: ClientSession | None = None

    def get(self, url: URL | str, **options: Any) -> _Answer:
        """Ask for an object, or a part of it."""
        return _Answer(self._follow("get", url, options))

    def head(self, url: URL | str, **options: Any) -> _Answer:
        """Ask for the description of an object."""
        return _Answer(self._follow("head", url, options))

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._session, self._bare):
            if session is not None:
                await session.close()

    async def _follow(self, method: str, url: URL | str, options: dict[str, Any]) -> ClientResponse:
        from yarl import URL  # aiohttp's

        at = begin = url if isinstance(url, URL) else URL(url)
        session, allowed = self._session, options.pop("allow_redirects", True)
        for _ in range(options.pop("max_redirects", _MAX_REDIRECTS)):
            answer: ClientResponse = await getattr(session, method)(at, allow_redirects=False, **options)
            to = answer.headers.get("Location")
            if not allowed or to is None or answer.status not in _REDIRECTS:
                return answer
            answer.release()
            try:
                before, at = at, at.join(URL(to))
            except ValueError:
                raise UnsupportedFormatError(f"{begin}: the server redirects to something that is no URL") from None
            if at.scheme not in ("http", "https") or not at.host:
                raise RefusedError(f"{begin}: the server redirects to {at.scheme}://, which is not followed")
            options.pop("params", None)  # are in the address that the server has made
            if at.origin() != before.origin():
                options = _public(options)
                session = self._bare = self._bare or self._make_bare()
        raise UnsupportedFormatError(f"{begin}: the server redirects again and again")


class _Answer:
    """Result of aiohttp's requests: awaited, or entered."""

    def __init__(self, request: Awaitable[ClientResponse]) -> None:
        self._request = request
        self._answer: ClientResponse | None = None

    def __await__(self) -> Generator[object, None, ClientResponse]:
        return self._request.__await__()

    async def __aenter__(self) -> ClientResponse:
        self._answer = await self._request
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._answer is not None
        await self._answer.__aexit__(kind, error, trace)


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    headers = {name: value for name, value in (options.get("headers") or {}).items() if name.lower() in _OURS}
    return {name: value for name, value in options.items() if name not in _PRIVATE} | {"headers": headers}


def with_redirects(make: Callable[..., Awaitable[ClientSession]]) -> Callable[..., Awaitable[WebSession]]:
    """Return a factory of fsspec's sessions from a factory of aiohttp's."""

    async def made(**options: Any) -> WebSession:
        import aiohttp

        session = await make(**options)
        common = {name: value for name, value in options.items() if name in _COMMON}
        common |= {"connector": session.connector, "connector_owner": False}
        return WebSession(session, lambda: aiohttp.ClientSession(**common))

    return made


async def read(
    url: Url, fs: HTTPFileSystem, path: str, span: tuple[int, int] | None, most: int | None = None
) -> tuple[bytes, int | None]:
    """Read an object of a web server, or ``span``, a first byte and a number of bytes.

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
        headers["Range"] = f"bytes={span[0]}-{sum(span) - 1}"
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
        return await _part_of_body(answer, span, url, most), size


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
    """Refuse answers of web servers that are no success, no whole object, or a part of something that is compressed.

    Raises
    ------
    CorruptDataError, UnsupportedFormatError
    """
    if status not in (200, 203) and not (status == 206 and asked_part):
        asked = "a part of it" if asked_part else "all of it"
        raise CorruptDataError(f"{url}: the server answered {status}, when {asked} was asked for; {BLAME}")
    if status == 206 and encoding != "identity":
        raise UnsupportedFormatError(
            f"{url}: the server sends parts of it compressed (Content-Encoding: {encoding}), which cannot be read one "
            "by one; have it serve the object as it is, or copy the object first"
        )


def _size_of_range(url: Url, span: tuple[int, int], content_range: str | None) -> int | None:
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
        raise CorruptDataError(f"{url}: bytes {first} to {last} were asked for, and the answer {said}; {BLAME}")
    return size

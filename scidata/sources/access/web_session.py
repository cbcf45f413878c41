"""Requests to web servers, which follow redirects as curl does: another host learns nothing that was meant for one.

aiohttp takes the headers, cookies and passwords that the user gave along to wherever a server points.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from scidata.errors import RefusedError, UnsupportedFormatError

_MAX_REDIRECTS = 10  # as aiohttp
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

    def __init__(self, session: Any, bare: Callable[[], Any]) -> None:
        self._session, self._make_bare = session, bare
        self._bare: Any = None

    def get(self, url: Any, **options: Any) -> _Answer:
        """Ask for an object, or a part of it."""
        return _Answer(self._follow("get", url, options))

    def head(self, url: Any, **options: Any) -> _Answer:
        """Ask what is said of an object."""
        return _Answer(self._follow("head", url, options))

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._session, self._bare):
            if session is not None:
                await session.close()

    async def _follow(self, method: str, url: Any, options: dict[str, Any]) -> Any:
        from yarl import URL  # aiohttp's

        at = begin = url if isinstance(url, URL) else URL(url)
        session, allowed = self._session, options.pop("allow_redirects", True)
        for _ in range(options.pop("max_redirects", _MAX_REDIRECTS)):
            answer = await getattr(session, method)(at, allow_redirects=False, **options)
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
    """What aiohttp's requests return: awaited, or entered."""

    def __init__(self, request: Awaitable[Any]) -> None:
        self._request = request
        self._answer: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._request.__await__()

    async def __aenter__(self) -> Any:
        self._answer = await self._request
        return self._answer

    async def __aexit__(self, *of_error: Any) -> None:
        await self._answer.__aexit__(*of_error)


def _public(options: dict[str, Any]) -> dict[str, Any]:
    headers = {name: value for name, value in (options.get("headers") or {}).items() if name.lower() in _OURS}
    return {name: value for name, value in options.items() if name not in _PRIVATE} | {"headers": headers}


def with_redirects(make: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[WebSession]]:
    """Return what makes fsspec's sessions, of what makes aiohttp's."""

    async def made(**options: Any) -> WebSession:
        import aiohttp

        session = await make(**options)
        common = {name: value for name, value in options.items() if name in _COMMON}
        common |= {"connector": session.connector, "connector_owner": False}
        return WebSession(session, lambda: aiohttp.ClientSession(**common))

    return made

"""URLs whose bytes are kept: readers need not know whether a request is made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypedDict

from scidata.core.urls import Url
from scidata.sources.access.filesystems import current


class RequestOptions(TypedDict, total=False):
    """A request: a range; of a document at most so many bytes; or a page of keys after one."""

    offset: int
    nbytes: int
    most: int
    after: str


class Came(NamedTuple):
    """A range of a :class:`KeptUrl`, and its cost at the server: bytes and requests."""

    data: memoryview
    num_fetched: int
    num_requests: int


class Keeper(Protocol):
    """Keeper of the bytes of URLs. It pickles."""

    def start(self, url: KeptUrl, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        """Begin a request as :func:`scidata.sources.access.remote.start` does; a range comes as a :class:`Came`."""


class Reader(NamedTuple):
    """Keeper of bytes that this process has, or computes: they can be read together with URLs of servers.

    ``read`` takes the first byte and the number of bytes, on any thread; it raises ShortReadError past the end.
    """

    read: Callable[[int, int], bytes]

    def start(self, url: KeptUrl, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        """Read a range."""
        return current().pool("request").submit(self.read, options["offset"], options["nbytes"])


class KeptUrl(Url):
    """A URL whose requests a keeper answers: ``key`` is the place below its own, ``plain`` the URL of the server."""

    keeper: Keeper
    key: str
    plain: Url

    def __new__(cls, plain: Url, keeper: Keeper, key: str = "") -> KeptUrl:
        """Make it."""
        self = super().__new__(cls, plain.target, plain.options, text=str(plain), seen=plain.seen)
        assert isinstance(self, KeptUrl)
        self.keeper, self.key, self.plain = keeper, key, plain
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return KeptUrl, (self.plain, self.keeper, self.key)

    def at(self, key: str) -> Url:
        """Return the URL of a path below."""
        return KeptUrl(self.plain.at(key), self.keeper, f"{self.key}/{key}" if self.key else key) if key else self

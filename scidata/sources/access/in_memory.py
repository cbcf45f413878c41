"""URLs of objects whose bytes this process has in memory."""

from __future__ import annotations

from collections.abc import Callable

from scidata.core.urls import Url


class InMemoryUrl(Url):
    """A URL whose bytes this process has, or computes: it can be read together with URLs of servers.

    Attributes
    ----------
    read
        Called with the first byte and the number of bytes, from any thread; raises ShortReadError past the end.
    """

    read: Callable[[int, int], bytes]

    def __new__(cls, text: str, read: Callable[[int, int], bytes]) -> InMemoryUrl:
        """Make the URL; messages show ``text``."""
        self = super().__new__(cls, text, {})
        assert isinstance(self, InMemoryUrl)
        self.read = read
        return self

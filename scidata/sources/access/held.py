"""Objects that this process gives itself, in place of a server."""

from __future__ import annotations

from collections.abc import Callable

from scidata.core.urls import Url


class Held(Url):
    """A URL of which this process has the bytes, or knows how to get them: what reads many URLs reads these along.

    Attributes
    ----------
    read
        Called with the first byte and the number of bytes, from any thread; raises ShortReadError where it ends before.
    """

    read: Callable[[int, int], bytes]

    def __new__(cls, text: str, read: Callable[[int, int], bytes]) -> Held:
        """Make it; ``text`` is shown."""
        self = super().__new__(cls, text, {})
        assert isinstance(self, Held)
        self.read = read
        return self

"""What a prefetcher asks of the other ranks that read along; knows nothing of how they are reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Peers(Protocol):
    """The other ranks that read along; :class:`scidata.loader.peers.session.Session` is them."""

    def check(self, step: int) -> None:
        """Raise what another rank has failed with, where it concerns this item."""

    def failed(self, step: int, error: BaseException, *, ahead: bool = False) -> None:
        """Tell them that this item has failed, or will when it is its turn; any thread."""

    def timed_out(self, step: int, error: Exception) -> Exception:
        """Tell them that this item did not come in time; return what to raise: theirs, where they are the reason."""

    def slow(self, step: int, text: str) -> None:
        """Warn that this item takes long."""


class Ballot(Protocol):
    """Decides which samples are left out because some rank cannot read them; the same on all ranks."""

    def vote(self, step: int, size: int, bad: Mapping[int, BaseException]) -> None:
        """Say which places of an item could not be read here; a reader thread, once an item."""

    def dropped(self, step: int, size: int) -> frozenset[int]:
        """Return the places that are left out; waits for the other ranks."""

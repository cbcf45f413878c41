"""How far a recipe has come, a line on stderr every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["telling"]


def telling(what: str, total: int, *, every: float = 5.0) -> Callable[[float], None]:
    """Say that ``what`` begins; the value is called with what share of ``total`` is done more."""
    print(f"{what}: {total} to do", file=sys.stderr, flush=True)
    done, told = 0.0, time.monotonic()

    def tick(share: float = 1.0) -> None:
        nonlocal done, told
        done += share
        if time.monotonic() - told >= every and done < total:
            told = time.monotonic()
            print(f"{what}: {done:.1f} of {total}", file=sys.stderr, flush=True)

    return tick

"""Inflate zlib and gzip streams: by zlib-ng if it is installed (the extra ``deflate``), else by Python's zlib.

zlib-ng is zlib with vector code: it stops at the same sizes and says the same of the same damage. isa-l, as fast on
average, accepts gzip headers that zlib refuses (tests/bench/README.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache
from typing import Protocol

from scidata.core.install import install_hint
from scidata.core.types import ArrayLayout

_CODECS = {"gzip", "zlib"}


class Decompressor(Protocol):
    """A stream of the standard library that gives no more bytes at once than it is asked for."""

    @property
    def eof(self) -> bool:
        """Whether the stream's end, with its checksum, was read."""

    @property
    def unused_data(self) -> bytes:
        """Bytes behind that end."""

    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes:
        """Decode at most ``max_length`` bytes more."""


class Engine(Protocol):
    """The part of the module zlib that scidata uses."""

    @property
    def error(self) -> type[Exception]:
        """Raised of damaged streams; each engine has its own."""

    def decompressobj(self, wbits: int = ..., /) -> Decompressor:
        """Open a stream: 15 is zlib, 31 gzip."""


@cache
def engine() -> Engine:
    """Return zlib-ng's module, loaded with the first stream, or Python's zlib."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib
    return zlib_ng


def decoder_text(layouts: Iterable[ArrayLayout]) -> str | None:
    """Say which library inflates arrays; None if scidata inflates none of them."""
    names = sorted(_CODECS & {codec.name for each in layouts if not each.fallback for codec in each.codecs})
    if not names:
        return None
    found = f"{' and '.join(names)}: decoded by "
    if engine() is not zlib:
        return f"{found}zlib-ng"
    return f"{found}Python's zlib; zlib-ng is 1.1 to 2.6 times as fast: {install_hint('deflate')}"

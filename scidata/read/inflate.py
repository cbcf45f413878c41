"""Inflate zlib and gzip streams, with zlib-ng if installed (extra ``deflate``), else with Python's zlib.

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
    """A standard library stream with a limit on the bytes returned at once."""

    @property
    def eof(self) -> bool:
        """Whether the stream's end, including its checksum, was read."""

    @property
    def unused_data(self) -> bytes:
        """Bytes after the end."""

    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes:
        """Decode at most ``max_length`` further bytes."""


class Engine(Protocol):
    """The functions of module zlib that scidata uses."""

    @property
    def error(self) -> type[Exception]:
        """Raised for damaged streams; each engine has its own."""

    def decompressobj(self, wbits: int = ..., /) -> Decompressor:
        """Open a stream: 15 means zlib, 31 gzip."""


@cache
def engine() -> Engine:
    """Return zlib-ng's module, loaded on first use, or Python's zlib."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib
    return zlib_ng


def decoder_text(layouts: Iterable[ArrayLayout]) -> str | None:
    """Name the library that inflates arrays; None if scidata inflates none of them."""
    names = sorted(_CODECS & {codec.name for each in layouts if not each.fallback for codec in each.codecs})
    if not names:
        return None
    found = f"{' and '.join(names)}: decoded by "
    if engine() is not zlib:
        return f"{found}zlib-ng"
    return f"{found}Python's zlib; zlib-ng is 1.1 to 2.6 times as fast: {install_hint('deflate')}"

"""Zstandard through numcodecs' library, with one context per thread.

numcodecs makes a context for each chunk, which takes a fifth to a quarter of decoding 50 kB.
"""

from __future__ import annotations

import ctypes
import threading

from numcodecs import zstd

from scidata.read.blosc import Bytes, address


def _library() -> ctypes.CDLL | None:
    """Return the library with its function types; None if a build hides its functions."""
    try:
        library = ctypes.CDLL(zstd.__file__)
        library.ZSTD_createDCtx.restype = ctypes.c_void_p
        library.ZSTD_freeDCtx.argtypes = (ctypes.c_void_p,)
        library.ZSTD_decompressDCtx.argtypes = (ctypes.c_void_p, *(ctypes.c_void_p, ctypes.c_size_t) * 2)
        library.ZSTD_decompressDCtx.restype = ctypes.c_size_t
    except (OSError, AttributeError):
        return None
    return library


_LIBRARY = _library()


class _Context:
    """Decoder tables and workspace for one thread at a time; ``address`` is None without memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.address: int | None = library.ZSTD_createDCtx()
        self._free = library.ZSTD_freeDCtx

    def __del__(self) -> None:
        self._free(self.address)


_thread = threading.local()


def _context() -> int | None:
    """Return this thread's context; it lives as long as the thread."""
    if _LIBRARY is None:
        return None
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        context = _thread.context = _Context(_LIBRARY)
    return context.address


def decode(data: Bytes, dest: Bytes) -> None:
    """Decode ``data`` into all of ``dest``.

    Raises RuntimeError, ValueError: numcodecs' own: they are damaged, or of another size.
    """
    context = _context()
    if _LIBRARY is None or context is None or not _is_decoded(_LIBRARY, context, data, dest):
        zstd.decompress(data, dest)


def _is_decoded(library: ctypes.CDLL, context: int, data: Bytes, dest: Bytes) -> bool:
    found: int = library.ZSTD_decompressDCtx(context, address(dest), dest.size, address(data), data.size)
    return found == dest.size

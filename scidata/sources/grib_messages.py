"""GRIB messages, decoded by ECMWF's eccodes or by gribberish: a chunk of a file, or of a reference set, is one."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np

from scidata.core.install import install_hint
from scidata.core.types import AnyArray, Codec
from scidata.errors import CorruptDataError, MissingDependencyError, UnsupportedFormatError
from scidata.sources.access.files import files

_MISSING = 3e38  # in place of values that a bitmap leaves out: no float32 field has it
_WINDOW = 2 << 10  # bytes of a message that are read for its header
_MAX_HEADER = 1 << 20  # bytes of one section of it
_NO_VALUES = b"\0\0\x0c\x08" + bytes(8), b"\0\0\0\x06\x06\xff\0\0\0\x05\x07"  # editions 1 and 2: one value everywhere
_DTYPES = ("float32", "float64", "<f4", "<f8", "f4", "f8")


def eccodes(why: str) -> Any:
    """Return the module, or raise MissingDependencyError."""
    try:
        return importlib.import_module("eccodes")
    except (ImportError, RuntimeError) as e:  # RuntimeError: without its library
        raise MissingDependencyError(f"{why} needs eccodes: {install_hint('grib')} ({e})") from e


@contextlib.contextmanager
def opened(message: bytes) -> Iterator[tuple[Any, int]]:
    """Open a message; give eccodes, and its handle of it."""
    library = eccodes("a GRIB message")
    with _turn():
        handle = library.codes_new_from_message(message)
        try:
            yield library, handle
        finally:
            library.codes_release(handle)


@functools.cache
def _turn() -> contextlib.AbstractContextManager[object]:
    library = eccodes("a GRIB message")
    features = getattr(library, "codes_get_features", lambda which: "")  # older ones do not say
    built = features(getattr(library, "CODES_FEATURES_ENABLED", 1))
    return contextlib.nullcontext() if "THREADS" in built else threading.RLock()


def codec_of(name: str, dtype: object) -> Codec | None:
    """Return the codec of kerchunk's filter ``grib``; None if nothing that is installed decodes it."""
    if dtype not in _DTYPES or not (find_spec("eccodes") or find_spec("gribberish")):
        return None
    key = f"{name}s" if name in ("latitude", "longitude") else "values"
    return Codec(name="grib", config={"var": name}, decoder=functools.partial(decode, key=key, dtype=str(dtype)))


def decode(data: memoryview, nbytes: int, *, key: str = "values", dtype: str = "float32") -> AnyArray:
    """Return the values of a message, NaN where they are missing, or the latitudes or longitudes of its points."""
    kind, message = np.dtype(dtype), bytes(data)
    _Header(None, 0, message).whole()  # eccodes may end the process of one that is cut off, or lies about its length
    if not find_spec("eccodes") and key == "values":
        return importlib.import_module("gribberish").parse_grib_array(message, 0).astype(kind, copy=False)
    with opened(message) as (library, handle):
        if (size := library.codes_get_size(handle, key)) * kind.itemsize != nbytes:
            raise ValueError(f"{size} points, but {nbytes // kind.itemsize} were expected")
        if is_masked := key == "values" and library.codes_get(handle, "bitmapPresent"):
            library.codes_set(handle, "missingValue", _MISSING)
        values: AnyArray = library.codes_get_array(handle, key)
    if is_masked:
        values[values == _MISSING] = np.nan
    return values.astype(kind, copy=False)


# -- the messages of a file ------------------------------------------------------------------------------------------


def headers(path: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield first byte and bytes of each message of a file, and a message with its header and no values."""
    size, at = files().size(path), 0
    while at < size:
        window = bytes(files().read(path, at, min(_WINDOW, size - at)))
        if not window.strip(b"\0"):  # between messages, or behind the last
            at += len(window)
            continue
        at += (begin := window.find(b"GRIB"))
        if begin < 0 or window[:begin].strip(b"\0\r\n"):
            raise CorruptDataError(
                f"{path}: no GRIB message begins at byte {at + (begin < 0) - max(begin, 0)}; copy it again"
            )
        nbytes, made = _Header(path, at, window[begin:]).whole()
        yield at, nbytes, made
        at += nbytes


def dated(header: bytes) -> tuple[int, bytes]:
    """Return the reference time of a header in minutes since 1970, and all of the header but that time."""
    if header[7] == 2:
        year, rest = int.from_bytes(header[28:30], "big"), header[:28] + header[35:]
        date = header[30:34]
    else:
        year, rest = 100 * (header[32] - 1) + header[20], header[:20] + header[25:32] + header[33:]
        date = header[21:25]
    begin = datetime.datetime(year, *date) - datetime.datetime(1970, 1, 1)
    return begin.days * 1440 + begin.seconds // 60, rest


class _Header:
    """A message by its header: in a file of which a window is read, or, if missing, in the window alone."""

    def __init__(self, path: str | None, begin: int, window: bytes) -> None:
        self._path, self._begin, self._window = path, begin, window

    def part(self, at: int, nbytes: int) -> bytes:
        if at + nbytes <= len(self._window):
            return self._window[at : at + nbytes]
        if self._path is None:
            self.refuse(f"{len(self._window)} bytes of at least {at + nbytes}")
        return bytes(files().read(self._path, self._begin + at, nbytes))

    def number(self, at: int, nbytes: int) -> int:
        return int.from_bytes(self.part(at, nbytes), "big")

    def section(self, at: int, width: int, least: int) -> bytes:
        nbytes = self.number(at, width)
        if not least <= nbytes <= _MAX_HEADER:
            self.refuse(f"a section of {nbytes} bytes at byte {self._begin + at}")
        return self.part(at, nbytes)

    def refuse(self, found: str) -> NoReturn:
        raise CorruptDataError(
            f"{self._path or 'GRIB'}: the message at byte {self._begin} has {found}; it is damaged: copy it again"
        )

    def whole(self) -> tuple[int, bytes]:
        """Return the bytes of a message, and its header with no values. Raises CorruptDataError: it has no such end."""
        if self.part(0, 4) != b"GRIB" or (edition := self.number(7, 1)) not in (1, 2):
            raise UnsupportedFormatError(
                f"{self._path}: the message at byte {self._begin} is not GRIB of edition 1 or 2, but begins with "
                f"{self.part(0, 8)!r}"
            )
        return self.of_edition_1() if edition == 1 else self.of_edition_2()

    def ended(self, total: int, at: int) -> int:
        if self.part(total - 4, 4) != b"7777":
            self.refuse("no end")
        if at != total - 4:
            if self.number(7, 1) == 2 and at < total - 9 and self.number(at + 4, 1) in (2, 3, 4):
                raise UnsupportedFormatError(
                    f"{self._path}: the message at byte {self._begin} has several fields; split it: grib_copy IN OUT"
                )
            self.refuse(f"data up to byte {at}, and an end at {total - 4}")
        return total

    def of_edition_2(self) -> tuple[int, bytes]:
        """Return the bytes of a message of edition 2, and its header: sections 0 to 4, and others without values."""
        total, at, kept = self.number(8, 8), 16, dict[int, bytes]()
        for number, least in ((1, 21), (2, 5), (3, 15), (4, 9)):
            if number != 2 or self.number(at + 4, 1) == 2:
                kept[number] = self.section(at, 4, least)
                at += len(kept[number])
                if kept[number][4] != number:
                    self.refuse(f"no section {number}")
        for _ in range(3):
            at += self.number(at, 4)
        points = kept[3][6:10]
        body = b"".join(kept.values()) + b"\0\0\0\x15\x05" + points + bytes(12) + _NO_VALUES[1] + b"7777"
        return self.ended(total, at), self.part(0, 8) + (16 + len(body)).to_bytes(8, "big") + body

    def of_edition_1(self) -> tuple[int, bytes]:
        """Return the bytes of a message of edition 1, and its header: sections 0 to 2, and one of no values."""
        total, product = self.number(4, 3), bytearray(self.section(8, 3, 28))
        at, flags, kept = 8 + len(product), product[7], b""
        product[7] &= ~0x40  # without a bitmap
        if flags & 0x80:
            kept = self.section(at, 3, 32)
            at += len(kept)
        if flags & 0x40:
            at += self.number(at, 3)
        nbytes = self.number(at, 3)
        if total & 0x800000 and nbytes < 120:  # ECMWF's way to count more than 8 MiB
            total = (total & 0x7FFFFF) * 120 - nbytes + 4
            nbytes = total - 4 - at
        body = bytes(product) + kept + _NO_VALUES[0] + b"7777"
        return self.ended(total, at + nbytes), b"GRIB" + (8 + len(body)).to_bytes(3, "big") + b"\x01" + body

"""GRIB messages, decoded by ECMWF's eccodes or by gribberish: a chunk of a file, or of a reference set, is one."""

from __future__ import annotations

import datetime
import functools
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from scidata.core.install import install_hint
from scidata.core.types import AnyArray, Codec
from scidata.errors import CorruptDataError, MissingDependencyError, UnsupportedFormatError
from scidata.sources.access.files import files

_MISSING = 3e38  # in place of values that a bitmap leaves out: no float32 field has it
_WINDOW = 2 << 10  # bytes of a message that are read for its header
_NO_VALUES = b"\0\0\x0c\x08" + bytes(8), b"\0\0\0\x06\x06\xff\0\0\0\x05\x07"  # editions 1 and 2: one value everywhere
_DTYPES = ("float32", "float64", "<f4", "<f8", "f4", "f8")


def eccodes(why: str) -> Any:
    """Return the module, or raise MissingDependencyError."""
    try:
        return importlib.import_module("eccodes")
    except (ImportError, RuntimeError) as e:  # RuntimeError: without its library
        raise MissingDependencyError(f"{why} needs eccodes: {install_hint('grib')} ({e})") from e


def codec_of(name: str, dtype: object) -> Codec | None:
    """Return the codec of kerchunk's filter ``grib``; None where nothing that is installed decodes it."""
    if dtype not in _DTYPES or not (find_spec("eccodes") or find_spec("gribberish")):
        return None
    key = f"{name}s" if name in ("latitude", "longitude") else "values"
    return Codec(name="grib", config={"var": name}, decoder=functools.partial(decode, key=key, dtype=str(dtype)))


def decode(data: memoryview, nbytes: int, *, key: str = "values", dtype: str = "float32") -> AnyArray:
    """Return the values of a message, NaN where they are missing, or the latitudes or longitudes of its points."""
    kind, message = np.dtype(dtype), bytes(data)
    if not find_spec("eccodes") and key == "values":
        return importlib.import_module("gribberish").parse_grib_array(message, 0).astype(kind, copy=False)
    library = eccodes("a GRIB message")
    handle = library.codes_new_from_message(message)
    try:
        if (size := library.codes_get_size(handle, key)) * kind.itemsize != nbytes:
            raise ValueError(f"{size} points, but {nbytes // kind.itemsize} were expected")
        if is_masked := key == "values" and library.codes_get(handle, "bitmapPresent"):
            library.codes_set(handle, "missingValue", _MISSING)
        values: AnyArray = library.codes_get_array(handle, key)
    finally:
        library.codes_release(handle)
    if is_masked:
        values[values == _MISSING] = np.nan
    return values.astype(kind, copy=False)


# -- the messages of a file ------------------------------------------------------------------------------------------


def headers(path: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield first byte and bytes of each message of a file, and a message with its header and no values.

    Raises
    ------
    CorruptDataError
        There are bytes that are no message, or one that is cut off.
    UnsupportedFormatError
        A message of several fields, or of another edition.
    """
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
        message = _Header(path, at, window[begin:])
        nbytes, made = message.of_edition_2() if message.part(7, 1)[0] == 2 else message.of_edition_1()
        if at + nbytes > size:
            raise CorruptDataError(
                f"{path}: the message at byte {at} has {nbytes} bytes, and the file {size}; copy it again"
            )
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
    """The header of one message, by its sections."""

    def __init__(self, path: str, begin: int, window: bytes) -> None:
        self._path, self._begin, self._window = path, begin, window

    def part(self, at: int, nbytes: int) -> bytes:
        """Return some bytes of the message."""
        if at + nbytes <= len(self._window):
            return self._window[at : at + nbytes]
        return bytes(files().read(self._path, self._begin + at, nbytes))

    def number(self, at: int, nbytes: int) -> int:
        """Return an unsigned integer of the message."""
        return int.from_bytes(self.part(at, nbytes), "big")

    def of_edition_2(self) -> tuple[int, bytes]:
        total, at, kept = self.number(8, 8), 16, b""
        number = 0
        while number != 7:
            nbytes, number = self.number(at, 4), self.number(at + 4, 1)
            if not 5 <= nbytes <= total - at:
                raise CorruptDataError(
                    f"{self._path}: a section at byte {self._begin + at} of {nbytes} bytes; copy it again"
                )
            if number < 5:
                kept += self.part(at, nbytes)
            if number == 3:
                points = self.part(at + 6, 4)
            at += nbytes
        if at != total - 4:
            raise UnsupportedFormatError(
                f"{self._path}: the message at byte {self._begin} has several fields; split it: grib_copy IN OUT"
            )
        kept += b"\0\0\0\x15\x05" + points + bytes(12) + _NO_VALUES[1] + b"7777"
        return total, self.part(0, 8) + (16 + len(kept)).to_bytes(8, "big") + kept

    def of_edition_1(self) -> tuple[int, bytes]:
        if self.number(7, 1) != 1:
            raise UnsupportedFormatError(f"{self._path}: GRIB of edition {self.number(7, 1)}, and not 1 or 2")
        total, flags, at = self.number(4, 3), self.number(15, 1), 8 + self.number(8, 3)
        product = bytearray(self.part(8, at - 8))
        product[7] = flags & ~0x40  # without a bitmap
        kept = bytes(product)
        if flags & 0x80:
            kept += self.part(at, self.number(at, 3))
            at += self.number(at, 3)
        if flags & 0x40:
            at += self.number(at, 3)
        if total & 0x800000 and self.number(at, 3) < 120:  # ECMWF's way to count more than 8 MiB
            total = (total & 0x7FFFFF) * 120 - self.number(at, 3) + 4
        kept += _NO_VALUES[0] + b"7777"
        return total, b"GRIB" + (8 + len(kept)).to_bytes(3, "big") + b"\x01" + kept

"""Undo the codecs of one chunk: stored bytes in, decoded bytes out.

A :class:`Pipeline` is made once for a list of codecs and a decoded size, and then runs on any thread. Every size that
the bytes themselves declare is checked before anything is allocated for it. Buffers come from a :class:`Scratch` that
is reused: the page faults of a fresh buffer cost five times the read (measured).
"""

from __future__ import annotations

import bz2
import lzma
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numcodecs.zstd
import numpy as np
from crc32c import crc32c
from numcodecs import lz4
from numcodecs.fletcher32 import Fletcher32

from scidata.core.cache import Cache
from scidata.core.checks import allocate, largest_encoded
from scidata.core.memory import ArrayPool
from scidata.core.types import AnyArray, BoolArray, Codec
from scidata.errors import ChecksumError, CorruptDataError, SciDataError, UnsupportedFormatError
from scidata.read import blosc, inflate, zstd
from scidata.read.blosc import Bytes
from scidata.read.inflate import Decompressor

_CHECKSUM_NBYTES = 4

#: Buffers of ended threads, for new ones: the C library's heap would keep them without reusing them.
_memory = ArrayPool(64 << 20)


class Scratch:
    """Named buffers that grow and are reused; not shared between threads."""

    #: A larger buffer is released after use, so that one huge chunk does not stay resident.
    max_kept = 256 << 20

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def get(self, name: str, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes, uninitialised or as last written under ``name``."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            del buffer  # freed before a larger one is allocated, which may take its place
            self._buffers.pop(name, None)
            # with slack, for slightly larger chunks; untouched memory costs nothing
            shape = (max(nbytes + nbytes // 8, 4096),)
            buffer = allocate("chunks and the bytes read beside them", shape, np.uint8, _memory.empty)
            if buffer.size <= self.max_kept:
                self._buffers[name] = buffer
        return buffer[:nbytes]


class _Step:
    """Undoes one codec. ``size`` is the decoded size if known in advance, ``limit`` its maximum."""

    def __init__(self, codec: Codec, size: int | None, limit: int, buffer: str) -> None:
        self.name, self.config, self.decoder = codec.name, codec.config, codec.decoder
        self.size, self.limit, self.buffer = size, limit, buffer

    def encoded_size(self) -> int | None:
        """Size before undoing, if it follows from the size after."""
        return None

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        """Return decoded bytes: ``dest``, or a view of ``data`` or ``scratch``."""
        raise NotImplementedError

    def room(self, declared: int, dest: Bytes | None, scratch: Scratch) -> Bytes:
        """Return the destination for ``declared`` bytes after checking that size."""
        if declared > self.limit or (self.size is not None and declared != self.size):
            wanted = f"{self.size} were" if self.size is not None else f"at most {self.limit} were"
            raise CorruptDataError(f"it declares {declared} decoded bytes, but {wanted} expected")
        return dest if dest is not None else scratch.get(self.buffer, declared)


class _Blosc(_Step):
    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        if dest is None:
            dest = self.room(blosc.read_header(data, self.size).nbytes, dest, scratch)
        blosc.decode(data, dest)
        return dest


class _LZ4(_Step):
    """numcodecs' LZ4: the decoded size as little-endian uint32, then one LZ4 block."""

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        if data.size < 4:
            raise CorruptDataError(f"{data.size} bytes are too few for LZ4")
        dest = self.room(struct.unpack_from("<I", data.data)[0], dest, scratch)
        if dest.size:
            try:
                lz4.decompress(data, dest)
            except (RuntimeError, ValueError) as e:
                raise CorruptDataError(f"LZ4 cannot decode it ({e})") from e
        return dest


class _Zstd(_Step):
    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        declared, exact = _zstd_size(data)
        try:
            if exact:
                dest = self.room(declared, dest, scratch)
                if dest.size:
                    zstd.decode(data, dest)
                return dest
            if declared > 16 * self.limit:
                raise CorruptDataError(f"its Zstandard frame may hold {declared} bytes, but {self.size} were expected")
            return np.frombuffer(numcodecs.zstd.decompress(data), np.uint8)
        except (RuntimeError, ValueError) as e:
            raise CorruptDataError(f"Zstandard cannot decode it ({e})") from e


def _zstd_size(data: Bytes) -> tuple[int, bool]:
    """Return a frame's declared decoded size and True, or an upper bound from its blocks and False."""
    head = bytes(data[:18])
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        raise CorruptDataError("it does not begin with a Zstandard frame")
    descriptor = head[4]
    single = bool(descriptor & 0x20)
    at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    if width:
        return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0), True
    bound, last = 0, False
    while not last:
        if at + 3 > data.size:
            raise CorruptDataError("its Zstandard frame ends inside a block")
        block = int.from_bytes(bytes(data[at : at + 3]), "little")
        last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        bound += 128 << 10 if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
    return bound, False


def _open_lzma(config: Mapping[str, Any]) -> Decompressor:
    kind = int(config.get("format", lzma.FORMAT_XZ))
    filters = config.get("filters") if kind == lzma.FORMAT_RAW else None
    if filters is not None:
        return lzma.LZMADecompressor(kind, None, [dict(f) for f in filters])
    return lzma.LZMADecompressor(kind, _LZMA_MEMORY)


_LZMA_MEMORY = 1 << 30  # the stream's declared dictionary size is allocated as well
_STREAMS: dict[str, Callable[[Mapping[str, Any]], Decompressor]] = {
    "zlib": lambda config: inflate.engine().decompressobj(15),
    "gzip": lambda config: inflate.engine().decompressobj(31),
    "bz2": lambda config: bz2.BZ2Decompressor(),
    "lzma": _open_lzma,
}


class _Stream(_Step):
    """A standard library codec, or zlib-ng instead, with a bounded decompressor object."""

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        try:
            decoded = self._decode(data.data)
        except CorruptDataError:
            raise
        except (inflate.engine().error, lzma.LZMAError, OSError, EOFError, ValueError) as e:
            raise CorruptDataError(f"{self.name} cannot decode it ({e})") from e
        if self.size is not None and len(decoded) != self.size:
            raise CorruptDataError(f"its {self.name} stream holds {len(decoded)} bytes, but {self.size} were expected")
        return np.frombuffer(decoded, np.uint8)

    def _decode(self, rest: bytes | memoryview) -> bytes:
        room, parts = self.size if self.size is not None else self.limit, list[bytes]()
        while not parts or any(rest):  # member by member: gzip and bz2 files may be concatenated
            stream = _STREAMS[self.name](self.config)
            parts.append(stream.decompress(rest, max(room, 1)))  # for zlib, 0 means no limit
            room -= len(parts[-1])
            if not stream.eof:  # the trailer with the checksum may be unread
                room -= len(stream.decompress(getattr(stream, "unconsumed_tail", b""), 1))
            if room < 0:
                raise CorruptDataError(f"its {self.name} stream holds more bytes than expected")
            if not stream.eof:
                raise CorruptDataError(f"its {self.name} stream is cut short")
            rest = stream.unused_data  # writers may pad with zeros
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Shuffle(_Step):
    def encoded_size(self) -> int | None:
        return self.size

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        itemsize = int(self.config.get("elementsize", 4))
        dest = self.room(data.size, dest, scratch)
        framed = scratch.get(self.buffer + " framed", data.size + blosc.FRAME)
        framed[blosc.FRAME :] = data
        blosc.unshuffle(framed, itemsize, dest)
        return dest


class _CRC32C(_Step):
    """CRC-32C check of four stored bytes against the data."""

    def encoded_size(self) -> int | None:
        return None if self.size is None else self.size + _CHECKSUM_NBYTES

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        if data.size < _CHECKSUM_NBYTES:
            raise CorruptDataError(f"{data.size} bytes are too few for a checksum")
        return self._verified(data)

    def _verified(self, data: Bytes) -> Bytes:
        if self.config.get("location", "end") == "start":
            stored, body = data[:_CHECKSUM_NBYTES], data[_CHECKSUM_NBYTES:]
        else:
            stored, body = data[-_CHECKSUM_NBYTES:], data[:-_CHECKSUM_NBYTES]
        check_crc32c(body.data, int.from_bytes(stored.tobytes(), "little"))
        return body


class _Fletcher32(_CRC32C):
    def _verified(self, data: Bytes) -> Bytes:
        if data.size > _CHECKSUM_NBYTES:
            try:
                Fletcher32().decode(np.ascontiguousarray(data))
            except RuntimeError as e:
                raise ChecksumError(f"its fletcher32 checksum does not match ({str(e).splitlines()[0]})") from e
        return data[:-_CHECKSUM_NBYTES]


class _Values(_Step):
    """A codec of values: ``config`` has the dtypes before and after undoing."""

    def __init__(self, codec: Codec, size: int | None, limit: int, buffer: str) -> None:
        super().__init__(codec, size, limit, buffer)
        self.stored, self.wanted = np.dtype(self.config["stored"]), np.dtype(self.config["wanted"])

    def encoded_size(self) -> int | None:
        return None if self.size is None else self.size // self.wanted.itemsize * self.stored.itemsize

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        if data.size % self.stored.itemsize:
            raise CorruptDataError(f"{data.size} bytes are no whole number of {self.stored} values")
        values = data.view(self.stored)
        dest = self.room(values.size * self.wanted.itemsize, dest, scratch)
        with np.errstate(all="ignore"):
            self._into(values, dest.view(self.wanted))
        return dest

    def _into(self, values: AnyArray, out: AnyArray) -> None:
        raise NotImplementedError

    def _fill(self, out: AnyArray, values: AnyArray, free: BoolArray | bool = False) -> None:
        """Convert values, rounding if ``out`` is an integer dtype; values in ``free`` need not fit."""
        if out.dtype.kind not in "iu" or np.can_cast(values.dtype, out.dtype):
            np.copyto(out, values, casting="unsafe")
            return
        info, is_float = np.iinfo(out.dtype), values.dtype.kind == "f"
        values = np.rint(values) if is_float else values
        fits = (values >= info.min) & (values < float(info.max) + 1 if is_float else values <= info.max)
        if not (fits | free).all():
            raise CorruptDataError(f"{self.name} gives values that {out.dtype} does not hold")
        np.copyto(out, values, where=fits, casting="unsafe")


class _CastValue(_Values):
    """Values stored as another dtype; some values mapped individually (``map``)."""

    def _into(self, values: AnyArray, out: AnyArray) -> None:
        pairs = self.config["map"]
        chosen = [values != values if key != key else values == key for key, _ in pairs]
        self._fill(out, values, np.logical_or.reduce(chosen) if chosen else False)
        for at, (_, value) in zip(chosen, pairs, strict=True):
            out[at] = value


class _ScaleOffset(_Values):
    """Values stored as ``(x - offset) * scale``, in the array's own arithmetic."""

    def _into(self, values: AnyArray, out: AnyArray) -> None:
        offset, scale = self.config["offset"], self.config["scale"]
        if out.dtype.kind == "f":
            np.divide(values, out.dtype.type(scale), out=out)
            np.add(out, out.dtype.type(offset), out=out)
            return
        wide = values.astype(np.int64)
        if (wide % scale).any():
            raise CorruptDataError(f"scale_offset: some values are no multiples of the scale, {scale}")
        self._fill(out, wide // scale + offset)


class _Own(_Step):
    """A codec of a registered format, decoded by that format's function."""

    def undo(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        assert self.decoder is not None
        size = self.limit if self.size is None else self.size
        try:
            return np.frombuffer(self.decoder(data.data, size), np.uint8)
        except SciDataError:
            raise
        except Exception as e:  # any exception of any package
            raise CorruptDataError(f"{self.name} cannot decode it ({type(e).__name__}: {e})") from e


def check_crc32c(body: memoryview, stored: int) -> None:
    """Raise ChecksumError if the CRC-32C of ``body`` differs from ``stored``."""
    found = crc32c(body)  # lets other threads run meanwhile
    if found != stored:
        raise ChecksumError(f"its crc32c checksum is {found:#010x}, but {stored:#010x} was stored")


_STEPS: dict[str, type[_Step]] = {
    "blosc": _Blosc,
    "zstd": _Zstd,
    "lz4": _LZ4,
    **dict.fromkeys(_STREAMS, _Stream),
    "shuffle": _Shuffle,
    "fletcher32": _Fletcher32,
    "crc32c": _CRC32C,
    "cast_value": _CastValue,
    "scale_offset": _ScaleOffset,
}


_made: Cache[tuple[Pipeline, tuple[Codec, ...]]] = Cache(256)


def pipeline_of(codecs: tuple[Codec, ...], skipped: int, nbytes: int) -> Pipeline:
    """Return the pipeline for these arguments, cached by the identity of ``codecs``.

    ``skipped`` has a bit for each codec that was not applied.
    """
    key = id(codecs), skipped, nbytes
    found = _made.get(key)
    if found is None:
        applied = [codec for i, codec in enumerate(codecs) if not skipped >> i & 1]
        found = _made.put(key, (Pipeline(applied, nbytes), codecs))  # reference kept, so that the id stays valid
    return found[0]


class Pipeline:
    """Undoes ``codecs`` (in order of application), which yields exactly ``nbytes`` bytes.

    ``is_blosc``: True if one Blosc codec is all there is, so that blocks can be decoded alone.
    ``is_crc32c``: True if one trailing crc32c is all there is, so that chunks can be read straight into place.
    """

    def __init__(self, codecs: Sequence[Codec], nbytes: int) -> None:
        steps: list[_Step] = []
        size: int | None = nbytes
        for i, codec in enumerate(codecs):
            kind = _STEPS.get(codec.name) if codec.decoder is None else _Own
            if kind is None:
                raise UnsupportedFormatError(
                    f"codec {codec.name!r} cannot be undone here (known: {', '.join(sorted(_STEPS))}); "
                    "the array must be read with its format's own library"
                )
            step = kind(codec, size, largest_encoded(nbytes), f"decoded {i}")
            steps.append(step)
            size = step.encoded_size()
        self.nbytes = nbytes
        self.is_blosc = len(steps) == 1 and isinstance(steps[0], _Blosc)
        self.is_crc32c = [step.name for step in steps] == ["crc32c"] and steps[0].config.get("location", "end") == "end"
        self._steps = tuple(reversed(steps))

    def decode(self, data: Bytes, dest: Bytes | None, scratch: Scratch) -> Bytes:
        """Return decoded bytes: ``dest`` if given, else a view of ``data`` or ``scratch``.

        ``data``: the encoded chunk, 1-D uint8. May be overwritten.
        ``dest``: 1-D uint8 of ``nbytes`` bytes, or None.
        Raises CorruptDataError, ChecksumError: sizes, checksum or contents are wrong.
        """
        last = len(self._steps) - 1
        for i, step in enumerate(self._steps):
            data = step.undo(data, dest if i == last else None, scratch)
        if data.size != self.nbytes:
            raise CorruptDataError(f"it holds {data.size} decoded bytes, but {self.nbytes} were expected")
        if dest is not None and data is not dest:
            dest[:] = data
        return data if dest is None else dest

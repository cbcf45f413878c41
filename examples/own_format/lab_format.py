"""A lab's own format, that scidata reads once this package is installed: ``pip install examples/own_format``.

A ``.lab`` file is the mark ``LAB1``, the length of a JSON header (4 bytes, little-endian), the header, and the chunks
of its arrays one after the other, each by itself: raw, or packed by ``pack``. The header has, of each array, its dtype,
dims, shape and chunks, and the places of the chunks, counted from the end of the header.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from scidata.sources import ArrayLayout, Codec, FileFormat

MARK = b"LAB1"
MAX_HEADER = 64 << 20


class LabFile(FileFormat):
    """One ``.lab`` file."""

    format = "lab"

    @classmethod
    def takes(cls, path: str) -> bool:
        """Look at the mark, where others name their files ``.lab``, too."""
        return bytes(cls(path).read_bytes(0, 4)) == MARK

    @cached_property
    def header(self) -> dict[str, Any]:
        """The JSON header."""
        (nbytes,) = struct.unpack("<I", self.read_bytes(4, 4))
        if nbytes > MAX_HEADER:
            raise ValueError(f"a header of {nbytes} bytes")
        return {"begin": 8 + nbytes, **json.loads(self.read_bytes(8, nbytes))}

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file."""
        return self.header["attributes"]

    def describe(self) -> Iterator[ArrayLayout]:
        """Return the arrays."""
        for name, each in self.header["arrays"].items():
            codecs = [Codec(name="lab-pack", decoder=unpack)] if each["packed"] else []
            given = {key: each[key] for key in ("dims", "chunks", "attributes")}
            yield self.array(name, each["shape"], each["dtype"], codecs=codecs, **given)

    def place(self, layout: ArrayLayout, chunk: tuple[int, ...]) -> tuple[str, int, int] | None:
        """Return where a chunk lies."""
        found = self.header["arrays"][layout.name]["places"].get(_key(chunk))
        return None if found is None else (self.path, self.header["begin"] + found[0], found[1])


def pack(chunk: bytes) -> bytes:
    """Compress a chunk of 4-byte values: all first bytes, all second ones, …."""
    return zlib.compress(np.frombuffer(chunk, "u1").reshape(-1, 4).T.tobytes(), 1)


def unpack(data: memoryview, nbytes: int) -> np.ndarray:
    """Undo :func:`pack`; a stream that holds more than ``nbytes`` is refused before it is unpacked."""
    stream = zlib.decompressobj()
    planes = stream.decompress(data, nbytes)
    if not stream.eof or len(planes) != nbytes:
        raise ValueError(f"does not hold {nbytes} bytes")
    return np.ascontiguousarray(np.frombuffer(planes, "u1").reshape(4, -1).T)


def _key(chunk: tuple[int, ...]) -> str:
    return ".".join(map(str, chunk))


def write_lab(
    path: str,
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray]],
    *,
    chunks: Mapping[str, int] | None = None,
    packed: bool = False,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write arrays by name, each with its dims; ``chunks`` has rows of a chunk by dim, else all."""
    described, pieces, at = {}, [], 0
    for name, (dims, values) in arrays.items():
        size = tuple((chunks or {}).get(dim, n) for dim, n in zip(dims, values.shape, strict=True))
        places = {}
        for chunk in itertools.product(*(range(-(-n // c)) for n, c in zip(values.shape, size, strict=True))):
            part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(chunk, size, strict=True))]
            full = np.zeros(size, values.dtype)  # chunks at the upper edge are full ones, too
            full[tuple(map(slice, part.shape))] = part
            piece = pack(full.tobytes()) if packed and values.dtype.itemsize == 4 else full.tobytes()
            places[_key(chunk)] = at, len(piece)
            pieces.append(piece)
            at += len(piece)
        described[name] = {
            "dtype": values.dtype.str, "dims": dims, "shape": values.shape, "chunks": size, "places": places,
            "packed": packed and values.dtype.itemsize == 4, "attributes": dict((attributes or {}).get(name, {})),
        }  # fmt: skip
    header = json.dumps({"arrays": described, "attributes": {"made by": "lab_format"}}).encode()
    with open(path, "wb") as file:
        file.write(MARK + struct.pack("<I", len(header)) + header + b"".join(pieces))

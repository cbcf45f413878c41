"""The header of a NetCDF-3 file: classic (CDF-1), 64-bit offset (CDF-2) and 64-bit data (CDF-5).

Written from the published grammar (NetCDF "File Format Specifications", and PnetCDF's for CDF-5). Everything is
big-endian and padded to four bytes. Sizes are checked against the file before anything of that size is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scidata.errors import CorruptDataError, ShortReadError, UnsupportedFormatError
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import read_head

_DIMENSION, _VARIABLE, _ATTRIBUTE = 10, 11, 12
_FIRST_READ = 1 << 16
#: By number, from 1 on.
_TYPES = dict(enumerate(map(np.dtype, (">i1", "S1", ">i2", ">i4", ">f4", ">f8", ">u1", ">u2", ">u4", ">i8", ">u8")), 1))
_CHAR = 2
_SHOWN = 64  # bytes of a name that is no name
_CDF5_FIRST = 7  # types from here on exist in CDF-5 only
_MOST_NBYTES = {1: 2**31 - 4, 2: 2**32 - 4, 5: 2**63 - 4}  # of a variable (or one record of it) that others follow


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable: of a record variable, ``shape[0]`` is the number of records and ``begin`` that of the first."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    begin: int
    is_record: bool
    attributes: dict[str, Any]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one record, or of the whole of a fixed variable; without padding."""
        return math.prod(self.shape[1:] if self.is_record else self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything the header says. ``record_nbytes`` is the distance from one record to the next."""

    version: int
    num_records: int
    record_nbytes: int
    attributes: dict[str, Any]
    variables: tuple[Variable, ...]
    file_size: int


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


class _Cursor:
    def __init__(self, path: str) -> None:
        self.path = path
        head, self.file_size = read_head(path, _FIRST_READ)
        self.position = 0
        self._bytes = bytearray(head)
        self.wide = False  # CDF-5: counts are 64-bit

    def take(self, nbytes: int, part: str) -> bytes:
        end = self.position + nbytes
        if nbytes < 0 or end > self.file_size:
            raise ShortReadError(
                f"{self.path}: the header's {part} needs {nbytes} bytes at byte {self.position}, but the file ends at "
                f"{self.file_size}; it is truncated or damaged: copy or write it again"
            )
        while end > len(self._bytes):
            have = len(self._bytes)
            more = min(max(have, end - have), self.file_size - have)
            self._bytes += files().read(self.path, have, more)
        data = bytes(self._bytes[self.position : end])
        self.position = end
        return data

    def integer(self, nbytes: int, part: str) -> int:
        return int.from_bytes(self.take(nbytes, part), "big")

    def count(self, part: str) -> int:
        """Return a NON_NEG of the format: a count, length or dimension id."""
        width = 8 if self.wide else 4
        value = self.integer(width, part)
        if value >> (8 * width - 1):
            raise CorruptDataError(f"{self.path}: the header's {part} is negative; the file is damaged")
        return value

    def name(self, part: str) -> str:
        length = self.count(f"{part} name length")
        raw = self.take(_padded(length), f"{part} name")[:length]
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise CorruptDataError(
                f"{self.path}: the header's {part} name {raw[:_SHOWN]!r} is not UTF-8; the file is damaged"
            ) from e
        if "\0" in name:
            raise CorruptDataError(f"{self.path}: the header's {part} name {raw[:_SHOWN]!r} holds a NUL; it is damaged")
        return name

    def list_length(self, tag: int, part: str, item_nbytes: int) -> int:
        found = self.integer(4, f"{part} list tag")
        length = self.count(f"{part} list length")
        if found == 0 and length == 0:
            return 0
        if found != tag:
            raise CorruptDataError(f"{self.path}: the header has tag {found} where the {part} list ({tag}) should be")
        if length * item_nbytes > self.file_size - self.position:
            raise ShortReadError(
                f"{self.path}: the header promises {length} {part}s, which do not fit into the file's "
                f"{self.file_size} bytes; it is truncated or damaged"
            )
        return length

    def type(self, part: str) -> int:
        number = self.integer(4, f"type of {part}")
        if number not in _TYPES or (number >= _CDF5_FIRST and not self.wide):
            raise CorruptDataError(f"{self.path}: {part} has type number {number}, which this format does not have")
        return number

    def attributes(self, part: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(self.list_length(_ATTRIBUTE, f"{part} attribute", 12)):
            name = self.name(f"{part} attribute")
            number = self.type(f"attribute {name!r} of {part}")
            length = self.count(f"attribute {name!r} length")
            dtype = _TYPES[number]
            raw = self.take(_padded(length * dtype.itemsize), f"attribute {name!r} of {part}")
            raw = raw[: length * dtype.itemsize]
            if number == _CHAR:
                values[name] = _text(raw)
            else:
                array = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
                values[name] = array[0] if length == 1 else array
        return values


def _text(raw: bytes) -> str:
    raw = raw.rstrip(b"\0")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def read_header(path: str) -> Header:
    """Parse the header of a NetCDF-3 file or URL; ShortReadError where values do not fit, else CorruptDataError."""
    cursor = _Cursor(path)
    magic = cursor.take(4, "magic number")
    if magic[:3] != b"CDF" or magic[3] not in (1, 2, 5):
        raise UnsupportedFormatError(f"{path}: begins with {magic!r}, which is not NetCDF-3")
    version = magic[3]
    cursor.wide = version == 5
    width = 8 if cursor.wide else 4
    num_records = cursor.integer(width, "number of records")
    dims = [(cursor.name("dimension"), cursor.count("dimension length")) for _ in _each(cursor, _DIMENSION)]
    attributes = cursor.attributes("file")
    raw = [_variable(cursor, dims, version) for _ in _each(cursor, _VARIABLE)]
    _check_order(path, version, cursor.position, raw)
    record_nbytes = _record_nbytes([v for v in raw if v.is_record])
    if num_records == (1 << 8 * width) - 1:  # streaming: the writer did not go back to fill the number in
        num_records = _streamed_records(raw, record_nbytes, cursor.file_size)
    elif num_records >> (8 * width - 1):
        raise CorruptDataError(f"{path}: the header's number of records is negative; the file is damaged")
    header = Header(
        version=version,
        num_records=num_records,
        record_nbytes=record_nbytes,
        attributes=attributes,
        variables=tuple(replace(v, shape=(num_records, *v.shape[1:])) if v.is_record else v for v in raw),
        file_size=cursor.file_size,
    )
    for variable in header.variables:
        _check_end(path, header, variable)
    _check_records(path, header)
    return header


def _each(cursor: _Cursor, tag: int) -> range:
    part, least = ("dimension", 8) if tag == _DIMENSION else ("variable", 28)
    return range(cursor.list_length(tag, part, least))


def _variable(cursor: _Cursor, dims: list[tuple[str, int]], version: int) -> Variable:
    name = cursor.name("variable")
    rank = cursor.count(f"rank of {name!r}")
    if rank * 4 > cursor.file_size:
        raise ShortReadError(f"{cursor.path}: variable {name!r} has {rank} dimensions: the header is damaged")
    ids = [cursor.count(f"dimension of {name!r}") for _ in range(rank)]
    if any(i >= len(dims) for i in ids):
        raise CorruptDataError(f"{cursor.path}: variable {name!r} names dimension {max(ids)} of {len(dims)}")
    attributes = cursor.attributes(f"variable {name!r}")
    number = cursor.type(f"variable {name!r}")
    cursor.count(f"size of {name!r}")  # vsize overflows for large variables: the shape counts
    begin = cursor.integer(4 if version == 1 else 8, f"begin of {name!r}")
    lengths = [dims[i][1] for i in ids]
    if any(n == 0 for n in lengths[1:]):
        raise CorruptDataError(f"{cursor.path}: variable {name!r} has its record dimension after the first")
    return Variable(
        name=name,
        dims=tuple(dims[i][0] for i in ids),
        shape=tuple(lengths),
        dtype=_TYPES[number],
        begin=begin,
        is_record=bool(lengths) and lengths[0] == 0,  # length 0 marks the record dimension
        attributes=attributes,
    )


def _check_order(path: str, version: int, header_nbytes: int, variables: list[Variable]) -> None:
    """Check that variables follow the header and each other as they are listed, those with records last.

    netCDF's C library refuses other files (``NC_check_voffs``, ``NC_check_vlens``), so no writer leaves any. Sizes
    are computed from the shapes: the header's own are wrong for large variables.
    """
    groups = [v for v in variables if not v.is_record], [v for v in variables if v.is_record]
    end, before = header_nbytes, "the header"
    for variable in (*groups[0], *groups[1]):
        if variable.begin < end:
            raise CorruptDataError(
                f"{path}: variable {variable.name!r} begins at byte {variable.begin}, but {before} ends at {end}; the "
                "header is damaged: copy or write the file again"
            )
        end, before = variable.begin + _padded(variable.row_nbytes), f"variable {variable.name!r} before it"
    followed = (*groups[0][: None if groups[1] else -1], *groups[1][:-1])
    for variable in variables if version == 5 else followed:
        if _padded(variable.row_nbytes) > _MOST_NBYTES[version]:
            raise CorruptDataError(
                f"{path}: variable {variable.name!r} of shape {variable.shape} needs {variable.row_nbytes} bytes, more "
                f"than the {_MOST_NBYTES[version]} that this variant of NetCDF-3 allows; the header is damaged"
            )


def _check_records(path: str, header: Header) -> None:
    records = [v for v in header.variables if v.is_record]
    if header.num_records < 2 or len(records) < 2:
        return
    end = records[-1].begin + _padded(records[-1].row_nbytes)
    if end > records[0].begin + header.record_nbytes:
        raise CorruptDataError(
            f"{path}: the first record of variable {records[-1].name!r} ends at byte {end}, but the next one of "
            f"{records[0].name!r} begins at {records[0].begin + header.record_nbytes}; the header is damaged: copy or "
            "write the file again"
        )


def _record_nbytes(records: list[Variable]) -> int:
    """Size of one record of all variables; the only record variable of a file is not padded."""
    if len(records) == 1:
        return records[0].row_nbytes
    return sum(_padded(v.row_nbytes) for v in records)


def _streamed_records(variables: list[Variable], record_nbytes: int, file_size: int) -> int:
    begins = [v.begin for v in variables if v.is_record]
    if not begins or not record_nbytes:
        return 0
    return max(0, (file_size - min(begins)) // record_nbytes)


def _check_end(path: str, header: Header, variable: Variable) -> None:
    rows = header.num_records if variable.is_record else 1
    if variable.dtype.kind == "S" or not rows or not variable.row_nbytes:
        return
    end = variable.begin + (rows - 1) * header.record_nbytes * variable.is_record + variable.row_nbytes
    if end > header.file_size:
        raise ShortReadError(
            f"{path}: variable {variable.name!r} ends at byte {end}, but the file has {header.file_size}; "
            "it is truncated: copy or write it again"
        )

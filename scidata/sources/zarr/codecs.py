"""Codecs that Zarr metadata list, v2 and v3: which of them scidata undoes, with numcodecs' names and arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.types import Codec
from scidata.errors import RefusedError, UnsupportedFormatError
from scidata.sources.grib_messages import codec_of
from scidata.sources.zarr.values import check_named, dtype_v3, fill_value_of

_BYTE_CODECS: Mapping[str, tuple[str, ...]] = {  # and numcodecs' arguments, which are all that is passed on
    "blosc": ("cname", "clevel", "shuffle", "blocksize"),
    "zstd": ("level", "checksum"),
    "gzip": ("level",),
    "zlib": ("level",),
    "lz4": ("acceleration",),
    "bz2": ("level",),
    "lzma": ("format", "check", "preset", "filters"),
    "shuffle": ("elementsize",),
    "fletcher32": (),
    "crc32c": (),
}
_SWAPPED = ">" if sys.byteorder == "little" else "<"
_BLOSC_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Effect of a list of codecs on a chunk: ``odd`` names those that only zarr-python can undo."""

    codecs: tuple[Codec, ...]
    axis_order: tuple[int, ...]
    endian: str = "="
    odd: tuple[str, ...] = ()


def refuse_pickle(codecs: object, where: str) -> None:
    """Refuse pickle however deep it hides: zarr-python would run it."""
    pending = [codecs]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, str) and node.rpartition(".")[2] == "pickle":
            raise RefusedError(f"{where}: codec {node!r} runs code from the file; write the array again without it")


def _byte_codec(name: str, config: Mapping[str, object], itemsize: int) -> Codec | None:
    """Return a bytes-to-bytes codec with numcodecs' arguments, or None if it is not one that scidata undoes."""
    if name == "grib":  # of a reference set; no name in a file is more than one of these
        return codec_of(str(config.get("var")), config.get("dtype") or "float64")
    if name not in _BYTE_CODECS or config.get("location", "end") != "end":
        return None
    arguments = {k: config[k] for k in _BYTE_CODECS[name] if k in config}
    shuffle = arguments.get("shuffle")
    if name == "blosc" and isinstance(shuffle, str):
        arguments["shuffle"] = _BLOSC_SHUFFLES.get(shuffle, 1)
    if name == "shuffle":
        size = arguments.setdefault("elementsize", itemsize)
        if not isinstance(size, int) or size < 1:
            return None
    return Codec(name=name, config=arguments)


def chain_v2(meta: Mapping[str, object], ndim: int, itemsize: int, where: str) -> Chain:
    """Read filters and a compressor, in the order in which they were applied."""
    order = meta.get("order", "C")
    if order not in ("C", "F"):
        raise UnsupportedFormatError(f"{where}: order must be 'C' or 'F', not {order!r}")
    filters, compressor = meta.get("filters") or [], meta.get("compressor")
    if not isinstance(filters, list):
        raise UnsupportedFormatError(f"{where}: filters must be a list, not {filters!r}")
    steps = filters + ([compressor] if compressor else [])
    codecs, odd = [], []
    for step in steps:
        if not isinstance(step, dict) or not isinstance(step.get("id"), str):
            raise UnsupportedFormatError(f"{where}: codec {step!r} has no id")
        if step["id"] == "bitround":  # lossy when written, nothing to undo
            continue
        codec = _byte_codec(step["id"], step, itemsize)
        codecs.append(codec or Codec(name=step["id"], config={k: v for k, v in step.items() if k != "id"}))
        if codec is None:
            odd.append(step["id"])
    axes = tuple(range(ndim))
    return Chain(codecs=tuple(codecs), axis_order=axes if order == "C" else axes[::-1], odd=tuple(odd))


def _transposed(axes: tuple[int, ...], order: object, where: str) -> tuple[int, ...]:
    if order in ("C", "F"):  # spelling of early v3 stores
        return axes if order == "C" else axes[::-1]
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(len(axes)))):
        raise UnsupportedFormatError(f"{where}: transpose order {order!r} is no permutation of {len(axes)} dimensions")
    return tuple(axes[i] for i in order)


def _number(value: object, dtype: np.dtype[np.generic], where: str) -> float:
    found = fill_value_of(value, dtype, where)
    if found is None:
        raise UnsupportedFormatError(f"{where}: a codec lacks a number of dtype {dtype}")
    number: float = found.item()
    return number


def _value_codec(
    name: str, config: Mapping[str, object], dtype: np.dtype[np.generic], where: str
) -> tuple[dict[str, object], np.dtype[np.generic]] | None:
    """Return what undoes an array-to-array codec of values, and the dtype that it stores; None if it is odd."""
    if dtype.kind not in "iuf":
        return None
    if name == "scale_offset":
        offset, scale = (_number(config.get(key, n), dtype, where) for key, n in (("offset", 0), ("scale", 1)))
        undone = dtype.kind == "f" or (dtype.itemsize < 8 and scale != 0)
        return ({"offset": offset, "scale": scale}, dtype) if undone else None
    stored, given = dtype_v3(config.get("data_type"), where), config.get("scalar_map") or {}
    usual = config.get("rounding", "nearest-even") == "nearest-even" and config.get("out_of_range") is None
    pairs = given.get("decode") or [] if isinstance(given, dict) else None
    known = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if stored.kind not in "iuf" or not known or not (usual or np.can_cast(stored, dtype)):
        return None
    assert isinstance(pairs, list)
    return {"map": [[_number(key, stored, where), _number(value, dtype, where)] for key, value in pairs]}, stored


def chain_v3(
    entries: Sequence[object], ndim: int, itemsize: int, where: str, dtype: np.dtype[np.generic] | None = None
) -> Chain:
    """Read array-to-array codecs, then ``bytes``, then bytes-to-bytes codecs; anything else is odd.

    ``dtype``: the array's, where codecs may change its values; chunks then decode to it in this machine's byte order.
    """
    axes, endian, codecs, odd = tuple(range(ndim)), "", list[Codec](), list[str]()
    own = None if dtype is None else dtype.newbyteorder("=")
    values: dict[str, object] | None = None
    for entry in entries:
        full_name, config = check_named(entry, "codec", where)
        name = full_name.removeprefix("numcodecs.")
        if name == "bytes" and not endian:
            spelled = config.get("endian") or "little"
            if spelled not in ("big", "little"):
                raise UnsupportedFormatError(f"{where}: bytes codec with endian {spelled!r}")
            endian = ">" if spelled == "big" else "<"
            if values is not None and own is not None:  # the last of them stands before the bytes
                codecs[-1] = Codec(
                    name=codecs[-1].name,
                    config=values | {"stored": own.newbyteorder("S" if endian == _SWAPPED else "=").str},
                )
            continue
        if not endian and name == "transpose":
            axes = _transposed(axes, config.get("order"), where)
            continue
        if not endian and name in ("scale_offset", "cast_value") and own is not None and not odd:
            found = _value_codec(name, config, own, where)
            if found is not None:
                wanted, own = own.str, found[1].newbyteorder("=")
                values, itemsize = {**found[0], "wanted": wanted, "stored": own.str}, own.itemsize
                codecs.append(Codec(name=name, config=values))
                continue
        if not endian and name == "bitround":  # lossy when written, nothing to undo
            continue
        codec = _byte_codec(name, config, itemsize) if endian else None
        codecs.append(codec or Codec(name=full_name, config=config))
        if codec is None:
            odd.append(full_name)
    if not endian and not odd:
        odd.append("(no bytes codec)")
    return Chain(
        codecs=tuple(codecs), axis_order=axes, endian=endian if values is None and endian else "=", odd=tuple(odd)
    )

"""Codecs that Zarr metadata list, v2 and v3: which of them scidata undoes, with numcodecs' names and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scidata.core.types import Codec
from scidata.errors import RefusedError, UnsupportedFormatError
from scidata.sources.zarr.values import check_named

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
    """Return a bytes-to-bytes codec with numcodecs' arguments, or None where it is not one that scidata undoes."""
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


def chain_v3(entries: Sequence[object], ndim: int, itemsize: int, where: str) -> Chain:
    """Read array-to-array codecs, then ``bytes``, then bytes-to-bytes codecs; anything else is odd."""
    axes, endian, codecs, odd = tuple(range(ndim)), "", [], []
    for entry in entries:
        full_name, config = check_named(entry, "codec", where)
        name = full_name.removeprefix("numcodecs.")
        if name == "bytes" and not endian:
            spelled = config.get("endian") or "little"
            if spelled not in ("big", "little"):
                raise UnsupportedFormatError(f"{where}: bytes codec with endian {spelled!r}")
            endian = ">" if spelled == "big" else "<"
            continue
        if not endian and name == "transpose":
            axes = _transposed(axes, config.get("order"), where)
            continue
        if not endian and name == "bitround":  # lossy when written, nothing to undo
            continue
        codec = _byte_codec(name, config, itemsize) if endian else None
        codecs.append(codec or Codec(name=full_name, config=config))
        if codec is None:
            odd.append(full_name)
    if not endian and not odd:
        odd.append("(no bytes codec)")
    return Chain(codecs=tuple(codecs), axis_order=axes, endian=endian or "=", odd=tuple(odd))

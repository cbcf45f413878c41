"""A metric's sums over a sample, as bytes that ranks can exchange, and the sum of all ranks' entries."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import FloatArray
from scidata.data.metrics.exact import rounded_sum
from scidata.errors import ConfigError

#: Number of the sample; or -1, the dp rank and a count, for one without a number. Then the field's name.
Key: TypeAlias = tuple[tuple[int, ...], str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Of one field of one sample: arrays over the dims that are kept.

    Attributes
    ----------
    dims, global_shape, offsets
        Of the dims that are kept, of which a rank may have a part.
    arrays
        On one rank, terms of the sums of each quantity, then of the weights: ``(num_terms, *local_shape)``. Of a whole
        domain, values: ``global_shape``.
    """

    dims: tuple[str, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    arrays: tuple[FloatArray, ...]


def pack(entries: Mapping[Key, Entry], **said: object) -> bytes:
    """Return entries, and values of JSON beside them, as bytes."""
    listed = [
        [*key, entry.dims, entry.global_shape, entry.offsets, [array.shape for array in entry.arrays]]
        for key, entry in entries.items()
    ]
    head = json.dumps({"entries": listed} | said).encode()
    values = [np.ascontiguousarray(array).tobytes() for entry in entries.values() for array in entry.arrays]
    return b"".join([len(head).to_bytes(8, "little"), head, *values])


def unpack(packed: bytes) -> tuple[dict[Key, Entry], dict[str, Any]]:
    """Return the arguments of :func:`pack`."""
    start = 8 + int.from_bytes(packed[:8], "little")
    said = json.loads(packed[8:start])
    entries: dict[Key, Entry] = {}
    for number, name, dims, global_shape, offsets, shapes in said.pop("entries"):
        arrays = []
        for shape in shapes:
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(packed, np.float64, count, start).reshape(shape))
            start += 8 * count
        entries[tuple(number), name] = Entry(
            dims=tuple(dims), global_shape=tuple(global_shape), offsets=tuple(offsets), arrays=tuple(arrays)
        )
    return entries, said


def domain_sums(parts: Sequence[Mapping[Key, Entry]]) -> dict[Key, Entry]:
    """Return the sums over all ranks of a domain, each rounded once; raise ConfigError where samples differ."""
    first = parts[0]
    for rank, other in enumerate(parts[1:], start=1):
        if other.keys() != first.keys():
            (number, name) = min(other.keys() ^ first.keys())
            sample = f"sample {number[0]}" if number[0] >= 0 else f"update number {number[2]}"
            raise ConfigError(
                f"ranks of one domain were given different samples: {sample}{f' of {name!r}' if name else ''} is on "
                f"rank 0 or {rank} of the domain alone; all ranks of a domain call update() for each of their samples"
            )
    return {key: _summed([part[key] for part in parts]) for key in first}


def _summed(parts: Sequence[Entry]) -> Entry:
    first = parts[0]
    if any((part.dims, part.global_shape) != (first.dims, first.global_shape) for part in parts):
        raise ConfigError(f"ranks of one domain were given tensors of different shapes: {first.dims} and others")
    sums = []
    for number in range(len(first.arrays)):
        spread = [_spread(part, part.arrays[number]) for part in parts]
        sums.append(rounded_sum(np.concatenate(spread)).reshape(first.global_shape))
    return replace(first, arrays=tuple(sums))


def _spread(part: Entry, terms: FloatArray) -> FloatArray:
    """Return terms of a part at their places in the whole, ``(num_terms, num_elements)``; zero elsewhere."""
    whole = np.zeros((len(terms), *part.global_shape))
    box = (slice(start, start + size) for start, size in zip(part.offsets, terms.shape[1:], strict=True))
    whole[(slice(None), *box)] = terms
    return whole.reshape(len(terms), math.prod(part.global_shape))

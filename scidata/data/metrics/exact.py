"""Sums of float64 that depend neither on the order of the addends nor on their distribution over ranks.

Bits of a floating sum depend on its order. Here each rank turns its addends into a few *terms* whose exact sum is that
of the addends, and the terms of all ranks are added without error and rounded once: the result is the float64
nearest to the real sum, as from ``math.fsum``, however the addends were dealt.

Addends become terms by error-free extraction: adding and subtracting a large enough power of two cuts off their high
bits, on a grid so coarse that ordinary sums of these bits are exact; the rest goes through the next round.
That is Rump, Ogita and Oishi's "Accurate floating-point summation, part I" (SIAM J. Sci. Comput. 31, 2008), which
Demmel and Nguyen's reproducible sums stand on ("Fast reproducible floating-point summation", ARITH 2013), with as many
rounds as it takes to leave nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from scidata.core.types import FloatArray
from scidata.errors import ConfigError

#: Addends from here on, 1e289, count as infinite: powers of two above them shall not overflow.
LARGEST = 2.0**960
_LEAST_EXPONENT = -1022  # the last bit of this number is the smallest positive float64
_BLOCK = {"cpu": 1 << 15}  # elements per block, so that intermediate results fit the cache: 3 times as fast
_MANY = 1 << 26  # elsewhere; more than 2^50 would leave no bits to cut off
_KEPT_TERMS = 8


def exact_terms(x: Tensor) -> FloatArray:
    """Return terms whose exact sums are those of the rows of ``x``.

    - ``x``: ``(num_sums, num_addends)``, float64. Infinite and NaN addends, and those beyond :data:`LARGEST`, have a
      term of their own.

    Returns ``(num_terms, num_sums)``, float64, on the host; as few as :func:`rounded_sum` makes little work of.
    """
    num_sums, num_addends = x.shape
    block = _BLOCK.get(x.device.type, _MANY)
    width = max(1, min(num_addends, block // max(1, min(num_sums, 64))))
    height = max(1, block // width)
    columns = []
    for first in range(0, num_sums, height):
        rows = x[first : first + height]
        parts = [_extracted(rows[:, i : i + width]) for i in range(0, num_addends, width)]
        columns.append(fewer_terms(np.concatenate([np.zeros((0, len(rows))), *parts])))
    num_terms = max((len(terms) for terms in columns), default=0)
    padded = [np.pad(terms, ((0, num_terms - len(terms)), (0, 0))) for terms in columns]
    return np.concatenate([np.zeros((num_terms, 0)), *padded], axis=1)


def fewer_terms(terms: FloatArray) -> FloatArray:
    """Return fewer terms with the same exact sums, if there are many."""
    if len(terms) <= _KEPT_TERMS:
        return terms
    return _extracted(torch.from_numpy(np.ascontiguousarray(terms.T)))


def _extracted(x: Tensor) -> FloatArray:
    terms = list(_rounds(x))
    return np.stack(terms) if terms else np.zeros((0, len(x)))


def _rounds(x: Tensor) -> Iterator[FloatArray]:
    """Yield the sum of the leading bits that each round cuts off the addends, until no bits are left."""
    if x.numel() == 0:
        return
    # Of 1.26 and 0.37 in decimal the first round cuts off 1.2 and 0.3, whose sum 1.5 is exact on the grid of tenths; of
    # the rest, 0.06 and 0.07, the next one cuts off 0.06 and 0.07: the terms are 1.5 and 0.13.
    room = max(1, int(x.shape[1] - 1).bit_length())  # extra bits that a sum of this many numbers may need
    largest = _largest(x)
    if not (largest < LARGEST).all():
        apart = ~(x.abs() < LARGEST)  # NaN too
        special = torch.where(apart, torch.where(x.abs() >= LARGEST, x * torch.inf, x), 0.0)
        yield special.sum(1).cpu().numpy()
        x = x.masked_fill(apart, 0.0)
        largest = _largest(x)
    while largest.any():
        exponents = np.frexp(largest)[1].astype(np.int64)  # addends are below 2^exponent
        # sums of multiples of 2^(top - 52) that stay below 2^(top + 1) are exact
        top = np.maximum(exponents + room, _LEAST_EXPONENT)
        anchor = torch.from_numpy(np.ldexp(1.5, top)).to(x.device)[:, None]
        cut = (x + anchor).sub_(anchor)
        yield cut.sum(1).cpu().numpy()
        x = x - cut
        largest = _largest(x)


def _largest(x: Tensor) -> FloatArray:
    # a maximum and a minimum: twenty times as fast on a CPU as the maximum of abs()
    both = torch.stack([x.amax(1), -x.amin(1)]).cpu().numpy()
    return np.maximum(both[0], both[1])


def rounded_sum(terms: FloatArray) -> FloatArray:
    """Return the float64 nearest to the exact sum of terms along dim 0, as ``math.fsum``; infinities and NaN add up."""
    special = np.where(np.isfinite(terms), 0.0, terms).sum(0)
    finite = np.where(np.isfinite(terms), terms, 0.0)
    parts = _apart(finite)
    if len(parts) == 0:
        return np.asarray(special, np.float64)
    total = parts[0].copy()
    if len(parts) > 1:
        # a tie between two floats is decided by the rest, which the first addition ignored
        rest = np.zeros_like(total)
        for part in parts[:1:-1]:
            rest = np.where(part != 0, part, rest)
        half = parts[1]
        up = total + 2 * half
        is_tie = (half != 0) & (np.sign(half) == np.sign(rest)) & (up - total == 2 * half)
        total = np.where(is_tie, up, total)
    return np.asarray(np.where(special == 0, total, special), np.float64)


def _apart(terms: FloatArray) -> FloatArray:
    """Return falling terms of the same sum, each at most half the last bit of the one before (Knuth's addition)."""
    terms = fewer_terms(terms).copy()
    changed = len(terms) > 1
    while changed:
        changed = False
        for i in range(len(terms) - 2, -1, -1):
            a, b = terms[i].copy(), terms[i + 1].copy()
            total = a + b
            back = total - a
            error = (a - (total - back)) + (b - back)
            changed = changed or bool((total != a).any())
            terms[i], terms[i + 1] = total, error
    return terms


#: Number of the sample; or -1, the dp rank and a count, for one without a number. Then the field's name.
Key: TypeAlias = tuple[tuple[int, ...], str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Sums of one field of one sample: arrays over the kept dims.

    - ``dims``, ``global_shape``, ``offsets``: of the dims that are kept, of which a rank may have a part.
    - ``arrays``: on one rank, terms of the sums of each quantity, then of the weights: ``(num_terms, *local_shape)``.
      Of a whole domain, values: ``global_shape``.
    """

    dims: tuple[str, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    arrays: tuple[FloatArray, ...]


def pack(entries: Mapping[Key, Entry], **said: object) -> bytes:
    """Return entries, and JSON values beside them, as bytes."""
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
    """Return the sums over all ranks of a domain, each rounded once; raise ConfigError if samples differ."""
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

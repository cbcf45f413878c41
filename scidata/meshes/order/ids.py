"""Node ids and pairs of them: checked, packed into one word to be sorted, and unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, BoolArray, IntArray
from scidata.errors import ConfigError

#: Global node ids as stored: int32 where they fit, which halves the largest array of a store.
NodeIds: TypeAlias = npt.NDArray[np.int32] | IntArray


def node_ids(ids: npt.ArrayLike, num_nodes: int, ends: str) -> NodeIds:
    """Check node ids and return them as an integer array of one dimension."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise ConfigError(f"edge {ends} must be one dimension of integers, not {array.dtype} of shape {array.shape}")
    if num_nodes > 1 << 32:
        raise ConfigError(f"a graph of {num_nodes} nodes: at most 2**32 are supported; split the sample")
    # seen as unsigned, a negative id is a large one: one pass finds both
    if len(array) and int(array.view(array.dtype.str.replace("i", "u")).max()) >= num_nodes:
        bad = np.flatnonzero((array < 0) | (array >= num_nodes))
        raise ConfigError(
            f"{len(bad)} edge {ends} are outside the {num_nodes} nodes (first edges: {bad[:5].tolist()}, "
            f"values: {array[bad[:5]].tolist()})"
        )
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


def id_dtype(num_nodes: int) -> np.dtype[Any]:
    """Return int32 where all ids fit, else int64."""
    return np.dtype(np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64)


def id_bits(num_nodes: int) -> int:
    """Return how many bits the largest id takes."""
    return max(num_nodes - 1, 0).bit_length()


def pair_keys(high: NodeIds, low: NodeIds, num_nodes: int) -> Keys:
    """Pack two ids below 2**32 into one word."""
    keys = np.empty(len(high), np.uint64)
    for rows in blocks(len(keys)):
        key = keys[rows]
        key[:] = high[rows]
        key <<= np.uint64(id_bits(num_nodes))
        key |= low[rows].astype(np.uint64)
    return keys


def low_ids(keys: Keys, num_nodes: int) -> NodeIds:
    """Unpack the low id of :func:`pair_keys`, as small as it gets."""
    low: NodeIds = np.empty(len(keys), id_dtype(num_nodes))
    for rows in blocks(len(keys)):
        low[rows] = keys[rows] & np.uint64((1 << id_bits(num_nodes)) - 1)
    return low


def undirected_keys(one: NodeIds, other: NodeIds, num_nodes: int, out: Keys | None = None) -> Keys:
    """Pack the two ends of each edge into one word, the same for both directions: the lower id is the high one."""
    keys = np.empty(len(one), np.uint64) if out is None else out
    for rows in blocks(len(keys)):
        key = keys[rows]
        key[:] = np.minimum(one[rows], other[rows])
        key <<= np.uint64(id_bits(num_nodes))
        key |= np.maximum(one[rows], other[rows]).astype(np.uint64)
    return keys


def both_directions(keys: Keys, num_nodes: int) -> IntArray:
    """Return both directions of every edge, each once and without self-loops, by (destination, source).

    - ``keys``: those of :func:`undirected_keys`; their memory is used up.
    """
    both = directed_words(keys, num_nodes)
    edge_index = np.empty((2, len(both)), np.int64)
    np.bitwise_and(both, np.uint64((1 << id_bits(num_nodes)) - 1), out=edge_index[0].view(np.uint64))
    np.right_shift(both, np.uint64(id_bits(num_nodes)), out=edge_index[1].view(np.uint64))
    return edge_index


def directed_words(keys: Keys, num_nodes: int) -> Keys:
    """Return both directions of every edge as :func:`pair_keys` of destination and source, sorted, each once.

    ``keys`` are those of :func:`undirected_keys`; self-loops are left out, and the memory of ``keys`` is used up.
    """
    # Of the edges 0-2, 2-0 and 1-1 the keys are 02, 02 and 11. Repeats and loops go: 02. Beside it comes its swap,
    # 20; sorted, high id first, these are the edges to 0 (from 2) and to 2 (from 0).
    num_bits, mask = np.uint64(id_bits(num_nodes)), np.uint64((1 << id_bits(num_nodes)) - 1)
    keys.sort()
    kept = run_starts(keys)  # each undirected edge once: half as many to sort again
    for rows in blocks(len(keys)):
        kept[rows] &= (keys[rows] >> num_bits) != (keys[rows] & mask)
    keys = keys[kept]
    both = np.concatenate([keys, keys])
    for rows in blocks(len(keys)):
        swapped = both[rows]
        swapped &= mask
        swapped <<= num_bits
        swapped |= keys[rows] >> num_bits
    del keys
    both.sort()
    return both


def ranges(starts: IntArray, stops: IntArray) -> IntArray:
    """Concatenate the ranges ``[starts[i], stops[i])`` as indices."""
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def contains(sorted_ids: AnyArray, wanted: AnyArray) -> BoolArray:
    """Say which of ``wanted`` are among sorted ids, or other numbers."""
    if not len(sorted_ids):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(sorted_ids, wanted), len(sorted_ids) - 1)
    return sorted_ids[at] == wanted


_BLOCK = 1 << 15

Keys: TypeAlias = npt.NDArray[np.uint64]


def stable_sort(keys: Keys, num_bits: int, *, overwrite: bool = False) -> tuple[Keys, IntArray]:
    """Return ``keys < 2**num_bits`` sorted, and the row each came from; equal keys stay in the order of their rows.

    ``overwrite``: the caller's keys are not needed any more, so that the work may be done in their memory.

    NumPy sorts plain integers with vector instructions, 7 times faster than it argsorts them. So the row goes into the
    low bits of the key. Rows whose order depends on the bits that this pushes out of the word are sorted again.
    """
    # Keys of 3 bits 101, 001, 101 with rows of 2 bits become 10100, 00101, 10110; sorted 00101, 10100, 10110: the low
    # bits say that rows 1, 0, 2 come in this order. Where key and row take more than 64 bits, the lowest bits of the
    # key are lost from the word at first.
    row_bits = max(len(keys) - 1, 0).bit_length()
    lost = max(num_bits + row_bits - 64, 0)
    words = keys if overwrite and not lost else np.empty(len(keys), np.uint64)
    order = np.empty(len(keys), np.int64)
    for rows in blocks(len(keys)):
        word = np.right_shift(keys[rows], np.uint64(lost), out=words[rows])
        word <<= np.uint64(row_bits)
        word |= np.arange(rows.start, rows.stop, dtype=np.uint64)
    words.sort()
    for rows in blocks(len(keys)):
        word = words[rows]
        np.bitwise_and(word, np.uint64((1 << row_bits) - 1), out=order[rows].view(np.uint64))
        word >>= np.uint64(row_bits)
    if not lost:
        return words, order
    starts = run_starts(words)
    tied = np.flatnonzero(~starts | ~np.append(starts[1:], True))
    order[tied] = _by_lost_bits(keys, order[tied], np.cumsum(starts[tied]), lost)
    return keys[order], order


def _by_lost_bits(keys: Keys, rows: IntArray, runs: IntArray, lost: int) -> IntArray:
    """Return rows, given run by run and ascending in each, by the low bits of their keys, then by row."""
    low = keys[rows] & np.uint64((1 << lost) - 1)
    run_bits = int(runs[-1]).bit_length() if len(runs) else 0
    if run_bits + lost > 64 - max(len(rows) - 1, 0).bit_length():
        return rows[np.lexsort((low, runs))]
    low |= runs.view(np.uint64) << np.uint64(lost)
    return rows[stable_sort(low, run_bits + lost)[1]]


def blocks(num: int, size: int = _BLOCK) -> Iterator[slice]:
    """Cut rows into blocks; by default their temporaries stay in a second-level cache, and need no fresh pages each."""
    return (slice(start, min(start + size, num)) for start in range(0, num, size))


def distinct(values: AnyArray) -> AnyArray:
    """Return the distinct values, sorted; ``values`` are sorted, too. np.unique, which hashes, takes times as long."""
    values.sort()
    return values[run_starts(values)]


def run_starts(values: AnyArray) -> BoolArray:
    """Return, for sorted values, where a new value begins."""
    starts = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=starts[1:])
    return starts

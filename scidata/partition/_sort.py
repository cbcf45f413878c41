"""Stable sorting of unsigned keys, several times faster than ``np.argsort(kind="stable")``."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.types import IntArray

__all__ = ["Keys", "run_starts", "stable_sort"]

Keys: TypeAlias = npt.NDArray[np.uint64]


def stable_sort(keys: Keys, num_bits: int) -> tuple[Keys, IntArray]:
    """Return ``keys < 2**num_bits`` sorted, and the row each came from; equal keys stay in the order of their rows.

    NumPy sorts plain integers with vector instructions, 7 times faster than it argsorts them. So the row goes into the
    low bits of the key, and what that pushes out of the word is put right afterwards, among the rows it concerns only.
    """
    row_bits = max(len(keys) - 1, 0).bit_length()
    lost = max(num_bits + row_bits - 64, 0)
    words = keys >> np.uint64(lost)
    words <<= np.uint64(row_bits)
    words |= np.arange(len(keys), dtype=np.uint64)
    words.sort()
    order: IntArray = (words & np.uint64((1 << row_bits) - 1)).view(np.int64)
    words >>= np.uint64(row_bits)
    if not lost:
        return words, order
    starts = run_starts(words)
    tied = np.flatnonzero(~starts | ~np.append(starts[1:], True))
    rows = order[tied]
    order[tied] = rows[np.argsort(keys[rows], kind="stable")]
    return keys[order], order


def run_starts(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return, for sorted values, where a new value begins."""
    starts = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=starts[1:])
    return starts

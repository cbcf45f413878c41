"""Orders whose runs of rows are random samples of the whole: for draws that read no more than they take.

Rows are dealt at random to *leaves* of equal size, and lie along the curve inside each. So a leaf is drawn from the
whole at random, and its first half lies in one half of space: parts of several leaves that are cut at the same shares
of the curve lie together, and have few ghosts.
"""

from __future__ import annotations

import numpy as np

from scidata.core.types import IntArray
from scidata.errors import ConfigError

SHUFFLE = "shuffle"
_LEAF_ROWS = 1 << 14
_GRAIN_ROWS = 1024  # of a leaf, that lie together in a draw: a chunk of a store


def leaf_rows_of(order: str) -> int | None:
    """Return the rows of a leaf of ``"shuffle"`` or ``"shuffle:ROWS"``; None of any other order."""
    name, colon, rows = order.partition(":")
    if name != SHUFFLE or not colon:
        return _LEAF_ROWS if name == SHUFFLE else None
    if not rows.isdecimal() or int(rows) < 1:
        raise ConfigError(f"order={order!r}: expected 'shuffle', or 'shuffle:16384' with the rows of a leaf")
    return int(rows)


def shuffled(curve: IntArray, leaf_rows: int, seed: int) -> IntArray:
    """Return all rows, given along a curve, leaf by leaf; the last leaf has those that are left."""
    leaves = np.arange(len(curve)) // leaf_rows
    np.random.default_rng([seed, len(curve)]).shuffle(leaves)
    return curve[np.argsort(leaves, kind="stable")]


def by_grain(rows: IntArray, num_rows: int, leaf_rows: int) -> IntArray:
    """Return stored rows by the grain of their leaf, then by leaf: along the curve, in whole chunks."""
    leaf = rows // leaf_rows
    size = np.minimum(leaf_rows, num_rows - leaf * leaf_rows)
    grain = (rows - leaf * leaf_rows) * -(-leaf_rows // _GRAIN_ROWS) // size
    return rows[np.lexsort((rows, grain))]

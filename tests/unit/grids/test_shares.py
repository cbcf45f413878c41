"""What ranks of a node need together: each element of a rank's part comes from one place, and is the right one."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scidata.core.bounds import rows_of
from scidata.core.types import Segment
from scidata.grids.blocks.node_shares import _segments, cut_by_ranks, touched_blocks
from scidata.grids.blocks.on_node import _chunks_of


def random_rows(rng: np.random.Generator, size: int, num_ranks: int) -> list[np.ndarray]:
    """Rows of each rank: slices that overlap, wrap round, go backwards, or are none."""
    found = []
    for _ in range(num_ranks):
        start, count, step = int(rng.integers(size)), int(rng.integers(0, size)), int(rng.choice([1, 1, 2, -1]))
        found.append((start + step * np.arange(count)) % size)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_put_together_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, shape = int(rng.integers(1, 5)), tuple(map(int, rng.integers(1, 14, 3)))
    chunks = tuple(int(rng.integers(1, n + 1)) for n in shape)
    rows = [None if d == 1 else random_rows(rng, n, num_ranks) for d, n in enumerate(shape)]
    if seed % 3 == 0:
        rows[2] = [np.arange(shape[2])] * num_ranks
    whole = rng.normal(size=shape)
    made: dict[str, int] = {}
    for me in range(num_ranks):
        mine = [np.arange(n) if r is None else r[me] for n, r in zip(shape, rows, strict=True)]
        out = np.full(tuple(map(len, mine)), np.nan)
        cut = cut_by_ranks(chunks, rows, me, num_ranks)
        for selection in cut.alone:
            picked, places = [], []
            for d, segments in enumerate(selection):
                picked.append(np.arange(shape[1]) if d == 1 else rows_of(segments))
                dest = [np.arange(s.offset, s.offset + s.count) for s in segments]
                places.append(np.arange(shape[1]) if d == 1 else np.concatenate(dest))
            assert np.isnan(out[np.ix_(*places)]).all()
            out[np.ix_(*places)] = whole[np.ix_(*picked)]
        for share in cut.shares:
            assert me in share.takers
            assert len(share.takers) > 1
            made[share.as_text()] = made.get(share.as_text(), 0) + 1
            ids = [np.arange(shape[1]) if d == 1 else rows_of(r) for d, r in enumerate(share.rows)]
            values = whole[np.ix_(*ids)]
            for to, source in share.copies:
                assert np.isnan(out[to]).all()
                out[to] = values[source]
        assert np.array_equal(out, whole[np.ix_(*mine)])
    # every taker knows of a share, by the same name
    counts = {name: len(ast.literal_eval(name)[0]) for name in made}
    assert made == counts


@pytest.mark.parametrize("step", [-3, -1, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rows_at_equal_distances_are_one_piece(count: int, step: int) -> None:
    rows = 30 + step * np.arange(count)
    (found,) = _segments(4 + np.arange(count), rows)
    assert (found.offset, rows_of([found]).tolist()) == (4, rows.tolist())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_blocks_that_hold_rows(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape, block = (4, 5, 6), int(rng.integers(8, 100))
        rows = [np.flatnonzero(rng.random(n) < 0.4) for n in shape]
        wanted = np.zeros(shape, np.bool_)
        wanted[np.ix_(*rows)] = True
        in_memory = wanted.transpose(order).reshape(-1)
        num_blocks = -(-4 * in_memory.size // block)
        first = 4 * np.flatnonzero(in_memory)
        exact = np.zeros(num_blocks, np.bool_)
        exact[first // block] = exact[(first + 3) // block] = True
        found = touched_blocks(shape, order, rows, 4, block, num_blocks)
        assert (found | ~exact).all()  # perhaps some more
        if all(len(r) == n for r, n in zip(rows, shape, strict=True)):
            assert (found == exact).all()


def test_chunks_of_a_share_are_those_of_its_samples_and_rows() -> None:
    """Their files are looked at: values that were handed on before one of them was written anew are not taken."""
    block: Any = SimpleNamespace(samples=(Segment(start=3, count=6),), layout=SimpleNamespace(chunks=(4, 2, 5)))
    share: Any = SimpleNamespace(chunks=(None, np.array([1, 3]), np.array([0])))
    assert _chunks_of(block, share).tolist() == [[t, y, 0] for t in range(3) for y in (1, 3)]

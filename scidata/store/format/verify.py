"""Checks of one stored sample: digests, and every invariant that readers rely on. Blocks of rows, so memory is small.

Memory: one byte per row for the permutation, and the row pointers of edges and cells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scidata.core.types import AnyArray, Array, ArrayLayout, IntArray, Source
from scidata.errors import SciDataError
from scidata.read.arrays import read_array
from scidata.store.format.arrays import ArrayDigest, blocks_of
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import folder_of_edges, relations_of, sets_of
from scidata.store.format.write import BLOCK_ROWS, search_space, touched_blocks

_BLOCK_BYTES = 32 << 20
_SLACK = 1e-12  # cos and sin may differ in the last bit from one machine to the next


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first thing wrong with a store, and its place as far as that is known."""

    store: str
    sample: int | None
    array: str | None
    row: int | None
    message: str

    def __str__(self) -> str:
        places = {"sample": self.sample, "array": self.array, "row": self.row}
        known = (f"{kind} {place!r}" for kind, place in places.items() if place is not None)
        return ": ".join([self.store, *known, self.message])


class FaultFound(Exception):  # noqa: N818 - carries a result, names no error
    """Ends the checks of a sample; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def read_rows(source: Source, layout: ArrayLayout, start: int | None = None, stop: int | None = None) -> Array:
    """Read rows ``[start, stop)`` of the first dimension, in native byte order."""
    return read_array(source, layout, (slice(start, stop), *(slice(None) for _ in layout.shape[1:])))


def check_sample(source: Source, info: SampleInfo, store: str) -> None:
    """Reread a sample's arrays and check them, beyond shapes, against its description; FaultFound: the first fault."""
    _Checker(source, info, store).check()


class _Checker:
    def __init__(self, source: Source, info: SampleInfo, store: str) -> None:
        self._source, self._info, self._store = source, info, store
        self._num_rows = info.counts[info.entity]

    def check(self) -> None:
        expected = set(self._info.arrays)
        if (found := set(self._source.arrays)) != expected:
            name = sorted(found ^ expected)[0]
            self._fail(name, None, "is not in the manifest" if name in found else "is not there")
        for path in self._info.arrays:
            self._check_digest(path)
        self._check_permutation(f"{self._info.entity}/original_id")
        if "cell/indptr" in expected:
            self._check_permutation("cell/original_id")
            self._check_cells()
        for name in [name for name in sets_of(self._info) if name != self._info.entity]:
            self._check_permutation(f"{name}/original_id")
            self._pointers(f"{name}/indptr", self._num_rows, self._info.counts[name])
        for name, (source, _, target) in relations_of(self._info).items():
            self._check_edges(name, self._info.counts[source], self._info.counts[target])
        self._check_blocks()

    def _fail(self, array: str | None, row: int | None, message: str) -> None:
        message += "; write it again"
        raise FaultFound(Fault(store=self._store, sample=self._info.index, array=array, row=row, message=message))

    def _check_digest(self, path: str) -> None:
        layout, info = self._source.arrays[path], self._info.arrays[path]
        if layout.shape != info.shape or layout.dtype != np.dtype(info.dtype):
            found = f"{layout.dtype.str} {layout.shape}"
            self._fail(path, None, f"is {found}, the manifest has {info.dtype} {info.shape}")
        digest = ArrayDigest(layout.shape, layout.dtype)
        try:
            for box in blocks_of(layout.shape, _block_shape(layout)):
                digest.update(read_array(self._source, layout, box))
        except (SciDataError, OSError) as e:
            self._fail(path, None, f"cannot be read: {e}")
        if digest.hexdigest() != info.digest:
            self._fail(
                path, None, f"has digest {digest.hexdigest()}, the manifest has {info.digest}: its values changed"
            )

    def _blocks(self, path: str) -> Iterator[tuple[int, AnyArray]]:
        """Yield first row and values of runs of rows; a multiple of the rows of a bounding box."""
        layout = self._source.arrays[path]
        row_bytes = max(1, math.prod(layout.shape[1:]) * layout.dtype.itemsize)
        step = max(1, _BLOCK_BYTES // row_bytes // BLOCK_ROWS) * BLOCK_ROWS
        for start in range(0, layout.shape[0], step):
            yield start, read_rows(self._source, layout, start, start + step)

    def _whole(self, path: str) -> Array:
        return read_rows(self._source, self._source.arrays[path])

    def _check_permutation(self, path: str) -> None:
        """Check that each of the source's rows is there once (at most once, where a repair left some out)."""
        entity = path.split("/")[0]
        num_rows = self._info.source_counts[entity]
        seen = np.zeros(num_rows, bool)
        for start, ids in self._blocks(path):
            self._check_range(path, start, ids, num_rows)
            order = np.argsort(ids, kind="stable")
            repeated = seen[ids]
            repeated[order[1:]] |= ids[order[1:]] == ids[order[:-1]]
            if repeated.any():
                row = int(np.flatnonzero(repeated)[0])
                self._fail(path, start + row, f"holds {ids[row]} a second time: it is no permutation")
            seen[ids] = True

    def _check_range(self, path: str, start: int, ids: AnyArray, num_rows: int) -> None:
        outside = (ids < 0) | (ids >= num_rows)
        if outside.any():
            row = int(np.flatnonzero(outside)[0])
            self._fail(path, start + row, f"holds {ids[row]}, which is not one of {num_rows} rows")

    def _pointers(self, path: str, num_rows: int, total: int) -> IntArray:
        """Return row pointers after checking that they run from 0 to ``total`` without a step back."""
        pointers: IntArray = self._whole(path).astype(np.int64)
        if pointers[0] != 0 or pointers[-1] != total:
            row = 0 if pointers[0] != 0 else num_rows
            self._fail(path, row, f"must run from 0 to {total}, but runs from {pointers[0]} to {pointers[-1]}")
        back = np.flatnonzero(np.diff(pointers) < 0)
        if len(back):
            self._fail(path, int(back[0]) + 1, f"decreases from {pointers[back[0]]} to {pointers[back[0] + 1]}")
        return pointers

    def _check_edges(self, relation: str, num_sources: int, num_targets: int) -> None:
        group = folder_of_edges(relation)
        indptr = self._pointers(f"{group}/indptr", num_targets, self._info.counts[relation])
        last = -1  # source of the edge before the block
        for start, src in self._blocks(f"{group}/src"):
            self._check_range(f"{group}/src", start, src, num_sources)
            steps = np.diff(src.astype(np.int64), prepend=last)
            rows = np.flatnonzero(steps < 0) + start
            first_of_node = indptr[np.searchsorted(indptr, rows)] == rows
            if not first_of_node.all():
                row = int(rows[~first_of_node][0])
                self._fail(
                    f"{group}/src", row, "is smaller than the one before it, of the same destination: not sorted"
                )
            last = int(src[-1])
        for start, ids in self._blocks(f"{group}/edge_id"):
            if (ids < 0).any():
                self._fail(f"{group}/edge_id", start + int(np.flatnonzero(ids < 0)[0]), "is negative")

    def _check_cells(self) -> None:
        num_cells = self._info.counts["cell"]
        total = self._source.arrays["cell/connectivity"].shape[0]
        offsets = self._pointers("cell/offsets", num_cells, total)
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty):
            self._fail("cell/offsets", int(empty[0]), "is a cell without nodes")
        owners = np.full(num_cells, np.iinfo(np.int64).max, np.int64)
        for start, nodes in self._blocks("cell/connectivity"):
            self._check_range("cell/connectivity", start, nodes, self._num_rows)
            first = int(np.searchsorted(offsets, start, side="right")) - 1
            last = int(np.searchsorted(offsets, start + len(nodes)))
            heads = np.maximum(offsets[first:last] - start, 0)
            lowest = np.minimum.reduceat(nodes.astype(np.int64), heads)
            owners[first:last] = np.minimum(owners[first:last], lowest)
        indptr = self._pointers("cell/indptr", self._num_rows, num_cells)
        expected = np.repeat(np.arange(self._num_rows), np.diff(indptr))
        wrong = np.flatnonzero(owners != expected)
        if len(wrong):
            row = int(wrong[0])
            message = f"is listed under node {expected[row]}, but its lowest node is {owners[row]}"
            self._fail("cell/indptr", row, f"cell {row} {message}")
        if "blocks/touched_by" in self._info.arrays:
            read = functools.partial(read_rows, self._source, self._source.arrays["cell/connectivity"])
            touched = touched_blocks(offsets, lambda rows: read(rows.start, rows.stop), self._num_rows)
            for path, values in zip(("blocks/touched_indptr", "blocks/touched_by"), touched, strict=True):
                if not np.array_equal(self._whole(path), values):
                    self._fail(path, None, "does not name the blocks whose cells touch others")

    def _check_blocks(self) -> None:
        prefix = self._whole("blocks/weight_prefix")
        back = np.flatnonzero(~(np.diff(prefix) >= 0))
        if prefix[0] != 0 or len(back):
            row = int(back[0]) + 1 if len(back) else 0
            self._fail("blocks/weight_prefix", row, "must begin at 0 and not decrease")
        if self._info.block_space is None:
            return
        path = f"{self._info.entity}/pos"
        boxes = self._whole("blocks/bbox")
        for start, pos in self._blocks(path):
            points = search_space(pos, on_sphere=self._info.block_space == "unit_sphere")
            block = (start + np.arange(len(points))) // BLOCK_ROWS
            inside = (points >= boxes[block, 0] - _SLACK) & (points <= boxes[block, 1] + _SLACK)
            if not inside.all():
                row = start + int(np.flatnonzero(~inside.all(axis=1))[0])
                self._fail("blocks/bbox", row // BLOCK_ROWS, f"does not contain row {row} of {path!r}")


def _block_shape(layout: ArrayLayout) -> tuple[int, ...]:
    """Return a box of about the block size whose boxes in C order hold the values in C order, chunk by chunk."""
    block = [1] * len(layout.shape)
    room = max(1, _BLOCK_BYTES // layout.dtype.itemsize)
    for dim in range(len(block) - 1, -1, -1):
        size = max(1, layout.shape[dim])
        fits = min(size, room)
        if fits < size:  # keep to whole chunks, so that none is read twice
            fits = max(fits // layout.chunks[dim], 1) * layout.chunks[dim]
        block[dim] = fits
        if fits < size:
            break
        room = max(1, room // size)
    return tuple(block)

"""Turn boxes of raw chunks into byte ranges, and merge byte ranges into fewer reads.

A *span* is one byte range that one copy (or none) brings to the destination: a whole box where its rows lie close
together on disk, else a part of it. A *read* is a run of spans of one file that one ``preadv`` fetches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.types import ArrayLayout, BoolArray, IntArray
from scidata.plan.cut import Cut

#: Bytes that are read and discarded rather than starting another read. One ``preadv`` from Python costs 3-4 µs with
#: its bookkeeping, as much as copying 16-32 KiB out of the page cache (measured). A request to S3 takes as much CPU
#: time as receiving 256 KiB by obstore, and by s3fs four times that; of 64, 128 and 256 KiB, 256 took the least in
#: whole reads of shards (tests/bench/README.md). On a saturated line less would be better.
MAX_GAP = 8 << 10
MAX_GAP_URL = 256 << 10

#: Largest span and largest read: enough to hide the cost of a call, few enough that scratch stays in the L2 cache and
#: that threads share a large array evenly.
MAX_SPAN = 1 << 20
MAX_READ = 2 << 20
MAX_READ_URL = 16 << 20

#: Chunks with only a checksum are read in place and checked while in the L2 cache: half again as
#: fast as from memory. Reads of 512 KiB took a tenth less than reads of 256 KiB, and as much as longer ones (measured).
MAX_CHECKED = 512 << 10

#: Reads straight into the destination need no scratch: they may be longer, if enough remain for all threads.
MAX_READ_DIRECT = 16 << 20
MIN_PARTS = 16

#: Shorter rows go through scratch and one strided copy; longer ones are separate buffers of a ``preadv``.
#: The two cost the same at 3-4 KiB (measured).
MIN_DIRECT = 4 << 10


def decoded_limit(layout: ArrayLayout) -> int:
    """Return the bytes of chunks decoded in one unit of work."""
    return MAX_CHECKED if all(codec.name == "crc32c" for codec in layout.codecs) else MAX_SPAN


def gap_limits(remote: bool) -> tuple[int, int]:
    """Return the largest gap to read across, and the largest read, for files or URLs."""
    return (MAX_GAP_URL, MAX_READ_URL) if remote else (MAX_GAP, MAX_READ)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Byte ranges of raw chunks and their destinations; one array row per span."""

    box: IntArray  # ``(num,)`` row of the box
    # first, count: ``(num, ndim)`` part of the box: first index along each dimension, and number of indices
    first: IntArray
    count: IntArray
    # offset, nbytes: ``(num,)`` first byte, from the chunk's own first byte, and length with all gaps
    offset: IntArray
    nbytes: IntArray
    direct: BoolArray  # ``(num,)`` bool: the bytes are also contiguous in the destination, in the same order
    dest: IntArray  # ``(num,)`` destination of the first element, in elements

    def take(self, order: IntArray) -> Spans:
        """Return the spans reordered."""
        return Spans(**{name: getattr(self, name)[order] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """Ranged reads: ``(num,)`` path index, first byte, length; read ``i`` has items ``[bounds[i], bounds[i + 1])``."""

    path_index: IntArray
    offset: IntArray
    nbytes: IntArray
    bounds: IntArray


def element_strides(layout: ArrayLayout, chunks: IntArray) -> IntArray:
    """Return the strides in elements, by logical dimension, of some chunks, or of all if equal.

    As :meth:`ArrayLayout.chunk_shapes` returns their shapes.
    """
    shapes = layout.chunk_shapes(chunks)
    strides, step = np.ones_like(shapes), np.ones(shapes.shape[:-1], np.int64)
    for dim in reversed(layout.axis_order):
        strides[..., dim] = step
        step = step * shapes[..., dim]
    return strides


def dest_strides(out_shape: Sequence[int]) -> IntArray:
    """Return the C-order strides of the destination, in elements."""
    return np.array([math.prod(out_shape[i + 1 :]) for i in range(len(out_shape))], np.int64)


def make_spans(
    layout: ArrayLayout,
    cut: Cut,
    rows: IntArray,
    out_shape: Sequence[int],
    max_gap: int,
) -> Spans:
    """Split the boxes ``rows`` into spans."""
    pieces, boxes, item = cut.pieces, cut.boxes, layout.dtype.itemsize
    ndim = len(layout.shape)
    start, count, step, dest, sign = (
        boxes.gather(pieces, name, rows) for name in ("start", "count", "step", "dest", "sign")
    )
    strides = element_strides(layout, cut.chunks[boxes.chunk_row[rows]]) * item
    pitch = strides * step
    origin = (start * strides).sum(axis=1)
    to = dest_strides(out_shape)
    num = len(rows)

    # First, from the fastest axis on disk to the slowest, how much of each box one span can hold. Of a chunk of
    # (4, 100, 1000) float32 a box wants [:, 10:12, :]. The last axis has no gaps: 4,000 bytes. Nor has the middle one,
    # whose rows follow each other: 8,000 bytes. Along the first the next bytes lie 400,000 further on, a gap of
    # 392,000 that is not read: merging stops there, at level 0. Second, below, the axes up to that level are
    # enumerated: 4 spans of 8,000 bytes each.
    extent = np.full(num, item, np.int64)  # bytes from first to last element of the axes merged so far
    wanted = np.ones(num, np.int64)  # number of their elements
    direct = np.ones(num, np.bool_)
    active = np.ones(num, np.bool_)
    level = np.full(num, -1, np.int64)  # axes before it are enumerated, this one in blocks
    block = np.ones(num, np.int64)
    for axis in range(ndim - 1, -1, -1):
        dim = layout.axis_order[axis]
        n, hop = count[:, dim], pitch[:, dim]
        close = (n == 1) | (hop - extent <= max_gap)
        whole = (n - 1) * hop + extent
        stays = direct & ((n == 1) | ((hop == extent) & (to[dim] * sign[:, dim] == wanted)))
        keep_rows = direct & ~stays & (extent >= MIN_DIRECT)
        merge = active & close & ~keep_rows & (whole <= MAX_SPAN)
        stop = active & ~merge
        level[stop] = axis
        fits = np.where(close & ~keep_rows, (MAX_SPAN - extent) // np.maximum(hop, 1) + 1, 1)
        block[stop] = np.clip(fits, 1, n)[stop]
        active = merge
        extent = np.where(merge, whole, extent)
        wanted = np.where(merge, wanted * n, wanted)
        direct = np.where(merge, stays, direct)
    if active.all():
        box, first, part = rows, np.zeros_like(count), count
        offset, nbytes, here = origin, extent, (dest * to).sum(axis=1)
        return Spans(box=box, first=first, count=part, offset=offset, nbytes=nbytes, direct=direct, dest=here)
    # Number the spans of each box like the digits of a clock, the fastest axis first: with 3 blocks along axis 1 and 4
    # indices along axis 0, span 7 of a box is block 7 % 3 = 1 and index 7 // 3 = 2.
    per_axis = np.ones_like(count)  # number of spans along each axis, slowest axis first
    for axis, dim in enumerate(layout.axis_order):
        n = count[:, dim]
        per_axis[:, axis] = np.where(level > axis, n, np.where(level == axis, -(-n // block), 1))
    per_box = per_axis.prod(axis=1)
    index = np.repeat(np.arange(num), per_box)
    within = np.arange(len(index)) - (np.cumsum(per_box) - per_box)[index]
    first, part = np.zeros((len(index), ndim), np.int64), count[index]
    for axis in range(ndim - 1, -1, -1):
        dim = layout.axis_order[axis]
        within, i = np.divmod(within, per_axis[index, axis])
        at, q = level[index], block[index]
        first[:, dim] = np.where(at > axis, i, np.where(at == axis, i * q, 0))
        left = part[:, dim] - first[:, dim]
        part[:, dim] = np.where(at > axis, 1, np.where(at == axis, np.minimum(q, left), part[:, dim]))
    nbytes = ((part - 1) * pitch[index]).sum(axis=1) + item
    return Spans(
        box=rows[index],
        first=first,
        count=part,
        offset=origin[index] + (first * pitch[index]).sum(axis=1),
        nbytes=nbytes,
        direct=_is_direct(layout, part, nbytes, sign[index], to),
        dest=((dest[index] + first * sign[index]) * to).sum(axis=1),
    )


def _is_direct(layout: ArrayLayout, count: IntArray, nbytes: IntArray, sign: IntArray, to: IntArray) -> BoolArray:
    """Return which spans have no gap on disk or in the destination, and the same order in both."""
    run = np.ones(len(count), np.int64)
    direct = np.ones(len(count), np.bool_)
    for dim in reversed(layout.axis_order):
        n = count[:, dim]
        direct &= (n == 1) | (to[dim] * sign[:, dim] == run)
        run = run * n
    direct &= run * layout.dtype.itemsize == nbytes
    return direct


def group_reads(
    path_index: IntArray,
    offset: IntArray,
    nbytes: IntArray,
    *,
    remote: bool,
    direct: BoolArray | None = None,
    decoded: IntArray | None = None,
    max_decoded: int = 0,
) -> tuple[IntArray, Reads]:
    """Sort byte ranges by location, and merge near ones into reads.

    Returns a permutation of the ranges, and the reads over the permuted ranges.

    ``remote``: whether they lie behind URLs, where a request costs more than bytes.
    ``direct``: which ranges are read straight into the destination. A read holds only such ranges or none, and ranges
    of one read may overlap (a periodic halo that takes the same rows twice) only if they are not direct.
    ``decoded``: for encoded chunks, which may not overlap either: their decoded sizes. A read is a unit of work, so it
    ends where ``max_decoded`` bytes of them have come together.
    """
    # Three steps: sort the ranges by file and offset; cut if the next one may not share a read (another file, a
    # gap too wide, direct beside not direct); cut runs that are too long for one read. Of files, ranges of 4 KiB at
    # 0 KiB, 10 KiB and 90 KiB are two reads: 0 to 14 KiB, whose gap of 6 KiB is read and thrown away, and 90 to 94.
    max_gap, max_read = gap_limits(remote)
    order = np.arange(len(offset))
    next_path = path_index[1:] > path_index[:-1]
    if next_path.all():  # each range is in another file
        bounds = np.arange(len(offset) + 1)
        return order, Reads(path_index=path_index, offset=offset, nbytes=nbytes, bounds=bounds)
    same_path = path_index[1:] == path_index[:-1]
    if not (next_path | (same_path & (offset[1:] >= offset[:-1]))).all():
        order = np.lexsort((offset, path_index))
        path_index, offset, nbytes = path_index[order], offset[order], nbytes[order]
        same_path = path_index[1:] == path_index[:-1]
    end = offset + nbytes
    reach = end if not same_path.all() else np.maximum.accumulate(end)  # end of the ranges so far in the file
    gap = offset[1:] - reach[:-1]
    cut = np.ones(len(offset), np.bool_)
    cut[1:] = ~same_path | (gap > max_gap)
    if direct is None:
        cut[1:] |= gap < 0
    else:
        direct = direct[order]
        cut[1:] |= (direct[1:] != direct[:-1]) | ((gap < 0) & direct[1:])
    if direct is not None and direct.all() and int(nbytes.sum()) >= MIN_DIRECT * len(nbytes):
        max_read = max(max_read, min(int(nbytes.sum()) // MIN_PARTS, MAX_READ_DIRECT))
    parts = _parts(offset, end, cut, max_read)
    if decoded is not None and not remote:  # a request to an object store costs more than an uneven load
        total = np.cumsum(decoded[order])
        parts |= _parts(total - decoded[order], total, cut, max_decoded)
    first = np.flatnonzero(cut | parts)
    last = np.maximum.reduceat(end, first) if len(first) else end
    reads = Reads(
        path_index=path_index[first],
        offset=offset[first],
        nbytes=last - offset[first],
        bounds=np.append(first, len(offset)),
    )
    return order, reads


def _parts(begin: IntArray, end: IntArray, cut: BoolArray, limit: int) -> BoolArray:
    """Return where runs of ranges, which begin at ``cut``, cross a multiple of ``limit``."""
    run_begin = begin[np.flatnonzero(cut)][np.cumsum(cut) - 1] if len(cut) else begin
    part = (end - run_begin - 1) // limit
    passed = np.zeros(len(cut), np.bool_)
    passed[1:] = part[1:] != part[:-1]
    return passed

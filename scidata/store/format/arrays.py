"""Arrays of a store: sharded Zarr v3, written block by block, with a digest and statistics on the way.

The metadata is zarr-python's. What is here is how arrays are cut into chunks and shards, the digest, the reordering of
fields that do not fit in memory, and the files of shards: chunks that carry a crc32c, in C order, then their index. The
format leaves the order of chunks free. zarr-python writes them along a Morton curve, which scatters the chunks of one
time step over a shard that holds many steps: each would be a read of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from scidata.core.own_files import open_own
from scidata.core.types import Array, IntArray
from scidata.store.format.manifest import ArrayInfo, RunningStatistics
from scidata.store.format.spools import Spool

if TYPE_CHECKING:
    import zarr

_ABSENT = 2**64 - 1


def write_shard(
    path: str | os.PathLike[str], values: Array, *, chunk: Sequence[int], shard: Sequence[int]
) -> npt.NDArray[np.uint32]:
    """Write the file of one shard; return the crc32c of each chunk that has values, by its place in the shard.

    - ``path``: folders on the way to it are made.
    - ``values``: in the stored dtype, with at least one element; smaller than the shard where the array ends in it.
      Chunks that it ends in are filled up with zeros, chunks beyond are left out.
    - ``chunk``, ``shard``: shapes; each of ``shard`` is a multiple of ``chunk``'s.
    """
    held = chunks_held(values.shape, chunk)
    sums = np.empty(math.prod(held), np.uint32)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        for i, corner in enumerate(np.ndindex(*held)):
            box = tuple(slice(k * c, (k + 1) * c) for k, c in zip(corner, chunk, strict=True))
            data = filled_up(values[box], chunk).reshape(-1).view(np.uint8).data
            sums[i] = crc32c(data)
            file.write(data)
            file.write(int(sums[i]).to_bytes(4, "little"))
        file.write(shard_index(values.shape, values.itemsize, chunk=chunk, shard=shard))
    return sums.reshape(held)


def chunks_held(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks hold values of ``shape``, along each dim."""
    return tuple([-(-n // c) for n, c in zip(shape, chunk, strict=True)])


def shard_index(shape: Sequence[int], itemsize: int, *, chunk: Sequence[int], shard: Sequence[int]) -> bytes:
    """Return the index at the end of a shard that holds values of ``shape``: first byte and bytes of each chunk."""
    held, nbytes = chunks_held(shape, chunk), math.prod(chunk) * itemsize + 4
    index = np.full((*chunks_held(shard, chunk), 2), _ABSENT, "<u8")
    there = tuple(map(slice, held))
    index[..., 0][there] = np.arange(math.prod(held)).reshape(held) * nbytes
    index[..., 1][there] = nbytes
    table = index.tobytes()
    return table + crc32c(table).to_bytes(4, "little")


def filled_up(values: Array, chunk: Sequence[int], fill: object = 0) -> Array:
    """Return a chunk of this shape in C order: at an array's end it is filled up."""
    if values.shape == tuple(chunk):
        return np.ascontiguousarray(values)
    whole = np.full(chunk, fill, values.dtype)
    whole[tuple(slice(0, n) for n in values.shape)] = values
    return whole


CHUNK_ROWS = 1024
_MAX_CHUNK_BYTES = 4 << 20  # rows of many components: fewer rows in a chunk
_SHARD_BYTES = 32 << 20

Slices = tuple[slice, ...]


def stored_dtype(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    """Return the little-endian dtype in which values are stored."""
    return np.dtype(dtype).newbyteorder("<")


class ArrayDigest:
    """BLAKE2b of an array's dtype, shape and values (little-endian, C order), fed block by block."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> None:
        self._dtype = stored_dtype(dtype)
        self._hash = hashlib.blake2b(f"{self._dtype.str}{tuple(shape)}".encode(), digest_size=16)

    def update(self, block: Array) -> None:
        """Take in the next values in C order."""
        self._hash.update(np.ascontiguousarray(block, self._dtype).reshape(-1).view(np.uint8).data)

    def hexdigest(self) -> str:
        """Return the digest as text."""
        return self._hash.hexdigest()


def _chunk_and_shard(
    shape: Sequence[int], itemsize: int, entity_dim: int, chunk_rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of chunks and shards.

    A shard spans the trailing dims, then as many rows as make up its size, then (where that is all of them) steps of
    the dims before: so shards in C order hold the array's values in C order.
    """
    tail = tuple(max(n, 1) for n in shape[entity_dim + 1 :])
    rows = max(1, min(chunk_rows, shape[entity_dim], _MAX_CHUNK_BYTES // max(1, math.prod(tail) * itemsize)))
    chunk = (*(1 for _ in shape[:entity_dim]), rows, *tail)
    room = max(1, _SHARD_BYTES // (math.prod(chunk) * itemsize))
    num_chunks = max(1, -(-shape[entity_dim] // rows))
    shard = list(chunk)
    taken = min(num_chunks, room)
    shard[entity_dim] = rows * taken
    whole, room = taken == num_chunks, room // taken
    for dim in range(entity_dim - 1, -1, -1):
        if not whole:
            break
        shard[dim] = max(1, min(shape[dim], room))
        whole, room = shard[dim] == max(shape[dim], 1), room // shard[dim]
    return chunk, tuple(shard)


def blocks_of(shape: Sequence[int], block: Sequence[int]) -> Iterator[Slices]:
    """Yield the boxes of a regular grid in C order."""
    starts = (range(0, n, b) for n, b in zip(shape, block, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(c, min(c + b, n)) for c, b, n in zip(corner, block, shape, strict=True))


def new_array(
    group: zarr.Group,
    path: str,
    *,
    shape: Sequence[int],
    dtype: np.dtype[np.generic],
    chunks: Sequence[int],
    shards: Sequence[int] | None = None,
    dims: Sequence[str],
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Make the Zarr array of a path, each chunk of which carries its crc32c."""
    from zarr.codecs import Crc32cCodec

    return group.create_array(
        path,
        shape=tuple(shape),
        dtype=dtype,
        chunks=tuple(chunks),
        shards=None if shards is None else tuple(shards),
        filters=None,
        compressors=[Crc32cCodec()],
        fill_value=0,
        dimension_names=list(dims),
        attributes=dict(attributes),
        config={"write_empty_chunks": True},  # else a chunk of zeros cannot be told from a lost one
    )


def write_array(
    group: zarr.Group,
    path: str,
    read: Callable[[Slices], Array],
    *,
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    dims: Sequence[str],
    attributes: Mapping[str, Any] = MappingProxyType({}),
    entity_dim: int = 0,
    chunk_rows: int = CHUNK_ROWS,
    statistics: RunningStatistics | None = None,
    tick: Callable[[int], None] | None = None,
    checksums: dict[str, npt.NDArray[np.uint32]] | None = None,
) -> ArrayInfo:
    """Write one array of a sample, shard by shard.

    - ``group``: the sample's ``zarr.Group``, in a folder.
    - ``read``: returns the values of a box; boxes are asked for in C order, once each.
    - ``statistics``: takes in every block.
    - ``checksums``: gets, by ``path``, the crc32c of each chunk by its place in the grid of chunks.
    """
    kind = stored_dtype(dtype)
    chunk, shard = _chunk_and_shard(shape, kind.itemsize, entity_dim, chunk_rows)
    array = new_array(
        group, path, shape=shape, dtype=kind, chunks=chunk, shards=shard, dims=dims, attributes=attributes
    )
    digest = ArrayDigest(shape, kind)
    folder = os.path.join(array.store.root, array.path)
    sums = np.zeros(chunks_held(shape, chunk), np.uint32)
    for box in blocks_of(shape, shard):
        values = np.ascontiguousarray(read(box), kind)
        digest.update(values)
        if statistics is not None:
            statistics.add(values)
        key = array.metadata.encode_chunk_key(tuple(s.start // n for s, n in zip(box, shard, strict=True)))
        place = tuple(slice(s.start // n, -(-s.stop // n)) for s, n in zip(box, chunk, strict=True))
        sums[place] = write_shard(os.path.join(folder, key), values, chunk=chunk, shard=shard)
        if tick is not None:
            tick(values.nbytes)
    if checksums is not None:
        checksums[path] = sums
    return ArrayInfo(shape=tuple(shape), dtype=kind.str, digest=digest.hexdigest(), chunks=chunk, shards=shard)


class Reordered:
    """Reads a field's boxes in the new order of its rows; boxes are asked for in C order, rows in equal blocks.

    As many steps of the dims before the entity's as a box has are read at once, where that takes no more than
    ``max_bytes``. Otherwise the source's rows are read in slabs, once, and each slab's rows are appended to the blocks
    they belong to in ``scratch``, a file of the field's size that the caller removes. Memory then holds a slab, a
    block, and an array of the order's size.

    - ``order``: ``(num_rows,)`` int64: the source's row of each new row; rows may repeat or be left out.
    """

    def __init__(
        self,
        read: Callable[[Slices], Array],
        order: IntArray,
        *,
        source_shape: Sequence[int],
        dtype: np.dtype[np.generic],
        entity_dim: int,
        scratch: str,
        max_bytes: int,
    ) -> None:
        self._read, self._order, self._shape, self._dim = read, order, tuple(source_shape), entity_dim
        self._dtype, self._scratch, self._max_bytes = dtype, scratch, max_bytes
        self._lead: tuple[tuple[int, int], ...] | None = None  # steps that are held
        self._whole: Array | None = None  # their values in the source's order
        self._block_rows = 0  # of the scratch file, where they are in that

    def __call__(self, box: Slices) -> Array:
        """Return the values of a box of the new order."""
        rows, tail = box[self._dim], box[self._dim + 1 :]
        assert all(s == slice(0, n) for s, n in zip(tail, self._shape[self._dim + 1 :], strict=True))
        lead = tuple((s.start, s.stop) for s in box[: self._dim])
        if lead != self._lead or (self._whole is None and self._block_rows == 0):
            self._whole, self._block_rows = None, 0  # let go before reading more
            self._load(box)
            self._lead = lead
        if self._whole is not None:
            return np.take(self._whole, self._order[rows], axis=self._dim)
        return self._from_scratch(rows, [s.stop - s.start for s in box[: self._dim]])

    def _box(self, lead: Slices, rows: slice) -> Slices:
        return (*lead, rows, *(slice(0, n) for n in self._shape[self._dim + 1 :]))

    def _load(self, box: Slices) -> None:
        lead, num_rows = box[: self._dim], self._shape[self._dim]
        sizes = [s.stop - s.start for s in lead]
        row_bytes = math.prod(sizes) * math.prod(self._shape[self._dim + 1 :]) * self._dtype.itemsize
        if row_bytes * num_rows <= self._max_bytes:
            self._whole = self._read(self._box(lead, slice(0, num_rows)))
            return
        block_rows = self._block_rows = box[self._dim].stop - box[self._dim].start
        starts = np.append(np.arange(0, len(self._order), block_rows), len(self._order))
        slab = max(1, self._max_bytes // 2 // row_bytes)
        firsts = np.append(np.arange(0, num_rows, slab), num_rows)
        # The source's rows of each block, sorted, lie in a file too, and where those of each slab begin in memory.
        sources, cuts = Spool(f"{self._scratch}.rows", np.int64), []
        for start, stop in itertools.pairwise(starts.tolist()):
            rows = np.sort(self._order[start:stop])
            sources.append(rows)
            cuts.append(start + np.searchsorted(rows, firsts))
        with open(open_own(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(self._order) * row_bytes)  # a full disk ends it here
            for i, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
                values = np.moveaxis(self._read(self._box(lead, slice(first, last))), self._dim, 0)
                for block in cuts:
                    a, b = int(block[i]), int(block[i + 1])
                    if a < b:
                        file.seek(a * row_bytes)
                        file.write(np.ascontiguousarray(values[sources[a:b] - first], self._dtype).data.cast("B"))
        sources.remove()

    def _from_scratch(self, rows: slice, lead_sizes: Sequence[int]) -> Array:
        shape = (rows.stop - rows.start, *lead_sizes, *self._shape[self._dim + 1 :])
        row_bytes = math.prod(shape[1:]) * self._dtype.itemsize
        with open(open_own(self._scratch, os.O_RDONLY), "rb") as file:
            file.seek(rows.start * row_bytes)
            found = np.frombuffer(file.read(shape[0] * row_bytes), self._dtype).reshape(shape)
        values = np.empty_like(found)
        values[np.argsort(self._order[rows], kind="stable")] = found  # a block's rows lie as they came in
        return np.moveaxis(values, 0, self._dim)

"""The memory that a loader of a grid takes on one rank, known before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from scidata.grids.blocks.layout import must_decode
from scidata.grids.blocks.node_shares import decodes_in_parts
from scidata.grids.reader import GridReader

_THREADS_AHEAD = 2  # that read blocks before samples need them
_BLOCKS = 2 + _THREADS_AHEAD  # besides cached blocks: free ones, and ones being read
_HEAP = 2 << 20  # a thread's decompressor takes and leaves in the C library's heap; trimmed where all rows are kept
_REST = 4 << 20  # plans, stacks of threads


@dataclass(frozen=True, kw_only=True)
class MemoryPromise:
    """Bytes of one rank beyond imports and loop; ``chunks``: those being decoded, in all threads, and decompressors."""

    pool: int
    batches: int
    chunks: int

    @property
    def total(self) -> int:
        """All together."""
        return self.pool + self.batches + self.chunks + _REST


def promise_of(
    reader: GridReader, rank: int = 0, *, batch_size: int = 1, num_workers: int = 2, prefetch: int = 2
) -> MemoryPromise:
    """Return the bytes that a loader in threads takes for the part of one rank of the domain.

    Within 15 % of the peak that ``tests/bench/memory_promise.py`` measures for local Zarr (raw, Blosc, zstd).
    Not counted: what HDF5's filters, clients of object stores and worker processes allocate.
    """
    place = reader.partition.coordinate(rank)
    part = reader.part_of(place)
    sizes, room = reader.chain.sizes.of(part), reader.pool.max_bytes(part)
    shared, fixed = sizes.kept_fields
    largest = max((sizes.nbytes(name) for name in shared), default=0)
    pool = sizes.bytes_of_all if sizes.keeps_all else room + _BLOCKS * largest if shared or fixed else 0
    sample = sum(spec.nbytes for spec in reader.buffer_specs(place).values())
    chunks = _of_thread(reader, rank, shared)
    if chunks and not sizes.keeps_all:
        chunks += _HEAP
    threads = num_workers + 1 + (_THREADS_AHEAD if shared and num_workers else 0)
    return MemoryPromise(
        pool=pool,
        batches=(prefetch + 1 if num_workers else 2) * batch_size * sample,
        chunks=threads * chunks,
    )


def _of_thread(reader: GridReader, rank: int, shared: frozenset[str]) -> int:
    """Return the bytes that a thread holds while it decodes a chunk: encoded, and decoded if only a part is wanted."""
    encoded = whole = 0
    for name, plans in reader.plan(0, rank).fields.items():
        for plan in plans:
            layout = reader.layout(name)
            if not must_decode(layout) or not plan.num_chunks:
                continue
            nbytes, wanted = layout.chunk_nbytes, plan.bytes_wanted // plan.num_chunks
            of_steps = min(nbytes, wanted * reader.chain.layout.steps_per_block[name])  # of the rank's part of a chunk
            touched = of_steps if decodes_in_parts(layout) else nbytes
            encoded = max(encoded, plan.bytes_fetched // plan.num_chunks * touched // nbytes)
            whole = max(whole, touched if (of_steps if name in shared else wanted) < nbytes else 0)
    return encoded + whole

"""Binds each chunk to its array, its place and its sample: a chunk in another's place is found when it is read.

A chunk's own crc32c does not know where it belongs. So a sample has one more array, ``checksums``: the crc32c of every
chunk of all its other arrays, in the order of their paths, each array's in C order of its grid of chunks. The manifest
has its digest. It is read once, and travels with the chunks' places to where they are decoded, which compares.

Stores of schema version 1 have none: there a chunk in another's place is found by ``scidata verify`` alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, ChunkRefs, Codec, IntArray
from scidata.core.urls import Url
from scidata.errors import ChecksumError, CorruptDataError, MissingChunkError, ShortReadError
from scidata.sources.access.files import files
from scidata.sources.zarr.metadata import known_v3
from scidata.sources.zarr.source import ZarrSource
from scidata.sources.zarr.tree import Tree
from scidata.sources.zarr.walk import Contents
from scidata.store.format.arrays import ArrayDigest, chunks_held, new_array
from scidata.store.format.manifest import CHECKSUMS, ArrayInfo, SampleInfo

if TYPE_CHECKING:
    import zarr

#: Checksums that are kept, of all samples together: those of about 64 GiB of chunks of 4 KiB.
KEPT_BYTES = 64 << 20

Checksums = npt.NDArray[np.uint32]


def write_checksums(group: zarr.Group, sums: Mapping[str, Checksums]) -> ArrayInfo:
    """Write the array of all chunks' checksums, by path as ``write_array`` gives them, as one chunk."""
    values = np.concatenate([sums[path].reshape(-1) for path in sorted(sums)]).astype("<u4")
    array = new_array(group, CHECKSUMS, shape=values.shape, dtype=values.dtype, chunks=values.shape, dims=["chunk"])
    array[:] = values
    return ArrayInfo(shape=values.shape, dtype=values.dtype.str, digest=_digest(values), chunks=values.shape, shards=())


def _digest(values: Checksums) -> str:
    digest = ArrayDigest(values.shape, values.dtype)
    digest.update(values)
    return digest.hexdigest()


class CheckedSource(ZarrSource):
    """A sample's Zarr source; the places of its chunks come with the checksums that they must carry.

    - ``is_parsed``: whether layouts come from Zarr's own metadata, not from the manifest; of stores that say none
      there, they do.
    """

    def __init__(
        self,
        path: str,
        *,
        store: str,
        info: SampleInfo,
        kept: Cache[Checksums],
        names: Sequence[str] | None,
        is_parsed: bool = False,
    ) -> None:
        super().__init__(path, names=names)
        self._store, self._info, self._kept, self._is_parsed = store, info, kept, is_parsed or info.version < 3

    def __getstate__(self) -> dict[str, object]:
        own = {"store": self._store, "info": self._info, "kept": self._kept, "is_parsed": self._is_parsed}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = {name: state[name] for name in ("store", "info", "kept", "names", "is_parsed")}
        CheckedSource.__init__(self, state["path"], **rest)

    def _find_arrays(self, tree: Tree) -> Contents:
        return super()._find_arrays(tree) if self._is_parsed else manifest_layouts(self._info, str(self.path))

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find bytes and checksums of chunks, as :class:`ZarrSource`; ChecksumError if these are not the manifest's."""
        return self._with_checksums(super().locate(layout, chunks), layout, chunks)

    def expect(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Do as :meth:`locate`, without a request for each chunk before it is read."""
        return self._with_checksums(super().expect(layout, chunks), layout, chunks)

    def _with_checksums(self, refs: ChunkRefs, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        place = self._places.get(layout.name)
        if place is None or not len(chunks):
            return refs
        self._check_cut(layout)
        first, strides = place
        sums = self._kept.get_or_make(
            self._info.index, lambda: self._read(layout, chunks), lambda found: found.nbytes, once=True
        )
        return replace(refs, checksums=sums[first + np.asarray(chunks, np.int64) @ strides])

    @cached_property
    def _places(self) -> dict[str, tuple[int, IntArray]]:
        """Of each array, where its checksums begin, and the strides of its grid of chunks; none in version 1."""
        places: dict[str, tuple[int, IntArray]] = {}
        first = 0
        for path in sorted(self._info.arrays) if CHECKSUMS in self._info.arrays else ():
            info = self._info.arrays[path]
            if path == CHECKSUMS or info.chunks is None:
                continue
            grid = chunks_held(info.shape, info.chunks)
            strides = [math.prod(grid[i + 1 :]) for i in range(len(grid))]
            places[path] = first, np.array(strides, np.int64)
            first += math.prod(grid)
        return places

    def _check_cut(self, layout: ArrayLayout) -> None:
        info = self._info.arrays[layout.name]
        if layout.shape == info.shape and layout.chunks == info.chunks and _is_checked(layout.codecs):
            return
        raise CorruptDataError(
            f"{self._store}: sample {self._info.index}: array {layout.name!r} is {layout.shape} in chunks "
            f"{layout.chunks} with codecs {[codec.name for codec in layout.codecs]}, but the manifest has {info.shape} "
            f"in chunks {info.chunks}, each with a crc32c; its zarr.json is damaged or another's: write the store again"
        )

    def _read(self, asked: ArrayLayout, chunks: IntArray) -> Checksums:
        """Read the checksums of the sample's chunks; errors name the array and the chunks that need them."""
        info = self._info.arrays[CHECKSUMS]
        key = f"{CHECKSUMS}/c/0"
        if isinstance(self.path, Url):
            path: str = self.path.at(key)
        else:
            path = os.path.join(self.path, key)
            super().locate(self.arrays[CHECKSUMS], np.zeros((1, 1), np.int64))  # refuses a link out of the store
        where = f"{self._store}: sample {self._info.index}: array {asked.name!r}, chunk {tuple(chunks[0].tolist())}"
        try:
            values = np.frombuffer(files().read(path, 0, 4 * info.shape[0]), "<u4")
        except FileNotFoundError as e:
            raise MissingChunkError(
                f"{where}: {path}, which has its checksum, is not there; copy the store again"
            ) from e
        except ShortReadError as e:
            raise ShortReadError(f"{where}: its checksum cannot be read: {e}") from e
        if (found := _digest(values)) != info.digest:
            raise ChecksumError(
                f"{where}: the sample's checksums in {path} have digest {found}, but the manifest has {info.digest}: "
                "they are damaged, or another sample lies in its place; copy the store again"
            )
        return values


def manifest_layouts(info: SampleInfo, store: str) -> Contents:
    """Return the layouts that a manifest of schema version 3 says of a sample's arrays; ``store`` is for messages."""
    contents = Contents(format="zarr3", attributes={})
    for path, array in info.arrays.items():
        layout = (array.shape, array.dtype, array.chunks, array.shards)
        contents.add(path, known_v3, *layout, store=store, prefix=path)
    return contents


def _is_checked(codecs: Sequence[Codec]) -> bool:
    return len(codecs) == 1 and codecs[0].name == "crc32c" and codecs[0].config.get("location", "end") == "end"

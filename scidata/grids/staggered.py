"""Fields on the faces of a staggered grid (Arakawa C, as WRF has it), at the centres of the cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, Files, IntArray, Source
from scidata.read.arrays import read_array
from scidata.sources.cf import decoding_of

_FACES = "_stag"  # how WRF ends the names of their dimensions


class CentredSource:
    """A source whose fields on faces are means of the two faces of each cell. Everything else is the source's own.

    Fields of floating numbers with one dimension ``<dim>_stag`` of a row more than ``<dim>``, which other arrays have.
    Each part reads its rows of faces and one more, so ranks still read no more than their part.
    """

    kept = None  # an index keeps values as they are in the file

    def __init__(self, source: Source, *, allow_missing: bool) -> None:
        self._source, self._allow_missing = source, allow_missing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # while it is unpickled, there is no source yet
        return getattr(self._source, name)

    @cached_property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every array of the source, those on faces as means."""
        sizes = {dim: n for x in self._source.arrays.values() for dim, n in zip(x.dims, x.shape, strict=True)}
        return {name: _centred(layout, sizes) for name, layout in self._source.arrays.items()}

    def _faces(self, layout: ArrayLayout) -> tuple[ArrayLayout, int | None]:
        own = self._source.arrays[layout.name]
        axes = [axis for axis, (a, b) in enumerate(zip(own.dims, layout.dims, strict=True)) if a != b]
        return own, axes[0] if axes else None

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks; of means, say that they are there: reading the faces tells."""
        own, axis = self._faces(layout)
        if axis is None:
            return self._source.locate(own, chunks)
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(str(self.path),), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read a box (positive steps): the faces on either side, and their mean."""
        own, axis = self._faces(layout)
        if axis is None:
            self._source.read_box(own, box, out)
            return
        rows = range(*box[axis].indices(layout.shape[axis]))
        faces = (*box[:axis], slice(rows.start, rows[-1] + 2), *box[axis + 1 :]) if rows else box
        values = np.moveaxis(read_array(self._source, own, faces, allow_missing=self._allow_missing), axis, 0)
        if not rows:
            return
        below, above = values[: -1 : rows.step], values[1 :: rows.step]
        np.moveaxis(out, axis, 0)[...] = (below[: len(rows)] + above[: len(rows)]) * values.dtype.type(0.5)

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the files of all faces that some chunks are means of."""
        own, axis = self._faces(layout)
        if axis is None:
            return self._source.files_of(own, chunks)
        along = np.arange(own.num_chunks[axis])
        every = np.repeat(chunks, len(along), axis=0)
        every[:, axis] = np.tile(along, len(chunks))
        return self._source.files_of(own, every)

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if files that were just read are not those opened."""
        self._source.check_unchanged(self._faces(layout)[0], paths)


def _centred(layout: ArrayLayout, sizes: Mapping[str, int]) -> ArrayLayout:
    faces = [axis for axis, dim in enumerate(layout.dims) if dim.endswith(_FACES)]
    if len(faces) != 1 or layout.dtype.kind != "f" or decoding_of(layout) is not None:
        return layout
    (axis,) = faces
    dim, size = layout.dims[axis].removesuffix(_FACES), layout.shape[axis] - 1
    if sizes.get(dim) != size:
        return layout
    return replace(
        layout,
        dims=(*layout.dims[:axis], dim, *layout.dims[axis + 1 :]),
        shape=(*layout.shape[:axis], size, *layout.shape[axis + 1 :]),
        chunks=(*layout.chunks[:axis], size, *layout.chunks[axis + 1 :]),
        dtype=layout.dtype.newbyteorder("="),
        axis_order=tuple(range(len(layout.dims))),
        codecs=(),
        edges=(),
        shards=None,
        fallback=math.prod(layout.shape) > 0,
    )

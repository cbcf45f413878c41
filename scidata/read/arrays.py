"""Read an array, or a box of it, at once into new memory: coordinates, meshes, arrays to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scidata.core.bounds import num_rows_of, segments_of_slice
from scidata.core.checks import allocate
from scidata.core.types import AnyArray, ArrayLayout, Decoding, Source
from scidata.core.urls import is_url
from scidata.errors import RefusedError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.plan.array import plan_array
from scidata.read import read_plan
from scidata.read.context import thread_scratch
from scidata.read.convert import converter
from scidata.read.places import expecting
from scidata.sources.access.files import files
from scidata.sources.file_source import FileSource

_SMALL = 1 << 20  # bytes


def read_array(
    source: Source,
    layout: ArrayLayout,
    box: Sequence[slice] | None = None,
    *,
    decoding: Decoding | None = None,
    allow_missing: bool = False,
) -> AnyArray:
    """Read a whole array, or a box given by one slice per dimension.

    ``decoding`` and ``allow_missing`` are as in :func:`scidata.read.read_plan`. Values are of the decoded dtype, or of
    the stored one in native byte order.
    """
    slices = [slice(None)] * len(layout.shape) if box is None else box
    selection = tuple(segments_of_slice(s, n) for s, n in zip(slices, layout.shape, strict=True))
    dtype = decoding.dtype if decoding is not None else layout.dtype.newbyteorder("=")
    out = allocate(f"{layout.store}: field {layout.name!r}", tuple(map(num_rows_of, selection)), dtype)
    values = _at_once(source, layout) if box is None and isinstance(source, FileSource) else None
    if values is not None:
        out[...] = decoded(values, decoding).reshape(out.shape)
    elif out.size:
        plan = plan_array(layout, selection, expecting(source), out_shape=out.shape)
        read_plan(plan, out, source=source, decoding=decoding, allow_missing=allow_missing)
    return out


def _at_once(source: FileSource[object], layout: ArrayLayout) -> AnyArray | None:
    """Return an array's stored values, flat, from an index or a single read; None if neither is possible.

    Coordinates are so small that a plan costs more than their bytes.
    """
    if source.kept is not None and (kept := source.kept.values_of(layout.name)) is not None:
        return kept
    finder = getattr(source, "finder", None)
    plain = layout.num_chunks == (1,) and layout.nbytes <= _SMALL and not layout.codecs and not layout.fallback
    plain = plain and not is_url(source.path)
    find = finder(layout) if plain and finder is not None else None
    place = None if find is None else find(0)
    if place is None or layout.nbytes > place[2]:
        return None
    data = bytearray(layout.nbytes)
    if not files().read_at_once(source.path, place[1], memoryview(data)):
        return None  # a planned read reports the error, or tries again
    source.check_unchanged(layout, (source.path,))
    return np.frombuffer(data, layout.dtype)


def decoded(values: AnyArray, decoding: Decoding | None) -> AnyArray:
    """Return flat stored values decoded, in native byte order, in new memory."""
    out = np.empty(len(values), values.dtype.newbyteorder("=") if decoding is None else decoding.dtype)
    converter(values.dtype, decoding, out.dtype).copy(out, values, thread_scratch())
    return out


def array_of(source: Source, name: str) -> ArrayLayout:
    """Return an array's layout.

    Raises UnsupportedFormatError: it is there, but scidata cannot read it; the reason is given.
    """
    if name in source.arrays:
        return source.arrays[name]
    skipped: Mapping[str, str] = getattr(source, "skipped", {})
    if name in skipped:
        refused = "allow_external" in skipped[name]
        raise (RefusedError if refused else UnsupportedFormatError)(f"{source.path}: field {name!r}: {skipped[name]}")
    raise UnknownNameError(f"{source.path}: no field {name!r}{near_matches(name, source.arrays)}")

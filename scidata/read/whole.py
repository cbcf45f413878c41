"""A whole small array (a coordinate), read at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from scidata.core.bounds import segments_of_slice
from scidata.core.checks import allocate
from scidata.core.types import ArrayLayout, Source
from scidata.errors import (
    RefusedError,
    UnknownNameError,
    UnsupportedFormatError,
    near_matches,
)
from scidata.plan import chunks_needed, plan_array
from scidata.read import read_plan

__all__ = ["array_of", "read_array"]


def read_array(source: Source, layout: ArrayLayout, **options: Any) -> npt.NDArray[Any]:
    """Read a whole small array (a coordinate), decoded as ``options`` of :func:`scidata.read.read_plan` say."""
    selection = tuple(segments_of_slice(slice(None), n) for n in layout.shape)
    refs = source.locate(layout, chunks_needed(layout, selection))
    plan = plan_array(layout, selection, refs, out_shape=layout.shape)
    decoding = options.get("decoding")
    dtype = decoding.dtype if decoding is not None else layout.dtype.newbyteorder("=")
    out = allocate(f"{layout.store}: field {layout.name!r}", layout.shape, dtype)
    read_plan(plan, out, source=source, **options)
    return out


def array_of(source: Source, name: str) -> ArrayLayout:
    """Return an array's layout.

    Raises
    ------
    UnknownNameError
        It is not there; near matches are named.
    UnsupportedFormatError
        It is there, but scidata cannot read it; the reason is given.
    """
    if name in source.arrays:
        return source.arrays[name]
    skipped: Mapping[str, str] = getattr(source, "skipped", {})
    if name in skipped:
        refused = "allow_external" in skipped[name]
        raise (RefusedError if refused else UnsupportedFormatError)(f"{source.path}: field {name!r}: {skipped[name]}")
    raise UnknownNameError(f"{source.path}: no field {name!r}{near_matches(name, source.arrays)}")

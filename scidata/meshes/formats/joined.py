"""Fields of one topology from several files: put together along time, or along a new dimension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from scidata.core.bounds import bounds_of
from scidata.core.types import Source
from scidata.errors import FieldMismatchError
from scidata.meshes.formats.base import Joined, NewDim, RawField, base_name
from scidata.meshes.formats.fields import is_time


def combine_fields(found: Sequence[tuple[Source, Mapping[str, RawField]]]) -> dict[str, RawField]:
    """Put together the fields of files that hold one topology's fields, in the order of the files.

    A field that several files have is joined along its first dimension where that is time, else along a new first
    dimension ``sample``.

    Raises
    ------
    FieldMismatchError
        Files disagree on what a field is.
    """
    combined: dict[str, RawField] = {}
    for name in dict.fromkeys(name for _, fields in found for name in fields):
        parts = [(source, fields[name]) for source, fields in found if name in fields]
        combined[name] = parts[0][1] if len(parts) == 1 else _join(name, parts)
    return combined


def _join(name: str, parts: list[tuple[Source, RawField]]) -> RawField:
    source, first = parts[0]
    timed = first.entity_dim > 0 and is_time(source, first.dims[0])
    wanted = _signature(first, timed=timed)
    for other, part in parts[1:]:
        if _signature(part, timed=timed) != wanted:
            raise FieldMismatchError(
                f"{other.path}: field {name!r} of {part.entity}s has dims {part.dims}, shape {part.shape} and dtype "
                f"{part.dtype}, but {source.path} has {first.dims}, {first.shape} and {first.dtype}; fields of "
                "one mesh must agree except in time"
            )
    fields = [part for _, part in parts]
    if not timed:
        fields = [
            replace(
                part,
                dims=("sample", *part.dims),
                shape=(1, *part.shape),
                entity_dim=part.entity_dim + 1,
                reader=NewDim(part=part.reader),
            )
            for part in fields
        ]
    bounds = tuple(bounds_of([part.shape[0] for part in fields]).tolist())
    shape = (bounds[-1], *fields[0].shape[1:])
    reader = Joined(parts=tuple(f.reader for f in fields), dim=0, bounds=bounds, shape=shape, dtype=first.dtype)
    return replace(fields[0], shape=shape, reader=reader)


def _signature(part: RawField, *, timed: bool) -> tuple[object, ...]:
    return part.entity, part.entity_dim, part.dims, part.dtype, part.shape[1 if timed else 0 :]


def short_names(fields: Mapping[str, RawField], every: Collection[str]) -> dict[str, RawField]:
    """Drop the group from ``node/<name>`` where no other entity has the name.

    ``every`` are the names of all arrays, chosen or not, so that a field's name does not depend on the choice.
    """
    counts = Counter(map(base_name, set(every) | set(fields)))
    named: dict[str, RawField] = {}
    for name, field in fields.items():
        short = field.base if counts[field.base] == 1 else field.path
        if short in named:
            raise FieldMismatchError(f"two fields are named {short!r}: {name!r} and another; choose one with fields=")
        named[short] = replace(field, name=short)
    return named

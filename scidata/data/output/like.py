"""Layouts of outputs like an opened data set: the part that grids, meshes, points and graphs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scidata.core.checks import names_of
from scidata.core.types import ArrayLayout, Source
from scidata.data.output.fields import OutputField, chunks_of, shards_of, sizes_by_dim
from scidata.errors import ConfigError, check_known


class Like(ABC):
    """The fields of an opened data set, as they are to be written.

    Parameters
    ----------
    fields
        Names, or options by name: see :func:`scidata.create`.
    default
        Returns the names where none are given.
    step_dims
        Dims of the steps.
    options
        Known options of a field.
    """

    def __init__(
        self, fields: object, default: Callable[[], Sequence[str]], step_dims: Sequence[str], options: Sequence[str]
    ) -> None:
        self.step_dims = tuple(step_dims)
        if isinstance(fields, Mapping):
            self._given = {name: dict(given or {}) for name, given in fields.items()}
        else:
            self._given = {name: {} for name in (default() if fields is None else names_of("fields", fields))}
        if not self._given:
            raise ConfigError("create: fields names none; give those that are written")
        for name, given in self._given.items():
            check_known(f"create: field {name!r} has no option", given, options)

    def fields(self, chunks: Mapping[str, int] | None, shards: Mapping[str, int] | None) -> dict[str, OutputField]:
        """Return the fields, with chunks and shards by dimension where these are given."""
        made = {name: self._field(name, options) for name, options in self._given.items()}
        known = [dim for each, _ in made.values() for dim in each.dims]
        chunk_sizes = sizes_by_dim("chunks", chunks, [*known, *self.step_dims])
        shard_sizes = sizes_by_dim("shards", shards, known)
        fields = {}
        for name, (each, source) in made.items():
            parts = chunks_of(each.dims, each.shape, each.packing.dtype.itemsize, chunk_sizes, source)
            shard = shards_of(name, each.dims, each.shape, parts, shard_sizes)
            fields[name] = replace(each, chunks=parts, shards=shard)
        return fields

    @abstractmethod
    def _field(self, name: str, options: dict[str, Any]) -> tuple[OutputField, Sequence[int] | None]:
        """Return a field in one chunk, and the source's chunks, where it suggests any."""

    def _constant(self, source: Source, names: Iterable[str], fields: Mapping[str, object]) -> Iterator[ArrayLayout]:
        """Yield the arrays of a source, among those named, that can be copied and have no steps."""
        for name in dict.fromkeys(names):
            layout = source.arrays[name]
            has_steps = bool(set(layout.dims) & set(self.step_dims))
            if name not in fields and not layout.fallback and not has_steps and layout.dtype.kind in "iufSU":
                yield layout

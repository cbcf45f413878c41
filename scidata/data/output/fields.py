"""The layout of an output: its fields, chunks, coordinates, and the labels of its steps."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scidata.core.checks import check_int, optional_module
from scidata.core.types import Array, ArrayLayout
from scidata.data.output.packing import OF_PACKING, Packing
from scidata.errors import ConfigError, check_known
from scidata.plan.owners import Box
from scidata.sources.cf import is_time

MAX_CHUNK_BYTES = 4 << 20  # of chunks chosen by default


@dataclass(frozen=True, kw_only=True)
class OutputField:
    """A field that is written step by step.

    - ``dims``, ``shape``: of one step.
    - ``chunks``: rows of one step that are encoded together.
    - ``shards``: rows of one step in one file of Zarr's sharding codec; None if each chunk is a file.
    - ``attributes``: of the array, without those of the packing.
    - ``entity``, ``entity_dim``: of meshes, points and graphs: the entity (node, cell, …) whose rows have values, and
      the dim of these rows.
    - ``given_shape``: that of the tensors that are given, where it is another one: the store has fewer rows than the
      source.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    packing: Packing
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    entity: str = ""
    entity_dim: int = 0
    given_shape: tuple[int, ...] | None = None

    @property
    def units(self) -> tuple[int, ...]:
        """The shape of the smallest box that one rank writes: a shard, or a chunk."""
        return self.chunks if self.shards is None else self.shards


@dataclass(frozen=True, kw_only=True)
class OutputVariable:
    """A coordinate, or another array that describes the fields; written once.

    - ``read``: returns the values, where they are written: on one rank.
    - ``digest``: of the values, where they tell one output from another.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    read: Callable[[], Array]
    attributes: Mapping[str, object] = field(default_factory=dict)
    digest: str = ""

    @classmethod
    def of(cls, name: str, values: Array, attributes: Mapping[str, object]) -> OutputVariable:
        """Make the coordinate of a dim."""
        digest = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        return cls(
            name=name, dims=(name,), shape=values.shape, dtype=values.dtype, read=lambda: values, attributes=attributes,
            digest=digest,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputLayout:
    """Fields, variables and steps of one output.

    - ``step_dims``: dimensions of the steps and their sizes, the last varying fastest: ``{"time": 40}``.
    - ``step_chunk``: steps of the last of them that share a chunk.
    """

    fields: Mapping[str, OutputField]
    step_dims: Mapping[str, int]
    variables: tuple[OutputVariable, ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)
    step_chunk: int = 1

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return math.prod(self.step_dims.values())

    def place(self, step: int) -> tuple[int, ...]:
        """Return the indices of a step along the step dimensions."""
        return tuple(int(i) for i in np.unravel_index(step, tuple(self.step_dims.values())))

    def box(self, step: int, num: int, box: Box) -> Box:
        """Return the box in an array of all steps for a box of ``num`` steps from ``step`` on."""
        *outer, first = self.place(step)
        return (*(slice(i, i + 1) for i in outer), slice(first, first + num), *box)

    def chunks_of(self, each: OutputField) -> tuple[int, ...]:
        """Return the chunks of a field's array of all steps."""
        return tuple(max(1, size) for size in (*self._step_chunks, *each.chunks))

    def shards_of(self, each: OutputField) -> tuple[int, ...] | None:
        """Return the shards of a field's array of all steps; None if each chunk is a file."""
        return None if each.shards is None else (*self._step_chunks, *each.shards)

    @property
    def _step_chunks(self) -> tuple[int, ...]:
        return (*(1 for _ in list(self.step_dims)[1:]), self.step_chunk)

    def block_of(self, step: int) -> tuple[int, int]:
        """Return the first of the steps that share a chunk with a step, and their number."""
        along = list(self.step_dims.values())[-1]
        row = step % along // self.step_chunk * self.step_chunk
        return step - step % along + row, min(self.step_chunk, along - row)

    def digest(self) -> str:
        """Return a digest of the layout: a run resumes only an output with an equal digest."""
        said = [
            [f.name, f.dims, f.shape, f.chunks, f.shards, str(f.packing.dtype), str(f.packing.attributes())]
            for f in self.fields.values()
        ]
        values = [[v.name, v.dims, v.shape, v.digest] for v in self.variables]
        text = json.dumps([said, dict(self.step_dims), self.step_chunk, values])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def sizes_by_dim(what: str, given: Mapping[str, object] | None, known: Sequence[str]) -> dict[str, int]:
    """Check sizes of chunks and return them by dimension."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} must name dimensions: {{'latitude': 64}}, not {given!r}")
    check_known(f"{what} names", given, known, ", which is no dimension")
    return {dim: check_int(f"{what} of {dim!r}", size, least=1) for dim, size in given.items()}


def distinct_dims(fields: Mapping[str, OutputField], taken: Mapping[str, int]) -> dict[str, OutputField]:
    """Rename dims so that equal names have equal sizes, as files require: prefix others with the field's name.

    Sources without names of dimensions have ``dim_0``, ``dim_1`` everywhere. ``taken`` are dims whose sizes are known.
    """
    sizes: dict[str, set[int]] = {dim: {size} for dim, size in taken.items()}
    for each in fields.values():
        for dim, size in zip(each.dims, each.shape, strict=True):
            sizes.setdefault(dim, set()).add(size)
    twice = {dim for dim, found in sizes.items() if len(found) > 1}
    return {
        name: replace(each, dims=tuple(f"{name}_{dim}" if dim in twice else dim for dim in each.dims))
        for name, each in fields.items()
    }


def chunks_of(
    dims: Sequence[str], shape: Sequence[int], itemsize: int, given: Mapping[str, int], source: Sequence[int] | None
) -> tuple[int, ...]:
    """Choose the chunks of one step, for any number of ranks: given, else the source's, or parts of large ones."""
    chunks = [min(size, each) if each else size for size, each in zip(shape, source or shape, strict=True)]
    chunks = [given.get(dim, max(1, chunk)) for dim, chunk in zip(dims, chunks, strict=True)]
    while math.prod(chunks) * itemsize > MAX_CHUNK_BYTES:  # cut the first dimensions first, so that rows stay long
        free = [i for i, dim in enumerate(dims) if dim not in given and chunks[i] > 1]
        if not free:
            break
        chunks[free[0]] = -(-chunks[free[0]] // 2)
    return tuple(chunks)


def shards_of(
    name: str, dims: Sequence[str], shape: Sequence[int], chunks: Sequence[int], given: Mapping[str, int]
) -> tuple[int, ...] | None:
    """Return the shards of one step; None if none are requested. Other dimensions get one chunk per shard."""
    if not given:
        return None
    shards = []
    for dim, size, chunk in zip(dims, shape, chunks, strict=True):
        wanted = given.get(dim, chunk)
        if wanted % chunk and wanted >= size:
            wanted = -(-size // chunk) * chunk
        if wanted % chunk:
            raise ConfigError(
                f"field {name!r}: shards of {wanted} rows of {dim!r} do not hold whole chunks of {chunk}; "
                f"give a multiple, such as shards={{{dim!r}: {-(-wanted // chunk) * chunk}}}"
            )
        shards.append(wanted)
    return tuple(shards)


_OF_STORAGE = {"_ARRAY_DIMENSIONS", "DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "_Netcdf4Dimid"}
_OF_STORAGE |= {"_Netcdf4Coordinates", "_nc3_strict", "_NCProperties"}


def stored_attributes(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a source's array whose stored values are copied."""
    return {name: value for name, value in attributes.items() if name not in _OF_STORAGE}


def kept_attributes(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a source's array, except those of its storage and packing."""
    return {name: value for name, value in stored_attributes(attributes).items() if name not in OF_PACKING}


def copied_variable(
    layout: ArrayLayout, read: Callable[[], Array], dims: tuple[str, ...], shape: tuple[int, ...]
) -> OutputVariable:
    """Return a source's array, to be copied as stored."""
    dtype, attributes = layout.dtype.newbyteorder("="), stored_attributes(layout.attributes)
    return OutputVariable(name=layout.name, dims=dims, shape=shape, dtype=dtype, read=read, attributes=attributes)


def given_steps(
    times: object, dim: str, known: Sequence[str], said: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, int], list[OutputVariable]]:
    """Return the sizes of the step dims, and their coordinates.

    - ``dim``: that of times which name none.
    - ``known``: dims along which one step lies.
    - ``said``: the attributes of the source's arrays, by name.
    """
    given = dict(times) if isinstance(times, Mapping) else {dim: times}
    sizes: dict[str, int] = {}
    variables: list[OutputVariable] = []
    for name, values in given.items():
        if name in known:
            raise ConfigError(f"create: times names {name!r}, along which one sample lies")
        if isinstance(values, int | np.integer) and not isinstance(values, bool):
            sizes[name] = int(values)
        else:
            coordinate = coordinate_of(str(name), values, said.get(str(name), {}))
            sizes[name] = coordinate.shape[0]
            variables.append(coordinate)
        if sizes[name] < 1:
            raise ConfigError(f"create: times has no steps along {name!r}")
    return sizes, variables


def coordinate_of(dim: str, given: object, said: Mapping[str, object]) -> OutputVariable:
    """Return the coordinate of a dim; ``given``: its decoded values; ``said``: attributes without packing."""
    values: Array = np.asarray(given)
    if values.ndim != 1:
        raise ConfigError(f"create: times of {dim!r} have shape {values.shape}; give a list, or a number of steps")
    attributes = kept_attributes(said)
    if values.dtype.kind in "iuf":
        return OutputVariable.of(dim, values, attributes)
    return _encoded(dim, values, attributes)


def _encoded(dim: str, values: Array, attributes: Mapping[str, object]) -> OutputVariable:
    """Return dates or durations as numbers with units: the source's units for dates of a calendar."""
    is_length = values.dtype.kind == "m"
    if values.dtype.kind not in "mM" and not all(hasattr(each, "calendar") for each in values):
        raise ConfigError(
            f"create: times of {dim!r} are {type(values[0]).__name__ if len(values) else values.dtype}; give numbers, "
            "datetime64, timedelta64, or objects of cftime"
        )
    xarray = optional_module("xarray", f"create: times of {dim!r} are encoded by xarray", "xarray")
    units = {name: attributes[name] for name in ("units", "calendar") if name in attributes and is_time(attributes)}
    variable = xarray.Variable((dim,), values, encoding={} if is_length else units)
    encoded = xarray.conventions.encode_cf_variable(variable, name=dim)
    said = {k: v for k, v in attributes.items() if k not in ("units", "calendar", *OF_PACKING)}
    return OutputVariable.of(dim, np.asarray(encoded.values), {**said, **encoded.attrs})

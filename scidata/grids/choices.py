"""What a gridded store holds and how it is meant to be read where the user does not say: fields, sample dim, split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import rows_of, segments_of_slice
from scidata.core.checks import names_of, offsets
from scidata.core.types import ArrayLayout, Source
from scidata.errors import ConfigError, FieldMismatchError, UnsupportedFormatError, near_matches
from scidata.grids.partition import resolve_dim
from scidata.read.whole import array_of, read_array
from scidata.sources.cf import decoding_of, is_coordinate, role_of, role_of_name

_TENSOR_KINDS = "biufc"  # NumPy kinds that torch has: not times, strings or records


def data_fields(source: Source) -> list[str]:
    """Return the arrays that hold data: not coordinates, with at least one dimension, of a dtype that torch has."""
    return [
        name
        for name, layout in source.arrays.items()
        if layout.shape and layout.dtype.kind in _TENSOR_KINDS and not is_coordinate(layout, source.arrays)
    ]


def dim_roles(source: Source, dims: Sequence[str]) -> dict[str, str]:
    """Return the CF role (``T Z Y X``) of each dimension that has one, from its coordinate variable or its name."""
    roles = {}
    for dim in dims:
        layout = source.arrays.get(dim)
        role = role_of(layout) if layout is not None and layout.dims == (dim,) else role_of_name(dim)
        if role is not None:
            roles[dim] = role
    return roles


def row_weights(
    source: Source, name: str, split: Mapping[str, str], crop: Mapping[str, Any]
) -> dict[str, npt.NDArray[np.float64]]:
    """Sum a field over every dimension but the sharded one: the cost of each row."""
    layout = array_of(source, name)
    if len(split) != 1:
        raise ConfigError("weights named by a field need a 1-D domain; give {dim: costs} instead")
    (dim,) = split
    if dim not in layout.dims:
        raise ConfigError(f"weights: field {name!r} has dims {layout.dims}, not {dim!r}")
    values = read_array(source, layout, decoding=decoding_of(layout, np.dtype("f8")))
    others = tuple(i for i, d in enumerate(layout.dims) if d != dim)
    cost: npt.NDArray[np.float64] = np.atleast_1d(np.nansum(values, axis=others, dtype=np.float64))
    return {dim: cost[rows_of(segments_of_slice(crop.get(dim, slice(None)), len(cost)))]}


def default_shard(
    sizes: Mapping[str, int], roles: Mapping[str, str], axis_sizes: Mapping[str, int], sample_dim: str | None
) -> dict[str, str]:
    """Choose the dimension that each domain axis splits.

    Latitude (``Y``) before longitude (``X``) before the slowest other dimension, so that a rank's rows are contiguous
    on disk; a dimension with fewer rows than ranks is passed over. Vertical levels are split last of all.
    """
    order = {"Y": 0, "X": 1, None: 2, "Z": 3, "T": 4}
    free = sorted((dim for dim in sizes if dim != sample_dim), key=lambda dim: order[roles.get(dim)])
    shard: dict[str, str] = {}
    for axis, num_parts in axis_sizes.items():
        fits = [dim for dim in free if sizes[dim] >= num_parts]
        if not fits:
            raise ConfigError(
                f"no dimension can be split over the {num_parts} ranks of axis {axis!r}: {dict(sizes)}; "
                "use fewer ranks, or a 2-D domain"
            )
        shard[fits[0]] = axis
        free.remove(fits[0])
    return shard


def chosen_fields(source: Source, fields: Sequence[str] | str | None) -> list[str]:
    """Return the fields asked for, or all that hold data.

    Raises
    ------
    UnknownNameError, UnsupportedFormatError, ConfigError
        A field that is not there or cannot be read, or none at all.
    """
    if fields is not None:
        names = names_of("fields", fields)
        if not names:
            raise ConfigError("fields is empty; leave it out to read all")
        for name in names:
            layout = array_of(source, name)
            if layout.dtype.kind not in _TENSOR_KINDS:
                raise UnsupportedFormatError(
                    f"{source.path}: field {name!r} has dtype {layout.dtype}, which no tensor has; leave it out"
                )
        return names
    names = data_fields(source)
    if not names:
        raise UnsupportedFormatError(
            f"{source.path}: holds no data fields (arrays that are not coordinates){near_matches('', source.arrays)}"
        )
    return names


def all_dims_of(source: Source, names: Sequence[str], reference: ArrayLayout) -> list[str]:
    """Return the dimensions of all fields, those of the reference first."""
    dims = list(reference.dims)
    for name in names:
        dims += [d for d in source.arrays[name].dims if d not in dims]
    return dims


def choose_sample_dim(
    reference: ArrayLayout,
    split: Sequence[str] | None,
    asked: str | int | None,
    all_dims: Sequence[str],
    roles: Mapping[str, str],
) -> str | None:
    """Return the dimension that numbers the samples: as asked, else the first that is not sharded."""
    if asked is not None:
        return resolve_dim(asked, all_dims, "sample_dim")
    if split is None:
        # without a word from the user the last two dimensions, or those with a horizontal role, are space
        space = [d for d in reference.dims if roles.get(d) in ("Y", "X")] or list(reference.dims[-2:])
        free = [d for d in reference.dims if d not in space]
    else:
        free = [d for d in reference.dims if d not in split]
    return free[0] if free else None


def agreeing_fields(source: Source, names: Sequence[str], reference: ArrayLayout) -> list[str]:
    """Return the fields whose dimensions are the reference's: with them a sample is one grid."""
    sizes = dict(zip(reference.dims, reference.shape, strict=True))
    kept = []
    for name in names:
        layout = source.arrays[name]
        if all(sizes.get(d) == n for d, n in zip(layout.dims, layout.shape, strict=True)):
            kept.append(name)
    return kept


def sizes_of(layouts: Iterable[ArrayLayout]) -> dict[str, int]:
    """Return the number of rows of each dimension.

    Raises
    ------
    FieldMismatchError
        Two fields disagree.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for layout in layouts:
        if len(set(layout.dims)) != len(layout.dims):
            raise FieldMismatchError(f"{layout.store}: field {layout.name!r} repeats a dimension: {layout.dims}")
        for dim, size in zip(layout.dims, layout.shape, strict=True):
            known, where = sizes.setdefault(dim, (size, layout.name))
            if known != size:
                raise FieldMismatchError(
                    f"{layout.store}: fields disagree in shape: dimension {dim!r} has {known} rows in {where!r} and "
                    f"{size} in {layout.name!r}; choose fields that agree with fields=[...]"
                )
    return {dim: size for dim, (size, _) in sizes.items()}


def largest_chunks(layouts: Iterable[ArrayLayout]) -> dict[str, int]:
    """Return the largest chunk along each dimension: the one that costs most when a bound cuts it."""
    chunks: dict[str, int] = {}
    for layout in layouts:
        for dim, chunk in zip(layout.dims, layout.chunks, strict=True):
            chunks[dim] = max(chunk, chunks.get(dim, 1))
    return chunks


def checked_steps(steps: Sequence[int], sample_dim: str | None) -> tuple[int, ...]:
    """Return the steps of a sample as integers; refuse several where there is no dimension of samples."""
    checked = offsets(steps)
    if sample_dim is None and checked != (0,):
        raise ConfigError(f"steps={checked} need a sample dimension; name it with sample_dim")
    return checked

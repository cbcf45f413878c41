"""Defaults for a gridded store: its fields, sample dimension and split, if the user does not name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.bounds import num_rows_of, rows_of, segments_of_slice
from scidata.core.checks import names_of
from scidata.core.options import ReadOptions, SampleDim
from scidata.core.types import ArrayLayout, FloatArray, Source
from scidata.errors import (
    ConfigError,
    FieldMismatchError,
    UnknownNameError,
    UnsupportedFormatError,
    near_matches,
)
from scidata.grids.partition import resolve_dim, selected_rows
from scidata.read.arrays import array_of, read_array
from scidata.sources.cf import decoding_of, named_as, role_of
from scidata.sources.kinds import TENSOR_KINDS, data_fields, dim_roles, numbers_cells

_MEMBERS = re.compile(r"(ensemble_?|ens_?)?(members?|numbers?|realizations?|ens|ensembles?)(_?id)?", re.IGNORECASE)

#: Latitudes and longitudes of curvilinear grids, where no attribute says so: XLAT, TLONG, nav_lat, geolon_c, lat_rho.
_HORIZONTAL = re.compile(r"(nav_|geo|grid_)?[a-z]?(lat|lon)(g|itude|gitude)?(_\w+)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fields and dimensions that a data set takes from a store.

    - ``sample_dims``: the dimensions that number the samples, that of steps last; none where all is one sample.
    - ``left_out``: fields on other grids, of those that nobody named.
    - ``taken_text``: says which arrays are taken for coordinates; empty if all of them look like some.
    """

    fields: tuple[str, ...]
    reference: ArrayLayout
    sample_dims: tuple[str, ...]
    left_out: tuple[str, ...]
    taken_text: str

    @property
    def sample_dim(self) -> str | None:
        """The dimension of steps."""
        return self.sample_dims[-1] if self.sample_dims else None


def choose(source: Source, options: ReadOptions) -> Choice:
    """Choose the fields and the sample dimension, as asked or from the first file."""
    names = chosen_fields(source, options.fields)
    reference = reference_of(source, names)
    dims = list(dict.fromkeys([*reference.dims, *(d for name in names for d in source.arrays[name].dims)]))
    split = None if options.shard is None else [resolve_dim(dim, dims, "shard") for dim in options.shard]
    sample_dims = choose_sample_dim(reference, split, options.sample_dim, dims, dim_roles(source, reference.dims))
    kept, text = names, ""
    if options.fields is None:
        kept, text = agreeing_fields(source, names, reference), taken_text(source, names, reference)
    return Choice(
        fields=tuple(kept), reference=reference, sample_dims=sample_dims,
        left_out=tuple(name for name in names if name not in kept), taken_text=text,
    )  # fmt: skip


def choose_split(
    source: Source,
    choice: Choice,
    shard: Mapping[str | int, str] | None,
    *,
    sizes: Mapping[str, int],
    crop: Mapping[str, Any],
    axis_sizes: Mapping[str, int],
) -> dict[str, str]:
    """Return the mesh axis over which each dimension is split: as asked, or by default."""
    if shard is not None:
        split = {resolve_dim(dim, list(sizes), "shard"): axis for dim, axis in shard.items()}
        for dim, axis in split.items():
            if axis not in axis_sizes:
                raise UnknownNameError(f"shard splits {dim!r} over mesh axis {axis!r}{near_matches(axis, axis_sizes)}")
    else:
        rows, reference = selected_rows(crop, sizes), choice.reference
        lengths = {
            dim: num_rows_of(rows[dim]) for dim in sizes if dim in reference.dims and dim not in choice.sample_dims
        }
        split = default_shard(source.path, lengths, dim_roles(source, reference.dims), axis_sizes)
    for dim in choice.sample_dims:
        if dim in split:
            raise ConfigError(f"{dim!r} is the sample dimension and cannot be sharded as well")
    return split


def row_weights(source: Source, name: str, split: Mapping[str, str], crop: Mapping[str, Any]) -> dict[str, FloatArray]:
    """Sum a field over every dimension but the sharded one: the cost of each row."""
    if name == "measured":
        raise ConfigError(
            f"{source.path}: weights='measured' is for stores; cut grids by bounds=scidata.balanced_bounds(…)"
        )
    layout = array_of(source, name)
    if len(split) != 1:
        raise ConfigError("weights named by a field need a 1-D domain; give {dim: costs} instead")
    (dim,) = split
    if dim not in layout.dims:
        raise ConfigError(
            f"weights: field {name!r} has dims {', '.join(layout.dims) or 'none'}, not {dim!r}, which is split; "
            "name one that has it"
        )
    values = read_array(source, layout, decoding=decoding_of(layout, np.dtype("f8")))
    others = tuple(i for i, d in enumerate(layout.dims) if d != dim)
    cost: FloatArray = np.atleast_1d(np.nansum(values, axis=others, dtype=np.float64))
    return {dim: cost[rows_of(segments_of_slice(crop.get(dim, slice(None)), len(cost)))]}


def default_shard(
    where: str, sizes: Mapping[str, int], roles: Mapping[str, str], axis_sizes: Mapping[str, int]
) -> dict[str, str]:
    """Choose the dimension that each domain axis splits.

    Latitude (``Y``) before longitude (``X``), so that a rank's rows are contiguous on disk, then, where the field lies
    on neither of them, a dimension known to number cells, nodes or columns; a dimension with fewer rows than ranks is
    passed over. An axis of one rank may split any. Raises if nothing of that is known of any dimension: it could as
    well be time or channels.
    """
    order = {"Y": 0, "X": 1, None: 2, "Z": 3, "T": 4}
    free = sorted(sizes, key=lambda dim: order[roles.get(dim)])
    known = [dim for dim in free if roles.get(dim) in ("Y", "X")] or list(filter(numbers_cells, free))
    shard: dict[str, str] = {}
    for axis, num_parts in axis_sizes.items():
        fits = [dim for dim in (known if num_parts > 1 else free) if sizes[dim] >= num_parts and dim not in shard]
        if not fits and any(sizes[dim] >= num_parts for dim in sizes if dim not in shard):
            raise ConfigError(_which_dim(where, axis, num_parts, sizes, roles, shard))
        if not fits:
            rows = ", ".join(f"{dim} has {size} rows" for dim, size in sizes.items())
            if not sizes:
                raise ConfigError(
                    f"{where}: a sample is a single number, of which the ranks of axis {axis!r} cannot split anything; "
                    "take all steps for one sample with sample_dim=False (--sample-dim none), or read it on a mesh "
                    "that has a dp axis alone"
                )
            raise ConfigError(
                f"{where}: no dimension can be split over the {num_parts} ranks of axis {axis!r}: {rows}; use fewer "
                "ranks, or a 2-D domain"
            )
        shard[fits[0]] = axis
    return shard


def _which_dim(
    where: str,
    axis: str,
    num_parts: int,
    sizes: Mapping[str, int],
    roles: Mapping[str, str],
    taken: Collection[str],
) -> str:
    """List the dimensions that could be split, and the rows that a rank would have of each."""
    meant = {"T": "times", "Z": "levels", "Y": "latitudes", "X": "longitudes"}
    found = [
        f"{dim} ({n} {meant.get(roles.get(dim, ''), 'rows')}, about {n // num_parts} a rank)"
        for dim, n in sizes.items()
        if n >= num_parts and dim not in taken
    ]
    fits = [dim for dim in sizes if sizes[dim] >= num_parts and dim not in taken and dim not in roles]
    of_samples = next(iter(sizes))  # by which one rank, of which nothing is asked, numbers the samples
    first = next((dim for dim in fits if dim != of_samples), next(iter(fits), "DIM"))
    samples = f"what numbers the samples with sample_dim={of_samples!r} (--sample-dim {of_samples})"
    if first == of_samples:
        samples = "that all rows are one sample with sample_dim=False (--sample-dim none)"
    return (
        f"{where}: which dimension do the {num_parts} ranks of axis {axis!r} split? None is known to be space by its "
        f"name or a coordinate, and it could be channels or time: {', '.join(found)}. Say so with "
        f"shard={{{first!r}: {axis!r}}} (--shard {first}), and {samples}"
    )


def chosen_fields(source: Source, fields: Sequence[str] | str | None) -> list[str]:
    """Return the fields asked for, or all that hold data."""
    if fields is not None:
        names = names_of("fields", fields)
        if not names:
            raise ConfigError("fields is empty; leave it out to read all")
        for name in names:
            layout = array_of(source, name)
            if layout.dtype.kind not in TENSOR_KINDS:
                raise UnsupportedFormatError(
                    f"{source.path}: field {name!r} has dtype {layout.dtype}, which no tensor has; leave it out"
                )
        return names
    names = data_fields(source)
    if not names:
        kinds = {x.name: x.dtype for x in source.arrays.values() if x.dtype.kind not in TENSOR_KINDS}
        why = "; ".join(f"{name!r} has dtype {dtype}, which no tensor has" for name, dtype in list(kinds.items())[:3])
        why = f"; {why}: store numbers" if kinds else near_matches("", source.arrays)
        if skipped := list(getattr(source, "skipped", {}).items())[:3]:
            why = "; left out: " + "; ".join(f"{name!r} ({reason})" for name, reason in skipped)
        raise UnsupportedFormatError(f"{source.path}: holds no data fields (arrays that are not coordinates){why}")
    return names


def reference_of(source: Source, names: Sequence[str]) -> ArrayLayout:
    """Return the field whose grid a sample is given on: the largest; of a staggered grid, one of the cells' centres.

    WRF names the dimensions of faces ``…_stag``. One that is without time gives way to those on its cells that are not:
    soil types of nine layers, beside fewer times.
    """
    layouts = [array_of(source, name) for name in names]
    most = max(len(layout.dims) for layout in layouts)
    centres = [x for x in layouts if len(x.dims) == most and not any(dim.endswith("_stag") for dim in x.dims)]
    largest = max(centres or layouts, key=lambda layout: layout.nbytes)
    roles = dim_roles(source, list(dict.fromkeys(dim for layout in layouts for dim in layout.dims)))
    cells = _cells_of(largest, roles)
    timed = [x for x in layouts if "T" in map(roles.get, x.dims) and cells and cells <= set(x.dims)]
    return largest if largest in timed or not timed else max(timed, key=lambda layout: layout.nbytes)


def _cells_of(layout: ArrayLayout, roles: Mapping[str, str]) -> set[str]:
    """Return the dimensions of a field that are known to be horizontal, or to number cells."""
    return {d for d in layout.dims if roles.get(d) in ("Y", "X")} or set(filter(numbers_cells, layout.dims))


def choose_sample_dim(
    reference: ArrayLayout,
    split: Sequence[str] | None,
    asked: SampleDim,
    all_dims: Sequence[str],
    roles: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the dimensions that number the samples: as asked, else the first that is not sharded; or none.

    Time, where the first is one of levels, or of the members of an ensemble. Levels without time raise: a field without
    time is no series of samples.
    """
    if asked is False:
        return ()
    if asked is not None:
        several = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
        dims = tuple([resolve_dim(dim, all_dims, "sample_dim") for dim in several])
        if len(set(dims)) != len(dims) or not dims:
            raise ConfigError(f"sample_dim={asked!r}: name each dimension once")
        return dims
    if split is None:
        # without a word: dims with a horizontal role are space, or those of cells, or else the last two but time
        space = _cells_of(reference, roles) or {d for d in reference.dims[-2:] if roles.get(d) != "T"}
        free = [d for d in reference.dims if d not in space]
    else:
        free = [d for d in reference.dims if d not in split]
        if free and (over := [d for d in split if roles.get(d) == "T"]):
            raise ConfigError(
                f"{reference.store}: shard splits {over[0]!r}, each step of which is a sample by default; split one "
                f"of {', '.join(free)}, which leaves samples as they are, or say with sample_dim= what a sample is "
                f"(False, --sample-dim none: all of {', '.join(reference.dims)})"
            )
    if not free or not (roles.get(free[0]) == "Z" or _MEMBERS.fullmatch(free[0])):
        return tuple(free[:1])
    times = [d for d in free if roles.get(d) == "T"]  # members, and levels, are parts of a sample
    if not times and roles.get(free[0]) == "Z":
        dim = free[0]
        raise ConfigError(
            f"{reference.store}: what is a sample? {reference.name!r} has dims {', '.join(reference.dims)}: {dim!r} is "
            f"vertical, and nothing is known to be time. Say so with sample_dim=: {dim!r} takes each {dim} for a "
            "sample, False (--sample-dim none) all for one"
        )
    return tuple(times[:1] or free[:1])


def agreeing_fields(source: Source, names: Sequence[str], reference: ArrayLayout) -> list[str]:
    """Return the fields whose dimensions are the reference's: with them a sample is one grid."""
    sizes = dict(zip(reference.dims, reference.shape, strict=True))
    layouts = [(name, source.arrays[name]) for name in names]
    return [name for name, x in layouts if all(sizes.get(d) == n for d, n in zip(x.dims, x.shape, strict=True))]


def left_out_text(names: Sequence[str], reference: str) -> str:
    """Say which fields a data set leaves out, since they lie on another grid."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{shown}: not on the grid of {reference}, left out unless named with fields"


def taken_text(source: Source, fields: Sequence[str], reference: ArrayLayout) -> str:
    """Say which arrays on the grid are no fields, since others name them as coordinates: an ``ens`` of each cell, say.

    Those of times, levels, latitudes or longitudes, which are coordinates by their own word too, need none.
    """
    taken = [
        x.name
        for x in source.arrays.values()
        if len(x.dims) > 1 and set(x.dims) <= set(reference.dims) and x.name not in fields
        if x.dtype.kind in TENSOR_KINDS and role_of(x) is None and named_as(x, source.arrays) == "coordinates"
        if not _HORIZONTAL.fullmatch(x.name.rpartition("/")[2])
    ]
    if not taken:
        return ""
    shown = ", ".join(taken[:8]) + (f" and {len(taken) - 8} more" if len(taken) > 8 else "")
    return f"{shown}: a coordinate by the attribute 'coordinates' of others, left out unless named with fields"


def sizes_of(layouts: Iterable[ArrayLayout]) -> dict[str, int]:
    """Return the number of rows of each dimension."""
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

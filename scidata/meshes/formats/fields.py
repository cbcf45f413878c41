"""Which arrays of a file are fields of a mesh, cloud or graph, and which of their dimensions counts its rows.

Fields of one topology from several files are put together along time, or along a new dimension.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from scidata.core.bounds import bounds_of
from scidata.core.types import ArrayLayout, Source
from scidata.errors import FieldMismatchError
from scidata.meshes.formats.base import (
    GROUPS,
    UNNAMED,
    Joined,
    NewDim,
    RawField,
    RawTopology,
    base_name,
    field_of,
    is_graph_value,
    is_wanted,
)
from scidata.sources.cf import is_coordinate, names_time, role_of

#: Names of integers that number rows of the mesh: ``nod_in_elem2D``, ``cellsOnCell``, ``edge_cells``, ``face_links``.
_NUMBERS = re.compile(
    r"(.*_)?(nod|node|vert|vertex|vertices|edge|face|cell|elem|element|neigh\w*)s?(2d|3d)?"
    r"(_?(in|on|of|to)_?|_)(nod|node|vert|vertex|vertices|edge|face|cell|elem|element)s?(2d|3d)?"
    r"|.*_(links|connectivity|neighbou?rs|connections)|.*_?neighbou?r_(cell|node|edge)_index|adjacent_cell_of_edge",
    re.IGNORECASE,
)


def find_fields(
    topology: RawTopology, source: Source, wanted: Sequence[str] | None
) -> tuple[dict[str, RawField], dict[str, str]]:
    """Find the fields that a file has on a topology, which may lie in another file.

    Asked in turn: UGRID's ``mesh`` and ``location``, the group an array lies in (``node/…``), the names of its
    dimensions, and, where those say nothing (another file, or dimensions without names), their lengths.

    - ``wanted``: names to look for, which the file need not have; None for every field there is.

    By name; and the reason for each that is left out. Raises FieldMismatchError: a field's length fits two
    entities, or a wanted field none.
    """
    own = source.path == topology.source.path
    fields: dict[str, RawField] = {}
    left_out: dict[str, str] = dict(getattr(source, "skipped", {}))
    for name, layout in source.arrays.items():
        if not is_wanted(name, wanted):
            continue
        if own and topology.leading_only and is_graph_value(name):
            continue
        if wanted is None and _is_structure(topology, source, layout, own=own):
            continue
        place = _place(topology, source, layout, own=own)
        if isinstance(place, str):
            if wanted is not None:
                raise FieldMismatchError(f"{source.path}: field {name!r} {place}")
            left_out[name] = place
        elif wanted is None and layout.dtype.kind in "iu" and _NUMBERS.fullmatch(base_name(name)):
            left_out[name] = (
                "numbers rows of the file by its name, which have other numbers in a store; fields= keeps it as it is"
            )
        elif layout.dtype.kind not in "iufb" or layout.dtype.itemsize > 8:
            left_out[name] = f"has dtype {layout.dtype}, which is no real number of at most 64 bits"
        else:
            fields[name] = field_of(source, layout, place[0], place[1], topology.options)
    return fields, left_out


def _is_structure(topology: RawTopology, source: Source, layout: ArrayLayout, *, own: bool) -> bool:
    """Return True if an array describes the topology or a coordinate instead of being a field."""
    if own and layout.name in topology.not_fields:
        return True
    if not layout.dims or "cf_role" in layout.attributes:
        return True
    if layout.dims == (layout.name.rpartition("/")[2],):  # of another dimension, such as time
        return True
    return not own and is_coordinate(layout, source.arrays) and layout.name in topology.not_fields


def _place(topology: RawTopology, source: Source, layout: ArrayLayout, *, own: bool) -> tuple[str, int] | str:
    if (elsewhere := _elsewhere(topology, layout)) is not None:
        return elsewhere
    entity = _said_entity(topology, layout)
    if entity is not None:
        if entity not in topology.sizes:
            return _absent(entity)
        # with several meshes in the file, a length says nothing: another mesh may have as many
        by_name = own and bool(topology.other_meshes) and "mesh" not in layout.attributes
        return _place_of_entity(topology, layout, entity, by_name=by_name)
    for position, dim in enumerate(layout.dims):
        named = _named_entity(topology, dim)
        if named is not None:
            return (named, position) if named in topology.sizes else _absent(named)
    return _place_by_length(topology, source, layout, own=own)


def _elsewhere(topology: RawTopology, layout: ArrayLayout) -> str | None:
    """Name the other place of a field by UGRID's attributes: another mesh of the topology's file, or part of a mesh."""
    if not topology.entity_of_location:
        return None
    if "location_index_set" in layout.attributes:
        return f"lives on a part of a mesh, location_index_set={layout.attributes['location_index_set']!r}"
    mesh, group = str(layout.attributes.get("mesh", "")).strip(), layout.name.rpartition("/")[0]
    named = next((n for n in (f"{group}/{mesh}" if group else mesh, mesh) if n in topology.other_meshes), None)
    return None if named is None else f"lives on mesh {named!r}; topology={named!r} takes it"


def _named_entity(topology: RawTopology, dim: str) -> str | None:
    """Return the entity of a dimension by its name, None for names that a source made up."""
    return None if UNNAMED.match(dim) else topology.entity_of_dim.get(dim)


def _absent(entity: str) -> str:
    if entity == "edge":
        return (
            "lives on edges, but those of the store are made of the cells, and the file does not say which is which; "
            "edges='edge_index' takes the file's own, where it has them"
        )
    return f"lives on {entity}s, which the topology has none of"


def _said_entity(topology: RawTopology, layout: ArrayLayout) -> str | None:
    location = layout.attributes.get("location")
    if isinstance(location, str) and location in topology.entity_of_location:
        return topology.entity_of_location[location]
    if layout.name in topology.entity_of_name:
        return topology.entity_of_name[layout.name]
    entity = GROUPS.get(layout.name.split("/")[0].lower()) if "/" in layout.name else None
    if entity in ("node", "point"):  # one and the same: a cloud has points, all else has nodes
        return "point" if "point" in topology.sizes else "node"
    return entity


def _place_of_entity(
    topology: RawTopology, layout: ArrayLayout, entity: str, *, by_name: bool = False
) -> tuple[str, int] | str:
    named = [i for i, dim in enumerate(layout.dims) if _named_entity(topology, dim) == entity]
    fitting = [i for i, n in enumerate(layout.shape) if n == topology.sizes[entity]]
    if len(named) == 1:
        return entity, named[0]
    if by_name and not any(map(UNNAMED.match, layout.dims)):
        return f"lives on {entity}s of another mesh of the file, by its dimensions {_shown(layout)}"
    if not fitting:
        raise FieldMismatchError(
            f"{layout.store}: field {layout.name!r} lives on {entity}s, of which {topology.source.path} has "
            f"{topology.sizes[entity]}, but no dimension of its shape {_shown(layout)} is as long; "
            "the field belongs to another mesh, or its location is wrong"
        )
    if len(fitting) > 1 and fitting[0] != 0:
        return f"has two dimensions as long as there are {entity}s: {_shown(layout)}; name its dimensions"
    return entity, fitting[0]


def _place_by_length(topology: RawTopology, source: Source, layout: ArrayLayout, *, own: bool) -> tuple[str, int] | str:
    candidates = [
        (entity, position)
        for position, (dim, n) in enumerate(zip(layout.dims, layout.shape, strict=True))
        for entity, size in topology.sizes.items()
        if n == size and (UNNAMED.match(dim) or (not own and not is_time(source, dim)))
    ]
    first = [place for place in candidates if place[1] == 0]
    one_entity = len({entity for entity, _ in candidates}) == 1
    if topology.leading_only and own:  # rows first; or behind time, where no other dimension could be meant
        candidates = first or (candidates if len(candidates) == 1 else [])
        if candidates and math.prod(layout.shape[: candidates[0][1]]) == 1 and not first:
            short, entity = base_name(layout.name), candidates[0][0]
            return (
                f"has shape {_shown(layout)}, which may be one step of a field or a value of the whole; say which by a "
                f"group, '{entity}/{short}' or 'graph/{short}'"
            )
    elif first and (one_entity or (topology.leading_only and UNNAMED.match(layout.dims[0]))):
        candidates = first  # a square array, or a layout without names: rows first
    if len(candidates) > 1:
        entities = " and ".join(f"{entity}s" for entity in dict.fromkeys(entity for entity, _ in candidates))
        raise FieldMismatchError(
            f"{layout.store}: field {layout.name!r} of shape {_shown(layout)} fits {entities} alike; say which by a "
            f"group ('node/{layout.name}', 'cell/{layout.name}', …), by named dimensions, or leave it out with fields="
        )
    if not candidates:
        have = ", ".join(f"{size} {entity}s" for entity, size in topology.sizes.items())
        return f"has shape {_shown(layout)}, but the topology in {topology.source.path} has {have}"
    return candidates[0]


def is_time(source: Source, dim: str) -> bool:
    """Return True if a dimension is time, by its name or its coordinate."""
    coordinate = source.arrays.get(dim)
    return names_time(dim) or (coordinate is not None and role_of(coordinate) == "T")


def _shown(layout: ArrayLayout) -> str:
    return "(" + ", ".join(f"{d}: {n}" for d, n in zip(layout.dims, layout.shape, strict=True)) + ")"


def combine_fields(found: Sequence[tuple[Source, Mapping[str, RawField]]]) -> dict[str, RawField]:
    """Put together the fields of files that hold one topology's fields, in the order of the files.

    A field that several files have is joined along its first dimension where that is time, else along a new first
    dimension ``sample``. Raises FieldMismatchError: a field differs between files.
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
    """Drop the group from ``node/<name>`` where no other entity has the name, of ``every`` array, chosen or not."""
    counts = Counter(map(base_name, set(every) | set(fields)))
    named: dict[str, RawField] = {}
    for name, field in fields.items():
        short = field.base if counts[field.base] == 1 else field.path
        if short in named:
            raise FieldMismatchError(f"two fields are named {short!r}: {name!r} and another; choose one with fields=")
        named[short] = replace(field, name=short)
    return named

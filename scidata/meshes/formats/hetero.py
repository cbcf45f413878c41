"""Graphs between several node sets, in groups of Zarr, HDF5 or NetCDF, or a ``HeteroData`` of ``torch.save``.

=============================================== =================== ==================================================
array                                           shape               meaning
=============================================== =================== ==================================================
``nodes/<set>/pos``                             (N, 2 or 3)         positions, optional; with units of angle,
                                                                    longitude and latitude. Or ``lon`` and ``lat``,
                                                                    ``(N,)`` each
``nodes/<set>/<name>``                          (N, …), (time, N)   fields of the set's nodes
``edges/<source>__<name>__<target>/edge_index`` (2, E) integer      rows of the source set and of the target set,
                                                                    0-based (``start_index``: an attribute, for others)
``edges/<source>__<name>__<target>/<name>``     (E, …)              fields of its edges
``graph/<name>``                                any                 values of the whole graph; ``graph/<set>/<name>``
                                                                    of a set or relation
=============================================== =================== ==================================================

The number of nodes of a set is that of its positions, else ``nodes/<set>/num_nodes``, one integer, else the first
dimension that its fields share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

from scidata.core.types import ArrayLayout, IntArray, Source
from scidata.errors import FieldMismatchError, UnknownNameError, near_matches
from scidata.meshes.formats.arrays import num_pairs, read_indices, read_pairs
from scidata.meshes.formats.base import (
    UNNAMED,
    Options,
    RawField,
    field_of,
    find_graph_values,
    is_graph_value,
    read_graph_values,
)
from scidata.meshes.formats.coordinates import as_coordinates, read_columns
from scidata.meshes.hetero import JOINT, RawSet, check_set_name, relation_parts
from scidata.meshes.sample import HeteroHeader, RawSample
from scidata.sources.torch_files import ENTITY_DIMS

_POSITIONS = (("pos",), ("points",), ("lon", "lat"), ("longitude", "latitude"), ("x", "y"), ("x", "y", "z"))
_NUM_NODES = "num_nodes"
#: Names of the arrays of positions, by node set.
_Positions: TypeAlias = Mapping[str, tuple[str, ...]]


def _load(
    source: Source,
    options: Options,
    positions: _Positions,
    values: Sequence[str],
    header: HeteroHeader,
) -> RawSample:
    sets: dict[str, RawSet] = {}
    relations: dict[str, IntArray] = {}
    for name, num in header.sizes.items():
        if relation_parts(name) is not None:
            relations[name] = read_pairs(source, f"edges/{name}/edge_index", options)
        elif name != JOINT:
            names = positions.get(name)
            points = None if names is None else read_columns(source, names, options, on_sphere=header.on_sphere)
            sets[name] = RawSet(num_nodes=num or 0, points=points)
    return RawSample(
        name=header.name, kind=header.kind, sets=sets, relations=relations, on_sphere=header.on_sphere,
        fields=header.fields, left_out=header.left_out, values=read_graph_values(source, values, options),
    )  # fmt: skip


def open_hetero(source: Source, name: str, options: Options, wanted: Sequence[str] | None) -> HeteroHeader:
    """Describe the graph of a file."""
    groups: dict[str, list[ArrayLayout]] = {}
    left_out: dict[str, str] = dict(getattr(source, "skipped", {}))
    relations: list[str] = []
    for path, layout in source.arrays.items():
        kind, _, rest = path.partition("/")
        group, _, array = rest.partition("/")
        if kind == "edges" and array and relation_parts(group) is not None:
            if array == "edge_index":
                relations.append(group)
            groups.setdefault(group, []).append(layout)
        elif kind == "nodes" and array:
            groups.setdefault(group, []).append(layout)
        elif kind == "edges" and array == "edge_index":
            raise FieldMismatchError(
                f"{source.path}: edges/{group} has edges, but its name says not of which node sets; expected "
                "edges/<source>__<name>__<target>, as in edges/grid__to__mesh"
            )
        elif not is_graph_value(path):
            left_out[path] = "lies in no group nodes/<set> or edges/<source>__<name>__<target>"
    for relation in [group for group in groups if relation_parts(group) is not None]:
        if relation not in relations:
            raise FieldMismatchError(f"{source.path}: edges/{relation} has no edge_index")
    sets = {name: arrays for name, arrays in groups.items() if relation_parts(name) is None}
    for each in sets:
        check_set_name(each, source.path)
    positions = {name: found for name, arrays in sets.items() if (found := _positions(name, arrays)) is not None}
    on_sphere = _on_sphere(source, positions)
    counts: dict[str, int] = {name: _count(source, name, arrays, positions, options) for name, arrays in sets.items()}
    counts |= {name: num_pairs(source.arrays[f"edges/{name}/edge_index"]) for name in relations}
    fields: dict[str, RawField] = {}
    for group, arrays in groups.items():
        prefix = "edges" if group in relations else "nodes"
        structure = {f"edges/{group}/edge_index", f"nodes/{group}/{_NUM_NODES}", *positions.get(group, ())}
        rows = {dim for p in structure & set(source.arrays) for dim in source.arrays[p].dims}
        rows |= set(ENTITY_DIMS) if source.format == "torch" else set()
        for layout in arrays:
            short = f"{group}/{layout.name.removeprefix(f'{prefix}/{group}/')}"
            if layout.name in structure or not _is_wanted(short, wanted):
                continue
            place = _place(layout, counts[group], rows)
            if isinstance(place, str):
                if wanted is not None or layout.shape:  # arrays of a group have its rows
                    raise FieldMismatchError(
                        f"{source.path}: field {layout.name!r} of {group} {place}; mend it, or choose others, --fields"
                    )
                left_out[layout.name] = place
                continue
            fields[short] = field_of(source, layout, group, place, options, name=short)
    values, too_large = find_graph_values(source, wanted)
    left_out |= too_large
    for each in wanted or ():
        if each not in values and not any(_is_wanted(known, [each]) for known in fields):
            raise UnknownNameError(f"{source.path}: no field {each!r}{near_matches(each, fields)}")
    return HeteroHeader(
        name=name,
        sizes={JOINT: sum(counts[each] for each in sets), **counts},
        on_sphere=on_sphere,
        fields=fields,
        left_out=left_out,
        paths=(source.path,),
        load=partial(_load, source, options, positions, values),
    )


def _is_wanted(short: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or short in wanted or short.partition("/")[2] in wanted


def _positions(name: str, arrays: list[ArrayLayout]) -> tuple[str, ...] | None:
    known = {layout.name for layout in arrays}
    for names in _POSITIONS:
        paths = tuple(f"nodes/{name}/{each}" for each in names)
        if set(paths) <= known:
            layouts = [layout for layout in arrays if layout.name in paths]
            if len(names) == 1 or all(layout.attributes.get("units") or names[0][:3] == "lon" for layout in layouts):
                return paths  # features named x and y, PyG's, are no coordinates
    return None


def _on_sphere(source: Source, positions: _Positions) -> bool:
    found = {}
    for name, paths in positions.items():
        _, angles = as_coordinates(source, [source.arrays[path] for path in paths])
        found[name] = angles or paths[0].endswith(("/lon", "/longitude"))
    if len(set(found.values())) > 1:
        on = [name for name, sphere in found.items() if sphere]
        off = [name for name, sphere in found.items() if not sphere]
        raise FieldMismatchError(
            f"{source.path}: positions of node set {on[0]!r} are longitude and latitude, those of {off[0]!r} are not; "
            "give all sets in one space (units = 'degrees' on pos says that its columns are longitude and latitude)"
        )
    return any(found.values())


def _count(source: Source, name: str, arrays: list[ArrayLayout], positions: _Positions, options: Options) -> int:
    if name in positions:
        return source.arrays[positions[name][0]].shape[0]
    said = next((layout for layout in arrays if layout.name == f"nodes/{name}/{_NUM_NODES}"), None)
    if said is not None:
        return int(read_indices(source, said.name, options).reshape(-1)[0])
    first = {layout.shape[0] for layout in arrays if layout.shape}
    if len(first) == 1:
        return first.pop()
    raise FieldMismatchError(
        f"{source.path}: nothing says how many nodes {name!r} has: neither nodes/{name}/pos nor "
        f"nodes/{name}/num_nodes, and its fields have {sorted(first)} rows"
    )


def _place(layout: ArrayLayout, num_rows: int, rows: set[str]) -> int | str:
    """Return the dimension of a field that counts its rows, or why there is none."""
    if layout.dtype.kind not in "iufb" or layout.dtype.itemsize > 8:
        return f"has dtype {layout.dtype}, which is no real number of at most 64 bits"
    named = [i for i, dim in enumerate(layout.dims) if dim in rows and not UNNAMED.match(dim)]
    same = [i for i, size in enumerate(layout.shape) if size == num_rows]
    found = [i for i in named if i in same] or same
    if not found:
        return f"has shape {layout.shape}, and no dimension of {num_rows} rows"
    return found[0]

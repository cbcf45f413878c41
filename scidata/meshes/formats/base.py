"""The common shape of all adapters: the description of a mesh, cloud or graph, and its fields, not yet read.

All of it pickles (sources by path), so that samples can be handed to worker processes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, FloatArray, IntArray, Source
from scidata.errors import ConfigError, CorruptDataError, SciDataError, UnsupportedFormatError
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.ids import blocks
from scidata.read.arrays import read_array
from scidata.sources.cf import array_of, decoding_of

#: Entity of the arrays in a group of this name; points of a cloud and nodes are told apart by the topology.
GROUPS: Mapping[str, str] = {
    **dict.fromkeys(("node", "nodes"), "node"),
    **dict.fromkeys(("point", "points"), "point"),
    **dict.fromkeys(("cell", "cells", "face", "faces"), "cell"),
    **dict.fromkeys(("edge", "edges"), "edge"),
}
Box = tuple[slice, ...]
#: Reads a box of an array, one slice with a positive step per dimension, in native byte order.
Reader: TypeAlias = Callable[[Box], AnyArray]
#: Names of dimensions that a source has made up.
UNNAMED = re.compile(r"dim_\d+$|phony_dim_\d+$")
_MAX_CHUNKS = 2**22  # of one array that is read whole: finding each takes some 200 bytes


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """Turn errors of the adapters' arithmetic on damaged metadata into CorruptDataError.

    They take arrays and attributes as their formats have them; any that has another shape or type ends here.
    """
    try:
        yield
    except SciDataError:
        raise
    except MemoryError as e:
        raise CorruptDataError(
            f"{path}: claims more than there is memory for ({e}); it is damaged, or needs a larger machine"
        ) from e
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as e:
        raise CorruptDataError(
            f"{path}: its arrays or attributes are not those of its format ({type(e).__name__}: {e}); it is damaged: "
            "copy or write it again, or say kind= if it is of another kind"
        ) from e


def is_wanted(name: str, wanted: Collection[str] | None) -> bool:
    """Whether a field is asked for, by its name or by that without groups; None asks for all."""
    return wanted is None or name in wanted or name.rpartition("/")[2] in wanted


def base_name(name: str) -> str:
    """Return an array's name without a group that says the entity."""
    group, _, rest = name.partition("/")
    return rest if rest and group.lower() in GROUPS else name


@dataclass(frozen=True, kw_only=True, eq=False)
class RawField:
    """A field that is not read yet.

    ``name, units, attributes``: as in the file; ``units`` is empty if it names none.
    """

    name: str
    entity: str  # ``"node"``, ``"point"``, ``"cell"`` or ``"edge"``
    # dims, shape: in the source's order
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    entity_dim: int  # position of the dimension with one row per entity
    dtype: np.dtype[Any]  # of the values as :meth:`read` gives them: decoded, native byte order
    reader: Reader  # reads a box; pickles
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> str:
        """The unit, empty if the file gives none."""
        return str(self.attributes.get("units", ""))

    @property
    def base(self) -> str:
        """The name without a group that says the entity."""
        return base_name(self.name)

    @property
    def path(self) -> str:
        """``entity/base``: unlike that of any other field of the sample."""
        return f"{self.entity}/{self.base}"

    @property
    def num_rows(self) -> int:
        """Rows along the entity's dimension."""
        return self.shape[self.entity_dim]

    def read(self, rows: slice | None = None) -> AnyArray:
        """Read some rows of the entity's dimension, all of the other dimensions.

        - ``rows``: a slice with a positive step; None for all.

        Returns ``shape`` with the selected rows along ``entity_dim``, C-contiguous, of dtype ``dtype``.
        """
        box = [slice(None)] * len(self.shape)
        box[self.entity_dim] = slice(None) if rows is None else rows
        return self.read_box(tuple(box))

    def read_box(self, box: Box) -> AnyArray:
        """Read one slice with a positive step of each dimension: for fields too large to read all levels at once."""
        if len(box) != len(self.shape) or any(s.step is not None and s.step < 1 for s in box):
            raise ConfigError(
                f"field {self.name!r}: {box} is not one slice with a positive step for each of {self.dims}"
            )
        return np.ascontiguousarray(self.reader(box), self.dtype)


@dataclass(frozen=True, kw_only=True)
class ArrayReader:
    """Reads boxes of one array of a source, through plan and read, decoded by CF."""

    source: Source
    layout: ArrayLayout
    decode: bool = True
    allow_missing: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values read."""
        decoding = decoding_of(self.layout) if self.decode else None
        return decoding.dtype if decoding is not None else self.layout.dtype.newbyteorder("=")

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        decoding = decoding_of(self.layout) if self.decode else None
        return read_array(self.source, self.layout, box, decoding=decoding, allow_missing=self.allow_missing)


@dataclass(frozen=True, kw_only=True)
class NewDim:
    """Puts a dimension of length 1 before a reader's."""

    part: Reader

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        values = self.part(box[1:])
        return np.broadcast_to(values, (len(range(*box[0].indices(1))), *values.shape))


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Parts that follow each other along one dimension, read as one array."""

    parts: tuple[Reader | None, ...]  # None for a part that the file does not have: its values are NaN
    dim: int  # the dimension along which they follow each other
    bounds: tuple[int, ...]  # first row of each part, and the end of the last
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the values

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        ranges = [range(*s.indices(n)) for s, n in zip(box, self.shape, strict=True)]
        out = np.empty(tuple(map(len, ranges)), self.dtype)
        wanted = ranges[self.dim]
        for part, start, stop in zip(self.parts, self.bounds[:-1], self.bounds[1:], strict=True):
            first = max(0, -(-(start - wanted.start) // wanted.step))
            rows = wanted[first : max(first, -(-(stop - wanted.start) // wanted.step))]
            if not len(rows):
                continue
            target = (*[slice(None)] * self.dim, slice(first, first + len(rows)))
            local = (*box[: self.dim], slice(rows[0] - start, rows[-1] - start + 1, rows.step), *box[self.dim + 1 :])
            out[target] = np.nan if part is None else part(local)
        return out


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that say where points, edges and the mesh are in a file."""

    # names of the coordinates: one ``(N, 2 or 3)`` array, or two or three of length N
    points: tuple[str, ...] | None = None
    # where edges come from: ``"edge_index"``, ``"cells"``, ``"knn:8"``, ``"radius:0.1"``; None: as the file has them
    edges: str | None = None
    topology: str | None = None  # name of the mesh variable, where a file has several
    allow_missing: bool = False  # read fill values where chunks are absent


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A topology that is read some cells or edges at a time, more than once if need be."""

    # points, cells, edges: yield the points, ``(num, 2 or 3)`` float64, the cells, or ``(2, num)`` int64 edges, in
    # their order, at most as many at once as asked for; None if there are none. Errors that need all of them come at
    # the end
    points: Callable[[int], Iterator[FloatArray]] | None
    cells: Callable[[int], Iterator[RawCells]] | None = None
    edges: Callable[[int], Iterator[IntArray]] | None = None


def blocks_in_memory(geometry: Geometry) -> Blocks:
    """Return what was read whole, by blocks."""
    points, cells, edges = geometry.points, geometry.cells, geometry.edge_index
    return Blocks(
        points=None if points is None else lambda num: iter([points]),
        cells=None
        if cells is None
        else lambda num: (cells.between(r.start, r.stop) for r in blocks(cells.num_cells, num)),
        edges=None if edges is None else lambda num: (edges[:, rows] for rows in blocks(edges.shape[1], num)),
    )


@dataclass(frozen=True, kw_only=True)
class RawTopology:
    """One mesh, cloud or graph as its metadata describe it; :meth:`load` reads it. Adapters subclass it."""

    source: Source  # the file that holds the topology
    kind: str = "mesh"  # ``"mesh"``, ``"points"`` or ``"graph"``
    on_sphere: bool = False  # True if the points are longitude and latitude
    sizes: Mapping[str, int]  # number of rows of each entity that fields may live on
    # entity of each dimension that is named; entities not in ``sizes`` have fields that are left out
    entity_of_dim: Mapping[str, str] = field(default_factory=dict)
    # entity of each value of a field's attribute ``location`` (UGRID)
    entity_of_location: Mapping[str, str] = field(default_factory=dict)
    # mesh variables of the file that are not this topology (UGRID): fields whose attribute ``mesh`` names one are not
    # of it
    other_meshes: frozenset[str] = frozenset()
    entity_of_name: Mapping[str, str] = field(default_factory=dict)  # entity of arrays whose name says it
    # arrays of the file that describe the topology: no fields unless asked for by name
    not_fields: frozenset[str] = frozenset()
    # width of the domain along each coordinate where it wraps, 0 if it does not
    period: tuple[float, ...] | None = None
    fields: Mapping[str, RawField] | None = None  # fields that only the adapter can find; None: by their dimensions
    leading_only: bool = False  # a field's rows are its first dimension, unless its dimensions are named
    left_out: Mapping[str, str] = field(default_factory=dict)  # arrays that the adapter passes over, and why
    # True if ``sizes["edge"]`` counts the undirected edges of a mesh, which :meth:`load_mesh_edges` reads: fields on
    # them follow to the directed edges that are made of the cells
    mesh_edges: bool = False
    # the rows are the cells, in ``points``, whatever was asked for: :meth:`load` returns their centres, and the edges
    # across their faces
    cells_are_rows: bool = False
    # names of the arrays of the points, where :func:`~scidata.meshes.formats.coordinates.read_points` reads them
    coordinates: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)

    def load(self) -> Geometry:
        """Read points, cells and edges."""
        raise NotImplementedError

    def by_blocks(self) -> Blocks | None:
        """Describe how points, cells and edges are read some at a time; None if the format is read whole."""
        return None

    def load_mesh_edges(self) -> IntArray:
        """Read the undirected edges of a mesh: ``(2, num_mesh_edges)`` int64, 0-based; -1 if a node is missing."""
        raise NotImplementedError


def fill_values(source: Source, layout: ArrayLayout) -> list[int | float]:
    """Return the values that mark missing entries of an array of a topology.

    Zarr v2 fills with 0 if nobody said otherwise, and its fill values are CF's: 0 is taken for a node or a
    coordinate there, not for a gap.
    """
    values = [layout.attributes[key] for key in ("_FillValue", "missing_value") if key in layout.attributes]
    numbers = [item for value in values for item in np.ravel(array_of(value)).tolist()]
    numbers = [item for item in numbers if isinstance(item, int | float) and item == item]
    return [item for item in numbers if item != 0 or source.format != "zarr2"]


def without_default_fill(source: Source, layout: ArrayLayout) -> ArrayLayout:
    """Return a layout in which Zarr v2's default fill value 0 counts as data."""
    if source.format != "zarr2" or fill_values(source, layout):
        return layout
    kept = {k: v for k, v in layout.attributes.items() if k not in ("_FillValue", "missing_value")}
    return replace(layout, attributes=kept)


def read_values(source: Source, name: str, options: Options, *, decode: bool = True, box: Box = ()) -> AnyArray:
    """Read an array of the topology, which must be there: all of it, or a box of its first dims."""
    layout = source.arrays[name]
    if math.prod(layout.num_chunks) > _MAX_CHUNKS:
        raise UnsupportedFormatError(
            f"{layout.store}: field {name!r} of shape {layout.shape} has {math.prod(layout.num_chunks)} chunks, but of "
            f"a topology at most {_MAX_CHUNKS} are read; its metadata are damaged, or write it with larger chunks"
        )
    if decode:
        layout = without_default_fill(source, layout)
    reader = ArrayReader(source=source, layout=layout, decode=decode, allow_missing=options.allow_missing)
    return reader((*box, *[slice(None)] * (len(layout.shape) - len(box))))


def field_of(
    source: Source, layout: ArrayLayout, entity: str, entity_dim: int, options: Options, *, name: str | None = None
) -> RawField:
    """Describe an array of a source as a field."""
    reader = ArrayReader(source=source, layout=layout, allow_missing=options.allow_missing)
    return RawField(
        name=name or layout.name,
        entity=entity,
        dims=layout.dims,
        shape=layout.shape,
        entity_dim=entity_dim,
        dtype=reader.dtype,
        reader=reader,
        attributes=layout.attributes,
    )


_GROUP = "graph/"
_MAX_BYTES = 64 << 10  # of all of them: they lie in the manifest of a store


def is_graph_value(name: str) -> bool:
    """Whether an array of the layouts of our own, by its name, belongs to the whole."""
    return name.startswith(_GROUP)


def find_graph_values(source: Source, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the values without their group, and why others are left out."""
    left_out: dict[str, str] = {}
    found, room = [], _MAX_BYTES
    for path, layout in source.arrays.items():
        name = path.removeprefix(_GROUP)
        if not is_graph_value(path) or (wanted is not None and name not in wanted):
            continue
        if layout.nbytes > room:
            left_out[path] = f"takes {layout.nbytes} bytes; values of the whole take {_MAX_BYTES} at most, together"
        else:
            found.append(name)
            room -= layout.nbytes
    return tuple(found), left_out


def read_graph_values(source: Source, names: Sequence[str], options: Options) -> dict[str, object]:
    """Read values: arrays, or values of JSON."""
    found: dict[str, object] = {}
    for name in names:
        values = read_values(source, f"{_GROUP}{name}", options)
        is_json = source.arrays[f"{_GROUP}{name}"].attributes.get("json")
        found[name] = json.loads(values.tobytes()) if is_json else values
    return found

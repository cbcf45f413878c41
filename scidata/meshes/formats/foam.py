"""OpenFOAM's cases: the cells of a polyMesh joined across its faces, and fields of cells by time, raw or decomposed.

A case is its folder, or a file ``*.foam`` in it: its fields have a dimension ``time``. The folder of one time
(``case/500``) is a sample of that time alone. Rows are cells in OpenFOAM's order, at OpenFOAM's centres; edges are
owner and neighbour, both ways. Where a case has no mesh but folders ``processorN``, their cells are put together,
in the order of ``cellProcAddressing`` where all have it, else processor by processor.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, FloatArray, IntArray
from scidata.core.urls import absolute
from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, UnsupportedFormatError, near_matches
from scidata.meshes.formats import foam_files
from scidata.meshes.formats.base import Options, RawTopology, field_of
from scidata.meshes.formats.foam_files import AGAIN, COMPONENTS, FoamFile, FoamPart, dimensions_of, existing
from scidata.meshes.formats.mesh_data import MeshData, of_faces
from scidata.meshes.geometry import Geometry
from scidata.meshes.order.ids import distinct
from scidata.meshes.order.polyhedra import CellFaces
from scidata.sources.file_source import WholeFileSource, layout_in_memory

#: Suffixes of the empty files by which ParaView opens a case.
SUFFIXES = (".foam", ".openfoam")
_TIME = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")
_MESH = "points", "faces", "owner", "neighbour", "boundary"
#: Types of patches that the conditions of all fields on them are of.
_CONSTRAINTS = (
    *("cyclic", "cyclicAMI", "cyclicACMI", "empty", "processor", "processorCyclic", "symmetry", "symmetryPlane"),
    *("wedge", "nonConformalCyclic", "internal"),
)


def is_case(path: str) -> bool:
    """Whether a path is a case, its ``.foam`` file, or the folder of one of its times."""
    return path.lower().endswith(SUFFIXES) or (os.path.isdir(path) and _split(path) is not None)


def _split(path: str) -> tuple[str, str | None] | None:
    """Return a case and the time that is named in it; None if the path is none."""
    path = absolute(path)
    if path.lower().endswith(SUFFIXES):
        path = os.path.dirname(path)
    elif _TIME.fullmatch(os.path.basename(path)) and _has_mesh(os.path.dirname(path)):
        return os.path.dirname(path), os.path.basename(path)
    return (path, None) if _has_mesh(path) else None


def _has_mesh(case: str) -> bool:
    return bool(_regions(case)) or os.path.isdir(os.path.join(case, "processor0", "constant"))


def _regions(case: str) -> dict[str, str]:
    """Return the folder of the mesh of each region of a case, which is ``""`` where there is but one."""
    constant = os.path.join(case, "constant")
    names = ["", *sorted(os.listdir(constant))] if os.path.isdir(constant) else []
    meshes = {name: os.path.join(constant, name, "polyMesh") for name in names}
    return {name: mesh for name, mesh in meshes.items() if existing(os.path.join(mesh, "owner"))}


def _times(case: str) -> list[str]:
    return sorted(
        (n for n in os.listdir(case) if _TIME.fullmatch(n) and os.path.isdir(os.path.join(case, n))), key=float
    )


def files_of(path: str) -> Iterator[str]:
    """Yield the files that a case is read from: those of its mesh, and of its times."""
    source = FoamSource(path)
    for part in source.parts:
        yield from filter(None, (existing(os.path.join(part.mesh, name)) for name in (*_MESH, "cellProcAddressing")))
        for time in source.times:
            folder = os.path.join(part.case, time, source.region)
            yield from (file.path for file in os.scandir(folder) if file.is_file())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cells:
    """The cells of all parts: centres, volumes, edges, and the rows of the case that each part's cells are."""

    centres: FloatArray
    volumes: FloatArray
    edges: IntArray
    rows: tuple[IntArray | slice, ...]


class FoamSource(WholeFileSource[_Cells]):
    """A case as a source: its arrays are ``cell/<field>``, ``cell/volume`` and, of all times, ``graph/time``.

    ``path``: as in :func:`is_case`; ``region``: which of several meshes.
    """

    format = "openfoam"

    def __init__(self, path: str, region: str | None = None) -> None:
        super().__init__(path)
        found = _split(path)
        if found is None:
            raise UnsupportedFormatError(
                f"{path}: no case of OpenFOAM: it has neither constant/polyMesh nor processor0"
            )
        self.case, time = found
        regions = _regions(self.case)
        if region is None and regions and "" not in regions and len(regions) > 1:
            raise UnsupportedFormatError(
                f"{path}: has the regions {', '.join(regions)}, each a mesh; name one with topology= (--topology)"
            )
        if region is not None and region not in regions:
            raise ConfigError(f"{path}: no region {region!r}{near_matches(region, regions)}")
        self.region = region if region is not None else "" if "" in regions or not regions else next(iter(regions))
        self.parts = self._find_parts(regions)
        self.has_time = time is None
        first = self.parts[0].case
        self.times = [time] if time is not None else _times(first)
        self._num_cells = [part.sizes()[0] for part in self.parts]
        self.skipped, self._unread = dict[str, str](), dict[str, str]()
        self._fields = self._find_fields()

    def _find_parts(self, regions: Mapping[str, str]) -> list[FoamPart]:
        case = self.case
        names = [name for name in os.listdir(case) if re.fullmatch(r"processor\d+", name)]
        own = self.region in regions
        if own and (
            not names or len(_times(case)) > 1 or not os.path.isdir(os.path.join(case, "processor0", "constant"))
        ):
            return [FoamPart(case=case, mesh=regions[self.region])]
        folders = [os.path.join(case, f"processor{number}") for number in range(len(names))]
        meshes = [os.path.join(folder, "constant", self.region, "polyMesh") for folder in folders]
        missing = [mesh for mesh in meshes if not existing(os.path.join(mesh, "owner"))]
        if missing or not meshes:
            raise CorruptDataError(
                f"{case}: {missing[0] if missing else 'processor0'} has no mesh; put the case together with "
                "reconstructParMesh and reconstructPar, or copy all of its processors"
            )
        return [FoamPart(case=folder, mesh=mesh) for folder, mesh in zip(folders, meshes, strict=True)]

    def _find_fields(self) -> dict[str, tuple[ArrayLayout, FoamFile]]:
        """Return each field that all the times have, and these times; drops the initial time where it lacks values."""
        found: dict[str, dict[str, FoamFile]] = {}
        for time in self.times:
            folder = os.path.join(self.parts[0].case, time, self.region)
            if existing(os.path.join(folder, "polyMesh", "points")):
                raise UnsupportedFormatError(
                    f"{folder}: has a mesh of its own: meshes that move or change are not read; make each time a case "
                    "of its own, with that mesh in constant/polyMesh"
                )
            for entry in sorted(os.scandir(folder), key=lambda file: file.name):
                name = entry.name.removesuffix(".gz")
                if entry.is_file() and not name.endswith(("~", ".orig")) and not name.startswith("."):
                    self._note(time, name, os.path.join(folder, name), found)
        for name in found.keys() & self._unread:
            raise CorruptDataError(f"{self._unread[name]}: has no header as it has at other times; {AGAIN}")
        first = self.times[0] if self.times else ""
        latest = {name for name, files in found.items() if self.times and self.times[-1] in files}
        if self.has_time and len(self.times) > 1 and float(first) == 0 and not all(first in found[n] for n in latest):
            self.times = self.times[1:]
            found = {name: {t: f for t, f in files.items() if t != first} for name, files in found.items()}
        fields = {}
        for name, files in found.items():
            kinds = {file.kind for file in files.values()}
            if files and len(files) == len(self.times) and len(kinds) == 1:
                fields[name] = next(iter(files.values()))
                self.skipped.pop(name, None)
            elif files:
                lacking = next((time for time in self.times if time not in files), None)
                self.skipped[name] = (
                    f"is of several classes ({', '.join(sorted(kinds))})" if lacking is None else
                    f"has no values at time {lacking} of {len(self.times)}; a time's folder is a sample, too: "
                    f"{os.path.join(self.case, next(iter(files)))}"
                )  # fmt: skip
        return {name: self._layout(name, file) for name, file in fields.items()}

    def _note(self, time: str, name: str, path: str, found: dict[str, dict[str, FoamFile]]) -> None:
        """Look at a file of a time; keep it as a field of cells, or say why it is none."""
        try:
            file = FoamFile.read(path, head=True)
        except CorruptDataError:
            file = None
        if file is None or not file.kind:
            self._unread[name] = path
            return  # something else that lies there, or damaged
        reason = "lives on points" if file.kind.startswith("point") else "lives on faces"
        if file.kind in COMPONENTS:
            if (unread := file.why_not()) is None:
                found.setdefault(name, {})[time] = file
                return
            reason = f"at time {time} {unread}"
        elif not file.kind.endswith("Field") or file.kind.endswith("Field::Internal"):
            return
        self.skipped.setdefault(name, reason)

    def _layout(self, name: str, file: FoamFile) -> tuple[ArrayLayout, FoamFile]:
        components = COMPONENTS[file.kind]
        shape = (self.num_cells,) if components == 1 else (self.num_cells, components)
        dims = ("cell", "dim_1")[: len(shape)]
        if self.has_time:
            shape, dims = (len(self.times), *shape), ("time", *dims)
        dtype = file.dtypes("scalar")[0].newbyteorder("=") if file.is_binary else np.dtype(np.float64)
        empty = np.broadcast_to(np.zeros((), dtype), shape)
        return layout_in_memory(self.path, f"cell/{name}", empty, dims, {"units": file.units}), file

    @property
    def num_cells(self) -> int:
        """Cells of all parts."""
        return sum(self._num_cells)

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Fields of cells, their volumes, and the times."""
        arrays = {layout.name: layout for layout, _ in self._fields.values()}
        volume = np.broadcast_to(np.zeros(()), (self.num_cells,))
        if "cell/volume" not in arrays:
            arrays["cell/volume"] = layout_in_memory(self.path, "cell/volume", volume, ("cell",), {"units": "m3"})
        if self.has_time:
            arrays["graph/time"] = layout_in_memory(
                self.path, "graph/time", np.array(list(map(float, self.times))), ("time",), {"units": "s"}
            )
        return arrays

    def _values(self) -> Mapping[str, AnyArray]:
        raise NotImplementedError  # read_box reads them

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read a box of the times' files, each as a whole."""
        if layout.name == "graph/time":
            out[...] = np.array(list(map(float, self.times)))[box]
            return
        name = layout.name.removeprefix("cell/")
        if name not in self._fields:
            out[...] = self._read().volumes[box]
            return
        times = self.times[box[0]] if self.has_time else self.times
        for values, time in zip(out if self.has_time else out[None], times, strict=True):
            values[...] = self._field(name, time)[box[1:] if self.has_time else box]

    def _field(self, name: str, time: str) -> AnyArray:
        rows = self._read().rows if len(self.parts) > 1 else (slice(None),)
        whole: AnyArray | None = None
        for part, num, own in zip(self.parts, self._num_cells, rows, strict=True):
            values = FoamFile.read(os.path.join(part.case, time, self.region, name)).field(num)
            if len(self.parts) == 1:
                return values
            if whole is None:
                whole = np.empty((self.num_cells, *values.shape[1:]), values.dtype)
            whole[own] = values
        assert whole is not None
        return whole

    @property
    def geometry(self) -> Geometry:
        """The cells' centres, and the edges between them."""
        cells = self._read()
        return Geometry(points=cells.centres, edge_index=cells.edges)

    def mesh(self) -> MeshData:
        """Return the points of all parts, those that several have once, and the cells by their faces."""
        points, found = list[FloatArray](), list[CellFaces]()
        for part, num, own in zip(self.parts, self._num_cells, self._rows(), strict=True):
            sizes, nodes, cell = part.faces(num).of_cells()
            found.append((sizes, nodes + sum(map(len, points)), np.arange(self.num_cells)[own][cell]))
            points.append(part.points)
        return of_faces(self.case, points, found, self.num_cells, foam_files.point_numbers(self.parts))

    def _parse(self) -> _Cells:
        rows = self._rows()
        centres, volumes = np.empty((self.num_cells, 3)), np.empty(self.num_cells)
        pairs, halves = [np.empty((2, 0), np.int64)], dict[tuple[int, int, int], IntArray]()
        for number, (part, num, own) in enumerate(zip(self.parts, self._num_cells, rows, strict=True)):
            faces = part.faces(num)
            centres[own], volumes[own] = faces.centres_and_volumes(part.points, num, where=part.case)
            ids = own if isinstance(own, np.ndarray) else np.arange(num)
            pairs.append(ids[faces.edges(num)])
            for patch, place, owners in foam_files.of_processors(part, faces, number) if len(self.parts) > 1 else ():
                halves[(*patch, place)] = ids[owners]
        for (one, other, place), cells in halves.items():
            there = halves.get((other, one, place))
            if there is None or len(there) != len(cells):
                raise CorruptDataError(
                    f"{self.case}: processor{one} has {len(cells)} faces beside processor{other}, which has "
                    f"{0 if there is None else len(there)}; {AGAIN}"
                )
            pairs.append(np.stack([there, cells]))
        edges = np.concatenate(pairs, axis=1) if len(pairs) > 2 else pairs[-1]
        if len(self.parts) > 1:  # two processors may share two faces of a pair of cells
            edges = np.stack(np.divmod(distinct(edges[1] * self.num_cells + edges[0]), self.num_cells))[::-1]
        return _Cells(centres=centres, volumes=volumes, edges=edges, rows=tuple(rows))

    def _rows(self) -> list[IntArray | slice]:
        """Return the rows of each part's cells in the whole."""
        names = [os.path.join(part.mesh, "cellProcAddressing") for part in self.parts]
        if len(self.parts) == 1:
            return [slice(None)]
        bounds = np.cumsum([0, *self._num_cells]).tolist()
        if not all(map(existing, names)):
            return [np.arange(begin, end) for begin, end in itertools.pairwise(bounds)]
        rows = [FoamFile.read(name).labels()[0] for name in names]
        if [len(own) for own in rows] != self._num_cells or not np.array_equal(
            np.sort(np.concatenate(rows)), np.arange(self.num_cells)
        ):
            raise CorruptDataError(
                f"{self.case}: cellProcAddressing of the processors does not number all {self.num_cells} cells once; "
                f"{AGAIN}"
            )
        return list(rows)

    def like(self, name: str) -> str | None:
        """Return the field whose format one of that name gets: its own, if there is such, else the first."""
        return name if name in self._fields else next(iter(self._fields), None)

    def write_field(
        self, time: str, name: str, values: AnyArray, *, like: str | None, into: str = "", units: str = ""
    ) -> None:
        """Write a field as :func:`write_field`; ``into``: another folder, and the field's dimensions are ``units``."""
        if values.shape[:1] != (self.num_cells,):
            raise FieldMismatchError(
                f"{self.case}: {name!r} has shape {values.shape}, but there are {self.num_cells} cells"
            )
        for part, own in zip(self.parts, self._rows(), strict=True):
            folder = os.path.join(part.case, time, self.region)
            file = FoamFile.read(os.path.join(folder, like), head=True) if like else part.file("owner")
            folder = os.path.join(into or self.case, os.path.relpath(folder, self.case))
            os.makedirs(folder, exist_ok=True)
            powers = re.search(rb"^[ \t]*dimensions\s+\[([^\]]*)\]", file.data, re.MULTILINE)
            types = {patch: entries.get("type", "patch") for patch, entries in part.patches().items()}
            conditions = {p: kind if kind in _CONSTRAINTS else "zeroGradient" for p, kind in types.items()}
            said = powers[1].decode().strip() if powers and not into else dimensions_of(units)
            foam_files.write_field(folder, name, values[own], like=file, patches=conditions, dimensions=said)


@dataclass(frozen=True, kw_only=True)
class FoamTopology(RawTopology):
    """The cells of a case."""

    def load(self) -> Geometry:
        """Read the mesh; return cells' centres and the edges between them."""
        assert isinstance(self.source, FoamSource)
        corners = self.source.mesh().corners() if self.options.edges == "nodes" else None
        return replace(self.source.geometry, corners=corners)


def open_topology(path: str, options: Options, kind: str | None = None) -> FoamTopology:
    """Describe a case; its fields' files are looked at, and its mesh is not read where ``owner`` says its size.

    Raises UnsupportedFormatError: a mesh that moves or changes; several regions, of which none is named.
    Raises CorruptDataError: a file is missing, cut off, or contradicts another.
    Raises FieldMismatchError: it is not of the kind that is asked for.
    """
    if kind not in (None, "mesh"):
        raise FieldMismatchError(
            f"{path}: a case of OpenFOAM is a mesh, whose rows are cells, not {kind!r}; leave out kind="
        )
    if options.points is not None:
        raise ConfigError(
            f"{path}: OpenFOAM's format says where the cells are, so points= has no meaning; leave it out"
        )
    source = FoamSource(path, options.topology)
    names = [name for name in source.arrays if name.startswith("cell/")]
    return FoamTopology(
        source=source,
        options=replace(options, topology=None),
        sizes={"cell": source.num_cells},
        fields={
            name: field_of(source, source.arrays[name], "cell", int(name != "cell/volume" and source.has_time), options)
            for name in names
        },
        left_out=source.skipped,
        leading_only=True,
        cells_are_rows=True,
    )


def write_field(
    case: str, time: str, name: str, values: AnyArray, *, like: str | None = None, region: str | None = None
) -> None:
    """Write a field of cells into a case, whole or not at all, as ascii or binary and packed or not as ``like`` is.

    ``case``: its folder, or its ``.foam`` file; decomposed ones get each processor's part.
    ``time``: such as ``"500"``; its folder is made if it is not there.
    ``values``: ``(num_cells,)``, or ``(num_cells, 3)`` (vectors), 6 (symmetric tensors) or 9, in the case's order.
    ``like``: a field of that time, whose dimensions it gets, too; by default it is without, and in the format of the
    mesh.
    """
    FoamSource(case, region).write_field(time, name, np.asarray(values), like=like)

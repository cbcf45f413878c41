"""Files of one sample: a copy of the source's file with more arrays, or a new file of its points, cells and arrays.

A format is a function that writes one file, by name in :data:`ONTO` (by the source's suffix) or :data:`NEW`. Of a case
of OpenFOAM it writes a folder: a case of one time, with links to all that is the source's.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from xml.etree import ElementTree

import h5py
import numpy as np

from scidata.core.own_files import sync
from scidata.core.types import AnyArray, Array, FloatArray, IntArray
from scidata.data.output.fields import OutputField
from scidata.data.output.flat_output import attributes_held
from scidata.data.output.vtkhdf_output import GROUPS, ROOT, in_space, write_mesh
from scidata.errors import ConfigError, RefusedError, UnsupportedFormatError
from scidata.meshes.formats.base import base_name
from scidata.meshes.formats.cgns_write import add_to_cgns
from scidata.meshes.formats.fluent import add_results, is_results
from scidata.meshes.formats.foam import FoamSource, is_case
from scidata.meshes.formats.meshio import read_polyhedra
from scidata.meshes.formats.vtk_write import add_to_vtk, write_index, write_vtk
from scidata.meshes.formats.xdmf_write import write_xdmf
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.polyhedra import CellFaces
from scidata.meshes.samples import read_samples
from scidata.sources.collections import PARALLEL, is_step, parts_of
from scidata.sources.groups import split_group
from scidata.sources.kinds import MESHES_IN_HDF5
from scidata.store.format.durable import remove, rename_over


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """The file that holds the points and cells of a sample.

    ``reading``: arguments of :func:`read_samples` for it; ``step``: which of its samples it is; ``others``: the files
    beside it that the sample was made of.
    """

    path: str
    reading: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    others: Sequence[str] = ()

    def geometry(self) -> tuple[FloatArray, RawCells | None, Sequence[CellFaces]]:
        """Read points, ``(num_points, 3)``, cells, and the faces of polyhedra, in the file's order."""
        if (mesh := read_polyhedra(self.path, self.reading.get("topology"))) is not None:
            return in_space(mesh.points, on_sphere=False), mesh.cells, mesh.faces
        topology = read_samples(self.path, **self.reading).header(0).topology  # type: ignore[union-attr]
        found = topology.load()
        if found.points is None:
            raise ConfigError(f"{self.path}: has no positions, and a mesh of it cannot be written")
        return in_space(found.points, on_sphere=topology.on_sphere), found.cells, ()


@dataclass(frozen=True, kw_only=True, eq=False)
class NewArray:
    """A field of a sample in the source's order, as stored, with the sample's dims."""

    field: OutputField
    values: Array

    @property
    def name(self) -> str:
        """The field's name without its entity."""
        return base_name(self.field.name)

    @property
    def rows(self) -> AnyArray:
        """Values ``(num_rows,)`` or ``(num_rows, num_components)``."""
        first = np.moveaxis(self.values, self.field.entity_dim, 0)
        return first if first.ndim == 1 else first.reshape(len(first), math.prod(first.shape[1:]))

    def values_at(self, rows: IntArray | slice) -> AnyArray:
        """Return the values of some rows; row -1 has the missing value."""
        if isinstance(rows, slice):
            return self.values
        values = self.values.take(rows, self.field.entity_dim)
        values[(slice(None),) * self.field.entity_dim + (rows < 0,)] = self.field.packing.missing
        return values


#: What the names of files begin with that are being written, and how the folder of a mesh's files ends then.
TEMPORARY, PIECES = ".tmp-", ".pieces"
#: Writes a file: source, path to write, arrays, whether they are compressed.
WriteFile: TypeAlias = Callable[[SourceFile, str, Sequence[NewArray], bool], None]


def _split(arrays: Sequence[NewArray]) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
    """Separate the arrays of points from those of cells."""
    found = {
        group: {each.name: each.rows for each in arrays if GROUPS[each.field.entity] == group}
        for group in ("PointData", "CellData")
    }
    return found["PointData"], found["CellData"]


def _onto_vtk(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    with open(source.path, "rb") as file:
        add_to_vtk(source.path, file.read(), target, *_split(arrays))


def _onto_pieces(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    mesh, parts, files = read_polyhedra(source.path), parts_of(source.path), dict[str, ElementTree.Element]()
    if mesh is None or mesh.cells is None:
        raise UnsupportedFormatError(f"{source.path}: has points alone in several files; give create(format='vtp')")
    folder = os.path.splitext(os.path.basename(target).removeprefix(TEMPORARY))[0]
    os.makedirs(target + PIECES)
    for number, path in enumerate(parts):
        name = f"{number}_{os.path.basename(path)}"
        rows = {group: mesh.rows[group][number] if mesh.rows else slice(None) for group in ("PointData", "CellData")}
        own = [replace(each, values=each.values_at(rows[GROUPS[each.field.entity]])) for each in arrays]
        with open(path, "rb") as file:
            files[f"{folder}/{name}"] = add_to_vtk(path, file.read(), f"{target}{PIECES}/{name}", *_split(own))
    write_index(target, files)


def _onto_hdf5(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    with h5py.File(source.path, "r") as file:
        is_vtk, moves = ROOT in file, f"{ROOT}/Steps" in file
        has_strips = len(file.get(f"{ROOT}/Strips/Connectivity", ())) > 0
    if has_strips and not moves and _split(arrays)[1]:
        raise UnsupportedFormatError(
            f"{source.path}: has triangle strips, whose triangles are the cells that were read; give "
            "create(format='vtkhdf')"
        )
    if moves:  # old arrays have all steps, and this file is one of them
        _new_vtkhdf(source, target, arrays, is_packed)
        return
    shutil.copyfile(source.path, target)
    with h5py.File(target, "r+") as file:
        for each in arrays:
            entity, base = each.field.entity, each.name
            known = [f"{ROOT}/{GROUPS[entity]}/{base}"] if is_vtk else [each.field.name, f"{entity}s/{base}"]
            place = next((path for path in known if path in file), known[0] if is_vtk else f"{entity}/{base}")
            _replace(file, place, each.rows if is_vtk else each.values, is_packed=is_packed)
            said = {} if is_vtk else {**each.field.attributes, **each.field.packing.attributes()}
            file[place].attrs.update(attributes_held(said))


def _replace(file: h5py.File, path: str, values: AnyArray, *, is_packed: bool) -> None:
    """Write an array in place of an equally named one, but not through a link to another file."""
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        if isinstance(file.get("/".join(parts[:end]), getlink=True), h5py.ExternalLink | h5py.SoftLink):
            raise RefusedError(f"{file.filename}: {'/'.join(parts[:end])!r} is a link, and is not written through")
    if path in file:
        del file[path]
    how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if is_packed and values.size else {}
    file.create_dataset(path, data=values, **how)


def _new_vtk(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool, *, kind: str) -> None:
    points, cells, faces = source.geometry()
    write_vtk(target, kind, points, cells, *_split(arrays), is_packed=is_packed, faces=faces)


def _new_vtkhdf(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    points, cells, faces = source.geometry()
    with h5py.File(target, "w") as file:
        write_mesh(file.create_group(ROOT), points, cells, faces)
        for each in arrays:
            _replace(file, f"{ROOT}/{GROUPS[each.field.entity]}/{each.name}", each.rows, is_packed=is_packed)


def _new_xdmf(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    points, cells, faces = source.geometry()
    if faces:
        raise UnsupportedFormatError(f"{source.path}: has polyhedra, which XDMF has not here; write format='vtu'")
    cells = RawCells.of_kind(np.arange(len(points))[:, None], 1) if cells is None else cells
    groups = dict(zip(("Node", "Cell"), _split(arrays), strict=True))
    name = os.path.splitext(os.path.basename(target).removeprefix(TEMPORARY))[0] + ".h5"
    write_xdmf(target, target + ".h5", name, points, cells, groups, is_packed=is_packed)


def _onto_cgns(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    shutil.copyfile(source.path, target)
    add_to_cgns(source.path, target, *_split(arrays))


def _onto_fluent(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    results = [path for path in source.others if is_results(path)]
    if results:
        shutil.copyfile(results[source.step if len(results) > 1 else 0], target)
    of_points, of_cells = _split(arrays)
    if of_points:
        raise ConfigError(
            f"{source.path}: Fluent's results have fields of cells, not of points: {', '.join(of_points)}"
        )
    add_results(target, of_cells)
    folder, name = os.path.split(target)
    _fill(source.path, os.path.join(folder, name.removeprefix(TEMPORARY).removesuffix(".dat.h5") + ".cas.h5"))


def _onto_case(source: SourceFile, target: str, arrays: Sequence[NewArray], is_packed: bool) -> None:
    case = FoamSource(source.path, source.reading.get("topology"))
    time = case.times[source.step]
    for each in arrays:
        units = str(each.field.attributes.get("units", ""))
        case.write_field(time, each.name, each.rows, like=case.like(each.name), into=target, units=units)
    parts = {part.case for part in case.parts}
    for folder in {case.case, *parts}:
        own = os.path.join(target, os.path.relpath(folder, case.case))
        for name in ("constant", "system", *([time] if folder in parts else [])):
            _fill(os.path.join(folder, name), os.path.join(own, name))
    with open(os.path.join(target, f"{os.path.basename(case.case)}.foam"), "wb"):
        pass  # ParaView opens the case by it


def _fill(source: str, target: str) -> None:
    """Link to a file or folder, relative to the link's folder; if the folder exists, link to each missing entry."""
    if os.path.isdir(target):
        there = {name.removesuffix(".gz") for name in os.listdir(target)}
        for name in os.listdir(source):
            if name.removesuffix(".gz") not in there or os.path.isdir(os.path.join(target, name)):
                _fill(os.path.join(source, name), os.path.join(target, name))
    elif os.path.exists(source):
        try:
            os.symlink(os.path.relpath(os.path.realpath(source), os.path.realpath(os.path.dirname(target))), target)
        except (OSError, NotImplementedError):  # a file system without links
            (shutil.copytree if os.path.isdir(source) else shutil.copyfile)(source, target)


def settle(made: str, place: str) -> None:
    """Give a file, or the time of a case, its final name once it is on disk; keep a case's other times.

    A time's folder comes after all else, and that of ``processor0``, by which readers list times, after the others.
    """
    if not os.path.isdir(made):
        if os.path.isdir(pieces := made + PIECES):
            for name in os.listdir(pieces):
                sync(os.path.join(pieces, name))
            rename_over(pieces, os.path.splitext(place)[0])
        if os.path.exists(beside := made + ".h5"):  # XDMF's arrays
            sync(beside)
            os.replace(beside, os.path.splitext(place)[0] + ".h5")
        sync(made)
        os.replace(made, place)
        return
    os.makedirs(place, exist_ok=True)
    for name in sorted(os.listdir(made), reverse=True):  # digits sort before letters
        old, new = os.path.join(made, name), os.path.join(place, name)
        if name.startswith("processor"):
            settle(old, new)
        elif name[0].isdigit():
            for root, _, files in os.walk(old):
                for path in (os.path.join(root, each) for each in files):
                    if not os.path.islink(path):
                        sync(path)
            remove(new)  # of a run that was killed before it recorded its end
            os.rename(old, new)
        elif not os.path.lexists(new):
            try:
                os.rename(old, new)
            except OSError:  # another rank's copy was faster
                if not os.path.lexists(new):
                    raise
    remove(made)


#: Formats of new files, by name, with their suffix.
NEW: Mapping[str, tuple[str, WriteFile]] = {
    "vtp": (".vtp", partial(_new_vtk, kind="PolyData")),
    "vtu": (".vtu", partial(_new_vtk, kind="UnstructuredGrid")),
    "vtkhdf": (".vtkhdf", _new_vtkhdf),
    "xdmf": (".xdmf", _new_xdmf),
}
#: Formats of sources that arrays are added to, by suffix.
ONTO: Mapping[str, WriteFile] = {
    ".vtp": _onto_vtk, ".vtu": _onto_vtk, **dict.fromkeys((".vtkhdf", ".h5", ".hdf5", ".hdf", ".he5"), _onto_hdf5),
    ".cgns": _onto_cgns,
}  # fmt: skip


def format_of(path: str, chosen: str | None) -> tuple[str, WriteFile]:
    """Return the suffix of a sample's file, and its writer; raise for formats to which nothing is added."""
    if chosen is not None:
        return NEW[chosen]
    if is_case(path):
        return "", _onto_case
    suffix = os.path.splitext(path)[1]
    if is_step(path) or suffix.lower() in PARALLEL:
        return f".p{suffix[-3:].lower()}", _onto_pieces
    if path.lower().endswith((".cas.h5", ".msh.h5")):
        return ".dat.h5", _onto_fluent
    is_other = path.lower().endswith(tuple(MESHES_IN_HDF5)) and suffix.lower() != ".cgns"
    if suffix.lower() not in ONTO or is_other or split_group(path) is not None:
        raise ConfigError(
            f"{path}: fields are added to files of {', '.join(ONTO)}, Fluent's and OpenFOAM's cases alone; "
            f"write new ones of its mesh with create(format=...): {', '.join(map(repr, NEW))}"
        )
    return suffix, ONTO[suffix.lower()]

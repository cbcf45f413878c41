"""Fluent's HDF5 (Common Fluid Format): the mesh of ``.cas.h5`` and ``.msh.h5``, the cells' fields of ``.dat.h5``.

Arrays lie in sections, each of the ids from ``minId`` to ``maxId``. Cells are known by their faces: in two dimensions a
cell is the polygon of its edges. In three, cells have their corners if all are tetrahedra, pyramids, wedges or
hexahedra; else each is a row at its centre, joined to others across faces. Fields have the solver's names, as
``SV_P``; those of phases beside the first, or the mixture, the phase's before them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import h5py
import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.meshes.formats.arrays import as_indices, polygon_types
from scidata.meshes.formats.base import damage_named
from scidata.meshes.formats.mesh_data import MeshData, of_faces
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.polyhedra import Faces
from scidata.sources.hdf5.walk import damage_as_corrupt_data, open_h5

_RESULTS = ".dat.h5"
#: Groups of cells or faces that stand for others: those of refined, overlapping and non-conformal meshes.
_HIDDEN = ("tree", "overset", "interface", "nci")
_AGAIN = "copy or write it again"


def is_results(path: str) -> bool:
    """Whether a file has fields alone, of the mesh of another."""
    return path.lower().endswith(_RESULTS)


def results_of(path: str) -> str | None:
    """Return the file of results that lies beside a case, by its name, as Fluent takes them for a pair."""
    beside = path[: -len(_RESULTS)] + _RESULTS
    return beside if path.lower().endswith(".cas.h5") and os.path.isfile(beside) else None


def read_fluent(path: str, *, as_rows: bool = True) -> MeshData:
    """Return the mesh of a case, or the fields of results, which have no points.

    Raises UnsupportedFormatError: several meshes, surfaces without cells, refined, overlapping or non-conformal meshes.
    Raises CorruptDataError: parts are missing or do not fit together.
    """
    with damage_named(path), open_h5(path) as h5, damage_as_corrupt_data(f"{path}: its arrays"), damage_named(path):
        if is_results(path):
            fields, left_out = _fields(path, h5["results"])
            return MeshData(points=np.empty((0, 3)), cells=None, point_data={}, cell_data=fields, left_out=left_out)
        return _mesh(path, h5["meshes"], as_rows=as_rows)


def _mesh(path: str, meshes: h5py.Group, *, as_rows: bool) -> MeshData:
    mesh = next(iter(meshes.values()))
    num_nodes, num_faces, num_cells = (int(mesh.attrs[f"{name}Count"][0]) for name in ("node", "face", "cell"))
    groups = {*mesh.get("cells", ()), *mesh["faces"]}
    hidden = sorted(name for name in groups if any(word in name.lower() for word in _HIDDEN))
    if len(meshes) != 1 or not num_cells or hidden:
        why = f"cells or faces in {hidden[0]!r}" if hidden else f"{len(meshes)} meshes with {num_cells} cells"
        raise UnsupportedFormatError(
            f"{path}: has {why}; read is one mesh of cells that meet at whole faces: export it as CGNS or VTU"
        )
    points = _by_id(path, mesh["nodes/coords"], num_nodes)
    c0, c1 = (_by_id(path, mesh[f"faces/{side}"], num_faces, missing=0) for side in ("c0", "c1"))
    owner, neighbour = (as_indices(each, path) - 1 for each in (c0, c1))
    parts = sorted(mesh["faces/nodes"].values(), key=lambda each: int(each.attrs["minId"][0]))
    sizes, nodes = (
        as_indices(np.concatenate([np.ravel(part[name][()]) for part in parts]), f"{path}: faces/nodes")
        for name in ("nnodes", "nodes")
    )
    if len(sizes) != num_faces or (sizes < 0).any() or sizes.sum() != len(nodes):
        raise CorruptDataError(f"{path}: has nodes of {len(sizes)} faces, but {num_faces} faces; {_AGAIN}")
    faces = Faces(offsets=bounds_of(sizes), nodes=nodes - 1, owner=owner, neighbour=neighbour)
    if int(mesh.attrs["dimension"][0]) == 2:
        faces.checked(path, num_nodes, num_cells, least=2)
        return MeshData(points=points, cells=_polygons(path, faces, num_cells), point_data={}, cell_data={})
    faces.checked(path, num_nodes, num_cells)
    if (cells := faces.solids(num_cells)) is not None:
        return MeshData(points=points, cells=cells, point_data={}, cell_data={})
    if not as_rows:
        return of_faces(path, [points], [faces.of_cells()], num_cells)
    centres, volumes = faces.centres_and_volumes(points, num_cells, where=path)
    return MeshData(  # faces are turned towards the first of their cells
        points=centres, cells=None, point_data={}, cell_data={"volume": -volumes}, edge_index=faces.edges(num_cells)
    )


def _by_id(path: str, group: h5py.Group, num: int, missing: int | None = None) -> AnyArray:
    """Return the values of all ids from 1 to ``num``, of all sections; if there are none, ``missing``."""
    sections = [(int(each.attrs["minId"][0]), int(each.attrs["maxId"][0]), each[()]) for each in group.values()]
    have = np.zeros(num, bool)
    out = np.full((num, *sections[0][2].shape[1:]), missing or 0, sections[0][2].dtype)
    for first, last, values in sections:
        if len(values) != last - first + 1 or first < 1 or last > num or have[first - 1 : last].any():
            raise CorruptDataError(
                f"{path}: {group.name}: a section has {len(values)} values of ids {first} to {last} of {num}, or some "
                f"twice; {_AGAIN}"
            )
        out[first - 1 : last], have[first - 1 : last] = values, True
    if missing is None and not have.all():
        raise CorruptDataError(f"{path}: {group.name} has no values of {int((~have).sum())} of {num} ids; {_AGAIN}")
    return out


def _polygons(path: str, faces: Faces, num_cells: int) -> RawCells:
    """Return the cells whose edges are faces of two nodes, each begun where its first edge begins."""
    inner = np.flatnonzero(faces.neighbour >= 0)
    one, other = faces.nodes[faces.offsets[:-1]], faces.nodes[faces.offsets[1:] - 1]
    cell = np.concatenate([faces.owner, faces.neighbour[inner]])
    begin, end = np.concatenate([one, other[inner]]), np.concatenate([other, one[inner]])
    order = np.lexsort([begin, cell])
    cell, begin, end = cell[order], begin[order], end[order]
    num_nodes, sizes = int(faces.nodes.max(initial=0)) + 1, np.bincount(cell, minlength=num_cells)
    key = cell * num_nodes + begin
    after = np.minimum(np.searchsorted(key, cell * num_nodes + end), max(len(key) - 1, 0))
    offsets, at = bounds_of(sizes), np.arange(len(key))
    is_ring = bool((np.diff(faces.offsets) == 2).all() and sizes.min() > 2 and (np.diff(key) > 0).all())
    is_ring = is_ring and np.array_equal(key[after], cell * num_nodes + end)
    out, place = np.empty_like(at), offsets[:-1].copy()
    for number in range(int(sizes.max()) if is_ring else 0):
        rows = np.flatnonzero(sizes > number)
        out[offsets[rows] + number] = place[rows]
        place[rows] = after[place[rows]]
    if not is_ring or len(np.unique(out)) != len(out) or not np.array_equal(place, offsets[:-1]):
        raise CorruptDataError(f"{path}: the faces of a cell do not make one ring around it; {_AGAIN}")
    return RawCells(offsets=offsets, connectivity=begin[out], cell_type=polygon_types(offsets))


def _fields(path: str, results: h5py.Group) -> tuple[dict[str, AnyArray], dict[str, str]]:
    """Return the fields of cells, by name; and why others are not there."""
    found, left_out = dict[str, AnyArray](), dict[str, str]()
    run = next(each for name, each in results.items() if name.isdigit())
    for phase, group in run.items():
        before = "" if phase == "phase-1" else f"{phase}_"
        for name, field in group.get("cells", {}).items():
            if isinstance(field, h5py.Group):
                num = max((int(each.attrs["maxId"][0]) for each in field.values()), default=0)
                found[before + name] = _by_id(path, field, num)
        others = [name for name in group.get("faces", ()) if name != "fields" and before + name not in found]
        left_out |= {f"{before}{name}": "lives on faces" for name in others}
    return found, left_out


def add_results(path: str, fields: Mapping[str, AnyArray]) -> None:
    """Add fields of cells, ``(num_cells,)`` or ``(num_cells, num_components)``, to a file of results, or a new one.

    One of a name that is there takes its place; those of a phase are named as :func:`read_fluent` names them.
    """
    with h5py.File(path, "a") as h5:
        results = h5.require_group("results")
        run = results.require_group(next((name for name in results if name.isdigit()), "1"))
        for full, values in fields.items():
            phase, _, name = full.partition("_") if full.partition("_")[0] in run else ("phase-1", "", full)
            cells = run.require_group(f"{phase}/cells")
            known = cells["fields"][()] if "fields" in cells else [b""]
            names = [each for each in b";".join(np.ravel(known)).decode().split(";") if each]
            for gone in ({"fields"} & {*cells}) | ({name} & {*cells}):
                del cells[gone]
            cells["fields"] = np.array(["".join(f"{each};" for each in dict.fromkeys([*names, name])).encode()])
            field = cells.create_group(name)
            field.attrs["nSections"] = np.array([1], "u8")
            section = field.create_dataset("1", data=values)
            section.attrs.update(minId=np.array([1], "u8"), maxId=np.array([len(values)], "u8"))

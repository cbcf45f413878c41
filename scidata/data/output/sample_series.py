"""A file that lists samples' files as steps, so that ParaView and pyvista open all of them at once.

It is written when all of them are there: ``series.pvd`` of VTP and VTU, ``series.xmf`` of XDMF, or ``series.hdf`` of
VTKHDF, a file with the mesh of each step whose arrays lie in the samples' files (HDF5's virtual data sets). The times
are the samples' numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import h5py
import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.own_files import write_whole
from scidata.data.output.vtkhdf_output import ROOT

_MESH = ("Points", "Connectivity", "Offsets", "Types", "NumberOfPoints", "NumberOfCells", "NumberOfConnectivityIds")


def write_series(folder: str, names: Mapping[int, str]) -> None:
    """Write the list if there are several files; ``names``: the folder's files by sample number."""
    suffixes = {os.path.splitext(name)[1].lower() for name in names.values()}
    if len(names) < 2 or any(name.startswith("series.") for name in names.values()):
        return
    if suffixes <= {".vtp", ".vtu", ".pvtp", ".pvtu"}:
        lines = [f'<DataSet timestep="{index}" file={quoteattr(name)}/>\n' for index, name in names.items()]
        text = f'<VTKFile type="Collection" version="1.0">\n<Collection>\n{"".join(lines)}</Collection>\n</VTKFile>\n'
        write_whole(os.path.join(folder, "series.pvd"), text.encode())
    elif suffixes == {".xdmf"}:
        root = ElementTree.Element("Xdmf", Version="3.0")
        said = {"Name": "series", "GridType": "Collection", "CollectionType": "Temporal"}
        steps = ElementTree.SubElement(ElementTree.SubElement(root, "Domain"), "Grid", said)
        for index, name in names.items():
            grid = ElementTree.parse(os.path.join(folder, name)).getroot()[0][0]
            ElementTree.SubElement(grid, "Time", Value=str(index))
            steps.append(grid)
        write_whole(os.path.join(folder, "series.xmf"), ElementTree.tostring(root))
    elif suffixes == {".vtkhdf"}:
        _write_steps(folder, names)


def _write_steps(folder: str, names: Mapping[int, str]) -> None:
    counts, found = [], list[dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]]()
    for name in names.values():
        with h5py.File(os.path.join(folder, name), "r") as file:
            root = file[ROOT]
            if "Types" not in root or "Steps" in root or "FaceOffsets" in root:
                return  # of surfaces, a series itself, or polyhedra
            parts = [root[name][()] for name in _MESH[-3:]]
            counts.append([len(parts[0]), *(int(each.sum()) for each in parts)])
            arrays = {path: root[path] for path in _MESH}
            for group, num in (("PointData", counts[-1][1]), ("CellData", counts[-1][2])):
                of_group = {key: x for key, x in root.get(group, {}).items() if isinstance(x, h5py.Dataset)}
                arrays |= {
                    f"{group}/{k}": x for k, x in of_group.items() if x.shape[:1] == (num,) and x.dtype.kind in "iuf"
                }
            found.append({path: (x.shape, x.dtype) for path, x in arrays.items()})
            version, kind = root.attrs["Version"], root.attrs["Type"]
    common = [p for p in found[0] if len({x[p][0][1:] if p in x else None for x in found}) == 1]
    firsts = dict(zip(("Part", "Point", "Cell", "ConnectivityId"), map(bounds_of, np.transpose(counts)), strict=True))
    temporary = os.path.join(folder, ".tmp-series.hdf")
    with h5py.File(temporary, "w", libver=("v110", "v110")) as file:
        root = file.create_group(ROOT)
        root.attrs["Version"] = version
        root.attrs.create("Type", kind, dtype=h5py.string_dtype("ascii", 16))
        for path in common:
            rows = bounds_of([x[path][0][0] for x in found])
            dtype = np.result_type(*(x[path][1] for x in found))
            layout = h5py.VirtualLayout((int(rows[-1]), *found[0][path][0][1:]), dtype)
            for name, own, first, last in zip(names.values(), found, rows[:-1], rows[1:], strict=True):
                layout[first:last] = h5py.VirtualSource(name, f"{ROOT}/{path}", own[path][0], own[path][1])
            root.create_virtual_dataset(path, layout)
        steps = root.create_group("Steps")
        steps.attrs["NSteps"] = len(names)
        steps["Values"], steps["NumberOfParts"] = np.array(list(names), np.float64), np.array(counts)[:, 0]
        for key, each in firsts.items():
            steps[f"{key}Offsets"] = each[:-1, None] if key in ("Cell", "ConnectivityId") else each[:-1]
        for path in common:
            if "/" in path:
                steps[path.replace("Data/", "DataOffsets/", 1)] = firsts[path.partition("Data")[0]][:-1]
    os.replace(temporary, os.path.join(folder, "series.hdf"))

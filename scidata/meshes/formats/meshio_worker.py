"""Reads a mesh by meshio or VTK in a process of its own: ``python meshio_worker.py PATH FOLDER SECONDS PACKAGE``.

Imports nothing of scidata. The folder gets ``mesh``, a pickle of meshio's mesh, or ``mesh.vtp`` or ``mesh.vtu``, which
VTK writes; or ``error``, a text.
"""

import contextlib
import io
import itertools
import os
import pickle
import re
import resource
import sys
from typing import Any

import numpy as np

_END = "scidata-end"
_HEADS = b"scalars", b"vectors", b"normals", b"tensors", b"texture", b"color", b"lookup"
_MEMORY, _RATIO = 4 << 30, 100  # bytes beside a mesh, and for each byte of its file


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _by_meshio(path: str, folder: str) -> None:
    import meshio

    zones: list[bytes] = []
    if path.lower().endswith(".su2"):
        with open(path, "rb") as source:
            head, *zones = re.split(rb"(?m)^\s*IZONE\s*=.*$", source.read())
        said = re.search(rb"(?m)^\s*NZONE\s*=\s*(\d+)", head)
        if said and int(said[1]) != max(len(zones), 1):
            raise ValueError(f"has {len(zones)} of {int(said[1])} zones")
    for i, zone in enumerate(zones):  # of several meshio would mix up the points
        with open(os.path.join(folder, f"{i}.su2"), "wb") as file:
            file.write(zone)
    mesh = _joined([meshio.read(os.path.join(folder, f"{i}.su2")) for i in range(len(zones))] or [meshio.read(path)])
    with open(os.path.join(folder, "mesh"), "wb") as file:
        pickle.dump(mesh, file, protocol=5)


def _joined(meshes: list[Any]) -> Any:
    """Put zones into one mesh, whose cells say in ``zone`` which they are of; they share no points."""
    if len(meshes) == 1:
        return meshes[0]
    firsts = [0, *itertools.accumulate([len(each.points) for each in meshes])]
    blocks = [(block.type, block.data + firsts[i], i) for i, each in enumerate(meshes) for block in each.cells]
    data = {name: [x for each in meshes for x in each.cell_data[name]] for name in meshes[0].cell_data}
    data["zone"] = [np.full(len(cells), i) for _, cells, i in blocks]
    points = np.concatenate([each.points for each in meshes])
    return type(meshes[0])(points, [(kind, cells) for kind, cells, _ in blocks], cell_data=data)


def _by_vtk(path: str, folder: str) -> None:
    from vtkmodules import vtkCommonCore, vtkFiltersCore, vtkIOLegacy, vtkIOXML

    window = vtkCommonCore.vtkStringOutputWindow()  # readers inside the reader tell it alone of errors
    vtkCommonCore.vtkOutputWindow.SetInstance(window)

    def read(data: bytes) -> Any:
        reader: Any = vtkIOLegacy.vtkGenericDataObjectReader()
        reader.ReadFromInputStringOn()
        reader.SetBinaryInputString(data, len(data))
        for kind in ("Scalars", "Vectors", "Tensors", "Normals", "TCoords", "ColorScalars", "Fields"):
            getattr(reader, f"ReadAll{kind}On")()
        reader.Update()
        found = reader.GetOutputDataObject(0)
        if window.GetOutput() or found is None or not found.IsA("vtkDataSet"):
            raise ValueError(" ".join(window.GetOutput().split()) or "it has no mesh")
        return found

    with open(path, "rb") as file:
        data = file.read()
    found = read(data)
    if data.split(b"\n", 3)[2].strip().upper() == b"ASCII" and (num := found.GetNumberOfPoints()):
        # of text that is cut off VTK makes up the rest: then an array that is put behind it does not come back
        sections = re.findall(rb"(?im)^\s*(point|cell)_data\b", data)
        begin = "" if sections and sections[-1].lower() == b"point" else f"POINT_DATA {num}"
        end = f"\n\n{begin}\nSCALARS {_END} int\nLOOKUP_TABLE default\n" + "7 " * num
        found = read(data + end.encode())
        array = found.GetPointData().GetArray(_END)
        last = data.rstrip().rpartition(b"\n")[2].strip().lower()
        if array is None or array.GetRange() != (7.0, 7.0) or last.startswith(_HEADS):
            raise ValueError("it ends before all is there that it announces")
        found.GetPointData().RemoveArray(_END)
    writer = vtkIOXML.vtkXMLPolyDataWriter() if found.IsA("vtkPolyData") else vtkIOXML.vtkXMLUnstructuredGridWriter()
    if not found.IsA("vtkPolyData"):  # a structured grid becomes one of cells
        append = vtkFiltersCore.vtkAppendFilter()
        append.AddInputDataObject(found)
        append.Update()
        found = append.GetOutput()
    writer.SetFileName(os.path.join(folder, f"mesh.{writer.GetDefaultFileExtension()}"))
    writer.SetInputDataObject(found)
    writer.SetDataModeToAppended()
    writer.EncodeAppendedDataOff()
    writer.SetCompressorTypeToNone()
    writer.SetHeaderTypeToUInt64()
    writer.Write()


def main(path: str, folder: str, seconds: int, package: str) -> None:
    """Read one file, within so many seconds of processor time, and memory that its size explains."""
    _limit(resource.RLIMIT_CPU, seconds)
    most = _MEMORY + _RATIO * os.path.getsize(path)
    _limit(resource.RLIMIT_DATA, most)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            (_by_vtk if package == "vtk" else _by_meshio)(path, folder)
    except (Exception, SystemExit) as e:  # readers raise nearly anything, and some end the program
        why = " ".join(printed.getvalue().split()) if isinstance(e, SystemExit) else str(e)
        with open(os.path.join(folder, "error"), "w", encoding="utf-8", errors="backslashreplace") as text:
            text.write(why or type(e).__name__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

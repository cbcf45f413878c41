"""Writes cases and results as Fluent's HDF5 has them."""

from itertools import pairwise

import h5py
import numpy as np


def sections(group, values, cuts):
    """Put values into sections that begin at some rows, the last one first."""
    bounds = [*cuts, len(values)]
    for number, (first, last) in enumerate(pairwise(bounds)):
        dataset = group.create_dataset(str(len(cuts) - number), data=values[first:last])
        dataset.attrs.update(minId=np.array([first + 1], "u8"), maxId=np.array([last], "u8"))


def write_case(path, points, faces, owner, neighbour, num_cells, cuts=(0, 3)):
    """Faces: lists of nodes, turned towards the owner; those of the boundary, without a neighbour, come last."""
    num_inner = int((np.asarray(neighbour) >= 0).sum())
    with h5py.File(path, "w") as file:
        mesh = file.create_group("meshes/1")
        counts = {"nodeCount": len(points), "faceCount": len(faces), "cellCount": num_cells}
        mesh.attrs.update({name: np.array([count], "u8") for name, count in counts.items()})
        mesh.attrs["dimension"] = np.array([points.shape[1]], "i4")
        mesh.create_group("cells/zoneTopology")
        sections(mesh.create_group("nodes/coords"), points, cuts)
        sections(mesh.create_group("faces/c0"), np.asarray(owner, "u4") + 1, cuts)
        sections(mesh.create_group("faces/c1"), np.asarray(neighbour[:num_inner], "u4") + 1, [0])
        for number, part in enumerate((faces[:2], faces[2:])):
            group = mesh.create_group(f"faces/nodes/{2 - number}")
            group.attrs["minId"] = np.array([1 + 2 * number], "u8")
            group["nnodes"] = np.array(list(map(len, part)), "i2")
            group["nodes"] = np.concatenate(part).astype("u4") + 1


def write_results(path, fields, cuts=(0, 2), phases=1):
    with h5py.File(path, "w") as file:
        for phase in range(1, phases + 1):
            cells = file.create_group(f"results/1/phase-{phase}/cells")
            cells["fields"] = np.array([";".join(fields).encode()])
            for name, values in fields.items():
                sections(cells.create_group(name), values, cuts)
        file["results/1/phase-1/faces/SV_FLUX/1"] = np.zeros(3)
        file.create_group("results/residuals")

"""Shared by tests: PIECES, write."""

import h5py
import numpy as np

#: two pieces: a tetrahedron and a wedge; a hexahedron
PIECES = [([[0, 1, 2, 3], [1, 2, 3, 4, 5, 0]], [10, 13], 6), ([[7, 6, 5, 4, 3, 2, 1, 0]], [12], 8)]


def write(path, *, kind="UnstructuredGrid", steps=None, ghosts=False, change=None, pieces=PIECES, compressed=False):
    rng = np.random.default_rng(0)
    num_points, num_cells = sum(p[2] for p in pieces), sum(len(p[0]) for p in pieces)
    data = {"points": rng.random((num_points, 3))}
    num = steps or 1
    with h5py.File(path, "w") as f:
        root = f.create_group("VTKHDF")
        root.attrs["Version"] = (2, 0)
        root.attrs.create("Type", kind.encode("ascii"), dtype=h5py.string_dtype("ascii", len(kind)))
        root["NumberOfPoints"] = [p[2] for p in pieces]
        root["NumberOfCells"] = [len(p[0]) for p in pieces]
        root["NumberOfConnectivityIds"] = [sum(map(len, p[0])) for p in pieces]
        root["Points"] = data["points"].astype("f4")
        root["Connectivity"] = np.array([n for p in pieces for row in p[0] for n in row])
        root["Offsets"] = np.concatenate([np.cumsum([0, *map(len, p[0])]) for p in pieces])
        root["Types"] = np.array([t for p in pieces for t in p[1]], "u1")
        options = {"chunks": (2, 3), "compression": "gzip"} if compressed else {}
        data["v"] = rng.random((num * num_points, 3))
        data["c"] = rng.integers(0, 9, num * num_cells)
        data["p"] = rng.random(num * num_points)
        root.create_dataset("PointData/v", data=data["v"], **options)
        root["PointData/p"] = data["p"]
        root["CellData/p"] = np.arange(num * num_cells, dtype="f4")
        root["CellData/c"] = data["c"]
        root["FieldData/total"] = [1.0]
        if ghosts:
            root["CellData/vtkGhostType"] = np.array([0] * (num_cells - 1) + [1], "u1")
        if steps:
            group = root.create_group("Steps")
            group.attrs["NSteps"] = steps
            group["Values"] = np.linspace(0, 1, steps)
            group["NumberOfParts"] = [len(pieces)] * steps
            for name in ("PartOffsets", "PointOffsets"):
                group[name] = np.zeros(steps, int)
            for name in ("CellOffsets", "ConnectivityIdOffsets"):
                group[name] = np.zeros((steps, 1), int)
            for name in ("v", "p"):
                group[f"PointDataOffsets/{name}"] = np.arange(steps)[::-1] * num_points  # in any order
            for name in ("c", "p"):
                group[f"CellDataOffsets/{name}"] = np.arange(steps) * num_cells
        if change:
            change(root)
    return str(path), data

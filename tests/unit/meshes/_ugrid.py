"""Shared by tests: CELLS, FILL, XY, netCDF4, write_mesh."""

import numpy as np
import pytest

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816


#: two triangles, a quad and a pentagon on eight nodes
CELLS = [[0, 1, 2], [0, 2, 3], [1, 4, 5, 2], [2, 5, 6, 7, 3]]


XY = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [2, 0], [2, 1], [1.5, 2], [0.5, 2]], np.float64)


FILL = -999


def write_mesh(
    path,
    *,
    start=0,
    fill=FILL,
    transposed=False,
    dtype="i4",
    cells=CELLS,
    mesh_attributes=None,
    units=("m", "m"),
    coordinates=True,
    points=XY,
    node_names=("node_x", "node_y"),
    say_fill=True,
    say_start=True,
    format="NETCDF4",
    mesh_type="i4",
):
    most = max(map(len, cells))
    rows = np.full((len(cells), most), fill, np.float64 if dtype == "f8" else np.int64)
    for row, nodes in zip(rows, cells, strict=True):
        row[: len(nodes)] = np.array(nodes) + start
    with netCDF4.Dataset(path, "w", format=format) as nc:
        for name, size in (("n_node", len(points)), ("n_face", len(cells)), ("most", most), ("time", 3), ("lev", 2)):
            nc.createDimension(name, size)
        mesh = nc.createVariable("mesh", mesh_type)
        attributes = {
            "cf_role": "mesh_topology",
            "topology_dimension": 2,
            "face_node_connectivity": "face_nodes",
            "face_dimension": "n_face",
        }
        if coordinates:
            attributes["node_coordinates"] = " ".join(node_names)
        mesh.setncatts({**attributes, **(mesh_attributes or {})})
        dims = ("most", "n_face") if transposed else ("n_face", "most")
        nodes = nc.createVariable("face_nodes", dtype, dims, fill_value=fill if say_fill else False)
        if say_start:
            nodes.start_index = start
        nodes.set_auto_mask(False)
        nodes[...] = rows.T if transposed else rows
        for name, unit, column in zip(node_names, units, points.T, strict=True):
            variable = nc.createVariable(name, "f8", ("n_node",))
            variable[...] = column
            if unit is not None:
                variable.units = unit
        variable = nc.createVariable("u", "f4", ("time", "lev", "n_node"))
        variable[...] = np.arange(3 * 2 * len(points)).reshape(3, 2, -1)
        packed = nc.createVariable("packed", "i2", ("n_face",), fill_value=-1)
        packed.set_auto_maskandscale(False)
        packed.setncatts({"scale_factor": 0.5, "add_offset": 10.0, "units": "K", "location": "face", "mesh": "mesh"})
        packed[...] = np.array([-1, *range(1, len(cells))])
        nc.createVariable("time", "f8", ("time",))[...] = [0, 1, 2]
    return str(path)

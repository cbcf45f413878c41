"""Shared by tests: HEX, POINTS, TETS, netCDF4, text, write."""

import numpy as np
import pytest

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816


HEX = [[1, 2, 3, 4, 5, 6, 7, 8]]


TETS = [[1, 2, 3, 5], [2, 3, 4, 9], [9, 3, 2, 1]]


POINTS = np.random.default_rng(0).random((9, 3))


def text(nc, name, dim, values, length=33):
    if "len_name" not in nc.dimensions:
        nc.createDimension("len_name", length)
    variable = nc.createVariable(name, "S1", (dim, "len_name"))
    for row, value in enumerate(values):
        variable[row] = np.array(list(value.ljust(length, "\0")), "S1")


def write(path, format, *, joint_coordinates=False, blocks=(("HEX8", HEX), ("TETRA", TETS)), old_variables=False):
    rng = np.random.default_rng(1)
    nodal, element = rng.random((2, 3, 9)), rng.random((2, 3, sum(len(b) for _, b in blocks)))
    with netCDF4.Dataset(path, "w", format=format) as nc:
        nc.createDimension("time_step", None)
        nc.createDimension("num_nodes", 9)
        nc.createDimension("num_dim", 3)
        nc.createVariable("time_whole", "f8", ("time_step",))[0:3] = [0.0, 0.5, 1.0]
        if joint_coordinates:
            nc.createVariable("coord", "f8", ("num_dim", "num_nodes"))[...] = POINTS.T
        else:
            for c, column in zip("xyz", POINTS.T, strict=True):
                nc.createVariable(f"coord{c}", "f8", ("num_nodes",))[...] = column
        nc.createDimension("num_nod_var", 2)
        nc.createDimension("num_elem_var", 2)
        text(nc, "name_nod_var", "num_nod_var", ["pressure", "T"])
        text(nc, "name_elem_var", "num_elem_var", ["stress", "T"])
        if old_variables:
            variable = nc.createVariable("vals_nod_var", "f8", ("time_step", "num_nod_var", "num_nodes"))
            variable[0:3] = nodal.transpose(1, 0, 2)
        else:
            for k in (1, 2):
                nc.createVariable(f"vals_nod_var{k}", "f8", ("time_step", "num_nodes"))[0:3] = nodal[k - 1]
        first = 0
        for b, (kind, nodes) in enumerate(blocks, 1):
            rows = np.array(nodes)
            nc.createDimension(f"num_el_in_blk{b}", len(rows))
            nc.createDimension(f"num_nod_per_el{b}", rows.shape[1])
            connect = nc.createVariable(f"connect{b}", "i4", (f"num_el_in_blk{b}", f"num_nod_per_el{b}"))
            connect.elem_type = kind
            connect[...] = rows
            for k in (1, 2):
                if (k, b) != (1, 1):  # "stress" is not defined on the first block
                    variable = nc.createVariable(f"vals_elem_var{k}eb{b}", "f8", ("time_step", f"num_el_in_blk{b}"))
                    variable[0:3] = element[k - 1, :, first : first + len(rows)]
            first += len(rows)
    element[0, :, : len(blocks[0][1])] = np.nan
    return str(path), nodal, element

"""XDMF, written: the arrays of a mesh in HDF5, and the XML that names them. Format: https://www.xdmf.org, model 3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from xml.etree import ElementTree

import h5py
import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, IntArray
from scidata.errors import UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import POLYGON

#: XDMF's codes by VTK's; before the nodes of the first ones stands their number.
_CODES = {1: 1, 3: 2, POLYGON: 3, 5: 4, 9: 5, 10: 6, 14: 7, 13: 8, 12: 9, 21: 34, 22: 36, 23: 37, 24: 38}
_COUNTED = (1, 2, 3)
_KINDS = {"f": "Float", "i": "Int", "u": "UInt"}
_RANKS = {1: "Scalar", 3: "Vector", 6: "Tensor6", 9: "Tensor"}  # of the numbers in a row


def write_xdmf(
    target: str, heavy: str, name: str, points: AnyArray, cells: RawCells, groups: Mapping[str, Mapping[str, AnyArray]],
    *, is_packed: bool = False,
) -> None:  # fmt: skip
    """Write the XML, and the HDF5 ``heavy``, which is to be named ``name`` and lie beside it.

    ``groups``: arrays by name, of ``"Node"`` and ``"Cell"``: ``(num_rows,)`` or ``(num_rows, num_components)``. Raises
    UnsupportedFormatError: cells of types that XDMF has not, or of whose nodes its readers disagree on the order.
    """
    if not_written := set(np.unique(cells.cell_type).tolist()) - set(_CODES):
        raise UnsupportedFormatError(
            f"{os.path.basename(target)}: has cells of VTK's type {min(not_written)}, which are not written as XDMF; "
            "write format='vtu'"
        )
    root = ElementTree.Element("Xdmf", Version="3.0")
    grid = ElementTree.SubElement(ElementTree.SubElement(root, "Domain"), "Grid", Name="mesh", GridType="Uniform")
    how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if is_packed else {}
    with h5py.File(heavy, "w") as file:

        def put(parent: ElementTree.Element, path: str, values: AnyArray) -> None:
            narrow = {("b", 1): "u1", ("f", 2): "f4"}.get((values.dtype.kind, values.dtype.itemsize))
            values = values if narrow is None else values.astype(narrow)
            file.create_dataset(path, data=values, **(how if values.size else {}))
            kind, size = _KINDS[values.dtype.kind], values.dtype.itemsize
            said = {"NumberType": {"Int": "Char", "UInt": "UChar"}.get(kind, kind) if size == 1 else kind}
            said |= {"Precision": str(size), "Dimensions": " ".join(map(str, values.shape)), "Format": "HDF"}
            ElementTree.SubElement(parent, "DataItem", said).text = f"{name}:/{path}"

        topology = ElementTree.SubElement(grid, "Topology", TopologyType="Mixed", NumberOfElements=str(cells.num_cells))
        put(topology, "cells", _mixed(cells))
        put(ElementTree.SubElement(grid, "Geometry", GeometryType="XYZ"), "points", points)
        for center, arrays in groups.items():
            for field, values in arrays.items():
                rank = _RANKS.get(values[:1].size if len(values) else 1, "Matrix")
                said = {"Name": field, "AttributeType": rank, "Center": center}
                put(ElementTree.SubElement(grid, "Attribute", said), f"{center}/{field}", values)
    ElementTree.ElementTree(root).write(target, encoding="utf-8", xml_declaration=True)


def _mixed(cells: RawCells) -> IntArray:
    """Return the code of each cell, the number of its nodes where that varies, and its nodes."""
    codes, sizes = np.array([_CODES.get(kind, 0) for kind in range(256)])[cells.cell_type], np.diff(cells.offsets)
    is_counted = np.isin(codes, _COUNTED)
    first = bounds_of(1 + is_counted + sizes)
    out, is_node = np.empty(first[-1], np.int64), np.ones(first[-1], bool)
    for place, values in ((first[:-1], codes), (first[:-1][is_counted] + 1, sizes[is_counted])):
        out[place], is_node[place] = values, False
    out[is_node] = cells.connectivity
    return out

"""VTK's ``vtkGhostType``: which points and cells are copies of another piece's, or not to be looked at.

The bits: https://docs.vtk.org/en/latest/api/python/vtkmodules.vtkCommonDataModel.html, vtkDataSetAttributes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.errors import UnsupportedFormatError

GHOSTS = "vtkGhostType"
_DUPLICATE, _HIDDEN_POINT, _REFINED_CELL, _HIDDEN_CELL = 1, 2, 8, 32


def check_ghosts(path: str, name: str, values: npt.NDArray[Any], *, of_cells: bool) -> None:
    """Refuse copies and hidden rows: read as others are, they would be there twice, or count though they do not.

    Raises
    ------
    UnsupportedFormatError
    """
    if values.dtype.kind not in "iu":
        marked = values != 0
        duplicate = hidden = int(marked.sum())
    else:
        bits = values.astype(np.int64)
        duplicate = int((bits & _DUPLICATE != 0).sum())
        hidden = int((bits & (_HIDDEN_CELL | _REFINED_CELL if of_cells else _HIDDEN_POINT) != 0).sum())
    if duplicate or hidden:
        rows = "cells" if of_cells else "points"
        what = "hidden, or replaced by finer ones"
        if duplicate:
            what = "ghosts, copies that pieces hold of each other's rows"
        raise UnsupportedFormatError(
            f"{path}: {name!r} marks {duplicate or hidden} of {values.size} {rows} as {what}; write the file without "
            "them (ParaView's filter Remove Ghost Information)"
        )

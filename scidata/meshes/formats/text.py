"""Names that are stored as characters, in variables that sources leave out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scidata.core.types import Source
from scidata.errors import CorruptDataError
from scidata.read.codecs import largest_encoded
from scidata.sources.bytes.files import files
from scidata.sources.hdf5.walk import damage_as_corrupt_data, open_h5
from scidata.sources.text import is_local, netcdf3_variables

__all__ = ["read_names"]

_MOST_TEXT = 1 << 22  # sizes are checked before they are allocated
_MOST_CHUNKS = 1 << 12  # usually one


def read_names(source: Source, name: str) -> list[str]:
    """Read a ``(num, length)`` array of characters as text; empty where there is none."""
    if source.format == "netcdf3":
        variable = netcdf3_variables(source).get(name)
        if variable is None or len(variable.shape) != 2:
            return []
        if variable.row_nbytes > _MOST_TEXT:
            raise CorruptDataError(
                f"{source.path}: field {name!r} has shape {variable.shape}, which is too much for names; the header is "
                "damaged"
            )
        raw = files().read(source.path, variable.begin, variable.row_nbytes)
        text = np.frombuffer(raw, "S1").reshape(variable.shape)
    else:
        with open_h5(source.path) as h5, damage_as_corrupt_data(f"{source.path}: field {name!r}"):
            if not is_local(h5, name) or h5[name].is_virtual or h5[name].external:
                return []
            if h5[name].dtype != np.dtype("S1") or h5[name].ndim != 2 or h5[name].size > _MOST_TEXT:
                raise CorruptDataError(
                    f"{source.path}: field {name!r} has shape {h5[name].shape} and dtype {h5[name].dtype}, but "
                    "(number, length) characters of names were expected"
                )
            _check_encoded(h5[name], f"{source.path}: field {name!r}")
            text = np.asarray(h5[name][...])
    return [b"".join(row.tolist()).split(b"\x00")[0].decode("utf-8", "replace").strip() for row in text]


def _check_encoded(dataset: Any, where: str) -> None:
    """Raise where a chunk's bytes in the file could fill the memory when HDF5 decodes them, whatever the shape says."""
    if not dataset.chunks:
        return
    most = largest_encoded(math.prod(dataset.chunks))
    num_chunks = dataset.id.get_num_chunks()
    if num_chunks > _MOST_CHUNKS or any(dataset.id.get_chunk_info(i).size > most for i in range(num_chunks)):
        raise CorruptDataError(
            f"{where}: its {num_chunks} chunks of {dataset.chunks} characters take more bytes than names do; the "
            "file is damaged"
        )

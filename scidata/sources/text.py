"""Text variables, which sources leave out: their attributes, and names and times that are stored as characters."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from scidata.core.checks import largest_encoded
from scidata.core.types import Source
from scidata.errors import CorruptDataError
from scidata.sources.groups import GroupSource
from scidata.sources.hdf5.walk import Attributes, Naming, clean_attributes, damage_as_corrupt_data, open_h5
from scidata.sources.netcdf import NetCDF3Source

_MOST_TEXT = 1 << 22  # sizes are checked before they are allocated
_MOST_CHUNKS = 1 << 16  # usually one; along an unlimited dimension, one a row


def text_attributes(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the attributes of every variable that the source leaves out."""
    skipped: Mapping[str, str] = getattr(source, "skipped", {})
    if not skipped:
        return {}
    if isinstance(source, NetCDF3Source):
        return {name: source.variables[name].attributes for name in skipped}
    if source.format not in ("netcdf4", "hdf5") or isinstance(source, GroupSource):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    with (
        open_h5(source.path, guarded=True) as h5,
        damage_as_corrupt_data(f"{source.path}: attributes of text variables"),
    ):
        for name in skipped:
            if _is_local(h5, name):
                found[name] = clean_attributes(
                    Attributes(h5[name]), Naming.hidden_attributes, f"{source.path}: {name!r}"
                )
    return found


def read_names(source: Source, name: str) -> list[str]:
    """Read a ``(num, length)`` array of characters as text; empty where there is none."""
    if isinstance(source, NetCDF3Source):
        variable = source.variables.get(name)
        if variable is None or len(variable.shape) != 2:
            return []
        if math.prod(variable.shape) > _MOST_TEXT:
            raise CorruptDataError(
                f"{source.path}: field {name!r} has shape {variable.shape}, which is too much for names; the header is "
                "damaged"
            )
        text = source.read_characters(name)
    else:
        with open_h5(source.path) as h5, damage_as_corrupt_data(f"{source.path}: field {name!r}"):
            if not _is_local(h5, name) or h5[name].is_virtual or h5[name].external:
                return []
            if h5[name].dtype != np.dtype("S1") or h5[name].ndim != 2 or h5[name].size > _MOST_TEXT:
                raise CorruptDataError(
                    f"{source.path}: field {name!r} has shape {h5[name].shape} and dtype {h5[name].dtype}, but "
                    "(number, length) characters of names were expected"
                )
            _check_encoded(h5[name], f"{source.path}: field {name!r}")
            text = np.asarray(h5[name][...])
    return _joined(text)


def read_text_along(source: Source, name: str, dim: str) -> list[str]:
    """Read a ``(dim, length)`` array of characters as text; empty where there is none, or too much of it."""
    if source.format not in ("netcdf3", "netcdf4", "hdf5") or isinstance(source, GroupSource):
        return []
    if name not in getattr(source, "skipped", {}):
        return []
    if isinstance(source, NetCDF3Source):
        variable = source.variables.get(name)
        known = variable is not None and variable.dims[:1] == (dim,)
    else:
        with open_h5(source.path, guarded=True) as h5, damage_as_corrupt_data(f"{source.path}: field {name!r}"):
            known = _is_local(h5, name) and h5[name].dtype == np.dtype("S1") and h5[name].ndim == 2
            scales = h5[name].dims[0].values() if known else []
            known = [posixpath.basename(scale.name) for scale in scales] == [dim]
    return read_names(source, name) if known else []


def _joined(text: npt.NDArray[np.bytes_]) -> list[str]:
    return [b"".join(row.tolist()).split(b"\x00")[0].decode("utf-8", "replace").strip() for row in text]


def _check_encoded(dataset: h5py.Dataset, where: str) -> None:
    """Raise where a chunk's bytes in the file could fill the memory when HDF5 decodes them, whatever the shape says."""
    if not dataset.chunks:
        return
    most = largest_encoded(math.prod(dataset.chunks))
    num_chunks = dataset.id.get_num_chunks()
    sizes: list[int] = []
    if num_chunks <= _MOST_CHUNKS:
        dataset.id.chunk_iter(lambda chunk: sizes.append(chunk.size))
    if num_chunks > _MOST_CHUNKS or any(size > most for size in sizes):
        raise CorruptDataError(
            f"{where}: its {num_chunks} chunks of {dataset.chunks} characters take more bytes than names do; the "
            "file is damaged"
        )


def _is_local(h5: h5py.File, name: str) -> bool:
    """Say whether a name is a dataset of this file itself: links may lead to files that nobody asked for."""
    link = h5.get(name, getlink=True)
    return isinstance(link, h5py.HardLink) and isinstance(h5[name], h5py.Dataset)

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
from scidata.errors import CorruptDataError, TooLargeError
from scidata.sources.groups import GroupSource
from scidata.sources.hdf5.walk import Attributes, Naming, clean_attributes, damage_as_corrupt_data, open_h5
from scidata.sources.netcdf import NetCDF3Source

_MOST_TEXT = 1 << 24  # sizes are checked before they are allocated
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


def read_text(source: Source, name: str) -> tuple[tuple[str, ...], npt.NDArray[np.str_]] | None:
    """Read an array of text that a source leaves out: its dims, and its values as ``str`` of that shape.

    Texts of variable or fixed length, or, of NetCDF and HDF5, characters along a last dimension, which is dropped. None
    if missing of that name, or its file is not of such a format. Raises CorruptDataError, TooLargeError.
    """
    if isinstance(source, GroupSource):
        return read_text(source.file, f"{source.group}/{name}")
    if (of_zarr := getattr(source, "read_text", None)) is not None:
        found = of_zarr(name)
        return None if found is None else (found[0], _as_str(found[1]))
    if name not in getattr(source, "skipped", {}) or source.format not in ("netcdf3", "netcdf4", "hdf5"):
        return None
    where = f"{source.path}: field {name!r}"
    if isinstance(source, NetCDF3Source):
        variable = source.variables.get(name)
        if variable is None or not variable.shape:
            return None
        _check_size(variable.shape, where)
        return variable.dims[:-1], _as_str(source.read_characters(name), joined=True)
    with open_h5(source.path, guarded=True) as h5, damage_as_corrupt_data(where):
        if not _is_local(h5, name) or h5[name].is_virtual or h5[name].external:
            return None
        dset, naming = h5[name], getattr(source, "naming", Naming)(h5)
        if h5py.check_string_dtype(dset.dtype) is None:
            return None
        _check_size((*dset.shape, dset.dtype.itemsize), where)
        _check_encoded(dset, where)
        joined = dset.dtype == np.dtype("S1") and dset.ndim > 1
        dims = tuple(map(posixpath.basename, naming.dims(Attributes(dset), name)))
        return dims[: len(dims) - joined], _as_str(np.asarray(dset[...]), joined=joined)


def _as_str(values: npt.NDArray[Any], *, joined: bool = False) -> npt.NDArray[np.str_]:
    """Return bytes, characters along the last dimension (``joined``) or objects as texts."""
    shape = values.shape[: values.ndim - joined]
    found = values.ravel().tolist()
    if joined:
        lines = values.reshape(math.prod(shape), values.shape[-1])
        found = [b"".join(line.tolist()).split(b"\x00")[0].strip() for line in lines]
    texts = [x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in found]
    return np.array(texts, np.str_).reshape(shape)


def _check_size(shape: tuple[int, ...], where: str) -> None:
    if math.prod(shape) > _MOST_TEXT:
        raise TooLargeError(f"{where} has shape {shape}, which is too much text for names; is the header damaged?")


def _check_encoded(dataset: h5py.Dataset, where: str) -> None:
    """Raise if a chunk's bytes in the file could fill the memory when HDF5 decodes them, whatever the shape says."""
    if not dataset.chunks:
        return
    most = largest_encoded(math.prod(dataset.chunks) * dataset.id.get_type().get_size())
    num_chunks = dataset.id.get_num_chunks()
    sizes: list[int] = []
    if num_chunks <= _MOST_CHUNKS:
        dataset.id.chunk_iter(lambda chunk: sizes.append(chunk.size))
    if num_chunks > _MOST_CHUNKS or any(size > most for size in sizes):
        raise CorruptDataError(
            f"{where}: its {num_chunks} chunks of {dataset.chunks} take more bytes than names do; the file is damaged"
        )


def _is_local(h5: h5py.File, name: str) -> bool:
    """Return True if a name is a dataset of this file itself: links may lead to files that nobody asked for."""
    link = h5.get(name, getlink=True)
    return isinstance(link, h5py.HardLink) and isinstance(h5[name], h5py.Dataset)

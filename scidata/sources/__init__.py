"""What a store contains and where its bytes lie, one module per format.

:func:`open_source` finds the format by looking at the content, never at the name alone.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Any

from scidata.core.types import Source
from scidata.core.urls import Url, is_url, url_of
from scidata.errors import UnsupportedFormatError, near_matches
from scidata.sources.access.fetches import each
from scidata.sources.access.files import files
from scidata.sources.groups import GroupSource, split_group
from scidata.sources.numpy_files import MAGIC, NumpySource, is_archive
from scidata.sources.pointers import check_pointer
from scidata.sources.torch_files import OLD_TORCH, TorchSource, is_torch_file

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CLASSIC_MAGICS = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
_ZARR_NAMES = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_STORE_MARK = "manifest.json"  # as scidata.store.format.store calls it
_NETCDF_SUFFIXES = (".nc", ".nc4", ".cdf")
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FORMATS = (
    "Zarr v2 and v3 folders, HDF5, NetCDF-4 and NetCDF-3 (classic, 64-bit offset, 64-bit data) files, Icechunk "
    "repositories, reference sets of kerchunk and VirtualiZarr, NumPy's .npy and .npz, and files of torch.save"
)


def open_source(
    path: str | os.PathLike[str],
    *,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """Open a raw store of any known format, detected by its content.

    Parameters
    ----------
    path
        A file, a folder, a group of an HDF5 or NetCDF-4 file (``a.h5/group``), or a URL that fsspec knows; of an
        Icechunk repository with ``@branch=``, ``@tag=`` or ``@snapshot=`` behind it.
    allow_external
        Also read what lies outside the store (HDF5 external storage, external links, virtual datasets, references).
    storage_options
        Of a URL: what fsspec's file system is made with (``endpoint_url``, ``key``, ``secret``, ``anon``, …).

    Raises
    ------
    FileNotFoundError
        Nothing is there; the message names what is nearby.
    UnsupportedFormatError
        It is of no format that scidata reads.
    """
    name = url_of(os.fspath(path), storage_options)
    files().forget(name)  # a store written again at this path has other files behind the old names
    marks = _zarr_marks(name)
    if marks == {".zmetadata"} and _is_parquet_set(name):
        return _reference_source(name, "kerchunk-parquet", allow_external)
    if marks:
        from scidata.sources.zarr.source import ZarrSource

        return ZarrSource(name, allow_external=allow_external)
    if not is_url(name) and (found := split_group(os.path.expanduser(str(name)))) is not None:
        return GroupSource(*found, allow_external=allow_external)
    try:
        if not is_url(name):
            _check_local(name)
        return _open_file(name, allow_external=allow_external)
    except (*_GONE, UnsupportedFormatError):
        from scidata.sources.references.source import open_repository

        repository = open_repository(name, allow_external=allow_external)
        if repository is None:
            raise
        return repository


def _reference_source(path: str, kind: str, allow_external: bool) -> Source:
    from scidata.sources.references.source import ReferenceSource

    return ReferenceSource(path, kind=kind, allow_external=allow_external)


def _is_parquet_set(path: str) -> bool:
    from scidata.sources.references.parquet import is_parquet_set
    from scidata.sources.zarr.tree import open_tree

    return is_parquet_set(open_tree(path, allow_external=False))


def _open_file(path: str, *, allow_external: bool) -> Source:
    """Open a single file of one of the formats that begin with a magic number."""
    size = files().size(path)
    head = bytes(files().read(path, 0, min(8, size)))
    if head[:4] in _CLASSIC_MAGICS:
        from scidata.sources.netcdf import NetCDF3Source

        return NetCDF3Source(path, allow_external=allow_external)
    if _has_hdf5_signature(path, size):
        # the suffix settles the plain cases without opening the file a second time
        from scidata.sources.hdf5.walk import has_netcdf_marks

        if path.lower().endswith(_NETCDF_SUFFIXES) or has_netcdf_marks(path):
            from scidata.sources.netcdf import NetCDF4Source

            return NetCDF4Source(path, allow_external=allow_external)
        from scidata.sources.hdf5.source import HDF5Source

        return HDF5Source(path, allow_external=allow_external)
    if head[:6] == MAGIC or (head[:2] == b"PK" and is_archive(path)):
        return NumpySource(path, allow_external=allow_external)
    if head[:8] == OLD_TORCH or (head[:2] == b"PK" and not is_url(path) and is_torch_file(path)):
        return TorchSource(path, allow_external=allow_external)
    is_json = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    if is_json and posixpath.basename(path) not in (*_ZARR_NAMES, _STORE_MARK):
        return _reference_source(path, "kerchunk", allow_external)
    if head == b"version ":
        check_pointer(bytes(files().read(path, 0, min(64, size))), path)
    begins = f"begins with {head!r}" if head else "is empty"
    if head[:2] == b"PK":
        raise UnsupportedFormatError(f"{path}: a zip archive; unpack it (unzip), and open what was in it")
    if posixpath.basename(path) in (*_ZARR_NAMES, _STORE_MARK):
        folder = os.path.dirname(path) or "."
        raise UnsupportedFormatError(f"{path}: describes the store in its folder; open that, {folder}")
    raise UnsupportedFormatError(f"{path}: {begins}, which is no format that scidata reads; it reads {_FORMATS}")


def _zarr_marks(path: str) -> set[str]:
    """Return which files are there that a Zarr store has at its top."""
    if not isinstance(path, Url):
        return {name for name in _ZARR_NAMES if os.path.isfile(os.path.join(path, name))}
    found = dict(zip(_ZARR_NAMES, each([path.at(name) for name in _ZARR_NAMES], "info"), strict=True))
    marks = {n for n, i in found.items() if not isinstance(i, Exception) and i.get("type") != "directory"}
    for error in found.values():  # some servers forbid what is not there
        if not marks and isinstance(error, Exception) and not isinstance(error, (*_GONE, PermissionError)):
            raise error
    return marks


def _check_local(path: str) -> None:
    """Raise if ``path`` is not a file, saying what to do instead."""
    if not path:
        raise FileNotFoundError("the path is empty: name a file, a folder or a URL")
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, _STORE_MARK)):
        raise UnsupportedFormatError(
            f"{path}: a store of `scidata partition`, which is opened by itself: open_dataset({path!r}, mesh), and "
            "several with scidata.concat"
        )
    if os.path.isdir(path):
        shown = sorted(os.listdir(path))[:6]
        raise UnsupportedFormatError(
            f"{path}: a folder without {', '.join(_ZARR_NAMES)} is no Zarr store (it holds {shown or 'nothing'}); "
            "name a file in it, or use a glob such as '*.nc' for a series of files"
        )
    if os.path.islink(path) and not os.path.exists(path):
        os.stat(path)  # says what is wrong with the link
    if not os.path.exists(path):
        parent = os.path.dirname(path) or "."
        if not os.path.isdir(parent):
            raise FileNotFoundError(f"{path}: there is no such file, and no folder {parent}")
        seen = [name for name in os.listdir(parent) if not name.startswith(".")]
        hint = near_matches(posixpath.basename(path), seen, listed=parent != os.path.expanduser("~"))
        raise FileNotFoundError(f"{path}: there is no such file in {parent}{hint}")


def _has_hdf5_signature(path: str, size: int) -> bool:
    """Look at 0, 512, 1024, 2048, …: a user block of that size may come before the HDF5 part."""
    offset = 0
    while offset + len(_HDF5_SIGNATURE) <= size:
        if files().read(path, offset, len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE:
            return True
        offset = 2 * offset if offset else 512
        if is_url(path) and offset > 1 << 20:  # each look is a request
            return False
    return False

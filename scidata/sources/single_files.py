"""Single files: which format one is of, by its content."""

from __future__ import annotations

import importlib.util
import os
import posixpath

from scidata.core.install import install_hint
from scidata.core.types import Source
from scidata.core.urls import Url, is_url
from scidata.errors import UnsupportedFormatError
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import MAX_METADATA_BYTES, NOT_THERE, has_document, read_head
from scidata.sources.numpy_files import MAGIC, NumpySource, names_in_archive
from scidata.sources.pointers import check_pointer
from scidata.sources.torch_files import DGL, OLD_TORCH, TorchSource

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CLASSIC_MAGICS = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
ZARR_NAMES = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")
STORE_MARK = "manifest.json"  # as scidata.store.format.store calls it
_TABLES = {b"PAR1": "parquet", b"ARRO": "arrow"}
_NETCDF_SUFFIXES = (".nc", ".nc4", ".cdf")
_TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
_FILE_SUFFIXES = (*_NETCDF_SUFFIXES, *_TABLE_SUFFIXES, ".h5", ".hdf5", ".hdf", ".he5", ".npy", ".npz", ".json")
_FORMATS = (
    "Zarr v2 and v3 folders, HDF5, NetCDF-4 and NetCDF-3 (classic, 64-bit offset, 64-bit data) files, Icechunk "
    "repositories, reference sets of kerchunk and VirtualiZarr, tables as Parquet and Arrow, GRIB, NumPy's .npy and "
    ".npz, and files of torch.save"
)


def is_as_named(url: Url) -> bool:
    """Return True if the object, or the Zarr store, is there that the end of a URL names; the answers are kept."""
    if url.endswith(".zarr"):
        return any(has_document(url.at(name), MAX_METADATA_BYTES) for name in ZARR_NAMES[:2])
    if not url.lower().endswith(_FILE_SUFFIXES):
        return False
    try:
        return read_head(url, 8).size > 0
    except (*NOT_THERE, PermissionError):
        return False


def open_file(path: str, *, allow_external: bool) -> Source:
    """Open a single file of one of the formats that begin with a magic number."""
    try:
        begin, size = read_head(path, 8)
    except FileNotFoundError:
        files().size(path)  # raises where it is a folder
        raise
    head = begin[:8]
    if head[:4] in _CLASSIC_MAGICS:
        from scidata.sources.netcdf import NetCDF3Source

        return NetCDF3Source(path)
    if _has_hdf5_signature(path, begin, size):
        # the suffix settles the plain cases without opening the file a second time
        from scidata.sources.hdf5.walk import has_netcdf_marks

        if path.lower().endswith(_NETCDF_SUFFIXES) or has_netcdf_marks(path):
            from scidata.sources.netcdf import NetCDF4Source

            return NetCDF4Source(path, allow_external=allow_external)
        from scidata.sources.hdf5.source import HDF5Source

        return HDF5Source(path, allow_external=allow_external)
    if head[:4] == b"GRIB":
        from scidata.sources.grib import GribSource

        return GribSource(path, allow_external=allow_external)
    names = names_in_archive(path) if head[:2] == b"PK" else []
    if head[:6] == MAGIC or (names and all(name.endswith(".npy") for name in names)):
        return NumpySource(path)
    if head[:8] == OLD_TORCH or (not is_url(path) and any(name.endswith("/data.pkl") for name in names)):
        return TorchSource(path)
    if (kind := _TABLES.get(head[:4])) is not None:
        from scidata.sources.tables import TableSource

        return TableSource(path, kind)
    is_json = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    if is_json and posixpath.basename(path) not in (*ZARR_NAMES, STORE_MARK):
        return reference_source(path, "kerchunk", allow_external)
    if head == DGL:
        if not is_url(path) and importlib.util.find_spec("dgl") is not None:
            return TorchSource(path)
        raise UnsupportedFormatError(
            f"{path}: graphs of DGL, which it alone reads, of a local file: {install_hint('dgl')}; or torch.save them "
            "as dicts of tensors, {'edge_index': torch.stack(g.edges()), 'num_nodes': g.num_nodes(), **g.ndata}"
        )
    if head == b"version ":
        check_pointer(bytes(files().read(path, 0, min(64, size))), path)
    begins = f"begins with {head!r}" if head else "is empty"
    if head[:2] == b"PK":
        raise UnsupportedFormatError(f"{path}: a zip archive; unpack it (unzip), and open its files")
    if posixpath.basename(path) in (*ZARR_NAMES, STORE_MARK):
        folder = os.path.dirname(path) or "."
        raise UnsupportedFormatError(f"{path}: describes the store in its folder; open that, {folder}")
    raise UnsupportedFormatError(f"{path}: {begins}, which is no format that scidata reads; it reads {_FORMATS}")


def _has_hdf5_signature(path: str, head: bytes, size: int) -> bool:
    """Look at 0, 512, 1024, 2048, …: a user block of that size may come before the HDF5 part."""
    offset = 0
    while offset + len(_HDF5_SIGNATURE) <= size:
        end = offset + len(_HDF5_SIGNATURE)
        found = head[offset:end] if end <= len(head) else files().read(path, offset, len(_HDF5_SIGNATURE))
        if found == _HDF5_SIGNATURE:
            return True
        offset = 2 * offset if offset else 512
        if is_url(path) and offset > 1 << 20:  # each look is a request
            return False
    return False


def reference_source(path: str, kind: str, allow_external: bool) -> Source:
    """Open a reference set of kerchunk, in JSON or Parquet."""
    from scidata.sources.references.source import ReferenceSource

    return ReferenceSource(path, kind=kind, allow_external=allow_external)

"""Contents of stores and places of their bytes, one module per format.

:func:`open_source` finds the format by looking at the content, never at the name alone; formats from outside, by
:func:`register_format` or an entry point, say which names are theirs.
"""

from __future__ import annotations

import itertools
import os
import posixpath
from collections.abc import Mapping

from scidata.core.types import ArrayLayout as ArrayLayout
from scidata.core.types import ChunkRefs as ChunkRefs
from scidata.core.types import Codec as Codec
from scidata.core.types import Files as Files
from scidata.core.types import Source as Source
from scidata.core.urls import Url, is_url, url_of
from scidata.errors import UnsupportedFormatError, near_matches
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import GONE, MAX_METADATA_BYTES, forget_documents, has_document, keep_document
from scidata.sources.formats import FileFormat as FileFormat
from scidata.sources.formats import open_own
from scidata.sources.formats import register_format as register_format
from scidata.sources.groups import GroupSource, split_group
from scidata.sources.single_files import STORE_MARK, ZARR_NAMES, is_as_named, open_file, reference_source


def open_source(
    path: str | os.PathLike[str],
    *,
    allow_external: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Source:
    """Open a raw store of any known format, detected by its content.

    - ``path``: a file, a folder, a group of an HDF5 or NetCDF-4 file (``a.h5/group``), or a URL that fsspec knows; of
      an Icechunk repository with ``@branch=``, ``@tag=`` or ``@snapshot=`` behind it.
    - ``allow_external``: also read values outside the store (HDF5 external storage, external links, virtual datasets,
      references).
    - ``storage_options``: arguments of the file system that opens a URL (``endpoint_url``, ``key``, ``secret``,
      ``anon``, …).

    Raises FileNotFoundError: nothing is there; the message names files nearby; UnsupportedFormatError: it is of no
    format that scidata reads.
    """
    name = url_of(os.fspath(path), storage_options)
    is_file = not is_url(name) and os.path.isfile(name)  # nothing else is looked for then
    # a store written again at this path has other files behind the old names
    if is_file:
        files().forget_each((name, os.path.abspath(name)))
    else:
        files().forget(name)
    is_there = is_file or is_url(name) or os.path.exists(name)
    if is_there and (own := open_own(name, allow_external=allow_external)) is not None:
        return own
    if not is_file and (found := _open_folder(name, allow_external)) is not None:
        return found
    try:
        if not is_file and not is_url(name):
            _check_local(name)
        return open_file(name, allow_external=allow_external)
    except (*GONE, UnsupportedFormatError):
        from scidata.sources.references.source import open_repository

        repository = open_repository(name, allow_external=allow_external)
        if repository is None:
            raise
        return repository


def _open_folder(name: str, allow_external: bool) -> Source | None:
    """Open a Zarr store, a set of references in Parquet, or a group of a file; None if it is none of them."""
    marks = set() if isinstance(name, Url) and not name.endswith(".zarr") and is_as_named(name) else _zarr_marks(name)
    if marks == {".zmetadata"} and _is_parquet_set(name):
        return reference_source(name, "kerchunk-parquet", allow_external)
    if marks:
        from scidata.sources.zarr.source import ZarrSource

        return ZarrSource(name, allow_external=allow_external)
    if not is_url(name) and (found := split_group(os.path.expanduser(str(name)))) is not None:
        return GroupSource(*found, allow_external=allow_external)
    return None


def _is_parquet_set(path: str) -> bool:
    from scidata.sources.zarr.tree import open_tree
    from scidata.sources.zarr.walk import read_json

    tree = open_tree(path, allow_external=False)
    where, found = tree.location(".zmetadata"), tree.get([".zmetadata"])
    for summary in found.values():
        if isinstance(where, Url):
            keep_document(where, summary)
        return "record_size" in read_json(summary, where)  # how long tables are, which a Zarr store does not say
    return False


def _zarr_marks(path: str) -> set[str]:
    """Return which files are there that a Zarr store has at its top; behind a URL, the first of them."""
    if not isinstance(path, Url):
        return {name for name in ZARR_NAMES if os.path.isfile(os.path.join(path, name))}
    # one after the other: where the first is there, nothing else is asked for
    found = (name for name in ZARR_NAMES if has_document(path.at(name), MAX_METADATA_BYTES))
    marks = set(itertools.islice(found, 1))
    if not marks:
        forget_documents([path.at(name) for name in ZARR_NAMES])
    return marks


def _check_local(path: str) -> None:
    if not path:
        raise FileNotFoundError("the path is empty: name a file, a folder or a URL")
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, STORE_MARK)):
        raise UnsupportedFormatError(
            f"{path}: a store of `scidata partition`, which is opened by itself: open_dataset({path!r}, mesh), and "
            "several with scidata.concat"
        )
    if os.path.isdir(path):
        shown = sorted(os.listdir(path))[:6]
        raise UnsupportedFormatError(
            f"{path}: a folder without {', '.join(ZARR_NAMES)} is no Zarr store (it holds {shown or 'nothing'}); "
            "name a file in it, or use a glob such as '*.nc' for a series of files"
        )
    if os.path.islink(path) and not os.path.exists(path):
        try:
            os.stat(path)  # raises the fault of the link
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: is a link to {os.readlink(path)}, which is not there") from None
    if not os.path.exists(path):
        parent = os.path.dirname(path) or "."
        if not os.path.isdir(parent):
            raise FileNotFoundError(f"{path}: there is no such file, and no folder {parent}")
        seen = [name for name in os.listdir(parent) if not name.startswith(".")]
        hint = near_matches(posixpath.basename(path), seen, listed=parent != os.path.expanduser("~"))
        raise FileNotFoundError(f"{path}: there is no such file in {parent}{hint}")

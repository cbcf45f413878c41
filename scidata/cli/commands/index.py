"""``scidata index``: metadata of many files, read once; progress on stderr, a report on stdout."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from scidata.cli.output import console, human_bytes, print_json
from scidata.cli.progress import progress
from scidata.core.own_files import make_own_folder
from scidata.core.types import Source
from scidata.core.urls import is_url
from scidata.errors import ConfigError, OutputError, UnsupportedFormatError
from scidata.read.arrays import read_array
from scidata.read.disk_cache import make_cache
from scidata.sources import open_source
from scidata.sources.indexed import FOLDER, IndexedFiles, has_rows, settles_in
from scidata.sources.paths import expand_paths


def run_index(paths: Sequence[str], *, out: str | None, as_json: bool) -> None:
    """Write the index of some files, or bring it up to date, and print where it is."""
    names = expand_paths(paths)
    for name in filter(is_url, names):
        raise ConfigError(f"{name}: is a URL; an index is of files on a file system")
    if out is not None:
        make_own_folder(os.path.join(make_cache(out, None).directory, FOLDER))
    files = IndexedFiles(names, out, _opened, to_write=True)
    new = [files[i] for i in files.unknown]
    time.sleep(settles_in(source.path for source in new))
    try:
        with progress("indexing", len(new)) as tick:
            num_rows, num_left = files.write(read_array, each=tick)
    except OSError as e:
        raise OutputError(
            f"{files.place}: cannot be written ({e.strerror}); name another folder with --out, and to open_dataset as "
            "cache_dir"
        ) from e
    nbytes = os.path.getsize(files.place)
    if as_json:
        counts = {"files": num_rows, "new": len(new) - num_left, "known": len(files) - len(new), "left_out": num_left}
        print_json({"index": files.place, **counts, "bytes": nbytes})
        return
    console().print(f"{files.place}: {num_rows} files, {human_bytes(nbytes)}", style="bold", soft_wrap=True)
    console().print(f"{len(new) - num_left} read, {len(files) - len(new)} known already", soft_wrap=True)
    if num_left:
        text = f"{num_left} left out: they are damaged, or were changed meanwhile; opening them says more"
        console().print(text, style="yellow", soft_wrap=True)


def _opened(name: str) -> Source:
    source = open_source(name)
    if not has_rows(source):
        raise UnsupportedFormatError(f"{name}: {source.format}; an index is of HDF5, NetCDF-4 and NetCDF-3 files")
    return source

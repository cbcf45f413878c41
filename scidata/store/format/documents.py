"""Checks every file of a sample and every byte in it, besides values.

Values have digests and checksums of their own. Here is the rest: the ``zarr.json`` files, the index of each shard, and
that no file holds more than that, and no folder more than those files. Of schema version 2 on; local stores.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator

from scidata.core.types import ArrayLayout
from scidata.errors import CorruptDataError
from scidata.store.format.arrays import blocks_of, chunks_held, shard_index
from scidata.store.format.checksums import CheckedSource, manifest_layouts
from scidata.store.format.manifest import CHECKSUMS, SampleInfo, digest_of, dump_json, sealed

ATTRIBUTE = "scidata"  # of the sample's group: its description

_DOCUMENT = "zarr.json"


def sample_document(info: SampleInfo) -> str:
    """Return the ``zarr.json`` of a sample's group, the same for the same description."""
    return dump_json({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: sealed(info)}})


def digest_documents(folder: str, arrays: Iterable[str]) -> str:
    """Return the digest of the ``zarr.json`` of all groups and arrays below a sample, by their paths."""
    parts: list[bytes] = []
    for path in sorted(_nodes(arrays)):
        name = os.path.join(folder, path, _DOCUMENT)
        text = _content(name)
        parts += [f"{path}\0{len(text)}\0".encode(), text]
    return digest_of(*parts)


def _nodes(arrays: Iterable[str]) -> set[str]:
    return {above for path in arrays for above in itertools.accumulate(path.split("/"), "{}/{}".format)}


def check_files(source: CheckedSource, info: SampleInfo, folder: str) -> None:
    """Check all of a local sample's files, but for the values in them."""
    name = os.path.join(folder, _DOCUMENT)
    if _content(name) != sample_document(info).encode():
        raise CorruptDataError(f"{name}: is not what scidata wrote of a sample of this description; it was edited")
    if (found := digest_documents(folder, info.arrays)) != info.documents:
        raise CorruptDataError(
            f"{folder}: the {_DOCUMENT} of its groups and arrays have digest {found}, but the manifest has "
            f"{info.documents}: one was edited"
        )
    shards = {path: list(_shards(source.arrays[path])) for path in info.arrays if path != CHECKSUMS}
    known = {_DOCUMENT, f"{CHECKSUMS}/c/0", *(f"{path}/{_DOCUMENT}" for path in _nodes(info.arrays))}
    known |= {f"{path}/{key}" for path, keys in shards.items() for key, _ in keys}
    check_names(folder, known)
    for path, keys in shards.items():
        layout = source.arrays[path]
        for key, shape in keys:
            _check_shard(os.path.join(folder, path, key), layout, shape)


def check_layouts(source: CheckedSource, info: SampleInfo, store: str) -> None:
    """Raise CorruptDataError unless arrays' own metadata, which other readers go by, agree with the manifest."""
    for path, record in manifest_layouts(info, store).records.items():
        found, expected = source.arrays[path], record.layout
        for name in ("shape", "dtype", "chunks", "shards", "codecs", "axis_order", "fill_value"):
            if getattr(found, name) != getattr(expected, name):
                raise CorruptDataError(
                    f"{store}: sample {info.index}: array {path!r}: its zarr.json has {name} {getattr(found, name)}, "
                    f"but the manifest has {getattr(expected, name)}; one was edited: copy the store again"
                )


def _shards(layout: ArrayLayout) -> Iterator[tuple[str, tuple[int, ...]]]:
    shard = layout.shards or layout.chunks
    for box in blocks_of(layout.shape, shard):
        corner = [str(s.start // n) for s, n in zip(box, shard, strict=True)]
        yield "/".join(["c", *corner]), tuple(s.stop - s.start for s in box)


def check_names(folder: str, known: set[str]) -> None:
    """Raise CorruptDataError unless a folder holds the files of these paths, in no folders but theirs."""
    folders = {"/".join(path.split("/")[:i]) for path in known for i in range(1, path.count("/") + 1)}
    found: set[str] = set()
    for top, inner, names in os.walk(folder):
        inside = os.path.relpath(top, folder)
        prefix = "" if inside == "." else f"{inside}/"
        found |= {prefix + name for name in names}
        found |= {prefix + name for name in inner if prefix + name not in folders}
    for path in sorted(found - known):
        raise CorruptDataError(f"{folder}: holds {path!a}, which is no part of the store: remove it")
    for path in sorted(known - found):
        raise CorruptDataError(f"{folder}: lacks {path!r}: copy the store again")


def _check_shard(path: str, layout: ArrayLayout, shape: tuple[int, ...]) -> None:
    index = shard_index(shape, layout.dtype.itemsize, chunk=layout.chunks, shard=layout.shards or layout.chunks)
    expected = math.prod(chunks_held(shape, layout.chunks)) * (layout.chunk_nbytes + 4) + len(index)
    if (size := os.path.getsize(path)) != expected:
        raise CorruptDataError(f"{path}: has {size} bytes, but {expected} were written; it is damaged")
    if _content(path, size - len(index)) != index:
        raise CorruptDataError(f"{path}: its index is not that which scidata wrote; it was edited")


def _content(path: str, start: int = 0) -> bytes:
    with open(path, "rb") as file:  # not through the cache of open files: the content of now
        file.seek(start)
        return file.read()

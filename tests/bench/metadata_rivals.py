"""Zarr metadata by scidata's parser and by zarr-python's classes: imports, time to open, and what is refused.

    PYTHONPATH=. python tests/bench/metadata_rivals.py [--arrays 2000]

CPU time, median of 5 interleaved rounds, page cache warm. The ways: scidata; ``zarr.open_group`` and its arrays; the
store walked by scidata, each document parsed by ``ArrayV3Metadata``.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zarr
from zarr.core.metadata import ArrayV3Metadata

from scidata.errors import SciDataError
from scidata.sources.zarr import walk
from scidata.sources.zarr.metadata import parse_v3
from scidata.sources.zarr.source import ZarrSource
from scidata.sources.zarr.tree import open_tree
from tests.unit.sources._zarr import ODD, V3, _places, _replaced


def _regular(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


IMPORTS = {
    "scidata": "from scidata.sources.zarr.source import ZarrSource",
    "zarr-python": "import zarr",
    "zarr.core.metadata": "from zarr.core.metadata import ArrayV3Metadata",
}
PLAIN = {**V3, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
HOSTILE: dict[str, dict[str, Any]] = {
    "a shape of 2^124 elements": {**PLAIN, "shape": [2**62, 2**62]},
    "a chunk of 2^60 elements": {**PLAIN, "chunk_grid": _regular(2**30, 2**30), "shape": [2**31, 2**31]},
    "a chunk extent of 0": {**PLAIN, "chunk_grid": _regular(0, 4)},
    "a shard index of 2^38 entries": {**V3, "chunk_grid": _regular(2**20, 2**20), "shape": [2**24, 2**24]},
    "attributes 900 deep": {**PLAIN, "attributes": {"a": functools.reduce(lambda inner, _: [inner], range(900), [1])}},
    "attributes that are no object": {**PLAIN, "attributes": [1]},
    "a dimension name with a NUL": {**PLAIN, "dimension_names": ["x", "a\0b"]},
    "an unknown storage transformer": {**PLAIN, "storage_transformers": [{"name": "x"}]},
    "a key separator of '../'": {
        **PLAIN,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}},
    },
    "a pickle codec": {**PLAIN, "codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle", "configuration": {}}]},
}


def ours(path: str) -> int:
    """Open by scidata."""
    return len(ZarrSource(path).arrays)


def by_group(path: str) -> int:
    """Open by zarr-python."""
    return len([array.metadata for _, array in zarr.open_group(path, mode="r").arrays()])


def by_class(path: str) -> int:
    """Walk as scidata does; parse by zarr-python."""
    tree = open_tree(path, allow_external=False)
    meta = json.loads(tree.get(["zarr.json"])["zarr.json"])
    nodes = walk._consolidated_v3(meta, path)
    nodes = walk._levels(tree, walk._nodes_v3) if nodes is None else nodes
    return len([ArrayV3Metadata.from_dict(node) for node in nodes.values()])


WAYS: dict[str, Callable[[str], int]] = {"scidata": ours, "zarr-python": by_group, "its metadata class": by_class}


def refused(parse: Callable[[Any], Any]) -> tuple[list[bool], Counter[str]]:
    """Parse a good document with each of its values replaced by an odd one; return what was refused, and by what."""
    found, kinds = [], Counter()
    for place in _places(V3)[1:]:
        for value in ODD:
            try:
                parse(_replaced(V3, place, value))
                found.append(False)
            except Exception as error:
                found.append(True)
                kinds["SciDataError" if isinstance(error, SciDataError) else type(error).__name__] += 1
    return found, kinds


def takes(parse: Callable[[Any], Any], meta: Any) -> bool:
    """Whether a document is taken."""
    try:
        parse(meta)
    except Exception:
        return False
    return True


def times_of(path: str, num_arrays: int) -> str:
    """Return CPU times of opening a store."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(5):
        for way, open_store in WAYS.items():
            began = time.process_time()
            assert open_store(path) == num_arrays
            times[way].append(1e3 * (time.process_time() - began))
    return ", ".join(f"{way} {statistics.median(found):.1f} ms" for way, found in times.items())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", type=int, default=2000)
    args = parser.parse_args()
    for name, statement in IMPORTS.items():
        code = (
            f"import sys, time; t = time.process_time(); {statement}; print(time.process_time() - t, len(sys.modules))"
        )
        runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(5)]
        seconds = statistics.median(float(run[0]) for run in runs)
        print(f"importing {name:20} {1e3 * seconds:6.0f} ms of CPU, {runs[0][1]} modules")
    with tempfile.TemporaryDirectory() as folder:
        for num_arrays in (1, args.arrays):
            path = os.path.join(folder, str(num_arrays))
            group = zarr.open_group(path, mode="w")
            for i in range(num_arrays):
                group.create_array(f"u{i}", shape=(64, 64), chunks=(8, 8), dtype="f4", attributes={"units": "m"})
            print(f"{num_arrays} arrays, folder by folder: {times_of(path, num_arrays)}", flush=True)
            zarr.consolidate_metadata(path, zarr_format=3)
            print(f"{num_arrays} arrays, consolidated: {times_of(path, num_arrays)}", flush=True)
    parsers = {
        "scidata": lambda meta: parse_v3(meta, store="s", name="n", prefix="n"),
        "zarr-python": ArrayV3Metadata.from_dict,
    }
    for name, parse in parsers.items():
        print(f"{name} takes: {', '.join(what for what, meta in HOSTILE.items() if takes(parse, meta)) or 'none'}")
    (own, own_kinds), (theirs, their_kinds) = (refused(parse) for parse in parsers.values())
    print(f"{len(own)} odd documents: scidata refuses {sum(own)} {dict(own_kinds)}")
    print(f"zarr-python refuses {sum(theirs)} {dict(their_kinds)}")
    print(f"refused by scidata only: {sum(a and not b for a, b in zip(own, theirs, strict=True))}")
    print(f"refused by zarr-python only: {sum(b and not a for a, b in zip(own, theirs, strict=True))}")


if __name__ == "__main__":
    main()

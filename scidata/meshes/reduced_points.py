"""Reduced Gaussian grids whose points on each latitude are a table: numbers, a text file, or an array of a data set.

What GRIB calls ``pl`` is ``reduced_points`` in NetCDF and Zarr that were made of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from scidata.core.checks import check_mapping
from scidata.core.types import AnyArray
from scidata.errors import ConfigError
from scidata.meshes.sets.grids import reduced_gaussian
from scidata.meshes.sets.node_set import NodeSet
from scidata.read.arrays import read_array
from scidata.sources import open_source

_RULE = re.compile(r"gaussian:(?:(N[1-9]\d*):)?(.+)", re.IGNORECASE | re.DOTALL)
_NUMBERS = re.compile(r"\d+(,\d+)+")
_NAMES = ("reduced_points", "pl")
_TEXTS = (".txt", ".csv", ".dat", ".lst", "")
_MAX_TEXT = 1 << 20  # bytes: of the finest grids it is some 20 kB


def resolved_nodes(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Return the rules of node sets, where tables of points a latitude are in the place of their files.

    ``"gaussian:FILE"`` and ``"gaussian:N320:FILE"`` become ``"gaussian:18,25,…"``, and so does a sequence of numbers:
    all latitudes from north to south, or those of the northern half. Raises ConfigError: a file that has no table, or
    one that is no grid's.
    """
    check_mapping("nodes", nodes, "{'mesh': 'icosahedron:4'}")
    found = {}
    for name, rule in nodes.items():
        if isinstance(rule, Sequence | np.ndarray) and not isinstance(rule, str):
            found[str(name)] = _as_rule(np.asarray(rule), f"nodes: {name!r}", None)
            continue
        match = _RULE.fullmatch(str(rule))
        # whether it names a file, and no grid, be it one that there is not
        is_path = match is not None and (any(mark in match[2] for mark in "./\\") or os.path.exists(match[2]))
        if match is None or _NUMBERS.fullmatch(match[2]) or not is_path:
            found[str(name)] = str(rule)
            continue
        found[str(name)] = _as_rule(_read(match[2]), f"nodes: {name!r}: {match[2]}", match[1])
    return found


def gaussian_of_rule(text: str) -> NodeSet:
    """Return the grid of the text after ``"gaussian:"``: its name, or its points a latitude."""
    if not _NUMBERS.fullmatch(text):
        return reduced_gaussian(text)
    counts = [int(each) for each in text.split(",")]
    return reduced_gaussian(f"N{len(counts) // 2}", counts)


def _as_rule(given: AnyArray, where: str, grid: str | None) -> str:
    """Return the rule of a table: a table that is the same from both ends is whole, another is the northern half."""
    if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) < 2 or int(given.min()) < 1:
        raise ConfigError(
            f"{where}: points on each latitude are positive whole numbers in one dimension, not {given.dtype} of shape "
            f"{given.shape}"
        )
    whole = given if np.array_equal(given, given[::-1]) else np.concatenate([given, given[::-1]])
    if len(whole) % 2:
        raise ConfigError(f"{where}: a Gaussian grid has latitudes on both sides of the equator, and so an even number "
                          f"of them, not {len(whole)}")  # fmt: skip
    half = whole[: len(whole) // 2]
    if np.any(np.diff(half.astype(np.int64)) < 0):
        row = int(np.flatnonzero(np.diff(half.astype(np.int64)) < 0)[0]) + 1
        raise ConfigError(
            f"{where}: latitude {row} has {half[row]} points, fewer than the one before it, {half[row - 1]}: expected "
            "the latitudes from north to south, or from the north pole to the equator"
        )
    if grid is not None and int(grid[1:]) != len(half):
        raise ConfigError(f"{where}: has {len(whole)} latitudes, but {grid} has {2 * int(grid[1:])}")
    return "gaussian:" + ",".join(map(str, whole.tolist()))


def _read(path: str) -> AnyArray:
    """Read a table: of a text file all its numbers, of others the array of that name, or the only one it can be."""
    if os.path.splitext(path)[1].lower() in _TEXTS and os.path.isfile(os.path.expanduser(path)):
        return _of_text(path)
    with closing(open_source(path)) as source:
        for name in _NAMES:
            if name in source.arrays:
                return read_array(source, source.arrays[name])
        rows = [each for each in source.arrays.values() if len(each.shape) == 1 and each.dtype.kind in "iu"]
        if len(rows) == 1:
            return read_array(source, rows[0])
        raise ConfigError(
            f"{path}: has no array {' or '.join(map(repr, _NAMES))}, the points on each latitude, and "
            f"{len(rows)} that could be it"
        )


def _of_text(path: str) -> AnyArray:
    with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_TEXT + 1)
    lines = [line.partition("#")[0] for line in text.splitlines()]
    words = re.split(r"[\s,;\[\]]+", " ".join(lines).strip(" ,;[]\t"))
    odd = [word for word in words if not re.fullmatch(r"\d{1,9}", word)]
    if len(text) > _MAX_TEXT or odd:
        shown = f"{odd[0][:40]!r} among them" if odd else f"more than {_MAX_TEXT} bytes"
        raise ConfigError(f"{path}: expected the points on each latitude, whole numbers, and found {shown}")
    return np.array(words, np.int64)

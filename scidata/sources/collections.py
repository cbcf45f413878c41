"""VTK's files that name others: collections of ParaView (``.pvd``), of the files of each time, and parallel files
(``.pvtu``, ``.pvtp``), of the pieces of one mesh.

A time of several files is the path ``run.pvd/3/first.vtu``: the number of the time, and the first of its files.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from xml.etree import ElementTree
from xml.parsers import expat

from scidata.errors import CorruptDataError, RefusedError, UnsupportedFormatError

_MOST_BYTES = 1 << 28
_STEP = re.compile(r"(.*\.pvd)/(\d{1,9})/[^/]*", re.IGNORECASE | re.DOTALL)
#: Suffixes of parallel files, and the element that has their pieces.
PARALLEL = {".pvtu": "PUnstructuredGrid", ".pvtp": "PPolyData"}


def steps_of(path: str) -> tuple[str, ...]:
    """Return the files of a collection, one for each of its times; of any other file it alone.

    A time of several files is a path that :func:`parts_of` takes.

    Raises CorruptDataError, UnsupportedFormatError: it is no such XML, or has times that are no numbers.
    Raises RefusedError: it declares XML entities, or names a file that does not lie in its folder.
    """
    if not (path.lower().endswith(".pvd") and os.path.isfile(path)):
        return (path,)
    return tuple(
        names[0] if len(names) == 1 else f"{path}/{number}/{os.path.basename(names[0])}"
        for number, names in enumerate(_times(path))
    )


def is_step(path: str) -> bool:
    """Whether a path is that of a time of several files."""
    return _STEP.fullmatch(path) is not None


def parts_of(path: str) -> tuple[str, ...]:
    """Return the files that a mesh lies in: those of a time of a collection, pieces; of any other file it alone.

    Raises as :func:`steps_of`.
    """
    if (step := _STEP.fullmatch(path)) is not None:
        times, number = _times(step[1]), int(step[2])
        if number >= len(times):
            raise FileNotFoundError(f"{path}: {step[1]} has {len(times)} times")
        return tuple(part for name in times[number] for part in parts_of(name))
    if (kind := PARALLEL.get(path[-5:].lower())) is None or not os.path.isfile(path):
        return (path,)
    found = [each.get("Source", "") for each in _root(path).findall(f"{kind}/Piece")]
    if not any(found):
        raise CorruptDataError(f"{path}: names no piece of a {kind}; copy or write it again")
    return tuple(_inside(path, name) for name in found if name)


def _times(path: str) -> list[list[str]]:
    """Return the files of each time, in their order."""
    found = defaultdict[float, list[str]](list)
    try:
        for each in _root(path).findall("Collection/DataSet"):
            found[float(each.get("timestep", "0"))].append(_inside(path, each.get("file", "")))
    except ValueError as e:
        raise CorruptDataError(f"{path}: is no collection of VTK's: {e}; copy or write it again") from e
    if not found or not all(map(math.isfinite, found)) or any(len(set(x)) < len(x) for x in found.values()):
        raise UnsupportedFormatError(
            f"{path}: names no files, one twice at a time, or times that are no numbers: {[*found][:3]}"
        )
    return [names for _, names in sorted(found.items())]


def _root(path: str) -> ElementTree.Element:
    with open(path, "rb") as file:
        data, parser = file.read(_MOST_BYTES), expat.ParserCreate()

    def refuse(name: str, *_: object) -> None:
        raise RefusedError(f"{path}: declares the XML entity {name!r}, which no such file needs; write it out")

    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
        return ElementTree.fromstring(data)
    except (expat.ExpatError, ValueError, LookupError) as e:
        raise CorruptDataError(f"{path}: is no XML of VTK's: {e}; copy or write it again") from e


def _inside(path: str, name: str) -> str:
    """Return the path of a file that another names; raises RefusedError where it lies outside of that one's folder."""
    folder, found = os.path.dirname(os.path.abspath(path)), os.path.join(os.path.dirname(path), name)
    if "\0" in found or not os.path.realpath(found).startswith(os.path.realpath(folder).rstrip("/") + "/"):
        raise RefusedError(f"{path}: names {found!r}, which is not in its folder; name the files themselves")
    return found

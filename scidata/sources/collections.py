"""Collections of ParaView (``.pvd``): the files of a time series, in the order of their times."""

from __future__ import annotations

import math
import os
from xml.etree import ElementTree
from xml.parsers import expat

from scidata.errors import CorruptDataError, RefusedError, UnsupportedFormatError

_MOST_BYTES = 1 << 28


def steps_of(path: str) -> tuple[str, ...]:
    """Return the files of a collection, one for each of its times; of any other file it alone.

    Raises CorruptDataError, UnsupportedFormatError: it is no such XML; or several files are parts of one time.
    Raises RefusedError: it declares XML entities, or names a file that does not lie in its folder.
    """
    if not (path.lower().endswith(".pvd") and os.path.isfile(path)):
        return (path,)
    with open(path, "rb") as file:
        data, parser = file.read(_MOST_BYTES), expat.ParserCreate()

    def refuse(name: str, *_: object) -> None:
        raise RefusedError(f"{path}: declares the XML entity {name!r}, which no collection needs; write it out")

    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
        found = ElementTree.fromstring(data).findall("Collection/DataSet")
        steps = [(float(each.get("timestep", "0")), number, each.get("file", "")) for number, each in enumerate(found)]
    except (expat.ExpatError, ValueError, LookupError) as e:
        raise CorruptDataError(f"{path}: is no collection of VTK's: {e}; copy or write it again") from e
    times = [time for time, _, _ in steps]
    if not steps or not all(map(math.isfinite, times)) or len(set(times)) != len(times):
        raise UnsupportedFormatError(
            f"{path}: has {len(steps)} files of {len(set(times))} times; read is one file of each time: name the files "
            "themselves, or join the parts (ParaView: Append Datasets)"
        )
    folder = os.path.dirname(os.path.abspath(path))
    names = [os.path.join(os.path.dirname(path), name) for _, _, name in sorted(steps)]
    for name in names:
        if "\0" in name or not os.path.realpath(name).startswith(os.path.realpath(folder).rstrip("/") + "/"):
            raise RefusedError(f"{path}: names {name!r}, which is not in its folder; name the files themselves")
    return tuple(names)

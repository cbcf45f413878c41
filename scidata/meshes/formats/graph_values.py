"""Values of a whole graph, cloud or mesh, which have no row for each node or edge: arrays in the group ``graph``.

A target of the whole, ``graph/y``, or what PyTorch Geometric's ``Data`` holds beside fields. Of one set or relation
they are ``graph/<set>/<name>``. Text and Python's numbers, which a ``Data`` may hold, come as JSON: bytes, with the
attribute ``json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from scidata.core.types import Source
from scidata.meshes.formats.base import Options, read_values

_GROUP = "graph/"
_MAX_BYTES = 64 << 10  # of all of them: they lie in the manifest of a store


def is_graph_value(name: str) -> bool:
    """Whether an array of the layouts of our own, by its name, belongs to the whole."""
    return name.startswith(_GROUP)


def find_graph_values(source: Source, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the values without their group, and why others are left out."""
    left_out: dict[str, str] = {}
    found, room = [], _MAX_BYTES
    for path, layout in source.arrays.items():
        name = path.removeprefix(_GROUP)
        if not is_graph_value(path) or (wanted is not None and name not in wanted):
            continue
        if layout.nbytes > room:
            left_out[path] = f"takes {layout.nbytes} bytes; values of the whole take {_MAX_BYTES} at most, together"
        else:
            found.append(name)
            room -= layout.nbytes
    return tuple(found), left_out


def read_graph_values(source: Source, names: Sequence[str], options: Options) -> dict[str, object]:
    """Read values: arrays, or what JSON has."""
    found: dict[str, object] = {}
    for name in names:
        values = read_values(source, f"{_GROUP}{name}", options)
        is_json = source.arrays[f"{_GROUP}{name}"].attributes.get("json")
        found[name] = json.loads(values.tobytes()) if is_json else values
    return found

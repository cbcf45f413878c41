"""Node sets of a graph, raw, and the names of sets and relations.

Each set has nodes of its own, numbered from 0; each relation has edges from the nodes of one set to those of another,
or of the same, and is called ``source__name__target``, as its group is in files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scidata.core.types import FloatArray
from scidata.errors import ConfigError

#: The entity whose rows are those of all sets together, which are ordered and cut at once.
JOINT = "joint"
SEPARATOR = "__"
_RESERVED = frozenset([JOINT, "blocks", "csr", "checksums", "edge", "cell"])
_NAME = re.compile(r"[^/\\\0]+")


def relation_parts(relation: str) -> tuple[str, str, str] | None:
    """Return source set, name and target set of a relation; None for other names."""
    parts = relation.split(SEPARATOR)
    if len(parts) != 3 or not all(parts) or any(part[0] == "_" or part[-1] == "_" for part in parts):
        return None
    return parts[0], parts[1], parts[2]


def relation_ends(relation: str) -> tuple[str, str]:
    """Return source set and target set of a relation, by its name."""
    source, _, target = relation_parts(relation) or ("", "", "")
    return source, target


def is_relation(entity: str) -> bool:
    """Whether an entity is a relation, and no set."""
    return relation_parts(entity) is not None


def rows_named(entity: str) -> str:
    """Return the plural of an entity, ``"nodes"``; sets and relations keep their names."""
    if entity == JOINT:
        return "rows"
    return f"{entity}s" if entity in ("node", "point", "cell", "edge") else entity


def check_set_name(name: str, where: str) -> None:
    """Raise ConfigError for names that sets cannot have."""
    if name in _RESERVED or is_relation(name) or not _NAME.fullmatch(name) or name in (".", ".."):
        why = "is a name that scidata has for something else" if name in _RESERVED else "cannot be the name of a set"
        raise ConfigError(f"{where}: node set {name!r} {why}; call it otherwise")


@dataclass(frozen=True, kw_only=True, eq=False)
class RawSet:
    """The nodes of one set.

    - ``num_nodes``: how many there are.
    - ``points``: ``(num_nodes, 2 or 3)`` float64 as :attr:`scidata.meshes.sample.RawSample.points`; None without
      positions.
    """

    num_nodes: int
    points: FloatArray | None = None

"""Graphs between several sets of nodes, raw: PyTorch Geometric's ``HeteroData``, GraphCast's grid and mesh.

Each set has nodes of its own, numbered from 0; each relation has edges from the nodes of one set to those of another,
or of the same, and is called ``source__name__target``, as its group is in files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.errors import ConfigError, CorruptDataError
from scidata.meshes.formats.base import RawField, damage_named
from scidata.meshes.geometry import Geometry
from scidata.meshes.order.faults import REMEDIES, Finding, check_sample

#: The entity whose rows are those of all sets together: what is ordered, and cut, at once.
JOINT = "joint"
SEPARATOR = "__"
_RESERVED = frozenset([JOINT, "blocks", "csr", "checksums", "edge", "cell"])
_NAME = re.compile(r"[^/\\\0]+")


def relation_name(source: str, name: str, target: str) -> str:
    """Return what a relation is called, ``source__name__target``.

    Raises
    ------
    ConfigError
        A part of it has two underscores in a row, or begins or ends with one where another part does.
    """
    whole = SEPARATOR.join((source, name, target))
    if relation_parts(whole) != (source, name, target):
        raise ConfigError(
            f"relation ({source!r}, {name!r}, {target!r}): the parts are joined by {SEPARATOR!r}, so none may have "
            "that in it, or an underscore at its ends; call them otherwise"
        )
    return whole


def relation_parts(relation: str) -> tuple[str, str, str] | None:
    """Return source set, name and target set of a relation; None where that is no relation's name."""
    parts = relation.split(SEPARATOR)
    if len(parts) != 3 or not all(parts) or any(part[0] == "_" or part[-1] == "_" for part in parts):
        return None
    return parts[0], parts[1], parts[2]


def is_relation(entity: str) -> bool:
    """Whether an entity is a relation, and no set."""
    return relation_parts(entity) is not None


def rows_named(entity: str) -> str:
    """Return what several rows of an entity are called: ``"nodes"``, but a set's or relation's own name."""
    if entity == JOINT:
        return "rows"
    return f"{entity}s" if entity in ("node", "point", "cell", "edge") else entity


def check_set_name(name: str, where: str) -> None:
    """Refuse names that sets cannot have.

    Raises
    ------
    ConfigError
    """
    if name in _RESERVED or is_relation(name) or not _NAME.fullmatch(name) or name in (".", ".."):
        why = "is a name that scidata has for something else" if name in _RESERVED else "cannot be the name of a set"
        raise ConfigError(f"{where}: node set {name!r} {why}; call it otherwise")


@dataclass(frozen=True, kw_only=True, eq=False)
class RawSet:
    """The nodes of one set.

    Attributes
    ----------
    num_nodes
        How many there are.
    points
        ``(num_nodes, 2 or 3)`` float64 as :attr:`scidata.meshes.sample.RawSample.points`; None without positions.
    """

    num_nodes: int
    points: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RawHetero:
    """One graph between several sets: topology in memory, fields not read yet.

    Attributes
    ----------
    sets, relations
        By name; of a relation ``(2, num_edges)`` int64, rows of its source set and of its target set.
    on_sphere
        True where the points of all sets are longitude and latitude.
    fields
        By name; ``entity`` is a set or a relation.
    left_out
        Arrays that are no field of this sample, and why.
    values
        Of the whole graph, or of ``<set>/`` or ``<relation>/``: arrays of any shape, or anything that JSON has.
    """

    name: str
    sets: Mapping[str, RawSet]
    relations: Mapping[str, IntArray]
    on_sphere: bool = False
    fields: Mapping[str, RawField] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    period: None = None

    kind = "hetero"
    entity = JOINT

    def __post_init__(self) -> None:
        if not self.sets:
            raise ConfigError(f"sample {self.name!r}: has no node set")
        for name in self.sets:
            check_set_name(name, f"sample {self.name!r}")
        for relation, pairs in self.relations.items():
            source, _, target = relation_parts(relation) or ("", "", "")
            for end in (source, target):
                if end not in self.sets:
                    raise CorruptDataError(
                        f"sample {self.name}: relation {relation!r} joins {source!r} and {target!r}, but there is no "
                        f"node set {end!r}; there are {', '.join(self.sets)}"
                    )
            if pairs.ndim != 2 or pairs.shape[0] != 2:
                raise CorruptDataError(
                    f"sample {self.name}: edge_index of {relation!r} has shape {pairs.shape}, but (2, num_edges) was "
                    "expected"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each entity."""
        sets = {name: each.num_nodes for name, each in self.sets.items()}
        return {JOINT: sum(sets.values()), **sets, **{name: x.shape[1] for name, x in self.relations.items()}}


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroHeader:
    """One sample by its metadata; :meth:`read` reads its topology. Pickles.

    Attributes
    ----------
    sizes
        Rows of each entity; None where edges are made, and not counted yet.
    load
        Reads, or makes, the sets and relations.
    finish
        Makes the fields of edges that are made, when they are; None where there are none.
    values, load_values
        Names of the values of the whole, or of one set or relation, and how they are read.
    fields, left_out, paths
        As in :class:`scidata.meshes.sample.SampleHeader`.
    """

    name: str
    sizes: Mapping[str, int | None]
    on_sphere: bool
    fields: Mapping[str, RawField]
    left_out: Mapping[str, str]
    paths: tuple[str, ...]
    load: Callable[[], tuple[Mapping[str, RawSet], Mapping[str, IntArray]]]
    finish: Callable[[Mapping[str, RawField]], Mapping[str, RawField]] | None = None
    values: tuple[str, ...] = ()
    load_values: Callable[[], Mapping[str, Any]] = dict

    kind = "hetero"
    entity = JOINT

    def read(self) -> RawHetero:
        """Read points and edges.

        Raises
        ------
        CorruptDataError, FieldMismatchError, UnsupportedFormatError
            Arrays of the topology do not fit together, or have what is not read.
        """
        with damage_named(", ".join(self.paths)):
            sets, relations = self.load()
            fields = self.fields if self.finish is None else self.finish(self.fields)
            values = self.load_values()
        return RawHetero(
            name=self.name, sets=sets, relations=relations, on_sphere=self.on_sphere, fields=fields,
            left_out=self.left_out, values=values,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroFinding:
    """One kind of fault of one set or relation: ``message`` names it."""

    entity: str
    finding: Finding

    @property
    def kind(self) -> str:
        """A key of :data:`scidata.meshes.order.faults.REMEDIES`."""
        return self.finding.kind

    @property
    def message(self) -> str:
        """A sentence for the user."""
        return f"{self.entity}: {self.finding.message}"

    @property
    def count(self) -> int:
        """How many rows it concerns."""
        return self.finding.count

    @property
    def first_rows(self) -> tuple[int, ...]:
        """At most five of the rows."""
        return self.finding.first_rows

    @property
    def repairable(self) -> bool:
        """Whether :func:`kept_rows` can do something about it."""
        return self.finding.repairable


def check_hetero(raw: RawHetero) -> list[HeteroFinding]:
    """Look for everything that is wrong with a raw sample, as :func:`scidata.meshes.order.faults.check_sample`."""
    found = []
    for name, each in raw.sets.items():
        found += [
            HeteroFinding(entity=name, finding=f) for f in check_sample(Geometry(points=each.points), each.num_nodes)
        ]
    for relation, pairs in raw.relations.items():
        found += [HeteroFinding(entity=relation, finding=f) for f in _edge_findings(raw, relation, pairs)]
    return found


def _edge_findings(raw: RawHetero, relation: str, pairs: IntArray) -> list[Finding]:
    source, _, target = relation_parts(relation) or ("", "", "")
    sizes = np.array([[raw.sets[source].num_nodes], [raw.sets[target].num_nodes]])
    total = int(sizes.sum())
    if source == target:
        return check_sample(Geometry(points=None, edge_index=pairs), int(sizes[0, 0]))
    # both sets in one numbering, where no edge leads to itself; what is outside of its set is outside of both
    numbered = pairs + np.array([[0], [int(sizes[0, 0])]])
    numbered[(pairs >= sizes)] = total
    numbered[pairs < 0] = pairs[pairs < 0]
    found = check_sample(Geometry(points=None, edge_index=numbered), total)
    shown = f"the {sizes[0, 0]} of {source} or the {sizes[1, 0]} of {target}"
    return [replace(f, message=f.message.replace(f"the {total}", shown)) for f in found]


def kept_rows(
    raw: RawHetero, findings: Collection[HeteroFinding]
) -> tuple[dict[str, IntArray | None], dict[str, IntArray | None]]:
    """Return the rows of each set, and of each relation, that are kept without what is faulty; None: all of them."""
    faulty: dict[str, list[IntArray]] = {}
    for each in findings:
        if REMEDIES[each.kind] is not None:
            faulty.setdefault(each.entity, []).append(each.finding.rows)
    sets: dict[str, IntArray | None] = {}
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    for name, size in raw.sizes.items():
        if name == JOINT or name in raw.relations:
            continue
        keep = masks[name] = np.ones(size, np.bool_)
        for rows in faulty.get(name, ()):
            keep[rows] = False
        sets[name] = None if keep.all() else np.flatnonzero(keep)
    relations: dict[str, IntArray | None] = {}
    for name, pairs in raw.relations.items():
        source, _, target = relation_parts(name) or ("", "", "")
        keep = np.ones(pairs.shape[1], np.bool_)
        for rows in faulty.get(name, ()):
            keep[rows] = False
        some = np.flatnonzero(keep)
        some = some[masks[source][pairs[0, some]] & masks[target][pairs[1, some]]]
        relations[name] = None if len(some) == len(keep) else some
    return sets, relations

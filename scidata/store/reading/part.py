"""The cut of one sample of irregular data, and the part that one rank read of it. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scidata.core.index_map import IndexMap
from scidata.core.types import Array, ByteArray, IntArray
from scidata.read.context import ReadStats


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplePart:
    """How one sample is cut."""

    index: int  # number of the stored sample
    entity: str  # ``"node"``, ``"point"`` for clouds, or ``"cell"``: whose bounds decide the others
    # ``(num_parts + 1,)`` int64 for each entity. Edges go with the node that they end at, cells with the
    # lowest-numbered of their nodes
    bounds: Mapping[str, IntArray]
    # if the parts are no ranges of rows: the row of each of their rows, one part's after the other's
    rows: IntArray | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"rows": None}  # all of a sample's, which a worker need not send

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.bounds[self.entity]) - 1

    def owned(self, entity: str, part: int) -> tuple[int, int]:
        """Return the first row that a part owns, and the one after the last."""
        return int(self.bounds[entity][part]), int(self.bounds[entity][part + 1])


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalCells:
    """The cells that a part owns, in local numbering of its nodes: ``connectivity[offsets[i]:offsets[i + 1]]``."""

    offsets: IntArray
    connectivity: IntArray
    types: ByteArray


class Identity:
    """Stands for index maps, edges and cells that several parts share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTopology:
    """What a part holds besides fields."""

    # by entity. Those of nodes and points have the ghosts; that of edges has the edges that end at ghosts less than
    # ``halo`` hops away, where ``halo`` is 2 or more
    index_maps: Mapping[str, IndexMap]
    # by relation, ``"edge"`` if there is one node set: ``(2, num_owned_edges)`` int64 in the local numbering of its
    # source set and of its target set, by destination; every destination is owned
    relations: Mapping[str, IntArray] = field(default_factory=dict)
    far_relations: Mapping[str, IntArray] = field(default_factory=dict)  # the same, of the edges that end at ghosts
    cells: LocalCells | None = None
    far_cells: LocalCells | None = None  # with ``halo="cells"``: the cells of others that have an owned node
    # where rows were drawn: by entity, the row of the store (or file) of each owned row, int64; sorted, but where a
    # draw walks through a shuffled store. None: the part's own rows of the whole sample, all of them
    rows: Mapping[str, IntArray] | None = None
    # the same for parts that share index maps, edges and cells, which are not to be written to; None if they are
    # this part's alone
    identity: Identity | None = None

    def _cells(self) -> dict[str, LocalCells]:
        cells = {"cells": self.cells, "far_cells": self.far_cells}
        return {name: each for name, each in cells.items() if each is not None}

    def num_bytes(self) -> int:
        """Return its memory, with the owners of ghosts, which are found later."""
        cells = [array for each in self._cells().values() for array in vars(each).values()]
        arrays = [*self.relations.values(), *self.far_relations.values(), *cells]
        maps = sum(2 * rows.bounds.nbytes + 2 * rows.ghosts.nbytes for rows in self.index_maps.values())
        return maps + sum(int(array.nbytes) for array in arrays)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPart(LocalTopology):
    """What one rank read of one sample. Pickles."""

    # index, number: number of the sample, and that in data sets combined of several
    index: int
    part: SamplePart
    # by name: owned rows along the field's entity dim, then the ghosts' where they are read from disk
    fields: Mapping[str, Array]
    stats: ReadStats = field(default_factory=ReadStats)
    number: int | list[int] | None = None
    values: Mapping[str, object] = field(default_factory=dict)  # of the whole sample, besides the stored ones

    def arrays(self) -> dict[str, Array]:
        """Return all that becomes tensors, by names that :meth:`with_arrays` takes."""
        found = {f"fields/{name}": values for name, values in self.fields.items()}
        found |= {f"relations/{name}": pairs for name, pairs in self.relations.items()}
        found |= {f"far_relations/{name}": pairs for name, pairs in self.far_relations.items()}
        found |= {f"{of}/{name}": values for of, each in self._cells().items() for name, values in vars(each).items()}
        return {name: np.ascontiguousarray(values) for name, values in found.items()}

    def with_arrays(self, arrays: Mapping[str, Any]) -> LocalPart:
        """Return the same part with others, tensors say, in the places of :meth:`arrays`, shared with no other part."""
        cells: dict[str, Any] = {
            of: LocalCells(**{name: arrays[f"{of}/{name}"] for name in vars(each)})
            for of, each in self._cells().items()
        }
        return dataclasses.replace(
            self,
            **cells,
            fields={name: arrays[f"fields/{name}"] for name in self.fields},
            relations={name: arrays[f"relations/{name}"] for name in self.relations},
            far_relations={name: arrays[f"far_relations/{name}"] for name in self.far_relations},
            identity=None,
        )

"""Routes of values to the ranks that write them: boxes of grids, and rows returned to their source's order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import even_bounds
from scidata.core.types import IntArray
from scidata.data.output.fields import OutputField
from scidata.data.output.ranks import Ranks
from scidata.errors import ConfigError
from scidata.plan.owners import Box, Exchange, common_box, whole_units, within, writer_bounds

Index = tuple[slice | IntArray, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The values of one step's field that one rank sends, receives and writes.

    - ``part``: this rank.
    - ``written``: global box; None if this rank writes nothing, and holds nothing that others do not.
    - ``shape``: of it.
    - ``inner``: the global box of whole chunks that is written from this rank's own part, and its index there.
    - ``edges``: the global boxes that are put together first, and their indices in the written box.
    - ``own``: for these: the place of this rank's values in the written box, and their index in its part.
    - ``sends``: another part, and the index of its values in this rank's part.
    - ``receives``: another part, and the place of its values in the written box, and their shape.
    - ``num_rows``: the rows that this part must hold, where the route is of these alone.
    """

    part: int
    written: Box | None
    shape: tuple[int, ...] = ()
    inner: tuple[Box, Index] | None = None
    edges: tuple[tuple[Box, Index], ...] = ()
    own: tuple[tuple[Index, Index], ...] = ()
    sends: tuple[tuple[int, Index], ...] = ()
    receives: tuple[tuple[int, Index, tuple[int, ...]], ...] = ()
    num_rows: int | None = None


def route_of(exchange: Exchange, units: Sequence[int]) -> Route:
    """Return the route of boxes; ``units`` is the shape of the smallest box to write."""
    held, written, part = exchange.held, exchange.written, exchange.part
    if held is None or written is None:
        return Route(part=part, written=None)
    inner, edges = whole_units(common_box(held, written), written, units)
    kept = [(within(box, written), within(box, held)) for edge in edges if (box := common_box(edge, held)) is not None]
    return Route(
        part=part,
        written=written,
        shape=exchange.shape,
        inner=None if inner is None else (inner, within(inner, held)),
        edges=tuple((edge, within(edge, written)) for edge in edges),
        own=tuple(kept),
        sends=tuple((other, within(box, held)) for other, box in exchange.sends if other != part),
        receives=tuple(
            (other, within(box, written), tuple(rows.stop - rows.start for rows in box))
            for other, box in exchange.receives
            if other != part
        ),
    )


class RowsBack:
    """Routes from a part's rows to their places in the source.

    All parts write a range of the source's rows each, whole chunks of it. Where each row goes is found once.

    - ``ids``: ``(num_owned,)`` int64 of each entity: the source's row of each row that this rank owns.
    """

    def __init__(self, ranks: Ranks, ids: Mapping[str, IntArray]) -> None:
        self._ranks, self._ids = ranks, ids
        self._known: dict[tuple[str, int, int], tuple[IntArray, list[IntArray], list[IntArray]]] = {}

    def route(self, field: OutputField) -> Route:
        """Return the route of a field. Collective over the domain on the first call for an entity and its chunks.

        Raises ConfigError: rows that come twice, such as the directed edges of a mesh: no order of the source has them.
        """
        dim, part = field.entity_dim, self._ranks.part
        key = field.entity, field.shape[dim], field.units[dim]
        if key not in self._known:
            self._known[key] = self._find(*key)
        bounds, sends, receives = self._known[key]
        rows = slice(int(bounds[part]), int(bounds[part + 1]))
        written = tuple(rows if i == dim else slice(0, size) for i, size in enumerate(field.shape))
        shape = tuple(each.stop - each.start for each in written)
        before: Index = (slice(None),) * dim
        return Route(
            part=part,
            written=written,
            shape=shape,
            edges=((written, (slice(None),) * len(shape)),),
            own=(((*before, receives[part]), (*before, sends[part])),),
            sends=tuple((to, (*before, ids)) for to, ids in enumerate(sends) if len(ids) and to != part),
            receives=tuple(
                (of, (*before, at), (*shape[:dim], len(at), *shape[dim + 1 :]))
                for of, at in enumerate(receives)
                if len(at) and of != part
            ),
            num_rows=len(self._ids[field.entity]),
        )

    def _find(self, entity: str, num_rows: int, unit: int) -> tuple[IntArray, list[IntArray], list[IntArray]]:
        ranks, ids = self._ranks, self._ids[entity]
        num_parts = int(np.prod(ranks.parts, dtype=np.int64))
        bounds = writer_bounds(even_bounds(num_rows, num_parts), unit)
        order = np.argsort(ids, kind="stable")
        cuts = np.searchsorted(ids[order], bounds)
        sends = [order[a:b] for a, b in itertools.pairwise(cuts)]
        places = [ids[rows] - bounds[part] for part, rows in enumerate(sends)]
        receives = ranks.exchange_rows(places)
        twice = sum(len(at) for at in receives) - len(np.unique(np.concatenate(receives)))
        error = None
        if twice:
            error = ConfigError(
                f"create: {twice} rows of {entity!r} come twice in the store, as edges of a mesh do, which it has both "
                "ways; write them with order='store'"
            )
        ranks.agree(error)
        return bounds, sends, receives

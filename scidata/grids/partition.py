"""How a grid is cut: crop, split and halo of every dimension. Pure arithmetic, for any rank of any world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import (
    chunk_bounds,
    compose,
    even_bounds,
    explicit_bounds,
    halo_widths,
    num_rows_of,
    rows_of,
    segments_of_slice,
    weighted_bounds,
    window,
)
from scidata.core.checks import check_int, names_of
from scidata.core.options import ReadOptions
from scidata.core.types import IntArray, Segment, Segments
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.plan.cut import chunk_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GridPartition:
    """The cut of a grid: global, the same on every rank.

    - ``selected``: for each dimension, the rows that crop and stride leave, as segments of the source's rows.
    - ``bounds``: ``(parts + 1,)`` int64 of each dimension, in selected rows; ``[0, size]`` if it is not sharded.
    """

    selected: Mapping[str, Segments]
    sizes: Mapping[str, int]
    axis_of_dim: Mapping[str, str]
    axis_sizes: Mapping[str, int]
    bounds: Mapping[str, IntArray]
    halo: Mapping[str, tuple[int, int]]
    periodic: frozenset[str]

    @property
    def num_parts(self) -> int:
        """Number of ranks that share one sample."""
        return math.prod(self.axis_sizes.values())

    def coordinate(self, part: int) -> dict[str, int]:
        """Return the position along each sharding axis of the ``part``-th rank, the last axis varying fastest."""
        if not 0 <= part < self.num_parts:
            raise ConfigError(f"rank {part} is out of range: the domain has {self.num_parts} ranks")
        index = np.unravel_index(part, tuple(self.axis_sizes.values()))
        return {axis: int(i) for axis, i in zip(self.axis_sizes, index, strict=True)}

    def _part(self, dim: str, coordinate: Mapping[str, int]) -> int:
        return coordinate[self.axis_of_dim[dim]] if dim in self.axis_of_dim else 0

    def owned_rows(self, dim: str, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return ``(start, stop)`` of the owned rows, in selected rows."""
        part = self._part(dim, coordinate)
        return int(self.bounds[dim][part]), int(self.bounds[dim][part + 1])

    def check_halos(self) -> None:
        """Refuse a halo that would have no rows: of a dimension that is neither split nor periodic."""
        idle = [dim for dim in self.halo if dim not in self.axis_of_dim and dim not in self.periodic]
        if idle:
            raise ConfigError(
                f"halo of {idle[0]!r}: it is not split ({', '.join(self.axis_of_dim) or 'nothing'} is), so that a rank "
                "has all of its rows, and none beyond the edge; leave it out, split it too, with shard=, or have it "
                f"wrap, with periodic={idle[0]!r}"
            )

    def halo_rows(self, dim: str, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return the rows below and above that the rank really holds: clipped at a non-periodic edge."""
        lo, hi = self.halo.get(dim, (0, 0))
        return halo_widths(self.bounds[dim], self._part(dim, coordinate), lo=lo, hi=hi, periodic=dim in self.periodic)

    def local_size(self, dim: str, coordinate: Mapping[str, int]) -> int:
        """Return the number of rows with halo."""
        start, stop = self.owned_rows(dim, coordinate)
        return stop - start + sum(self.halo_rows(dim, coordinate))

    def local_rows(self, dim: str, coordinate: Mapping[str, int]) -> IntArray:
        """Return which of the selected rows the rank holds, halo included, ``(local_size,)`` int64."""
        return rows_of(self.window(dim, coordinate))

    def segments(self, dim: str, coordinate: Mapping[str, int]) -> Segments:
        """Return the rank's rows with halo, as segments of the source's rows."""
        return compose(self.selected[dim], self.window(dim, coordinate))

    def window(self, dim: str, coordinate: Mapping[str, int]) -> tuple[Segment, ...]:
        """Return the rank's rows with halo, as segments of the selected rows."""
        lo, hi = self.halo.get(dim, (0, 0))
        return window(self.bounds[dim], self._part(dim, coordinate), lo=lo, hi=hi, periodic=dim in self.periodic)


def per_dim(value: Any, dims: Sequence[str], known: Sequence[str], argument: str) -> dict[str, Any]:
    """Spread an argument that is either one value for ``dims`` or a mapping by dimension."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(dims, value)
    return {resolve_dim(name, known, argument): item for name, item in value.items()}


def resolve_dim(name: str | int, known: Sequence[str], argument: str) -> str:
    """Return the dimension that a name or an integer position means."""
    if isinstance(name, int | np.integer) and not isinstance(name, bool) and -len(known) <= name < len(known):
        return known[name]
    if name not in known:
        raise UnknownNameError(
            f"{argument} names dimension {name!r}, which no field has{near_matches(str(name), known)}"
        )
    return str(name)


def _halo_pair(dim: str, width: Any) -> tuple[int, int]:
    pair = tuple(width) if isinstance(width, tuple | list) else (width, width)
    if len(pair) != 2 or not all(isinstance(w, int | np.integer) for w in pair):
        raise ConfigError(f"halo of {dim!r} must be a width or (below, above), not {width!r}")
    if min(pair) < 0:
        raise ConfigError(f"halo of {dim!r} must not be negative: {pair}")
    return int(pair[0]), int(pair[1])


def chunk_edges(selected: Segments, grid: int | IntArray) -> IntArray:
    """Return the selected rows at which another chunk of the source begins; ``grid``: ``ArrayLayout.chunk_grid``."""
    return np.flatnonzero(np.diff(chunk_of(rows_of(selected), grid))).astype(np.int64) + 1


def selected_rows(crop: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Segments]:
    """Return the rows of each dimension after a crop."""
    selected = {}
    for dim, size in sizes.items():
        rows = crop.get(dim, slice(None))
        selected[dim] = _named(f"isel of {dim!r}", segments_of_slice, rows, size)
        if dim in crop and not selected[dim]:
            raise ConfigError(f"isel leaves no rows of {dim!r}, which has {size}")
    return selected


def make_partition(
    sizes: Mapping[str, int],
    options: ReadOptions,
    *,
    axis_sizes: Mapping[str, int],
    chunks: Mapping[str, int | IntArray],
) -> GridPartition:
    """Cut a grid as its options say: ``isel`` before the split, which is ``shard``; each mesh axis once.

    Needs no I/O, so errors are the same on every rank.

    - ``chunks``: largest chunk of the fields along each dimension, or the edges of its chunks, for ``bounds="chunk"``.
    """
    known = list(sizes)
    crop = per_dim(options.isel or {}, known, known, "isel")
    selected = selected_rows(crop, sizes)
    lengths = {dim: num_rows_of(selected[dim]) for dim in known}

    shard = {resolve_dim(dim, known, "shard"): axis for dim, axis in (options.shard or {}).items()}
    if len(set(shard.values())) != len(shard):
        raise ConfigError(f"shard splits two dimensions over one mesh axis: {dict(shard)}; give each its own axis")
    for dim in shard:
        if isinstance(crop.get(dim), int | np.integer):
            raise ConfigError(f"isel takes a single row of {dim!r}, so it cannot be sharded")

    sharded, weights = list(shard), options.weights
    kinds = per_dim(options.bounds, sharded, known, "bounds")
    aligns = per_dim(options.align, sharded, known, "align")
    costs = per_dim(weights, sharded, known, "weights") if weights is not None else {}
    if weights is not None and not isinstance(weights, Mapping) and len(sharded) > 1:
        raise ConfigError("weights need a mapping {dim: costs} on a 2-D domain")
    for argument, given in (("bounds", kinds), ("weights", costs)):
        stray = [dim for dim in given if dim not in shard]
        if stray:
            raise ConfigError(f"{argument} names {stray[0]!r}, which is not sharded: shard is {dict(shard)}")

    cuts: dict[str, IntArray] = {dim: np.array([0, lengths[dim]], np.int64) for dim in known}
    for dim, axis in shard.items():
        unit = check_int("align", aligns.get(dim, 1), least=1)
        cuts[dim] = _named(
            f"dimension {dim!r}",
            _bounds_of, kinds.get(dim, "even"), costs.get(dim), selected[dim], axis_sizes[axis], align=unit,
            chunk=chunks.get(dim, 1),
        )  # fmt: skip

    pairs = {dim: _halo_pair(dim, width) for dim, width in per_dim(options.halo, sharded, known, "halo").items()}
    names = names_of("periodic", options.periodic)
    return GridPartition(
        selected=selected,
        sizes=lengths,
        axis_of_dim=shard,
        axis_sizes={axis: int(size) for axis, size in axis_sizes.items() if axis in shard.values()},
        bounds=cuts,
        halo={dim: pair for dim, pair in pairs.items() if pair != (0, 0)},
        periodic=frozenset(resolve_dim(name, known, "periodic") for name in names),
    )


_KINDS = ("even", "chunk")


def _bounds_of(
    kind: npt.ArrayLike,
    costs: npt.ArrayLike | None,
    selected: Segments,
    num_parts: int,
    *,
    align: int,
    chunk: int | IntArray,
) -> IntArray:
    """Cut the selected rows of one dimension; ``chunk``: of ``make_partition`` along it."""
    rows = num_rows_of(selected)
    if costs is not None:
        if np.shape(costs)[:1] != (rows,):
            given = f"{len(np.asarray(costs))} values" if np.ndim(costs) else f"one number, {costs!r},"
            raise ConfigError(f"weights have {given} for {rows} selected rows")
        return weighted_bounds(costs, num_parts, align=align)
    if not isinstance(kind, str):
        return explicit_bounds(kind, rows, num_parts)
    if kind == "even":
        return even_bounds(rows, num_parts, align=align)
    if kind == "chunk":
        return chunk_bounds(rows, num_parts, edges=chunk_edges(selected, chunk), align=align)
    raise ConfigError(f"bounds must be 'even', 'chunk' or a list, not {kind!r}{near_matches(kind, _KINDS)}")


def _named(where: str, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function, and put ``where`` before the message of its error."""
    try:
        return function(*args, **options)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None

"""Patches of global samples: where each begins, as a pure function of seed, epoch and number; and how one is cut.

A patch is a crop of one sample, which is cut over the ranks as a sample is. Its halo is that of the grid: rows beyond
the edges of the patch are read, too, where the grid has some.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import rows_of, wrapped
from scidata.core.options import ReadOptions
from scidata.core.patches import Patches
from scidata.core.types import Array, FloatArray, IntArray, Segment, Source
from scidata.errors import ConfigError
from scidata.grids.partition import GridPartition, chunk_edges, make_partition, resolve_dim
from scidata.read.arrays import array_of, read_array
from scidata.sources.cf import decoding_of

#: The first row of a patch along each of its dims, in selected rows.
Origin: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PatchPartition(GridPartition):
    """The cut of a patch: sizes and bounds are its own, ``selected`` are all rows of the grid."""

    whole: Mapping[str, int]
    origin: Mapping[str, int]

    def at(self, origin: Origin) -> PatchPartition:
        """Return the cut of the patch that begins at ``origin``."""
        return replace(self, origin=dict(zip(self.origin, origin, strict=True)))

    def beyond(self, dim: str) -> tuple[int, int]:
        """Return how many rows of its halo, at most, lie before the patch and after it, inside the grid."""
        lo, hi = self.halo.get(dim, (0, 0))
        if dim not in self.origin or dim in self.periodic:
            return (lo, hi) if dim in self.origin else (0, 0)
        return min(lo, self.origin[dim]), min(hi, self.whole[dim] - self.origin[dim] - self.sizes[dim])

    def halo_rows(self, dim: str, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return the rows below and above that the rank really holds: clipped at a non-periodic edge of the grid."""
        if dim not in self.origin:
            return super().halo_rows(dim, coordinate)
        (lo, hi), (start, stop) = self.halo.get(dim, (0, 0)), self.owned_rows(dim, coordinate)
        before, after = self.beyond(dim)
        return (0, 0) if start == stop else (min(lo, start + before), min(hi, self.sizes[dim] - stop + after))

    def most_rows(self, dim: str, coordinate: Mapping[str, int]) -> tuple[int, int, int]:
        """Return the rows below, owned and above of a rank's buffers, which hold any patch."""
        (start, stop), (lo, hi) = self.owned_rows(dim, coordinate), self.halo.get(dim, (0, 0))
        if dim not in self.origin:
            lo, hi = self.halo_rows(dim, coordinate)
        return (lo, stop - start, hi) if stop > start else (0, 0, 0)

    def check_halos(self) -> None:
        """Refuse a halo that would have no rows: of a dimension that is neither split, nor periodic, nor of patches."""
        kept = {dim: pair for dim, pair in self.halo.items() if dim not in self.origin}
        GridPartition.check_halos(replace(self, halo=kept))

    def window(self, dim: str, coordinate: Mapping[str, int]) -> tuple[Segment, ...]:
        """Return the rank's rows with halo, as segments of the selected rows."""
        if dim not in self.origin:
            return super().window(dim, coordinate)
        (start, stop), (below, above) = self.owned_rows(dim, coordinate), self.halo_rows(dim, coordinate)
        first = self.origin[dim]
        return wrapped(first + start - below, first + stop + above, self.whole[dim])


def patch_partition(
    whole: GridPartition, size: Mapping[str, int], options: ReadOptions, *, axis_sizes: Mapping[str, int],
    chunks: Mapping[str, int],
) -> PatchPartition:  # fmt: skip
    """Cut the patch at the grid's first rows; ``whole`` is the grid after the crop, ``options`` are of the cut."""
    made = replace(options, isel=None)
    cut = make_partition({**whole.sizes, **size}, made, axis_sizes=axis_sizes, chunks=chunks)
    origin = {dim: 0 for dim, n in size.items() if n < whole.sizes[dim]}
    return PatchPartition(**vars(cut) | {"selected": whole.selected}, whole=whole.sizes, origin=origin)


class PatchPlan:
    """Which patch each sample is.

    - ``chunks``: rows of the source's largest chunk along each dim.
    - ``weights``: of all rows of the patches' dims but that of steps.
    - ``dims``: those along which patches have fewer rows than the grid, but for that of steps.
    """

    def __init__(
        self, patches: Patches, cut: PatchPartition, *, sample_dim: str | None, num_samples: int,
        chunks: Mapping[str, int], weights: FloatArray | None,
    ) -> None:  # fmt: skip
        self.patches, self.dims = patches, tuple(cut.origin)
        self.starts = [self._starts(dim, cut.whole[dim], chunks, cut) for dim in self.dims]
        self.shape = tuple(map(len, self.starts))
        self.per_sample = math.prod(self.shape) if patches.is_regular else patches.num
        self._bases: Sequence[int] = range(num_samples)
        if sample_dim is not None and sample_dim in patches.size:
            rows = num_samples + patches.size[sample_dim] - 1 if num_samples else 0
            self._bases = self._starts(sample_dim, rows, chunks).tolist() if rows else ()
        self.num = len(self._bases) * self.per_sample
        self._edges = None if weights is None else self._edges_of(weights, cut, sample_dim)

    def _starts(self, dim: str, rows: int, chunks: Mapping[str, int], cut: PatchPartition | None = None) -> IntArray:
        """Return the rows at which a patch may begin along a dim, or tiles do, ascending."""
        size, unit, wraps = self.patches.size[dim], self.patches.units[dim], cut is not None and dim in cut.periodic
        chunk = chunks.get(dim, 1)
        if unit == 0 and cut is not None:
            allowed = np.concatenate([[0], chunk_edges(cut.selected[dim], chunk)])
        else:
            allowed = np.arange(0, rows, unit or chunk)
        fits = allowed if wraps else allowed[allowed + size <= rows]
        if not self.patches.is_regular:
            return fits.astype(np.int64)
        step, found = size - self.patches.overlaps[dim], [0]
        while (found[-1] + step < rows) if wraps else (found[-1] + size < rows):
            within = fits[(fits > found[-1]) & (fits <= found[-1] + step)]
            if not len(within):
                at = "edges of chunks" if not unit else f"multiples of {unit}"
                raise ConfigError(
                    f"patch: tiles of {size} rows that begin at {at} do not cover the {rows} rows of {dim!r} from row "
                    f"{found[-1] + size} on; crop with isel, or choose another align"
                )
            found.append(int(within[-1]))
        return np.array(found, np.int64)

    def base(self, index: int) -> int:
        """Return the number of the global sample that a sample is a patch of."""
        return self._bases[index // self.per_sample]

    @property
    def bases(self) -> IntArray:
        """The global sample of each sample, ``(num,)`` int64."""
        return np.repeat(np.asarray(self._bases, np.int64), self.per_sample)

    def origin(self, index: int, epoch: int) -> Origin:
        """Return where a sample begins along each of ``dims``."""
        if self.patches.is_regular:
            place = np.unravel_index(index % self.per_sample, self.shape) if self.shape else ()
            return tuple([int(starts[k]) for starts, k in zip(self.starts, place, strict=True)])
        stream = np.random.default_rng(np.random.SeedSequence([self.patches.seed, epoch, index]))
        if self._edges is None:
            return tuple([int(starts[stream.integers(len(starts))]) for starts in self.starts])
        drawn = np.searchsorted(self._edges, stream.random() * self._edges[-1], side="right")
        last = np.searchsorted(self._edges, self._edges[-1])  # where rounding brings the number to the very end
        place = np.unravel_index(min(int(drawn), int(last)), self.shape)
        return tuple([int(starts[k]) for starts, k in zip(self.starts, place, strict=True)])

    @property
    def recipe(self) -> list[object]:
        """What decides the patches, as plain values."""
        asked, edges = self.patches, self._edges
        shares = None if edges is None else _digest((edges / edges[-1]).round(6))
        drawn = [] if asked.is_regular else [asked.num, asked.seed, shares]
        starts = [f"{len(starts)} places, {_digest(starts)}" for starts in self.starts]
        return [asked.order, dict(asked.size), starts, len(self._bases), *drawn]

    def _edges_of(self, weights: FloatArray, cut: PatchPartition, sample_dim: str | None) -> FloatArray:
        """Return the running sum of the weights of all places where a patch may begin."""
        try:
            found = np.nan_to_num(np.asarray(weights, np.float64), nan=0.0, posinf=np.inf)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"patch: weights must be an array of numbers, or the name of a field: {error}") from error
        size = {dim: n for dim, n in self.patches.size.items() if dim != sample_dim}
        whole = tuple(cut.whole[dim] for dim in size)
        if found.shape != whole:
            raise ConfigError(f"patch: weights along {', '.join(size)} have shape {whole}, not {found.shape}")
        if not np.isfinite(found).all() or (found < 0).any():
            raise ConfigError("patch: weights must be finite and not negative")
        for axis, (dim, n) in enumerate(size.items()):
            wrapping = np.concatenate([found, found.take(range(n), axis)], axis)
            sums = np.concatenate([np.zeros_like(wrapping.take([0], axis)), np.cumsum(wrapping, axis)], axis)
            starts = self.starts[self.dims.index(dim)] if dim in self.dims else np.zeros(1, np.int64)
            found = np.maximum(sums.take(starts + n, axis) - sums.take(starts, axis), 0)
        if not found.sum() > 0:
            raise ConfigError("patch: weights are 0 wherever a patch may lie; leave them out, or give others")
        return np.cumsum(found.reshape(-1))


def _digest(values: Array) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:8]


def named(patches: Patches, sizes: Mapping[str, int], sample_dims: Sequence[str]) -> Patches:
    """Return patches with dims by name, that fit into a grid of these sizes."""
    names = {given: resolve_dim(given, list(sizes), "patch") for given in patches.size}
    for given, dim in names.items():
        if dim in sample_dims[:-1]:
            raise ConfigError(f"patch: {dim!r} numbers the samples; a patch lies inside one of them")
        if patches.size[given] > sizes[dim]:
            raise ConfigError(f"patch of {dim!r} has {patches.size[given]} rows, and the grid has {sizes[dim]}")
    return patches.renamed(names)


def weights_of(
    source: Source, name: str, dims: Sequence[str], sample_dims: Sequence[str], whole: GridPartition
) -> FloatArray:
    """Return a field's mean along all dims but ``dims``, of their selected rows."""
    layout = array_of(source, name)
    if not set(dims) <= set(layout.dims) or set(sample_dims) & set(layout.dims):
        raise ConfigError(
            f"patch: weights: field {name!r} has dims {', '.join(layout.dims) or 'none'}; name one that has "
            f"{', '.join(dims)}, and is the same in all samples, or give an array"
        )
    values = read_array(source, layout, decoding=decoding_of(layout, np.dtype("f8")))
    for axis, dim in enumerate(layout.dims):
        values = values.take(rows_of(whole.selected[dim]), axis) if dim in whole.selected else values
    kept = [dim for dim in layout.dims if dim in dims]
    others = tuple(axis for axis, dim in enumerate(layout.dims) if dim not in dims)
    found: FloatArray = np.nan_to_num(values).mean(axis=others)
    return found.transpose([kept.index(dim) for dim in dims])

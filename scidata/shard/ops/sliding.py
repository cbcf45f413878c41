"""Shared by convolution, pooling and interpolation: the owner of each output row, and the input rows that it needs.

**Who owns an output row.** An op that keeps the extent of a sharded dim keeps its sizes. One that comes to an extent
that the tensor had before splits it as it was split there. Otherwise a row belongs to the rank that owns the input row
in the middle of its window (the lower of two). All follow from the layout alone, so every rank knows all windows, and
no part has to be a multiple of a stride. A rank that owns no output row computes one on filled rows and drops it, so
that its parameters have their gradients of zero.

Rows 0 to 4 are on rank 0 and 5 to 9 on rank 1. A kernel of 3 with stride 2 and padding 1 has outputs 0 to 4, from the
rows around 0, 2, 4, 6 and 8: three of them are rank 0's, and its last window takes row 5 of rank 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, owners_of
from scidata.shard.comm.transport import Group
from scidata.shard.op_table import TorchFunction
from scidata.shard.ops.align import finish
from scidata.shard.rows.runs import (
    FILLED,
    Runs,
    RunsPlan,
    edges_of,
    fetch_runs,
    halo_runs,
    parts_as_runs,
    plan_runs,
    runs_of,
    window_runs,
)
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor

Extents = int | Sequence[int]  # of all spatial dims, or of each


def per_dim(value: Extents, count: int) -> tuple[int, ...]:
    """Repeat a number that stands for all dims."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * (count if len(value) == 1 else 1)


# -- output rows ---------------------------------------------------------------------------------------------------


class Middle(NamedTuple):
    """The input row under output row o: ``(o * times + plus) // over``, clipped to the dim."""

    times: int = 1
    plus: int = 0
    over: int = 1


def _owned_outputs(sizes: tuple[int, ...], num_out: int, middle: Middle) -> tuple[int, ...]:
    rows = (np.arange(num_out) * middle.times + middle.plus) // middle.over
    bounds = bounds_of(sizes)
    owners = owners_of(bounds, np.clip(rows, 0, bounds[-1] - 1))
    return tuple(np.bincount(owners, minlength=len(sizes)).tolist())


def output_sizes(spec: ShardSpec, dim: int, num_out: int, middle: Middle) -> tuple[int, ...]:
    """Return the sizes of a sharded dim after an op that gives it ``num_out`` rows; the rule is the module's."""
    axis = spec.sharded[dim]
    sizes = spec.sizes_of(axis)
    if num_out == spec.global_shape[dim]:
        return sizes
    known = spec.past_sizes.get((axis, num_out))
    return known if known is not None else _owned_outputs(sizes, num_out, middle)


# -- input rows ----------------------------------------------------------------------------------------------------


def _inside(available: tuple[Runs, ...], wanted: tuple[Runs, ...]) -> tuple[Runs, ...] | None:
    """Return where each rank finds the wanted rows among its own; None if any rank lacks one."""
    result = []
    for has, wants in zip(available, wanted, strict=True):
        place = {}
        offset = 0
        for start, count in has:
            place.update({start + i: offset + i for i in range(count)})
            offset += count
        rows = [FILLED if start == FILLED else start + i for start, count in wants for i in range(count)]
        if any(row not in place for row in rows if row != FILLED):
            return None
        result.append(runs_of([FILLED if row == FILLED else place[row] for row in rows]))
    return tuple(result)


class Slide(NamedTuple):
    """Windows along one dim, seen from one rank."""

    sizes: tuple[int, ...] | None  # outputs of each rank; None where the dim is not sharded
    first: int  # this rank's first output
    length: int  # this rank's outputs
    plan: RunsPlan  # of the rows under them


class _Asked(NamedTuple):
    """A slide, the key by which its layout keeps it, and the rows that each rank wants for it."""

    slide: Slide
    key: tuple[Hashable, ...]
    wanted: Callable[[], tuple[Runs, ...]]


def _from_halo(x: ShardTensor, asked: Mapping[int, _Asked], fill: float) -> Tensor | None:
    """Take the rows from the held halo, if it is wide enough on every rank."""
    padded = x.held_halo()
    if padded is None:
        return None
    plans = {dim: _plan_in_halo(x.spec, dim, x.halo.get(dim), asked.get(dim)) for dim in {*x.halo, *asked}}
    if not all(plans.values()):
        return None
    for dim, (plan,) in plans.items():
        padded = fetch_runs(padded, plan, dim, None, fill=fill)
    return padded


def _plan_in_halo(spec: ShardSpec, dim: int, halo: HaloDim | None, asked: _Asked | None) -> tuple[RunsPlan, ...]:
    """Plan to take rows from a part with its halo; None if the halo is too narrow on some rank."""

    def make() -> tuple[RunsPlan, ...]:
        sizes, rank, _ = spec.parts(dim)
        has = parts_as_runs(sizes) if halo is None else halo_runs(sizes, **vars(halo))
        found = _inside(has, parts_as_runs(sizes) if asked is None else asked.wanted())
        return () if found is None else (plan_runs((sum(n for _, n in has[rank]),), 0, (found[rank],)),)

    return spec.plans.get_or_make(("in halo", dim, halo, asked and asked.key), make)


# -- an op on windows ----------------------------------------------------------------------------------------------


@dataclass
class Windows:
    """An op on windows of a tensor of some layout: planned dim by dim, then run on the rows that :meth:`fetch` returns.

    Plans are kept with the layout. So may all of it be, once it is complete: a step of a model then looks it up.
    """

    spec: ShardSpec
    shape: list[int] = field(init=False)
    asked: dict[int, _Asked] = field(default_factory=dict)
    cuts: dict[int, tuple[int, int]] = field(default_factory=dict)  # rows of the op's result that are this rank's

    def __post_init__(self) -> None:
        self.shape = list(self.spec.global_shape)

    @property
    def fills(self) -> bool:
        """Whether any rank gets filled rows."""
        return any(each.slide.plan.fills for each in self.asked.values())

    def keep(self, dims: Sequence[int]) -> None:
        """Keep dims unchanged; ranks with empty parts compute on a filled row."""
        for dim in self.spec.emptied:
            if dim in dims:
                self.slide(dim, self.spec.global_shape[dim], Middle(), lambda start, stop: ((start, stop - start),), 1)

    def slide(
        self,
        dim: int,
        num_out: int,
        middle: Middle,
        rows: Callable[[int, int], Runs],
        least: int,
        key: tuple[Hashable, ...] = (),
    ) -> tuple[int, int]:
        """Give a dim ``num_out`` rows: outputs ``[start, stop)`` need the input rows ``rows(start, stop)``.

        A rank without outputs gets ``least`` filled rows, as many as give it one. ``key`` has all that ``rows`` depends
        on besides. Returns this rank's first output and the number of its outputs.
        """
        spec = self.spec
        self.shape[dim] = num_out

        def sizes() -> tuple[int, ...]:
            return output_sizes(spec, dim, num_out, middle) if dim in spec.sharded else (num_out,)

        def wanted() -> tuple[Runs, ...]:
            return tuple(rows(a, b) if b > a else ((FILLED, least),) for a, b in pairwise(edges_of(sizes())))

        def make() -> Slide:
            parts, rank, _ = spec.parts(dim)
            new = sizes()
            plan = plan_runs(parts, rank, wanted())
            return Slide(new if dim in spec.sharded else None, edges_of(new)[rank], new[rank], plan)

        full = ("slide", dim, num_out, middle, least, *key)
        slide: Slide = spec.plans.get_or_make(full, make)
        self.asked[dim] = _Asked(slide, full, wanted)
        return slide.first, slide.length

    def resize(self, func: TorchFunction, dim: int, num_out: int) -> bool:
        """Give a dim ``num_out`` rows, at least one; return whether it is sharded, otherwise torch's function resizes
        it.
        """
        if num_out < 1:
            spec, name = self.spec, getattr(func, "__name__", func)
            raise RuntimeError(f"{name}: a dim of {spec.global_shape[dim]} rows gives {num_out} output rows ({spec})")
        self.shape[dim] = num_out
        return dim in self.spec.sharded

    def slide_under(self, dim: int, num_out: int, reach: int, stride: int = 1, below: int = 0) -> tuple[int, int]:
        """Slide windows of ``reach`` rows, the first of which begins ``below`` rows before the dim."""
        extent = self.spec.global_shape[dim]

        def rows(start: int, stop: int) -> Runs:
            return window_runs(start * stride - below, (stop - 1) * stride - below + reach, extent)

        middle = Middle(times=stride, plus=(reach - 1) // 2 - below)
        return self.slide(dim, num_out, middle, rows, reach, ("under", stride, below))

    def slide_back(self, dim: int, num_out: int, reach: int, stride: int, padding: int) -> None:
        """Give a dim the outputs of a transposed convolution, each from the input rows that reach it.

        Filled rows are added at both ends until the rows' outputs cover those of this rank, which are cut out then.
        With stride 2 and a kernel of 3, row 4 reaches outputs 8 to 10: a rank that owns outputs 9 to 12 takes rows 4 to
        6, whose outputs begin at 8, so its own begin one row later.
        """
        extent = self.spec.global_shape[dim]

        def lowest(start: int) -> int:
            begin = start + padding  # in outputs before they are cropped
            return min(-(-(begin - reach + 1) // stride), begin // stride)

        def rows(start: int, stop: int) -> Runs:
            begin, end, low = start + padding, stop - 1 + padding, lowest(start)
            high = max(end // stride, -(-(end - reach + 1) // stride))
            needed = range(max(0, -(-(begin - reach + 1) // stride)), min(extent - 1, end // stride) + 1)
            if not needed:
                return ((FILLED, high - low + 1),)
            runs = (FILLED, needed.start - low), (needed.start, len(needed)), (FILLED, high + 1 - needed.stop)
            return tuple(run for run in runs if run[1])

        middle = Middle(plus=padding - (reach - 1) // 2, over=stride)
        start, count = self.slide(dim, num_out, middle, rows, 1, ("back", reach, stride, padding))
        self.cuts[dim] = (start - (lowest(start) * stride - padding), count) if count else (0, 0)

    @cached_property
    def _moves(self) -> list[tuple[RunsPlan, int, Group]]:
        """What is fetched along which dim, from which group."""
        # dims that are not sharded first, which may shrink the part that is sent; all ranks sort alike
        dims = sorted(self.asked, key=lambda d: d in self.spec.sharded)
        return [(self.asked[dim].slide.plan, dim, self.spec.parts(dim)[2]) for dim in dims]

    def fetch(self, x: ShardTensor, fill: float = 0.0) -> Tensor:
        """Return this rank's part of ``x`` with the rows that it needs along some dims, sharded or not.

        From a halo that is held and wide enough, else by one exchange for each mesh axis along which any rank needs
        rows of another; collective then. The second exchange carries the corners.
        """
        if x.padded is not None and any(plan.pairs for plan, *_ in self._moves):
            held = _from_halo(x, self.asked, fill)
            if held is not None:
                return held
        local = x.local
        for plan, dim, group in self._moves:
            local = fetch_runs(local, plan, dim, group, fill=fill)
        return local

    def own(self, result: Tensor) -> Tensor:
        """Cut this rank's rows out of the op's result."""
        for dim, (begin, rows) in self.cuts.items():
            result = result.narrow(dim, begin, rows)
        for dim, (slide, *_) in self.asked.items():
            if slide.length == 0:
                result = result.narrow(dim, 0, 0)
        return result

    def finish(self, result: Tensor) -> Tensor:
        """Wrap the op's result on the fetched rows."""
        return finish(self.own(result), self.layout)

    @property
    def sizes(self) -> list[tuple[int, ...] | None]:
        """The sizes of the result's parts along each mesh axis."""
        spec, sizes = self.spec, list(self.spec.sizes)
        for dim, (slide, *_) in self.asked.items():
            if slide.sizes is not None:
                sizes[spec.sharded[dim]] = slide.sizes
        return sizes

    @cached_property
    def layout(self) -> ShardSpec:
        """The layout of the result, whose shape is known by now."""
        return self.spec.resize(self.shape, self.sizes)


def row_values(values: Sequence[float], dim: int, like: Tensor) -> Tensor:
    """Return numbers, one for each row along ``dim`` of a tensor, in the shape that broadcasts over it."""
    shape = [-1 if d == dim else 1 for d in range(like.ndim)]
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(shape)

"""A rank's part of a metric's tensors: local values, and their place in the whole."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from scidata.device_mesh import axes_of, axis_rank, further_axes
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard import ShardTensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Place of a rank's box in a tensor.

    - ``global_shape``, ``local_shape``, ``offsets``: of the whole, of the box, and of the box's first element, by dim.
    - ``split``: which dims are sharded over several ranks.
    - ``axes``: mesh axes along which ranks have different boxes; along the others they have the same one.
    """

    dims: tuple[str, ...]
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    split: tuple[bool, ...]
    axes: frozenset[str] = frozenset()

    def without(self, dim: int) -> Layout:
        """Drop a dim that is not split."""
        return self.select([d for d in range(len(self.dims)) if d != dim])

    def box(self, dims: Iterable[int]) -> list[tuple[int, int]]:
        """Return the start and the size of the box along some dims."""
        return [(self.offsets[d], self.local_shape[d]) for d in dims]

    def select(self, kept: Sequence[int]) -> Layout:
        """Keep some dims."""
        by_dim = ("dims", "global_shape", "local_shape", "offsets", "split")
        found: dict[str, Any] = {name: tuple(getattr(self, name)[d] for d in kept) for name in by_dim}
        return replace(self, **found)


def cut_out(values: Tensor, box: Iterable[tuple[int, int]]) -> Tensor:
    """Cut a box, given by its start and size along each dim, out of a whole tensor."""
    for dim, (start, size) in enumerate(box):
        values = values.narrow(dim, start, size)
    return values


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The axes of a mesh (None: one process) over which a metric adds up."""

    mesh: DeviceMesh | None
    dp: str | None
    domain: tuple[str, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp: str | None, domain: str | Sequence[str] | None) -> Ranks:
        """Tell the axes apart as ``open_dataset`` does; without ``domain``, further axes (of members) join it."""
        if mesh is None:
            return cls(mesh=None, dp=None, domain=())
        dp_axis, axes = axes_of(mesh, dp=dp, domain=domain)
        more = further_axes(mesh, (dp_axis, *axes)) if domain is None else ()
        return cls(mesh=mesh, dp=dp_axis, domain=(*axes, *more))

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinate along each axis."""
        axes = (*self.domain, *([] if self.dp is None else [self.dp]))
        return {axis: axis_rank(self.mesh, axis) for axis in axes}

    def counts(self, layout: Layout) -> bool:
        """Whether this rank's values are counted: True for the first of the ranks with the same box."""
        return all(axis_rank(self.mesh, axis) == 0 for axis in self.domain if axis not in layout.axes)


def part_of(x: Tensor, dims: tuple[str, ...], ranks: Ranks, what: str) -> tuple[Tensor, Layout]:
    """Return the values that this rank owns, without a gradient, and their place. No communication."""
    if isinstance(x, DTensor):
        raise ConfigError(f"{what} is a DTensor: make a ShardTensor of it, with scidata.from_dtensor()")
    if x.is_complex():
        raise ConfigError(f"{what}: complex values; give abs(), or real and imaginary parts as two fields")
    if x.ndim != len(dims):
        raise ConfigError(f"{what} has {x.ndim} dims {tuple(x.shape)}, but there are {len(dims)} names: {dims}")
    if not isinstance(x, ShardTensor):
        shape = tuple(x.shape)
        return x.detach(), Layout(
            dims=dims, global_shape=shape, local_shape=shape, offsets=(0,) * x.ndim, split=(False,) * x.ndim
        )
    spec = x.spec
    names = frozenset(spec.axes[axis].name for axis in spec.sharded.values() if spec.axes[axis].size > 1)
    if not names <= set(ranks.domain):
        known = f"that has domain axes {', '.join(ranks.domain)}" if ranks.mesh is not None else "made without a mesh"
        raise ConfigError(f"{what} is sharded over {', '.join(sorted(names))}, on a metric {known}; give it mesh=mesh")
    layout = Layout(
        dims=dims,
        global_shape=spec.global_shape,
        local_shape=spec.local_shape,
        offsets=spec.offsets,
        split=tuple(dim in spec.sharded and spec.axes[spec.sharded[dim]].size > 1 for dim in range(spec.ndim)),
        axes=names,
    )
    return x.to_local().detach(), layout


def whole_along(x: Tensor, dim: int, first: int) -> Tensor:
    """Gather a tensor's rows along a dim sharded from ``first`` on. Collective over the axis that shards them."""
    axis = x.spec.sharded.get(dim) if isinstance(x, ShardTensor) else None
    if axis is None or not isinstance(x, ShardTensor) or x.spec.axes[axis].size < 2:
        return x
    others = [d for d in range(first, x.ndim) if d not in x.spec.sharded]
    placements = list(x.spec.placements)
    placements[axis] = Shard(max(others, key=lambda d: x.shape[d])) if others else Replicate()
    return x.redistribute(placements=placements)


def aligned(parts: Sequence[tuple[Tensor, Layout]], names: Sequence[str]) -> tuple[list[Tensor], Layout]:
    """Return the parts as the same box of tensors of one shape; cut parts that are whole on each rank."""
    reference = max((layout for _, layout in parts), key=lambda layout: len(layout.axes))
    found, box = [], reference.box(range(len(reference.dims)))
    for (values, layout), name in zip(parts, names, strict=True):
        own = values
        if layout.global_shape != reference.global_shape:
            is_part = layout.global_shape == reference.local_shape and not layout.axes
            hint = "this looks like a rank's own part; make a ShardTensor of it, with ShardTensor.from_local()"
            raise ShardLayoutError(
                f"{name} has shape {layout.global_shape}, and the others have {reference.global_shape}: "
                f"{hint if is_part else 'a metric compares tensors of one shape'}"
            )
        begins = [start - at for (start, _), at in zip(box, layout.offsets, strict=True)]
        ends = [begin + n for begin, n in zip(begins, reference.local_shape, strict=True)]
        inside = min(begins, default=0) >= 0 and all(map(operator.le, ends, layout.local_shape))
        if layout.axes < reference.axes and inside:  # of all members, say
            own = cut_out(values, zip(begins, reference.local_shape, strict=True))
        elif layout.box(range(len(layout.dims))) != box:
            raise ShardLayoutError(
                f"{name} and the other tensors are split differently, {layout.local_shape} from {layout.offsets} and "
                f"{reference.local_shape} from {reference.offsets}: call redistribute() on one of them"
            )
        found.append(own)
    return found, reference

"""Tensor parallelism by torch beside the domain: ShardTensors in the hooks of ``parallelize_module``.

The hooks hand a module's input to ``DTensor.from_local``, and take ``to_local()`` of its output. In between, a tensor
is split along two kinds of axes: its rows over the domain, its features over ``tp``. ShardTensors can be split by
several axes, so it is one on a mesh of both; it shows the hooks the axes of ``tp`` alone, as a DTensor would.
Parameters that are DTensors join it by their local parts. ``(6, 8)`` on 2 domain x 2 tp ranks: parts are (3, 4); the
hooks see the placement ``Shard(1)``, operations see ``(Shard(0), Shard(1))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scidata.core.bounds import chunk_sizes
from scidata.errors import ShardLayoutError
from scidata.shard.axes import kept_spec
from scidata.shard.comm.sums import defer, deferred_groups
from scidata.shard.layouts import add_up
from scidata.shard.memory import memory_of
from scidata.shard.op_table import TorchFunction, Types, unsupported
from scidata.shard.spec import UNKNOWN, ShardSpec, Strides, dim_of
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import (
    forbid_address,
    make_wrapper,
    root_mesh,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)


class _Meshes(NamedTuple):
    """A domain, the axes of tensor parallelism beside it, and the mesh of both."""

    domain: DeviceMesh
    tp: DeviceMesh
    both: DeviceMesh
    domain_axes: tuple[int, ...]  # of the mesh of both
    tp_axes: tuple[int, ...]


def _joined(domain: DeviceMesh, tp: DeviceMesh) -> _Meshes:
    root, own, other = root_mesh(domain), domain.mesh_dim_names or (), tp.mesh_dim_names or ()
    names = root.mesh_dim_names or ()
    if root != root_mesh(tp) or not own or not other or set(own) & set(other) or not {*own, *other} <= {*names}:
        raise ShardLayoutError(
            f"tensor parallelism over {tp} and a tensor that is split over {domain}: both must be axes of one mesh, "
            "and different ones; make it with init_mesh(domain=..., extra={'tp': ...}) and take mesh['tp']"
        )
    order = tuple(name for name in names if name in {*own, *other})
    both = root if order == tuple(names) else root[order]
    return _Meshes(domain, tp, both, tuple(map(order.index, own)), tuple(map(order.index, other)))


class ShardedDTensor(ShardTensor):
    """A DTensor over ``tp`` whose local parts are ShardTensors: the result of ``DTensor.from_local`` with a
    ShardTensor.

    ``device_mesh``, ``placements``, ``redistribute``, ``to_local`` and ``full_tensor`` are about the axes of tensor
    parallelism, as a DTensor's are; ``spec`` is about all. Every result is one too, but for numbers. Plain tensors that
    meet it are taken as replicated on all axes, DTensors over ``tp`` as replicated over the domain.
    """

    __slots__ = ("_meshes", "_whole")

    _whole: ShardTensor  # over all axes: the operations work on it
    _meshes: _Meshes

    @staticmethod
    def __new__(cls, whole: ShardTensor, meshes: _Meshes) -> ShardedDTensor:
        """Show a tensor on the mesh of both as one on the axes of tensor parallelism."""
        self: ShardedDTensor = make_wrapper(cls, whole.shape, dtype=whole.dtype, device=whole.device)
        forbid_address(self)
        self._whole, self._meshes = whole, meshes
        return self

    # the attributes of ShardBase are kept once, in the tensor that the operations work on
    local = property(lambda self: self._whole.local)
    spec = property(lambda self: self._whole.spec)
    halo = property(lambda self: self._whole.halo)
    padded = property(lambda self: self._whole.padded)
    padded_version = property(lambda self: self._whole.padded_version)
    copied = property(lambda self: self._whole.copied)
    global_strides = property(lambda self: self._whole.global_strides)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The axes of tensor parallelism."""
        return self._meshes.tp

    @property
    def placements(self) -> tuple[Placement, ...]:
        """``Shard(dim)`` or ``Replicate()``, one per axis of tensor parallelism."""
        return tuple(self.spec.placements[axis] for axis in self._meshes.tp_axes)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the part of this rank of tensor parallelism: a ShardTensor over the domain, else a plain tensor.

        The gradient is taken as split or replicated as this tensor is.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise unsupported(DTensor.to_local, f"grad_placements={grad_placements} differ from its own", self.spec)
        meshes, spec, local = self._meshes, self.spec, self._whole.to_local()
        shape = list(spec.global_shape)
        for axis in meshes.tp_axes:
            dim, parts = spec.dims[axis], spec.sizes[axis]
            if dim is None or parts is None:
                continue
            if len(set(parts)) > 1:  # no hook could tell the sizes of the others again
                remedy = "use_local_output=False, or a number of features that the tp axis divides"
                raise unsupported(DTensor.to_local, f"the parts differ along dim {dim}", spec, remedy=remedy)
            shape[dim] = local.shape[dim]
        placements, sizes = zip(*[(spec.placements[a], spec.sizes[a]) for a in meshes.domain_axes], strict=True)
        new = _spec(spec, meshes.domain, placements, shape, sizes)
        if new.is_replicated:
            return local
        return ShardTensor(local, new, global_strides=_memory_of_part(self.global_strides, self.placements))

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardedDTensor:
        """Return the same tensor with other placements on the axes of tensor parallelism. Collective."""
        if device_mesh not in (None, self._meshes.tp) or forward_dtype is not None or backward_dtype is not None:
            raise unsupported(DTensor.redistribute, "another mesh, or dtypes, are given", self.spec, remedy="to()")
        new, spec = list(self.spec.placements), self.spec
        sizes: dict[int | str, Sequence[int]] = {a: s for a, s in enumerate(spec.sizes) if s is not None}
        for axis, placement in zip(self._meshes.tp_axes, placements or (), strict=True):
            new[axis], dim = _checked(placement, spec)
            sizes.pop(axis, None)
            if dim is not None:
                sizes[axis] = chunk_sizes(spec.global_shape[dim], spec.axes[axis].size)
        return ShardedDTensor(self._whole.redistribute(placements=new, sizes=sizes), self._meshes)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole along the axes of tensor parallelism: a ShardTensor over the domain. Collective."""
        whole = self.redistribute(placements=[Replicate()] * self._meshes.tp.ndim)
        return whole.to_local(grad_placements=grad_placements)

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        flat, tree = tree_flatten((args, kwargs or {}))
        given = [x for x in flat if isinstance(x, ShardedDTensor)]
        meshes = given[0]._meshes
        new_args, new_kwargs = tree_unflatten([_joining(func, x, meshes) for x in flat], tree)
        known = {id(x._whole): x for x in given}  # a tensor that was written to is returned itself

        def show(x: Tensor) -> Tensor:
            if isinstance(x, ShardTensor):
                return known[id(x)] if id(x) in known else ShardedDTensor(x, meshes)
            whole = ShardTensor(x, given[0].spec.replicated(x.shape), global_strides=memory_of(x))
            return ShardedDTensor(whole, meshes)

        return tree_map_only(Tensor, show, func(*new_args, **new_kwargs))


def _joining(func: TorchFunction, x: object, meshes: _Meshes) -> object:
    """Return an operand as a tensor on the mesh of both."""
    if isinstance(x, ShardedDTensor):
        if x._meshes != meshes:
            raise unsupported(func, "the operands lie on different device meshes", x.spec)
        return x._whole
    if isinstance(x, ShardTensor):
        remedy = "to_local() of the one, or DTensor.from_local() of the other"
        raise unsupported(func, "a ShardTensor meets a DTensor of ShardTensors", x.spec, remedy=remedy)
    if not isinstance(x, DTensor):
        return x
    if func is torch.autograd.grad:  # of its local part, made anew, nothing depends
        raise unsupported(func, "the gradient of a DTensor", x.placements, remedy="use backward(), or to_local() first")
    return _of_parameter(func, x, meshes)


def _of_parameter(func: TorchFunction, x: DTensor, meshes: _Meshes) -> Tensor:
    """Return a DTensor over the axes of tensor parallelism, replicated over the domain, on the mesh of both."""
    if x.device_mesh != meshes.tp:
        raise unsupported(func, f"a DTensor on {x.device_mesh} meets one on {meshes.tp}", x.placements)
    if any(isinstance(p, Partial) for p in x.placements):
        x = x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])
    placements: list[Placement] = [Replicate()] * meshes.both.ndim
    sizes: list[tuple[int, ...] | None] = [None] * meshes.both.ndim
    for axis, placement in zip(meshes.tp_axes, x.placements, strict=True):
        if isinstance(placement, Shard):
            placements[axis] = placement
            sizes[axis] = chunk_sizes(x.shape[placement.dim], meshes.both.size(axis))
    local, groups = x.to_local(), deferred_groups(x)
    if groups is not None:
        defer(local, groups)
    spec = ShardSpec.on(meshes.both, tuple(placements), tuple(x.shape), tuple(sizes))
    return local if spec.is_replicated else ShardTensor(local, spec)


def from_local(
    function: type[Function],
    x: ShardTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> object:
    """Implement ``DTensor.from_local`` for a ShardTensor as local part, with equal sizes along ``tp``.

    ``function`` is torch's own: it makes a DTensor of a ShardTensor that is replicated on all axes.
    """
    spec = x.spec
    if isinstance(x, ShardedDTensor):
        return x.redistribute(device_mesh, placements)  # a module's hook saw that it is no DTensor
    if spec.is_replicated:
        apply: Callable[..., object] = function.apply
        return apply(x.to_local(), device_mesh, placements, run_check, shape, stride, grad_placements)
    if run_check or shape is not None or stride is not None or grad_placements is not None:
        raise unsupported(DTensor.from_local, "run_check, shape, stride or grad_placements are given", spec)
    meshes = kept_spec(spec.device_mesh, device_mesh, lambda: _joined(spec.device_mesh, device_mesh))
    local, shape = x.to_local(), list(spec.global_shape)
    new: list[Placement] = [Replicate()] * meshes.both.ndim
    sizes: list[tuple[int, ...] | None] = [None] * meshes.both.ndim
    for own, axis in enumerate(meshes.domain_axes):
        new[axis], sizes[axis] = spec.placements[own], spec.sizes[own]
    for axis, placement in zip(meshes.tp_axes, placements, strict=True):
        if isinstance(placement, Partial):
            local = add_up(local, placement, meshes.both.get_group(axis))
            continue
        new[axis], dim = _checked(placement, spec)
        if dim is None:
            continue
        if dim in spec.sharded:
            raise unsupported(
                DTensor.from_local,
                f"tensor parallelism is to split dim {dim}, which the domain splits",
                spec,
                remedy="leave SequenceParallel out; the domain splits the sequence in all modules",
            )
        num_parts = meshes.both.size(axis)
        sizes[axis] = (local.shape[dim],) * num_parts
        shape[dim] *= num_parts
    joined = _spec(spec, meshes.both, tuple(new), shape, tuple(sizes))
    strides = _memory_of_part(x.global_strides, placements)
    return ShardedDTensor(ShardTensor(local, joined, global_strides=strides), meshes)


def _checked(placement: Placement, spec: ShardSpec) -> tuple[Placement, int | None]:
    """Return a placement, and the dim that it splits."""
    if type(placement) not in (Shard, Replicate):
        remedy = "use Shard(dim) or Replicate()"
        raise unsupported(DTensor.redistribute, f"{placement} along tensor parallelism", spec, remedy=remedy)
    dim = dim_of(placement, spec.ndim)
    return placement if dim is None else Shard(dim), dim


def _spec(
    like: ShardSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    sizes: Sequence[tuple[int, ...] | None],
) -> ShardSpec:
    spec = ShardSpec.on(mesh, tuple(placements), tuple(shape), tuple(sizes))
    return spec if like.exchange is None else replace(spec, exchange=like.exchange)


def _memory_of_part(memory: Strides | None, placements: Sequence[Placement]) -> Strides | None:
    """Convert a tensor's strides to those of its part, or back."""
    return memory if memory is None or all(isinstance(p, Replicate) for p in placements) else UNKNOWN

"""``vmap`` of functions that see ShardTensors: over this rank's rows at once, or row by row on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scidata.device_mesh.devices import random_states
from scidata.shard.base import ShardBase
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.memory import memory_of
from scidata.shard.op_table import TRANSFORMS, TorchFunction, unsupported
from scidata.shard.ops.align import is_sharded, local_of, to_axis
from scidata.shard.spec import UNKNOWN, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import (
    TreeSpec,
    flat_out_dims,
    is_plain,
    mapped_inputs,
    parameters_of,
    reached,
    sees,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from scidata.shard.transforms.derivatives import refuse_inside

_Dims: TypeAlias = int | tuple[object, ...] | None  # nested as the arguments or results are


class _Call(NamedTuple):
    plain: Callable[..., object]  # torch's own
    func: TorchFunction
    in_dims: _Dims
    out_dims: _Dims
    chunk_size: int | None
    kwargs: dict[str, object]
    num_rows: int
    dims: Sequence[int | None]  # that are mapped, of each argument
    flat: Sequence[object]
    tree: TreeSpec


def vmap(
    plain: Callable[..., object],
    func: TorchFunction,
    in_dims: _Dims,
    out_dims: _Dims,
    randomness: str,
    chunk_size: int | None,
    *args: object,
    **kwargs: object,
) -> object:
    """Do as ``torch.vmap``. Collective if the function's operations are, and where some rank has no rows."""
    refuse_inside(torch.func.vmap)
    num_rows, dims, flat, tree = mapped_inputs(in_dims, args, func)
    if randomness != "error":
        remedy = "draw outside of the function, and map over what was drawn"
        raise unsupported(torch.func.vmap, f"randomness={randomness!r}", *_specs(flat), remedy=remedy)
    given = _Call(plain, func, in_dims, out_dims, chunk_size, kwargs, num_rows, dims, flat, tree)
    for x, d in zip(flat, dims, strict=True):
        if is_sharded(x) and d in x.spec.sharded:
            return _over_rows(given, _Rows(x, d))
    return _in_loop(given)


def _specs(values: object) -> list[ShardSpec]:
    return [x.spec for x in tree_leaves(values) if isinstance(x, ShardTensor)]


# -- over rows of a dim that is not sharded ----------------------------------------------------------------------------


def _in_loop(given: _Call) -> object:
    """Call the function on each row, as often on each rank."""
    if not given.num_rows:
        raise unsupported(torch.func.vmap, "there are no rows", *_specs((given.flat, given.kwargs)), remedy="map some")
    columns = [
        x.unbind(d) if isinstance(x, Tensor) and d is not None else [x] * given.num_rows
        for x, d in zip(given.flat, given.dims, strict=True)
    ]
    before = random_states()
    results = [given.func(*tree_unflatten(row, given.tree), **given.kwargs) for row in zip(*columns, strict=True)]
    if not all(map(torch.equal, before, random_states())):
        given.plain(lambda x: x + torch.rand(()), 0, 0, "error", None, torch.zeros(1))  # torch's own error
    places = flat_out_dims(given.out_dims, results[0])
    flat = zip(*[tree_flatten(result)[0] for result in results], strict=True)
    stacked = [_stacked(rows, place) for rows, place in zip(flat, places, strict=True)]
    if any(isinstance(x, Tensor) and (d or memory_of(x)) for x, d in zip(given.flat, given.dims, strict=True)):
        # torch has rows beside one another where they were, or in front, by the operation
        spec = next(iter(_specs(given.flat)), None)
        stacked = [_of_unknown_strides(x, spec) for x in stacked]
    return tree_unflatten(stacked, tree_flatten(results[0])[1])


def _of_unknown_strides(x: object, spec: ShardSpec | None) -> object:
    if spec is not None and is_plain(x) and sum(n > 1 for n in x.shape) > 1:
        x = ShardTensor(x, spec.replicated(x.shape))
    if isinstance(x, ShardTensor):
        x.global_strides = UNKNOWN
    return x


def _stacked(rows: Sequence[object], place: int | None) -> object:
    tensors = [x for x in rows if isinstance(x, Tensor)]
    if len(tensors) == len(rows):
        if place is None:
            remedy = "give it a place, and take one row of the result"
            raise unsupported(torch.func.vmap, "a tensor at out_dims=None", *_specs(rows), remedy=remedy)
        return torch.stack(tensors, place)
    if place is None:
        return rows[0]
    raise ValueError(f"vmap: the function must return tensors only, got {type(rows[0])} without out_dims=None")


# -- over this rank's rows ---------------------------------------------------------------------------------------------


class _Borders:
    """Alias the inputs of the rows, so that the autograd graphs of the results have to stop there."""

    def __init__(self) -> None:
        self._nodes: set[Node | None] = set()

    def view(self, x: Tensor) -> Tensor:
        """Return a view of a tensor that autograd follows, others as they are."""
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        view = x.view_as(x)
        self._nodes.add(view.grad_fn)
        return view

    def check(self, result: Tensor) -> None:
        """Raise if a result depends on another leaf, whose gradient nobody would sum over the ranks."""
        seen: set[Node] = set()
        left = [result.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen or node in self._nodes:
                continue
            seen.add(node)
            if getattr(node, "variable", None) is not None:
                raise unsupported(
                    torch.func.vmap,
                    "the function closes over a tensor that requires grad, whose gradient is the sum over all rows",
                    remedy="pass it as an argument with in_dims=None",
                )
            left.extend(following for following, _ in node.next_functions)


class _Rows:
    """The rows of a sharded dim that is mapped over."""

    def __init__(self, first: ShardTensor, dim: int) -> None:
        spec = first.spec
        self.spec, self.axis = spec, spec.sharded[dim]
        self.sizes = spec.sizes_of(self.axis)
        self.some_empty = 0 in self.sizes and sum(self.sizes) > 0

    def check(self, given: _Call) -> None:
        """Raise if a row needs rows of other ranks."""
        if sees(given.func, ShardBase) or any(map(is_sharded, tree_leaves(given.kwargs))):
            self._refuse("the function holds a ShardTensor, and each row needs all of it", "use its full_tensor()")
        for x, d in zip(given.flat, given.dims, strict=True):
            if is_sharded(x) and (x.spec.sharded.keys() != {d} or x.spec.device_mesh != self.spec.device_mesh):
                self._refuse(
                    "a mapped dim is sharded, and beside it another one, or a tensor that is not mapped",
                    "redistribute() so that mapped dims alone are sharded, or none of them",
                )
            if d is not None and not is_sharded(x) and not self.spec.in_order:
                self._refuse("edges are not in the order of one process", "map over sharded tensors alone")

    def _refuse(self, reason: str, remedy: str) -> NoReturn:
        raise unsupported(torch.func.vmap, reason, self.spec, remedy=remedy)

    def inputs(self, x: object, dim: int | None, borders: _Borders) -> object:
        """Return an argument for this rank's rows; if there are none, with the first row of all."""
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, ShardTensor):
            x.refresh()
        if dim is None:
            return borders.view(self._shared(local_of(x)))
        whole = x if is_sharded(x) else local_of(x)
        if is_sharded(whole):
            whole = whole.redistribute(placements=self._placed(dim), sizes={self.axis: self.sizes})
            part = whole.local
        else:
            part = to_axis(whole, range(whole.ndim), (dim, self.sizes), self.spec, self.axis)
        if self.some_empty:  # torch does not map over no rows
            row = whole.detach().narrow(dim, 0, 1)
            row = row.full_tensor() if isinstance(row, ShardTensor) else row
            part = part if self.sizes[self.spec.coordinate(self.axis)] else torch.cat([part, row], dim)
        return borders.view(part)

    def _placed(self, dim: int) -> list[Placement]:
        return [Shard(dim) if axis == self.axis else Replicate() for axis in range(len(self.spec.axes))]

    def _shared(self, x: Tensor) -> Tensor:
        return replicate_to_shards(x, [self.spec.group(self.axis)]) if x.requires_grad else x

    @contextmanager
    def parameters(self, func: TorchFunction, borders: _Borders) -> Iterator[None]:
        """Have gradients of the parameters of modules that the function holds summed over the ranks, in this block."""
        modules = dict.fromkeys(m for x in reached(func) if isinstance(x, nn.Module) for m in x.modules())
        kept = [(parameters_of(module), dict(parameters_of(module))) for module in modules]
        learned = [p for _, own in kept for p in own.values() if p is not None and p.requires_grad]
        shared = {p: borders.view(self._shared(p)) for p in learned}
        try:
            for own, old in kept:
                own.update({name: shared.get(p, p) for name, p in old.items()})
            yield
        finally:
            for own, old in kept:
                own.update(old)

    def outputs(self, result: object, place: int | None, borders: _Borders) -> object:
        """Return one result of this rank's rows as part of that of all."""
        learned = isinstance(result, Tensor) and result.requires_grad
        if isinstance(result, Tensor) and learned:
            borders.check(result)
        if place is None or not isinstance(result, Tensor):
            if learned:
                self._refuse("a result at out_dims=None requires grad", "give it a place, and take one row of it")
            return result
        place %= result.ndim
        if self.some_empty:
            result = result.narrow(place, 0, self.sizes[self.spec.coordinate(self.axis)])
        shape = [sum(self.sizes) if d == place else n for d, n in enumerate(result.shape)]
        spec = self.spec.along(self.axis, place, shape, self.sizes)
        return ShardTensor(result, spec, global_strides=UNKNOWN)  # one row does not show in which order torch has them


def _over_rows(given: _Call, rows: _Rows) -> object:
    """Have torch map over this rank's rows."""
    rows.check(given)
    borders = _Borders()
    more, more_tree = tree_flatten(given.kwargs)
    args = [rows.inputs(x, d, borders) for x, d in zip(given.flat, given.dims, strict=True)]
    kwargs = [rows.inputs(x, None, borders) for x in more]
    versions = [version_of(x) for x in (*args, *kwargs) if isinstance(x, Tensor)]
    options = given.in_dims, given.out_dims, "error", given.chunk_size
    with rows.parameters(given.func, borders):
        results = given.plain(
            given.func, *options, *tree_unflatten(args, given.tree), **tree_unflatten(kwargs, more_tree)
        )
    if versions != [version_of(x) for x in (*args, *kwargs) if isinstance(x, Tensor)]:
        remedy = "have it work on a clone()"
        raise unsupported(torch.func.vmap, "the function writes to its arguments", rows.spec, remedy=remedy)
    flat, tree = tree_flatten(results)
    places = flat_out_dims(given.out_dims, results)
    return tree_unflatten([rows.outputs(x, place, borders) for x, place in zip(flat, places, strict=True)], tree)


TRANSFORMS["vmap_impl"] = vmap

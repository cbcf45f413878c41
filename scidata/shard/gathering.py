"""A way out for operations without a rule: gather the operands, run torch's own function, shard the result again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.core.keywords import checked_keywords
from scidata.errors import UnsupportedShardOp
from scidata.shard.memory import laid_out
from scidata.shard.op_table import FALLBACKS, HANDLERS, REFUSES, TorchFunction, is_in_place, op_name
from scidata.shard.spec import UNKNOWN, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_flatten, tree_map_only, tree_unflatten, version_of
from scidata.shard.views import refuse_write_to_copy, written

#: Functions that ask for the tensor's own memory or its place in the graph: another tensor cannot answer.
_ITS_OWN = """
    data_ptr storage untyped_storage share_memory_ is_shared set_ __dlpack__ __dlpack_device__ backward grad __set__
    record_stream register_hook retain_grad __reduce_ex__ __deepcopy__
"""


@checked_keywords
@contextmanager
def gather() -> Iterator[None]:
    """Run operations that have no rule for sharded tensors on gathered ones, in this block, or a function decorated.

    Each rank then holds the operands whole, for as long as autograd does, and computes the whole result, which is
    sharded again where an operand's layout fits it; else it is plain. Values and gradients are those of one process.
    Each place is named once, in a warning of rank 0, with the bytes that it gathers on each rank.

    For the whole process, backward passes in the block included. Collective: enter it on all ranks.

    Raises
    ------
    UnsupportedShardOp
        From operations that another tensor cannot stand in for: those of memory (``data_ptr``, ``set_``), in-place
        changes of shape, and operations on edges of a graph that are not in the order of the whole.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> x = scidata.scatter_tensor(torch.arange(5.0), 0, mesh["domain"], [Shard(0)])
    >>> with scidata.gather():  # has a rule or not
    ...     y = torch.special.zeta(x + 2, torch.ones(5))
    >>> tuple(y.shape)
    (5,)
    """
    with gathered(quiet=False):
        yield


@contextmanager
def gathered(*, quiet: bool) -> Iterator[Gathering]:
    """Implement :func:`gather`; ``quiet``: without a warning."""
    run = Gathering(quiet)
    FALLBACKS.append(run)
    try:
        yield run
    finally:
        FALLBACKS.remove(run)


class Gathering:
    """Runs operations of a block of :func:`gather`; ``calls`` counts them."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.calls = quiet, 0
        self.seen: set[tuple[TorchFunction, tuple[str, int]]] = set()

    def __call__(
        self, func: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object], error: UnsupportedShardOp
    ) -> object:
        """Run a function on gathered tensors, or raise the error. Collective."""
        self.calls += 1
        flat, tree = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, ShardTensor)]
        name = getattr(func, "__name__", "")
        if HANDLERS.get(func) in REFUSES or name in _ITS_OWN.split() or not tensors:
            raise error
        if not all(x.spec.in_order or x.spec.is_replicated for x in tensors):
            raise error
        if not self.quiet:
            self._tell(func, error, tensors)
        whole = {id(x): _whole(x) for x in tensors}
        versions = {key: version_of(x) for key, x in whole.items()}
        full_args, full_kwargs = tree_unflatten([whole.get(id(x), x) for x in flat], tree)
        run: TorchFunction = func.apply if isinstance(func, type) and issubclass(func, Function) else func
        result = run(*full_args, **full_kwargs)
        writes = is_in_place(func) or name.startswith(("__setitem__", "__i"))
        for x in tensors:
            full = whole[id(x)]
            if version_of(full) != versions[id(x)] or (writes and x is args[0]):  # some writes are not counted
                _write_back(func, x, full)
        owners = {id(whole[id(x)]): x for x in tensors} | {id(x): x for x in flat if type(x) is Tensor}
        return tree_map_only(Tensor, lambda x: owners[id(x)] if id(x) in owners else _sharded(x, tensors), result)

    def _tell(self, func: TorchFunction, error: UnsupportedShardOp, tensors: list[ShardTensor]) -> None:
        """Warn of a place that gathers, once."""
        frame = inspect.currentframe()
        assert frame is not None
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("scidata", "torch"):
            frame = frame.f_back
        place = (frame.f_code.co_filename, frame.f_lineno)
        if (func, place) in self.seen:
            return
        self.seen.add((func, place))
        if dist.get_rank() == 0:
            held = sum(x.numel() * x.element_size() for x in tensors)
            message = f"{op_name(func)} runs on gathered tensors, {held:,} bytes on each rank: {error}"
            warnings.warn_explicit(message, UserWarning, *place, registry={})


def _whole(x: ShardTensor) -> Tensor:
    """Gather a tensor with the memory layout of one process; always a copy of the own part, which may be written to."""
    if x.global_strides is UNKNOWN:
        raise UnsupportedShardOp(f"the strides of a tensor are not known ({x.spec}); use contiguous() first")
    full = x.full_tensor()
    full = full if x.global_strides is None else laid_out(full, x.global_strides)
    return full.clone() if full is x.local or x.spec.is_replicated else full


def _write_back(func: TorchFunction, x: ShardTensor, full: Tensor) -> None:
    refuse_write_to_copy(func, x)
    for d, start in enumerate(x.spec.offsets):
        full = full.narrow(d, start, x.spec.local_shape[d])
    x.local.copy_(full)
    written(x)


def _sharded(result: Tensor, tensors: list[ShardTensor]) -> Tensor:
    """Shard a result like the largest operand whose sharded dims it has, with its graph; else leave it plain."""
    for x in sorted(tensors, key=lambda x: -x.numel()):
        spec = x.spec
        if spec.is_replicated or result.ndim != spec.ndim:
            continue
        if all(result.shape[d] == spec.global_shape[d] for d in spec.sharded):
            return _cut(result, spec.derive(tuple(result.shape), spec.dims, spec.sizes))
    return result


def _cut(result: Tensor, spec: ShardSpec) -> Tensor:
    sizes: dict[int | str, Sequence[int]] = {axis: spec.sizes_of(axis) for axis in spec.sharded.values()}
    whole = ShardTensor(result, spec.replicated(result.shape))
    cut = whole.redistribute(placements=spec.placements, sizes=sizes)
    contiguous = result.is_contiguous() if result.layout is torch.strided else True
    cut.global_strides = None if contiguous else tuple(result.stride())
    return cut

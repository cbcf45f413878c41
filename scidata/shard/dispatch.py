"""A call of a torch function on ShardTensors: find its handler and run it.

Around the handler, copies are brought up to date, edges are put in order, and the strides of results are noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from scidata.device_mesh.board import record_error
from scidata.device_mesh.board.calls import called
from scidata.errors import UnsupportedShardOp
from scidata.shard.base import ShardBase
from scidata.shard.comm.operators import is_capturing
from scidata.shard.memory import BY_MEMORY, REARRANGES, note
from scidata.shard.op_table import (
    ANY_ORDER,
    BOUND,
    FALLBACKS,
    HANDLERS,
    KEEPS_REPLICATED,
    OF_THE_WHOLE,
    Handler,
    TorchFunction,
    Types,
    find,
    handler_of_operator,
    is_in_place,
    op_name,
    unsupported,
)
from scidata.shard.rows.edge_order import in_one_order, refuse_disorder
from scidata.shard.spec import UNKNOWN
from scidata.shard.torch_internals import (
    is_plain,
    replay_views,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    version_of,
    views_are_replayed,
)
from scidata.shard.views import call_on_copies

# Backward needs their input unchanged. Here torch may save a copy, with halos or gathered, so that it does not notice
# a write to the input.
_NEEDS_INPUT = frozenset(
    find("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention")
    + find("layer_norm batch_norm group_norm instance_norm cumprod amax amin max_pool1d max_pool2d max_pool3d")
    + find("avg_pool1d avg_pool2d avg_pool3d")
)
# of these, a plain out= takes gathered rows: PyG's way to put a zero before sums
_TAKES_OUT = frozenset(find("cumsum cumprod logcumsumexp"))
_Run: TypeAlias = Callable[[TorchFunction, Types, tuple[object, ...], dict[str, object]], object]
_NOTED, _DISORDER = 1, 2  # flags of _look()
_NO_TENSORS = frozenset({int, float, bool, str, slice, type(None), torch.dtype, torch.device})


def dispatch(func: TorchFunction, types: Types, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Handle a torch function of which an argument is a ShardTensor.

    ``torch.add(x, 1)`` of a row-major ``x`` takes the short way: the handler is looked up and called. The other ways:
    ``x`` is replicated on all axes, or there is no handler (:func:`_call_unusual`); backward needs the input
    (:func:`_call_watched`); edges are not in order (:func:`_all_in_order`); an argument is a copy, or not row-major
    (:func:`_call_noted`).
    """
    if kwargs and (out := kwargs.get("out")) is not None and not (func in _TAKES_OUT and is_plain(out)):
        return _into(func, args, kwargs)
    handler = HANDLERS.get(func) or handler_of_operator(func)
    first = args[0] if args else None
    if type(first) is list or type(first) is tuple:  # of cat, of stack
        first = next((x for x in first if isinstance(x, ShardBase) and not x.spec.is_replicated), None)
    if handler is None or not isinstance(first, ShardBase) or first.spec.is_replicated:
        run: _Run = partial(_call_unusual, handler)
        direct = None
    else:  # torch's own parameters, all by position: without the handler's binding of names
        run, direct = handler, None if kwargs else BOUND.get(func)
    if func in _NEEDS_INPUT and torch.is_grad_enabled():
        run, direct = partial(_call_watched, run, direct), None
    operation = called.operation
    is_outermost = operation[0] is None
    if is_outermost:
        operation[0] = func
    empty = isinstance(first, ShardBase) and first.spec.emptied and 0 in first.spec.local_shape
    replays = empty and not views_are_replayed()
    if replays:
        replay_views(True)
    try:
        found = _look((*args, *kwargs.values()) if kwargs else args)
        disorder = found & _DISORDER and handler is not None
        if disorder and (handler not in ANY_ORDER or _are_mixed(func, args, kwargs)):
            args, kwargs = _all_in_order(func, args, kwargs)
        if not found & _NOTED and func not in REARRANGES:
            return run(func, types, args, kwargs) if direct is None else direct(*args)
        if handler is not None and handler in OF_THE_WHOLE:
            return handler(func, types, args, kwargs)
        if not found & _NOTED:  # so that no copy is to be brought up to date, and no strides are unknown
            return note(func, args, kwargs, run(func, types, args, dict(kwargs)) if direct is None else direct(*args))
        return _call_noted(run, func, types, args, kwargs)
    except UnsupportedShardOp as error:
        if not FALLBACKS:
            raise
        return FALLBACKS[-1](func, args, kwargs, error)
    except Exception as error:
        if not is_capturing():
            record_error(error)  # the others may be in a collective by now
        raise
    finally:
        if is_outermost:
            operation[0] = None
        if replays:
            replay_views(False)


def _into(func: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Compute, and copy the results to the tensors of ``out=``. Collective if their layouts differ."""
    name, out = op_name(func), kwargs["out"]
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(f"{name}: out= has no derivative, but a tensor requires grad; use torch.no_grad()")
    result = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    for target, value in zip(*(tree_flatten(each)[0] for each in (out, result)), strict=True):
        if target.shape != value.shape and not target.numel() and not isinstance(target, ShardBase):
            target.resize_(value.shape)
        if target.shape != value.shape:
            specs = [x.spec for x in tensors if isinstance(x, ShardBase)]
            raise unsupported(func, f"out= has shape {tuple(target.shape)}, not {tuple(value.shape)}", *specs)
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to {target.dtype} of out=")
        target.copy_(value)
    if name.endswith("_copy") and not isinstance(out, Tensor):  # torch's own return nothing
        return None
    return out if isinstance(out, Tensor) else tree_unflatten(list(tree_flatten(out)[0]), tree_flatten(result)[1])


def _call_watched(
    run: _Run, direct: Callable[..., object] | None, func: TorchFunction, types: Types, args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:  # fmt: skip
    """Call a handler; backward raises, as torch's does, if an input was written to since."""
    kept = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, ShardBase):
            # a view's base, which has its versions, is there while any tensor is that may be written to
            part = x.local
            base = part if part._base is None else part._base  # without a call
            kept.append((weakref.ref(base), version_of(base)))
    result = run(func, types, args, kwargs) if direct is None else direct(*args)
    local = result.local if isinstance(result, ShardBase) else result

    def check(grads: Sequence[Tensor]) -> None:
        for known, version in kept:
            if (x := known()) is not None and version_of(x) != version:
                raise RuntimeError(
                    f"{op_name(func)}: its input, which is needed for gradient computation, has been modified by an "
                    "inplace operation; write to a clone() of it"
                )

    # a hook of a view would be lost on the ranks where the result is one and is written to
    if isinstance(local, Tensor):
        node = local.grad_fn if local._base is None else local._base.grad_fn
        if node is not None:
            node.register_prehook(check)
    return result


def _look(values: Iterable[object]) -> int:
    """Return flags in one pass over the arguments: ``_NOTED`` if a tensor is a copy or not row-major in one process,
    ``_DISORDER`` if edges are not in the order of one process; 0 for neither.
    """
    found = 0
    for x in values:
        if isinstance(x, ShardBase):
            if x.global_strides is not None or x.copied is not None:
                found |= _NOTED
            if x.spec.exchange is not None and not x.spec.in_order:
                found |= _DISORDER
            continue
        kind = type(x)
        if kind in _NO_TENSORS:  # asking for an instance of Tensor takes longer
            continue
        if isinstance(x, tuple | list):
            if not _NO_TENSORS.issuperset(map(type, x)):
                found |= _look(x)
        elif isinstance(x, Tensor):
            if x.layout is torch.strided and not x.is_contiguous():
                found |= _NOTED
        elif kind is torch.memory_format and x is not torch.preserve_format:
            found |= _NOTED
    return found


def _shards(values: Iterable[object]) -> Iterator[ShardBase]:
    for x in values:
        if isinstance(x, ShardBase):
            yield x
        elif type(x) is tuple or type(x) is list:
            yield from _shards(x)


def _are_mixed(func: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether edge tensors with equal sizes have different orders, so that equal rows are different edges.

    An index with routes cannot follow the others, since routes are from where its ids are now.
    """
    given = _shards((*args, *kwargs.values()))
    edges = [x for x in given if x.spec.exchange is not None and not x.spec.is_replicated]
    orders: dict[object, object] = {}
    mixed = any(orders.setdefault(x.spec.sizes, x.spec.order) != x.spec.order for x in edges)
    if mixed and any(hasattr(x, "exchanges") for x in edges):
        refuse_disorder(func, *[x.spec for x in edges])
    return mixed


def _all_in_order(
    func: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Bring edge tensors among the arguments to the order of one process. Collective if they have another."""

    def ordered(x: ShardBase) -> ShardBase:
        if x.spec.in_order:
            return x
        if is_in_place(func):
            refuse_disorder(func, x.spec)
        x.refresh()
        return x.like(*in_one_order(func, x.local, x.spec), None, x.global_strides)

    new_args, new_kwargs = tree_map_only(ShardBase, ordered, (args, kwargs))
    return new_args, new_kwargs


def _call_noted(
    run: _Run, func: TorchFunction, types: Types, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Handle a function, and note how its results lie in memory; bring copies up to date first."""
    given = list(_shards((*args, *kwargs.values())))
    for x in given:
        if x.copied is not None:
            x.refresh()
    result = note(func, args, kwargs, run(func, types, args, dict(kwargs)))
    if isinstance(result, ShardBase):
        return result
    unknown = next((x for x in given if x.global_strides is UNKNOWN), None)  # gradients, or computed from them
    if unknown is None or result is None or func is torch.autograd.grad:
        return result
    if is_plain(result) and result.ndim < 2:
        return result
    known = set(map(id, tree_flatten((args, kwargs))[0]))
    return tree_map_only(Tensor, lambda x: x if id(x) in known else _of_unknown(x, unknown), result)


def _of_unknown(x: Tensor, operand: ShardBase) -> Tensor:
    """Wrap a plain result with unknown strides, so that functions that depend on strides are refused."""
    if not is_plain(x) or sum(n > 1 for n in x.shape) < 2:
        return x
    return operand.like(x, operand.spec.replicated(x.shape), None, UNKNOWN)


def _call_unusual(
    handler: Handler | None, func: TorchFunction, types: Types, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Run any function on tensors that are replicated on all axes; refuse unknown functions of other tensors."""
    bound = None if kwargs else BOUND.get(func)
    if handler is not None and handler in KEEPS_REPLICATED:
        return handler(func, types, args, kwargs) if bound is None else bound(*args)
    flat, tree = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, ShardBase)]
    specs = [x.spec for x in tensors]
    if specs and all(spec.is_replicated for spec in specs):
        copies = [x for x in tensors if x.copied is not None]
        # rows that were moved lie as they came, not as in one process
        if func in BY_MEMORY and (copies or any(x.global_strides is UNKNOWN for x in tensors)):
            if handler is None:
                raise unsupported(func, "its order in memory is that of a view", *specs, remedy="clone() it first")
            return handler(func, types, args, kwargs)
        flat = [x.local if isinstance(x, ShardBase) else x for x in flat]
        plain_args, plain_kwargs = tree_unflatten(flat, tree)
        if not copies:
            return func(*plain_args, **plain_kwargs)
        return call_on_copies(func, copies, plain_args, plain_kwargs)
    if handler is None:
        raise unsupported(func, f"{op_name(func)} has no rule for sharded tensors", *specs)
    return handler(func, types, args, kwargs) if bound is None else bound(*args)

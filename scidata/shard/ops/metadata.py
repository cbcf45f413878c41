"""What asks about a tensor rather than computing with it, conversions, new tensors, and autograd's own calls."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from scidata.shard.layouts import check_graphs
from scidata.shard.memory import UNKNOWN, laid_out, strides_of
from scidata.shard.op_table import OF_THE_WHOLE, find, getters, register_op, unsupported
from scidata.shard.ops.align import is_sharded, local_of, map_local, operands_of, specs_of
from scidata.shard.ops.edges import new_filled
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import DisableTorchFunctionSubclass, make_dual, unpack_dual
from scidata.shard.views import Copy, refuse_write_to_copy, written

_GLOBAL = (
    "size dim ndimension numel nelement is_floating_point is_complex is_signed element_size get_device is_inference"
)
_GLOBAL_GETTERS = """
    shape ndim dtype device layout is_cuda is_cpu is_meta is_sparse is_sparse_csr is_mkldnn is_quantized is_nested
    is_mps is_xpu itemsize nbytes
"""
_CONVERSIONS = """
    to float double half bfloat16 int long short char byte bool type_as clone cuda cpu pin_memory
    cdouble cfloat chalf
"""
_NEW = "new_zeros new_ones new_full new_empty new_tensor"
_FILLED = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
_BOTH = (torch, Tensor)
_LIKE = "zeros_like ones_like full_like empty_like"


@register_op(
    *find(_GLOBAL, namespaces=(torch, Tensor)),
    *getters(_GLOBAL_GETTERS),
    Tensor.__len__,
    keeps_replicated=True,
    any_order=True,
)
def of_the_whole(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer for the tensor as a whole: the wrapper has the global shape, the dtype and the device."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


OF_THE_WHOLE.add(of_the_whole)


@register_op(Tensor.is_contiguous, Tensor.stride, keeps_replicated=True, any_order=True)
def of_the_memory(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer as one process would, whatever this rank's part is like."""
    x: ShardTensor = args[0]
    strides = strides_of(x)
    if strides is UNKNOWN:
        raise unsupported(func, "the strides are not known", x.spec, remedy="use contiguous() first")
    return func(torch.empty_strided(x.spec.global_shape, strides, device="meta"), *args[1:], **kwargs)


@register_op(Tensor.data.__set__, keeps_replicated=True, any_order=True)  # type: ignore[attr-defined]
def set_data(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put other values in the place of a tensor's own, of the same layout; its gradient and graph stay."""
    x, value = args
    known = isinstance(x, ShardTensor) and value.shape == x.shape
    if not known or not (value.spec == x.spec if isinstance(value, ShardTensor) else x.spec.is_replicated):
        reason = "data of another layout takes the place of a tensor's own"
        raise unsupported(func, reason, *specs_of(args), remedy="use copy_()")
    refuse_write_to_copy(func, x)
    func(x.local, local_of(value))
    written(x)


@register_op(Tensor.is_pinned, Tensor.record_stream, torch.result_type, keeps_replicated=True, any_order=True)
def of_the_part(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer for, or act on, this rank's part."""
    return func(*map(local_of, args), **kwargs)


@register_op(*find(_CONVERSIONS, namespaces=(torch.Tensor,)), torch.clone, keeps_replicated=True, any_order=True)
def convert(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Change dtype, device or memory, element by element; the layout and the halo stay."""
    x, *rest = args
    others = [local_of(other) for other in rest]
    others_by_name = {name: local_of(other) for name, other in kwargs.items()}
    if not isinstance(x, ShardTensor):  # x.to(other), x.type_as(other): only the other's dtype and device count
        return func(x, *others, **others_by_name)  # type: ignore[no-any-return]
    return map_local(x, lambda part: func(part, *others, **others_by_name))


@register_op(Tensor.type, keeps_replicated=True, any_order=True)
def type_of(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Say the type of the parts, or convert to another."""
    return func(args[0].local) if len(args) == 1 and not kwargs else convert(func, types, args, kwargs)


@register_op(*find("detach_", namespaces=_BOTH), keeps_replicated=True, any_order=True)
def detach_in_place(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Take the part out of the graph."""
    x: ShardTensor = args[0]
    func(x.local)
    return x


@register_op(torch.detach, Tensor.detach, *getters("data"), keeps_replicated=True, any_order=True)
def detach(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Share the values, not the graph. Writes to ``data`` are counted too, or copies of the tensor would miss them."""
    result: Any = map_local(args[0], Tensor.detach)
    if result.copied is not None:
        result.copied = result.copied.detached()
    return result  # type: ignore[no-any-return]


@register_op(Tensor.contiguous, keeps_replicated=True, any_order=True)
def contiguous(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor itself where one process would, whatever this rank's part is like; else a copy."""
    x: ShardTensor = args[0]
    strides = strides_of(x)
    if strides is UNKNOWN:  # it may be the tensor itself in one process

        def refuse() -> NoReturn:
            raise unsupported(func, "whether it is what was written to is not known", x.spec, remedy="clone() it")

        part = x.local.clone(memory_format=torch.contiguous_format)
        copied = Copy(x, part, refuse)
        copied.may_be_base = True
        return ShardTensor(part, x.spec, copied=copied)
    whole = torch.empty_strided(x.spec.global_shape, strides, device="meta")
    if func(whole, *args[1:], **kwargs) is whole:
        return x
    return map_local(
        x, lambda part: part.clone(memory_format=(*args[1:], *kwargs.values(), torch.contiguous_format)[0])
    )


@register_op(*find(_LIKE, namespaces=(torch,)), keeps_replicated=True, any_order=True)
def like(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a tensor of the same layout. Memory formats are those of the parts."""
    x: ShardTensor = args[0] if args else kwargs.pop("input")
    part = x.local
    if x.spec.is_replicated and x.global_strides is not None and x.global_strides is not UNKNOWN:
        part = laid_out(part, x.global_strides)  # rows that were moved lie as they came
    return ShardTensor(func(part, *args[1:], **kwargs), x.spec, halo=x.halo)


@register_op(*find(_NEW, namespaces=(Tensor,)), keeps_replicated=True, any_order=True)
def new(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a plain tensor of the shape that is asked for, the same on each rank; from edges, a constant for now."""
    x = args[0]
    if func in _FILLED and is_sharded(x) and x.spec.exchange is not None:
        filled = new_filled(func, args, kwargs)
        if filled is not None:
            return filled
    if any(isinstance(other, ShardTensor) for other in operands_of(args[1:], kwargs)[0]):
        raise unsupported(func, "the data is sharded", *specs_of(args))
    return func(x.local, *args[1:], **kwargs)  # type: ignore[no-any-return]


@register_op(
    Tensor.item, *find("__bool__ __float__ __int__ __index__ __complex__"), keeps_replicated=True, any_order=True
)
def to_number(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn one element into a Python number. Collective where it is sharded."""
    x: ShardTensor = args[0]
    if x.spec.global_shape.count(1) != x.spec.ndim:
        raise unsupported(
            func, "a sharded tensor of many elements is no single number", x.spec, remedy="reduce it first"
        )
    return func(x.full_tensor())


@register_op(Tensor.tolist, Tensor.numpy, Tensor.__array__, keeps_replicated=True, any_order=True)
def to_numpy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand the values to Python only where this rank holds all of them."""
    x: ShardTensor = args[0]
    if not x.spec.is_replicated:
        remedy = "use to_local() for this rank's part, full_tensor() for all"
        raise unsupported(func, "this rank holds a part of the values", x.spec, remedy=remedy)
    return func(x.local, *args[1:], **kwargs)


@register_op(torch.autograd.grad, keeps_replicated=True, any_order=True)
def grad(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Differentiate with respect to sharded tensors. A sharded output needs its ``grad_outputs``. Collective."""
    outputs, inputs = args
    given = kwargs.pop("grad_outputs", None)
    given = [None] * len(outputs) if given is None else [given] if isinstance(given, Tensor) else list(given)
    for output, gradient in zip(outputs, given, strict=True):
        if is_sharded(output) and (not isinstance(gradient, ShardTensor) or gradient.spec != output.spec):
            reason = "a sharded output needs grad_outputs of the same layout"
            raise unsupported(func, reason, output.spec, remedy="reduce it to a loss first")
    for x in inputs:
        if isinstance(x, ShardTensor) and isinstance(x.copied, Copy) and x.copied.may_be_base:
            reason = "whether what contiguous() gave is the tensor itself is not known"
            raise unsupported(func, reason, x.spec, remedy="differentiate with respect to that, or to a clone() of it")
    found = func([*map(local_of, outputs)], [*map(local_of, inputs)], [*map(local_of, given)], **kwargs)
    for x, g in zip(inputs, found, strict=True) if kwargs.get("create_graph") else ():
        if is_sharded(x):
            check_graphs(func, x.spec, g)
    return tuple(
        x._gradient(g) if isinstance(x, ShardTensor) and g is not None else g
        for x, g in zip(inputs, found, strict=True)
    )


@register_op(make_dual, keeps_replicated=True, any_order=True)
def with_tangent(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Give a tensor a tangent of the same layout, for forward-mode differentiation."""
    x, tangent = args
    if not isinstance(x, ShardTensor) or not isinstance(tangent, ShardTensor) or x.spec != tangent.spec:
        raise unsupported(func, "a tangent of another layout", *specs_of(args), remedy="use redistribute()")
    return ShardTensor(func(x.local, tangent.local, **kwargs), x.spec)


@register_op(unpack_dual, keeps_replicated=True, any_order=True)
def primal_and_tangent(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values and the tangents."""
    x: ShardTensor = args[0]
    return tuple(None if part is None else ShardTensor(part, x.spec) for part in func(x.local, **kwargs))

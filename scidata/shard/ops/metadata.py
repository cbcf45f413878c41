"""Questions about a tensor, conversions, new tensors, and autograd's own calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn
from weakref import getweakrefs

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.operators import is_capturing
from scidata.shard.memory import laid_out, memory_of, strides_of
from scidata.shard.op_table import (
    OF_THE_WHOLE,
    REFUSES,
    TensorFunction,
    TorchFunction,
    find,
    getters,
    register_op,
    unsupported,
)
from scidata.shard.ops.align import is_sharded, local_of, map_local, operands_of, specs_of, whole
from scidata.shard.ops.arguments import handles, integers
from scidata.shard.ops.edges import new_filled
from scidata.shard.ops.moving import as_sharded, to_layout
from scidata.shard.ops.spectra import Blank, Later, Spectrum
from scidata.shard.spec import UNKNOWN
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import DisableTorchFunctionSubclass, make_dual, unpack_dual
from scidata.shard.views import Copy, become, gradient_of

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
_LIKE = "zeros_like ones_like full_like empty_like"


@register_op(
    *find(_GLOBAL, namespaces=(torch, Tensor)),
    *getters(_GLOBAL_GETTERS),
    Tensor.__len__,
    keeps_replicated=True,
    any_order=True,
)
def of_the_whole(func: TorchFunction, types: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Answer for the tensor as a whole: the wrapper has the global shape, the dtype and the device."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


OF_THE_WHOLE.add(of_the_whole)


@handles(Tensor.is_contiguous, Tensor.stride, keeps_replicated=True, any_order=True)
def of_the_memory(func: TorchFunction, x: ShardTensor, *args: object, **kwargs: object) -> object:
    """Answer for the whole tensor as one process would; the part may lie in memory otherwise."""
    strides = strides_of(x)
    if strides is UNKNOWN:
        raise unsupported(func, "the strides are not known", x.spec, remedy="use contiguous() first")
    return func(torch.empty_strided(x.spec.global_shape, strides, device="meta"), *args, **kwargs)


@handles(Tensor.data.__set__, keeps_replicated=True, any_order=True)  # type: ignore[attr-defined]
def set_data(func: TorchFunction, x: Tensor, value: Tensor) -> None:
    """Replace a tensor's values by others of the same layout; gradient and graph stay.

    They may have another dtype or device: so ``module.double()`` keeps parameters that are tied, or an optimiser's.
    """
    fits = value.shape == x.shape
    if (
        not isinstance(x, ShardTensor)
        or not fits
        or (value.spec != x.spec if isinstance(value, ShardTensor) else is_sharded(x))
    ):
        reason = "data of another layout takes the place of a tensor's own"
        raise unsupported(func, reason, *specs_of([x, value]), remedy="use copy_()")
    changed = (x.dtype, x.device) != (value.dtype, value.device)
    func(x.local, local_of(value))
    # no view any more of what it was a view of
    x.copied, x.global_strides = value.copied if isinstance(value, ShardTensor) else None, memory_of(value)
    x.padded = None
    if changed:
        become(x, x.like(x.local, x.spec, x.copied, x.global_strides))


@handles("aten.set_.source_Tensor", keeps_replicated=True, any_order=True)  # set_ asks no __torch_function__
def set_memory(func: TorchFunction, x: Tensor, source: Tensor) -> Tensor:
    """Take the memory of another tensor of the same layout."""
    set_data(func, x, source)
    return x


class PartStorage:
    """The memory of a tensor's parts. It can be freed and made again, which is all that is the same for every part."""

    def __init__(self, x: ShardTensor) -> None:
        self._x = x

    def resize_(self, size: int) -> PartStorage:
        """Free the memory, or make it again without its values; ``size`` is 0 or the bytes of the whole tensor.

        Reversible layers do so with their input.
        """
        if is_capturing():
            raise UnsupportedShardOp("memory is freed, which a captured step cannot do")
        x, local = self._x, self._x.local
        if 0 < size < x.nbytes:
            raise unsupported(Tensor.untyped_storage, f"{size} of {x.nbytes} bytes", x.spec, remedy="use resize_(0)")
        x.padded = None  # it lies in the same memory
        steps = [(n - 1) * step for n, step in zip(local.shape, local.stride(), strict=True)]
        needed = (int(local.storage_offset()) + sum(steps) + 1) * local.itemsize if size and local.numel() else 0
        local.untyped_storage().resize_(needed)
        return self

    def __eq__(self, other: object) -> NoReturn:
        self.__getattr__("__eq__")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        memory_of_a_part(Tensor.untyped_storage, (), (self._x,), {})


@handles(Tensor.untyped_storage, any_order=True)
def untyped_storage(x: ShardTensor) -> PartStorage:
    """Return the memory of the parts."""
    return PartStorage(x)


@handles("_has_compatible_shallow_copy_type", keeps_replicated=True, any_order=True)
def takes_data_of(x: Tensor, other: Tensor) -> bool:
    """Whether ``x.data = other`` is possible: otherwise ``module.double()`` makes new parameters."""
    specs = specs_of([x, other])
    alike = (x.dtype, x.device) == (other.dtype, other.device)
    return len(specs) == 2 and specs[0] == specs[1] and (alike or (type(x) is ShardTensor and not getweakrefs(x)))


@handles("_is_view", Tensor.is_pinned, Tensor.record_stream, torch.result_type, keeps_replicated=True, any_order=True)
def of_the_part(func: TorchFunction, *args: object, **kwargs: object) -> object:
    """Answer for, or act on, this rank's part."""
    return func(*map(local_of, args), **kwargs)


@register_op(
    *find("data_ptr storage __dlpack__ __dlpack_device__", namespaces=(Tensor,)),
    *getters("__cuda_array_interface__"),
    any_order=True,
)
def memory_of_a_part(func: TorchFunction, types: object, args: Sequence[object], kwargs: object) -> NoReturn:
    """Raise: a kernel that takes addresses (of warp, say) would see this rank's part alone."""
    raise unsupported(
        func,
        "a kernel that takes a tensor's memory would see this rank's part alone",
        *specs_of(args),
        remedy="give it to_local() if it computes each row by itself, full_tensor() if it needs the rows of other "
        "ranks, or give the function that calls it a rule by scidata.register_op",
    )


REFUSES.add(memory_of_a_part)


@handles(_CONVERSIONS, keeps_replicated=True, any_order=True)
def convert(func: TensorFunction, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Change dtype, device or memory, element by element; the layout and the halo stay."""
    others = [local_of(other) for other in args]
    others_by_name = {name: local_of(other) for name, other in kwargs.items()}
    if not isinstance(x, ShardTensor):  # x.to(other), x.type_as(other): only the other's dtype and device count
        return func(x, *others, **others_by_name)
    return map_local(x, lambda part: func(part, *others, **others_by_name))


@handles(Tensor.type, keeps_replicated=True, any_order=True)
def type_of(func: Callable[..., str], x: ShardTensor, *args: object, **kwargs: object) -> str | Tensor:
    """Return the type of the parts, or convert to another."""
    return convert(Tensor.type, x, *args, **kwargs) if args or kwargs else func(x.facts())


@handles("detach_", keeps_replicated=True, any_order=True)
def detach_in_place(func: TensorFunction, x: ShardTensor) -> Tensor:
    """Take the part out of the graph."""
    func(x.local)
    return x


@handles(torch.detach, Tensor.detach, *getters("data"), keeps_replicated=True, any_order=True)
def detach(x: ShardTensor) -> Tensor:
    """Share the values, not the graph. Writes to ``data`` are counted too, or copies of the tensor would miss them."""
    result = map_local(x, Tensor.detach)
    if result.copied is not None:
        result.copied = result.copied.detached()
    return result


@handles(Tensor.contiguous, keeps_replicated=True, any_order=True)
def contiguous(
    func: TensorFunction, x: ShardTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Return the tensor itself if one process would; else a copy. The part's own memory layout may differ."""
    strides = strides_of(x)
    if strides is UNKNOWN:  # it may be the tensor itself in one process

        def refuse() -> NoReturn:
            raise unsupported(
                func, "whether it is the tensor that was written to is not known", x.spec, remedy="clone() it"
            )

        part = x.local.clone(memory_format=torch.contiguous_format)
        copied = Copy(x, part, refuse)
        copied.may_be_base = True
        return ShardTensor(part, x.spec, copied=copied)
    whole = torch.empty_strided(x.spec.global_shape, strides, device="meta")
    if func(whole, memory_format=memory_format) is whole:
        return x
    return map_local(x, lambda part: part.clone(memory_format=memory_format))


@handles(_LIKE, keeps_replicated=True, any_order=True)
def like(func: TensorFunction, x: ShardTensor, *args: object, **kwargs: object) -> Tensor:
    """Make a tensor of the same layout. Memory formats are those of the parts."""
    if isinstance(x, Spectrum) and func is torch.zeros_like and not args and kwargs.items() <= _same(x).items():
        return Blank(x.spec, x.sample.detach())
    part = x.outline() if isinstance(x, Later) else x.local
    if x.spec.is_replicated and x.global_strides is not None and x.global_strides is not UNKNOWN:
        part = laid_out(part, x.global_strides)  # rows that were moved lie as they came
    return ShardTensor(func(part, *args, **kwargs), x.spec, halo=x.halo)


def _same(x: ShardTensor) -> dict[str, object]:
    return {"dtype": x.dtype, "device": x.device}


def _sample(x: Tensor) -> Tensor:
    """Return a tensor of the same dtype and device."""
    return x.facts() if isinstance(x, ShardTensor) else x


def _new(func: TensorFunction, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    if any(isinstance(other, ShardTensor) for other in operands_of(args, kwargs)[0]):
        raise unsupported(func, "the data is sharded", *specs_of([x, *args]))
    return func(_sample(x), *args, **kwargs)


#: Make a plain tensor of the shape that is asked for, the same on each rank.
new = handles(Tensor.new_empty, Tensor.new_tensor, keeps_replicated=True, any_order=True)(_new)


@handles(Tensor.new_full, keeps_replicated=True, any_order=True)
def new_full(
    func: TensorFunction, x: Tensor, size: Sequence[int], fill_value: float | Tensor, **kwargs: object
) -> Tensor:
    """Make a plain constant, equal on each rank; from edges, a constant whose layout is decided later."""
    known = not isinstance(fill_value, Tensor)
    make = partial(func, _sample(x), fill_value=fill_value, **kwargs)
    filled = new_filled(x, integers(size), make) if known else None
    return _new(func, x, size, fill_value, **kwargs) if filled is None else filled


@handles(Tensor.new_zeros, Tensor.new_ones, keeps_replicated=True, any_order=True)
def new_constant(
    func: TensorFunction, x: Tensor, *shape: int | Sequence[int], size: Sequence[int] = (), **kwargs: object
) -> Tensor:
    """Like :func:`new_full` with zeros or ones."""
    filled = new_filled(x, integers(*shape, *size), partial(func, _sample(x), **kwargs))
    return _new(func, x, *(shape or (size,)), **kwargs) if filled is None else filled


@handles(Tensor.item, "__bool__ __float__ __int__ __index__ __complex__", keeps_replicated=True, any_order=True)
def to_number(func: TorchFunction, x: ShardTensor) -> object:
    """Convert one element to a Python number. Collective if it is sharded."""
    if x.spec.global_shape.count(1) != x.spec.ndim:
        raise unsupported(
            func, "a sharded tensor of many elements is no single number", x.spec, remedy="reduce it first"
        )
    return func(x.full_tensor())


@handles(Tensor.tolist, keeps_replicated=True, any_order=True)
def to_list(func: TorchFunction, x: ShardTensor) -> object:
    """Return all values as Python numbers in lists. Collective if they are sharded."""
    return func(whole(func, x))


@handles(Tensor.numpy, Tensor.__array__, keeps_replicated=True, any_order=True)
def to_numpy(func: TorchFunction, x: ShardTensor, *args: object, **kwargs: object) -> object:
    """Return all values as NumPy's. Collective if they are sharded.

    The array shares memory with the tensor if this rank holds all of it, as in one process. Else it is read-only: what
    is written to it would not reach the tensor.
    """
    full = whole(func, x)
    array = func(full, *args, **kwargs)
    if not full.is_set_to(x.local):
        array.flags.writeable = False  # type: ignore[attr-defined]
    return array


Tensors = Sequence[Tensor]


def _several(given: Tensor | Sequence[Tensor | None] | None) -> list[Tensor | None]:
    return [given] if isinstance(given, Tensor) else list(given or ())


def _gradients(
    func: TorchFunction, outputs: Sequence[Tensor | None], given: Tensor | Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """Return the gradients of outputs, each split as its output. Collective if one is not."""
    found: list[Tensor | None] = []
    for output, gradient in zip(outputs, _several(given) or [None] * len(outputs), strict=True):
        if not is_sharded(output):
            found.append(local_of(gradient))
        elif gradient is None or gradient.shape != output.shape:
            reason = "a sharded output needs its gradient (grad_outputs), of the same shape"
            raise unsupported(func, reason, output.spec, remedy="reduce to a loss, a plain tensor")
        else:
            found.append(to_layout(as_sharded(gradient, output.spec), output.spec).local)
    return found


@handles(torch.autograd.backward, keeps_replicated=True, any_order=True)
def backward(
    func: Callable[..., None],
    tensors: Tensor | Tensors,
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    *flags: bool | None,
    inputs: Tensor | Tensors | None = None,
    **named: bool | None,
) -> None:
    """Backpropagate from, and to, sharded tensors. Collective."""
    outputs = _several(tensors)
    given = _gradients(func, outputs, grad_tensors)
    func([*map(local_of, outputs)], given, *flags, inputs=[*map(local_of, _several(inputs))] or None, **named)


@handles(Tensor.register_post_accumulate_grad_hook, keeps_replicated=True, any_order=True)
def register_post_accumulate_grad_hook(x: ShardTensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` with the tensor once its gradient has been added to ``.grad``."""
    return x.local.register_post_accumulate_grad_hook(lambda _: hook(x))  # type: ignore[no-untyped-call]


@handles(torch.autograd.grad, keeps_replicated=True, any_order=True)
def grad(
    func: Callable[..., Sequence[Tensor | None]],
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    **kwargs: bool,
) -> tuple[Tensor | None, ...]:
    """Differentiate with respect to sharded tensors. A sharded output needs its ``grad_outputs``. Collective."""
    if kwargs.pop("is_grads_batched", False):
        # one pass a row: the batch comes before the output's dims, and is not split
        rows = list(zip(*_several(grad_outputs), strict=True))
        flags = [kwargs | ({} if i == len(rows) - 1 else {"retain_graph": True}) for i in range(len(rows))]
        each = [grad(func, outputs, inputs, row, **flag) for row, flag in zip(rows, flags, strict=True)]
        return tuple(None if g[0] is None else torch.stack(g) for g in zip(each[0], *each[1:], strict=True))
    given = _gradients(func, outputs, grad_outputs)
    for x in inputs:
        if isinstance(x, Later):
            x.refuse_passed(func)
        if isinstance(x, ShardTensor) and isinstance(x.copied, Copy) and x.copied.may_be_base:
            reason = "whether the result of contiguous() is the tensor itself is not known"
            raise unsupported(func, reason, x.spec, remedy="differentiate with respect to that, or to a clone() of it")
    found = func([local_of(x) for x in outputs], [local_of(x) for x in inputs], given, **kwargs)
    pairs = zip(inputs, found, strict=True)
    return tuple(gradient_of(x, g) if isinstance(x, ShardTensor) and g is not None else g for x, g in pairs)


@handles(make_dual, keeps_replicated=True, any_order=True)
def with_tangent(func: TensorFunction, x: Tensor, tangent: Tensor, **kwargs: object) -> Tensor:
    """Give a tensor a tangent of the same layout, for forward-mode differentiation."""
    if not isinstance(x, ShardTensor) or not isinstance(tangent, ShardTensor) or x.spec != tangent.spec:
        raise unsupported(func, "a tangent of another layout", *specs_of([x, tangent]), remedy="use redistribute()")
    return ShardTensor(func(x.local, tangent.local, **kwargs), x.spec)


@handles(unpack_dual, keeps_replicated=True, any_order=True)
def primal_and_tangent(
    func: Callable[..., Sequence[Tensor | None]], x: ShardTensor, **kwargs: object
) -> tuple[Tensor | None, ...]:
    """Return the values and the tangents."""
    return tuple(None if part is None else ShardTensor(part, x.spec) for part in func(x.local, **kwargs))

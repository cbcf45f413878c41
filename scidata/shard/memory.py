"""Where one process would have a tensor's elements in memory: the strides of the whole tensor.

They decide which random numbers an element gets, since torch draws in the order of memory, and whether a reshape is a
view. A local part cannot say: it is a copy where elements were moved, and of a dim of one row any stride would do.
Most tensors are row-major, and carry None. Where a function rearranges, or one of its tensors is not row-major, torch's
own inference of shapes gives the strides of the result; no rank asks another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.cache import Cache
from scidata.shard.base import ShardBase
from scidata.shard.comm.functions import linear
from scidata.shard.op_table import TorchFunction, find, getters
from scidata.shard.spec import UNKNOWN, ShardSpec, Strides, row_major
from scidata.shard.torch_internals import inferring, keeping_version, kernels, tree_leaves, tree_map_only

_Args: TypeAlias = tuple[object, ...]
_Kwargs: TypeAlias = dict[str, object]

_CALLED = ("torch", "torch_geometric", "einops")  # others' functions may do more than return a tensor
_INFERRED: Cache[tuple[Strides | None, ...]] = Cache(4096)
_BOTH = (torch, Tensor)

_CONVOLUTIONS = find("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", namespaces=(F,))

#: Functions whose result may not be row-major though all their tensors are.
REARRANGES: frozenset[object] = frozenset(
    [
        *find("t transpose swapaxes swapdims permute movedim moveaxis adjoint as_strided", namespaces=_BOTH),
        *find("broadcast_to narrow select chunk split tensor_split split_with_sizes unbind", namespaces=_BOTH),
        *find("unsafe_chunk unsafe_split hsplit vsplit dsplit diagonal rot90 quantile nanquantile", namespaces=_BOTH),
        *find("expand expand_as unfold", namespaces=(Tensor,)),
        *find("broadcast_tensors meshgrid einsum real imag", namespaces=(torch,)),
        *find(
            "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn", namespaces=(torch.fft,)
        ),
        *find("hfft2 ihfft2 hfftn ihfftn", namespaces=(torch.fft,)),
        *find("diagonal inv inv_ex solve solve_ex qr svd eig eigh cholesky cholesky_ex matrix_power lu lu_factor"),
        *find("lu_factor_ex lu_solve ldl_factor ldl_factor_ex ldl_solve householder_product geqrf"),
        *find(
            "cholesky_solve cholesky_inverse inverse pinverse matrix_exp solve_triangular triangular_solve pinv stft"
        ),
        *getters("T mT H mH real imag"),
        Tensor.__getitem__,
        *kernels("slice", "Tensor"),
        torch.linalg.lstsq,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        *_CONVOLUTIONS,  # by the strides of a weight of one channel, too
    ]
)

# Where torch's inference differs from its CPU kernels: all elementwise ones go by the same rule as add;
_AS_ADD = frozenset(
    find("copysign div divide true_divide floor_divide logaddexp logaddexp2 xlogy xlog1py logical_and logical_or")
    + find("logical_xor heaviside")
    + kernels("native_dropout_backward")
)
# these take the kernel into account only on fake tensors;
_BY_KERNEL = frozenset([F.scaled_dot_product_attention, *_CONVOLUTIONS])
_REVERSED = frozenset(
    find("rsub __rsub__ __rmod__ __rpow__ __rfloordiv__ __rand__ __ror__ __rxor__ __rlshift__ __rrshift__")
)
_LDEXP = frozenset(find("ldexp", namespaces=_BOTH))
# these give row-major results of any tensors;
_ROW_MAJOR = frozenset(
    find("max_unpool1d max_unpool3d nll_loss ctc_loss one_hot", namespaces=(F,))
    + find("normal view_copy repeat_interleave isin", namespaces=_BOTH)
    + [torch.sparse.mm]
)
_POWERS = frozenset([torch.pow, torch.float_power, Tensor.__rpow__])
# these lie as the strides of the first tensor suggest, by CPU kernels;
_PADS = frozenset([F.pad, torch.constant_pad_nd])
_SHUFFLES = find("channel_shuffle native_channel_shuffle pixel_shuffle pixel_unshuffle max_unpool2d", namespaces=(F,))
_BY_FORMAT = frozenset([*_PADS, *_SHUFFLES, F.group_norm, torch.group_norm])
# these are right for row-major tensors alone.
_UNSURE = frozenset(
    [
        *_SHUFFLES,
        F.cross_entropy,
        *find("irfft hfft ihfft ihfft2 irfft2 ihfftn irfftn rfft2 rfftn", namespaces=(torch.fft,)),
    ]
)
# and these not even for those, but for the last two dims.
_NEVER = frozenset([*find("hfft2 hfftn rfft2 rfftn", namespaces=(torch.fft,)), torch.linalg.eig, torch.linalg.lstsq])
# Nor are these where dims have the same stride: kernels sort dims otherwise.
_TRANSFORMS = frozenset(
    [*find("fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn", namespaces=(torch.fft,))]
)
#: Functions of results whose sizes depend on values: handlers set the strides of those that are not row-major.
OF_VALUES = frozenset(find("nonzero argwhere masked_select unique unique_consecutive", namespaces=_BOTH))
#: Functions that depend on the order of memory: they draw random numbers, or return a view where they can.
BY_MEMORY = frozenset(
    find("dropout alpha_dropout dropout1d dropout2d dropout3d rrelu", namespaces=(torch, F))
    + find("rand_like randn_like randint_like bernoulli poisson normal multinomial", namespaces=_BOTH)
    + find("uniform_ normal_ exponential_ bernoulli_ random_ log_normal_ cauchy_ geometric_", namespaces=(Tensor,))
    + find("reshape reshape_as flatten ravel unflatten as_strided", namespaces=_BOTH)
)
_WHERE = (torch.where, Tensor.where)  # of one argument too
# functions whose sizes and places may be tensors of one number
_SIZED = frozenset(find("view reshape expand narrow tensor_split unflatten", namespaces=_BOTH))
_INT = frozenset({int})
#: Functions of two tensors that act on each element alone; filled with their handlers.
ELEMENTWISE: set[object] = set()
#: Those of one and of three, but for those that write to an empty tensor like the first, or to a product with a number.
AT_ONCE: set[object] = set()


def _batch_norm(x: Tensor, *others: object, **options: object) -> Tensor:
    for layout in (torch.channels_last, torch.channels_last_3d):
        if x.ndim == (4 if layout is torch.channels_last else 5) and x.is_contiguous(memory_format=layout):
            return x
    return x.contiguous()


def _native_batch_norm(x: Tensor, *others: object, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1:2])
    return _batch_norm(x), channels, channels


def _binary_cross_entropy(x: Tensor, *others: object, **options: object) -> Tensor:
    return torch.empty_like(x)


def _roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    shifts, dims = ([each] if isinstance(each, int) else each for each in (shifts, dims))
    if not dims:
        return x.contiguous()
    for shift, d in zip(shifts, dims, strict=True):
        start = -shift % max(1, x.shape[d])
        x = torch.cat([x.narrow(d, start, x.shape[d] - start), x.narrow(d, 0, start)], d) if x.numel() else x.clone()
    return x


#: What infers the strides of CPU kernels' results in place of torch's own functions.
_LIKE_KERNELS: dict[object, Callable[..., object]] = {
    F.batch_norm: _batch_norm,
    F.binary_cross_entropy: _binary_cross_entropy,
    torch.native_batch_norm: _native_batch_norm,
    **dict.fromkeys(find("roll", namespaces=_BOTH), _roll),
}


def _suggested(x: Tensor) -> torch.memory_format | None:
    """Return the memory format that kernels take a tensor for (C++'s ``suggest_memory_format``); None if unknown."""
    shape, strides, least = x.shape, strides_of(x), 0
    if len(shape) not in (4, 5):
        return torch.contiguous_format
    if strides is UNKNOWN:
        return None
    if not strides[1]:
        return torch.contiguous_format
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if not shape[d] or strides[d] < least or (d == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[d] * shape[d]
    return torch.channels_last if len(shape) == 4 else torch.channels_last_3d


def memory_of(x: Tensor) -> Strides | None:
    """Return a tensor's strides in one process; UNKNOWN if they are not known, None if row-major."""
    if isinstance(x, ShardBase):
        return x.global_strides
    # a dim of extent 1 may have any stride in a contiguous tensor, but kernels take some for channels last
    return x.stride() if x.layout is torch.strided and x.stride() != row_major(x.shape) else None


def strides_of(x: Tensor) -> Strides:
    """Return a tensor's strides in one process, or UNKNOWN."""
    if isinstance(x, ShardBase):
        return x.global_strides or row_major(x.shape)
    return x.stride() if x.layout is torch.strided else row_major(x.shape)  # sparse: the other factor decides


def note(func: TorchFunction, args: _Args, kwargs: _Kwargs, result: object) -> object:
    """Note the strides that a call's results have in one process. Plain results, which are whole, are laid out so."""
    if func in OF_VALUES or (func in _WHERE and len(args) + len(kwargs) == 1):
        return result
    if isinstance(result, ShardBase):
        if not args or result is not args[0]:
            found = infer_strides(func, args, kwargs)
            result.global_strides = strides = found[0] if found else UNKNOWN
            if result.spec.is_replicated and result.copied is None and strides is not UNKNOWN:
                result.local = laid_out(result.local, strides or row_major(result.shape))  # for views of it to be views
        return result
    results = list(result) if isinstance(result, tuple | list) else [result]
    given = set(map(id, args))
    new = [i for i, x in enumerate(results) if isinstance(x, Tensor) and id(x) not in given]
    if not new:
        return result
    found = infer_strides(func, args, kwargs)
    changed = False
    for i in new:
        x, strides = results[i], found[i] if i < len(found) else UNKNOWN
        if isinstance(x, ShardBase):
            x.global_strides = strides
        elif isinstance(x, Tensor) and x.layout is torch.strided and x.numel() > 1 and strides is not UNKNOWN:
            results[i] = laid_out(x, strides or row_major(x.shape))
            changed |= results[i] is not x
    if not changed:
        return result
    return type(result)(results) if isinstance(result, tuple | list) else results[0]


def infer_strides(func: TorchFunction, args: _Args, kwargs: _Kwargs) -> tuple[Strides | None, ...]:
    """Return each result's strides in one process; None for row-major ones."""
    if func in _SIZED:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        if kwargs or not _INT.issuperset(map(type, sizes)):
            args, kwargs = _with_numbers(args, kwargs)
    if "generator" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    try:
        key = (func, torch.is_grad_enabled(), _keyed(args), _keyed(kwargs.items()) if kwargs else ())
        found = _INFERRED.get(key)
        return _INFERRED.put(key, _inferred(func, args, kwargs)) if found is None else found
    except TypeError:  # an argument that does not hash
        return _inferred(func, args, kwargs)


def _with_numbers(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """Return arguments with plain tensors of sizes as numbers, since the strides depend on these."""
    others, named = tree_map_only(Tensor, lambda x: x.tolist() if type(x) is Tensor else x, (args[1:], kwargs))
    return (*args[:1], *others), named


def _inferred(func: TorchFunction, args: _Args, kwargs: _Kwargs) -> tuple[Strides | None, ...]:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    memories = [memory for x in tensors if (memory := memory_of(x)) is not None]
    if func is Tensor.contiguous and len(args) == 1 and not kwargs:
        return (None,)
    if str(func).startswith("pyg."):  # pyg-lib's searches give ids in new memory, of sizes that values decide
        return (None,)
    if (getattr(func, "__module__", None) or "torch").split(".")[0] not in _CALLED:
        return ()
    form = _format_of(func, tensors[0], args, kwargs) if tensors else None
    if form is torch.contiguous_format:
        return (None,)
    if any(memory is UNKNOWN for memory in memories) or (memories and func in _UNSURE and form is None):
        return ()
    if func in _NEVER and not _is_of_last_two(func, args, kwargs):
        return ()
    if func in (torch.fft.fftn, torch.fft.ifftn) and _num_transformed(args, kwargs) > 3:  # at once, by kernels on CPU
        return ()
    if func in _TRANSFORMS and any(len({*memory}) < len(memory) for memory in memories):
        return ()
    if func is Tensor.__getitem__ and any(x.dtype == torch.bool for x in tensors[1:]):  # of a size that values decide
        return () if memory_of(tensors[0]) else (None,)
    if func is Tensor.__getitem__ and len(tensors) > 1 and _keeps_a_row(tensors[0], args[1]):
        return ()
    if func is F.scaled_dot_product_attention and len(args) > 2 and _is_two_products(tensors, args, kwargs):
        return (None,)
    operands = [(tuple(x.shape), strides_of(x)) for x in tensors]
    if func in _LDEXP:  # a product with powers of 2, which are row-major
        func, operands[1:] = torch.mul, [(shape, row_major(shape)) for shape, _ in operands[1:]]
    elif func in _AS_ADD:
        func, args, kwargs = torch.add, args[:2], {}
    if func in ELEMENTWISE and func not in AT_ONCE and len(operands) == 1:
        operands.append(((), ()))  # a number is an operand of another shape
    if (func in AT_ONCE or func in ELEMENTWISE) and (laid := _at_once(operands)):
        return laid
    if func in ELEMENTWISE and len({x.dtype for x in tensors}) == 1 < len({shape for shape, _ in operands}):
        return (_broadcast_strides(operands[::-1] if func in _REVERSED else operands),)
    like = _LIKE_KERNELS.get(func, func)
    func = func if like is _roll and tensors[0].device.type != "cpu" else like  # row-major there
    for fake in (False, True):  # the second knows devices, and more functions, and takes a hundred times as long
        if func in _BY_KERNEL and not fake:
            continue
        try:
            with inferring(fake=fake):
                make = partial(_stand_in, fake=fake, exact=func is torch.einsum)  # that of bfloat16 is inferred wrongly
                made, options = tree_map_only(Tensor, make, (args, kwargs))
                result = func(*made, **options)
        except Exception:
            continue
        results: Sequence[Any] = result if isinstance(result, tuple | list) else [result]
        if form is not None:
            results = [torch.empty(results[0].shape, device="meta", memory_format=form)]
        return tuple(memory_of(x) if isinstance(x, Tensor) else UNKNOWN for x in results)
    return ()


def _format_of(func: TorchFunction, x: Tensor, args: _Args, kwargs: _Kwargs) -> torch.memory_format | None:
    """Return the memory format of a result that lies in new memory, by that; None for those of other functions."""
    has_indices = x.requires_grad and torch.is_grad_enabled()  # of maxima, which takes another kernel
    on_cpu = func is F.logsigmoid or (func is F.max_pool1d and not has_indices)
    if func in _ROW_MAJOR or (on_cpu and x.device.type == "cpu"):
        return torch.contiguous_format
    if func in _POWERS:  # of a number: that overload of the kernel keeps no strides
        base = kwargs.get("self") if not args else args[1] if func is Tensor.__rpow__ else args[0]
        return torch.contiguous_format if isinstance(base, int | float | complex) else None
    if func not in _BY_FORMAT:
        return None
    if func in _PADS:
        given: dict[str, Any] = dict(zip(("input", "pad", "mode"), args, strict=False)) | kwargs
        mode = given.get("mode", "constant") if func is F.pad else "constant"
        if mode == "circular":
            return torch.contiguous_format
        if mode == "constant" and max(given["pad"], default=0) <= 0:  # a copy of a part
            return None
    elif x.device.type != "cpu":
        return None
    return _suggested(x)


def _at_once(operands: Sequence[tuple[tuple[int, ...], Strides]]) -> tuple[Strides | None, ...]:
    """Return the strides where the CPU's kernel takes all elements as one row: operands of one shape, each without
    gaps, in row-major order or as channels last, whatever strides their dims of one row have; nothing elsewhere.

    As ``TensorIterator::fast_set_up`` has it.
    """
    made = [torch.empty_strided(shape, strides, device="meta") for shape, strides in operands]
    for form in (torch.contiguous_format, torch.channels_last):
        if all(x.shape == made[0].shape and x.is_contiguous(memory_format=form) for x in made):
            return (memory_of(torch.empty_like(made[0], memory_format=form)),)
    return ()


def _keeps_a_row(x: Tensor, index: object) -> bool:
    """Whether an index leaves a dim of one row beside those that its tensors number: kernels order that otherwise."""
    strides = memory_of(x)
    if strides is None:
        return False
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, bool) for each in parts):
        return True
    made = torch.empty_strided(x.shape, strides, device="meta")
    is_basic = [each is None or each is Ellipsis or isinstance(each, int | slice) for each in parts]
    left = made[tuple(each if kept else slice(0, 0) for each, kept in zip(parts, is_basic, strict=True))]
    return 1 in left.shape or any(n == 1 and strides.count(step) > 1 for n, step in zip(x.shape, strides, strict=True))


def _is_two_products(tensors: Sequence[Tensor], args: _Args, kwargs: _Kwargs) -> bool:
    """Whether the CPU computes attention by two products with a row-major result, since its kernel refuses these
    operands.

    To infer it takes ten times as long as to infer the kernel's.
    """
    operands, masks = tensors[:3], tensors[3:]
    return operands[0].device.type == "cpu" and (
        any(x.ndim != 4 or x.shape[3] != operands[0].shape[3] for x in operands)
        or any(x.shape[0] != operands[0].shape[0] for x in operands)
        or any(mask.requires_grad for mask in masks)
        or bool(kwargs.get("dropout_p") or any(args[4:5]))
    )


def _broadcast_strides(operands: Sequence[tuple[tuple[int, ...], Strides]]) -> Strides | None:
    """Return the strides of an elementwise result, None if row-major: dims in the order of the operands' strides.

    As ``TensorIterator::reorder_dimensions`` has it, which is not the same on the device ``"meta"`` where several
    orders would do.
    """
    shape = torch.broadcast_shapes(*(own for own, _ in operands))  # type: ignore[no-untyped-call]
    ndim, rows = len(shape), []
    for own, steps in operands:
        added = ndim - len(own)
        found = [0 if n == 1 != m else step for n, m, step in zip(own, shape[added:], steps, strict=True)]
        rows.append([0] * added + found)

    def order(first: int, second: int) -> int:
        for row in rows:
            if row[first] and row[second] and row[first] != row[second]:
                return row[first] - row[second]
            if row[first] and row[second] and shape[first] > shape[second]:
                return 1
        return 0

    inner = list(reversed(range(ndim)))  # the innermost first
    for i in range(1, ndim):
        at = i
        for before in reversed(range(i)):
            found_order = order(inner[before], inner[at])
            if found_order > 0:
                inner[before], inner[at] = inner[at], inner[before]
                at = before
            elif found_order < 0:
                break
    strides, step = [0] * ndim, 1
    for d in inner:
        strides[d], step = step, step * shape[d]
    return None if inner == list(reversed(range(ndim))) or 0 in shape else tuple(strides)


def _num_transformed(args: _Args, kwargs: _Kwargs) -> int:
    given = [*args[1:3], kwargs.get("s"), kwargs.get("dim")]
    first = args[0] if args else None
    return next(
        (len(each) for each in given if isinstance(each, tuple | list)), first.ndim if isinstance(first, Tensor) else 0
    )


def _is_of_last_two(func: TorchFunction, args: _Args, kwargs: _Kwargs) -> bool:
    """Whether this is a real Fourier transform of the last two dims, as in models: its strides are inferred rightly."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else (-2, -1) if func is torch.fft.rfft2 else None)
    return func in (torch.fft.rfft2, torch.fft.rfftn) and dim in ((-2, -1), [-2, -1])


def _keyed(values: Iterable[object]) -> tuple[object, ...]:
    """Describe arguments by all that the strides of a result depend on."""
    found: list[object] = []
    for value in values:
        kind: type = type(value)
        if kind is int or kind is str or value is None:
            found.append(value)
        elif isinstance(value, ShardBase):
            spec, local = value.spec, value.facts()
            found.append((spec.global_shape, local.dtype, local.device, local.requires_grad, value.global_strides))
        elif isinstance(value, tuple | list):
            found.append(_keyed(value))
        elif isinstance(value, Tensor):
            strides = value.stride() if value.layout is torch.strided else None  # called often: no function of ours
            found.append((value.shape, value.dtype, value.device, value.requires_grad, strides))
        elif isinstance(value, dict):
            found.append(_keyed(value.items()))
        elif isinstance(value, slice):
            found.append(("slice", value.start, value.stop, value.step))
        else:
            found.append((kind, value))
    return tuple(found)


def _stand_in(x: Tensor, fake: bool, exact: bool) -> Tensor:
    """Return a tensor without values of the same shape, strides and dtype; if ``exact``, float64 for floats."""
    strides = strides_of(x)
    if strides is UNKNOWN:
        raise ValueError("a tensor whose strides are not known")
    dtype = torch.float64 if exact and x.is_floating_point() else x.dtype
    made = torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device if fake else "meta")
    return made.requires_grad_(x.requires_grad)


def own_strides(x: Tensor) -> Strides:
    """Return the strides of a copy without gaps; an empty tuple if it is row-major."""
    if x.layout is not torch.strided or x.stride() == row_major(x.shape):
        return ()
    strides = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()
    return () if strides == row_major(x.shape) else strides


def memory_of_parts(spec: ShardSpec, laid: Sequence[tuple[tuple[int, ...], Strides]]) -> Strides | None:
    """Return the strides of the whole, with its dims in the order in which the parts have them; None: row-major.

    A part of one row or of none does not show where its dim comes: the part that shows the most decides. UNKNOWN where
    parts differ, and where only the own one is known while others may show less.
    """
    if not any(strides for _, strides in laid):
        return None
    less = any(min(spec.sizes_of(axis)) < min(2, spec.global_shape[d]) for d, axis in spec.sharded.items())
    if len(laid) == 1 and less:
        return UNKNOWN
    shape, strides = max(laid, key=lambda part: (0 not in part[0], sum(n > 1 for n in part[0])))
    order = _order(shape, strides)
    for other, steps in laid:
        seen = [d for d in order if other[d] > 1]
        if 0 not in other and seen != [d for d in _order(other, steps) if other[d] > 1]:
            return UNKNOWN
    for layout, ndim in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if len(shape) == ndim and strides == torch.empty(shape, device="meta", memory_format=layout).stride():
            order = [0, *range(2, ndim), 1]  # also for one channel, although strides do not show it
    whole, step = [0] * len(order), 1
    for d in reversed(order):
        whole[d], step = step, step * max(spec.global_shape[d], 1)
    return None if order == sorted(order) else tuple(whole)


def _order(shape: tuple[int, ...], strides: Strides) -> list[int]:
    """Return the dims, the outermost in memory first."""
    return sorted(range(len(shape)), key=lambda d: -(strides or row_major(shape))[d])


def dense(memory: Strides | None, shape: Sequence[int]) -> Strides | None:
    """Return the strides if elements are dense and do not overlap, else row-major strides."""
    if memory is None or memory is UNKNOWN:
        return memory
    whole = torch.empty_strided(shape, memory, device="meta")
    return memory if torch.empty_like(whole).stride() == memory else None


def laid_out(x: Tensor, strides: Strides) -> Tensor:
    """Return a plain tensor with these strides: itself, a view if only dims of size 1 differ, or a copy."""
    if x.stride() == strides or x.numel() < 2:
        return x
    if all(n == 1 or old == new for n, old, new in zip(x.shape, x.stride(), strides, strict=True)):
        if x.requires_grad or x._base is not None:
            return x.as_strided(x.shape, strides)
        # no view of x: under no_grad torch lets these be written to less freely; and no write to x, which a graph may
        # have saved (the positions of a sort)
        with nullcontext() if x.is_inference() else keeping_version(x):
            return x.detach().as_strided_(x.shape, strides)
    if 0 in strides:  # by slices of x, the first row of an expanded dim would have the gradients of all
        return linear(_expanded, lambda grad, _: grad.clone(), x, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _expanded(x: Tensor, strides: Strides) -> Tensor:
    once = tuple([slice(0, 1) if step == 0 else slice(None) for step in strides])
    first = x[once]  # not written through: a graph has no two elements in one place
    result = torch.empty_strided(first.shape, strides, dtype=x.dtype, device=x.device).copy_(first)
    return result.as_strided_(x.shape, strides)

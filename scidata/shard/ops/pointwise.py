"""Functions that act on each element alone, with broadcasting: arithmetic, comparisons, activations, in-place too.

The halo takes part and is kept, as long as nothing requires grad and all sharded operands hold the same halo.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.core.bounds import window
from scidata.shard.comm.operators import is_capturing
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.memory import AT_ONCE, ELEMENTWISE
from scidata.shard.op_table import TensorFunction, find, register_op, unsupported
from scidata.shard.ops.align import Layout, align, finish, on_parts, operands_of, specs_of, write_to_plain
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.moving import beside, joined
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory, version_of
from scidata.shard.views import refuse_write_to_copy, written

_UNARY = """
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan arcsin
    arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh sigmoid expit logit erf erfc erfinv square
    reciprocal floor ceil round trunc fix frac sign signbit sgn isnan isinf isfinite isposinf isneginf isreal
    logical_not bitwise_not nan_to_num deg2rad rad2deg lgamma digamma i0 sinc clamp clip clamp_min clamp_max
    relu relu6 selu celu elu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish hardshrink softshrink
    tanhshrink leaky_relu logsigmoid threshold __invert__ angle conj_physical resolve_conj resolve_neg
    polygamma mvlgamma entr erfcx i0e i1 i1e log_ndtr ndtr ndtri psi gammaln multigammaln airy_ai bessel_j0 bessel_j1
    bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
"""
_BINARY = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide pow float_power maximum minimum fmax fmin
    atan2 arctan2 fmod remainder hypot copysign nextafter ldexp logaddexp logaddexp2 xlogy xlog1py heaviside
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    __eq__ __ne__ __and__ __or__ __xor__ __rsub__ __rdiv__ __pow__ __rpow__ __floordiv__ __rfloordiv__ __mod__ __rmod__
    __rand__ __ror__ __rxor__ __lshift__ __rshift__ __rlshift__ __rrshift__ complex polar gcd lcm igamma igammac
    gammainc gammaincc zeta chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w
"""
_ALL = f"{_UNARY} {_BINARY} lerp addcmul addcdiv masked_fill"
_IN_PLACE = """
    fill_ zero_ copy_ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ __ifloordiv__ __ipow__ __imod__
    __iadd__ __isub__ __imul__ __idiv__ __itruediv__
"""


ELEMENTWISE.update(find(_BINARY))
_OF_NUMBER = "pow float_power __pow__ __rpow__ __rdiv__"  # of two, with a kernel for a number
_KEEPING = "positive isreal nan_to_num deg2rad rad2deg relu6 hardtanh conj_physical resolve_conj resolve_neg"
AT_ONCE.update(set(find(f"{_UNARY} {_OF_NUMBER} lerp addcmul addcdiv")) - set(find(_KEEPING)))
_NUMBERS = frozenset({int, float, bool, type(None)})
_PLAIN = _NUMBERS | {str}  # of options


@register_op(*find(_ALL), any_order=True)
def elementwise(func: TensorFunction, types: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """Handle any function that acts elementwise over all its tensor arguments, with broadcasting."""
    is_plain = not kwargs or (not kwargs.get("inplace") and _PLAIN.issuperset(map(type, kwargs.values())))
    if args and is_plain and (quick := _same_layout(func, kwargs, *args)) is not None:
        return quick
    if kwargs.get("inplace"):
        return elementwise_in_place(func, types, args, kwargs)
    operands, rebuild = operands_of(args, kwargs)
    specs = specs_of(operands)
    held = _held(operands)
    if held is not None:
        new_args, new_kwargs = rebuild(held)
        first = next(x for x in operands if isinstance(x, ShardTensor) and not x.spec.is_replicated)
        return ShardTensor.from_padded(func(*new_args, **new_kwargs), first.spec, first.halo)
    spec = specs[0]
    if len(specs) == len(operands) and all(other == spec for other in specs):
        locals_ = [x.local for x in operands]  # type: ignore[attr-defined]
    else:
        locals_, layout, shape = _broadcast(func, operands)
        spec = _result_spec(specs, layout, shape)
    new_args, new_kwargs = rebuild(locals_)
    result = func(*new_args, **new_kwargs)
    if result.layout is not torch.strided:
        raise unsupported(func, "the result would be sparse", spec, remedy="use to_dense() on the sparse operand")
    return finish(result, spec, halo=_common_halo(operands, spec))


def _same_layout(func: TensorFunction, options: Mapping[str, object], x: object, *other: object) -> Tensor | None:
    """Fast path: one ShardTensor, with numbers alone, or with a tensor of equal layout or a plain row; no halos."""
    if not isinstance(x, ShardTensor) or x.padded is not None or x.halo:
        return None
    spec = x.spec
    if _NUMBERS.issuperset(map(type, other)):
        result = func(x.local, *other, **options)
        return ShardTensor(result, spec) if isinstance(result, Tensor) else result  # of x == None
    if len(other) > 1:
        return None
    (y,) = other
    if isinstance(y, ShardTensor):
        if y.padded is None and not y.halo and (y.spec is spec or y.spec == spec):
            return ShardTensor(func(x.local, y.local, **options), spec)
    elif isinstance(y, Tensor) and y.layout is torch.strided and _lies_inside(y.shape, spec):
        if y.requires_grad:
            y = replicate_to_shards(y, spec.shard_groups)
        return ShardTensor(func(x.local, y, **options), spec)
    return None


def _lies_inside(shape: Sequence[int], spec: ShardSpec) -> bool:
    """Whether a plain tensor has none of the sharded dims, and broadcasts to the others."""
    first = spec.ndim - len(shape)
    return first > spec.last_sharded and all(
        n in (1, extent) for n, extent in zip(shape, spec.global_shape[first:], strict=True)
    )


@register_op(torch.where, Tensor.where, any_order=True)
def where(
    func: TensorFunction, types: object, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]
) -> Tensor | tuple[Tensor, ...]:
    """``where`` with three arguments; with one, ``nonzero`` as a tuple."""
    if len(args) + len(kwargs) < 2:
        return torch.nonzero(*args, *kwargs.values(), as_tuple=True)
    return elementwise(func, (), tuple(args), dict(kwargs))


@register_op(
    *find([f"{name}_" for name in _ALL.split() if not name.startswith("__")], optional=True),
    *find(_IN_PLACE),
    keeps_replicated=True,
    any_order=True,
)
def elementwise_in_place(
    func: TensorFunction, types: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    """Write to the first argument's part, and to its halo if all others have one."""
    operands, rebuild = operands_of(args, kwargs)
    target = args[0]
    if not isinstance(target, ShardTensor):
        return write_to_plain(func, args, kwargs)
    refuse_write_to_copy(func, target)
    spec = target.spec
    held = _held(operands)
    if held is not None:
        new_args, new_kwargs = rebuild(held)
        func(*new_args, **new_kwargs)
        target.padded_version = version_of(held[0])
        return target
    locals_, layout, shape = _broadcast(func, operands)
    if tuple(shape) == spec.global_shape and _result_spec(specs_of(operands), layout, shape) != spec:
        dims = [range(spec.ndim - len(x.shape), spec.ndim) for x in operands]
        operands = [target, *(beside(x, names, spec) for x, names in zip(operands[1:], dims[1:], strict=True))]
        locals_, layout, shape = _broadcast(func, operands)
    if tuple(shape) != spec.global_shape or _result_spec(specs_of(operands), layout, shape) != spec:
        raise unsupported(func, "the result has another layout than the tensor it is written to", *specs_of(operands))
    new_args, new_kwargs = rebuild([locals_[0], *(_apart(part, locals_[0]) for part in locals_[1:])])
    func(*new_args, **new_kwargs)
    written(target)
    return target


def _apart(part: Tensor, target: Tensor) -> Tensor:
    """Copy an operand that overlaps with the target: torch refuses it, but only on ranks whose rows overlap.

    A graph writes to nothing: what is captured has copies where they are needed.
    """
    if is_capturing():
        return part
    same = part.data_ptr() == target.data_ptr() and part.stride() == target.stride()
    return part.clone() if shares_memory(part, target) and not same else part


def _broadcast(func: TensorFunction, operands: Sequence[Tensor]) -> tuple[list[Tensor], Layout, tuple[int, ...]]:
    """Align operands with their dims counted from the right."""
    ndims = [x.spec.ndim if isinstance(x, ShardTensor) else x.ndim for x in operands]
    ndim = max(ndims)
    locals_, layout, extents = align(func, operands, [range(ndim - n, ndim) for n in ndims])
    return locals_, layout, tuple(extents[d] for d in range(ndim))


def _result_spec(specs: Sequence[ShardSpec], layout: Layout, shape: tuple[int, ...]) -> ShardSpec:
    dims = tuple(None if entry is None else entry[0] for entry in layout)
    sizes = tuple(None if entry is None else entry[1] for entry in layout)
    for spec in specs:
        if spec.global_shape == shape and spec.dims == dims and spec.sizes == sizes:
            return spec
    return specs[0].derive(shape, dims, sizes)  # type: ignore[arg-type]


def _common_halo(operands: Sequence[Tensor], spec: ShardSpec) -> Mapping[int, HaloDim]:
    """Return the halo that all operands of the result's layout ask for; none if they contradict."""
    halos = [x.halo for x in operands if isinstance(x, ShardTensor) and x.halo and x.spec == spec]
    return halos[0] if halos and all(halo == halos[0] for halo in halos) else {}


def _held(operands: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the operands with their halos; None if the function cannot act on the halo."""
    if not any(isinstance(x, ShardTensor) and x.padded is not None for x in operands):
        return None
    plain = [x.local if isinstance(x, ShardTensor) and x.spec.is_replicated else x for x in operands]
    sharded = [x for x in plain if isinstance(x, ShardTensor)]
    if not sharded or sharded[0].padded is None:
        return None
    spec, halo = sharded[0].spec, sharded[0].halo
    if torch.is_grad_enabled() and any(x.requires_grad for x in plain):
        return None
    result = []
    for x in plain:
        if isinstance(x, ShardTensor):
            padded = x.held_halo() if x.spec == spec and x.halo == halo else None
        elif len(x.shape) > spec.ndim or any(
            n not in (1, whole) for n, whole in zip(reversed(x.shape), reversed(spec.global_shape), strict=False)
        ):
            return None
        else:
            beyond = any(widths.before or widths.after for widths in halo.values())  # of a patch: x has no such rows
            padded = None if beyond else _window_of(x, spec, halo)
        if padded is None:
            return None
        result.append(padded)
    return result


def _window_of(x: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> Tensor:
    """Cut a replicated operand to this rank's rows and halo, wrapping where the halo wraps."""
    for dim in {*spec.sharded, *halo}:
        own = dim - spec.ndim + x.ndim
        if own < 0 or x.shape[own] == 1:
            continue
        widths = vars(halo[dim]) if dim in halo else {}
        segments = window(*spec.dim_bounds(dim), **widths)
        rows = [x.narrow(own, segment.start, segment.count) for segment in segments]
        x = rows[0] if len(rows) == 1 else joined(rows, own) if rows else x.narrow(own, 0, 0)
    return x


@handles(F.prelu, Tensor.prelu, any_order=True)
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Scale negative elements by a learned number, or by one for each channel (dim 1)."""
    shape, own = tuple(input.shape), tuple(weight.shape)
    channels = shape[1] if len(shape) > 1 else 1
    if len(own) > 1 or (own not in ((), (1,)) and own != (channels,)):
        raise RuntimeError(f"prelu: a weight of shape {own} does not fit an input of shape {shape}")
    name: Hashable = 1 if own == (channels,) and len(shape) > 1 else "weight"
    dims = range(len(shape))
    if isinstance(weight, ShardTensor) and name == "weight":
        weight = weight.full_tensor()
    return on_parts(F.prelu, F.prelu, [input, weight], [dims, [name] * len(own)], dims)


@handles(F.glu)
def glu(input: ShardTensor, dim: int = -1) -> Tensor:
    """Half of a dim, gated by the other half."""
    spec = input.spec
    dim = normal_dim(dim, spec.ndim)
    if spec.global_shape[dim] % 2:
        raise RuntimeError(f"glu: dim {dim} of size {spec.global_shape[dim]} has no halves")
    half = spec.global_shape[dim] // 2
    if dim not in spec.sharded:
        return ShardTensor(F.glu(input.local, dim), spec.with_rows(dim, half))
    first: Tensor = input.narrow(dim, 0, half)
    return first * input.narrow(dim, half, half).sigmoid()


_OF_ONE = {
    "norm": torch.linalg.vector_norm,
    "maximum": Tensor.clamp_min,  # takes numbers, too
    "minimum": Tensor.clamp_max,
    "maximum_": Tensor.clamp_min_,
    "minimum_": Tensor.clamp_max_,
}


@handles(
    *[getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name != "_foreach_powsum"],
    keeps_replicated=True,
    any_order=True,
)
def of_each(func: TensorFunction, tensors: Sequence[Tensor], *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    """Apply a function to each tensor of a list, with the matching items of other lists."""
    if not isinstance(tensors, list | tuple):
        raise unsupported(func, "its first argument is no list", *specs_of(args), remedy="call it for each tensor")
    name = func.__name__.removeprefix("_foreach_")
    if name.startswith("addc") and len(args) > 2:
        args, kwargs = args[:2], {"value": args[2].tolist() if isinstance(args[2], Tensor) else args[2]}
    of_one = _OF_ONE.get(name) or getattr(Tensor, name)

    def at(value: object, i: int) -> object:
        return value[i] if isinstance(value, list | tuple) else value

    return tuple(
        of_one(x, *[at(value, i) for value in args], **{key: at(value, i) for key, value in kwargs.items()})
        for i, x in enumerate(tensors)
    )

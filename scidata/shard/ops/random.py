"""Random numbers: each rank keeps its part of the numbers that one process draws for the whole tensor.

So results do not depend on how many ranks share a tensor, and on the CPU they equal those of plain torch. Ranks have to
be in step, as with one seed on all ranks of a domain. The price: each rank draws for the whole tensor, for dropout one
byte an element.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scidata.shard.memory import strides_of
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import Dtype, finish, operands_of, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import to_layout
from scidata.shard.rows.edge_order import edge_runs
from scidata.shard.spec import UNKNOWN, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

_ALPHA = 1.7580993408473766  # of SELU: where dropped elements go in alpha dropout


def _own_part(func: TorchFunction, full: Tensor, spec: ShardSpec) -> Tensor:
    """Cut out this rank's part; a dim of extent 1 is kept."""
    part = full
    for dim, axis in spec.sharded.items():
        if full.shape[dim] != spec.global_shape[dim]:
            continue
        runs = [(spec.offsets[dim], spec.local_shape[dim])]
        if spec.edge_parts is not None:  # edges with self-loops are joined of several parts
            runs = edge_runs(spec.edge_parts, spec.coordinate(axis))
        elif not spec.in_order:
            raise unsupported(func, "edges have no order for random numbers", spec, remedy="draw for nodes, or use p=0")
        part = torch.cat([part.narrow(dim, start, rows) for start, rows in runs], dim)
    return part.clone(memory_format=torch.contiguous_format)


def _whole(func: TorchFunction, x: ShardTensor, dtype: Dtype = None) -> Tensor:
    """Return an uninitialised tensor of the whole shape with the memory layout of one process.

    That is the order in which torch draws.
    """
    strides = strides_of(x)
    if strides is UNKNOWN:
        reason = "random numbers follow the order in memory, which is not known here"
        raise unsupported(func, reason, x.spec, remedy="use contiguous() first")
    if dtype is None:
        return torch.empty_strided(x.spec.global_shape, strides, dtype=x.dtype, device=x.device)
    like = torch.empty_strided(x.spec.global_shape, strides, dtype=dtype, device="meta")
    return torch.empty_like(like, device=x.device)


@handles(
    *(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    any_order=True,
)
def dropout(
    func: TensorFunction, x: ShardTensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
    train: bool = True,
) -> Tensor:  # fmt: skip
    """Drop elements or whole channels by the mask that one process draws with the same seed.

    Alpha dropout keeps mean and variance of the results of SELU.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    shape = x.spec.global_shape
    if p == 0 or not (training and train) or 0 in shape:
        return x
    scale = shift = x.local.new_zeros(())
    if p < 1:
        if func in (F.dropout, torch.dropout, F.alpha_dropout):
            mask = _whole(func, x, torch.bool)
        else:
            if func is F.feature_alpha_dropout and len(shape) < 2:
                raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
            unbatched = (func is F.dropout1d and len(shape) == 2) or (func is F.dropout3d and len(shape) == 4)
            lead = 1 if unbatched else 2
            mask = torch.empty((*shape[:lead], *[1] * (len(shape) - lead)), dtype=torch.bool, device=x.device)
        kept = _own_part(func, mask.bernoulli_(1 - p), x.spec).to(x.dtype)
        if "alpha" in func.__name__:
            a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
            scale, shift = kept * a, (kept - 1) * (_ALPHA * a) + _ALPHA * a * p
        else:
            scale = kept.div_(1 - p)
    if not inplace:
        return finish(x.local * scale + shift if shift.ndim else x.local * scale, x.spec)
    refuse_write_to_copy(func, x)
    x.local.mul_(scale).add_(shift)
    written(x)
    return x


@handles(torch.native_dropout)
def native_dropout(func: TensorFunction, input: ShardTensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drop elements, and return the mask, too."""
    drawn = _whole(func, input, torch.bool)
    kept = _own_part(func, drawn.bernoulli_(1 - p) if train is not False else drawn.fill_(True), input.spec)
    scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
    return finish(input.local * kept * scale, input.spec), finish(kept, input.spec)


@handles(torch.rand_like, torch.randn_like, torch.randint_like, any_order=True)
def random_like(
    func: TensorFunction, x: ShardTensor, *args: object, requires_grad: bool = False, **kwargs: object
) -> Tensor:
    """Draw a tensor of the same layout."""
    drawn = _own_part(func, func(_whole(func, x), *args, **kwargs), x.spec)
    return finish(drawn.requires_grad_(requires_grad), x.spec)


@handles("bernoulli")
def bernoulli(
    func: TensorFunction, x: Tensor, p: float | Tensor | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw 1 with a probability, each element's own unless one is given: then all are gathered. Collective."""
    if isinstance(p, Tensor) or not isinstance(x, ShardTensor):
        raise unsupported(func, "p is a tensor", *specs_of([x, p]))
    spec = x.spec
    like = torch.empty(spec.global_shape, dtype=x.dtype, device=x.device) if p is not None else x.full_tensor().detach()
    drawn = torch.bernoulli(like.contiguous(), *[] if p is None else [p], generator=generator)
    part = _own_part(func, drawn, spec)
    return finish(torch.where(torch.ones_like(part, dtype=torch.bool), part, x.local), spec)  # a gradient of nought


@handles("normal poisson binomial _standard_gamma _sample_dirichlet")
def drawn(
    func: TensorFunction, *args: Tensor | float, generator: torch.Generator | None = None, **named: Tensor | float
) -> Tensor:
    """Draw each element by its own parameters, which are gathered. Collective. Gradients are torch's own."""
    operands, rebuild = operands_of(args, named)
    whole = [_whole(func, x).copy_(x.full_tensor()) if isinstance(x, ShardTensor) else x for x in operands]
    given, options = rebuild(whole)
    result = func(*given, generator=generator, **options)
    spec = next((x.spec for x in operands if isinstance(x, ShardTensor) and x.shape == result.shape), None)
    return result if spec is None else to_layout(ShardTensor(result, spec.replicated(result.shape)), spec)


@handles(F.rrelu, torch.rrelu, torch.rrelu_)
def rrelu(
    func: TensorFunction, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Leaky ReLU, by the middle of the slopes, or by drawn ones; the tensor is gathered then."""
    inplace = inplace or func is torch.rrelu_
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    result = drawn(torch.rrelu, input, lower=lower, upper=upper, training=True)
    return input.copy_(result) if inplace else result


@handles("multinomial")
def multinomial(func: TensorFunction, x: ShardTensor, *args: int, **kwargs: object) -> Tensor:
    """Draw column numbers by weights, which are gathered; each rank keeps its rows. Collective."""
    drawn: Tensor = func(_whole(func, x).copy_(x.full_tensor().detach()), *args, **kwargs)
    rows = x.spec.sharded.get(0) if drawn.ndim > 1 else None
    spec = x.spec.derive(drawn.shape, [0 if a == rows else None for a in range(len(x.spec.axes))], x.spec.sizes)
    return finish(_own_part(func, drawn, spec), spec)


@handles("uniform_ normal_ exponential_ bernoulli_ random_ log_normal_ cauchy_ geometric_", any_order=True)
def random_in_place(func: TensorFunction, x: ShardTensor, *args: object, **kwargs: object) -> Tensor:
    """Overwrite with random numbers; parameters are numbers."""
    if any(isinstance(other, Tensor) for other in (*args, *kwargs.values())):
        raise unsupported(func, "its parameters are tensors", *specs_of([x, *args, *kwargs.values()]))
    refuse_write_to_copy(func, x)
    x.local.copy_(_own_part(func, func(_whole(func, x), *args, **kwargs), x.spec))
    written(x)
    return x


@handles(nn.init.constant_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, any_order=True)
def initialise(func: TensorFunction, tensor: ShardTensor, val: float = 0.0, **how: object) -> Tensor:
    """Overwrite as one process would, without a graph."""
    with torch.no_grad():
        return tensor.fill_(val) if func is nn.init.constant_ else random_in_place(func, tensor, **how)

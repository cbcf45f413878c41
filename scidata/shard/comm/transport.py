"""Moving values between ranks, without autograd: the parts of differentiable collectives.

Values that are only moved travel as bytes, so every dtype works on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from scidata.errors import ConfigError
from scidata.shard.comm.indexed import compare

Group: TypeAlias = dist.ProcessGroup | None

# Sums of these are taken in a wider dtype: for the digits, and because gloo has no 16-bit integers.
SUM_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.uint8: torch.int64,
}

#: What can be described to a rank that does not know it: dtypes by their place here, shapes of so many dims.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_DIMS = 14

# Bytes that a rank of a group on CPUs receives at once: up to so many, gathers and reductions are one exchange.
# Those of gloo are rings, whose steps cost 3 ranks 5 to 10 times as much (80 us of CPU for 700, on a busy machine).
_AT_ONCE = 1 << 16
_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, int], Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}

# torch 2.13 renamed it, and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_size(group: Group) -> int:
    """Return the number of ranks; 1 for no group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Return this rank inside the group; 0 for no group."""
    if group is None:
        return 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("this process is not a member of the group it was asked to communicate in")
    return rank


def device_of(group: Group) -> torch.device:
    """Return the device on which a group communicates."""
    nccl = group is not None and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def as_bytes(x: Tensor) -> Tensor:
    """Return the values as a flat row of bytes, a view where that can be."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element counts as contiguous with any stride


def with_dim(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Return ``shape`` with another size at ``dim``."""
    return (*shape[:dim], size, *shape[dim + 1 :])


_sent = [0]


def count_sent(num_bytes: int = 0) -> int:
    """Add to the bytes that this rank has sent, and return how many these are; of large reductions those of a ring."""
    _sent[0] += num_bytes
    return _sent[0]


def _is_small(num_bytes: int, group: Group) -> bool:
    """Whether this many bytes of each rank are gathered by one exchange; the same on all ranks."""
    num_ranks = group_size(group)
    return num_ranks > 2 and num_bytes * num_ranks <= _AT_ONCE and device_of(group).type == "cpu"


def exchange(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send ``parts[p]`` to rank p and return the tensors received, of the given shapes. Collective, not differentiable.

    All parts are of one dtype and device. Empty parts are legal, and are not sent.
    """
    if group_size(group) == 1:
        return [parts[0].detach().clone()]
    dtype, device = parts[0].dtype, parts[0].device
    outgoing = [as_bytes(part) for part in parts]
    send_counts = [len(part) for part in outgoing]
    recv_counts = [dtype.itemsize * torch.Size(shape).numel() for shape in shapes]
    received = torch.empty(sum(recv_counts), dtype=torch.uint8, device=device)
    count_sent(sum(send_counts) - send_counts[group_rank(group)])
    compare(group)
    dist.all_to_all_single(received, torch.cat(outgoing), recv_counts, send_counts, group=group)
    return [
        part.view(dtype).view(tuple(shape))
        for part, shape in zip(torch.split(received, recv_counts), shapes, strict=True)
    ]


def broadcast(x: Tensor, src: int, group: Group) -> None:
    """Overwrite ``x`` with rank ``src``'s values. Collective."""
    if group_size(group) == 1 or x.numel() == 0:
        return
    x = once(x)
    values = x.contiguous()
    count_sent(values.nbytes * (group_size(group) - 1) if group_rank(group) == src else 0)
    compare(group)
    dist.broadcast(as_bytes(values), group=group, group_src=src)
    if values.data_ptr() != x.data_ptr():
        x.copy_(values)


def once(x: Tensor) -> Tensor:
    """Return the values of a tensor that lie in memory, without a graph: one row of each expanded dim."""
    return x.detach()[tuple([slice(0, 1) if step == 0 else slice(None) for step in x.stride()])]


def gather(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
    """Return all ranks' parts joined along ``dim``. Collective.

    Large parts are padded to the longest, because gloo gathers equal sizes only.
    """
    longest = max(sizes)
    rows = x.detach().movedim(dim, 0)
    rest = rows.shape[1:]
    if longest * rest.numel() == 0:
        return x.new_zeros(with_dim(x.shape, dim, sum(sizes)))
    if _is_small(longest * rest.numel() * x.dtype.itemsize, group):
        return torch.cat(exchange([x] * len(sizes), [with_dim(x.shape, dim, size) for size in sizes], group), dim)
    padded = rows
    if len(rows) < longest:
        padded = rows.new_zeros((longest, *rest))
        padded[: len(rows)] = rows
    gathered = torch.empty((len(sizes) * longest, *rest), dtype=x.dtype, device=x.device)
    count_sent(padded.nbytes * (len(sizes) - 1))
    compare(group)
    _all_gather(gathered.view(-1).view(torch.uint8), as_bytes(padded), group=group)
    if min(sizes) == longest:  # no view: torch forbids writes to a custom function's views
        return gathered.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim % x.ndim else gathered
    parts = zip(torch.split(gathered, longest), sizes, strict=True)
    return torch.cat([part[:size].movedim(0, dim) for part, size in parts], dim)


def gather_rows(row: Tensor, group: Group) -> Tensor:
    """Return the row ``(n,)`` of each rank, ``(num_ranks, n)``. Collective; a group of one communicates nothing."""
    num_ranks = group_size(group)
    return row[None] if num_ranks == 1 else gather(row[None], (1,) * num_ranks, 0, group)


def reduce_scatter(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
    """Return the own part of the sum of all ranks' ``x``. Collective.

    The sum is in rank order and in a wide dtype; the traffic is that of a ring's reduce-scatter.
    """
    own = with_dim(x.shape, dim, sizes[group_rank(group)])
    parts = exchange(torch.split(x, list(sizes), dim), [own] * len(sizes), group)
    return torch.stack(parts).sum(0, dtype=SUM_IN.get(x.dtype, x.dtype)).to(x.dtype)


def reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """Return the elementwise reduction of all ranks' ``x`` in a new contiguous tensor. Collective."""
    wide = torch.empty_like(x, dtype=SUM_IN.get(x.dtype, x.dtype), memory_format=torch.contiguous_format)
    wide.copy_(x.detach())
    if wide.numel() > 0 and op in _REDUCTIONS and _is_small(wide.nbytes, group):
        wide = _REDUCTIONS[op](gather_rows(wide.view(-1), group), 0).view(wide.shape)
    elif wide.numel() > 0:
        count_sent(2 * wide.nbytes * (group_size(group) - 1) // group_size(group))
        compare(group)
        dist.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide, op, group=group)
    return wide.to(x.dtype)


def _all_reduce_extreme(x: Tensor, op: dist.ReduceOp.RedOpType, neutral: float, group: Group) -> Tensor:
    if x.is_complex():
        raise ConfigError("complex numbers have no maximum or minimum")
    if group_size(group) == 1:
        return x.detach()
    if not x.is_floating_point():
        return reduce(x.to(torch.uint8) if x.dtype == torch.bool else x, op, group).to(x.dtype)
    # Backends differ in how they reduce NaN, torch's own reductions keep it: so it travels beside the values.
    missing = x.isnan()
    is_max = op == dist.ReduceOp.MAX
    pair = torch.stack([x.masked_fill(missing, neutral), missing.to(x.dtype) if is_max else -missing.to(x.dtype)])
    both = reduce(pair, op, group)
    return both[0].masked_fill_(both[1] != 0, float("nan"))


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Maximum over ranks, elementwise; NaN where any rank has NaN. Not differentiable. Collective.

    A rank without values passes the least value of the dtype.
    """
    return _all_reduce_extreme(x, dist.ReduceOp.MAX, float("-inf"), group)


def all_reduce_min(x: Tensor, group: Group) -> Tensor:
    """Minimum over ranks, elementwise; NaN where any rank has NaN. Not differentiable. Collective."""
    return _all_reduce_extreme(x, dist.ReduceOp.MIN, float("inf"), group)

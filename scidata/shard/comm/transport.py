"""Moving values between ranks, without autograd: the parts of differentiable collectives.

Values that are only moved travel as bytes, so every dtype works on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from scidata.device_mesh.devices import current_device, kind_of
from scidata.device_mesh.groups import explaining
from scidata.device_mesh.torch_internals import RLock, count_as_one, is_profiled, named
from scidata.errors import ConfigError
from scidata.shard.comm.indexed import compare
from scidata.shard.comm.operators import captures, operator, tapes, uses_operators
from scidata.shard.sizes import facts_of, ones

Group: TypeAlias = dist.ProcessGroup | None
#: ``(rank, number)`` of each rank that gets or sends any, in the order of the ranks.
Counts: TypeAlias = Sequence[tuple[int, int]]

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
# Ranks that gather a value of each to reduce it. More reduce by pairs, or as the backend does. CPU us a rank of 128
# bytes on two busy cores, 8 / 16 / 32 ranks (tests/bench/small_reductions.py): one exchange 506 / 987 / 1,723, gloo's
# ring 2,611 / 3,851 / 3,461, pairs 1,093 / 1,003 / 1,365.
_FEW = 16
_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.PRODUCT: torch.prod,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}

# torch 2.13 renamed it, and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_size(group: Group) -> int:
    """Return the number of ranks; 1 for no group."""
    return 1 if group is None else _member(group).size()


def group_rank(group: Group) -> int:
    """Return this rank inside the group; 0 for no group."""
    return 0 if group is None else _member(group).rank()


def _member(group: object) -> dist.ProcessGroup:
    """Return the group; refuse the object that torch gives in its place to processes outside it."""
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError("this process is not a member of the group it was asked to communicate in")
    return group


def device_of(group: Group) -> torch.device:
    """Return the device on which a group communicates."""
    return torch.device("cpu") if group is None else current_device(kind_of(group))


def _is_gloo(group: Group) -> bool:
    return group is not None and group.name() == "gloo"


def as_bytes(x: Tensor) -> Tensor:
    """Return the values as a flat row of bytes, a view if possible."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element counts as contiguous with any stride


def with_dim(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Return ``shape`` with another size at ``dim``."""
    return (*shape[:dim], size, *shape[dim + 1 :])


_sent = [0]


def count_sent(num_bytes: int = 0) -> int:
    """Add to the number of bytes that this rank has sent, and return it; large reductions count as rings."""
    _sent[0] += num_bytes
    return _sent[0]


def gathers_to_reduce(num_ranks: int) -> bool:
    """Whether ranks gather a value of each to reduce it; many send messages of one value, however many they are."""
    return num_ranks <= _FEW


def _is_small(x: Tensor, num_ranks: int) -> bool:
    """Whether tensors of all ranks are gathered by one exchange; equal on all ranks."""
    return num_ranks > 2 and x.nbytes * num_ranks <= _AT_ONCE and x.is_cpu


def _alike(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gather(x: Tensor, shape: Sequence[int], num_ranks: int, group: Group) -> Tensor:
    """Return the equally shaped tensors of all ranks, concatenated in a tensor of another shape. Collective."""
    found = x.new_empty(shape)
    received, part = found.view(-1).view(torch.uint8), as_bytes(x)
    count_sent(x.nbytes * (num_ranks - 1))
    compare(group, "gather", x.nbytes)
    with named("gather") if is_profiled() else RLock():
        if _is_small(x, num_ranks):
            dist.all_to_all_single(received, part.repeat(num_ranks), group=group)
        else:
            _all_gather(received, part, group=group)
    return found


_TAG = 0  # messages of one tag between two ranks stay in order
_under_way: set[Transfer] = set()  # of two ranks each: a buffer that went too soon would leave its bytes to the next


class Transfer:
    """An exchange under way between the ranks of a group; ``received`` is valid after :meth:`wait`. Collective.

    Where few ranks send to each other they send and receive by themselves; else it is one all-to-all, in which gloo
    sends a message to every rank, an empty one too. A convolution's halos, on two busy cores, by one and by the other:
    4 ranks 4.4 and 2.1 ms, 8 ranks 8.0 and 7.1, 16 ranks 17 and 29. NCCL's all-to-all sends nothing if there is
    nothing to send, and makes the connections of all ranks at its first use.

    ``outgoing``: ``(num,)``, the values for each rank one after the other.
    ``sent, held``: how many rows of ``width`` values go to, and come from, each rank that gets or sends any.
    ``pairs``: how many pairs of a sender and a receiver there are among all ranks, the same on all; None for many.
    """

    def __init__(
        self, outgoing: Tensor, sent: Counts, held: Counts, group: Group, pairs: int | None, *, waits: bool = False,
        width: int = 1,
    ) -> None:  # fmt: skip
        num_ranks = group_size(group)
        self._works: list[dist.Work] = []
        if group is None or num_ranks == 1:
            self.received = outgoing.detach().clone()
            return
        # a compiler sees when the values are used, and may move other work in between
        if (captures or tapes) and uses_operators():
            ranks = [[rank for rank, _ in counts] for counts in (sent, held)]
            nums = [[num * width for _, num in counts] for counts in (sent, held)]
            pairs = num_ranks**2 if pairs is None else pairs
            self.received = _exchange(outgoing, ranks[0], nums[0], ranks[1], nums[1], pairs, group)
            return
        rank, size = group_rank(group), outgoing.element_size() * width
        self.received = outgoing.new_empty(width * sum([num for _, num in held]))
        self._outgoing, received = as_bytes(outgoing), self.received.view(torch.uint8)  # must live until it is sent
        sent, held = ([(other, num * size) for other, num in counts] for counts in (sent, held))
        count_sent(sum([num for other, num in sent if other != rank]))
        compare(group, "exchange")
        # each rank sends to less than a quarter of the others in the mean; of four ranks all are neighbours
        if pairs is not None and 4 * pairs <= num_ranks**2 and num_ranks > 4 and outgoing.is_cpu:
            self._send(received, sent, held, rank, group)
            return
        counts = [0] * num_ranks, [0] * num_ranks
        for each, given in zip(counts, (held, sent), strict=True):
            for other, num in given:
                each[other] = num
        work = dist.all_to_all_single(received, self._outgoing, *counts, group=group, async_op=not waits)
        self._works += [] if work is None else [work]

    def _send(self, received: Tensor, sent: Counts, held: Counts, rank: int, group: dist.ProcessGroup) -> None:
        incoming, outgoing = _slices(received, held), _slices(self._outgoing, sent)
        if rank in incoming:
            incoming.pop(rank).copy_(outgoing.pop(rank))
        count_as_one(group, len(incoming) + len(outgoing))
        self._works += [group.recv([part], other, _TAG) for other, part in incoming.items()]
        self._works += [group.send([part], other, _TAG) for other, part in outgoing.items()]
        _under_way.add(self)

    def wait(self) -> None:
        """Return once the bytes have come."""
        with explaining():
            for work in self._works:
                work.wait()
        _under_way.discard(self)


def as_held(x: Tensor, _0: object, _1: object, _2: object, held: Sequence[int], *_: object) -> Tensor:
    """Make a tensor as that of the values received."""
    return x.new_empty(sum(held))


#: Parameters of operators that send values to some ranks, and get some of others.
ROUTE = "Tensor x, int[] receivers, int[] sent, int[] senders, int[] held, int pairs, str group"


def sent_by_route(x: Tensor, *route: Any, waits: bool) -> Transfer:
    """Send values by the arguments of such an operator; see :class:`Transfer`. Collective."""
    receivers, sent, senders, held, pairs, group = route
    outgoing, incoming = [*zip(receivers, sent, strict=True)], [*zip(senders, held, strict=True)]
    with named("halo") if is_profiled() else RLock():
        found = Transfer(x, outgoing, incoming, group, pairs, waits=waits)
        if waits:
            found.wait()
    return found


@operator(ROUTE, as_held)
def _exchange(x: Tensor, *route: Any) -> Tensor:
    """Send values to some ranks, and return the received ones. Collective; see :class:`Transfer`."""
    return sent_by_route(x, *route, waits=True).received


def _slices(x: Tensor, counts: Counts) -> dict[int, Tensor]:
    starts = accumulate([num for _, num in counts], initial=0)
    return {rank: x[start : start + num] for (rank, num), start in zip(counts, starts, strict=False) if num}


def start_rows(
    rows: Tensor, sent: Counts, held: Counts, group: Group, pairs: int | None, *, waits: bool = False
) -> tuple[Transfer, Tensor]:
    """Start to send ``rows``, so many to each rank one after the other, into the tensor returned. Collective."""
    shape = rows.shape[1:]
    transfer = Transfer(rows.detach().reshape(-1), sent, held, group, pairs, waits=waits, width=shape.numel())
    return transfer, transfer.received.view(sum([num for _, num in held]), *shape)


def exchange_rows(rows: Tensor, sent: Counts, held: Counts, group: Group, pairs: int | None) -> Tensor:
    """Send ``rows``, and return the rows received, both by rank. Collective, not differentiable."""
    with named("halo") if is_profiled() else RLock():
        transfer, received = start_rows(rows, sent, held, group, pairs, waits=True)
        transfer.wait()
    return received


@operator("Tensor rows, str group", _alike)
def swap(rows: Tensor, group: Group) -> Tensor:
    """Send each rank its number of rows, and return the received rows, both ordered by rank. Collective."""
    outgoing = as_bytes(rows)
    received = torch.empty_like(outgoing)
    count_sent(len(outgoing) - len(outgoing) // group_size(group))
    compare(group, "exchange", len(outgoing))
    dist.all_to_all_single(received, outgoing, group=group)
    return received.view(rows.dtype).view(rows.shape)


def exchange(
    x: Tensor, parts: Sequence[tuple[int, Tensor]], shapes: Sequence[tuple[int, Sequence[int]]], group: Group,
    pairs: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Send each part to its rank, and return the received tensors of the given shapes. Collective, not differentiable.

    ``x``: a tensor of their dtype, on their device.
    ``parts, shapes``: of the ranks to which this one sends, and from which it receives; in the order of the ranks.
    ``pairs``: see :class:`Transfer`.
    """
    outgoing = [part.detach().reshape(-1) for _, part in parts]
    sent = [(rank, len(part)) for (rank, _), part in zip(parts, outgoing, strict=True)]
    held = [(rank, torch.Size(shape).numel()) for rank, shape in shapes]
    joined = outgoing[0] if len(outgoing) == 1 else torch.cat(outgoing) if outgoing else x.new_empty(0)
    with named("halo") if is_profiled() else RLock():
        transfer = Transfer(joined, sent, held, group, pairs, waits=True)
        transfer.wait()
    found = torch.split(transfer.received, [num for _, num in held])
    return [part.view(tuple(shape)) for part, (_, shape) in zip(found, shapes, strict=True)]


def broadcast(x: Tensor, src: int, group: Group) -> None:
    """Overwrite ``x`` with rank ``src``'s values. Collective."""
    if group_size(group) == 1 or x.numel() == 0:
        return
    x = once(x)
    if uses_operators():
        x.copy_(_broadcast(x, src, group))
        return
    values = x.contiguous()
    count_sent(values.nbytes * (group_size(group) - 1) if group_rank(group) == src else 0)
    compare(group, "broadcast", values.nbytes)
    dist.broadcast(as_bytes(values), group=group, group_src=src)
    if values.data_ptr() != x.data_ptr():
        x.copy_(values)


@operator("Tensor x, int src, str group", _alike)
def _broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    values = x.clone(memory_format=torch.contiguous_format)
    broadcast(values, src, group)
    return values


def once(x: Tensor) -> Tensor:
    """Return the values of a tensor that lie in memory, without a graph: one row of each expanded dim."""
    return x.detach()[tuple([slice(0, 1) if step == 0 else slice(None) for step in x.stride()])]


def gather(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
    """Return all ranks' parts joined along ``dim``. Collective.

    Parts are padded to the longest, because gloo gathers equal sizes only.
    """
    dim %= x.ndim
    shape = with_dim(x.shape, dim, facts_of(sizes).total)
    return x.new_zeros(shape) if 0 in shape else _gather_parts(x, sizes, dim, group)


# one operator, so that a graph keeps the result for backward once
@operator(
    "Tensor x, int[] sizes, int dim, str group", lambda x, s, dim, *_: x.new_empty(with_dim(x.shape, dim, sum(s)))
)
def _gather_parts(x: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    facts = facts_of(sizes)
    longest = facts.longest
    padded = rows = x.detach().movedim(dim, 0)
    rest = rows.shape[1:]
    if len(rows) < longest:
        padded = rows.new_zeros((longest, *rest))
        padded[: len(rows)] = rows
    gathered = _gather(padded, (len(sizes) * longest, *rest), len(sizes), group)
    if facts.are_even:  # no view: torch forbids writes to a custom function's views
        return gathered.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else gathered
    if len(facts.runs) > _FEW:  # in one step, which costs rows of one value more than few parts do
        key = "rows of padded parts", x.device
        held = facts.plans.get_or_make(key, lambda: _rows_of_padded(sizes, longest).to(x.device))
        return gathered.movedim(0, dim).index_select(dim, held)
    blocks = gathered.view(len(sizes), longest, *rest)
    parts = [blocks[first : first + num, :size].flatten(0, 1) for first, num, size in facts.runs if size]
    return torch.cat([part.movedim(0, dim) for part in parts], dim).contiguous()


def _rows_of_padded(sizes: Sequence[int], longest: int) -> Tensor:
    return (torch.arange(longest) < torch.tensor(sizes)[:, None]).view(-1).nonzero()[:, 0]


def gathered_to_reduce(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> tuple[Tensor, Group]:
    """Gather the parts of a few ranks along ``dim``, so that each reduces them by itself and no group is needed.
    Collective.

    Of many ranks, the own part, and the group: what is made of it has to be reduced over that.
    """
    num_ranks = len(sizes)
    if num_ranks == 1 or not gathers_to_reduce(num_ranks):
        return x, group
    return gather(x, sizes, dim, group), None


def gather_rows(row: Tensor, group: Group) -> Tensor:
    """Return the row ``(n,)`` of each rank, ``(num_ranks, n)``. Collective; a group of one communicates nothing."""
    num_ranks = group_size(group)
    return row[None] if num_ranks == 1 else gather(row[None], ones(num_ranks), 0, group)


def reduce_scatter(x: Tensor, sizes: tuple[int, ...], dim: int, group: Group) -> Tensor:
    """Return the own part of the sum of all ranks' ``x``. Collective.

    The sum is in rank order and in a wide dtype; the traffic is that of a ring's reduce-scatter.
    """
    rows, own = x.detach().movedim(dim, 0), sizes[group_rank(group)]
    if facts_of(sizes).are_even:
        parts = swap(rows, group)
    else:
        parts = exchange_rows(rows, list(enumerate(sizes)), [(rank, own) for rank in range(len(sizes))], group, None)
    total = parts.view(len(sizes), own, *rows.shape[1:]).sum(0, dtype=SUM_IN.get(x.dtype, x.dtype)).to(x.dtype)
    return total.movedim(0, dim).contiguous()


def reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """Return the elementwise reduction of all ranks' ``x`` in a new contiguous tensor. Collective."""
    number: Any = op  # an enumeration that torch types as none
    return _reduce(x, int(number), group)


@operator("Tensor x, int op, str group", _alike)
def _reduce(x: Tensor, number: int, group: Group) -> Tensor:
    op = dist.ReduceOp.RedOpType(number)
    wide = torch.empty_like(x, dtype=SUM_IN.get(x.dtype, x.dtype), memory_format=torch.contiguous_format)
    wide.copy_(x.detach())
    num_ranks = group_size(group)
    if not wide.numel():
        return wide.to(x.dtype)
    if gathers_to_reduce(num_ranks) and _is_small(wide, num_ranks):
        wide = _REDUCTIONS[op](_gather(wide, (num_ranks, *wide.shape), num_ranks, group), 0)
    elif not gathers_to_reduce(num_ranks) and wide.nbytes <= _AT_ONCE and wide.is_cpu and _is_gloo(group):
        wide = _reduce_by_pairs(wide, op, group)
    else:
        count_sent(2 * wide.nbytes * (num_ranks - 1) // num_ranks)
        compare(group, "reduction", wide.nbytes)
        dist.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide, op, group=group)
    return wide.to(x.dtype)


def _reduce_by_pairs(x: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """Reduce between pairs of ranks, then pairs of pairs, and so on: ``log2(ranks)`` messages each. Collective.

    Both of a pair reduce the same two values, so all come to the same bits. Ranks beyond a power of two hand their
    value to another first, and get the result from it last; all call all exchanges.
    """
    num_ranks, rank, row = group_size(group), group_rank(group), x.reshape(1, -1)
    half = 1 << num_ranks.bit_length() - 1
    inside, beyond, has_guest = rank < half, rank >= half, rank < num_ranks - half
    rounds = [(1 << i, inside, inside) for i in range(half.bit_length() - 1)]
    if num_ranks > half:
        rounds = [(half, beyond, has_guest), *rounds, (half, has_guest, beyond)]
    for distance, sends, gets in rounds:
        peer = rank ^ distance
        sent, held = [(peer, 1)] * sends, [(peer, 1)] * gets
        other = exchange_rows(row[: len(sent)], sent, held, group, num_ranks)
        if distance == half and beyond:  # it gave its values away in the first round
            row = other
        elif gets:
            row = _REDUCTIONS[op](torch.cat([row, other]), 0, keepdim=True).to(x.dtype)
    return row.view(x.shape)


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


def all_reduce_product(x: Tensor, group: Group) -> Tensor:
    """Product over ranks, elementwise, of a tensor that is not complex. Not differentiable. Collective."""
    return reduce(x, dist.ReduceOp.PRODUCT, group)

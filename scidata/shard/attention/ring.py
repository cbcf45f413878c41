"""Ring attention: blocks of keys and values go round the ranks while each computes with the one that it holds.

After Liu, Zaharia and Abbeel (2023). Nothing larger than a block is held: keys and values of the own block, of the
current one and of the one on its way. In backward the blocks go round once more, their gradients behind them.

Attention to one block of keys has a form from which the results of several blocks are merged: by torch's flash kernels
where they take the operands, else by matrix products. In backward the probabilities are those of the whole sequence.
The largest score of a row and the sum of exponentials less it are kept apart: their log-sum-exp, which is all that the
kernels tell, loses the sum beside a large score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.transport import Group, Transfer, group_rank, group_size
from scidata.shard.torch_internals import flash, flash_backward, flash_cpu, flash_cpu_backward, has_flash_attention

_NONE = float("-inf")  # the log-sum-exp of no key


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention to some of the keys, float32 or wider."""

    out: Tensor  # (..., L, Ev): sums of values, weighted with exponentials of scores less the peak
    peak: Tensor  # (..., L): the largest score of each row; -inf of no key
    total: Tensor  # (..., L): sum of the weights

    def mean(self) -> Tensor:
        """Return the weighted mean of the values; 0 of no key."""
        return self.out / _not_zero(self.total).unsqueeze(-1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> str:
    """Name the kernel that takes these operands."""
    plain = bias is None and query.ndim == 4 and query.shape[-1] == value.shape[-1] and key.shape[-2] > 0
    if not plain or 0 in query.shape:
        return "products"
    if not query.is_cpu and has_flash_attention(query.device.type):
        half = query.dtype in (torch.float16, torch.bfloat16)
        # the kernels pad other widths in a wrapper that does not hand out the log-sum-exp
        return "flash" if half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 else "products"
    return "flash_cpu" if query.is_cpu else "products"


def _is_coarse(lse: Tensor, query: Tensor) -> bool:
    """Whether a CPU kernel's log-sum-exp is too large to weigh blocks with, or NaN."""
    digits = torch.finfo(query.dtype).eps / torch.finfo(lse.dtype).eps
    return bool(lse.numel()) and not bool(lse.abs().amax() < 16 * digits)


def _not_zero(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, _NONE)
    return scores


def _weights(scores: Tensor, peak: Tensor) -> Tensor:
    """A row without any key has none, not NaN."""
    return torch.exp(scores - peak.masked_fill(peak == _NONE, 0).unsqueeze(-1))


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Partial:
    """Attend to a block of keys. ``causal``: queries and keys are the same rows."""
    kernel = _kernel(query, key, value, bias)
    if kernel == "flash":
        out, lse = flash(query, key, value, 0.0, causal, False, scale=scale)[:2]
        return Partial(out.float(), lse, torch.ones_like(lse))
    if kernel == "flash_cpu":
        out, lse = flash_cpu(query, key, value, 0.0, causal, attn_mask=None, scale=scale)
        if not _is_coarse(lse, query):
            return Partial(out.to(lse.dtype), lse, torch.ones_like(lse))
    scores = _scores(query, key, bias, causal, scale)
    peak = scores.amax(-1) if key.shape[-2] else scores.new_full(scores.shape[:-1], _NONE)
    weights = _weights(scores, peak)
    return Partial(weights @ value.to(scores.dtype), peak, weights.sum(-1))


def merge(first: Partial | None, second: Partial) -> Partial:
    """Return attention to the keys of both (online softmax; Milakov and Gimelshein, 2018)."""
    if first is None:
        return second
    peak = torch.maximum(first.peak, second.peak)
    safe = peak.masked_fill(peak == _NONE, 0)
    factors = [torch.exp(each.peak - safe) for each in (first, second)]
    out = first.out * factors[0].unsqueeze(-1) + second.out * factors[1].unsqueeze(-1)
    return Partial(out, peak, first.total * factors[0] + second.total * factors[1])


def block_backward(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    whole: Partial,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and of the scores (None if there is no bias), of one block.

    ``whole`` is attention to all keys, with the mean as ``out``.
    """
    query, key, value = operands
    kernel, lse = _kernel(query, key, value, bias), whole.peak + whole.total.log()
    if kernel == "flash":
        # one block is one sequence for each sample: the tables of packed sequences and the seeds of dropout are empty
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        cumulative = (None, None, query.shape[-2], key.shape[-2])
        rest = (0.0, causal, nothing, nothing)
        out = whole.out.to(query.dtype)
        found = flash_backward(grad, query, key, value, out, lse, *cumulative, *rest, scale=scale)
        return found[0], found[1], found[2], None
    if kernel == "flash_cpu" and not _is_coarse(lse, query):
        out = whole.out.to(query.dtype)
        how = (0.0, causal)
        found = flash_cpu_backward(grad, query, key, value, out, lse, *how, attn_mask=None, scale=scale)
        return found[0], found[1], found[2], None
    weights = _weights(_scores(query, key, bias, causal, scale), whole.peak)
    probabilities = weights / _not_zero(whole.total).unsqueeze(-1)
    wide = grad.to(probabilities.dtype)
    inner = (wide * whole.out).sum(-1, keepdim=True)
    d_scores = probabilities * (wide @ value.to(wide.dtype).transpose(-2, -1) - inner)
    d_query = d_scores @ key.to(wide.dtype) * scale
    d_key = d_scores.transpose(-2, -1) @ query.to(wide.dtype) * scale
    return d_query, d_key, probabilities.transpose(-2, -1) @ wide, d_scores


@dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Which rows each rank holds."""

    sizes: tuple[int, ...]  # keys of each rank
    first_query: int  # global row of this rank's first one
    causal: bool
    scale: float
    group: Group

    def start(self, owner: int) -> int:
        """Return the global row of an owner's first key."""
        return sum(self.sizes[:owner])


def _pass_on(buffer: Tensor, num_received: int, group: Group) -> Transfer:
    """Send a flat buffer to the next rank, and receive one from the previous."""
    rank, num_ranks = group_rank(group), group_size(group)
    sent, held = ((rank + 1) % num_ranks, len(buffer)), ((rank - 1) % num_ranks, num_received)
    return Transfer(buffer, [sent] if sent[1] else [], [held] if held[1] else [], group, num_ranks)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(buffer: Tensor, key: Tensor, value: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Cut a block of so many rows, otherwise of the shapes of ``key`` and ``value``, out of a buffer."""
    shapes = [(*x.shape[:-2], num_rows, x.shape[-1]) for x in (key, value)]
    split = torch.Size(shapes[0]).numel()
    return buffer[:split].view(shapes[0]), buffer[split:].view(shapes[1])


def _size_before(owner: int, key: Tensor, value: Tensor, layout: RingLayout) -> int:
    """Return the number of elements of the block that comes after this owner's: that of the rank before it."""
    num_rows = layout.sizes[owner - 1]
    return num_rows * sum(x.shape[:-2].numel() * x.shape[-1] for x in (key, value))


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat heads that several query heads share."""
    shared = query.shape[-3] // max(x.shape[-3], 1) if query.ndim > 2 else 1
    return x if shared == 1 else x.repeat_interleave(shared, -3)


def _of_heads(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape[:-2] == like.shape[:-2]:
        return grad
    shape = (*like.shape[:-2], grad.shape[-3] // like.shape[-3], *grad.shape[-2:])
    return grad.view(shape).sum(-3)


def _bias(mask: Tensor | None, query: Tensor, layout: RingLayout, owner: int) -> tuple[Tensor | None, bool, bool]:
    """Return the bias of a block's scores, whether the kernel masks it causally, and whether to skip the block."""
    # Causal, queries 4 to 7: keys 0 to 3 need no mask, keys 4 to 7 the kernel's own, keys 8 to 11 are skipped. Keys 2
    # to 6, of a rank with other bounds, get a triangle of their own.
    start, count = layout.start(owner), layout.sizes[owner]
    bias = None if mask is None else mask.narrow(-1, start, count) if mask.shape[-1] != 1 else mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
    if not layout.causal:
        return bias, False, count == 0
    first, last = layout.first_query, layout.first_query + query.shape[-2] - 1
    if count == 0 or start > last:
        return None, False, True
    if start + count - 1 <= first:
        return bias, False, False
    if start == first and count == query.shape[-2]:
        return bias, True, False
    rows = torch.arange(first, last + 1, device=query.device)[:, None]
    above = rows < torch.arange(start, start + count, device=query.device)
    triangle = torch.zeros(above.shape, dtype=query.dtype, device=query.device).masked_fill_(above, float("-inf"))
    return triangle if bias is None else bias + triangle, False, False


def _blocks(key: Tensor, value: Tensor, layout: RingLayout) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's block of keys and values with its owner, while the next one is on its way.

    Of three ranks, rank 1 gets the blocks of 1, 0 and 2. It passes each on to rank 2 while it computes with it.
    """
    rank, num_ranks = group_rank(layout.group), len(layout.sizes)
    if num_ranks == 1:
        yield 0, key, value
        return
    block = _packed(key, value)
    for step in range(num_ranks):
        owner = (rank - step) % num_ranks
        is_last = step + 1 == num_ranks
        arrives = None if is_last else _pass_on(block, _size_before(owner, key, value, layout), layout.group)
        yield owner, *_unpacked(block, key, value, layout.sizes[owner])
        if arrives is not None:
            arrives.wait()
            block = arrives.received


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layout: RingLayout) -> Tensor:
        whole: Partial | None = None
        for owner, keys, values in _blocks(key, value, layout):
            bias, causal, skip = _bias(mask, query, layout, owner)
            if not skip:
                held = _heads(keys, query), _heads(values, query)
                whole = merge(whole, block_forward(query, *held, bias, causal, layout.scale))
        if whole is None:  # this rank's queries see no key
            wide = torch.promote_types(query.dtype, torch.float32)
            rows = query.new_full(query.shape[:-1], float("-inf"), dtype=wide)
            whole = Partial(rows.new_zeros((*query.shape[:-1], value.shape[-1])), rows, torch.zeros_like(rows))
        out = whole.mean()
        ctx.save_for_backward(query, key, value, mask, out, whole.peak, whole.total)
        ctx.layout = layout
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise UnsupportedShardOp(
                "ring attention has no second derivative (create_graph=True). Remedy: compute that step in "
                'scidata.attention("gather")'
            )
        query, key, value, mask, *found = ctx.saved_tensors
        whole = Partial(*found)
        out = whole.out
        layout: RingLayout = ctx.layout
        grad, d_query = grad.contiguous(), out.new_zeros(query.shape)
        d_mask = torch.zeros_like(mask, dtype=out.dtype) if mask is not None and ctx.needs_input_grad[3] else None
        returns: Transfer | None = None
        for owner, keys, values in _blocks(key, value, layout):
            bias, causal, skip = _bias(mask, query, layout, owner)
            d_key, d_value = torch.zeros_like(keys, dtype=out.dtype), torch.zeros_like(values, dtype=out.dtype)
            if not skip:
                operands = query, _heads(keys, query), _heads(values, query)
                d_block = block_backward(grad, operands, bias, whole, causal, layout.scale)
                d_query += d_block[0]
                d_key += _of_heads(d_block[1], keys)
                d_value += _of_heads(d_block[2], values)
                if d_mask is not None and d_block[3] is not None:
                    start, count = layout.start(owner), layout.sizes[owner]
                    place = d_mask if d_mask.shape[-1] == 1 else d_mask.narrow(-1, start, count)
                    place += d_block[3].sum_to_size(place.shape)
            sent = _packed(d_key, d_value)  # follows the block, one rank behind; the last pass brings it home
            if returns is not None:
                returns.wait()
                sent += returns.received
            if len(layout.sizes) > 1:
                returns = _pass_on(sent, _size_before(owner, key, value, layout), layout.group)
        if returns is not None:
            returns.wait()
            sent = returns.received
        d_key, d_value = _unpacked(sent, key, value, layout.sizes[group_rank(layout.group)])
        d_mask = None if d_mask is None else d_mask.to(mask.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_mask, None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layout: RingLayout) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks. Collective; a second derivative raises.

    Operands are ``(..., rows, width)``, the own part of the sequence; other ranks may have other numbers of rows, or
    none. Fewer heads of keys and values are shared by groups of query heads. The mask is bool (True attends) or added
    to the scores; it broadcasts over this rank's queries and the whole sequence.
    """
    return _Ring.apply(query.contiguous(), key, value, mask, layout)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

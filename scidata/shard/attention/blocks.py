"""Attention to one block of keys, in a form from which the results of several blocks are merged.

Torch's flash kernels where they take the operands, else matrix products. In backward the probabilities are those of the
whole sequence. The largest score of a row and the sum of exponentials less it are kept apart: their log-sum-exp, which
is all that the kernels tell, loses the sum beside a large score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Return the gradients of query, key, value and of the scores (None where there is no bias), of one block.

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
